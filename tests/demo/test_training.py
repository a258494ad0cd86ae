"""A GPT, the text that it learns, and its settings."""

import dataclasses
import json
import os
import re
import tomllib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anybatch as ab
from anybatch.demo import gpt as gpt_module
from anybatch.demo import job
from anybatch.demo.config import RunConfig, example
from anybatch.demo.gpt import GPT, count
from anybatch.demo.job import RunFolder
from anybatch.demo.text import Corpus, Vocabulary, Windows, read_text
from anybatch.report import Report
from anybatch.report.figures import visible
from anybatch.training import checkpoint_folder
from anybatch.training.checkpoints import Checkpoints
from anybatch.training.sources import open_source

pytestmark = pytest.mark.thorough  # what it tests does not depend on the version of JAX

SHAPE = GPT(vocabulary=11, context=6, layers=2, heads=2, width=8)
LOSS, LOGITS = jax.jit(SHAPE.loss), jax.jit(SHAPE.logits)
TOKENS = np.random.default_rng(0).integers(0, 11, (12, 7)).astype(np.int32)


@pytest.fixture(scope="module")
def params():
    return SHAPE.init(jax.random.key(0))


# The text


@pytest.mark.parametrize("level", ["characters", "bytes"])
def test_a_text_comes_back_as_it_was(level):
    text = "Grüße, \N{SNOWMAN} and \N{GRINNING FACE}.\n"
    vocabulary = Vocabulary.of(text, level)
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert vocabulary.size == (256 if level == "bytes" else len(set(text)))


def test_windows_are_those_of_the_text():
    ids = np.arange(50) ** 2
    for row in Windows(ids, context=4, batch_size=32, seed=0).batch(0)["tokens"]:
        start = int(row[0] ** 0.5)
        assert row.tolist() == ids[start : start + 5].tolist()


def test_windows_begin_everywhere():
    starts = Windows(np.arange(10), context=4, batch_size=200, seed=0).batch(0)["tokens"][:, 0]
    assert set(starts.tolist()) == set(range(6))


def test_windows_go_on_where_they_stopped():
    windows = Windows(np.arange(500), context=4, batch_size=8, seed=3)
    opened = open_source(windows)
    drawn = [next(opened) for _ in range(6)]
    position = json.loads(json.dumps(drawn[2][1]))
    resumed = open_source(windows, position=position)
    for batch, _ in drawn[3:]:
        np.testing.assert_array_equal(next(resumed)[0]["tokens"], batch["tokens"])
    # The control: other batches, and other seeds, are different.
    other = Windows(np.arange(500), context=4, batch_size=8, seed=4).batch(0)["tokens"]
    assert (drawn[0][0]["tokens"] != drawn[1][0]["tokens"]).any() and (other != drawn[0][0]["tokens"]).any()


def test_what_is_held_back_is_not_learned_from():
    text = "".join(map(chr, range(1000, 1200)))
    corpus = Corpus.of(text, level="characters", context=5, validation=0.25)
    assert corpus.vocabulary.decode(corpus.training) == text[:150]
    windows = corpus.validation_windows(5, most=4)
    assert windows.shape == (4, 6) and windows.min() == 150 and windows.max() >= 190
    assert Corpus.of(text, level="characters", context=5, validation=0.0).validation.size == 0


