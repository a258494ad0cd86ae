"""Rematerialisation: divides a program into blocks and applies `jax.checkpoint` to each of them.

One `jax.checkpoint` around the loss saves no memory: the backward pass would compute all of it again and keep all
activations at once. It saves memory around blocks, one after the other. So the program is divided where few bytes are
passed on, as between the layers of a network. The body of a `lax.scan` over layers is already such a block.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from anybatch.jaxprs import avals, interpreter, tracing
from anybatch.jaxprs.graph import num_bytes
from anybatch.jaxprs.primitives import CALLS, FUSED, called_jaxpr
from anybatch.reading.block_loop import is_region

MOST_BLOCKS = 64


def rematerialised(traced: tracing.Traced, const_types: Sequence[Any], policy: str) -> tracing.Traced:
    """The same program, divided into blocks with `jax.checkpoint`.

    `const_types` are the types of the arrays that it closes over. One of `jax.checkpoint_policies` says which
    activations of a block are kept.
    """
    saveable = getattr(jax.checkpoint_policies, policy)
    jaxpr = traced.jaxpr
    types = [avals.abstract(variable.aval) for variable in traced.arguments]

    def in_blocks(*flat: Any) -> list[Any]:
        return _run(jaxpr, (*traced.inner, *flat), saveable, _written(jaxpr))

    return dataclasses.replace(tracing.retrace(in_blocks, const_types, types), bound=traced.bound)


def _run(jaxpr: Any, values: Sequence[Any], policy: Any, all_written: int) -> list[Any]:
    variables, consts, equations = interpreter.open_jaxpr(jaxpr)
    outputs = interpreter.outputs_of(jaxpr)
    environment = interpreter.Environment(variables, [*consts, *values])
    for segment in _segments(equations, outputs, all_written):
        if segment.has_blocks_inside:
            (equation,) = segment.equations
            results = _run_inside(equation, environment.read(equation.invars), policy, all_written)
            environment.write(equation.outvars, results)
        else:
            block = jax.checkpoint(_block(segment), policy=policy)
            environment.write(segment.writes, block(*environment.read(segment.reads)))
    return environment.read(outputs)


def _run_inside(equation: Any, operands: Sequence[Any], policy: Any, all_written: int) -> list[Any]:
    """Evaluates an equation that contains most of the program, with blocks inside it; or one that needs none."""
    if is_region(equation):
        return interpreter.evaluate(equation, operands)
    if equation.primitive.name in CALLS:
        return _run(called_jaxpr(equation), operands, policy, all_written)
    body = equation.params["jaxpr"]
    types = [avals.abstract(variable.aval) for variable in interpreter.unbound_inputs_of(body)]

    def turn(*flat: Any) -> list[Any]:
        return interpreter.call(body, *flat)

    # In a loop, XLA cannot merge the second computation with the first, so prevent_cse is not needed.
    blocked = tracing.close(jax.checkpoint(turn, policy=policy, prevent_cse=False), types)
    return interpreter.evaluate(equation, operands, equation.params | {"jaxpr": blocked})


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Consecutive equations, the variables that they read, and those that later equations read."""

    equations: list[Any]
    reads: list[Any]
    writes: list[Any]
    has_blocks_inside: bool  # True for a single equation that is divided inside instead


def _block(segment: _Segment) -> Callable[..., list[Any]]:
    def block(*values: Any) -> list[Any]:
        environment = interpreter.Environment(segment.reads, values)
        for equation in segment.equations:
            results = interpreter.evaluate(equation, environment.read(equation.invars))
            environment.write(equation.outvars, results)
        return environment.read(segment.writes)

    return block


def _segments(equations: Sequence[Any], outputs: Sequence[Any], all_written: int) -> list[_Segment]:
    last_use = {operand: position for position, each in enumerate(equations) for operand in _variables(each.invars)}
    last_use |= dict.fromkeys(_variables(outputs), len(equations))
    opened = [_has_blocks_inside(equation, all_written) for equation in equations]
    borders = {0, len(equations)}
    for position, is_opened in enumerate(opened):
        if is_opened:
            borders |= {position, position + 1}
    plain = sum(_weight(equation) for equation, is_opened in zip(equations, opened, strict=True) if not is_opened)
    if plain > 0.5 * all_written:
        borders |= set(_cuts(equations, last_use))
    segments = []
    for start, end in itertools.pairwise(sorted(borders)):
        inside = list(equations[start:end])
        made = {output for equation in inside for output in equation.outvars}
        read = dict.fromkeys(each for equation in inside for each in _variables(equation.invars) if each not in made)
        writes = [output for equation in inside for output in equation.outvars if last_use.get(output, -1) >= end]
        segments.append(_Segment(inside, list(read), writes, len(inside) == 1 and opened[start]))
    return segments


def _cuts(equations: Sequence[Any], last_use: dict[Any, int]) -> list[int]:
    """Where to divide: into blocks that write about the same number of bytes, and pass few bytes to the next.

    With K blocks, memory holds K borders and the inside of one block. That is smallest at K = sqrt(inside / border).
    """
    reached = list(itertools.accumulate(map(_weight, equations)))
    passed_on = _passed_on(equations, last_use)
    borders = [each for each in passed_on[len(equations) // 8 : -len(equations) // 8] if each > 0]
    if not borders or not reached[-1]:
        return []
    number = min(MOST_BLOCKS, max(2, round(math.sqrt(reached[-1] / min(borders)))))
    each_block = reached[-1] / number
    cuts, begin = [], 0
    for wanted in range(1, number):
        window = [i for i in range(begin, len(equations)) if abs(reached[i] / each_block - wanted) <= 0.4]
        if window:
            best = min(window, key=lambda i: (passed_on[i], abs(reached[i] / each_block - wanted)))
            begin = best + 1
            cuts.append(begin)
    return cuts


def _passed_on(equations: Sequence[Any], last_use: dict[Any, int]) -> list[int]:
    """For each equation, the bytes that it or an earlier equation writes and a later one reads."""
    live, results = 0, []
    ending: dict[int, int] = {}
    for position, equation in enumerate(equations):
        for output in equation.outvars:
            until = last_use.get(output, -1)
            if until > position:
                live += num_bytes(output.aval)
                ending[until] = ending.get(until, 0) + num_bytes(output.aval)
        live -= ending.pop(position, 0)
        results.append(live)
    return results


def _has_blocks_inside(equation: Any, all_written: int) -> bool:
    """True for a loop over much of the program, a call of a function with most of it inside, or a region."""
    if is_region(equation):
        return True
    name = equation.primitive.name
    if name == "scan":
        return equation.params["length"] > 1 and _weight(equation) > 0.1 * all_written
    return name in CALLS and _weight(equation) > 0.5 * all_written


def _written(jaxpr: Any) -> int:
    """An estimate of the bytes that a program writes, except in regions, which keep nothing for the backward pass."""
    return sum(map(_weight, interpreter.equations_of(jaxpr)))


def _weight(equation: Any) -> int:
    """An estimate of the bytes that an equation writes."""
    name = equation.primitive.name
    if is_region(equation):
        return 0
    has_functions_of_numbers = name.startswith(("scatter", "reduce"))
    inner = 0 if has_functions_of_numbers else sum(map(_written, interpreter.jaxprs_in(equation)))
    if inner:
        return inner * (equation.params["length"] if name == "scan" else 1)
    return 0 if name in FUSED else sum(num_bytes(output.aval) for output in equation.outvars)


def _variables(operands: Sequence[Any]) -> list[Any]:
    return [operand for operand in operands if not interpreter.is_literal(operand)]
