"""Uses the gradients of microbatches instead of per-example gradients.

caught by: value
says: the variance of the mean gradients of microbatches
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def square_of(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def noise_scale(params, x, y, n_microbatches):
    def mean_loss(params, x, y):
        return jnp.mean(jax.vmap(loss, (None, 0, 0))(params, x, y))

    def add(carry, microbatch):
        total, squares = carry
        gradient = jax.grad(mean_loss)(params, *microbatch)
        return (jax.tree.map(jnp.add, total, gradient), squares + square_of(gradient)), None

    n = n_microbatches
    microbatches = x.reshape(n, -1, x.shape[-1]), y.reshape(n, -1)
    total, squares = jax.lax.scan(add, (jax.tree.map(jnp.zeros_like, params), 0.0), microbatches)[0]
    mean_square = square_of(total) / n**2
    trace = (squares - n * mean_square) / (n - 1)
    return {"trace": trace, "gradient_square": mean_square - trace / n}
