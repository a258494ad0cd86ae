"""Write a loss that needs the memory of one microbatch, even when other code differentiates it."""

import jax
import jax.numpy as jnp


def predict(params, x):
    """The predictions of some rows: x has shape (rows, d), the result (rows,)."""
    return jnp.tanh(x @ params["w"]) @ params["v"]


def batch_loss(params, x, y, n_microbatches):
    """The root of the mean squared error of the full batch, computed with a scan over microbatches.

    Args:
      params: {"w": (d, h), "v": (h,)}.
      x: the inputs, of shape (N, d).
      y: the targets, of shape (N,).
      n_microbatches: the number of microbatches, an int that divides N.

    Returns:
      float32 of shape ().
    """
    raise NotImplementedError("Add up squared errors in a scan that keeps no activations.")


def loss_and_grads(params, x, y, n_microbatches):
    """The other code, which differentiates your loss. Do not change it."""
    return jax.value_and_grad(batch_loss)(params, x, y, n_microbatches)
