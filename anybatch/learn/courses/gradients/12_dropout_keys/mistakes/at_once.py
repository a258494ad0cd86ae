"""Right masks, but the full batch at once.

caught by: program
says: there is no lax.scan
"""

import jax
import jax.numpy as jnp

RATE = 0.25  # of the hidden units that are dropped


def loss(params, x, y, mask):
    """The mean squared error over one microbatch; mask (M, H) multiplies the hidden units. Do not change it."""
    hidden = jnp.tanh(x @ params["w"]) * mask
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def dropout_grads(params, key, x, y, n_microbatches):
    def mask_of(index):
        return jax.random.bernoulli(jax.random.fold_in(key, index), 1 - RATE, params["v"].shape) / (1 - RATE)

    return jax.grad(loss)(params, x, y, jax.vmap(mask_of)(jnp.arange(len(x))))
