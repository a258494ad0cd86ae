"""The full batch at once, and a scan over nothing.

caught by: program
says: your code also computes with the full batch outside of it
"""

import jax
import jax.numpy as jnp


def loss(w, x, y):
    """A sum over examples."""
    return jnp.sum((w * x - y) ** 2)


def microbatched_grads(w, b, x_full, y_full, n_microbatches):
    """The gradient, by microbatches."""
    n, num_examples = int(n_microbatches), len(x_full)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError(f"{num_examples} examples cannot be cut into {n_microbatches} microbatches")
    w = jnp.asarray(w, jnp.float32)
    xs, _ys = x_full.reshape(n, -1), y_full.reshape(n, -1)
    nothing, _ = jax.lax.scan(lambda total, x: (total + 0 * x[0], None), jnp.zeros_like(w), xs)
    return nothing + jax.grad(loss)(w, x_full, y_full)
