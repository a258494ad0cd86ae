"""`audit`: every mistake is found on a loop that makes it, and a right loop is never accused."""

import dataclasses
import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import anybatch as ab
from anybatch.auditing import causes
from anybatch.auditing.causes import Cause

N, SIZE = 12, 3
RANDOM = np.random.default_rng(0)
PARAMS = {
    "w": RANDOM.normal(size=(4, 5)).astype(np.float32),
    "v": RANDOM.normal(size=(5,)).astype(np.float32),
}
BATCH = {
    "x": RANDOM.normal(size=(N, 4)).astype(np.float32),
    "y": RANDOM.normal(size=(N,)).astype(np.float32),
    "mask": np.array([1, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1], np.float32),
}
KEY = jax.random.key(0)


def losses_of(params, batch):
    return (jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2


def mean_loss(params, batch):
    return jnp.mean(losses_of(params, batch))


def sum_loss(params, batch):
    return jnp.sum(losses_of(params, batch))


def masked_loss(params, batch):
    return jnp.sum(losses_of(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def norm_loss(params, batch):
    hidden = batch["x"] @ params["w"]
    hidden = (hidden - jnp.mean(hidden, 0, keepdims=True)) / (jnp.std(hidden, 0, keepdims=True) + 0.1)
    return jnp.mean((jnp.tanh(hidden) @ params["v"] - batch["y"]) ** 2)


def dropout_loss(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.7, hidden.shape), hidden, 0.0)
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def parts_of(batch, size=SIZE, drop=False):
    number = len(batch["x"]) if not drop else len(batch["x"]) // size * size
    return [rows_of(batch, start, size) for start in range(0, number, size)]


def rows_of(batch, start, size):
    return jax.tree.map(lambda leaf: leaf[start : start + size], batch)


def added(trees):
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


def scaled(tree, factor):
    return jax.tree.map(lambda leaf: leaf * factor, tree)


def mean_of(trees):
    return scaled(added(trees), 1 / len(trees))


def loop(
    loss, size=SIZE, *, weigh=lambda part, count: 1 / count, drop=False, each=lambda grads: grads, pick=slice(None)
):
    """A loop over microbatches. Its defaults are right for a mean over examples."""

    @jax.jit
    def candidate(params, batch, *args):
        parts = parts_of(batch, size, drop)
        grads = [scaled(each(jax.grad(loss)(params, part, *args)), weigh(part, len(parts))) for part in parts]
        return added(grads[pick])

    return candidate


def by_scan(loss, size=SIZE, dtype=None):
    """The usual scan over a reshaped batch, for a mean."""

    @jax.jit
    def candidate(params, batch):
        stacked = jax.tree.map(lambda leaf: leaf.reshape(-1, size, *leaf.shape[1:]), batch)
        count = len(stacked["x"])

        def body(carry, part):
            value, sums = carry
            new, grads = jax.value_and_grad(loss)(params, part)
            return (value + new, jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, grads)), None

        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype or leaf.dtype), params)
        first = jnp.zeros((), jax.dtypes.canonicalize_dtype(float) if dtype is None else jnp.result_type(params["w"]))
        (value, sums), _ = jax.lax.scan(body, (first, zeros), stacked)
        return value / count, jax.tree.map(lambda leaf, p: (leaf / count).astype(p.dtype), sums, params)

    return candidate


def clip(grads, limit=0.5):
    norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(grads)))
    return scaled(grads, jnp.minimum(1.0, limit / norm))


def tokens(part, count):
    return jnp.sum(part["mask"]) / float(BATCH["mask"].sum())


def last_leaf_only(params, batch):
    grads = [jax.grad(mean_loss)(params, part) for part in parts_of(batch)]
    return {"w": mean_of(grads)["w"], "v": grads[-1]["v"]}


def without_a_leaf(params, batch):
    return {**jax.grad(mean_loss)(params, batch), "v": jnp.zeros_like(params["v"])}


def clamped(params, batch):
    parts = [rows_of(batch, start, 5) for start in (0, 5, 7)]
    return mean_of([jax.grad(mean_loss)(params, part) for part in parts])


def summed_with_decay(params, batch):
    return sum_loss(params, batch) + 0.1 * jnp.sum(params["w"] ** 2)


def penalised(params, batch):
    return mean_loss(params, batch) + 0.1 * jnp.sum(params["w"] ** 2)


def penalised_each_time(params, batch):
    """The data terms have the right weights, and the penalty is added for each microbatch."""

    def of_part(params, part):
        return sum_loss(params, part) / N + 0.1 * jnp.sum(params["w"] ** 2)

    return added([jax.grad(of_part)(params, part) for part in parts_of(batch)])


GRADIENTS = {
    "a sum of means": (loop(mean_loss, weigh=lambda *_: 1.0), mean_loss, Cause.NUMBER_OF_MICROBATCHES),
    "a mean of sums": (loop(sum_loss), sum_loss, Cause.NUMBER_OF_MICROBATCHES),
    "a regulariser in a sum": (
        loop(summed_with_decay, weigh=lambda *_: 1.0),
        summed_with_decay,
        Cause.NUMBER_OF_MICROBATCHES,
    ),
    "a penalty for each microbatch": (penalised_each_time, penalised, Cause.NUMBER_OF_MICROBATCHES),
    "a mean of masked means": (loop(masked_loss), masked_loss, Cause.MEAN_OF_MEANS),
    "a mean of ragged means": (loop(mean_loss, 5), mean_loss, Cause.MEAN_OF_MEANS),
    "a clamped slice": (clamped, mean_loss, Cause.MEAN_OF_MEANS),
    "BatchNorm": (loop(norm_loss), norm_loss, Cause.BATCH_STATISTICS),
    "a dropped remainder": (loop(mean_loss, 5, drop=True), mean_loss, Cause.DROPPED_REMAINDER),
    "the last microbatch": (
        loop(mean_loss, pick=slice(-1, None), weigh=lambda *_: 1.0),
        mean_loss,
        Cause.LAST_MICROBATCH,
    ),
    "the first microbatch, divided": (loop(mean_loss, pick=slice(1)), mean_loss, Cause.LAST_MICROBATCH),
    "a leaf of the last microbatch": (last_leaf_only, mean_loss, Cause.LAST_MICROBATCH),
    "a factor": (lambda p, b: scaled(jax.grad(mean_loss)(p, b), 1.7), mean_loss, Cause.SCALE),
    "divided by the tokens": (
        lambda p, b: scaled(jax.grad(masked_loss)(p, b), 1 / 9.0),
        masked_loss,
        Cause.SCALE,
    ),
    "clipped": (lambda p, b: clip(jax.grad(mean_loss)(p, b)), mean_loss, Cause.CLIPPED),
    "clipped microbatches": (loop(mean_loss, each=clip), mean_loss, Cause.CLIPPED),
    "clipped entries": (
        lambda p, b: jax.tree.map(lambda leaf: jnp.clip(leaf, -0.1, 0.1), jax.grad(mean_loss)(p, b)),
        mean_loss,
        Cause.CLIPPED,
    ),
    "a leaf without gradient": (without_a_leaf, mean_loss, Cause.NOT_TRAINED),
    "sums in bfloat16": (by_scan(mean_loss, 1, jnp.bfloat16), mean_loss, Cause.NARROW_ACCUMULATOR),
    "sums in float16": (by_scan(mean_loss, 1, jnp.float16), mean_loss, Cause.NARROW_ACCUMULATOR),
    "the sum of the values": (
        lambda p, b: (4 * mean_loss(p, b), jax.grad(mean_loss)(p, b)),
        mean_loss,
        Cause.VALUE_ONLY,
    ),
}


