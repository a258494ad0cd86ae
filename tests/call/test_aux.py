"""aux with a declared reduction: rows in order, the rest as `aux_reduction` says."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anybatch as ab

pytestmark = pytest.mark.every_jax

X = jnp.arange(1.0, 12.0)  # 11 examples


def loss_with_aux(w, x):
    aux = {
        "rows": x * w,
        "layers": {"transposed": jnp.stack([x, -x, 2 * x]), "ids": x.astype(jnp.int32)},
        "mean": jnp.mean(x),
        "count": jnp.asarray(x.shape[0]),
    }
    return jnp.mean((x * w) ** 2), aux


AUX_REDUCTION = {"rows": "last", "layers": "last", "mean": "mean", "count": "sum"}


@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 4, 11, 12, None])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_aux_equals_that_of_the_full_batch(transform, microbatch_size):
    """Rows are found by themselves, along whichever axis: what aux_reduction says of them does not matter."""
    expected = jax.value_and_grad(loss_with_aux, has_aux=True)(2.0, X)
    fun = ab.value_and_grad(
        loss_with_aux, has_aux=True, microbatch_size=microbatch_size, reduction="mean", aux_reduction=AUX_REDUCTION
    )
    actual = transform(fun)(2.0, X)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6)


def summary(w, x):
    return jnp.sum(w * x), jnp.mean(x)


@pytest.mark.parametrize(
    "aux_reduction, expected",
    [("stack", [2.5, 6.5, 10.0]), ("mean", 6.0), ("sum", 19.0), ("last", 10.0)],  # means of 1-4, 5-8, 9-11
)
def test_each_aux_reduction(aux_reduction, expected):
    fun = ab.grad(summary, has_aux=True, microbatch_size=4, reduction="sum", aux_reduction=aux_reduction)
    np.testing.assert_allclose(fun(1.0, X)[1], expected, rtol=1e-6)


def test_a_mean_weighs_the_ragged_last_microbatch_by_its_examples():
    """The control: the mean of the three microbatches' means is 6.33, not the mean of the batch, 6."""
    fun = ab.grad(summary, has_aux=True, microbatch_size=4, reduction="sum", aux_reduction="stack")
    assert float(fun(1.0, X)[1].mean()) == pytest.approx(19 / 3)


@pytest.mark.parametrize("microbatch_size", [11, 20, None])
def test_one_microbatch_is_stacked_too(microbatch_size):
    def with_rows(w, x):
        return jnp.sum(w * x), {"mean": jnp.mean(x), "rows": x}

    fun = ab.grad(with_rows, has_aux=True, microbatch_size=microbatch_size, reduction="sum", aux_reduction="stack")
    aux = fun(1.0, X)[1]
    assert aux["mean"].shape == (1,)
    assert aux["rows"].shape == (11,)


def test_the_mean_of_a_weighted_loss_is_weighted_as_the_loss_is():
    """Accuracy over tokens: the mean over the batch is over its tokens, not over its examples."""
    mask = jnp.asarray([1.0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0])

    def masked(w, batch):
        x, mask = batch
        accuracy = jnp.sum(x * mask) / jnp.sum(mask)
        return (jnp.sum(w * x * mask), jnp.sum(mask)), {"accuracy": accuracy}

    expected = masked(1.0, (X, mask))[1]
    options = {"has_aux": True, "reduction": "weighted", "aux_reduction": "mean"}
    for microbatch_size in (4, 6, None):
        _, aux = ab.grad(masked, microbatch_size=microbatch_size, **options)(1.0, (X, mask))
        chex.assert_trees_all_close(aux, expected, rtol=1e-6)


def test_a_length_that_happens_to_be_the_microbatch_is_not_taken_for_rows():
    """A leaf of 4 classes with microbatches of 4 examples: by shape alone it would look like rows."""

    def histogram(w, x):
        return jnp.sum(w * x), jnp.bincount(x.astype(jnp.int32) % 4, length=4)

    fun = ab.grad(histogram, has_aux=True, microbatch_size=4, reduction="sum", aux_reduction="sum")
    np.testing.assert_array_equal(fun(1.0, X)[1], histogram(1.0, X)[1])


def test_low_precision_aux_is_summed_in_float32():
    def ones(w, x):
        return jnp.sum(w * x), jnp.ones((), jnp.bfloat16)

    fun = ab.grad(ones, has_aux=True, microbatch_size=1, reduction="sum", aux_reduction="sum")
    aux = fun(1.0, jnp.ones(4096))[1]
    assert aux.dtype == jnp.bfloat16
    assert float(aux) == 4096


def test_memory_of_summed_aux_does_not_grow_with_the_batch():
    def statistics(w, x):
        return jnp.mean(x @ w), {"second moment": x.T @ x}

    fun = ab.value_and_grad(statistics, has_aux=True, microbatch_size=8, reduction="mean", aux_reduction="sum")

    def temporaries(examples):
        shapes = jax.ShapeDtypeStruct((128,), jnp.float32), jax.ShapeDtypeStruct((examples, 128), jnp.float32)
        return jax.jit(fun).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8192) <= 1.05 * temporaries(256)
