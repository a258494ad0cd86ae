"""How do the time and memory of a loss that selects rows of its batch compare with a hand-written loop?

    python benchmarks/selections.py                          # CPU, about a minute; look at the memory, not the times
    python benchmarks/selections.py gpt2:64:8 --repeats 10   # one 80 GiB GPU, about three minutes

The losses select every second sequence of the batch, or the first quarter and the rest as two terms. In the
hand-written loop the rows are selected before the loss is called, and each part has its own scan. Expected: anybatch
within 1.02 of its time and at most its temporaries. Found on an H200 with JAX 0.11.2: 0.99 of the time, 0.99 and
1.001 of the temporaries.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
from models import MODELS
from overhead import by_hand, compare, report

import anybatch as ab


def rows(batch: Any, which: slice) -> Any:
    return jax.tree.map(lambda leaf: leaf[which], batch)


def every_second(loss: Callable[..., Any], examples: int, size: int) -> dict[str, Callable[..., Any]]:
    which = slice(None, None, 2)
    loop = by_hand(loss, size)
    return {
        "by hand": lambda params, batch: loop(params, rows(batch, which)),
        "anybatch": ab.value_and_grad(lambda params, batch: loss(params, rows(batch, which)), microbatch_size=size),
    }


def quarter_and_rest(loss: Callable[..., Any], examples: int, size: int) -> dict[str, Callable[..., Any]]:
    parts = slice(examples // 4), slice(examples // 4, None)
    loop = by_hand(loss, size)

    def added(params: Any, batch: Any) -> Any:
        one, other = (loop(params, rows(batch, which)) for which in parts)
        return jax.tree.map(lambda left, right: left + 0.5 * right, one, other)

    def both(params: Any, batch: Any) -> Any:
        return loss(params, rows(batch, parts[0])) + 0.5 * loss(params, rows(batch, parts[1]))

    return {"by hand": added, "anybatch": ab.value_and_grad(both, microbatch_size=size)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="model:examples:microbatch size, models: " + ", ".join(MODELS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    for case in options.cases or ["mlp:1024:32", "gpt-tiny:64:4"]:
        name, examples, size = case.split(":")
        model, _ = MODELS[name]
        params = jax.jit(model.init)(jax.random.key(0))
        batch = model.batch(jax.random.key(1), int(examples))
        for selects in (every_second, quarter_and_rest):
            contestants = selects(model.loss, int(examples), int(size))
            report(f"{case} {selects.__name__}", compare(contestants, params, batch, options.repeats))


if __name__ == "__main__":
    main()
