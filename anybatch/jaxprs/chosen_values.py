"""Computes chosen values of a program, also from inside its scans, and only the equations that they need."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from anybatch.jaxprs import avals, interpreter, tracing
from anybatch.jaxprs.primitives import CALLS, REMAT, called_jaxpr


@dataclasses.dataclass(frozen=True)
class Source:
    """A value of a program: a variable, perhaps inside scans, whose iterations are stacked along leading axes."""

    variable: Any
    loops: tuple[Any, ...] = ()  # the equations of the scans around it, the outermost first

    def inside(self, loop: Any) -> "Source":
        """The same value, seen from outside of a scan that has it in its body."""
        return Source(self.variable, (loop, *self.loops))


class Body:
    """A program without calls: its equations in order, and the equation that makes each variable."""

    def __init__(self, jaxpr: Any) -> None:
        self.variables, self.consts, self.equations = interpreter.open_jaxpr(jaxpr)
        self.inputs, self.outputs = interpreter.unbound_inputs_of(jaxpr), interpreter.outputs_of(jaxpr)
        self.makers = {output: equation for equation in self.equations for output in equation.outvars}
        self._bodies: dict[int, Body] = {}

    def of_loop(self, loop: Any) -> "Body":
        """The body of a `scan` among its equations."""
        if id(loop) not in self._bodies:
            self._bodies[id(loop)] = without_calls(loop.params["jaxpr"])
        return self._bodies[id(loop)]


def without_calls(jaxpr: Any) -> Body:
    """A program with its calls inlined. An optimization barrier keeps rematerialised parts apart."""
    types = [avals.abstract(variable.aval) for variable in interpreter.unbound_inputs_of(jaxpr)]
    return Body(tracing.close(lambda *flat: _inlined(jaxpr, flat), types))


def _inlined(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    def compute(equation: Any, operands: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        # Functions with a custom derivative stay: what is computed here may be differentiated.
        if name not in CALLS | REMAT:
            return interpreter.evaluate(equation, operands)
        if name in REMAT and params.get("prevent_cse", True) and params.get("differentiated", False):
            operands = lax.optimization_barrier(operands)
        return _inlined(called_jaxpr(equation), operands)

    return interpreter.interpret(jaxpr, arguments, compute)


def _compute(body: Body, arguments: Sequence[Any], wanted: Sequence[Source]) -> list[Any]:
    """The wanted values of a program, and, until the program is traced and pruned, all others too."""
    inside: dict[int, list[Source]] = {}
    # A source outside of loops may be a literal, which cannot be hashed.
    for source in dict.fromkeys(source for source in wanted if source.loops):
        inside.setdefault(id(source.loops[0]), []).append(Source(source.variable, source.loops[1:]))
    environment = interpreter.Environment(body.variables, [*body.consts, *arguments])
    emitted: dict[Source, Any] = {}
    for equation in body.equations:
        operands, sources = environment.read(equation.invars), inside.get(id(equation), [])
        if sources:
            results = _run_loop(equation, body.of_loop(equation), operands, sources)
            emitted.update(zip([source.inside(equation) for source in sources], results[-len(sources) :], strict=True))
        else:
            results = interpreter.evaluate(equation, operands)
        environment.write(equation.outvars, results[: len(equation.outvars)])
    return [emitted[source] if source.loops else environment.read([source.variable])[0] for source in wanted]


def _run_loop(equation: Any, body: Body, operands: Sequence[Any], inside: Sequence[Source]) -> list[Any]:
    """The outputs of a scan, and then the wanted values inside it."""
    params, wanted = equation.params, [*map(Source, body.outputs), *inside]
    num_consts, num_carried = interpreter.scan_counts(params)
    first = num_consts + num_carried

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _compute(body, [*operands[:num_consts], *carry, *slices], wanted)
        return results[:num_carried], results[num_carried:]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carried, stacked = lax.scan(step, list(operands[num_consts:first]), list(operands[first:]), **options)
    return [*carried, *stacked]


def closed_program(fun: Callable[..., Sequence[Any]], types: Sequence[Any]) -> Body:
    """The program of a function of flat arrays that closes over none, with its calls inlined."""
    return without_calls(tracing.close(fun, types))


def batched(body: Body, axes: Sequence[int | None], arguments: Sequence[Any], wanted: Sequence[Source]) -> list[Any]:
    """The wanted values of each example, along a leading axis. What they do not need is not computed."""
    of_examples = jax.vmap(lambda *flat: _compute(body, flat, wanted), in_axes=tuple(axes))
    traced, consts = tracing.trace(of_examples, *arguments)
    return traced.without_unused()(consts, *arguments)