@pytest.mark.every_jax
@pytest.mark.parametrize("name", GRADIENTS)
def test_each_mistake_is_named(name):
    candidate, loss, kind = GRADIENTS[name]
    result = ab.audit(candidate, loss, PARAMS, BATCH)
    assert not result.same
    assert result.kind is kind, result
    with pytest.raises(ab.DifferentGradientError):
        result.raise_if_different()


def test_a_dropped_remainder_and_a_sum_are_both_named():
    result = ab.audit(loop(mean_loss, 5, drop=True, weigh=lambda *_: 1.0), mean_loss, PARAMS, BATCH)
    assert result.kinds == (Cause.DROPPED_REMAINDER, Cause.NUMBER_OF_MICROBATCHES), result


@pytest.mark.full
def test_many_sums_in_the_dtype_of_a_narrow_model(standard):
    """A bfloat16 model with few parameters, and more microbatches than these."""
    batch = {name: np.resize(leaf, (256, *leaf.shape[1:])) for name, leaf in BATCH.items()}
    params, batch = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), (PARAMS, batch))
    assert ab.audit(by_scan(mean_loss, 1), mean_loss, params, batch).kind is Cause.NARROW_ACCUMULATOR
    assert ab.audit(by_scan(mean_loss, 1, jnp.float32), mean_loss, params, batch).same


RIGHT = {
    "full batch": (jax.grad(mean_loss), mean_loss),
    "value and gradient": (jax.jit(jax.value_and_grad(mean_loss)), mean_loss),
    "a mean": (loop(mean_loss), mean_loss),
    "a ragged mean": (loop(mean_loss, 5, weigh=lambda part, _: len(part["x"]) / N), mean_loss),
    "a sum": (loop(sum_loss, 5, weigh=lambda *_: 1.0), sum_loss),
    "weighted by tokens": (loop(masked_loss, 5, weigh=tokens), masked_loss),
    "a scan": (by_scan(mean_loss), mean_loss),
    "sums in float32": (by_scan(mean_loss, dtype=jnp.float32), mean_loss),
    "anybatch": (ab.value_and_grad(norm_loss, microbatch_size=5), norm_loss),
}


@pytest.mark.every_jax
@pytest.mark.parametrize("name", RIGHT)
def test_right_loops_are_not_accused(name):
    candidate, loss = RIGHT[name]
    result = ab.audit(candidate, loss, PARAMS, BATCH)
    assert result.same and result.kind is None and result.cause is None, result
    assert result.raise_if_different() is result
    assert result.dtype == "float64"


def line_loss(w, x):
    return jnp.mean((w * x - 1) ** 2)


def line_loop(starts, size, factor):
    def candidate(w, x):
        return factor * sum(jax.grad(line_loss)(w, x[start : start + size]) for start in starts)

    return candidate


@pytest.mark.full
@pytest.mark.parametrize(
    "starts, size, factor, kind",
    [
        ((0, 5, 10), 5, 1 / 3, Cause.MEAN_OF_MEANS),
        ((0, 5), 5, 1 / 2, Cause.DROPPED_REMAINDER),
        ((0,), 12, 1.3, Cause.SCALE),
        ((0, 6), 6, 1 / 2, None),
    ],
)
def test_one_parameter(starts, size, factor, kind):
    """One number has a ratio to every other one, so other evidence decides."""
    result = ab.audit(line_loop(starts, size, factor), line_loss, jnp.float32(2.0), BATCH["x"][:, 0])
    assert result.kind is kind, result


@pytest.mark.full
def test_an_optimizer_whose_state_has_no_gradient(standard):
    """Then mistakes are tried by what they make of the step."""
    optimizer = optax.adafactor(1e-3)
    right, wrong = (step_of(loop(masked_loss, weigh=weigh), optimizer) for weigh in (tokens, lambda _, n: 1 / n))
    assert ab.audit(right, masked_loss, PARAMS, BATCH, optimizer=optimizer).same
    result = ab.audit(wrong, masked_loss, PARAMS, BATCH, optimizer=optimizer)
    assert result.kind is Cause.MEAN_OF_MEANS


# What is not a weighting of microbatches.


def other_labels(params, batch):
    return jax.grad(mean_loss)(params, {**batch, "y": jnp.roll(batch["y"], 1)})


def other_loss(params, batch):
    def huber(params, batch):
        return jnp.mean(optax.huber_loss(jnp.tanh(batch["x"] @ params["w"]) @ params["v"], batch["y"]))

    return jax.grad(huber)(params, batch)


@pytest.mark.full
@pytest.mark.parametrize("candidate", [other_labels, other_loss])
def test_another_loss_is_no_weighting_of_examples(candidate):
    """Although single gradients, with weights of their own, add up to what the candidate gave."""
    assert ab.audit(candidate, mean_loss, PARAMS, BATCH).kind is Cause.UNKNOWN


@pytest.mark.parametrize("size", [None, SIZE])
def test_entries_that_are_limited_in_each_microbatch(size):
    def limited(grads):
        return jax.tree.map(lambda leaf: jnp.clip(leaf, -0.1, 0.1), grads)

    result = ab.audit(loop(mean_loss, each=limited), mean_loss, PARAMS, BATCH, microbatch_size=size)
    assert result.kind is Cause.CLIPPED and "limited to 0.1 in each microbatch of 3" in result.cause


