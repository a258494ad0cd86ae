"""What do reading and planning cost once, before the first step, and how does that grow with the model?

    python benchmarks/reading_cost.py                        # GPTs of 1 to 48 layers, on a CPU about five minutes
    python benchmarks/reading_cost.py --accelerator          # 1, 12 and 48 layers, on a machine with a GPU
    python benchmarks/reading_cost.py --accelerator --layers 12 --repeats 3      # about 80 s
    python benchmarks/reading_cost.py --layers 1 4 --save FILE

All times are host times: seconds of CPU time of the process, the least of five. They are spent in Python, and in XLA's
compiler where it says so. They depend on the CPU of the machine, so compare them with each other and with tracing,
which JAX does anyway.

`trace` and `trace gradient` are `jax.make_jaxpr` of the loss and of its gradient; `read` is `ab.read` without tracing.
These three use the shapes of GPT-2 (width 768, 1,024 tokens, 50,304 words); nothing is computed.

All else is run, with narrow layers (width 32) so that a call takes little time on any device. `plan` is
`ab.plan(timed=False)` when the programs are compiled already and no record is on disk: it traces, reads, lowers, and
decides by bytes. `lower` is tracing and lowering under `jit`, `compile` is XLA; both for a loop by hand and for
anybatch, in microbatches of the same size. `later` is the time of one later call. Under `jit` it is a call of the
compiled program, in which nothing of anybatch runs. `eager` is a call outside `jit`, in CPU time: anybatch then traces
and lowers the loss again, to see whether it has changed; `jax.value_and_grad` of the full batch runs one operation
after the other, and compiles a `lax.scan` each time.

Found on two CPU cores with JAX 0.10.2: reading takes 0.4 to 0.7 of what JAX takes to trace the gradient. It grows with
the number of equations for unrolled layers, and stays the same for scanned ones. Tracing and lowering take 2 to 3 times
those of the loop by hand, once. Later calls take the same time under `jit`. Outside of it they take 2.7 to 3.1 times
JAX's eager calls if layers are unrolled, and 0.06 to 0.12 of them if layers are scanned.
Found beside an H200 with JAX 0.11.2, 12 layers unrolled and scanned: reading takes 0.51 and 0.41 of tracing the
gradient (0.17 s and 0.04 s), planning 0.88 s and 0.20 s, lowering 2 and 2.6 times that of the loop by hand. Later calls
take 1.08 of the loop under `jit`; outside of it 1.7 of JAX's eager calls if unrolled, 0.11 if scanned.
"""

import argparse
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import models
import record
from models import GPT
from overhead import by_hand

import anybatch as ab

LAYERS = [1, 4, 12, 24, 48]
EXAMPLES, SIZE = 8, 2


def seconds(fun: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.process_time) -> float:
    """The least seconds of a call. The least, since other programs on the host only add time."""
    taken = []
    for _ in range(repeats + 1):  # the first trace of anything is slow
        start = clock()
        jax.block_until_ready(fun())
        taken.append(clock() - start)
    return min(taken)


def equations(jaxpr: Any) -> int:
    """The number of equations, with those of inner jaxprs."""
    inner = [
        getattr(value, "jaxpr", value)
        for equation in jaxpr.eqns
        for param in equation.params.values()
        for value in (param if isinstance(param, (tuple, list)) else (param,))
    ]
    return len(jaxpr.eqns) + sum(equations(each) for each in inner if hasattr(each, "eqns"))


def reading_costs(layers: int, scanned: bool, repeats: int) -> dict[str, Any]:
    """Tracing and reading, from the shapes of GPT-2."""
    model = GPT(layers=layers, width=768, heads=12, scan_layers=scanned)
    params = jax.eval_shape(model.init, jax.random.key(0))
    batch = jax.eval_shape(lambda key: model.batch(key, EXAMPLES), jax.random.key(0))
    loss = model.masked_loss
    # A new function each time, so that JAX does not find the trace of the last one.
    trace = seconds(lambda: jax.make_jaxpr(lambda *args: loss(*args))(params, batch) and None, repeats)
    gradient = seconds(
        lambda: jax.make_jaxpr(lambda *args: jax.value_and_grad(loss)(*args))(params, batch) and None, repeats
    )
    read = seconds(lambda: ab.read(loss, params, batch) and None, repeats)
    return {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
        "equations": equations(jax.make_jaxpr(loss)(params, batch).jaxpr),
        "trace_seconds": trace,
        "trace_gradient_seconds": gradient,
        "read_seconds": read - trace,
    }


