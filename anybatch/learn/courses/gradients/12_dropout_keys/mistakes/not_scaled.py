"""Drops units, and does not scale the others.

caught by: value
says: they must be scaled by 1 / (1 - RATE)
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
        return jax.random.bernoulli(jax.random.fold_in(key, index), 1 - RATE, params["v"].shape)

    def add_microbatch(total, microbatch):
        x, y, indices = microbatch
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x, y, jax.vmap(mask_of)(indices))), None

    batch = (x, y, jnp.arange(len(x)))
    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), batch)
    total, _ = jax.lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda t: t / n_microbatches, total)
