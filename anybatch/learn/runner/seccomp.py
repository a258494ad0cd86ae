"""A filter of system calls, on Linux: no other process, no socket, no signal to others, nobody else's memory.

The kernel asks the filter at every call of this process, of all its threads, for good. What is refused fails as if a
permission were missing. Threads can be started, since JAX needs them.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

# The numbers of the calls that always fail, on each architecture.
_REFUSED = {
    "x86_64": {
        **{"fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "socket": 41, "ptrace": 101},
        **{"process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_open": 434, "pidfd_getfd": 438},
        **{"pidfd_send_signal": 424, "tkill": 200, "mount": 165, "umount2": 166, "unshare": 272, "setns": 308},
        **{"pivot_root": 155, "chroot": 161, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323},
        **{"add_key": 248, "request_key": 249, "keyctl": 250, "io_uring_setup": 425},
    },
    "aarch64": {
        **{"execve": 221, "execveat": 281, "socket": 198, "ptrace": 117},
        **{"process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "pidfd_open": 434, "pidfd_getfd": 438},
        **{"pidfd_send_signal": 424, "tkill": 130, "mount": 40, "umount2": 39, "unshare": 97, "setns": 268},
        **{"pivot_root": 41, "chroot": 51, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282},
        **{"add_key": 217, "request_key": 218, "keyctl": 219, "io_uring_setup": 425},
    },
}
# Those that reach this very process alone: the first argument must be its number.
_ONLY_ITSELF = {
    "x86_64": {"kill": 62, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297},
    "aarch64": {"kill": 129, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240},
}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_OTHER_NUMBERS = 0x40000000  # of the x32 calls, which x86_64 has beside its own

_CLONE_THREAD = 0x00010000
_SET_MODE_FILTER, _SPECULATION_ALLOWED = 1, 1 << 2  # without the flag, older kernels make the whole process slower

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in what the filter is shown; both architectures begin low


def program(machine: str, pid: int) -> list[tuple[int, int, int, int]]:
    """The filter for a process: instructions (code, jump if true, jump if false, value).

    >>> program("x86_64", 1)[0]  # first, which architecture the call is for
    (32, 0, 0, 4)
    """
    refuse, allow = (_RETURN, 0, 0, _FAIL | errno.EPERM), (_RETURN, 0, 0, _ALLOW)
    steps = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _ARCHITECTURE[machine]), refuse, (_LOAD, 0, 0, _NUMBER)]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _OTHER_NUMBERS), refuse]
    for number in _REFUSED[machine].values():
        steps += [(_EQUAL, 0, 1, number), refuse]
    for number in _ONLY_ITSELF[machine].values():
        steps += [(_EQUAL, 0, 4, number), (_LOAD, 0, 0, _FIRST_ARGUMENT), (_EQUAL, 0, 1, pid), allow, refuse]
    steps += [(_EQUAL, 0, 4, _CLONE[machine]), (_LOAD, 0, 0, _FIRST_ARGUMENT)]
    steps += [(_ANY_BIT, 0, 1, _CLONE_THREAD), allow, refuse]
    # Its flags are behind a pointer, where no filter can look: the C library then takes the older call.
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    return [*steps, allow]


def install() -> None:
    """Puts the filter on this process, which must have given up new privileges. Raises OSError where it cannot."""
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in _REFUSED or struct.calcsize("P") != 8:
        raise OSError(errno.ENOSYS, f"no filter of system calls for {sys.platform} on {machine}")
    steps = program(machine, os.getpid())
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = struct.pack("@HP", len(steps), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (_SPECULATION_ALLOWED, 0):
        if libc.syscall(_SECCOMP[machine], _SET_MODE_FILTER, flags, header) == 0:
            return
    raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")
