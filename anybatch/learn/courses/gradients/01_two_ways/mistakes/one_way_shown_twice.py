"""One gradient, stacked with itself.

caught by: program
says: there is only one gradient in the program
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """The second way is left out."""
    gradient = jax.grad(lambda w: jnp.sum(f(w, x_batch)))(jnp.asarray(w, jnp.float32))
    return jnp.stack([gradient, gradient])
