"""Is the planned gradient as fast as the best of an exhaustive search, and does it stay within its memory budget?

    python benchmarks/planning.py                        # six small models on a CPU, about twelve minutes
    python benchmarks/planning.py --accelerator --sizes 3 --shares 0.5 1 --limit 60     # six models on one 80 GiB GPU
    python benchmarks/planning.py gpt2:9GiB gpt2@48:20GiB           # model:budget, model@examples:budget
    python benchmarks/planning.py --peak gpt2:4GiB       # the peak memory of one planned gradient, also while compiling

The planner was developed on the models of `models.py`, and not on those of `planned_models.py`.

For each case, one process calls `anybatch.plan`: without times, then with times, then with the record on disk. Then a
grid is compiled: the powers of two, three times these, and the full batch; with `--shares`, each size also with these
shares of the activations computed again. Those that fit and the chosen strategy run in turns. Then the fastest of the
grid and the chosen strategy run against each other. The ratio is the median of the ratios of their times in one round;
it is below 1 if the plan found a faster strategy between those of the grid. Expected: at most 1.03. `--sizes 3 --limit
60` compiles three sizes for each share, the two nearest to the chosen one and the largest power of two, and it starts
none after 60 s.

On a GPU the same program compiled twice may differ by 5% in time, because XLA tunes kernels by timing them. So JAX's
compilation cache is on, and the programs that the plan compiled are the ones timed.

A second process, which gets the program from that cache, runs the chosen strategy alone. It tells the peak memory of
the device, or of the process on a CPU. The peak of the first process while it planned may be larger: it also has the
memory that XLA takes to tune kernels. Expected: the peak of the second process below the budget. On a CPU, add up to 20
MiB that the runtime sets up when a program runs for the first time.

`--peak` compiles without the cache, and does not time. It compares the peak of the device with the budget and with
XLA's figure, and the predicted bytes with XLA's. Expected: predicted within 5%.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import models
import numpy as np
import planned_models
import record

import anybatch as ab
from anybatch.call.memory import memory_budget, readable
from anybatch.call.models import partition_models
from anybatch.call.options import Options
from anybatch.gradients.computation import Gradient
from anybatch.planning.measure import Measurements
from anybatch.planning.strategy import Strategy

MODELS = models.MODELS | planned_models.MODELS
ON_CPU = ("lstm-tiny:24MiB", "vit-tiny:48MiB", "unet-tiny:24MiB", "moe-tiny:24MiB", "gpt-tiny:40MiB", "mlp:64MiB")
ON_ACCELERATOR = ("lstm:4GiB", "vit:8GiB", "unet:4GiB", "moe:12GiB", "gpt2:9GiB", "gpt-1.3b-scanned:24GiB")


def problem(name: str) -> tuple[Any, Any, Any]:
    """The loss, parameters and batch. They are made on the host, so that they do not add to the peak of the device."""
    name, _, examples = name.partition("@")
    model, usual = MODELS[name]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
        batch = jax.tree.map(np.asarray, model.batch(jax.random.key(1), int(examples or usual)))
    return model.loss, jax.device_put(params), jax.device_put(batch)


def measurements_of(loss: Any, params: Any, batch: Any) -> Measurements:
    """Measures any strategy of one gradient, without the planner."""
    options = Options.of(loss)
    call = partition_models(loss, options.roles, False, (params, batch), {})
    return Measurements(Gradient(call.fun, call.options(options), options.roles.sort(call.fun, call.args, call.kwargs)))


def remat_of(options: argparse.Namespace) -> str | None:
    return None if options.remat == "none" else options.remat


def grid(examples: int) -> list[int]:
    """The microbatch sizes of the exhaustive search, the largest first."""
    powers = [2**power for power in range(examples.bit_length())]
    return sorted({examples, *(size for size in [*powers, *(3 * power for power in powers)] if size < examples)})[::-1]


def spread(sizes: list[int], chosen: int, number: int) -> list[int]:
    """So many sizes of the grid: the two nearest to the chosen one, and powers of two from the largest on."""
    nearest = sorted((size for size in sizes if size != chosen), key=lambda size: abs(math.log(size / chosen)))[:2]
    powers = [size for size in sizes if size & (size - 1) == 0 and size not in nearest]
    return [*nearest, *powers][:number]


def device_peak() -> int | None:
    """The most bytes that were in use on the device; None on a CPU."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def search(name: str, budget: str, options: argparse.Namespace) -> dict[str, Any]:
    """Plans, and times the chosen strategy beside the sizes of the grid that fit. Prints the tables."""
    loss, params, batch = problem(name)
    examples = jax.tree.leaves(batch)[0].shape[0]
    jax.block_until_ready(batch)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ANYBATCH_CACHE"] = folder
        given = {"memory": None if budget == "all" else budget, "remat": remat_of(options)}
        untimed = ab.plan(loss, params, batch, timed=False, **given)
        os.environ["ANYBATCH_CACHE"] = str(pathlib.Path(folder) / "timed")
        plan = ab.plan(loss, params, batch, **given)
        peak = device_peak()
        start = time.perf_counter()
        again = ab.plan(loss, params, batch, **given)
        again_seconds = time.perf_counter() - start
    print(f"\n{name}, budget {budget}\n{plan}")
    print(
        f"planned in {plan.planning_seconds:.1f} s with {plan.compilations} compilations, again in "
        f"{again_seconds * 1e3:.0f} ms with {again.compilations}; without times {untimed.chosen.strategy} in "
        f"{untimed.planning_seconds:.1f} s with {untimed.compilations}",
        flush=True,
    )
    os.environ["ANYBATCH_CACHE"] = "off"
    measurements = measurements_of(loss, params, batch)
    chosen = plan.chosen.strategy
    # A larger size takes more memory: those above one that is known not to fit are not compiled. With what is computed
    # again they may fit.
    sizes = grid(examples)
    if not options.shares:
        too_large = [each.microbatch_size for each in plan.candidates if each.bytes and not each.fits]
        sizes = [size for size in sizes if size < min(too_large, default=10**9)]
    if options.sizes is not None:
        sizes = spread(sizes, chosen.microbatch_size, options.sizes)
    fitting, start = [], time.perf_counter()
    for strategy in [Strategy(size, share) for size in sizes for share in (None, *options.shares)]:
        if options.limit is not None and fitting and time.perf_counter() - start > options.limit:
            break
        found = measurements.bytes_of(strategy)
        fitting += [strategy] if found is not None and found.total <= plan.budget else []
    seconds = measurements.race(list(dict.fromkeys([*fitting, chosen])), options.rounds)
    print(f"\n{name}, budget {budget}: the sizes of the grid that fit, and the chosen strategy, in turns")
    for strategy in sorted(seconds, key=lambda each: -each.microbatch_size):
        low, high = np.percentile(measurements.taken[strategy], (25, 75)) * 1e3
        marks = "<- chosen" if strategy == chosen else ""
        size = readable(measurements.bytes_of(strategy).total)
        print(f"  {strategy!s:40} {seconds[strategy] * 1e3:9.2f} ms ({low:.1f} to {high:.1f}) {size:>10}  {marks}")
    best = min(fitting, key=lambda each: seconds[each])
    # The fastest of many was also the luckiest. So the two run against each other once more.
    duel = measurements.race(list(dict.fromkeys([chosen, best])), 2 * options.rounds)
    pairs = zip(measurements.taken[chosen], measurements.taken[best], strict=True)
    return {
        "model": name.partition("@")[0],
        "examples": examples,
        "budget_bytes": plan.budget,
        "chosen_microbatch_size": chosen.microbatch_size,
        "chosen_remat": chosen.remat,
        "chosen_block_size": chosen.block_size,
        "chosen_ms": duel[chosen] * 1e3,
        "best_size": best.microbatch_size,
        "best_remat": best.remat,
        "best_ms": duel[best] * 1e3,
        "ratio": statistics.median(mine / its for mine, its in pairs),
        "sizes_timed": len(fitting),
        "untimed": str(untimed.chosen.strategy),
        "untimed_planning_seconds": untimed.planning_seconds,
        "untimed_compilations": untimed.compilations,
        "xla_bytes": measurements.bytes_of(chosen).total,
        "best_xla_bytes": measurements.bytes_of(best).total,
        "peak_while_planning_bytes": peak,
        "planning_seconds": plan.planning_seconds,
        "compilations": plan.compilations,
        "planning_again_seconds": again_seconds,
        "device": plan.device,
    }


