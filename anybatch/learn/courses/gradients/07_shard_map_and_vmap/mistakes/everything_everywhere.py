"""All rows on all devices.

caught by: program
says: Every device computes with all 16 rows
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
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.shard_map(each_row, mesh=mesh, in_specs=P(), out_specs=P())
    return jnp.stack([spread(x), each_row(x)])
