"""Runs a function of arrays compiled, and keeps what it compiled by what the function computes."""

import collections
import hashlib
from collections.abc import Callable
from typing import Any

import jax

from anybatch import compat

CAPACITY = 32


class Programs:
    """Compiled functions, found again by the program that they lower to.

    A call outside `jit` should be fast, so it should not compile anew; and it must be right, so it must not
    go by the identity of the user's function: that function may read a global, or an attribute of its object,
    which has changed since. So every such call traces the function, as `jax.value_and_grad` does, and what
    was traced decides which program runs. Under `jit` none of this happens.
    """

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[Any, Callable[..., list[Any]]] = collections.OrderedDict()

    def run(self, fun: Callable[..., list[Any]], *arrays: Any) -> list[Any]:
        """`fun(*arrays)`, compiled, for flat arrays. Inside another trace, simply `fun(*arrays)`."""
        if compat.jit_is_disabled() or any(isinstance(array, jax.core.Tracer) for array in arrays):
            return fun(*arrays)
        lowered = jax.jit(lambda *flat: fun(*flat)).lower(*arrays)
        key = (
            hashlib.sha256(lowered.as_text().encode()).digest(),
            tuple(map(_placement, arrays)),
            compat.default_device(),
        )
        if key not in self._kept:
            # The executable alone is kept: a function would keep alive the arrays that it closes over.
            self._kept[key] = lowered.compile()
        self._kept.move_to_end(key)
        if len(self._kept) > CAPACITY:
            self._kept.popitem(last=False)
        return self._kept[key](*arrays)


def _placement(array: Any) -> Any:
    """What an executable expects of an argument beyond the types that its text spells out."""
    aval = jax.typeof(array)
    if isinstance(array, jax.Array):
        return str(aval), getattr(aval, "weak_type", False), array.sharding, array.committed
    return str(aval), getattr(aval, "weak_type", False)
