"""A loop that is unrolled: a copy of the model for each microbatch, to be compiled.

caught by: program
says: No scan loops over the microbatches
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    """The squared error of one example: x has shape (d,), y is a number."""
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def clipped_sum(params, x, y, clip, n_microbatches):
    """The sum over all examples of their gradients, each scaled down to a norm of at most `clip`."""

    def clipped(x, y):
        gradient = jax.grad(loss)(params, x, y)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
        return jax.tree.map(lambda leaf: leaf * (clip / jnp.maximum(norm, clip)), gradient)

    total = jax.tree.map(jnp.zeros_like, params)
    for microbatch in zip(jnp.split(x, n_microbatches), jnp.split(y, n_microbatches), strict=True):
        each = jax.vmap(clipped)(*microbatch)
        total = jax.tree.map(lambda total, each: total + each.sum(axis=0), total, each)
    return total
