"""Computes a region as a loop over blocks of its rows: its results, and their gradient.

`BlockLoop` is the loop, for a region that `regions.py` has found. `OverRows` is what may divide the rows among devices,
each of which then runs the loop for its own rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.jaxprs import avals
from anybatch.jaxprs.graph import Value
from anybatch.jaxprs.primitives import CALLS
from anybatch.reading.evaluation import Examples, Microbatch
from anybatch.reading.positions import Draw
from anybatch.reading.regions import Region
from anybatch.reading.states import Batched, replaced, take_rows

# `fun(first, length, invariant, rows)` returns sums over `length` rows of a region, from `first` on, and rows. It is
# given these rows of some arrays, and other arrays in full.
OfRows = Callable[[Any, int, list[Any], list[Any]], tuple[list[Any], list[Any]]]
# `over_rows(fun, length, invariant, rows, row_layouts, output_layouts)` calls `fun` for all rows of a region, or on
# each device for some of them. It returns the sums over all rows, and all rows.
OverRows = Callable[
    [OfRows, int, list[Any], list[Any], Sequence[Batched], Sequence[Batched]], tuple[list[Any], list[Any]]
]


def here(fun: OfRows, length: int, invariant: list[Any], rows: list[Any], *_: Any) -> tuple[list[Any], list[Any]]:
    """An `OverRows` that divides nothing: a single loop over all rows."""
    return fun(0, length, invariant, rows)


class BlockLoop:
    """Computes a region, the part of a program around a big value, in a loop over blocks of rows.

    Args:
      region: the region.
      block_size: the number of rows of a block. If it does not divide the rows, the remaining last rows are a smaller
        block, which is computed first.
      over_rows: what divides the rows among devices. Each device runs the loop for its own rows.
    """

    def __init__(self, region: Region, block_size: int, over_rows: OverRows = here) -> None:
        self.region, self.block_size, self._over_rows = region, block_size, over_rows
        self.states = [region.state(value) for value in region.exits]
        facts, needs = region.program.facts, region.needs
        self.cuts = [(value, rows) for value, rows in needs.cuts if over_rows is here or self._is_divided(value, rows)]
        self.entries = list(dict.fromkeys((*needs.entries, *(cut[0] for cut in needs.cuts if cut not in self.cuts))))
        self._moving_cuts = [facts[value].has_gradient for value, _ in self.cuts]
        self._moving_entries = [facts[value].has_gradient for value in self.entries]
        self._cut_layouts = [rows for _, rows in self.cuts]
        self._in_rows = [isinstance(state, Batched) for state in self.states]
        self._exit_layouts = [state for state in self.states if isinstance(state, Batched)]

    def _is_divided(self, value: Value, rows: Batched) -> bool:
        """Whether each device gets its rows of a value only.

        Otherwise it takes them from the full value, which it reads anyway, or which is small and would have to be
        moved: arrays are sharded along their first axis. The gradient is then summed with those of other entries.
        """
        is_in_place = rows.axis == 0 and rows.outer == 1
        return value not in self.region.needs.entries and (is_in_place or self.region.program.is_large(value))

    def of_block(self, slices: Sequence[Any], entries: Sequence[Any], start: Any, size: int) -> list[Any]:
        """The exits of one block, which starts at this row of the region."""
        region, needs = self.region, self.region.needs
        full = dict(zip(self.entries, entries, strict=True))
        now = dict(zip(self.cuts, slices, strict=True))
        for value, rows in needs.cuts:
            if (value, rows) not in now:
                now[value, rows] = take_rows(full[value], rows, region.length, start, size)
        known = {source: now[region.sources[source]] for source in needs.sources}
        block = Microbatch(region.reader, Examples(start, size), known, full, Draw(in_full=True))
        block.run(needs.wanted)
        return [jnp.asarray(block.value(value)) for value in needs.wanted]

    def forward(self, cuts: Sequence[Any], entries: Sequence[Any]) -> list[Any]:
        """The exits, without gradients."""

        def of_rows(first: Any, length: int, entries: list[Any], cuts: list[Any]) -> tuple[list[Any], list[Any]]:
            def step(made: list[Any], start: Any, size: int) -> list[Any]:
                slices = self._slices(cuts, self._cut_layouts, length, start, size)
                return self._collect(made, self.of_block(slices, entries, first + start, size), length, start)

            return self._sums_and_rows(self._over_blocks(step, self._zeros(length), length))

        layouts = self._cut_layouts, self._exit_layouts
        return self._finish(*self._over_rows(of_rows, self.region.length, list(entries), list(cuts), *layouts))

    def differentiable(self, cuts: list[Any], entries: list[Any]) -> list[Any]:
        """The exits, with a derivative that computes every block again.

        `cuts` are the arrays that blocks take rows of, and `entries` those that every block reads in full.
        """
        positions = self.region.differentiated
        types = list(map(jax.typeof, cuts)), list(map(jax.typeof, entries))

        @jax.custom_vjp
        def region(cuts: list[Any], entries: list[Any]) -> list[Any]:
            return self.forward(cuts, entries)

        def backward(kept: Any, cotangents: list[Any]) -> tuple[Any, Any]:
            own = [cotangents[position] for position in positions]
            _, of_cuts, of_entries = self.backward(kept[0], kept[1], own, keeps_exits=False)
            return (
                _in_place_of(of_cuts, self._moving_cuts, types[0]),
                _in_place_of(of_entries, self._moving_entries, types[1]),
            )

        region.defvjp(lambda *arrays: (self.forward(*arrays), arrays), backward)
        return _named(region)(cuts, entries)

    def with_known_cotangents(
        self, cuts: list[Any], entries: list[Any], known: list[Any], totals: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """The exits, with a derivative that is computed with them; and the totals with gradients of entries added.

        Args:
          cuts: the arrays that blocks take rows of.
          entries: the arrays that every block reads in full.
          known: the cotangents of the differentiated exits.
          totals: an accumulator for each entry; None for one whose gradient is given to JAX.
        """
        types = list(map(jax.typeof, cuts)), list(map(jax.typeof, entries))
        has_total = [total is not None for total in totals]
        own = [moves and not has for moves, has in zip(self._moving_entries, has_total, strict=True)]

        def compute(cuts: list[Any], entries: list[Any], known: list[Any], given: list[Any]) -> tuple[Any, Any]:
            totals = _replaced([None] * len(entries), has_total, given)
            exits, of_cuts, of_entries = self.backward(cuts, entries, known, keeps_exits=True, totals=totals)
            all_entries = _replaced([None] * len(entries), self._moving_entries, of_entries)
            return (exits, _chosen(all_entries, has_total)), (of_cuts, _chosen(all_entries, own))

        @jax.custom_vjp
        def region(*arrays: Any) -> Any:
            return compute(*arrays)[0]

        def backward(kept: Any, _: Any) -> tuple[Any, ...]:
            return _in_place_of(kept[0], self._moving_cuts, types[0]), _in_place_of(kept[1], own, types[1]), None, None

        region.defvjp(compute, backward)
        exits, added = _named(region)(cuts, entries, known, _chosen(totals, has_total))
        return exits, _replaced([None] * len(entries), has_total, added)

    def backward(
        self,
        cuts: Sequence[Any],
        entries: Sequence[Any],
        cotangents: Sequence[Any],
        *,
        keeps_exits: bool,
        totals: Sequence[Any] | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The exits, if kept, and the gradients with respect to the cuts and the entries that have one.

        `totals` has for each entry what its gradient is added to; None for zeros.
        """
        positions, num_entries, num_cuts = self.region.differentiated, len(entries), len(cuts)
        in_rows = [self._in_rows[position] for position in positions]
        moving_layouts = _chosen(self._cut_layouts, self._moving_cuts)
        exit_states = [self.states[position] for position in positions]
        own_layouts = [state for state in exit_states if isinstance(state, Batched)]
        # On several devices, a sum that starts from a total would count it several times.
        assert self._over_rows is here or not any(total is not None for total in totals or ())

        def of_rows(first: Any, length: int, invariant: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            (entries, of_sums), (cuts, of_exits) = _divided(invariant, num_entries), _divided(rows, num_cuts)
            moving_entries = _chosen(entries, self._moving_entries)

            def step(carry: Any, start: Any, size: int) -> Any:
                made, of_cuts, of_entries = carry
                slices = self._slices(cuts, self._cut_layouts, length, start, size)

                def fun(moving_slices: list[Any], wide_entries: list[Any]) -> tuple[list[Any], list[Any]]:
                    mine = _replaced(slices, self._moving_cuts, moving_slices)
                    # They are wide, so that their gradients are summed wide.
                    narrow = [wide.astype(each.dtype) for wide, each in zip(wide_entries, moving_entries, strict=True)]
                    full = _replaced(entries, self._moving_entries, narrow)
                    exits = self.of_block(mine, full, first + start, size)
                    return [exits[position] for position in positions], exits

                point = [each.astype(summed_in(each.dtype)) for each in moving_entries]
                _, pullback, exits = jax.vjp(fun, _chosen(slices, self._moving_cuts), point, has_aux=True)
                new_cuts, new_entries = pullback(
                    _joined(of_sums, self._slices(of_exits, own_layouts, length, start, size), in_rows)
                )
                of_cuts = [
                    put_block(old, new, each, length, start)
                    for old, new, each in zip(of_cuts, new_cuts, moving_layouts, strict=True)
                ]
                of_entries = [old + new.astype(old.dtype) for old, new in zip(of_entries, new_entries, strict=True)]
                return self._collect(made, exits, length, start) if keeps_exits else made, of_cuts, of_entries

            zeros = [jnp.zeros_like(each) for each in _chosen(cuts, self._moving_cuts)]
            starts = _chosen(totals or [None] * num_entries, self._moving_entries)
            starts = [
                jnp.zeros_like(each, summed_in(each.dtype)) if start is None else start
                for each, start in zip(moving_entries, starts, strict=True)
            ]
            carry = self._zeros(length) if keeps_exits else [], zeros, starts
            made, of_cuts, of_entries = self._over_blocks(step, carry, length)
            sums, made_rows = self._sums_and_rows(made) if keeps_exits else ([], [])
            return [*of_entries, *sums], [*of_cuts, *made_rows]

        of_sums, of_exits = _chosen(cotangents, [not each for each in in_rows]), _chosen(cotangents, in_rows)
        sums, rows = self._over_rows(
            of_rows,
            self.region.length,
            [*entries, *of_sums],
            [*cuts, *of_exits],
            [*self._cut_layouts, *own_layouts],
            [*moving_layouts, *(self._exit_layouts if keeps_exits else [])],
        )
        of_entries, exit_sums = _divided(sums, sum(self._moving_entries))
        of_cuts, exit_rows = _divided(rows, sum(self._moving_cuts))
        return self._finish(exit_sums, exit_rows) if keeps_exits else [], list(of_cuts), list(of_entries)

    def _slices(
        self, arrays: Sequence[Any], layouts: Sequence[Batched], length: int, start: Any, size: int
    ) -> list[Any]:
        pairs = zip(arrays, layouts, strict=True)
        return [take_rows(array, rows, length, start, size) for array, rows in pairs]

    def _over_blocks(self, step: Callable[[Any, Any, int], Any], carry: Any, length: int) -> Any:
        size = max(1, min(self.block_size, length))
        number, rest = divmod(length, size)
        if rest:
            carry = step(carry, jnp.int32(number * size), rest)
        starts = jnp.arange(number, dtype=jnp.int32) * size
        with jax.named_scope("anybatch_blocks"):
            return lax.scan(lambda carry, start: (step(carry, start, size), None), carry, starts)[0]

    def _zeros(self, length: int) -> list[Any]:
        """Zeros for the exits of so many rows."""
        return [
            jnp.zeros(replaced(value.shape, state.axis, state.length(length)), value.dtype)
            if isinstance(state, Batched)
            else avals.zeros_of(value.aval, summed_in(value.dtype))
            for value, state in zip(self.region.exits, self.states, strict=True)
        ]

    def _collect(self, made: Sequence[Any], new: Sequence[Any], length: int, start: Any) -> list[Any]:
        return [
            put_block(old, each, state, length, start) if isinstance(state, Batched) else old + each.astype(old.dtype)
            for old, each, state in zip(made, new, self.states, strict=True)
        ]

    def _sums_and_rows(self, made: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return _chosen(made, [not each for each in self._in_rows]), _chosen(made, self._in_rows)

    def _finish(self, sums: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        made = _joined(sums, rows, self._in_rows)
        return [each.astype(value.dtype) for each, value in zip(made, self.region.exits, strict=True)]


REGION = "anybatch_region"  # the name of the function that computes a region, in a jaxpr


def _named(region: Callable[..., Any]) -> Callable[..., Any]:
    def anybatch_region(*arrays: Any) -> Any:
        return region(*arrays)

    return jax.jit(anybatch_region)


def is_region(equation: Any) -> bool:
    """Whether an equation computes a region: then it keeps no activations that could be computed again."""
    return equation.primitive.name in CALLS and equation.params.get("name") == REGION


def put_block(array: Any, new: Any, rows: Batched, length: int, start: Any) -> Any:
    """The array with the rows of one block replaced: the opposite of `take_rows`."""
    axis, outer, inner = rows.axis, rows.outer, rows.inner
    if outer == 1:
        return lax.dynamic_update_slice_in_dim(array, new, start * inner, axis)
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    size = new.shape[axis] // (outer * inner)
    apart = array.reshape(*before, outer, length, inner, *after)
    written = lax.dynamic_update_slice_in_dim(apart, new.reshape(*before, outer, size, inner, *after), start, axis + 1)
    return written.reshape(array.shape)


def summed_in(dtype: Any) -> Any:
    """The dtype in which sums over blocks are added up."""
    return avals.wide_dtype(dtype, jnp.float32)


def _chosen(values: Sequence[Any], flags: Sequence[bool]) -> list[Any]:
    return [value for value, flag in zip(values, flags, strict=True) if flag]


def _divided(values: Sequence[Any], number: int) -> tuple[Sequence[Any], Sequence[Any]]:
    return values[:number], values[number:]


def _joined(sums: Sequence[Any], rows: Sequence[Any], in_rows: Sequence[bool]) -> list[Any]:
    return _replaced(_replaced([None] * len(in_rows), in_rows, rows), [not each for each in in_rows], sums)


def _replaced(values: Sequence[Any], flags: Sequence[bool], new: Sequence[Any]) -> list[Any]:
    others = iter(new)
    return [next(others) if flag else value for value, flag in zip(values, flags, strict=True)]


def _in_place_of(grads: Sequence[Any], flags: Sequence[bool], types: Sequence[Any]) -> list[Any]:
    """Gradients in the dtypes of the arrays that they belong to; None for arrays without a gradient."""
    found = iter(grads)
    return [next(found).astype(aval.dtype) if flag else None for aval, flag in zip(types, flags, strict=True)]
