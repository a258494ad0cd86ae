"""The last microbatch is filled up with zeros.

caught by: errors
says: 2 examples would be left over
"""

import jax
import jax.numpy as jnp


def cut(batch, n_microbatches):
    """Zeros count as examples in every mean that follows."""
    num_examples, n = len(jax.tree.leaves(batch)[0]), int(n_microbatches)
    size = -(-num_examples // n)

    def cut_one(leaf):
        filled = jnp.pad(leaf, [(0, n * size - num_examples)] + [(0, 0)] * (leaf.ndim - 1))
        return filled.reshape(n, size, *leaf.shape[1:])

    return jax.tree.map(cut_one, batch)
