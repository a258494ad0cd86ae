"""The remainder is computed before the count is checked.

caught by: errors
says: it raises ZeroDivisionError
"""

import jax


def cut(batch, n_microbatches):
    """Modulo 0 raises another error."""
    num_examples = len(jax.tree.leaves(batch)[0])
    if num_examples % n_microbatches or n_microbatches < 1:
        raise ValueError(f"{num_examples} examples cannot be cut into {n_microbatches} microbatches")
    n = int(n_microbatches)
    return jax.tree.map(lambda leaf: leaf.reshape(n, num_examples // n, *leaf.shape[1:]), batch)
