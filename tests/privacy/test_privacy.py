"""Sensitivity, noise and what an attacker gains: each measured, beside a control that must fail."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.meshes import bits, mesh_of
from scipy import stats

import anybatch as ab
from anybatch import privacy

WIDTH = 5


def loss(params, example):
    hidden = jnp.tanh(example["x"] @ params["w"])
    return (hidden @ params["v"] + params["b"] - example["y"]) ** 2


def parameters(dtype=np.float32):
    random = np.random.default_rng(0)
    tree = {"w": random.normal(size=(WIDTH, 4)), "v": random.normal(size=4), "b": random.normal()}
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def examples(number, dtype=np.float32, seed=1):
    random = np.random.default_rng(seed)
    return {"x": random.normal(size=(number, WIDTH)).astype(dtype), "y": random.normal(size=number).astype(dtype)}


# What somebody may send to do harm: gradients of every size, and of none.
HARMFUL = {
    "usual": 1.0,
    "tiny": 1e-20,
    "none": 0.0,
    "large": 1e6,
    "squares overflow": 1e20,
    "overflows": 3e38,
    "infinite": np.inf,
    "minus infinite": -np.inf,
    "not a number": np.nan,
}


def with_harmful(batch, target):
    """The batch, whose first example has `target` as its label: its gradient is proportional to that."""
    return {"x": batch["x"], "y": np.concatenate([np.array([target], batch["y"].dtype), batch["y"][1:]])}


def padded(batch):
    """The batch as one without padding."""
    return privacy.PaddedBatch(batch, np.zeros(len(jax.tree.leaves(batch)[0]), bool))


def without_first(batch):
    return jax.tree.map(lambda array: array[1:], batch)


def distance(one, other):
    """The Euclidean distance of two trees, in float64."""
    one, other = (
        np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])
        for tree in (one, other)
    )
    return float(np.linalg.norm(one - other))


# Rounding of a sum of n terms: each addition is off by half a unit in the last place of what is there by then.
def rounding(number, dtype=np.float32):
    return 1 + number**2 * float(np.finfo(dtype).eps)


@pytest.mark.parametrize("method", ["vmap", "factored"])
@pytest.mark.parametrize("harm", HARMFUL, ids=lambda name: name.replace(" ", "_"))
def test_one_example_changes_the_sum_by_at_most_the_sensitivity(harm, method):
    params, batch = parameters(), with_harmful(examples(12), HARMFUL[harm])
    grad = privacy.private_grad(
        loss, clip_norm=0.7, noise_multiplier=1.0, expected_batch_size=8, microbatch_size=5, method=method
    )
    assert grad.sensitivity == 0.7 / 8
    (whole, _), (rest, _) = (grad.clipped((params, padded(each)), {}, None) for each in (batch, without_first(batch)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(whole))
    assert distance(whole, rest) <= grad.sensitivity * rounding(12)
    if harm in ("large", "usual"):
        assert distance(whole, rest) > 0.99 * grad.sensitivity  # and it is not less than that


def test_padding_instead_of_an_example_changes_as_much():
    params, batch = parameters(), with_harmful(examples(12), 1e6)
    grad = privacy.private_grad(loss, clip_norm=0.7, noise_multiplier=1.0, expected_batch_size=8)
    whole, _ = grad.clipped((params, padded(batch)), {}, None)
    masked, _ = grad.clipped((params, batch), {}, np.arange(12) == 0)
    rest, _ = grad.clipped((params, padded(without_first(batch))), {}, None)
    assert distance(whole, masked) <= grad.sensitivity * rounding(12)
    assert distance(masked, rest) <= 1e-6 * grad.sensitivity


@pytest.mark.parametrize("method", ["vmap", "factored"])
def test_gradients_of_parts_that_cancel_are_bounded_too(method):
    """A small sum of large terms, one for each position. Its norm has an error, and must not be taken too low."""
    random = np.random.default_rng(0)
    x, y = (np.float32(1e3) * random.normal(size=(3, 8, 32)).astype(np.float32) for _ in range(2))
    x[:, 4:], y[:, 4:] = x[:, :4], -np.float32(1 - 1e-6) * y[:, :4]
    options = {"clip_norm": 0.7, "noise_multiplier": 1.0, "expected_batch_size": 1, "microbatch_size": None}
    grad = privacy.private_grad(lambda w, example: jnp.sum((example[0] @ w) * example[1]), method=method, **options)
    for first in range(3):
        alone, _ = grad.clipped((jnp.zeros((32, 32)), (x, y)), {}, np.arange(3) != first)
        assert distance(alone, np.zeros((32, 32))) <= grad.sensitivity * rounding(3)


@pytest.mark.parametrize("harm", ["large", "overflows", "infinite", "not a number"])
def test_without_clipping_one_example_changes_more(harm):
    """The control."""
    params, batch = parameters(), with_harmful(examples(12), HARMFUL[harm])
    grad = privacy.private_grad(
        loss, clip_norm=math.inf, noise_multiplier=0, allow_no_noise=True, expected_batch_size=8, microbatch_size=5
    )
    mean = functools.partial(jax.grad(lambda params, batch: jnp.sum(jax.vmap(loss, (None, 0))(params, batch))), params)
    assert not distance(mean(batch), mean(without_first(batch))) <= 100 * 0.7
    if harm == "large":  # those that are not finite are left out even so
        (whole, _), (rest, _) = (
            grad.clipped((params, padded(each)), {}, None) for each in (batch, without_first(batch))
        )
        assert distance(whole, rest) > 100 * 0.7 / 8


def narrow_problem(number=400):
    """Gradients that all point the same way, so that the sum is large."""
    params = {"w": jnp.zeros(64, jnp.bfloat16)}
    batch = {"x": np.full((number, 64), 1.0, np.float32) + np.linspace(0, 0.3, 64, dtype=np.float32)}

    def narrow_loss(params, example):
        return jnp.sum(params["w"] * example["x"].astype(jnp.bfloat16))

    return narrow_loss, params, batch


@pytest.mark.parametrize("argnums", [0, -2])
def test_narrow_parameters_are_noised_before_they_are_rounded(argnums):
    """In bfloat16, neighbours of 400 differ by more than one example adds."""
    narrow_loss, params, batch = narrow_problem()
    options = {"clip_norm": 1.0, "microbatch_size": None}
    grad = privacy.private_grad(narrow_loss, argnums, noise_multiplier=1.0, expected_batch_size=400, **options)
    (whole, _), (rest, _) = (grad.clipped((params, padded(each)), {}, None) for each in (batch, without_first(batch)))
    assert distance(whole, rest) <= grad.sensitivity * rounding(400)
    assert grad(params, padded(batch), noise_key=privacy.secret_key())["w"].dtype == jnp.bfloat16
    # The control: rounded first, one example may change it by more.
    rounded = ab.clipped_grad(narrow_loss, normalize_by=400.0, **options)
    compiled = jax.jit(lambda first: rounded(params, batch, is_padding=jnp.arange(400) < first))
    sums = [compiled(first) for first in range(100)]
    assert max(itertools.starmap(distance, itertools.pairwise(sums))) > 1.5 * rounded.sensitivity()


# Noise --------------------------------------------------------------------------------------------------------------


def test_noise_is_gaussian_with_the_claimed_deviation():
    number = 200_000
    noised = privacy.add_noise({"a": jnp.zeros(number), "b": jnp.zeros((4, number // 4))}, jax.random.key(0), 3.0)
    for leaf in noised.values():
        noise = np.asarray(leaf, np.float64).ravel()
        assert abs(noise.std() / 3 - 1) < 5 / math.sqrt(2 * number)
        assert abs(noise.mean()) < 5 * 3 / math.sqrt(number)
        assert stats.kstest(noise / 3, "norm").pvalue > 1e-4
    # The control: other noise of the same deviation is told from it.
    uniform = np.random.default_rng(0).uniform(-math.sqrt(3), math.sqrt(3), number)
    assert stats.kstest(uniform, "norm").pvalue < 1e-4


def test_noise_of_leaves_and_of_neighbours_is_independent():
    number = 100_000
    tree = {"a": jnp.zeros(number), "b": jnp.zeros(number), "c": jnp.zeros(number, jnp.bfloat16)}
    noised = {
        name: np.asarray(leaf, np.float64) for name, leaf in privacy.add_noise(tree, jax.random.key(1), 1.0).items()
    }
    for one, other in itertools.combinations(noised, 2):
        assert abs(np.mean(noised[one] * noised[other])) < 5 / math.sqrt(number)
    assert abs(np.mean(noised["a"][1:] * noised["a"][:-1])) < 5 / math.sqrt(number)
    assert abs(np.mean(noised["a"] * noised["a"])) > 0.9  # the control


@pytest.mark.full
def test_the_tails_of_the_noise_are_fine():
    """One draw in float32 has few values in its tail, and none beyond 5.42. The sum of four draws has neither flaw."""
    zeros = jnp.zeros(2**23)

    def far_out(noise):
        return np.abs(noise[np.abs(noise) > 4.3])

    def repeated(noise):
        return len(noise) - len(np.unique(noise))

    ours = far_out(np.asarray(privacy.add_noise(zeros, jax.random.key(2), 1.0)))
    theirs = far_out(np.asarray(jax.random.normal(jax.random.key(2), zeros.shape)))
    expected = 2 * stats.norm.sf(4.3) * 2**23
    assert abs(len(ours) - expected) < 5 * math.sqrt(expected)
    assert repeated(theirs) > 5 > repeated(ours)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_noise_keeps_dtypes_and_is_drawn_in_float32(dtype):
    noised = privacy.add_noise([jnp.full(50, 3, dtype)], jax.random.key(0), 1e-3)[0]
    wide = privacy.add_noise([jnp.full(50, 3, jnp.float32)], jax.random.key(0), 1e-3)[0]
    assert noised.dtype == dtype
    np.testing.assert_array_equal(noised, wide.astype(dtype))


def test_noise_in_float64(float64):
    noised = privacy.add_noise(jnp.zeros(1000), jax.random.key(0), 1.0)
    assert noised.dtype == jnp.float64
    assert np.any(np.asarray(noised).astype(np.float32) != np.asarray(noised))


def test_the_same_key_gives_the_same_noise_and_another_key_another():
    zeros = {"a": jnp.zeros(20), "b": jnp.zeros(())}
    one, again, other = (privacy.add_noise(zeros, jax.random.key(seed), 1.0) for seed in (3, 3, 4))
    assert bits(one) == bits(again)
    assert not any(np.any(np.asarray(one[name]) == np.asarray(other[name])) for name in zeros)
    assert bits(jax.jit(lambda key: privacy.add_noise(zeros, key, 1.0))(jax.random.key(3))) == bits(one)


def test_secret_keys_differ():
    keys = {jax.random.key_data(privacy.secret_key()).tobytes() for _ in range(20)}
    assert len(keys) == 20


# What an attacker gains ---------------------------------------------------------------------------------------------

TRIALS = 20_000


@functools.cache
def projections(noise_multiplier, trials=TRIALS):
    """The gradients of many runs, with and without the example that an attacker looks for, along its gradient.

    The attacker knows the model and all other examples, and chose the one that is looked for: it is clipped. What is
    seen is 0 without and 1 with it, and noise.
    """
    params, batch = jnp.ones(WIDTH), with_harmful(examples(12), 1e6)
    grad = privacy.private_grad(
        lambda params, example: (example["x"] @ params - example["y"]) ** 2,
        **{"clip_norm": 0.7, "expected_batch_size": 8, "microbatch_size": None},
        noise_multiplier=noise_multiplier,
        allow_no_noise=True,
    )
    is_first = np.arange(12) == 0
    rest, _ = grad.clipped((params, batch), {}, is_first)
    direction = batch["x"][0] / np.linalg.norm(batch["x"][0])  # and its sign: the gradient is -2 (y - ...) x

    @jax.jit
    def seen(keys, is_padding):
        noised = jax.vmap(lambda key: grad(params, batch, noise_key=key, is_padding=is_padding))(keys)
        return -(noised - rest[None]) @ direction / grad.sensitivity

    keys = jax.random.split(jax.random.key(5), (2, trials))
    return [
        np.asarray(seen(key, gone), np.float64) for key, gone in zip(keys, (is_first & False, is_first), strict=True)
    ]


@pytest.mark.full
@pytest.mark.parametrize("noise", [0.5, 1.0])
def test_an_attacker_gains_what_theory_says_and_no_more(noise):
    present, absent = projections(noise)
    advantage = np.mean(present > 0.5) - np.mean(absent > 0.5)
    theory = 2 * stats.norm.cdf(0.5 / noise) - 1
    margin = 5 * math.sqrt(0.5 / TRIALS)
    assert advantage <= theory + margin
    assert advantage >= theory - margin  # no better attacker exists, so that this test sees what there is to see
    for sample in (present, absent):
        assert abs(sample.std() / noise - 1) < 5 / math.sqrt(2 * TRIALS)


def test_without_noise_an_attacker_always_wins():
    """The control."""
    present, absent = projections(0.0, trials=1000)
    assert np.all(present > 0.5) and np.all(absent < 0.5)


def excess_over(epsilon, delta, present, absent):
    """The excess probability of a set of outcomes over (epsilon, delta), in standard errors of the estimate."""
    worst = -math.inf
    for threshold in np.linspace(-1, 4, 26):
        seen, expected = np.mean(present > threshold), np.mean(absent > threshold)
        deviation = math.sqrt((seen * (1 - seen) + math.exp(2 * epsilon) * expected * (1 - expected)) / TRIALS)
        worst = max(worst, (seen - math.exp(epsilon) * expected - delta) / max(deviation, 1e-3))
    return worst


@pytest.mark.full
def test_the_epsilon_that_is_accounted_for_bounds_what_is_seen():
    delta = 0.02
    epsilon = privacy.epsilon(noise_multiplier=1.0, sampling_rate=1.0, steps=1, delta=delta)
    assert excess_over(epsilon, delta, *projections(1.0)) < 5
    # The control: with half of the noise, more is seen than that.
    assert excess_over(epsilon, delta, *projections(0.5)) > 5


# Steps --------------------------------------------------------------------------------------------------------------


def dp_sgd(optimizer=None, **options):
    usual = {
        "clip_norm": 0.7,
        "noise_multiplier": 1.5,
        "expected_batch_size": 8,
        "num_examples": 40,
        "microbatch_size": 8,
    }
    return privacy.dp_sgd(loss, optimizer or optax.sgd(0.1, momentum=0.9), **{**usual, **options})


def test_a_step_is_clipping_noise_and_the_optimizer():
    """Against a step by hand, without noise. The divisor is a constant, whatever the number of examples."""
    params, batch = parameters(), examples(11)
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = dp_sgd(optimizer, noise_multiplier=0, allow_no_noise=True)
    state, metrics = step(step.init(params, privacy.secret_key()), padded(batch))

    def clip(gradient):
        norm = optax.tree.norm(gradient)
        return jax.tree.map(lambda leaf: leaf * jnp.minimum(1.0, 0.7 / norm), gradient)

    gradients = jax.vmap(lambda example: clip(jax.grad(loss)(params, example)))(batch)
    expected = jax.tree.map(lambda leaf: leaf.sum(0) / 8, gradients)
    updates, opt_state = optimizer.update(expected, optimizer.init(params), params)
    assert distance(state.params, optax.apply_updates(params, updates)) < 1e-6
    assert distance(state.opt_state, opt_state) < 1e-6
    assert metrics.gradient_norm == pytest.approx(float(optax.tree.norm(expected)), rel=1e-6)
    assert metrics.not_private is None
    assert int(state.steps) == 1


@pytest.mark.parametrize("compiled", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_noise_of_a_step_has_the_claimed_deviation(compiled):
    """All examples are padding, so that nothing but noise is left."""
    params = {"w": jnp.zeros((200, 300)), "b": jnp.zeros(())}
    step = privacy.dp_sgd(
        lambda params, x: jnp.sum(params["w"]) * x + params["b"],
        optax.sgd(1.0),
        **{"clip_norm": 0.7, "noise_multiplier": 1.5, "expected_batch_size": 8, "num_examples": 40},
        jit=compiled,
    )
    state = step.init(params, privacy.secret_key())
    seen = []
    for _ in range(3):
        after, _ = step(state, np.ones(10, np.float32), is_padding=np.ones(10, bool))
        seen.append(np.asarray(after.params["w"] - state.params["w"], np.float64).ravel())
        state = after
    for noise in seen:
        assert abs(noise.std() / (1.5 * 0.7 / 8) - 1) < 5 / math.sqrt(2 * noise.size)
    for one, other in itertools.combinations(seen, 2):  # new in each step
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(one.size)


def test_epsilon_of_a_run():
    step = dp_sgd()
    state = step.init(parameters(), privacy.secret_key())
    assert step.epsilon(state, 1e-3) == 0
    batches = privacy.poisson_batches(40, expected_batch_size=8, steps=3, seed=privacy.secret_key())
    data = examples(40)
    for draw in batches:
        state, _ = step(state, draw.take(data))
    spent = {"noise_multiplier": 1.5, "sampling_rate": 0.2, "steps": 3, "delta": 1e-3}
    assert step.epsilon(state, 1e-3) == privacy.epsilon(**spent)
    assert step.epsilon(state, 1e-3, accountant="rdp") == privacy.epsilon(**spent, accountant="rdp")


@pytest.mark.parametrize(
    "way",
    ["compiled", *(pytest.param(way, marks=pytest.mark.full) for way in ("traced in each call", "inside jit"))],
)
def test_steps_are_the_same_however_they_are_compiled(way):
    """No step compiles twice: Poisson samples have different sizes, and their padded arrays have one."""
    traces = []

    def counted(params, example):
        traces.append(1)
        return loss(params, example)

    usual = {"clip_norm": 0.7, "noise_multiplier": 1.5, "expected_batch_size": 8, "num_examples": 40}
    options = {**usual, "allow_key_reuse": True, "microbatch_size": 4}
    plain = privacy.dp_sgd(loss, optax.sgd(0.1), jit=False, **options)
    step = privacy.dp_sgd(counted, optax.sgd(0.1), jit=way == "compiled", **options)
    take = jax.jit(step) if way == "inside jit" else step
    data, state = examples(40), step.init(parameters(), jax.random.key(11))
    expected = state
    after_first = None
    for indices, is_padding in privacy.poisson_batches(40, expected_batch_size=8, steps=3, seed=3):
        batch = jax.tree.map(lambda array, rows=indices: array[rows], data)
        expected, _ = plain(expected, batch, is_padding=is_padding)
        state, _ = take(state, batch, is_padding=is_padding)
        after_first = after_first or len(traces)
    assert (len(traces) == after_first) == (way != "traced in each call")
    assert distance(state.params, expected.params) < 1e-5
    assert bits(jax.random.key_data(state.key)) == bits(jax.random.key_data(expected.key))


def test_constants_of_a_step_are_not_traced():
    def powered(params, example, *, power, name):
        assert isinstance(power, int) and name == "loss"
        return loss(params, example) ** power

    options = {"clip_norm": 0.7, "noise_multiplier": 0, "expected_batch_size": 8, "num_examples": 40}
    step = privacy.dp_sgd(powered, optax.sgd(0.1), allow_no_noise=True, microbatch_size=4, **options)
    state = step.init(parameters(), privacy.secret_key())
    once, _ = step(state, examples(9), power=1, name="loss", is_padding=[False] * 9)
    other, _ = step(once, padded(examples(9)), power=2, name="loss")
    assert distance(once.params, state.params) > 0 < distance(other.params, once.params)


def test_steps_inside_a_scan():
    step = dp_sgd()
    state = step.init(parameters(), privacy.secret_key())
    batches = jax.tree.map(lambda array: array.reshape(4, 6, *array.shape[1:]), examples(24))
    padded_batches = privacy.PaddedBatch(batches, np.zeros((4, 6), bool))
    end, norms = jax.jit(lambda state: jax.lax.scan(step, state, padded_batches))(state)
    assert int(end.steps) == 4
    assert len(set(np.asarray(norms.gradient_norm).tolist())) == 4


def test_a_state_is_a_small_tree():
    step = dp_sgd(optax.sgd(0.1))
    state = step.init(parameters(), privacy.secret_key())
    assert len(jax.tree.leaves(state)) == len(jax.tree.leaves(parameters())) + 2
    assert isinstance(jax.tree.map(lambda leaf: leaf, state), privacy.State)


def test_what_is_not_private_is_called_so():
    step = dp_sgd(return_values=True, return_norms=True)
    _, metrics = step(step.init(parameters(), privacy.secret_key()), padded(examples(9)))
    values = jax.vmap(loss, (None, 0))(parameters(), examples(9))
    np.testing.assert_allclose(metrics.not_private.values, values, rtol=1e-5)
    assert metrics.not_private.norms.shape == (9,)


def test_aux_and_more_arguments():
    def with_aux(params, example, scale, key, *, power):
        kept = jax.random.bernoulli(key, 0.5).astype(jnp.float32)
        return loss(params, example) * scale * kept**power, {"kept": kept}

    grad = privacy.private_grad(
        with_aux, has_aux=True, clip_norm=0.7, noise_multiplier=1.0, expected_batch_size=8, rng_argnums=3
    )
    arguments = (parameters(), padded(examples(9)), jnp.float32(2), jax.random.key(1))
    noised, aux = grad(*arguments, noise_key=privacy.secret_key(), power=2)
    assert jax.tree.structure(noised) == jax.tree.structure(parameters())
    assert aux["kept"].shape == (9,)


@pytest.mark.full
def test_gradients_of_several_arguments_are_clipped_together():
    def split_loss(w, example, b):
        return loss({**w, "b": b}, example)

    params, batch = parameters(), with_harmful(examples(12), 1e6)
    rest = {name: params[name] for name in ("w", "v")}
    grad = privacy.private_grad(split_loss, (0, 2), clip_norm=0.7, noise_multiplier=1.0, expected_batch_size=8)
    (whole, _), (less, _) = (
        grad.clipped((rest, padded(each), params["b"]), {}, None) for each in (batch, without_first(batch))
    )
    assert 0.99 * grad.sensitivity < distance(whole, less) <= grad.sensitivity * rounding(12)
    noised = grad(rest, padded(batch), params["b"], noise_key=privacy.secret_key())
    assert jax.tree.structure(noised) == jax.tree.structure((rest, params["b"]))


# Many devices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_noise_is_the_same_on_any_number_of_devices(compiled):
    """With padding alone, the gradient is the noise. With examples, the noise is added once."""
    params, batch, key = parameters(), examples(16), jax.random.key(21)
    noises, gradients = [], []
    for devices in (None, 8):
        mesh = {} if devices is None else {"mesh": mesh_of(devices)}
        grad = privacy.private_grad(
            loss,
            **{"clip_norm": 0.7, "noise_multiplier": 1.0, "expected_batch_size": 8, "microbatch_size": 2, **mesh},
            allow_key_reuse=True,
        )

        def noised(batch, is_padding, grad=grad):
            return grad(params, batch, noise_key=key, is_padding=is_padding)

        noised = jax.jit(noised) if compiled else noised
        noises.append(noised(batch, np.ones(16, bool)))
        gradients.append(noised(batch, np.zeros(16, bool)))
    clipped = ab.clipped_grad(loss, clip_norm=0.7, normalize_by=8.0)(params, batch)
    for noise, gradient in zip(noises, gradients, strict=True):
        assert bits(noise) == bits(noises[0])
        assert distance(gradient, jax.tree.map(jnp.add, clipped, noises[0])) < 1e-6


@pytest.mark.full
@pytest.mark.parametrize("compiled", [pytest.param(False, marks=pytest.mark.slow), True])
def test_steps_over_a_mesh(compiled):
    data, key = examples(40), jax.random.key(22)
    ends = []
    for options in ({}, {"mesh": mesh_of(4)}):
        step = dp_sgd(**options, allow_key_reuse=True, microbatch_size=4, jit=compiled)
        state = step.init(parameters(), key)
        for indices, is_padding in privacy.poisson_batches(40, expected_batch_size=8, steps=3, seed=4):
            state, _ = step(state, jax.tree.map(lambda array, rows=indices: array[rows], data), is_padding=is_padding)
        ends.append(state.params)
    assert distance(*ends) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("where", ["parameters", "batch"])
def test_arrays_that_lie_elsewhere_are_put_on_the_mesh(where):
    mesh, elsewhere = mesh_of(4), jax.devices()[5]
    params, batch = parameters(), examples(8)
    step = dp_sgd(mesh=mesh, microbatch_size=2)
    placed = jax.device_put(params if where == "parameters" else batch, elsewhere)
    state = step.init(placed if where == "parameters" else params, privacy.secret_key())
    state, _ = step(state, padded(placed if where == "batch" else batch))
    assert state.params["w"].sharding.device_set == set(mesh.devices.flat)
