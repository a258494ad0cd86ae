"""The course: starters fail, solutions pass, mistakes are caught and named."""

import ast
import builtins
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from anybatch.learn.catalogue import Course
from anybatch.learn.grading import grade
from anybatch.learn.runner.submissions import Runner
from anybatch.learn.terminal.author_commands import examine

pytestmark = [pytest.mark.every_jax, pytest.mark.every_set]

COURSE = Course.builtin()
SEEDS = 1  # `anybatch learn dev check` takes three


@pytest.fixture(scope="session")
def runner():
    with Runner() as runner:
        yield runner


@pytest.mark.full
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


WAYS = {
    f"{exercise.name}: {title}": (exercise, code)
    for exercise in COURSE.exercises
    for title, code in exercise.other_ways
}


@pytest.mark.parametrize("exercise, code", WAYS.values(), ids=WAYS)
def test_another_way_passes(exercise, code, runner):
    verdict = grade(exercise, exercise.file_with(code), runner, seed=0)
    assert verdict.passed, f"{verdict.stage}: {verdict.title}\n{verdict.text}"


def test_most_exercises_have_other_ways():
    assert sum(bool(exercise.other_ways) for exercise in COURSE.exercises) >= 10


@pytest.mark.full
def test_a_way_that_is_wrong_is_found(tmp_path, runner):
    """The control: one that takes the first microbatch every time, beside one that is right."""
    folder = shutil.copytree(COURSE.folder, tmp_path / "course")
    home = folder / COURSE.find("accumulate_in_a_scan").full_name
    shutil.rmtree(home / "mistakes")  # which are tested above
    right, wrong = "x_full, i * size, size", "x_full, 0 * size, size"
    text = (home / "other_ways.md").read_text()
    assert text.count(right) == 1
    (home / "other_ways.md").write_text(text.replace(right, wrong))
    found = examine(Course.read(folder).find("accumulate_in_a_scan"), runner, SEEDS)
    about = [defect for defect in found.defects if "other_ways.md" in defect]
    assert len(about) == 1 and about[0].startswith(
        "'fori_loop and slices' in other_ways.md must pass; it fails in value"
    )


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def error_of(terms, mean):
    exact = np.asarray(terms, np.float64).mean(axis=0)
    return np.mean(np.abs(np.asarray(mean, np.float64) / exact - 1))


@pytest.mark.full
def test_the_order_of_a_division_hardly_matters_as_the_page_says():
    page, space = COURSE.find("float32_accumulator").page, {}
    with jax.numpy_dtype_promotion("standard"):  # as learners have it
        for block in blocks(page):
            exec(block, space)
    terms, mean_of = space["terms"], space["mean_of"]
    table = {
        "float32  ": (terms, jnp.float32),
        "bfloat16  ": (terms, jnp.bfloat16),
        "float16  ": (terms, jnp.float16),
        "float16, terms times 100": (100 * terms, jnp.float16),
    }
    for row, (given, dtype) in table.items():
        shown = re.search(rf"^{row} +(\S+) +(\S+)$", page, re.MULTILINE).groups()
        for said, as_you_go in zip(shown, (False, True), strict=True):
            error = error_of(given.astype(dtype), mean_of(given, dtype, as_you_go))
            said = np.inf if said == "infinite" else float(said.rstrip("%")) / (100 if "%" in said else 1)
            assert error == pytest.approx(said, rel=0.15), (row, as_you_go)
    for dtype in (jnp.float32, jnp.bfloat16):
        more = jax.random.uniform(jax.random.key(1), (4096, 100))
        assert np.array_equal(mean_of(more, dtype, False), mean_of(more, dtype, True))
        fewer = more[:4000]
        assert not np.array_equal(mean_of(fewer, dtype, False), mean_of(fewer, dtype, True))  # the control


def test_batchnorm_makes_another_loss_as_the_page_says():
    (block,) = [block for block in blocks(COURSE.find("accumulate_a_tree").page) if "BatchNorm" in block]
    space = {"jax": jax, "jnp": jnp}
    exec(block, space)
    assert "# -0.236" in block and space["full"] == pytest.approx(-0.236, abs=5e-4)
    assert block.count("# 1.0\n") == 2 and (space["first"], space["second"]) == pytest.approx((1.0, 1.0))


def test_plus_is_about_containers_as_the_page_says():
    first, second = blocks(COURSE.find("gradient_trees").page)[0].splitlines()
    expression, said = first.split("  # TypeError: ")
    with pytest.raises(TypeError, match=re.escape(said)):
        eval(expression)
    expression, said = second.split("  # ")
    assert said.startswith(f"{eval(expression)}:")


def test_a_mean_of_unequal_microbatches_as_the_page_says():
    page, numbers = COURSE.find("weighted_mean").page, np.arange(1.0, 11.0)
    means, sizes = [part.mean() for part in np.split(numbers, [4, 8])], [4, 4, 2]
    assert "{}, {} and {}.".format(*means) in page
    assert f"The mean of these is {np.mean(means):.2f};" in page
    assert np.average(means, weights=sizes) == numbers.mean() == 5.5 and "it is 5.5, which is right" in page


def placement(index, **space):
    """Runs the code of a question; returns its last value, and the answer that is said to be right."""
    question = COURSE.placement[index]
    (block,) = blocks(question.text)
    *body, last = ast.parse(block).body
    space = {"jax": jax, "jnp": jnp, "P": P} | space
    exec(compile(ast.Module(body, []), "question", "exec"), space)
    return eval(compile(ast.Expression(last.value), "question", "eval"), space), question.answers[question.right]


def test_the_right_answers_of_the_placement_are_right():
    def one(w, x):
        return jnp.vdot(w, x) ** 2

    def mean(w, rows):
        return jax.vmap(one, (None, 0))(w, rows).mean()

    w, rows = jnp.arange(5.0), jax.random.normal(jax.random.key(0), (64, 5))
    each, answer = placement(0, loss=one, w=w, xs=rows[:8])
    assert answer.startswith(f"Shape `{each.shape}`: the gradient of each")
    (total, _), answer = placement(1, loss=mean, w=w, xs=rows.reshape(4, 16, 5))
    assert answer == f"`{np.mean(total / jax.grad(mean)(w, rows)):.0f} * g`"
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    x = jnp.arange(64.0)
    result, answer = placement(2, mesh=mesh, x=x)
    assert answer == f"`{result / x.mean():.0f} * m`"


def test_the_placement_starts_later_for_those_who_know_more():
    starts = [COURSE.find(question.start).number for question in COURSE.placement]
    starts.append(COURSE.find(COURSE.placement_end).number)
    assert len(starts) == 4 and starts[0] == 1 and starts == sorted(set(starts))
    assert all(3 <= len(question.answers) <= 4 for question in COURSE.placement)


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
