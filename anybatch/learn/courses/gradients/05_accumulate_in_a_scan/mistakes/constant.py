"""A constant: the answer of one batch.

caught by: value
says: The answer is wrong
"""

import jax.numpy as jnp


def loss(w, x, y):
    """A sum over examples."""
    return jnp.sum((w * x - y) ** 2)


def microbatched_grads(w, b, x_full, y_full, n_microbatches):
    """A constant."""
    n, num_examples = int(n_microbatches), len(x_full)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError(f"{num_examples} examples cannot be cut into {n_microbatches} microbatches")
    w = jnp.asarray(w, jnp.float32)
    xs, ys = x_full.reshape(n, -1), y_full.reshape(n, -1)
    del xs, ys
    return jnp.float32(-60.0)
