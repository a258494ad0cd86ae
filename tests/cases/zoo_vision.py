"""Models of images, as people write them in Flax Linen: only the widths are small."""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cases.zoo_arrays import generator, labels, params_of, variables_of


def images_and_labels(num_examples, size=8, num_classes=5):
    images = generator().normal(size=(num_examples, size, size, 3))
    return {"image": images, "label": labels(num_examples, num_classes)}


class ResidualBlock(nn.Module):
    features: int
    norm: Callable[..., Any]
    strides: int = 1

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.features, (3, 3), self.strides, use_bias=False)(x)
        y = nn.relu(self.norm()(y))
        y = nn.Conv(self.features, (3, 3), use_bias=False)(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if x.shape != y.shape:
            x = nn.Conv(self.features, (1, 1), self.strides, use_bias=False, name="projection")(x)
            x = self.norm(name="norm_of_projection")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    norm: Callable[..., Any]
    num_classes: int = 5

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(4, (3, 3), use_bias=False)(x)
        x = nn.relu(self.norm()(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        x = ResidualBlock(4, self.norm)(x)
        x = ResidualBlock(8, self.norm, strides=2)(x)
        return nn.Dense(self.num_classes)(jnp.mean(x, axis=(1, 2)))


def weight_decay(params):
    return 0.5e-2 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params) if leaf.ndim > 1)


def resnet_with_group_norm(num_examples):
    model = ResNet(partial(nn.GroupNorm, num_groups=2))
    batch = images_and_labels(num_examples)

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses) + weight_decay(params)

    return loss, params_of(model, batch["image"]), batch, ()


def resnet_with_batch_norm(num_examples):
    """The running statistics come back as aux, together with a metric and the logits."""
    model = ResNet(partial(nn.BatchNorm, use_running_average=False, momentum=0.9))
    batch = images_and_labels(num_examples)

    def loss(params, batch, batch_stats):
        variables = {"params": params, "batch_stats": batch_stats}
        logits, updates = model.apply(variables, batch["image"], mutable=["batch_stats"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == batch["label"])
        aux = {"batch_stats": updates["batch_stats"], "accuracy": accuracy, "logits": logits}
        return jnp.mean(losses) + weight_decay(params), aux

    variables = variables_of(model, batch["image"])
    return loss, variables["params"], batch, (variables["batch_stats"],)


class EncoderBlock(nn.Module):
    num_heads: int = 2

    @nn.compact
    def __call__(self, x):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.num_heads)(y)
        y = nn.gelu(nn.Dense(2 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(y)


class ViT(nn.Module):
    width: int = 8
    num_classes: int = 5

    @nn.compact
    def __call__(self, image):
        x = nn.Conv(self.width, (4, 4), strides=(4, 4), padding="VALID", name="patches")(image)
        n, height, width, channels = x.shape
        x = jnp.reshape(x, [n, height * width, channels])
        cls = self.param("cls", nn.initializers.zeros_init(), (1, 1, channels))
        x = jnp.concatenate([jnp.tile(cls, [n, 1, 1]), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, x.shape[1], channels))
        for _ in range(2):
            x = EncoderBlock()(x)
        return nn.Dense(self.num_classes)(nn.LayerNorm()(x)[:, 0])


def vision_transformer(num_examples):
    """Smoothed labels, and aux with one leaf of each sort: a mean, rows, a count, something of the parameters alone."""
    model = ViT()
    batch = images_and_labels(num_examples)

    def loss(params, batch):
        logits = model.apply({"params": params}, batch["image"])
        targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], 5), 0.1)
        losses = optax.softmax_cross_entropy(logits, targets)
        right = jnp.argmax(logits, axis=-1) == batch["label"]
        aux = {
            "accuracy": jnp.mean(right),
            "losses": losses,
            "num_right": jnp.sum(right),
            "norm": optax.tree.norm(params),
        }
        return losses.mean(), aux

    return loss, params_of(model, batch["image"]), batch, ()


