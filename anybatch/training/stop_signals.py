"""`StopSignals`: SIGTERM and Ctrl-C stop a run between two steps, in all processes after the same step."""

import json
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from anybatch.errors import user_stacklevel

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_END = object()


class StopSignals:
    """A context in which the first SIGTERM or Ctrl-C is recorded instead of ending the process.

    A second one has its usual effect: it raises `KeyboardInterrupt`, or ends the process. Python delivers signals to
    the main thread only; in other threads nothing is recorded.

    Args:
      prints: whether to print at once, on the standard error, that the run will stop.
    """

    def __init__(self, *, prints: bool = False) -> None:
        self._prints = prints
        self._received: str | None = None
        self._agreed: str | None = None
        self._handlers: dict[int, Any] = {}  # those from before

    @property
    def received(self) -> str | None:
        """The name of the signal that this process received, or None."""
        return self._received

    @property
    def agreed(self) -> str | None:
        """The name of a signal that any process received and that all processes know of, or None."""
        return self._received if jax.process_count() == 1 else self._agreed

    def in_lockstep(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of each process, as long as every process has one and none received a signal.

        All processes must take a step together: one that went ahead would wait for the others forever. So they exchange
        a few bytes before each step.
        """
        while True:
            item = next(items, _END)
            own = 1 + SIGNALS.index(signal.Signals[self._received]) if self._received else 0
            everyone = np.asarray(multihost_utils.process_allgather(np.asarray([own, item is _END], np.int32)))
            signals, ended = everyone.reshape(-1, 2).T
            if signals.any():
                self._agreed = SIGNALS[signals.max() - 1].name
                return
            if ended.any():
                if not ended.all():
                    warnings.warn(
                        f"The batches of process {', '.join(map(str, np.flatnonzero(ended)))} have ended, and the "
                        "others have more: the run ends here. Give every process equally many batches, or pass steps= "
                        "and batches that can be iterated over again.",
                        RuntimeWarning,
                        stacklevel=user_stacklevel(),
                    )
                return
            yield item
            del item

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not None:  # None: a handler outside of Python, which cannot be restored
                    self._handlers[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number).name
            if self._prints:  # now, since a step may take long; with os.write, since print() is not reentrant
                text = f"\n{self._received}: stopping after this step. A second one stops at once.\n"
                os.write(2, text.encode())
            return
        handler = self._handlers[number]
        signal.signal(number, handler)
        if callable(handler):
            handler(number, frame)
        elif handler != signal.SIG_IGN:
            os.kill(os.getpid(), number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
            outer = getattr(handler, "__self__", None)
            if isinstance(outer, StopSignals) and self._received == signal.Signals(number).name:
                outer._received = outer._received or self._received  # a run inside a run: both stop
        self._handlers.clear()


def gather_json(value: Any) -> list[Any]:
    """The JSON values of all processes, in their order. All processes must call it."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.asarray(len(text), np.int32))).reshape(-1)
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(text)] = text
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
