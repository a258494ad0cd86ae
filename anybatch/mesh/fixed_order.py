"""Sums with the same bits wherever their parts are computed: groups of examples, added by a tree that never changes.

The tree is over the groups. A device has some neighbours among them and adds these up as the tree does; what is
left of the tree is over devices. So it makes no difference how many devices there are, as long as they are 2**k
and no more than groups.
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
    batch_pass: BatchPass, shard: Shard, number: int, examples: int, whole: list[Any], rows: list[Any]
) -> tuple[list[Any], list[Any]]:
    """The sums of a part that is `number` groups of examples, by a tree, and their rows.

    Memory: log2(number) more of what is summed.

    Args:
      batch_pass: the pass over the examples of a group.
      shard: the examples of all these groups.
      number: how many groups, 2**k.
      examples: those of the whole batch.
      whole: what every group sees alike.
      rows: what belongs to the examples of the part.
    """
    fun, takes, gives = batch_pass.fun, batch_pass.takes, batch_pass.gives
    each = shard.examples // number
    # On one device XLA would know constants that come from outside, and divide by some of them another way.
    whole, rows = lax.optimization_barrier((whole, rows))

    def group(position: Any) -> tuple[list[Any], list[Any]]:
        first = shard.first + position * each
        mine = [
            take_rows(array, how, shard.examples, position * each, each) for array, how in zip(rows, takes, strict=True)
        ]
        own = Shard(
            jnp.asarray(first, jnp.int32), each, first + each == examples, shard.whole, shard.is_shard, fixed_order=True
        )
        sums, made = fun(own, whole, mine)
        return lax.optimization_barrier((sums, made))

    # XLA must not see how many turns there are: a loop of one would be no loop, and its sums be fused with others.
    turns = lax.optimization_barrier(jnp.asarray(number, jnp.int32))
    sum_types, row_types = jax.eval_shape(group, jnp.zeros((), jnp.int32))
    levels = max(1, number.bit_length() - 1)
    stacked = [jnp.zeros((levels, *one.shape), one.dtype) for one in sum_types]
    buffers = [_buffer(one, layout, number, each) for one, layout in zip(row_types, gives, strict=True)]

    def turn(position: Any, carry: Any) -> Any:
        stacked, _, buffers = carry
        sums, made = group(position)
        index = position.astype(jnp.uint32)
        finished = lax.population_count((index ^ (index + np.uint32(1))) >> np.uint32(1)).astype(jnp.int32)

        def merge(level: Any, sums: list[Any]) -> list[Any]:
            earlier = [lax.dynamic_index_in_dim(array, level, 0, keepdims=False) for array in stacked]
            return lax.optimization_barrier([one + other for one, other in zip(earlier, sums, strict=True)])

        sums = lax.fori_loop(0, finished, merge, sums)
        level = jnp.minimum(finished, levels - 1)  # that of the root is carried by itself
        stacked = [
            lax.dynamic_update_index_in_dim(array, one, level, 0) for array, one in zip(stacked, sums, strict=True)
        ]
        buffers = [
            _put(buffer, one, layout, position, each) for buffer, one, layout in zip(buffers, made, gives, strict=True)
        ]
        return stacked, sums, buffers

    zeros = [jnp.zeros(one.shape, one.dtype) for one in sum_types]
    _, sums, buffers = lax.fori_loop(0, turns, turn, (stacked, zeros, buffers))
    return sums, [merge_axis(buffer, layout.rows) for buffer, layout in zip(buffers, gives, strict=True)]


def _buffer(one: Any, layout: OutputLayout, number: int, each: int) -> jax.Array:
    """Room for the rows of all groups, with an axis of their own for the examples."""
    axis, count = layout.rows.axis, layout.count(each)
    inner = one.shape[axis] // max(1, layout.rows.outer * count)
    return jnp.zeros((*one.shape[:axis], layout.rows.outer, number * count, inner, *one.shape[axis + 1 :]), one.dtype)


def _put(buffer: jax.Array, one: jax.Array, layout: OutputLayout, position: Any, each: int) -> jax.Array:
    axis, count = layout.rows.axis, layout.count(each)
    split = one.reshape(*buffer.shape[: axis + 1], count, *buffer.shape[axis + 2 :])
    return lax.dynamic_update_slice_in_dim(buffer, split, position * count, axis + 1)


@dataclasses.dataclass(frozen=True)
class InGroups(LocalExecutor):
    """All examples at one place, summed in the order that many devices would."""

    number: int = 1

    def __call__(self, batch_pass: BatchPass) -> tuple[list[Any], list[Any]]:
        """The sums over the examples, and their rows."""
        shard = Shard(jnp.zeros((), jnp.int32), self.examples)
        return in_fixed_order(
            batch_pass, shard, self.number, self.examples, list(batch_pass.whole), list(batch_pass.rows)
        )
