"""Columns are sharded, and their sums added up.

caught by: program
says: The devices exchange something
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def each_row(x):
    """The sums of squares of some rows."""
    return jax.vmap(lambda row: jnp.sum(row**2))(x)


def shard_map_vs_vmap(x):
    """Both rows."""
    count = jax.device_count() if x.shape[1] % jax.device_count() == 0 else 1
    mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.shard_map(
        lambda part: jax.lax.psum(each_row(part), "data"), mesh=mesh, in_specs=P(None, "data"), out_specs=P()
    )
    return jnp.stack([spread(x), each_row(x)])
