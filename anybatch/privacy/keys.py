"""Keys that were used before. Noise that is added twice can be subtracted: two results then show the data bare.

What can be seen is seen in one process and outside `jit`, and nothing waits for a device. A run is known by the value
of its first key, which is read once; a step by the key in its state, the very array; a key that a loop passes by the
array, and by its value where that is at hand.
"""

import collections
import threading
import weakref
from typing import Any

import jax
import numpy as np

from anybatch.errors import InputError
from anybatch.jaxprs import avals, versions

CAPACITY = 2**16  # values of single keys that are remembered, the newest

SAMPLING, RUN, DRAW = "sampling of batches", "noise of a run", "noise of a call"


class Ledger:
    """The keys that were used in this process, and what for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[bytes, str] = {}  # of runs and samplings: few
        self._drawn: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._arrays: dict[int, weakref.ref[Any]] = {}

    def begin_run(self, key: Any, *, allow_reuse: bool) -> None:
        """Records the first key of a run.

        Raises:
          InputError: if it was used before.
        """
        value = value_of(key)
        if value is None:
            return
        with self._lock:
            before = self._values.get(value) or (DRAW if value in self._drawn else None)
            if before is not None and not allow_reuse:
                raise _used_twice("key", before)
            self._values[value] = RUN

    def begin_sampling(self, key: Any) -> None:
        """Records a key of which batches are drawn. Drawing the same batches again, to resume, is all right.

        Raises:
          InputError: if noise was drawn of it.
        """
        value = value_of(key)
        if value is None:
            return
        with self._lock:
            before = self._values.get(value, SAMPLING)
            if before != SAMPLING or value in self._drawn:
                raise _used_twice("seed", before if before != SAMPLING else DRAW)
            self._values[value] = SAMPLING

    def check_draw(self, key: Any) -> None:
        """Refuses a key of which the noise of a call was drawn before, or batches.

        Raises:
          InputError: if it was.
        """
        value = value_if_ready(key)
        with self._lock:
            before = None if value is None else self._values.get(value)
            if before is not None or self._is_spent(key) or value in self._drawn:
                raise _used_twice("noise_key", before or DRAW)

    def record_draw(self, key: Any) -> None:
        """Records that the noise of a call was drawn."""
        value = value_if_ready(key)
        with self._lock:
            self._spend(key)
            if value is not None:
                self._drawn[value] = None
                if len(self._drawn) > CAPACITY:
                    self._drawn.popitem(last=False)

    def check_step(self, key: Any) -> None:
        """Refuses a state from which a step was taken.

        Raises:
          InputError: if one was.
        """
        with self._lock:
            if self._is_spent(key):
                raise InputError(
                    "Each state can be stepped once: the noise of another step would be the same, and their "
                    "difference would show the data without any",
                    given="a state from which a step was taken before",
                    remedy="Go on from the state that it returned: state, metrics = step(state, batch). To repeat a "
                    "step on purpose, and release one result only: privacy.dp_sgd(..., allow_key_reuse=True).",
                )

    def record_step(self, key: Any) -> None:
        """Records that a step was taken from the state with this key."""
        with self._lock:
            self._spend(key)

    def _is_spent(self, key: Any) -> bool:
        known = self._arrays.get(id(key))
        return known is not None and known() is key

    def _spend(self, key: Any) -> None:
        position = id(key)
        if not isinstance(key, jax.core.Tracer) and isinstance(key, jax.Array):
            # Forgotten with the array, whose place another one may take.
            self._arrays[position] = weakref.ref(key, lambda gone: self._forget(position, gone))

    def _forget(self, position: int, gone: Any) -> None:
        if self._arrays.get(position) is gone:
            del self._arrays[position]


LEDGER = Ledger()


def value_of(key: Any) -> bytes | None:
    """The bits of a key; None under `jit`, where it has none yet, or if they lie with other processes."""
    if isinstance(key, jax.core.Tracer) or not versions.is_eager():
        return None
    bits = _bits(key)
    is_here = not isinstance(bits, jax.Array) or bits.is_fully_addressable or bits.is_fully_replicated
    return np.asarray(bits).tobytes() if is_here else None


def value_if_ready(key: Any) -> bytes | None:
    """The bits of a key, unless one would have to wait for them."""
    if isinstance(key, jax.core.Tracer) or not versions.is_eager():
        return None
    bits = _bits(key)
    return np.asarray(bits).tobytes() if is_at_hand(bits) else None


def is_at_hand(array: Any) -> bool:
    """Whether an array can be read by this process without waiting for a device."""
    if not isinstance(array, jax.Array):
        return True
    on_device: Any = array
    return bool(on_device.is_fully_addressable and on_device.is_ready())


def _bits(key: Any) -> Any:
    return jax.random.key_data(key) if avals.has_keys(key) else key


def _used_twice(name: str, before: str) -> InputError:
    return InputError(
        "A key is for one use: noise that is added twice can be subtracted, and noise that batches were drawn with "
        "is not independent of them",
        given=f"{name}: a key that was used before, for the {before}",
        remedy=f"Pass another one, e.g. {name}=privacy.secret_key(), or split it: key, other = jax.random.split(key). "
        "To repeat a run on purpose, and release one of them only: allow_key_reuse=True.",
    )
