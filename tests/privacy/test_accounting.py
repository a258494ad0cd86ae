"""Epsilon, the noise for an epsilon, and Poisson batches."""

import dataclasses
import math
import sys
import time

import jax
import numpy as np
import pytest
from scipy import optimize, stats

from anybatch import privacy
from anybatch.errors import InputError

# (examples, batch size, noise, epochs, delta, epsilon) by Rényi divergences.
# tensorflow_privacy/privacy/analysis/compute_dp_sgd_privacy_test.py, test_compute_dp_sgd_privacy.
PUBLISHED_RDP = [
    (60_000, 150, 1.3, 15, 1e-5, 0.7242234026109595),
    (100_000, 100, 1.0, 30, 1e-7, 1.4154988495444842),
]

# The table of tutorials/README.md of tensorflow_privacy: MNIST, batches of 256, delta 1e-5. Its conversion from Rényi
# divergences is that of 2019; today's is tighter, so that these are upper bounds, and not far.
PUBLISHED_MNIST = [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)]


@pytest.mark.parametrize("examples, size, noise, epochs, delta, expected", PUBLISHED_RDP)
def test_epsilon_by_renyi_divergences_is_the_published_one(examples, size, noise, epochs, delta, expected):
    spent = {"noise_multiplier": noise, "sampling_rate": size / examples, "steps": epochs * examples // size}
    assert privacy.epsilon(**spent, delta=delta, accountant="rdp") == pytest.approx(expected, rel=1e-10)
    assert privacy.epsilon(**spent, delta=delta) < expected  # privacy loss distributions are tighter


def test_epsilon_by_both_accountants_is_the_published_one():
    """Of test_compute_dp_sgd_example_privacy in the same file: 1.2 epochs at a rate of 0.01."""
    spent = {"noise_multiplier": 0.7, "sampling_rate": 0.01, "steps": 120, "delta": 1e-5}
    assert privacy.epsilon(**spent, accountant="rdp") == pytest.approx(3.2392676, abs=1e-7)
    assert privacy.epsilon(**spent, accountant="pld") == pytest.approx(2.4612381, abs=1e-7)


def test_epsilon_is_that_of_the_library():
    """dp_accounting/pld/pld_privacy_accountant_test.py, the subsampled Gaussian: epsilon 1 at delta 0.15594."""
    spent = privacy.epsilon(noise_multiplier=0.5, sampling_rate=0.2, steps=3, delta=0.15594)
    assert spent == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("noise, epochs, published", PUBLISHED_MNIST)
def test_epsilon_of_the_mnist_tutorial(noise, epochs, published):
    spent = {"noise_multiplier": noise, "sampling_rate": 256 / 60_000, "steps": epochs * 60_000 // 256, "delta": 1e-5}
    assert 0.8 * published < privacy.epsilon(**spent, accountant="rdp") < published


@pytest.mark.full
@pytest.mark.parametrize(
    "rate, steps, sensitivity, published",
    [(0.01, 1, 1, 0.67379294682), pytest.param(0.001, 25, 6, 3.20956502598, marks=pytest.mark.slow)],
)
def test_noise_is_the_published_one(rate, steps, sensitivity, published):
    """dp_accounting/pld/accountant_test.py, test_get_smallest_subsampled_gaussian_noise: epsilon 1, delta 1e-5."""
    noise = privacy.noise_multiplier(epsilon=1, delta=1e-5, sampling_rate=rate, steps=steps)
    assert published / sensitivity * (1 - 1e-6) <= noise <= published / sensitivity * (1 + 2e-4)


@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.full)])
@pytest.mark.parametrize("budget", [0.5, 4.0])
def test_what_is_calibrated_stays_within_its_budget(accountant, budget):
    run = {"delta": 1e-6, "sampling_rate": 0.02, "steps": 2000, "accountant": accountant}
    noise = privacy.noise_multiplier(epsilon=budget, **run)
    assert 0.99 * budget < privacy.epsilon(noise_multiplier=noise, **run) <= budget
    assert privacy.epsilon(noise_multiplier=0.999 * noise, **run) > budget  # and it is the least


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_epsilon_grows_with_steps_and_rate_and_shrinks_with_noise_and_delta(accountant):
    base = {"noise_multiplier": 2.5, "sampling_rate": 0.01, "steps": 500, "delta": 1e-5}

    def spent(**changed):
        return privacy.epsilon(**{**base, **changed}, accountant=accountant)

    assert 0 == spent(steps=0) < spent(steps=100) < spent() < spent(steps=1000)
    assert spent(sampling_rate=0.005) < spent() < spent(sampling_rate=0.02)
    assert spent(noise_multiplier=3.0) < spent() < spent(noise_multiplier=2.0) < spent(noise_multiplier=0) == np.inf
    assert spent(delta=1e-4) < spent() < spent(delta=1e-6)


