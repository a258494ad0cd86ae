"""What is asked of the gradients of examples: clipped sums, norms, or the gradients themselves.

Example by example: the gradients of a microbatch at a time, clipped and summed, or kept one by one.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.call.arguments import Arrays
from anybatch.call.microbatches import Microbatches, join_rows, loop_start, slice_examples
from anybatch.gradients.outputs import wide_dtype
from anybatch.jaxprs import avals
from anybatch.mesh.executor import BatchPass, Executor, OutputLayout, Shard
from anybatch.per_example.choice import Leaf
from anybatch.per_example.norms import square_of
from anybatch.per_example.sums import ExampleProgram, Kept, add_squares, at_most
from anybatch.reading.states import Batched

Transform = Callable[[list[Any]], list[Any]]  # of the gradient leaves of one example


class Found(NamedTuple):
    """What there is of some examples."""

    sums: list[Any]  # the clipped gradients, and the losses
    rows: list[Any]  # one for each example
    is_bad: Any  # whose gradients are not finite
    is_doubtful: Any  # whose norms must be computed in another way; they are not in the sums yet


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """What is asked of the gradient of every example."""

    parameters: Sequence[Any]  # their types
    outputs: Sequence[Any]  # the types of what the loss of one example returns, itself and aux
    accumulator_dtype: Any
    sums: bool  # whether they are clipped and summed
    keeps_gradients: bool = False
    keeps_norms: bool = False
    per_leaf: bool = False  # whether there is a norm for each parameter
    nan_safe: bool = True
    transform: Transform | None = None

    @functools.cached_property
    def transformed(self) -> list[Any]:
        """The types of what is summed or kept of one example."""
        types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self.parameters]
        return types if self.transform is None else jax.eval_shape(self.transform, types)

    @property
    def num_norms(self) -> int:
        """How many norms are kept of an example."""
        return (len(self.transformed) if self.per_leaf else 1) if self.keeps_norms else 0

    @property
    def num_rows(self) -> int:
        """How many arrays with rows of the examples there are."""
        kept = len(self.transformed) if self.keeps_gradients else 0
        return len(self.outputs) + self.num_norms + kept

    def can_doubt(self, leaves: Sequence[Leaf]) -> bool:
        """Whether there may be norms that are not to be trusted: those that come from factors."""
        return self.transform is None and (self.sums or self.keeps_norms) and any(leaf.products for leaf in leaves)

    def start(self) -> list[Any]:
        """Sums of nothing: of gradients, and of losses."""
        if not self.sums:
            return []
        types = [*self.transformed, jax.ShapeDtypeStruct((), self.outputs[0].dtype)]
        wide = [*[self.accumulator_dtype] * len(self.transformed), jnp.float32]
        return [jnp.zeros(each.shape, wide_dtype(each.dtype, dtype)) for each, dtype in zip(types, wide, strict=True)]

    def of(self, kept: Kept, clip_norm: Any, is_padding: Any, was_bad: Any, sums: list[Any]) -> Found:
        """What some examples come to.

        Args:
          kept: what is kept of their gradients.
          clip_norm: the largest norm that one may have.
          is_padding: which of them count for nothing, if any.
          was_bad: in whose places others stand, which count for nothing either.
          sums: to which theirs are added.
        """
        rows = [kept.values, *kept.aux]
        if is_padding is not None:
            rows = [
                each if avals.has_keys(each) else where_rows(is_padding, jnp.zeros_like(each), each) for each in rows
            ]
        grads = None
        if self.transform is not None:
            grads = jax.vmap(self.transform)(kept.each())
        elif self.keeps_gradients:
            grads = kept.each()
        needs_squares = self.sums or self.keeps_norms or self.nan_safe
        squares, bound = [], jnp.zeros(kept.values.shape[:1], jnp.float32)
        if grads is not None and self.transform is not None:
            squares = [square_of(grad) for grad in grads]
            bound = at_most(add_squares(squares, kept.values))
        elif needs_squares:
            squares, bound = [each.square for each in kept.squares], kept.bound
        square = add_squares(squares, kept.values)
        is_finite = jnp.isfinite(square)
        is_doubtful = (
            kept.is_doubtful(per_leaf=self.per_leaf) if self.can_doubt(kept.leaves) else jnp.zeros_like(is_finite)
        )
        counts = jnp.ones_like(is_finite)
        for mark in (is_padding, was_bad):
            counts = counts if mark is None else counts & ~mark
        is_doubtful = is_doubtful & counts
        if self.keeps_norms:
            norms = [jnp.sqrt(each) for each in (squares if self.per_leaf else [square])]
            if self.nan_safe and not self.sums:
                norms = [jnp.where(is_finite, norm, jnp.zeros_like(norm)) for norm in norms]
            rows += [norm if is_padding is None else jnp.where(is_padding, 0, norm) for norm in norms]
        if self.sums:
            weights = jnp.where(is_finite, _weights(bound, clip_norm), 0.0 if self.nan_safe else jnp.nan)
            weights = jnp.where(counts & ~is_doubtful, weights, 0)
            *totals, value = sums
            if grads is None:
                totals = kept.add_weighted(weights, totals)
            else:
                totals = _add_plainly(grads, weights, totals)
            counts = counts & is_finite if self.nan_safe else counts
            sums = [*totals, value + jnp.sum(jnp.where(counts, kept.values.astype(value.dtype), 0))]
        if self.keeps_gradients:
            assert grads is not None
            if self.nan_safe:
                grads = [where_rows(is_finite, grad, jnp.zeros_like(grad)) for grad in grads]
            rows += [
                grad if is_padding is None else where_rows(is_padding, jnp.zeros_like(grad), grad) for grad in grads
            ]
        is_bad = ~is_finite if self.nan_safe or is_padding is None else ~is_finite & is_padding
        return Found(sums, rows, is_bad, is_doubtful)


def _weights(bound: Any, clip_norm: Any) -> Any:
    """By how much each gradient is scaled: exactly 1 where its norm is no more than allowed."""
    norm = jnp.sqrt(bound)
    clip_norm = jnp.asarray(clip_norm, norm.dtype)
    is_large = norm > clip_norm
    return jnp.where(is_large, clip_norm / jnp.where(is_large, norm, 1), jnp.ones_like(norm))


def where_rows(mark: Any, one: Any, other: Any) -> Any:
    """Of two arrays with rows, the one or the other."""
    return jnp.where(mark.reshape(-1, *[1] * (other.ndim - 1)), one, other)


def _add_plainly(grads: Sequence[Any], weights: Any, totals: Sequence[Any]) -> list[Any]:
    added = []
    for grad, total in zip(grads, totals, strict=True):
        scale = weights.reshape(-1, *[1] * (grad.ndim - 1)).astype(total.dtype)
        weighed = jnp.where(scale == 0, 0, grad.astype(total.dtype) * scale)
        added.append(total + jnp.sum(weighed, axis=0))
    return added


class Inputs(NamedTuple):
    """What the examples of a part are computed from."""

    consts: list[Any]
    arrays: Arrays
    clip_norm: Any
    is_padding: Any | None


@dataclasses.dataclass(frozen=True, eq=False)
class EachExample:
    """A walk over all examples, by microbatches, for what is asked of their gradients."""

    program: ExampleProgram
    asked: Asked
    size: int  # of the microbatches
    keeps_batch_axis: bool = False  # whether the loss of one example is that of a batch of one
    skips_padding: bool = True  # where nothing stands against it

    def __call__(self, place: Executor, inputs: Inputs) -> tuple[list[Any], list[Any]]:
        """The sums, wide: the clipped gradients and the losses; and rows of all examples, in the order of the batch.

        The rows are the losses, the aux leaves, the norms and the gradients, as far as they are kept.

        Memory: what is kept of the gradients of one microbatch, its temporaries, and the sums.
        """
        arrays = inputs.arrays
        rows = [*arrays.batch, *([] if inputs.is_padding is None else [inputs.is_padding])]
        wrt = [jnp.asarray(leaf) for leaf in arrays.wrt]
        whole, tree = jax.tree.flatten((inputs.consts, wrt, arrays.keys, arrays.rest, inputs.clip_norm))

        def over(shard: Shard, whole: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            consts, wrt, keys, rest, clip_norm = jax.tree.unflatten(tree, whole)
            batch, padding = (rows, None) if inputs.is_padding is None else (rows[:-1], rows[-1])
            return self._over(shard, Inputs(consts, Arrays(wrt, batch, keys, rest), clip_norm, padding))

        variables = len(wrt) if self.asked.sums and self.asked.transform is None else 0
        gives = [OutputLayout(Batched(0))] * self.asked.num_rows
        return place(BatchPass(over, whole, rows, [Batched(0)] * len(rows), gives, variables))

    def _over(self, shard: Shard, inputs: Inputs) -> tuple[list[Any], list[Any]]:
        if not shard.examples:
            return self._start(inputs), self._no_rows(shard, inputs)
        found = self._until_good(shard, inputs) if self._is_spoilt(inputs) else self._microbatches(shard, inputs, None)
        if self._can_doubt:
            found = self._afterwards(shard, inputs, found)
        return found.sums, found.rows

    def _is_spoilt(self, inputs: Inputs) -> bool:
        """Whether sums would be spoilt by examples that are not finite, and that count for nothing."""
        may_be_bad = self.asked.nan_safe or inputs.is_padding is not None
        return self.asked.sums and self._can_doubt and may_be_bad

    def _start(self, inputs: Inputs) -> list[Any]:
        return [_like_rows(each, inputs.arrays.batch) for each in self.asked.start()]

    @property
    def _can_doubt(self) -> bool:
        return self.asked.can_doubt(self.program.leaves)

    def _no_rows(self, shard: Shard, inputs: Inputs) -> list[Any]:
        """The rows of no examples, in the types of those of one."""
        arrays = inputs.arrays._replace(
            batch=[jnp.zeros((1, *leaf.shape[1:]), leaf.dtype) for leaf in inputs.arrays.batch]
        )
        padding = None if inputs.is_padding is None else jnp.zeros(1, bool)
        one = inputs._replace(arrays=arrays, is_padding=padding)
        types = jax.eval_shape(
            lambda: self._microbatches(dataclasses.replace(shard, examples=1, runs=1), one, None).rows
        )
        return [_zeros(jax.ShapeDtypeStruct((0, *each.shape[1:]), each.dtype)) for each in types]

    def _until_good(self, shard: Shard, inputs: Inputs) -> Found:
        """All examples; and again without those whose gradients are not finite, for these would spoil the sums.

        Nearly always once is enough. To leave an example out, another one is put in its place, and weighs nothing.
        """

        def attempt(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            _, is_bad, before = state
            found = self._microbatches(shard, inputs, is_bad)
            kept = [where_rows(is_bad, old, new) for old, new in zip(before.rows, found.rows, strict=True)]
            more = found.is_bad & ~is_bad
            doubtful = found.is_doubtful & ~is_bad
            return jnp.any(more), is_bad | more, Found(found.sums, kept, more, doubtful)

        nobody = _like_rows(jnp.zeros(shard.examples, bool), inputs.arrays.batch)
        types = jax.eval_shape(lambda: self._microbatches(shard, inputs, nobody))
        start = jax.tree.map(lambda each: _like_rows(_zeros(each), inputs.arrays.batch), types)
        again = _like_rows(jnp.asarray(True), inputs.arrays.batch)
        _, is_bad, found = lax.while_loop(lambda state: state[0], attempt, (again, nobody, start))
        return found._replace(is_bad=is_bad)

    def _afterwards(self, shard: Shard, inputs: Inputs, found: Found) -> Found:
        """What is left to do for some examples: nearly always nothing, and a loop of no turns touches no sum.

        Examples whose norms are doubtful, or not finite, for squares of factors may overflow where gradients do not:
        from their gradients, computed as they are, one after the other. And where none was good, so that there was
        nothing to put in their places, the sums begin at 0.
        """
        plainly = dataclasses.replace(self, program=dataclasses.replace(self.program, method="vmap"), size=1)
        first = len(self.program.loss.out_avals)
        is_left = _without(found.is_doubtful | found.is_bad, inputs.is_padding)
        order = jnp.argsort(~is_left, stable=True)
        none = jnp.all(_or(found.is_bad, inputs.is_padding)) if self._is_spoilt(inputs) else jnp.asarray(False)
        none = _like_rows(none, inputs.arrays.batch)
        before = none.astype(jnp.int32)  # turns before the first of them
        number = jnp.sum(is_left, dtype=jnp.int32) + before

        def add(state: tuple[Any, list[Any], list[Any]]) -> tuple[Any, list[Any], list[Any]]:
            turn, sums, rows = state
            which = order[turn - before]
            one = plainly._microbatch(shard, inputs, 1, _One(which), sums, None)
            norms = [old.at[which].set(new[0]) for old, new in zip(rows[first:], one.rows[first:], strict=True)]
            if not sums:
                return turn + 1, [], [*rows[:first], *norms]
            value = jnp.where(
                found.is_bad[which], one.sums[-1], sums[-1]
            )  # the losses of others are in the sum already
            return turn + 1, [*one.sums[:-1], value], [*rows[:first], *norms]

        def nothing(state: tuple[Any, list[Any], list[Any]]) -> tuple[Any, list[Any], list[Any]]:
            turn, sums, rows = state
            return turn + 1, jax.tree.map(jnp.zeros_like, sums), rows

        def step(state: tuple[Any, list[Any], list[Any]]) -> tuple[Any, list[Any], list[Any]]:
            is_first = none & (state[0] == 0)
            return lax.cond(is_first, nothing, add, state) if self._is_spoilt(inputs) else add(state)

        start = (jnp.zeros_like(number), found.sums, found.rows)
        _, sums, rows = lax.while_loop(lambda state: state[0] < number, step, start)
        return found._replace(sums=sums, rows=rows)

    def _microbatches(self, shard: Shard, inputs: Inputs, is_bad: Any | None) -> Found:
        """All examples of a part, some of which are known to be bad."""
        microbatches = Microbatches(shard.examples, max(1, min(self.size, shard.examples)), shard.runs)
        sums, last = self._start(inputs), None
        if microbatches.remainder:  # first, so that its results are where the sums start
            with jax.named_scope("anybatch_last_microbatch"):
                last = self._unless_padding(shard, inputs, microbatches, sums, is_bad)
                sums = last.sums
        first_row, sums = loop_start(microbatches, sums)

        def step(carry: Any, _: None) -> tuple[Any, Any]:
            row, sums = carry
            with jax.named_scope("anybatch_microbatch"):
                found = self._microbatch(shard, inputs, microbatches.size, row, sums, is_bad)
            return (row + microbatches.step, found.sums), found._replace(sums=[])

        if microbatches.complete == 0 and last is not None:
            return last
        if inputs.is_padding is not None and self.skips_padding:
            sums, stacked = self._those_that_count(shard, inputs, microbatches, step, (first_row, sums))
        elif microbatches.complete == 1 and last is None:
            return self._microbatch(shard, inputs, microbatches.size, 0, sums, is_bad)
        else:
            (_, sums), stacked = lax.scan(step, (first_row, sums), length=microbatches.complete)
        end = None if last is None else last._replace(sums=[])
        ends = [None] * len(jax.tree.leaves(stacked)) if end is None else jax.tree.leaves(end)
        leaves, tree = jax.tree.flatten(stacked)
        joined = [join_rows(rows, other, 0, shard.runs) for rows, other in zip(leaves, ends, strict=True)]
        return jax.tree.unflatten(tree, joined)._replace(sums=sums)

    def _those_that_count(
        self,
        shard: Shard,
        inputs: Inputs,
        microbatches: Microbatches,
        step: Callable[[Any, None], Any],
        start: tuple[Any, list[Any]],
    ) -> tuple[list[Any], Any]:
        """Only the microbatches that are not all padding, with rows of zeros for the others.

        A loop of as many turns as there are such microbatches: a branch in each turn would make a GPU wait.
        """
        first_row, sums = start
        assert inputs.is_padding is not None
        padding = inputs.is_padding.reshape(shard.runs, -1)[:, : microbatches.complete * microbatches.step]
        is_padding = padding.reshape(shard.runs, microbatches.complete, microbatches.step).all(axis=(0, 2))
        order, number = jnp.argsort(is_padding, stable=True).astype(jnp.int32), jnp.sum(~is_padding)
        types = jax.eval_shape(step, start, None)[1]
        rows = jax.tree.map(
            lambda each: _like_rows(
                _zeros(jax.ShapeDtypeStruct((microbatches.complete, *each.shape), each.dtype)), inputs.arrays.batch
            ),
            types,
        )

        def turn(state: tuple[Any, list[Any], Any]) -> tuple[Any, list[Any], Any]:
            turns, sums, rows = state
            which = order[turns]
            (_, sums), mine = step((first_row + which * microbatches.step, sums), None)
            return turns + 1, sums, jax.tree.map(lambda old, new: old.at[which].set(new), rows, mine)

        begin = (jnp.zeros_like(number), sums, rows)
        _, sums, rows = lax.while_loop(lambda state: state[0] < number, turn, begin)
        return sums, rows

    def _unless_padding(
        self, shard: Shard, inputs: Inputs, microbatches: Microbatches, sums: list[Any], is_bad: Any
    ) -> Found:
        """The ragged last microbatch, if it is not all padding."""
        run = functools.partial(
            self._microbatch, shard, inputs, microbatches.remainder, microbatches.last_start, is_bad=is_bad
        )
        if inputs.is_padding is None or not self.skips_padding:
            return run(sums)
        types = jax.eval_shape(run, sums)

        def skip(sums: list[Any]) -> Found:
            return jax.tree.map(lambda each: _like_rows(_zeros(each), inputs.arrays.batch), types)._replace(sums=sums)

        (mine,) = slice_examples([inputs.is_padding], microbatches.last_start, microbatches.remainder, shard.runs)
        return lax.cond(jnp.all(mine), skip, run, sums)

    def _microbatch(
        self, shard: Shard, inputs: Inputs, size: int, row: Any, sums: list[Any], is_bad: Any | None
    ) -> Found:
        """Some examples: the sums with theirs added, and their rows."""
        arrays, padding = inputs.arrays, inputs.is_padding
        numbers = jnp.arange(shard.examples, dtype=jnp.int32)
        marks = [mark for mark in (padding, is_bad) if mark is not None]
        if isinstance(row, _One):
            taken = [lax.dynamic_slice_in_dim(leaf, row.number, 1) for leaf in [*arrays.batch, numbers, *marks]]
        else:
            taken = slice_examples([*arrays.batch, numbers, *marks], row, size, shard.runs)
        batch, (number, *own) = taken[: len(arrays.batch)], taken[len(arrays.batch) :]
        is_padding, was_bad = own.pop(0) if padding is not None else None, own.pop(0) if own else None
        if was_bad is not None and is_bad is not None:
            good = jnp.argmin(_or(is_bad, padding))
            number = jnp.where(was_bad, good.astype(number.dtype), number)
            batch = [
                where_rows(was_bad, lax.dynamic_slice_in_dim(whole, good, 1), mine)
                for whole, mine in zip(arrays.batch, batch, strict=True)
            ]
        keys = [jax.vmap(functools.partial(jax.random.fold_in, key))(shard.first + number) for key in arrays.keys]
        batch = [leaf[:, None] for leaf in batch] if self.keeps_batch_axis else batch
        own_arrays = arrays._replace(batch=batch, keys=keys)

        return self.asked.of(self.program(inputs.consts, own_arrays), inputs.clip_norm, is_padding, was_bad, sums)


class _One(NamedTuple):
    """The place of a single example, wherever it is."""

    number: Any


def _zeros(aval: Any) -> Any:
    if avals.has_keys(aval):
        data = jax.eval_shape(jax.random.key_data, aval)
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=avals.key_impl(aval.dtype))
    return jnp.zeros(aval.shape, aval.dtype)


def _like_rows(array: Any, batch: Sequence[Any]) -> Any:
    """An array that differs from device to device where the examples do, as loops in a `shard_map` want it."""
    varying = frozenset().union(*(avals.varying_axes(jax.typeof(leaf)) for leaf in batch))
    missing = tuple(varying - avals.varying_axes(jax.typeof(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def _or(mark: Any, other: Any | None) -> Any:
    return mark if other is None else mark | other


def _without(mark: Any, other: Any | None) -> Any:
    return mark if other is None else mark & ~other
