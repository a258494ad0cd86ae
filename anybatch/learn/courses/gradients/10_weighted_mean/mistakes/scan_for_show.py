"""Scans over something, and computes the full batch at once.

caught by: program
says: the full batch is computed at once
"""

import jax
import jax.numpy as jnp


def token_losses(params, x, y):
    """The squared error of each token, with the shape of y. Do not change it."""
    return (x @ params["w"] + params["b"] - y) ** 2


def masked_mean_grads(params, x, y, mask, n_microbatches):
    def loss(params):
        return jnp.sum(jnp.where(mask, token_losses(params, x, y), 0.0)) / jnp.maximum(jnp.sum(mask), 1)

    share = jax.tree.map(lambda g: g / n_microbatches, jax.grad(loss)(params))

    def turn(total, _):
        return jax.tree.map(jnp.add, total, share), None

    return jax.lax.scan(turn, jax.tree.map(jnp.zeros_like, params), None, length=n_microbatches)[0]
