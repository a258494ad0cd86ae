"""The playground: what it says of each of its losses, of files that fail, and what it draws."""

import asyncio
import contextlib
import functools
import re
import sys
import tempfile
import time

import numpy as np
import pytest

from anybatch.learn.web import analysis, playground
from anybatch.learn.web.analysis import AnalysisLimits, Analyst
from anybatch.learn.web.playground_losses import LOSSES, named

KINDS = {
    "squares": "mean over 256 examples",
    "classifier": "mean over 256 examples",
    "masked": "ratio of sums",
    "rmse": "square root of a mean over 256 examples",
    "dropout": "mean over 256 examples",
    "regulariser": "mean over 256 examples, plus a term of the parameters",
    "contrastive": "couples examples",
    "batchnorm": "couples examples",
    "experts": "mean over 128 examples plus function of 2 sums over 128 examples",
    "hardest": "couples examples",
    "weights": "ratio of sums",
    "attention": "mean over 64 examples",
    "vocabulary": "mean over 256 examples",
}

# Lines of losses, by how they begin, and their kinds. All other lines are not marked.
MARKS = {
    "masked": {
        "hidden = ": "rows",
        "guess = ": "rows",
        "error = ": "rows",
        "total = ": "sum",
        "return total / ": "sum",
    },
    "regulariser": {
        "hidden = ": "rows",
        "error = ": "rows",
        "squares = ": "same",
        "penalty = ": "same",
        "fit = ": "sum",
        "return fit": "once",
    },
    "batchnorm": {
        "mean = ": "sum",
        "variance = ": "couples",
        "return (x - mean)": "couples",
        "hidden = batch": "rows",
        "hidden = jax": "full",
        "error = ": "full",
        "return jnp.mean": "full",
    },
    "attention": {  # with a scan, whose body is read too
        "queries, keys": "rows",
        "scores = ": "rows",
        "causal = ": "same",
        "mixed = ": "rows",
        "return x + ": "rows",
        "x = params": "rows",
        "x, _ = ": "rows",
        "log_probs = ": "rows",
        "right = ": "rows",
        "return -jnp.mean": "sum",
    },
}

ENDLESS = """\
import numpy as np
params, batch = 1.0, np.ones(4)


def loss(params, batch):
    while True:
        pass
"""


@pytest.fixture(scope="module")
def runner():
    """An event loop for the whole file, so that a process is kept ready from one test to the next."""
    with asyncio.Runner() as found:
        yield found


@pytest.fixture(scope="module")
def analyse(runner):
    """Returns the parts of the analysis of a source, by their names. Each source is analysed once."""
    analyst = Analyst()

    async def collect(source):
        return [part async for part in analyst.analyse(source)]

    @functools.cache
    def parts(source):
        *found, last = runner.run(collect(source))
        assert last == {"part": "end"}
        return {part["part"]: part for part in found}

    yield parts
    runner.run(analyst.close())


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The folder where the processes have theirs. They must remove them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def check_marks(source, marks, expected):
    """Asserts that each line of a loss has the kind that is expected of it, and all other lines none."""
    lines = [line.strip() for line in source.splitlines()]
    found = {mark["line"]: mark["kind"] for mark in marks}
    wanted = {
        1 + number: kind
        for start, kind in expected.items()
        for number, line in enumerate(lines)
        if line.startswith(start)
    }
    assert len(wanted) == len(expected)
    assert found == wanted


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_each_loss_is_what_it_is_said_to_be(analyse, name):
    """Its reading is as expected, every part arrives, and every route gives the gradient of the full batch."""
    parts = analyse(named(name).source)

    assert parts.keys() == {"reading", "plan", "verification", "steps"}
    assert parts["reading"]["kind"] == KINDS[name]
    assert parts["reading"]["couples"] == named(name).is_coupled
    assert bool(parts["reading"]["blames"]) == named(name).is_coupled
    assert parts["verification"]["ok"] and parts["verification"]["dtype"] == "float64"
    assert all(route["same"] and route["difference"] < 1e-12 for route in parts["verification"]["routes"])
    assert all(found["difference"] < 1e-12 for found in parts["steps"]["sizes"].values())
    assert parts["steps"]["passes"] == parts["reading"]["passes"]


def test_there_are_a_dozen_and_each_can_be_found():
    assert len(LOSSES) >= 12 and KINDS.keys() == {loss.name for loss in LOSSES}
    assert sum(loss.is_coupled for loss in LOSSES) == 3


@pytest.mark.full
@pytest.mark.parametrize("name", MARKS)
def test_the_lines_of_a_loss_are_marked(analyse, name):
    source = named(name).source
    check_marks(source, analyse(source)["reading"]["marks"], MARKS[name])


@pytest.mark.full
def test_the_comparison_of_marks_can_fail(analyse):
    """The control: one wrong kind, one line too many and one too few are each noticed."""
    source = named("masked").source
    marks = analyse(source)["reading"]["marks"]
    check_marks(source, marks, MARKS["masked"])
    fewer = {start: kind for start, kind in MARKS["masked"].items() if kind == "rows"}
    for wrong in ({**MARKS["masked"], "total = ": "rows"}, {**MARKS["masked"], "import jax.numpy": "same"}, fewer):
        with pytest.raises(AssertionError):
            check_marks(source, marks, wrong)


