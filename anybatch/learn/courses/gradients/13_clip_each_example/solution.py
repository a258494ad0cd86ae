"""The scan carries only the clipped sum, and the per-example gradients of one microbatch are freed before the next.

`clip / max(norm, clip)` is `min(1, clip / norm)` without a division by zero: a gradient of norm 0 is scaled by 1.
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    """The squared error of one example: x has shape (d,), y is a number."""
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def clipped_sum(params, x, y, clip, n_microbatches):
    """The sum over all examples of their gradients, each scaled down to a norm of at most `clip`."""

    def clipped(x, y):
        gradient = jax.grad(loss)(params, x, y)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))
        return jax.tree.map(lambda leaf: leaf * (clip / jnp.maximum(norm, clip)), gradient)

    def add_one_microbatch(total, microbatch):
        each = jax.vmap(clipped)(*microbatch)
        return jax.tree.map(lambda total, each: total + each.sum(axis=0), total, each), None

    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), (x, y))
    total, _ = jax.lax.scan(add_one_microbatch, jax.tree.map(jnp.zeros_like, params), microbatches)
    return total
