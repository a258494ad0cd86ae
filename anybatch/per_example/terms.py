"""Writes the gradient of one example with respect to one parameter as a sum of terms.

`Recognizer` starts at the gradient in the program of one example and walks back through the equations that make it. It
recognises four kinds of terms: `Product` (a `dot_general`), `Convolution`, `Lookups` (rows scattered into a table) and
`DirectTerm`, which is any other value of the program. A `LinearPath` leads from each term to the parameter.

An equation that is not recognised makes a `DirectTerm`, which is computed as the program says. So recognition decides
what a result costs, and never whether it is right.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.jaxprs import interpreter
from anybatch.jaxprs.chosen_values import Body, Source
from anybatch.jaxprs.primitives import SCATTER_ADD

CASTS = ("convert_element_type", "copy", "copy_p", "sharding_constraint", "sharding_hint")
_REARRANGEMENTS = (*CASTS, "reshape", "squeeze", "transpose", "broadcast_in_dim")
_FLOATS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)))

MOST_TERMS = 32  # a sum of more terms is kept as one direct term
_MOST_EQUATIONS = 64  # followed from a gradient back to a term; Python allows about a thousand nested calls


@dataclasses.dataclass(frozen=True)
class LinearPath:
    """The linear function that maps a term, as it is computed, to the shape of the parameter."""

    # For each axis of the parameter, the axis of the term that it comes from; None once a reshape has mixed them.
    axes: tuple[int, ...] | None
    # The equations that cast or rearrange its entries, in order. Each is mapped over a number of leading axes: the
    # iterations of the scans around it.
    rearrangements: tuple[tuple[Any, int], ...] = ()
    scale: float = 1.0  # applied last

    def __call__(self, array: Any) -> Any:
        for equation, num_mapped_axes in self.rearrangements:
            if equation.primitive.name in CASTS:
                continue  # sums stay in their wide dtype, whatever the dtype of the terms
            rearrange: Any = functools.partial(_evaluate, equation)
            for _ in range(num_mapped_axes):
                rearrange = jax.vmap(rearrange)
            array = rearrange(array)
        return array if self.scale == 1 else array * self.scale

    @property
    def rearranges(self) -> bool:
        """True if it does more than cast and scale."""
        return any(equation.primitive.name not in CASTS for equation, _ in self.rearrangements)

    def stacked(self) -> "LinearPath":
        """The path of the terms that a scan stacks, to a parameter with one layer for each iteration."""
        axes = None if self.axes is None else (0, *(axis + 1 for axis in self.axes))
        mapped = tuple((equation, number + 1) for equation, number in self.rearrangements)
        return dataclasses.replace(self, axes=axes, rearrangements=mapped)

    def then(self, outer: "LinearPath") -> "LinearPath":
        axes = None
        if self.axes is not None and outer.axes is not None:
            axes = tuple(self.axes[axis] for axis in outer.axes)
        return LinearPath(axes, (*self.rearrangements, *outer.rearrangements), self.scale * outer.scale)


def _evaluate(equation: Any, array: Any) -> Any:
    return interpreter.evaluate(equation, [array], equation.params)[0]


def identity(rank: int) -> LinearPath:
    """The path of a term that already has the shape of its parameter."""
    return LinearPath(tuple(range(rank)))


# The terms ------------------------------------------------------------------------------------------------------------


def shape_of(source: Source) -> tuple[int, ...]:
    """The shape of a value of the program of one example, with the iterations of its scans along the leading axes."""
    return (*(loop.params["length"] for loop in source.loops), *source.variable.aval.shape)


@dataclasses.dataclass(frozen=True)
class Factors:
    """Two arrays whose product is a term, and the path from their product to the parameter."""

    left: Source
    right: Source
    path: LinearPath

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.left, self.right

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return shape_of(self.left), shape_of(self.right)

    @property
    def dtypes(self) -> tuple[Any, Any]:
        return self.left.variable.aval.dtype, self.right.variable.aval.dtype


@dataclasses.dataclass(frozen=True)
class Product(Factors):
    """`dot_general(left, right)`: a sum of outer products over the contracted axes."""

    output: Source | None  # the product, if it is a value of the program
    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    precision: Any

    @property
    def summands(self) -> int:
        """The number of outer products in a sum."""
        return math.prod(self.shapes[0][axis] for axis in self.contract[0])

    @property
    def copies(self) -> int:
        """The number of such sums, along the batch axes that both sides share."""
        return math.prod(self.shapes[0][axis] for axis in self.batch[0])

    @property
    def widths(self) -> tuple[int, int]:
        """The lengths of the vectors on the left and on the right of an outer product."""
        left, right = (math.prod(shape) // max(1, self.summands * self.copies) for shape in self.shapes)
        return left, right

    @property
    def product_shape(self) -> tuple[int, ...]:
        """The shape of the product: the batch axes, then the free axes of the left side, then those of the right."""
        free = [self.shapes[side][axis] for side in (0, 1) for axis in self.free(side)]
        return (*(self.shapes[0][axis] for axis in self.batch[0]), *free)

    def free(self, side: int) -> list[int]:
        """The axes of a side that are neither contracted nor batch axes."""
        taken = {*self.contract[side], *self.batch[side]}
        return [axis for axis in range(len(self.shapes[side])) if axis not in taken]


@dataclasses.dataclass(frozen=True)
class Convolution(Factors):
    """`conv_general_dilated(left, right)`: a product of the windows of the left side with the right side."""

    params: dict[str, Any]
    output_shape: tuple[int, ...]
    copies = 1

    @property
    def summands(self) -> int:
        """The number of outer products that are added up: the entries of the right side for each output feature."""
        return math.prod(self.shapes[1]) // self.output_features

    @property
    def output_features(self) -> int:
        """The output features of the right side. In the gradient of a layer, these are the layer's output channels."""
        return self.shapes[1][self.params["dimension_numbers"].rhs_spec[0]]

    @property
    def widths(self) -> tuple[int, int]:
        """The lengths of the vectors on the left and on the right of an outer product."""
        return math.prod(self.output_shape) // self.output_features, self.output_features


