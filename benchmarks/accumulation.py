"""What do the time and memory of a gradient cost against the microbatch size, by each way to accumulate it?

    python benchmarks/accumulation.py                                # CPU, a few minutes: memory only
    python benchmarks/accumulation.py --accelerator                  # one H200, about ten minutes
    python benchmarks/accumulation.py --accelerator --models gpt2 --ways "by hand" anybatch --sizes 8 1
    python benchmarks/accumulation.py --accelerator --models gpt-1.3b --extend FILE --save FILE    # adds to its rows
    python benchmarks/torch_gpt.py --check                           # PyTorch's model has the loss of JAX's

GPT-2 with 124 million parameters and 64 examples, and a GPT with 1.3 billion and 16, of 1,024 tokens each: float32
parameters, bfloat16 arithmetic, unrolled layers, a mean over all tokens.

  full batch         `jax.value_and_grad`, nothing accumulated
  by hand            a `lax.scan` over equal microbatches that sums in float32 and divides at the end
  optax              `optax.microbatching.microbatch` with its accumulator for means
  MultiSteps         `optax.MultiSteps` around SGD: one call for each microbatch, which also updates the parameters
  anybatch           `ab.value_and_grad(loss, microbatch_size=m)`, which reads the loss
  anybatch, planned  the size that `ab.plan(memory=...)` chooses, without timing candidates
  torch              PyTorch: `.backward()` for each microbatch, which adds to `.grad`
  torch.compile      the same, each size compiled with its shapes as constants

Memory is what a way takes beyond the parameters, the batch and one gradient. For JAX that is what XLA reports as
temporaries of the compiled program. For MultiSteps it is the temporaries of a mini-step and its accumulator, less the
one gradient that every way has. For PyTorch it is the peak of its allocator less parameters, batch and gradient.

The ways of one size run in turns; ratios are medians of the ratios to the hand-written loop in the same round. XLA
remembers which kernels it found best, so the first way of a size has the longest compilation. PyTorch runs before JAX,
in a process of its own. On a CPU nothing is timed. `difference` is the distance of a gradient from that of the full
batch, relative to its norm: about 0.01, the rounding of bfloat16.
Found on one H200: benchmarks/results/accumulation.json.
"""

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import models
import record
from overhead import by_hand, by_optax

import anybatch as ab
from anybatch.jaxprs import versions

FULL, PLANNED = "full batch", "anybatch, planned"
TORCH = ("torch", "torch.compile")
# model -> way -> its microbatch sizes, or its memory budgets. Those who compile longest have fewer sizes.
ON_ACCELERATOR: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "torch": (64, 32, 16, 8, 4, 2, 1),
        "torch.compile": (64, 16, 4, 1),
        FULL: (64,),
        "by hand": (32, 16, 8, 4, 2, 1),
        "optax": (16, 4, 1),
        "MultiSteps": (16, 4, 1),
        "anybatch": (32, 16, 8, 4, 2, 1),
        PLANNED: ("9GiB",),
    },
    "gpt-1.3b": {
        "torch": (16, 8, 4, 2, 1),
        "torch.compile": (16, 4, 1),
        FULL: (16,),
        "by hand": (4, 1),
        "optax": (1,),
        "MultiSteps": (1,),
        "anybatch": (4, 1),
        PLANNED: ("24GiB",),
    },
}
ON_CPU: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt-tiny": {
        FULL: (64,),
        **dict.fromkeys(("by hand", "optax", "MultiSteps", "anybatch"), (16, 4, 1)),
        PLANNED: ("48MiB",),
    },
    "mlp": {
        FULL: (2048,),
        **dict.fromkeys(("by hand", "optax", "MultiSteps", "anybatch"), (512, 128, 32)),
        PLANNED: ("32MiB",),
    },
}
WAYS = tuple(ON_ACCELERATOR["gpt2"])
TABLED = tuple(way for way in WAYS if way not in (FULL, PLANNED))