@pytest.mark.parametrize("size", [None, SIZE])
def test_means_divided_by_the_number_of_examples(size):
    result = ab.audit(loop(mean_loss, weigh=lambda *_: 1 / N), mean_loss, PARAMS, BATCH, microbatch_size=size)
    assert result.kind is Cause.SCALE and "Divide by 4" in result.cause and result.microbatch_size == SIZE


def test_a_loop_over_a_root_of_a_mean():
    def root(params, batch):
        return jnp.sqrt(mean_loss(params, batch))

    result = ab.audit(loop(root), root, PARAMS, BATCH)
    assert result.kind is Cause.MEAN_OF_MEANS and "Apply the function once" in result.cause


def test_limited_entries_of_leaves_with_other_signs():
    """The gradient of the first leaf changes its sign between microbatches, so another leaf shows the limit."""

    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] + params["a"] - batch["y"]) ** 2)

    def limited(grads):
        return jax.tree.map(lambda leaf: jnp.clip(leaf, -0.1, 0.1), grads)

    params = {**PARAMS, "a": np.float32(0)}
    result = ab.audit(loop(loss, each=limited), loss, params, BATCH, microbatch_size=SIZE)
    assert result.kind is Cause.CLIPPED and "limited to 0.1 in each microbatch of 3" in result.cause


def test_a_candidate_that_changes_has_no_named_cause():
    calls = []

    def candidate(params, batch):
        calls.append(0)
        return scaled(jax.grad(mean_loss)(params, batch), float(len(calls) + 1))

    result = ab.audit(candidate, mean_loss, PARAMS, BATCH)
    assert result.kind is Cause.UNKNOWN and "not in the same way each time" in result.cause


@pytest.mark.parametrize("traced", [True, False])
def test_an_accumulator_that_is_kept_between_calls(traced):
    """Its first call is right. It is not traced, since it would keep the tracers."""
    kept = []

    def candidate(params, batch):
        kept.append(loop(mean_loss)(params, batch))
        return added(kept if traced else jax.tree.map(np.asarray, kept))

    result = ab.audit(candidate, mean_loss, PARAMS, BATCH)
    assert result.kind is Cause.UNKNOWN and "The first call is right. The second one" in result.cause
    assert "Set it to zero before the first microbatch" in result.cause and result.leaves[0].ratio == pytest.approx(2)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [None, optax.adam(1e-3)])
def test_an_accumulator_that_holds_gradients_of_an_earlier_step(optimizer, standard):
    """The difference is the same for other parameters, where that of a penalty is not."""
    kept = jax.tree.map(np.asarray, jax.grad(mean_loss)(PARAMS, rows_of(BATCH, 0, SIZE)))

    def audited(extra):
        def grads_of(params, batch):
            return added([extra(params), loop(mean_loss)(params, batch)])

        candidate = grads_of if optimizer is None else step_of(grads_of, optimizer)
        return ab.audit(candidate, mean_loss, PARAMS, BATCH, optimizer=optimizer)

    result = audited(lambda _: kept)
    assert result.kind is Cause.UNKNOWN and "Set it to zero before the first microbatch" in result.cause
    for penalty in (jnp.sign, lambda leaf: 0.1 * leaf):  # the control
        decayed = audited(functools.partial(jax.tree.map, penalty))
        assert "A term of the parameters, such as weight decay, is added" in decayed.cause


@pytest.mark.full
@pytest.mark.parametrize(
    "times, kind, words",
    [
        (0, Cause.UNKNOWN, "leaves it out"),
        (4, Cause.NUMBER_OF_MICROBATCHES, "counts it 4 times"),
        (0.25, Cause.NUMBER_OF_MICROBATCHES, "counts it 0.25 times"),
        (1.3, Cause.SCALE, "counts it 1.3 times"),
        (1, None, ""),
    ],
)
@pytest.mark.parametrize("optimizer", [None, optax.adam(1e-3)])
def test_a_penalty_that_does_not_count_once(times, kind, words, optimizer, standard):
    @jax.jit
    def loss(params, batch):
        return (penalised(params, batch) + 0.1 * jnp.sum(jnp.abs(params["v"]))) / 2

    def penalty(params):
        return loss(params, BATCH) - mean_loss(params, BATCH) / 2

    def grads_of(params, batch):
        return added([scaled(loop(mean_loss)(params, batch), 0.5), scaled(jax.grad(penalty)(params), times)])

    candidate = grads_of if optimizer is None else step_of(grads_of, optimizer)
    result = ab.audit(candidate, loss, PARAMS, BATCH, optimizer=optimizer)
    assert result.kind is kind and words in (result.cause or ""), result


def test_a_small_difference_has_no_named_cause():
    """Any cause would explain a difference of a few roundings."""
    compiled = jax.jit(jax.grad(mean_loss)).lower(PARAMS, BATCH).compile()
    allowed = max(leaf.allowed for leaf in ab.audit(compiled, mean_loss, PARAMS, BATCH).leaves)
    result = ab.audit(lambda p, b: scaled(compiled(p, b), 1 + 2 * allowed), mean_loss, PARAMS, BATCH)
    assert result.kind is Cause.UNKNOWN and "No known mistake" in result.cause


def test_a_maximum_over_the_batch_is_no_mean_of_means():
    def loss(params, batch):
        return jnp.max(losses_of(params, batch))

    result = ab.audit(loop(loss), loss, PARAMS, BATCH)
    assert result.kind is Cause.BATCH_STATISTICS and "looks across examples" in result.cause
    assert causes._weights_in_words(np.array([-1e-9, 1.0])) == "0.000, 1.000"


@pytest.mark.parametrize(
    "factor, loss, words",
    [
        (5.0, mean_loss, "the right one times 5."),  # and not the length of an axis of a parameter
        (1 / 9, masked_loss, "Perhaps the loop divides by it."),
        (1 + 1e-6, mean_loss, "times 1 + 1.0e-06."),
    ],
)
def test_words_about_a_factor(factor, loss, words):
    result = ab.audit(lambda p, b: scaled(jax.grad(loss)(p, b), factor), loss, PARAMS, BATCH)
    assert result.kind is Cause.SCALE and words in result.cause, result


def test_a_guessed_number_of_microbatches_is_a_guess():
    """Nothing shows how many microbatches this candidate has."""
    result = ab.audit(opaque(loop(mean_loss, weigh=lambda _, count: 2 / count)), mean_loss, PARAMS, BATCH)
    assert "If the loop has 2 microbatches" in result.cause and result.microbatch_size is None


