"""Weighted sums of the gradients of some examples with respect to one parameter, from what is kept of them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.factors.choice import Leaf
from anybatch.factors.dtypes import common
from anybatch.factors.squares import rows_of
from anybatch.factors.terms import Convolution, Lookups, Product

_FEW = 32  # examples that are added up one by one, in one pass over them


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
        elif isinstance(term, Convolution):
            total = total + term.way(_convolution(term, mine, weights, start.dtype)).reshape(start.shape)
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
    narrow = common(left.dtype, right.dtype)

    def merged(array: Any, side: int) -> Any:
        """(copies, examples and summands, entries): XLA on the CPU multiplies narrow numbers in this form only."""
        axes = [*(axis + 1 for axis in term.batch[side]), 0]
        axes += [axis + 1 for axis in (*term.contract[side], *term.free(side))]
        array = jnp.transpose(array.astype(narrow), axes)
        return array.reshape(term.copies, -1, term.widths[side])

    product = lax.dot_general(
        merged(left, 0),
        merged(right, 1),
        (((1,), (1,)), ((0,), (0,))),
        precision=term.precision,
        preferred_element_type=common(narrow, dtype),
    )
    return product.astype(dtype).reshape(term.product_shape)


def _convolution(term: Convolution, arrays: Sequence[Any], weights: Any, dtype: Any) -> Any:
    """One convolution for all examples: they are more of the features that it adds up over."""
    numbers, params = term.params["dimension_numbers"], dict(term.params)
    left, right = arrays
    if left.size <= right.size:
        left = _scaled(left, weights)
    else:
        right = _scaled(right, weights)

    def merged(array: Any, spec: Sequence[int]) -> Any:
        """(batch or outputs, examples and features, places)."""
        first, features, *places = (axis + 1 for axis in spec)
        array = jnp.transpose(array, [first, 0, features, *places])
        return array.reshape(array.shape[0], -1, *array.shape[3:])

    rank = len(numbers.lhs_spec)
    plain = tuple(range(rank))
    params["dimension_numbers"] = lax.ConvDimensionNumbers(plain, plain, plain)
    made = lax.conv_general_dilated_p.bind(merged(left, numbers.lhs_spec), merged(right, numbers.rhs_spec), **params)
    return jnp.transpose(made, [int(axis) for axis in np.argsort(numbers.out_spec)]).astype(dtype)


def _scaled(array: Any, weights: Any) -> Any:
    weights = weights.reshape(-1, *[1] * (array.ndim - 1))
    scaled = array.astype(weights.dtype) * weights
    return scaled if array.dtype == jnp.float16 else scaled.astype(array.dtype)  # float16 has no small numbers


def _value(array: Any, weights: Any, dtype: Any) -> Any:
    weights = weights.astype(dtype)
    if 0 < array.shape[0] <= _FEW:
        total = _times(array[0], weights[0], dtype)
        for position in range(1, array.shape[0]):
            total = total + _times(array[position], weights[position], dtype)
        return total
    return jnp.sum(_times(array, weights.reshape(-1, *[1] * (array.ndim - 1)), dtype), axis=0)


def _times(array: Any, weights: Any, dtype: Any) -> Any:
    """The product, 0 where the weight is: whatever was to be weighed."""
    return jnp.where(weights == 0, 0, array.astype(dtype) * weights)


def _add_rows(term: Lookups, arrays: Sequence[Any], weights: Any, total: Any) -> Any:
    index, rows = rows_of(term, *arrays)
    rows = _times(rows, weights.astype(total.dtype)[:, None, None], total.dtype)
    rest = tuple(np.asarray(total.shape[1:], int))
    flat = rows.reshape(-1, *rest)
    return total.at[index.reshape(-1)].add(flat, mode="drop")
