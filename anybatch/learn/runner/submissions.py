r"""Runs a learner's file in another process, and asks that process what the file's functions do.

>>> with Runner() as runner, runner.open("def double(x):\n    return 2 * x\n", "double.py") as submission:
...     submission.loaded["functions"]
{'double': [1, 1]}

Only plain data reaches this process, through a pipe. `fork_server` is the process that the others are forked from, and
`isolation` has their limits.

From bottom to top: `Ended` says why a process gave no answer. `ForkServer` and `Child` are the grader's ends of the
sockets and pipes. `Runner` and `Submission` are what the grader uses.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from anybatch.call.memory import readable
from anybatch.errors import AnybatchError, NotAvailableError
from anybatch.learn.runner import fork_server, isolation, wire
from anybatch.learn.runner.isolation import Limits

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
_OUT_OF_MEMORY = re.compile(
    r"bad_alloc|out of memory|RESOURCE_EXHAUSTED|Cannot allocate memory|MemoryError", re.IGNORECASE
)

_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP")


# Exit reasons.


class Ended(Exception):
    """The learner's code gave no answer: it used too much time or memory, or ended its process.

    Args:
      kind: "time", "memory", "exit", "signal", "prints" or "channel".
      message: for the learner, what happened and what the limit is.
      where: the line number in the learner's file where the code was, and that line; None if it is not known.
    """

    def __init__(self, kind: str, message: str, where: tuple[int, str] | None = None) -> None:
        super().__init__(message)
        self.kind, self.message, self.where = kind, message, where


def too_long(limits: Limits, trace: str, where: tuple[int, str] | None) -> Ended:
    """The code was still running when its time was up."""
    message = f"Your code was still running after {limits.seconds:g} seconds, the limit of a check, and was stopped."
    if where is None and _FRAME.search(trace):
        message += " It was not in any line of your file: most likely a loop in a compiled function never ends."
    return Ended("time", message, where)


def too_much_printed(limits: Limits) -> Ended:
    """The code printed more than it may."""
    most = readable(limits.print_bytes)
    return Ended("prints", f"Your code printed more than {most}, and was stopped. The beginning is shown.")


def broken(reason: str = "") -> Ended:
    """No answer came through the pipe, though the learner's function may have returned."""
    if reason:
        message = f"Your code's answer could not be sent: {reason}."
        return Ended("channel", f"{message} The file has replaced something that is needed, or left something running.")
    message = "Your code's answer was lost: the file wrote to, or read from, the pipe that carries it."
    return Ended("channel", f"{message} A file that is checked must not change descriptors, `os` or `json`.")


def of_status(status: int | None, limits: Limits, prints: str, trace: str, where: tuple[int, str] | None) -> Ended:
    """The reason why a process ended by itself.

    Args:
      status: its exit status, negative for a signal; None if it is not known.
      limits: its limits.
      prints: what it printed.
      trace: what it wrote to its trace pipe when it ended.
      where: the line of the learner's file where it was.
    """
    memory = f"A check may use {readable(limits.memory)} beyond what JAX takes itself."
    if status is None:
        return Ended("signal", "Your code ended its parent process, and was ended with it.", where)
    if status == fork_server.LOST:
        reason = re.search(rf"^{fork_server.REASON} (.*)$", trace, re.MULTILINE)
        return broken(reason[1][:300].rstrip(".") if reason else "")
    if status >= 0:
        return Ended("exit", f"Your code ended its process (exit code {status}) before it returned an answer.", where)
    name = _name(-status)
    if -status == fork_server.TRACE_AND_END:
        computed = f"Your code computed for more than {limits.cpu_seconds} seconds, on all cores together"
        return Ended("time", f"{computed}, which is the limit of a check, and was stopped.", where)
    if -status == signal.SIGKILL:
        return Ended("memory", f"The system killed your code ({name}), most likely for its memory. {memory}", where)
    if _OUT_OF_MEMORY.search(prints):
        return Ended("memory", f"Your code was aborted when its memory ran out ({name}). {memory}", where)
    verb = "crashed" if name in _CRASHES else "ended"
    message = f"Your code {verb} its process ({name}) before it returned an answer."
    if -status == signal.SIGSEGV:
        message += " The usual cause is a recursion that never ends."
    return Ended("signal", message, where)


def line_of(trace: str, path: str, source: str) -> tuple[int, str] | None:
    """The innermost line of a file in a trace of all threads; the main thread is searched first."""
    lines = source.splitlines()
    name = path.encode("ascii", "backslashreplace").decode()
    # A trace has the newest thread first, and each thread has its innermost frame first.
    for section in reversed(re.split(r"^(?:Current thread|Thread) 0x.*$", trace, flags=re.MULTILINE)):
        for file, number in _FRAME.findall(section):
            if file == name and 1 <= int(number) <= len(lines):
                return int(number), lines[int(number) - 1]
    return None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# The fork server and its children, as the grader sees them.

