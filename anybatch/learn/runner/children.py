"""The grader's ends of the nursery and of its children: sockets, pipes, and what came out of them."""

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from anybatch.learn.runner import isolation, nursery, wire

_START = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from anybatch.learn.runner import nursery
nursery.main(int(sys.argv[2]), sys.argv[3])
"""
_MOST_TRACE = 2**16


class Nursery:
    """The process that forks children, started at once and without waiting for it."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="anybatch-learn-")
        self._log = os.path.join(self.folder, "nursery.log")
        self.control, far = socket.socketpair()
        places = [place for place in sys.path if place]  # the empty one is the current folder, which is none of ours
        try:
            with open(self._log, "wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", _START, json.dumps(places), str(far.fileno()), self.folder],
                    env=isolation.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    pass_fds=(far.fileno(),),
                    start_new_session=True,  # out of reach of Ctrl-C
                )
        finally:
            far.close()
        self._lock = threading.Lock()
        self._last = 0
        self._finalizer = weakref.finalize(self, _end, self.control, self.process, self.folder)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def number(self) -> int:
        """A new one, for a child."""
        with self._lock:
            self._last += 1
            return self._last

    def order(self, order: Mapping[str, Any], pipes: Sequence[int] = ()) -> None:
        """Sends an order, with ends of pipes; raises OSError if the nursery is gone."""
        with self._lock:
            nursery.send(self.control, dict(order), list(pipes))

    def log(self) -> str:
        """What it had to say, which is nothing unless something is wrong with it."""
        with contextlib.suppress(OSError), open(self._log, errors="replace") as file:
            return file.read()[-4000:].strip()
        return ""

    def close(self) -> None:
        """Ends it with all of its children, and removes their folders."""
        self._finalizer()


def _end(control: socket.socket, process: subprocess.Popen, folder: str) -> None:
    control.close()  # upon which it ends its children and itself
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    nursery.remove(folder)


