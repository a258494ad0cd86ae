"""The second row is the gradient of a mean.

caught by: value
says: Row 1 is the mean over the examples
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """The loss of a batch is nearly always a mean, and so it was written here."""
    w = jnp.asarray(w, jnp.float32)
    each = jax.vmap(jax.grad(f), in_axes=(None, 0))(w, x_batch)
    return jnp.stack([each.sum(), jax.grad(lambda w: jnp.mean(f(w, x_batch)))(w)])
