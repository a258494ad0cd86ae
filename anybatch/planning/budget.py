"""The memory budget of a gradient: how many bytes its program may take, with its arguments."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from anybatch.call.caches import can_run
from anybatch.call.memory import memory_budget, memory_left, memory_limit, readable
from anybatch.call.placement import local_bytes
from anybatch.jaxprs import versions
from anybatch.planning.problem import Problem

# The share kept free if the user named no budget: allocators leave gaps, and a host out of memory kills the process.
SPARE_ON_ACCELERATOR = 0.05
SPARE_ON_CPU = 0.10

# How many copies of the parameters a training step may hold beside the gradient: new parameters, two moments, updates.
COPIES_IN_A_STEP = 4


@dataclasses.dataclass(frozen=True)
class Budget:
    """The bytes that the program of a gradient may take, with its arguments, on each device."""

    allowed: int | None  # None if unknown
    reserve: int  # the part of `allowed` to leave, if possible, to the training step around it
    limit: int | None  # all memory of the device
    taken: int | None  # the part of `limit` that other arrays use
    source: str  # where `allowed` comes from, in words
    # Of a budget that the user named for a training step, what the step needs around the program of a strategy.
    around: Callable[[Any, int], int] = lambda strategy, total: 0

    def __str__(self) -> str:
        return "unknown" if self.allowed is None else f"{readable(self.allowed)} ({self.source})"


def allowed_memory(memory: Any, devices: Sequence[Any], present: int = 0) -> Budget:
    """The budget of a program on these devices for the option `memory=`, or else most of the free memory.

    The bytes of its arguments that are `present` on a device already count as used, so they are added to the free ones.
    """
    limit = memory_limit(devices)
    if is_explicit(memory):
        return Budget(memory_budget(memory), 0, limit, None, f"memory={memory!r}")
    left = memory_left(devices)
    if left is None:
        return Budget(None, 0, limit, None, "the device does not say")
    available = left + present
    taken = None if limit is None else max(0, limit - available)
    if memory is not None:
        return Budget(memory_budget(memory, available), 0, limit, taken, f"{memory} of the free memory")
    on_cpu = (list(devices) or jax.local_devices())[0].platform == "cpu"
    spare = SPARE_ON_CPU if on_cpu else SPARE_ON_ACCELERATOR
    return Budget(int(available * (1 - spare)), 0, limit, taken, f"{1 - spare:.0%} of the free memory")


def is_explicit(memory: Any) -> bool:
    """True if the option `memory=` names a number of bytes. A percentage is of the free memory."""
    return memory is not None and not (isinstance(memory, str) and "%" in memory)


def budget_of(gradient: Problem, *, arrays_exist: bool = True) -> Budget:
    """The budget of a gradient: its `memory=`, or else most of the free memory.

    If its arrays exist, those on a device are already counted as used.
    """
    leaves = jax.tree.leaves(gradient.arguments.arrays)
    present = sum(local_bytes(leaf) for leaf in leaves if isinstance(leaf, jax.Array)) if arrays_exist else 0
    budget = allowed_memory(gradient.options.memory, gradient.devices, present)
    if gradient.options.memory is not None or budget.allowed is None or can_run(*leaves) or not arrays_exist:
        return budget
    return dataclasses.replace(budget, reserve=COPIES_IN_A_STEP * gradient.local_bytes("wrt"))


def left_for_head(gradient: Problem) -> int | None:
    """The bytes that are left for the head of a loss beside the arguments; None if that is not known."""
    allowed = budget_of(gradient).allowed
    return None if allowed is None else max(0, allowed - gradient.argument_bytes)


def agreed(budget: Budget) -> Budget:
    """The least budget of all processes. Every process must call this, since it communicates."""
    given = np.asarray([-1 if budget.allowed is None else budget.allowed, budget.reserve], np.float64)
    # The gather must run now, even while the call is being traced. Each number is sent as two halves that a float32
    # holds, since 64 bits may not be enabled.
    halves = np.stack([given // 2**20, given % 2**20]).astype(np.float32)
    everyone = np.asarray(versions.elsewhere(lambda: multihost_utils.process_allgather(halves)), np.float64)
    allowed, reserve = (everyone[:, 0, :] * 2**20 + everyone[:, 1, :]).T
    least = None if allowed.min() < 0 else int(allowed.min())
    source = f"{budget.source}, in all processes"
    return dataclasses.replace(budget, allowed=least, reserve=int(reserve.max()), source=source)
