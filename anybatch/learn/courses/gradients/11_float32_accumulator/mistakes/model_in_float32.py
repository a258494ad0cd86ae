"""Casts everything to float32 first: right, but no longer a bfloat16 model.

caught by: program
says: the model runs in float32
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    """The mean squared error of a linear model over one microbatch, in bfloat16. Do not change it."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def accumulated_grads(params, x, y, n_microbatches):
    params, x, y = jax.tree.map(lambda a: a.astype(jnp.float32), (params, x, y))

    def add_microbatch(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *microbatch)), None

    microbatches = (x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1))
    total, _ = jax.lax.scan(add_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda t: t / n_microbatches, total)
