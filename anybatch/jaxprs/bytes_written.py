"""Estimates the bytes that a program writes to memory, from its equations."""

from typing import Any

from anybatch.jaxprs import interpreter
from anybatch.jaxprs.graph import Value
from anybatch.jaxprs.primitives import FUSED


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
    return any(
        equation.primitive.name.startswith(name) or any(uses(each, name) for each in interpreter.jaxprs_in(equation))
        for equation in interpreter.equations_of(jaxpr)
    )


def num_bytes(aval: Any) -> int:
    """The bytes of a value of that type; 0 if it is not an array."""
    return Value(aval).num_bytes if hasattr(aval, "dtype") else 0