def test_what_does_not_come_from_the_arguments_is_noted():
    """Such a candidate is right here, and wrong for the next batch or the next step."""
    results = [
        ab.audit(lambda params, _: jax.grad(mean_loss)(params, BATCH), mean_loss, PARAMS, BATCH),
        ab.audit(lambda _, batch: jax.grad(mean_loss)(PARAMS, batch), mean_loss, PARAMS, BATCH),
        ab.audit(jax.grad(mean_loss), mean_loss, PARAMS, BATCH),  # the control
    ]
    assert all(result.same for result in results)
    assert "For other examples the candidate differs" in results[0].notes[0] and len(results[0].notes) == 1
    assert "For other parameters the candidate differs" in results[1].notes[0]
    assert results[2].notes == ()


# Random numbers.


def with_keys(make_keys, weigh=lambda part, count: 1 / count, pick=slice(None)):
    @jax.jit
    def candidate(params, batch, key):
        parts = parts_of(batch)
        keys = make_keys(key, len(parts))
        grads = [jax.grad(dropout_loss)(params, part, k) for part, k in zip(parts, keys, strict=True)]
        return added([scaled(each, weigh(None, len(parts))) for each in grads[pick]])

    return candidate


def drawn_by_hand(key, number):
    return [jax.random.fold_in(key, 100 + 7 * i) for i in range(number)]


@pytest.mark.parametrize(
    "make_keys, kind",
    [
        (lambda key, number: [key] * number, Cause.SAME_RANDOM_NUMBERS),
        (lambda key, number: [jax.random.split(key)[1]] * number, Cause.SAME_RANDOM_NUMBERS),
        (jax.random.split, Cause.OTHER_RANDOM_NUMBERS),
        (drawn_by_hand, Cause.OTHER_RANDOM_NUMBERS),
    ],
)
def test_random_numbers(make_keys, kind, monkeypatch):
    monkeypatch.setattr(causes, "SECONDS", 1.0)
    result = ab.audit(with_keys(make_keys), dropout_loss, PARAMS, BATCH, KEY)
    assert result.kind is kind, result


def dropout_of_masked(params, batch, key):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden, 0.0)
    return jnp.sum((hidden @ params["v"] - batch["y"]) ** 2 * batch["mask"]) / jnp.sum(batch["mask"])


@pytest.mark.parametrize("first", [0, pytest.param(50, marks=pytest.mark.full)])
def test_a_mistake_is_found_beside_other_random_numbers(first, monkeypatch):
    """By the numbers that each microbatch draws, or else on average over many keys."""
    monkeypatch.setattr(causes, "SECONDS", 30.0)

    def candidate(params, batch, key):
        starts = range(0, N, SIZE)
        keys = [jax.random.fold_in(key, first + start) for start in starts]
        parts = zip([rows_of(batch, start, SIZE) for start in starts], keys, strict=True)
        return mean_of([jax.grad(dropout_of_masked)(params, part, each) for part, each in parts])

    result = ab.audit(jax.jit(candidate), dropout_of_masked, PARAMS, BATCH, KEY)
    assert result.kind is (Cause.UNKNOWN if first else Cause.MEAN_OF_MEANS), result
    assert ("averaged over many keys the two still differ" in result.cause) is bool(first)


@pytest.mark.full
def test_an_average_over_keys_says_how_exact_it_is(monkeypatch):
    monkeypatch.setattr(causes, "SECONDS", 0.0)
    result = ab.audit(with_keys(drawn_by_hand), dropout_loss, PARAMS, BATCH, KEY)
    few = float(re.search(r"agree to ([\d.e+]+)%", result.cause)[1])
    monkeypatch.setattr(causes, "SECONDS", 10.0)
    result = ab.audit(with_keys(drawn_by_hand), dropout_loss, PARAMS, BATCH, KEY)
    assert float(re.search(r"agree to ([\d.e+]+)%", result.cause)[1]) < 0.5 * few


@pytest.mark.full
def test_random_numbers_with_a_factor():
    """The factor is named first, and the random numbers after it."""
    same = with_keys(lambda key, number: [key] * number, weigh=lambda *_: 1.0)
    result = ab.audit(same, dropout_loss, PARAMS, BATCH, KEY)
    assert result.kinds == (Cause.NUMBER_OF_MICROBATCHES, Cause.SAME_RANDOM_NUMBERS)


@pytest.mark.full
def test_a_factor_is_not_taken_for_random_numbers():
    """The averages over many keys differ, too."""
    unknown = with_keys(drawn_by_hand, weigh=lambda *_: 1.0)
    assert ab.audit(unknown, dropout_loss, PARAMS, BATCH, KEY).kind is Cause.UNKNOWN


@pytest.mark.full
def test_the_numbers_of_the_full_batch_are_right():
    """The control."""
    assert ab.audit(ab.grad(dropout_loss, microbatch_size=5), dropout_loss, PARAMS, BATCH, KEY).same


# Training steps.


