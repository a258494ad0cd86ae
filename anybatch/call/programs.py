"""Runs a function of arrays compiled, and keeps what it compiled by what the function computes."""

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
    """A compiled function of flat arrays, and the key by which it is found again, if it may be kept."""

    executable: Callable[..., list[Any]]
    key: Any
    text_hash: str | None  # of the lowered program, the same in every process

    def __call__(self, *arrays: Any) -> list[Any]:
        return self.executable(*arrays)


class Programs:
    """Compiled functions, found again by the program that they lower to.

    A call outside `jit` should be fast, so it should not compile anew; and it must be right, so it must not
    go by the identity of the user's function: that function may read a global, or an attribute of its object,
    which has changed since. So every such call traces the function, as `jax.value_and_grad` does, and what
    was traced decides which program runs. Under `jit` none of this happens.
    """

    def __init__(self) -> None:
        self._kept: Cache[CompiledProgram] = Cache(CAPACITY, of_programs=True)

    def run(self, fun: Callable[..., list[Any]], *arrays: Any, has_effects: bool) -> list[Any]:
        """`fun(*arrays)`, compiled, for flat arrays. Inside another trace, simply `fun(*arrays)`."""
        if not can_run(*arrays):
            return fun(*arrays)
        program = self.compile(fun, *arrays, has_effects=has_effects)
        self.keep(program)
        return program(*arrays)

    def compile(self, fun: Callable[..., list[Any]], *arrays: Any, has_effects: bool) -> CompiledProgram:
        """`fun`, compiled for these arrays: the program that is kept, or a new one, which is not kept yet."""
        traced = jax.jit(lambda *flat: fun(*flat)).trace(*arrays)
        lowered = traced.lower()
        text = None if has_effects else versions.program_key(lowered)
        if text is None:
            return CompiledProgram(lowered.compile(), None, None)
        text_hash = hashlib.sha256(text.encode()).hexdigest()
        types = tuple(_type(aval) for aval in traced.jaxpr.out_avals)
        key = (text_hash, types, (*map(_placement, arrays), versions.default_device()))
        kept = self._kept.get(key)
        # The executable alone is kept: a function would keep alive the arrays that it closes over.
        return CompiledProgram(lowered.compile(), key, text_hash) if kept is None else kept

    def keep(self, program: CompiledProgram) -> None:
        """Keeps a program for the next call, and forgets the one that was not used for longest."""
        if program.key is not None:
            self._kept.put(program.key, program)


# Shared, since programs go by what they compute: a wrapper made anew for each call does not compile for each call.
PROGRAMS = Programs()


def can_run(*arrays: Any) -> bool:
    """Whether a call with these arrays computes its results, rather than being part of another trace."""
    return versions.is_eager() and not any(isinstance(array, jax.core.Tracer) for array in arrays)


def _placement(array: Any) -> Any:
    """What an executable expects of an argument beyond what its text spells out."""
    placement = (array.sharding, array.committed) if isinstance(array, jax.Array) else None
    return _type(jax.typeof(array)), placement


def _type(aval: Any) -> tuple[str, bool]:
    """A type in full: the text of a program does not tell weak types, which decide about promotion later."""
    return str(aval), aval.weak_type
