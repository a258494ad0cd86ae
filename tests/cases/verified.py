"""Losses and data that the tests of `verify` share."""

import jax.numpy as jnp
import numpy as np
from cases.losses import LOSSES

CASES = {case.name: case for case in LOSSES}
READ_IT = "or leave reduction out: then anybatch reads the loss itself."

PARAMS = {"scale": jnp.float32(1.5), "w": jnp.asarray([0.3, -0.7, 1.1])}
BATCH = {
    "x": jnp.asarray(np.random.default_rng(0).normal(size=(10, 3)), jnp.float32),
    "mask": jnp.asarray([1, 1, 1, 1, 1, 1, 0, 1, 0, 1], bool),  # 4 + 3 + 1 of 8
}


def losses_of(params, batch):
    return (jnp.tanh(batch["x"] @ params["w"]) * params["scale"] - 0.5) ** 2


def mean_loss(params, batch):
    return jnp.mean(losses_of(params, batch))


def sum_loss(params, batch):
    return jnp.sum(losses_of(params, batch))


def masked_loss(params, batch):
    losses = losses_of(params, batch)
    return jnp.sum(jnp.where(batch["mask"], losses, jnp.zeros_like(losses))), jnp.sum(batch["mask"])


def masked_mean(params, batch):
    total, weight = masked_loss(params, batch)
    return total / weight.astype(total.dtype)


X = jnp.asarray([0.5, 1.25, -0.75, 2.5, -1.5, 0.3])


def line(w, x):
    return jnp.mean((w * x - 1) ** 2)


def add_up(w, x):
    return jnp.sum(w * x)
