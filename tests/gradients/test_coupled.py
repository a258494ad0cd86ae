"""Losses with a head, which runs on the full batch: a small head is silent, a large one warns or raises."""

import contextlib
import functools
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anybatch as ab
from anybatch.call.memory import memory_budget
from anybatch.jaxprs import versions
from anybatch.reading import evaluation

pytestmark = pytest.mark.every_jax


def layers(params, x):
    for weights in params:
        x = jnp.tanh(x @ weights)
    return x


def whitened(x):
    return (x - x.mean(0, keepdims=True)) / jnp.sqrt(x.var(0, keepdims=True) + 1e-5)


def coupled_early(params, x):
    return jnp.mean(layers(params, whitened(x @ params[0])) ** 2)


def coupled_late(params, x):
    z = layers(params, x)
    return jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1))


def shapes(num_examples, width=64, depth=6):
    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * depth
    return params, jax.ShapeDtypeStruct((num_examples, width), jnp.float32)


def lower(loss, *args, **options):
    return jax.jit(ab.value_and_grad(loss, microbatch_size=16, **options)).lower(*args)


def test_a_large_head_is_loud():
    with pytest.warns(ab.LargeHeadWarning, match="Most of this model runs on the full batch") as caught:
        lower(coupled_early, *shapes(16384))
    text = str(caught[0].message)
    assert re.search(rf"{re.escape(__file__)}:\d+ in whitened", text)
    assert re.search(r"about [\d.]+ MiB of [\d.]+ MiB", text)
    assert "GroupNorm" in text and 'reduction="mean"' in text
    assert caught[0].filename == __file__


def test_a_small_head_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lower(coupled_early, *shapes(64))
        lower(coupled_late, *shapes(1024))


def test_a_key_or_a_counter_that_a_loop_carries_is_no_head():
    """Nobody reads it after the loop, so that all of the loop runs per microbatch."""

    def loss(params, x):
        def layer(carry, weights):
            x, key, number = carry
            key, of_layer = jax.random.split(key)
            kept = jax.random.bernoulli(of_layer, 0.9, x.shape)
            return (jnp.where(kept, jnp.tanh(x @ weights), 0), key, number + 1), None

        (x, _, _), _ = jax.lax.scan(layer, (x, jax.random.key(0), 0), params)
        return jnp.mean(x**2)

    _, x = shapes(16384)
    params = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32)
    assert ab.read(loss, params, x).head_bytes == 0
    lower(loss, params, x)  # warnings are errors
    lower(loss, params, x, memory="8MiB")


def test_what_runs_at_once_because_it_fits_is_no_reason_to_warn():
    jax.jit(ab.value_and_grad(coupled_early)).lower(*shapes(4096))


def test_a_head_that_does_not_fit_is_an_error_before_any_work():
    with pytest.raises(ab.HeadTooLargeError, match=r"needs .* and there are 928\.0 KiB left for it") as error:
        lower(coupled_early, *shapes(4096), memory="2MiB")
    assert __file__ in str(error.value) and "GroupNorm" in str(error.value)


def test_a_head_that_fits_is_not_an_error():
    """The control: the same loss, with memory enough."""
    with pytest.warns(ab.LargeHeadWarning):
        lower(coupled_early, *shapes(4096), memory="1GiB")


def temporaries(loss, *args, **options):
    return versions.temporaries(lower(loss, *args, **options).compile())


def test_memory_of_two_passes_grows_with_the_embeddings_alone():
    """Towers of one microbatch, and what the head makes of embeddings of 8 numbers: nothing else grows."""

    def loss(params, x):
        z = layers(params, x) @ jnp.ones((64, 8))
        return jnp.mean(jnp.sum(z, axis=0) ** 2) + jnp.mean(jnp.max(z, axis=0))

    small, large = (temporaries(loss, *shapes(n)) for n in (1024, 16384))
    embeddings = (16384 - 1024) * 8 * 4
    assert large - small <= 6 * embeddings
    at_once = [versions.temporaries(jax.jit(jax.grad(loss)).lower(*shapes(n)).compile()) for n in (1024, 16384)]
    assert at_once[1] - at_once[0] > 10 * (large - small)  # the control


