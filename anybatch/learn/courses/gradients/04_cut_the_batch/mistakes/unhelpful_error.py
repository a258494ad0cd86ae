"""The error message does not have the numbers.

caught by: errors
says: does not mention 5 and 12
"""

import jax


def cut(batch, n_microbatches):
    """The message does not say what was wrong."""
    num_examples, n = len(jax.tree.leaves(batch)[0]), int(n_microbatches)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError("the count does not fit the batch")
    return jax.tree.map(lambda leaf: leaf.reshape(n, num_examples // n, *leaf.shape[1:]), batch)
