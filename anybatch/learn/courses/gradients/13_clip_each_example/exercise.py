"""Clip the gradient of each example, and add them up microbatch by microbatch."""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    """The squared error of one example: x has shape (d,), y is a number."""
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def clipped_sum(params, x, y, clip, n_microbatches):
    """The sum over all examples of their gradients, each scaled down to a norm of at most `clip`.

    Args:
      params: {"w": (d, h), "v": (h,)}.
      x: the inputs, of shape (N, d).
      y: the targets, of shape (N,).
      clip: the largest norm of one example's gradient, a float.
      n_microbatches: the number of microbatches, an int that divides N.

    Returns:
      A tree like `params`.
    """
    raise NotImplementedError("Clip the gradients of one microbatch at a time, and accumulate their sum.")
