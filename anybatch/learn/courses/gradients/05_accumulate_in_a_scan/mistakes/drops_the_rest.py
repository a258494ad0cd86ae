"""Examples that are left over are dropped.

caught by: errors
says: It must raise ValueError, and does not
"""

import jax
import jax.numpy as jnp


def loss(w, x, y):
    """A sum over examples."""
    return jnp.sum((w * x - y) ** 2)


def microbatched_grads(w, b, x_full, y_full, n_microbatches):
    """The gradient of as many examples as fit."""
    n = int(n_microbatches)
    size = len(x_full) // n
    w = jnp.asarray(w, jnp.float32)
    xs, ys = x_full[: n * size].reshape(n, -1), y_full[: n * size].reshape(n, -1)
    total, _ = jax.lax.scan(lambda total, batch: (total + jax.grad(loss)(w, *batch), None), jnp.zeros_like(w), (xs, ys))
    return total
