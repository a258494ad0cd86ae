"""What do evaluation and a Gauss-Newton product cost in microbatches, against a loop written by hand?

    python benchmarks/evaluation.py                                 # CPU, about a minute: memory only
    python benchmarks/evaluation.py --accelerator                   # one H200
    python benchmarks/evaluation.py --accelerator --tasks evaluation --examples 8 32

GPT-2 with 124 million parameters and sequences of 1,024 tokens: float32 parameters, bfloat16 arithmetic, unrolled
layers. On a CPU, a GPT of 4 layers with 64 tokens.

  evaluation     loss, perplexity and accuracy over the unmasked tokens
  Gauss-Newton   the product J.T @ H @ J @ vector for the mean over all tokens

  full batch         the function as it is; where it does not fit, it is compiled and not run
  by hand            a `lax.scan` over equal microbatches. Evaluation: sums of losses, of correct tokens and of the
                     mask, divided at the end. Gauss-Newton: the products of the microbatches, averaged
  anybatch           `ab.map_batch` and `ab.ggn_product` with the same microbatch size
  anybatch, planned  the size that `ab.plan(memory=...)` chooses, without timing candidates

Memory is what XLA reports as temporaries of the compiled program. The ways run in turns; ratios are medians of the
ratios to the hand-written loop in the same round. On a CPU nothing is timed. `difference` is the distance of a result
from that of the first way, relative to its norm: the rounding of bfloat16. Attention is XLA's in the Gauss-Newton
products of all ways, since cuDNN's has no second derivative.
Expected: anybatch within 1.02 of the time of the loop, at most its temporaries, and the same temporaries for any number
of examples.
Found on a CPU, in microbatches of 4: for 8, 32 and 128 examples, evaluation takes 4.4 MiB and a product 26.5 MiB, by
hand and by anybatch (ratio 1.000). The full batch of 128 takes 99.4 and 720.8 MiB. All differences are those of the
loop: at most 6e-5 and 4e-3.
Found on one H200, JAX 0.11.2, against the loop: evaluation in microbatches of 8 takes 1.020 of its time for 8 examples
(6 ms) and 0.959 for 128, and 903.7 MiB for both (1.000); the full batch of 128 takes 12.6 GiB. A Gauss-Newton product
in microbatches of 4 takes 0.994 of the time for 8 examples and 1.000 for 128, and 7,012 MiB for both (0.992). The
plans, not timed, take 0.845 (evaluation of 128 examples in 8 GiB) and 0.936 (product of 8 in 24 GiB). XLA did not
compile the product of the full batch of 32 or more within two minutes: leave it out with --ways.
"""

import argparse
import dataclasses
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import models
import record

import anybatch as ab
from anybatch.jaxprs import versions

