"""A pass over all examples, one microbatch at a time, that sums or keeps what is asked of their gradients.

`ExamplePass` loops over the microbatches. It then recomputes examples whose norms cannot be trusted, and leaves out
those that are not finite.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.call.arguments import Arrays
from anybatch.call.microbatches import Microbatches, slice_examples
from anybatch.gradients.accumulate import Kind, Output, over_microbatches
from anybatch.jaxprs import avals
from anybatch.jaxprs.graph import uses
from anybatch.mesh.executor import BatchPass, Executor, OutputLayout, Shard
from anybatch.per_example.kept_gradients import ExampleProgram, KeptGradients
from anybatch.per_example.options import PerExampleOptions, Wants
from anybatch.reading.states import Batched


class PassResult(NamedTuple):
    """The results of some examples."""

    sums: list[Any]  # of the clipped gradients, and of the losses
    rows: list[Any]  # arrays with one row for each example: losses, aux, norms and gradients
    is_nonfinite: Any  # a boolean for each example: True if it must be left out, since it is not finite
    is_doubtful: Any  # True if its norm must be recomputed; such an example is not in the sums yet


class PassInputs(NamedTuple):
    """What the examples of one shard are computed from."""

    shard: Shard
    consts: list[Any]
    arrays: Arrays
    clip_norm: Any
    is_padding: Any | None

    def zeros(self, types: Any) -> Any:
        """A tree of zeros that vary over the same mesh axes as the batch."""
        return jax.tree.map(lambda each: varying_as(_zeros(each), self.arrays.batch), types)


@dataclasses.dataclass(frozen=True, eq=False)
class ExamplePass:
    """A loop over all examples, one microbatch at a time, for what is requested of their gradients."""

    program: ExampleProgram
    options: PerExampleOptions
    size: int  # of a microbatch
    skips_padding: bool  # whether microbatches of padding alone may be skipped

    def __call__(
        self, executor: Executor, consts: list[Any], arrays: Arrays, clip_norm: Any, is_padding: Any | None
    ) -> tuple[list[Any], list[Any]]:
        """Runs the pass.

        Memory: the kept gradients of one microbatch, its temporaries, and the sums.

        Returns:
          The sums of the clipped gradients and of the losses, in the accumulator's dtype; and arrays with one row for
          each example, in the order of the batch: the losses, the aux leaves, and the norms and gradients that are
          kept.
        """
        rows = [*arrays.batch, *([] if is_padding is None else [is_padding])]
        wrt = [jnp.asarray(leaf) for leaf in arrays.wrt]
        invariant, tree = jax.tree.flatten((consts, wrt, arrays.keys, arrays.rest, clip_norm))

        def run(shard: Shard, invariant: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            consts, wrt, keys, rest, clip_norm = jax.tree.unflatten(tree, invariant)
            batch, padding = (rows, None) if is_padding is None else (rows[:-1], rows[-1])
            return self._run(PassInputs(shard, consts, Arrays(wrt, batch, keys, rest), clip_norm, padding))

        variables = len(wrt) if self.sums and self.options.transform is None else 0
        layouts = [OutputLayout(Batched(0))] * self.num_rows
        return executor(BatchPass(run, invariant, rows, [Batched(0)] * len(rows), layouts, variables))

    @property
    def sums(self) -> bool:
        """True if gradients are clipped and summed."""
        return self.options.wants is Wants.SUM

    @property
    def num_norms(self) -> int:
        """The number of norms that are kept of an example."""
        return (len(self.program.gradient_types) if self.options.per_leaf else 1) if self.options.keeps_norms else 0

    @property
    def num_rows(self) -> int:
        """The number of arrays with one row for each example."""
        kept = len(self.program.gradient_types) if self.options.wants is Wants.GRADIENTS else 0
        return len(self.program.loss.out_avals) + self.num_norms + kept

    @property
    def _can_doubt(self) -> bool:
        """True if some norms may have to be recomputed: only those that are computed from factors."""
        return (self.sums or self.options.keeps_norms) and any(form.products for form in self.program.forms)

    @property
    def _can_spread(self) -> bool:
        """True if an example that is not finite may spoil the gradients of others. They are then computed one by one.

        XLA may compute the convolutions of all examples of a microbatch as one, with zeros between them, and so
        multiply NaN or infinity of one example by zero. (Factored gradients are computed again anyway.)
        """
        has_convolutions = uses(self.program.loss.traced.jaxpr, "conv_general_dilated")
        return not self._can_doubt and has_convolutions and self.size > 1

    def _can_be_spoilt(self, inputs: PassInputs) -> bool:
        """True if an example that should count for nothing could make the sums NaN or infinite."""
        return self.sums and self._can_doubt and (self.options.nan_safe or inputs.is_padding is not None)

    def _zero_sums(self, inputs: PassInputs) -> list[Any]:
        """The sums before the first example: of gradients, and of losses."""
        if not self.sums:
            return []
        wide = [(each, self.options.accumulator_dtype) for each in self.program.gradient_types]
        wide.append((self.program.loss.out_avals[0], jnp.float32))
        return inputs.zeros(
            [jax.ShapeDtypeStruct(each.shape, avals.wide_dtype(each.dtype, dtype)) for each, dtype in wide]
        )

    def _run(self, inputs: PassInputs) -> tuple[list[Any], list[Any]]:
        if not inputs.shard.examples:
            return self._zero_sums(inputs), self._no_rows(inputs)
        if self._can_be_spoilt(inputs):
            result = self._without_nonfinite(inputs)
        else:
            result = self._all_microbatches(inputs, None)
        if self._can_spread:
            result = self._one_by_one_if_spoilt(inputs, result)
        if self._can_doubt:
            result = self._with_recomputed(inputs, result)
        return result.sums, result.rows

    def _one_by_one_if_spoilt(self, inputs: PassInputs, result: PassResult) -> PassResult:
        alone = dataclasses.replace(self, size=1)
        is_spoilt = jnp.any(result.is_nonfinite)
        return lax.cond(is_spoilt, lambda: alone._all_microbatches(inputs, None), lambda: result)

    def _no_rows(self, inputs: PassInputs) -> list[Any]:
        """The rows of a shard without examples, with the types of the rows of one example."""
        batch = [jnp.zeros((1, *leaf.shape[1:]), leaf.dtype) for leaf in inputs.arrays.batch]
        one = inputs._replace(
            shard=dataclasses.replace(inputs.shard, examples=1, runs=1),
            arrays=inputs.arrays._replace(batch=batch),
            is_padding=None if inputs.is_padding is None else jnp.zeros(1, bool),
        )
        types = jax.eval_shape(lambda: self._all_microbatches(one, None).rows)
        return [_zeros(jax.ShapeDtypeStruct((0, *each.shape[1:]), each.dtype)) for each in types]

    def _without_nonfinite(self, inputs: PassInputs) -> PassResult:
        """All examples, and again without those that are not finite, until no such example spoils the sums.

        Nearly always one turn is enough. An example is left out by putting another one in its place, with weight 0.
        """

        def attempt(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            _, is_nonfinite, before = state
            result = self._all_microbatches(inputs, is_nonfinite)
            rows = [_where_rows(is_nonfinite, old, new) for old, new in zip(before.rows, result.rows, strict=True)]
            more = result.is_nonfinite & ~is_nonfinite
            doubtful = result.is_doubtful & ~is_nonfinite
            return jnp.any(more), is_nonfinite | more, PassResult(result.sums, rows, more, doubtful)

        nobody = inputs.zeros(jax.ShapeDtypeStruct((inputs.shard.examples,), bool))
        start = inputs.zeros(jax.eval_shape(lambda: self._all_microbatches(inputs, nobody)))
        again = varying_as(jnp.asarray(True), inputs.arrays.batch)
        _, is_nonfinite, result = lax.while_loop(lambda state: state[0], attempt, (again, nobody, start))
        return result._replace(is_nonfinite=is_nonfinite)

    def _with_recomputed(self, inputs: PassInputs, result: PassResult) -> PassResult:
        """Recomputes some examples from their gradients, one after the other, and adds them to the sums.

        These are the examples whose norms are doubtful, and those that are not finite: squares of factors may overflow
        where gradients do not. Nearly always there are none, and a loop of no turns does not touch the sums.

        If no example was finite, none could stand in for the others, and the sums are spoilt. They are set to 0 first.
        """
        by_gradient = dataclasses.replace(self, program=dataclasses.replace(self.program, method="vmap"), size=1)
        alone = inputs._replace(shard=dataclasses.replace(inputs.shard, runs=1))
        num_outputs = len(self.program.loss.out_avals)
        is_left = result.is_doubtful | result.is_nonfinite
        if inputs.is_padding is not None:
            is_left = is_left & ~inputs.is_padding
        order = jnp.argsort(~is_left, stable=True)
        can_be_spoilt = self._can_be_spoilt(inputs)
        is_spoilt = jnp.all(_any_of(result.is_nonfinite, inputs.is_padding)) if can_be_spoilt else jnp.asarray(False)
        is_spoilt = varying_as(is_spoilt, inputs.arrays.batch)
        num_resets = is_spoilt.astype(jnp.int32)  # 0 or 1: the turn before the first example
        num_turns = jnp.sum(is_left, dtype=jnp.int32) + num_resets

        def add_example(state: tuple[Any, list[Any], list[Any]]) -> tuple[Any, list[Any], list[Any]]:
            turn, sums, rows = state
            index = order[turn - num_resets]
            one = by_gradient._microbatch(alone, 1, index, sums, None)
            pairs = zip(rows[num_outputs:], one.rows[num_outputs:], strict=True)
            norms = [old.at[index].set(new[0]) for old, new in pairs]
            if not sums:
                return turn + 1, [], [*rows[:num_outputs], *norms]
            # The losses of doubtful examples are in the sum already.
            value = jnp.where(result.is_nonfinite[index], one.sums[-1], sums[-1])
            return turn + 1, [*one.sums[:-1], value], [*rows[:num_outputs], *norms]

        def reset_sums(state: tuple[Any, list[Any], list[Any]]) -> tuple[Any, list[Any], list[Any]]:
            turn, sums, rows = state
            return turn + 1, jax.tree.map(jnp.zeros_like, sums), rows

        def step(state: tuple[Any, list[Any], list[Any]]) -> tuple[Any, list[Any], list[Any]]:
            is_first = is_spoilt & (state[0] == 0)
            return lax.cond(is_first, reset_sums, add_example, state) if can_be_spoilt else add_example(state)

        start = (jnp.zeros_like(num_turns), result.sums, result.rows)
        _, sums, rows = lax.while_loop(lambda state: state[0] < num_turns, step, start)
        return result._replace(sums=sums, rows=rows)

    def _all_microbatches(self, inputs: PassInputs, is_nonfinite: Any | None) -> PassResult:
        """All examples of a shard, without those that are known not to be finite."""
        shard = inputs.shard
        microbatches = Microbatches(shard.examples, max(1, min(self.size, shard.examples)), shard.runs)
        skips = inputs.is_padding is not None and self.skips_padding

        def step(sums: list[Any], start: Any, size: int) -> tuple[list[Any], PassResult]:
            run = functools.partial(self._microbatch, inputs, size, start, is_nonfinite=is_nonfinite)
            is_last = size == microbatches.remainder
            result = self._unless_padding(inputs, microbatches, run, sums) if skips and is_last else run(sums)
            return result.sums, result._replace(sums=[])

        sums = self._zero_sums(inputs)
        if microbatches.number == 1 and not skips:
            sums, result = step(sums, 0, shard.examples)
            return result._replace(sums=sums)
        scan = functools.partial(self._scan_without_padding, inputs, microbatches) if skips else lax.scan
        sums, stacked, last = over_microbatches(microbatches, step, sums, scan=scan)
        leaves, tree = jax.tree.flatten(stacked)
        ends = [None] * len(leaves) if last is None else jax.tree.leaves(last)
        output = Output(Kind.ROWS)
        joined = [output.join(rows, end, microbatches) for rows, end in zip(leaves, ends, strict=True)]
        return jax.tree.unflatten(tree, joined)._replace(sums=sums)

    def _scan_without_padding(
        self,
        inputs: PassInputs,
        microbatches: Microbatches,
        turn: Callable[[Any, None], Any],
        state: tuple[Any, list[Any]],
        *,
        length: int,
    ) -> tuple[Any, Any]:
        """As `lax.scan`, for the microbatches that are not all padding. The others get rows of zeros.

        The loop has as many turns as there are such microbatches. A branch in each turn would make a GPU wait.
        """
        first_row, sums = state
        assert inputs.is_padding is not None
        runs, step = inputs.shard.runs, microbatches.step
        padding = inputs.is_padding.reshape(runs, -1)[:, : length * step]
        is_padding = padding.reshape(runs, length, step).all(axis=(0, 2))
        order, num_turns = jnp.argsort(is_padding, stable=True).astype(jnp.int32), jnp.sum(~is_padding)
        types = jax.eval_shape(turn, state, None)[1]
        stacked = jax.tree.map(lambda each: jax.ShapeDtypeStruct((length, *each.shape), each.dtype), types)

        def of_number(state: tuple[Any, list[Any], Any]) -> tuple[Any, list[Any], Any]:
            number, sums, rows = state
            which = order[number]
            (_, sums), new_rows = turn((first_row + which * step, sums), None)
            return number + 1, sums, jax.tree.map(lambda old, new: old.at[which].set(new), rows, new_rows)

        begin = (jnp.zeros_like(num_turns), sums, inputs.zeros(stacked))
        _, sums, rows = lax.while_loop(lambda state: state[0] < num_turns, of_number, begin)
        return (first_row, sums), rows

    def _unless_padding(
        self,
        inputs: PassInputs,
        microbatches: Microbatches,
        run: Callable[[list[Any]], PassResult],
        sums: list[Any],
    ) -> PassResult:
        """The smaller last microbatch, unless it is all padding."""
        types = jax.eval_shape(run, sums)
        start, size = microbatches.last_start, microbatches.remainder
        (is_padding,) = slice_examples([inputs.is_padding], start, size, inputs.shard.runs)
        return lax.cond(jnp.all(is_padding), lambda sums: inputs.zeros(types)._replace(sums=sums), run, sums)

    def _microbatch(
        self, inputs: PassInputs, size: int, start: Any, sums: list[Any], is_nonfinite: Any | None
    ) -> PassResult:
        """One microbatch: the sums with its examples added, and their rows."""
        shard, arrays, padding = inputs.shard, inputs.arrays, inputs.is_padding
        indices = jnp.arange(shard.examples, dtype=jnp.int32)
        marks = [mark for mark in (padding, is_nonfinite) if mark is not None]
        taken = slice_examples([*arrays.batch, indices, *marks], start, size, shard.runs)
        batch, (index, *taken_marks) = taken[: len(arrays.batch)], taken[len(arrays.batch) :]
        is_padding = None if padding is None else taken_marks[0]
        is_replaced = None if is_nonfinite is None else taken_marks[-1]
        if is_replaced is not None:
            good = jnp.argmin(_any_of(is_nonfinite, padding))
            index = jnp.where(is_replaced, good.astype(index.dtype), index)
            batch = [
                _where_rows(is_replaced, lax.dynamic_slice_in_dim(leaf, good, 1), rows)
                for leaf, rows in zip(arrays.batch, batch, strict=True)
            ]
        keys = [jax.vmap(functools.partial(jax.random.fold_in, key))(shard.first + index) for key in arrays.keys]
        batch = [leaf[:, None] for leaf in batch] if self.options.keep_batch_dim else batch
        kept = self.program(inputs.consts, arrays._replace(batch=batch, keys=keys))
        return self._results(kept, inputs.clip_norm, is_padding, is_replaced, sums)

    def _results(
        self, kept: KeptGradients, clip_norm: Any, is_padding: Any, is_replaced: Any, sums: list[Any]
    ) -> PassResult:
        """The results of the examples of one microbatch, and `sums` with theirs added.

        An example with `is_replaced` stands in for one that is not finite, and counts for nothing.
        """
        nan_safe = self.options.nan_safe
        if self.sums or self.options.keeps_norms or nan_safe or self._can_spread:
            is_finite = jnp.isfinite(kept.square)
        else:
            is_finite = jnp.ones(kept.values.shape[:1], bool)
        counts = ~_any_of(jnp.zeros_like(is_finite), is_padding, is_replaced)
        is_doubtful = jnp.zeros_like(is_finite) & counts
        if self._can_doubt:
            is_doubtful = kept.is_doubtful(self.options.per_leaf) & counts
        if self.sums:
            weights = jnp.where(is_finite, _weights(kept.bound, clip_norm), 0.0 if nan_safe else jnp.nan)
            weights = jnp.where(counts & ~is_doubtful, weights, 0)
            *totals, value = sums
            has_value = counts & is_finite if nan_safe else counts
            value = value + jnp.sum(jnp.where(has_value, kept.values.astype(value.dtype), 0))
            sums = [*kept.add_weighted(weights, totals), value]
        rows = [kept.values, *kept.aux, *self._kept_rows(kept, is_finite)]
        is_nonfinite = ~is_finite if nan_safe or is_padding is None else ~is_finite & is_padding
        return PassResult(sums, [_zero_rows(is_padding, row) for row in rows], is_nonfinite, is_doubtful)

    def _kept_rows(self, kept: KeptGradients, is_finite: Any) -> list[Any]:
        rows: list[Any] = []
        if self.options.keeps_norms:
            squares = [each.square for each in kept.squares] if self.options.per_leaf else [kept.square]
            rows += map(jnp.sqrt, squares)
        if self.options.wants is Wants.GRADIENTS:
            rows += kept.gradients()
        if self.options.nan_safe and not self.sums:
            rows = [_zero_rows(~is_finite, row) for row in rows]
        return rows


def varying_as(array: Any, batch: Sequence[Any]) -> Any:
    """An array that varies over the same mesh axes as the batch, as the carry of a loop in a `shard_map` must."""
    axes = frozenset().union(*(avals.varying_axes(jax.typeof(leaf)) for leaf in batch))
    missing = tuple(axes - avals.varying_axes(jax.typeof(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def _weights(bound: Any, clip_norm: Any) -> Any:
    """The factor that scales each gradient: exactly 1 where its norm is at most `clip_norm`."""
    norm = jnp.sqrt(bound)
    clip_norm = jnp.asarray(clip_norm, norm.dtype)
    is_large = norm > clip_norm
    return jnp.where(is_large, clip_norm / jnp.where(is_large, norm, 1), jnp.ones_like(norm))


def _where_rows(mark: Any, one: Any, other: Any) -> Any:
    """For each row, that of `one` where the mark is True, and that of `other` where it is not."""
    return jnp.where(mark.reshape(-1, *[1] * (other.ndim - 1)), one, other)


def _zero_rows(mark: Any | None, rows: Any) -> Any:
    """The rows, with zeros where the mark is True. PRNG keys stay as they are."""
    if mark is None or avals.has_keys(rows):
        return rows
    return _where_rows(mark, jnp.zeros_like(rows), rows)


def _zeros(aval: Any) -> Any:
    if avals.has_keys(aval):
        data = jax.eval_shape(jax.random.key_data, aval)
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=avals.key_impl(aval.dtype))
    return jnp.zeros(aval.shape, aval.dtype)


def _any_of(*marks: Any | None) -> Any:
    return functools.reduce(jnp.logical_or, [mark for mark in marks if mark is not None])