@dataclasses.dataclass(frozen=True)
class Lookups:
    """Rows that are added to a table at some indices: the gradient of an embedding."""

    index: Source
    update: Source
    shape: tuple[int, ...]  # of the table
    clips: bool  # if True, an index outside the table means its nearest row; if False, it means no row
    path: LinearPath

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.index, self.update

    @property
    def number(self) -> int:
        return math.prod(shape_of(self.index)[:-1])


@dataclasses.dataclass(frozen=True)
class DirectTerm:
    """A term that is itself computed for every example."""

    source: Source
    path: LinearPath

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.source,)


FactoredTerm = Product | Convolution
Term = Product | Convolution | Lookups | DirectTerm


def _in_scan(term: Any, scan: Any, *, adds_up: bool) -> Any:
    """A term of one iteration of a scan, for all iterations, which the scan adds up or stacks."""
    fields = {field.name: getattr(term, field.name) for field in dataclasses.fields(term)}
    changed: dict[str, Any] = {name: value.inside(scan) for name, value in fields.items() if isinstance(value, Source)}
    if not adds_up:
        changed["path"] = term.path.stacked()
    if isinstance(term, Product):
        # The iterations are one more axis of both sides: contracted, or a batch axis.
        new = {"contract": (0,) if adds_up else (), "batch": () if adds_up else (0,)}
        for name, first in new.items():
            changed[name] = tuple((*first, *(axis + 1 for axis in side)) for side in fields[name])
        changed["output"] = None if adds_up else changed.get("output")
    return dataclasses.replace(term, **changed)


