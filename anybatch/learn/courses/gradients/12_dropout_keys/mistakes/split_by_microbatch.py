"""Splits the key into one for each microbatch: new masks, which depend on the number of microbatches.

caught by: value
says: from one key, made from its number
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
        x, y, key = microbatch
        mask = jax.random.bernoulli(key, 1 - RATE, (len(x), len(params["v"]))) / (1 - RATE)
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x, y, mask)), None

    keys = jax.random.split(key, n_microbatches)
    microbatches = (x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1), keys)
    total, _ = jax.lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda t: t / n_microbatches, total)
