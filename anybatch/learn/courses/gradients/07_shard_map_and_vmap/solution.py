"""A row's sum of squares needs only that row, so the rows can be distributed over devices without any communication.

`P("data")` appears twice: the first axis of the input is sharded over the devices, and so is that of the output.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def sum_of_squares(row):
    """The sum of squares of one row, of shape (d,)."""
    return jnp.sum(row**2)


def shard_map_vs_vmap(x):
    """The sum of squares of each row of `x`, of shape (B, d), in two ways: float32 of shape (2, B)."""
    each_row = jax.vmap(sum_of_squares)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(each_row, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return jnp.stack([sharded(x), each_row(x)])