@pytest.mark.full
def test_a_mean_of_means_is_shown_to_be_wrong(analyse):
    naive = analyse(named("masked").source)["verification"]["naive"]
    assert not naive["same"] and naive["difference"] > 1e-3
    assert naive["diagnosis"].startswith("A mean of means over unequal counts")
    table = playground.verification_table(analyse(named("masked").source)["verification"])
    assert table.count("✓ same") == 4 and table.count("✗ different") == 1


@pytest.mark.full
def test_the_plan_has_the_bytes_of_xla_and_the_choice_of_anybatch(analyse):
    """The file itself asks XLA for the bytes of the full batch and of two sizes, and `anybatch.plan` for its choice."""
    ask = """
import jax
import anybatch as ab
for size in (256, 32, 1):
    gradient = jax.value_and_grad(loss) if size == 256 else ab.value_and_grad(loss, microbatch_size=size)
    found = jax.jit(gradient).lower(*example()).compile().memory_analysis()
    print(found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes)
print(ab.plan(loss, *example(), timed=False, memory=40_000).microbatch_size)
"""
    parts = analyse(named("squares").source + ask)
    *totals, chosen = map(int, parts["prints"]["text"].splitlines())
    candidates = parts["plan"]["candidates"]
    ours = {each["size"]: each["total"] for each in candidates}

    assert [ours[size] for size in (256, 32, 1)] == totals
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 3
    size = playground.choice(candidates, 40_000)["size"]
    assert size <= chosen < 2 * size  # anybatch.plan may choose a size between two powers of two


def test_a_budget_fills_what_fits_and_marks_the_choice():
    candidates = [
        {"size": size, "total": total, "arguments": 100, "gradients": 50, "seconds": 1e-3}
        for size, total in ((256, 1000), (128, 600), (64, 400))
    ]
    assert playground.choice(candidates, 600)["size"] == 128
    assert playground.choice(candidates, 599)["size"] == 64
    assert playground.choice(candidates, 399) is None
    filled = 'fill="var(--ab-rows)"><title>'
    for budget, fitting in ((1000, 3), (999, 2), (400, 1), (399, 0)):
        picture = playground.plan_picture(candidates, budget)
        assert picture.count(filled) == fitting
        assert picture.count('r="6.5"') == (1 if fitting else 0)
    assert "microbatches of 128 examples, the largest that fits" in playground.choice_in_words(candidates, 700)
    assert "nothing fits. Even microbatches of 64 take 400 B" in playground.choice_in_words(candidates, 300)


