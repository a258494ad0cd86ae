"""The contracts of the four recipes."""

import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anybatch as ab
from anybatch import recipes


def check(actual, expected, shape):
    assert isinstance(actual, jax.Array)
    assert actual.dtype == jnp.float32
    assert actual.shape == shape
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, list])
@pytest.mark.parametrize("w", [3, 3.0, np.float64(3), np.asarray(3), jnp.asarray(3.0)])
def test_equivalent_two_ways(w, kind):
    x = kind([1, 2, -3])
    check(recipes.equivalent_two_ways(w, x), [84.0, 84.0], (2,))  # 2 * 3 * (1 + 4 + 9)
    check(recipes.equivalent_two_ways(w=w, x_batch=x), [84.0, 84.0], (2,))


@pytest.mark.parametrize("n_microbatches", [1, 2, 3, 4, 6, 12, 4.0, np.int64(4), np.float32(4), jnp.asarray(4)])
def test_microbatched_grads_is_a_sum_that_does_not_depend_on_n(n_microbatches):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 12))
    w = 0.7
    expected = np.sum(2 * (w * x - y) * x)
    check(recipes.microbatched_grads(w, 1e9, x, y, n_microbatches), expected, ())
    check(
        recipes.microbatched_grads(w=jnp.asarray(w), b=None, x_full=list(x), y_full=y, n_microbatches=n_microbatches),
        expected,
        (),
    )


def test_microbatched_grads_scans():
    jaxpr = jax.make_jaxpr(lambda w, x, y: recipes.microbatched_grads(w, 0.0, x, y, 4))(1.0, np.ones(8), np.ones(8))
    assert "scan[" in str(jaxpr)


@pytest.mark.parametrize("n_microbatches", [2.5, 0, -1, -4.0, 5, 24, float("nan"), float("inf")])
def test_microbatched_grads_refuses_what_does_not_divide_and_names_both_numbers(n_microbatches):
    with pytest.raises(ValueError, match=f"n_microbatches={n_microbatches} for 12 examples"):
        recipes.microbatched_grads(1.0, 0.0, np.ones(12), np.ones(12), n_microbatches)


def test_microbatched_grads_refuses_unequal_lengths():
    with pytest.raises(ValueError, match="same number of examples, got 12 and 8"):
        recipes.microbatched_grads(1.0, 0.0, np.ones(12), np.ones(8), 4)


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
def test_shard_map_vs_vmap_on_one_device_and_on_eight(rows):
    assert len(jax.devices()) == 8
    x = np.random.default_rng(0).normal(size=(rows, 5))
    check(recipes.shard_map_vs_vmap(x), np.stack([(x**2).sum(1)] * 2), (2, rows))


def test_shard_map_vs_vmap_spreads_over_all_devices_and_moves_nothing():
    jaxpr = str(jax.make_jaxpr(recipes.shard_map_vs_vmap)(jnp.ones((16, 5))))
    assert "shard_map[" in jaxpr
    assert "data': 8" in jaxpr or "'data': 8" in jaxpr or "data:8" in jaxpr.replace(" ", "")


@pytest.mark.parametrize("seed", [0, 3, 3.0, np.asarray(3)])
def test_grad_accumulation_step_is_one_step_of_the_whole_batch(seed):
    """Checked with a gradient written by hand in numpy, from the same initial parameters."""
    rng = np.random.default_rng(1)
    x, y, lr = rng.normal(size=(2, 6, 3)), rng.normal(size=(2, 6)), 0.1

    class Linear(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)

    dense = Linear().init(jax.random.PRNGKey(int(seed)), jnp.zeros((6, 3)))["params"]["Dense_0"]
    kernel, bias = np.asarray(dense["kernel"], np.float64)[:, 0], float(dense["bias"][0])
    flat_x, flat_y = x.reshape(12, 3), y.reshape(12)
    error = flat_x @ kernel + bias - flat_y
    kernel, bias = kernel - lr * 2 * flat_x.T @ error / 12, bias - lr * 2 * error.mean()
    expected = [np.mean((flat_x @ kernel + bias - flat_y) ** 2)]

    check(recipes.grad_accumulation_step(seed, x, y, lr), expected, (1,))
    check(recipes.grad_accumulation_step(seed=seed, x_batches=x, y_batches=y, lr=np.float32(lr)), expected, (1,))


@pytest.mark.parametrize("x_shape, y_shape", [((3, 6, 3), (3, 6)), ((2, 6), (2, 6)), ((2, 6, 3), (12,))])
def test_grad_accumulation_step_refuses_other_shapes(x_shape, y_shape):
    with pytest.raises(ab.InputError, match=r"x_batches must have shape \(2, M, D\)"):
        recipes.grad_accumulation_step(0, np.ones(x_shape), np.ones(y_shape), 0.1)


def test_the_names_of_the_arguments():
    names = {
        "equivalent_two_ways": ["w", "x_batch"],
        "microbatched_grads": ["w", "b", "x_full", "y_full", "n_microbatches"],
        "shard_map_vs_vmap": ["x"],
        "grad_accumulation_step": ["seed", "x_batches", "y_batches", "lr"],
    }
    for name, arguments in names.items():
        assert list(inspect.signature(getattr(recipes, name)).parameters) == arguments


@pytest.mark.parametrize(
    "call",
    [
        lambda: recipes.equivalent_two_ways([1.0, 2.0], [1.0]),
        lambda: recipes.equivalent_two_ways(1.0, [[1.0]]),
        lambda: recipes.shard_map_vs_vmap([1.0, 2.0]),
    ],
)
def test_wrong_numbers_of_axes(call):
    with pytest.raises(ab.InputError, match="must"):
        call()
