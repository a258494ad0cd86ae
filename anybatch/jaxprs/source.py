"""Finds the line of the user's source that an equation comes from."""

import dataclasses
import functools
import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import jax

from anybatch.jaxprs.graph import Node

_INSTALLED = ("site-packages", "dist-packages")


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """A line of the user's source, and the library function it calls, if the equation comes from a library."""

    file: str = ""
    line: int = 0
    function: str = ""
    inside: str = ""


def locate(node: Node) -> SourceLine:
    """The line of the user's source that a node comes from: the innermost one outside of libraries.

    The frames that JAX keeps of an equation end where the function that contains it begins: a jitted function, one
    with a custom derivative, the body of a loop. If all of these are in a library, the line of the call is taken.
    """
    equations = [node.equation, *reversed(node.calls)]
    tracebacks = [equation.source_info.traceback for equation in equations]
    frames = [
        (depth, frame.file_name, frame.line_num, frame.function_name)
        for depth, traceback in enumerate(tracebacks)
        for frame in (traceback.frames if traceback else ())  # the innermost first
    ]
    files = [file for _, file, _, _ in frames if file and not _is_own(file)]
    package = _package(files[-1]) if files else ""
    users: tuple[Callable[[str], bool], ...] = (
        lambda file: not _is_library(file) and not file.startswith("<"),
        lambda file: not _is_library(file),  # a line of a shell, or generated code
        lambda file: bool(package) and file.startswith(package),  # the loss itself is in an installed package
        lambda file: not _is_own(file),
    )
    for is_users in users:
        for position, (depth, file, line, function) in enumerate(frames):
            if file and is_users(file):
                inside = _callee([frame[1:] for frame in frames[:position]], equations[1 : depth + 1][::-1])
                return SourceLine(_displayed(file), line, _plain(function), inside)
    return SourceLine()


def _displayed(file: str) -> str:
    """The name of a file, or that of a notebook's cell, such as "In[3]" in IPython: the file of a cell is temporary."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda _: None)(file)
    return file if named is None else str(named[1])


def _callee(frames: Sequence[tuple[str, int, str]], calls: Sequence[Any]) -> str:
    """The library function that the user's line called.

    The frames are those between that line and the equation, the innermost first. The calls are the equations among
    these that call functions, the outermost first.
    """
    outside = [_plain(function) for file, _, function in reversed(frames) if not _is_own(file)]
    # Most frames are wrappers. The most telling name is that of a layer, or else a public one.
    for is_telling in (lambda name: name.endswith(".__call__"), lambda name: not _is_private(name), lambda name: True):
        for name in outside:
            if is_telling(name):
                return name.removesuffix(".__call__")
    return next((str(call.params["name"]) for call in calls if "name" in call.params), "")


def _is_private(name: str) -> bool:
    return "wrap" in name or any(part.startswith("_") for part in name.split("."))


def _plain(function: str) -> str:
    return function.replace(".<locals>", "")


@functools.cache
def _is_library(file: str) -> bool:
    installed = any(f"{os.sep}{name}{os.sep}" in file for name in _INSTALLED)
    return installed or _is_own(file) or any(file.startswith(root + os.sep) for root in _library_roots())


@functools.cache
def _is_own(file: str) -> bool:
    roots = (os.path.dirname(jax.__file__), os.path.dirname(os.path.dirname(__file__)))
    return file.startswith("<frozen") or any(file.startswith(root + os.sep) for root in roots)


def _package(file: str) -> str:
    """The folder of the installed package that a file is in, or an empty text."""
    for name in _INSTALLED:
        before, found, after = file.rpartition(f"{os.sep}{name}{os.sep}")
        if found and os.sep in after:
            return f"{before}{found}{after.split(os.sep)[0]}{os.sep}"
    return ""


@functools.cache
def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")})
