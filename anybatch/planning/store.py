"""Keeps measurements on disk, so that the second run of a program plans in milliseconds.

A record is found by a key: the hash of everything that memory and time depend on, which includes the `fingerprint` of
the program. A record is only advice: one that cannot be read or does not fit is ignored. Records lie in
`~/.cache/anybatch`, or in the folder that the environment variable `ANYBATCH_CACHE` names; "off" keeps none.
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

# The layout of a record. A record with another number is ignored.
SCHEMA = 2
# Values of ANYBATCH_CACHE that switch the store off.
OFF = ("", "0", "off", "no", "false", "none")

# How deep the texts of a fingerprint look into values, and how many elements of one container they read.
MAX_DEPTH, MAX_LENGTH = 12, 256
# The address of an object in its repr, which differs in every process.
_ADDRESS = re.compile(r"(<[^<>]*)? at 0x[0-9a-f]+|0x[0-9a-f]+")


def folder() -> pathlib.Path | None:
    """The folder of the records; None if none are kept."""
    chosen = os.environ.get("ANYBATCH_CACHE")
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        if chosen is not None:
            return None if chosen.strip().lower() in OFF else pathlib.Path(chosen).expanduser()
        return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "anybatch"
    except RuntimeError:  # there is no home folder
        return None


def key_of(*parts: Any) -> str:
    """The key of a record: a hash of `parts` that is the same in every process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def load(key: str) -> dict[str, Any]:
    """The record with this key; an empty one if there is none that can be used."""
    where = folder()
    record: Any = None
    if where is not None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            record = json.loads((where / f"{key}.json").read_text())
    usable = isinstance(record, dict) and record.get("schema") == SCHEMA and record.get("key") == key
    return record if usable else {}


def save(key: str, record: dict[str, Any]) -> None:
    """Writes a record. Does nothing if the disk is full or read-only."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        # Another process sees the old record or the new one, never half of one.
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


def fingerprint(jaxpr: Any) -> str:
    """A hash of the equations of a jaxpr that is the same in every process.

    Functions in it, such as the rules of a `custom_vjp`, count by their code, their constants and what they close over.
    """
    digest = hashlib.sha256()
    for part in _parts(interpreter.opened(jaxpr), {}, _Texts()):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def fingerprint_of_function(function: Any) -> str:
    """A text of a function: its code, its constants and what it closes over."""
    return _Texts().of(function)


def _parts(jaxpr: Any, names: dict[Any, int], texts: "_Texts") -> Iterator[str]:
    """The texts that a fingerprint hashes: variables, types, primitives and parameters, in order."""

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
    """Texts of the parameters of equations, the same in every process and before and after a program has run.

    A function may close over anything, even over large, changing or recursive objects. So mutable containers and
    objects of unknown classes count by their type alone, and no object is looked into twice.
    """

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # by id; holding the object keeps its id from being reused

    def of(self, value: Any, depth: int = 0) -> str:  # noqa: C901 - one case for each kind of object
        if isinstance(value, (str, int, float, complex, bytes, type(None), np.dtype, np.generic)):
            return repr(value)
        if isinstance(value, (tuple, frozenset, set)):
            return self._of_several(value, depth)
        if isinstance(value, (jax.Array, np.ndarray)):
            return f"{value.dtype}{value.shape}"  # memory and time do not depend on its numbers
        if isinstance(value, types.CodeType):
            constants = self.of(value.co_consts, depth + 1)
            return f"{value.co_qualname}:{hashlib.sha256(value.co_code).hexdigest()}{value.co_names}{constants}"
        if depth > MAX_DEPTH or id(value) in self._seen or isinstance(value, type):
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
        if depth > MAX_DEPTH or len(values) > MAX_LENGTH:
            return f"{type(values).__name__} of {len(values)}"
        texts = [self.of(each, depth + 1) for each in values]
        return f"({','.join(texts if isinstance(values, tuple) else sorted(texts))})"

    def _of_jax(self, value: Any, depth: int) -> str:
        """The text of a JAX object: a wrapped function counts as that function, anything else as its repr."""
        if interpreter.is_jaxpr(value):
            return ""  # `_parts` goes through its equations
        inner = [getattr(value, name, None) for name in ("__wrapped__", "f", "f_transformed", "func", "fun", "call")]
        functions = tuple(each for each in inner if callable(each) and each is not value)
        if functions:
            return f"{type(value).__qualname__}{self.of(functions, depth + 1)}"
        return _ADDRESS.sub("", f"{type(value).__qualname__}:{value!r}")


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False
