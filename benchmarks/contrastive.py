"""How much memory does a contrastive batch take: in full, by GradCache written by hand, and with anybatch?

    python benchmarks/contrastive.py                                # CPU, about a minute: memory only
    python benchmarks/contrastive.py --accelerator                  # one 80 GiB GPU, about two minutes
    python benchmarks/contrastive.py --accelerator --sizes 128 2048

Two towers and the loss of CLIP, which compares every image with every text. It is computed as a full batch, and in
two passes over microbatches: the embeddings of all microbatches, the gradient of the loss with respect to them, then
the towers again, microbatch after microbatch, with these gradients. GradCache is this method (Gao et al., 2021). By
hand it is two scans around the part of the loss that compares embeddings, so the loss is written as two functions.
anybatch takes the loss as it is. Expected: with two passes, temporaries grow only by the embeddings and their products;
those of the towers stay at the size of one microbatch. The full batch runs only with the fewest pairs, for gradients to
compare with; elsewhere anybatch is compared with GradCache. blocks.py has more pairs, compared in blocks.
"""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import record

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
        return self.pairs(images, texts, params["temperature"])

    def pairs(self, images: jax.Array, texts: jax.Array, temperature: jax.Array) -> jax.Array:
        """The loss from all embeddings."""
        logits = images @ texts.T * jnp.exp(temperature)
        right = jnp.diagonal(logits)
        rows, columns = jax.nn.logsumexp(logits, axis=1) - right, jax.nn.logsumexp(logits, axis=0) - right
        return (jnp.mean(rows) + jnp.mean(columns)) / 2


def _norm(hidden: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)).astype(hidden.dtype)


def grad_cache(model: TwoTowers, size: int) -> Callable[..., Any]:
    """GradCache by hand: two scans over microbatches, and the loss from all embeddings between them."""

    def embed(towers: Any, microbatch: Any) -> Any:
        return model.tower(towers["images"], microbatch[0]), model.tower(towers["texts"], microbatch[1])

    def value_and_grad(params: Any, batch: Any) -> Any:
        towers = {name: params[name] for name in ("images", "texts")}
        microbatches = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), batch)
        embedded = jax.lax.map(lambda microbatch: embed(towers, microbatch), microbatches)
        images, texts = (leaf.reshape(-1, leaf.shape[-1]) for leaf in embedded)
        value, (of_images, of_texts, of_temperature) = jax.value_and_grad(model.pairs, argnums=(0, 1, 2))(
            images, texts, params["temperature"]
        )
        cotangents = tuple(leaf.reshape(-1, size, leaf.shape[-1]) for leaf in (of_images, of_texts))

        def step(total: Any, part: Any) -> Any:
            microbatch, cotangent = part
            (grads,) = jax.vjp(lambda towers: embed(towers, microbatch), towers)[1](cotangent)
            return jax.tree.map(jnp.add, total, grads), None

        zero = jax.tree.map(jnp.zeros_like, towers)
        grads, _ = jax.lax.scan(step, zero, (microbatches, cotangents))
        return value, {**grads, "temperature": of_temperature}

    return value_and_grad


@jax.jit
def distance(mine: Any, its: Any) -> jax.Array:
    """The distance of two gradients, relative to the norm of the second."""

    def square(tree: Any) -> jax.Array:
        return jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)]))

    return jnp.sqrt(square(jax.tree.map(jnp.subtract, mine, its)) / square(its))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", action="store_true", help="the model for a large GPU")
    parser.add_argument("--sizes", nargs="+", type=int, help="numbers of pairs, the smallest first")
    parser.add_argument("--rounds", type=int, default=3)
    record.add_option(parser)
    options = parser.parse_args()
    results = record.Results(options.save)
    timed = jax.default_backend() != "cpu"
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    model = TwoTowers(12, 768, 196) if options.accelerator else TwoTowers(2, 128, 16)
    sizes = options.sizes or ((128, 512, 2048) if options.accelerator else (32, 128, 512))
    size = 32 if options.accelerator else 8
    params = jax.jit(model.init)(jax.random.key(0))
    print(ab.read(model.loss, params, jax.eval_shape(lambda: model.batch(jax.random.key(1), sizes[-1]))))
    ways = {
        "full batch": jax.value_and_grad(model.loss),
        "GradCache by hand": grad_cache(model, size),
        "anybatch": ab.value_and_grad(model.loss, microbatch_size=size),
    }
    print(f"\n{'pairs':>6} {'':18} {'temporaries':>12} {'beyond embeddings':>18} {'time':>10} {'difference':>11}")
    for examples in sizes:
        batch = model.batch(jax.random.key(1), examples)
        # Embeddings and their products, which every way has.
        head = 2 * examples * model.embedding * 4 + examples**2 * 4
        programs, seconds, differences, compilations = {}, {}, {}, {}
        reference = None
        for way, fun in ways.items():
            start = time.perf_counter()
            programs[way] = jax.jit(fun).lower(params, batch).compile()
            compilations[way] = time.perf_counter() - start
            if way != "full batch" or examples == sizes[0]:
                seconds[way] = []
                _, grads = programs[way](params, batch)
                reference = grads if reference is None else reference
                differences[way] = float(distance(grads, reference))
                del grads
        for _ in range(options.rounds if timed else 0):  # in turns
            for way, taken in seconds.items():
                start = time.perf_counter()
                jax.block_until_ready(programs[way](params, batch))
                taken.append(time.perf_counter() - start)
        for way, program in programs.items():
            temporaries, ran = versions.temporaries(program), bool(seconds.get(way))
            milliseconds = 1e3 * statistics.median(seconds[way]) if ran else None
            apart = f"{differences[way]:.1e}" if way in differences else "not run"
            print(
                f"{examples:6} {way:18} {temporaries / 2**20:8.0f} MiB {(temporaries - head) / 2**20:14.0f} MiB"
                f" {f'{milliseconds:.0f} ms' if ran else '-':>10} {apart:>11}",
                flush=True,
            )
            results.add(
                examples=examples,
                way=way,
                microbatch_size=examples if way == "full batch" else size,
                milliseconds=milliseconds,
                temporaries_bytes=temporaries,
                compile_seconds=compilations[way] if timed else None,
                difference=differences.get(way),
                note="" if way in differences else "compiled, not run",
            )
        del programs, program, reference
        gc.collect()


if __name__ == "__main__":
    main()
