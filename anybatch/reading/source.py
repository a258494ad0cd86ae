"""Where in the user's own source an equation comes from, and what to blame it for."""

import dataclasses
import functools
import os
import sysconfig

import jax

from anybatch import compat
from anybatch.reading.graph import Node


@dataclasses.dataclass(frozen=True)
class Blame:
    """A line that brings examples together, so that they cannot be computed one microbatch at a time."""

    file: str
    line: int
    function: str
    primitive: str
    why: str
    inside: str = ""  # the library function in which it happens, if it is not the user's own line

    @property
    def place(self) -> str:
        """The line in the form that editors and terminals turn into a link."""
        return f"{self.file}:{self.line}" if self.file else "an unknown line"

    def __str__(self) -> str:
        inside = f", inside {self.inside}" if self.inside else ""
        function = f" in {self.function}" if self.function else ""
        return f"{self.place}{function} ({self.primitive}{inside}): {self.why}"


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of source, and the library function that it called, if the equation is of a library."""

    file: str = ""
    line: int = 0
    function: str = ""
    inside: str = ""


def blame(node: Node, why: str) -> Blame:
    """Blames a node."""
    place = locate(node)
    return Blame(place.file, place.line, place.function, node.name, why, place.inside)


def locate(node: Node) -> Place:
    """The user's line that a node comes from: the innermost one that is not a library's."""
    equation = node.equation
    for call in node.calls:
        # JAX caches the trace of a function that it jits itself, with the lines of whoever called it first.
        if _is_library(compat.defining_file(call)):
            equation = call
            break
    frames = compat.source_frames(equation)
    for is_foreign in (_is_library, _is_own):  # or, where everything is installed, at least not JAX
        for position, (file, line, function) in enumerate(frames):
            if file and not is_foreign(file):
                return Place(file, line, _plain(function), _callee(node, frames[:position]))
    return Place()


def _callee(node: Node, frames: list[tuple[str, int, str]]) -> str:
    """The library function that the user's line called."""
    outside = [_plain(function) for file, _, function in reversed(frames) if not _is_own(file)]
    # Wrappers of wrappers: the name that says something is that of a layer, or else a public one.
    for is_telling in (lambda name: name.endswith(".__call__"), lambda name: not _is_private(name), lambda name: True):
        for name in outside:
            if is_telling(name):
                return name.removesuffix(".__call__")
    for call in node.calls:
        if _is_library(compat.defining_file(call)):
            return str(call.params.get("name", ""))
    return ""


def _is_private(name: str) -> bool:
    return "wrap" in name or any(part.startswith("_") for part in name.split("."))


def _plain(function: str) -> str:
    return function.replace(".<locals>", "")


@functools.cache
def _is_library(file: str) -> bool:
    installed = any(f"{os.sep}{name}{os.sep}" in file for name in ("site-packages", "dist-packages"))
    return installed or _is_own(file) or any(file.startswith(root + os.sep) for root in _library_roots())


@functools.cache
def _is_own(file: str) -> bool:
    roots = (os.path.dirname(jax.__file__), os.path.dirname(os.path.dirname(__file__)))
    return file.startswith("<frozen") or any(file.startswith(root + os.sep) for root in roots)


@functools.cache
def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths[name] for name in ("purelib", "platlib", "stdlib", "platstdlib")})
