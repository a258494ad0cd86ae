"""The memory of a device: how much is free, and how much a user allows (`memory=`)."""

import os
import re
from collections.abc import Sequence
from typing import Any

import jax

from anybatch.errors import InputError

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def memory_budget(memory: Any, left: int | None = None) -> int | None:
    """The value of the option `memory=` in bytes.

    >>> memory_budget("16GiB") == 16 * 2**30
    True

    Args:
      memory: a number of bytes, a text such as "16GiB", a percentage of the free memory such as "80%", or None for all
        of the free memory.
      left: the free bytes. By default, `memory_left()`.

    Returns:
      None if the answer depends on the free memory and that is not known.
    """
    if memory is None:
        return memory_left() if left is None else left
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[KMGT]?i?B|)\s*", memory)
        if match and float(match[1]) > 0:
            if match[2] == "%" and float(match[1]) <= 100:
                left = memory_left() if left is None else left
                return None if left is None else int(left * float(match[1]) / 100)
            if match[2] in _UNITS:
                return int(float(match[1]) * _UNITS[match[2]])
    raise InputError(
        "memory must be a number of bytes, a text with a unit, a percentage of the free memory, or None",
        given=f"memory={memory!r}",
        remedy='For example memory="16GiB", memory="80%" or memory=16 * 2**30.',
    )


def memory_left(devices: Sequence[Any] = ()) -> int | None:
    """The free bytes of the device that has the least, or None if no device reports them.

    Devices that are simulated on the CPU share the memory of the host.

    Args:
      devices: the devices; by default, JAX's default device.
    """
    devices = list(devices) or [default_device()]
    left = [_limit(device)[1] for device in devices]
    known = [each for each in left if each is not None]
    if not known:
        return None
    return min(known) // (len(devices) if devices[0].platform == "cpu" else 1)


def memory_limit(devices: Sequence[Any] = ()) -> int | None:
    """The total bytes of the smallest device, or None if no device reports them."""
    known = [limit for limit, _ in map(_limit, list(devices) or [default_device()]) if limit is not None]
    return min(known, default=None)


def default_device() -> Any:
    """The device on which JAX puts arrays by default."""
    config: Any = jax.config
    device = config.jax_default_device
    if isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return jax.local_devices()[0] if device is None else device


def _limit(device: Any) -> tuple[int | None, int | None]:
    """The total and the free bytes of a device."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"], stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return _host_memory() if device.platform == "cpu" else (None, None)


def _host_memory() -> tuple[int | None, int | None]:
    total, left = _system_memory()
    # A container may be allowed less than the machine has.
    for folder, limit_file, used_file in _CONTAINER_FILES:
        limit, used = _number(folder + limit_file), _number(folder + used_file)
        if limit is not None and used is not None and (total is None or limit < total):
            used -= _found(folder + "memory.stat", "inactive_file").get(
                "inactive_file", 0
            )  # cached files, which the kernel can drop
            total, left = limit, min(limit - used, limit if left is None else left)
    return total, left


_CONTAINER_FILES = (
    ("/sys/fs/cgroup/", "memory.max", "memory.current"),
    ("/sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())  # "max" is no number
    except (OSError, ValueError):
        return None


def _found(path: str, *names: str) -> dict[str, int]:
    """Reads lines of the form "name number" for these names."""
    try:
        with open(path) as lines:
            return {words[0]: int(words[1]) for words in map(str.split, lines) if words and words[0] in names}
    except (OSError, ValueError, IndexError):
        return {}


def _system_memory() -> tuple[int | None, int | None]:
    found = _found("/proc/meminfo", "MemTotal:", "MemAvailable:")
    if len(found) == 2:
        return found["MemTotal:"] * 1024, found["MemAvailable:"] * 1024
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page
    except (AttributeError, OSError, ValueError):
        return None, None


def readable(num_bytes: int) -> str:
    """A number of bytes as a text with a unit.

    >>> readable(3 * 2**20)
    '3.0 MiB'
    """
    number, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
