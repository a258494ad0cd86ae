"""A pass over all examples, one microbatch at a time, that sums or keeps what is asked of their gradients.

`Request` says what is asked, and computes it for the examples of one microbatch. `ExamplePass` loops over the
microbatches. It then recomputes examples whose norms cannot be trusted, and leaves out those that are not finite.
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
from anybatch.gradients.accumulate import Kind, Output, over_microbatches, wide_dtype
from anybatch.jaxprs import avals
from anybatch.mesh.executor import BatchPass, Executor, OutputLayout, Shard
from anybatch.per_example.forms import GradientForm
from anybatch.per_example.kept_gradients import ExampleProgram, KeptGradients, rounded_up, total_square
from anybatch.per_example.norms import square_of
from anybatch.reading.states import Batched

Transform = Callable[[list[Any]], list[Any]]  # of the gradient leaves of one example


class PassResult(NamedTuple):
    """The results of some examples."""

    sums: list[Any]  # of the clipped gradients, and of the losses
    rows: list[Any]  # arrays with one row for each example: losses, aux, norms and gradients
    is_nonfinite: Any  # a boolean for each example: True if it must be left out, since it is not finite
    is_doubtful: Any  # True if its norm must be recomputed; such an example is not in the sums yet


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """What is computed from the gradients of the examples: a clipped sum, norms, or the gradients themselves."""

    parameters: Sequence[Any]  # their types
    outputs: Sequence[Any]  # the types of the loss of one example and its aux leaves
    accumulator_dtype: Any
    sums: bool  # whether gradients are clipped and summed
    keeps_gradients: bool = False
    keeps_norms: bool = False
    per_leaf: bool = False  # whether there is a norm for each parameter
    nan_safe: bool = True
    transform: Transform | None = None

    @functools.cached_property
    def transformed(self) -> list[Any]:
        """The types of one example's gradient leaves, after `transform`."""
        types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self.parameters]
        return types if self.transform is None else jax.eval_shape(self.transform, types)

    @property
    def num_norms(self) -> int:
        """The number of norms that are kept of an example."""
        return (len(self.transformed) if self.per_leaf else 1) if self.keeps_norms else 0

    @property
    def num_rows(self) -> int:
        """The number of arrays with one row for each example."""
        kept = len(self.transformed) if self.keeps_gradients else 0
        return len(self.outputs) + self.num_norms + kept

    def can_doubt(self, forms: Sequence[GradientForm]) -> bool:
        """True if some norms may have to be recomputed: only those that are computed from factors."""
        return self.transform is None and (self.sums or self.keeps_norms) and any(form.products for form in forms)

    def zero_sums(self) -> list[Any]:
        """The sums before the first example: of gradients, and of losses."""
        if not self.sums:
            return []
        types = [*self.transformed, jax.ShapeDtypeStruct((), self.outputs[0].dtype)]
        wide = [*[self.accumulator_dtype] * len(self.transformed), jnp.float32]
        return [jnp.zeros(each.shape, wide_dtype(each.dtype, dtype)) for each, dtype in zip(types, wide, strict=True)]

    def results(
        self, kept: KeptGradients, clip_norm: Any, is_padding: Any, is_replaced: Any, sums: list[Any]
    ) -> PassResult:
        """The results of the examples of one microbatch.

        Args:
          kept: their gradients.
          clip_norm: the largest norm that a gradient may have.
          is_padding: a boolean for each example, True for padding; None if there is none.
          is_replaced: True where another example stands in for one that is not finite, and counts for nothing.
          sums: the sums so far, to which theirs are added.
        """
        grads = self._gradients(kept)
        squares, bound = self._squares(kept, grads)
        square = total_square(squares, kept.values)
        is_finite = jnp.isfinite(square)
        counts = jnp.ones_like(is_finite)
        for mark in (is_padding, is_replaced):
            counts = counts if mark is None else counts & ~mark
        if self.can_doubt(kept.forms):
            is_doubtful = kept.is_doubtful(per_leaf=self.per_leaf)
        else:
            is_doubtful = jnp.zeros_like(is_finite)
        is_doubtful = is_doubtful & counts
        if self.sums:
            weights = jnp.where(is_finite, _weights(bound, clip_norm), 0.0 if self.nan_safe else jnp.nan)
            weights = jnp.where(counts & ~is_doubtful, weights, 0)
            *totals, value = sums
            totals = kept.add_weighted(weights, totals) if grads is None else _add_weighted(grads, weights, totals)
            has_value = counts & is_finite if self.nan_safe else counts
            sums = [*totals, value + jnp.sum(jnp.where(has_value, kept.values.astype(value.dtype), 0))]
        rows = [kept.values, *kept.aux, *self._norms(squares, square, is_finite)]
        rows += self._kept_gradients(grads, is_finite)
        is_nonfinite = ~is_finite if self.nan_safe or is_padding is None else ~is_finite & is_padding
        return PassResult(sums, [_zero_rows(is_padding, row) for row in rows], is_nonfinite, is_doubtful)

    def _gradients(self, kept: KeptGradients) -> list[Any] | None:
        """The gradients of the examples, if they are needed themselves."""
        if self.transform is not None:
            return jax.vmap(self.transform)(kept.gradients())
        return kept.gradients() if self.keeps_gradients else None

    def _squares(self, kept: KeptGradients, grads: list[Any] | None) -> tuple[list[Any], Any]:
        """The squared norms for each parameter, and an upper bound of their sum that holds despite rounding."""
        if self.transform is not None and grads is not None:
            squares = [square_of(grad) for grad in grads]
            return squares, rounded_up(total_square(squares, kept.values))
        if self.sums or self.keeps_norms or self.nan_safe:
            return [each.square for each in kept.squares], kept.bound
        return [], jnp.zeros(kept.values.shape[:1], jnp.float32)

    def _norms(self, squares: list[Any], square: Any, is_finite: Any) -> list[Any]:
        """The norms to keep, if any."""
        if not self.keeps_norms:
            return []
        norms = [jnp.sqrt(each) for each in (squares if self.per_leaf else [square])]
        if self.nan_safe and not self.sums:
            return [jnp.where(is_finite, norm, jnp.zeros_like(norm)) for norm in norms]
        return norms

    def _kept_gradients(self, grads: list[Any] | None, is_finite: Any) -> list[Any]:
        """The gradients to keep, if any."""
        if not self.keeps_gradients:
            return []
        assert grads is not None
        return [_zero_rows(~is_finite, grad) for grad in grads] if self.nan_safe else grads