@pytest.mark.parametrize("norm", [True, False], ids=["BatchNorm", "none"])
def test_the_reading_says_how_much_microbatches_do_not_save(norm):
    """What is gathered before a BatchNorm stays for the full batch, like all that follows; without one, nothing."""

    def loss(params, x):
        first, second, last = params
        hidden = x @ first
        inside = hidden @ second
        if norm:
            mean, variance = inside.mean(axis=0, keepdims=True), inside.var(axis=0, keepdims=True)
            inside = (inside - mean) * jax.lax.rsqrt(variance + 1e-5)
        return jnp.mean(((hidden + jax.nn.gelu(inside)) @ last) ** 2)

    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((20, 128), (128, 128), (128, 5))]
    x = jax.ShapeDtypeStruct((2048, 20), jnp.float32)
    reading = ab.read(loss, params, x)
    with pytest.warns(ab.LargeHeadWarning) if norm else contextlib.nullcontext():  # other warnings are errors
        in_microbatches = temporaries(loss, params, x)
    kept = in_microbatches / versions.temporaries(jax.jit(jax.grad(loss)).lower(params, x).compile())
    assert kept > 0.8 if norm else kept < 0.2
    assert reading.full_batch_share == pytest.approx(kept, abs=0.2)


def test_memory_of_random_numbers_is_that_of_a_microbatch():
    def loss(params, x, key):
        return jnp.mean((layers(params, x) * jax.random.bernoulli(key, 0.9, x.shape).astype(x.dtype)) ** 2)

    small, large = (temporaries(loss, *shapes(n), jax.random.key(0)) for n in (512, 16384))
    assert large <= 1.05 * small


def test_memory_of_a_frozen_tower_is_that_of_a_microbatch():
    """A tower without a gradient, all of whose outputs every example is compared with."""

    def loss(params, x, frozen):
        z, anchors = layers(params, x), layers(frozen, x) @ jnp.ones((64, 1))
        return jnp.mean(jax.nn.logsumexp(z @ jnp.ones((64, 1)) @ anchors.T * 0.01, axis=1))

    params, x = shapes(512, depth=2)
    reading = ab.read(loss, params, x, shapes(1, depth=8)[0])
    assert reading.passes == 1 and reading.separable
    small, large = (temporaries(loss, *shapes(n, depth=2), shapes(1, depth=8)[0]) for n in (512, 8192))
    # Every example of the microbatch, with every anchor: 16 rows of that many. The tower itself is not there.
    assert large - small <= 8 * 16 * (8192 - 512) * 4


def test_a_frozen_tower_is_exact(float64):
    def loss(params, x, frozen):
        z, anchors = layers(params, x), layers(frozen, x)
        return jnp.mean(jax.nn.logsumexp(z @ anchors.T, axis=1))

    keys = jax.random.split(jax.random.key(0), 3)
    params, frozen = ([jax.random.normal(key, (3, 3))] for key in keys[:2])
    x = jax.random.normal(keys[2], (7, 3))
    expected = jax.value_and_grad(loss)(params, x, frozen)
    actual = ab.value_and_grad(loss, microbatch_size=3)(params, x, frozen)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), actual, expected)


@pytest.mark.parametrize(
    "text, expected", [("16GiB", 16 * 2**30), ("1.5MB", 1_500_000), ("64 KiB", 65536), (1024, 1024), ("512", 512)]
)
def test_memory_is_understood(text, expected):
    assert memory_budget(text) == expected


def test_memory_as_a_share_of_what_is_left():
    left = memory_budget(None)
    assert left is not None and 0.3 * left < memory_budget("50%") < 0.7 * left


@pytest.mark.parametrize("memory", ["lots", "16XB", 0, -1, True, 1.5, "0GiB"])
def test_memory_that_is_not_one(memory):
    with pytest.raises(ab.InputError, match="memory must be a number of bytes") as error:
        ab.value_and_grad(coupled_late, microbatch_size=2, memory=memory)
    assert 'memory="16GiB"' in str(error.value)


class Block(nn.Module):
    """A residual block with BatchNorm."""

    @nn.compact
    def __call__(self, x):
        return x + nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x)))


