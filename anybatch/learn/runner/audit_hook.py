"""What Python code in a check is told when it reaches for the network, other processes, or files that are not its own.

An audit hook: Python asks it before it opens, connects, forks and so on, on every platform. What goes around Python,
through C, is the business of the kernel; this gives the messages, and holds where the kernel does not.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

NETWORK = "A check has no network"
PROCESSES = "A check may start no other process"
SIGNALS = "A check may send no signal to another process"
MEMORY = "A check may not look into other processes"

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NO_NETWORK = (
    *("connect", "bind", "sendto", "sendmsg", "getaddrinfo", "gethostbyname", "gethostbyaddr", "getnameinfo"),
    "sethostname",
)
_NO_PROCESSES = ("subprocess.Popen", "os.system", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn", "os.spawn")
# event -> which of its arguments are paths that it changes, and which are folders that these are relative to
_CHANGES = {
    **{"os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),), "os.truncate": ((0, None),)},
    **{"os.rename": ((0, 2), (1, 3)), "os.link": ((0, 2), (1, 3)), "os.symlink": ((1, 2),)},
    **{"os.chmod": ((0, 2),), "os.chown": ((0, 3),), "os.utime": ((0, 3),), "os.setxattr": ((0, None),)},
}


def install(writable: str, hidden: Sequence[str]) -> None:
    """Refuses, from now on and for good, what a check does not need.

    Args:
      writable: the folder in which files can be changed.
      hidden: folders that cannot be read.
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
    # Event loops of Python wake themselves through a pair of these, which leads nowhere else.
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
        # By the descriptor of a folder around it, a hidden file could be opened without its path ever being seen.
        if mode is None and os.path.isdir(real) and any(_is_inside(each, _folded(real)) for each in self.hidden):
            raise PermissionError(f"{real} holds the course: it cannot be opened as a folder in a check.")
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
        _not_of_others(os.path.abspath(os.fsdecode(path)))  # what a link there leads to is theirs as well
        real = _real(path)
        _not_of_others(real)
        folded = _folded(real)
        if any(folded == each or _is_inside(folded, each) for each in self.hidden):
            raise PermissionError(f"{real} belongs to the course: a check cannot read it.")
        return real

    def _writable(self, real: str) -> None:
        if not (_is_inside(real, self.writable) or real == self.writable or real.startswith("/dev/")):
            raise PermissionError(f"A check can write in its own empty folder alone ({self.writable}), not to {real}.")


def _not_of_others(path: str) -> None:
    owner = path.split("/")[2] if path.startswith("/proc/") else ""
    if owner.isdigit() and owner != str(os.getpid()):
        raise PermissionError(f"{MEMORY}: {path} is refused.")


def _real(path: Any, descriptor: int = -1, is_link: bool = False) -> str:
    """The real path of what an event names; of a link itself, not of what it leads to, if that is what is changed."""
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
    """On a Mac, names that differ in case are usually the same."""
    return path.casefold() if sys.platform == "darwin" else path
