"""What does a clipped per-example gradient cost, compared with the plain gradient, jax_privacy and Opacus?

    python benchmarks/clipping.py --small                      # CPU, two minutes: memory and distances
    python benchmarks/clipping.py                              # one large GPU; most of the time goes into compiling
    python benchmarks/clipping.py --rows factored:all vmap:8 jax_privacy:8 torch_plain opacus opacus_ghost  # 4 min
    python benchmarks/clipping.py --case 32x256 --rows plain factored vmap:4
    python benchmarks/clipping.py --case 32x256 --rows factored:8 --profile DIR    # and its kernels, by time

GPT-2, a batch of examples x tokens. Half of the examples are clipped, because the bound is the median of their norms.
Every program is compiled once, and they run in turn. The last two columns are distances from a hand-written loop over
single examples, relative to its norm: of all arrays together, and of the array that differs most. The plain gradient is
not clipped, so its distances show what a method that forgot to clip would have. Expected: all arrays together within
0.02, the rounding of bfloat16.

Opacus (torch_gpt.py) runs before JAX, in a process of its own, on the same model in PyTorch without torch.compile: with
gradients of single examples, and with ghost clipping, for which input and output embeddings cannot be tied. Its ratios
are to PyTorch's plain gradient, and its distances are from a loop over single examples in PyTorch. Memory is beyond
parameters, batch and one gradient: XLA's temporaries, or the peak of PyTorch's allocator. On a CPU no time is saved.
"""

import argparse
import dataclasses
import gc
import importlib.util
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import record
from models import GPT
from profiling import profile

import anybatch as ab
from anybatch.jaxprs import versions

CASES = {
    "32x256": (GPT(layers=12, width=768, heads=12, context=256), 32),
    "16x1024": (GPT(layers=12, width=768, heads=12, context=1024), 16),
    "small": (GPT(layers=2, width=64, heads=2, context=32, vocabulary=256), 32),
}
# method -> sizes of its microbatches, as --rows takes them
ROWS: dict[str, tuple[str, ...]] = {
    "plain": ("all", "8"),
    "jax_privacy": ("8", "4", "2", "1"),
    "vmap": ("8", "4", "2", "1"),
    "factored": ("all", "16", "8", "4", "2", "1"),
    "torch_plain": ("all",),
    "opacus": ("all",),
    "opacus_ghost": ("all",),
}
TORCH = ("torch_plain", "opacus", "opacus_ghost")
TOLERANCE = 0.02  # bfloat16 has 8 bits, and the methods multiply in different orders, through 12 layers


@dataclasses.dataclass
class Row:
    """One method with one microbatch size, and its figures."""

    method: str
    size: str
    compiled: Any = None
    temporaries: int = 0
    compile_seconds: float = 0.0
    difference: float = float("nan")  # of all arrays of the gradient together
    worst: float = float("nan")  # of the array that differs most
    failure: str = ""
    note: str = ""
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.method}:{self.size}"

    @property
    def wrong(self) -> bool:
        """True if it failed, or if its gradient is not the clipped one."""
        return bool(self.failure) or (not self.method.endswith("plain") and not self.difference < TOLERANCE)

    def fun(self, loss: Callable[..., Any], clip_norm: float) -> Callable[..., Any]:
        """The function that a user would write, before `jax.jit`."""
        size = None if self.size == "all" else int(self.size)
        if self.method == "plain":
            return jax.grad(loss) if size is None else ab.grad(loss, microbatch_size=size)
        # The loss takes a batch, so each method passes it batches of one example.
        if self.method == "jax_privacy":
            import jax_privacy

            return jax_privacy.clipped_grad(loss, l2_clip_norm=clip_norm, microbatch_size=size, keep_batch_dim=True)
        return ab.clipped_grad(loss, clip_norm=clip_norm, microbatch_size=size, method=self.method, keep_batch_dim=True)


def example_losses(model: Any) -> Callable[..., Any]:
    """The weighted sum of the losses of the examples. The weights are between 1/4 and 4, so that norms differ."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return jnp.sum(batch["weights"] * jnp.mean(model.token_losses(params, batch), axis=-1))

    return loss


def batch_of(model: Any, examples: int) -> Any:
    keys = jax.random.split(jax.random.key(1))
    weights = 2.0 ** jax.random.uniform(keys[1], (examples,), minval=-2.0, maxval=2.0)
    return {**model.batch(keys[0], examples), "weights": weights}


def by_hand(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The clipped sum and the norms, by a loop over single examples. The bound is an argument."""

    def clipped_sum(params: Any, batch: Any, clip_norm: jax.Array) -> Any:
        def step(total: Any, example: Any) -> Any:
            grads = jax.grad(loss)(params, jax.tree.map(lambda leaf: leaf[None], example))
            norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
            factor = jnp.minimum(1.0, clip_norm / norm)
            return jax.tree.map(lambda old, leaf: old + factor * leaf, total, grads), norm

        return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, params), batch)

    return clipped_sum


