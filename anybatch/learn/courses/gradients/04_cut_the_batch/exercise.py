"""Cut a batch into microbatches, and refuse a count that does not fit."""

import jax
import jax.numpy as jnp


def cut(batch, n_microbatches):
    """The batch with an axis more: every array (N, ...) becomes (n, N // n, ...), in order.

    Args:
      batch: a tree of arrays, all with N examples along axis 0.
      n_microbatches: how many microbatches, n: a whole number that divides N, possibly as a float such as 4.0.

    Returns:
      A tree of that structure.

    Raises:
      ValueError: for any other count; it names the count and N.
    """
    raise NotImplementedError("Return the batch, cut into microbatches.")
