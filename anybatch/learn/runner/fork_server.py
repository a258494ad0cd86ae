"""The fork server: a process that has imported JAX and forks one child for each check. And the code of such a child.

It is a new process, so nothing that the grader knows is in its memory. It has used no device and has a single thread,
which makes a fork safe. The grader orders children through a socket. With each order come five pipes: for requests,
results, prints, a trace of where the code was, and the child's status, which the fork server writes. When the grader
ends, the fork server ends its children, removes their folders, and exits.
"""

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import warnings
from typing import Any, NoReturn

from anybatch.jaxprs import versions
from anybatch.learn.runner import evidence, isolation, wire

PRELOADED = ("jax", "jax.numpy", "numpy", "flax.linen", "flax.training.train_state", "optax")
LENGTH = struct.Struct(">I")
# requests, results, prints, trace, status
PIPES = 5
# The signal that ends a child with a trace of all its threads. The kernel sends it when the computing time is used up.
TRACE_AND_END = signal.SIGXCPU if hasattr(signal, "SIGXCPU") else signal.SIGTERM
LOST = 97  # the exit status of a child that could not send its answer; the reason is in its trace
REASON = "not sent:"

# Copies, since a learner's file may replace functions in `os`.
_read, _write, _select, _exit = os.read, os.write, select.select, os._exit


def main(control: int, folder: str) -> None:
    """Serves the grader at the other end of a socket until the grader ends.

    Args:
      control: the descriptor of the socket.
      folder: where to create the home folders of children.
    """
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Objects that exist now are never collected, so that no child copies memory pages only to count references.
    gc.collect()
    gc.freeze()
    _ForkServer(socket.socket(fileno=control), folder).serve()


