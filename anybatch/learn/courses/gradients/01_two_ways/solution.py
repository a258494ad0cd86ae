"""Differentiation is linear: the derivative of a sum is the sum of the derivatives, so both ways give 2 w Σx².

Training uses one backward pass through the sum. Clipping and noise estimates need a gradient for each example, and pay
for it with the memory of as many gradients.
"""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """The sum of the gradients, and the gradient of the sum, in an array of shape (2,)."""
    w = jnp.asarray(w, jnp.float32)

    def total(w):
        return jax.vmap(f, in_axes=(None, 0))(w, x_batch).sum()

    sum_of_gradients = jax.vmap(jax.grad(f), in_axes=(None, 0))(w, x_batch).sum()
    gradient_of_sum = jax.grad(total)(w)
    return jnp.stack([sum_of_gradients, gradient_of_sum])