@jax.jit
def distance(mine: Any, its: Any) -> tuple[jax.Array, jax.Array]:
    """The distance of two gradients relative to the norm of the second: of all arrays, and of the worst array."""

    def squares(tree: Any) -> jax.Array:
        return jnp.stack([jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)])

    apart, lengths = squares(jax.tree.map(jnp.subtract, mine, its)), squares(its)
    return jnp.sqrt(apart.sum() / lengths.sum()), jnp.sqrt(jnp.max(apart / lengths))


def timed(compiled: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return time.perf_counter() - start


def measure(case: str, rows: list[Row], rounds: int, folder: pathlib.Path | None) -> None:
    """Compiles every row, compares its gradient with the hand-written loop, and runs the rows in turn."""
    model, examples = CASES[case]
    loss, batch = example_losses(model), batch_of(model, examples)
    params = jax.jit(model.init)(jax.random.key(0))
    reference = jax.jit(by_hand(loss))
    norms = jax.device_get(reference(params, batch, jnp.inf)[1])
    clip_norm = float(statistics.median(norms.tolist()))
    expected = reference(params, batch, clip_norm)[0]
    print(f"\n{case}: norms {norms.min():.3g} to {norms.max():.3g}, clipped to {clip_norm:.3g}", flush=True)
    for row in rows:
        start = time.perf_counter()
        try:
            row.compiled = jax.jit(row.fun(loss, clip_norm)).lower(params, batch).compile()
            row.compile_seconds = time.perf_counter() - start
            row.temporaries = versions.temporaries(row.compiled)
            row.difference, row.worst = map(float, distance(row.compiled(params, batch), expected))
            if folder is not None:
                profile(f"{case}-{row.method}-{row.size}", row.compiled, (params, batch), folder)
            # Printed at once, in case the run is cut short.
            once = f"{timed(row.compiled, params, batch) * 1e3:.1f} ms once, {row.temporaries / 2**20:.0f} MiB"
            print(f"  {row.name}: {once}, difference {row.difference:.1e}", file=sys.stderr, flush=True)
        except Exception as error:  # such as out of memory: the other rows still count
            row.compiled, row.failure = None, f"{type(error).__name__}: {str(error)[:160].splitlines()[0]}"
            print(f"  {row.name}: {row.failure}", file=sys.stderr, flush=True)
    del expected
    # In turn, so that a change in the machine's speed affects all rows.
    for _ in range(rounds):
        for row in rows:
            if row.compiled is not None:
                row.seconds.append(timed(row.compiled, params, batch))


def report(case: str, rows: list[Row], plain: Row) -> None:
    """Prints a table with ratios to the plain gradient."""
    print(f"\n{case}")
    print(f"  {'':15} {'time':>11} {'ratio':>7} {'temporaries':>13} {'compile':>9} {'difference':>10} {'worst':>8}")
    for row in rows:
        if row.failure:
            print(f"  {row.name:15} {row.failure}")
            continue
        print(
            f"  {row.name:15} {statistics.median(row.seconds) * 1e3:8.2f} ms {ratio(row, plain):7.3f}"
            f" {row.temporaries / 2**20:9.1f} MiB {row.compile_seconds:7.1f} s {row.difference:10.1e} {row.worst:8.1e}"
            f"{'  WRONG' if row.wrong else ''}",
            flush=True,
        )


def ratio(row: Row, plain: Row) -> float:
    """The median of the ratios of runs in the same round: steadier than a ratio of medians."""
    if plain.failure:
        return float("nan")
    return statistics.median(mine / its for mine, its in zip(row.seconds, plain.seconds, strict=True))


def saved_rows(case: str, rows: list[Row], first: Row, timed: bool) -> Iterator[dict[str, Any]]:
    """The rows as they are saved. On a CPU their times are left out."""
    for row in rows:
        ran = not row.failure
        yield {
            "case": case,
            "way": row.method,
            "microbatch_size": CASES[case][1] if row.size == "all" else int(row.size),
            "milliseconds": 1e3 * statistics.median(row.seconds) if ran and timed else None,
            "time_ratio": ratio(row, first) if ran and timed and not first.failure else None,
            "temporaries_bytes": (row.temporaries or None) if ran else None,
            "compile_seconds": row.compile_seconds if ran and timed and row.method not in TORCH else None,
            "difference": row.difference if ran else None,
            "worst": row.worst if ran else None,
            "note": row.failure or row.note,
        }


def torch_lines(wanted: dict[str, list[str]], rounds: int) -> Iterator[dict[str, Any]]:
    """The lines of torch_gpt.py, as they come: its device, then a row for each case and method."""
    tasks = []
    for case, methods in wanted.items():
        model, examples = CASES[case]
        shape = {name: getattr(model, name) for name in ("layers", "width", "heads", "context", "vocabulary")}
        task = {"kind": "clipping", "labels": {"case": case}, "shape": shape, "examples": examples}
        tasks.append({**task, "ways": methods, "repeats": rounds})
    command = [sys.executable, str(pathlib.Path(__file__).with_name("torch_gpt.py")), "--work", json.dumps(tasks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield from map(json.loads, process.stdout or ())


def torch_row(line: dict[str, Any]) -> Row:
    """The row of a line. It failed, if the line has no time."""
    if "milliseconds" not in line:
        return Row(line["way"], "all", failure=line["note"])
    figures = {name: line[name] for name in ("difference", "worst", "note")}
    seconds = [line["milliseconds"] / 1e3]
    return Row(line["way"], "all", temporaries=line["temporaries_bytes"] or 0, seconds=seconds, **figures)


def rows_of(wanted: list[str], examples: int) -> Iterator[Row]:
    """The plain gradient, then the wanted rows in JAX: a method with all its sizes, or method:size."""
    yield Row("plain", "all")
    for entry in wanted:
        method, _, size = entry.partition(":")
        for each in () if method in TORCH else (size,) if size else ROWS[method]:
            # A microbatch of all examples is the row "all".
            if (method, each) != ("plain", "all") and (each == "all" or int(each) < examples):
                yield Row(method, each)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--case", nargs="+", choices=list(CASES), default=["32x256", "16x1024"], help="examples x tokens"
    )
    parser.add_argument(
        "--small", action="store_const", const=["small"], dest="case", help="a small model, for the CPU"
    )
    parser.add_argument("--rows", nargs="+", default=list(ROWS), help="methods or method:size, of " + ", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", type=pathlib.Path, metavar="DIR", help="the HLO and the kernels of each row")
    record.add_option(parser)
    options = parser.parse_args()
    if unknown := [entry for entry in options.rows if entry.partition(":")[0] not in ROWS]:
        parser.error(f"--rows takes {', '.join(ROWS)}, each alone or with a size such as vmap:4, got {unknown}")
    missing = [name for name in ("jax_privacy", "torch", "opacus") if importlib.util.find_spec(name) is None]
    for name in missing:
        print(f"Without {name}: it is not installed")
    needs = {"jax_privacy": ("jax_privacy",), "torch": TORCH, "opacus": ("opacus", "opacus_ghost")}
    absent = {method for name in missing for method in needs[name]}
    entries = [entry for entry in options.rows if entry.partition(":")[0] not in absent]
    wrong = []
    results: record.Results | None = None
    packages = ("jax-privacy", "opacus", "torch", "optax")
    # A device that JAX uses is shared with PyTorch only after PyTorch's process has ended.
    if methods := [entry for entry in entries if entry in TORCH]:
        first = Row("torch_plain", "all", failure="not run")
        for line in torch_lines(dict.fromkeys(options.case, methods), options.rounds):
            if results is None:
                print(f"{line['device']}, torch {line['torch']}", flush=True)
                results, timed = (
                    record.Results(options.save, device=line["device"], packages=packages),
                    line["device"] != "cpu",
                )
                continue
            row = torch_row(line)
            if row.method == "torch_plain":
                first = row
            report(line["case"], [row], first)
            wrong += [f"{line['case']} {row.name}"] if row.wrong else []
            for each in saved_rows(line["case"], [row], first, timed):
                results.add(**each)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}", flush=True)
    results = results or record.Results(options.save, packages=packages)
    for case in options.case:
        rows = list(rows_of(entries, CASES[case][1]))
        measure(case, rows, options.rounds, options.profile)
        report(f"{case}, {options.rounds} rounds", rows, rows[0])
        wrong += [f"{case} {row.name}" for row in rows if row.wrong]
        for row in rows:
            row.compiled = None
        for each in saved_rows(case, rows, rows[0], jax.default_backend() != "cpu"):
            results.add(**each)
        gc.collect()
    if wrong:
        sys.exit(f"failed, or a different gradient: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