def peak_of(strategy: Strategy, loss: Any, params: Any, batch: Any) -> int:
    """The peak memory of a strategy that runs alone in this process, with its arguments."""
    measurements = measurements_of(loss, params, batch)
    computation = measurements.computation(strategy)
    program, arguments = computation.compile(), measurements.bytes_of(strategy).arguments
    if device_peak() is not None:
        jax.block_until_ready(program(*computation.leaves))
        return device_peak()
    before = _resident()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    outputs = jax.block_until_ready(program(*computation.leaves))
    measured = _resident("VmHWM:") - before + arguments
    del outputs
    return measured


def _resident(field: str = "VmRSS:") -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def planned_peak(name: str, budget: str, remat: str | None) -> None:
    """Plans without timing, runs the planned gradient, and prints the memory that it took."""
    os.environ["ANYBATCH_CACHE"] = "off"
    loss, params, batch = problem(name)
    jax.block_until_ready(batch)
    plan = ab.plan(loss, params, batch, memory=budget, timed=False, remat=remat)
    compiling = "" if device_peak() is None else f", while compiling {readable(device_peak())}"
    measured = peak_of(plan.chosen.strategy, loss, params, batch)
    allowed, predicted = memory_budget(budget), plan.chosen.predicted
    error = "" if predicted is None else f" predicted {predicted / plan.chosen.total - 1:+.1%}"
    print(
        f"{name:22} budget {readable(allowed):>10}: {plan.chosen.strategy}, XLA {readable(plan.chosen.total)}{error}, "
        f"measured {readable(measured)} ({measured / allowed:.3f} of the budget){compiling}, "
        f"{plan.compilations} compilations",
        flush=True,
    )


