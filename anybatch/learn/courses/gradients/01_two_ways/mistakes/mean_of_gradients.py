"""The first row is the mean of the gradients.

caught by: value
says: Row 0 is the mean over the examples
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """Gradients are averaged nearly everywhere, and so they were here."""
    w = jnp.asarray(w, jnp.float32)
    each = jax.vmap(jax.grad(f), in_axes=(None, 0))(w, x_batch)
    return jnp.stack([each.mean(), jax.grad(lambda w: jnp.sum(f(w, x_batch)))(w)])
