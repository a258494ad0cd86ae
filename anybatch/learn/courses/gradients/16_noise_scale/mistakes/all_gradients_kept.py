"""Stacks the gradients of all examples in the scan.

caught by: memory
says: Gradients are kept
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    return (jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2


def square_of(tree):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))


def noise_scale(params, x, y, n_microbatches):
    def gradients(carry, microbatch):
        return carry, jax.vmap(jax.grad(loss), (None, 0, 0))(params, *microbatch)

    microbatches = x.reshape(n_microbatches, -1, x.shape[-1]), y.reshape(n_microbatches, -1)
    each = jax.lax.scan(gradients, None, microbatches)[1]
    each = jax.tree.map(lambda leaf: leaf.reshape(len(x), -1), each)
    trace = sum(jnp.sum(jnp.var(leaf, axis=0, ddof=1)) for leaf in jax.tree.leaves(each))
    mean_square = sum(jnp.sum(jnp.mean(leaf, axis=0) ** 2) for leaf in jax.tree.leaves(each))
    return {"trace": trace, "gradient_square": mean_square - trace / len(x)}
