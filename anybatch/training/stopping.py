"""A wish to stop, from SIGTERM or Ctrl-C, that is granted between two steps; in many processes, by all at once."""

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


class Stopper:
    """While it is entered, the first SIGTERM or Ctrl-C is noted instead of ending the process.

    A second one does what it would have done without us: it raises `KeyboardInterrupt`, or ends the process. Signals
    reach the main thread alone; elsewhere nothing is caught.

    Args:
      says_so: whether to say at once, on the standard error, that the wish was noted.
    """

    def __init__(self, *, says_so: bool = False) -> None:
        self._says_so = says_so
        self._noted: str | None = None
        self._agreed: str | None = None
        self._before: dict[int, Any] = {}

    @property
    def noted(self) -> str | None:
        """The name of the signal that came, if one did."""
        return self._noted

    @property
    def agreed(self) -> str | None:
        """The signal that came to any of the processes, and that all know of."""
        return self._noted if jax.process_count() == 1 else self._agreed

    def together(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of each process, as long as all of them have one and none is told to stop.

        A step is taken by all processes or by none: one that went ahead would wait for the others without an end. So
        they ask each other before each step, by a few bytes.
        """
        while True:
            item = next(items, _END)
            own = 1 + SIGNALS.index(signal.Signals[self._noted]) if self._noted else 0
            everyone = np.asarray(multihost_utils.process_allgather(np.asarray([own, item is _END], np.int32)))
            signals, ended = everyone.reshape(-1, 2).T
            if signals.any():
                self._agreed = SIGNALS[signals.max() - 1].name
                return
            if ended.any():
                if not ended.all():
                    warnings.warn(
                        f"The batches of process {', '.join(map(str, np.flatnonzero(ended)))} have ended, and the "
                        "others have more: the run ends here. Give every process as many, or pass steps= and something "
                        "that can be iterated over again.",
                        RuntimeWarning,
                        stacklevel=user_stacklevel(),
                    )
                return
            yield item
            del item

    def __enter__(self) -> "Stopper":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not None:  # else it is not Python's to give back
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is None:
            self._noted = signal.Signals(number).name
            if self._says_so:  # a step may take a while; print() may be in the middle of something
                text = f"\n{self._noted}: stopping after this step. Once more ends it at once.\n"
                os.write(2, text.encode())
            return
        before = self._before[number]
        signal.signal(number, before)
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            os.kill(os.getpid(), number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
            around = getattr(before, "__self__", None)
            if isinstance(around, Stopper) and self._noted == signal.Signals(number).name:
                around._noted = around._noted or self._noted  # a run within a run: both are to stop
        self._before.clear()


def of_all_processes(value: Any) -> list[Any]:
    """What each process has, as JSON can say it, in their order. All of them must ask."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.asarray(len(text), np.int32))).reshape(-1)
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(text)] = text
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(lengths), -1)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]
