"""`objective="speed"`: which strategy is chosen, with a clock that shows known times."""

import dataclasses

import jax
import pytest
from cases.planned import network, problem

import anybatch as ab
from anybatch.planning.candidates import AS_FAST, StrategySearch
from anybatch.planning.measure import Measurements
from anybatch.planning.prediction import Predictions
from anybatch.planning.strategy import Strategy

# Milliseconds by microbatch size: one that was measured with a GPT, one that saturates, one with a valley.
KNEE = {64: 139, 32: 134, 16: 132, 11: 133, 8: 138, 6: 143, 4: 149, 3: 165, 2: 182, 1: 245}
FLAT = {64: 100, 32: 100.4, 16: 100.6, 11: 100.8, 8: 101, 6: 104, 4: 109, 3: 115, 2: 120, 1: 150}
VALLEY = {64: 160, 32: 130, 22: 112, 16: 120, 11: 130, 8: 140, 4: 180, 2: 260, 1: 400}


@pytest.fixture
def clock(monkeypatch):
    """A race whose times are known."""

    def install(milliseconds, out_of_memory=()):
        raced = []

        def race(measurements, strategies, rounds):
            raced.append([strategy.microbatch_size for strategy in strategies])
            return {strategy: _between(milliseconds, strategy.microbatch_size) / 1e3 for strategy in strategies}

        monkeypatch.setattr(Measurements, "race", race)
        return raced

    return install


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder in which plans are kept."""
    monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path))


def _between(milliseconds, size):
    known = sorted(milliseconds)
    below, above = max(s for s in known if s <= size), min(s for s in known if s >= size)
    if below == above:
        return milliseconds[size]
    return milliseconds[below] + (milliseconds[above] - milliseconds[below]) * (size - below) / (above - below)


@pytest.mark.full
@pytest.mark.parametrize("milliseconds", [KNEE, FLAT, VALLEY], ids=["knee", "flat", "valley"])
def test_the_choice_is_within_3_percent_of_the_best_divisor(clock, milliseconds):
    clock(milliseconds)
    plan = ab.plan(network, *problem(64), memory="1GiB", remat=None)
    best = min(milliseconds[size] for size in (64, 32, 16, 8, 4, 2, 1))
    assert 1e3 * plan.chosen.seconds <= 1.03 * best


@pytest.mark.full
def test_of_those_as_fast_the_leanest_is_taken(clock):
    clock(KNEE)
    plan = ab.plan(network, *problem(64), memory="1GiB", remat=None)
    assert plan.microbatch_size == 16
    assert plan.reason == "Chosen: microbatch_size=16, the fastest."
    clock(FLAT)
    plan = ab.plan(network, *problem(64), memory="1GiB", remat=None)
    assert plan.microbatch_size < 64  # the full batch is faster by less than can be told
    assert "which needs the least memory of those within 2% of the fastest (100.0 ms)." in plan.reason
    assert 1e3 * plan.chosen.seconds <= (1 + AS_FAST) * FLAT[64]


@pytest.mark.full
def test_without_timing_what_was_timed_before_is_followed(clock, kept):
    clock(VALLEY)
    timed = ab.plan(network, *problem(64), memory="1GiB", remat=None)
    plan = ab.explain(network, *problem(64), memory="1GiB", timed=False, remat=None)
    assert plan.microbatch_size == timed.microbatch_size == 16
    assert plan.reason == timed.reason


@pytest.mark.full
def test_no_time_is_claimed_for_what_was_not_chosen_by_time(clock, kept):
    """Times are known from an earlier plan, with another budget: nothing was compared under this one."""
    clock(VALLEY)
    ab.plan(network, *problem(64), memory="1GiB", remat=None)
    plan = ab.explain(network, *problem(64), memory="2GiB", timed=False)
    assert plan.microbatch_size == 64 and "fastest" not in plan.reason
    assert plan.reason == "Chosen: the full batch, since it fits."
    known = {each.microbatch_size: each.total for each in plan.candidates}
    plan = ab.explain(network, *problem(64), memory=known[16] + 1024, timed=False, remat=None)
    assert plan.microbatch_size == 16 and "fastest" not in plan.reason
    assert plan.reason.startswith("Chosen: microbatch_size=16, the largest that fits.")


@pytest.mark.full
def test_what_does_not_fit_is_not_the_fastest(clock, kept):
    clock(VALLEY)
    known = {
        each.microbatch_size: each.total
        for each in ab.plan(network, *problem(64), memory="1GiB", remat=None).candidates
    }
    plan = ab.plan(network, *problem(64), memory=known[16] + 1024, remat=None)
    assert plan.microbatch_size == 16
    assert plan.reason == "Chosen: microbatch_size=16, the fastest."  # 22 is faster, and does not fit


@pytest.mark.full
def test_a_plan_with_times_compiles_at_most_four_programs(clock):
    """They are around the knee."""
    raced = clock(KNEE)
    plan = ab.plan(network, *problem(64), memory="1GiB", remat=None)
    tried = {size for sizes in raced for size in sizes}
    assert 1 not in tried and {64, 16, 4} <= tried and len(tried) == plan.compilations == 4


@pytest.mark.full
def test_sizes_that_are_predicted_to_be_slower_are_not_compiled(clock, monkeypatch):
    """With a prediction that can be trusted."""
    monkeypatch.setattr("anybatch.planning.candidates.DOUBT_ON_CPU", 0.05)
    monkeypatch.setattr(Predictions, "_seconds", lambda predictions, strategy, size: KNEE[64] + 20 / size)
    raced = clock({size: 139 * 64 / size for size in KNEE})
    plan = ab.plan(network, *problem(64), memory="1GiB", remat=None)
    assert plan.microbatch_size == 64 and plan.compilations == 1 and raced == [[64]]


@pytest.mark.full
def test_only_what_fits_is_run(clock):
    raced = clock(KNEE)
    params, batch = problem(64)
    plan = ab.plan(network, params, batch, memory="250KiB")
    assert plan.chosen.total <= 250 * 1024
    bytes_of = {each.microbatch_size: each.total for each in plan.candidates}
    assert all(bytes_of[size] <= 250 * 1024 for sizes in raced for size in sizes)


def test_a_candidate_that_runs_out_of_memory_is_out(monkeypatch):
    """It fits as XLA counts, and the device disagrees."""
    params, batch = problem(64)
    original = Measurements.computation

    def computation(measurements, strategy):
        found = original(measurements, strategy)
        if strategy.microbatch_size > 16:

            def fail(*_):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1GiB")

            return dataclasses.replace(found, program=fail)
        return found

    monkeypatch.setattr(Measurements, "computation", computation)
    plan = ab.plan(network, params, batch, memory="1GiB")
    assert plan.microbatch_size <= 16
    assert [each.fits for each in plan.candidates if each.microbatch_size == 64 and each.remat is None] == [False]


def test_times_are_taken_in_turns():
    """Real times: every strategy runs in every round."""
    params, batch = problem(64)
    plan = ab.plan(network, params, batch, memory="1GiB")
    timed = [each for each in plan.candidates if each.seconds is not None]
    assert len(timed) >= 2 and plan.chosen in timed
    assert plan.chosen.seconds <= 1.5 * min(each.seconds for each in timed)


def test_search_is_not_needed_to_predict(monkeypatch):
    """What is known of two sizes tells a third without a compilation."""
    from anybatch.call.options import Options
    from anybatch.gradients.computation import Gradient

    params, batch = problem(64)
    options = Options.of(network, accumulator_dtype=None)
    measurements = Measurements(Gradient(network, options, options.roles.sort(network, (params, batch), {})))
    search = StrategySearch(measurements, 2**30)
    measurements.bytes_of(Strategy(8))
    measurements.bytes_of(Strategy(32))
    assert search.predict(Strategy(16)) == pytest.approx(measurements.bytes_of(Strategy(16)).total, rel=0.05)
    assert measurements.compilations == 3