# Recognition ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Recognizer:
    """The walk from variables of a program back to the equations that make them."""

    body: Body
    known: dict[Any, list[Term]] = dataclasses.field(default_factory=dict)
    in_progress: list[Any] = dataclasses.field(default_factory=list)

    def terms(self, variable: Any) -> list[Term]:
        """Terms whose sum is a variable of a program. A variable that is not recognised is one direct term."""
        if interpreter.is_literal(variable) or len(self.in_progress) > _MOST_EQUATIONS:
            return [_as_it_is(variable)]
        if variable not in self.known:
            self.in_progress.append(variable)
            self.known[variable] = self._terms(variable) or [_as_it_is(variable)]
            self.in_progress.pop()
        return self.known[variable]

    def _terms(self, variable: Any) -> list[Term] | None:
        """The terms of a variable, by the equation that makes it; None if that is not recognised."""
        equation = self._maker(variable)
        if equation is None:
            return None
        name = equation.primitive.name
        if name in ("add_any", "add"):
            return self._sum(equation)
        if name == "dot_general" and _has_float_operands(equation):
            return [_product(equation)]
        if name == "conv_general_dilated" and _has_float_operands(equation):
            return _convolution(equation)
        if name in SCATTER_ADD:
            return self._lookups(equation)
        if name == "scan":
            return self._scan(equation, equation.outvars.index(variable))
        rearranged = _rearranged(equation, variable)
        if rearranged is None:
            return None
        before, path = rearranged
        return _with_path(self.terms(before), path)

    def direct(self, variable: Any) -> DirectTerm:
        """A variable as one direct term, taken before casts and scales, in the dtype in which it is computed."""
        equation = self._maker(variable)
        if equation is None:
            return _as_it_is(variable)
        if equation.primitive.name == "scan":
            position, (_, num_carried) = equation.outvars.index(variable), interpreter.scan_counts(equation.params)
            if position < num_carried:
                return _as_it_is(variable)
            body = self.body.of_loop(equation)
            return _in_scan(Recognizer(body).direct(body.outputs[position]), equation, adds_up=False)
        rearranged = _rearranged(equation, variable)
        if rearranged is None or rearranged[1].rearranges:  # only casts and scales can wait until terms are summed
            return _as_it_is(variable)
        (term,) = _with_path([self.direct(rearranged[0])], rearranged[1])
        assert isinstance(term, DirectTerm)
        return term

    def _maker(self, variable: Any) -> Any | None:
        """The equation that makes a variable of real numbers; None for inputs, literals and other dtypes."""
        if interpreter.is_literal(variable) or not jax.dtypes.issubdtype(variable.aval.dtype, jnp.floating):
            return None
        return self.body.makers.get(variable)

    def _sum(self, equation: Any) -> list[Term] | None:
        shape = equation.outvars[0].aval.shape
        if any(interpreter.is_literal(operand) or operand.aval.shape != shape for operand in equation.invars):
            return None
        terms = [term for operand in equation.invars if not self._is_zero(operand) for term in self.terms(operand)]
        return terms if 0 < len(terms) <= MOST_TERMS else None

    def _lookups(self, equation: Any) -> list[Term] | None:
        table, index, update = equation.invars
        if interpreter.is_literal(index) or interpreter.is_literal(update) or not _scatters_rows(equation):
            return None
        lookups = Lookups(
            index=Source(index),
            update=Source(update),
            shape=tuple(table.aval.shape),
            clips="CLIP" in str(equation.params["mode"]),
            path=identity(len(table.aval.shape)),
        )
        return [lookups, *([] if self._is_zero(table) else self.terms(table))]

    def _scan(self, equation: Any, position: int) -> list[Term] | None:
        """The terms of one output of a scan: a value that it carries, or one that it stacks."""
        _, num_carried = interpreter.scan_counts(equation.params)
        if position < num_carried:
            return self._carried(equation, position)
        body = self.body.of_loop(equation)
        terms = Recognizer(body).terms(body.outputs[position])
        if len(terms) > 1 or isinstance(terms[0], (Lookups, Convolution)):
            return None
        return [_in_scan(terms[0], equation, adds_up=False)]

    def _carried(self, equation: Any, position: int) -> list[Term] | None:
        """The terms of a carried value that the scan only adds to: the gradient of a value all iterations share."""
        body = self.body.of_loop(equation)
        num_consts, _ = interpreter.scan_counts(equation.params)
        before = body.inputs[num_consts + position]
        terms = Recognizer(body).terms(body.outputs[position])
        carried = [term for term in terms if isinstance(term, DirectTerm) and term.source == Source(before)]
        added = [term for term in terms if term not in carried]
        is_sum = len(carried) == 1 and carried[0].path == identity(len(before.aval.shape)) and added
        factored = [term for term in added if isinstance(term, (Product, Lookups))]
        if not is_sum or len(factored) < len(added) or _num_uses(body, before) != 1:
            return None
        start = equation.invars[num_consts + position]
        of_all_iterations = [_in_scan(term, equation, adds_up=True) for term in factored]
        return [*of_all_iterations, *([] if self._is_zero(start) else self.terms(start))]

    def _is_zero(self, variable: Any, depth: int = 4) -> bool:
        if interpreter.is_literal(variable):
            return bool(np.all(np.asarray(variable.val) == 0))
        equation = self.body.makers.get(variable)
        if equation is None or not depth or equation.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
            return False
        return self._is_zero(equation.invars[0], depth - 1)