def step_of(grads_of, optimizer):
    @jax.jit
    def step(params, opt_state, batch):
        updates, opt_state = optimizer.update(grads_of(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": 0.0}

    return step


def update_each(optimizer):
    def step(params, opt_state, batch):
        for part in parts_of(batch):
            updates, opt_state = optimizer.update(jax.grad(mean_loss)(params, part), opt_state, params)
            params = optax.apply_updates(params, updates)
        return params, opt_state

    return step


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(1e-3, weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
}


@pytest.fixture
def standard():
    """optax is written for JAX's own promotion of dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_right_steps_are_not_accused(name, standard):
    optimizer = OPTIMIZERS[name]
    result = ab.audit(step_of(loop(mean_loss), optimizer), mean_loss, PARAMS, BATCH, optimizer=optimizer)
    assert result.same, result


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_with_mistakes(name, standard):
    optimizer = OPTIMIZERS[name]

    def audit(step, loss):
        return ab.audit(step, loss, PARAMS, BATCH, optimizer=optimizer)

    assert audit(step_of(loop(masked_loss), optimizer), masked_loss).kind is Cause.MEAN_OF_MEANS
    assert audit(update_each(optimizer), mean_loss).kind is Cause.OPTIMIZER_PER_MICROBATCH
    if name != "clipped":  # which hides a factor
        result = audit(step_of(loop(mean_loss, weigh=lambda *_: 1.0), optimizer), mean_loss)
        assert result.kind is Cause.NUMBER_OF_MICROBATCHES


@pytest.mark.full
def test_weights_that_explain_the_state_alone_are_not_named(standard):
    """Momentum decays between updates. So its state is a multiple or a weighting, and the parameters are not."""
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params, opt_state, batch):
        changes = []
        for part in parts_of(batch):
            updates, opt_state = optimizer.update(jax.grad(mean_loss)(params, part), opt_state, params)
            changes.append(updates)
        return optax.apply_updates(params, added(changes)), opt_state

    def twice(params, opt_state, batch):
        for _ in range(2):
            updates, opt_state = optimizer.update(jax.grad(mean_loss)(PARAMS, batch), opt_state, params)
            params = optax.apply_updates(params, updates)
        return params, opt_state

    for candidate in (step, twice):
        result = ab.audit(candidate, mean_loss, PARAMS, BATCH, optimizer=optimizer)
        assert result.kind is Cause.UNKNOWN and "No single gradient explains both" in result.cause
    weighted = step_of(lambda p, b: loop(mean_loss, weigh=lambda part, _: jnp.sum(part["mask"]))(p, b), optimizer)
    assert ab.audit(weighted, mean_loss, PARAMS, BATCH, optimizer=optimizer).kind is Cause.MEAN_OF_MEANS  # the control


@pytest.mark.parametrize("times, kind", [(1 / 4, Cause.NUMBER_OF_MICROBATCHES), (0.3, None), (1.0, None)])
def test_a_factor_after_an_optimizer_that_clips(times, kind, standard):
    """The sum is clipped, and the update is divided. So no multiple of the gradient gives the step."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1))

    def step(params, opt_state, batch):
        updates, opt_state = optimizer.update(jax.grad(mean_loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, scaled(updates, times)), opt_state

    result = ab.audit(step, mean_loss, PARAMS, BATCH, optimizer=optimizer)
    assert result.same is (times == 1) and result.kind is not Cause.MEAN_OF_MEANS, result
    assert kind is None or result.kind is kind, result


def test_an_old_state_of_the_optimizer_is_named(standard):
    """Although the moments in it are zero, as for a gradient of zero."""
    optimizer = optax.adam(1e-2)

    def step(params, opt_state, batch):
        updates, _ = optimizer.update(jax.grad(mean_loss)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    result = ab.audit(step, mean_loss, PARAMS, BATCH, optimizer=optimizer)
    assert result.kind is Cause.OPTIMIZER_STATE, result

    def idle(params, opt_state, batch):
        return params, opt_state

    assert (
        ab.audit(idle, mean_loss, PARAMS, BATCH, optimizer=optimizer).kind is not Cause.OPTIMIZER_STATE
    )  # the control


@pytest.mark.full
def test_adam_hides_a_factor_in_the_parameters_only(standard):
    optimizer = optax.adam(1e-3, eps=1e-20)
    result = ab.audit(
        step_of(loop(mean_loss, weigh=lambda *_: 1.0), optimizer), mean_loss, PARAMS, BATCH, optimizer=optimizer
    )
    verdicts = {leaf.name: leaf.ok for leaf in result.leaves}
    assert verdicts["params['w']"] and not verdicts["opt_state[0].mu['w']"]
    assert result.kind is Cause.NUMBER_OF_MICROBATCHES


def multi_steps_step(optimizer):
    @jax.jit
    def step(params, opt_state, part):
        updates, opt_state = optimizer.update(jax.grad(mean_loss)(params, part), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return step


@pytest.mark.every_jax
@pytest.mark.parametrize("every, same", [(4, True), (2, False), (8, False)])
def test_multi_steps(every, same, standard):
    optimizer = optax.MultiSteps(optax.adam(1e-3), every)
    options = {"optimizer": optimizer, "microbatch_size": SIZE, "calls": "microbatches"}
    result = ab.audit(multi_steps_step(optimizer), mean_loss, PARAMS, BATCH, **options)
    assert result.same is same, result
    if not same:
        assert result.kind is (Cause.OPTIMIZER_PER_MICROBATCH if every == 2 else Cause.NOT_TRAINED)


def test_calls_with_single_examples(standard):
    """With one example fewer there is one microbatch fewer, for which MultiSteps waits. That is no remainder."""
    optimizer = optax.MultiSteps(optax.sgd(0.1), N)
    step = step_of(jax.grad(mean_loss), optimizer)
    calls = {"optimizer": optimizer, "microbatch_size": 1, "calls": "microbatches"}
    result = ab.audit(step, mean_loss, PARAMS, BATCH, **calls)
    assert result.same and not any("divide evenly" in note for note in result.notes)


@pytest.mark.full
def test_multi_steps_as_a_transformation(standard):
    optimizer = optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()
    options = {"microbatch_size": SIZE, "calls": "microbatches"}
    step = multi_steps_step(optimizer)
    assert ab.audit(step, mean_loss, PARAMS, BATCH, optimizer=optimizer, **options).same
    options["reference_optimizer"] = optax.sgd(0.2)  # the control
    assert not ab.audit(step, mean_loss, PARAMS, BATCH, optimizer=optimizer, **options).same


# States.


@dataclasses.dataclass
class OwnState:
    params: Any
    opt_state: Any


def own_step(factor):
    def step(state, batch):
        grads = scaled(jax.grad(mean_loss)(state.params, batch), factor)
        updates, opt_state = optax.adam(1e-3).update(grads, state.opt_state, state.params)
        return OwnState(optax.apply_updates(state.params, updates), opt_state)

    return step


def flax_step(factor):
    @jax.jit
    def step(state, batch):
        grads = loop(mean_loss, weigh=lambda _, count: factor / count)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": 0.0}

    return step


@pytest.mark.parametrize("factor", [1.0, pytest.param(4.0, marks=pytest.mark.full)])
def test_states(factor, standard):
    from flax.training.train_state import TrainState

    own = OwnState(PARAMS, optax.adam(1e-3).init(PARAMS))
    flax = TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(1e-3))
    results = [
        ab.audit(own_step(factor), mean_loss, PARAMS, BATCH, state=own, optimizer=optax.adam(1e-3)),
        ab.audit(flax_step(factor), mean_loss, PARAMS, BATCH, state=flax),
    ]
    for result in results:
        assert result.same is (factor == 1), result
        assert result.kind is (None if factor == 1 else Cause.NUMBER_OF_MICROBATCHES)


@pytest.mark.full
def test_train_step_of_anybatch(standard):
    optimizer = optax.adam(1e-3)
    step = ab.train_step(dropout_loss, optimizer, microbatch_size=5)
    state = step.init(PARAMS, key=KEY)
    assert ab.audit(step, dropout_loss, state.params, BATCH, state=state, optimizer=optimizer).same
    other = optax.adam(2e-3)  # the control
    assert not ab.audit(step, dropout_loss, state.params, BATCH, state=state, optimizer=other).same


def nnx_problem():
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(4, 5, rngs=nnx.Rngs(0))
            self.last = nnx.Linear(5, 1, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x)))[:, 0]

    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    def grads(factor):
        @nnx.jit
        def candidate(model, batch):
            return mean_of([scaled(nnx.grad(loss)(model, part), factor) for part in parts_of(batch)])

        return candidate

    def step(factor):
        @nnx.jit
        def candidate(model, optimizer, batch):
            optimizer.update(model, grads(factor)(model, batch))

        return candidate

    return nnx, Model(), loss, grads, step


@pytest.mark.full
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_nnx(factor, standard):
    nnx, model, loss, grads, step = nnx_problem()
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    before = np.asarray(model.first.kernel[...])

    def pair_step(state, batch):
        return step(factor)(*state, batch)

    with jax.numpy_rank_promotion("allow"):
        results = [
            ab.audit(grads(factor), loss, model, BATCH),
            ab.audit(step(factor), loss, model, BATCH, state=optimizer),
            ab.audit(pair_step, loss, model, BATCH, state=(model, optimizer)),
        ]
    for result in results:
        assert result.same is (factor == 1), result
        assert result.kind is (None if factor == 1 else Cause.NUMBER_OF_MICROBATCHES)
    assert (np.asarray(model.first.kernel[...]) == before).all()  # it works on copies


@pytest.mark.every_jax
@pytest.mark.parametrize("factor", [pytest.param(1.0, marks=pytest.mark.full), 4.0])
def test_equinox(factor, standard):
    import equinox as eqx

    model = eqx.nn.MLP(4, "scalar", 5, 1, key=KEY)

    def loss(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

    def candidate(model, batch):
        grads = [eqx.filter_grad(loss)(model, part) for part in parts_of(batch)]
        return scaled(mean_of(grads), factor)

    result = ab.audit(candidate, loss, model, BATCH)
    assert result.same is (factor == 1), result
    assert result.kind is (None if factor == 1 else Cause.NUMBER_OF_MICROBATCHES)


# Devices.


def sharded(reduce, loss=mean_loss):
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec

    @jax.jit
    def candidate(params, batch):
        def on_device(params, batch):
            return jax.tree.map(reduce, jax.grad(loss)(params, batch))

        return jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)(
            params, batch
        )

    return candidate


@pytest.mark.parametrize(
    "reduce, kind",
    [
        (lambda leaf: jax.lax.pmean(leaf, "data"), None),
        (lambda leaf: jax.lax.psum(leaf, "data"), Cause.PSUM_TWICE),
        (lambda leaf: leaf, Cause.PSUM_MISSING),
    ],
    ids=["pmean", "psum", "none"],
)
def test_devices(reduce, kind):
    assert ab.audit(sharded(reduce), mean_loss, PARAMS, BATCH).kind is kind


@pytest.mark.full
def test_a_sum_over_both_axes_of_a_mesh():
    axes, P = ("a", "b"), jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2, 3), axes, devices=jax.devices()[:6], axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def on_device(params, batch):
        return jax.lax.psum(jax.grad(mean_loss)(params, batch), axes)

    candidate = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P(), check_vma=False)
    result = ab.audit(candidate, mean_loss, PARAMS, BATCH)
    assert result.kind is Cause.PSUM_TWICE and "6 times too large" in result.cause


