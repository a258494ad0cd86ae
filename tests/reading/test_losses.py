"""Nothing is declared: value, aux and gradient of every loss in the table are those of `jax.value_and_grad`."""

import jax
import jax.numpy as jnp
import pytest
from cases.comparing import assert_same, quick_jit
from cases.read_losses import INFERRED, NUM_EXAMPLES

import anybatch as ab

pytestmark = pytest.mark.every_jax

SIZES = [1, 4, 5]
BY_NAME = {case.name: case for case in INFERRED}


@pytest.fixture(autouse=True)
def as_their_authors_write(float64):
    """The losses in the table promote ranks and dtypes, as losses do."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def full_batch(case):
    return jax.value_and_grad(case.loss, has_aux=case.has_aux)


def microbatched(case, microbatch_size):
    options = {"has_aux": case.has_aux, "batch_argnums": case.batch_argnums}
    return ab.value_and_grad(case.loss, microbatch_size=microbatch_size, **options)


# A third of them on every Python, all on one.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[] if position % 3 == 0 else pytest.mark.full)
        for position, case in enumerate(INFERRED)
    ],
)
def test_value_aux_and_gradient_are_those_of_the_full_batch(case):
    args = case.make(NUM_EXAMPLES)
    functions = [full_batch(case), *(microbatched(case, size) for size in SIZES)]
    # As one program they compile faster than as four.
    expected, *of_sizes = quick_jit(lambda *args: [fun(*args) for fun in functions])(*args)

    assert case.moves == any(bool(jnp.any(leaf != 0)) for leaf in jax.tree.leaves(expected[1]))
    for actual in of_sizes:
        assert_same(actual, expected)


@pytest.mark.parametrize("case", INFERRED, ids=lambda case: case.name)
def test_as_few_passes_as_suffice(case):
    reading = ab.read(case.loss, *case.make(NUM_EXAMPLES), has_aux=case.has_aux, batch_argnums=case.batch_argnums)
    assert reading.passes == case.passes
    assert reading.num_examples == NUM_EXAMPLES


PLAIN_MEANS = "mean per_example_function divided_by_the_length".split()
NO_PLAIN_MEANS = """total masked_mean token_mean root_mean_square dice clip batch_norm_by_hand trimmed_mean dropout
    mixup_with_the_batch_rolled positions""".split()


@pytest.mark.parametrize("name", [*PLAIN_MEANS, *NO_PLAIN_MEANS])
def test_the_comparison_can_fail(name):
    """The control: the average over microbatches, which everyone writes, is another number for all but plain means."""
    case = BY_NAME[name]
    params, batch, *rest = case.make(NUM_EXAMPLES)
    expected = quick_jit(full_batch(case))(params, batch, *rest)

    @quick_jit
    def mean_of_means(params, batch, *rest):
        parts = jax.tree.map(lambda leaf: jnp.reshape(leaf, (3, NUM_EXAMPLES // 3, *leaf.shape[1:])), batch)
        of_parts = jax.lax.map(lambda part: full_batch(case)(params, part, *rest), parts)
        return jax.tree.map(lambda leaf: leaf.mean(axis=0), of_parts)

    actual = mean_of_means(params, batch, *rest)
    if name in PLAIN_MEANS:
        assert_same(actual, expected)
    else:
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            assert_same(actual, expected, rtol=1e-3)


@pytest.mark.parametrize("spoil", [lambda rows: rows[::-1], lambda rows: rows[1:], lambda rows: rows.astype("float32")])
def test_the_comparison_sees_the_order_the_shape_and_the_dtype_of_rows(spoil):
    case = BY_NAME["predictions_in_order"]
    (value, aux), gradient = quick_jit(full_batch(case))(*case.make(NUM_EXAMPLES))
    spoilt = (value, {**aux, "prediction": spoil(aux["prediction"])}), gradient

    with pytest.raises(AssertionError, match="prediction"):
        assert_same(spoilt, ((value, aux), gradient))
