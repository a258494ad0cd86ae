"""What does it cost in every step that the reduction is read from the loss, and not declared?

    python benchmarks/reading.py                                # CPU, about a minute; look at the memory, not the times
    python benchmarks/reading.py --accelerator                  # one 80 GiB GPU, about five minutes
    python benchmarks/reading.py gpt2:8 gpt2-scanned:8          # model:microbatch size

For a mean over all tokens and for a masked mean, compares the loop by hand, the declared reduction, and the reduction
read from the loss. Expected: read within 1.02 of the time of declared, with no more memory. What reading costs once,
before the first step, is in `reading_cost.py`.
"""

import argparse
import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import record
from models import MODELS
from overhead import by_hand, compare, report, rows_of

import anybatch as ab

ON_CPU = ["gpt-tiny:8", "gpt-tiny-scanned:8"]
ON_ACCELERATOR = ["gpt2:8", "gpt2-scanned:8", "gpt-1.3b:1", "gpt-1.3b-scanned:1"]


def by_hand_weighted(loss: Callable[..., Any], size: int) -> Callable[..., Any]:
    """A masked mean by hand: sums of totals and of weights, divided once at the end."""

    def value_and_grad(params: Any, batch: Any) -> Any:
        count = jax.tree.leaves(batch)[0].shape[0] // size
        microbatches = jax.tree.map(lambda leaf: leaf.reshape(count, size, *leaf.shape[1:]), batch)

        def step(carry: Any, microbatch: Any) -> Any:
            (total, weight), grads = jax.value_and_grad(loss, has_aux=True)(params, microbatch)
            return jax.tree.map(jnp.add, carry, (total, weight, grads)), None

        zero = (jnp.zeros(()), jnp.zeros(()), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params))
        (total, weight, grads), _ = jax.lax.scan(step, zero, microbatches)
        return total / weight, jax.tree.map(lambda leaf: leaf / weight, grads)

    return value_and_grad


def contestants(model: Any, size: int) -> dict[str, dict[str, Callable[..., Any]]]:
    """For each loss, three functions that compute its gradient; the first is the reference."""
    given = {"microbatch_size": size}
    return {
        "mean": {
            "by hand": by_hand(model.loss, size),
            "declared": ab.value_and_grad(model.loss, reduction="mean", **given),
            "read": ab.value_and_grad(model.loss, **given),
        },
        "masked mean": {
            "by hand": by_hand_weighted(model.weighted_loss, size),
            "declared": ab.value_and_grad(model.weighted_loss, reduction="weighted", **given),
            "read": ab.value_and_grad(model.masked_loss, **given),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="model:microbatch size, models: " + ", ".join(MODELS))
    parser.add_argument("--accelerator", action="store_true", help="the cases for a large GPU")
    parser.add_argument("--repeats", type=int, default=10)
    record.add_option(parser)
    options = parser.parse_args()
    saved = record.Results(options.save)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    for case in options.cases or (ON_ACCELERATOR if options.accelerator else ON_CPU):
        name, size = case.split(":")
        model, examples = MODELS[name]
        params, batch = jax.jit(model.init)(jax.random.key(0)), model.batch(jax.random.key(1), examples)
        print(f"\n{name}: {ab.read(model.masked_loss, params, batch)}")
        for loss, functions in contestants(model, int(size)).items():
            results = compare(functions, params, batch, options.repeats)
            report(f"{name}, {loss}, {examples} examples, microbatch {size}", results)
            for row in rows_of(name, examples, int(size), results):
                saved.add(**row, loss=loss)
            del results
            gc.collect()


if __name__ == "__main__":
    main()
