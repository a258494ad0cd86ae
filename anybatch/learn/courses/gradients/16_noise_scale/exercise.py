"""Estimate without bias how noisy a gradient is, and how large it would be without noise."""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    """The squared error of one example: x has shape (d,), y is a number."""
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def noise_scale(params, x, y, n_microbatches):
    """The two parts of the gradient noise scale, from per-example gradients.

    Args:
      params: {"w": (d, h), "v": (h,)}.
      x: the inputs, of shape (N, d).
      y: the targets, of shape (N,).
      n_microbatches: the number of microbatches, an int that divides N.

    Returns:
      {"trace": unbiased estimate of tr(C), "gradient_square": unbiased estimate of |G|**2}.
    """
    raise NotImplementedError("Accumulate the sums that the two estimates need.")
