"""An example's mask depends only on the key and on its index in the full batch, not on its microbatch or its place
there. So the indices are cut like the examples, and each iteration draws only the masks of its own examples.
"""

import jax
import jax.numpy as jnp

RATE = 0.25  # the fraction of hidden units that are dropped


def loss(params, x, y, mask):
    """The mean squared error over one microbatch; mask (M, H) multiplies the hidden units. Do not change it."""
    hidden = jnp.tanh(x @ params["w"]) * mask
    return jnp.mean((hidden @ params["v"] - y) ** 2)


def dropout_grads(params, key, x, y, n_microbatches):
    """The gradient of the mean over all examples, with dropout, accumulated over microbatches."""

    def mask_of(index):
        return jax.random.bernoulli(jax.random.fold_in(key, index), 1 - RATE, params["v"].shape) / (1 - RATE)

    def add_microbatch(total, microbatch):
        x, y, indices = microbatch
        grads = jax.grad(loss)(params, x, y, jax.vmap(mask_of)(indices))
        return jax.tree.map(jnp.add, total, grads), None

    batch = (x, y, jnp.arange(len(x)))
    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), batch)
    total, _ = jax.lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda t: t / n_microbatches, total)
