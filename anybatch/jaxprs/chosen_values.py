"""Computes chosen values of a program, also from inside its scans, and only the equations that they need."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
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

    @functools.cached_property
    def _bodies(self) -> dict[int, "Body"]:
        return {}

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


def compute(body: Body, arguments: Sequence[Any], wanted: Sequence[Source]) -> list[Any]:
    """The wanted values of a program. Arguments that they do not need may be None."""
    needs = _Needs(body, wanted)
    environment = interpreter.Environment(body.variables, [*body.consts, *arguments])
    emitted: dict[Source, Any] = {}
    for equation in needs.equations:
        operands = environment.read(equation.invars)
        if id(equation) in needs.loops:
            results, inner = _run_loop(needs.loops[id(equation)], operands)
            emitted.update({source.inside(equation): value for source, value in inner.items()})
        else:
            results = interpreter.evaluate(equation, operands)
        environment.write(equation.outvars, results)
    return [emitted[source] if source.loops else environment.read([source.variable])[0] for source in wanted]


class _Needs:
    """The equations and inputs that the wanted values of a program need."""

    def __init__(self, body: Body, wanted: Iterable[Source]) -> None:
        inside: dict[int, list[Source]] = {}
        needed = set()
        for source in wanted:
            if source.loops:
                loop, *rest = source.loops
                inside.setdefault(id(loop), []).append(Source(source.variable, tuple(rest)))
            elif not interpreter.is_literal(source.variable):
                needed.add(source.variable)
        self.loops: dict[int, _LoopNeeds] = {}
        equations = []
        operands: Sequence[Any]
        for equation in reversed(body.equations):
            outputs = [position for position, output in enumerate(equation.outvars) if output in needed]
            if id(equation) in inside:
                loop = _LoopNeeds(equation, body.of_loop(equation), outputs, inside[id(equation)])
                self.loops[id(equation)] = loop
                operands = [equation.invars[position] for position in loop.operands]
            elif outputs or equation.effects:
                operands = equation.invars
            else:
                continue
            equations.append(equation)
            needed.update(operand for operand in operands if not interpreter.is_literal(operand))
        self.equations = equations[::-1]
        self.inputs = needed


class _LoopNeeds:
    """The part of a scan that must be computed: of its carry, only what the wanted values depend on."""

    def __init__(self, equation: Any, body: Body, outputs: Sequence[int], inside: Sequence[Source]) -> None:
        self.equation, self.body, self.inside = equation, body, list(dict.fromkeys(inside))
        num_consts, num_carried = interpreter.scan_counts(equation.params)
        self.num_before_carry, self.num_before_scanned = num_consts, num_consts + num_carried
        self.stacked = [position for position in outputs if position >= num_carried]
        carried = {position for position in outputs if position < num_carried}
        while True:
            used = _Needs(body, self.wanted(sorted(carried))).inputs
            operands = [position for position, variable in enumerate(body.inputs) if variable in used]
            more = {position - num_consts for position in operands if 0 <= position - num_consts < num_carried}
            if more <= carried:
                break
            carried |= more
        self.carried = sorted(carried)
        starts = {position + num_consts for position in carried}
        self.operands: list[int] = sorted({*operands, *starts})

    def wanted(self, carried: Sequence[int]) -> list[Source]:
        """What each iteration computes: its carry, its stacked outputs, and the wanted values inside it."""
        return [Source(self.body.outputs[position]) for position in [*carried, *self.stacked]] + self.inside


def _run_loop(needs: _LoopNeeds, operands: Sequence[Any]) -> tuple[list[Any], dict[Source, Any]]:
    """The outputs of a scan, None for those that are not needed, and the wanted values inside it."""
    params, wanted = needs.equation.params, needs.wanted(needs.carried)
    first, last = needs.num_before_carry, needs.num_before_scanned
    scanned = [position for position in needs.operands if position >= last]

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        arguments = [*operands[:first], *[None] * (len(operands) - first)]
        for position, value in zip(needs.carried, carry, strict=True):
            arguments[first + position] = value
        for position, value in zip(scanned, slices, strict=True):
            arguments[position] = value
        results = compute(needs.body, arguments, wanted)
        return results[: len(carry)], results[len(carry) :]

    carried, stacked = lax.scan(
        step,
        [operands[first + position] for position in needs.carried],
        [operands[position] for position in scanned],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    outputs: list[Any] = [None] * len(needs.equation.outvars)
    for position, value in zip([*needs.carried, *needs.stacked], [*carried, *stacked], strict=False):
        outputs[position] = value
    return outputs, dict(zip(needs.inside, stacked[len(needs.stacked) :], strict=True))


def closed_program(fun: Callable[..., Sequence[Any]], types: Sequence[Any]) -> Body:
    """The program of a function of flat arrays that closes over none, with its calls inlined."""
    return without_calls(tracing.close(fun, types))


def batched(body: Body, axes: Sequence[int | None], arguments: Sequence[Any], wanted: Sequence[Source]) -> list[Any]:
    """The wanted values of each example, along a leading axis."""
    return jax.vmap(lambda *flat: compute(body, flat, wanted), in_axes=tuple(axes))(*arguments)
