"""A checkpoint around the complete scan: it is run again, and keeps every iteration.

caught by: memory
says: Around the complete scan it saves nothing
"""

import jax
import jax.numpy as jnp


def predict(params, x):
    return jnp.tanh(x @ params["w"]) @ params["v"]


def batch_loss(params, x, y, n_microbatches):
    @jax.checkpoint
    def total(params):
        def add(total, microbatch):
            x, y = microbatch
            return total + jnp.sum((predict(params, x) - y) ** 2), None

        microbatches = x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1)
        return jax.lax.scan(add, 0.0, microbatches)[0]

    return jnp.sqrt(total(params) / len(x))


def loss_and_grads(params, x, y, n_microbatches):
    return jax.value_and_grad(batch_loss)(params, x, y, n_microbatches)
