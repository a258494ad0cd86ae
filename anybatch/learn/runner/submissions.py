r"""Runs a learner's file in another process, and asks that process what the file's functions do.

>>> with Runner() as runner, runner.open("def double(x):\n    return 2 * x\n", "double.py") as submission:
...     submission.loaded["functions"]
{'double': [1, 1]}

Only plain data comes back, through a connection. `fork_server` is the process that the others are forked from, and
`isolation` has their limits. From bottom to top: `Ended` says why a process gave no answer, `ForkServer` is the
grader's end of its connection, and `Runner` and `Submission` are what the grader uses.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing import connection, reduction
from typing import Any

from anybatch.call.checks import Finding
from anybatch.call.memory import readable
from anybatch.errors import AnybatchError, NotAvailableError
from anybatch.learn.catalogue import COURSES
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


def of_status(status: int | None, limits: Limits, prints: str, trace: str, where: tuple[int, str] | None) -> Ended:
    """The reason why a process ended by itself.

    Args:
      status: its exit status, negative for a signal; None if it is not known.
      limits: its limits.
      prints: what it printed.
      trace: what it wrote to its trace pipe when it ended.
      where: the line of the learner's file where it was.
    """
    if status is None or status == fork_server.LOST:
        found = re.search(rf"^{fork_server.REASON} (.*)$", trace, re.MULTILINE)
        if found:
            message = f"Your code's answer could not be sent: {found[1][:300].rstrip('.')}."
            cause = "The file has replaced something that is needed, or left something running."
            return Ended("channel", f"{message} {cause}")
        lost = "Your code's answer was lost: the file changed the connection that carries it, or ended another process."
        return Ended("channel", f"{lost} A file that is checked must not change descriptors, `os` or `json`.")
    if status >= 0:
        return Ended("exit", f"Your code ended its process (exit code {status}) before it returned an answer.", where)
    name = _name(-status)
    memory = f"A check may use {readable(limits.memory)} beyond what JAX takes itself."
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


# The fork server, as the grader sees it.

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
        self.control, far = multiprocessing.Pipe()
        places = [place for place in sys.path if place]  # without "", the current folder
        with far, open(self._log, "wb") as log:
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
        self._lock = threading.Lock()
        self._last = 0
        self._finalizer = weakref.finalize(self, _end, self.control, self.process, self.folder)

    def fork(self, order: Mapping[str, Any], far: connection.Connection) -> int:
        """Orders a child at the other end of a connection, and returns its number."""
        with self._lock:
            self._last += 1
            self.control.send({**order, "do": "fork", "number": self._last})
            reduction.send_handle(self.control, far.fileno(), self.process.pid)
            return self._last

    def order(self, do: str, number: int) -> None:
        """Sends an order for a child: "trace", "end" or "close"."""
        with self._lock, contextlib.suppress(OSError):  # the fork server may have ended
            self.control.send({"do": do, "number": number})

    def log(self) -> str:
        """The end of the fork server's output, which is empty unless something is wrong."""
        return _beginning(self._log, 2**20)[-4000:].strip()

    def close(self) -> None:
        """Ends the fork server and all of its children, and removes their folders."""
        self._finalizer()


def _end(control: connection.Connection, process: subprocess.Popen, folder: str) -> None:
    control.close()  # the fork server then ends its children and itself
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _beginning(path: str, most: int) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(most).decode(errors="replace")
    return ""


# What the grader uses.

_PATIENCE = 120.0  # seconds until a process must be ready, even on a busy machine


