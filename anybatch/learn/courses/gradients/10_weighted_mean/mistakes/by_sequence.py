"""Averages within each sequence first, and then over sequences.

caught by: value
says: You averaged within each sequence first
"""

import jax
import jax.numpy as jnp


def token_losses(params, x, y):
    """The squared error of each token, with the shape of y. Do not change it."""
    return (x @ params["w"] + params["b"] - y) ** 2


def masked_mean_grads(params, x, y, mask, n_microbatches):
    def loss(params, x, y, mask):
        of_sequences = jnp.sum(jnp.where(mask, token_losses(params, x, y), 0.0), axis=1)
        return jnp.mean(of_sequences / jnp.maximum(jnp.sum(mask, axis=1), 1))

    def add_microbatch(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *microbatch)), None

    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), (x, y, mask))
    total, _ = jax.lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda g: g / n_microbatches, total)
