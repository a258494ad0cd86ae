"""The gradient of a sum is the sum of the gradients, so the microbatches' gradients add up to that of the batch.

The scan carries a single running sum, and the gradient is taken inside it. So only one microbatch is in memory at a
time.
"""

import jax
import jax.numpy as jnp


def loss(w, x, y):
    """The loss of some examples: a sum over them, not a mean."""
    return jnp.sum((w * x - y) ** 2)


def microbatched_grads(w, b, x_full, y_full, n_microbatches):
    """The gradient of the loss of all examples with respect to `w`, accumulated over equal microbatches in a scan."""
    del b
    n, num_examples = int(n_microbatches), len(x_full)
    if n != n_microbatches or n < 1 or num_examples % n:
        raise ValueError(f"{num_examples} examples cannot be cut into {n_microbatches} equal microbatches")
    w = jnp.asarray(w, jnp.float32)

    def add_one(total, microbatch):
        return total + jax.grad(loss)(w, *microbatch), None

    microbatches = (x_full.reshape(n, -1), y_full.reshape(n, -1))
    total, _ = jax.lax.scan(add_one, jnp.zeros_like(w), microbatches)
    return total
