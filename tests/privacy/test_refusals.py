"""Whatever would silently void the guarantee is an error that says what to do."""

import functools
import gc
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.meshes import mesh_of
from jax.sharding import PartitionSpec as P

from anybatch import privacy
from anybatch.errors import CoupledError, InputError

USUAL = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4, "num_examples": 20, "microbatch_size": 3}


def loss(params, example):
    return (params @ example["x"] - example["y"]) ** 2


PARAMS = jnp.ones(3)
BATCH = privacy.PaddedBatch({"x": np.ones((6, 3), np.float32), "y": np.zeros(6, np.float32)}, np.zeros(6, bool))


def private_grad(fun=loss, **options):
    return privacy.private_grad(fun, **{**USUAL, **options})


def dp_sgd(fun=loss, optimizer=None, **options):
    return privacy.dp_sgd(fun, optimizer or optax.sgd(0.1), **{**USUAL, **options})


@pytest.mark.parametrize("make", [private_grad, dp_sgd])
@pytest.mark.parametrize(
    "options, text",
    [
        ({"nan_safe": False}, "nan_safe must be True: one example whose gradient is not finite would make the sum NaN"),
        ({"clip_norm": math.inf}, "clip_norm must be positive and finite: if nothing bounds the effect of one example"),
        ({"clip_norm": 0.0}, "clip_norm must be positive and finite"),
        ({"clip_norm": jnp.float32(1)}, "clip_norm must be a Python number: the guarantee rests on it"),
        (
            {"noise_multiplier": 0},
            "noise_multiplier must be positive and finite, got noise_multiplier=0.\n.*allow_no_noise",
        ),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be positive and finite"),
        ({"noise_multiplier": math.nan}, "noise_multiplier must be a number"),
        ({"noise_multiplier": None}, "noise_multiplier must be a number, got noise_multiplier=None"),
        (
            {"normalize_by": 6.0},
            "normalize_by must be the expected batch size: .*normalize_by=6 and expected_batch_size=4",
        ),
        ({"normalize_by": jnp.float32(4)}, "normalize_by must be a Python number: .*must not depend on the data"),
        ({"expected_batch_size": 0}, "expected_batch_size must be positive and finite"),
        ({"expected_batch_size": 21}, "expected_batch_size must be at most the number of examples"),
        ({"num_examples": 0}, "num_examples must be a whole number of at least 1"),
        ({"max_batch_size": 0.5}, "max_batch_size must be a whole number of at least 1"),
    ],
)
def test_options_that_void_the_guarantee(make, options, text):
    with pytest.raises(InputError, match=text):
        make(**options)


def test_options_that_do_not():
    """The control: the same options are accepted with other values."""
    assert private_grad(nan_safe=True, normalize_by=4.0, max_batch_size=6).sensitivity == 0.25
    assert private_grad(noise_multiplier=0, allow_no_noise=True, clip_norm=math.inf).noise_stddev == 0


def test_a_number_of_the_batch_is_refused_under_jit():
    with pytest.raises(InputError, match=r"normalize_by must be a Python number: .* under jit"):
        jax.jit(lambda is_padding: private_grad(normalize_by=jnp.sum(is_padding).astype(float)).noise_stddev)(
            np.zeros(6, bool)
        )


def test_without_noise_epsilon_is_infinite():
    step = dp_sgd(noise_multiplier=0, allow_no_noise=True)
    state, _ = step(step.init(PARAMS, privacy.secret_key()), BATCH)
    assert step.epsilon(state, 1e-5) == math.inf


def test_options_of_the_step():
    with pytest.raises(InputError, match="The parameters must be the first argument of the loss, got argnums=1"):
        dp_sgd(argnums=1)
    with pytest.raises(InputError, match="num_examples must be given: the sampling rate is"):
        dp_sgd(num_examples=None)
    with pytest.raises(InputError, match=r"The first argument of a step must be a privacy.State, got state of type"):
        dp_sgd()(PARAMS, BATCH)


# Losses that look across examples -----------------------------------------------------------------------------------


def batch_normalised(params, batch):
    rows = batch["x"] * params[None]
    rows = rows - jnp.mean(rows, axis=0, keepdims=True)  # HERE
    return jnp.mean((jnp.sum(jnp.tanh(rows), axis=1) - batch["y"]) ** 2)


def rowwise(params, batch):
    rows = batch["x"] * params[None]
    rows = rows - jnp.mean(rows, axis=1, keepdims=True)
    return jnp.mean((jnp.sum(jnp.tanh(rows), axis=1) - batch["y"]) ** 2)


def line_of(marker):
    with open(__file__) as lines:
        return next(number for number, line in enumerate(lines, 1) if line.rstrip().endswith(marker))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_loss_that_looks_across_examples_is_refused_with_its_line(compiled):
    grad = private_grad(batch_normalised, keep_batch_dim=True)
    call = functools.partial(grad, PARAMS, noise_key=privacy.secret_key())
    with pytest.raises(CoupledError, match=f"test_refusals.py:{line_of('# HERE')}.*\n.*GroupNorm or LayerNorm"):
        (jax.jit(call) if compiled else call)(BATCH)


def test_a_loss_of_rows_is_not():
    """The control. A loss that takes only batches of one is accepted too."""
    grad = private_grad(rowwise, keep_batch_dim=True)
    assert grad(PARAMS, BATCH, noise_key=privacy.secret_key()).shape == (3,)

    def of_one(params, batch):
        return loss(params, jax.tree.map(lambda array: jnp.squeeze(array, 0), batch))

    grad = private_grad(of_one, keep_batch_dim=True)
    assert grad(PARAMS, BATCH, noise_key=privacy.secret_key()).shape == (3,)


# Batches ------------------------------------------------------------------------------------------------------------


def many(number):
    return {"x": np.ones((number, 3), np.float32), "y": np.zeros(number, np.float32)}


def test_batches_larger_than_the_sampling_rate_gives():
    step = dp_sgd(num_examples=100_000, expected_batch_size=4)
    state = step.init(PARAMS, privacy.secret_key())
    with pytest.raises(
        InputError, match=r"A batch must be a Poisson sample at the declared rate.*got 64 examples, where 4"
    ):
        step(state, many(64), is_padding=np.zeros(64, bool))
    with pytest.raises(InputError, match="A batch must be a Poisson sample at the declared rate"):
        jax.eval_shape(functools.partial(step, is_padding=np.zeros(64, bool)), state, many(64))
    with pytest.raises(InputError, match="got 60 examples, where 4 of 100000 are expected"):
        step(state, many(64), is_padding=np.arange(64) >= 60)
    step(state, many(64), is_padding=np.arange(64) >= 9)  # the control


def test_batches_larger_than_declared():
    step = dp_sgd(max_batch_size=6)
    state = step.init(PARAMS, privacy.secret_key())
    text = "A batch must not be larger than declared, got 7 rows and max_batch_size=6"
    with pytest.raises(InputError, match=text):
        step(state, many(7), is_padding=np.ones(7, bool))
    grad = private_grad(max_batch_size=6, num_examples=None)  # the sampling rate is not known
    with pytest.raises(InputError, match=text):
        grad(PARAMS, many(7), noise_key=privacy.secret_key(), is_padding=np.ones(7, bool))
    grad(PARAMS, BATCH, noise_key=privacy.secret_key())  # the control


def test_noise_inside_shard_map_is_refused():
    grad = private_grad()

    def of_a_device(batch):
        return grad(PARAMS, batch, noise_key=jax.random.key(0))

    spread = jax.shard_map(of_a_device, mesh=mesh_of(2), in_specs=P("data"), out_specs=P(), check_vma=False)
    with pytest.raises(
        InputError, match=r"Noise is added once, to the sum over all devices, got a call inside shard_map"
    ):
        spread(BATCH)


# Optimizers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer, name",
    [
        (optax.MultiSteps(optax.sgd(0.1), 4), "optax.MultiSteps"),
        (optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation(), "optax.MultiSteps"),
        (
            optax.chain(optax.clip(1.0), optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation()),
            "optax.MultiSteps",
        ),
        (optax.masked(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(), True), "optax.MultiSteps"),
        (optax.chain(optax.apply_every(4), optax.sgd(0.1)), "optax.apply_every"),
    ],
)
def test_optimizers_that_collect_gradients_are_refused(optimizer, name):
    with pytest.raises(InputError, match=f"optimizer must take one step for each call.*got an optimizer with {name}"):
        dp_sgd(optimizer=optimizer).init(PARAMS, privacy.secret_key())


def test_other_optimizers_are_not():
    """The control."""
    optimizer = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    dp_sgd(optimizer=optimizer).init(PARAMS, privacy.secret_key())
    with pytest.raises(InputError, match="optimizer must have init and update, like those of optax"):
        dp_sgd(optimizer=0.1)


# Keys ---------------------------------------------------------------------------------------------------------------


def test_a_state_is_stepped_once():
    step = dp_sgd()
    state = step.init(PARAMS, privacy.secret_key())
    after, _ = step(state, BATCH)
    with pytest.raises(InputError, match=r"Each state can be stepped once.*\nContinue from the state that the step "):
        step(state, BATCH)
    with pytest.raises(InputError, match="Each state can be stepped once"):
        step(state._replace(params=2 * PARAMS), BATCH)
    step(after, BATCH)  # the control
    again = dp_sgd(allow_key_reuse=True)
    np.testing.assert_array_equal(again(state, BATCH)[0].params, after.params)


