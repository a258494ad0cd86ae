"""The course: starters fail, solutions pass, mistakes are caught and named."""

import ast
import builtins
import re

import pytest

from anybatch.learn.catalogue import Course
from anybatch.learn.grading import grade
from anybatch.learn.runner.submissions import Runner
from anybatch.learn.terminal.author_commands import examine

pytestmark = pytest.mark.every_jax

COURSE = Course.builtin()
SEEDS = 1  # `anybatch learn dev check` takes three


@pytest.fixture(scope="session")
def runner():
    with Runner() as runner:
        yield runner


@pytest.mark.parametrize("exercise", COURSE.exercises, ids=lambda exercise: exercise.name)
def test_every_exercise_is_sound(exercise, runner):
    found = examine(exercise, runner, SEEDS)
    assert found.defects == []
    assert found.checks >= 1 + SEEDS * (2 + 3)


def test_the_course_is_in_the_order_of_its_numbers():
    assert [exercise.number for exercise in COURSE.exercises] == list(range(1, 17))


@pytest.mark.parametrize("exercise", COURSE.exercises, ids=lambda exercise: exercise.name)
def test_a_worked_example_can_be_pasted(exercise):
    """The first code block uses only names that it imports or defines. (A second block may continue from it.)"""
    section = exercise.page.partition("## A worked example")[2].partition("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    tree = ast.walk(ast.parse(code))
    names = [node for node in tree if isinstance(node, (ast.Name, ast.alias, ast.FunctionDef, ast.arg))]
    used = {node.id for node in names if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    known = {getattr(node, "id", None) for node in names if isinstance(getattr(node, "ctx", None), ast.Store)}
    known |= {node.asname or node.name.partition(".")[0] for node in names if isinstance(node, ast.alias)}
    known |= {getattr(node, "name", None) or getattr(node, "arg", None) for node in names}
    assert used - known - set(dir(builtins)) == set()


# Shortcuts around an exercise, each a file in `mistakes/` that is caught, as tested above.
CHEATS = {
    "constants": ("accumulate_in_a_scan", "constant"),
    "vmap twice for shard_map": ("shard_map_and_vmap", "vmap_twice"),
    "a Python loop for the scan": ("accumulate_in_a_scan", "python_loop"),
    "the full batch for the microbatch": ("accumulate_in_a_scan", "full_batch"),
    "the full batch beside a scan of nothing": ("accumulate_in_a_scan", "dummy_scan"),
    "grad outside of the scan": ("accumulate_in_a_scan", "gradient_of_the_loop"),
    "one device's answer on eight": ("one_all_reduce", "forgotten_psum"),
    "one device for the work of eight": ("one_all_reduce", "no_mesh"),
}


@pytest.mark.parametrize("name, file", CHEATS.values(), ids=CHEATS)
def test_a_cheat_is_among_the_mistakes(name, file):
    assert file in [mistake.name for mistake in COURSE.find(name).mistakes]


FOLDER = COURSE.find("accumulate_in_a_scan").folder
CALL = "microbatched_grads(w, b, x_full, y_full, n_microbatches)"
BY_DISK = f"""
space = {{}}
exec(open({str(FOLDER / "solution.py")!r}).read(), space)
def {CALL}:
    return space["microbatched_grads"](w, b, x_full, y_full, n_microbatches)
"""
BY_IMPORT = """
from anybatch.recipes import microbatched_grads
"""
BY_MODULES = f"""
import sys
def {CALL}:
    recipes = next(each for name, each in sys.modules.items() if "anybatch.recipes" in name)
    return recipes.microbatched_grads(w, b, x_full, y_full, n_microbatches)
"""
BY_PATH = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("check", {str(FOLDER / "check.py")!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
def {CALL}:
    return module.reference(w, b, x_full, y_full, n_microbatches)
"""
BY_STACK = f"""
import sys
def {CALL}:
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):
            if hasattr(value, "reference"):
                return value.reference(w, b, x_full, y_full, n_microbatches)
        frame = frame.f_back
    raise RuntimeError("no reference up the stack")
"""
BY_MEMORY = f"""
import gc
def {CALL}:
    for each in gc.get_objects():
        if type(each).__name__ in ("Check", "Expected", "_Grading"):
            return each.reference(w, b, x_full, y_full, n_microbatches)
    raise RuntimeError("no reference in memory")
"""
BY_PARENT = f"""
import os
def {CALL}:
    parent = os.getppid()
    data = b""
    with open(f"/proc/{{parent}}/mem", "rb") as memory, open(f"/proc/{{parent}}/maps") as maps:
        for line in maps:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            memory.seek(begin)
            data += memory.read(min(end - begin, 4096))
    raise RuntimeError(f"{{len(data)}} bytes were read")
"""
THIEVES = {
    "the solution from the disk": (BY_DISK, "file", "solution"),
    "the library": (BY_IMPORT, "file", "you write it by hand"),
    "a module that is there already": (BY_MODULES, "run", "StopIteration"),
    "the check from the disk": (BY_PATH, "file", "check"),
    "the stack": (BY_STACK, "run", "no reference up the stack"),
    "memory": (BY_MEMORY, "run", "no reference in memory"),
    "the parent": (BY_PARENT, "run", ""),
}


@pytest.mark.parametrize("source, stage, says", THIEVES.values(), ids=THIEVES)
def test_the_right_answer_cannot_be_taken_from(source, stage, says, runner):
    verdict = grade(COURSE.find("accumulate_in_a_scan"), source, runner, seed=0)
    assert not verdict.passed and verdict.stage == stage and says in f"{verdict.title} {verdict.text}", verdict
    assert "bytes were read" not in verdict.title
