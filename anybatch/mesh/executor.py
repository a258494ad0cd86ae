"""Where passes over a batch run. Here, all of it; or in parts, whose results are put together again."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import lax

from anybatch.reading.states import Batched

Variables = list[Any]


def _as_they_are(variables: Variables) -> Variables:
    return variables


@dataclasses.dataclass(frozen=True)
class Shard:
    """Consecutive examples of a batch: all of them, or those of a device."""

    first: Any  # the index in the batch of the first one; on a device, known at run time only
    examples: int
    is_last: Any = True  # whether the last example of the batch is among them
    whole: Callable[[Variables], Variables] = _as_they_are  # what is differentiated, from the shards of this device
    is_shard: Sequence[bool] = ()  # which of them come as shards
    runs: int = 1  # of consecutive examples that each of its microbatches is made of
    fixed_order: bool = False  # whether sums must have the same bits wherever the part is computed

    @property
    def place(self) -> list[Any]:
        """What is known of it at run time only: where it begins, and whether it is the last. Nothing, if it is all."""
        return [self.first, self.is_last] if isinstance(self.first, jax.Array) else []

    @property
    def anywhere(self) -> "Shard":
        """As many examples, without what is known at run time only: a function that lives on may close over this."""
        return dataclasses.replace(self, first=0, is_last=True)

    def at(self, place: Sequence[Any]) -> "Shard":
        """The part at a place."""
        return dataclasses.replace(self, first=place[0], is_last=place[1]) if place else self

    def in_place(self, allowed: Sequence[bool]) -> list[bool]:
        """Which gradients may be added to their accumulators by the backward pass: not those that become shards."""
        return [
            each and not shard for each, shard in zip(allowed, self.is_shard or [False] * len(allowed), strict=True)
        ]

    def apart(self, grads: Any) -> Any:
        """The gradients of a microbatch, to be added up: where bits matter, not fused with what computed them."""
        return lax.optimization_barrier(grads) if self.fixed_order else grads


@dataclasses.dataclass(frozen=True)
class OutputLayout:
    """How results of a part lie that are put one after the other: rows of its examples, or of its microbatches."""

    rows: Batched
    count: Callable[[int], int] = int  # of as many examples


class Pass(Protocol):
    """A computation over some examples."""

    def __call__(self, shard: Shard, whole: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        """Sums over the examples, and rows of them.

        Args:
          shard: which examples.
          whole: what every part sees alike.
          rows: what belongs to these examples.
        """


@dataclasses.dataclass(frozen=True, eq=False)
class BatchPass:
    """A pass over all examples, and what it is given."""

    fun: Pass
    whole: Sequence[Any]  # what it sees alike everywhere
    rows: Sequence[Any]  # arrays with rows of the examples
    takes: Sequence[Batched]  # how these lie in them
    gives: Sequence[OutputLayout] = ()  # how the rows lie in what the pass returns
    # Of `whole`, how many are differentiated: the first ones. The sums then begin with their gradients.
    variables: int = 0


class Executor(Protocol):
    """Where a pass over the examples runs."""

    def in_order(self, examples: Any) -> Any:
        """An array of the examples as the batch has it, if it was laid out for the passes in another way."""

    def once(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of whole arrays, lists and tuples of them, outside of the passes."""

    def of_rows(self, number: int) -> "Executor":
        """The same place, for so many rows that are selected from the examples."""

    @property
    def has_all_examples(self) -> bool:
        """Whether a part of the rows sees the whole batch, so that it can look up its own."""

    def __call__(self, batch_pass: BatchPass) -> tuple[list[Any], list[Any]]:
        """The sums over all examples, and the rows of all of them in the order of the batch."""


@dataclasses.dataclass(frozen=True)
class LocalExecutor:
    """All examples at one place."""

    examples: int
    runs: int = 1

    def in_order(self, examples: Any) -> Any:
        """The same: nothing was laid out."""
        return examples

    def once(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function."""
        return fun(*arguments)

    def of_rows(self, number: int) -> "LocalExecutor":
        """The same place, for so many rows: they lie one after the other."""
        return LocalExecutor(number)

    @property
    def has_all_examples(self) -> bool:
        """True: there is only one part."""
        return True

    def __call__(self, batch_pass: BatchPass) -> tuple[list[Any], list[Any]]:
        """The sums over the examples, and their rows."""
        return batch_pass.fun(Shard(0, self.examples, runs=self.runs), list(batch_pass.whole), list(batch_pass.rows))


def split_axis(array: Any, rows: Batched, examples: int | None = None) -> Any:
    """An array with axes of their own for the blocks and the examples: (outer, examples, inner) instead of one."""
    axis, shape = rows.axis, array.shape
    number = shape[axis] // (rows.outer * rows.inner) if examples is None else examples
    return array.reshape(*shape[:axis], rows.outer, number, rows.inner, *shape[axis + 1 :])


def merge_axis(array: Any, rows: Batched) -> Any:
    """The reverse."""
    axis, shape = rows.axis, array.shape
    return array.reshape(*shape[:axis], math.prod(shape[axis : axis + 3]), *shape[axis + 3 :])
