"""Cuts a program into blocks that its derivative computes a second time, instead of keeping what is inside them.

`jax.checkpoint` around a whole loss saves nothing: when its derivative is due, everything is computed again and kept at
once. It saves where it stands around parts, one after the other. So the program is cut where little is handed on, as
between the layers of a network, and each part gets a checkpoint of its own; the body of a loop over layers is such a
part already.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from anybatch.jaxprs import avals, interpreter, tracing
from anybatch.jaxprs.bytes_written import num_bytes, written_bytes
from anybatch.jaxprs.primitives import CALLS, FUSED, called_jaxpr

MOST_BLOCKS = 64


def rematerialised(
    traced: tracing.Traced, const_types: Sequence[Any], types: Sequence[Any], policy: str
) -> tracing.Traced:
    """The same program, in blocks.

    Args:
      traced: the program.
      const_types: the types of the arrays that it closes over.
      types: the types of its arguments.
      policy: what is kept of a block, the name of one of `jax.checkpoint_policies`.
    """
    saveable = getattr(jax.checkpoint_policies, policy)
    jaxpr = traced.jaxpr

    def in_blocks(*flat: Any) -> list[Any]:
        return _run(jaxpr, flat, saveable, written_bytes(jaxpr))

    return dataclasses.replace(tracing.retrace(in_blocks, const_types, types), bound=traced.bound)


def _run(jaxpr: Any, values: Sequence[Any], policy: Any, all_written: int) -> list[Any]:
    variables, consts, equations = interpreter.open_jaxpr(jaxpr)
    outputs = interpreter.outputs_of(jaxpr)
    known = dict(zip(variables, [*consts, *values], strict=True))

    def read(operand: Any) -> Any:
        return operand.val if interpreter.is_literal(operand) else known[operand]

    for part in _parts(equations, outputs, all_written):
        if len(part.equations) == 1 and part.is_whole:
            (equation,) = part.equations
            results = _run_whole(equation, [read(operand) for operand in equation.invars], policy, all_written)
            known.update(zip(equation.outvars, results, strict=True))
        else:
            block = jax.checkpoint(_block(part), policy=policy)
            known.update(zip(part.writes, block(*(known[each] for each in part.reads)), strict=True))
    return [read(output) for output in outputs]


def _run_whole(equation: Any, operands: Sequence[Any], policy: Any, all_written: int) -> list[Any]:
    """An equation that has most of the program inside it: the blocks are there."""
    if equation.primitive.name in CALLS:
        return _run(called_jaxpr(equation), operands, policy, all_written)
    body = equation.params["jaxpr"]
    variables, consts, _ = interpreter.open_jaxpr(body)
    types = [avals.abstract(variable.aval) for variable in variables[len(consts) :]]

    def turn(*flat: Any) -> list[Any]:
        return interpreter.call(body, *flat)

    # In a loop nothing can be merged with the first time it was computed, so nothing need be done against that.
    blocked = tracing.close(jax.checkpoint(turn, policy=policy, prevent_cse=False), types)
    return interpreter.evaluate(equation, operands, equation.params | {"jaxpr": blocked})


@dataclasses.dataclass(frozen=True)
class _Part:
    """Equations that follow each other, with what they take from those before and hand on to those after."""

    equations: list[Any]
    reads: list[Any]
    writes: list[Any]
    is_whole: bool  # not to be computed twice: its own parts are


def _block(part: _Part) -> Callable[..., list[Any]]:
    def block(*values: Any) -> list[Any]:
        known = dict(zip(part.reads, values, strict=True))
        for equation in part.equations:
            operands = [each.val if interpreter.is_literal(each) else known[each] for each in equation.invars]
            known.update(zip(equation.outvars, interpreter.evaluate(equation, operands), strict=True))
        return [known[each] for each in part.writes]

    return block


def _parts(equations: Sequence[Any], outputs: Sequence[Any], all_written: int) -> list[_Part]:
    last_use = {operand: position for position, each in enumerate(equations) for operand in _variables(each.invars)}
    last_use |= dict.fromkeys(_variables(outputs), len(equations))
    wholes = [_is_whole(equation, all_written) for equation in equations]
    borders = {0, len(equations)}
    for position, whole in enumerate(wholes):
        if whole:
            borders |= {position, position + 1}
    plain = sum(_weight(equation) for equation, whole in zip(equations, wholes, strict=True) if not whole)
    if plain > 0.5 * all_written:
        borders |= set(_cuts(equations, last_use))
    ordered = sorted(borders)
    parts = []
    for start, end in itertools.pairwise(ordered):
        mine = list(equations[start:end])
        made = {output for equation in mine for output in equation.outvars}
        read = dict.fromkeys(each for equation in mine for each in _variables(equation.invars) if each not in made)
        writes = [output for equation in mine for output in equation.outvars if last_use.get(output, -1) >= end]
        parts.append(_Part(mine, list(read), writes, len(mine) == 1 and wholes[start]))
    return [part for part in parts if part.equations]


def _cuts(equations: Sequence[Any], last_use: dict[Any, int]) -> list[int]:
    """Where to cut so that the blocks are about equally heavy, and little is handed from one to the next.

    With K blocks memory holds K borders and the inside of one block: least at K = sqrt(inside / border).
    """
    reached = list(itertools.accumulate(map(_weight, equations)))
    handed_on = _handed_on(equations, last_use)
    borders = [each for each in handed_on[len(equations) // 8 : -len(equations) // 8] if each > 0]
    if not borders or not reached[-1]:
        return []
    number = min(MOST_BLOCKS, max(2, round(math.sqrt(reached[-1] / min(borders)))))
    each_block = reached[-1] / number
    cuts, begin = [], 0
    for wanted in range(1, number):
        window = [i for i in range(begin, len(equations)) if abs(reached[i] / each_block - wanted) <= 0.4]
        if window:
            best = min(window, key=lambda i: (handed_on[i], abs(reached[i] / each_block - wanted)))
            begin = best + 1
            cuts.append(begin)
    return cuts


def _handed_on(equations: Sequence[Any], last_use: dict[Any, int]) -> list[int]:
    """The bytes that are made by an equation or before it and used after it, for each equation."""
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


def _is_whole(equation: Any, all_written: int) -> bool:
    """Whether an equation is a loop over much of the program, or a function with most of it inside."""
    name = equation.primitive.name
    if name == "scan":
        return equation.params["length"] > 1 and _weight(equation) > 0.1 * all_written
    return name in CALLS and _weight(equation) > 0.5 * all_written


def _weight(equation: Any) -> int:
    """About the bytes that an equation leaves in memory."""
    inner = sum(map(written_bytes, interpreter.jaxprs_in(equation)))
    if inner:
        return inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return 0 if equation.primitive.name in FUSED else sum(num_bytes(output.aval) for output in equation.outvars)


def _variables(operands: Sequence[Any]) -> list[Any]:
    return [operand for operand in operands if not interpreter.is_literal(operand)]