def _as_it_is(variable: Any) -> DirectTerm:
    return DirectTerm(Source(variable), identity(len(variable.aval.shape)))


def _with_path(terms: Sequence[Term], outer: LinearPath) -> list[Term]:
    """The terms of a value, with the path from that value on appended to theirs."""
    return [dataclasses.replace(term, path=term.path.then(outer)) for term in terms]


def _has_float_operands(equation: Any) -> bool:
    """True if norms and sums can be computed from the operands: floats of 16 bits or more, and not empty."""
    return all(operand.aval.dtype in _FLOATS and operand.aval.size for operand in equation.invars)


def _product(equation: Any) -> Product:
    left, right = equation.invars
    (left_contract, right_contract), (left_batch, right_batch) = equation.params["dimension_numbers"]
    return Product(
        left=Source(left),
        right=Source(right),
        output=Source(equation.outvars[0]),
        contract=(tuple(left_contract), tuple(right_contract)),
        batch=(tuple(left_batch), tuple(right_batch)),
        precision=equation.params.get("precision"),
        path=identity(len(equation.outvars[0].aval.shape)),
    )


def _convolution(equation: Any) -> list[Term] | None:
    params = equation.params
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    left, right = map(Source, equation.invars)
    shape = tuple(equation.outvars[0].aval.shape)
    return [Convolution(left=left, right=right, params=params, path=identity(len(shape)), output_shape=shape)]


def _scatters_rows(equation: Any) -> bool:
    """True if a scatter adds complete rows of floats to a table that is not empty, one for each index."""
    table, index, update = (operand.aval for operand in equation.invars)
    numbers, rank = equation.params["dimension_numbers"], len(index.shape)
    return bool(
        tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and not tuple(getattr(numbers, "operand_batching_dims", ()))
        and index.shape[-1] == 1
        and tuple(numbers.update_window_dims) == tuple(range(rank - 1, len(update.shape)))
        and update.shape[rank - 1 :] == table.shape[1:]
        and update.dtype in _FLOATS
        and table.size
    )


def _rearranged(equation: Any, variable: Any) -> tuple[Any, LinearPath] | None:
    """The variable that an equation only rearranges, casts or scales, and the path from there; None otherwise."""
    name, rank = equation.primitive.name, len(variable.aval.shape)
    if name == "neg":
        return equation.invars[0], LinearPath(tuple(range(rank)), (), -1.0)
    if name in ("mul", "div"):
        return _scaled(equation, variable)
    if name not in _REARRANGEMENTS or len(equation.invars) != 1:
        return None
    (before,) = equation.invars
    if interpreter.is_literal(before) or before.aval.size != variable.aval.size:
        return None
    if before.aval.dtype not in _FLOATS or variable.aval.dtype not in _FLOATS:  # a cast to 8 bits is meant to round
        return None
    axes: tuple[int, ...] | None = None
    if name == "transpose":
        axes = tuple(equation.params["permutation"])
    elif before.aval.shape == variable.aval.shape and name != "broadcast_in_dim":
        axes = tuple(range(rank))
    return before, LinearPath(axes, ((equation, 0),))


def _scaled(equation: Any, variable: Any) -> tuple[Any, LinearPath] | None:
    """The variable that an equation multiplies or divides by a literal number, and the path from there."""
    first, second = equation.invars
    if equation.primitive.name == "mul" and interpreter.is_literal(first):
        first, second = second, first
    if interpreter.is_literal(first) or not interpreter.is_literal(second) or first.aval.shape != variable.aval.shape:
        return None
    number = np.asarray(second.val)
    if number.shape != () or not np.isfinite(number) or number == 0:
        return None
    scale = float(number) if equation.primitive.name == "mul" else 1 / float(number)
    return first, LinearPath(tuple(range(len(variable.aval.shape))), (), scale)


def _num_uses(body: Body, variable: Any) -> int:
    in_equations = sum(operand is variable for equation in body.equations for operand in equation.invars)
    return in_equations + sum(output is variable for output in body.outputs)


# Dtypes ---------------------------------------------------------------------------------------------------------------


def common_dtype(*dtypes: Any) -> Any:
    """The dtype that holds numbers of all these dtypes, also where JAX is configured to promote none."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def sum_dtype(*dtypes: Any) -> Any:
    """The dtype in which numbers of these dtypes are added up: their common dtype, and at least float32."""
    return common_dtype(jnp.float32, *dtypes)
