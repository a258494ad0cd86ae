"""The limits on a process that runs a learner's code.

There are three layers, and each is left out where the platform does not have it:

- limits of the kernel on memory, computing time, files and threads;
- namespaces of Linux: a network without an interface, a home folder of limited size, and an empty folder in the place
  of each course;
- an audit hook, which Python calls before it opens a file, connects or forks. It refuses the network, other processes
  and other files, with a message.

They guard against accidents, such as an endless loop or a deleted folder. They do not hold code that was written to
break out: what calls C directly, through ctypes for example, goes around the hook.
"""

import contextlib
import ctypes
import dataclasses
import errno
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from anybatch.call.checks import Finding
from anybatch.call.memory import readable

NETWORK = "A check has no network"
PROCESSES = "A check may start no other process"
SIGNALS = "A check may send no signal to another process"
MEMORY = "A check may not read the memory of other processes"

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NO_NETWORK = (
    *("connect", "bind", "sendto", "sendmsg", "getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo"),
    "sethostname",
)
_NO_PROCESSES = ("subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn")
# event -> pairs of argument positions: a path that is changed, and the descriptor of the folder it is relative to
_CHANGES = {
    **{"os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),), "os.truncate": ((0, None),)},
    **{"os.rename": ((0, 2), (1, 3)), "os.link": ((0, 2), (1, 3)), "os.symlink": ((1, 2),)},
    **{"os.chmod": ((0, 2),), "os.chown": ((0, 3),), "os.utime": ((0, 3),), "os.setxattr": ((0, None),)},
}


def install(writable: str, hidden: Sequence[str]) -> None:
    """Installs the hook, which cannot be removed.

    Args:
      writable: the only folder in which files may be changed.
      hidden: folders that must not be read.
    """
    handlers = _handlers(_Files(writable, hidden))

    def hook(event: str, arguments: tuple[Any, ...], get: Callable[[str], Any] = handlers.get) -> None:
        handler = get(event)
        if handler is not None:
            handler(*arguments)

    sys.addaudithook(hook)


def _handlers(files: "_Files") -> dict[str, Callable[..., None]]:
    handlers: dict[str, Callable[..., None]] = {
        "open": files.open,
        "os.listdir": files.read,
        "os.scandir": files.read,
        "os.chdir": files.read,
        "sqlite3.connect": files.read,
        "socket.__new__": _socket,
        "os.kill": _kill,
        "os.killpg": _refuse(SIGNALS, "os.killpg"),
        "pty.spawn": _refuse(PROCESSES, "pty.spawn"),
    }
    handlers |= {f"socket.{name}": _refuse(NETWORK, f"socket.{name}") for name in _NO_NETWORK}
    handlers |= {name: _refuse(PROCESSES, name) for name in _NO_PROCESSES}
    return handlers | {name: files.change(places) for name, places in _CHANGES.items()}


def _refuse(sentence: str, name: str) -> Callable[..., None]:
    def handler(*_: Any) -> None:
        raise PermissionError(f"{sentence}: {name} is refused.")

    return handler


def _socket(_: Any, family: int, *__: Any) -> None:
    # A socketpair is allowed: Python's event loops wake themselves with one, and it connects to nothing else.
    if family not in (-1, 1):
        raise PermissionError(f"{NETWORK}: socket.socket is refused.")


def _kill(pid: int, _: int) -> None:
    if pid != os.getpid():
        raise PermissionError(f"{SIGNALS}: os.kill({pid}, ...) is refused.")


class _Files:
    def __init__(self, writable: str, hidden: Sequence[str]) -> None:
        self.writable = os.path.realpath(writable)
        self.hidden = [_folded(os.path.realpath(folder)) for folder in hidden]

    def open(self, path: Any, mode: str | None, flags: int) -> None:
        if isinstance(path, int):
            return
        real = self._readable(path)
        # With the descriptor of a parent folder, a hidden file could be opened by a relative path that says nothing.
        if mode is None and os.path.isdir(real) and any(_is_inside(each, _folded(real)) for each in self.hidden):
            raise PermissionError(f"{real} contains the course: a check cannot open it as a folder.")
        if flags & _WRITES:
            self._writable(real)

    def read(self, path: Any = ".", *_: Any) -> None:
        if not isinstance(path, int):
            self._readable("." if path is None else path)

    def change(self, places: Sequence[tuple[int, int | None]]) -> Callable[..., None]:
        def handler(*arguments: Any) -> None:
            for place, folder in places:
                descriptor = arguments[folder] if folder is not None and folder < len(arguments) else -1
                if not isinstance(arguments[place], int):
                    self._writable(_real(arguments[place], descriptor, is_link=True))

        return handler

    def _readable(self, path: Any) -> str:
        _refuse_other_processes(os.path.abspath(os.fsdecode(path)))  # before a link in there is followed
        real = _real(path)
        _refuse_other_processes(real)
        folded = _folded(real)
        if any(folded == each or _is_inside(folded, each) for each in self.hidden):
            raise PermissionError(f"{real} belongs to the course: a check cannot read it.")
        return real

    def _writable(self, real: str) -> None:
        if not (_is_inside(real, self.writable) or real == self.writable or real.startswith("/dev/")):
            raise PermissionError(f"A check can write only in its own empty folder ({self.writable}), not to {real}.")


def _refuse_other_processes(path: str) -> None:
    owner = path.split("/")[2] if path.startswith("/proc/") else ""
    if owner.isdigit() and owner != str(os.getpid()):
        raise PermissionError(f"{MEMORY}: {path} is refused.")


def _real(path: Any, descriptor: int = -1, is_link: bool = False) -> str:
    """The real path of a file. With `is_link`, a link at the end is not followed, since the link itself is changed."""
    name = os.fsdecode(path)
    if descriptor is not None and descriptor >= 0 and not os.path.isabs(name):
        name = os.path.join(_of_descriptor(descriptor), name)
    if is_link:
        folder, last = os.path.split(name.rstrip("/"))
        return os.path.join(os.path.realpath(folder or "."), last)
    return os.path.realpath(name)


def _of_descriptor(descriptor: int) -> str:
    if sys.platform == "darwin":
        import fcntl

        return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _is_inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip("/") + "/")


