"""The limits on a process that runs a learner's code.

- Limits of the kernel: on memory (on Linux), computing time and files.
- An audit hook, which Python calls before it opens a file, connects or forks. It refuses the network, other processes,
  changes outside of the check's own folder, and the course with its solutions.

They guard against accidents, such as an endless loop or a deleted folder. They do not hold code that was written to
break out: what calls C directly, through ctypes for example, goes around the hook.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

NETWORK = "A check has no network"
PROCESSES = "A check may start no other process"

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NO_NETWORK = (
    *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "socket.gethostbyname"),
    *("socket.gethostbyaddr", "socket.getnameinfo"),
)
_NO_PROCESSES = ("subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn")
# event -> the positions of the paths that are changed
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "os.chown", "os.utime"), (0,)),
    **{"os.rename": (0, 1), "os.link": (0, 1), "os.symlink": (1,), "shutil.rmtree": (0,)},
}

# The fork server inherits only these variables. Those of JAX and XLA would change what is checked.
_VARIABLES = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONUSERBASE")
_SETTINGS = {
    **{"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    **{"PYTHONDONTWRITEBYTECODE": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "ANYBATCH_CACHE": "off"},
    # Unbuffered, so that what was printed before an endless loop is shown.
    **{"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8:backslashreplace"},
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # on a Mac: safe, since the fork server has a single thread
    # The number of XLA's threads. One for each core would be hundreds on some machines, for tiny arrays.
    "NPROC": str(min(4, os.cpu_count() or 1)),
}
_PARENT_DEATH = 1  # an option of Linux's prctl


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one check.

    Args:
      seconds: wall-clock time, counted while the grader waits for the learner's code.
      cpu_seconds: computing time, on all cores together.
      memory: bytes, beyond what JAX takes itself; limited on Linux only. The stacks of threads are part of it.
      file_bytes: the size of the largest file, also of everything that is printed.
      files: how many files may be open at once.
      print_bytes: how much may be printed.
      shown_print_bytes: how much of the output is shown, from its beginning.
      reply_bytes: the size of the largest answer.
    """

    seconds: float = 10.0
    cpu_seconds: int = 20
    memory: int = 2 * 2**30
    file_bytes: int = 16 * 2**20
    files: int = 256
    print_bytes: int = 2**20
    shown_print_bytes: int = 4000
    reply_bytes: int = 2**28


def environment() -> dict[str, str]:
    """The environment variables for processes that run learners' code. With these, imports start no thread."""
    kept = {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith("LC_")}
    return kept | _SETTINGS


def begin(limits: Limits, home: str, hidden: Sequence[str]) -> None:
    """Limits this process, right before it runs the learner's code.

    Args:
      limits: the limits.
      home: the only folder in which files may be changed.
      hidden: folders that must not be read.
    """
    import resource

    used = int(time.process_time()) + 1
    # The soft limit ends the process with a trace of where it was, the hard one without.
    _lower(resource.RLIMIT_CPU, used + limits.cpu_seconds, used + limits.cpu_seconds + 2)
    _lower(resource.RLIMIT_DATA, _data_bytes() + limits.memory)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    _lower(resource.RLIMIT_NOFILE, limits.files)
    handlers = _handlers(os.path.realpath(home), [os.path.realpath(folder) for folder in hidden])

    def hook(event: str, arguments: tuple[Any, ...], get: Callable[[str], Any] = handlers.get) -> None:
        handler = get(event)
        if handler is not None:
            handler(*arguments)

    sys.addaudithook(hook)


def die_with_parent(parent: int) -> None:
    """Has Linux kill this process when the one that forked it ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


def _lower(which: int, soft: int, hard: int | None = None) -> None:
    """Sets a limit of the kernel, unless a lower one is set."""
    import resource

    _, highest = resource.getrlimit(which)
    hard = soft if hard is None else hard
    if highest != resource.RLIM_INFINITY:
        soft, hard = min(soft, highest), min(hard, highest)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(which, (soft, hard))


def _data_bytes() -> int:
    """The private memory of this process, as Linux's RLIMIT_DATA counts it."""
    with contextlib.suppress(OSError), open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmData:"))
    return 0


def _handlers(home: str, hidden: Sequence[str]) -> dict[str, Callable[..., None]]:
    """What to do at each event of the audit hook."""
    return {
        "open": functools.partial(_open, home, hidden),
        **dict.fromkeys(("os.listdir", "os.scandir", "os.chdir"), functools.partial(_read, hidden)),
        **{name: functools.partial(_change, home, places) for name, places in _CHANGES.items()},
        **{name: functools.partial(_refuse, NETWORK, name) for name in _NO_NETWORK},
        **{name: functools.partial(_refuse, PROCESSES, name) for name in _NO_PROCESSES},
    }


def _refuse(sentence: str, name: str, *_: Any) -> None:
    raise PermissionError(f"{sentence}: {name} is refused.")


def _open(home: str, hidden: Sequence[str], path: Any, _: Any, flags: int) -> None:
    _read(hidden, path)
    if flags & _WRITES and not isinstance(path, int):
        _write(home, os.path.realpath(os.fsdecode(path)))


def _read(hidden: Sequence[str], path: Any = ".", *_: Any) -> None:
    if isinstance(path, int):
        return
    real = os.path.realpath(os.fsdecode(path or "."))
    if any(_is_in(real, folder) for folder in hidden):
        raise PermissionError(f"{real} belongs to the course: a check cannot read it.")


def _change(home: str, places: Sequence[int], *arguments: Any) -> None:
    for path in (arguments[place] for place in places):
        if not isinstance(path, int):
            # A link itself is changed, not what it points to.
            folder, name = os.path.split(os.fsdecode(path).rstrip("/"))
            _write(home, os.path.join(os.path.realpath(folder or "."), name))


def _write(home: str, real: str) -> None:
    if not _is_in(real, home) and not real.startswith("/dev/"):
        raise PermissionError(f"A check can write only in its own empty folder ({home}), not to {real}.")


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")
