"""How much memory does a contrastive batch take, in two passes and as a full batch?

    python benchmarks/contrastive.py                  # CPU, about a minute; look at the memory, not the times
    python benchmarks/contrastive.py --accelerator    # one 80 GiB GPU, about three minutes

Two towers and the loss of CLIP, which compares every image with every text. It is computed as a full batch, and in
two passes over microbatches. Expected: with two passes, temporaries grow only by the embeddings and their products;
those of the towers stay at the size of one microbatch.
"""

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import anybatch as ab
from anybatch.jaxprs import versions


@dataclasses.dataclass(frozen=True)
class TwoTowers:
    """Two transformers of the same shape. Their inputs are embedded patches and tokens."""

    layers: int
    width: int
    tokens: int
    embedding: int = 512

    def init(self, key: jax.Array) -> Any:
        def tower(key: jax.Array) -> Any:
            keys = jax.random.split(key, 5)
            shapes = {
                "qkv": (self.layers, self.width, 3 * self.width),
                "project": (self.layers, self.width, self.width),
                "up": (self.layers, self.width, 4 * self.width),
                "down": (self.layers, 4 * self.width, self.width),
                "out": (self.width, self.embedding),
            }
            return {
                name: jax.random.normal(key, shape) * shape[-2] ** -0.5
                for key, (name, shape) in zip(keys, shapes.items(), strict=True)
            }

        images, texts = map(tower, jax.random.split(key))
        return {"images": images, "texts": texts, "temperature": jnp.zeros(())}

    def batch(self, key: jax.Array, examples: int) -> Any:
        shape = (examples, self.tokens, self.width)
        return [jax.random.normal(each, shape, jnp.bfloat16) for each in jax.random.split(key)]

    def tower(self, params: Any, tokens: jax.Array) -> jax.Array:
        heads = (*tokens.shape[:2], self.width // 64, 64)

        def layer(hidden: jax.Array, block: Any) -> tuple[jax.Array, None]:
            block = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), block)
            q, k, v = (x.reshape(heads) for x in jnp.split(_norm(hidden) @ block["qkv"], 3, axis=-1))
            implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
            attended = jax.nn.dot_product_attention(q, k, v, implementation=implementation)
            hidden = hidden + attended.reshape(hidden.shape) @ block["project"]
            return hidden + jax.nn.gelu(_norm(hidden) @ block["up"]) @ block["down"], None

        blocks = {name: leaf for name, leaf in params.items() if name != "out"}
        hidden, _ = jax.lax.scan(layer, tokens, blocks)
        pooled = hidden.mean(axis=1).astype(jnp.float32) @ params["out"]
        return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)

    def loss(self, params: Any, batch: Any) -> jax.Array:
        images, texts = self.tower(params["images"], batch[0]), self.tower(params["texts"], batch[1])
        logits = images @ texts.T * jnp.exp(params["temperature"])
        right = jnp.diagonal(logits)
        rows, columns = jax.nn.logsumexp(logits, axis=1) - right, jax.nn.logsumexp(logits, axis=0) - right
        return (jnp.mean(rows) + jnp.mean(columns)) / 2


def _norm(hidden: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)).astype(hidden.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", action="store_true", help="the size for a large GPU")
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    model = TwoTowers(12, 768, 196) if options.accelerator else TwoTowers(2, 128, 16)
    sizes = (128, 256, 512, 2048) if options.accelerator else (32, 64, 128, 512)
    size = sizes[0] // 4
    params = jax.jit(model.init)(jax.random.key(0))
    print(ab.read(model.loss, params, jax.eval_shape(lambda: model.batch(jax.random.key(1), sizes[-1]))))
    names = ("examples", "full batch", "two passes", "beyond embeddings", "time", "difference")
    print("\n" + " ".join(f"{name:>{width}}" for name, width in zip(names, (8, 12, 12, 18, 10, 11), strict=True)))
    for examples in sizes:
        batch = model.batch(jax.random.key(1), examples)
        program = jax.jit(jax.value_and_grad(model.loss)).lower(params, batch).compile()
        full, difference = versions.temporaries(program), "not run"
        compiled = jax.jit(ab.value_and_grad(model.loss, microbatch_size=size)).lower(params, batch).compile()
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            _, grads = jax.block_until_ready(compiled(params, batch))
            seconds.append(time.perf_counter() - start)
        if examples == sizes[0]:
            _, expected = program(params, batch)
            worst = max(
                float(jnp.abs(x - y).max() / jnp.abs(y).max())
                for x, y in zip(*map(jax.tree.leaves, (grads, expected)), strict=True)
            )
            difference = f"{worst:.1e}"
        taken = versions.temporaries(compiled)
        head = 2 * examples * model.embedding * 4 + examples**2 * 4
        print(
            f"{examples:8} {full / 2**20:8.0f} MiB {taken / 2**20:8.0f} MiB {(taken - head) / 2**20:14.0f} MiB"
            f" {statistics.median(seconds) * 1e3:7.0f} ms {difference:>11}",
            flush=True,
        )


if __name__ == "__main__":
    main()
