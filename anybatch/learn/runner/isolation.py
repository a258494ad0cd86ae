"""What a process that runs a learner's code may use, and how it is held to that.

Each layer stands alone and is left out where the platform does not have it: limits of the kernel on memory, computing
time, files and threads; namespaces without a network; Landlock for files; a filter of system calls; and last an audit
hook, which gives the messages. Together they guard against accidents, such as a loop that never ends or a folder that
is deleted. They are no prison for code that was written to break out.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from anybatch.call.checks import Finding
from anybatch.call.memory import readable
from anybatch.learn.runner import audit_hook, landlock, namespaces, seccomp

_PROBE = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from anybatch.learn.runner import isolation
isolation.probe(json.loads(sys.argv[2]))
"""
# Of the variables around, the fork server sees these. Those of JAX and XLA would change what is checked.
_VARIABLES = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONUSERBASE")
_SETTINGS = {
    **{"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    **{"PYTHONDONTWRITEBYTECODE": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "ANYBATCH_CACHE": "off"},
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # on a Mac: the fork server has a single thread when it forks
    # XLA's threads: as many as there are cores would be hundreds on some machines, for arrays of a few numbers.
    "NPROC": str(min(4, os.cpu_count() or 1)),
}
# What a check shall not do -> what that means, if the kernel sees to it; and what remains possible, if it does not.
_CLOSED = {
    "network": ("closed", "open a connection"),
    "processes": ("none can be started", "start others"),
    "signals": ("none to other processes", "end other processes of yours"),
    "other processes": ("their memory cannot be read", "read the memory of other processes of yours"),
    "files": ("written in an empty temporary folder alone", "change your files"),
    "the course": ("its answers cannot be read", "read the answers"),
}
_LAYERS = {
    "network": "namespaces",
    "landlock": "Landlock",
    "seccomp": "a filter of system calls",
    "hook": "Python's audit hook",
}
PURPOSE = (
    "guards against accidents, not against attackers: exercises run as you, so do not paste code that you do not trust"
)


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


def environment() -> dict[str, str]:
    """The variables of the processes that run learners' code; with them, imports start no thread."""
    kept = {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith("LC_")}
    return kept | _SETTINGS


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
    steps: dict[str, Callable[[], None]] = {
        "capabilities": namespaces.drop_capabilities,
        "privileges": namespaces.no_new_privileges,
        "landlock": lambda: landlock.restrict(home, hidden),
        "seccomp": seccomp.install,
    }
    for name, step in steps.items():
        if name not in without:
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
        audit_hook.install(home, hidden)


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


def examine(limits: Limits | None = None, *, _without: Collection[str] = ()) -> list[Finding]:
    """What a check is kept from on this machine: each was tried in a process of its own."""
    limits = Limits() if limits is None else limits
    if os.name != "posix":
        return [Finding("isolation", "anybatch learn needs fork, which Windows does not have", False, "Run it in WSL.")]
    try:
        tried = _try(limits, _without)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [Finding("isolation", f"could not be tried: {error}", False)]
    return [
        Finding("wall clock", f"{limits.seconds:g} seconds, then the process is killed"),
        _computing(limits, tried["limits"]["computing time"]),
        _memory(limits, tried["limits"]["memory"]),
        *(_closed(subject, tried["kernel"][subject], tried["hook"][subject]) for subject in _CLOSED),
        _layers([*tried["layers"], *(() if "hook" in _without else ("hook",))]),
        Finding("isolation", PURPOSE),
    ]


def _computing(limits: Limits, is_held: bool) -> Finding:
    text = f"{limits.cpu_seconds} seconds on all cores together" if is_held else "not limited on this system"
    return Finding("computing time", text, is_held)


def _memory(limits: Limits, is_held: bool) -> Finding:
    most = f"{readable(limits.memory)} beyond what JAX takes"
    late = "watched, and ended a moment too late, since this system has no such limit"
    return Finding("memory", most if is_held else f"{most}: {late}")


def _closed(subject: str, kernel: bool, hook: bool) -> Finding:
    closed, possible = _CLOSED[subject]
    if kernel:
        return Finding(subject, closed)
    if hook:
        return Finding(subject, f"{closed}, by Python code; what goes through C could {possible}")
    return Finding(subject, f"open: a check could {possible}. Exercises run as you", False)


def _layers(holds: Collection[str]) -> Finding:
    has = ", ".join(name for layer, name in _LAYERS.items() if layer in holds)
    *some, last = [name for layer, name in _LAYERS.items() if layer not in holds] or [""]
    missing = f"{', '.join(some)} or {last}" if some else last
    if not sys.platform.startswith("linux"):
        return Finding("layers", f"{has}; the others are Linux's")
    return Finding(
        "layers", has + (f"; this kernel, or who has set it up, does not allow {missing}" if missing else "")
    )


def _try(limits: Limits, without: Collection[str]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(os.path.realpath(stack.enter_context(tempfile.TemporaryDirectory())))
        for name in ("home", "hidden", "outside"):
            (folder / name).mkdir()
        (folder / "hidden" / "solution.py").write_text("the answer")
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        asked = {
            "folder": str(folder),
            "port": listener.getsockname()[1],
            "limits": dataclasses.asdict(limits),
            "without": sorted(without),
        }
        places = [place for place in sys.path if place]
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, json.dumps(places), json.dumps(asked)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
            start_new_session=True,
        )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (IndexError, ValueError):
        raise OSError(f"status {done.returncode}: {done.stderr.strip()[-500:]}") from None


def probe(asked: Mapping[str, Any]) -> None:
    """In a process of its own: is held as a check is, tries what it shall not do, and prints what failed."""
    import resource

    limits, folder, without = Limits(**asked["limits"]), asked["folder"], asked["without"]
    home, hidden = os.path.join(folder, "home"), [os.path.join(folder, "hidden")]
    attempts = _attempts(folder, asked["port"])
    layers = enter(limits, home, hidden, without)
    kernel = {name: _fails(attempt) for name, attempt in attempts.items()}
    begin(limits, home, hidden, without)
    is_limited = sys.platform.startswith("linux") and "limits" not in without
    held = {
        "memory": is_limited and _fails(lambda: bytearray(limits.memory + 2**26)),
        "computing time": resource.getrlimit(resource.RLIMIT_CPU)[0] != resource.RLIM_INFINITY,
    }
    hook = {name: _fails(attempt) for name, attempt in attempts.items()}
    print(json.dumps({"layers": sorted(layers), "kernel": kernel, "hook": hook, "limits": held}), flush=True)


def _attempts(folder: str, port: int) -> dict[str, Callable[[], Any]]:
    parent = os.getppid()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as datagrams:
            datagrams.sendto(b"", ("127.0.0.1", port))
            return
        socket.create_connection(("127.0.0.1", port), timeout=2.0).close()

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    def memory() -> None:
        if not sys.platform.startswith("linux"):
            raise PermissionError("only the debugger can, on a Mac")
        with open(f"/proc/{parent}/mem", "rb"):
            pass

    def write() -> None:
        with open(os.path.join(folder, "outside", "file"), "w"):
            pass

    def read() -> None:
        with open(os.path.join(folder, "hidden", "solution.py")) as file:
            file.read()

    return {
        "network": connect,
        "processes": fork,
        "signals": lambda: os.kill(parent, 0),
        "other processes": memory,
        "files": write,
        "the course": read,
    }


def _fails(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except (OSError, MemoryError):
        return True
    return False
