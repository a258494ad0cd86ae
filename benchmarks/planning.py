"""Is the planned gradient as fast as the best of an exhaustive search, and does it stay within its memory budget?

    python benchmarks/planning.py                        # a small GPT and an MLP, on any machine
    python benchmarks/planning.py gpt2:9GiB gpt2:20GiB   # on a GPU: model:budget, one table each
    python benchmarks/planning.py --peak gpt2:4GiB       # the peak memory of one planned gradient

Each table first says how long `anybatch.plan` takes, without its cache and with it. Then every divisor of the batch
that fits the same budget, and the planned size, are timed in turns. Expected: the planned size within 3% of the best.
On a GPU the same program compiled twice may differ by 5% in time, because XLA tunes kernels by timing them. So JAX's
compilation cache is on, and the programs that the plan compiled are the ones timed. (This also shortens planning for
a second budget.)

`--peak` runs one planned gradient, in a separate process for each case. It reports the peak memory of the device (or
of the process, on a CPU), the budget, the predicted bytes and XLA's figure. Expected: below the budget; predicted
within 5% of XLA.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from models import MODELS

import anybatch as ab
from anybatch.call.memory import memory_budget, readable
from anybatch.call.options import Options
from anybatch.gradients.computation import Gradient
from anybatch.planning.measure import Measurements
from anybatch.planning.strategy import Strategy

ON_CPU = ("gpt-tiny:40MiB", "mlp:64MiB")


def problem(name: str) -> tuple:
    """The loss, parameters and batch. They are made on the host, so that they do not add to the peak of the device."""
    name, _, examples = name.partition("@")
    model, usual = MODELS[name]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
        batch = jax.tree.map(np.asarray, model.batch(jax.random.key(1), int(examples or usual)))
    return model.loss, jax.device_put(params), jax.device_put(batch)


def measurements_of(loss, params, batch) -> Measurements:
    """Measures any strategy of one gradient, without the planner."""
    options = Options.of(loss)
    return Measurements(Gradient(loss, options, options.roles.sort(loss, (params, batch), {})))


def compare(name: str, budgets: list[str], rounds: int, remat: str | None) -> None:
    """Plans within each budget, then times all divisors that fit, and the chosen sizes."""
    folder = tempfile.mkdtemp()
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    loss, params, batch = problem(name)
    examples = jax.tree.leaves(batch)[0].shape[0]
    choices = {}
    for budget in budgets:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["ANYBATCH_CACHE"] = folder
            memory = None if budget == "all" else budget
            plan = ab.plan(loss, params, batch, memory=memory, remat=remat)
            start = time.perf_counter()
            again = ab.plan(loss, params, batch, memory=memory, remat=remat)
            planned = time.perf_counter()
            jax.make_jaxpr(lambda *args: loss(*args))(params, batch)
            traced = time.perf_counter()
        choices[budget] = plan
        print(f"\n{name}, budget {budget}\n{plan}")
        print(
            f"planned in {plan.planning_seconds:.1f} s with {plan.compilations} compilations, again in "
            f"{(planned - start) * 1e3:.0f} ms with {again.compilations}; tracing alone takes "
            f"{(traced - planned) * 1e3:.0f} ms",
            flush=True,
        )
    os.environ["ANYBATCH_CACHE"] = "off"
    measurements = measurements_of(loss, params, batch)
    largest = max(plan.budget for plan in choices.values())
    divisors = [Strategy(size) for size in range(examples, 0, -1) if examples % size == 0]
    measured = [
        each for each in divisors if (found := measurements.bytes_of(each)) is not None and found.total <= largest
    ]
    chosen = {budget: Strategy(plan.microbatch_size, plan.remat) for budget, plan in choices.items()}
    seconds = measurements.race(list(dict.fromkeys([*measured, *chosen.values()])), rounds)
    quartiles = {strategy: np.percentile(taken, (25, 75)) * 1e3 for strategy, taken in measurements.taken.items()}
    print(f"\n{name}, every divisor of {examples} that fits, and the chosen sizes, in turns")
    for strategy in sorted(seconds, key=lambda strategy: -(strategy.microbatch_size or 0)):
        total = measurements.bytes_of(strategy).total
        marks = [budget for budget, other in chosen.items() if other == strategy]
        low, high = quartiles[strategy]
        times = f"{seconds[strategy] * 1e3:9.2f} ms ({low:.1f} to {high:.1f})"
        print(f"  {strategy!s:24} {times} {readable(total):>10}  {' '.join(marks)}")
    for budget, plan in choices.items():
        fitting = [strategy for strategy in measured if measurements.bytes[strategy].total <= plan.budget]
        best = min(seconds[strategy] for strategy in fitting)
        mine = seconds[chosen[budget]]
        full = f", {mine / seconds[divisors[0]]:.3f} of the full batch" if divisors[0] in seconds else ""
        memory = measurements.bytes[chosen[budget]].total / measurements.bytes_of(divisors[0]).total
        shares = f"{mine / best:.3f} of the best divisor{full}; {memory:.3f} of the memory of the full batch"
        print(f"  budget {budget}: {shares}", flush=True)


def peak(name: str, budget: str, remat: str | None) -> None:
    """Runs one planned gradient and prints the memory that it took."""
    os.environ["ANYBATCH_CACHE"] = "off"
    loss, params, batch = problem(name)
    device = jax.local_devices()[0]
    jax.block_until_ready((params, batch))
    plan = ab.plan(loss, params, batch, memory=budget, timed=False, remat=remat)
    fun = ab.value_and_grad(loss, microbatch_size=plan.microbatch_size, remat=plan.remat)
    stats = device.memory_stats() or {}
    compiled_peak = stats.get("peak_bytes_in_use", 0)
    if not stats:
        compute = jax.jit(fun).lower(params, batch).compile()
        before = _resident()
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak so far
        value = jax.block_until_ready(compute(params, batch))
        measured = _resident("VmHWM:") - before + plan.chosen.bytes.arguments
    else:
        value = jax.block_until_ready(fun(params, batch))
        measured = device.memory_stats()["peak_bytes_in_use"]
    allowed = memory_budget(budget)
    predicted = plan.chosen.predicted
    error = "" if predicted is None else f" predicted {predicted / plan.chosen.total - 1:+.1%}"
    compiling = f", while compiling {readable(compiled_peak)}" if compiled_peak else ""
    print(
        f"{name:22} budget {readable(allowed):>10}: microbatch {plan.microbatch_size:>4} {plan.remat or ''}, "
        f"XLA {readable(plan.chosen.total):>10}{error}, "
        f"measured {readable(measured)} ({measured / allowed:.3f} of the budget){compiling}, "
        f"{plan.compilations} compilations",
        flush=True,
    )
    del value


def _resident(field: str = "VmRSS:") -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="model:budget, models: " + ", ".join(MODELS))
    parser.add_argument("--peak", action="store_true", help="print the peak memory of one planned gradient")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--remat", help='"auto" lets the plan recompute activations')
    options = parser.parse_args()
    cases = [case.rpartition(":")[::2] for case in options.cases or ON_CPU]
    if options.peak and len(cases) > 1:
        for name, budget in cases:
            remat = ["--remat", options.remat] if options.remat else []
            subprocess.run([sys.executable, __file__, "--peak", f"{name}:{budget}", *remat], check=False)
        return
    if options.peak:
        return peak(*cases[0], options.remat)
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    for name in dict.fromkeys(name for name, _ in cases):
        compare(name, [budget for other, budget in cases if other == name], options.rounds, options.remat)


if __name__ == "__main__":
    main()
