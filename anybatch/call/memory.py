"""The memory of a device: how much is free, and how much a user allows (`memory=`)."""

import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from anybatch.errors import InputError

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def memory_budget(memory: Any, left: int | None = None) -> int | None:
    """The bytes of the option `memory=`: a number, "16GiB", "80%" of the free memory, or None for all of it.

    >>> memory_budget("16GiB") == 16 * 2**30
    True

    The free bytes are `left`, or else `memory_left()`. If they are needed and not known, the result is None.
    """
    if memory is None:
        return memory_left() if left is None else left
    if isinstance(memory, int | np.integer) and not isinstance(memory, bool) and memory > 0:
        return int(memory)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[KMGT]?i?B|)\s*", memory) if isinstance(memory, str) else None
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if unit == "%" and 0 < number <= 100:
        left = memory_left() if left is None else left
        return None if left is None else int(left * number / 100)
    if unit in _UNITS and number > 0:
        return int(number * _UNITS[unit])
    raise InputError(
        "memory must be a number of bytes, a text with a unit, a percentage of the free memory, or None",
        given=f"memory={memory!r}",
        remedy='For example memory="16GiB", memory="80%" or memory=16 * 2**30.',
    )


def memory_left(devices: Sequence[Any] = ()) -> int | None:
    """The free bytes of the device that has the least, or None if no device reports them.

    The devices are by default JAX's default device. Devices that are simulated on the CPU share the host's memory.
    """
    devices = list(devices) or [default_device()]
    known = [left for _, left in map(_limit, devices) if left is not None]
    if not known:
        return None
    return min(known) // (len(devices) if devices[0].platform == "cpu" else 1)


def bytes_in_use(devices: Sequence[Any] = ()) -> tuple[int, int] | None:
    """The bytes in use on an accelerator now, and the most since the process began.

    They are those of the device with the highest peak; None if no device reports them.
    """
    stats = [each.memory_stats() or {} for each in list(devices) or [default_device()] if each.platform != "cpu"]
    known = [(each["bytes_in_use"], each["peak_bytes_in_use"]) for each in stats if "peak_bytes_in_use" in each]
    return max(known, key=lambda each: each[1], default=None)


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
            # Without cached files, which the kernel can drop.
            used -= _found(folder + "memory.stat", "inactive_file").get("inactive_file", 0)
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


def readable(num_bytes: int, *, at_least: bool = False) -> str:
    """A number of bytes as a text with a unit, rounded; with `at_least`, rounded up.

    >>> readable(3 * 2**20), readable(3 * 2**20 + 1, at_least=True)
    ('3.0 MiB', '3.1 MiB')
    """
    for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB")):
        if num_bytes < 1024 ** (power + 1) or unit == "TiB":
            break
    number = num_bytes / 1024**power
    number = math.ceil(10 * number) / 10 if at_least else number
    return f"{number:.{0 if unit == 'B' else 1}f} {unit}"
