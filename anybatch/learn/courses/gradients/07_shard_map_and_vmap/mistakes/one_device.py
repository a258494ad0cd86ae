"""A mesh of only the first device.

caught by: program
says: Your mesh has 1 of 8 devices
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
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    spread = jax.shard_map(each_row, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return jnp.stack([spread(x), each_row(x)])