def call_costs(layers: int, scanned: bool, repeats: int) -> dict[str, Any]:
    """Planning, the first call and later calls, with narrow layers."""
    model = GPT(layers=layers, width=32, heads=2, context=16, vocabulary=64, scan_layers=scanned)
    params, batch = jax.jit(model.init)(jax.random.key(0)), model.batch(jax.random.key(1), EXAMPLES)
    loss = model.loss
    found: dict[str, Any] = {}
    budget = {"memory": "1GiB", "timed": False}  # with a budget that is named, a plan looks at the compiled program
    start = time.process_time()
    found["plan_compilations"] = ab.plan(loss, params, batch, **budget).compilations
    found["first_plan_seconds"] = time.process_time() - start
    found["plan_seconds"] = seconds(lambda: ab.plan(loss, params, batch, **budget) and None, repeats)
    eager = ab.value_and_grad(loss, microbatch_size=SIZE)

    def lower(fun: Callable[..., Any]) -> Any:
        return jax.jit(lambda *args: fun(*args)).lower(params, batch)

    for name, fun in (("hand", by_hand(loss, SIZE)), ("anybatch", eager)):
        found[f"{name}_lower_seconds"] = seconds(lambda fun=fun: lower(fun) and None, repeats)
        lowered, start = lower(fun), time.process_time()
        compiled = lowered.compile()
        found[f"{name}_compile_seconds"] = time.process_time() - start
        call = functools.partial(compiled, params, batch)
        found[f"{name}_later_us"] = 1e6 * seconds(call, 10 * repeats, time.perf_counter)
    for name, fun in (("jax", jax.value_and_grad(loss)), ("anybatch", eager)):
        found[f"{name}_later_outside_jit_us"] = 1e6 * seconds(functools.partial(fun, params, batch), min(2, repeats))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int)
    parser.add_argument("--accelerator", action="store_true", help="fewer cases")
    parser.add_argument("--repeats", type=int, default=5)
    record.add_option(parser)
    options = parser.parse_args()
    os.environ["ANYBATCH_CACHE"] = "off"
    models.ATTENTION = "xla"  # the same program on every machine, and quick to compile
    layers = options.layers or ([1, 12, 48] if options.accelerator else LAYERS)
    results = record.Results(options.save)
    print(f"host times on the CPU of a machine with {jax.devices()[0].device_kind}, JAX {jax.__version__}")
    titles = "equations|trace|trace gradient|read|read / trace gradient|plan|lower, hand|lower|compile, hand|compile"
    titles += "|later, jit, hand|later, jit|later, eager, JAX|later, eager"
    for scanned in (False, True):
        for count in layers:
            row = {"layers": count, "layers_in": "scan" if scanned else "unrolled"}
            row |= reading_costs(count, scanned, options.repeats)
            # Unrolled layers take XLA long to compile, and only the host's work is of interest here.
            if scanned or not options.accelerator or count <= 12:
                row |= call_costs(count, scanned, options.repeats)
            results.add(**row)
            share = row["read_seconds"] / row["trace_gradient_seconds"]
            cells = [f"{row['equations']}", *(f"{1e3 * row[key]:.0f} ms" for key in _HOST), f"{share:.2f}"]
            if "plan_seconds" in row:
                cells += [f"{1e3 * row['plan_seconds']:.0f} ms"]
                cells += [f"{row[f'{name}_{step}_seconds']:.2f} s" for step in ("lower", "compile") for name in _WAYS]
                cells += [f"{row[f'{name}_later_us']:.0f} us" for name in _WAYS]
                cells += [f"{row[f'{name}_later_outside_jit_us']:.0f} us" for name in ("jax", "anybatch")]
            print(f"\n{count} layers, {row['layers_in']}, {row['parameters'] / 1e6:.0f} million parameters as GPT-2")
            for title, cell in zip(titles.split("|"), cells, strict=False):
                print(f"  {title:24}{cell:>12}", flush=True)


_HOST = ("trace_seconds", "trace_gradient_seconds", "read_seconds")
_WAYS = ("hand", "anybatch")


if __name__ == "__main__":
    main()
