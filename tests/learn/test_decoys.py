"""A required operation must affect the answer: decoys with the right value fail, honest solutions pass."""

import pytest
from cases.learn_decoys import DECOYS
from cases.learn_honest import HONEST

from anybatch.learn.catalogue import Course
from anybatch.learn.grading import grade
from anybatch.learn.runner.submissions import Runner

COURSE = Course.builtin()
# These always run. Of the others, CI runs one in `EVERY`, and `make test-slow` runs all.
FIRST = {
    "times what is always zero",
    "half of the batch in every iteration",
    "handed through",
    "a buffer of one size",
    "all rows on each device",
}
EVERY = 6


def marked(table, is_first):
    """A parameter for each file, with the markers that say where it runs."""
    parameters = []
    for name, files in table.items():
        for place, (how, found) in enumerate(files.items()):
            marks = pytest.mark.full if place % EVERY == 0 else pytest.mark.slow
            parameters.append(
                pytest.param(name, found, id=f"{name}: {how}", marks=[] if is_first(name, place, how) else [marks])
            )
    return parameters


@pytest.fixture(scope="module")
def runner():
    with Runner() as runner:
        yield runner


@pytest.mark.parametrize("name, source", marked(HONEST, lambda name, place, how: place == 0))
def test_an_honest_way_passes(name, source, runner):
    verdict = grade(COURSE.find(name), source, runner, seed=0)
    assert verdict.passed, f"{verdict.stage}: {verdict.title}\n{verdict.text}"


@pytest.mark.parametrize("name, decoy", marked(DECOYS, lambda name, place, how: how in FIRST or len(DECOYS[name]) == 1))
def test_a_decoy_fails_with_the_right_words(name, decoy, runner):
    source, stage, says = decoy
    verdict = grade(COURSE.find(name), source, runner, seed=0)
    assert not verdict.passed
    assert verdict.stage == stage and says in f"{verdict.title}\n{verdict.text}", f"{verdict.title}\n{verdict.text}"


@pytest.mark.full
def test_every_exercise_has_both():
    names = {exercise.name for exercise in COURSE.exercises}
    assert set(HONEST) == set(DECOYS) == names and all(HONEST.values()) and all(DECOYS.values())
