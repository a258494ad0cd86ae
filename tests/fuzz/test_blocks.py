"""Random losses in blocks, against `jax.value_and_grad`, in float64: always the same, to the last digits.

Most are traced and interpreted, without XLA. The compiled ones are compared with the compiled gradient of JAX.
"""

import os
import sys

import jax
import pytest
from fuzz.wide_programs import WideProgram, compare, compare_compiled, program, survey

import anybatch as ab

PROGRAMS_PER_TEST = 20
SHARE_WITH_REGIONS = 0.6

# Every Python tries programs of its own.
FIRST_SEED = 1_000_000 * sys.version_info.minor


@pytest.fixture(autouse=True)
def as_users_write(float64):
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def check(seeds, compare=compare):
    counts, wrong = survey(seeds, compare)
    print(f"programs {seeds.start} to {seeds.stop - 1}:", dict(counts))
    assert not wrong, "\n\n".join(wrong)
    assert counts["refused"] + counts["invalid"] + counts["not finite"] <= max(2, 0.05 * len(seeds))
    assert counts["with regions"] >= SHARE_WITH_REGIONS * len(seeds) or len(seeds) == 1


@pytest.mark.full
@pytest.mark.every_jax
def test_random_wide_programs_interpreted():
    check(range(FIRST_SEED, FIRST_SEED + PROGRAMS_PER_TEST))


@pytest.mark.every_jax
@pytest.mark.parametrize("seed", [31_201_243, 31_201_447, 31_301_310])
def test_programs_that_were_wrong_or_crashed_once(seed):
    check(range(seed, seed + 1))


@pytest.mark.full
def test_random_wide_programs_compiled():
    first = FIRST_SEED + 500_000
    check(range(first, first + PROGRAMS_PER_TEST // 2), compare_compiled)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(int(os.environ.get("ANYBATCH_FUZZ_PROGRAMS", "2000")) // 100))
def test_many_random_wide_programs(part):
    """`ANYBATCH_FUZZ_PROGRAMS=100000 pytest -m slow -n 8 -s tests/fuzz/test_blocks.py` for as many."""
    first = 700_000_000 + part * 100
    check(range(first, first + 100))


def test_wide_programs_have_what_blocks_are_for():
    """Of a few programs, most operations are there, and most programs have a value that is big."""
    programs = [WideProgram(seed) for seed in range(60)]
    assert len({step.name for made in programs for step in made.steps}) >= 30
    assert sum(any(made.is_big(index) for index in range(9, len(made.values))) for made in programs) >= 50


def test_a_wide_program_is_its_seed():
    assert str(WideProgram(7)) == str(WideProgram(7)) != str(WideProgram(8))
    loss, params, batch = program(7)
    full = jax.eval_shape(jax.grad(loss, has_aux=WideProgram(7).has_aux), params, batch)
    assert full is not None


# The control.


@pytest.mark.full
def test_a_gradient_in_blocks_that_is_off_in_the_eighth_digit_is_noticed(monkeypatch):
    right = ab.value_and_grad

    def off(fun, **options):
        def scaled(params, batch):
            value, grads = right(fun, **options)(params, batch)
            return value, jax.tree.map(lambda leaf: leaf * (1 + 3e-8), grads)

        return scaled

    monkeypatch.setattr(ab, "value_and_grad", off)
    assert [compare(WideProgram(seed)).kind for seed in range(10)].count("different") >= 8
