"""What is asked of the gradients of examples: clipped sums, norms, or the gradients themselves."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anybatch import compat
from anybatch.factors.choice import Leaf
from anybatch.factors.gradients import Kept, add_squares, at_most
from anybatch.factors.squares import square_of
from anybatch.routes.outputs import wide_dtype

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
                each if compat.has_keys(each) else where_rows(is_padding, jnp.zeros_like(each), each) for each in rows
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