# What is printed.


def test_the_table_fits_and_names_the_cause():
    result = ab.audit(GRADIENTS["a sum of means"][0], mean_loss, PARAMS, BATCH)
    assert max(map(len, str(result).splitlines())) <= 80
    assert "params['w']" in str(result) and "DIFFERENT" in str(result)
    assert "4 times too large, for 4 microbatches" in str(result)
    assert max(map(len, result.text(60).splitlines())) <= 60
    assert result.microbatch_size == 3 and "ab.value_and_grad(loss, microbatch_size=3)" in result.cause
    assert '<tr class="bad">' in result._repr_html_()
    fields = json.loads(result.to_json())
    assert fields["kind"] == "number_of_microbatches" and len(fields["leaves"]) == 2


@pytest.mark.full
def test_the_line_that_looks_across_examples_is_named():
    cause = ab.audit(GRADIENTS["BatchNorm"][0], norm_loss, PARAMS, BATCH).cause
    assert "test_audit.py" in cause


@pytest.mark.full
def test_a_candidate_that_cannot_be_traced():
    """NumPy and Python numbers: it runs as it is, in float64."""

    def candidate(params, batch):
        weights = [float(part["mask"].sum()) / float(batch["mask"].sum()) for part in parts_of(batch, 5)]
        parts = zip(weights, parts_of(batch, 5), strict=True)
        return added([scaled(jax.grad(masked_loss)(params, part), weight) for weight, part in parts])

    result = ab.audit(candidate, masked_loss, PARAMS, BATCH)
    assert result.same and result.dtype == "float64"


def test_a_candidate_for_one_dtype_is_compared_in_it():
    compiled = jax.jit(jax.grad(mean_loss)).lower(PARAMS, BATCH).compile()
    result = ab.audit(compiled, mean_loss, PARAMS, BATCH)
    assert result.same and result.dtype == "float32"
    assert "Not compared in float64" in result.notes[0]
    twice = ab.audit(lambda p, b: scaled(compiled(p, b), 1.001), mean_loss, PARAMS, BATCH)
    assert not twice.same


@pytest.mark.full
def test_a_model_in_bfloat16():
    """What the model rounds is not held against the loop; what the loop drops is."""

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.mean((hidden @ params["v"].astype(jnp.float32) - batch["y"].astype(jnp.float32)) ** 2)

    assert ab.audit(loop(loss), loss, PARAMS, BATCH).same
    assert ab.audit(loop(loss, 5, drop=True), loss, PARAMS, BATCH).kind is Cause.DROPPED_REMAINDER


def narrow_loss(params, batch):
    """It computes in bfloat16, whatever the dtypes of its arguments are."""
    hidden = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16))
    output = (hidden @ params["v"].astype(jnp.bfloat16)).astype(jnp.float32)
    return jnp.mean((output - batch["y"].astype(jnp.float32)) ** 2)


def third(params, batch, size=4):
    """A mean of three microbatches, whose factor is rounded to bfloat16."""
    sums = added([jax.grad(narrow_loss)(params, part) for part in parts_of(batch, size)[:3]])
    return jax.tree.map(lambda leaf: (leaf.astype(jnp.bfloat16) * (1 / 3)).astype(leaf.dtype), sums)