def test_batch_norm_in_a_large_network_is_loud():
    model = nn.Sequential([nn.Conv(8, (3, 3)), Block(), Block(), Block()])
    images = jax.ShapeDtypeStruct((256, 32, 32, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, images):
        state = {"params": params, "batch_stats": jax.tree.map(jnp.zeros_like, variables["batch_stats"])}
        return jnp.mean(model.apply(state, images, mutable=["batch_stats"])[0] ** 2)

    with pytest.warns(ab.LargeHeadWarning, match="inside BatchNorm"):
        lower(loss, variables["params"], images)


# Rows that are selected before the model: each has a loop of its own, and a copy of the data is not made.


def errors(params, x):
    return jnp.mean(layers(params, x) ** 2)


SELECTED = {
    "a multiple of 100": lambda params, x: errors(params, x[: len(x) // 100 * 100]),
    "every second": lambda params, x: errors(params, x[::2]),
    "differences of neighbours": lambda params, x: errors(params, x[1:] - x[:-1]),
    "halves": lambda params, x: errors(params, x[: len(x) // 2]) + 2.0 * errors(params, x[len(x) // 2 :]),
    "an eighth and the rest": lambda params, x: errors(params, x[: len(x) // 8]) + errors(params, x[len(x) // 8 :]),
    "a sixteenth": lambda params, x: errors(params, x[: len(x) // 16]),
    "padded": lambda params, x: errors(params, jnp.pad(x, ((2, 3), (0, 0)))),
    "repeated": lambda params, x: errors(params, jnp.repeat(x, 3, axis=0)),
    "rolled": lambda params, x: errors(params, jnp.roll(x, 1, axis=0) + x),
    "scaled, then selected": lambda params, x: errors(params, (x / 255.0)[1::3]),
}


def temporaries_of_small(loss, num_examples):
    return temporaries(loss, *shapes(num_examples, width=32, depth=2))


@pytest.mark.parametrize("name", SELECTED)
def test_memory_is_flat_in_the_batch_where_rows_are_selected(name):
    assert temporaries_of_small(SELECTED[name], 16384) <= 1.05 * temporaries_of_small(SELECTED[name], 512)


def test_that_memory_is_flat_can_fail():
    """The control: sorting needs all of the data."""

    def sorts(params, x):
        return errors(params, jnp.sort(x, axis=0)[1:])

    assert temporaries_of_small(sorts, 16384) > 2 * temporaries_of_small(sorts, 512)


def selects(params, x):
    return errors(params, x[1:])


def test_a_selection_is_read_as_rows():
    reading = ab.read(selects, *shapes(64))
    assert reading.kind == "mean over 63 rows of 64 examples"
    assert reading.separable and reading.passes == 1 and not reading.blame and reading.head_bytes == 0
    assert "in selects (slice): it takes some of the examples" in str(reading.rearranged[0])
    lower(selects, *shapes(64), on_coupled="error")


def test_a_selection_that_stays_whole_is_counted_named_and_warned_of():
    """With sums in a fixed order, all loops are over the batch itself."""
    with pytest.warns(ab.LargeHeadWarning, match=rf"{re.escape(__file__)}:\d+ in selects \(slice\)"):
        lower(selects, *shapes(16384), reproducible=True)
    with pytest.raises(ab.CoupledError, match=rf"looks across examples at {re.escape(__file__)}:\d+ in selects"):
        lower(selects, *shapes(64), reproducible=True, on_coupled="error")


def test_a_print_happens_in_the_loop_of_the_rows_it_prints(capsys):
    def loss(params, x):
        selected = x[::2]
        jax.debug.print("example {}", jnp.sum(x, axis=1))
        jax.debug.print("row {}", jnp.sum(selected, axis=1))
        return errors(params, x) + errors(params, selected)

    x = jnp.arange(24.0).reshape(6, 4)
    ab.value_and_grad(loss, microbatch_size=2)([jnp.eye(4)], x)
    jax.effects_barrier()
    printed = sorted(capsys.readouterr().out.splitlines())
    assert printed == ["example [ 6. 22.]", "example [38. 54.]", "example [70. 86.]", "row [ 6. 38.]", "row [70.]"]


def test_rows_are_followed_back_through_a_bounded_number_of_steps(monkeypatch):
    """Each difference of neighbours looks up two rows: unbounded, thirty of them would take 2**30 steps."""
    steps = []
    look_up = evaluation.Lookup._look_up
    monkeypatch.setattr(evaluation.Lookup, "_look_up", lambda self, *args: (steps.append(1), look_up(self, *args))[1])
    params, x = shapes(64, width=4, depth=1)
    lower(lambda params, x: errors(params, jnp.diff(x, n=12, axis=0)), params, x)
    assert 0 < len(steps) < 5000
