"""Models that the planner was not developed on: a U-Net, a ViT in Flax NNX, an LSTM, and a mixture of experts.

`MODELS` has each of them for an accelerator, and with "-tiny" for a CPU. They have float32 parameters and bfloat16
arithmetic. The ViT needs Flax; without it, it is missing from `MODELS`.
"""

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import models

NARROW = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class UNet:
    """Removes noise from images: two convolutions at each level, halved and doubled resolution, skip connections."""

    size: int
    channels: tuple[int, ...]

    def init(self, key: jax.Array) -> Any:
        keys = iter(jax.random.split(key, 8 * len(self.channels)))

        def convolution(inputs: int, outputs: int, width: int = 3) -> Any:
            weights = jax.random.normal(next(keys), (width, width, inputs, outputs)) / (width * inputs**0.5)
            return {"weights": weights, "scale": jnp.ones(outputs), "shift": jnp.zeros(outputs)}

        down, up, before = [], [], 3
        for channels in self.channels:
            down.append([convolution(before, channels), convolution(channels, channels)])
            before = channels
        for channels in reversed(self.channels[:-1]):
            up.append([convolution(before + channels, channels), convolution(channels, channels)])
            before = channels
        return {"down": down, "up": up, "out": convolution(before, 3, 1)["weights"]}

    def batch(self, key: jax.Array, examples: int) -> Any:
        clean, noise = jax.random.normal(key, (2, examples, self.size, self.size, 3))
        return {"noisy": clean + noise, "noise": noise}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The mean squared error of the predicted noise."""
        hidden, skips = batch["noisy"].astype(NARROW), []
        for level, convolutions in enumerate(params["down"]):
            if level:
                skips.append(hidden)
                hidden = hidden.reshape(hidden.shape[0], hidden.shape[1] // 2, 2, hidden.shape[2] // 2, 2, -1)
                hidden = hidden.mean(axis=(2, 4))
            for each in convolutions:
                hidden = jax.nn.silu(_group_norm(_convolved(hidden, each["weights"]), each))
        for convolutions in params["up"]:
            hidden = jnp.repeat(jnp.repeat(hidden, 2, axis=1), 2, axis=2)
            hidden = jnp.concatenate([hidden, skips.pop()], axis=-1)
            for each in convolutions:
                hidden = jax.nn.silu(_group_norm(_convolved(hidden, each["weights"]), each))
        predicted = _convolved(hidden, params["out"]).astype(jnp.float32)
        return jnp.mean((predicted - batch["noise"]) ** 2)


def _convolved(images: jax.Array, weights: jax.Array) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(images, weights.astype(NARROW), (1, 1), "SAME", dimension_numbers=layout)


def _group_norm(images: jax.Array, params: Any, groups: int = 8) -> jax.Array:
    wide = images.astype(jnp.float32).reshape(*images.shape[:3], groups, -1)
    wide = wide - wide.mean(axis=(1, 2, 4), keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=(1, 2, 4), keepdims=True) + 1e-5)
    return (wide.reshape(images.shape) * params["scale"] + params["shift"]).astype(images.dtype)


@dataclasses.dataclass(frozen=True)
class LSTM:
    """A language model: LSTM layers in one `lax.scan` over time, and logits of all tokens at once."""

    layers: int
    width: int
    context: int
    vocabulary: int

    def init(self, key: jax.Array) -> Any:
        keys = jax.random.split(key, self.layers + 2)
        shape = (2 * self.width, 4 * self.width)
        cells = [
            {"weights": jax.random.normal(k, shape) * shape[0] ** -0.5, "bias": jnp.zeros(shape[1])} for k in keys[2:]
        ]
        embedding = 0.1 * jax.random.normal(keys[0], (self.vocabulary, self.width))
        return {"embedding": embedding, "cells": cells, "out": embedding.T * 0.5}

    def batch(self, key: jax.Array, examples: int) -> Any:
        tokens = jax.random.randint(key, (examples, self.context + 1), 0, self.vocabulary)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The mean cross entropy over all tokens."""
        cells = jax.tree.map(lambda leaf: leaf.astype(NARROW), params["cells"])

        def step(states: Any, hidden: jax.Array) -> Any:
            new = []
            for cell, (output, memory) in zip(cells, states, strict=True):
                gates = jnp.concatenate([hidden, output], axis=-1) @ cell["weights"] + cell["bias"]
                enter, keep, show, value = jnp.split(gates, 4, axis=-1)
                memory = jax.nn.sigmoid(keep + 1) * memory + jax.nn.sigmoid(enter) * jnp.tanh(value)
                hidden = jax.nn.sigmoid(show) * jnp.tanh(memory)
                new.append((hidden, memory))
            return new, hidden

        embedded = params["embedding"].astype(NARROW)[batch["inputs"]]
        zeros = jnp.zeros((embedded.shape[0], self.width), NARROW)
        _, hidden = jax.lax.scan(step, [(zeros, zeros)] * self.layers, embedded.swapaxes(0, 1))
        logits = (hidden.swapaxes(0, 1) @ params["out"].astype(NARROW)).astype(jnp.float32)
        target = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target)


@dataclasses.dataclass(frozen=True)
class ViT:
    """A vision transformer in Flax NNX. `init` returns the `nnx.Module`, and the loss takes it as its parameters."""

    size: int
    patch: int
    layers: int
    width: int
    heads: int
    classes: int = 1000

    def init(self, key: jax.Array) -> Any:
        return _vit_module(self, key)

    def batch(self, key: jax.Array, examples: int) -> Any:
        images = jax.random.normal(key, (examples, self.size, self.size, 3))
        return {"images": images, "labels": jax.random.randint(key, (examples,), 0, self.classes)}

    def loss(self, model: Any, batch: Any) -> jax.Array:
        """The mean cross entropy of the labels."""
        log_probabilities = jax.nn.log_softmax(model(batch["images"]).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(log_probabilities, batch["labels"][:, None], axis=1))


def _vit_module(config: ViT, key: jax.Array) -> Any:
    """The NNX module of a `ViT`. Flax is imported here, so that the other models do not need it."""
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            width = config.width
            self.norm1, self.norm2 = (nnx.LayerNorm(width, dtype=NARROW, rngs=rngs) for _ in range(2))
            self.attention = nnx.MultiHeadAttention(config.heads, width, dtype=NARROW, decode=False, rngs=rngs)
            self.up = nnx.Linear(width, 4 * width, dtype=NARROW, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, dtype=NARROW, rngs=rngs)

        def __call__(self, hidden: jax.Array) -> jax.Array:
            hidden = hidden + self.attention(self.norm1(hidden))
            return hidden + self.down(nnx.gelu(self.up(self.norm2(hidden))))

    class Module(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            patch, tokens = (config.patch, config.patch), (config.size // config.patch) ** 2
            self.patches = nnx.Conv(3, config.width, patch, patch, padding="VALID", dtype=NARROW, rngs=rngs)
            self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, tokens, config.width)))
            self.blocks = nnx.List([Block(rngs) for _ in range(config.layers)])
            self.norm = nnx.LayerNorm(config.width, dtype=NARROW, rngs=rngs)
            self.out = nnx.Linear(config.width, config.classes, dtype=NARROW, rngs=rngs)

        def __call__(self, images: jax.Array) -> jax.Array:
            hidden = self.patches(images).reshape(images.shape[0], -1, config.width)
            hidden = hidden + self.positions[...].astype(NARROW)
            for block in self.blocks:
                hidden = block(hidden)
            return self.out(self.norm(hidden).mean(axis=1))

    return Module(nnx.Rngs(key))


