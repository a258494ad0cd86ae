"""A masked mean is a ratio of two sums. Sums of microbatches add up, ratios do not: so the scan carries the gradient of
the summed loss and the number of tokens, and they are divided once, at the end. A microbatch without tokens adds zero
to both, and max(..., 1) gives zeros for a batch without tokens.
"""

import jax
import jax.numpy as jnp


def token_losses(params, x, y):
    """The squared error of each token, with the shape of y. Do not change it."""
    return (x @ params["w"] + params["b"] - y) ** 2


def masked_mean_grads(params, x, y, mask, n_microbatches):
    """The gradient of the mean of token_losses over the tokens where the mask is True; zeros if there are none."""

    def summed_loss(params, x, y, mask):
        return jnp.sum(jnp.where(mask, token_losses(params, x, y), 0.0))

    def add_microbatch(carry, microbatch):
        total, count = carry
        grads = jax.grad(summed_loss)(params, *microbatch)
        return (jax.tree.map(jnp.add, total, grads), count + jnp.sum(microbatch[2])), None

    microbatches = jax.tree.map(lambda a: a.reshape(n_microbatches, -1, *a.shape[1:]), (x, y, mask))
    nothing = (jax.tree.map(jnp.zeros_like, params), 0)
    (total, count), _ = jax.lax.scan(add_microbatch, nothing, microbatches)
    return jax.tree.map(lambda g: g / jnp.maximum(count, 1), total)