class Runner:
    """Runs learners' files, each in a process forked from one fork server.

    The fork server starts when `keep_warm` or `open` is first called, and is ready a second or two later. What needs
    it waits for that.

    Args:
      limits: the limits of each check.
      hidden: folders that a check must not read, in addition to the courses that come with anybatch.
    """

    def __init__(self, limits: Limits | None = None, *, hidden: Sequence[str | os.PathLike] = ()) -> None:
        if os.name != "posix":
            raise NotAvailableError("anybatch learn on Windows", remedy="Run it in WSL.")
        self.limits = Limits() if limits is None else limits
        self._order = {
            "limits": dataclasses.asdict(self.limits),
            "hidden": [os.path.realpath(folder) for folder in (COURSES, *hidden)],
        }
        self._wanted: Counter[int] = Counter()
        self._spares: dict[int, list[Submission]] = {}
        self._lock = threading.RLock()
        self._fork_server: ForkServer | None = None
        self._is_closed = False

    def keep_warm(self, devices: Sequence[int]) -> None:
        """Keeps spare processes ready: one for each number of devices in the list."""
        with self._lock:
            self._wanted = Counter(devices)
            for count, spares in self._spares.items():
                for spare in spares[self._wanted[count] :]:
                    spare.discard()
                del spares[self._wanted[count] :]
            self.refill()

    def open(self, source: str, path: str, *, devices: int = 1, anybatch: bool = False) -> "Submission":
        """Starts to run a file, and returns without waiting for it.

        Args:
          source: the text of the file.
          path: its name in messages; nothing is read from there.
          devices: the number of simulated devices.
          anybatch: whether the file may import anybatch.
        """
        with self._lock:
            spares = self._spares.get(devices, [])
            while spares:
                spare = spares.pop(0)
                if spare.is_left():
                    break
                spare.discard()
            else:
                spare = self._fork(devices)
        spare.load(source, path, anybatch)
        return spare

    def refill(self) -> None:
        """Starts new spares once a check has ended. Any earlier, they would compete with it for the cores."""
        with self._lock:
            for count, wanted in self._wanted.items():
                spares = self._spares.setdefault(count, [])
                while len(spares) < wanted:
                    spares.append(self._fork(count, warm=True))

    def _fork(self, devices: int, warm: bool = False) -> "Submission":
        """Starts a process; `warm` if there is time to prepare it well."""
        if self._is_closed:
            raise AnybatchError("This Runner was closed. Open a new one: `with Runner() as runner: ...`")
        order = self._order | {"devices": devices, "warm": warm}
        if self._fork_server is not None:
            with contextlib.suppress(OSError):
                return Submission(self, self._fork_server, order)
            self._fork_server.close()  # it has ended
        self._fork_server = ForkServer()
        return Submission(self, self._fork_server, order)

    def close(self) -> None:
        """Ends all processes, and removes their folders."""
        with self._lock:
            self.keep_warm(())
            self._is_closed = True
            if self._fork_server is not None:
                self._fork_server.close()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Submission:
    """A process for a learner's file, which `load` gives to it. Only one thread at a time may use it.

    Attributes:
      status: the exit status of the process, negative for a signal; None while it is not known.
    """

    def __init__(self, runner: Runner, parent: ForkServer, order: Mapping[str, Any]) -> None:
        self._runner, self._parent, self._limits = runner, parent, runner.limits
        self._near, far = multiprocessing.Pipe()
        with far:
            self._number = parent.fork(order, far)
        self._folder = os.path.join(parent.folder, str(self._number))
        self._source = self._path = self._reason = ""
        self._is_ready = self._is_over = False
        self.status: int | None = None
        self._left = self._limits.seconds
        self._loaded: dict[str, Any] | None = None
        self._ended: Ended | None = None

    def load(self, source: str, path: str, anybatch: bool) -> None:
        """Sends the file to the process, without waiting for it."""
        self._source, self._path = source, path
        self._send({"source": source, "path": path, "anybatch": anybatch})

    @property
    def loaded(self) -> dict[str, Any]:
        """The result of loading the file. Waits for it; raises `Ended` if there is none."""
        if self._loaded is None:
            # The learner's time is counted from when the process has started JAX.
            if not self._is_ready and self._receive(_PATIENCE) is None:
                said = self._reason or self._trace.strip() or self._parent.log() or f"status {self.status}"
                raise AnybatchError(f"A process for the check could not be started. Its output:\n{said}")
            self._loaded = self._answer()
        return self._loaded

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a request to the process, and waits for the answer. Raises `Ended` if there will be none."""
        assert self.loaded is not None
        if self._ended is None:
            self._send(request)
        return self._answer()

    @property
    def prints(self) -> str:
        """The beginning of what was printed so far."""
        return _beginning(os.path.join(self._folder, "prints"), self._limits.shown_print_bytes)

    @property
    def prints_dropped(self) -> int:
        """How many bytes were printed after `prints`."""
        return max(0, self._printed - self._limits.shown_print_bytes)

    def end(self) -> None:
        """Ends the process, without waiting. Any thread may call it; one that waits for an answer gets `Ended`."""
        self._parent.order("end", self._number)

    def close(self) -> None:
        """Ends the process and removes its folder, without waiting."""
        self.discard()
        self._runner.refill()

    def discard(self) -> None:
        """Ends the process and removes its folder, and starts no other process for it."""
        self._parent.order("close", self._number)
        self._near.close()
        self._is_over = True

    def is_left(self) -> bool:
        """Whether a process that was not used yet still runs."""
        while self._receive(0.0) is not None:
            pass
        return not self._is_over

    def __enter__(self) -> "Submission":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def _printed(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(os.path.join(self._folder, "prints")).st_size
        return 0

    @property
    def _trace(self) -> str:
        return _beginning(os.path.join(self._folder, "trace"), _MOST_TRACE)

    def _send(self, request: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the process may have ended, which `_receive` will notice
            self._near.send(request)

    def _receive(self, seconds: float) -> dict[str, Any] | None:
        """Waits at most `seconds` for a message. Returns None if there is none, or the process has ended."""
        if self._is_over or not self._near.poll(max(0.0, seconds)):
            return None
        try:
            message = wire.decode(self._near.recv_bytes(self._limits.reply_bytes))
        except (EOFError, OSError, ValueError):
            message = {"ended": None}
        if "ended" not in message:
            self._is_ready = True  # its first message says so
            return message
        self._is_over, self.status, self._reason = True, message["ended"], message.get("reason", "")
        return None

    def _answer(self) -> dict[str, Any]:
        if self._ended is not None:
            raise self._ended
        begin = time.monotonic()
        reply = self._receive(self._left)
        self._left -= time.monotonic() - begin
        if reply is None or self._printed > self._limits.print_bytes:
            self._ended = self._why()
            self.end()
            raise self._ended
        return reply

    def _why(self) -> Ended:
        limits = self._limits
        if self._printed > limits.print_bytes:
            most = readable(limits.print_bytes)
            return Ended("prints", f"Your code printed more than {most}, and was stopped. The beginning is shown.")
        is_late = not self._is_over
        if is_late:
            self._parent.order("trace", self._number)
            self._receive(0.5)
        trace = self._trace
        where = line_of(trace, self._path, self._source)
        if not is_late:
            prints = _beginning(os.path.join(self._folder, "prints"), limits.print_bytes)
            return of_status(self.status, limits, prints, trace, where)
        limit = f"{limits.seconds:g} seconds, the limit of a check"
        message = f"Your code was still running after {limit}, and was stopped."
        if where is None and _FRAME.search(trace):
            message += " It was not in any line of your file: most likely a loop in a compiled function never ends."
        return Ended("time", message, where)


# What `anybatch learn doctor` shows.

_REFUSED = {
    "network": "no connection can be opened from Python; code in C could open a connection",
    "processes": "no other process can be started from Python; code in C could start others",
    "files": "can be written only in an empty temporary folder from Python; code in C could change your files",
    "the course": "its answers cannot be read from Python; code in C could read the answers",
}
_PURPOSE = (
    "guards against accidents, not against attackers: exercises run as you, so do not paste code that you do not trust"
)
_PROBE = """\
import pathlib, socket, subprocess

