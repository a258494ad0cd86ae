"""The examples are added up before the loss sees them.

caught by: value
says: Row 1 squares the sum of the examples
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """The sum in the wrong place."""
    w = jnp.asarray(w, jnp.float32)
    each = jax.vmap(jax.grad(f), in_axes=(None, 0))(w, x_batch)
    return jnp.stack([each.sum(), jax.grad(f)(w, x_batch.sum())])
