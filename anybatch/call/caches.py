"""Every cache of the package: bounded, safe to use from several threads, and emptied by `clear_caches`."""

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
    """Forgets everything that anybatch keeps in this process: compiled programs and chosen strategies.

    The next call compiles and plans again. Plans on disk stay: they lie in the folder `ANYBATCH_CACHE`. The programs of
    a `train_step` are dropped too; the strategies that it has chosen stay, so that a run goes on with the same bits.

    `jax.clear_caches()` also drops our compiled programs. This function does not call it.

    >>> import anybatch as ab
    >>> ab.clear_caches()
    """
    for cache in list(_CACHES):
        cache.cache_clear()
