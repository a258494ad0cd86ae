"""The models that the benchmarks measure, in plain JAX: an MLP, and GPTs with layers unrolled or scanned."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

# The implementation of attention; None for cuDNN's if JAX runs on a GPU.
ATTENTION: str | None = None


@dataclasses.dataclass(frozen=True)
class GPT:
    """A GPT with tied embeddings: float32 or bfloat16 parameters, bfloat16 arithmetic, mean loss over tokens."""

    layers: int
    width: int
    heads: int
    context: int = 1024
    vocabulary: int = 50304
    scan_layers: bool = False
    param_dtype: Any = jnp.float32

    def init(self, key: jax.Array) -> Any:
        d, keys = self.width, jax.random.split(key, 6)

        def normal(key: jax.Array, *shape: int) -> jax.Array:
            return (0.02 * jax.random.normal(key, shape, jnp.float32)).astype(self.param_dtype)

        def ones(*shape: int) -> jax.Array:
            return jnp.ones(shape, self.param_dtype)

        stacked = {
            "norm1": ones(self.layers, d),
            "qkv": normal(keys[0], self.layers, d, 3 * d),
            "project": normal(keys[1], self.layers, d, d),
            "norm2": ones(self.layers, d),
            "up": normal(keys[2], self.layers, d, 4 * d),
            "down": normal(keys[3], self.layers, 4 * d, d),
        }
        unrolled = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(self.layers)]
        return {
            "embedding": normal(keys[4], self.vocabulary, d),
            "position": normal(keys[5], self.context, d),
            "blocks": stacked if self.scan_layers else unrolled,
            "norm": ones(d),
        }

    def batch(self, key: jax.Array, examples: int) -> Any:
        tokens = jax.random.randint(key, (examples, self.context + 1), 0, self.vocabulary)
        # Documents have different lengths: the mask is 0 after the end.
        lengths = jax.random.randint(jax.random.fold_in(key, 1), (examples, 1), self.context // 2, self.context + 1)
        mask = (jnp.arange(self.context) < lengths).astype(jnp.float32)
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}

    def loss(self, params: Any, batch: Any) -> jax.Array:
        """The mean over all tokens."""
        return jnp.mean(self.token_losses(params, batch))

    def masked_loss(self, params: Any, batch: Any) -> jax.Array:
        """The mean over unmasked tokens: a ratio of sums over the batch."""
        return jnp.sum(self.token_losses(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])

    def weighted_loss(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """The same for a declared reduction: the sum, and the weight to divide it by."""
        return jnp.sum(self.token_losses(params, batch) * batch["mask"]), jnp.sum(batch["mask"])

    def token_losses(self, params: Any, batch: Any) -> jax.Array:
        """The cross entropy of every token."""
        logits = self.logits(params, batch)
        target = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - target

    def logits(self, params: Any, batch: Any) -> jax.Array:
        """The scores of all tokens of the vocabulary, for every token of the batch."""
        embedding = params["embedding"].astype(jnp.bfloat16)
        hidden = embedding[batch["inputs"]] + params["position"].astype(jnp.bfloat16)
        if self.scan_layers:
            hidden, _ = jax.lax.scan(lambda h, block: (self._block(block, h), None), hidden, params["blocks"])
        else:
            for block in params["blocks"]:
                hidden = self._block(block, hidden)
        return (norm(hidden, params["norm"]) @ embedding.T).astype(jnp.float32)

    def _block(self, block: Any, hidden: jax.Array) -> jax.Array:
        block = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), block)
        hidden = hidden + attention(norm(hidden, block["norm1"]), block, self.heads)
        return hidden + jax.nn.gelu(norm(hidden, block["norm2"]) @ block["up"]) @ block["down"]


def attention(hidden: jax.Array, block: Any, heads: int) -> jax.Array:
    """Causal attention with the parameters "qkv" and "project"."""
    shape = (*hidden.shape[:-1], heads, hidden.shape[-1] // heads)
    q, k, v = (x.reshape(shape) for x in jnp.split(hidden @ block["qkv"].astype(hidden.dtype), 3, axis=-1))
    implementation = ATTENTION or ("cudnn" if jax.default_backend() == "gpu" else "xla")
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return attended.reshape(hidden.shape) @ block["project"].astype(hidden.dtype)


def norm(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    wide = wide - wide.mean(axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return wide.astype(hidden.dtype) * scale.astype(hidden.dtype)


@dataclasses.dataclass(frozen=True)
class MLP:
    """A float32 MLP with a mean loss over the examples."""

    widths: tuple[int, ...] = (512, 1024, 1024, 10)

    def init(self, key: jax.Array) -> Any:
        shapes = list(zip(self.widths[:-1], self.widths[1:], strict=True))
        keys = jax.random.split(key, len(shapes))
        return [jax.random.normal(k, shape) * shape[0] ** -0.5 for k, shape in zip(keys, shapes, strict=True)]

    def batch(self, key: jax.Array, examples: int) -> Any:
        return {
            "x": jax.random.normal(key, (examples, self.widths[0])),
            "y": jax.random.randint(key, (examples,), 0, self.widths[-1]),
        }

    def loss(self, params: Any, batch: Any) -> jax.Array:
        hidden = batch["x"]
        for weights in params[:-1]:
            hidden = jnp.tanh(hidden @ weights)
        log_probabilities = jax.nn.log_softmax(hidden @ params[-1])
        return -jnp.mean(jnp.take_along_axis(log_probabilities, batch["y"][:, None], axis=1))


# name -> (model, examples in the batch)
MODELS: dict[str, tuple[Any, int]] = {
    "mlp": (MLP(), 2048),
    "gpt-tiny": (GPT(layers=4, width=128, heads=4, context=64, vocabulary=512), 64),
    "gpt-tiny-scanned": (GPT(layers=4, width=128, heads=4, context=64, vocabulary=512, scan_layers=True), 64),
    "gpt2": (GPT(layers=12, width=768, heads=12), 64),
    "gpt2-scanned": (GPT(layers=12, width=768, heads=12, scan_layers=True), 64),
    "gpt2-bf16": (GPT(layers=12, width=768, heads=12, param_dtype=jnp.bfloat16), 64),
    "gpt-1.3b": (GPT(layers=24, width=2048, heads=16), 16),
    "gpt-1.3b-scanned": (GPT(layers=24, width=2048, heads=16, scan_layers=True), 16),
    "gpt-1.3b-scanned-bf16": (
        GPT(layers=24, width=2048, heads=16, scan_layers=True, param_dtype=jnp.bfloat16),
        16,
    ),
}
