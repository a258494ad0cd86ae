"""Uses the mean of the squares instead of the variance.

caught by: value
says: This trace is the mean of the squared norms
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
    trace = squares / len(x)
    return {"trace": trace, "gradient_square": square_of(total) / len(x) ** 2 - trace / len(x)}
