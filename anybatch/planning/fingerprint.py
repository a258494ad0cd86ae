"""A name for a program that is the same in every process."""

import functools
import hashlib
import re
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

from anybatch import compat


def fingerprint(jaxpr: Any) -> str:
    """A hash of what a program computes, as far as its equations spell it out.

    Functions in it, such as derivatives of one's own, count by their code, their constants and what they close over.
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
    """A parameter of an equation, or what a function in it closes over, without the addresses in its text."""
    if isinstance(value, (str, int, float, complex, bool, type(None), np.dtype, np.generic)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({','.join(_plain(each, depth) for each in value)})"
    if isinstance(value, (set, frozenset)):
        return f"set({','.join(sorted(_plain(each, depth) for each in value))})"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_plain(k, depth)}:{_plain(v, depth)}" for k, v in value.items()) + "}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{value.shape}"  # its numbers say nothing of memory and time
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return ""  # it has been told equation by equation
    if depth > DEEP:
        return type(value).__qualname__
    if isinstance(value, functools.partial):
        return f"partial({_plain((value.func, value.args, value.keywords), depth + 1)})"
    code = getattr(value, "__code__", None)
    if code is not None:
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return f"{_code(code)}{_plain((value.__defaults__, cells), depth + 1)}"
    if isinstance(value, types.MethodType):
        return _plain((value.__func__, value.__self__), depth + 1)
    inner = [getattr(value, name, None) for name in ("__wrapped__", "f", "f_transformed", "func", "fun", "call")]
    functions = [each for each in inner if callable(each) and each is not value]
    if functions:  # a decorator, or one of JAX's own wrappers
        return f"{type(value).__qualname__}{_plain(functions, depth + 1)}"
    return _ADDRESS.sub("", f"{type(value).__qualname__}:{value!r}")


DEEP = 6
_ADDRESS = re.compile(r"(<[^<>]*)? at 0x[0-9a-f]+|0x[0-9a-f]+")


def _code(code: types.CodeType) -> str:
    constants = [_code(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    parts = (code.co_code, repr(code.co_names).encode(), repr(sorted(constants)).encode())
    return f"{code.co_qualname}:{hashlib.sha256(b'|'.join(parts)).hexdigest()}"


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
