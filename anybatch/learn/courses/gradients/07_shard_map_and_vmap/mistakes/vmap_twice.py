"""Both rows with vmap.

caught by: program
says: There is no shard_map in the program
"""

import jax
import jax.numpy as jnp


def shard_map_vs_vmap(x):
    """Both rows by vmap."""
    rows = jax.vmap(lambda row: jnp.sum(row**2))(x)
    return jnp.stack([rows, rows])
