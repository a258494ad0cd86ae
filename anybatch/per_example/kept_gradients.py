"""The gradients of one microbatch of examples: computes what is kept of them, their norms, and their weighted sums.

`ExampleProgram` maps the arrays of a microbatch to `KeptGradients`. Below it stand the weighted sums for each kind of
term; `norms.py` has the norms.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.call.arguments import Arrays
from anybatch.call.loss import TracedLoss
from anybatch.jaxprs import avals, chosen_values, tracing
from anybatch.jaxprs.chosen_values import Body, Source
from anybatch.per_example.forms import GradientForm, choose_form
from anybatch.per_example.norms import Squares, TermArrays, is_doubtful, rows_of, squares_of, sum_of
from anybatch.per_example.terms import Convolution, DirectTerm, Lookups, Product, common_dtype, identity

_LARGE = 2**16  # entries of a parameter whose sum gets a kernel of its own
_FEW_EXAMPLES = 31  # up to which XLA adds up gradients on a GPU in one kernel with what their sum is added to

# The relative error of a sum of squares, by the bytes of its dtype.
_ROUNDING = {4: 2.0**-20, 8: 2.0**-48}


@dataclasses.dataclass(frozen=True, eq=False)
class ExampleProgram:
    """The program of one example's gradient, to be run for the examples of a microbatch.

    With `method="vmap"` it is `jax.vmap(jax.grad(...))`. With `method="factored"` the equation that multiplies the
    factors of a gradient is left out, and the factors are kept instead, where that is cheaper.
    """

    loss: TracedLoss  # of one example
    method: str
    prefer: str = "cost"  # as for `choose_form`
    strict: bool = False  # if True, bounds hold even where the roundings of all factors have the same sign
    # A function of the gradient leaves of one example; what it returns takes their place. Only with method="vmap".
    transform: Callable[[list[Any]], list[Any]] | None = None
    # The loss with its big values in blocks, if they are not computed in full. It takes its cotangent, 1, as a further
    # argument, and must be differentiated with that.
    in_blocks: tracing.Traced | None = None

    @functools.cached_property
    def gradient_types(self) -> list[Any]:
        """The types of one example's gradient leaves, after `transform`."""
        types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in self.loss.types.wrt]
        return types if self.transform is None else jax.eval_shape(self.transform, types)

    @functools.cached_property
    def body(self) -> Body:
        """The program that returns the loss, aux and the gradients of one example."""
        types = [*self.loss.const_types, *jax.tree.leaves(self.loss.types)]
        return chosen_values.closed_program(self._of_example, types)

    @functools.cached_property
    def forms(self) -> list[GradientForm]:
        """The form in which the gradients of each parameter are kept."""
        types = self.gradient_types
        if self.method == "vmap":
            sources = [(Source(number), identity(len(each.shape))) for number, each in enumerate(types)]
            return [GradientForm((DirectTerm(source, path),)) for source, path in sources]
        variables = self.body.outputs[len(self.body.outputs) - len(types) :]
        return [choose_form(self.body, variable, self.prefer) for variable in variables]

    def __call__(self, consts: Sequence[Any], arrays: Arrays) -> "KeptGradients":
        """Runs the program for some examples: batch and keys have one entry for each of them along axis 0."""
        flat = [*consts, *jax.tree.leaves(arrays)]
        axes: list[int | None] = [None] * len(flat)
        first = len(consts) + len(arrays.wrt)
        axes[first : first + len(arrays.batch) + len(arrays.keys)] = [0] * (len(arrays.batch) + len(arrays.keys))
        num_outputs = len(self.loss.out_avals)
        if self.method == "vmap":
            results = jax.vmap(self._of_example, in_axes=tuple(axes))(*flat)
        else:
            wanted = [Source(output) for output in self.body.outputs[:num_outputs]]
            wanted += [source for form in self.forms for term in form.terms for source in term.sources]
            results = chosen_values.batched(self.body, axes, flat, wanted)
        supply = iter(results[num_outputs:])
        return KeptGradients(
            values=results[0],
            aux=list(results[1:num_outputs]),
            forms=self.forms,
            terms=[[(term, [next(supply) for _ in term.sources]) for term in form.terms] for form in self.forms],
            strict=self.strict,
        )

    def _of_example(self, *flat: Any) -> list[Any]:
        number = len(self.loss.const_types)
        arrays = jax.tree.unflatten(jax.tree.structure(self.loss.types), flat[number:])

        def loss(wrt: list[Any]) -> tuple[Any, list[Any]]:
            given = arrays._replace(wrt=wrt)
            if self.in_blocks is None:
                value, *aux = self.loss(flat[:number], given)
            else:
                aval = self.loss.out_avals[0]
                one = avals.zeros_of(aval, aval.dtype) + 1
                value, *aux = self.in_blocks(flat[:number], *jax.tree.leaves(given), one)
            return value, aux

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(arrays.wrt)
        return [value, *aux, *(grads if self.transform is None else self.transform(grads))]