class UNet(nn.Module):
    """Two levels: strided convolutions down, a transposed convolution or a resize up, and skip connections."""

    out_features: int
    upsample: str

    @nn.compact
    def __call__(self, x, time=None):
        skips = []
        for features in (4, 8):
            x = nn.swish(nn.GroupNorm(2)(nn.Conv(features, (3, 3))(x)))
            if time is not None:
                x = x + nn.Dense(features)(nn.swish(time))[:, None, None, :]
            skips.append(x)
            x = nn.Conv(features, (3, 3), strides=(2, 2))(x)
        x = nn.swish(nn.Conv(8, (3, 3))(x))
        for features, skip in zip((8, 4), reversed(skips), strict=True):
            if self.upsample == "transpose":
                x = nn.ConvTranspose(features, (2, 2), strides=(2, 2))(x)
            else:
                n, height, width, channels = x.shape
                x = jax.image.resize(x, (n, 2 * height, 2 * width, channels), method=self.upsample)
            x = jnp.concatenate([x, skip], axis=-1)
            x = nn.swish(nn.GroupNorm(2)(nn.Conv(features, (3, 3))(x)))
        return nn.Conv(self.out_features, (1, 1))(x)


def timestep_embedding(timesteps, width):
    frequencies = jnp.exp(-jnp.log(10000.0) * jnp.arange(width // 2) / (width // 2))
    angles = timesteps.astype(frequencies.dtype)[:, None] * frequencies[None, :]
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def unet_diffusion(num_examples):
    """A denoising step: times and noise are drawn per example, the noise schedule is a table read at those times."""
    model = UNet(out_features=3, upsample="nearest")
    schedule = jnp.cumprod(1 - jnp.linspace(1e-4, 0.1, 20))
    batch = images_and_labels(num_examples)["image"]

    def loss(params, images, key):
        of_times, of_noise = jax.random.split(key)
        timesteps = jax.random.randint(of_times, (images.shape[0],), 0, 20)
        noise = jax.random.normal(of_noise, images.shape, images.dtype)
        kept = schedule[timesteps][:, None, None, None]
        noisy = jnp.sqrt(kept) * images + jnp.sqrt(1 - kept) * noise
        predicted = model.apply({"params": params}, noisy, timestep_embedding(timesteps, 8))
        return jnp.mean(jnp.square(predicted - noise))

    return loss, params_of(model, batch, np.zeros((num_examples, 8))), batch, (jax.random.key(2),)


def unet_segmentation(num_examples):
    """Cross entropy of the pixels plus a dice loss, which is a ratio of sums over the batch for each class."""
    model = UNet(out_features=3, upsample="transpose")
    images = images_and_labels(num_examples)["image"]
    batch = (images, labels(images.shape[:3], 3))

    def loss(params, batch):
        images, labels = batch
        logits = model.apply({"params": params}, images)
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        probabilities, targets = jax.nn.softmax(logits), jax.nn.one_hot(labels, 3)
        overlap = jnp.sum(probabilities * targets, axis=(0, 1, 2))
        size = jnp.sum(probabilities, axis=(0, 1, 2)) + jnp.sum(targets, axis=(0, 1, 2))
        dice = 1 - jnp.mean((2 * overlap + 1) / (size + 1))
        return cross_entropy + dice, {"dice": dice, "segmentation": jnp.argmax(logits, axis=-1)}

    return loss, params_of(model, images), batch, ()


class VariationalAutoencoder(nn.Module):
    num_pixels: int
    num_latents: int = 4

    @nn.compact
    def __call__(self, x, key):
        hidden = nn.relu(nn.Dense(10)(x))
        mean, log_variance = nn.Dense(self.num_latents)(hidden), nn.Dense(self.num_latents)(hidden)
        deviation = jnp.exp(0.5 * log_variance)
        latents = mean + deviation * jax.random.normal(key, log_variance.shape, log_variance.dtype)
        return nn.Dense(self.num_pixels)(nn.relu(nn.Dense(10)(latents))), mean, log_variance


@jax.vmap
def divergence_from_standard_normal(mean, log_variance):
    return -0.5 * jnp.sum(1 + log_variance - jnp.square(mean) - jnp.exp(log_variance))


@jax.vmap
def binary_cross_entropy(logits, labels):
    log_probabilities = nn.log_sigmoid(logits)
    return -jnp.sum(labels * log_probabilities + (1.0 - labels) * jnp.log(-jnp.expm1(log_probabilities)))


def variational_autoencoder(num_examples):
    model = VariationalAutoencoder(num_pixels=12)
    batch = generator().integers(0, 2, (num_examples, 12)).astype(float)

    def loss(params, batch, key):
        reconstruction, mean, log_variance = model.apply({"params": params}, batch, key)
        cross_entropy = binary_cross_entropy(reconstruction, batch).mean()
        divergence = divergence_from_standard_normal(mean, log_variance).mean()
        return cross_entropy + divergence, {"cross_entropy": cross_entropy, "divergence": divergence, "mean": mean}

    key = jax.random.key(2)
    return loss, params_of(model, batch, key), batch, (key,)