@pytest.mark.parametrize(
    "changed, text",
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier must be finite and not negative, got noise_multiplier=-1.0"),
        ({"noise_multiplier": "much"}, "noise_multiplier must be a number, got noise_multiplier='much'"),
        ({"sampling_rate": 256}, "sampling_rate must be above 0 and at most 1, got sampling_rate=256"),
        ({"steps": 1.5}, "steps must be a whole number of at least 0, got steps=1.5"),
        ({"delta": 0}, "delta must be above 0 and below 1, got delta=0"),
        ({"accountant": "moments"}, "accountant must be one of 'pld', 'rdp', got accountant='moments'"),
    ],
)
def test_numbers_that_cannot_be(changed, text):
    with pytest.raises(InputError, match=text):
        privacy.epsilon(**{"noise_multiplier": 1.0, "sampling_rate": 0.01, "steps": 10, "delta": 1e-5, **changed})


def test_a_budget_out_of_reach():
    with pytest.raises(InputError, match="epsilon must be within reach of the accountant, got epsilon=1e-08"):
        privacy.noise_multiplier(epsilon=1e-8, delta=1e-9, sampling_rate=1.0, steps=100_000, accountant="rdp")


# Little noise --------------------------------------------------------------------------------------------------------


def gaussian_epsilon(noise, steps, delta):
    """Without sampling, n steps equal one step with noise divided by sqrt(n), whose delta is known exactly."""
    mean = math.sqrt(steps) / noise

    def excess(epsilon):
        upper, lower = mean / 2 - epsilon / mean, -mean / 2 - epsilon / mean
        return stats.norm.cdf(upper) - math.exp(epsilon + stats.norm.logcdf(lower)) - delta

    return optimize.brentq(excess, 0, mean * (mean + 40), xtol=1e-12, rtol=1e-12)


# Above about 700, exp(-epsilon) is next to nothing; below a noise of 0.001, there is no grid.
@pytest.mark.parametrize("noise, steps", [(1.0, 1), (0.294, 100), (0.2, 1000), (0.05, 1), (0.02, 7), (1e-4, 3)])
def test_epsilon_of_little_noise_is_an_upper_bound_and_not_far(noise, steps):
    exact = gaussian_epsilon(noise, steps, 1e-5)
    spent = privacy.epsilon(noise_multiplier=noise, sampling_rate=1.0, steps=steps, delta=1e-5)
    assert exact <= spent * (1 + 1e-9)
    assert spent <= exact * 1.01


def test_sampling_counts_with_little_noise_too():
    run = {"steps": 1000, "delta": 1e-5}
    assert privacy.epsilon(noise_multiplier=0.1, sampling_rate=0.01, **run) == pytest.approx(1195.7, rel=1e-3)
    assert gaussian_epsilon(0.1, **run) > 40 * 1195.7  # the control


