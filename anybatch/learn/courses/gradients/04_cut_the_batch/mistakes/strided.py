"""Every n-th example.

caught by: value
says: the examples are in the wrong order
"""

import jax


def cut(batch, n_microbatches):
    """Reshaped to (size, n), then swapped: the right shape, another order."""
    num_examples, n = len(jax.tree.leaves(batch)[0]), int(n_microbatches)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError(f"{num_examples} examples cannot be cut into {n_microbatches} microbatches")
    return jax.tree.map(lambda leaf: leaf.reshape(num_examples // n, n, *leaf.shape[1:]).swapaxes(0, 1), batch)
