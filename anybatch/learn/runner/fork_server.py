"""The fork server: a process that has imported JAX and forks one child for each check. And the code of such a child.

It is a new process, so nothing that the grader knows is in its memory. It has used no device and has a single thread,
which makes a fork safe. The grader orders children through a socket, and sends each order with the child's end of a
connection. The child gets requests through it and answers them; at its end, the fork server sends its status. When the
grader ends, the fork server ends its children, removes their folders, and exits.

Each child has a folder: `home`, its current folder, and the files `prints` and `trace`.
"""

import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import warnings
from multiprocessing import connection, reduction
from typing import Any, NoReturn

from anybatch.jaxprs import versions
from anybatch.learn.runner import isolation, wire
from anybatch.learn.runner.evidence import SubmittedFile

PRELOADED = ("jax", "jax.numpy", "numpy", "flax.linen", "flax.training.train_state", "optax")
# The signal that ends a child with a trace of all its threads. The kernel sends it when the computing time is used up.
TRACE_AND_END = signal.SIGXCPU
LOST = 97  # the exit status of a child that could not send its answer; the reason is in its trace
REASON = "not sent:"

_exit = os._exit  # a copy, since a learner's file may replace functions in `os`


def main(control: int, folder: str) -> None:
    """Serves the grader at the other end of a connection until the grader ends.

    Args:
      control: the descriptor of the connection.
      folder: where to create the folders of children.
    """
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Objects that exist now are never collected, so that no child copies memory pages only to count references.
    gc.collect()
    gc.freeze()
    _ForkServer(connection.Connection(control), folder).serve()


@dataclasses.dataclass
class _Forked:
    pid: int
    grader: connection.Connection
    folder: str
    has_ended: bool = False
    is_closed: bool = False  # the grader needs its folder no longer


class _ForkServer:
    def __init__(self, control: connection.Connection, folder: str) -> None:
        self.control, self.folder = control, folder
        self.children: dict[int, _Forked] = {}  # by their number
        self.awake, waker = os.pipe()
        for end in (self.awake, waker):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def serve(self) -> None:
        try:
            while True:
                ready = connection.wait([self.control, self.awake])
                if self.awake in ready:
                    os.read(self.awake, 4096)
                self.reap()
                if self.control in ready:
                    self.obey(self.control.recv())
        except (EOFError, ConnectionResetError):
            pass  # the grader has ended
        finally:
            for child in self.children.values():
                if not child.has_ended:
                    end(child.pid)
                    os.waitpid(child.pid, 0)
            shutil.rmtree(self.folder, ignore_errors=True)

    def obey(self, order: dict[str, Any]) -> None:
        number = order["number"]
        if order["do"] == "fork":
            self.fork(order, connection.Connection(reduction.recv_handle(self.control)))
        elif number in self.children:
            child = self.children[number]
            if order["do"] == "trace" and not child.has_ended:
                os.kill(child.pid, TRACE_AND_END)
            elif not child.has_ended:
                end(child.pid)
            child.is_closed |= order["do"] == "close"
            self.clean_up(number)

    def fork(self, order: dict[str, Any], grader: connection.Connection) -> None:
        folder = os.path.join(self.folder, str(order["number"]))
        parent = os.getpid()
        with warnings.catch_warnings():
            # JAX and Python warn of threads that a fork loses. There are none, since no device has been used.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            warnings.filterwarnings("ignore", r".*use of fork\(\) may lead to deadlocks", DeprecationWarning)
            try:
                os.mkdir(folder, 0o700)
                pid = os.fork()
            except OSError as error:  # a full disk, or too many processes: only this child is lost
                _tell(grader, {"ended": None, "reason": str(error)})
                return
        if pid == 0:
            _child(order, grader, folder, parent)
        self.children[order["number"]] = _Forked(pid, grader, folder)

    def reap(self) -> None:
        """Collects children that have ended, and the processes of their groups."""
        for number, child in list(self.children.items()):
            if child.has_ended:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                end(pid)
                child.has_ended = True
                _tell(child.grader, {"ended": os.waitstatus_to_exitcode(status)})
                self.clean_up(number)

    def clean_up(self, number: int) -> None:
        child = self.children[number]
        if child.is_closed and child.has_ended:
            shutil.rmtree(child.folder, ignore_errors=True)
            del self.children[number]


def _tell(grader: connection.Connection, news: dict[str, Any]) -> None:
    """Sends the last message to the grader, which may have stopped to listen."""
    os.set_blocking(grader.fileno(), False)
    with contextlib.suppress(OSError), grader:
        grader.send_bytes(wire.encode(news))


def end(pid: int) -> None:
    """Kills a process and its group. If the process has ended already, kills the group."""
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _child(order: dict[str, Any], grader: connection.Connection, folder: str, parent: int) -> NoReturn:
    """Runs a child, from its fork to its end."""
    trace = 2
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        isolation.die_with_parent(parent)
        trace = _own_descriptors(grader.fileno(), folder)
        home = os.path.join(folder, "home")
        os.mkdir(home)
        os.chdir(home)
        flags = f"--xla_force_host_platform_device_count={order['devices']} {versions.quick_compilation_flags()}"
        os.environ |= {"HOME": home, "TMPDIR": home, "XLA_FLAGS": flags}
        tempfile.tempdir = None  # it is found again, in TMPDIR
        sys.argv = ["exercise"]
        _warm_up(order["warm"])
        faulthandler.enable(trace, all_threads=True)
        faulthandler.register(TRACE_AND_END, trace, all_threads=True, chain=True)
        grader.send_bytes(wire.encode({"ready": True}))
        request = grader.recv()
        isolation.begin(isolation.Limits(**order["limits"]), home, order["hidden"])
        file = SubmittedFile(**request)
        grader.send_bytes(wire.encode(file.loaded))
        while True:
            grader.send_bytes(wire.encode(file.answer(grader.recv())))
    except EOFError:  # no more requests will come
        _exit(0)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(trace, f"\n{REASON} {type(error).__name__}: {error}\n".encode(errors="replace"))
    finally:
        _exit(LOST)


def _own_descriptors(descriptor: int, folder: str) -> int:
    """Opens this child's files, closes the descriptors of everything else, and returns that of its trace."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    prints, trace = (os.open(os.path.join(folder, name), flags, 0o600) for name in ("prints", "trace"))
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (prints, 1), (prints, 2)):
        os.dup2(source, target)
    for low, high in itertools.pairwise((2, *sorted((trace, descriptor)), 4096)):
        os.closerange(low + 1, high)
    return trace


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
