"""Namespaces of Linux: a network without an interface, and files that only this process sees.

A user may have them without privileges where the kernel and its policies allow it; containers and some distributions
do not. What could be had is returned, and nothing is changed for others.
"""

import contextlib
import ctypes
import errno
import os
import struct
import sys
from collections.abc import Sequence

_MOUNTS, _IPC, _USER, _NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x40000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _NO_EXEC, _RECURSIVE, _PRIVATE = 1, 2, 4, 8, 16384, 1 << 18
_CAPABILITIES = 0x20080522  # of the structure that holds 64 of them

_PARENT_DEATH, _NO_NEW_PRIVILEGES, _SUBREAPER = 1, 38, 36


def enter() -> set[str]:
    """Leaves the namespaces of the parent; returns which are its own now: "user", "network", "files".

    The process must have one thread.
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
        with contextlib.suppress(OSError):  # without them, the user's number reads 65534, and all else is the same
            for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                with open(f"/proc/self/{file}", "w") as map_:
                    map_.write(text)
    if wanted & _MOUNTS and _mount("none", "/", None, _RECURSIVE | _PRIVATE, None) != 0:
        names.discard("files")  # what is mounted here could be seen elsewhere
    return names


def cover(hidden: Sequence[str], home: str, size: int, files: int) -> bool:
    """Puts an empty folder over each hidden one, and one in memory, of limited size, over `home`.

    Only in a namespace of files of one's own. Returns whether all of it was possible.
    """
    flags = _NO_SUID | _NO_DEVICES
    done = [
        _mount("tmpfs", folder, "tmpfs", flags | _NO_EXEC | _READ_ONLY, "mode=0,size=4k") == 0
        for folder in hidden
        if os.path.isdir(folder)
    ]
    done.append(_mount("tmpfs", home, "tmpfs", flags, f"mode=700,size={size},nr_inodes={files}") == 0)
    return all(done)


def drop_capabilities() -> None:
    """Gives up whatever root may do beyond what the permissions of files allow; raises OSError if that fails."""
    if not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, "there are no capabilities")
    header, none = struct.pack("=Ii", _CAPABILITIES, 0), bytes(24)
    if _libc().capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capabilities could not be dropped")


def no_new_privileges() -> None:
    """What is executed from here on gains no privilege, by set-user-ID or otherwise; filters ask for it."""
    _control(_NO_NEW_PRIVILEGES, 1, "new privileges could not be given up")


def die_with_parent(parent: int, signal: int) -> None:
    """Has the kernel send a signal when the thread that forked this process ends."""
    _control(_PARENT_DEATH, signal, "the end of the parent will not be noticed")
    if os.getppid() != parent:  # it came before it could be asked about
        os._exit(1)


def adopt_orphans() -> None:
    """Becomes the parent of every descendant whose own parent ends."""
    _control(_SUBREAPER, 1, "orphans cannot be adopted")


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