@dataclasses.dataclass(frozen=True, eq=False)
class KeptGradients:
    """The losses and aux leaves of some examples, and their gradients in the form in which they are kept."""

    values: Any
    aux: list[Any]
    forms: list[GradientForm]  # one for each parameter
    terms: list[list[TermArrays]]  # for each parameter, the terms of its form, with the values of their sources
    strict: bool

    @functools.cached_property
    def squares(self) -> list[Squares]:
        """The squared norms for each parameter."""
        pairs = zip(self.forms, self.terms, strict=True)
        return [squares_of(form, terms, strict=self.strict) for form, terms in pairs]

    @functools.cached_property
    def square(self) -> Any:
        """The squared norms over all parameters."""
        return self._total([each.square for each in self.squares])

    def is_doubtful(self, per_leaf: bool) -> Any:
        """A boolean for each example: True if its norm may be off by more than the tolerance."""
        return is_doubtful(self.forms, self.squares, per_leaf)

    @property
    def bound(self) -> Any:
        """An upper bound of each squared norm that holds despite rounding, in a weighted sum too."""
        errors = [each.slack + each.doubt for each in self.squares]
        return self.square * (1 + _ROUNDING[jnp.dtype(self.square.dtype).itemsize]) + self._total(errors)

    def _total(self, squares: Sequence[Any]) -> Any:
        """The sum of squares, with one entry for each example even if there are no squares."""
        return sum_of([jnp.zeros(self.values.shape[:1], jnp.float32), *squares])

    def add_weighted(self, weights: Any, start: Sequence[Any]) -> list[Any]:
        """`start` plus the weighted sum of the gradients. The factors of an example with weight 0 must be finite.

        In a product of factors 0 times NaN is NaN. Direct terms of weight 0 are left out, whatever they are.
        """
        totals, both = [], Weights(weights, weights == 0)
        for terms, total in zip(self.terms, start, strict=True):
            total = _add_weighted(terms, both, total)
            if total.size >= _LARGE:
                # One after the other: otherwise XLA makes one kernel, a very slow one, of the sums of many parameters.
                both, total = lax.optimization_barrier((both, total))
            totals.append(total)
        return totals

    def gradients(self) -> list[Any]:
        """The gradients themselves, if all are kept as direct terms."""
        return [array for ((_, (array,)),) in self.terms]


# Weighted sums --------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """The weights of some examples, and which of them are 0: compared once, not in a kernel of every sum."""

    values: Any
    are_zero: Any


def _add_weighted(terms: Sequence[TermArrays], weights: Weights, start: Any) -> Any:
    """`start` plus the weighted sum of the gradients of one parameter, in the shape and dtype of `start`."""
    total = start
    for term, values in terms:
        if isinstance(term, Lookups):
            total = _add_rows(term, values, weights, total)
            continue
        if isinstance(term, Product):
            summed = _sum_of_products(term, values, weights.values, start.dtype)
        elif isinstance(term, Convolution):
            summed = _sum_of_convolutions(term, values, weights.values, start.dtype)
        else:
            summed = _sum_of_values(values[0], weights, start.dtype)
        total = total + term.path(summed).reshape(start.shape)
    return total


