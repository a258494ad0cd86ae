"""Executors: where a pass over the batch runs. The interface, and the executor for one device.

A pass is a function of some examples that returns sums over them and rows of them. An executor calls it for all
examples at once (`LocalExecutor`), or on every device of a mesh for the examples of that device (`ShardedExecutor` in
`sharded.py`), and combines the results.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import lax

from anybatch.reading.states import Batched

Variables = list[Any]


def _identity(variables: Variables) -> Variables:
    return variables


@dataclasses.dataclass(frozen=True)
class Shard:
    """Consecutive examples of a batch: all of them, or those of one device."""

    first: Any  # the index in the batch of the first example; on a mesh, a traced integer
    examples: int
    is_last: Any = True  # whether the last example of the batch is among them; on a mesh, a traced bool
    gather: Callable[[Variables], Variables] = _identity  # all-gathers the differentiated arrays that are sharded
    is_sharded: Sequence[bool] = ()  # which of the differentiated arrays these are
    runs: int = 1  # as in `Microbatches`
    fixed_order: bool = False  # whether sums must have the same bits on any number of devices

    @property
    def traced_values(self) -> list[Any]:
        """`first` and `is_last`, if they are traced; otherwise nothing."""
        return [self.first, self.is_last] if isinstance(self.first, jax.Array) else []

    @property
    def static(self) -> "Shard":
        """The same shard without traced values, safe for a function that outlives the trace to close over."""
        return dataclasses.replace(self, first=0, is_last=True)

    def with_traced_values(self, values: Sequence[Any]) -> "Shard":
        """The inverse of `static`: the shard with its `traced_values`."""
        return dataclasses.replace(self, first=values[0], is_last=values[1]) if values else self

    def in_place(self, allowed: Sequence[bool]) -> list[bool]:
        """Which gradients the backward pass may add to their accumulators: those allowed that are not sharded."""
        is_sharded = self.is_sharded or [False] * len(allowed)
        return [each and not sharded for each, sharded in zip(allowed, is_sharded, strict=True)]

    def unfused(self, grads: Any) -> Any:
        """The gradients of a microbatch, with a barrier in a fixed order: fusion could change the bits of their sum."""
        return lax.optimization_barrier(grads) if self.fixed_order else grads


@dataclasses.dataclass(frozen=True)
class OutputLayout:
    """The layout of an output of a pass whose shards are concatenated: a row for each example, or each microbatch."""

    rows: Batched
    count: Callable[[int], int] = int  # the number of rows, from the number of examples


class Pass(Protocol):
    """A computation over some examples."""

    def __call__(self, shard: Shard, invariant: list[Any], rows: list[Any], /) -> tuple[list[Any], list[Any]]:
        """Sums over the examples, and rows of them.

        Args:
          shard: which examples.
          invariant: arrays that do not depend on the shard.
          rows: arrays with the rows of these examples.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPass:
    """A pass over all examples of a batch, and its inputs."""

    fun: Pass
    invariant: Sequence[Any]  # arrays that do not depend on the shard
    rows: Sequence[Any]  # arrays with rows of the examples
    row_layouts: Sequence[Batched]  # where these rows are in each array
    output_layouts: Sequence[OutputLayout] = ()  # where the rows are in each array that the pass returns
    # How many of the invariant arrays are differentiated: the first ones. The sums then begin with their gradients.
    num_variables: int = 0


class Executor(Protocol):
    """Runs passes over the examples of a batch."""

    def in_batch_order(self, examples: Any) -> Any:
        """An array of examples in the order of the batch, if it was padded for the devices."""

    def run_once(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of full arrays, or of lists and tuples of them, outside of any pass."""

    def for_rows(self, number: int) -> "Executor":
        """The same executor for this number of rows, which are selected from the examples."""

    @property
    def has_all_examples(self) -> bool:
        """True if every shard sees the full batch, and so can look up its rows there."""

    def __call__(self, batch_pass: BatchPass) -> tuple[list[Any], list[Any]]:
        """The sums over all examples, and the rows of all of them in the order of the batch."""


@dataclasses.dataclass(frozen=True)
class LocalExecutor:
    """Runs a pass for all examples at once."""

    examples: int
    runs: int = 1

    def in_batch_order(self, examples: Any) -> Any:
        """The array itself: nothing was padded."""
        return examples

    def run_once(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function."""
        return fun(*arguments)

    def for_rows(self, number: int) -> "LocalExecutor":
        """The executor for this number of rows. They are consecutive, so that a microbatch is one slice of them."""
        return LocalExecutor(number)

    @property
    def has_all_examples(self) -> bool:
        """True: there is only one shard."""
        return True

    def __call__(self, batch_pass: BatchPass) -> tuple[list[Any], list[Any]]:
        """The sums over the examples, and their rows."""
        shard = Shard(0, self.examples, runs=self.runs)
        return batch_pass.fun(shard, list(batch_pass.invariant), list(batch_pass.rows))


def split_axis(array: Any, rows: Batched, examples: int | None = None) -> Any:
    """Reshapes the axis of the rows into three: (outer, examples, inner)."""
    axis, shape = rows.axis, array.shape
    number = shape[axis] // (rows.outer * rows.inner) if examples is None else examples
    return array.reshape(*shape[:axis], rows.outer, number, rows.inner, *shape[axis + 1 :])


def merge_axis(array: Any, rows: Batched) -> Any:
    """The inverse of `split_axis`."""
    axis, shape = rows.axis, array.shape
    return array.reshape(*shape[:axis], math.prod(shape[axis : axis + 3]), *shape[axis + 3 :])
