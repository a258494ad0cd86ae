"""Both rows are sums of gradients, written differently.

caught by: program
says: both rows add up a gradient for each example
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """The second row has vmap inside a lambda, and is the same program."""
    w = jnp.asarray(w, jnp.float32)
    first = jax.vmap(jax.grad(f), in_axes=(None, 0))(w, x_batch).sum()
    second = jax.vmap(lambda x: jax.grad(lambda w: f(w, x))(w))(x_batch).sum()
    return jnp.stack([first, second])
