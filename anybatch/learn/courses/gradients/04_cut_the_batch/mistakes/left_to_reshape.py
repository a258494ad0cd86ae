"""Relies on the error that reshape raises.

caught by: errors
says: It must raise ValueError; it raises TypeError.
"""

import jax


def cut(batch, n_microbatches):
    """JAX raises an error of another type, about shapes."""
    n = int(n_microbatches)
    return jax.tree.map(lambda leaf: leaf.reshape(n, leaf.shape[0] // n, *leaf.shape[1:]), batch)
