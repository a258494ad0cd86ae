"""The class of all caches in this process: bounded, thread-safe, and emptied by `clear_caches`."""

import collections
import threading
import weakref
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

from anybatch.jaxprs import versions

V = TypeVar("V")

_CACHES: "weakref.WeakSet[Cache[Any]]" = weakref.WeakSet()


class Cache(Generic[V]):
    """A mapping that forgets its least recently used entry when it is full.

    Args:
      capacity: the largest number of entries.
      of_programs: True for compiled programs, which `jax.clear_caches()` drops too, where JAX allows it.
    """

    def __init__(self, capacity: int, *, of_programs: bool = False) -> None:
        self._capacity = capacity
        self._entries: collections.OrderedDict[Hashable, V] = collections.OrderedDict()
        self._lock = threading.Lock()
        _CACHES.add(self)
        if of_programs:
            versions.clear_with_jax(self)

    def get(self, key: Hashable) -> V | None:
        """The entry for `key`, or None."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: Hashable, value: V) -> None:
        """Adds an entry, or replaces it."""
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

    __hash__ = object.__hash__


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
