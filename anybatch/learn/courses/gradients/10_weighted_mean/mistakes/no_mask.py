"""Divides by the tokens that count, and adds up the losses of all.

caught by: value
says: but added up the losses of all tokens
"""

import jax
import jax.numpy as jnp


def token_losses(params, x, y):
    """The squared error of each token, with the shape of y. Do not change it."""
    return (x @ params["w"] + params["b"] - y) ** 2


def masked_mean_grads(params, x, y, mask, n_microbatches):
    def add_microbatch(carry, microbatch):
        total, count = carry
        x, y, mask = microbatch
        grads = jax.grad(lambda params: jnp.sum(token_losses(params, x, y)))(params)
        return (jax.tree.map(jnp.add, total, grads), count + jnp.sum(mask)), None

    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), (x, y, mask))
    (total, count), _ = jax.lax.scan(add_microbatch, (jax.tree.map(jnp.zeros_like, params), 0), microbatches)
    return jax.tree.map(lambda g: g / jnp.maximum(count, 1), total)
