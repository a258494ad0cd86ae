"""Differentiated on paper.

caught by: program
says: is the formula
"""

import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """Right, but without jax.grad."""
    return jnp.stack([2 * w * jnp.sum(x_batch**2), jnp.sum(2 * w * x_batch**2)])