@dataclasses.dataclass
class Entry:
    """One way with one microbatch size, and its figures."""

    way: str
    size: int
    run: Callable[[], Any] = lambda: None  # computes the gradient once
    temporaries: int | None = None
    compile_seconds: float | None = None
    difference: float | None = None  # from the first gradient of the model, relative to its norm
    seconds: list[float] = dataclasses.field(default_factory=list)
    note: str = ""


class Measured:
    """A model with its parameters and batch, and the gradient that the others are compared with."""

    def __init__(self, name: str, repeats: int) -> None:
        self.model, self.examples = models.MODELS[name]
        self.repeats = repeats
        self.params = jax.jit(self.model.init)(jax.random.key(0))
        self.batch = self.model.batch(jax.random.key(1), self.examples)
        self.reference: Any = None

    def entries(self, size: int, ways: list[str]) -> list[Entry]:
        """Compiles the ways for one size and runs them in turns."""
        entries = []
        for way in ways:
            entry = Entry(way, size)
            start = time.perf_counter()
            try:
                gradient = self.multi_steps(entry) if way == "MultiSteps" else self.one_call(entry)
            except (ImportError, jax.errors.JaxRuntimeError) as error:  # not installed, or out of memory
                entry.note = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
                entries.append(entry)
                continue
            self.compare(entry, gradient)
            del gradient
            entries.append(entry)
            taken = time.perf_counter() - start
            print(f"  {way} {size}: compiled and run in {taken:.1f} s", file=sys.stderr, flush=True)
        for _ in range(self.repeats):
            for entry in entries:
                if entry.temporaries is not None:
                    start = time.perf_counter()
                    jax.block_until_ready(entry.run())
                    entry.seconds.append(time.perf_counter() - start)
        return entries

    def compare(self, entry: Entry, gradient: Any) -> None:
        if self.reference is None:
            self.reference = gradient
        entry.difference = float(distance(gradient, self.reference))

    def one_call(self, entry: Entry) -> Any:
        """A way that is one program for the full batch. Returns the gradient of its first run."""
        loss, size = self.model.loss, entry.size
        make = {
            FULL: lambda: jax.value_and_grad(loss),
            "by hand": lambda: by_hand(loss, size),
            "optax": lambda: by_optax(loss, size),
            "anybatch": lambda: ab.value_and_grad(loss, microbatch_size=size),
        }
        return self.compile(entry, make[entry.way]())

    def compile(self, entry: Entry, fun: Callable[..., Any]) -> Any:
        start = time.perf_counter()
        program = jax.jit(fun).lower(self.params, self.batch).compile()
        entry.compile_seconds = time.perf_counter() - start
        entry.run = lambda: program(self.params, self.batch)
        _, gradient = jax.block_until_ready(entry.run())
        entry.temporaries = versions.temporaries(program)
        return gradient

    def multi_steps(self, entry: Entry) -> Any:
        """`optax.MultiSteps`: a program for one microbatch, called for each. Its arguments are donated."""
        import optax

        count = self.examples // entry.size

        def mini_step(params: Any, state: Any, microbatch: Any, rate: jax.Array) -> Any:
            value, grads = jax.value_and_grad(self.model.loss)(params, microbatch)
            updates, state = optax.MultiSteps(optax.sgd(rate), every_k_schedule=count).update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        cut = jax.jit(lambda batch, i: jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:])[i], batch))
        microbatches = [cut(self.batch, i) for i in range(count)]
        start = time.perf_counter()
        copied = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 0, tree))(self.params)
        state = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=count).init(copied)
        held = [copied, state]
        arguments = (copied, state, microbatches[0], jnp.float32(1.0))
        program = jax.jit(mini_step, donate_argnums=(0, 1)).lower(*arguments).compile()
        entry.compile_seconds = time.perf_counter() - start

        def run(rate: jax.Array) -> Any:
            for microbatch in microbatches:
                held[0], held[1], value = program(held[0], held[1], microbatch, rate)
            return held[0], value

        # One step at rate 1 moves the parameters by the gradient. The timed steps have rate 0: parameters stay.
        gradient = jax.jit(lambda old, new: jax.tree.map(jnp.subtract, old, new))(self.params, run(jnp.float32(1.0))[0])
        zero = jnp.float32(0.0)
        entry.run = lambda: run(zero)
        accumulator, one_gradient = bytes_of(state.acc_grads), bytes_of(self.params)
        entry.temporaries = versions.temporaries(program) + accumulator - one_gradient
        entry.note = f"mini-step: {versions.temporaries(program)} bytes; accumulator: {accumulator}"
        return gradient

    def planned(self, budget: str) -> list[Entry]:
        """The size that a plan chooses within a budget."""
        start = time.perf_counter()
        plan = ab.plan(self.model.loss, self.params, self.batch, memory=budget, timed=False)
        planning = time.perf_counter() - start
        entry = Entry(PLANNED, plan.microbatch_size)
        chosen = {"microbatch_size": plan.microbatch_size, "block_size": plan.block_size, "remat": plan.remat}
        gradient = self.compile(entry, ab.value_and_grad(self.model.loss, **chosen))
        self.compare(entry, gradient)
        entry.note = f"memory={budget!r}; {plan.compilations} compilations to plan"
        if self.repeats:
            entry.note += f", {planning:.1f} s"
        for _ in range(self.repeats):
            start = time.perf_counter()
            jax.block_until_ready(entry.run())
            entry.seconds.append(time.perf_counter() - start)
        return [entry]


