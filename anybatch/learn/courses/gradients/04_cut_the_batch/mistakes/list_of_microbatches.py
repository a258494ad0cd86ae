"""One tree for each microbatch.

caught by: structure
says: This is a list of microbatches
"""

import jax


def cut(batch, n_microbatches):
    """Fine for a Python loop, and not for a scan."""
    num_examples, n = len(jax.tree.leaves(batch)[0]), int(n_microbatches)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError(f"{num_examples} examples cannot be cut into {n_microbatches} microbatches")
    size = num_examples // n
    return [jax.tree.map(lambda leaf, i=i: leaf[i * size : (i + 1) * size], batch) for i in range(n)]
