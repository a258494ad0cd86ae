"""Compute the same thing for every row: spread over devices by `shard_map`, and by `vmap`."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def sum_of_squares(row):
    """Of one row, of shape (d,)."""
    return jnp.sum(row**2)


def shard_map_vs_vmap(x):
    """The sum of squares of each row of `x`, of shape (B, d), in two ways: float32 of shape (2, B).

    Row 0: by `jax.shard_map` over a mesh of all devices with one axis, "data"; each device gets its own rows.
    Row 1: by `jax.vmap` alone.
    """
    raise NotImplementedError("Make a mesh, spread the rows over it with shard_map, and stack both results.")
