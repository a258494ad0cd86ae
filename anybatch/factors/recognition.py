"""Walks back from the gradient of one example to the operations that make it.

What is not recognised is a value like any other, computed as the program has it: whether the answer is right does not
depend on what is recognised, only what it costs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch import compat
from anybatch.factors.evaluation import Body, Source
from anybatch.factors.terms import CASTS, Convolution, Lookups, Product, Step, Term, Value, Way, identity, with_way

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
        if compat.is_literal(variable) or len(self.under_way) > _DEEP:
            return [Value(Source(variable), identity(len(variable.aval.shape)))]
        if variable not in self.seen:
            self.under_way.append(variable)
            self.seen[variable] = self._terms(variable)
            self.under_way.pop()
        return self.seen[variable]

    def _terms(self, variable: Any) -> list[Term]:
        equation = None if compat.is_literal(variable) else self.body.makers.get(variable)
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
        elif name in ("scatter-add", "scatter_add"):
            found = self._lookups(equation)
        elif name == "scan":
            found = self._loop(equation, equation.outvars.index(variable))
        else:
            moved = _moved(equation, variable)
            if moved is not None:
                before, way = moved
                return with_way(self.terms(before), way)
        return whole if found is None else found

    def value(self, variable: Any) -> Value:
        equation = None if compat.is_literal(variable) else self.body.makers.get(variable)
        whole = Value(Source(variable), identity(len(variable.aval.shape)))
        if equation is None or not _is_real(variable):
            return whole
        if equation.primitive.name == "scan":
            position, (_, num_carried) = equation.outvars.index(variable), compat.scan_counts(equation.params)
            if position < num_carried:
                return whole
            body = self.body.of_loop(equation)
            return _Walk(body).value(body.outputs[position]).in_loop(equation)
        moved = _moved(equation, variable)
        if moved is None or moved[1].steps_move:  # what is moved before it is kept is moved by what makes it
            return whole
        (term,) = with_way([self.value(moved[0])], moved[1])
        assert isinstance(term, Value)
        return term

    def _sum(self, equation: Any) -> list[Term] | None:
        shape = equation.outvars[0].aval.shape
        if any(compat.is_literal(operand) or operand.aval.shape != shape for operand in equation.invars):
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
        if not plain or compat.is_literal(index) or compat.is_literal(update):
            return None
        lookups = Lookups(
            index=Source(index),
            update=Source(update),
            shape=tuple(shape),
            number=int(np.prod(index.aval.shape[:-1], dtype=np.int64)),
            dtype=update.aval.dtype,
            clips="CLIP" in str(equation.params["mode"]),
            way=identity(len(shape)),
        )
        return [lookups, *([] if self._is_zero(table) else self.terms(table))]

    def _loop(self, equation: Any, position: int) -> list[Term] | None:
        body, turns = self.body.of_loop(equation), equation.params["length"]
        num_consts, num_carried = compat.scan_counts(equation.params)
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
        is_sum = len(carried) == 1 and carried[0].way == identity(len(before.aval.shape)) and added
        only_factors = [term for term in added if isinstance(term, (Product, Lookups))]
        if not is_sum or len(only_factors) < len(added):
            return None
        if _uses(body, before) != 1:
            return None
        start = equation.invars[num_consts + position]
        lifted = [term.in_loop(equation, turns, adds_up=True) for term in only_factors]
        return [*lifted, *([] if self._is_zero(start) else self.terms(start))]

    def _is_zero(self, variable: Any, depth: int = 4) -> bool:
        if compat.is_literal(variable):
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
        way=identity(len(equation.outvars[0].aval.shape)),
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
            way=identity(len(made)),
            made=made,
        )
    ]


def _moved(equation: Any, variable: Any) -> tuple[Any, Way] | None:
    """The variable that an equation takes its entries from, as they are or scaled, and the way from there."""
    name, rank = equation.primitive.name, len(variable.aval.shape)
    if name == "neg":
        return equation.invars[0], Way(tuple(range(rank)), (), -1.0)
    if name in ("mul", "div"):
        return _scaled(equation, variable)
    if name not in _MOVES or len(equation.invars) != 1:
        return None
    (before,) = equation.invars
    if compat.is_literal(before) or before.aval.size != variable.aval.size:
        return None
    if before.aval.dtype not in _FLOATS or variable.aval.dtype not in _FLOATS:  # a cast to 8 bits is meant to round
        return None
    axes: tuple[int, ...] | None = None
    if name == "transpose":
        axes = tuple(equation.params["permutation"])
    elif before.aval.shape == variable.aval.shape and name != "broadcast_in_dim":
        axes = tuple(range(rank))
    return before, Way(axes, (Step(equation),))


def _scaled(equation: Any, variable: Any) -> tuple[Any, Way] | None:
    first, second = equation.invars
    if equation.primitive.name == "mul" and compat.is_literal(first):
        first, second = second, first
    if compat.is_literal(first) or not compat.is_literal(second) or first.aval.shape != variable.aval.shape:
        return None
    number = np.asarray(second.val)
    if number.shape != () or not np.isfinite(number) or number == 0:
        return None
    scale = float(number) if equation.primitive.name == "mul" else 1 / float(number)
    return first, Way(tuple(range(len(variable.aval.shape))), (), scale)


def _is_real(variable: Any) -> bool:
    return jax.dtypes.issubdtype(variable.aval.dtype, jnp.floating)


def _uses(body: Body, variable: Any) -> int:
    in_equations = sum(operand is variable for equation in body.equations for operand in equation.invars)
    return in_equations + sum(output is variable for output in body.outputs)