class Child:
    """One child, ordered from the nursery; `pump` moves what is in its pipes, and never waits for all of it.

    `is_over`: the child has ended, or the nursery has. `is_mute`: it has closed the pipe of its results. `status`: how
    it ended, negative for a signal. `prints`: the beginning of what was printed; `printed`: how many bytes in all.
    """

    def __init__(self, parent: Nursery, order: Mapping[str, Any]) -> None:
        self._parent, self._number = parent, parent.number()
        self.prints, self.trace, self.printed = bytearray(), bytearray(), 0
        self.pid: int | None = None
        self.status: int | None = None
        self.is_over = self.is_mute = self._is_closed = False
        self._results, self._news, self._unsent = bytearray(), bytearray(), bytearray()
        self._most_prints = int(order["limits"]["shown_print_bytes"])
        self._selector = selectors.DefaultSelector()
        far, self._requests = os.pipe()
        os.set_blocking(self._requests, False)
        self._far = [far]
        for hear in (self._hear_results, self._hear_prints, self._hear_trace, self._hear_news):
            near, far = os.pipe()
            os.set_blocking(near, False)
            self._selector.register(near, selectors.EVENT_READ, hear)
            self._far.append(far)
        try:
            parent.order({**order, "number": self._number}, self._far)
        except OSError:
            self._release()
            raise
        if sys.platform != "darwin":  # a Mac loses descriptors on their way if the sender has closed them already
            self._let_go()

    def send(self, data: bytes) -> None:
        """Sends as much as the pipe takes now, and the rest while `pump` waits."""
        self._unsent += data
        self._flush()

    def take(self, token: int, most: int) -> Any:
        """The next answer, or None while it is not there; raises `BrokenWire` for anything without the token."""
        start = wire.header(bytes(self._results[: wire.HEADER]))
        if start is None:
            return None
        length, found = start
        if found != token or length > most:
            raise wire.BrokenWire("no answer begins so")
        if len(self._results) < wire.HEADER + length:
            return None
        data = bytes(self._results[wire.HEADER : wire.HEADER + length])
        del self._results[: wire.HEADER + length]
        answer = wire.decode(data)
        if not isinstance(answer, dict):
            raise wire.BrokenWire("an answer is a dict")
        return answer

    def pump(self, seconds: float) -> bool:
        """Waits until something comes, for so many seconds at most, and keeps it. Returns whether anything came."""
        if self._is_closed:
            return False
        came = self._selector.select(max(0.0, seconds))
        for key, events in came:
            if events & selectors.EVENT_WRITE:
                self._flush()
            else:
                self._hear(key.fd, key.data)
        if self.is_over:  # what it had written before is complete now
            for key in list(self._selector.get_map().values()):
                while key.events & selectors.EVENT_READ and self._hear(key.fd, key.data):
                    pass
        return bool(came)

    def wait(self, seconds: float) -> bool:
        """Waits for its end, for so many seconds at most. Returns whether it has ended."""
        deadline = time.monotonic() + seconds
        while not self.is_over and (left := deadline - time.monotonic()) > 0:
            self.pump(left)
        return self.is_over

    def trace_and_end(self) -> None:
        """Ends it, with a trace of where it was if it leaves one."""
        with contextlib.suppress(OSError):
            self._parent.order({"do": "trace", "number": self._number})
        self.wait(0.5)

    def end(self) -> None:
        """Has it ended, with whatever it has started, without waiting for that. Any thread may do so."""
        with contextlib.suppress(OSError):
            self._parent.order({"do": "end", "number": self._number})

    def close(self) -> None:
        """Has it ended, and its folder removed, without waiting for that."""
        if self._is_closed:
            return
        if not self.is_over:
            self.end()
        if self.status is None and self.pid is not None and not self._parent.is_running:
            nursery.end(self.pid)  # where the kernel does not do it when the nursery is gone
        self._release()

    def failure(self) -> str:
        """Why it never came to be ready, for a person who may report it."""
        log = self.trace.decode(errors="replace").strip() or self.prints.decode(errors="replace").strip()
        said = log or self._parent.log() or f"status {self.status}"
        return f"A process for the check could not be started. It said:\n{said}"

    def _hear(self, pipe: int, keep: Callable[[bytes], None]) -> bool:
        """Reads what is there; returns whether there may be more."""
        try:
            data = os.read(pipe, 2**16)
        except BlockingIOError:
            return False
        keep(data)
        if not data:
            self._selector.unregister(pipe)
            os.close(pipe)
        return bool(data)

    def _hear_results(self, data: bytes) -> None:
        self._results += data
        self.is_mute |= not data

    def _hear_prints(self, data: bytes) -> None:
        self.printed += len(data)
        self.prints += data[: self._most_prints - len(self.prints)]

    def _hear_trace(self, data: bytes) -> None:
        self.trace += data[: _MOST_TRACE - len(self.trace)]

    def _hear_news(self, data: bytes) -> None:
        self._let_go()
        self._news += data
        *complete, rest = self._news.split(b"\n")
        self._news = rest
        for line in complete:
            news = json.loads(line)
            self.pid, self.status = news.get("pid", self.pid), news.get("status", self.status)
        self.is_over |= not data or self.status is not None

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._requests, self._unsent[: 2**16])]
        except BlockingIOError:
            pass
        except OSError:  # nobody reads it: its end will be noticed
            self._unsent.clear()
        is_waiting = self._requests in self._selector.get_map()
        if self._unsent and not is_waiting:
            self._selector.register(self._requests, selectors.EVENT_WRITE)
        if is_waiting and not self._unsent:
            self._selector.unregister(self._requests)

    def _let_go(self) -> None:
        """Closes the ends that are the child's."""
        while self._far:
            os.close(self._far.pop())

    def _release(self) -> None:
        self._is_closed = self.is_over = True
        self._let_go()
        for key in list(self._selector.get_map().values()):
            if key.fd != self._requests:
                os.close(key.fd)
        os.close(self._requests)
        self._selector.close()
