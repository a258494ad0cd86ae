"""No transformation at all.

caught by: program
says: There is no shard_map in the program
"""

import jax.numpy as jnp


def shard_map_vs_vmap(x):
    """Both rows by a sum along an axis."""
    return jnp.stack([jnp.sum(x**2, axis=1), jnp.einsum("ij,ij->i", x, x)])
