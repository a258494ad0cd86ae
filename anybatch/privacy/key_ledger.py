"""Remembers the keys that this process has used, and refuses a second use.

If two results have the same noise, their difference has none, and reveals the data.

The ledger sees uses in one process and outside `jit`, and never waits for a device. It recognises a run by the value of
its first key, which is read once; a step by the key array in its state, by identity; and a key that a loop passes by
identity, and by its value if that can be read without waiting.
"""

import collections
import threading
import weakref
from typing import Any

import jax
import numpy as np

from anybatch.errors import InputError
from anybatch.jaxprs import avals, versions

CAPACITY = 2**16  # values of keys of single calls that are remembered; the oldest are forgotten

SAMPLING, RUN, DRAW = "sampling of batches", "noise of a run", "noise of a call"


class Ledger:
    """The keys that were used in this process, and for what."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[bytes, str] = {}  # of runs and samplings, which are few
        self._drawn: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        # By id. An array that is deleted is forgotten, since another array may then get the same id.
        self._arrays: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def begin_run(self, key: Any, *, allow_reuse: bool) -> None:
        """Records the first key of a run. Raises an InputError if it was used before."""
        self._begin("key", key, RUN, allowed=(SAMPLING, RUN, DRAW) if allow_reuse else ())

    def begin_sampling(self, key: Any) -> None:
        """Records a key that batches are drawn with. Raises an InputError if noise was drawn with it.

        Drawing the same batches again, to resume a run, is allowed.
        """
        self._begin("seed", key, SAMPLING, allowed=(SAMPLING,))

    def _begin(self, name: str, key: Any, use: str, allowed: tuple[str, ...]) -> None:
        value = value_of(key)
        if value is None:
            return
        with self._lock:
            for before in self._uses(value):
                if before not in allowed:
                    raise _used_twice(name, before)
            self._values[value] = use

    def check_draw(self, key: Any) -> None:
        """Raises an InputError if noise or batches were drawn with a key before."""
        value = value_of(key, may_wait=False)
        with self._lock:
            uses = [*self._uses(value), *([DRAW] if self._is_spent(key) else [])]
            if uses:
                raise _used_twice("noise_key", uses[0])

    def record_draw(self, key: Any) -> None:
        """Records that the noise of a call was drawn with a key."""
        value = value_of(key, may_wait=False)
        self.record_step(key)
        with self._lock:
            if value is not None:
                self._drawn[value] = None
                if len(self._drawn) > CAPACITY:
                    self._drawn.popitem(last=False)

    def check_step(self, key: Any) -> None:
        """Raises an InputError if a step was taken from the state with this key."""
        with self._lock:
            if self._is_spent(key):
                raise InputError(
                    "Each state can be stepped once: a second step would have the same noise, and the difference of "
                    "both results would reveal the data without noise",
                    given="a state from which a step was taken before",
                    remedy="Continue from the state that the step returned: state, metrics = step(state, batch). To "
                    "repeat a step on purpose and release only one result, pass allow_key_reuse=True to dp_sgd.",
                )

    def record_step(self, key: Any) -> None:
        """Records that a step was taken from the state with this key."""
        with self._lock:
            if not isinstance(key, jax.core.Tracer) and isinstance(key, jax.Array):
                self._arrays[id(key)] = key

    def _uses(self, value: bytes | None) -> list[str]:
        uses = [] if value is None else [self._values.get(value), DRAW if value in self._drawn else None]
        return [use for use in uses if use is not None]

    def _is_spent(self, key: Any) -> bool:
        return self._arrays.get(id(key)) is key


LEDGER = Ledger()


def value_of(key: Any, *, may_wait: bool = True) -> bytes | None:
    """The bits of a key; None under `jit`, if they are on the devices of other processes, or must be waited for."""
    if isinstance(key, jax.core.Tracer) or not versions.is_eager():
        return None
    bits = jax.random.key_data(key) if avals.has_keys(key) else key
    is_copied = may_wait and isinstance(bits, jax.Array) and (bits.is_fully_addressable or bits.is_fully_replicated)
    return np.asarray(bits).tobytes() if is_copied or is_readable(bits) else None


def is_readable(array: Any) -> bool:
    """True if this process can read an array without waiting for a device."""
    if not isinstance(array, jax.Array):
        return True
    on_device: Any = array
    return bool(on_device.is_fully_addressable and on_device.is_ready())


def _used_twice(name: str, before: str) -> InputError:
    return InputError(
        "A key can be used once: noise that is added twice can be subtracted, and noise from the key of the batches is "
        "not independent of them",
        given=f"{name}: a key that was used before, for the {before}",
        remedy=f"Pass a new key, e.g. {name}=privacy.secret_key(), or split it: key, other = jax.random.split(key). "
        "To repeat a run on purpose and release only one of them, pass allow_key_reuse=True.",
    )
