"""An audit hook that refuses Python code in a check the network, other processes, and other files, with a message.

Python calls the hook before it opens a file, connects, forks and so on, on every platform. Code that calls C directly
goes around it.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

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