@jax.jit
def distance(mine: Any, its: Any) -> jax.Array:
    """The distance of two gradients, relative to the norm of the second."""

    def square(tree: Any) -> jax.Array:
        return sum(jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree))

    return jnp.sqrt(square(jax.tree.map(jnp.subtract, mine, its)) / square(its))


def bytes_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def rows_of(name: str, examples: int, entries: list[Entry], timed: bool) -> Iterator[dict[str, Any]]:
    """The rows of the ways of one size. On a CPU their times are left out."""
    hand = next((entry for entry in entries if entry.way == "by hand" and entry.temporaries is not None), None)
    for entry in entries:
        ratio = memory = None
        if hand is not None and entry.temporaries is not None:
            memory = entry.temporaries / hand.temporaries
            if timed:
                ratio = statistics.median(x / y for x, y in zip(entry.seconds, hand.seconds, strict=True))
        yield {
            "model": name,
            "examples": examples,
            "way": entry.way,
            "microbatch_size": entry.size,
            "milliseconds": 1e3 * statistics.median(entry.seconds) if timed and entry.seconds else None,
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
        f"{row['model']:9} {row['way']:18} {row['microbatch_size']:5} {number(row['milliseconds'], '.1f', ' ms'):>11}"
        f" {number(row['time_ratio'], '.3f'):>6} {number(memory and memory / 2**20, '.1f', ' MiB'):>12}"
        f" {number(row['memory_ratio'], '.3f'):>6} {number(row['compile_seconds'], '.1f', ' s'):>8}"
        f" {number(row['difference'], '.1e'):>8}  {row['note']}",
        flush=True,
    )


