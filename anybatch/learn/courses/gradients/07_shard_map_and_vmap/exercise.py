"""Compute the same thing for every row: sharded over devices with `shard_map`, and with `vmap`."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def sum_of_squares(row):
    """The sum of squares of one row, of shape (d,)."""
    return jnp.sum(row**2)


def shard_map_vs_vmap(x):
    """The sum of squares of each row of `x`, of shape (B, d), in two ways: float32 of shape (2, B).

    Row 0: with `jax.shard_map` over a mesh of all devices with one axis, "data"; each device gets its own rows.
    Row 1: with `jax.vmap`, without a mesh.
    """
    raise NotImplementedError("Make a mesh, shard the rows over it with shard_map, and stack both results.")
