"""Uses the sum of the norms of the leaves as the norm of the tree.

caught by: value
says: add up their squares
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)


def clipped_sum(params, x, y, clip, n_microbatches):
    def clipped(x, y):
        gradient = jax.grad(loss)(params, x, y)
        norm = sum(jnp.linalg.norm(leaf) for leaf in jax.tree.leaves(gradient))
        return jax.tree.map(lambda leaf: leaf * (clip / jnp.maximum(norm, clip)), gradient)

    def add(total, microbatch):
        each = jax.vmap(clipped)(*microbatch)
        return jax.tree.map(lambda total, each: total + each.sum(axis=0), total, each), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), cut(n_microbatches, x, y))[0]