def torch_rows(work: dict[str, dict[str, tuple[Any, ...]]], repeats: int) -> Iterator[dict[str, Any]]:
    """The lines of torch_gpt.py, as they come: its device, then rows. Nothing, if PyTorch is not installed."""
    tasks = []
    for name, ways in work.items():
        model, examples = models.MODELS[name]
        if not isinstance(model, models.GPT):
            continue
        shape = {field: getattr(model, field) for field in ("layers", "width", "heads", "context", "vocabulary")}
        labels = {"model": name, "examples": examples}
        for way in TORCH:
            if way in ways:
                task = {"kind": "accumulation", "labels": labels, "shape": shape, "examples": examples, "way": way}
                tasks.append({**task, "sizes": ways[way], "repeats": repeats})
    if tasks:
        script = pathlib.Path(__file__).with_name("torch_gpt.py")
        command = [sys.executable, str(script), "--work", json.dumps(tasks)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield from map(json.loads, process.stdout or ())
            finally:
                process.terminate()  # if the caller wants no more


def torch_row(found: dict[str, Any], timed: bool) -> dict[str, Any]:
    compiled = found["way"] == "torch.compile" and timed
    return {
        **{name: found[name] for name in ("model", "examples", "way", "microbatch_size")},
        "milliseconds": found.get("milliseconds") if timed else None,
        "temporaries_bytes": found.get("temporaries_bytes"),
        "compile_seconds": found.get("first_seconds") if compiled else None,
        "time_ratio": None,
        "memory_ratio": None,
        "difference": None,
        "note": found["note"],
    }


def wanted(options: argparse.Namespace) -> dict[str, dict[str, tuple[Any, ...]]]:
    """For each model and way, the sizes that the options select."""
    work = ON_ACCELERATOR if options.accelerator else ON_CPU
    chosen = {}
    for name in options.models or work:
        # A model that is not in the table needs --sizes.
        ways = work.get(name) or {FULL: (models.MODELS[name][1],), **dict.fromkeys(TABLED, tuple(options.sizes or ()))}
        ways = {way: sizes for way, sizes in ways.items() if not options.ways or way in options.ways}
        if options.sizes:
            ways = {way: sizes if way in (FULL, PLANNED) else tuple(options.sizes) for way, sizes in ways.items()}
        chosen[name] = ways
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", action="store_true", help="the models for a large GPU")
    parser.add_argument("--models", nargs="+", choices=list(models.MODELS), help="by default all of the table")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="by default all of the table")
    parser.add_argument("--sizes", nargs="+", type=int, help="microbatch sizes for every way; by default the table's")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--limit", type=float, default=float("inf"), help="start nothing new after these seconds")
    parser.add_argument("--extend", metavar="FILE", help="a file of --save, whose rows are kept before the new ones")
    record.add_option(parser)
    options = parser.parse_args()
    began = time.perf_counter()
    os.environ["ANYBATCH_CACHE"] = "off"  # plans of earlier runs are not used
    work = wanted(options)
    # A device that JAX uses is shared with PyTorch only after PyTorch's process has ended.
    results: record.Results | None = None
    earlier = pathlib.Path(options.extend) if options.extend else None
    kept = json.loads(earlier.read_text())["rows"] if earlier is not None and earlier.exists() else []

    if options.extend:  # it says where and not what, as --save does
        position = sys.argv.index("--extend")
        del sys.argv[position : position + 2]

    def start(device: str | None) -> record.Results:
        made = record.Results(options.save, device=device, packages=("optax", "torch"))
        for row in kept:
            made.add(**row)
        return made

    for found in torch_rows(work, options.repeats):
        if results is None:
            print(f"{found['device']}, torch {found['torch']}", flush=True)
            results, timed = start(found["device"]), found["device"] != "cpu"
            continue
        row = torch_row(found, timed)
        results.add(**row)
        show(row)
        if time.perf_counter() - began > options.limit:
            break
    if not any(way not in TORCH for ways in work.values() for way in ways):
        return
    results = results or start(None)
    timed = jax.default_backend() != "cpu"
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    for name, ways in work.items():
        measured = Measured(name, options.repeats if timed else 0)
        sizes = sorted({size for way, each in ways.items() if way not in (PLANNED, *TORCH) for size in each})
        groups = [(size, [way for way, each in ways.items() if way not in TORCH and size in each]) for size in sizes]
        for size, group in reversed(groups):
            if time.perf_counter() - began > options.limit:
                print(f"{name}, microbatches of {size} and smaller: left out, because of --limit", flush=True)
                break
            for row in rows_of(name, measured.examples, measured.entries(size, group), timed):
                results.add(**row)
                show(row)
            gc.collect()
        for budget in ways.get(PLANNED, ()):
            if time.perf_counter() - began > options.limit:
                break
            try:
                planned = measured.planned(budget)
            except (ab.errors.NothingFitsError, jax.errors.JaxRuntimeError) as error:
                print(f"{name}, {budget}: {str(error).splitlines()[0]}", flush=True)
                continue
            for row in rows_of(name, measured.examples, planned, timed):
                results.add(**row)
                show(row)
            gc.collect()
        del measured
        gc.collect()


if __name__ == "__main__":
    main()
