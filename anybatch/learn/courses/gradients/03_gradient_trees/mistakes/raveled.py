"""Flattened for a dot product, and never put back.

caught by: structure
says: in one flat array
"""

import jax.numpy as jnp
from jax.flatten_util import ravel_pytree


def weighted_sum(trees, weights):
    """The second half of what ravel_pytree returns was thrown away."""
    return weights @ jnp.stack([ravel_pytree(tree)[0] for tree in trees])
