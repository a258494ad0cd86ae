"""Runs the model in float32, with a product and a sum in the place of the matrix product.

caught by: program
says: the model runs in float32
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    return jnp.mean((jnp.sum(x * params["w"], axis=-1) + params["b"] - y) ** 2)


def accumulated_grads(params, x, y, n_microbatches):
    params, x, y = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, x, y))

    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *microbatch)), None

    microbatches = (x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1))
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda t: t / n_microbatches, total)
