"""How fast is a gradient of a batch that is larger than the device?

    python benchmarks/host_batch.py                        # CPU, 0.25 GiB of images, two minutes: no times
    python benchmarks/host_batch.py --accelerator          # one H200, 160 GiB of images
    python benchmarks/host_batch.py --accelerator --gib 16 --models vit conv

Images of 224 by 224 pixels as uint8, with labels, come from an iterator on the host. It hands out a few buffers that
were filled before, again and again, so that the host is not the limit. The model divides by 255 on the device:

  vit    patches of 16 by 16 pixels, 12 layers of 768 features, bfloat16 arithmetic: much compute for each byte
  conv   four convolutions with a stride of 2, up to 256 channels: little compute for each byte

Measured in one run, for the same chunks:

  compute    a loop over chunks that are on the device already: the gradient of each chunk in microbatches, added up
  transfer   `jax.device_put` of each chunk, waiting for it
  streamed   `ab.value_and_grad(loss, microbatch_size=...)` with an `ab.HostBatch`

The first two are measured on `--sample-gib` of images, and scaled to all. The ratio is the time of `streamed`, divided
by the longer of the other two: 1 is a perfect overlap. Peak memory is what the device reports after `streamed`.
Before that, the streamed gradient of a few chunks is compared with that of the loop, relative to its norm.
Programs are compiled before they are timed; the iterator of such a call stops after two chunks.
Expected: a ratio below 1.05, and a peak that does not depend on the number of images.
Found on a CPU: gradients differ by 8e-4 (vit) and 4e-4 (conv), the rounding of bfloat16.
Found on one H200, JAX 0.11.2: conv, 160 GiB: 16.0 s, a ratio of 0.668, peak 0.52 GiB for 0.08, 8 and 160 GiB. It is
below 1 since chunks are copied in slices at once, at 14 to 15 GiB/s instead of 6.7. Against compute alone (11.5 GiB/s),
which is the longer one then, it is 1.15. Copied in one piece, as before, the ratio was 1.156. vit, 8 GiB: a ratio of
1.031 (1.056 for 4 GiB), peak 9.49 GiB. All 160 GiB would take vit eight minutes, and were not run.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import record

import anybatch as ab

CLASSES = 1000
BUFFERS = 4


@dataclasses.dataclass(frozen=True)
class ViT:
    """A transformer over patches, without a class token."""

    layers: int
    width: int
    pixels: int
    patch: int = 16

    def init(self, key: jax.Array) -> Any:
        keys, d = jax.random.split(key, 7), self.width

        def normal(key: jax.Array, *shape: int) -> jax.Array:
            return jax.random.normal(key, shape) * shape[-2] ** -0.5

        return {
            "patch": normal(keys[0], 3 * self.patch**2, d),
            "position": 0.02 * jax.random.normal(keys[1], ((self.pixels // self.patch) ** 2, d)),
            "blocks": {
                "qkv": normal(keys[2], self.layers, d, 3 * d),
                "project": normal(keys[3], self.layers, d, d),
                "up": normal(keys[4], self.layers, d, 4 * d),
                "down": normal(keys[5], self.layers, 4 * d, d),
            },
            "out": normal(keys[6], d, CLASSES),
        }

    def logits(self, params: Any, images: jax.Array) -> jax.Array:
        number, side, patch = len(images), self.pixels // self.patch, self.patch
        patches = (images.astype(jnp.bfloat16) / 255).reshape(number, side, patch, side, patch, 3)
        patches = patches.transpose(0, 1, 3, 2, 4, 5).reshape(number, side**2, 3 * patch**2)
        hidden = patches @ params["patch"].astype(jnp.bfloat16) + params["position"].astype(jnp.bfloat16)
        heads = (number, side**2, self.width // 64, 64)

        def layer(hidden: jax.Array, block: Any) -> tuple[jax.Array, None]:
            block = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), block)
            q, k, v = (each.reshape(heads) for each in jnp.split(_norm(hidden) @ block["qkv"], 3, axis=-1))
            implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
            attended = jax.nn.dot_product_attention(q, k, v, implementation=implementation)
            hidden = hidden + attended.reshape(hidden.shape) @ block["project"]
            return hidden + jax.nn.gelu(_norm(hidden) @ block["up"]) @ block["down"], None

        hidden, _ = jax.lax.scan(layer, hidden, params["blocks"])
        return _norm(hidden).mean(axis=1).astype(jnp.float32) @ params["out"]


@dataclasses.dataclass(frozen=True)
class Convolutions:
    """Convolutions with a stride of 2."""

    channels: tuple[int, ...] = (32, 64, 128, 256)

    def init(self, key: jax.Array) -> Any:
        channels = (3, *self.channels)
        shapes = [(3, 3, *pair) for pair in itertools.pairwise(channels)]
        keys = jax.random.split(key, len(shapes) + 1)
        kernels = [jax.random.normal(k, s) * (2 / (9 * s[2])) ** 0.5 for k, s in zip(keys[1:], shapes, strict=True)]
        return {"kernels": kernels, "out": jax.random.normal(keys[0], (channels[-1], CLASSES)) * channels[-1] ** -0.5}

    def logits(self, params: Any, images: jax.Array) -> jax.Array:
        hidden = images.astype(jnp.bfloat16) / 255
        for kernel in params["kernels"]:
            kernel = kernel.astype(jnp.bfloat16)
            layout = ("NHWC", "HWIO", "NHWC")
            hidden = jax.lax.conv_general_dilated(hidden, kernel, (2, 2), "SAME", dimension_numbers=layout)
            hidden = jax.nn.relu(hidden)
        return hidden.mean(axis=(1, 2)).astype(jnp.float32) @ params["out"]


def _norm(hidden: jax.Array) -> jax.Array:
    wide = hidden.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)).astype(hidden.dtype)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The models, and their images in a microbatch and in a chunk."""

    models: dict[str, Any]
    microbatch: int
    chunk: int
    pixels: int
    gib: float
    sample_gib: float


