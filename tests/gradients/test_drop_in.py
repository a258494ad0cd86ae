"""Odd losses that `jax.value_and_grad` takes, and that have once come out wrong here."""

import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.compilations import counted_compilations
from jax import lax
from jax.sharding import PartitionSpec as P

import anybatch as ab

pytestmark = pytest.mark.every_jax

X = jnp.arange(1.0, 7.0)


def mean(fun, **options):
    return ab.value_and_grad(fun, **{"microbatch_size": 2, "reduction": "mean", **options})


# Weighted losses.


def ratio_of(fun):
    def divided(*args):
        total, weight = fun(*args)
        return total / weight

    return divided


@pytest.mark.parametrize("weight_of_params", [False, True])
@pytest.mark.parametrize("microbatch_size", [3, 4, None])
def test_a_weighted_loss_inside_a_users_shard_map(microbatch_size, weight_of_params):
    """The parameters are replicated: JAX adds up over the devices gradients that have different weights."""

    def fun(w, x, mask):
        return jnp.sum((w * x) ** 2 * mask), jnp.sum(mask * (w if weight_of_params else 1.0))

    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

    def spread(value_and_grad):
        def local(w, x, mask):
            value, gradient = value_and_grad(w, x, mask)
            return value[None], lax.pmean(gradient, "data")[None]

        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": (P("data"), P("data"))}
        return jax.jit(jax.shard_map(local, mesh=mesh, **specs))

    x, mask = jnp.arange(24.0), jnp.asarray([0.3] * 4 + [0.0, 1.0, 2.0, 3.0] * 5)
    expected = spread(jax.value_and_grad(ratio_of(fun)))(2.0, x, mask)
    options = {"reduction": "weighted", "batch_argnums": (1, 2), "microbatch_size": microbatch_size}
    chex.assert_trees_all_close(spread(ab.value_and_grad(fun, **options))(2.0, x, mask), expected, rtol=1e-5)


@pytest.mark.parametrize("count", [lambda x: jnp.float32(len(x)), len], ids=["float", "int"])
def test_a_float16_gradient_of_a_weighted_loss_does_not_overflow(count):
    """The gradient of the total is 70,000, more than float16 holds; that of the ratio is 1."""

    def fun(w, x):
        return jnp.sum((w * x).astype(jnp.float32)), count(x)

    w, x = jnp.float16(1), jnp.ones(140_000, jnp.float16)
    value, gradient = ab.value_and_grad(fun, microbatch_size=70_000, reduction="weighted")(w, x)
    np.testing.assert_allclose([value, gradient], [1.0, 1.0], rtol=2e-3)


@pytest.mark.parametrize("microbatch_size", [10_000, None])
def test_a_weight_that_the_dtype_of_the_total_cannot_hold(microbatch_size):
    def fun(w, x):
        return jnp.sum((w * x).astype(jnp.float32)).astype(jnp.float16), jnp.float32(len(x))

    w, x = jnp.float16(1), jnp.full(100_000, 0.3, jnp.float16)
    value, gradient = ab.value_and_grad(fun, microbatch_size=microbatch_size, reduction="weighted")(w, x)
    assert (value.dtype, gradient.dtype) == (jnp.float32, jnp.float16)  # as total / weight has them
    np.testing.assert_allclose([value, gradient], [0.3, 0.3], rtol=1e-2)


@pytest.mark.parametrize("total, weight", [("bfloat16", "float32"), ("bfloat16", "int32"), ("float32", "bfloat16")])
@pytest.mark.parametrize("microbatch_size", [2, None])
def test_the_value_has_the_dtype_of_the_quotient(total, weight, microbatch_size):
    def fun(w, x):
        return jnp.sum(w * x).astype(total), jnp.sum(x).astype(weight)

    with jax.numpy_dtype_promotion("standard"):
        expected = jax.value_and_grad(ratio_of(fun))(2.0, X)
        actual = ab.value_and_grad(fun, microbatch_size=microbatch_size, reduction="weighted")(2.0, X)
    chex.assert_trees_all_equal_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=2e-2)


@pytest.mark.parametrize("accumulator_dtype", [jnp.float32, None])
def test_a_weight_beyond_float16(accumulator_dtype):
    def fun(w, x):
        return jnp.sum(x * w), jnp.float32(len(x)) * 20_000

    options = {"microbatch_size": 2, "reduction": "weighted", "accumulator_dtype": accumulator_dtype}
    value, gradient = ab.value_and_grad(fun, **options)(jnp.float16(1), jnp.full(8, 100, jnp.float16))
    np.testing.assert_allclose([value, gradient], [0.005, 0.005], rtol=2e-3)


@pytest.mark.parametrize("microbatch_size", [2, 4, None])
def test_a_weight_of_params_that_is_exactly_zero(microbatch_size):
    """It divides by 1, a constant, whatever the microbatches."""
    fun = ab.value_and_grad(
        lambda w, x: (jnp.sum(x * w), jnp.sum((w - 1) * x)), microbatch_size=microbatch_size, reduction="weighted"
    )
    assert float(fun(1.0, X)[1]) == 21


def test_a_microbatch_without_weight_does_not_spoil_the_mean_of_aux():
    mask = jnp.asarray([1.0, 1, 1, 0, 0, 0])

    def fun(w, x, mask):
        return (jnp.sum(w * x * mask), jnp.sum(mask)), jnp.sum(x * mask) / jnp.sum(mask)

    options = {"has_aux": True, "reduction": "weighted", "batch_argnums": (1, 2), "aux_reduction": "mean"}
    (_, aux), _ = ab.value_and_grad(fun, microbatch_size=3, **options)(1.0, X, mask)
    assert float(aux) == 2


# Effects, callbacks, references.


