"""Draw dropout masks by the index of each example in the full batch, so that microbatches do not change them."""

import jax
import jax.numpy as jnp

RATE = 0.25  # the fraction of hidden units that are dropped


def loss(params, x, y, mask):
    """The mean squared error over one microbatch; mask (M, H) multiplies the hidden units. Do not change it."""
    hidden = jnp.tanh(x @ params["w"]) * mask
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def dropout_grads(params, key, x, y, n_microbatches):
    """The gradient of the mean over all examples, with dropout, accumulated over microbatches.

    Example i of the full batch keeps the hidden units where
    `jax.random.bernoulli(jax.random.fold_in(key, i), 1 - RATE, (H,))` is True; these are scaled by 1 / (1 - RATE).

    Args:
      params: {"w": (D, H), "v": (H,)}, float32.
      key: a raw key as jax.random.PRNGKey returns it, uint32 of shape (2,).
      x: the inputs, of shape (N, D).
      y: the targets, of shape (N,).
      n_microbatches: a Python int that divides N.
    """
    raise NotImplementedError("Accumulate the gradient with dropout masks that do not depend on the microbatches.")