# A chunk has as many microbatches as fit 32 MiB, as those of anybatch, so that its pieces need not be joined.
ON_ACCELERATOR = Settings({"vit": ViT(12, 768, 224), "conv": Convolutions()}, 64, 192, 224, 160.0, 8.0)
ON_CPU = Settings({"vit": ViT(2, 64, 64), "conv": Convolutions((8, 16))}, 256, 2560, 64, 0.25, 0.0625)


class Stopped(Exception):
    """An iterator has ended early, on purpose."""


class Measured:
    """A model, and a source of images."""

    def __init__(self, model: Any, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.params = jax.jit(model.init)(jax.random.key(0))
        random, pixels = np.random.default_rng(0), settings.pixels
        self.buffers = [
            {
                "image": random.integers(0, 256, (settings.chunk, pixels, pixels, 3), np.uint8),
                "label": random.integers(0, CLASSES, settings.chunk, np.int32),
            }
            for _ in range(BUFFERS)
        ]
        self.chunk_bytes = sum(leaf.nbytes for leaf in self.buffers[0].values())

    def loss(self, params: Any, batch: Any) -> jax.Array:
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(self.model.logits(params, batch["image"])), batch["label"][:, None], axis=1
        )
        return -jnp.mean(chosen)

    def pieces(self, chunks: int) -> Iterator[Any]:
        for number in range(chunks):
            yield self.buffers[number % BUFFERS]

    def batch(self, chunks: int) -> ab.HostBatch:
        return ab.HostBatch(lambda: self.pieces(chunks), chunks * self.settings.chunk)

    def streamed(self, chunks: int) -> Any:
        fun = ab.value_and_grad(self.loss, microbatch_size=self.settings.microbatch)
        return jax.block_until_ready(fun(self.params, self.batch(chunks)))

    def compile_streamed(self, chunks: int) -> None:
        """Compiles the program for a number of chunks, which it divides by, and computes two of them."""

        def stops() -> Iterator[Any]:
            yield from self.pieces(2)
            raise Stopped

        fun = ab.value_and_grad(self.loss, microbatch_size=self.settings.microbatch)
        with contextlib.suppress(Stopped):
            fun(self.params, ab.HostBatch(stops, chunks * self.settings.chunk))

    def by_hand(self) -> Callable[..., Any]:
        """A program that adds the gradient of one chunk, computed in microbatches."""
        size = self.settings.microbatch

        def add(total: Any, params: Any, chunk: Any) -> Any:
            microbatches = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), chunk)

            def step(total: Any, microbatch: Any) -> Any:
                new = jax.value_and_grad(self.loss)(params, microbatch)
                return jax.tree.map(jnp.add, total, new), None

            return jax.lax.scan(step, total, microbatches)[0]

        return jax.jit(add, donate_argnums=0)

    def loop(self, add: Callable[..., Any], chunks: Iterator[Any], number: int) -> Any:
        total = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), self.params))
        for chunk in chunks:
            total = add(total, self.params, chunk)
        microbatches = number * (self.settings.chunk // self.settings.microbatch)
        return jax.block_until_ready(jax.tree.map(lambda leaf: leaf / microbatches, total))


def distance(mine: Any, its: Any) -> float:
    """The distance of two gradients, relative to the norm of the second."""

    def square(tree: Any) -> jax.Array:
        return sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree))

    return float(jnp.sqrt(square(jax.tree.map(jnp.subtract, mine, its)) / square(its)))


