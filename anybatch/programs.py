"""Runs a function of arrays compiled, and keeps what it compiled by what the function computes."""

import collections
import hashlib
import threading
from collections.abc import Callable
from typing import Any

import jax

from anybatch import compat

CAPACITY = 128


class Programs:
    """Compiled functions, found again by the program that they lower to.

    A call outside `jit` should be fast, so it should not compile anew; and it must be right, so it must not
    go by the identity of the user's function: that function may read a global, or an attribute of its object,
    which has changed since. So every such call traces the function, as `jax.value_and_grad` does, and what
    was traced decides which program runs. Under `jit` none of this happens.
    """

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[Any, Callable[..., list[Any]]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def run(self, fun: Callable[..., list[Any]], *arrays: Any, has_effects: bool) -> list[Any]:
        """`fun(*arrays)`, compiled, for flat arrays. Inside another trace, simply `fun(*arrays)`."""
        if not compat.is_eager() or any(isinstance(array, jax.core.Tracer) for array in arrays):
            return fun(*arrays)
        traced = jax.jit(lambda *flat: fun(*flat)).trace(*arrays)
        lowered = traced.lower()
        text = None if has_effects else compat.program_key(lowered)
        if text is None:
            return lowered.compile()(*arrays)
        types = tuple(_type(aval) for aval in traced.jaxpr.out_avals)
        placement = (*map(_placement, arrays), compat.default_device())
        key = (hashlib.sha256(text.encode()).digest(), types, placement)
        with self._lock:
            program = self._kept.get(key)
        # The executable alone is kept: a function would keep alive the arrays that it closes over.
        program = lowered.compile() if program is None else program
        with self._lock:
            self._kept[key] = program
            self._kept.move_to_end(key)
            if len(self._kept) > CAPACITY:
                self._kept.popitem(last=False)
        return program(*arrays)


# Shared, since programs go by what they compute: a wrapper made anew for each call does not compile for each call.
PROGRAMS = Programs()


def _placement(array: Any) -> Any:
    """What an executable expects of an argument beyond what its text spells out."""
    placement = (array.sharding, array.committed) if isinstance(array, jax.Array) else None
    return _type(jax.typeof(array)), placement


def _type(aval: Any) -> tuple[str, bool]:
    """A type in full: the text of a program does not tell weak types, which decide about promotion later."""
    return str(aval), aval.weak_type
