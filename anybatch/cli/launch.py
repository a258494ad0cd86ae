"""`anybatch launch`: runs a script in several processes on this machine, as a cluster would.

Two threads per process copy what it prints. The main thread looks every few milliseconds whether a process has ended
or a signal has come (`_watch`).
"""

import contextlib
import ctypes
import importlib.metadata
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

from anybatch import distributed
from anybatch.errors import InputError, NotAvailableError

# Seconds between SIGTERM and SIGKILL. JAX treats SIGTERM as a notice of preemption and keeps running. If the user asked
# for the end there is more time, so that a run can save its state.
_GRACE, _GRACE_WHEN_ASKED = 3.0, 10.0
_PAUSE = 0.02  # seconds between two looks at the processes
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG


def launch(
    script: str | os.PathLike, arguments: Sequence[str] = (), *, processes: int, devices_per_process: int | None = None
) -> int:
    """Runs a script in several processes that can find each other. Each line they print is shown with their number.

    When one process fails, the others get SIGTERM, and SIGKILL three seconds later. After Ctrl-C or SIGTERM, or when
    nobody reads the output any more, the processes have ten seconds to save their state; a second signal kills them at
    once. On Linux they also end when this process is killed.

    By default the GPUs are divided among the processes, and on the CPU each process has one device.

    Returns:
      The exit status: 0 if all processes succeeded, else that of the first one that failed (128 + signal if a signal
      killed it); 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
      InputError: before anything starts: if the script does not exist, there are too few GPUs, or `processes` is larger
        than allowed. Also if the operating system refuses to start a process; the ones already started are ended.
    """
    if os.name != "posix":
        raise NotAvailableError("anybatch launch on Windows", remedy="Run it in WSL.")
    if not pathlib.Path(script).is_file():
        raise InputError(
            "The script must be a file",
            given=repr(os.fspath(script)),
            remedy=f"anybatch launch --processes {processes} path/to/script.py, with the script's arguments after it.",
        )
    cpus = os.cpu_count() or 1
    allowed = max(4 * cpus, 16)  # each process loads JAX: a few hundred MiB and many threads
    if processes > allowed:
        raise InputError(
            f"processes must be at most {allowed}: each process loads JAX, and this machine has {cpus} CPUs",
            given=f"processes={processes}",
            remedy="Start fewer. With --devices-per-process, one process has several simulated devices.",
        )
    command = [sys.executable, os.fspath(script), *arguments]
    environments = _environments(os.environ, processes, devices_per_process)
    children: list[subprocess.Popen] = []
    with _signals() as received:
        try:
            # Start all processes before the first thread: `preexec_fn` runs Python between fork and exec, which could
            # deadlock on a lock held by another thread.
            for environment in environments:
                children.append(_start(command, environment))
            readers = _forward(children, received)
            status = _watch(children, received)
        except OSError as error:
            started = len(children)
            raise InputError(
                "The operating system must be able to start all processes",
                given=f"process {started} of {processes} ({error.strerror or error})",
                remedy=f"Start fewer, e.g. anybatch launch --processes {max(started, 1)} ..., or raise the system's "
                "limits: ulimit -n, ulimit -u.",
            ) from error
        finally:
            _end(children, received)
        for reader in readers:
            reader.join(timeout=1.0)  # a grandchild may keep the pipe open
    return status


