"""Keeps all gradients in bfloat16, and adds them up in float32 after the scan.

caught by: program
says: keeps something of each microbatch until the end
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    """The mean squared error of a linear model over one microbatch, in bfloat16. Do not change it."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def accumulated_grads(params, x, y, n_microbatches):
    def turn(carry, microbatch):
        return carry, jax.grad(loss)(params, *microbatch)

    microbatches = (x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1))
    _, grads = jax.lax.scan(turn, None, microbatches)
    return jax.tree.map(lambda g: jnp.mean(g.astype(jnp.float32), axis=0), grads)
