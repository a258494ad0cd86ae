"""What a process that runs a learner's code may use, and how it is held to that.

Each layer stands alone and is left out where the platform does not have it: limits of the kernel on memory, computing
time, files and threads; namespaces without a network; Landlock for files; a filter of system calls; and last an audit
hook, which gives the messages. Together they guard against accidents, such as a loop that never ends or a folder that
is deleted. They are no prison for code that was written to break out.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from anybatch.learn import landlock, namespaces, refusals, seccomp

LAYERS = ("limits", "namespaces", "capabilities", "landlock", "seccomp", "hook")


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one check may use.

    Args:
      seconds: of the clock, as long as the learner's code is being waited for.
      cpu_seconds: of computing, on all cores together.
      memory: bytes, beyond what JAX has taken by itself.
      file_bytes: the largest file; all files together may have four times as much, where the kernel can see to it.
      files: how many may be open; four times as many may be there.
      processes: threads, since no other process can be started.
      print_bytes: how much may be printed before the check is ended.
      shown_print_bytes: how much of it is kept, from its beginning.
      reply_bytes: the largest answer.
    """

    seconds: float = 10.0
    cpu_seconds: int = 20
    memory: int = 2 * 2**30
    file_bytes: int = 16 * 2**20
    files: int = 256
    processes: int = 512
    print_bytes: int = 2**20
    shown_print_bytes: int = 4000
    reply_bytes: int = 2**28


def enter(limits: Limits, home: str, hidden: Sequence[str], without: Collection[str] = ()) -> set[str]:
    """Gives up, for good, what a check does not need; `begin` has to follow before the learner's code.

    It is called in a new process with a single thread, before JAX starts others.

    Args:
      limits: what it may use.
      home: an empty folder, which becomes the current one.
      hidden: real paths of folders that cannot be read.
      without: layers to leave out; for tests.

    Returns:
      The layers that hold.
    """
    holds: set[str] = set()
    if "namespaces" not in without:
        own = namespaces.enter()
        holds |= own & {"user", "network"}
        if "files" in own and namespaces.cover(hidden, home, 4 * limits.file_bytes, 4 * limits.files):
            holds.add("files")
    os.chdir(home)
    if "limits" not in without:
        _limit(limits, is_alone="user" in holds)
        holds.add("limits")
    steps: dict[str, Any] = {
        "capabilities": namespaces.drop_capabilities if sys.platform.startswith("linux") else None,
        "privileges": namespaces.no_new_privileges,
        "landlock": lambda: landlock.restrict(home, hidden),
        "seccomp": seccomp.install,
    }
    for name, step in steps.items():
        if step is not None and name not in without:
            with contextlib.suppress(OSError):
                step()
                holds.add(name)
    return holds


def begin(limits: Limits, home: str, hidden: Sequence[str], without: Collection[str] = ()) -> None:
    """Right before the learner's code: memory and computing time from here on, and the audit hook."""
    if "limits" not in without:
        import resource

        _lower(resource.RLIMIT_DATA, _data_bytes() + limits.memory)
        used = int(time.process_time()) + 1
        # The first ends the process with a trace of where it was, the second without.
        _lower(resource.RLIMIT_CPU, used + limits.cpu_seconds, used + limits.cpu_seconds + 2)
    if not sys.platform.startswith("linux") or "limits" in without:
        threading.Thread(target=_watch_memory, args=(limits.memory,), daemon=True).start()
    if "hook" not in without:
        refusals.install(home, hidden)


def _limit(limits: Limits, is_alone: bool) -> None:
    import resource

    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    _lower(resource.RLIMIT_NOFILE, limits.files)
    if sys.platform.startswith("linux"):
        # It counts the threads of the user; since 5.14, of the user in this namespace. Root has no such limit.
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        others = 0 if is_alone and release >= (5, 14) else _threads_of_user()
        _lower(resource.RLIMIT_NPROC, others + limits.processes)


def _lower(which: int, soft: int, hard: int | None = None) -> None:
    """Sets a limit, unless there is a lower one."""
    import resource

    _, highest = resource.getrlimit(which)
    hard = soft if hard is None else hard
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(which, (soft, hard))


def _data_bytes() -> int:
    """The private memory that the process has asked for, as RLIMIT_DATA counts it."""
    return _field("/proc/self/status", "VmData:") * 1024


def _threads_of_user() -> int:
    total = 0
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                total += _field(f"/proc/{name}/status", "Threads:")
    return total


def _field(path: str, name: str) -> int:
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            if line.startswith(name):
                return int(line.split()[1])
    return 0


def _watch_memory(most: int) -> None:
    """For systems on which the kernel does not limit memory: ends the process once it has taken too much."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < most:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