def peak() -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def transfer(measured: Measured, chunks: int) -> None:
    for chunk in measured.pieces(chunks):
        jax.block_until_ready(jax.device_put(chunk))


def seconds_of(fun: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fun()
    return time.perf_counter() - start


def measure(name: str, settings: Settings, gib: float, sample_gib: float, timed: bool) -> Iterator[dict[str, Any]]:
    """The rows of a model, as they are found."""
    measured = Measured(settings.models[name], settings)
    few, sample, chunks = 3, *(math.ceil(each * 2**30 / measured.chunk_bytes) for each in (sample_gib, gib))
    sample = min(sample, chunks)

    def row(what: str, number: int, **found: Any) -> dict[str, Any]:
        images, read = number * settings.chunk, number * measured.chunk_bytes / 2**30
        empty = dict.fromkeys(("seconds", "gib_per_second", "ratio", "peak_bytes", "difference"))
        return {"model": name, "what": what, "images": images, "gib": read, **empty, **found}

    def with_time(what: str, number: int, seconds: float, **found: Any) -> dict[str, Any]:
        if not timed:
            return row(what, number, **found)
        rate = number * measured.chunk_bytes / 2**30 / seconds
        return row(what, number, seconds=seconds, gib_per_second=rate, **found)

    # The first calls compile.
    (value, grads), add = measured.streamed(few), measured.by_hand()
    expected = measured.loop(add, measured.pieces(few), few)
    value_difference = abs(float(value - expected[0]) / float(expected[0]))
    worst = max(distance(grads, expected[1]), value_difference)
    yield row("comparison", few, difference=worst, peak_bytes=peak())  # the peak of a device never falls
    del grads, expected
    alone = {}
    for what in ("transfer", "compute"):
        if what == "transfer":
            transfer(measured, 2)
            taken = seconds_of(lambda: transfer(measured, sample))
        else:
            on_device = [jax.device_put(chunk) for chunk in measured.buffers]
            repeated = (on_device[number % BUFFERS] for number in range(sample))
            taken = seconds_of(lambda repeated=repeated: measured.loop(add, repeated, sample))
            del on_device, repeated
        alone[what] = taken / sample
        yield with_time(what, sample, taken)
    for number in sorted({sample, chunks}):  # the sample first: a run that is stopped has its ratio
        measured.compile_streamed(number)
        taken = seconds_of(lambda number=number: measured.streamed(number))
        ratio = taken / number / max(alone.values()) if timed else None
        yield with_time("streamed", number, taken, ratio=ratio, peak_bytes=peak())


def show(row: dict[str, Any]) -> None:
    def number(value: float | None, format: str, unit: str = "") -> str:
        return "-" if value is None else f"{value:{format}}{unit}"

    memory = row["peak_bytes"]
    print(
        f"{row['model']:5} {row['what']:10} {row['images']:8} images {row['gib']:7.2f} GiB"
        f" {number(row['seconds'], '.2f', ' s'):>10} {number(row['gib_per_second'], '.2f', ' GiB/s'):>12}"
        f" ratio {number(row['ratio'], '.3f'):>6}"
        f" peak {number(None if memory is None else memory / 2**30, '.2f', ' GiB'):>10}"
        f" difference {number(row['difference'], '.1e'):>8}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", action="store_true", help="the models for a large GPU")
    parser.add_argument("--models", nargs="+", choices=("vit", "conv"), default=("vit", "conv"))
    parser.add_argument("--gib", type=float, help="of images; by default 160, on a CPU 0.25")
    parser.add_argument("--sample-gib", type=float, help="of images for compute and transfer alone; by default 8")
    record.add_option(parser)
    options = parser.parse_args()
    results = record.Results(options.save)
    settings = ON_ACCELERATOR if options.accelerator else ON_CPU
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    gib, sample = options.gib or settings.gib, options.sample_gib or settings.sample_gib
    for name in options.models:
        for row in measure(name, settings, gib, sample, timed=jax.default_backend() != "cpu"):
            results.add(**row)
            show(row)


if __name__ == "__main__":
    main()
