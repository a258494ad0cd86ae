"""The axes of the examples are lost.

caught by: shape
says: one long row
"""

import jax


def cut(batch, n_microbatches):
    """Reshape to (n, -1), which flattens the other axes."""
    num_examples, n = len(jax.tree.leaves(batch)[0]), int(n_microbatches)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError(f"{num_examples} examples cannot be cut into {n_microbatches} microbatches")
    return jax.tree.map(lambda leaf: leaf.reshape(n, -1), batch)
