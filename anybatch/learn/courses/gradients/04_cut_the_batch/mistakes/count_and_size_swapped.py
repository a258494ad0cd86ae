"""The two new axes are swapped.

caught by: shape
says: There are 4 microbatches of 3 examples
"""

import jax


def cut(batch, n_microbatches):
    """Microbatches along the second axis."""
    num_examples, n = len(jax.tree.leaves(batch)[0]), int(n_microbatches)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError(f"{num_examples} examples cannot be cut into {n_microbatches} microbatches")
    return jax.tree.map(lambda leaf: leaf.reshape(num_examples // n, n, *leaf.shape[1:]), batch)
