"""Differentiated with respect to an integer.

caught by: run
says: a Python int
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """Right for a float, and an error for w = 3."""
    first = jax.vmap(jax.grad(f), in_axes=(None, 0))(w, x_batch).sum()
    second = jax.grad(lambda w: jnp.sum(f(w, x_batch)))(w)
    return jnp.stack([first, second])
