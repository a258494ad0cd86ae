"""Both rows are the gradient of a sum, written differently.

caught by: program
says: both rows are gradients of a summed loss
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """vmap in the first row, broadcasting in the second; both sum before they differentiate."""
    w = jnp.asarray(w, jnp.float32)
    first = jax.grad(lambda w: jax.vmap(f, in_axes=(None, 0))(w, x_batch).sum())(w)
    second = jax.grad(lambda w: jnp.sum(f(w, x_batch)))(w)
    return jnp.stack([first, second])
