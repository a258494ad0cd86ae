"""Passes over the microbatches of a loss that was split: forward, or forward and backward at once."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anybatch import compat
from anybatch.batch import Cut, first_start
from anybatch.reading.split import Split
from anybatch.reading.states import SUM, Rows, State, put_rows, replaced, take_rows
from anybatch.reading.units import Units
from anybatch.routes import blocks, references, squares
from anybatch.routes.outputs import wide_dtype
from anybatch.routes.parts import Part


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """The arrays of one call, as the passes see them."""

    variables: list[Any]  # what is differentiated: the parameters, then what was hoisted from them
    inputs: list[Any]  # those of the loss, all of them, with the examples of the part at hand
    known: list[Any]  # what was computed from data alone
    selected: list[Any]  # values of `known` with rows of the selection, cut to those of the part; none if all are here
    place: list[Any]  # the index in the batch of the first example of the part, unless it is 0

    @property
    def origin(self) -> Any:
        """The index in the batch of the first example, None if it is 0."""
        return self.place[0] if self.place else None

    @property
    def types(self) -> "Given":
        """Their types."""
        parts = (self.variables, self.inputs, self.known, self.selected, self.place)
        return Given(*([compat.abstract(jax.typeof(leaf)) for leaf in part] for part in parts))


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The prefix of a loss at the sizes of the microbatches, traced."""

    split: Split
    cut: Cut
    accumulator_dtype: Any
    given: Given
    part: Part
    remat: str | None = None  # a policy of jax.checkpoint for the backward pass
    units: Units | None = None  # what microbatches count, if the squares of their gradients are wanted
    selection: int | None = None  # the rows that are counted as examples, if not those of the batch

    @functools.cached_property
    def _positions(self) -> list[int]:
        """Which values of the frontier it makes."""
        return self.split.selections.get(self.selection, [])

    @functools.cached_property
    def states(self) -> list[State]:
        """Their states."""
        return [self.split.states[position] for position in self._positions]

    def _trace(self, size: int) -> compat.Traced:
        split, types = self.split, self.given.types
        if self.part.examples < size:  # there are none at all: it is traced for its types, and never called
            self._give_rows(types, size)
        variables = jax.eval_shape(self.part.whole, types.variables) if self.part.is_shard else types.variables
        leaves, tree = jax.tree.flatten((variables, types.inputs, types.known, types.selected, types.place))
        first, num_wrt = split.num_consts, len(split.loss.types.wrt)

        def prefix(*flat: Any) -> list[Any]:
            *arrays, start = flat
            variables, inputs, known, selected, place = jax.tree.unflatten(tree, arrays)
            inputs[first : first + num_wrt] = variables[:num_wrt]
            origin = Given(variables, inputs, known, selected, place).origin
            wanted = [split.frontier[position] for position in self._positions]
            hoisted, runs = variables[num_wrt:], self.cut.runs
            return split.prefix(inputs, known, hoisted, start, size, wanted, origin, runs, self.selection, selected)

        start = jax.ShapeDtypeStruct((), jnp.int32)
        traced, consts = compat.trace(prefix, *leaves, start)
        if self.remat is not None:
            const_types = [compat.abstract(jax.typeof(const)) for const in consts]
            traced = blocks.rematerialised(traced, const_types, [*leaves, start], self.remat)
        if consts:  # constants of the loss, which this module hands back to it
            return dataclasses.replace(traced, bound=tuple(consts))
        return traced

    def _give_rows(self, types: Given, size: int) -> None:
        """Makes types of a part without rows those of one with as many as a microbatch has."""
        if types.selected and self.selection is not None:
            for index, rows in enumerate(self.split.selected_first(self.selection).values()):
                array = types.selected[index]
                types.selected[index] = array.update(shape=replaced(array.shape, rows.axis, rows.length(size)))
        elif self.selection is None:
            for position in self.split.batch_positions:
                array = types.inputs[position]
                types.inputs[position] = array.update(shape=(size, *array.shape[1:]))

    @functools.cached_property
    def whole(self) -> compat.Traced:
        """At the size of the whole microbatches."""
        return self._trace(self.cut.size)

    @functools.cached_property
    def last(self) -> compat.Traced | None:
        """At the size of the ragged last one."""
        return self._trace(self.cut.remainder) if self.cut.remainder else None

    def forward(self) -> list[Any]:
        """What the examples make of the frontier."""
        given = self.given

        def run(traced: compat.Traced, start: Any) -> list[Any]:
            # As in a backward pass: a function with derivatives of its own may have another forward pass there.
            whole = self.part.whole(given.variables)
            return jax.vjp(lambda variables: self._call(traced, variables, start), whole)[0]

        last = None if self.last is None else run(self.last, self.cut.last_start)

        def step(carry: Any, _: None) -> tuple[Any, list[Any]]:
            first, sums = carry
            with jax.named_scope("anybatch_forward"):
                made = run(self.whole, first)
            return (first + self.cut.step, self._add(sums, made)), self._emitted(made)

        start = jnp.zeros((), jnp.int32)
        (_, sums), emitted = self._loop(step, (start, self._zeros(last)))
        return self._finish(sums, emitted, last)

    def _loop(self, step: Any, carry: Any) -> tuple[Any, list[Any]]:
        """`lax.scan` over the whole microbatches, if there are any."""
        if self.cut.whole:
            return lax.scan(step, carry, length=self.cut.whole)
        return carry, [jnp.zeros((0, *aval.shape), aval.dtype) for aval in self._emitted(self.whole.out_avals)]

    def backward(self, seeds: Sequence[Any], *, mutate: bool, keeps_frontier: bool) -> tuple[list[Any], ...]:
        """The gradient with respect to the variables, and what the examples make of the frontier if it is wanted.

        Also the sums of the squares of the microbatches, if these are wanted.

        Args:
          seeds: the gradient with respect to those values of the frontier that are differentiated; of rows, those of
            the examples.
          mutate: whether to add the gradient up in references.
          keeps_frontier: whether the frontier is wanted.
        """
        given, cut = self.given, self.cut
        positions = [index for index, position in enumerate(self._positions) if position in self.split.differentiated]
        wide = [wide_dtype(leaf.dtype, self.accumulator_dtype) for leaf in given.variables]
        is_direct = self.part.in_place([leaf.dtype == dtype for leaf, dtype in zip(given.variables, wide, strict=True)])
        written_in_place = references.written_in_place(self.whole, is_direct) if mutate else []

        def run(
            traced: compat.Traced, start: Any, size: int, written_in_place: list[bool] | None = None
        ) -> tuple[list[Any], Any, list[Any]]:
            def of_wide(wide_variables: list[Any]) -> tuple[list[Any], list[Any]]:
                whole = self.part.whole(wide_variables)  # still wide, so that devices add up wide gradients too
                narrow = [leaf.astype(own.dtype) for leaf, own in zip(whole, given.variables, strict=True)]
                made = self._call(traced, narrow, start)
                return [made[position] for position in positions], made

            # Widening what is differentiated makes autodiff itself add up in the wide dtype.
            point = [leaf.astype(dtype) for leaf, dtype in zip(given.variables, wide, strict=True)]
            fun = of_wide if written_in_place is None else references.shielded(of_wide, written_in_place)
            _, pullback, made = jax.vjp(fun, point, has_aux=True)
            mine = []
            for position, seed in zip(positions, seeds, strict=True):
                state = self.states[position]
                if isinstance(state, Rows):
                    seed = take_rows(seed, state, cut.examples, start, size, cut.runs)
                mine.append(seed)
            return made, pullback, mine

        def add(totals: Sequence[Any], in_place: list[bool], *, mutate: bool) -> list[Any]:
            _, pullback, mine = run(self.whole, 0, cut.size, in_place if mutate else None)
            return references.add(pullback, mine, totals, mutate=mutate)

        if cut.whole and references.reach_nested_functions(self.whole, written_in_place):
            types = [jax.typeof(leaf).update(dtype=dtype) for leaf, dtype in zip(given.variables, wide, strict=True)]
            written_in_place = references.with_same_terms(add, types, written_in_place)

        last: list[Any] | None = None
        noise = [] if self.units is None else squares.zeros(wide)
        if self.last is None:
            grads = [jnp.zeros_like(leaf, dtype) for leaf, dtype in zip(given.variables, wide, strict=True)]
        else:
            with jax.named_scope("anybatch_last_microbatch"):
                last, pullback, mine = run(self.last, cut.last_start, cut.remainder)
                (grads,) = pullback(mine)
            noise = self._with_square(noise, grads, cut.last_start, cut.remainder)
        start, grads = first_start(cut, grads)
        accumulators = [jax.new_ref(leaf) for leaf in grads] if mutate else None

        def step(carry: Any, _: None) -> tuple[Any, list[Any]]:
            first, sums, grads, noise = carry
            with jax.named_scope("anybatch_microbatch"):
                made, pullback, mine = run(self.whole, first, cut.size, written_in_place if mutate else None)
                if accumulators is not None:
                    pullback.with_refs(accumulators)(mine)
                else:
                    own = self.part.apart(pullback(mine)[0])
                    grads, noise = jax.tree.map(jnp.add, grads, own), self._with_square(noise, own, first, cut.size)
            kept = (self._add(sums, made), self._emitted(made)) if keeps_frontier else ([], [])
            return (first + cut.step, kept[0], grads, noise), kept[1]

        sums = self._zeros(last) if keeps_frontier else []
        carry = (start, sums, [] if mutate else grads, noise)
        (_, sums, grads, noise), emitted = self._loop(step, carry)
        if accumulators is not None:
            grads = [jax.freeze(accumulator) for accumulator in accumulators]
        return grads, self._finish(sums, emitted, last) if keeps_frontier else [], noise

    def _with_square(self, noise: list[Any], grads: list[Any], start: Any, size: int) -> list[Any]:
        if self.units is None:
            return []
        given = self.given
        return squares.add(
            noise, grads, self.units.of_microbatch(given.inputs, start, size, given.origin, self.cut.runs)
        )

    def _call(self, traced: compat.Traced, variables: list[Any], start: Any) -> list[Any]:
        given, start = self.given, jnp.asarray(start, jnp.int32)
        arrays = (variables, given.inputs, given.known, given.selected, given.place)
        return traced(traced.bound, *jax.tree.leaves(arrays), start)

    # The frontier: sums are carried through the loop, rows are emitted by every microbatch.

    def _zeros(self, last: Sequence[Any] | None) -> list[Any]:
        types = self.whole.out_avals
        zeros = [
            compat.zeros_of(aval, wide_dtype(aval.dtype, self.accumulator_dtype))
            for aval, state in zip(types, self.states, strict=True)
            if state == SUM
        ]
        return zeros if last is None else self._add(zeros, last)

    def _add(self, sums: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        new = [value for value, state in zip(made, self.states, strict=True) if state == SUM]
        return [old + value.astype(old.dtype) for old, value in zip(sums, new, strict=True)]

    def _emitted(self, made: Sequence[Any]) -> list[Any]:
        return [value for value, state in zip(made, self.states, strict=True) if isinstance(state, Rows)]

    def _finish(self, sums: Sequence[Any], emitted: Sequence[Any], last: Sequence[Any] | None) -> list[Any]:
        carried, stacked = iter(sums), iter(emitted)
        whole = []
        for position, state in enumerate(self.states):
            if isinstance(state, Rows):
                mine = None if last is None else last[position]
                whole.append(put_rows(next(stacked), mine, state, self.cut.size, self.cut.remainder, self.cut.runs))
            else:
                whole.append(next(carried))
        return whole


def gather_rows(split: Split, cut: Cut, given: Given) -> list[Any]:
    """Rows of data alone, for the examples of a part, computed microbatch by microbatch."""
    wanted = split.gathered_first

    def run(start: Any, size: int) -> list[Any]:
        return split.prefix(given.inputs, None, [], start, size, wanted, given.origin, cut.runs)

    last = run(cut.last_start, cut.remainder) if cut.remainder else [None] * len(wanted)

    def step(start: Any, _: None) -> tuple[Any, list[Any]]:
        return start + cut.step, run(start, cut.size)

    _, stacked = lax.scan(step, jnp.zeros((), jnp.int32), length=cut.whole)
    states: list[Any] = [split.reader.state(value) for value in wanted]
    return [put_rows(*each, cut.size, cut.remainder, cut.runs) for each in zip(stacked, last, states, strict=True)]
