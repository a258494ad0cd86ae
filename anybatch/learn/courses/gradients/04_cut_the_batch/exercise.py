"""Cut a batch into microbatches, and raise an error for a count that does not fit."""

import jax
import jax.numpy as jnp


def cut(batch, n_microbatches):
    """The batch with one more axis: every array (N, ...) becomes (n, N // n, ...), in order.

    Args:
      batch: a tree of arrays, all with N examples along axis 0.
      n_microbatches: the number of microbatches, n: an integer that divides N, possibly a float such as 4.0.

    Returns:
      A tree of the same structure.

    Raises:
      ValueError: for any other count; the message has the count and N.
    """
    raise NotImplementedError("Return the batch, cut into microbatches.")