@pytest.mark.full
def test_a_constant_in_bfloat16_is_no_mistake():
    result = ab.audit(third, narrow_loss, PARAMS, BATCH)
    assert result.same and "as with a constant in bfloat16" in result.notes[0], result
    # It allows no more than its rounding.
    assert not ab.audit(lambda p, b: scaled(third(p, b), 1.02), narrow_loss, PARAMS, BATCH).same
    assert not ab.audit(lambda p, b: third(p, b, 3), narrow_loss, PARAMS, BATCH).same


@pytest.mark.full
def test_an_optimizer_in_bfloat16_is_no_mistake(standard):
    """Its own constants are rounded, such as the 0.1 of Adam."""
    optimizer = optax.adamw(1e-2)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), PARAMS)

    def step(params, opt_state, batch):
        grads = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), loop(narrow_loss)(params, batch))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    result = ab.audit(step, narrow_loss, params, BATCH, optimizer=optimizer)
    assert result.same and "as with a constant in bfloat16" in result.notes[0], result


def opaque(candidate):
    """The candidate, made so that it cannot be traced."""

    def fun(params, batch):
        result = candidate(params, batch)
        assert all(np.isfinite(np.asarray(leaf, float)).all() for leaf in jax.tree.leaves(result))
        return result

    return fun


@pytest.mark.full
@pytest.mark.parametrize(
    "factor, pick, same",
    [
        (1.0, slice(None), True),
        (1.05, slice(None), False),
        (1.2, slice(None), False),
        (4 / 3, slice(3), False),
    ],
)
def test_narrow_operations_of_a_candidate_that_cannot_be_traced(factor, pick, same):
    candidate = opaque(loop(narrow_loss, each=lambda grads: scaled(grads, factor), pick=pick))
    result = ab.audit(candidate, narrow_loss, PARAMS, BATCH)
    assert result.same is same, result
    assert any("cannot be traced" in note for note in result.notes) is same


@pytest.mark.full
@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_random_numbers_in_another_dtype(factor, monkeypatch):
    """The loss draws in the default dtype, and the loop in float32."""
    monkeypatch.setattr(causes, "MOST_KEYS", 32)

    def part_loss(params, part, kept):
        hidden = jnp.where(kept, jnp.tanh(part["x"] @ params["w"]), 0.0)
        return factor * jnp.mean((hidden @ params["v"] - part["y"]) ** 2)

    def candidate(params, batch, key):
        kept = jax.random.uniform(key, (N, 5), jnp.float32) < 0.7
        rows = zip(parts_of(batch), jnp.split(kept, N // SIZE), strict=True)
        return mean_of([jax.grad(part_loss)(params, *pair) for pair in rows])

    result = ab.audit(candidate, dropout_loss, PARAMS, BATCH, KEY)
    assert result.same is (factor == 1.0), result


def sums_in(dtype, ravelled=False):
    """Gradients in bfloat16, added up in a dtype."""

    def candidate(params, batch, *args):
        narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        stacked = jax.tree.map(lambda leaf: leaf[:, None], batch)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, dtype), params)
        flat, unravel = ravel_pytree(zeros) if ravelled else (zeros, lambda tree: tree)

        def body(sums, part):
            grads = jax.tree.map(lambda leaf: leaf.astype(dtype), jax.grad(narrow_loss)(narrow, part))
            return jax.tree.map(jnp.add, sums, ravel_pytree(grads)[0] if ravelled else grads), None

        sums = unravel(jax.lax.scan(body, flat, stacked)[0])
        return jax.tree.map(lambda leaf, w: leaf.astype(w.dtype) / len(batch["x"]), sums, params)

    return candidate


@pytest.mark.full
@pytest.mark.parametrize(
    "dtype, ravelled, same",
    [(jnp.bfloat16, False, False), (jnp.bfloat16, True, False), (jnp.float32, False, True)],
    ids=["bfloat16", "in one vector", "float32"],
)
def test_narrow_sums_in_a_step(dtype, ravelled, same, standard):
    """Adam hides them in the parameters. The gradient that it used shows them."""
    random, optimizer = np.random.default_rng(1), optax.adam(1e-2)
    params = {name: np.float32(random.normal(size=size) / 4) for name, size in {"w": (8, 16), "v": 16}.items()}
    batch = {name: np.float32(random.normal(size=size)) for name, size in {"x": (1024, 8), "y": 1024}.items()}
    step = step_of(sums_in(dtype, ravelled), optimizer)
    result = ab.audit(step, narrow_loss, params, batch, optimizer=optimizer)
    assert result.same is same and result.kind is (None if same else Cause.NARROW_ACCUMULATOR), result


def test_narrow_sums_that_are_not_measured_are_noted():
    """Of a random loss no gradient of a microbatch is known."""

    def loss(params, part, key):
        return narrow_loss(params, part) + 0 * jax.random.normal(key)

    result = ab.audit(sums_in(jnp.bfloat16), loss, PARAMS, BATCH, KEY)
    assert result.same and any("could not be measured" in note for note in result.notes), result


def test_a_candidate_may_donate():
    params, batch = jax.tree.map(jnp.asarray, (PARAMS, BATCH))
    result = ab.audit(jax.jit(jax.grad(mean_loss), donate_argnums=0), mean_loss, params, batch)
    assert result.same and not params["w"].is_deleted()


def test_aux():
    def loss(params, batch):
        losses = losses_of(params, batch)
        return jnp.mean(losses), {"largest": jnp.max(losses), "all": losses}

    right = jax.value_and_grad(loss, has_aux=True)

    def wrong(params, batch):
        (value, aux), grads = right(params, batch)
        return (value, {**aux, "largest": 2 * aux["largest"]}), grads

    assert ab.audit(right, loss, PARAMS, BATCH, has_aux=True).same
    result = ab.audit(wrong, loss, PARAMS, BATCH, has_aux=True)
    assert result.kind is Cause.VALUE_ONLY and "aux['largest']" in result.cause


@pytest.mark.full
def test_keys_in_the_batch():
    """Each example has its own key, so that a loop is right."""

    def loss(params, batch):
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (5,)))(batch["key"])
        return jnp.mean((jnp.where(kept, jnp.tanh(batch["x"] @ params["w"]), 0.0) @ params["v"] - batch["y"]) ** 2)

    batch = {**BATCH, "key": jax.random.split(KEY, N)}
    assert ab.audit(loop(loss), loss, PARAMS, batch).same
    assert ab.audit(loop(loss, pick=slice(3)), loss, PARAMS, batch).kind is Cause.DROPPED_REMAINDER  # the control


