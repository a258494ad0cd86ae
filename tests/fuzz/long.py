"""Any number of random programs, from a start seed: `python tests/fuzz_long.py --models 14000 --readings 6000`.

`--models` are random models with trees of parameters (`model_programs.py`), `--readings` random losses (`programs.py`),
`--wides` random losses with big values, in blocks (`wide_programs.py`). All are compared with `jax.value_and_grad` at
the full batch, in float64, by an interpreter of jaxprs that compiles nothing (`interpreter.py`). One program in
`--compiled` is compiled by XLA instead, and of these every fifth model or reading is spread over two simulated devices.
A finding is printed with the seed that makes it again: `python tests/fuzz/model_programs.py SEED`,
`python tests/fuzz/programs.py SEED`, `python tests/fuzz/wide_programs.py SEED`.

Takes 0.1 to 0.2 s of a core for each program. Exits with 1 if a gradient was wrong, or anything raised an error that is
not one of anybatch's own.
"""

import argparse
import collections
import gc
import os
import sys
import time

import jax
from fuzz.model_programs import ModelProgram, compare_compiled, compare_model
from fuzz.programs import Program, compare, compare_interpreted
from fuzz.wide_programs import WideProgram
from fuzz.wide_programs import compare as compare_wide
from fuzz.wide_programs import compare_compiled as compare_wide_compiled

WRONG = ("different", "crashed")


def configure():
    """XLA reads its flags when it is first used, not when it is imported."""
    os.environ["ANYBATCH_CACHE"] = "off"
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = "--xla_force_host_platform_device_count=2"
    if jax.__version_info__ < (0, 11):  # A third of the time to compile.
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    jax.config.update("jax_enable_x64", True)


def model(seed, compiled, devices):
    program = ModelProgram(seed)
    return program, compare_compiled(program, devices) if compiled else compare_model(program)


def reading(seed, compiled, devices):
    program = Program(seed)
    return program, compare(program) if compiled else compare_interpreted(program)


def wide(seed, compiled, devices):
    program = WideProgram(seed)
    return program, compare_wide_compiled(program) if compiled else compare_wide(program)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=int, default=1000, help="how many random models")
    parser.add_argument("--readings", type=int, default=500, help="how many random losses")
    parser.add_argument("--wides", type=int, default=0, help="how many random losses with big values, in blocks")
    parser.add_argument("--start", type=int, default=0, help="the first seed of each")
    parser.add_argument("--compiled", type=int, default=100, help="one program in so many is compiled; 0 for none")
    options = parser.parse_args(argv)
    configure()
    began, counts, wrong = time.time(), collections.Counter(), 0
    todo = [("model", model, number, options.models) for number in range(options.models)]
    todo += [("reading", reading, number, options.readings) for number in range(options.readings)]
    todo += [("wide", wide, number, options.wides) for number in range(options.wides)]
    todo.sort(key=lambda one: one[2] / one[3])  # Some of each, wherever it is stopped.
    gc.disable()  # What tracing leaves behind is collected below, once for many programs.
    what = f"{options.models} models, {options.readings} readings, {options.wides} wides"
    print(f"JAX {jax.__version__}: {what}, from {options.start}")
    for done, (kind, run, number, _) in enumerate(todo, 1):
        seed = options.start + number
        compiled = options.compiled and number % options.compiled == options.compiled - 1
        devices = 2 if compiled and number // options.compiled % 5 == 4 else 1
        program, outcome = run(seed, compiled, devices)
        counts[f"{kind} {outcome.kind}"] += 1
        counts["compiled"] += bool(compiled)
        counts["model warned"] += kind == "model" and bool(outcome.warned)
        if kind == "model" and outcome.warned and counts["model warned"] <= 5:
            print(f"warned model {seed}: {outcome.warned}\n{program}\n", flush=True)
        if outcome.kind in WRONG:
            wrong += 1
            how = f"compiled for {devices}" if compiled else "interpreted"
            print(f"FINDING {kind} {seed}, {how}: {outcome.kind} {outcome.text}\n{program}\n", flush=True)
        elif outcome.kind in ("refused", "invalid") and counts[f"{kind} {outcome.kind}"] <= 5:
            print(f"{outcome.kind} {kind} {seed}: {outcome.text}\n", flush=True)
        if done % 200 == 0:
            jax.clear_caches()  # Every program is traced once and never again.
            gc.collect()
        if done % 200 == 0 or done == len(todo):
            each = f"{time.process_time() / done:.3f} s of a core each"
            print(f"{done} of {len(todo)} in {time.time() - began:.0f} s, {each}: {dict(counts)}", flush=True)
    refused = counts["model refused"] + counts["reading refused"] + counts["wide refused"]
    print(
        f"JAX {jax.__version__}: {len(todo)} programs, {refused} refused, {wrong} findings, "
        f"{time.time() - began:.0f} seconds, {time.process_time():.0f} of a core"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
