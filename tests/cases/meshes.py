"""Meshes of simulated devices, and losses to be spread over them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from anybatch.collectives import Traffic


def mesh_of(*sizes, names=("data", "model"), explicit=False):
    devices = np.asarray(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    kind = AxisType.Explicit if explicit else AxisType.Auto
    return Mesh(devices, names[: len(sizes)], axis_types=(kind,) * len(sizes))


def spread(tree, mesh, *spec):
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def parameters(width=8, dtype=np.float64):
    random = np.random.default_rng(0)
    return {
        "w": jnp.asarray(random.normal(size=(5, width)), dtype),
        "v": jnp.asarray(random.normal(size=(width, 4)), dtype),
        "b": jnp.asarray(random.normal(size=4), dtype),
    }


def examples(number, dtype=np.float64):
    random = np.random.default_rng(1)
    return {
        "x": random.normal(size=(number, 5)).astype(dtype),
        "y": random.normal(size=(number, 4)).astype(dtype),
        # Very unequal weights: where means of means go wrong.
        "mask": (np.arange(number) < 0.3 * number + 1).astype(dtype),
        "label": random.integers(0, 4, number),
    }


def outputs_of(params, batch):
    return jnp.tanh(batch["x"] @ params["w"]) @ params["v"] + params["b"][None]


def mean(params, batch):
    return jnp.mean((outputs_of(params, batch) - batch["y"]) ** 2)


def total(params, batch):
    return jnp.sum((outputs_of(params, batch) - batch["y"]) ** 2)


def masked(params, batch):
    losses = jnp.sum((outputs_of(params, batch) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"])


def counted(params, batch):
    """A mean over a whole number of examples, which must be exact."""
    losses = jnp.sum((outputs_of(params, batch) - batch["y"]) ** 2, axis=-1)
    kept = batch["label"] > 0
    return jnp.sum(jnp.where(kept, losses, 0)) / jnp.maximum(jnp.sum(kept), 1).astype(losses.dtype)


def rmse(params, batch):
    return jnp.sqrt(mean(params, batch))


def contrastive(params, batch):
    rows = outputs_of(params, batch)
    rows = rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(3 * rows @ rows.T)))


def two_views(params, batch):
    """Two augmented copies in one array of 2N rows, as contrastive losses have them."""
    both = jnp.concatenate([batch["x"], 0.5 * batch["x"] + 1])
    rows = jnp.tanh(both @ params["w"]) @ params["v"]
    return jnp.mean(jax.nn.logsumexp(rows @ rows.T, axis=-1)) + jnp.mean(params["b"] ** 2)


def standardized(params, batch):
    """Inputs divided by a statistic of the whole batch, which is known before the first microbatch."""
    return mean(params, {**batch, "x": batch["x"] / (1 + jnp.std(batch["x"], axis=0, keepdims=True))})


def against_the_data(params, batch):
    """Every example beside all inputs: these are data, and needed whole."""
    return jnp.mean(jnp.tanh(jnp.tanh(batch["x"] @ params["w"]) @ params["v"] @ batch["y"].T) ** 2)


def dropped(params, batch):
    rows = outputs_of(params, batch)
    return jnp.mean(
        (rows * jax.random.bernoulli(jax.random.key(3), 0.5, rows.shape).astype(rows.dtype) - batch["y"]) ** 2
    )


def looked_up(params, batch):
    scores = jax.nn.log_softmax(outputs_of(params, batch))
    positions = jnp.arange(scores.shape[0])
    return -jnp.mean(scores[positions, batch["label"]] * (1 + positions).astype(scores.dtype))


def parameters_alone(params, batch):
    return jnp.sum(params["w"] ** 2) + 0.0 * jnp.sum(batch["x"])


ONE_PASS = [mean, total, masked, counted, rmse, dropped, looked_up, parameters_alone]
TWO_PASSES = [contrastive, two_views, standardized, against_the_data]


def with_aux(params, batch):
    rows = outputs_of(params, batch)
    aux = {"rows": rows, "columns": rows.T, "count": jnp.sum(batch["label"] == 2), "largest": jnp.max(rows)}
    return masked(params, batch), aux


def worst(actual, expected):
    """The largest difference of any leaf, relative to its largest entry; infinite for another tree."""
    if jax.tree.structure(actual) != jax.tree.structure(expected):
        return np.inf

    def difference(one, other):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        if one.shape != other.shape:
            return np.inf
        return float(np.max(np.abs(one - other), initial=0) / max(1e-300, np.max(np.abs(other), initial=0)))

    return max(jax.tree.leaves(jax.tree.map(difference, actual, expected)))


def traffic(fun, mesh, *args):
    return Traffic.of(jax.jit(fun).lower(*args).compile(), mesh)


def bits(tree):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))
