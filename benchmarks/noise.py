"""What does the noise scale of a gradient cost, compared with the gradient alone?

    python benchmarks/noise.py                                # CPU, about a minute; look at the memory, not the times
    python benchmarks/noise.py gpt2:8 gpt2-scanned:8          # one 80 GiB GPU, about two minutes

Compiles `value_and_grad` and `noise_scale` for the same masked loss, runs them in turn, and prints medians and ratios.
Expected: time within 1.05; the same temporaries if activations are large, otherwise up to one gradient more.
"""

import argparse
import statistics
import time
from typing import Any

import jax
from models import MODELS

import anybatch as ab
from anybatch.jaxprs import versions

ON_CPU = ["mlp:128", "gpt-tiny:8", "gpt-tiny-scanned:8"]


def measure(model: Any, examples: int, size: int, repeats: int) -> None:
    """Prints the figures of one model."""
    params = jax.jit(model.init)(jax.random.key(0))
    batch = model.batch(jax.random.key(1), examples)
    loss = getattr(model, "masked_loss", model.loss)
    gradient = sum(leaf.size * 4 for leaf in jax.tree.leaves(params))
    contestants = {"value_and_grad": ab.value_and_grad, "noise_scale": ab.noise_scale}
    compiled = {
        name: jax.jit(make(loss, microbatch_size=size)).lower(params, batch).compile()
        for name, make in contestants.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    results = {name: jax.block_until_ready(run(params, batch)) for name, run in compiled.items()}
    print(f"  {results['noise_scale'][2]}")
    del results
    for _ in range(repeats):
        for name, run in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(run(params, batch))
            seconds[name].append(time.perf_counter() - start)
    first = next(iter(contestants))
    for name, run in compiled.items():
        ratio = statistics.median(mine / its for mine, its in zip(seconds[name], seconds[first], strict=True))
        more = (versions.temporaries(run) - versions.temporaries(compiled[first])) / gradient
        print(
            f"  {name:14} {statistics.median(seconds[name]) * 1e3:8.1f} ms {ratio:7.3f}"
            f" {versions.temporaries(run) / 2**20:10.1f} MiB {more:+7.2f} gradients",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="model:microbatch size, models: " + ", ".join(MODELS))
    parser.add_argument("--repeats", type=int, default=10)
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    for case in options.cases or ON_CPU:
        name, size = case.split(":")
        model, examples = MODELS[name]
        print(f"\n{name}, {examples} examples, microbatch {size}")
        measure(model, examples, int(size), options.repeats)


if __name__ == "__main__":
    main()
