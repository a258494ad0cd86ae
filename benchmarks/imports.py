"""How long do `import anybatch` and `anybatch --help` take?

    python benchmarks/imports.py                # CPU, half a minute; on a busy machine, look at the CPU seconds

Every line is the median of 7 fresh processes, taken in turns, with bytecode already compiled, as in an installed
package. The lines "beyond jax" start the clock after `import jax`. The aims: `anybatch.value_and_grad` within 0.15 s
beyond jax, and `anybatch --help` within 0.5 s. Found on two idle cores, with Python 3.11 and JAX 0.10.2: `import jax`
0.46 s, `anybatch.value_and_grad` 0.05 s beyond it, `anybatch --help` 0.08 s.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

# An import is timed by the process itself, so that the start of Python is not counted.
TIMED = """
import time
{before}
wall, cpu = time.perf_counter(), time.process_time()
{timed}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""

IMPORTS = {
    "import jax": ("", "import jax"),
    "import anybatch": ("", "import anybatch"),
    "import anybatch, beyond jax": ("import jax", "import anybatch"),
    "anybatch.value_and_grad, beyond jax": ("import jax", "import anybatch; anybatch.value_and_grad"),
}
HELP = "anybatch --help"

AIMS = {"anybatch.value_and_grad, beyond jax": 0.15, HELP: 0.5}  # seconds


def time_import(environment: dict[str, str], before: str, timed: str) -> tuple[float, float]:
    """The seconds and CPU seconds that a fresh process takes for the statements `timed`."""
    program = TIMED.format(before=before, timed=timed)
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    wall, cpu = map(float, printed.split())
    return wall, cpu


def time_help(environment: dict[str, str]) -> tuple[float, float]:
    """The seconds and CPU seconds of the process `anybatch --help`, with the start of Python."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "anybatch", "--help"]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in (*IMPORTS, HELP)}
    with tempfile.TemporaryDirectory() as folder:
        # The first round compiles the bytecode, even where PYTHONDONTWRITEBYTECODE is set.
        environment = os.environ | {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        for _ in range(1 + options.repeats):
            for name, statements in IMPORTS.items():
                times[name].append(time_import(environment, *statements))
            times[HELP].append(time_help(environment))
    print(f"Python {sys.version.split()[0]}, medians of {options.repeats}\n")
    print(f"{'':<38}{'seconds':>9}{'CPU':>9}{'aim':>9}")
    for name, taken in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*taken[1:], strict=True))
        aim = AIMS.get(name)
        verdict = "" if aim is None else f"{aim:>9.2f}  {'holds' if wall <= aim else 'MISSED'}"
        print(f"{name:<38}{wall:>9.3f}{cpu:>9.3f}{verdict}")


if __name__ == "__main__":
    main()
