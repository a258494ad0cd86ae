"""`ab.Batches` yields which examples go together.

For a gradient you do not have to cut at all: `ab.value_and_grad(loss, microbatch_size=3)` takes any batch and any size,
and the last microbatch may be smaller.
"""

import jax
import numpy as np

import anybatch as ab


def cut(batch, n_microbatches):
    """The batch with one more axis: every array (N, ...) becomes (n, N // n, ...), in order."""
    num_examples, n = len(jax.tree.leaves(batch)[0]), int(n_microbatches)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError(f"n_microbatches must divide the {num_examples} examples, got {n_microbatches}")
    rows = np.stack(list(ab.Batches(np.arange(num_examples), num_examples // n, shuffle=False)))
    return jax.tree.map(lambda leaf: leaf[rows], batch)
