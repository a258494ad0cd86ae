"""What a program writes to memory, counted in its equations."""

from typing import Any

from anybatch.jaxprs import interpreter
from anybatch.jaxprs.graph import Value
from anybatch.jaxprs.primitives import FUSED


def written_bytes(jaxpr: Any, fused: frozenset[str] = FUSED) -> int:
    """The bytes of all values of a program, at any depth and in every turn of its loops, but for those that are fused.

    With nothing fused, what nested functions return counts once more where they are called.
    """
    total = 0
    for equation in interpreter.equations_of(jaxpr):
        name, inner = equation.primitive.name, interpreter.jaxprs_in(equation)
        turns = equation.params["length"] if name == "scan" else 1
        if not name.startswith(("scatter", "reduce")):  # theirs are functions of two numbers
            total += turns * sum(written_bytes(each, fused) for each in inner)
        has_own = not inner or name.startswith(("scatter", "reduce"))
        if name not in fused and (has_own or not fused):
            total += sum(num_bytes(output.aval) for output in equation.outvars)
    return total


def uses(jaxpr: Any, name: str) -> bool:
    """Whether a program has an equation of a primitive whose name begins so, at any depth."""
    return any(
        equation.primitive.name.startswith(name) or any(uses(each, name) for each in interpreter.jaxprs_in(equation))
        for equation in interpreter.equations_of(jaxpr)
    )


def num_bytes(aval: Any) -> int:
    """The bytes of a value of that type; none for what is no array."""
    return Value(aval).num_bytes if hasattr(aval, "dtype") else 0
