"""Executors: where a pass over the batch runs.

A pass is a function of some examples that returns sums over them and rows of them. An `Executor` calls it for all
examples at once. A `ShardedExecutor` (in `sharded.py`) calls it on every device of a mesh for the examples of that
device, and combines the results.

Sums in a fixed order have the same bits on any number of devices (`reproducible=True`). The batch is divided into
groups of consecutive examples, and the sums of the groups are added by a binary tree that does not depend on the
devices. Each device has neighbouring groups, and adds them as the lower levels of the tree do. The upper levels
add over devices. The bits are the same as long as the number of devices is a power of two and at most the number of
groups.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.reading.block_loop import OverRows
from anybatch.reading.states import Batched, take_rows

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


# `run(shard, invariant, rows)` returns sums over the examples of a shard, and rows of them. `invariant` are arrays that
# do not depend on the shard, and `rows` are arrays with the rows of its examples.
Pass = Callable[[Shard, list[Any], list[Any]], tuple[list[Any], list[Any]]]


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


@dataclasses.dataclass(frozen=True, eq=False)
class Executor:
    """Runs passes over the examples of a batch: here, all of them in one shard."""

    examples: int
    num_groups: int | None = None  # of examples, for sums in a fixed order
    runs: int = 1  # as in `Microbatches`

    @property
    def has_all_examples(self) -> bool:
        """True if every shard sees the full batch, and so can look up its rows there."""
        return True

    def in_batch_order(self, examples: Any) -> Any:
        """An array of examples in the order of the batch, if it was padded for the devices."""
        return examples

    def run_once(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of full arrays, or of lists and tuples of them, outside of any pass."""
        return fun(*arguments)

    @property
    def over_rows(self) -> OverRows | None:
        """What divides the rows of big values among devices, for functions that `run_once` calls; None for nothing."""
        return None

    def for_rows(self, number: int) -> "Executor":
        """The executor for this number of rows, selected from the examples. A microbatch is one slice of them."""
        return Executor(number)

    def __call__(self, batch_pass: BatchPass) -> tuple[list[Any], list[Any]]:
        """The sums over all examples, and the rows of all of them in the order of the batch."""
        invariant, rows = list(batch_pass.invariant), list(batch_pass.rows)
        if self.num_groups is None:
            return batch_pass.fun(Shard(0, self.examples, runs=self.runs), invariant, rows)
        shard = Shard(jnp.zeros((), jnp.int32), self.examples)
        return in_fixed_order(batch_pass, shard, self.num_groups, self.examples, invariant, rows)


def split_axis(array: Any, rows: Batched, examples: int | None = None) -> Any:
    """Reshapes the axis of the rows into three: (outer, examples, inner)."""
    axis, shape = rows.axis, array.shape
    number = shape[axis] // (rows.outer * rows.inner) if examples is None else examples
    return array.reshape(*shape[:axis], rows.outer, number, rows.inner, *shape[axis + 1 :])


def merge_axis(array: Any, rows: Batched) -> Any:
    """The inverse of `split_axis`."""
    axis, shape = rows.axis, array.shape
    return array.reshape(*shape[:axis], math.prod(shape[axis : axis + 3]), *shape[axis + 3 :])


MOST_GROUPS = 64


def number_of_groups(microbatches: int) -> int:
    """The largest power of two, up to 64, that divides the number of microbatches.

    >>> number_of_groups(48), number_of_groups(1024), number_of_groups(7)
    (16, 64, 1)
    """
    return math.gcd(microbatches, MOST_GROUPS)


def in_fixed_order(
    batch_pass: BatchPass, shard: Shard, number: int, examples: int, invariant: list[Any], rows: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Runs a pass for each of the `number` groups of a shard, a power of two, and adds their sums by a tree.

    Memory: log2(number) additional copies of the sums. `examples` is the number of examples of the full batch,
    `invariant` and `rows` are as in `Pass`. Returns the sums over the shard, and its rows.
    """
    layouts = batch_pass.output_layouts
    each = shard.examples // number
    # On one device, XLA would see that some inputs are constants, and divide by them in another way.
    invariant, rows = lax.optimization_barrier((invariant, rows))

    def group(position: Any) -> tuple[list[Any], list[Any]]:
        first = shard.first + position * each
        own_rows = [
            take_rows(array, layout, shard.examples, position * each, each)
            for array, layout in zip(rows, batch_pass.row_layouts, strict=True)
        ]
        is_last = first + each == examples
        own_shard = dataclasses.replace(
            shard, first=jnp.asarray(first, jnp.int32), examples=each, is_last=is_last, runs=1, fixed_order=True
        )
        return lax.optimization_barrier(batch_pass.fun(own_shard, invariant, own_rows))

    # XLA must not know the number of iterations: it would unroll a single one, and fuse its sums with others.
    turns = lax.optimization_barrier(jnp.asarray(number, jnp.int32))
    sum_types, row_types = jax.eval_shape(group, jnp.zeros((), jnp.int32))
    levels = max(1, number.bit_length() - 1)
    stacked = [jnp.zeros((levels, *one.shape), one.dtype) for one in sum_types]
    buffers = [_buffer(one, layout, number, each) for one, layout in zip(row_types, layouts, strict=True)]

    def turn(position: Any, carry: Any) -> Any:
        stacked, _, buffers = carry
        sums, made = group(position)
        index = position.astype(jnp.uint32)
        finished = lax.population_count((index ^ (index + np.uint32(1))) >> np.uint32(1)).astype(jnp.int32)

        def merge(level: Any, sums: list[Any]) -> list[Any]:
            earlier = [lax.dynamic_index_in_dim(array, level, 0, keepdims=False) for array in stacked]
            return lax.optimization_barrier([one + other for one, other in zip(earlier, sums, strict=True)])

        sums = lax.fori_loop(0, finished, merge, sums)
        level = jnp.minimum(finished, levels - 1)  # the root is carried on its own
        stacked = [
            lax.dynamic_update_index_in_dim(array, one, level, 0) for array, one in zip(stacked, sums, strict=True)
        ]
        buffers = [
            _put(buffer, one, layout, position, each)
            for buffer, one, layout in zip(buffers, made, layouts, strict=True)
        ]
        return stacked, sums, buffers

    zeros = [jnp.zeros(one.shape, one.dtype) for one in sum_types]
    _, sums, buffers = lax.fori_loop(0, turns, turn, (stacked, zeros, buffers))
    return sums, [merge_axis(buffer, layout.rows) for buffer, layout in zip(buffers, layouts, strict=True)]


def _buffer(one: Any, layout: OutputLayout, number: int, each: int) -> jax.Array:
    """Zeros for the rows of all groups, with the axes (outer, examples, inner) of `split_axis`."""
    axis, count = layout.rows.axis, layout.count(each)
    inner = one.shape[axis] // max(1, layout.rows.outer * count)
    return jnp.zeros((*one.shape[:axis], layout.rows.outer, number * count, inner, *one.shape[axis + 1 :]), one.dtype)


def _put(buffer: jax.Array, one: jax.Array, layout: OutputLayout, position: Any, each: int) -> jax.Array:
    axis, count = layout.rows.axis, layout.count(each)
    split = one.reshape(*buffer.shape[: axis + 1], count, *buffer.shape[axis + 2 :])
    return lax.dynamic_update_slice_in_dim(buffer, split, position * count, axis + 1)
