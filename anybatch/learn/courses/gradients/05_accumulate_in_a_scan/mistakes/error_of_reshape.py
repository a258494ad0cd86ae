"""Relies on `reshape`, which raises another error, and none for 2.5.

caught by: errors
says: It must raise ValueError; it raises TypeError
"""

import jax
import jax.numpy as jnp


def loss(w, x, y):
    """A sum over examples."""
    return jnp.sum((w * x - y) ** 2)


def microbatched_grads(w, b, x_full, y_full, n_microbatches):
    """The gradient, or the error that JAX raises."""
    n = int(n_microbatches)
    w = jnp.asarray(w, jnp.float32)
    xs, ys = x_full.reshape(n, -1), y_full.reshape(n, -1)
    total, _ = jax.lax.scan(lambda total, batch: (total + jax.grad(loss)(w, *batch), None), jnp.zeros_like(w), (xs, ys))
    return total