_START = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from anybatch.learn.runner import fork_server
fork_server.main(int(sys.argv[2]), sys.argv[3])
"""
_MOST_TRACE = 2**16


class ForkServer:
    """Starts the fork server, without waiting until it is ready, and talks to it."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="anybatch-learn-")
        self._log = os.path.join(self.folder, "fork_server.log")
        self.control, far = socket.socketpair()
        places = [place for place in sys.path if place]  # without "", the current folder
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
        """Returns a new number, for a child."""
        with self._lock:
            self._last += 1
            return self._last

    def order(self, order: Mapping[str, Any], pipes: Sequence[int] = ()) -> None:
        """Sends an order with the child's ends of its pipes. Raises OSError if the fork server has ended."""
        with self._lock:
            fork_server.send(self.control, dict(order), list(pipes))

    def log(self) -> str:
        """The output of the fork server, which is empty unless something is wrong."""
        with contextlib.suppress(OSError), open(self._log, errors="replace") as file:
            return file.read()[-4000:].strip()
        return ""

    def close(self) -> None:
        """Ends the fork server and all of its children, and removes their folders."""
        self._finalizer()


def _end(control: socket.socket, process: subprocess.Popen, folder: str) -> None:
    control.close()  # the fork server then ends its children and itself
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    fork_server.remove(folder)


