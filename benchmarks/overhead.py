"""How do the time and memory of anybatch compare with the best hand-written loop?

    python benchmarks/overhead.py                            # CPU, about a minute; look at the memory, not the times
    python benchmarks/overhead.py --accelerator              # one 80 GiB GPU, about ten minutes
    python benchmarks/overhead.py gpt2:8 gpt-1.3b-scanned:1  # model:microbatch size

`accumulation.py` has more ways and sizes; this one also has scanned layers and bfloat16 parameters. It compiles each
contestant, runs them in turn, and prints medians and ratios to the hand-written `lax.scan`.
Expected: anybatch within 1.02 of its time and at most its temporaries; fewer temporaries with layers in `lax.scan`.
"""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import record
from models import MODELS

import anybatch as ab
from anybatch.jaxprs import versions

ON_CPU = ["mlp:128", "mlp:16", "gpt-tiny:8", "gpt-tiny-scanned:8"]
ON_ACCELERATOR = [
    *("gpt2:16", "gpt2:8", "gpt2:4", "gpt2:1", "gpt2-scanned:8"),
    *("gpt-1.3b:4", "gpt-1.3b:1", "gpt-1.3b-scanned:4", "gpt-1.3b-scanned:1"),
    *("gpt2-bf16:8", "gpt-1.3b-scanned-bf16:1"),
]


def by_hand(loss: Callable[..., Any], size: int) -> Callable[..., Any]:
    """A loop without a library: equal microbatches, a scan, a float32 sum, one division at the end."""

    def value_and_grad(params: Any, batch: Any) -> Any:
        examples = jax.tree.leaves(batch)[0].shape[0]
        count = examples // size
        microbatches = jax.tree.map(lambda leaf: leaf.reshape(count, size, *leaf.shape[1:]), batch)

        def step(carry: Any, microbatch: Any) -> Any:
            new = jax.value_and_grad(loss)(params, microbatch)
            return jax.tree.map(lambda total, leaf: total + leaf.astype(total.dtype), carry, new), None

        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (jnp.zeros(()), params))
        (value, grads), _ = jax.lax.scan(step, zero, microbatches)
        return value / count, jax.tree.map(lambda leaf, like: (leaf / count).astype(like.dtype), grads, params)

    return value_and_grad


def by_optax(loss: Callable[..., Any], size: int) -> Callable[..., Any]:
    """`optax.microbatching.microbatch` with its accumulator for means."""
    from optax import microbatching

    mean = microbatching.AccumulationType.MEAN
    return microbatching.microbatch(jax.value_and_grad(loss), argnums=1, microbatch_size=size, accumulator=mean)


def by_anybatch(loss: Callable[..., Any], size: int) -> Callable[..., Any]:
    """`anybatch.value_and_grad` with a declared reduction."""
    return ab.value_and_grad(loss, microbatch_size=size, reduction="mean")


CONTESTANTS = {"by hand": by_hand, "optax": by_optax, "anybatch": by_anybatch}


@dataclasses.dataclass
class Result:
    """The figures of one contestant."""

    compiled: Any
    temporaries: int
    compile_seconds: float
    difference: float = 0.0
    seconds: list[float] = dataclasses.field(default_factory=list)


def measure(model: Any, examples: int, size: int, repeats: int) -> dict[str, Result]:
    """Measures the contestants that are installed."""
    contestants = {}
    for name, make in CONTESTANTS.items():
        try:
            contestants[name] = make(model.loss, size)
        except ImportError:
            continue
    params = jax.jit(model.init)(jax.random.key(0))
    return compare(contestants, params, model.batch(jax.random.key(1), examples), repeats)


def compare(contestants: dict[str, Callable[..., Any]], params: Any, batch: Any, repeats: int) -> dict[str, Result]:
    """Compiles all contestants, compares their gradients with the first one's, and runs them in turn.

    In turn, so that a change in the machine's speed affects all of them.
    """
    results: dict[str, Result] = {}
    reference = None
    for name, fun in contestants.items():
        start = time.perf_counter()
        compiled = jax.jit(fun).lower(params, batch).compile()
        results[name] = Result(compiled, versions.temporaries(compiled), time.perf_counter() - start)
        _, gradient = jax.block_until_ready(compiled(params, batch))
        reference = gradient if reference is None else reference
        results[name].difference = max(
            float(jnp.abs(x - y).max() / jnp.abs(y).max())
            for x, y in zip(*map(jax.tree.leaves, (gradient, reference)), strict=True)
        )
        del gradient
    for _ in range(repeats):
        for result in results.values():
            start = time.perf_counter()
            jax.block_until_ready(result.compiled(params, batch))
            result.seconds.append(time.perf_counter() - start)
    return results


def report(case: str, results: dict[str, Result]) -> None:
    """Prints a table with ratios to the hand-written loop."""
    hand = results["by hand"]
    # The median of the ratios of runs in the same round: steadier than a ratio of medians.
    print(f"\n{case}")
    print(f"  {'':14} {'time':>10} {'ratio':>7} {'temporaries':>14} {'ratio':>7} {'compile':>8} {'difference':>11}")
    for name, result in results.items():
        ratio = statistics.median(mine / its for mine, its in zip(result.seconds, hand.seconds, strict=True))
        print(
            f"  {name:14} {statistics.median(result.seconds) * 1e3:7.1f} ms {ratio:7.3f}"
            f" {result.temporaries / 2**20:10.1f} MiB {result.temporaries / hand.temporaries:7.3f}"
            f" {result.compile_seconds:6.1f} s {result.difference:11.1e}",
            flush=True,
        )


def rows_of(model: str, examples: int, size: int, results: dict[str, Result]) -> Iterator[dict[str, Any]]:
    """The rows that are saved: one for each contestant."""
    hand = results["by hand"]
    for name, result in results.items():
        yield {
            "model": model,
            "examples": examples,
            "microbatch_size": size,
            "way": name,
            "milliseconds": 1e3 * statistics.median(result.seconds),
            "time_ratio": statistics.median(x / y for x, y in zip(result.seconds, hand.seconds, strict=True)),
            "temporaries_bytes": result.temporaries,
            "memory_ratio": result.temporaries / hand.temporaries,
            "compile_seconds": result.compile_seconds,
            "difference": result.difference,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="model:microbatch size, models: " + ", ".join(MODELS))
    parser.add_argument("--accelerator", action="store_true", help="the cases for a large GPU")
    parser.add_argument("--repeats", type=int, default=10)
    record.add_option(parser)
    options = parser.parse_args()
    saved = record.Results(options.save, packages=("optax",))
    device = jax.devices()[0]
    print(f"{device.device_kind}, JAX {jax.__version__}")
    for case in options.cases or (ON_ACCELERATOR if options.accelerator else ON_CPU):
        name, size = case.split(":")
        model, examples = MODELS[name]
        results = measure(model, examples, int(size), options.repeats)
        report(f"{name}, {examples} examples, microbatch {size}", results)
        for row in rows_of(name, examples, int(size), results):
            saved.add(**row)
        del results
        gc.collect()


if __name__ == "__main__":
    main()
