"""Split, and not stacked.

caught by: structure
says: list of pieces
"""

import jax
import jax.numpy as jnp


def cut(batch, n_microbatches):
    """Pieces by jnp.split, which are lists."""
    num_examples, n = len(jax.tree.leaves(batch)[0]), int(n_microbatches)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError(f"{num_examples} examples cannot be cut into {n_microbatches} microbatches")
    return jax.tree.map(lambda leaf: jnp.split(leaf, n), batch)
