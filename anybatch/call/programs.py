"""Compiles and runs functions of arrays, with a cache whose key is the lowered program."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax

from anybatch.call.caches import Cache
from anybatch.jaxprs import versions

CAPACITY = 128


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """A compiled function of flat arrays, and its key in the cache (None if it must not be cached)."""

    executable: Callable[..., list[Any]]
    key: Any
    text_hash: str | None  # a hash of the lowered program, the same in every process

    def __call__(self, *arrays: Any) -> list[Any]:
        return self.executable(*arrays)


class Programs:
    """A cache of compiled functions whose key is the program that a function lowers to.

    A call outside `jit` should not compile again. But the identity of the user's function is no safe key: the function
    may read a global variable, or an attribute of an object, that has changed since. So every call outside `jit` traces
    the function, as `jax.value_and_grad` does, and the lowered program is the key. Under `jit`, nothing is cached here.
    """

    def __init__(self) -> None:
        self._kept: Cache[CompiledProgram] = Cache(CAPACITY, of_programs=True)

    def run(self, fun: Callable[..., list[Any]], *arrays: Any, has_effects: bool) -> list[Any]:
        """Compiles and runs `fun(*arrays)`. Inside another trace, it just calls `fun(*arrays)`."""
        if not can_run(*arrays):
            return fun(*arrays)
        program = self.compile(fun, *arrays, has_effects=has_effects)
        self.keep(program)
        return program(*arrays)

    def compile(self, fun: Callable[..., list[Any]], *arrays: Any, has_effects: bool) -> CompiledProgram:
        """The compiled `fun` for these arrays, from the cache or new. Only `keep` puts a new one into the cache."""
        traced = jax.jit(lambda *flat: fun(*flat)).trace(*arrays)
        lowered = traced.lower()
        text = None if has_effects else versions.program_key(lowered)
        if text is None:
            return CompiledProgram(lowered.compile(), None, None)
        text_hash = hashlib.sha256(text.encode()).hexdigest()
        types = tuple(_type(aval) for aval in traced.jaxpr.out_avals)
        key = (text_hash, types, (*map(_placement, arrays), versions.default_device()))
        kept = self._kept.get(key)
        # Only the executable is cached: `fun` would keep alive the arrays that it closes over.
        return CompiledProgram(lowered.compile(), key, text_hash) if kept is None else kept

    def keep(self, program: CompiledProgram) -> None:
        """Puts a program into the cache."""
        if program.key is not None:
            self._kept.put(program.key, program)


# One cache for all wrapped losses: a loss that is wrapped again in every step is not compiled in every step.
PROGRAMS = Programs()


def can_run(*arrays: Any) -> bool:
    """True outside of any trace: a call with these arrays returns numbers, not tracers."""
    return versions.is_eager() and not any(isinstance(array, jax.core.Tracer) for array in arrays)


def _placement(array: Any) -> Any:
    """The type and sharding of an argument: the executable depends on both, and the program's text lacks them."""
    placement = (array.sharding, array.committed) if isinstance(array, jax.Array) else None
    return _type(jax.typeof(array)), placement


def _type(aval: Any) -> tuple[str, bool]:
    """A type and its weak_type flag. The text of a program lacks that flag, and later promotions depend on it."""
    return str(aval), aval.weak_type