def _sum_of_products(term: Product, arrays: Sequence[Any], weights: Any, dtype: Any) -> Any:
    """One product for all examples, which contracts their axis too."""
    left, right = _with_weights(arrays, weights)
    narrow = common_dtype(left.dtype, right.dtype)

    def merged(array: Any, side: int) -> Any:
        """(copies, examples and summands, entries): XLA multiplies narrow numbers on the CPU in this form only."""
        axes = [*(axis + 1 for axis in term.batch[side]), 0]
        axes += [axis + 1 for axis in (*term.contract[side], *term.free(side))]
        array = jnp.transpose(array.astype(narrow), axes)
        return array.reshape(term.copies, -1, term.widths[side])

    product = lax.dot_general(
        merged(left, 0),
        merged(right, 1),
        (((1,), (1,)), ((0,), (0,))),
        precision=term.precision,
        preferred_element_type=common_dtype(narrow, dtype),
    )
    return product.astype(dtype).reshape(term.product_shape)


def _sum_of_convolutions(term: Convolution, arrays: Sequence[Any], weights: Any, dtype: Any) -> Any:
    """One convolution for all examples, which are merged into the features that it adds up over."""
    numbers, params = term.params["dimension_numbers"], dict(term.params)
    left, right = _with_weights(arrays, weights)

    def merged(array: Any, spec: Sequence[int]) -> Any:
        """(batch or output features, examples and input features, positions)."""
        first, features, *positions = (axis + 1 for axis in spec)
        array = jnp.transpose(array, [first, 0, features, *positions])
        return array.reshape(array.shape[0], -1, *array.shape[3:])

    rank = len(numbers.lhs_spec)
    plain = tuple(range(rank))
    params["dimension_numbers"] = lax.ConvDimensionNumbers(plain, plain, plain)
    output = lax.conv_general_dilated_p.bind(merged(left, numbers.lhs_spec), merged(right, numbers.rhs_spec), **params)
    return jnp.transpose(output, [int(axis) for axis in np.argsort(numbers.out_spec)]).astype(dtype)


def _with_weights(factors: Sequence[Any], weights: Any) -> tuple[Any, Any]:
    """Both factors, the smaller of them times the weights."""
    left, right = factors
    return (_scaled(left, weights), right) if left.size <= right.size else (left, _scaled(right, weights))


def _scaled(array: Any, weights: Any) -> Any:
    weights = weights.reshape(-1, *[1] * (array.ndim - 1))
    scaled = array.astype(weights.dtype) * weights
    return scaled if array.dtype == jnp.float16 else scaled.astype(array.dtype)  # in float16, small numbers become 0


def _sum_of_values(array: Any, weights: Weights, dtype: Any) -> Any:
    def total_of(array: Any, weights: Weights) -> Any:
        return jnp.sum(_times(array, weights, dtype), axis=0)

    if array.shape[0] != _FEW_EXAMPLES + 1:
        return total_of(array, weights)
    # 32 examples are common: the last one is added by itself, in the same kernel.
    first, last = ([each[part] for each in (array, *weights)] for part in (slice(-1), slice(-1, None)))
    return total_of(first[0], Weights(*first[1:])) + total_of(last[0], Weights(*last[1:]))


def _times(array: Any, weights: Weights, dtype: Any) -> Any:
    """The product of the rows and the weights; 0 where the weight is 0, even for NaN and infinities."""
    shape = (-1, *[1] * (array.ndim - 1))
    wide = common_dtype(dtype, weights.values.dtype)
    product = array.astype(wide) * weights.values.astype(wide).reshape(shape)
    return jnp.where(weights.are_zero.reshape(shape), 0, product).astype(dtype)


def _add_rows(term: Lookups, arrays: Sequence[Any], weights: Weights, total: Any) -> Any:
    index, rows = rows_of(term, *arrays)
    rows = _times(rows, weights, total.dtype)
    rest = tuple(np.asarray(total.shape[1:], int))
    flat = rows.reshape(-1, *rest)
    return total.at[index.reshape(-1)].add(flat, mode="drop")
