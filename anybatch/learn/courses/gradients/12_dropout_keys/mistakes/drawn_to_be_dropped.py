"""Draws which units to drop instead of which to keep: valid dropout, but other masks.

caught by: value
says: You drew which units to drop
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
        return ~jax.random.bernoulli(jax.random.fold_in(key, index), RATE, params["v"].shape) / (1 - RATE)

    def add_microbatch(total, microbatch):
        x, y, indices = microbatch
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x, y, jax.vmap(mask_of)(indices))), None

    batch = (x, y, jnp.arange(len(x)))
    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), batch)
    total, _ = jax.lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda t: t / n_microbatches, total)
