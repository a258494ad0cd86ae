"""One gradient at a time.

caught by: program
says: written out by a Python loop
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """Traced as many copies as there are examples."""
    w = jnp.asarray(w, jnp.float32)
    first = sum(jax.grad(f)(w, x_batch[index]) for index in range(len(x_batch)))
    second = jax.grad(lambda w: jnp.sum(f(w, x_batch)))(w)
    return jnp.stack([first, second])
