"""The full batch, computed twice.

caught by: program
says: No scan loops over the microbatches
"""

import jax
import jax.numpy as jnp


def predict(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


@jax.checkpoint
def mean_square(params, x, y):
    return jnp.mean((predict(params, x) - y) ** 2)


def batch_loss(params, x, y, n_microbatches):
    return jnp.sqrt(mean_square(params, x, y))


def loss_and_grads(params, x, y, n_microbatches):
    return jax.value_and_grad(batch_loss)(params, x, y, n_microbatches)
