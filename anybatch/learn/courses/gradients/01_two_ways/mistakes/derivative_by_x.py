"""Differentiated with respect to the second argument.

caught by: value
says: Each row is a derivative with respect to x
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """argnums=1 is x."""
    w = jnp.asarray(w, jnp.float32)
    each = jax.vmap(jax.grad(f, argnums=1), in_axes=(None, 0))(w, x_batch)
    return jnp.stack([each.sum(), jax.grad(lambda x: jnp.sum(f(w, x)))(x_batch).sum()])
