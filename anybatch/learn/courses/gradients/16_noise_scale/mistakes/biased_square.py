"""Does not correct the square of the mean gradient.

caught by: value
says: subtract trace / N
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def square_of(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def sums(params, x, y, n):
    def add(carry, microbatch):
        total, squares = carry
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *microbatch)
        return (jax.tree.map(lambda t, leaf: t + leaf.sum(axis=0), total, each), squares + square_of(each)), None

    microbatches = x.reshape(n, -1, x.shape[-1]), y.reshape(n, -1)
    return jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, params), 0.0), microbatches)[0]


def noise_scale(params, x, y, n_microbatches):
    total, squares = sums(params, x, y, n_microbatches)
    mean_square = square_of(total) / len(x) ** 2
    return {"trace": (squares - len(x) * mean_square) / (len(x) - 1), "gradient_square": mean_square}