@pytest.mark.parametrize(
    "call",
    [
        lambda: privacy.epsilon(noise_multiplier=1e-3, sampling_rate=0.01, steps=1000, delta=1e-5),
        lambda: privacy.epsilon(noise_multiplier=0.05, sampling_rate=0.01, steps=100, delta=1e-5),
        lambda: privacy.epsilon(noise_multiplier=1.0, sampling_rate=1.0, steps=10**6, delta=1e-12),
    ],
    ids=["least noise", "little noise", "many steps"],
)
def test_epsilon_takes_seconds(call):
    before = time.process_time()
    assert 0 < call() < math.inf
    assert time.process_time() - before < 10


@pytest.mark.full
def test_the_noise_of_a_large_budget_is_found_in_seconds():
    run = {"delta": 1e-5, "sampling_rate": 0.01, "steps": 1000}
    before = time.process_time()
    noise = privacy.noise_multiplier(epsilon=50, **run)
    assert time.process_time() - before < 20
    assert 49.9 < privacy.epsilon(noise_multiplier=noise, **run) <= 50


def test_divergences_lost_to_rounding_are_not_taken_for_none():
    """For steps whose results differ by 4e-8 in total variation, which a delta of 1e-12 does not cover."""
    run = {"noise_multiplier": 1e6, "sampling_rate": 0.001, "steps": 100, "delta": 1e-12}
    assert run["steps"] * run["sampling_rate"] * math.sqrt(2 / math.pi) / 2 / run["noise_multiplier"] > 1e-8
    assert 0 < privacy.epsilon(**run, accountant="rdp") < 0.1


def test_without_the_library_there_is_a_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r'pip install "\.\[privacy\]"'):
        privacy.epsilon(noise_multiplier=1.0, sampling_rate=0.01, steps=10, delta=1e-5)


# Batches ------------------------------------------------------------------------------------------------------------


def chosen_of(batches):
    """Which examples are in which batch, as zeros and ones."""
    chosen = np.zeros((len(batches), batches.num_examples))
    for step, (indices, is_padding) in enumerate(batches):
        assert indices.shape == is_padding.shape == (batches.batch_size,)
        examples = indices[~is_padding]
        assert len(set(examples.tolist())) == len(examples)
        chosen[step, examples] = 1
    return chosen


def is_poisson(chosen, rate, bound=5.5):
    """Checks that membership looks independent: for single examples, pairs, consecutive batches and sums."""
    steps, examples = chosen.shape
    tosses = (chosen - rate) / np.sqrt(rate * (1 - rate))
    each = np.abs(tosses.sum(0)) / np.sqrt(steps)
    pairs = np.abs(tosses.T @ tosses)[~np.eye(examples, dtype=bool)] / np.sqrt(steps)
    in_time = np.abs(tosses[1:].T @ tosses[:-1]) / np.sqrt(steps)
    # The number of examples in a batch has the variance of independent tosses.
    sums = tosses.sum(1) ** 2 / examples
    spread = abs(sums.sum() - steps) / np.sqrt(2 * steps)
    return max(each.max(), pairs.max(), in_time.max(), spread) < bound


@pytest.mark.parametrize("rate", [0.02, 0.3, 0.5])
def test_each_example_is_in_each_batch_by_a_toss_of_its_own(rate):
    batches = privacy.poisson_batches(40, sampling_rate=rate, steps=4000, seed=7)
    assert is_poisson(chosen_of(batches), rate)


def test_batches_of_a_fixed_size_are_no_poisson_samples():
    """The control."""
    random = np.random.default_rng(0)
    chosen = np.zeros((4000, 40))
    for row in chosen:
        row[random.permutation(40)[:12]] = 1
    assert not is_poisson(chosen, 0.3)


