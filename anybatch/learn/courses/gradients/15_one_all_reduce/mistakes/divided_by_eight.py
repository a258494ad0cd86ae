"""Corrects the factor, but leaves the sum over devices in the loop, where jax.grad has inserted it.

caught by: collectives
says: If you did not, it was jax.grad
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
        def add(total, microbatch):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *microbatch)), None

        total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), cut(n_microbatches, x, y))
        return jax.tree.map(lambda leaf: leaf / (n_microbatches * mesh.size), total)

    specs = (P(), P("data"), P("data"))
    return jax.shard_map(on_a_device, mesh=mesh, in_specs=specs, out_specs=P())(params, x, y)