class _ForkServer:
    def __init__(self, control: socket.socket, folder: str) -> None:
        self.control, self.folder = control, folder
        self.children: dict[int, dict[str, Any]] = {}  # by process
        with contextlib.suppress(OSError):
            isolation.adopt_orphans()
        self.awake, waker = os.pipe()
        for end in (self.awake, waker):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def serve(self) -> None:
        try:
            while True:
                ready, _, _ = select.select([self.control.fileno(), self.awake], [], [])
                if self.awake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.awake, 4096)
                self.reap()
                if self.control.fileno() in ready:
                    self.obey()
        except EOFError:
            pass
        finally:
            for pid in list(self.children):
                end(pid)
            while self.children:
                self.reap(wait=True)
        remove(self.folder)

    def obey(self) -> None:
        order, pipes = receive(self.control)
        if order["do"] == "fork":
            self.fork(order, pipes)
            return
        for pid, child in self.children.items():
            if child["number"] == order["number"]:
                if order["do"] == "trace":
                    os.kill(pid, TRACE_AND_END)
                else:
                    end(pid)

    def fork(self, order: dict[str, Any], pipes: list[int]) -> None:
        home = os.path.join(self.folder, f"home-{order['number']}")
        parent = os.getpid()
        with warnings.catch_warnings():
            # JAX and Python warn of threads that a fork loses. There are none, since no device has been used.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            warnings.filterwarnings("ignore", r".*use of fork\(\) may lead to deadlocks", DeprecationWarning)
            try:
                os.mkdir(home, 0o700)
                pid = os.fork()
            except OSError as error:  # a full disk, or too many processes: only this child is lost
                _send(pipes[3], str(error).encode())
                for pipe in pipes:
                    os.close(pipe)
                return
        if pid == 0:
            _child(order, pipes, home, parent)
        for pipe in pipes[:-1]:
            os.close(pipe)
        self.children[pid] = {"number": order["number"], "home": home, "status": pipes[-1]}
        _tell(pipes[-1], {"pid": pid})

    def reap(self, wait: bool = False) -> None:
        """Collects children that have ended, and ends the processes they have left behind."""
        while self.children:
            try:
                pid, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
            except ChildProcessError:
                return
            wait = False
            if pid == 0:
                return
            child = self.children.pop(pid, None)
            if child is not None:
                end(pid)
                self.end_orphans()
                remove(child["home"])
                _tell(child["status"], {"status": os.waitstatus_to_exitcode(status)})
                os.close(child["status"])

    def end_orphans(self) -> None:
        """Ends processes that children started outside of their group. Linux has made them children of this process."""
        deadline = time.monotonic() + 2.0
        while (orphans := _children() - set(self.children)) and time.monotonic() < deadline:
            for pid in orphans:
                end(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _children() -> set[int]:
    """The ids of this process's children, where Linux tells them."""
    me = os.getpid()
    with contextlib.suppress(OSError), open(f"/proc/{me}/task/{me}/children") as file:
        return {int(pid) for pid in file.read().split()}
    found = set()
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                if int(file.read().rpartition(")")[2].split()[1]) == me:
                    found.add(int(name))
    return found


def end(pid: int) -> None:
    """Kills a process and its group. If the process has ended already, kills the group."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def remove(folder: str) -> None:
    """Removes a folder, even if its subfolders have lost their permissions."""
    for path, names, _ in os.walk(folder):
        for name in names:
            inner = os.path.join(path, name)
            if not os.path.islink(inner):
                with contextlib.suppress(OSError):
                    os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def send(control: socket.socket, order: dict[str, Any], pipes: list[int]) -> None:
    """Sends an order to the fork server, with its ends of the pipes."""
    data = json.dumps(order).encode()
    message = LENGTH.pack(len(data)) + data
    sent = socket.send_fds(control, [message], pipes) if pipes else control.send(message)
    control.sendall(message[sent:])


def receive(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns the next order and the pipes that came with it. Raises EOFError when there are no more orders."""
    start, pipes, _, _ = socket.recv_fds(control, LENGTH.size, PIPES)
    start += _exactly(control, LENGTH.size - len(start))
    return json.loads(_exactly(control, *LENGTH.unpack(start))), list(pipes)


def _exactly(control: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = control.recv(length)
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _tell(pipe: int, news: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the reader may have ended
        os.write(pipe, json.dumps(news).encode() + b"\n")


def _child(order: dict[str, Any], pipes: list[int], home: str, parent: int) -> NoReturn:
    """Runs a child, from its fork to its end."""
    trace = pipes[3]
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        requests, results, trace = _own_descriptors(pipes)
        limits, hidden, without = isolation.Limits(**order["limits"]), order["hidden"], order["without"]
        _settle(home, order["devices"])
        holds = isolation.enter(limits, home, hidden, without)
        with contextlib.suppress(OSError):
            isolation.die_with_parent(parent, signal.SIGKILL)
        _warm_up(order["warm"])
        faulthandler.enable(trace, all_threads=True)
        faulthandler.register(TRACE_AND_END, trace, all_threads=True, chain=True)
        _send(results, wire.frame(0, {"ready": sorted(holds)}))
        request = _next(requests)[1]
        isolation.begin(limits, home, hidden, without)
        while True:
            reply = evidence.answer(request)
            # The token of the answer is read only now, so it was not in memory while the learner's code ran.
            if not _select([requests], [], [], 1.0)[0]:
                raise EOFError("something else has read the request")
            token, _ = _next(requests)
            _send(results, wire.frame(token, reply))
            request = _next(requests)[1]
    except BaseException as error:
        with contextlib.suppress(BaseException):
            _send(trace, f"\n{REASON} {type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        _exit(LOST)


def _own_descriptors(pipes: list[int]) -> tuple[int, int, int]:
    """Moves the pipes of this child to random descriptor numbers, and closes every other descriptor."""
    import fcntl

    null = os.open(os.devnull, os.O_RDONLY)
    requests, results, prints, trace, _ = pipes
    for source, target in ((null, 0), (prints, 1), (prints, 2)):
        os.dup2(source, target)
    kept = [
        fcntl.fcntl(pipe, fcntl.F_DUPFD_CLOEXEC, 100 + secrets.randbelow(80)) for pipe in (requests, results, trace)
    ]
    last = 2
    for number in (*sorted(kept), 4096):
        os.closerange(last + 1, number)
        last = number
    return kept[0], kept[1], kept[2]


def _settle(home: str, devices: int) -> None:
    """Sets up the environment of Python and JAX: an empty home folder, streams, a number of devices."""
    flags = f"--xla_force_host_platform_device_count={devices} {versions.quick_compilation_flags()}"
    os.environ |= {"HOME": home, "TMPDIR": home, "XLA_FLAGS": flags}
    tempfile.tempdir = None
    os.umask(0o077)
    sys.argv = ["exercise"]
    # Unbuffered, so that what was printed before an endless loop is shown.
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        raw: Any = io.FileIO(number, "w" if number else "r", closefd=False)
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=bool(number))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _warm_up(thoroughly: bool) -> None:
    """Starts the devices. In a spare child, also compiles a small program, since the first compilation is slow."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    jax.devices()
    if not thoroughly:
        return

    def loss(w: Any, x: Any) -> Any:
        def body(total: Any, row: Any) -> tuple[Any, None]:
            return total + jnp.sum(jnp.tanh(w * row) ** 2), None

        return jax.lax.scan(body, 0.0, x)[0]

    # numpy arrays, since creating a JAX array would compile one more program.
    arrays = np.ones(3, np.float32), np.ones((4, 3), np.float32)
    jax.block_until_ready(jax.jit(jax.value_and_grad(loss)).trace(*arrays).lower().compile()(*arrays))
    # Random draws are long programs. Only their lowering is worth doing ahead.
    draw = jax.vmap(lambda key, index: jax.random.bernoulli(jax.random.fold_in(key, index)), (None, 0))
    jax.jit(draw).trace(np.zeros(2, np.uint32), np.arange(3)).lower()


def _next(requests: int) -> tuple[int, Any]:
    start = _bytes(requests, wire.HEADER)
    length, token = wire.header(start) or (0, 0)
    return token, wire.decode(_bytes(requests, length))


def _bytes(pipe: int, length: int) -> bytes:
    parts = []
    while length:
        part = _read(pipe, min(length, 2**20))
        if not part:
            _exit(0)  # no more requests will come
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _send(pipe: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[_write(pipe, view) :]