@pytest.mark.full
def test_a_batch_that_hides_a_mistake():
    """Microbatches with equally many tokens in the given order, and a remainder that is empty."""
    hidden = {**BATCH, "mask": np.array([1, 1, 0] * 4, np.float32)}
    result = ab.audit(loop(masked_loss), masked_loss, PARAMS, hidden)
    assert result.kind is Cause.MEAN_OF_MEANS and "shuffled" in result.notes[0]
    ones = {**BATCH, "mask": np.ones(N, np.float32)}
    result = ab.audit(loop(masked_loss), masked_loss, PARAMS, ones)
    assert result.same and "batch['mask'] is 1 everywhere" in result.notes[-1]
    result = ab.audit(loop(mean_loss, drop=True), mean_loss, PARAMS, BATCH)
    assert result.same and "With only 11 of the 12 examples" in result.notes[0]
    assert not ab.audit(ab.grad(masked_loss, microbatch_size=5), masked_loss, PARAMS, BATCH).notes  # the control


@pytest.mark.full
def test_an_optimizer_that_hides_a_factor(standard):
    optimizer = OPTIMIZERS["clipped"]
    step = step_of(loop(mean_loss, weigh=lambda *_: 1.0), optimizer)
    result = ab.audit(step, mean_loss, PARAMS, BATCH, optimizer=optimizer)
    assert result.same and "a wrong factor would not show" in result.notes[-1]


# What is refused.


@pytest.mark.parametrize(
    "change, words",
    [
        ({"candidate": 3}, "candidate must be a function, got candidate of type int"),
        ({"loss": None}, "loss must be a function"),
        ({"calls": "twice"}, "calls must be one of"),
        ({"microbatch_size": 0}, "microbatch_size must be a whole number of at least 1"),
        ({"calls": "microbatches"}, 'calls="microbatches" needs the size'),
        ({"candidate": lambda p, b: {"w": p["w"]}}, "got no array for params['v'] of shape (5,)"),
        ({"candidate": lambda p, b: {"v": p["v"], "w": p["w"].T}}, "got float32[5,4] for params['w'] of shape (4, 5)"),
        ({"optimizer": "adam"}, "optimizer must be an optax optimizer"),
        ({"state": {"weights": 1}}, "A state must have params and opt_state"),
        ({"batch": {**BATCH, "y": BATCH["y"][1:]}}, "every array of batch has a row for each example"),
        ({"loss": lambda p, b: (mean_loss(p, b), 1.0)}, "with has_aux=True a pair (loss, aux)"),
        ({"loss": lambda p, b: jnp.log(-jnp.sum(b["x"] ** 2)) * p["v"][0]}, "must be finite"),
    ],
)
def test_bad_input(change, words):
    arguments = {"candidate": jax.grad(mean_loss), "loss": mean_loss, "params": PARAMS, "batch": BATCH} | change
    with pytest.raises(ab.InputError) as error:
        ab.audit(**arguments)
    assert words in str(error.value)


def test_two_readings_of_a_result_are_refused():
    params = (jnp.ones(()), jnp.ones(()))

    def loss(params, batch):
        return jnp.mean((params[0] * batch["x"][:, 0] - params[1]) ** 2)

    assert ab.audit(jax.grad(loss), loss, params, BATCH).same
    assert ab.audit(jax.value_and_grad(loss), loss, params, BATCH).same


def test_a_microbatch_that_is_added_twice_is_named():
    """The accumulator starts with the gradient of the first one, and the loop adds it again."""

    def loop(params, batch):
        parts = [jax.tree.map(lambda leaf, i=i: leaf[i : i + SIZE], batch) for i in range(0, N, SIZE)]
        grads = [jax.grad(mean_loss)(params, part) for part in parts]
        return jax.tree.map(lambda *leaves: sum(leaves) / len(parts), grads[0], *grads)

    result = ab.audit(loop, mean_loss, PARAMS, BATCH)
    assert result.kind == Cause.MEAN_OF_MEANS
    assert "The examples of rows 0, 1, 2 count twice." in result.cause
    weighted = ab.audit(lambda *args: jax.grad(_weighted_loss)(*args), mean_loss, PARAMS, BATCH)
    assert "twice" not in weighted.cause  # the control


def _weighted_loss(params, batch):
    return jnp.mean(losses_of(params, batch) * jnp.linspace(0.5, 1.5, N, dtype=batch["y"].dtype))


def test_leaves_that_the_table_leaves_out_are_counted_as_they_are():
    def loss(params, batch):
        return sum(jnp.mean((batch["y"] * leaf) ** 2) for leaf in params)

    params = [jnp.float32(number + 1) for number in range(20)]

    def wrong(params, batch):
        return [(2 if number < 15 else 1) * leaf for number, leaf in enumerate(jax.grad(loss)(params, batch))]

    result = ab.audit(wrong, loss, params, BATCH)
    assert sum(not leaf.ok for leaf in result.leaves) == 15
    text = "Of the leaves that are not shown, 3 differ and 5 are the same: see .leaves."
    assert text in result.text(width=None) and text in result._repr_html_()
    right = dataclasses.replace(result, leaves=[dataclasses.replace(leaf) for leaf in result.leaves[15:] * 3])
    assert "Of the leaves that are not shown, 3 are the same: see .leaves." in right.text(width=None)
    assert "not shown" not in dataclasses.replace(result, leaves=result.leaves[:12]).text(width=None)


def test_leaves_of_aux_are_compared_by_name():
    def loss(params, batch):
        losses = losses_of(params, batch)
        return jnp.mean(losses), {"largest": jnp.max(losses), "sum": jnp.sum(losses)}

    def candidate(params, batch, change):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return (value, change(aux)), grads

    right = {"fewer": lambda aux: {"sum": aux["sum"]}, "more": lambda aux: aux | {"a": 3 * aux["sum"]}}
    for change in right.values():
        result = ab.audit(functools.partial(candidate, change=change), loss, PARAMS, BATCH, has_aux=True)
        assert result.same and "aux['sum']" in [leaf.name for leaf in result.leaves]
        assert any("other names or shapes" in note for note in result.notes)
    wrong = functools.partial(candidate, change=lambda aux: {"sum": aux["largest"]})
    assert not ab.audit(wrong, loss, PARAMS, BATCH, has_aux=True).same


def test_a_step_that_ignores_the_gradient_is_refused():
    """As at the first step of a warm-up, whatever its gradient is."""
    optimizer = optax.sgd(optax.linear_schedule(0.0, 1.0, 10))

    def step(params, state, batch):
        grads = jax.grad(mean_loss)(params, jax.tree.map(lambda leaf: leaf[:1], batch))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    with pytest.raises(ab.InputError, match="must depend on the gradient"):
        ab.audit(step, mean_loss, PARAMS, BATCH, optimizer=optimizer)
