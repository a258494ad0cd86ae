"""One gradient for each example, and one of the sum."""

import jax.numpy as jnp

import anybatch as ab


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def total(w, x_batch):
    """The loss of a batch."""
    return jnp.sum(f(w, x_batch))


def equivalent_two_ways(w, x_batch):
    """The sum of the gradients, and the gradient of the sum, in an array of shape (2,)."""
    w = jnp.asarray(w, jnp.float32)
    return jnp.stack([ab.per_example_grads(f)(w, x_batch).sum(), ab.grad(total)(w, x_batch)])
