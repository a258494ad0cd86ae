"""Draw dropout masks by the index of each example in the full batch, so that microbatches do not change them."""

import jax
import jax.numpy as jnp

RATE = 0.25  # of the hidden units that are dropped


def loss(params, x, y, mask):
    """Mean squared error over one microbatch; mask (M, H) multiplies the hidden units. Given: leave it as it is."""
    hidden = jnp.tanh(x @ params["w"]) * mask
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def dropout_grads(params, key, x, y, n_microbatches):
    """The gradient of the mean over all examples, with dropout, accumulated over microbatches.

    Example i of the full batch keeps the hidden units where
    `jax.random.bernoulli(jax.random.fold_in(key, i), 1 - RATE, (H,))` is True; those count 1 / (1 - RATE).

    Args:
      params: {"w": (D, H), "v": (H,)}
      key: as jax.random.PRNGKey gives it, uint32 of shape (2,)
      x: inputs, (N, D)
      y: targets, (N,)
      n_microbatches: a Python int that divides N
    """
    raise NotImplementedError("accumulate the gradient with dropout masks that do not depend on the microbatches")
