"""The order matters.

caught by: value
says: The answer is wrong
"""

import jax


def mean_gradient(w, x):
    """The gradient of only the first example."""
    return jax.grad(lambda w: (w * x[0]) ** 2)(w)