def _folded(path: str) -> str:
    """The path in lower case on a Mac, where names that differ only in case are usually the same file."""
    return path.casefold() if sys.platform == "darwin" else path


_PROBE = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from anybatch.learn.runner import isolation
isolation.probe(json.loads(sys.argv[2]))
"""
# The fork server inherits only these variables. Those of JAX and XLA would change what is checked.
_VARIABLES = ("PATH", "LANG", "TZ", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "PYTHONUSERBASE")
_SETTINGS = {
    **{"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    **{"PYTHONDONTWRITEBYTECODE": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "ANYBATCH_CACHE": "off"},
    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # on a Mac: safe, since the fork server has a single thread
    # The number of XLA's threads. One for each core would be hundreds on some machines, for tiny arrays.
    "NPROC": str(min(4, os.cpu_count() or 1)),
}
# subject -> what holds if it is closed, and what a check could do if it is not
_CLOSED = {
    "network": ("no connection can be opened", "open a connection"),
    "processes": ("no other process can be started", "start others"),
    "signals": ("none can be sent to other processes", "end other processes of yours"),
    "other processes": ("their memory cannot be read", "read the memory of other processes of yours"),
    "files": ("can be written only in an empty temporary folder", "change your files"),
    "the course": ("its answers cannot be read", "read the answers"),
}
PURPOSE = (
    "guards against accidents, not against attackers: exercises run as you, so do not paste code that you do not trust"
)

# Flags of Linux system calls: namespaces, mounts, prctl.
_MOUNTS, _IPC, _USER, _NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x40000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _RECURSIVE, _PRIVATE = 1, 2, 4, 8, 16384, 1 << 18
_CAPABILITIES = 0x20080522  # the version of the structure that holds 64 of them
_PARENT_DEATH, _SUBREAPER = 1, 36


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one check.

    Args:
      seconds: wall-clock time, counted while the grader waits for the learner's code.
      cpu_seconds: computing time, on all cores together.
      memory: bytes, beyond what JAX takes itself.
      file_bytes: the size of the largest file. All files together may have four times as much, where there are
        namespaces.
      files: how many files may be open at once. Four times as many may exist, where there are namespaces.
      processes: how many threads may run.
      print_bytes: how much may be printed before the check is ended.
      shown_print_bytes: how much of the output is kept, from its beginning.
      reply_bytes: the size of the largest answer.
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
    """The environment variables for processes that run learners' code. With these, imports start no thread."""
    kept = {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith("LC_")}
    return kept | _SETTINGS


