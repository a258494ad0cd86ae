"""How much memory there is, and how much a user allows."""

import os
import re
from typing import Any

import jax

from anybatch.errors import InputError

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def memory_budget(memory: Any) -> int | None:
    """The bytes that a user allows: a number, a text such as "16GiB" or "80%" of what is left, or None: all of it.

    >>> memory_budget("16GiB") == 16 * 2**30
    True

    Returns:
      None if nothing was said and nobody knows how much is left.
    """
    if memory is None:
        return memory_left()
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[KMGT]?i?B|)\s*", memory)
        if match and float(match[1]) > 0:
            if match[2] == "%":
                left = memory_left()
                return None if left is None else int(left * float(match[1]) / 100)
            if match[2] in _UNITS:
                return int(float(match[1]) * _UNITS[match[2]])
    raise InputError(
        "memory must be a number of bytes, a text with a unit, a percentage of what is left, or None",
        given=f"memory={memory!r}",
        remedy='For example memory="16GiB", memory="80%" or memory=16 * 2**30.',
    )


def memory_left() -> int | None:
    """The bytes that the device has left, or None if nobody knows."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    return _host_memory_left()


def _host_memory_left() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def readable(num_bytes: int) -> str:
    """A number of bytes for people.

    >>> readable(3 * 2**20)
    '3.0 MiB'
    """
    number, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
