"""How much memory a gradient may take, and what the rest is taken by."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from anybatch.call.memory import memory_budget, memory_left, memory_limit, readable
from anybatch.call.placement import local_bytes
from anybatch.call.programs import can_run
from anybatch.jaxprs import versions
from anybatch.planning.strategy import Planned

# Kept free where nobody has named a budget: allocators leave gaps; and a host that runs full kills the process.
SPARE_ON_ACCELERATOR = 0.05
SPARE_ON_HOST = 0.10

# What a training step may hold beside the gradient's program: new parameters, two moments, updates.
COPIES_IN_A_STEP = 4


@dataclasses.dataclass(frozen=True)
class Budget:
    """The bytes that a gradient's program may take, with its arguments."""

    allowed: int | None  # None if nobody knows
    reserve: int  # of these, what had better be left to the step around it
    limit: int | None  # what the device has in all
    taken: int | None  # of these, what is in use by other arrays
    source: str  # where the figure comes from

    def __str__(self) -> str:
        return "unknown" if self.allowed is None else f"{readable(self.allowed)} ({self.source})"


def budget_of(gradient: Planned, *, are_given: bool = True) -> Budget:
    """What a gradient may take.

    Args:
      gradient: the gradient.
      are_given: whether its arrays lie on a device, or will when it runs: they have been paid for.
    """
    memory = gradient.options.memory
    leaves = jax.tree.leaves(gradient.arguments.arrays)
    devices = gradient.devices
    limit = memory_limit(devices)
    explicit = memory is not None and not (isinstance(memory, str) and "%" in memory)
    if explicit:
        return Budget(memory_budget(memory), 0, limit, None, f"memory={memory!r}")
    left = memory_left(devices)
    if left is None:
        return Budget(None, 0, limit, None, "the device does not tell")
    paid = sum(local_bytes(leaf) for leaf in leaves if not _is_on_host(leaf)) if are_given else 0
    in_all = left + paid
    taken = None if limit is None else max(0, limit - in_all)
    if memory is not None:
        return Budget(memory_budget(memory, in_all), 0, limit, taken, f"{memory} of what is left")
    spare = SPARE_ON_HOST if _on_host(devices) else SPARE_ON_ACCELERATOR
    step = 0 if can_run(*leaves) or not are_given else COPIES_IN_A_STEP
    reserve = step * gradient.local_bytes("wrt")
    return Budget(int(in_all * (1 - spare)), reserve, limit, taken, f"{1 - spare:.0%} of what is left")


def agreed(budget: Budget) -> Budget:
    """What all processes have: the least that any of them may take. All of them must come here."""
    given = np.asarray([-1 if budget.allowed is None else budget.allowed, budget.reserve], np.float64)
    # Outside of the trace around us, if there is one; in halves that a float32 holds, since 64 bits may not be enabled.
    halves = np.stack([given // 2**20, given % 2**20]).astype(np.float32)
    everyone = np.asarray(versions.elsewhere(lambda: multihost_utils.process_allgather(halves)), np.float64)
    allowed, reserve = (everyone[:, 0, :] * 2**20 + everyone[:, 1, :]).T
    least = None if allowed.min() < 0 else int(allowed.min())
    return dataclasses.replace(
        budget, allowed=least, reserve=int(reserve.max()), source=f"{budget.source}, in all processes"
    )


def _on_host(devices: list[Any]) -> bool:
    return (devices or jax.local_devices())[0].platform == "cpu"


def _is_on_host(leaf: Any) -> bool:
    """Whether an array is yet to be moved to the device."""
    return not isinstance(leaf, jax.Array)
