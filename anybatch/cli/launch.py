"""`anybatch launch`: runs a script in several processes on this machine, as a cluster would.

One thread per stream copies what the processes print, one thread per process waits for its end, and signals become
events. The main thread reads all of these from one queue (`_watch`).
"""

import contextlib
import ctypes
import importlib.metadata
import os
import pathlib
import queue
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
from typing import IO, Any

from anybatch import distributed
from anybatch.call.checks import whole_number
from anybatch.errors import InputError, NotAvailableError

# Seconds between SIGTERM and SIGKILL. JAX treats SIGTERM as a notice of preemption and keeps running. If the user asked
# for the end there is more time, so that a run can save its state.
_GRACE, _GRACE_WHEN_ASKED = 3.0, 10.0
_TIMED_OUT, _NO_READER = 124, 128 + signal.SIGPIPE  # the statuses that `timeout` and the shell use
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG

# Each process loads JAX: a few hundred MiB and many threads. Even a small machine can run 16 of them.
_FEWEST_ALLOWED, _MOST_ALLOWED = 16, 1024
_MOST_SIMULATED = 1024  # simulated devices of all processes together


def launch(
    script: str | os.PathLike,
    arguments: Sequence[str] = (),
    *,
    processes: int,
    devices_per_process: int | None = None,
    timeout: float | None = None,
    max_processes: int | None = None,
) -> int:
    """Runs a script in several processes that can find each other. Each line they print is shown with their number.

    When one process fails, the others get SIGTERM, and SIGKILL three seconds later. The same happens after `timeout`,
    and when nobody reads the output any more. After Ctrl-C or SIGTERM the processes have ten seconds to save their
    state; a second signal kills them at once. On Linux they also end when this process is killed.

    Args:
      script: the file to run with this Python.
      arguments: the script's `sys.argv[1:]`.
      processes: the number of processes.
      devices_per_process: GPUs for each process. On a machine without GPUs: simulated CPU devices. By default the GPUs
        are divided among the processes, and on the CPU each process has one device.
      timeout: end all processes after this many seconds.
      max_processes: refuse more processes than this. By default four for each CPU, at least 16 and at most 1,024.

    Returns:
      The exit status: 0 if all processes succeeded, else that of the first one that failed (128 + signal if a signal
      killed it); 130 after Ctrl-C, 143 after SIGTERM, 124 after the timeout.

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
    _check_counts(processes, devices_per_process, max_processes)
    command = [sys.executable, os.fspath(script), *arguments]
    environments = _environments(os.environ, processes, devices_per_process)
    # Events: ("ended", index of the process), ("signal", its number), or ("unread", index) if stdout was closed.
    events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    children: list[subprocess.Popen] = []
    readers: list[threading.Thread] = []
    status = 0
    with _signals(events):
        try:
            # Start all processes before the first thread: `preexec_fn` runs Python between fork and exec, which could
            # deadlock on a lock held by another thread.
            for environment in environments:
                children.append(_started(command, environment, len(children), processes))
            readers += _forward(children, events)
            status = _watch(children, events, timeout)
            return status
        finally:
            was_asked = status in (128 + signal.SIGINT, 128 + signal.SIGTERM)
            _end(children, events, _GRACE_WHEN_ASKED if was_asked else _GRACE)
            for reader in readers:
                reader.join(timeout=1.0)  # a grandchild may keep the pipe open


def _check_counts(processes: int, devices_per_process: int | None, max_processes: int | None) -> None:
    whole_number("processes", processes, 1, example="2")
    allowed = min(max(4 * _cpus(), _FEWEST_ALLOWED), _MOST_ALLOWED)
    if max_processes is not None:
        allowed = whole_number("max_processes", max_processes, 1)
    if processes > allowed:
        raise InputError(
            f"processes must be at most {allowed}, unless you allow more: each process loads JAX, and this machine has "
            f"{_cpus()} CPUs",
            given=f"processes={processes}",
            remedy=f"Start fewer, or raise the limit: anybatch launch --max-processes {processes} ...",
        )
    if devices_per_process is not None:
        whole_number("devices_per_process", devices_per_process, 1)


def _cpus() -> int:
    """The number of CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    gpus = visible_gpus(outer)
    share = len(gpus) // processes if devices_per_process is None else devices_per_process
    if gpus and (share == 0 or share * processes > len(gpus)):
        raise InputError(
            "Every process needs at least one GPU that no other process uses",
            given=f"{len(gpus)} GPUs for {processes} processes"
            + (f" with {devices_per_process} devices each" if devices_per_process else ""),
            remedy="Start fewer processes, or try it on simulated devices: JAX_PLATFORMS=cpu anybatch launch ...",
        )
    if not gpus and devices_per_process is not None:
        if devices_per_process * processes > _MOST_SIMULATED:
            raise InputError(
                f"The simulated devices of all processes together must be at most {_MOST_SIMULATED}",
                given=f"devices_per_process={devices_per_process} in {processes} processes",
                remedy="Use fewer, or set the variable of JAX, which has no limit: "
                f"JAX_NUM_CPU_DEVICES={devices_per_process} anybatch launch ...",
            )
        shared["JAX_NUM_CPU_DEVICES"] = str(devices_per_process)  # takes precedence over the flag in XLA_FLAGS
    each = [shared | {distributed.PROCESS_ID: str(index)} for index in range(processes)]
    for index, environment in enumerate(each):
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[index * share : (index + 1) * share])
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


