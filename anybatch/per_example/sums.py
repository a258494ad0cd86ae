"""Weighted sums of the gradients of some examples with respect to one parameter, from what is kept of them.

The gradients of the examples of a microbatch: what is kept of them, their norms, and weighted sums.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.call.arguments import Arrays
from anybatch.call.loss import TracedLoss
from anybatch.jaxprs import chosen_values
from anybatch.jaxprs.chosen_values import Body, Source
from anybatch.per_example.choice import Leaf, choose
from anybatch.per_example.norms import Squares, added, is_doubtful, rows_of, squares_of
from anybatch.per_example.terms import Convolution, Lookups, Product, Value, common, identity

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
            total = total + term.path(_product(term, mine, weights, start.dtype)).reshape(start.shape)
        elif isinstance(term, Convolution):
            total = total + term.path(_convolution(term, mine, weights, start.dtype)).reshape(start.shape)
        elif isinstance(term, Lookups):
            total = _add_rows(term, mine, weights, total)
        else:
            total = total + term.path(_value(mine[0], weights, start.dtype)).reshape(start.shape)
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


_LARGE = 2**16  # numbers in a parameter

# What rounding of sums may add to a clipped gradient.
_ROUNDED = {4: 2.0**-20, 8: 2.0**-48}


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleProgram:
    """The gradient of one example, as a program for many of them.

    By "vmap" it is `jax.vmap(jax.grad(...))`. If it is "factored", its program is looked into, and what a gradient is
    multiplied from is kept instead of it, where that is less.
    """

    loss: TracedLoss  # of one example
    method: str
    prefer: str = "cost"
    strict: bool = False  # whether bounds hold even where all roundings of factors point the same way

    @functools.cached_property
    def body(self) -> Body:
        """The program that gives the loss, aux and the gradients of one example."""
        types = [*self.loss.const_types, *jax.tree.leaves(self.loss.types)]
        return chosen_values.closed_program(self._of_example, types)

    @functools.cached_property
    def leaves(self) -> list[Leaf]:
        """What is kept of the gradient of each parameter."""
        wrt = self.loss.types.wrt
        if self.method == "vmap":
            return [
                Leaf(tuple(each.shape), each.dtype, (Value(Source(number), identity(len(each.shape))),))
                for number, each in enumerate(wrt)
            ]
        variables = self.body.outputs[len(self.body.outputs) - len(wrt) :]
        return [choose(self.body, variable, each, self.prefer) for variable, each in zip(variables, wrt, strict=True)]

    def __call__(self, consts: Sequence[Any], arrays: Arrays) -> "Kept":
        """What there is of some examples: batch and keys have one entry for each, along axis 0."""
        flat = [*consts, *jax.tree.leaves(arrays)]
        axes: list[int | None] = [None] * len(flat)
        first = len(consts) + len(arrays.wrt)
        axes[first : first + len(arrays.batch) + len(arrays.keys)] = [0] * (len(arrays.batch) + len(arrays.keys))
        num_outputs = len(self.loss.out_avals)
        if self.method == "vmap":
            results = jax.vmap(self._of_example, in_axes=tuple(axes))(*flat)
        else:
            wanted = [Source(output) for output in self.body.outputs[:num_outputs]]
            wanted += [source for leaf in self.leaves for source in leaf.sources]
            results = chosen_values.batched(self.body, axes, flat, wanted)
        supply = iter(results[num_outputs:])
        return Kept(
            values=results[0],
            aux=list(results[1:num_outputs]),
            leaves=self.leaves,
            strict=self.strict,
            arrays=[[next(supply) for _ in leaf.sources] for leaf in self.leaves],
        )

    def _of_example(self, *flat: Any) -> list[Any]:
        number = len(self.loss.const_types)
        arrays = jax.tree.unflatten(jax.tree.structure(self.loss.types), flat[number:])

        def loss(wrt: list[Any]) -> tuple[Any, list[Any]]:
            value, *aux = self.loss(flat[:number], arrays._replace(wrt=wrt))
            return value, aux

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(arrays.wrt)
        return [value, *aux, *grads]


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """The losses of some examples, their aux leaves, and what is kept of their gradients."""

    values: Any
    aux: list[Any]
    leaves: list[Leaf]
    arrays: list[list[Any]]
    strict: bool

    @functools.cached_property
    def squares(self) -> list[Squares]:
        """The squared norms for each parameter."""
        pairs = zip(self.leaves, self.arrays, strict=True)
        return [squares_of(leaf, mine, strict=self.strict) for leaf, mine in pairs]

    @property
    def square(self) -> Any:
        """The squared norms of the gradients."""
        return add_squares([each.square for each in self.squares], self.values)

    def is_doubtful(self, *, per_leaf: bool) -> Any:
        """For each example whether sums have cancelled so much that its norm is not to be trusted."""
        return is_doubtful(self.leaves, self.squares, per_leaf)

    @property
    def bound(self) -> Any:
        """What the squared norm of a gradient is at most, however it was rounded, in a weighted sum too."""
        return at_most(self.square) + add_squares([each.slack + each.doubt for each in self.squares], self.values)

    def add_weighted(self, weights: Any, start: Sequence[Any]) -> list[Any]:
        """`start` and the sum of the gradients, each times its weight: those of weight 0 must be finite.

        Only products of factors mind, since 0 times NaN is NaN: a gradient that is kept as it is, is left out.
        """
        totals = []
        for leaf, mine, total in zip(self.leaves, self.arrays, start, strict=True):
            total = add_weighted(leaf, mine, weights, total)
            if total.size >= _LARGE:
                # One after the other: XLA would make one kernel of the sums of many parameters, a very slow one.
                weights, total = lax.optimization_barrier((weights, total))
            totals.append(total)
        return totals

    def each(self) -> list[Any]:
        """The gradients themselves, if they are kept as they are."""
        return [mine[0] for mine in self.arrays]


def at_most(square: Any) -> Any:
    """What a sum of squares can have been before it was rounded."""
    return square * (1 + _ROUNDED[jnp.dtype(square.dtype).itemsize])


def add_squares(squares: Sequence[Any], values: Any) -> Any:
    """Their sum, for as many examples as there are values."""
    return added([jnp.zeros(values.shape[:1], jnp.float32), *squares])
