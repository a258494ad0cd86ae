"""One all-reduce, of the gradients of all microbatches.

caught by: collectives
says: it transfers more than one gradient
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def cut(n, *arrays):
    return tuple(a.reshape(n, -1, *a.shape[1:]) for a in arrays)


def data_parallel_grads(params, x, y, n_microbatches):
    def on_a_device(params, x, y):
        def one(carry, microbatch):
            return carry, jax.grad(loss)(params, *microbatch)

        _, stacked = jax.lax.scan(one, None, cut(n_microbatches, x, y))
        return jax.tree.map(lambda leaf: leaf.mean(axis=0), jax.lax.pmean(stacked, "data"))

    specs = (P(), P("data"), P("data"))
    return jax.shard_map(on_a_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(params, x, y)
