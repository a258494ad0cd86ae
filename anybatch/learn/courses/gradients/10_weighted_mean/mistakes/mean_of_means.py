"""Divides in each microbatch by its own tokens, and averages the microbatches.

caught by: value
says: You averaged over the 4 microbatches; this exercise asks for the mean over all tokens
"""

import jax
import jax.numpy as jnp


def token_losses(params, x, y):
    """The squared error of each token, with the shape of y. Do not change it."""
    return (x @ params["w"] + params["b"] - y) ** 2


def masked_mean_grads(params, x, y, mask, n_microbatches):
    def mean_loss(params, x, y, mask):
        return jnp.sum(jnp.where(mask, token_losses(params, x, y), 0.0)) / jnp.maximum(jnp.sum(mask), 1)

    def add_microbatch(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.grad(mean_loss)(params, *microbatch)), None

    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), (x, y, mask))
    total, _ = jax.lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda g: g / n_microbatches, total)
