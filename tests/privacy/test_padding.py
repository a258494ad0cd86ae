"""Padding never counts as examples, and a batch that does not say which rows are padding is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.meshes import bits

import anybatch as ab
from anybatch import privacy
from anybatch.errors import InputError
from anybatch.training.log import read_log

NUMBER, EXPECTED = 40, 4
USUAL = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": EXPECTED, "num_examples": NUMBER}
PARAMS = jnp.zeros(3)


def loss(params, example):
    return params @ example["x"]


def examples(number=NUMBER):
    """Examples whose gradients have a norm of at least 1; the first is very long."""
    x = np.random.default_rng(0).normal(size=(number, 3)).astype(np.float32)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    x[0] *= 1e6
    return {"x": x}


def dp_sgd(fun=loss, **options):
    options = {**USUAL, "microbatch_size": 4, **options}
    return privacy.dp_sgd(fun, optax.sgd(1.0), **options)


def private_grad(fun=loss, **options):
    return privacy.private_grad(fun, **{**USUAL, "microbatch_size": 4, **options})


def draws(steps=3, seed=0, number=NUMBER):
    return privacy.poisson_batches(number, expected_batch_size=EXPECTED, steps=steps, seed=seed)


def started(step):
    return step.init(PARAMS, privacy.secret_key())


def grad_of(grad, *args, **kwargs):
    return grad(PARAMS, *args, noise_key=privacy.secret_key(), **kwargs)


# Batches ------------------------------------------------------------------------------------------------------------


def test_a_draw_unpacks_and_takes():
    data = {"x": np.arange(NUMBER), "pair": (jnp.arange(NUMBER) * 2, np.ones((NUMBER, 2)))}
    for draw, batch in zip(draws(), draws().of(data), strict=True):
        indices, is_padding = draw
        assert isinstance(draw, privacy.Draw) and isinstance(batch, privacy.PaddedBatch)
        np.testing.assert_array_equal(batch.examples["x"], indices)
        np.testing.assert_array_equal(batch.examples["pair"][0], indices * 2)
        np.testing.assert_array_equal(batch.is_padding, is_padding)
        np.testing.assert_array_equal(draw.take(data).examples["x"], indices)


@pytest.mark.parametrize(
    "data, text",
    [
        ({"x": np.ones(NUMBER - 1)}, r"with 40 rows, one for each example, got data\['x'\]: float64\[39\]"),
        ({"x": np.ones(NUMBER + 1)}, "data must be a tree of arrays with 40 rows"),
        ({"x": jnp.ones(NUMBER), "y": 3}, r"data must be a tree of arrays with 40 rows.*got data\['y'\]: 3"),
        ({}, "data must be a tree of arrays with 40 rows, one for each example, got a tree without arrays"),
    ],
)
def test_data_that_the_draws_are_not_of(data, text):
    with pytest.raises(InputError, match=text):
        draws().of(data)


def test_an_index_beyond_the_data_is_refused():
    """JAX would take the last example for each of them, which would then count several times."""
    draw = privacy.Draw(np.array([1, 5, 6]), np.zeros(3, bool))
    with pytest.raises(InputError, match="data must be a tree of arrays with at least 7 rows"):
        draw.take(jnp.arange(5))
    with pytest.raises(InputError, match="The indices of a draw must be known when examples are taken"):
        jax.jit(lambda draw: draw.take(jnp.arange(5)))(draw)
    assert draw.take(jnp.arange(7)).examples.tolist() == [1, 5, 6]  # the control


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True])
def test_a_batch_without_padding_is_refused_before_any_work(compiled):
    traced = []

    def counted(params, example):
        traced.append(1)
        return loss(params, example)

    text = (
        r"A call must say which rows of the batch are padding: padding that counts as examples voids the guarantee, "
        r"got dict without is_padding.\nPass {} for each draw of privacy.poisson_batches\(...\), or "
        r"ab.fit\(step, state, batches.of\(data\)\). For a batch without padding, pass "
        r"is_padding=np.zeros\(4, bool\)."
    )
    wrap = jax.jit if compiled else (lambda fun: fun)
    step, grad = dp_sgd(counted), private_grad(counted)
    state, batch = started(step), examples(4)
    with pytest.raises(InputError, match=text.format(r"step\(state, draw.take\(data\)\)")):
        wrap(step)(state, batch)
    with pytest.raises(InputError, match=text.format(r"grad\(params, draw.take\(data\), noise_key=key\)")):
        wrap(functools.partial(grad_of, grad))(batch)
    assert not traced
    with pytest.raises(InputError, match="got Draw without is_padding"):
        step(state, draws().batch(0))
    # The control: what was refused may be said, and the state was not used up.
    step(state, batch, is_padding=np.zeros(4, bool))


def test_the_error_of_fit_with_other_batches_is_the_same():
    step = dp_sgd()
    with pytest.raises(InputError, match=r"(?s)which rows of the batch are padding.*ab.fit\(step, state, batches.of"):
        ab.fit(step, started(step), ab.Batches(examples(), 4), steps=2, progress=False)
    with pytest.raises(InputError, match=r"got Draw without is_padding"):
        ab.fit(step, started(step), draws(), steps=2, progress=False)


def test_padding_is_given_once():
    step, data, draw = dp_sgd(), examples(), draws().batch(0)
    batch = draw.take(data)
    with pytest.raises(InputError, match=r"A call must say once which rows .*got 1 PaddedBatch and is_padding="):
        step(started(step), batch, is_padding=np.zeros(len(batch.is_padding), bool))
    step(started(step), batch, is_padding=draw.is_padding)  # the same

    def of_two(params, x, y):
        return params @ x * y

    step = dp_sgd(of_two, batch_argnums=(1, 2))
    x, y = data["x"], np.ones(NUMBER, np.float32)
    ends = [
        step(step.init(PARAMS, key), *batch, **kwargs)[0].params
        for key, batch, kwargs in [
            (privacy.secret_key(), (draw.take(x), draw.take(y)), {}),
            (privacy.secret_key(), (x[draw.indices], y[draw.indices]), {"is_padding": draw.is_padding}),
        ]
    ]
    assert all(np.isfinite(end).all() for end in ends)
    with pytest.raises(InputError, match=r"(?s)got 2 PaddedBatch without is_padding=.*draw.take\(\(x, y\)\)"):
        step(started(step), draw.take(x), draws().batch(1).take(y))


@pytest.mark.parametrize(
    "mask", [True, [0, 1, 0, 1], np.zeros(3, bool), np.zeros((4, 1), bool)], ids=["scalar", "numbers", "short", "wide"]
)
def test_padding_that_is_none(mask):
    with pytest.raises(InputError, match="is_padding must have one boolean for each example"):
        grad_of(private_grad(), examples(4), is_padding=mask)


# Rows that all examples would see -----------------------------------------------------------------------------------


def swallowing(params, example, **kwargs):
    return loss(params, example)


MASK = np.array([False, False, True, True, True])


@pytest.mark.parametrize("name", ["is_padding_example", "padding", "is_pad", "padding_mask", "pad_mask", "isPadded"])
@pytest.mark.parametrize("mask", [MASK, jnp.asarray(MASK), MASK.tolist()], ids=["numpy", "jax", "list"])
def test_padding_by_another_name_is_refused(name, mask):
    step, grad = dp_sgd(swallowing), private_grad(swallowing)
    with pytest.raises(InputError, match=rf"without is_padding, and {name}=.*, which only the loss would see"):
        step(started(step), examples(5), **{name: mask})
    with pytest.raises(InputError, match=rf"(?s)got {name} = .*beside a batch of 5 rows.*pass it as is_padding={name}"):
        step(started(step), examples(5), is_padding=MASK, **{name: mask})
    with pytest.raises(InputError, match=rf"(?s)got {name} = .*beside a batch of 5 rows.*pass it as is_padding={name}"):
        grad_of(grad, privacy.PaddedBatch(examples(5), MASK), **{name: mask})


@pytest.mark.parametrize(
    "value",
    [np.ones(5), jnp.ones((5, 2)), {"a": (np.ones(5),)}, [1.0] * 5, (1, 2, 3, 4, 5)],
    ids=["numpy", "jax", "tree", "list", "tuple"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_by_keyword_are_refused(value, compiled):
    """Each example would see the rows of all others, and clipping bounds only its own gradient."""

    def weighted(params, example, *, weights):
        return loss(params, example) * sum(jnp.sum(jnp.asarray(leaf)) for leaf in jax.tree.leaves(weights))

    text = r"(?s)An argument with one row for each example must be part of the batch.*got weights.*a batch of 5 rows"
    step, grad = dp_sgd(weighted, jit=compiled), private_grad(weighted)
    with pytest.raises(InputError, match=text):
        step(started(step), examples(5), is_padding=MASK, weights=value)
    with pytest.raises(InputError, match=text):
        grad_of(grad, examples(5), is_padding=MASK, weights=value)


def test_rows_by_position_are_refused_unless_they_are_a_batch():
    def of_two(params, x, y):
        return jnp.mean((params @ x - y) ** 2)

    x, y = examples(5)["x"], np.ones(5, np.float32)
    step = dp_sgd(of_two)
    with pytest.raises(InputError, match=r"(?s)must be part of the batch.*got y = float32\[5\].*batch_argnums"):
        step(started(step), x, y, is_padding=MASK)
    step = dp_sgd(of_two, batch_argnums=(1, 2))
    step(started(step), x, y, is_padding=MASK)  # the control


def test_flags_and_public_arrays_are_not_refused():
    """The control: arguments with another number of rows, and keys, are accepted."""

    def flagged(params, example, scale, key, **kwargs):
        assert kwargs["train"] is True and kwargs["padding"] == "SAME"
        return loss(params, example) * scale * jax.random.uniform(key) * jnp.sum(kwargs["weights"])

    step = dp_sgd(flagged, rng_argnums=3)
    public = {"train": True, "padding": "SAME", "weights": np.ones(4, np.float32), "pads": ((1, 1), (0, 0))}
    state, _ = step(started(step), examples(5), 2.0, jax.random.PRNGKey(0), is_padding=MASK, **public)
    step(state, examples(2), 2.0, jax.random.PRNGKey(0), is_padding=MASK[:2], **{**public, "pads": None})


# An attack ----------------------------------------------------------------------------------------------------------


class CountsPadding:
    """The control: a step that takes the padding of its batch for examples."""

    def __init__(self, step):
        self.step = step

    def __call__(self, state, batch):
        return self.step(state, batch._replace(is_padding=np.zeros_like(batch.is_padding)))


def sum_before_noise(data, seed, *, counts_padding):
    """The update of one step as documented, with next to no noise."""
    step = dp_sgd(noise_multiplier=1e-12, allow_key_reuse=True)
    taken = CountsPadding(step) if counts_padding else step
    state = step.init(PARAMS, jax.random.key(5))
    run = ab.fit(taken, state, draws(steps=1, seed=seed).of(data), progress=False)
    return -np.asarray(run.state.params, np.float64)


def change(example, seed, *, counts_padding=False):
    """The change of a step when an example is removed, in units of the sensitivity.

    The draws of all others stay as they are. An example whose gradient is 0 adds as much as one that is not there.
    """
    removed = examples()
    removed["x"][example] = 0
    ends = [sum_before_noise(data, seed, counts_padding=counts_padding) for data in (examples(), removed)]
    return np.linalg.norm(ends[0] - ends[1]) / (1.0 / EXPECTED)


def drawn(seed):
    ((indices, is_padding),) = draws(steps=1, seed=seed)
    return indices[~is_padding].tolist()


WITH_0 = next(seed for seed in range(1000) if 0 in drawn(seed) and len(drawn(seed)) > 2)
WITHOUT_0 = next(seed for seed in range(1000) if 0 not in drawn(seed) and len(drawn(seed)) > 2)


@pytest.mark.parametrize("place", [0, -1], ids=["example 0", "another"])
def test_one_example_changes_a_step_by_at_most_the_sensitivity(place):
    assert 0.99 < change(drawn(WITH_0)[place], WITH_0) <= 1 + 1e-5


def test_an_example_that_was_not_drawn_changes_nothing():
    assert change(0, WITHOUT_0) <= 1e-5


@pytest.mark.parametrize("seed", [WITH_0, WITHOUT_0], ids=["drawn", "not drawn"])
def test_a_step_that_counts_padding_does_not_keep_to_the_sensitivity(seed):
    """The control: example 0 counts once for each row of padding."""
    assert change(0, seed, counts_padding=True) > 5


def test_what_padding_repeats_need_not_be_finite():
    data = examples()
    data["x"][0] = np.nan
    step = dp_sgd(allow_key_reuse=True, noise_multiplier=1e-12)
    run = ab.fit(step, step.init(PARAMS, jax.random.key(7)), draws().of(data), progress=False)
    assert np.isfinite(run.state.params).all() and np.any(run.state.params != PARAMS)


# With fit -----------------------------------------------------------------------------------------------------------


def one_run(folder, *, steps, seed, key, **options):
    step = dp_sgd(allow_key_reuse=True, **options)
    batches = draws(steps=9, seed=seed).of(examples())
    return ab.fit(
        *(step, step.init(PARAMS, key), batches),
        **{"steps": steps, "checkpoints": folder, "checkpoint_every": 3, "progress": False},
    )


@pytest.mark.full
@pytest.mark.parametrize("stopped_after", [0, 4])
def test_a_run_that_goes_on_has_the_same_bits_and_the_seed_of_before(tmp_path, stopped_after):
    """A script that makes new keys at each start resumes with the old ones, from the first checkpoint on."""
    whole = one_run(tmp_path / "whole", steps=9, seed=jax.random.key(31), key=jax.random.key(32))
    one_run(tmp_path / "stopped", steps=stopped_after, seed=jax.random.key(31), key=jax.random.key(32))
    resumed = one_run(tmp_path / "stopped", steps=9, seed=privacy.secret_key(), key=privacy.secret_key())
    assert resumed.resumed_from == stopped_after
    assert bits(resumed.state.params) == bits(whole.state.params)
    assert int(resumed.state.steps) == 9
    other = one_run(tmp_path / "other", steps=9, seed=privacy.secret_key(), key=jax.random.key(32))
    assert bits(other.state.params) != bits(whole.state.params)  # the control


def test_draws_are_not_repeated_by_a_second_pass():
    step = dp_sgd()
    text = "Each batch of a private run is for one step: a second pass would repeat the draws of the first, got {}"
    for batches in (draws(), draws().of(examples())):
        for options, given in [({"epochs": 2}, "epochs=2"), ({"steps": 4}, "steps=4")]:
            with pytest.raises(InputError, match=text.format(f"{given} for 3 batches")):
                ab.fit(step, started(step), batches, progress=False, **options)
    run = ab.fit(step, started(step), draws().of(examples()), progress=False)
    assert run.steps == int(run.state.steps) == 3  # the control


def test_a_run_goes_on_only_with_the_account_it_had(tmp_path):
    keys = {"seed": 1, "key": jax.random.key(33)}
    one_run(tmp_path, steps=2, **keys)
    with pytest.raises(InputError, match=r"(?s)must be resumed with the same step.*noise_multiplier=2.0, and 1.0 be"):
        one_run(tmp_path, steps=4, noise_multiplier=2.0, **keys)
    step = dp_sgd(allow_key_reuse=True)
    rarer = privacy.poisson_batches(NUMBER, expected_batch_size=2, steps=9, seed=1).of(examples())
    with pytest.raises(InputError, match=r"(?s)must draw its batches as before.*sampling_rate=0.05, and 0.1 before"):
        ab.fit(step, step.init(PARAMS, keys["key"]), rarer, checkpoints=tmp_path, progress=False)
    assert one_run(tmp_path, steps=4, **keys).steps == 4  # the control


def test_what_is_not_private_is_not_logged(tmp_path, capfd):
    def with_aux(params, example):
        return loss(params, example), jnp.sum(example["x"])

    step = dp_sgd(with_aux, has_aux=True, return_values=True)

    def told(state, batch):
        state, metrics = step(state, batch)
        return state, metrics._replace(not_private=jnp.sum(metrics.not_private.aux))

    for taken in (step, told):
        log = tmp_path / f"{taken is told}.csv"
        run = ab.fit(taken, started(step), draws().of(examples()), log=log, progress="lines")
        for row in [read_log(log)[0], *run.history]:
            assert "gradient_norm" in row and not any("private" in name or "aux" in name for name in row)
    assert "private" not in capfd.readouterr().err


def test_steps_inside_a_scan_take_padded_batches():
    step = dp_sgd()
    batches = list(draws().of(examples()))
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
    end, _ = jax.jit(lambda state: jax.lax.scan(step, state, stacked))(started(step))
    assert int(end.steps) == 3
