"""Adds up in float32, and never divides.

caught by: value
says: You added up the gradients of the 32 microbatches
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    """The mean squared error of a linear model over one microbatch, in bfloat16. Do not change it."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def accumulated_grads(params, x, y, n_microbatches):
    def add_microbatch(total, microbatch):
        grads = jax.grad(loss)(params, *microbatch)
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads), None

    microbatches = (x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1))
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    return jax.lax.scan(add_microbatch, zeros, microbatches)[0]
