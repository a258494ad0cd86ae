"""The mean of the losses of microbatches, each with its own root.

caught by: value
says: You took a root in each microbatch
"""

import jax
import jax.numpy as jnp


def predict(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def batch_loss(params, x, y, n_microbatches):
    @jax.checkpoint
    def add(total, microbatch):
        x, y = microbatch
        return total + jnp.sqrt(jnp.mean((predict(params, x) - y) ** 2)), None

    microbatches = x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1)
    return jax.lax.scan(add, 0.0, microbatches)[0] / n_microbatches


def loss_and_grads(params, x, y, n_microbatches):
    return jax.value_and_grad(batch_loss)(params, x, y, n_microbatches)