def enter(limits: Limits, home: str, hidden: Sequence[str], without: Collection[str] = ()) -> set[str]:
    """Applies every layer that can be applied before JAX starts; `begin` applies the rest.

    Call it in a new process that has a single thread.

    Args:
      limits: the limits.
      home: an empty folder, which becomes the current one.
      hidden: real paths of folders that must not be read.
      without: names of layers to leave out; for tests.

    Returns:
      The names of the layers that are in force: some of "user", "network", "files", "limits", "capabilities".
    """
    holds: set[str] = set()
    if "namespaces" not in without:
        entered = _enter_namespaces()
        holds |= entered & {"user", "network"}
        if "files" in entered and _cover(hidden, home, 4 * limits.file_bytes, 4 * limits.files):
            holds.add("files")
    os.chdir(home)
    if "limits" not in without:
        _limit(limits, is_alone="user" in holds)
        holds.add("limits")
    if "capabilities" not in without:
        with contextlib.suppress(OSError):
            _drop_capabilities()
            holds.add("capabilities")
    return holds


def begin(limits: Limits, home: str, hidden: Sequence[str], without: Collection[str] = ()) -> None:
    """Applies the other layers, right before the learner's code: memory, computing time and the audit hook."""
    if "limits" not in without:
        import resource

        _lower(resource.RLIMIT_DATA, _data_bytes() + limits.memory)
        used = int(time.process_time()) + 1
        # The soft limit ends the process with a trace of where it was, the hard one without.
        _lower(resource.RLIMIT_CPU, used + limits.cpu_seconds, used + limits.cpu_seconds + 2)
    if not sys.platform.startswith("linux") or "limits" in without:
        threading.Thread(target=_watch_memory, args=(limits.memory,), daemon=True).start()
    if "hook" not in without:
        install(home, hidden)


def die_with_parent(parent: int, signal: int) -> None:
    """Has the kernel send a signal when the thread that forked this process ends. Raises OSError where it cannot."""
    _control(_PARENT_DEATH, signal, "the kernel will not tell when the parent ends")
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def adopt_orphans() -> None:
    """Becomes the parent of every descendant whose own parent ends. Raises OSError where it cannot."""
    _control(_SUBREAPER, 1, "this process cannot adopt orphans")


def _limit(limits: Limits, is_alone: bool) -> None:
    import resource

    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    _lower(resource.RLIMIT_NOFILE, limits.files)
    if sys.platform.startswith("linux"):
        # The limit counts all threads of the user; since Linux 5.14, only those in the same user namespace. Root has
        # no such limit.
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        others = 0 if is_alone and release >= (5, 14) else _threads_of_user()
        _lower(resource.RLIMIT_NPROC, others + limits.processes)


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
    """The private memory of this process, as RLIMIT_DATA counts it."""
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
    """Ends the process once it has taken too much memory, on systems whose kernel does not limit that."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < most:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def _enter_namespaces() -> set[str]:
    """Moves this process into new namespaces; returns which: some of "user", "network", "files".

    The process must have one thread. Containers and some distributions do not allow it.
    """
    if not sys.platform.startswith("linux"):
        return set()
    uid, gid = os.getuid(), os.getgid()
    for wanted in (_USER | _MOUNTS | _IPC | _NETWORK, _USER | _NETWORK, _MOUNTS | _NETWORK):
        if _libc().unshare(wanted) == 0:
            break
    else:
        return set()
    names = {name for name, flag in (("user", _USER), ("network", _NETWORK), ("files", _MOUNTS)) if wanted & flag}
    if wanted & _USER:
        with contextlib.suppress(OSError):  # without these files the user's number reads 65534; nothing else changes
            for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{file}", "w") as map_:
                    map_.write(text)
    if wanted & _MOUNTS and _mount("none", "/", None, _RECURSIVE | _PRIVATE, None) != 0:
        names.discard("files")  # other processes could see what is mounted here
    return names


def _cover(hidden: Sequence[str], home: str, size: int, files: int) -> bool:
    """Mounts an empty folder over each hidden one, and one in memory, of limited size, over `home`.

    Call it only in a new mount namespace. Returns whether everything was mounted.
    """
    flags = _NO_SUID | _NO_DEVICES
    done = [
        _mount("tmpfs", folder, "tmpfs", flags | _NO_EXEC | _READ_ONLY, "mode=0,size=4k") == 0
        for folder in hidden
        if os.path.isdir(folder)
    ]
    done.append(_mount("tmpfs", home, "tmpfs", flags, f"mode=700,size={size},nr_inodes={files}") == 0)
    return all(done)


def _drop_capabilities() -> None:
    """Gives up root's capabilities, so that permissions and limits hold for root, too. Raises OSError if it fails."""
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, "this system has no capabilities")
    header, none = struct.pack("=Ii", _CAPABILITIES, 0), bytes(24)
    if _libc().capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "the capabilities could not be dropped")


