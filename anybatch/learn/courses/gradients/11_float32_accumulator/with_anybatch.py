"""anybatch adds up in float32. With float32 parameters, cast inside the loss, it also returns the sum in float32."""

import jax
import jax.numpy as jnp

import anybatch as ab


def loss(params, x, y):
    """The mean squared error of a linear model over one microbatch, in bfloat16. Do not change it."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def accumulated_grads(params, x, y, n_microbatches):
    """The mean of the microbatches' bfloat16 gradients, accumulated and returned in float32."""

    def in_bfloat16(params, x, y):
        return loss(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), x, y)

    params, size = jax.tree.map(lambda p: p.astype(jnp.float32), params), len(x) // n_microbatches
    return ab.grad(in_bfloat16, batch_argnums=(1, 2), microbatch_size=size)(params, x, y)
