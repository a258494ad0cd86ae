"""Every route gives the gradient of the full batch. The oracle is `jax.value_and_grad`."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.losses import LOSSES

import anybatch as ab

SIZES = [1, 5, 6, 12, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 3, 11, 13, None))]


def by_name(case):
    return case.name


@pytest.mark.parametrize("microbatch_size", SIZES)
@pytest.mark.parametrize("transform", [pytest.param(lambda fun: fun, marks=pytest.mark.slow, id="eager"), jax.jit])
@pytest.mark.parametrize("case", LOSSES, ids=by_name)
def test_gradient_equals_full_batch_gradient(case, transform, microbatch_size):
    params, batch = case.problem()
    expected = jax.value_and_grad(case.oracle)(params, batch)

    fun = ab.value_and_grad(case.loss, microbatch_size=microbatch_size, reduction=case.reduction)
    actual = transform(fun)(params, batch)

    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("microbatch_size", [1, 4, 5])
@pytest.mark.parametrize("case", LOSSES, ids=by_name)
def test_gradient_is_exact_to_the_last_digits_in_float64(float64, case, microbatch_size):
    params, batch = case.problem(dtype=jnp.float64)
    expected = jax.value_and_grad(case.oracle)(params, batch)

    actual = ab.value_and_grad(case.loss, microbatch_size=microbatch_size, reduction=case.reduction)(params, batch)

    assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(actual))
    chex.assert_trees_all_close(actual, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("microbatch_size", [5, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 12))])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("case", LOSSES, ids=by_name)
def test_low_precision_is_no_further_from_the_truth_than_the_full_batch(case, dtype, microbatch_size):
    """The truth is the full-batch gradient in float64, at the very same rounded parameters and batch."""
    params, batch = case.problem(dtype=dtype)
    rounded = jax.value_and_grad(case.oracle)(params, batch)

    fun = ab.value_and_grad(case.loss, microbatch_size=microbatch_size, reduction=case.reduction)
    actual = jax.jit(fun)(params, batch)

    chex.assert_trees_all_equal_shapes_and_dtypes(actual, rounded)
    with jax.enable_x64(True):
        truth = jax.value_and_grad(case.oracle)(*_cast((params, batch), jnp.float64))
    for got, full, true in zip(*map(jax.tree.leaves, (actual, rounded, truth)), strict=True):
        scale = np.abs(np.asarray(true)).max()
        error, error_of_full_batch = (np.abs(np.asarray(x, np.float64) - np.asarray(true)).max() for x in (got, full))
        assert error <= error_of_full_batch + 4 * float(jnp.finfo(dtype).eps) * scale


def _cast(tree, dtype):
    return jax.tree.map(
        lambda x: np.asarray(x, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else np.asarray(x), tree
    )


@pytest.mark.parametrize("accumulator_dtype, expected", [(jnp.float32, 4096.0), (None, 256.0)])
def test_bfloat16_gradients_are_summed_in_float32(accumulator_dtype, expected):
    """4096 gradients of 1: a bfloat16 accumulator (the control) stops at 256, where adding 1 changes nothing."""
    ones = jnp.ones((4096,), jnp.bfloat16)

    gradient = ab.grad(
        lambda w, x: jnp.sum(w * x), microbatch_size=1, reduction="sum", accumulator_dtype=accumulator_dtype
    )(jnp.ones((), jnp.bfloat16), ones)

    assert gradient.dtype == jnp.bfloat16
    assert float(gradient) == expected


def test_bfloat16_losses_are_summed_in_float32():
    value, _ = ab.value_and_grad(lambda w, x: jnp.sum(w * x), microbatch_size=1, reduction="sum")(
        jnp.ones((), jnp.bfloat16), jnp.ones((4096,), jnp.bfloat16)
    )
    assert float(value) == 4096


@pytest.mark.parametrize(
    "wrongly_declared, case",
    [("sum", LOSSES[0]), ("mean", LOSSES[1])],
    ids=["a mean declared as a sum", "a sum declared as a mean"],
)
def test_the_comparison_can_fail(wrongly_declared, case):
    params, batch = case.problem()
    expected = jax.value_and_grad(case.oracle)(params, batch)

    actual = ab.value_and_grad(case.loss, microbatch_size=4, reduction=wrongly_declared)(params, batch)

    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(actual, expected, rtol=1e-2)


def test_a_mean_of_means_over_unequal_weights_is_wrong():
    """The control for "weighted": the bug that everyone ships differs by much more than any tolerance here."""
    (case,) = (case for case in LOSSES if case.name == "token_mean")
    params, batch = case.problem()
    expected = jax.value_and_grad(case.oracle)(params, batch)

    mean_of_means = ab.value_and_grad(case.oracle, microbatch_size=4, reduction="mean")(params, batch)

    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(mean_of_means, expected, rtol=1e-3)


def test_a_loss_across_examples_is_not_a_mean():
    """The control for the whole idea: a loss that normalises over the batch cannot be microbatched as a mean."""

    def batch_norm(w, x):
        y = x * w
        return jnp.mean(((y - y.mean()) / (y.std() + 1.0)) ** 4)

    x = jax.random.normal(jax.random.key(0), (12,))
    expected = jax.value_and_grad(batch_norm)(1.5, x)

    actual = ab.value_and_grad(batch_norm, microbatch_size=4, reduction="mean")(1.5, x)

    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(actual, expected, rtol=1e-2)


@pytest.mark.parametrize("accumulator_dtype", [None, jnp.float32])
@pytest.mark.parametrize("microbatch_size", [4, 5])
def test_the_mean_of_a_bfloat16_loss_is_not_divided_in_bfloat16(accumulator_dtype, microbatch_size):
    """1/3 rounded to bfloat16 would be off by 0.2%."""

    def loss(w, x):
        return jnp.mean(w * x).astype(jnp.bfloat16)

    x = jnp.arange(1.0, 13.0)
    options = {"microbatch_size": microbatch_size, "reduction": "mean", "accumulator_dtype": accumulator_dtype}
    gradient = ab.grad(loss, **options)(jnp.float32(0.5), x)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient, jnp.mean(x), rtol=1e-6)
