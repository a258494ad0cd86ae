"""Accumulate bfloat16 gradients in float32."""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    """The mean squared error of a linear model over one microbatch, in bfloat16. Do not change it."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def accumulated_grads(params, x, y, n_microbatches):
    """The mean of the microbatches' bfloat16 gradients, accumulated and returned in float32.

    Args:
      params: {"w": (D,), "b": ()}, bfloat16.
      x: the inputs, bfloat16 of shape (N, D).
      y: the targets, bfloat16 of shape (N,).
      n_microbatches: a Python int that divides N.
    """
    raise NotImplementedError("Accumulate the bfloat16 gradients of the microbatches in float32.")
