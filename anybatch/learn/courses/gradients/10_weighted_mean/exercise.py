"""Differentiate a mean over the tokens that a mask selects, microbatch by microbatch: divide once, at the end."""

import jax
import jax.numpy as jnp


def token_losses(params, x, y):
    """The squared error of each token, with the shape of y. Do not change it."""
    return (x @ params["w"] + params["b"] - y) ** 2


def masked_mean_grads(params, x, y, mask, n_microbatches):
    """The gradient of the mean of token_losses over the tokens where the mask is True; zeros if there are none.

    Args:
      params: {"w": (D,), "b": ()}, float32.
      x: the inputs, of shape (N sequences, T tokens, D).
      y: the targets, of shape (N, T).
      mask: bool of shape (N, T): True for the tokens that count.
      n_microbatches: a Python int that divides N. A microbatch has N // n_microbatches sequences.
    """
    raise NotImplementedError("Accumulate the gradient of the masked mean in a scan over the microbatches.")