def stage(name: str, case: str, options: argparse.Namespace, folder: str, *more: str) -> dict[str, Any] | None:
    """Runs this file for one stage of one case in its own process; returns what it wrote, or None if it failed."""
    out = pathlib.Path(folder) / "stage.json"
    out.unlink(missing_ok=True)
    command = [sys.executable, __file__, case, "--stage", name, "--folder", folder, *more]
    command += ["--shares", *map(str, options.shares)] if options.shares else []
    for option in ("rounds", "sizes", "limit", "remat"):
        value = getattr(options, option)
        command += [] if value is None else [f"--{option}", str(value)]
    subprocess.run(command, check=False)
    return json.loads(out.read_text()) if out.exists() else None


def run_stage(case: str, options: argparse.Namespace) -> None:
    jax.config.update("jax_compilation_cache_dir", options.folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    name, _, budget = case.rpartition(":")
    if options.stage == "search":
        found = search(name, budget, options)
    else:
        os.environ["ANYBATCH_CACHE"] = "off"
        found = {"peak_bytes": peak_of(Strategy(**json.loads(options.strategy)), *problem(name))}
    (pathlib.Path(options.folder) / "stage.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="model:budget, models: " + ", ".join(MODELS))
    parser.add_argument("--accelerator", action="store_true", help="the cases for a large GPU")
    parser.add_argument("--peak", action="store_true", help="print the peak memory of one planned gradient")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", type=int, help="how many sizes of the grid to compile; by default, all that may fit")
    parser.add_argument("--limit", type=float, help="seconds after which no more sizes are compiled, in each case")
    parser.add_argument("--shares", type=float, nargs="*", default=(), help="shares of the activations for the grid")
    parser.add_argument("--remat", default="auto", help='"none" keeps the plan from computing activations again')
    parser.add_argument("--stage", choices=("search", "peak", "planned_peak"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    record.add_option(parser)
    options = parser.parse_args()
    cases = options.cases or (ON_ACCELERATOR if options.accelerator else ON_CPU)
    if options.stage == "planned_peak":
        name, _, budget = cases[0].rpartition(":")
        return planned_peak(name, budget, remat_of(options))
    if options.stage:
        return run_stage(cases[0], options)
    # JAX is not used in this process: it would take the memory of the device.
    results = None
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            if case.rpartition(":")[0].partition("@")[0] not in MODELS:
                print(f"{case} is left out: Flax is not installed, or there is no such model")
                continue
            if options.peak:
                stage("planned_peak", case, options, folder)
                continue
            found = stage("search", case, options, folder)
            if found is None:
                print(f"{case} failed")
                continue
            results = results or record.Results(options.save, device=found["device"], packages=("flax",))
            fields = {"microbatch_size": "chosen_microbatch_size", "remat": "chosen_remat"}
            fields["block_size"] = "chosen_block_size"
            strategy = json.dumps({field: found[key] for field, key in fields.items()})
            found |= stage("peak", case, options, folder, "--strategy", strategy) or {"peak_bytes": None}
            del found["device"]
            results.add(**found)
            report(found)


def report(row: dict[str, Any]) -> None:
    """Prints one row in words."""
    peak, planning = row["peak_bytes"], row["peak_while_planning_bytes"]
    shown = "unknown" if peak is None else f"{readable(peak)} ({peak / row['budget_bytes']:.3f} of the budget)"
    shown += "" if planning is None else f", while planning {readable(planning)}"
    print(
        f"{row['model']}: {row['chosen_ms']:.1f} ms, {row['ratio']:.3f} of the best of {row['sizes_timed']} strategies "
        f"({row['best_size']}, remat={row['best_remat']}); XLA {readable(row['xla_bytes'])}, peak {shown}",
        flush=True,
    )


if __name__ == "__main__":
    main()
