"""Both rows agree, on a mean.

caught by: value
says: Each row is the mean over the examples
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """Both rows are equal, but wrong."""
    w = jnp.asarray(w, jnp.float32)
    each = jax.vmap(jax.grad(f), in_axes=(None, 0))(w, x_batch)
    return jnp.stack([each.mean(), jax.grad(lambda w: jnp.mean(f(w, x_batch)))(w)])
