"""`ab.noise_scale` returns the loss, the gradient and a record of the noise. Records of many steps can be added up.

Without `exact=True` it uses the gradients of microbatches, which exist anyway, and costs almost nothing.
"""

import jax.numpy as jnp

import anybatch as ab


def loss(params, x, y):
    """The mean squared error of some rows: x has shape (rows, d), y (rows,)."""
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def noise_scale(params, x, y, n_microbatches):
    """The two parts of the gradient noise scale, from per-example gradients."""
    size = len(x) // n_microbatches
    _, _, noise = ab.noise_scale(loss, exact=True, batch_argnums=(1, 2), microbatch_size=size)(params, x, y)
    return {"trace": noise.trace, "gradient_square": noise.gradient_square}