def free_port() -> int:
    """A free port on 127.0.0.1, below the range that the system uses for outgoing connections."""
    for port in random.sample(range(20000, 32000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("No port between 20000 and 32000 is free on 127.0.0.1.")


def _environments(outer: Mapping[str, str], processes: int, devices_per_process: int | None) -> list[dict[str, str]]:
    """The environment variables of each process: how it finds the others, and which devices it uses."""
    shared = {name: value for name, value in outer.items() if not name.startswith("JAX_COORDINATOR_")}
    shared |= {
        "PYTHONUNBUFFERED": "1",  # show each line at once
        distributed.COORDINATOR: f"127.0.0.1:{free_port()}",
        distributed.NUM_PROCESSES: str(processes),
    }
    each = [shared | {distributed.PROCESS_ID: str(index)} for index in range(processes)]
    gpus = visible_gpus(outer)
    share = len(gpus) // processes if devices_per_process is None else devices_per_process
    if gpus and (share == 0 or share * processes > len(gpus)):
        raise InputError(
            "Every process needs at least one GPU that no other process uses",
            given=f"{len(gpus)} GPUs for {processes} processes"
            + (f" with {devices_per_process} devices each" if devices_per_process else ""),
            remedy="Start fewer processes, or try it on simulated devices: JAX_PLATFORMS=cpu anybatch launch ...",
        )
    for index, environment in enumerate(each):
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * share : (index + 1) * share])
        elif share:
            environment["JAX_NUM_CPU_DEVICES"] = str(share)  # takes precedence over the flag in XLA_FLAGS
    return each


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The GPUs that JAX would use, as names for CUDA_VISIBLE_DEVICES. Does not initialise the GPUs."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    if not any("cuda" in plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")):
        return []
    named = environment.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in re.split(r"\s*,\s*", named.strip()) if name not in ("", "-1", "NoDevFiles")]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)


def _start(command: Sequence[str], environment: dict[str, str]) -> subprocess.Popen:
    with warnings.catch_warnings():
        # Python warns that another thread may hold a lock at the fork. `_die_with` takes no lock.
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a new process group: Ctrl-C does not reach it, and killpg ends all of it
            preexec_fn=_die_with(os.getpid()),
        )


def _die_with(parent: int) -> Callable[[], None] | None:
    """A function that makes the kernel kill the calling process when its parent dies. None if this is not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl

    def request_signal() -> None:
        prctl(_PARENT_DEATH, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return request_signal


def _forward(children: Sequence[subprocess.Popen], received: list[int]) -> list[threading.Thread]:
    """Starts the threads that copy the children's output."""
    readers = []
    for index, child in enumerate(children):
        for source, target in ((child.stdout, sys.stdout.buffer), (child.stderr, sys.stderr.buffer)):
            readers.append(threading.Thread(target=_copy, args=(index, source, target, received), daemon=True))
            readers[-1].start()
    return readers


_writing = threading.Lock()


def _copy(index: int, source: IO[bytes], target: IO[bytes], received: list[int]) -> None:
    with source:
        for line in source:
            try:
                with _writing:
                    target.write(b"[%d] %s\n" % (index, line.removesuffix(b"\n")))
                    target.flush()
            except OSError:  # nobody reads the output any more
                if not received:
                    received.append(signal.SIGPIPE)
                return


def _watch(children: Sequence[subprocess.Popen], received: Sequence[int]) -> int:
    """Waits until all children have ended, or must be ended. Returns the exit status."""
    while not received:
        codes = [child.poll() for child in children]
        for number, code in enumerate(codes):
            if code:
                names = {each.value: each.name for each in signal.Signals}
                how = f"ended with status {code}" if code > 0 else f"was killed by {names.get(-code, -code)}"
                _say(f"process {number} {how}" + ("; ending the others" if None in codes else ""))
                _signal_group(children[number], signal.SIGKILL)  # its own children, which may still run
                return code if code > 0 else 128 - code
        if None not in codes:
            return 0
        time.sleep(_PAUSE)
    _say(f"{signal.Signals(received[0]).name}; ending all processes")
    return 128 + received[0]


def _end(children: Sequence[subprocess.Popen], received: Sequence[int]) -> None:
    """Ends all children: SIGTERM, then SIGKILL after some seconds or at the next signal. Returns when all ended."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        _signal_group(child, signal.SIGTERM)
    earlier, deadline = len(received), time.monotonic() + (_GRACE_WHEN_ASKED if received else _GRACE)
    while time.monotonic() < deadline and len(received) == earlier and any(child.poll() is None for child in running):
        time.sleep(_PAUSE)
    for child in running:
        _signal_group(child, signal.SIGKILL)
    for child in children:
        child.wait()


def _signal_group(child: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM, so that neither can interrupt the code between a start and its cleanup."""
    received: list[int] = []
    both = (signal.SIGINT, signal.SIGTERM)
    earlier = {number: signal.signal(number, lambda number, _: received.append(number)) for number in both}
    try:
        yield received
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _say(text: str) -> None:
    with _writing, contextlib.suppress(OSError):
        print(f"anybatch launch: {text}", file=sys.stderr, flush=True)
