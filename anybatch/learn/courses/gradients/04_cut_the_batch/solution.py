"""A reshape keeps the order of the numbers, so splitting the first axis in two cuts the batch and moves nothing.

The count is checked first, because examples that are lost silently are worse than an error.
"""

import jax


def cut(batch, n_microbatches):
    """The batch with one more axis: every array (N, ...) becomes (n, N // n, ...), in order."""
    num_examples = len(jax.tree.leaves(batch)[0])
    n = int(n_microbatches)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError(
            f"n_microbatches must be an integer of at least 1 that divides the {num_examples} examples, "
            f"got {n_microbatches}"
        )
    return jax.tree.map(lambda leaf: leaf.reshape(n, num_examples // n, *leaf.shape[1:]), batch)
