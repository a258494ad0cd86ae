"""A sum instead of a mean.

caught by: value
says: this is the gradient of a sum
"""

import jax
import jax.numpy as jnp


def mean_gradient(w, x):
    """N times the answer, for N examples."""
    return jax.grad(lambda w: jnp.sum((w * x) ** 2))(w)