@pytest.mark.parametrize("name", ["contrastive", pytest.param("rmse", marks=pytest.mark.full)])
def test_the_frames_fill_the_buffer_to_the_gradient_of_the_full_batch(analyse, name):
    part = analyse(named(name).source)["steps"]
    for size in map(int, part["sizes"]):
        frames = playground.frames(part, size)
        microbatches = -(-part["examples"] // size)
        stages = [frame.stage for frame in frames if frame.current is not None]
        assert stages == (
            ["first"] * microbatches + ["second"] * microbatches if part["passes"] == 2 else ["only"] * microbatches
        )
        assert not any(frames[0].bars)
        np.testing.assert_allclose(frames[-1].bars, part["expected"], rtol=1e-12)
        assert frames[-1].words.startswith("Equals the full batch's gradient")
        # The control: before the last microbatch, the buffer is another one.
        before = [frame for frame in frames if frame.current is not None][-2]
        assert not np.allclose(before.bars, part["expected"], rtol=1e-3)
        for frame in frames:
            assert playground.steps_picture(part, size, frame).startswith("<svg")


def in_this_process(source):
    """The parts for a file that cannot be loaded, which needs no process of its own."""
    parts = []
    analysis.analyse(source, lambda of: None, parts.append)
    return {part["part"]: part for part in parts}


@pytest.fixture
def no_module(monkeypatch):
    """Forgets the learner's module at the end of a test."""
    monkeypatch.setitem(sys.modules, "loss", None)


@pytest.mark.full
def test_an_error_names_its_line(analyse, no_module):
    in_the_loss = "import numpy as np\nparams, batch = 1.0, np.ones(4)\ndef loss(p, b):\n    return b.missing\n"
    for run, source, line, title, message in (
        (analyse, in_the_loss, 4, "AttributeError", "missing"),
        (analyse, "x = 1\nopen('/tmp/playground', 'w')\n", 2, "PermissionError", "only in its own empty folder"),
        (in_this_process, "x = 1\ny = (2\n", 2, "SyntaxError", "never closed"),
        (in_this_process, "x = 1\nraise ValueError('mine')\n", 2, "ValueError", "mine"),
        (in_this_process, "import sys\nsys.exit(3)\n", 2, "SystemExit", "3"),
    ):
        (error,) = run(source).values()
        assert (error["line"], error["title"]) == (line, title)
        assert message in error["message"]
        assert f"Line {line}: {title}" in playground.problem(error)


def test_a_file_without_a_loss_says_what_it_must_define(no_module):
    for source, message in (
        ("x = 1\n", "no function loss; it defines x"),
        ("def loss(params, batch):\n    return 0.0\n", "neither example() nor params and batch; it defines loss"),
        ("def loss(params, batch):\n    return 0.0\ndef example():\n    return 3\n", "example() returned int"),
    ):
        (error,) = in_this_process(source).values()
        assert error["line"] is None and error["title"] == ""
        assert message in error["message"] and analysis.CONTRACT in error["message"]


def test_an_error_of_anybatch_is_shown_as_it_is(analyse):
    source = "import jax.numpy as jnp\ndef loss(p, b):\n    return p * jnp.mean(b['x'])\n"
    (error,) = analyse(f"{source}params, batch = 1.0, {{'x': jnp.ones(3), 'y': jnp.ones(4)}}\n").values()
    assert error["of"] == "reading" and error["title"] == ""
    assert "same number of examples along axis 0" in error["message"]


@pytest.mark.full
def test_a_part_that_fails_leaves_the_others(analyse):
    """A loss for 16 examples only can be read, planned and verified, and not be shown with 12 of them."""
    parts = analyse(
        "import jax.numpy as jnp\nparams, batch = jnp.ones(2), jnp.ones((16, 2))\n"
        "def loss(params, batch):\n    return jnp.mean(batch @ params + jnp.ones(16))\n"
    )
    assert parts.keys() == {"reading", "plan", "verification", "error"} and parts["verification"]["ok"]
    assert (parts["error"]["of"], parts["error"]["line"]) == ("steps", 4)
    assert "it may rely on there being 16" in parts["error"]["message"]


def test_what_is_shown_is_escaped():
    error = {"title": "", "line": None, "message": "<script>alert(1)</script>"}
    assert "<script>" not in playground.problem(error)
    mark = {"line": 1, "kind": "rows", "values": [{"kind": "rows", "type": "<b>"}]}
    assert "<b>" not in playground.line_table([mark])


@pytest.mark.full
def test_params_and_batch_of_the_file_are_taken(analyse):
    parts = analyse(
        "import jax.numpy as jnp\nparams, batch = jnp.ones(2), jnp.ones((8, 2))\nprint('printed')\n"
        "def loss(params, batch):\n    return jnp.mean(batch @ params)\n"
    )
    assert parts["reading"]["examples"] == 8 and parts["reading"]["marks"][0]["line"] == 5
    assert parts["prints"]["text"] == "printed\n"


@pytest.mark.parametrize(
    "source, line", [(ENDLESS, 7), ("x = 1\nwhile True:\n    pass\n", 3)], ids=["in the loss", "in the file"]
)
def test_an_endless_loop_is_ended(runner, folders, source, line):
    """It is ended within its limit, is said to be so at its line, and leaves nothing behind."""
    analyst = Analyst(AnalysisLimits(seconds=1.0))

    async def look():
        parts = [part async for part in analyst.analyse(source)]
        await analyst.close()
        return parts

    start = time.monotonic()
    *parts, _ = runner.run(look())
    (error,) = parts
    assert error["message"].startswith("Stopped: your code ran for more than 1 second,")
    assert error["line"] in (line - 1, line)
    assert time.monotonic() - start < 30  # most of it is the start of the process, on a busy machine
    assert not list(folders.iterdir())


def test_a_new_run_ends_the_old_one(runner, folders):
    analyst = Analyst()

    async def look():
        task = asyncio.ensure_future(anext(analyst.analyse(ENDLESS)))
        await asyncio.sleep(0.5)
        assert len(list(folders.iterdir())) == 1
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await analyst.close()

    start = time.monotonic()
    runner.run(look())
    assert time.monotonic() - start < AnalysisLimits().seconds
    assert not list(folders.iterdir())


def test_a_file_that_is_too_large_is_refused(analyse):
    (error,) = analyse("#" * (analysis.LARGEST_SOURCE + 1)).values()
    assert re.search(r"may have 100,000 characters, and this one has 100,001", error["message"])


def test_the_labels_are_at_the_ends_of_their_lines():
    source = "a = 1\nbb = 2\n"
    (line, label) = playground.decorations(source, [{"line": 2, "kind": "couples", "values": []}])
    assert line["line"] == 2 and "ab-play-couples" in line["class"]
    assert source[: label["position"]] == "a = 1\nbb = 2" and label["text"] == "couples"


def test_every_kind_has_words_and_a_colour():
    assert playground.WORDS.keys() == set(analysis.KINDS)
    for kind, (label, _) in playground.WORDS.items():
        assert label and f".ab-play-{kind}" in playground.CSS and f".ab-play-of-{kind}" in playground.CSS
    assert len({label for label, _ in playground.WORDS.values()}) == len(playground.WORDS)
