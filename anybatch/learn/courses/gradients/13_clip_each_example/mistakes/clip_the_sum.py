"""Accumulates the sum, and clips that.

caught by: value
says: You clipped the sum of all gradients
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
    def add(total, microbatch):
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *microbatch)
        return jax.tree.map(lambda total, each: total + each.sum(axis=0), total, each), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), cut(n_microbatches, x, y))
    factor = jnp.minimum(1, clip / norm_of(total))
    return jax.tree.map(lambda leaf: leaf * factor, total)
