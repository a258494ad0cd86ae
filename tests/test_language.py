"""A GPT, the text that it learns, and its settings."""

import dataclasses
import json
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anybatch as ab
from anybatch.language import gpt as gpt_module
from anybatch.language import job
from anybatch.language.config import RunConfig, example
from anybatch.language.gpt import GPT, count
from anybatch.language.text import Corpus, Vocabulary, Windows, read_text
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
    with pytest.raises(ab.InputError, match="got 'q'"):
        Vocabulary.of("banana", "characters").encode("qab")


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
            r"steps must be a whole number of at least 1, got steps = 1.5 in .*line 1.\nFor example: steps",
        ),
        ("steps = true", "got steps = true"),
        ("\ndropout = 1.0", "dropout must be a number of at least 0 and below 1, got dropout = 1.0 in .*, line 2"),
        ("clip = inf", "clip must be a number above 0, got clip = inf"),
        ('dtype = "float64"', 'dtype must be one of "float32", "bfloat16", got dtype = "float64"'),
        ("text = 3", "text must be a text in quotes, got text = 3"),
        ("verify = 1", "verify must be true or false, got verify = 1"),
        ("width = 100\nheads = 8", "width must be a multiple of twice the heads, got .*\nFor example: width = 96"),
        ('memory = "much"', "memory must be a number of bytes"),
        ("steps 5", "must be TOML.*line 1"),
    ],
)
def test_settings_that_are_not_allowed(tmp_path, text, said):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ab.InputError, match=f"(?s){said}"):
        RunConfig.read(tmp_path / "run.toml")


def test_a_file_of_settings_that_is_not_there():
    with pytest.raises(ab.InputError, match=r"Make one: anybatch train --example > missing.toml"):
        RunConfig.read("missing.toml")


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

    # What is there is not written over, and goes on with the same text alone.
    with pytest.raises(ab.InputError, match=r"with a run of 4 steps\.\nLeave --no-resume out"):
        job.Job(config, resume=False)
    (tmp_path / "text.txt").write_text("abcdab dcabca " * 20)
    with pytest.raises(ab.InputError, match="must have the text it had before"):
        job.Job(config)


def test_nothing_is_begun_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ab.InputError, match="folder of a run must be one that can be written, got out = 'file'"):
        job.Job(dataclasses.replace(config, out="file"))
    with pytest.raises(ab.InputError, match=r"report = 'missing/r.html'.\nFor example .* mkdir -p"):
        job.Job(dataclasses.replace(config, report="missing/r.html"))
    with pytest.raises(ab.InputError, match="got 'Z'"):
        job.Job(dataclasses.replace(config, prompt="Z"))
