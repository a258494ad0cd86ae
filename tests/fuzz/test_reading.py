"""Random programs against `jax.value_and_grad`, in float64: a gradient may be refused, and is never wrong."""

import functools
import os
import sys

import jax
import pytest
from cases.meshes import mesh_of
from fuzz.programs import Program, compare, compare_interpreted, survey

import anybatch as ab

PROGRAMS_PER_TEST = 25
SHARE_OF_REFUSALS = 0.04

# Every Python tries programs of its own, so that one run of them all tries three times as many.
FIRST_SEED = 1_000_000 * sys.version_info.minor


@pytest.fixture(autouse=True)
def as_users_write(float64):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def check(seeds, value_and_grad=None):
    counts, wrong = survey(seeds, value_and_grad)
    print(f"programs {seeds.start} to {seeds.stop - 1}:", dict(counts))
    assert not wrong, "\n\n".join(wrong)
    assert counts["refused"] <= max(1, SHARE_OF_REFUSALS * len(seeds))
    assert counts["same"] >= len(seeds) / 2


@pytest.mark.full
@pytest.mark.parametrize(
    "part", [part if part < 1 else pytest.param(part, marks=pytest.mark.slow) for part in range(4)]
)
def test_random_programs(part):
    first = FIRST_SEED + part * PROGRAMS_PER_TEST
    check(range(first, first + PROGRAMS_PER_TEST))


def test_random_programs_interpreted():
    """Others than above, without XLA. `python tests/fuzz_long.py --readings 6000` runs as many as one likes."""
    seeds = range(FIRST_SEED + 500_000, FIRST_SEED + 500_000 + PROGRAMS_PER_TEST)
    outcomes = {seed: compare_interpreted(Program(seed)) for seed in seeds}
    wrong = [f"{one.kind} {one.text}\n{Program(seed)}" for seed, one in outcomes.items() if one.kind != "same"]
    assert len(wrong) <= 1 and not any(one.kind in ("different", "crashed") for one in outcomes.values()), wrong


def test_some_programs_have_blocks_of_a_model():
    programs = [Program(seed) for seed in range(40)]
    assert sum(any(step.name == "block_of_a_model" for step in program.steps) for program in programs) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3])
def test_random_programs_over_a_mesh(devices):
    """Of 2 to 7 examples, so that most are uneven, and some devices have none."""
    first = FIRST_SEED + 900_000 + devices * PROGRAMS_PER_TEST
    check(range(first, first + PROGRAMS_PER_TEST), functools.partial(ab.value_and_grad, mesh=mesh_of(devices)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(int(os.environ.get("ANYBATCH_FUZZ_PROGRAMS", "2000")) // 100))
def test_many_random_programs(part):
    """`ANYBATCH_FUZZ_PROGRAMS=100000 pytest -m slow -n 8 -s tests/test_reading_fuzz.py` for as many."""
    first = 500_000_000 + part * 100
    check(range(first, first + 100))


# The controls.


def off_in_the_eighth_digit(fun, has_aux, microbatch_size):
    gradient = jax.value_and_grad(fun, has_aux=has_aux)

    def scaled(params, batch, key):
        value, grads = gradient(params, batch, key)
        return value, jax.tree.map(lambda leaf: leaf * (1 + 3e-8), grads)

    return scaled


@pytest.mark.full
def test_a_gradient_that_is_off_in_the_eighth_digit_is_noticed():
    outcomes = [compare(Program(seed), off_in_the_eighth_digit).kind for seed in range(10)]
    assert outcomes.count("different") >= 8  # The rest have no gradient, or one of a few discontinuities.


@pytest.mark.full
def test_a_refusal_is_counted_as_such():
    def refuses(fun, has_aux, microbatch_size):
        return ab.value_and_grad(fun, has_aux=has_aux, microbatch_size=microbatch_size, on_coupled="error")

    outcomes = [compare(Program(seed), refuses).kind for seed in range(20)]
    assert {"same", "refused"} == set(outcomes)


def test_a_program_is_its_seed():
    assert str(Program(7)) == str(Program(7)) != str(Program(8))
