"""Keeps the gradient of every microbatch, and adds them up after the scan.

caught by: program
says: keeps something of each microbatch until the end
"""

import jax
import jax.numpy as jnp


def token_losses(params, x, y):
    """The squared error of each token, with the shape of y. Do not change it."""
    return (x @ params["w"] + params["b"] - y) ** 2


def masked_mean_grads(params, x, y, mask, n_microbatches):
    def summed_loss(params, x, y, mask):
        return jnp.sum(jnp.where(mask, token_losses(params, x, y), 0.0))

    def turn(count, microbatch):
        return count + jnp.sum(microbatch[2]), jax.grad(summed_loss)(params, *microbatch)

    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), (x, y, mask))
    count, grads = jax.lax.scan(turn, 0, microbatches)
    return jax.tree.map(lambda g: g.sum(axis=0) / jnp.maximum(count, 1), grads)
