"""Right, but computed from the full batch at once, without a scan.

caught by: program
says: there is no lax.scan
"""

import jax
import jax.numpy as jnp


def token_losses(params, x, y):
    """The squared error of each token, with the shape of y. Do not change it."""
    return (x @ params["w"] + params["b"] - y) ** 2


def masked_mean_grads(params, x, y, mask, n_microbatches):
    def loss(params):
        return jnp.sum(jnp.where(mask, token_losses(params, x, y), 0.0)) / jnp.maximum(jnp.sum(mask), 1)

    return jax.grad(loss)(params)
