"""What a process may do to files, by Linux' Landlock: read all but some folders, and write in one.

It needs no privilege, and holds for whatever the process does, in C as well. Beside files, it takes TCP, signals to
others and a look at their memory away, as far as the kernel's version knows how.
"""

import ctypes
import errno
import itertools
import os
import struct
import sys
from collections.abc import Iterator, Sequence

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # on every architecture
_RULE_BENEATH = 1

_EXECUTE, _WRITE, _READ = 1 << 0, 1 << 1, 1 << 2
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # from versions 2 and 3 on
_TCP, _OTHERS = 0b11, 0b11  # from versions 4 and 6 on: bind and connect; abstract sockets and signals
_QUIET = 1  # from version 7 on: no line in the system's log for each refusal

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_MOST_RULES = 5000


def version() -> int:
    """The version that the kernel has; 0 if none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, ctypes.CDLL(None).syscall(_CREATE, None, 0, 1))


def restrict(writable: str, hidden: Sequence[str]) -> None:
    """Holds this process to files outside of `hidden`, and to `writable` for writing. Raises OSError where it cannot.

    Args:
      writable: the only folder in which files can be made and changed.
      hidden: folders of which no file can be read, by their real paths.
    """
    known = version()
    if not known:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock")
    write = _WRITE | _REMOVE_AND_MAKE | (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0)
    handled = _EXECUTE | _READ | write
    attributes = struct.pack("=QQQ", handled, _TCP if known >= 4 else 0, _OTHERS if known >= 6 else 0)
    attributes = attributes[: 8 if known < 4 else 16 if known < 6 else 24]
    libc = ctypes.CDLL(None, use_errno=True)
    rules = libc.syscall(_CREATE, attributes, len(attributes), 0)
    if rules < 0:
        raise OSError(ctypes.get_errno(), "no Landlock rules could be made")
    try:
        _allow(libc, rules, writable, _READ | write)
        for device in _DEVICES:
            if os.path.exists(device):
                _allow(libc, rules, device, _READ | _WRITE)
        for path in _readable(hidden):
            _allow(libc, rules, path, _READ)
        if libc.syscall(_RESTRICT, rules, _QUIET if known >= 7 else 0) != 0:
            raise OSError(ctypes.get_errno(), "Landlock refused its rules")
    finally:
        os.close(rules)


def _allow(libc: ctypes.CDLL, rules: int, path: str, access: int) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # gone since it was listed, or out of reach anyway
        return
    try:
        beneath = struct.pack("=Qi", access, target)
        if libc.syscall(_ADD_RULE, rules, _RULE_BENEATH, beneath, 0) != 0:
            raise OSError(ctypes.get_errno(), f"Landlock refused a rule for {path}")
    finally:
        os.close(target)


def _readable(hidden: Sequence[str]) -> list[str]:
    """Paths that hold all that can be read; where these are too many, the root, and nothing is hidden by this layer."""
    # Python's own places are named as well, for they may lie in a folder that cannot be listed.
    roots = ["/", *(os.path.realpath(place) for place in (*sys.path, sys.prefix, sys.base_prefix) if place)]
    paths = list(itertools.islice((path for root in roots for path in _beside(root, hidden)), _MOST_RULES + 1))
    return paths if len(paths) <= _MOST_RULES else ["/"]


def _beside(folder: str, hidden: Sequence[str]) -> Iterator[str]:
    """Paths that together hold everything in a folder but what is hidden.

    Rules only ever allow, and hold for all that is beneath: what is to be left out must lie beneath none.
    """
    if folder in hidden:
        return
    inside = folder.rstrip("/") + "/"
    if not any(each.startswith(inside) for each in hidden):
        yield folder
        return
    try:
        with os.scandir(folder) as entries:
            # What a link leads to is reached by its own path.
            names = [entry.name for entry in entries if not entry.is_symlink()]
    except OSError:  # it cannot be listed: what is hidden in it may have something readable beside it further down
        names = sorted({each[len(inside) :].partition("/")[0] for each in hidden if each.startswith(inside)})
    for name in names:
        yield from _beside(inside + name, hidden)
