"""Compute one gradient in two ways, and see that they agree."""

import jax
import jax.numpy as jnp


def f(w, x):
    """The loss of one example; w and x are scalars."""
    return (w * x) ** 2


def equivalent_two_ways(w, x_batch):
    """The sum of the gradients (row 0) and the gradient of the sum (row 1), with respect to w.

    Args:
      w: a number: a Python int, a float, or an array of shape ().
      x_batch: the examples, float32 of shape (N,).

    Returns:
      float32 of shape (2,).
    """
    raise NotImplementedError("Return both gradients, in an array of shape (2,).")
