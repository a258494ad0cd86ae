"""`ab.value_and_grad` takes the loss of the full batch: it finds the mean under the root, and splits that."""

import jax.numpy as jnp

import anybatch as ab


def predict(params, x):
    """The predictions of some rows: x has shape (rows, d), the result (rows,)."""
    return jnp.tanh(x @ params["w"]) @ params["v"]


def batch_loss(params, x, y):
    """The root of the mean squared error of the full batch."""
    return jnp.sqrt(jnp.mean((predict(params, x) - y) ** 2))


def loss_and_grads(params, x, y, n_microbatches):
    """The loss and its gradient, in the memory of one microbatch."""
    size = len(x) // n_microbatches
    return ab.value_and_grad(batch_loss, batch_argnums=(1, 2), microbatch_size=size)(params, x, y)
