"""A name for a program that is the same in every process.

What was measured, kept on disk: the second run plans in milliseconds.

A record is advice. It is found by the program, the shapes, the device and the versions; one that cannot be read, or is
of another kind, is as good as none. Where the cache lies is up to `ANYBATCH_CACHE`: a folder, or "off".
"""

import contextlib
import enum
import functools
import hashlib
import json
import os
import pathlib
import re
import tempfile
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from anybatch.jaxprs import interpreter


def fingerprint(jaxpr: Any) -> str:
    """A hash of what a program computes, as far as its equations spell it out.

    Functions in it, such as derivatives of one's own, count by their code, their constants and what they close over.
    """
    digest = hashlib.sha256()
    for part in _parts(interpreter.opened(jaxpr), {}, _Texts()):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def fingerprint_of_function(function: Any) -> str:
    """A text that changes with the code of a function, its constants and what it closes over."""
    return _Texts().of(function)


def _parts(jaxpr: Any, names: dict[Any, int], texts: "_Texts") -> Iterator[str]:
    def name(variable: Any) -> str:
        if interpreter.is_literal(variable):
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
        for inner in interpreter.jaxprs_in(equation):
            yield from _parts(inner, names, texts)
        for key in sorted(equation.params):
            yield f"{key}={texts.of(equation.params[key])}"
    for output in jaxpr.outvars:
        yield name(output)


class _Texts:
    """Parameters of equations as texts that are the same in every process, before and after a program has run.

    What a function closes over may be anything, large, changing or endless. So mutable containers and objects of
    unknown kinds count by their type alone, and no object is looked into twice.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by identity; the objects too, so that no identity is used again

    def of(self, value: Any, depth: int = 0) -> str:
        if isinstance(value, (str, int, float, complex, bytes, type(None), np.dtype, np.generic)):
            return repr(value)
        if isinstance(value, (tuple, frozenset, set)):
            return self._of_several(value, depth)
        if isinstance(value, (jax.Array, np.ndarray)):
            return f"{value.dtype}{value.shape}"  # its numbers say nothing of memory and time
        if isinstance(value, types.CodeType):
            constants = self.of(value.co_consts, depth + 1)
            return f"{value.co_qualname}:{hashlib.sha256(value.co_code).hexdigest()}{value.co_names}{constants}"
        if depth > DEEP or id(value) in self._seen or isinstance(value, type):
            return type(value).__qualname__
        self._seen[id(value)] = value
        if isinstance(value, functools.partial):
            return f"partial{self.of((value.func, value.args, *value.keywords.items()), depth + 1)}"
        if isinstance(value, types.FunctionType):
            cells = tuple(cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell))
            return self.of((value.__code__, value.__defaults__, cells), depth + 1)
        if isinstance(value, types.MethodType):
            return self.of((value.__func__, type(value.__self__).__qualname__), depth + 1)
        if isinstance(value, enum.Enum):
            return str(value)
        if type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
            return self._of_jax(value, depth)
        return type(value).__qualname__

    def _of_several(self, values: Any, depth: int) -> str:
        if depth > DEEP or len(values) > LONG:
            return f"{type(values).__name__} of {len(values)}"
        texts = [self.of(each, depth + 1) for each in values]
        return f"({','.join(texts if isinstance(values, tuple) else sorted(texts))})"

    def _of_jax(self, value: Any, depth: int) -> str:
        """A wrapper of a function by that function; shardings, dimension numbers and the like as they print."""
        if interpreter.is_jaxpr(value):
            return ""  # it has been told equation by equation
        inner = [getattr(value, name, None) for name in ("__wrapped__", "f", "f_transformed", "func", "fun", "call")]
        functions = tuple(each for each in inner if callable(each) and each is not value)
        if functions:
            return f"{type(value).__qualname__}{self.of(functions, depth + 1)}"
        return _ADDRESS.sub("", f"{type(value).__qualname__}:{value!r}")


DEEP, LONG = 12, 256
_ADDRESS = re.compile(r"(<[^<>]*)? at 0x[0-9a-f]+|0x[0-9a-f]+")


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


SCHEMA = 1
OFF = ("", "0", "off", "no", "false", "none")


def folder() -> pathlib.Path | None:
    """Where records are kept, or None if they are not to be kept."""
    chosen = os.environ.get("ANYBATCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen is not None:
            return None if chosen.strip().lower() in OFF else pathlib.Path(chosen).expanduser()
        return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "anybatch"
    except RuntimeError:  # nobody's home
        return None


def key_of(*parts: Any) -> str:
    """A name for a record, the same in every process for the same parts."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def load(key: str) -> dict[str, Any]:
    """The record with that key; an empty one if there is none that can be used."""
    where = folder()
    if where is None:
        return {}
    try:
        record = json.loads((where / f"{key}.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    usable = isinstance(record, dict) and record.get("schema") == SCHEMA and record.get("key") == key
    return record if usable else {}


def save(key: str, record: dict[str, Any]) -> None:
    """Keeps a record, or does not: a full or read-only disk is no reason to stop."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        # Written beside and moved: another process sees the old record or the new one, never a part.
        handle, name = tempfile.mkstemp(dir=where, suffix=".part")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"schema": SCHEMA, "key": key} | record, file)
            os.replace(name, where / f"{key}.json")
        except OSError:
            os.unlink(name)


def forget(key: str) -> None:
    """Removes a record."""
    where = folder()
    if where is not None:
        with contextlib.suppress(OSError):
            (where / f"{key}.json").unlink()
