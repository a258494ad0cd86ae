"""All examples at once.

caught by: program
says: No scan loops over the microbatches
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def square_of(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def noise_scale(params, x, y, n_microbatches):
    each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)
    mean_square = square_of(jax.tree.map(lambda leaf: leaf.mean(axis=0), each))
    trace = (square_of(each) - len(x) * mean_square) / (len(x) - 1)
    return {"trace": trace, "gradient_square": mean_square - trace / len(x)}
