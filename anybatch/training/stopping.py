"""A wish to stop, from SIGTERM or Ctrl-C, that is granted between two steps."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopper:
    """While it is entered, the first SIGTERM or Ctrl-C is noted instead of ending the process.

    A second one does what it would have done without us: it raises `KeyboardInterrupt`, or ends the process. Signals
    reach the main thread alone; elsewhere nothing is caught.
    """

    def __init__(self) -> None:
        self._noted: str | None = None
        self._before: dict[int, Any] = {}

    @property
    def noted(self) -> str | None:
        """The name of the signal that came, if one did."""
        return self._noted

    def agreed(self) -> str | None:
        """The signal that came to any of the processes: all of them must ask, after the same step."""
        if jax.process_count() == 1:
            return self._noted
        own = 1 + SIGNALS.index(signal.Signals[self._noted]) if self._noted else 0
        highest = int(np.max(multihost_utils.process_allgather(np.asarray(own, np.int32))))
        return signal.Signals(SIGNALS[highest - 1]).name if highest else None

    def __enter__(self) -> "Stopper":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not None:  # else it is not Python's to give back
                    self._before[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is None:
            self._noted = signal.Signals(number).name
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
        self._before.clear()
