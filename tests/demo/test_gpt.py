"""The GPT of the demo."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anybatch as ab
from anybatch.demo import gpt as gpt_module
from anybatch.demo.gpt import GPT, count

SHAPE = GPT(vocabulary=11, context=6, layers=2, heads=2, width=8)
LOSS, LOGITS = jax.jit(SHAPE.loss), jax.jit(SHAPE.logits)
TOKENS = np.random.default_rng(0).integers(0, 11, (12, 7)).astype(np.int32)


@pytest.fixture(scope="module")
def params():
    return SHAPE.init(jax.random.key(0))


@pytest.mark.full
def test_no_token_looks_ahead(params):
    before = LOGITS(params, TOKENS[:, :-1])
    changed = TOKENS[:, :-1].copy()
    changed[:, 3] = (changed[:, 3] + 1) % 11
    after = LOGITS(params, changed)
    np.testing.assert_array_equal(after[:, :3], before[:, :3])
    assert (jnp.abs(after[:, 3:] - before[:, 3:]).max(axis=(0, 2)) > 1e-6).all()  # the control


def test_rotary_products_depend_on_the_distance_only(params):
    query, key = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 4)).astype(np.float32)
    angles = gpt_module._angles(9, 4)

    def product(here, there):
        turned = [gpt_module._rotate(x, angles[place : place + 1]) for x, place in ((query, here), (key, there))]
        return float(jnp.sum(turned[0] * turned[1]))

    assert product(5, 3) == pytest.approx(product(8, 6), rel=1e-5)
    assert product(5, 3) != pytest.approx(product(8, 5), rel=1e-3)


def test_the_loss_is_the_mean_cross_entropy(params):
    probabilities = np.asarray(jax.nn.softmax(LOGITS(params, TOKENS[:, :-1])))
    costs = [-np.log(probabilities[row, place, TOKENS[row, place + 1]]) for row in range(12) for place in range(6)]
    np.testing.assert_allclose(LOSS(params, TOKENS), np.mean(costs), rtol=1e-5)


def test_scanned_and_unrolled_layers_agree(params, monkeypatch):
    one_by_one = LOSS(params, TOKENS)
    monkeypatch.setattr(gpt_module, "FEW", 0)
    as_a_loop = jax.jit(lambda params: SHAPE.loss(params, TOKENS))
    assert "while" in as_a_loop.lower(params).as_text()
    np.testing.assert_allclose(as_a_loop(params), one_by_one, rtol=1e-6)


@pytest.mark.full
def test_dropout_needs_a_key_and_bfloat16_is_close(params):
    with_dropout = jax.jit(dataclasses.replace(SHAPE, dropout=0.5).loss)
    assert with_dropout(params, TOKENS) == LOSS(params, TOKENS)
    assert with_dropout(params, TOKENS, jax.random.key(1)) != LOSS(params, TOKENS)
    narrow = jax.jit(dataclasses.replace(SHAPE, dtype="bfloat16").loss)(params, TOKENS)
    assert narrow.dtype == jnp.float32 and 0 < abs(narrow - LOSS(params, TOKENS)) < 0.03


@pytest.mark.parametrize("few", [0, 3], ids=["scanned", "unrolled"])
def test_the_loss_is_read_as_a_mean_over_windows_with_exact_dropout(params, monkeypatch, few):
    monkeypatch.setattr(gpt_module, "FEW", few)
    loss = dataclasses.replace(SHAPE, dropout=0.3).loss
    reading = ab.read(loss, params, TOKENS, jax.random.key(2))
    assert (reading.kind, reading.passes, reading.randomness) == ("mean over 12 examples", 1, "exact")


def test_at_temperature_zero_the_likeliest_token_is_sampled(params):
    text = SHAPE.sample(params, jnp.array([3, 1]), jax.random.key(0), length=9, temperature=0.0).tolist()
    expected = [3, 1]
    for _ in range(9):
        window = np.zeros((1, 6), np.int32)  # tokens after the last one do not matter
        window[0, : len(expected)] = expected[-6:]
        expected.append(int(np.argmax(LOGITS(params, window)[0, min(len(expected), 6) - 1])))
    assert text == expected


def test_samples_depend_on_the_key(params):
    def sample(seed):
        return SHAPE.sample(params, jnp.array([3]), jax.random.key(seed), length=9).tolist()

    assert sample(0) == sample(0) != sample(1)


def test_count(params):
    assert count(params) == 11 * 8 + 2 * (8 + 8 * 24 + 8 * 8 + 8 + 8 * 32 + 32 * 8) + 8
