"""A loss as a graph: its jaxpr with calls inlined and unused equations dropped. And the bytes that it writes."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.jaxprs import avals, interpreter
from anybatch.jaxprs.primitives import CALLS, FUSED, called_jaxpr

# `jax.custom_batching.custom_vmap` too, whose rule for `vmap` is not used here; and other spellings of a plain call.
INLINED = CALLS | {"core_closed_call", "call", "custom_vmap_call"}


class Value:
    """A value of the graph: an input, a result of a node, or a constant."""

    __slots__ = ("aval", "constant", "hint", "is_constant", "node")

    def __init__(self, aval: Any, node: "Node | None" = None, constant: Any = None, is_constant: bool = False) -> None:
        self.aval, self.node, self.constant, self.is_constant = aval, node, constant, is_constant
        self.hint: Any = None  # the array of an input, if it is known: one that the loss closes over

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(getattr(self.aval, "shape", ()))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        return getattr(self.aval, "dtype", None)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_key(self) -> bool:
        return self.dtype is not None and jax.dtypes.issubdtype(self.dtype, jax.dtypes.extended)

    @property
    def is_inexact(self) -> bool:
        return self.dtype is not None and not self.is_key and jax.dtypes.issubdtype(self.dtype, np.inexact)

    @property
    def num_bytes(self) -> int:
        return self.size * (8 if self.is_key or self.dtype is None else jnp.dtype(self.dtype).itemsize)

    @property
    def type(self) -> jax.ShapeDtypeStruct:
        """Its type, to trace with."""
        return avals.abstract(self.aval)

    @property
    def known(self) -> Any:
        """The constant, in the dtype that it has in the program."""
        if self.is_key or isinstance(self.constant, jax.core.Tracer):
            return self.constant
        if isinstance(self.constant, (bool, int, float, complex, np.generic, np.ndarray)):
            return np.asarray(self.constant, self.dtype)
        return self.constant

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Node:
    """One equation, with the calls that it was inlined from."""

    __slots__ = ("calls", "equation", "index", "inputs", "name", "outputs", "params")

    def __init__(self, equation: Any, inputs: list[Value], calls: tuple[Any, ...], index: int) -> None:
        self.equation, self.inputs, self.calls, self.index = equation, inputs, calls, index
        self.name, self.params = equation.primitive.name, equation.params
        self.outputs = [Value(output.aval, self) for output in equation.outvars]

    @property
    def has_effects(self) -> bool:
        return bool(self.equation.effects)

    def __call__(self, operands: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
        return interpreter.evaluate(self.equation, operands, params)


class Graph:
    """The nodes that the outputs need, in an order in which they can be computed.

    `opened` has equations of checkpoints to inline and of scans to unroll, by their `id`, each with the function that
    takes its place. `calls` are the equations around a function inside an equation, the outermost first.
    """

    def __init__(
        self, jaxpr: Any, opened: Mapping[int, tuple[Any, Any]] | None = None, calls: tuple[Any, ...] = ()
    ) -> None:
        self._opened = opened or {}
        self._nodes: list[Node] = []
        self.inputs = [Value(variable.aval) for variable in interpreter.unbound_inputs_of(jaxpr)]
        self.outputs = self._add(jaxpr, self.inputs, calls)
        self.nodes = self._live_nodes()

    def _add(self, jaxpr: Any, arguments: Sequence[Value], calls: tuple[Any, ...]) -> list[Value]:
        """Adds the equations of a function called with `arguments`, and returns its results."""
        return interpreter.interpret(
            jaxpr,
            arguments,
            lambda equation, inputs: self._add_equation(equation, inputs, calls),
            lambda constant, aval: Value(aval, constant=constant, is_constant=True),
        )

    def _add_equation(self, equation: Any, inputs: list[Value], calls: tuple[Any, ...]) -> Sequence[Value]:
        name = equation.primitive.name
        if name == "optimization_barrier":
            return inputs
        if name in INLINED:
            return self._add(called_jaxpr(equation), inputs, (*calls, equation))
        if id(equation) in self._opened:
            return self._add(self._opened[id(equation)][1], inputs, (*calls, equation))
        node = Node(equation, inputs, calls, len(self._nodes))
        self._nodes.append(node)
        return node.outputs

    def _live_nodes(self) -> list[Node]:
        live = set(map(id, self.outputs))
        kept = []
        for node in reversed(self._nodes):
            # A print has no results, and must be kept.
            if node.has_effects or any(id(output) in live for output in node.outputs):
                kept.append(node)
                live.update(map(id, node.inputs))
        for index, node in enumerate(reversed(kept)):
            node.index = index
        self.live = live
        return kept[::-1]


def operands_of(value: Value) -> Sequence[Value]:
    """The operands of the node that computes a value."""
    return [] if value.node is None else value.node.inputs


def sources(
    values: Iterable[Value],
    is_last: Callable[[Value], bool] = lambda value: False,
    operands: Callable[[Value], Iterable[Value]] = operands_of,
) -> Iterator[Value]:
    """These values and all that they are computed from, each once, without constants. Goes no further than the last."""
    seen: set[Value] = set()
    pending = list(values)
    while pending:
        value = pending.pop()
        if value.is_constant or value in seen:
            continue
        seen.add(value)
        yield value
        if not is_last(value):
            pending.extend(operands(value))


def opened_function(node: Node) -> Any:
    """The jaxpr to inline in the place of a checkpoint (its function) or of a scan (its iterations, unrolled)."""
    params = node.params
    if node.name != "scan":
        return params["jaxpr"]
    num_consts, num_carry = interpreter.scan_counts(params)
    body = interpreter.as_function(params["jaxpr"])
    steps = range(params["length"])

    def unrolled(*operands: Any) -> list[Any]:
        consts, scanned = operands[:num_consts], operands[num_consts + num_carry :]
        carry = list(operands[num_consts : num_consts + num_carry])
        emitted: dict[int, list[Any]] = {}
        for step in reversed(steps) if params["reverse"] else steps:
            results = body(*consts, *carry, *(array[step] for array in scanned))
            carry, emitted[step] = results[:num_carry], results[num_carry:]
        columns = zip(*(emitted[step] for step in steps), strict=True)
        return [*carry, *(jnp.stack([jnp.asarray(row) for row in column]) for column in columns)]

    return jax.make_jaxpr(unrolled)(*(value.type for value in node.inputs))


def written_bytes(jaxpr: Any, fused: frozenset[str] = FUSED) -> int:
    """The bytes of all values that a jaxpr computes, at any depth and in every iteration of its scans.

    Args:
      jaxpr: the program.
      fused: the primitives that do not count. If it is empty, the results of nested functions count twice: inside, and
        where they are called.
    """
    total = 0
    for equation in interpreter.equations_of(jaxpr):
        name, inner = equation.primitive.name, interpreter.jaxprs_in(equation)
        iterations = equation.params["length"] if name == "scan" else 1
        if not name.startswith(("scatter", "reduce")):  # the functions inside these are of two numbers
            total += iterations * sum(written_bytes(each, fused) for each in inner)
        has_own = not inner or name.startswith(("scatter", "reduce"))
        if name not in fused and (has_own or not fused):
            total += sum(num_bytes(output.aval) for output in equation.outvars)
    return total


def uses(jaxpr: Any, name: str) -> bool:
    """Whether a jaxpr has, at any depth, an equation of a primitive whose name starts with `name`."""
    return any(equation.primitive.name.startswith(name) for equation in interpreter.walk(jaxpr))


def num_bytes(aval: Any) -> int:
    """The bytes of a value of that type; 0 if it is not an array."""
    return Value(aval).num_bytes if hasattr(aval, "dtype") else 0
