"""With a checkpoint on its body, the scan keeps only the inputs of each iteration for the backward pass.

The backward pass computes the microbatches again, and has the activations of only one at a time.
"""

import jax
import jax.numpy as jnp


def predict(params, x):
    """The predictions of some rows: x has shape (rows, d), the result (rows,)."""
    return jnp.tanh(x @ params["w"]) @ params["v"]


def batch_loss(params, x, y, n_microbatches):
    """The root of the mean squared error of the full batch, computed with a scan over microbatches."""

    @jax.checkpoint
    def add_one_microbatch(total, microbatch):
        x, y = microbatch
        return total + jnp.sum((predict(params, x) - y) ** 2), None

    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), (x, y))
    total, _ = jax.lax.scan(add_one_microbatch, 0.0, microbatches)
    return jnp.sqrt(total / len(x))


def loss_and_grads(params, x, y, n_microbatches):
    """The other code, which differentiates your loss. Do not change it."""
    return jax.value_and_grad(batch_loss)(params, x, y, n_microbatches)