@pytest.mark.parametrize("microbatch_size", [2, None])
def test_eager_calls_see_a_changed_callback(microbatch_size):
    factor = [1.0]

    def fun(w, x):
        now = np.float32(factor[0])
        return jnp.sum(w * jax.pure_callback(lambda t: np.asarray(t) * now, jax.typeof(x), x))

    compute = ab.grad(fun, microbatch_size=microbatch_size, reduction="sum")
    assert float(compute(2.0, X)) == 21
    factor[0] = 3.0
    assert float(compute(2.0, X)) == 63


@pytest.mark.parametrize("ordered", [False, True])
def test_effects_happen_in_every_call(ordered):
    seen = []

    def fun(w, x):
        jax.debug.callback(lambda n: seen.append(int(n)), x[0], ordered=ordered)
        return jnp.mean(w * x)

    compute = mean(fun)
    compiled = jax.jit(lambda: compute(1.0, X))
    for call in (lambda: compute(1.0, X), compiled, compiled, jax.jit(lambda: (compute(1.0, X), 3.0)[1])):
        seen.clear()
        call()
        jax.effects_barrier()
        assert sorted(seen) == [1, 3, 5]


def test_a_loss_that_writes_to_a_reference():
    total = jax.new_ref(jnp.zeros(()))

    def fun(w, x):
        total[...] += jnp.sum(x)
        return jnp.mean(w * x)

    value, gradient = mean(fun)(2.0, X)
    assert (float(value), float(gradient), float(total[...])) == (7.0, 3.5, 21.0)


def test_with_constants_hidden_from_the_program_text():
    program = """
import jax, jax.numpy as jnp, anybatch as ab
held = [jnp.full(2000, 1.0)]
fun = ab.grad(lambda w, x: jnp.sum(jax.jit(lambda w: w * x * held[0][:2])(w)), microbatch_size=2, reduction="sum")
first = fun(2.0, jnp.arange(6.0))
held[0] = jnp.full(2000, 2.0)
print(first, fun(2.0, jnp.arange(6.0)))
"""
    environment = {**os.environ, "JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert result.stdout == "15.0 30.0\n", result.stderr


# Transformations.


@pytest.mark.parametrize(
    "fun",
    [lambda w, x: jnp.mean(lax.psum(w, "i") * x), lambda w, x: jnp.mean(w * lax.axis_index("i") * x)],
    ids=["psum", "axis_index"],
)
def test_collectives_of_an_outer_vmap(fun):
    def outer(value_and_grad):
        return jax.vmap(lambda w: value_and_grad(w, X), axis_name="i")(jnp.arange(1.0, 4.0))

    with jax.numpy_dtype_promotion("standard"):
        chex.assert_trees_all_close(outer(mean(fun)), outer(jax.value_and_grad(fun)), rtol=1e-6)


def test_no_tracer_is_leaked():
    def outer(c):
        return mean(lambda w, x: jnp.mean(w * x * c))(2.0, X)

    with jax.checking_leaks():
        chex.assert_trees_all_close(jax.jit(outer)(3.0), (jnp.float32(21.0), jnp.float32(10.5)))


def test_an_implicit_function():
    def root_of(w):
        def newton(f, y):
            return lax.fori_loop(0, 20, lambda _, y: y - (y**2 - w) / (2 * y), y)

        return lax.custom_root(lambda y: y**2 - w, 1.0, newton, lambda g, y: y / g(1.0))

    actual = mean(lambda w, x: jnp.mean(x) * root_of(w))(4.0, X)
    chex.assert_trees_all_close(actual, (jnp.float32(7.0), jnp.float32(0.875)), rtol=1e-6)


# aux.


def test_the_last_of_narrow_aux():
    (_, aux), _ = mean(lambda w, x: (jnp.mean(w * x), x[-1].astype(jnp.bfloat16)), has_aux=True, aux_reduction="last")(
        1.0, X
    )
    assert (aux.dtype, float(aux)) == (jnp.bfloat16, 6.0)


def test_none_stands_for_leaves_that_have_rows():
    def fun(w, x):
        return jnp.mean(w * x), {"mean": w, "rows": x, "nothing": None}

    names = {"mean": "mean", "rows": None, "nothing": None}
    (_, aux), _ = mean(fun, has_aux=True, aux_reduction=names)(1.0, X)
    chex.assert_trees_all_close(aux, {"mean": jnp.float32(1.0), "rows": X, "nothing": None})


def test_aux_in_a_list_of_two():
    """`jax.value_and_grad` unpacks any pair."""
    (_, aux), _ = mean(lambda w, x: [jnp.mean(w * x), x], has_aux=True)(1.0, X)
    np.testing.assert_array_equal(aux, X)


@pytest.mark.parametrize("aux", [(), None, {}, {"a": 1, "b": 2.5}], ids=repr)
def test_aux_without_arrays(aux):
    (_, actual), _ = mean(lambda w, x: (jnp.mean(w * x), aux), has_aux=True, aux_reduction="last")(1.0, X)
    assert jax.tree.structure(actual) == jax.tree.structure(aux)
    chex.assert_trees_all_close(actual, jax.tree.map(jnp.asarray, aux))


# Words for those who are puzzled.


def test_a_loss_that_knows_its_number_of_examples_is_told_about_microbatches():
    with pytest.raises(TypeError) as caught:
        mean(lambda w, x: jnp.mean(w * x.reshape(3, 2)))(1.0, X)
    assert any("for 2 of the 6 examples" in note for note in caught.value.__notes__)


def test_wrappers_made_anew_share_their_programs():
    def call():
        return ab.grad(lambda w, x: jnp.mean(w * x * 1.625), microbatch_size=2, reduction="mean")(1.0, X)

    call()
    with counted_compilations() as count:
        call()
    assert count == [0]