EVALUATION, PRODUCT = "evaluation", "Gauss-Newton"
FULL, HAND, ANYBATCH, PLANNED = "full batch", "by hand", "anybatch", "anybatch, planned"
WAYS = [FULL, HAND, ANYBATCH, PLANNED]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The model, its microbatch sizes and the budgets of its plans."""

    model: models.GPT
    sizes: dict[str, int]
    budgets: dict[str, str]


ON_ACCELERATOR = Settings(models.MODELS["gpt2"][0], {EVALUATION: 8, PRODUCT: 4}, {EVALUATION: "8GiB", PRODUCT: "24GiB"})
ON_CPU = Settings(models.MODELS["gpt-tiny"][0], {EVALUATION: 4, PRODUCT: 4}, {EVALUATION: "10MiB", PRODUCT: "40MiB"})


def microbatches(batch: Any, size: int) -> Any:
    return jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), batch)


class Evaluation:
    """Metrics of a language model."""

    def __init__(self, model: models.GPT) -> None:
        self.model = model

    def sums(self, params: Any, batch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits, targets, mask = self.model.logits(params, batch), batch["targets"], batch["mask"]
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - chosen
        correct = jnp.argmax(logits, axis=-1) == targets
        return jnp.sum(losses * mask), jnp.sum(correct * mask), jnp.sum(mask)

    def full_batch(self, params: Any, batch: Any, vector: Any) -> Any:
        return self.metrics(*self.sums(params, batch))

    def metrics(self, losses: jax.Array, correct: jax.Array, number: jax.Array) -> Any:
        loss = losses / number
        return {"loss": loss, "perplexity": jnp.exp(loss), "accuracy": correct / number}

    def by_hand(self, size: int) -> Callable[..., Any]:
        def run(params: Any, batch: Any, vector: Any) -> Any:
            def step(totals: Any, microbatch: Any) -> Any:
                return jax.tree.map(jnp.add, totals, self.sums(params, microbatch)), None

            totals, _ = jax.lax.scan(step, (jnp.zeros(()),) * 3, microbatches(batch, size))
            return self.metrics(*totals)

        return run

    def mapped(self, **options: Any) -> Any:
        """The function that is planned."""
        return ab.map_batch(lambda params, batch: self.metrics(*self.sums(params, batch)), **options)

    def by_anybatch(self, microbatch_size: int) -> Callable[..., Any]:
        mapped = self.mapped(microbatch_size=microbatch_size)
        return lambda params, batch, vector: mapped(params, batch)

    def plan(self, budget: str, params: Any, batch: Any, vector: Any) -> Any:
        return ab.plan(self.mapped(), params, batch, memory=budget, timed=False)


class Product:
    """The product of the Gauss-Newton matrix with a vector."""

    def __init__(self, model: models.GPT) -> None:
        self.model = model

    def loss(self, logits: jax.Array, batch: Any) -> jax.Array:
        chosen = jnp.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)

    def full_batch(self, params: Any, batch: Any, vector: Any) -> Any:
        def predict(params: Any) -> jax.Array:
            return self.model.logits(params, batch)

        logits, pullback = jax.vjp(predict, params)
        _, pushed = jax.jvp(predict, (params,), (vector,))
        _, curved = jax.jvp(jax.grad(lambda logits: self.loss(logits, batch)), (logits,), (pushed,))
        return pullback(curved)[0]

    def by_hand(self, size: int) -> Callable[..., Any]:
        def run(params: Any, batch: Any, vector: Any) -> Any:
            parts = microbatches(batch, size)
            count = len(parts["inputs"])

            def step(total: Any, microbatch: Any) -> Any:
                return jax.tree.map(jnp.add, total, self.full_batch(params, microbatch, vector)), None

            total, _ = jax.lax.scan(step, jax.tree.map(jnp.zeros_like, params), parts)
            return jax.tree.map(lambda leaf: leaf / count, total)

        return run

    def product(self, **options: Any) -> Any:
        return ab.ggn_product(self.model.logits, self.loss, **options)

    def by_anybatch(self, microbatch_size: int, **options: Any) -> Callable[..., Any]:
        product = self.product(microbatch_size=microbatch_size, **options)
        return lambda params, batch, vector: product(params, batch, vector=vector)

    def plan(self, budget: str, params: Any, batch: Any, vector: Any) -> Any:
        return ab.plan(self.product(), params, batch, vector=vector, memory=budget, timed=False)


TASKS: dict[str, Any] = {EVALUATION: Evaluation, PRODUCT: Product}


@dataclasses.dataclass
class Entry:
    """One way, and its figures."""

    way: str
    size: int
    program: Any = None
    temporaries: int | None = None
    compile_seconds: float | None = None
    difference: float | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)
    note: str = ""


@jax.jit
def distance(mine: Any, its: Any) -> jax.Array:
    """The distance of two results, relative to the norm of the second."""

    def square(tree: Any) -> jax.Array:
        return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))

    return jnp.sqrt(square(jax.tree.map(jnp.subtract, mine, its)) / square(its))


def fits(temporaries: int) -> bool:
    """Whether a program can be run: not the full batch of a large model."""
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    return limit is None or temporaries < 0.8 * limit


def entries(
    task: Any, ways: list[str], size: int, budget: str, examples: int, arguments: tuple[Any, ...], repeats: int
) -> list[Entry]:
    """Compiles the ways for a batch, compares their results, and runs them in turns."""
    made = [
        (Entry(FULL, examples), lambda: task.full_batch),
        (Entry(HAND, size), lambda: task.by_hand(size)),
        (Entry(ANYBATCH, size), lambda: task.by_anybatch(size)),
    ]
    made = [(entry, make) for entry, make in made if entry.way in ways]
    try:
        plan = task.plan(budget, *arguments) if PLANNED in ways else None
    except ab.NothingFitsError as error:
        print(f"  planned: {str(error).splitlines()[-1]}", flush=True)
        plan = None
    if plan is not None:
        chosen = {"block_size": plan.block_size, "remat": plan.remat}
        chosen = {name: choice for name, choice in chosen.items() if choice is not None}
        note = f"memory={budget!r}; {plan.compilations} compilations to plan"
        planned = Entry(PLANNED, plan.microbatch_size, note=note)
        made.append((planned, lambda: task.by_anybatch(planned.size, **chosen)))
    reference = None
    for entry, make in made:
        start = time.perf_counter()
        try:
            entry.program = jax.jit(make()).lower(*arguments).compile()
            entry.compile_seconds = time.perf_counter() - start
            entry.temporaries = versions.temporaries(entry.program)
            if not fits(entry.temporaries):
                entry.program, entry.note = None, "compiled, not run"
                continue
            result = jax.block_until_ready(entry.program(*arguments))
        except jax.errors.JaxRuntimeError as error:  # out of memory
            entry.program, entry.note = None, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            continue
        reference = result if reference is None else reference
        entry.difference = float(distance(result, reference))
        del result
    running = [entry for entry, _ in made if entry.program is not None]
    for _ in range(repeats):
        for entry in running:
            start = time.perf_counter()
            jax.block_until_ready(entry.program(*arguments))
            entry.seconds.append(time.perf_counter() - start)
    return [entry for entry, _ in made]


def rows_of(task: str, examples: int, found: list[Entry], timed: bool) -> Iterator[dict[str, Any]]:
    hand = next((entry for entry in found if entry.way == HAND and entry.program is not None), None)
    for entry in found:
        ratio = memory = None
        if hand is not None and entry.temporaries is not None:
            memory = entry.temporaries / hand.temporaries
            if entry.seconds:
                ratio = statistics.median(x / y for x, y in zip(entry.seconds, hand.seconds, strict=True))
        yield {
            "task": task,
            "examples": examples,
            "way": entry.way,
            "microbatch_size": entry.size,
            "milliseconds": 1e3 * statistics.median(entry.seconds) if entry.seconds else None,
            "temporaries_bytes": entry.temporaries,
            "compile_seconds": entry.compile_seconds if timed else None,
            "time_ratio": ratio,
            "memory_ratio": memory,
            "difference": entry.difference,
            "note": entry.note,
        }


def show(row: dict[str, Any]) -> None:
    def number(value: float | None, format: str, unit: str = "") -> str:
        return "-" if value is None else f"{value:{format}}{unit}"

    memory = row["temporaries_bytes"]
    print(
        f"{row['task']:12} {row['examples']:4} {row['way']:17} {row['microbatch_size']:4}"
        f" {number(row['milliseconds'], '.1f', ' ms'):>10} {number(row['time_ratio'], '.3f'):>6}"
        f" {number(None if memory is None else memory / 2**20, '.1f', ' MiB'):>12}"
        f" {number(row['memory_ratio'], '.3f'):>6} {number(row['difference'], '.1e'):>8}  {row['note']}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", action="store_true", help="the model for a large GPU")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--examples", nargs="+", type=int, default=[8, 32, 128])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--repeats", type=int, default=7)
    record.add_option(parser)
    options = parser.parse_args()
    os.environ["ANYBATCH_CACHE"] = "off"  # plans of earlier runs are not used
    results = record.Results(options.save)
    timed = jax.default_backend() != "cpu"
    settings = ON_ACCELERATOR if options.accelerator else ON_CPU
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    params = jax.jit(settings.model.init)(jax.random.key(0))
    vector = jax.jit(settings.model.init)(jax.random.key(2))
    for name in options.tasks:
        models.ATTENTION = "xla" if name == PRODUCT else None
        task = TASKS[name](settings.model)
        for examples in options.examples:
            arguments = (params, settings.model.batch(jax.random.key(1), examples), vector)
            size, budget = min(settings.sizes[name], examples), settings.budgets[name]
            found = entries(task, options.ways, size, budget, examples, arguments, options.repeats if timed else 0)
            for row in rows_of(name, examples, found, timed):
                results.add(**row)
                show(row)
            del found
            gc.collect()


if __name__ == "__main__":
    main()