@dataclasses.dataclass(frozen=True)
class MoE:
    """A GPT whose feed-forward layers are mixtures of experts, with a loss that balances them over the batch.

    Each token goes to two experts. In a sequence, an expert takes up to a quarter more tokens than its share.
    """

    layers: int
    width: int
    heads: int
    experts: int
    context: int
    vocabulary: int

    def init(self, key: jax.Array) -> Any:
        gpt = models.GPT(self.layers, self.width, self.heads, self.context, self.vocabulary)
        params = gpt.init(key)
        shapes = {
            "router": (self.width, self.experts),
            "up": (self.experts, self.width, 4 * self.width),
            "down": (self.experts, 4 * self.width, self.width),
        }
        for number, block in enumerate(params["blocks"]):
            keys = jax.random.split(jax.random.fold_in(key, number), len(shapes))
            for (name, shape), each in zip(shapes.items(), keys, strict=True):
                block[name] = 0.02 * jax.random.normal(each, shape)
        return params

    def batch(self, key: jax.Array, examples: int) -> Any:
        tokens = jax.random.randint(key, (examples, self.context + 1), 0, self.vocabulary)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The mean cross entropy, and a hundredth of the balance of all layers."""
        embedding = params["embedding"].astype(NARROW)
        hidden = embedding[batch["inputs"]] + params["position"].astype(NARROW)
        balance = 0.0
        for block in params["blocks"]:
            hidden = hidden + models.attention(models.norm(hidden, block["norm1"]), block, self.heads)
            mixed, share_of_tokens, probability = self._experts(models.norm(hidden, block["norm2"]), block)
            hidden = hidden + mixed
            balance += self.experts * jnp.sum(share_of_tokens * probability)
        logits = (models.norm(hidden, params["norm"]) @ embedding.T).astype(jnp.float32)
        target = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - target) + 0.01 * balance / self.layers

    def _experts(self, hidden: jax.Array, block: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The outputs of the experts; for each, its share of the tokens of the batch and its mean probability."""
        probabilities = jax.nn.softmax(hidden.astype(jnp.float32) @ block["router"])
        gates, chosen = jax.lax.top_k(probabilities, 2)
        is_sent = jax.nn.one_hot(chosen, self.experts)  # sequence, token, choice, expert
        capacity = 2 * self.context * 5 // (4 * self.experts)
        # The first choices of all tokens of a sequence come before the second ones.
        in_order = is_sent.swapaxes(1, 2).reshape(hidden.shape[0], -1, self.experts)
        place = jnp.cumsum(in_order, axis=1).reshape(hidden.shape[0], 2, -1, self.experts).swapaxes(1, 2) - 1
        slots = is_sent[..., None] * jax.nn.one_hot(place.astype(jnp.int32), capacity)
        sent = slots.sum(axis=2).astype(NARROW)
        weighted = jnp.einsum("btk,btkec->btec", gates, slots).astype(NARROW)
        inside = jnp.einsum("btec,btd->becd", sent, hidden)
        inside = jax.nn.gelu(jnp.einsum("becd,edf->becf", inside, block["up"].astype(NARROW)))
        inside = jnp.einsum("becf,efd->becd", inside, block["down"].astype(NARROW))
        mixed = jnp.einsum("btec,becd->btd", weighted, inside)
        return mixed, is_sent.sum(axis=2).mean(axis=(0, 1)) / 2, probabilities.mean(axis=(0, 1))


# name -> (model, examples in the batch)
MODELS: dict[str, tuple[Any, int]] = {
    "unet": (UNet(size=128, channels=(64, 128, 256)), 128),
    "unet-tiny": (UNet(size=16, channels=(16, 32)), 128),
    "lstm": (LSTM(layers=2, width=1024, context=256, vocabulary=8192), 512),
    "lstm-tiny": (LSTM(layers=2, width=64, context=32, vocabulary=512), 256),
    "moe": (MoE(layers=8, width=768, heads=12, experts=8, context=512, vocabulary=32768), 64),
    "moe-tiny": (MoE(layers=2, width=64, heads=4, experts=4, context=32, vocabulary=256), 64),
}
if importlib.util.find_spec("flax"):
    MODELS["vit"] = (ViT(size=224, patch=16, layers=12, width=384, heads=6), 256)
    MODELS["vit-tiny"] = (ViT(size=32, patch=4, layers=3, width=64, heads=4, classes=10), 128)
