"""Harmful files, mostly by accident: each fails in time, with a clear message."""

import time

import pytest

from anybatch.learn.catalogue import Course
from anybatch.learn.grading import grade
from anybatch.learn.runner.isolation import Limits
from anybatch.learn.runner.submissions import Runner

EXERCISE = Course.builtin().find("accumulate_in_a_scan")
BODY = "def microbatched_grads(w, b, x_full, y_full, n_microbatches):\n    "
LIMITS = Limits(seconds=2.0)

# what the file does -> the file, the stage that fails, and words of the message
FILES = {
    "a loop without end": (BODY + "while True: pass", "limits", "still running after 2 seconds"),
    "a loop without end at import": ("while True: pass", "limits", "still running after 2 seconds"),
    "a compiled loop without end": (
        "import jax\njax.lax.while_loop(lambda c: c >= 0, lambda c: c * 0, 1).block_until_ready()",
        "limits",
        "still running after 2 seconds",
    ),
    "forks": ("import os\nwhile True: os.fork()", "file", "A check may start no other process"),
    "processes": ("import subprocess\nsubprocess.run(['true'])", "file", "A check may start no other process"),
    "10 GB": (BODY + "return len(bytearray(10 * 2**30))", "run", "MemoryError"),
    "10 GB of numpy": (BODY + "import numpy as np; return np.ones(10 * 2**27).sum()", "run", "memory"),
    "10 GB of JAX": ("import jax.numpy as jnp\njnp.ones(10 * 2**28).block_until_ready()", "file", "memory"),
    "a flood of prints": ("while True: print('x' * 1000)", "limits", "printed more than 1.0 MiB"),
    "sys.exit(0)": (BODY + "import sys; sys.exit(0)", "run", "calls sys.exit(0)"),
    "os._exit(0)": (BODY + "import os; os._exit(0)", "limits", "ended its process (exit code 0)"),
    "os._exit(0) at import": ("import os; os._exit(0)", "limits", "ended its process (exit code 0)"),
    "a patched numpy": (
        "import numpy as np\nnp.allclose = np.array_equal = lambda *a, **k: True\n" + BODY + "return w",
        "file",
        "The file replaces numpy.",
    ),
    "a patched numpy inside": (
        "import numpy as np\n" + BODY + "np.asarray = lambda x: x\n    return w",
        "file",
        "The file replaces numpy.asarray",
    ),
    "no Python": ("def microbatched_grads(w, b:\n    return w", "file", "SyntaxError"),
    "no function": ("def something_else(x): return x", "signature", "There is no function `microbatched_grads`"),
    "nothing": ("", "signature", "There is no function `microbatched_grads`"),
    "recursion": (BODY + "return microbatched_grads(w, b, x_full, y_full, n_microbatches)", "run", "Recursion"),
}


@pytest.fixture(scope="module")
def runner():
    with Runner(LIMITS) as runner:
        runner.keep_warm([1, 1])
        yield runner


@pytest.mark.parametrize("source, stage, says", FILES.values(), ids=FILES)
def test_it_ends_in_a_sentence(source, stage, says, runner):
    grade(EXERCISE, "", runner)  # so that the time below does not include the start of the processes
    begin = time.monotonic()
    verdict = grade(EXERCISE, source, runner, seed=0)
    assert not verdict.passed and verdict.stage == stage, verdict
    assert says in f"{verdict.title} {verdict.text}", verdict
    assert verdict.line or "still running" not in verdict.title
    assert time.monotonic() - begin < LIMITS.seconds + 30  # a busy machine is slow to end things


def test_the_next_check_is_as_if_nothing_had_been(runner):
    assert grade(EXERCISE, EXERCISE.solution, runner).passed


def test_prints_are_shown_apart_and_cut(runner):
    verdict = grade(EXERCISE, "print('hello ' * 2000)\n" + EXERCISE.solution, runner)
    assert verdict.passed and verdict.prints.startswith("hello hello") and len(verdict.prints) <= 4000
    assert verdict.prints_dropped > 5000
