"""Goes through the full batch first, on every device, and averages eight equal gradients.

caught by: program
says: Every device goes through the full batch
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


def data_parallel_grads(params, x, y, n_microbatches):
    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *microbatch)), None

    def average(gradient):
        return jax.lax.pmean(jax.lax.pcast(gradient, "data", to="varying"), "data")

    cut = tuple(a.reshape(n_microbatches, -1, *a.shape[1:]) for a in (x, y))
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), cut)
    total = jax.tree.map(lambda leaf: leaf / n_microbatches, total)
    return jax.shard_map(average, mesh=mesh, in_specs=P(), out_specs=P())(total)
