"""Columns are sharded, and the parts of each row are not added up.

caught by: run
says: the same shape
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
    spread = jax.shard_map(each_row, mesh=mesh, in_specs=P(None, "data"), out_specs=P("data"))
    return jnp.stack([spread(x), each_row(x)])
