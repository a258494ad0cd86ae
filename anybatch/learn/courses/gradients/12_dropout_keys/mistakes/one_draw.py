"""Draws one array of masks for the full batch, and cuts it.

caught by: value
says: You drew the masks of the full batch at once
"""

import jax
import jax.numpy as jnp

RATE = 0.25  # of the hidden units that are dropped


def loss(params, x, y, mask):
    """The mean squared error over one microbatch; mask (M, H) multiplies the hidden units. Do not change it."""
    hidden = jnp.tanh(x @ params["w"]) * mask
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def dropout_grads(params, key, x, y, n_microbatches):
    def add_microbatch(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *microbatch)), None

    masks = jax.random.bernoulli(key, 1 - RATE, (len(x), len(params["v"]))) / (1 - RATE)
    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), (x, y, masks))
    total, _ = jax.lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda t: t / n_microbatches, total)
