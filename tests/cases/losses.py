"""One table of losses. A new row inherits every test that is parametrized by it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss, how it is declared, and the same loss as `jax.value_and_grad` takes it."""

    name: str
    loss: Callable[..., Any]
    reduction: str
    params: Callable[[jax.Array, Any], Any]
    batch: Callable[[jax.Array, int, Any], Any]

    def oracle(self, params, batch):
        if self.reduction != "weighted":
            return self.loss(params, batch)
        total, weight = self.loss(params, batch)
        return total / jnp.asarray(weight).astype(total.dtype)

    def problem(self, num_examples=12, dtype=jnp.float32):
        key_of_params, key_of_batch = jax.random.split(jax.random.key(len(self.name)))
        return self.params(key_of_params, dtype), self.batch(key_of_batch, num_examples, dtype)


def normal(key, shape, dtype):
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def mlp_params(key, dtype):
    first, second = jax.random.split(key)
    layers = [{"w": normal(first, (5, 7), dtype), "b": jnp.zeros((1, 7), dtype)}, {"w": normal(second, (7, 3), dtype)}]
    return {"layers": layers, "scale": jnp.ones((), dtype)}


def images(key, num_examples, dtype):
    """Float, integer and bool leaves, in a nested tree."""
    keys = jax.random.split(key, 3)
    return {
        "image": normal(keys[0], (num_examples, 5), dtype),
        "target": (
            jax.random.randint(keys[1], (num_examples,), 0, 3),
            jax.random.bernoulli(keys[2], 0.7, (num_examples,)),
        ),
    }


def mlp_losses(params, batch):
    hidden = jnp.tanh(batch["image"] @ params["layers"][0]["w"] + params["layers"][0]["b"])
    logits = hidden @ params["layers"][1]["w"] * params["scale"]
    labels, _ = batch["target"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)[:, 0]


def mlp_mean(params, batch):
    return jnp.mean(mlp_losses(params, batch))


def mlp_sum(params, batch):
    return jnp.sum(mlp_losses(params, batch))


def mlp_regularised(params, batch):
    penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return jnp.mean(mlp_losses(params, batch)) + 0.01 * penalty


def mlp_masked(params, batch):
    _, mask = batch["target"]
    losses = mlp_losses(params, batch)
    return jnp.sum(jnp.where(mask, losses, jnp.zeros_like(losses))), jnp.sum(mask)


def mlp_weight_of_params(params, batch):
    """The weight moves with the parameters, so that its own gradient counts."""
    losses = mlp_losses(params, batch)
    weights = jax.nn.softplus(batch["image"] @ params["layers"][0]["w"]).sum(axis=1)
    return jnp.sum(losses * weights), jnp.sum(weights)


TEMPERATURE = jnp.asarray([1.5])


def closure_and_weight_of_params(params, batch):
    """Closes over an array, and the weight moves with the parameters."""
    losses = mlp_losses(params, batch) / TEMPERATURE.astype(params["scale"].dtype)
    return jnp.sum(losses * params["scale"]), jnp.sum(jnp.exp(params["scale"]) * jnp.ones_like(losses))


def mlp_stopped_weight(params, batch):
    losses = mlp_losses(params, batch)
    weights = jax.lax.stop_gradient(jnp.exp(-losses))
    return jnp.sum(losses * weights), jnp.sum(weights)


def scanned_params(key, dtype):
    return {"layers": normal(key, (4, 5, 5), dtype) * jnp.asarray(0.5, dtype), "out": jnp.ones((5,), dtype)}


def scanned_layers(params, batch):
    def layer(hidden, weights):
        return jnp.tanh(hidden @ weights), None

    hidden, _ = jax.lax.scan(jax.checkpoint(layer), batch["image"], params["layers"])
    return jnp.mean((hidden @ params["out"]) ** 2)


def token_params(key, dtype):
    return {"embedding": normal(key, (11, 4), dtype)}


def tokens(key, num_examples, dtype):
    """Sentences of unequal length: a mean over tokens is no mean over examples."""
    ids, lengths = jax.random.split(key)
    mask = jnp.arange(6)[None, :] < jax.random.randint(lengths, (num_examples, 1), 1, 7)
    return {"ids": jax.random.randint(ids, (num_examples, 6), 0, 11), "mask": mask.astype(dtype)}


def token_mean(params, batch):
    """The embedding is used twice: tied weights, a gather and a matrix product."""
    hidden = jnp.tanh(params["embedding"][batch["ids"]])
    logits = hidden @ params["embedding"].T
    losses = -jax.nn.log_softmax(logits)[..., 0]
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


@jax.jit
def jitted_mean(params, batch):
    return mlp_mean(params, batch)


@jax.custom_vjp
def doubled_backwards(x):
    return jnp.sin(x)


doubled_backwards.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g * jnp.cos(x),))


def custom_backward(params, batch):
    return jnp.mean(jnp.sum(doubled_backwards(batch["image"] @ params["layers"][0]["w"]), axis=1))


LOSSES = [
    Case("mean", mlp_mean, "mean", mlp_params, images),
    Case("sum", mlp_sum, "sum", mlp_params, images),
    Case("mean_and_regulariser", mlp_regularised, "mean", mlp_params, images),
    Case("masked_mean", mlp_masked, "weighted", mlp_params, images),
    Case("weight_of_params", mlp_weight_of_params, "weighted", mlp_params, images),
    Case("closure_and_weight_of_params", closure_and_weight_of_params, "weighted", mlp_params, images),
    Case("stopped_weight", mlp_stopped_weight, "weighted", mlp_params, images),
    Case("token_mean", token_mean, "weighted", token_params, tokens),
    Case("scanned_layers_remat", scanned_layers, "mean", scanned_params, images),
    Case("jitted", jitted_mean, "mean", mlp_params, images),
    Case("custom_vjp", custom_backward, "mean", mlp_params, images),
]
