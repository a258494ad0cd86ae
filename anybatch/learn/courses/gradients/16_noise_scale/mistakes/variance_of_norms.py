"""Uses only the norms of gradients.

caught by: value
says: You took the variance of the norms
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def square_of(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def noise_scale(params, x, y, n_microbatches):
    def norms(carry, microbatch):
        each = jax.vmap(jax.grad(loss), (None, 0, 0))(params, *microbatch)
        return carry, jnp.sqrt(jax.vmap(square_of)(each))

    microbatches = x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1)
    norms = jax.lax.scan(norms, None, microbatches)[1].reshape(-1)
    trace = jnp.var(norms, ddof=1)
    return {"trace": trace, "gradient_square": jnp.mean(norms) ** 2 - trace / len(x)}
