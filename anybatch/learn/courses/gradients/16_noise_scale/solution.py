"""Deviations from the sample mean have N - 1 degrees of freedom, and the square of a mean of N has trace / N of noise.

Both estimates follow from two sums, of the gradients and of their squares, so no gradient has to be kept.
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    """The squared error of one example: x has shape (d,), y is a number."""
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def square_of(tree):
    """The sum of the squares of all numbers in a tree."""
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def noise_scale(params, x, y, n_microbatches):
    """The two parts of the gradient noise scale, from per-example gradients."""

    def add_one_microbatch(carry, microbatch):
        total, squares = carry
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *microbatch)
        total = jax.tree.map(lambda total, leaf: total + leaf.sum(axis=0), total, each)
        return (total, squares + square_of(each)), None

    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), (x, y))
    start = jax.tree.map(jnp.zeros_like, params), 0.0
    (total, squares), _ = jax.lax.scan(add_one_microbatch, start, microbatches)

    number = len(x)
    mean_square = square_of(total) / number**2
    trace = (squares - number * mean_square) / (number - 1)
    return {"trace": trace, "gradient_square": mean_square - trace / number}
