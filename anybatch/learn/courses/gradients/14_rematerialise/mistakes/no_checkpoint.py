"""A scan without a checkpoint: the activations of all iterations are kept.

caught by: memory
says: The activations of every microbatch are kept
"""

import jax
import jax.numpy as jnp


def predict(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def batch_loss(params, x, y, n_microbatches):
    def add(total, microbatch):
        x, y = microbatch
        return total + jnp.sum((predict(params, x) - y) ** 2), None

    microbatches = x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1)
    return jnp.sqrt(jax.lax.scan(add, 0.0, microbatches)[0] / len(x))


def loss_and_grads(params, x, y, n_microbatches):
    return jax.value_and_grad(batch_loss)(params, x, y, n_microbatches)
