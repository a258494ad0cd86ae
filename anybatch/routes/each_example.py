"""Example by example: the gradients of a microbatch at a time, clipped and summed, or kept one by one."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anybatch import compat
from anybatch.arguments import Arrays
from anybatch.batch import Cut, first_start, join_rows, take
from anybatch.factors.gradients import Kept, Program, add_squares
from anybatch.factors.squares import square_of
from anybatch.reading.states import Rows
from anybatch.routes.outputs import wide_dtype
from anybatch.routes.parts import Give, Part, Place, Work

Transform = Callable[[list[Any]], list[Any]]  # of the gradient leaves of one example


@dataclasses.dataclass(frozen=True, eq=False)
class EachExample:
    """What to do with the gradient of every example."""

    program: Program
    size: int  # of the microbatches
    accumulator_dtype: Any
    sums: bool  # whether they are clipped and summed
    keeps_gradients: bool = False
    keeps_norms: bool = False
    per_leaf: bool = False  # whether there is a norm for each parameter
    nan_safe: bool = True
    keeps_batch_axis: bool = False  # whether the loss of one example is that of a batch of one
    transform: Transform | None = None
    skips_padding: bool = True  # where nothing stands against it

    @functools.cached_property
    def transformed(self) -> list[Any]:
        """The types of what is summed or kept of one example."""
        wrt = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self.program.loss.types.wrt]
        return wrt if self.transform is None else jax.eval_shape(self.transform, wrt)

    def __call__(
        self, place: Place, consts: Sequence[Any], arrays: Arrays, clip_norm: Any, is_padding: Any | None
    ) -> tuple[list[Any], list[Any]]:
        """The sums, wide: the clipped gradients and the losses; and rows of all examples, in the order of the batch.

        The rows are the losses, the norms, aux and the gradients, as far as they are kept.

        Memory: what is kept of the gradients of one microbatch, its temporaries, and the sums.
        """
        wrt = [jnp.asarray(leaf) for leaf in arrays.wrt]
        whole, tree = jax.tree.flatten((wrt, list(consts), arrays.keys, arrays.rest, clip_norm))
        rows = [*arrays.batch, *([] if is_padding is None else [is_padding])]

        def over(part: Part, whole: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            wrt, consts, keys, rest, clip_norm = jax.tree.unflatten(tree, whole)
            batch, padding = (rows, None) if is_padding is None else (rows[:-1], rows[-1])
            own = Arrays(wrt, batch, keys, rest)
            return self._over_microbatches(part, consts, own, clip_norm, padding)

        takes, variables = [Rows(0)] * len(rows), 0
        if self.sums and self.transform is None:
            variables = len(wrt)
        gives = [Give(Rows(0))] * self.num_rows
        return place(Work(over, whole, rows, takes, gives, variables))

    @property
    def num_norms(self) -> int:
        """How many norms are kept of an example."""
        return (len(self.transformed) if self.per_leaf else 1) if self.keeps_norms else 0

    @property
    def num_rows(self) -> int:
        """How many arrays with rows of the examples there are."""
        kept = len(self.transformed) if self.keeps_gradients else 0
        return len(self.program.loss.out_avals) + self.num_norms + kept

    def _over_microbatches(
        self, part: Part, consts: list[Any], arrays: Arrays, clip_norm: Any, padding: Any
    ) -> tuple[list[Any], list[Any]]:
        cut = Cut(part.examples, max(1, min(self.size, part.examples)), part.runs)
        numbers = jnp.arange(part.examples, dtype=jnp.int32)
        cuttable = [*arrays.batch, numbers, *([] if padding is None else [padding])]

        def microbatch(size: int, row: Any, sums: list[Any]) -> tuple[list[Any], list[Any]]:
            mine = take(cuttable, row, size, part.runs)
            batch, number = mine[: len(arrays.batch)], mine[len(arrays.batch)]
            is_padding = mine[-1] if padding is not None else None
            keys = [jax.vmap(functools.partial(jax.random.fold_in, key))(part.first + number) for key in arrays.keys]
            batch = [leaf[:, None] for leaf in batch] if self.keeps_batch_axis else batch
            own = arrays._replace(batch=batch, keys=keys)

            def run(sums: list[Any]) -> tuple[list[Any], list[Any]]:
                return self._examples(self.program(consts, own), clip_norm, is_padding, sums)

            if is_padding is None or not self.skips_padding:
                return run(sums)
            types = jax.eval_shape(run, sums)[1]

            def skip(sums: list[Any]) -> tuple[list[Any], list[Any]]:
                return sums, [_zeros(each) for each in types]

            return lax.cond(jnp.all(is_padding), skip, run, sums)

        sums, last = self._start(arrays), None
        if cut.remainder:  # first, so that its results are where the sums start
            with jax.named_scope("anybatch_last_microbatch"):
                sums, last = microbatch(cut.remainder, cut.last_start, sums)
        first_row, sums = first_start(cut, sums)

        def step(carry: Any, _: None) -> tuple[Any, list[Any]]:
            row, sums = carry
            with jax.named_scope("anybatch_microbatch"):
                sums, rows = microbatch(cut.size, row, sums)
            return (row + cut.step, sums), rows

        if cut.whole == 1 and last is None:
            sums, rows = microbatch(cut.size, 0, sums)
            return sums, rows
        if not cut.whole:
            if last is not None:
                return sums, last
            types = jax.eval_shape(lambda sums: microbatch(0, 0, sums)[1], sums)
            return sums, [_zeros(each) for each in types]
        (_, sums), stacked = lax.scan(step, (first_row, sums), length=cut.whole)
        ends = [None] * len(stacked) if last is None else last
        return sums, [join_rows(rows, end, 0, part.runs) for rows, end in zip(stacked, ends, strict=True)]

    def _examples(self, kept: Kept, clip_norm: Any, is_padding: Any, sums: list[Any]) -> tuple[list[Any], list[Any]]:
        """One microbatch: the sums with its own added, and its rows."""
        rows = [kept.values, *kept.aux]
        grads = None
        if self.transform is not None:
            grads = jax.vmap(self.transform)(kept.each())
        elif self.keeps_gradients:
            grads = kept.each()
        if grads is None or self.transform is None:
            squares, bound = [each.square for each in kept.squares], kept.bound
        else:
            squares = [square_of(grad) for grad in grads]
            bound = add_squares(squares, kept.values) * (1 + 2.0**-20)
        square = add_squares(squares, kept.values)
        if self.keeps_norms:
            norms = [jnp.sqrt(each) for each in (squares if self.per_leaf else [square])]
            if self.nan_safe and not self.sums:
                norms = [jnp.where(jnp.isfinite(square), norm, jnp.zeros_like(norm)) for norm in norms]
            rows += [norm if is_padding is None else jnp.where(is_padding, 0, norm) for norm in norms]
        if self.sums:
            weights, is_good = self._weights(square, bound, clip_norm, is_padding)
            *totals, value = sums
            if grads is None:
                totals = kept.add_weighted(weights, totals, is_good)
            else:
                totals = _add_plainly(grads, weights, totals, is_good)
            values = kept.values.astype(value.dtype)
            if is_padding is not None:
                values = jnp.where(is_padding, jnp.zeros_like(values), values)
            sums = [*totals, value + jnp.sum(values)]
        if self.keeps_gradients:
            assert grads is not None
            if self.nan_safe:
                grads = [_where(jnp.isfinite(square), grad) for grad in grads]
            rows += [grad if is_padding is None else _where(~is_padding, grad) for grad in grads]
        return sums, rows

    def _weights(self, square: Any, bound: Any, clip_norm: Any, is_padding: Any) -> tuple[Any, Any]:
        """By how much each gradient is scaled; and which of them count at all, if there may be others."""
        norm = jnp.sqrt(bound)
        clip_norm = jnp.asarray(clip_norm, norm.dtype)
        # Where the norm is 0 or below the bound, exactly 1.
        weights = jnp.where(norm > clip_norm, clip_norm / jnp.where(norm > clip_norm, norm, 1), jnp.ones_like(norm))
        is_good = None
        if self.nan_safe:
            is_good = jnp.isfinite(square)
        if is_padding is not None:
            is_good = ~is_padding if is_good is None else is_good & ~is_padding
        if is_good is not None:
            weights = jnp.where(is_good, weights, 0)
        return weights, is_good

    def _start(self, arrays: Arrays) -> list[Any]:
        """Sums of nothing."""
        if not self.sums:
            return []
        varying = frozenset().union(*(compat.varying_axes(jax.typeof(leaf)) for leaf in arrays.batch))
        types = [*self.transformed, jax.ShapeDtypeStruct((), self.program.loss.out_avals[0].dtype)]
        wide = [*[self.accumulator_dtype] * len(self.transformed), jnp.float32]
        zeros = [jnp.zeros(each.shape, wide_dtype(each.dtype, dtype)) for each, dtype in zip(types, wide, strict=True)]
        return [lax.pcast(each, tuple(varying), to="varying") for each in zeros] if varying else zeros


def _zeros(aval: Any) -> Any:
    if compat.has_keys(aval):
        data = jax.eval_shape(jax.random.key_data, aval)
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=compat.key_impl(aval.dtype))
    return jnp.zeros(aval.shape, aval.dtype)


def _where(is_good: Any, array: Any) -> Any:
    return jnp.where(is_good.reshape(-1, *[1] * (array.ndim - 1)), array, jnp.zeros_like(array))


def _add_plainly(grads: Sequence[Any], weights: Any, totals: Sequence[Any], is_good: Any) -> list[Any]:
    added = []
    for grad, total in zip(grads, totals, strict=True):
        grad = grad if is_good is None else _where(is_good, grad)
        scale = weights.reshape(-1, *[1] * (grad.ndim - 1)).astype(total.dtype)
        added.append(total + jnp.sum(grad.astype(total.dtype) * scale, axis=0))
    return added
