r"""Runs a learner's file in a process of its own, and asks it for what it found out.

>>> with Runner() as runner, runner.open("def double(x):\n    return 2 * x\n", "double.py") as submission:
...     submission.loaded["functions"]
{'double': [1, 1]}

Nothing that the file does reaches this process, but plain data through a pipe: see `isolation` for what it is kept
from, and `nursery` for the process that it is forked from.
"""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from anybatch.errors import AnybatchError, NotAvailableError
from anybatch.learn.runner import endings, wire
from anybatch.learn.runner.children import Child, Nursery
from anybatch.learn.runner.endings import Ended
from anybatch.learn.runner.isolation import Limits

__all__ = ["Ended", "Limits", "Runner", "Submission"]

# The answers of the courses that come with anybatch.
_COURSES = pathlib.Path(__file__).parents[1] / "courses"
_PATIENCE = 120.0  # seconds for a child to be ready, on a machine that is busy with other things


class Runner:
    """Where learners' code runs.

    The process that they are forked from is started at once, and is ready a second or two later. `open` can be called
    before; it waits.

    Args:
      limits: what each check may use.
      hidden: folders that cannot be read in a check, beside those of the courses of anybatch.
    """

    def __init__(
        self, limits: Limits | None = None, *, hidden: Sequence[str | os.PathLike] = (), _without: Collection[str] = ()
    ) -> None:
        if os.name != "posix":
            raise NotAvailableError("anybatch learn on Windows", remedy="Run it in WSL.")
        self.limits = Limits() if limits is None else limits
        self._order = {
            "do": "fork",
            "limits": dataclasses.asdict(self.limits),
            "hidden": [os.path.realpath(folder) for folder in (_COURSES, *hidden)],
            "without": sorted(_without),
        }
        self._wanted: Counter[int] = Counter()
        self._spares: dict[int, list[Child]] = {}
        self._lock = threading.RLock()
        self._nursery: Nursery | None = Nursery()

    def keep_warm(self, devices: Sequence[int]) -> None:
        """Keeps processes ready that wait for a file: one for each number of devices in the list."""
        with self._lock:
            self._wanted = Counter(devices)
            for count, spares in self._spares.items():
                for spare in spares[self._wanted[count] :]:
                    spare.close()
                del spares[self._wanted[count] :]
            self._refill()

    def open(self, source: str, path: str, *, devices: int = 1, anybatch: bool = False) -> "Submission":
        """Begins to run a file, and returns without waiting for it.

        Args:
          source: its text.
          path: its name, as messages have it; nothing is read there.
          devices: how many simulated devices it has.
          anybatch: whether it may import anybatch.
        """

        def fork() -> Child:
            with self._lock:
                return self._fork(devices, warm=False)

        with self._lock:
            child = self._take(devices)
        return Submission(child, fork, self._closed, self.limits, source, path, anybatch)

    def close(self) -> None:
        """Ends all processes, and removes what they had on disk."""
        with self._lock:
            self.keep_warm(())
            if self._nursery is not None:
                self._nursery.close()
            self._nursery = None

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _take(self, devices: int) -> Child:
        spares = self._spares.get(devices, [])
        while spares:
            spare = spares.pop(0)
            while spare.pump(0):
                pass
            if not spare.is_over:
                return spare
            spare.close()
        return self._fork(devices, warm=False)

    def _closed(self) -> None:
        """A check is over: only now, since a spare that warms up would take the cores from it."""
        with self._lock:
            self._refill()

    def _refill(self) -> None:
        for count, wanted in self._wanted.items():
            spares = self._spares.setdefault(count, [])
            while len(spares) < wanted:
                spares.append(self._fork(count, warm=True))

    def _fork(self, devices: int, warm: bool) -> Child:
        if self._nursery is None:
            raise AnybatchError("This Runner was closed: open a new one, `with Runner() as runner: ...`.")
        order = self._order | {"devices": devices, "warm": warm}
        if self._nursery.is_running:
            with contextlib.suppress(OSError):
                return Child(self._nursery, order)
        self._nursery.close()
        self._nursery = Nursery()
        return Child(self._nursery, order)


