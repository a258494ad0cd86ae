"""`ab.clipped_grad` costs about as much as a plain gradient: it never computes the gradient of each example."""

import jax.numpy as jnp

import anybatch as ab


def loss(params, x, y):
    """The squared error of one example: x has shape (d,), y is a number."""
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def clipped_sum(params, x, y, clip, n_microbatches):
    """The sum over all examples of their gradients, each scaled down to a norm of at most `clip`."""
    size = len(x) // n_microbatches
    return ab.clipped_grad(loss, clip_norm=clip, batch_argnums=(1, 2), microbatch_size=size)(params, x, y)
