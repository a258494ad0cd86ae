"""Divides by the count at the end, also where it is 0.

caught by: value
says: A batch in which no token counts gives NaN
"""

import jax
import jax.numpy as jnp


def token_losses(params, x, y):
    """The squared error of each token, with the shape of y. Do not change it."""
    return (x @ params["w"] + params["b"] - y) ** 2


def masked_mean_grads(params, x, y, mask, n_microbatches):
    def summed_loss(params, x, y, mask):
        return jnp.sum(token_losses(params, x, y) * mask)

    def add_microbatch(carry, microbatch):
        total, count = carry
        grads = jax.grad(summed_loss)(params, *microbatch)
        return (jax.tree.map(jnp.add, total, grads), count + jnp.sum(microbatch[2])), None

    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), (x, y, mask))
    (total, count), _ = jax.lax.scan(add_microbatch, (jax.tree.map(jnp.zeros_like, params), 0), microbatches)
    return jax.tree.map(lambda g: g / count, total)
