"""Carries a bfloat16 sum and, also in bfloat16, what rounding lost: accurate, but not simple.

caught by: program
says: a scan carries bfloat16 from one iteration to the next
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    """The mean squared error of a linear model over one microbatch, in bfloat16. Do not change it."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def accumulated_grads(params, x, y, n_microbatches):
    def add(total, lost, gradient):
        wide = total.astype(jnp.float32) + gradient.astype(jnp.float32)
        narrow = wide.astype(jnp.bfloat16)
        return narrow, lost + (wide - narrow.astype(jnp.float32)).astype(jnp.bfloat16)

    def add_microbatch(carry, microbatch):
        total, lost = carry
        pairs = jax.tree.map(add, total, lost, jax.grad(loss)(params, *microbatch))
        return jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), pairs), None

    microbatches = (x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1))
    zeros = jax.tree.map(jnp.zeros_like, params)
    (total, lost), _ = jax.lax.scan(add_microbatch, (zeros, zeros), microbatches)
    return jax.tree.map(lambda t, r: (t.astype(jnp.float32) + r.astype(jnp.float32)) / n_microbatches, total, lost)
