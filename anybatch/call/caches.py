"""The caches of compiled programs and of plans: bounded, thread-safe, and emptied by `clear_caches`.

`Programs` compiles and runs functions of arrays. Its cache has the lowered program as its key.
"""

import collections
import dataclasses
import hashlib
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import jax

from anybatch.jaxprs import versions

V = TypeVar("V")

_CACHES: "weakref.WeakSet[Cache[Any]]" = weakref.WeakSet()


class Cache(Generic[V]):
    """A mapping that forgets its least recently used entry when it is full.

    It may be `of_programs`: compiled programs, which `jax.clear_caches()` drops too, where JAX allows it.
    """

    def __init__(self, capacity: int, *, of_programs: bool = False) -> None:
        self._capacity = capacity
        self._entries: collections.OrderedDict[Hashable, V] = collections.OrderedDict()
        self._lock = threading.Lock()
        _CACHES.add(self)
        if of_programs:
            versions.clear_with_jax(self)

    def get(self, key: Hashable) -> V | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Hashable, value: V) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self._capacity:
                self._entries.popitem(last=False)

    def cache_clear(self) -> None:
        """Removes all entries. The name is the one that `jax.clear_caches` calls."""
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._entries))


def clear_caches() -> None:
    """Empties the caches of anybatch in this process: compiled programs and chosen strategies.

    The next call compiles and plans again. Plans on disk, in the folder `ANYBATCH_CACHE`, stay. A `train_step` also
    loses its compiled programs, but keeps the strategies that it has chosen, so that a run continues with the same
    bits.

    `jax.clear_caches()` drops the compiled programs of anybatch too. This function does not call it.

    >>> import anybatch as ab
    >>> ab.clear_caches()
    """
    for cache in list(_CACHES):
        cache.cache_clear()


CAPACITY = 128


@dataclasses.dataclass
class CompiledProgram:
    """A compiled function of flat arrays, and its key in the cache (None if it must not be cached)."""

    executable: Callable[..., list[Any]]
    key: Any
    text_hash: str | None  # a hash of the lowered program, the same in every process
    has_run: bool = False  # whether it has finished once, so that the memory is enough for it

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

    def compile(
        self, fun: Callable[..., list[Any]], *arrays: Any, has_effects: bool, donated: Sequence[int] = ()
    ) -> CompiledProgram:
        """The compiled `fun` for these arrays, from the cache or new. Only `keep` puts a new one into the cache.

        The arrays at the positions `donated` may be overwritten. Arrays may be types (`jax.ShapeDtypeStruct`).
        """
        traced = jax.jit(lambda *flat: fun(*flat), donate_argnums=tuple(donated)).trace(*arrays)
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
        if program.key is not None:
            self._kept.put(program.key, program)


# One cache for all wrapped losses: a loss that is wrapped again in every step is not compiled in every step.
PROGRAMS = Programs()


def can_run(*arrays: Any) -> bool:
    """True outside of any trace: a call with these arrays returns numbers, not tracers."""
    return versions.is_eager() and not any(isinstance(array, jax.core.Tracer) for array in arrays)


def _placement(array: Any) -> Any:
    """The type and sharding of an argument: the executable depends on both, and the program's text lacks them."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return str(array), None
    placement = (array.sharding, array.committed) if isinstance(array, jax.Array) else None
    return _type(jax.typeof(array)), placement


def _type(aval: Any) -> tuple[str, bool]:
    """A type and its weak_type flag. The text of a program lacks that flag, and later promotions depend on it."""
    return str(aval), aval.weak_type
