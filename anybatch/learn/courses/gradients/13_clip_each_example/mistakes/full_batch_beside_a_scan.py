"""The full batch, and a scan without any use.

caught by: program
says: The scan has no influence on the answer
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
    def clipped(x, y):
        gradient = jax.grad(loss)(params, x, y)
        factor = clip / jnp.maximum(norm_of(gradient), clip)
        return jax.tree.map(lambda leaf: leaf * factor, gradient)

    each = jax.vmap(clipped)(x, y)
    zero, _ = jax.lax.scan(lambda carry, row: (carry + 0 * row.sum(), None), 0.0, cut(n_microbatches, x)[0])
    return jax.tree.map(lambda leaf: leaf.sum(axis=0) + zero, each)
