"""A name for a program that is the same in every process."""

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from anybatch import compat


def fingerprint(jaxpr: Any) -> str:
    """A hash of what a program computes, as far as its equations spell it out.

    Functions in it, such as derivatives of one's own, count by their code; what they close over does not.
    """
    digest = hashlib.sha256()
    names: dict[Any, int] = {}
    for part in _parts(getattr(jaxpr, "jaxpr", jaxpr), names):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def _parts(jaxpr: Any, names: dict[Any, int]) -> Iterator[str]:
    def name(variable: Any) -> str:
        if compat.is_literal(variable):
            return str(variable.val)
        return str(names.setdefault(variable, len(names)))

    for variable in (*jaxpr.constvars, *jaxpr.invars):
        yield f"{name(variable)}:{variable.aval}"
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for operand in equation.invars:
            yield name(operand)
        for output in equation.outvars:
            yield f"{name(output)}:{output.aval}"
        for inner in compat.jaxprs_in(equation):
            yield from _parts(inner, names)
        for key in sorted(equation.params):
            yield f"{key}={_plain(equation.params[key])}"
    for output in jaxpr.outvars:
        yield name(output)


def _plain(value: Any, depth: int = 0) -> str:
    """A parameter of an equation without the addresses that its text may have."""
    if isinstance(value, (str, int, float, complex, bool, type(None), np.dtype, np.generic)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(_plain(each, depth) for each in value) + ")"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_plain(k, depth)}:{_plain(v, depth)}" for k, v in value.items()) + "}"
    if depth < 4:
        if isinstance(value, functools.partial):
            return f"partial({_plain(value.func, depth + 1)},{_plain(value.args, depth + 1)})"
        for attribute in ("__wrapped__", "f", "func", "fun"):  # of decorators, and of JAX's own wrappers
            inner = getattr(value, attribute, None)
            if callable(inner) and inner is not value:
                return _plain(inner, depth + 1)
        code = getattr(value, "__code__", None)
        if code is not None:
            digest = hashlib.sha256(code.co_code + repr(code.co_names).encode()).hexdigest()
            cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
            inner_functions = [_plain(each, depth + 1) for each in cells if callable(each)]
            return f"{getattr(value, '__qualname__', '')}:{digest}:{inner_functions}"
    return type(value).__qualname__


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
