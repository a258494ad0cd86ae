"""Draws from the same key in every iteration.

caught by: value
says: All 4 microbatches have the same dropout masks: each drew them from the same key
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
        x, y = microbatch
        mask = jax.random.bernoulli(key, 1 - RATE, (len(x), len(params["v"]))) / (1 - RATE)
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x, y, mask)), None

    microbatches = (x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1))
    total, _ = jax.lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda t: t / n_microbatches, total)
