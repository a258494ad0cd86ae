"""Sums that have the same bits on any number of devices (`reproducible=True`).

The batch is divided into groups of consecutive examples, and the sums of the groups are added by a binary tree that
does not depend on the devices. Each device has neighbouring groups, and adds them as the lower levels of the tree do.
The upper levels add over devices. The bits are the same as long as the number of devices is a power of two and at most
the number of groups.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.mesh.executor import BatchPass, LocalExecutor, OutputLayout, Shard, merge_axis
from anybatch.reading.states import take_rows

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
    """Runs a pass for each of the `number` groups of a shard, and adds the sums of the groups by a tree.

    Memory: log2(number) additional copies of the sums.

    Args:
      batch_pass: the pass.
      shard: the examples of these groups.
      number: the number of groups, a power of two.
      examples: the number of examples of the full batch.
      invariant: arrays that do not depend on the group.
      rows: arrays with the rows of the shard.

    Returns:
      The sums over the shard, and its rows.
    """
    fun, layouts = batch_pass.fun, batch_pass.output_layouts
    each = shard.examples // number
    # On one device, XLA would see that some inputs are constants, and divide by them in another way.
    invariant, rows = lax.optimization_barrier((invariant, rows))

    def group(position: Any) -> tuple[list[Any], list[Any]]:
        first = shard.first + position * each
        own_rows = [
            take_rows(array, layout, shard.examples, position * each, each)
            for array, layout in zip(rows, batch_pass.row_layouts, strict=True)
        ]
        own_shard = Shard(
            jnp.asarray(first, jnp.int32),
            each,
            first + each == examples,
            shard.gather,
            shard.is_sharded,
            fixed_order=True,
        )
        sums, made = fun(own_shard, invariant, own_rows)
        return lax.optimization_barrier((sums, made))

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


@dataclasses.dataclass(frozen=True)
class FixedOrderExecutor(LocalExecutor):
    """Runs a pass on one device with the sums in the order that any number of devices uses."""

    number: int = 1  # of groups

    def __call__(self, batch_pass: BatchPass) -> tuple[list[Any], list[Any]]:
        """The sums over the examples, and their rows."""
        shard = Shard(jnp.zeros((), jnp.int32), self.examples)
        return in_fixed_order(
            batch_pass, shard, self.number, self.examples, list(batch_pass.invariant), list(batch_pass.rows)
        )
