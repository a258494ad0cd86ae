"""Write the loss of the full batch, with its indices; anybatch cuts it, and each microbatch draws its own masks."""

import jax
import jax.numpy as jnp

import anybatch as ab

RATE = 0.25  # the fraction of hidden units that are dropped


def loss(params, x, y, mask):
    """The mean squared error over one microbatch; mask (M, H) multiplies the hidden units. Do not change it."""
    hidden = jnp.tanh(x @ params["w"]) * mask
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def dropout_grads(params, key, x, y, n_microbatches):
    """The gradient of the mean over all examples, with dropout, accumulated over microbatches."""

    def mask_of(index):
        return jax.random.bernoulli(jax.random.fold_in(key, index), 1 - RATE, params["v"].shape) / (1 - RATE)

    def full_batch(params, x, y):
        return loss(params, x, y, jax.vmap(mask_of)(jnp.arange(len(x))))

    return ab.grad(full_batch, batch_argnums=(1, 2), microbatch_size=len(x) // n_microbatches)(params, x, y)