def _weights(bound: Any, clip_norm: Any) -> Any:
    """The factor that scales each gradient: exactly 1 where its norm is at most `clip_norm`."""
    norm = jnp.sqrt(bound)
    clip_norm = jnp.asarray(clip_norm, norm.dtype)
    is_large = norm > clip_norm
    return jnp.where(is_large, clip_norm / jnp.where(is_large, norm, 1), jnp.ones_like(norm))


def _add_weighted(grads: Sequence[Any], weights: Any, totals: Sequence[Any]) -> list[Any]:
    added = []
    for grad, total in zip(grads, totals, strict=True):
        scale = weights.reshape(-1, *[1] * (grad.ndim - 1)).astype(total.dtype)
        weighted = jnp.where(scale == 0, 0, grad.astype(total.dtype) * scale)
        added.append(total + jnp.sum(weighted, axis=0))
    return added


class PassInputs(NamedTuple):
    """The arrays that the examples of one shard are computed from."""

    consts: list[Any]
    arrays: Arrays
    clip_norm: Any
    is_padding: Any | None


@dataclasses.dataclass(frozen=True, eq=False)
class ExamplePass:
    """A loop over all examples, one microbatch at a time, for what is requested of their gradients."""

    program: ExampleProgram
    request: Request
    size: int  # of a microbatch
    keeps_batch_axis: bool = False  # whether the loss takes a batch of one example
    skips_padding: bool = True  # whether microbatches of padding alone may be skipped

    def __call__(self, executor: Executor, inputs: PassInputs) -> tuple[list[Any], list[Any]]:
        """Runs the pass.

        Memory: the kept gradients of one microbatch, its temporaries, and the sums.

        Returns:
          The sums of the clipped gradients and of the losses, in the accumulator's dtype; and arrays with one row for
          each example, in the order of the batch: the losses, the aux leaves, and the norms and gradients that are
          kept.
        """
        arrays = inputs.arrays
        rows = [*arrays.batch, *([] if inputs.is_padding is None else [inputs.is_padding])]
        wrt = [jnp.asarray(leaf) for leaf in arrays.wrt]
        invariant, tree = jax.tree.flatten((inputs.consts, wrt, arrays.keys, arrays.rest, inputs.clip_norm))

        def run(shard: Shard, invariant: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            consts, wrt, keys, rest, clip_norm = jax.tree.unflatten(tree, invariant)
            batch, padding = (rows, None) if inputs.is_padding is None else (rows[:-1], rows[-1])
            return self._run(shard, PassInputs(consts, Arrays(wrt, batch, keys, rest), clip_norm, padding))

        variables = len(wrt) if self.request.sums and self.request.transform is None else 0
        layouts = [OutputLayout(Batched(0))] * self.request.num_rows
        return executor(BatchPass(run, invariant, rows, [Batched(0)] * len(rows), layouts, variables))

    def _run(self, shard: Shard, inputs: PassInputs) -> tuple[list[Any], list[Any]]:
        if not shard.examples:
            return self._zero_sums(inputs), self._no_rows(shard, inputs)
        if self._can_be_spoilt(inputs):
            result = self._without_nonfinite(shard, inputs)
        else:
            result = self._all_microbatches(shard, inputs, None)
        if self._can_doubt:
            result = self._with_recomputed(shard, inputs, result)
        return result.sums, result.rows

    def _can_be_spoilt(self, inputs: PassInputs) -> bool:
        """True if an example that should count for nothing could make the sums NaN or infinite."""
        may_leave_out = self.request.nan_safe or inputs.is_padding is not None
        return self.request.sums and self._can_doubt and may_leave_out

    def _zero_sums(self, inputs: PassInputs) -> list[Any]:
        return [_varying_as(each, inputs.arrays.batch) for each in self.request.zero_sums()]

    @property
    def _can_doubt(self) -> bool:
        return self.request.can_doubt(self.program.forms)

    def _no_rows(self, shard: Shard, inputs: PassInputs) -> list[Any]:
        """The rows of a shard without examples, with the types of the rows of one example."""
        arrays = inputs.arrays._replace(
            batch=[jnp.zeros((1, *leaf.shape[1:]), leaf.dtype) for leaf in inputs.arrays.batch]
        )
        padding = None if inputs.is_padding is None else jnp.zeros(1, bool)
        one = inputs._replace(arrays=arrays, is_padding=padding)
        types = jax.eval_shape(
            lambda: self._all_microbatches(dataclasses.replace(shard, examples=1, runs=1), one, None).rows
        )
        return [_zeros(jax.ShapeDtypeStruct((0, *each.shape[1:]), each.dtype)) for each in types]

    def _without_nonfinite(self, shard: Shard, inputs: PassInputs) -> PassResult:
        """All examples, and again without those that are not finite, until no such example spoils the sums.

        Nearly always one turn is enough. An example is left out by putting another one in its place, with weight 0.
        """

        def attempt(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            _, is_nonfinite, before = state
            result = self._all_microbatches(shard, inputs, is_nonfinite)
            rows = [_where_rows(is_nonfinite, old, new) for old, new in zip(before.rows, result.rows, strict=True)]
            more = result.is_nonfinite & ~is_nonfinite
            doubtful = result.is_doubtful & ~is_nonfinite
            return jnp.any(more), is_nonfinite | more, PassResult(result.sums, rows, more, doubtful)

        nobody = _varying_as(jnp.zeros(shard.examples, bool), inputs.arrays.batch)
        types = jax.eval_shape(lambda: self._all_microbatches(shard, inputs, nobody))
        start = jax.tree.map(lambda each: _varying_as(_zeros(each), inputs.arrays.batch), types)
        again = _varying_as(jnp.asarray(True), inputs.arrays.batch)
        _, is_nonfinite, result = lax.while_loop(lambda state: state[0], attempt, (again, nobody, start))
        return result._replace(is_nonfinite=is_nonfinite)

    def _with_recomputed(self, shard: Shard, inputs: PassInputs, result: PassResult) -> PassResult:
        """Recomputes some examples from their gradients, one after the other, and adds them to the sums.

        These are the examples whose norms are doubtful, and those that are not finite: squares of factors may overflow
        where gradients do not. Nearly always there are none, and a loop of no turns does not touch the sums.

        If no example was finite, none could stand in for the others, and the sums are spoilt. They are set to 0 first.
        """
        by_gradient = dataclasses.replace(self, program=dataclasses.replace(self.program, method="vmap"), size=1)
        num_outputs = len(self.program.loss.out_avals)
        is_left = _and_not(result.is_doubtful | result.is_nonfinite, inputs.is_padding)
        order = jnp.argsort(~is_left, stable=True)
        can_be_spoilt = self._can_be_spoilt(inputs)
        is_spoilt = jnp.all(_or(result.is_nonfinite, inputs.is_padding)) if can_be_spoilt else jnp.asarray(False)
        is_spoilt = _varying_as(is_spoilt, inputs.arrays.batch)
        num_resets = is_spoilt.astype(jnp.int32)  # 0 or 1: the turn before the first example
        num_turns = jnp.sum(is_left, dtype=jnp.int32) + num_resets

        def add_example(state: tuple[Any, list[Any], list[Any]]) -> tuple[Any, list[Any], list[Any]]:
            turn, sums, rows = state
            index = order[turn - num_resets]
            one = by_gradient._microbatch(shard, inputs, 1, _Single(index), sums, None)
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

    def _all_microbatches(self, shard: Shard, inputs: PassInputs, is_nonfinite: Any | None) -> PassResult:
        """All examples of a shard, without those that are known not to be finite."""
        microbatches = Microbatches(shard.examples, max(1, min(self.size, shard.examples)), shard.runs)
        skips = inputs.is_padding is not None and self.skips_padding

        def step(sums: list[Any], start: Any, size: int) -> tuple[list[Any], PassResult]:
            run = functools.partial(self._microbatch, shard, inputs, size, start, is_nonfinite=is_nonfinite)
            is_last = size == microbatches.remainder
            result = self._unless_padding(shard, inputs, microbatches, run, sums) if skips and is_last else run(sums)
            return result.sums, result._replace(sums=[])

        sums = self._zero_sums(inputs)
        if microbatches.number == 1 and not skips:
            sums, result = step(sums, 0, shard.examples)
            return result._replace(sums=sums)
        scan = functools.partial(self._scan_without_padding, shard, inputs, microbatches) if skips else lax.scan
        sums, stacked, last = over_microbatches(microbatches, step, sums, scan=scan)
        leaves, tree = jax.tree.flatten(stacked)
        ends = [None] * len(leaves) if last is None else jax.tree.leaves(last)
        output = Output(Kind.ROWS)
        joined = [output.join(rows, end, microbatches) for rows, end in zip(leaves, ends, strict=True)]
        return jax.tree.unflatten(tree, joined)._replace(sums=sums)

    def _scan_without_padding(
        self,
        shard: Shard,
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
        padding = inputs.is_padding.reshape(shard.runs, -1)[:, : length * microbatches.step]
        is_padding = padding.reshape(shard.runs, length, microbatches.step).all(axis=(0, 2))
        order, num_turns = jnp.argsort(is_padding, stable=True).astype(jnp.int32), jnp.sum(~is_padding)
        types = jax.eval_shape(turn, state, None)[1]
        rows = jax.tree.map(
            lambda each: _varying_as(
                _zeros(jax.ShapeDtypeStruct((length, *each.shape), each.dtype)), inputs.arrays.batch
            ),
            types,
        )

        def of_number(state: tuple[Any, list[Any], Any]) -> tuple[Any, list[Any], Any]:
            number, sums, rows = state
            which = order[number]
            (_, sums), new_rows = turn((first_row + which * microbatches.step, sums), None)
            return number + 1, sums, jax.tree.map(lambda old, new: old.at[which].set(new), rows, new_rows)

        begin = (jnp.zeros_like(num_turns), sums, rows)
        _, sums, rows = lax.while_loop(lambda state: state[0] < num_turns, of_number, begin)
        return (first_row, sums), rows

    def _unless_padding(
        self,
        shard: Shard,
        inputs: PassInputs,
        microbatches: Microbatches,
        run: Callable[[list[Any]], PassResult],
        sums: list[Any],
    ) -> PassResult:
        """The smaller last microbatch, unless it is all padding."""
        types = jax.eval_shape(run, sums)

        def skip(sums: list[Any]) -> PassResult:
            return jax.tree.map(lambda each: _varying_as(_zeros(each), inputs.arrays.batch), types)._replace(sums=sums)

        (is_padding,) = slice_examples([inputs.is_padding], microbatches.last_start, microbatches.remainder, shard.runs)
        return lax.cond(jnp.all(is_padding), skip, run, sums)

    def _microbatch(
        self,
        shard: Shard,
        inputs: PassInputs,
        size: int,
        start: "_Single | Any",
        sums: list[Any],
        is_nonfinite: Any | None,
    ) -> PassResult:
        """One microbatch: the sums with its examples added, and their rows."""
        arrays, padding = inputs.arrays, inputs.is_padding
        indices = jnp.arange(shard.examples, dtype=jnp.int32)
        marks = [mark for mark in (padding, is_nonfinite) if mark is not None]
        if isinstance(start, _Single):
            taken = [lax.dynamic_slice_in_dim(leaf, start.index, 1) for leaf in [*arrays.batch, indices, *marks]]
        else:
            taken = slice_examples([*arrays.batch, indices, *marks], start, size, shard.runs)
        batch, (index, *taken_marks) = taken[: len(arrays.batch)], taken[len(arrays.batch) :]
        is_padding = None if padding is None else taken_marks[0]
        is_replaced = None if is_nonfinite is None else taken_marks[-1]
        if is_replaced is not None:
            good = jnp.argmin(_or(is_nonfinite, padding))
            index = jnp.where(is_replaced, good.astype(index.dtype), index)
            batch = [
                _where_rows(is_replaced, lax.dynamic_slice_in_dim(leaf, good, 1), rows)
                for leaf, rows in zip(arrays.batch, batch, strict=True)
            ]
        keys = [jax.vmap(functools.partial(jax.random.fold_in, key))(shard.first + index) for key in arrays.keys]
        batch = [leaf[:, None] for leaf in batch] if self.keeps_batch_axis else batch
        kept = self.program(inputs.consts, arrays._replace(batch=batch, keys=keys))
        return self.request.results(kept, inputs.clip_norm, is_padding, is_replaced, sums)


class _Single(NamedTuple):
    """The index of one example in its shard, to be computed alone."""

    index: Any


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


def _varying_as(array: Any, batch: Sequence[Any]) -> Any:
    """An array that varies over the same mesh axes as the batch, as the carry of a loop in a `shard_map` must."""
    varying = frozenset().union(*(avals.varying_axes(jax.typeof(leaf)) for leaf in batch))
    missing = tuple(varying - avals.varying_axes(jax.typeof(array)))
    return lax.pcast(array, missing, to="varying") if missing else array


def _or(mark: Any, other: Any | None) -> Any:
    return mark if other is None else mark | other


def _and_not(mark: Any, other: Any | None) -> Any:
    return mark if other is None else mark & ~other
