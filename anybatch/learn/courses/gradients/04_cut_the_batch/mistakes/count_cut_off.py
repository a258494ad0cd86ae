"""2.5 becomes 2.

caught by: errors
says: a count must be an integer
"""

import jax


def cut(batch, n_microbatches):
    """int() drops the fraction before it is checked."""
    num_examples, n = len(jax.tree.leaves(batch)[0]), int(n_microbatches)
    if n < 1 or num_examples % n:
        raise ValueError(f"{num_examples} examples cannot be cut into {n_microbatches} microbatches")
    return jax.tree.map(lambda leaf: leaf.reshape(n, num_examples // n, *leaf.shape[1:]), batch)