def test_texts_that_cannot_be_learned(tmp_path):
    with pytest.raises(ab.InputError, match=r"must be a file that can be read, got text = .*No such file"):
        read_text(str(tmp_path / "missing.txt"))
    with pytest.raises(ab.InputError, match="must be a file that can be read"):
        read_text(str(tmp_path))
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ab.InputError, match="0 bytes"):
        read_text(str(tmp_path / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin1"))
    with pytest.raises(ab.InputError, match=r'byte 2 is 0xfc.\nConvert it: iconv .* level = "bytes"'):
        read_text(str(tmp_path / "latin.txt"))
    text = read_text(str(tmp_path / "latin.txt"), "bytes")
    assert Vocabulary.of(text, "bytes").encode(text).tobytes() == "Grüße".encode("latin1")
    with pytest.raises(ab.InputError, match=r"with 20 characters, of which 2 are held back .*context=8"):
        Corpus.of("x" * 20, level="characters", context=8, validation=0.1)
    (tmp_path / "wide.txt").write_text("Grüße", "utf-16")
    with pytest.raises(ab.InputError, match="iconv -f utf-16 -t utf-8"):
        read_text(str(tmp_path / "wide.txt"))
    with pytest.raises(ab.InputError, match="got 'q'"):
        Vocabulary.of("banana", "characters").encode("qab")


@pytest.mark.parametrize(
    "length, context, validation", [(20, 8, 0.1), (20, 12, 0.9), (20, 30, 0.1), (2, 1, 0.5), (2, 9, 0.0), (1, 1, 0.1)]
)
def test_what_a_short_text_is_told_to_do_would_do(length, context, validation):
    given = {"context": context, "validation": validation}
    with pytest.raises(ab.InputError, match="Take a longer text") as error:
        Corpus.of("x" * length, level="characters", **given)
    ways = dict(re.findall(r"(context|validation) = ([\d.]+\d|\d)", error.value.remedy))
    for name, value in ways.items():
        Corpus.of("x" * length, level="characters", **given | {name: float(value) if "." in value else int(value)})
    assert bool(ways) == (length > 1)


def test_what_is_printed_does_nothing_to_a_terminal(capsys):
    assert visible("a\r\nb\tc\x1b[2J\x07\x9b") == "a\nb\tc\\x1b[2J\\x07\\x9b"
    job._Speaker(job._console()).text("a\x1b[2Jb")
    assert capsys.readouterr().out == "a\\x1b[2Jb\n"


def test_the_fables_are_there():
    text = read_text("")
    assert 18_000 < len(text) < 25_000 and text.isascii()
    assert text.count("So says the owl in the old oak tree:") == text.count("\n\nThe ") + 1


# The model


def test_no_token_looks_ahead(params):
    before = LOGITS(params, TOKENS[:, :-1])
    changed = TOKENS[:, :-1].copy()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    after = LOGITS(params, changed)
    np.testing.assert_array_equal(after[:, :3], before[:, :3])
    assert (jnp.abs(after[:, 3:] - before[:, 3:]).max(axis=(0, 2)) > 1e-6).all()  # the control


def test_where_a_text_begins_does_not_matter(params):
    """Rotations tell how far apart tokens are, and nothing else: a text after one that is never looked at."""
    query, key = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 4)).astype(np.float32)
    angles = gpt_module._angles(9, 4)

    def product(here, there):
        turned = [gpt_module._rotate(x, angles[place : place + 1]) for x, place in ((query, here), (key, there))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert product(5, 3) == pytest.approx(product(8, 6), rel=1e-5)
    assert product(5, 3) != pytest.approx(product(8, 5), rel=1e-3)


def test_the_loss_is_the_mean_cost_of_a_token(params):
    probabilities = np.asarray(jax.nn.softmax(LOGITS(params, TOKENS[:, :-1])))
    costs = [-np.log(probabilities[row, place, TOKENS[row, place + 1]]) for row in range(12) for place in range(6)]
    np.testing.assert_allclose(LOSS(params, TOKENS), np.mean(costs), rtol=1e-5)


def test_layers_as_a_loop_and_one_by_one_are_the_same(params, monkeypatch):
    one_by_one = LOSS(params, TOKENS)
    monkeypatch.setattr(gpt_module, "FEW", 0)
    as_a_loop = jax.jit(lambda params: SHAPE.loss(params, TOKENS))
    assert "while" in as_a_loop.lower(params).as_text()
    np.testing.assert_allclose(as_a_loop(params), one_by_one, rtol=1e-6)


def test_dropout_needs_a_key_and_narrow_layers_come_close(params):
    with_dropout = jax.jit(dataclasses.replace(SHAPE, dropout=0.5).loss)
    assert with_dropout(params, TOKENS) == LOSS(params, TOKENS)
    assert with_dropout(params, TOKENS, jax.random.key(1)) != LOSS(params, TOKENS)
    narrow = jax.jit(dataclasses.replace(SHAPE, dtype="bfloat16").loss)(params, TOKENS)
    assert narrow.dtype == jnp.float32 and 0 < abs(narrow - LOSS(params, TOKENS)) < 0.03


@pytest.mark.parametrize("few", [0, 3], ids=["a loop", "one by one"])
def test_a_window_is_an_example_and_keeps_its_mask(params, monkeypatch, few):
    monkeypatch.setattr(gpt_module, "FEW", few)
    loss = dataclasses.replace(SHAPE, dropout=0.3).loss
    reading = ab.read(loss, params, TOKENS, jax.random.key(2))
    assert (reading.kind, reading.passes, reading.randomness) == ("mean over 12 examples", 1, "exact")


def test_at_temperature_zero_it_writes_what_is_likeliest(params):
    text = SHAPE.sample(params, jnp.array([3, 1]), jax.random.key(0), length=9, temperature=0.0).tolist()
    expected = [3, 1]
    for _ in range(9):
        window = np.zeros((1, 6), np.int32)  # what comes after the last one does not matter
        window[0, : len(expected)] = expected[-6:]
        expected.append(int(np.argmax(LOGITS(params, window)[0, min(len(expected), 6) - 1])))
    assert text == expected


def test_it_draws_by_the_key(params):
    def sample(seed):
        return SHAPE.sample(params, jnp.array([3]), jax.random.key(seed), length=9).tolist()

    assert sample(0) == sample(0) != sample(1)


def test_count(params):
    assert count(params) == 11 * 8 + 2 * (8 + 8 * 24 + 8 * 8 + 8 + 8 * 32 + 32 * 8) + 8


# Settings


def test_the_example_has_the_defaults(tmp_path):
    (tmp_path / "run.toml").write_text(example())
    assert RunConfig.read(tmp_path / "run.toml") == RunConfig()
    assert set(tomllib.loads(example())) == {field.name for field in dataclasses.fields(RunConfig)}


@pytest.mark.parametrize(
    "text, said",
    [
        ("steps = 5\nlearning_rat = 1\n", r"'learning_rat' in .*run.toml, line 2.\nDid you mean learning_rate\? There"),
        ("[model]\nlayers = 2", "'model' in .*, line 1.\nThere are: text"),
        (
            "steps = 1.5",
            r"steps must be a whole number of at least 1 and at most 1,000,000,000, got steps = 1.5 in .*line 1.\n"
            "For example: steps",
        ),
        ("steps = true", "got steps = true"),
        ("\ndropout = 1.0", "dropout must be a number of at least 0 and below 1, got dropout = 1.0 in .*, line 2"),
        ("steps = 1000000001", "steps must be .*, got steps = 1000000001"),
        ("batch = 10000000000", "batch must be a whole number of at least 1 and at most 10,000,000, got"),
        ("weight_decay = inf", "weight_decay must be a number of at least 0, got weight_decay = inf"),
        ("temperature = nan", "got temperature = nan"),
        ("learning_rate = inf", "got learning_rate = inf"),
        (f"learning_rate = 1{'0' * 400}", "learning_rate must be a number above 0"),
        (f"steps = 1{'0' * 5000}", "must be TOML"),
        ('out = " "', 'out must be a text in quotes, and not empty, got out = " "'),
        ("clip = inf", "clip must be a number above 0, got clip = inf"),
        ('dtype = "float64"', 'dtype must be one of "float32", "bfloat16", got dtype = "float64"'),
        ("text = 3", "text must be a text in quotes, got text = 3"),
        ("verify = 1", "verify must be true or false, got verify = 1"),
        ("width = 100\nheads = 8", "width must be a multiple of twice the heads, got .*\nFor example: width = 96"),
        ('memory = "much"', "memory must be a number of bytes"),
        ("steps 5", "must be TOML.*line 1"),
        ("steps = 5\0", "must be TOML.*line 1"),
        ("steps = " + "[" * 5000, "must be TOML"),
        (
            'text = "a\\u0000b"',
            r'text must be the name of a file or a folder, .*, got text = "a\\u0000b" in',
        ),
        (
            'out = "a\\u0000b"',
            r'out must be the name of a file or a folder, .*, got out = "a\\u0000b" in',
        ),
        ('report = "a\\u0000b"', "report must be the name of a file or a folder, "),
    ],
)
def test_settings_that_are_not_allowed(tmp_path, text, said):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ab.InputError, match=f"(?s){said}"):
        RunConfig.read(tmp_path / "run.toml")


