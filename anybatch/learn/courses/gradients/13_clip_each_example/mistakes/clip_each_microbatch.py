"""Clips the gradient of each microbatch, which is already a sum.

caught by: value
says: You clipped the gradient of each microbatch
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)


def clipped_sum(params, x, y, clip, n_microbatches):
    def total_loss(params, x, y):
        return jnp.sum(jax.vmap(loss, (None, 0, 0))(params, x, y))

    def add(total, microbatch):
        gradient = jax.grad(total_loss)(params, *microbatch)
        factor = jnp.minimum(1, clip / norm_of(gradient))
        return jax.tree.map(lambda total, leaf: total + leaf * factor, total, gradient), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), cut(n_microbatches, x, y))[0]