class Submission:
    """A learner's file while it is being checked. Not to be asked by two threads at once."""

    def __init__(
        self,
        child: Child,
        fork: Callable[[], Child],
        closed: Callable[[], None],
        limits: Limits,
        source: str,
        path: str,
        anybatch: bool,
    ) -> None:
        self._closed = closed
        self._child, self._fork, self._limits, self._source, self._path = child, fork, limits, source, path
        self._left = limits.seconds
        self.layers: frozenset[str] = frozenset()
        self._is_ready = False
        self._loaded: dict[str, Any] | None = None
        self._ended: Ended | None = None
        self._load = {"do": "load", "source": source, "path": path, "anybatch": anybatch}
        self._token = self._send(self._load)

    @property
    def loaded(self) -> dict[str, Any]:
        """What came of loading the file. Waits for it; raises `Ended`."""
        if self._loaded is None:
            if not self._is_ready:
                self._wait_until_ready()
            self._loaded = self._receive(self._token)
        return self._loaded

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Asks the process, and waits for its answer; raises `Ended` if there will be none."""
        assert self.loaded is not None
        if self._ended is not None:
            raise self._ended
        return self._receive(self._send(request))

    @property
    def prints(self) -> str:
        """What was printed so far, the beginning of it."""
        self._child.pump(0)
        return self._child.prints.decode(errors="replace")

    @property
    def prints_dropped(self) -> int:
        """How many bytes were printed after that."""
        return self._child.printed - len(self._child.prints)

    def end(self) -> None:
        """Has the process ended, also while another thread waits for an answer, which is then told so."""
        self._child.end()

    def close(self) -> None:
        """Has the process ended, with whatever it has started, and its folder removed. It does not wait for that."""
        self._child.close()
        self._closed()

    def __enter__(self) -> "Submission":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _send(self, request: Mapping[str, Any]) -> int:
        token = secrets.randbits(32)
        self._child.send(wire.frame(0, request) + wire.frame(token, None))
        return token

    def _wait_until_ready(self) -> None:
        """JAX has been started in the process; what follows is on the learner's account."""
        deadline, is_first = time.monotonic() + _PATIENCE, True
        while (found := self._child.take(0, 2**20)) is None:
            if self._child.is_over and is_first:
                # It, or the nursery with all of its children, was killed before, by whatever else ran on the machine.
                self._child.close()
                self._child, is_first = self._fork(), False
                self._token = self._send(self._load)
            if self._child.is_over or time.monotonic() > deadline:
                self._child.close()
                raise AnybatchError(self._child.failure())
            self._child.pump(deadline - time.monotonic())
        self.layers = frozenset(found["ready"])
        self._is_ready = True

    def _receive(self, token: int) -> dict[str, Any]:
        if self._ended is not None:
            raise self._ended
        try:
            return self._wait_for(token)
        except Ended as ended:
            self._ended = ended
            self._child.close()
            raise

    def _wait_for(self, token: int) -> dict[str, Any]:
        child, begin = self._child, time.monotonic()
        while True:
            was_over = child.is_over
            try:
                reply = child.take(token, self._limits.reply_bytes)
            except wire.BrokenWire:
                raise endings.broken() from None
            left = self._left - (time.monotonic() - begin)
            if child.printed > self._limits.print_bytes:
                raise endings.too_much_printed(self._limits)
            if reply is not None:
                self._left = left
                return reply
            if was_over or child.is_mute:
                raise self._why()
            if left <= 0:
                child.trace_and_end()
                raise endings.too_long(self._limits, self._trace, self._where())
            child.pump(left)

    def _why(self) -> Ended:
        child = self._child
        if not child.wait(max(1.0, self._left)):  # it lives, and has closed its end of the pipe
            return endings.broken()
        prints = child.prints.decode(errors="replace")
        return endings.of_status(child.status, self._limits, prints, self._trace, self._where())

    @property
    def _trace(self) -> str:
        return self._child.trace.decode(errors="replace")

    def _where(self) -> tuple[int, str] | None:
        return endings.line_of(self._trace, self._path, self._source)
