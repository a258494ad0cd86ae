"""How long does a learner wait for a verdict, after the first one?

    python benchmarks/learn.py [--rounds 5]

Checks every solution and every starter of the course, with a pause between two checks, as if somebody edited the file.
The time includes everything: the process, tracing, compiling, running and judging. For comparison, it also measures a
new process that imports the same libraries and adds 1 and 1. Everything runs on the CPU, as for a learner. Expected:
every median is below half a second on two cores.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"

from anybatch.learn.catalogue import Course
from anybatch.learn.grading import devices_of, grade
from anybatch.learn.runner.submissions import Runner

LIMIT = 0.5  # seconds
PLAIN = "import jax, jax.numpy, flax.linen, optax; jax.jit(lambda x: x + 1)(1.0)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    exercises = Course.builtin().exercises
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", PLAIN], check=True)
    plain = time.perf_counter() - begin
    print(f"a new process, until it has computed 1 + 1: {plain:.2f} s")
    print(f"{'exercise':28} {'median':>8} {'slowest':>8} {'starter':>8}")
    slow = []
    with Runner() as runner:
        for exercise in exercises:
            runner.keep_warm(devices_of(exercise))
            grade(exercise, exercise.solution, runner)  # not measured: the first check may wait for imports
            times, starters = [], []
            for _ in range(rounds):
                for source, into in ((exercise.solution, times), (exercise.starter, starters)):
                    time.sleep(0.7)  # nobody saves faster than that, and a spare process gets ready meanwhile
                    verdict = grade(exercise, source, runner)
                    assert verdict.passed == (source is exercise.solution), verdict
                    into.append(verdict.seconds)
            median = statistics.median(times)
            slow += [exercise.name] if median > LIMIT else []
            print(f"{exercise.name:28} {median:8.3f} {max(times):8.3f} {statistics.median(starters):8.3f}", flush=True)
    print(f"over {LIMIT} s: {', '.join(slow) or 'none'}")
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())