class Child:
    """One child of the fork server. `pump` reads from its pipes and writes to them, as far as that is possible now.

    Attributes:
      is_over: whether the child or the fork server has ended.
      is_mute: whether the child has closed the pipe for results.
      status: the exit status, negative for a signal; None while it is not known.
      prints: the beginning of what was printed.
      printed: how many bytes were printed in all.
    """

    def __init__(self, parent: ForkServer, order: Mapping[str, Any]) -> None:
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
        if sys.platform != "darwin":  # a Mac loses descriptors that the sender closes before they have arrived
            self._close_far_ends()

    def send(self, data: bytes) -> None:
        """Sends as much as the pipe takes now; `pump` sends the rest."""
        self._unsent += data
        self._flush()

    def take(self, token: int, most: int) -> Any:
        """Returns the next answer, or None if it has not arrived. Raises `BrokenWire` if it has another token."""
        start = wire.header(bytes(self._results[: wire.HEADER]))
        if start is None:
            return None
        length, found = start
        if found != token or length > most:
            raise wire.BrokenWire("this is not the beginning of an answer")
        if len(self._results) < wire.HEADER + length:
            return None
        data = bytes(self._results[wire.HEADER : wire.HEADER + length])
        del self._results[: wire.HEADER + length]
        answer = wire.decode(data)
        if not isinstance(answer, dict):
            raise wire.BrokenWire("an answer must be a dict")
        return answer

    def pump(self, seconds: float) -> bool:
        """Waits at most `seconds` for data from the child, and stores it. Returns whether there was any."""
        if self._is_closed:
            return False
        came = self._selector.select(max(0.0, seconds))
        for key, events in came:
            if events & selectors.EVENT_WRITE:
                self._flush()
            else:
                self._hear(key.fd, key.data)
        if self.is_over:  # everything it wrote is in the pipes now
            for key in list(self._selector.get_map().values()):
                while key.events & selectors.EVENT_READ and self._hear(key.fd, key.data):
                    pass
        return bool(came)

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds` for the end of the child. Returns whether it has ended."""
        deadline = time.monotonic() + seconds
        while not self.is_over and (left := deadline - time.monotonic()) > 0:
            self.pump(left)
        return self.is_over

    def trace_and_end(self) -> None:
        """Ends the child, and asks it for a trace of where it was."""
        with contextlib.suppress(OSError):
            self._parent.order({"do": "trace", "number": self._number})
        self.wait(0.5)

    def end(self) -> None:
        """Ends the child and every process it has started, without waiting. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._parent.order({"do": "end", "number": self._number})

    def close(self) -> None:
        """Ends the child and removes its folder, without waiting."""
        if self._is_closed:
            return
        if not self.is_over:
            self.end()
        if self.status is None and self.pid is not None and not self._parent.is_running:
            fork_server.end(self.pid)  # not every kernel ends it with the fork server
        self._release()

    def failure(self) -> str:
        """An error message for a child that did not start."""
        log = self.trace.decode(errors="replace").strip() or self.prints.decode(errors="replace").strip()
        said = log or self._parent.log() or f"status {self.status}"
        return f"A process for the check could not be started. Its output:\n{said}"

    def _hear(self, pipe: int, keep: Callable[[bytes], None]) -> bool:
        """Reads the data in a pipe; returns whether there may be more."""
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
        self._close_far_ends()
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
        except OSError:  # the child has closed the pipe; its end will be noticed elsewhere
            self._unsent.clear()
        is_waiting = self._requests in self._selector.get_map()
        if self._unsent and not is_waiting:
            self._selector.register(self._requests, selectors.EVENT_WRITE)
        if is_waiting and not self._unsent:
            self._selector.unregister(self._requests)

    def _close_far_ends(self) -> None:
        """Closes this process's copies of the child's ends of the pipes."""
        while self._far:
            os.close(self._far.pop())

    def _release(self) -> None:
        self._is_closed = self.is_over = True
        self._close_far_ends()
        for key in list(self._selector.get_map().values()):
            if key.fd != self._requests:
                os.close(key.fd)
        os.close(self._requests)
        self._selector.close()


# What the grader uses.

# The courses that come with anybatch, with their solutions.
_COURSES = pathlib.Path(__file__).parents[1] / "courses"
_PATIENCE = 120.0  # seconds until a child must be ready, even on a busy machine


class Runner:
    """Runs learners' files, each in a process forked from one fork server.

    The fork server starts when the runner is created, and is ready a second or two later. `open` can be called before
    that, and then waits.

    Args:
      limits: the limits of each check.
      hidden: folders that a check must not read, in addition to the courses that come with anybatch.
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
        self._fork_server: ForkServer | None = ForkServer()

    def keep_warm(self, devices: Sequence[int]) -> None:
        """Keeps spare processes ready: one for each number of devices in the list."""
        with self._lock:
            self._wanted = Counter(devices)
            for count, spares in self._spares.items():
                for spare in spares[self._wanted[count] :]:
                    spare.close()
                del spares[self._wanted[count] :]
            self._refill()

    def open(self, source: str, path: str, *, devices: int = 1, anybatch: bool = False) -> "Submission":
        """Starts to run a file, and returns without waiting for it.

        Args:
          source: the text of the file.
          path: its name in messages; nothing is read from there.
          devices: the number of simulated devices.
          anybatch: whether the file may import anybatch.
        """

        def fork() -> Child:
            with self._lock:
                return self._fork(devices, warm=False)

        with self._lock:
            child = self._take(devices)
        return Submission(child, fork, self._closed, self.limits, source, path, anybatch)

    def close(self) -> None:
        """Ends all processes, and removes their folders."""
        with self._lock:
            self.keep_warm(())
            if self._fork_server is not None:
                self._fork_server.close()
            self._fork_server = None

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
        """Starts new spares once a check has ended. Any earlier, they would compete with it for the cores."""
        with self._lock:
            self._refill()

    def _refill(self) -> None:
        for count, wanted in self._wanted.items():
            spares = self._spares.setdefault(count, [])
            while len(spares) < wanted:
                spares.append(self._fork(count, warm=True))

    def _fork(self, devices: int, warm: bool) -> Child:
        if self._fork_server is None:
            raise AnybatchError("This Runner was closed. Open a new one: `with Runner() as runner: ...`")
        order = self._order | {"devices": devices, "warm": warm}
        if self._fork_server.is_running:
            with contextlib.suppress(OSError):
                return Child(self._fork_server, order)
        self._fork_server.close()
        self._fork_server = ForkServer()
        return Child(self._fork_server, order)


class Submission:
    """A learner's file while it is being checked. Only one thread at a time may use it."""

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
        """The result of loading the file. Waits for it; raises `Ended` if there is none."""
        if self._loaded is None:
            if not self._is_ready:
                self._wait_until_ready()
            self._loaded = self._receive(self._token)
        return self._loaded

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request to the process, and waits for the answer. Raises `Ended` if there will be none."""
        assert self.loaded is not None
        if self._ended is not None:
            raise self._ended
        return self._receive(self._send(request))

    @property
    def prints(self) -> str:
        """The beginning of what was printed so far."""
        self._child.pump(0)
        return self._child.prints.decode(errors="replace")

    @property
    def prints_dropped(self) -> int:
        """How many bytes were printed after `prints`."""
        return self._child.printed - len(self._child.prints)

    def end(self) -> None:
        """Ends the process. A thread that waits for an answer then gets `Ended`."""
        self._child.end()

    def close(self) -> None:
        """Ends the process and every process it has started, and removes its folder, without waiting."""
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
        """Waits until the process has started JAX. The learner's time is counted from then on."""
        deadline, is_first = time.monotonic() + _PATIENCE, True
        while (found := self._child.take(0, 2**20)) is None:
            if self._child.is_over and is_first:
                # The child, or the fork server, was killed before it was used. Try once more.
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
                raise broken() from None
            left = self._left - (time.monotonic() - begin)
            if child.printed > self._limits.print_bytes:
                raise too_much_printed(self._limits)
            if reply is not None:
                self._left = left
                return reply
            if was_over or child.is_mute:
                raise self._why()
            if left <= 0:
                child.trace_and_end()
                raise too_long(self._limits, self._trace, self._where())
            child.pump(left)

    def _why(self) -> Ended:
        child = self._child
        if not child.wait(max(1.0, self._left)):  # it still runs, but has closed its end of the pipe
            return broken()
        prints = child.prints.decode(errors="replace")
        return of_status(child.status, self._limits, prints, self._trace, self._where())

    @property
    def _trace(self) -> str:
        return self._child.trace.decode(errors="replace")

    def _where(self) -> tuple[int, str] | None:
        return line_of(self._trace, self._path, self._source)
