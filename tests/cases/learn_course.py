"""A small course for the tests of `anybatch learn`, and a stand-in for the grader."""

import time

from anybatch.learn.catalogue import Course
from anybatch.learn.check import Verdict
from anybatch.learn.terminal import author_commands

NAMES = ("mean_gradient", "second", "third")


def write_course(folder):
    """Three exercises, as `anybatch learn dev new` writes them."""
    author_commands.new(folder, None)
    for name in NAMES[1:]:
        author_commands.new(folder, name)
    return Course.read(folder)


def grade(exercise, source, runner=None, *, path=None, seed=None, anybatch=False, on_stage=None):
    """Passes a file that contains "right"; is slow if the file contains "slow"."""
    if isinstance(runner, Runner):
        Runner.checked += 1
    if "slow" in source:
        time.sleep(1.0)
    if "explode" in source:
        raise RuntimeError("a bug of the grader")
    if "NotImplementedError" in source:
        return Verdict(exercise.name, False, "run", "Not written yet.", started=False, seconds=0.1)
    if "right" in source:
        if on_stage:
            on_stage("value", "5 cases")
        return Verdict(exercise.name, True, done=(("value", "5 cases"),), seconds=0.25)
    return Verdict(exercise.name, False, "value", f"Wrong: {source.strip()}", "Look again.", seconds=0.2)


class Runner:
    """Runs nothing, and counts how many files were checked."""

    checked = 0

    def __init__(self, **_):
        pass

    def keep_warm(self, devices):
        pass

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass
