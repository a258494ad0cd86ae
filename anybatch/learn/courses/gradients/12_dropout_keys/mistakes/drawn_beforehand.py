"""Right masks, but all of them are drawn before the scan, and need the memory of the full batch.

caught by: program
says: masks or hidden units of the full batch are computed at once
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

    def add_microbatch(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *microbatch)), None

    batch = (x, y, jax.vmap(mask_of)(jnp.arange(len(x))))
    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), batch)
    total, _ = jax.lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda t: t / n_microbatches, total)
