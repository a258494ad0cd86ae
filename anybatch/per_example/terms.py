"""The dtypes in which numbers of narrower or different ones are added up, whatever promotion JAX is told to allow.

What the gradient of one example with respect to one parameter is made of: products, looked-up rows, plain values.

Walks back from the gradient of one example to the operations that make it.

What is not recognised is a value like any other, computed as the program has it: whether the answer is right does not
depend on what is recognised, only what it costs.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.jaxprs import interpreter
from anybatch.jaxprs.chosen_values import Body, Source
from anybatch.jaxprs.primitives import SCATTER_ADD


def common(*dtypes: Any) -> Any:
    """The dtype that holds numbers of all of these."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def wide(*dtypes: Any) -> Any:
    """The same, and float32 at least."""
    return common(jnp.float32, *dtypes)


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation that moves the entries of an array and changes none; of several arrays, below `lifts` axes."""

    equation: Any
    lifts: int = 0

    def __call__(self, array: Any) -> Any:
        def move(array: Any) -> Any:
            params = self.equation.params
            if self.equation.primitive.name in CASTS:
                return array  # sums are wide, whatever the dtype of the terms
            return interpreter.evaluate(self.equation, [array], params)[0]

        for _ in range(self.lifts):
            move = jax.vmap(move)
        return move(array)


CASTS = ("convert_element_type", "copy", "copy_p", "sharding_constraint", "sharding_hint")


@dataclasses.dataclass(frozen=True)
class LinearPath:
    """From a term as it is computed to the parameter that it belongs to."""

    # Where each axis of the parameter is in the term; None once a reshape has mixed them.
    axes: tuple[int, ...] | None
    steps: tuple[Step, ...] = ()  # in the order in which they are taken
    scale: float = 1.0  # a number that all of it is multiplied by

    def __call__(self, array: Any) -> Any:
        for step in self.steps:
            array = step(array)
        return array if self.scale == 1 else array * self.scale

    @property
    def steps_move(self) -> bool:
        """Whether it does more than cast and scale."""
        return any(step.equation.primitive.name not in CASTS for step in self.steps)

    def lifted(self) -> "LinearPath":
        """The way of a term that a loop stacks up, and whose parameter has a layer for each turn of it."""
        axes = None if self.axes is None else (0, *(axis + 1 for axis in self.axes))
        return dataclasses.replace(self, axes=axes, steps=tuple(Step(s.equation, s.lifts + 1) for s in self.steps))

    def then(self, outer: "LinearPath") -> "LinearPath":
        """First this one, then another that begins where this one ends."""
        axes = None
        if self.axes is not None and outer.axes is not None:
            axes = tuple(self.axes[axis] for axis in outer.axes)
        return LinearPath(axes, (*self.steps, *outer.steps), self.scale * outer.scale)


@dataclasses.dataclass(frozen=True)
class Factors:
    """Two arrays that are multiplied, and the way from their product to the parameter."""

    left: Source
    right: Source
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[Any, Any]
    path: LinearPath

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.left, self.right


@dataclasses.dataclass(frozen=True)
class Product(Factors):
    """`dot_general(left, right)`: a sum of outer products over the contracted axes."""

    output: Source | None  # what it makes, where that is a value of the program
    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    precision: Any

    @property
    def summands(self) -> int:
        """How many outer products are added up."""
        return math.prod(self.shapes[0][axis] for axis in self.contract[0])

    @property
    def copies(self) -> int:
        """How many such sums there are, along axes that both sides have."""
        return math.prod(self.shapes[0][axis] for axis in self.batch[0])

    @property
    def widths(self) -> tuple[int, int]:
        """The entries of a vector on the left, and of one on the right."""
        left, right = (math.prod(shape) // max(1, self.summands * self.copies) for shape in self.shapes)
        return left, right

    @property
    def product_shape(self) -> tuple[int, ...]:
        """The shape of what it makes: the copies, then what is free on the left, then on the right."""
        free = [self.shapes[side][axis] for side in (0, 1) for axis in self.free(side)]
        return (*(self.shapes[0][axis] for axis in self.batch[0]), *free)

    def free(self, side: int) -> list[int]:
        """The axes of a side that are neither contracted nor shared."""
        taken = {*self.contract[side], *self.batch[side]}
        return [axis for axis in range(len(self.shapes[side])) if axis not in taken]

    def in_loop(self, loop: Any, turns: int, *, adds_up: bool) -> "Product":
        """The same of all turns of a loop, which adds them up or stacks them."""

        def shifted(axes: tuple[tuple[int, ...], ...], more: bool) -> Any:
            return tuple((*((0,) if more else ()), *(axis + 1 for axis in side)) for side in axes)

        return dataclasses.replace(
            self,
            left=self.left.inside(loop),
            right=self.right.inside(loop),
            output=None if adds_up or self.output is None else self.output.inside(loop),
            shapes=((turns, *self.shapes[0]), (turns, *self.shapes[1])),
            contract=shifted(self.contract, adds_up),
            batch=shifted(self.batch, not adds_up),
            path=self.path if adds_up else self.path.lifted(),
        )


@dataclasses.dataclass(frozen=True)
class Convolution(Factors):
    """`conv_general_dilated(left, right)`: a product, of the windows of the left with the right."""

    params: dict[str, Any]
    made: tuple[int, ...]  # the shape of what it makes
    copies = 1

    @property
    def summands(self) -> int:
        """How many outer products are added up: the entries of the right, for each of its outputs."""
        return math.prod(self.shapes[1]) // self.outputs

    @property
    def outputs(self) -> int:
        """How many there are on the right: in the gradient of a layer, the channels that it makes."""
        return self.shapes[1][self.params["dimension_numbers"].rhs_spec[0]]

    @property
    def widths(self) -> tuple[int, int]:
        """The entries of a vector on the left, and of one on the right."""
        return math.prod(self.made) // self.outputs, self.outputs


@dataclasses.dataclass(frozen=True)
class Lookups:
    """Rows that are added to those of a table at some indices: the gradient of an embedding."""

    index: Source
    update: Source
    shape: tuple[int, ...]  # of the table
    number: int  # of indices
    dtype: Any
    clips: bool  # whether indices beyond the table mean its last row; otherwise they mean none
    path: LinearPath

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.index, self.update

    def in_loop(self, loop: Any, turns: int, *, adds_up: bool) -> "Lookups":
        """The same of all turns of a loop that adds them up."""
        assert adds_up  # rows of a stack of tables are not kept as rows
        return dataclasses.replace(
            self, index=self.index.inside(loop), update=self.update.inside(loop), number=turns * self.number
        )


@dataclasses.dataclass(frozen=True)
class Value:
    """A term that is computed as it is, for every example."""

    value: Source
    path: LinearPath

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.value,)

    def in_loop(self, loop: Any) -> "Value":
        """The same of all turns of a loop that stacks them."""
        return Value(self.value.inside(loop), self.path.lifted())


Multiplied = Product | Convolution
Term = Product | Convolution | Lookups | Value


def identity(rank: int) -> LinearPath:
    """The way of a term that is the gradient of its parameter as it is."""
    return LinearPath(tuple(range(rank)))


def with_path(terms: Sequence[Term], outer: LinearPath) -> list[Term]:
    """Terms of a value that itself has a way to go."""
    return [dataclasses.replace(term, path=term.path.then(outer)) for term in terms]


MANY = 32  # more terms than this, and their sum had better be a value
_DEEP = 64  # operations between a gradient and what makes it; Python allows for a thousand calls
_MOVES = (*CASTS, "reshape", "squeeze", "transpose", "broadcast_in_dim")


def terms_of(body: Body, variable: Any) -> list[Term]:
    """Terms whose sum is a variable of a program: as many as there are ways to see through it."""
    return _Walk(body).terms(variable)


def value_of(body: Body, variable: Any) -> Value:
    """A variable as one value, taken before its entries are cast."""
    return _Walk(body).value(variable)


@dataclasses.dataclass(frozen=True)
class _Walk:
    body: Body
    seen: dict[Any, list[Term]] = dataclasses.field(default_factory=dict)
    under_way: list[Any] = dataclasses.field(default_factory=list)

    def terms(self, variable: Any) -> list[Term]:
        if interpreter.is_literal(variable) or len(self.under_way) > _DEEP:
            return [Value(Source(variable), identity(len(variable.aval.shape)))]
        if variable not in self.seen:
            self.under_way.append(variable)
            self.seen[variable] = self._terms(variable)
            self.under_way.pop()
        return self.seen[variable]

    def _terms(self, variable: Any) -> list[Term]:
        equation = None if interpreter.is_literal(variable) else self.body.makers.get(variable)
        whole: list[Term] = [Value(Source(variable), identity(len(variable.aval.shape)))]
        if equation is None or not _is_real(variable):
            return whole
        found: list[Term] | None = None
        name = equation.primitive.name
        if name == "add_any" or name == "add":
            found = self._sum(equation)
        elif name == "dot_general" and _are_multiplied(equation):
            found = [_product(equation)]
        elif name == "conv_general_dilated" and _are_multiplied(equation):
            found = _convolution(equation)
        elif name in SCATTER_ADD:
            found = self._lookups(equation)
        elif name == "scan":
            found = self._loop(equation, equation.outvars.index(variable))
        else:
            moved = _moved(equation, variable)
            if moved is not None:
                before, path = moved
                return with_path(self.terms(before), path)
        return whole if found is None else found

    def value(self, variable: Any) -> Value:
        equation = None if interpreter.is_literal(variable) else self.body.makers.get(variable)
        whole = Value(Source(variable), identity(len(variable.aval.shape)))
        if equation is None or not _is_real(variable):
            return whole
        if equation.primitive.name == "scan":
            position, (_, num_carried) = equation.outvars.index(variable), interpreter.scan_counts(equation.params)
            if position < num_carried:
                return whole
            body = self.body.of_loop(equation)
            return _Walk(body).value(body.outputs[position]).in_loop(equation)
        moved = _moved(equation, variable)
        if moved is None or moved[1].steps_move:  # what is moved before it is kept is moved by what makes it
            return whole
        (term,) = with_path([self.value(moved[0])], moved[1])
        assert isinstance(term, Value)
        return term

    def _sum(self, equation: Any) -> list[Term] | None:
        shape = equation.outvars[0].aval.shape
        if any(interpreter.is_literal(operand) or operand.aval.shape != shape for operand in equation.invars):
            return None
        parts = [self.terms(operand) for operand in equation.invars if not self._is_zero(operand)]
        found = [term for part in parts for term in part]
        return found if 0 < len(found) <= MANY else None

    def _lookups(self, equation: Any) -> list[Term] | None:
        table, index, update = equation.invars
        numbers = equation.params["dimension_numbers"]
        shape, rank = table.aval.shape, len(index.aval.shape)
        plain = (
            tuple(numbers.inserted_window_dims) == (0,)
            and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
            and not tuple(getattr(numbers, "operand_batching_dims", ()))
            and index.aval.shape[-1] == 1
            and tuple(numbers.update_window_dims) == tuple(range(rank - 1, len(update.aval.shape)))
            and update.aval.shape[rank - 1 :] == shape[1:]
            and update.aval.dtype in _FLOATS
            and table.aval.size
        )
        if not plain or interpreter.is_literal(index) or interpreter.is_literal(update):
            return None
        lookups = Lookups(
            index=Source(index),
            update=Source(update),
            shape=tuple(shape),
            number=int(np.prod(index.aval.shape[:-1], dtype=np.int64)),
            dtype=update.aval.dtype,
            clips="CLIP" in str(equation.params["mode"]),
            path=identity(len(shape)),
        )
        return [lookups, *([] if self._is_zero(table) else self.terms(table))]

    def _loop(self, equation: Any, position: int) -> list[Term] | None:
        body, turns = self.body.of_loop(equation), equation.params["length"]
        num_consts, num_carried = interpreter.scan_counts(equation.params)
        inner = _Walk(body)
        if position >= num_carried:
            terms = inner.terms(body.outputs[position])
            if len(terms) > 1 or isinstance(terms[0], (Lookups, Convolution)):
                return None
            (term,) = terms
            if isinstance(term, Value):
                return [term.in_loop(equation)]
            assert isinstance(term, Product)
            return [term.in_loop(equation, turns, adds_up=False)]
        # What a loop carries on and only adds to: the gradient of what every turn uses alike.
        before = body.inputs[num_consts + position]
        terms = inner.terms(body.outputs[position])
        carried = [term for term in terms if isinstance(term, Value) and term.value == Source(before)]
        added = [term for term in terms if term not in carried]
        is_sum = len(carried) == 1 and carried[0].path == identity(len(before.aval.shape)) and added
        only_factors = [term for term in added if isinstance(term, (Product, Lookups))]
        if not is_sum or len(only_factors) < len(added):
            return None
        if _uses(body, before) != 1:
            return None
        start = equation.invars[num_consts + position]
        lifted = [term.in_loop(equation, turns, adds_up=True) for term in only_factors]
        return [*lifted, *([] if self._is_zero(start) else self.terms(start))]

    def _is_zero(self, variable: Any, depth: int = 4) -> bool:
        if interpreter.is_literal(variable):
            return bool(np.all(np.asarray(variable.val) == 0))
        equation = self.body.makers.get(variable)
        if equation is None or not depth or equation.primitive.name not in ("broadcast_in_dim", "convert_element_type"):
            return False
        return self._is_zero(equation.invars[0], depth - 1)


def _are_multiplied(equation: Any) -> bool:
    """Whether both sides are of dtypes whose products and sums are known here: not of integers, not of 8 bits."""
    return all(operand.aval.dtype in _FLOATS and operand.aval.size for operand in equation.invars)


_FLOATS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)))


def _product(equation: Any) -> Product:
    left, right = equation.invars
    (left_contract, right_contract), (left_batch, right_batch) = equation.params["dimension_numbers"]
    return Product(
        left=Source(left),
        right=Source(right),
        output=Source(equation.outvars[0]),
        shapes=(tuple(left.aval.shape), tuple(right.aval.shape)),
        dtypes=(left.aval.dtype, right.aval.dtype),
        contract=(tuple(left_contract), tuple(right_contract)),
        batch=(tuple(left_batch), tuple(right_batch)),
        precision=equation.params.get("precision"),
        path=identity(len(equation.outvars[0].aval.shape)),
    )


def _convolution(equation: Any) -> list[Term] | None:
    left, right = equation.invars
    params = equation.params
    if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
        return None
    made = tuple(equation.outvars[0].aval.shape)
    return [
        Convolution(
            left=Source(left),
            right=Source(right),
            shapes=(tuple(left.aval.shape), tuple(right.aval.shape)),
            dtypes=(left.aval.dtype, right.aval.dtype),
            params=params,
            path=identity(len(made)),
            made=made,
        )
    ]


def _moved(equation: Any, variable: Any) -> tuple[Any, LinearPath] | None:
    """The variable that an equation takes its entries from, as they are or scaled, and the way from there."""
    name, rank = equation.primitive.name, len(variable.aval.shape)
    if name == "neg":
        return equation.invars[0], LinearPath(tuple(range(rank)), (), -1.0)
    if name in ("mul", "div"):
        return _scaled(equation, variable)
    if name not in _MOVES or len(equation.invars) != 1:
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
    return before, LinearPath(axes, (Step(equation),))


def _scaled(equation: Any, variable: Any) -> tuple[Any, LinearPath] | None:
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


def _is_real(variable: Any) -> bool:
    return jax.dtypes.issubdtype(variable.aval.dtype, jnp.floating)


def _uses(body: Body, variable: Any) -> int:
    in_equations = sum(operand is variable for equation in body.equations for operand in equation.invars)
    return in_equations + sum(output is variable for output in body.outputs)