def test_a_batch_depends_on_the_seed_and_its_step_alone():
    options = {"num_examples": 1000, "expected_batch_size": 30, "steps": 20}
    whole = list(privacy.poisson_batches(**options, seed=5))
    resumed = privacy.poisson_batches(**options, seed=5, start=13)
    assert len(resumed) == 7
    for expected, actual in zip(whole[13:], resumed, strict=True):
        np.testing.assert_array_equal(expected, actual)
    np.testing.assert_array_equal(whole[4], resumed.batch(4))
    other = privacy.poisson_batches(**options, seed=6)
    assert not any(np.array_equal(one, two) for (one, _), (two, _) in zip(whole, other, strict=True))


def test_batches_of_a_key_can_be_drawn_again():
    key = privacy.secret_key()
    one, two = (privacy.poisson_batches(100, sampling_rate=0.5, steps=3, seed=key) for _ in range(2))
    np.testing.assert_array_equal(one.batch(2), two.batch(2))


def test_there_is_room_for_every_draw():
    """Against the tail of the binomial distribution, by a library; and not much larger than needed."""
    for examples, expected, steps in [(60_000, 256, 14_000), (1000, 500, 10), (10**8, 4096, 10**6), (50, 1, 100)]:
        batches = privacy.poisson_batches(examples, expected_batch_size=expected, steps=steps, seed=0)
        excess = steps * stats.binom.sf(batches.batch_size, examples, expected / examples)
        assert excess <= 1e-12
        smaller = steps * stats.binom.sf(int(batches.batch_size * 0.97) - 3, examples, expected / examples)
        assert smaller > 1e-12
        assert batches.expected_batch_size == pytest.approx(expected)


def test_all_examples_at_rate_one():
    indices, is_padding = privacy.poisson_batches(7, sampling_rate=1, steps=2, seed=0).batch(1)
    np.testing.assert_array_equal(indices, np.arange(7))
    assert not is_padding.any()


def test_nothing_is_dropped_silently():
    safe = privacy.poisson_batches(100, sampling_rate=0.3, steps=50, seed=0)
    small = dataclasses.replace(safe, batch_size=30)
    with pytest.raises(InputError, match=r"A batch must have a row for every example that was drawn, got 3. examples"):
        list(small)


@pytest.mark.parametrize(
    "options, text",
    [
        (
            {"max_batch_size": 300},
            "max_batch_size must be large enough for every draw: leaving examples out would void",
        ),
        ({"sampling_rate": 0.1}, "Either sampling_rate or expected_batch_size must be given"),
        ({"expected_batch_size": None}, "Either sampling_rate or expected_batch_size must be given"),
        ({"expected_batch_size": 70_000}, "expected_batch_size must be at most the number of examples"),
        ({"steps": 0}, "steps must be a whole number of at least 1, got steps=0"),
        ({"start": 101}, "start must be a step of the run, got start=101 and steps=100"),
        ({"seed": None}, "seed must be a whole number of at least 0, got seed=None"),
        ({"seed": np.ones(3)}, "seed must be one PRNG key"),
    ],
)
def test_batches_that_cannot_be(options, text):
    usual = {"num_examples": 60_000, "expected_batch_size": 256, "steps": 100, "seed": 0}
    with pytest.raises(InputError, match=text):
        privacy.poisson_batches(**{**usual, **options})


def test_a_step_beyond_the_run():
    with pytest.raises(InputError, match="step must be a step of the run, got step=3 of 3"):
        privacy.poisson_batches(10, sampling_rate=0.5, steps=3, seed=0).batch(3)


def test_a_larger_size_is_accepted():
    batches = privacy.poisson_batches(60_000, expected_batch_size=256, steps=10, seed=0, max_batch_size=512)
    assert batches.batch(0)[0].shape == (512,)


def test_batches_are_drawn_outside_jit():
    with pytest.raises(InputError, match="seed must be known when batches are drawn"):
        jax.jit(lambda key: privacy.poisson_batches(10, sampling_rate=0.5, steps=3, seed=key).batch(0)[0])(
            jax.random.key(0)
        )
