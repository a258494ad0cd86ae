"""Does not use the mesh.

caught by: collectives
says: Nothing was exchanged
"""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)


def data_parallel_grads(params, x, y, n_microbatches):
    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *microbatch)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), cut(n_microbatches, x, y))
    return jax.tree.map(lambda leaf: leaf / n_microbatches, total)
