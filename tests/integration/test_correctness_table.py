"""The table of `benchmarks/correctness.py`: its comparison can fail, and anybatch is exact on every loss in it."""

import json
import pathlib
import sys

import jax
import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import correctness  # noqa: E402
from correctness_losses import LOSSES  # noqa: E402

pytestmark = [pytest.mark.usefixtures("model_defaults"), pytest.mark.every_set]
BY_NAME = {loss.name: loss for loss in LOSSES}


def row(name, way):
    return correctness.cell(correctness.Case.of(BY_NAME[name]), way)


@pytest.mark.parametrize("name", BY_NAME)
def test_anybatch_takes_every_loss_of_the_table_as_it_is(name):
    found = row(name, "anybatch")
    assert found["outcome"] == found["unchanged"] == "exact", found
    assert found["note"] == ""


def test_a_mean_is_exact_in_every_loop():
    for way in ("plain scan", "optax.microbatch", "optax.MultiSteps"):
        found = row("mean", way)
        assert found["unchanged"] == "exact" and found["difference"] < 1e-14
    # What `default` says is what Optax does without an accumulator: it adds up the gradients of eight means.
    found = row("mean", "optax.microbatch")
    assert found["default"] == "wrong" and found["default_note"] == "8 times the gradient"


def test_a_masked_mean_is_wrong_as_it_is_and_exact_after_the_documented_rewriting():
    for way in ("plain scan", "optax.microbatch", "optax.MultiSteps"):
        found = row("masked mean over tokens", way)
        assert found["unchanged"] == "wrong" and 0.05 < found["unchanged_difference"] < 0.5
        assert found["outcome"] == "exact" and found["note"].startswith("needs sums of microbatches")


def test_a_loss_across_examples_is_exact_with_gradcache_and_wrong_in_a_scan():
    assert row("dice: ratios of sums", "GradCache's method")["outcome"] == "exact"
    found = row("dice: ratios of sums", "plain scan")
    assert found["outcome"] == "wrong" and found["difference"] > 0.1


def test_errors_are_refusals_with_their_first_line():
    found = row("ragged: 29 examples by 4", "optax.microbatch")
    assert found["outcome"] == "refused"
    assert found["note"] == "ValueError: batch_size=29 must be divisible by microbatch_size=4."


def test_the_comparison_finds_an_error_in_the_eleventh_digit():
    case = correctness.Case.of(BY_NAME["mean"])
    assert correctness.measure(lambda: case.expected, case).outcome == "exact"
    nearly = jax.tree.map(lambda leaf: leaf * (1 + 1e-11), case.expected)
    assert correctness.measure(lambda: nearly, case).outcome == "wrong"
    one_leaf = (case.expected[0] | {"b": case.expected[0]["b"] * (1 + 1e-9)},)
    assert correctness.measure(lambda: one_leaf, case).outcome == "wrong"


def test_a_peer_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(correctness.importlib.util, "find_spec", lambda name: None)
    found = row("mean", "jax_privacy")
    assert found["outcome"] == "not installed" and found["note"] == "jax_privacy is not installed"


def test_the_saved_table_has_every_cell_and_the_outcomes_of_this_code():
    saved = json.loads((BENCHMARKS / "results" / "correctness.json").read_text())["rows"]
    cells = {(each["loss"], each["way"]): each for each in saved}
    assert set(cells) == {(name, way) for name in BY_NAME for way in correctness.WAYS}
    assert len(LOSSES) == 25 and len(saved) == 25 * 7
    assert all(each["outcome"] == "exact" for each in saved if each["way"] == "anybatch")
    assert not any(each["outcome"] == "not installed" for each in saved)
    for name in ("sum", "RMSE: root of a mean", "CLIP, in-batch negatives"):
        found = row(name, "plain scan")
        assert found["outcome"] == cells[name, "plain scan"]["outcome"]
        assert found["difference"] == pytest.approx(cells[name, "plain scan"]["difference"], rel=1e-6, abs=1e-12)
