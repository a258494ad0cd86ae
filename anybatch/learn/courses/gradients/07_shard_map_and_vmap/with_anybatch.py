"""With anybatch: the gradient of row @ w with respect to w is the row, so its squared norm is the sum of squares."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import anybatch as ab


def shard_map_vs_vmap(x):
    """The sum of squares of each row of `x`, of shape (B, d), in two ways: float32 of shape (2, B)."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    norms = ab.per_example_norms(lambda w, rows: jnp.sum(rows @ w), mesh=mesh)(jnp.zeros(x.shape[1]), x)
    return jnp.stack([norms**2, jax.vmap(lambda row: jnp.sum(row**2))(x)])