def is_refused(attempt, *arguments):
    try:
        attempt(*arguments)
    except (OSError, MemoryError):
        return True
    return False

def probe(outside, course, memory):
    return {
        "network": is_refused(socket.create_server, ("127.0.0.1", 0)),
        "processes": is_refused(subprocess.run, ["true"]),
        "files": is_refused(pathlib.Path(outside).write_text, "text"),
        "the course": is_refused(pathlib.Path(course).read_text),
        "memory": is_refused(bytearray, memory),
    }
"""


def examine(runner: Runner) -> list[Finding]:
    """Finds out what a check cannot do on this machine, by trying it in a check."""
    limits = runner.limits
    with tempfile.TemporaryDirectory() as folder, runner.open(_PROBE, "probe.py") as submission:
        args = (os.path.join(folder, "file"), str(next(COURSES.rglob("catalogue.toml"))), limits.memory + 2**26)
        reply = submission.ask({"function": "probe", "args": args, "want": ("value",), "compiled": False})
    leaves = map(bool, reply["value"]["leaves"])
    refused = dict(zip(sorted((*_REFUSED, "memory")), leaves, strict=True))  # JAX sorts the keys
    memory = f"{readable(limits.memory)} beyond what JAX takes" if refused["memory"] else "not limited on this system"
    return [
        Finding("wall clock", f"{limits.seconds:g} seconds, then the process is killed"),
        Finding("computing time", f"{limits.cpu_seconds} seconds on all cores together"),
        Finding("memory", memory),
        *(
            Finding(subject, text if refused[subject] else "open: not refused. Exercises run as you", refused[subject])
            for subject, text in _REFUSED.items()
        ),
        Finding("isolation", _PURPOSE),
    ]
