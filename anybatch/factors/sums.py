"""Weighted sums of the gradients of some examples with respect to one parameter, from what is kept of them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.factors.choice import Leaf
from anybatch.factors.squares import rows_of
from anybatch.factors.terms import Lookups, Product

_FEW = 16  # examples that are added up one by one, in one pass over them


def add_weighted(leaf: Leaf, arrays: Sequence[Any], weights: Any, start: Any) -> Any:
    """`start` and the sum of the examples' gradients, each times its weight, in the dtype of `start`.

    Args:
      leaf: what is kept.
      arrays: for its sources, with the examples along axis 0.
      weights: one for each example.
      start: in the shape of the parameter.
    """
    supply, total = iter(arrays), start
    for term in leaf.terms:
        mine = [next(supply) for _ in term.sources]
        if isinstance(term, Product):
            total = total + term.way(_product(term, mine, weights, start.dtype)).reshape(start.shape)
        elif isinstance(term, Lookups):
            total = _add_rows(term, mine, weights, total)
        else:
            total = total + term.way(_value(mine[0], weights, start.dtype)).reshape(start.shape)
    return total


def _product(term: Product, arrays: Sequence[Any], weights: Any, dtype: Any) -> Any:
    """One product for all examples: they are contracted with what is contracted anyway."""
    left, right = arrays
    if left.size <= right.size:
        left = _scaled(left, weights)
    else:
        right = _scaled(right, weights)
    common = jnp.promote_types(left.dtype, right.dtype)

    def shifted(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(axis + 1 for axis in axes)

    contract = ((0, *shifted(term.contract[0])), (0, *shifted(term.contract[1])))
    batch = (shifted(term.batch[0]), shifted(term.batch[1]))
    return lax.dot_general(
        left.astype(common),
        right.astype(common),
        (contract, batch),
        precision=term.precision,
        preferred_element_type=jnp.promote_types(common, dtype),
    ).astype(dtype)


def _scaled(array: Any, weights: Any) -> Any:
    weights = weights.reshape(-1, *[1] * (array.ndim - 1))
    return (array.astype(weights.dtype) * weights).astype(array.dtype)


def _value(array: Any, weights: Any, dtype: Any) -> Any:
    weights = weights.astype(dtype)
    if 0 < array.shape[0] <= _FEW:
        total = array[0].astype(dtype) * weights[0]
        for position in range(1, array.shape[0]):
            total = total + array[position].astype(dtype) * weights[position]
        return total
    return jnp.sum(array.astype(dtype) * weights.reshape(-1, *[1] * (array.ndim - 1)), axis=0)


def _add_rows(term: Lookups, arrays: Sequence[Any], weights: Any, total: Any) -> Any:
    index, rows = rows_of(term, *arrays)
    rows = rows.astype(total.dtype) * weights.astype(total.dtype)[:, None, None]
    rest = tuple(np.asarray(total.shape[1:], int))
    flat = rows.reshape(-1, *rest)
    return total.at[index.reshape(-1)].add(flat, mode="drop")
