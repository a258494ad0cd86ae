"""A sum for a mean.

caught by: value
says: this is the gradient of a sum
"""

import jax
import jax.numpy as jnp


def mean_gradient(w, x):
    """As many times the answer as there are examples."""
    return jax.grad(lambda w: jnp.sum((w * x) ** 2))(w)