def test_a_step_that_failed_may_be_repeated():
    step = dp_sgd()
    state = step.init(PARAMS, privacy.secret_key())
    with pytest.raises(InputError):
        step(state, BATCH._replace(examples={"x": np.ones((6, 3), np.float32), "y": np.zeros(5, np.float32)}))
    step(state, BATCH)


def test_states_that_are_gone_are_forgotten():
    """A new array may have the id of one that was used and deleted."""
    from anybatch.privacy.key_ledger import LEDGER

    step = dp_sgd()
    state = step.init(PARAMS, privacy.secret_key())
    gc.collect()
    before = len(LEDGER._arrays)
    for _ in range(5):
        state, _ = step(state, BATCH)
    del state
    gc.collect()
    assert len(LEDGER._arrays) <= before


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_two_runs_do_not_share_a_key(make):
    seed = 1000 + 7 * (make is jax.random.key)
    step = dp_sgd()
    step.init(PARAMS, make(seed))
    with pytest.raises(InputError, match=r"A key can be used once.*used before, for the noise of a run"):
        dp_sgd().init(PARAMS, make(seed))
    dp_sgd().init(PARAMS, make(seed + 1))  # the control
    dp_sgd(allow_key_reuse=True).init(PARAMS, make(seed))


def test_sampling_and_noise_do_not_share_a_key():
    key, other = jax.random.key(2001), jax.random.key(2002)
    privacy.poisson_batches(20, expected_batch_size=4, steps=3, seed=key)
    with pytest.raises(InputError, match="used before, for the sampling of batches"):
        dp_sgd().init(PARAMS, key)
    with pytest.raises(InputError, match="used before, for the sampling of batches"):
        private_grad()(PARAMS, BATCH, noise_key=key)
    dp_sgd().init(PARAMS, other)
    with pytest.raises(InputError, match="seed: a key that was used before, for the noise of a run"):
        privacy.poisson_batches(20, expected_batch_size=4, steps=3, seed=other)


def test_a_key_is_for_one_gradient():
    grad, key = private_grad(), jax.random.key(3001)
    grad(PARAMS, BATCH, noise_key=key)
    for same in (key, jax.random.key(3001)):
        with pytest.raises(InputError, match="noise_key: a key that was used before, for the noise of a call"):
            grad(PARAMS, BATCH, noise_key=same)
    for each in jax.random.split(key, 2):
        grad(PARAMS, BATCH, noise_key=each)
    private_grad(allow_key_reuse=True)(PARAMS, BATCH, noise_key=key)


def test_the_key_of_the_loss_is_not_that_of_the_noise():
    def dropped(params, example, key):
        return loss(params, example) * jax.random.bernoulli(key, 0.5).astype(jnp.float32)

    key = privacy.secret_key()
    with pytest.raises(InputError, match="noise_key must be used for noise alone, got a key that is also an argument"):
        private_grad(dropped, rng_argnums=2)(PARAMS, BATCH, key, noise_key=key)


@pytest.mark.parametrize(
    "key, text",
    [
        (0, "must be one PRNG key, got .*=0"),
        (jax.random.split(jax.random.key(0), 2), "must be one PRNG key"),
        (jax.random.key(0, impl="unsafe_rbg"), "must belong to a generator that splits keys into independent ones"),
    ],
)
def test_keys_that_are_none(key, text):
    with pytest.raises(InputError, match=text):
        dp_sgd().init(PARAMS, key)
    with pytest.raises(InputError, match=text):
        private_grad()(PARAMS, BATCH, noise_key=key)
    with pytest.raises(InputError, match=text):
        privacy.add_noise(PARAMS, key, 1.0)


def test_noise_for_what_is_no_real_number():
    for leaf in (jnp.ones(3, jnp.complex64), jnp.ones(3, jnp.int32)):
        text = r"Noise can be added only to real floating-point numbers, got tree\['a'\]"
        with pytest.raises(InputError, match=text):
            privacy.add_noise({"a": leaf}, jax.random.key(0), 1.0)
    for stddev in (-1.0, math.inf):
        with pytest.raises(InputError, match="stddev must be finite and not negative"):
            privacy.add_noise(PARAMS, jax.random.key(0), stddev)


def test_a_transform_that_rounds_is_refused():
    grad = private_grad(transform=lambda gradient: gradient.astype(jnp.bfloat16))
    with pytest.raises(InputError, match="at least float32 when noise is added"):
        grad(PARAMS, BATCH, noise_key=privacy.secret_key())