def _control(option: int, value: int, failure: str) -> None:
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, failure)
    if _libc().prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), failure)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> int:
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    return int(_libc().mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


# What `anybatch learn doctor` shows.


def examine(limits: Limits | None = None, *, _without: Collection[str] = ()) -> list[Finding]:
    """Finds out what a check cannot do on this machine, by trying all of it in a new process."""
    limits = Limits() if limits is None else limits
    if os.name != "posix":
        return [Finding("isolation", "anybatch learn needs fork, which Windows does not have", False, "Run it in WSL.")]
    try:
        tried = _try(limits, _without)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return [Finding("isolation", f"the process that tries it failed: {error}", False)]
    return [
        Finding("wall clock", f"{limits.seconds:g} seconds, then the process is killed"),
        _computing(limits, tried["limits"]["computing time"]),
        _memory(limits, tried["limits"]["memory"]),
        *(_closed(subject, tried["kernel"][subject], tried["hook"][subject]) for subject in _CLOSED),
        _layers(has_namespaces="network" in tried["layers"], has_hook="hook" not in _without),
        Finding("isolation", PURPOSE),
    ]


def _computing(limits: Limits, is_held: bool) -> Finding:
    text = f"{limits.cpu_seconds} seconds on all cores together" if is_held else "not limited on this system"
    return Finding("computing time", text, is_held)


def _memory(limits: Limits, is_held: bool) -> Finding:
    most = f"{readable(limits.memory)} beyond what JAX takes"
    watched = "this system cannot limit it, so it is watched, and the process ended shortly after"
    return Finding("memory", most if is_held else f"{most}: {watched}")


def _closed(subject: str, by_kernel: bool, by_hook: bool) -> Finding:
    closed, possible = _CLOSED[subject]
    if by_kernel:
        return Finding(subject, closed)
    if by_hook:
        return Finding(subject, f"{closed} from Python; code in C could {possible}")
    return Finding(subject, f"open: a check could {possible}. Exercises run as you", False)


def _layers(has_namespaces: bool, has_hook: bool) -> Finding:
    layers = {"namespaces of Linux": has_namespaces, "Python's audit hook": has_hook}
    has = " and ".join(name for name, is_there in layers.items() if is_there) or "limits alone"
    if has_namespaces or not sys.platform.startswith("linux"):
        return Finding("layers", has)
    return Finding("layers", f"{has}; this kernel, or its configuration, does not allow namespaces")


def _try(limits: Limits, without: Collection[str]) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(os.path.realpath(stack.enter_context(tempfile.TemporaryDirectory())))
        for name in ("home", "hidden", "outside"):
            (folder / name).mkdir()
        (folder / "hidden" / "solution.py").write_text("the answer")
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        request = {
            "folder": str(folder),
            "port": listener.getsockname()[1],
            "limits": dataclasses.asdict(limits),
            "without": sorted(without),
        }
        places = [place for place in sys.path if place]
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, json.dumps(places), json.dumps(request)],
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


def probe(request: Mapping[str, Any]) -> None:
    """The program of the new process: applies the layers, tries what must fail, and prints what did fail."""
    import resource

    limits, folder, without = Limits(**request["limits"]), request["folder"], request["without"]
    home, hidden = os.path.join(folder, "home"), [os.path.join(folder, "hidden")]
    attempts = _attempts(folder, request["port"])
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
            raise PermissionError("on a Mac, only a debugger can")
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
