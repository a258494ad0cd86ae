"""Computes chosen values of a program, those inside its loops too, and nothing that these do not need."""

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
    """A value of a program: a variable, perhaps inside loops; then it has one of each turn, along leading axes."""

    variable: Any
    loops: tuple[Any, ...] = ()  # equations, the outermost first

    def inside(self, loop: Any) -> "Source":
        """The same value, seen from outside of a loop that has it in its body."""
        return Source(self.variable, (loop, *self.loops))


class Body:
    """A program without calls: equations in order, and which of them makes a variable."""

    def __init__(self, jaxpr: Any) -> None:
        self.variables, self.consts, self.equations = interpreter.open_jaxpr(jaxpr)
        self.inputs = self.variables[len(self.consts) :]
        self.outputs = list(interpreter.opened(jaxpr).outvars)
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
    """A program with the functions that it calls written out; what is to be computed twice stays apart."""
    variables, consts, _ = interpreter.open_jaxpr(jaxpr)
    types = [avals.abstract(variable.aval) for variable in variables[len(consts) :]]
    return Body(tracing.close(lambda *flat: _written_out(jaxpr, flat), types))


def _written_out(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    def compute(equation: Any, operands: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        # Functions with a custom derivative stay: what is computed here may be differentiated.
        if name not in CALLS | REMAT:
            return interpreter.evaluate(equation, operands)
        if name in REMAT and params.get("prevent_cse", True) and params.get("differentiated", False):
            operands = lax.optimization_barrier(operands)
        return _written_out(called_jaxpr(equation), operands)

    return interpreter.interpret(jaxpr, arguments, compute)


def compute(body: Body, arguments: Sequence[Any], wanted: Sequence[Source]) -> list[Any]:
    """The wanted values of a program at some arguments; those that nothing wanted needs may be None."""
    needs = _Needs(body, wanted)
    known = dict(zip(body.variables, [*body.consts, *arguments], strict=True))
    emitted: dict[Source, Any] = {}

    def read(operand: Any) -> Any:
        return operand.val if interpreter.is_literal(operand) else known.get(operand)

    for equation in needs.equations:
        operands = [read(operand) for operand in equation.invars]
        if id(equation) in needs.loops:
            results, inner = _run_loop(needs.loops[id(equation)], operands)
            emitted.update({source.inside(equation): value for source, value in inner.items()})
        else:
            results = interpreter.evaluate(equation, operands)
        known.update(zip(equation.outvars, results, strict=True))
    return [emitted[source] if source.loops else read(source.variable) for source in wanted]


class _Needs:
    """What must be computed for some values of a program."""

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
    """What of a loop must be computed: of what it carries, only what the wanted values depend on."""

    def __init__(self, equation: Any, body: Body, outputs: Sequence[int], inside: Sequence[Source]) -> None:
        self.equation, self.body, self.inside = equation, body, list(dict.fromkeys(inside))
        num_consts, num_carried = interpreter.scan_counts(equation.params)
        self.num_before_carry, self.num_before_rows = num_consts, num_consts + num_carried
        self.rows = [position for position in outputs if position >= num_carried]
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
        """What each turn computes: what goes on to the next, what it leaves behind, what is wanted of its inside."""
        return [Source(self.body.outputs[position]) for position in [*carried, *self.rows]] + self.inside


def _run_loop(needs: _LoopNeeds, operands: Sequence[Any]) -> tuple[list[Any], dict[Source, Any]]:
    """The outputs of a loop, None for those that are not needed, and what is wanted of its inside."""
    params, wanted = needs.equation.params, needs.wanted(needs.carried)
    first, last = needs.num_before_carry, needs.num_before_rows
    row_positions = [position for position in needs.operands if position >= last]

    def turn(carry: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        arguments = [*operands[:first], *[None] * (len(operands) - first)]
        for position, value in zip(needs.carried, carry, strict=True):
            arguments[first + position] = value
        for position, value in zip(row_positions, rows, strict=True):
            arguments[position] = value
        results = compute(needs.body, arguments, wanted)
        return results[: len(carry)], results[len(carry) :]

    carried, stacked = lax.scan(
        turn,
        [operands[first + position] for position in needs.carried],
        [operands[position] for position in row_positions],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    outputs: list[Any] = [None] * len(needs.equation.outvars)
    for position, value in zip([*needs.carried, *needs.rows], [*carried, *stacked], strict=False):
        outputs[position] = value
    return outputs, dict(zip(needs.inside, stacked[len(needs.rows) :], strict=True))


def closed_program(fun: Callable[..., Sequence[Any]], types: Sequence[Any]) -> Body:
    """The program of a function of flat arrays that closes over none, without calls."""
    return without_calls(tracing.close(fun, types))


def batched(body: Body, axes: Sequence[int | None], arguments: Sequence[Any], wanted: Sequence[Source]) -> list[Any]:
    """The wanted values for each of several examples, along a leading axis."""
    return jax.vmap(lambda *flat: compute(body, flat, wanted), in_axes=tuple(axes))(*arguments)