def test_a_file_of_settings_that_is_not_there():
    with pytest.raises(ab.InputError, match=r"Make one: anybatch train --example > missing.toml"):
        RunConfig.read("missing.toml")


def special(kind, path):
    """Something at a path that is no file to be read."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, 2**33)
    elif kind == "closed":
        path.write_text("steps = 1")
        path.chmod(0)
    return path


SPECIAL = {
    "folder": "a folder",
    "pipe": "a device, pipe or socket, not a regular file",
    "device": "a device, pipe or socket, not a regular file",
    "huge": "8,589,934,592 bytes, more than the limit of",
    "closed": "Permission denied",
    "missing": "No such file or directory",
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_refused_at_once(tmp_path, kind):
    """Nothing waits for a pipe, and nothing reads a device to its end, which it has not."""
    path = special(kind, tmp_path / "it")
    if kind == "closed" and os.access(path, os.R_OK):
        pytest.skip("the superuser may read everything")
    with pytest.raises(ab.InputError, match="(?s)The settings must be in a file that can be read.*" + SPECIAL[kind]):
        RunConfig.read(path)
    with pytest.raises(ab.InputError, match="(?s)The text must be a file that can be read.*" + SPECIAL[kind]):
        read_text(str(path))


def test_names_that_no_file_can_have(tmp_path):
    with pytest.raises(ab.InputError, match=r"got 'a\\x00b' \(no file can have such a name\)"):
        RunConfig.read("a\0b")
    with pytest.raises(ab.InputError, match=r"text = 'a\\x00b' \(no file can have such a name\)"):
        read_text("a\0b")
    with pytest.raises(ab.InputError, match="File name too long"):
        RunConfig.read("a" * 5000)
    with pytest.raises(ab.InputError, match="No such file"):
        read_text("~nobody-of-that-name/text.txt")
    (tmp_path / "latin.toml").write_bytes('prompt = "\xe4"'.encode("latin-1"))
    with pytest.raises(ab.InputError, match="not UTF-8"):
        RunConfig.read(tmp_path / "latin.toml")


def test_a_folder_of_a_run_with_a_pipe_in_it(config, tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "settings.json")
    with pytest.raises(ab.InputError):
        job.Job(dataclasses.replace(config, out=str(tmp_path / "run")))


# The job


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abcab cabca " * 20)
    settings = RunConfig(
        text="text.txt",
        layers=1,
        heads=1,
        width=8,
        context=8,
        batch=16,
        steps=4,
        learning_rate=1e-2,
        evaluate_every=2,
        checkpoint_every=2,
        sample=10,
        verify=False,
        validation=0.2,
    )
    with jax.numpy_dtype_promotion("standard"):  # the schedules of optax need it
        yield settings


def test_a_run_from_its_beginning_to_its_report(config, tmp_path, capsys):
    assert job.run(config, command="anybatch train") == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    for part in (
        "mean over 16 examples",
        "All 16 at once take",
        "Before training\nabcab ca",
        "After 4 steps\nabcab ca",
    ):
        assert part in said
    assert "The gradient noise scale" in said and "The report: anybatch-report.html" in said
    page = (tmp_path / "anybatch-report.html").read_text()
    assert "A GPT learns text.txt" in page and "After 4 steps" in page
    out = tmp_path / "anybatch-run"
    assert json.loads((out / "vocabulary.json").read_text()) == {"level": "characters", "characters": " abc"}
    assert len((out / "log.csv").read_text().splitlines()) == 5
    settings = (out / "settings.json").read_bytes()
    assert json.loads(settings)["run"] == "train"

    # What is there is not written over, and goes on with the same model and the same text alone.
    with pytest.raises(ab.InputError, match=r"with a run of 4 steps\.\nLeave --no-resume out"):
        job.Job(config, resume=False)
    for change, said in (
        ({"width": 16}, "got width = 16, and width = 8 in .*\nGo on with width = 8, or .* rm -r"),
        ({"dropout": 0.1}, "got dropout = 0.1, and dropout = 0.0 in"),
        ({"level": "bytes"}, 'got level = "bytes", and level = "characters" in'),
    ):
        with pytest.raises(ab.InputError, match=said):
            job.Job(dataclasses.replace(config, **change))
    for text in ("abcdab dcabca " * 20, "acbab cabca " * 20):
        (tmp_path / "other.txt").write_text(text)
        with pytest.raises(ab.InputError, match="must have the text it had before"):
            job.Job(dataclasses.replace(config, text="other.txt"))
    # The demo is not to begin there, be it at its end or not.
    for steps, resume in ((4, True), (9, True), (9, False)):
        with pytest.raises(ab.InputError, match="a run of 4 steps that is not the demo's"):
            job.Job(dataclasses.replace(config, steps=steps), resume=resume, is_demo=True)
    # The control: what may change is told.
    (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
    moved = dataclasses.replace(config, text="moved.txt", batch=32, seed=1, sample=5)
    notes = ["It goes on with batch = 32, was 16.", "It goes on with seed = 1, was 0."]
    going_on = job.Job(moved)
    assert going_on.folder.changes() == notes and going_on.folder.steps_saved() == 4
    assert (out / "settings.json").read_bytes() == settings


def run_folder(config, **options):
    return RunFolder(config, "abc", Vocabulary("abc"), name="it", **options)


def checkpoint(folder, step):
    """What is taken for one."""
    (folder / str(step) / "record").mkdir(parents=True)
    (folder / str(step) / "record" / "metadata").touch()
    (folder / ".anybatch-checkpoints").touch()


def test_the_demo_clears_its_own_run_and_nothing_else(tmp_path):
    config = RunConfig(out=str(tmp_path / "run"), steps=5)
    run_folder(config, is_demo=True).begin()
    out, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    checkpoint(checkpoints, 3)
    checkpoint(checkpoints, 5)
    (out / "log.csv").touch()
    (out / "notes.txt").touch()
    assert not run_folder(dataclasses.replace(config, steps=6), is_demo=True).is_replaced  # it goes on
    (checkpoints / "thesis.tex").touch()
    for resume in (True, False):
        with pytest.raises(ab.InputError, match=r"nothing but checkpoints among its own, got .* with thesis.tex"):
            run_folder(config, is_demo=True, resume=resume)
    (checkpoints / "thesis.tex").unlink()
    again = run_folder(config, is_demo=True)
    assert again.steps_saved() is None and again.steps_on_disk() == 5 and (out / "log.csv").exists()
    again.begin()
    assert again.steps_on_disk() is None and not again.is_replaced
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoints",
        "notes.txt",
        "settings.json",
        "vocabulary.json",
    ]


@pytest.mark.parametrize("name", ["log.csv", "settings.json", "vocabulary.json", "checkpoints/model.pt"])
@pytest.mark.parametrize("resume", [True, False])
def test_files_of_others_are_left_alone(tmp_path, name, resume):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    for is_demo in (True, False):
        with pytest.raises(ab.InputError, match=f"must be new, or one of a run, got .* with {name}"):
            run_folder(RunConfig(out=str(tmp_path)), resume=resume, is_demo=is_demo)
    assert (tmp_path / name).read_text() == "{}" and len(list(tmp_path.iterdir())) == 1


def test_settings_of_another_program_are_left_alone(tmp_path):
    (tmp_path / "settings.json").write_text('{"run": "fast"}')
    with pytest.raises(ab.InputError, match=r"must be new, or one of a run, got .* with settings.json"):
        run_folder(RunConfig(out=str(tmp_path)))


def test_a_report_goes_home_or_into_the_folder(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert job.Job(dataclasses.replace(config, report="~/r.html")).report == tmp_path / "r.html"
    job.Job(dataclasses.replace(config, out="new/run", report="new/run/r.html"))
    with pytest.raises(ab.InputError, match=r"report = 'new/other/r\.html'"):
        job.Job(dataclasses.replace(config, out="new/run", report="new/other/r.html"))


@pytest.mark.parametrize(
    "losses, said",
    [
        ([4.0, 3.0], "the loss fell from 4.00 to 3.00."),
        ([3.0, 4.0], "the loss rose from 3.00 to 4.00."),
        ([3.0, 9.0, 3.001], "the loss did not change, and is 3.00."),
        ([3.0, float("nan"), 2.0, float("nan"), float("inf")], "the loss is not finite since step 4."),
    ],
)
def test_what_became_of_the_loss(losses, said):
    history = [{"step": step, "loss": loss, "eval.loss": loss} for step, loss in enumerate(losses, 1)]
    notes = job._learned(types.SimpleNamespace(history=history, steps=len(losses), seconds=1.0))
    assert notes[0].endswith(f": {said}")
    assert ("not finite" in notes[1]) == ("not finite" in said)


def test_a_signal_after_the_last_step_costs_no_report(config, tmp_path, monkeypatch, capsys):
    def stopped(*arguments, steps, **options):
        fitted = ab.fit(*arguments, steps=min(steps, 3), **options)
        return dataclasses.replace(fitted, stopped_by="SIGTERM")

    monkeypatch.setattr(job, "fit", stopped)
    assert job.run(config, command="again") == 143
    assert "To go on: again" in capsys.readouterr().out and not (tmp_path / "anybatch-report.html").exists()
    assert job.run(dataclasses.replace(config, steps=3, batch=15), command="again") == 143
    said = capsys.readouterr().out
    assert "To go on" not in said and "It goes on with batch = 15, was 16." in said
    assert (tmp_path / "anybatch-report.html").exists()


def test_a_report_takes_the_place_of_nothing_else(config, tmp_path, monkeypatch):
    """Neither of the text, nor of the settings, nor of what the run itself writes."""
    (tmp_path / "run.toml").write_text('report = "run.toml"')
    (tmp_path / "link.html").symlink_to("text.txt")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for report, words in [("text.txt", "which is the text"), ("link.html", "the text"), ("run.toml", "something else")]:
        with pytest.raises(ab.InputError, match=rf"got report = '{report}', .*{words}\."):
            job.run(dataclasses.replace(config, report=report), command="again")
    for report in ("log.csv", "settings.json", "vocabulary.json", "LOG.csv", "checkpoints/r.html", "checkpoints"):
        with pytest.raises(ab.InputError) as caught:
            job.run(dataclasses.replace(config, report=f"anybatch-run/{report}"), command="again")
        assert str(caught.value) == (
            "The report must be a file of its own, got "
            f"report = 'anybatch-run/{report}', which the run writes itself.\n"
            'For example: report = "anybatch-report.html"'
        )
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    Report("A run", []).write(tmp_path / "page.html")  # a report may be the text, too
    page = (tmp_path / "page.html").read_bytes()
    with pytest.raises(ab.InputError, match=r"of its own, got report = 'page.html', which is the text\."):
        job.run(dataclasses.replace(config, text="page.html", report="page.html"), command="again")
    assert (tmp_path / "page.html").read_bytes() == page
    job.Job(dataclasses.replace(config, report="page.html"))  # the control


def test_a_file_that_comes_while_the_run_goes_on_is_not_replaced_by_the_report(config, tmp_path, monkeypatch):
    def slow(*arguments, **options):
        (tmp_path / "anybatch-report.html").write_text("mine")
        return ab.fit(*arguments, **options)

    monkeypatch.setattr(job, "fit", slow)
    with pytest.raises(ab.InputError, match="replaces no file but a report of anybatch"):
        job.run(config, command="again")
    assert (tmp_path / "anybatch-report.html").read_text() == "mine"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert job.run(dataclasses.replace(config, report="r.html"), command="again") == 0  # nothing was lost
    assert (tmp_path / "r.html").exists()


def test_a_second_run_does_not_change_what_the_first_was_told(tmp_path, monkeypatch):
    """Both began in a new folder; the first has the checkpoints open."""
    monkeypatch.setattr(checkpoint_folder, "_PATIENCE", 0.1)
    config = RunConfig(out=str(tmp_path / "run"), steps=5)
    first, second = run_folder(config), run_folder(dataclasses.replace(config, width=256))
    first.begin()
    told = (tmp_path / "run" / "settings.json").read_bytes()
    with Checkpoints(tmp_path / "run" / "checkpoints"), pytest.raises(ab.InputError, match="must have one writer only"):
        second.begin()
    assert (tmp_path / "run" / "settings.json").read_bytes() == told


def test_nothing_is_begun_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ab.InputError, match="folder of a run must be one that can be written, got out = 'file'"):
        job.Job(dataclasses.replace(config, out="file"))
    with pytest.raises(ab.InputError, match=r"report = 'missing/r.html'.\nFor example .* mkdir -p"):
        job.Job(dataclasses.replace(config, report="missing/r.html"))
    with pytest.raises(ab.InputError, match="got 'Z'"):
        job.Job(dataclasses.replace(config, prompt="Z"))
