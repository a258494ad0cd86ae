"""A GPT trained within a memory budget has the loss curve of one trained on the full batch."""

import importlib.resources

import jax
import numpy as np
import optax
import pytest

import anybatch as ab
from anybatch.demo.gpt import GPT
from anybatch.demo.text import Corpus, Windows

BUDGET = "3MiB"


def curve(examples, steps=8, **options):
    """The losses of a run, and the bytes that its step takes."""
    text = importlib.resources.files("anybatch.demo").joinpath("fables.txt").read_text()
    corpus = Corpus.of(text, level="characters", context=16, validation=0.0)
    gpt = GPT(corpus.vocabulary.size, context=16, layers=2, heads=2, width=32)
    step = ab.train_step(lambda params, batch: gpt.loss(params, batch["tokens"]), optax.adamw(3e-3), **options)
    batches = Windows(corpus.training, context=16, batch_size=examples, seed=0)
    state = step.init(gpt.init(jax.random.key(0)))
    stats = step.lower(state, batches.batch(0)).compile().memory_analysis()
    taken = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    run = ab.fit(step, state, batches, steps=steps, progress=False)
    return np.asarray([row["loss"] for row in run.history]), taken - stats.alias_size_in_bytes


@pytest.fixture(scope="module", autouse=True)
def model_defaults_for_all():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.full
def test_a_batch_of_512_in_a_small_budget_has_the_loss_curve_of_the_full_batch():
    full, at_once = curve(512, microbatch_size=None)
    within, taken = curve(512, memory=BUDGET)
    assert taken <= 3 * 2**20 < at_once / 5
    # Rounding: sums over 8,192 tokens in float32, in another order, for eight updates.
    np.testing.assert_allclose(within, full, rtol=2e-6)
    assert full[-1] < full[0] - 0.3  # it did learn
    # The control: half the batch gives another curve.
    other, _ = curve(256, memory=BUDGET)
    assert np.max(np.abs(other - full) / full) > 3e-4
