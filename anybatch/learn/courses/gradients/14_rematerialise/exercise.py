"""Write a loss that needs the memory of one microbatch, even when someone else differentiates it."""

import jax
import jax.numpy as jnp


def predict(params, x):
    """The predictions of some rows: x has shape (rows, d), the result (rows,)."""
    return jnp.tanh(x @ params["w"]) @ params["v"]


def batch_loss(params, x, y, n_microbatches):
    """The root of the mean squared error of the full batch, by a scan over microbatches.

    Args:
      params: {"w": (d, h), "v": (h,)}.
      x: the inputs, (N, d).
      y: the targets, (N,).
      n_microbatches: the number of microbatches, an int that divides N.

    Returns:
      A number.
    """
    raise NotImplementedError("Add up squared errors in a scan that keeps nothing of its iterations.")


def loss_and_grads(params, x, y, n_microbatches):
    """Someone else's code, which differentiates your loss as a whole. Leave it as it is."""
    return jax.value_and_grad(batch_loss)(params, x, y, n_microbatches)