def _started(command: Sequence[str], environment: dict[str, str], index: int, processes: int) -> subprocess.Popen:
    try:
        return _start(command, environment)
    except OSError as error:
        raise InputError(
            "The operating system must be able to start all processes",
            given=f"process {index} of {processes} ({error.strerror or error})",
            remedy=f"Start fewer, e.g. anybatch launch --processes {max(index, 1)} ..., or raise the system's limits: "
            "ulimit -n, ulimit -u.",
        ) from error


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
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return None

    def request_signal() -> None:
        prctl(_PARENT_DEATH, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return request_signal


def _forward(children: Sequence[subprocess.Popen], events: queue.SimpleQueue) -> list[threading.Thread]:
    """Starts the threads that copy the children's output, and those that wait for their end. Returns the former."""
    readers = []
    for index, child in enumerate(children):
        for source, target in ((child.stdout, sys.stdout.buffer), (child.stderr, sys.stderr.buffer)):
            readers.append(threading.Thread(target=_copy, args=(index, source, target, events), daemon=True))

        def wait(index: int = index, child: subprocess.Popen = child) -> None:
            child.wait()
            events.put(("ended", index))

        threading.Thread(target=wait, daemon=True).start()
    for reader in readers:
        reader.start()
    return readers


_writing = threading.Lock()


def _copy(index: int, source: IO[bytes], target: IO[bytes], events: queue.SimpleQueue) -> None:
    with source:
        for line in source:
            try:
                with _writing:
                    target.write(b"[%d] %s\n" % (index, line.removesuffix(b"\n")))
                    target.flush()
            except OSError:
                events.put(("unread", index))
                return


def _watch(children: Sequence[subprocess.Popen], events: queue.SimpleQueue, timeout: float | None) -> int:
    """Waits until all children have ended, or must be ended. Returns the exit status."""
    deadline = None if timeout is None else time.monotonic() + timeout
    running = len(children)
    while running:
        try:
            kind, number = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            _say(f"not done after {timeout:g} seconds; ending the {running} still running")
            return _TIMED_OUT
        if kind == "unread":
            return _NO_READER
        if kind == "signal":
            _say(f"{signal.Signals(number).name}; ending the {running} still running")
            return 128 + number
        code = children[number].returncode
        if code:
            how = f"was killed by {_name(-code)}" if code < 0 else f"ended with status {code}"
            _say(f"process {number} {how}" + ("; ending the others" if running > 1 else ""))
            _signal_group(children[number], signal.SIGKILL)  # its own children, which may still run
            return 128 - code if code < 0 else code
        running -= 1
    return 0


def _end(children: Sequence[subprocess.Popen], events: queue.SimpleQueue, grace: float) -> None:
    """Ends all children: SIGTERM, then SIGKILL after `grace` seconds or at the next signal. Returns when all ended."""
    running = [child for child in children if child.poll() is None]
    for child in running:
        _signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while time.monotonic() < deadline and any(child.poll() is None for child in running):
        with contextlib.suppress(queue.Empty):
            if events.get(timeout=0.02)[0] == "signal":
                break
    for child in running:
        _signal_group(child, signal.SIGKILL)
    for child in children:
        child.wait()


def _signal_group(child: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)


@contextlib.contextmanager
def _signals(events: queue.SimpleQueue) -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into events, so that neither can interrupt the code between a start and its cleanup."""

    def note(number: int, _: Any) -> None:
        events.put(("signal", number))

    earlier = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _say(text: str) -> None:
    with _writing, contextlib.suppress(OSError):
        print(f"anybatch launch: {text}", file=sys.stderr, flush=True)
