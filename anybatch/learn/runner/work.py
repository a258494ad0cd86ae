"""How much one device computes in a run of a compiled program: multiplications, counted as often as loops run them."""

import math
import re
from collections.abc import Mapping
from typing import Any

from anybatch.hlo import Instruction, Program

_DIMENSIONS = re.compile(r"\[([^\]]*)\]")
_OPERANDS = re.compile(r"%?([\w.\-]+)(?:,|\)|$)")
_RUNS = {
    **dict.fromkeys(("call", "async-start", "custom-call"), ("to_apply", "calls")),
    "fusion": ("calls",),
    "conditional": ("true_computation", "false_computation", "branch_computations"),
    "while": ("body",),
}


def multiplications_of(compiled: Any) -> int:
    """Those of one run on one device, in products of matrices and elsewhere; -1 if a loop's turns are not known.

    Of the branches of a condition, all are counted.
    """
    program = Program(compiled.as_text())
    return _total(program, program.entry)


def _total(program: Program, name: str) -> int:
    shapes = {_name(each): each.shape for each in program[name]}
    total = 0
    for each in program[name]:
        inner = sum(_total(program, one) for key in _RUNS.get(each.op, ()) for one in each.names(key))
        if each.op == "while" and inner:
            inner = -1 if each.trip_count is None or inner < 0 else each.trip_count * inner
        if inner < 0:
            return -1
        total += inner + _multiplications(each, shapes)
    return total


def _multiplications(each: Instruction, shapes: Mapping[str, str]) -> int:
    if each.op == "multiply":
        return _size(each.shape)
    if each.op != "dot":
        return 0
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.attributes)
    # Operands are written with their types or without.
    first = each.attributes if _DIMENSIONS.match(each.attributes.lstrip("abcdefghijklmnopqrstuvwxyz0123456789")) else ""
    shape = first or shapes.get(_OPERANDS.findall(each.attributes)[0], "")
    sizes = _sizes(shape)
    contracted = [int(place) for place in match[1].split(",") if place] if match else []
    return _size(each.shape) * math.prod(sizes[place] for place in contracted if place < len(sizes))


def _name(each: Instruction) -> str:
    return each.line.strip().removeprefix("ROOT ").split(" ", 1)[0].lstrip("%")


def _sizes(shape: str) -> list[int]:
    match = _DIMENSIONS.search(shape)
    return [int(size.lstrip("<=")) for size in match[1].split(",") if size] if match else []


def _size(shape: str) -> int:
    return math.prod(_sizes(shape))
