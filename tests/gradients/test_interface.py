"""A drop-in for `jax.value_and_grad`: the same arguments, trees and dtypes, under the same transformations."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import anybatch as ab

pytestmark = pytest.mark.every_jax


def loss(w, x):
    return jnp.mean(jnp.tanh(x * w) ** 2)


def two_argument_loss(first, second, batch, *, power, offset=None):
    prediction = batch["x"] @ first["w"] + second
    if offset is not None:
        prediction = prediction + offset
    return jnp.mean((prediction - batch["y"]) ** power)


def two_argument_problem():
    keys = jax.random.split(jax.random.key(0), 4)
    batch = {"x": jax.random.normal(keys[0], (7, 3)), "y": jax.random.normal(keys[1], (7,))}
    return {"w": jax.random.normal(keys[2], (3,))}, jax.random.normal(keys[3], ()), batch


@pytest.mark.parametrize("argnums", [0, 1, (0,), (0, 1), (1, 0), -2, (-3, 1)])
def test_argnums_select_and_order_the_gradients(argnums):
    args = two_argument_problem()
    expected = jax.value_and_grad(two_argument_loss, argnums)(*args, power=2)

    fun = ab.value_and_grad(two_argument_loss, argnums, batch_argnums=2, microbatch_size=3, reduction="mean")
    actual = fun(*args, power=2)

    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("power", [2, 4])
def test_keyword_arguments_pass_through(power):
    args = two_argument_problem()
    options = {"power": power, "offset": np.float32(0.5)}
    expected = jax.value_and_grad(two_argument_loss)(*args, **options)

    fun = ab.value_and_grad(two_argument_loss, batch_argnums=2, microbatch_size=3, reduction="mean")

    chex.assert_trees_all_close(fun(*args, **options), expected, rtol=1e-5)


def test_settings_in_arguments_stay_python_values():
    """A string and a count steer Python code in the loss, as they can with `jax.value_and_grad`."""

    def steered(w, x, config):
        for _ in range(config["repeats"]):
            x = {"tanh": jnp.tanh, "sin": jnp.sin}[config["activation"]](x * w)
        return jnp.sum(x)

    x, config = jnp.arange(5.0), {"repeats": 3, "activation": "sin", "unhashable": {1, 2}}
    expected = jax.grad(steered)(0.7, x, config)
    np.testing.assert_allclose(
        ab.grad(steered, microbatch_size=2, reduction="sum")(0.7, x, config), expected, rtol=1e-5
    )


def test_several_batch_arguments_and_numpy_arrays():
    def pair(w, x, scale, y):
        return jnp.sum(scale * (x @ w - y) ** 2)

    w, x, y = np.ones(3, np.float32), np.arange(15, dtype=np.float32).reshape(5, 3), np.arange(5, dtype=np.float32)
    expected = jax.value_and_grad(pair)(w, x, np.float32(2), y)
    fun = ab.value_and_grad(pair, batch_argnums=(1, 3), microbatch_size=2, reduction="sum")
    chex.assert_trees_all_close(fun(w, x, np.float32(2), y), expected, rtol=1e-6)


def test_complex_parameters_have_the_gradient_that_jax_gives_them():
    def power(z, x):
        return jnp.sum(jnp.abs(z * x.astype(z.dtype)) ** 2) + jnp.sum(jnp.real(z) * x)

    z, x = jnp.asarray(1.0 + 2.0j), jnp.arange(5.0)
    expected = jax.value_and_grad(power)(z, x)
    actual = ab.value_and_grad(power, microbatch_size=2, reduction="sum")(z, x)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6)


def test_a_parameter_that_the_loss_ignores_has_gradient_zero():
    gradient = ab.grad(lambda p, x: jnp.sum(p["used"] * x), microbatch_size=2, reduction="sum")(
        {"used": 2.0, "ignored": jnp.ones((2, 2))}, jnp.arange(5.0)
    )
    chex.assert_trees_all_close(gradient, {"used": jnp.float32(10.0), "ignored": jnp.zeros((2, 2))})


def test_grad_is_the_gradient_alone():
    x = jnp.arange(5.0)
    assert float(ab.grad(loss, microbatch_size=2, reduction="mean")(0.3, x)) == pytest.approx(
        float(jax.grad(loss)(0.3, x)), rel=1e-6
    )
    gradient, aux = ab.grad(lambda w, x: (loss(w, x), x * w), has_aux=True, microbatch_size=2, reduction="mean")(0.3, x)
    np.testing.assert_allclose(aux, 0.3 * x, rtol=1e-6)
    assert float(gradient) == pytest.approx(float(jax.grad(loss)(0.3, x)), rel=1e-6)


def test_the_wrapped_function_keeps_its_name_and_signature():
    fun = ab.value_and_grad(two_argument_loss, batch_argnums=2, microbatch_size=3, reduction="mean")
    assert fun.__name__ == "two_argument_loss"


# An empty batch and a batch of one.


@pytest.mark.parametrize("microbatch_size", [1, 4, None])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_an_empty_batch_gives_what_jax_gives(reduction, microbatch_size):
    def fun(w, x):
        return (jnp.sum if reduction == "sum" else jnp.mean)(x * w) + w**2

    empty = jnp.zeros((0,))
    expected = jax.value_and_grad(fun)(2.0, empty)
    actual = ab.value_and_grad(fun, microbatch_size=microbatch_size, reduction=reduction)(2.0, empty)
    chex.assert_trees_all_equal(actual, expected)


@pytest.mark.parametrize("num_examples, microbatch_size", [(0, 4), (5, 2), (5, 5), (5, None)])
def test_weights_that_sum_to_zero_give_zero_and_not_nan(num_examples, microbatch_size):
    def all_masked(w, x):
        return jnp.sum(0.0 * x * w), jnp.sum(0.0 * x)

    fun = ab.value_and_grad(all_masked, microbatch_size=microbatch_size, reduction="weighted")
    value, gradient = fun(2.0, jnp.arange(float(num_examples)))
    assert (float(value), float(gradient)) == (0.0, 0.0)


@pytest.mark.parametrize("microbatch_size", [1, 3, None])
def test_a_batch_of_one(microbatch_size):
    x = jnp.asarray([0.7])
    actual = ab.value_and_grad(loss, microbatch_size=microbatch_size, reduction="mean")(0.3, x)
    chex.assert_trees_all_close(actual, jax.value_and_grad(loss)(0.3, x), rtol=1e-6)


# Non-finite numbers.


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("position", [0, 3, 6])
def test_one_bad_example_gives_what_the_full_batch_gives_and_leaves_the_next_call_alone(bad, position):
    def separate(w, x):
        return jnp.mean(jnp.sum((x * w[None, :]) ** 2, axis=1))

    w, x = jnp.ones(2), jnp.ones((7, 2))
    spoiled = x.at[position, 0].set(bad)
    fun = jax.jit(ab.value_and_grad(separate, microbatch_size=2, reduction="mean"))

    chex.assert_trees_all_close(fun(w, spoiled), jax.value_and_grad(separate)(w, spoiled))  # NaN equals NaN here
    assert np.isfinite(fun(w, spoiled)[1][1])  # the other column is untouched
    chex.assert_trees_all_close(fun(w, x), jax.value_and_grad(separate)(w, x))


# Transformations. A naive in-place accumulation raises under vmap and checkpoint, and is silently wrong under the
# gradient of a scan; each of these compares with the same transformation of `jax.value_and_grad`.


def stack(w):
    return jnp.stack([w, 1.5 * w])


def descend(fun, x):
    def step(w, _):
        return w - 0.1 * fun(w, x)[1], None

    return lambda w: jax.lax.scan(step, w, None, length=3)[0]


TRANSFORMATIONS = {
    "grad": lambda fun, w, x: jax.grad(lambda w: fun(w, x)[1].sum())(w),
    "grad of the value": lambda fun, w, x: jax.grad(lambda w: fun(w, x)[0])(w),
    "grad in the batch": lambda fun, w, x: jax.grad(lambda x: fun(w, x)[1].sum())(x),
    "jit of grad": lambda fun, w, x: jax.jit(jax.grad(lambda w: fun(w, x)[1].sum()))(w),
    "grad of jit": lambda fun, w, x: jax.grad(jax.jit(lambda w: fun(w, x)[1].sum()))(w),
    "grad in a closure": lambda fun, w, x: jax.grad(lambda c: fun(w * c, x)[1].sum())(2.0),
    "hessian": lambda fun, w, x: jax.hessian(lambda w: fun(w, x)[0])(w),
    "jvp": lambda fun, w, x: jax.jvp(lambda w: fun(w, x), (w,), (w,)),
    "vmap": lambda fun, w, x: jax.vmap(lambda w: fun(w, x))(stack(w)),
    "vmap over batches": lambda fun, w, x: jax.vmap(fun, (None, 0))(w, stack(x)),
    "vmap of jit": lambda fun, w, x: jax.vmap(jax.jit(lambda w: fun(w, x)))(stack(w)),
    "vmap of grad": lambda fun, w, x: jax.vmap(jax.grad(lambda w: fun(w, x)[1].sum()))(stack(w)),
    "grad of vmap": lambda fun, w, x: jax.grad(lambda w: jax.vmap(lambda w: fun(w, x))(w)[1].sum())(stack(w)),
    "checkpoint": lambda fun, w, x: jax.grad(jax.checkpoint(lambda w: fun(w, x)[1].sum()))(w),
    "scan": lambda fun, w, x: descend(fun, x)(w),
    "grad of scan": lambda fun, w, x: jax.grad(lambda w: descend(fun, x)(w).sum())(w),
    "cond": lambda fun, w, x: jax.lax.cond(w.sum() > -9, lambda: fun(w, x), lambda: fun(-w, x)),
    "disable_jit": lambda fun, w, x: _without_jit(fun, w, x),
}


def _without_jit(fun, w, x):
    with jax.disable_jit():
        return fun(w, x)


@pytest.mark.parametrize("microbatch_size", [3, 4])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_give_what_they_give_for_jax(name, microbatch_size):
    def vector_loss(w, x):
        return jnp.mean(jnp.sin(x @ w) ** 2)

    w, x = jax.random.normal(jax.random.key(0), (3,)), jax.random.normal(jax.random.key(1), (12, 3))[:8]
    transform = TRANSFORMATIONS[name]
    expected = transform(jax.value_and_grad(vector_loss), w, x)

    actual = transform(ab.value_and_grad(vector_loss, microbatch_size=microbatch_size, reduction="mean"), w, x)

    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=1e-6)


def test_a_loss_that_closes_over_a_traced_value():
    """The tracer is no argument of the loss, and its gradient must not be lost."""
    x = jnp.arange(1.0, 6.0)

    def outer(scale, gradient_of):
        return gradient_of(lambda w, x: jnp.mean(jnp.sin(scale * w * x)))(0.3, x)

    expected = jax.grad(lambda s: outer(s, jax.grad))(0.5)
    microbatched = lambda fun: ab.grad(fun, microbatch_size=2, reduction="mean")  # noqa: E731
    actual = jax.grad(lambda s: outer(s, microbatched))(0.5)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_batch_that_is_spread_over_devices(transform, devices):
    mesh = jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    x = jax.random.normal(jax.random.key(1), (24,))
    spread = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))
    for microbatch_size in (8, 5):
        fun = transform(ab.value_and_grad(loss, microbatch_size=microbatch_size, reduction="mean"))
        chex.assert_trees_all_close(fun(0.7, spread), jax.value_and_grad(loss)(0.7, x), rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_users_shard_map(check_vma):
    x = jax.random.normal(jax.random.key(1), (24,))
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    fun = ab.value_and_grad(lambda w, x: jnp.sum(jnp.sin(x * w)), microbatch_size=4, reduction="sum")

    def local(w, x):
        w = jax.lax.pcast(w, "data", to="varying")
        return jax.lax.psum(fun(w, x), "data")

    spread = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    expected = jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(x * w)))(0.7, x)
    chex.assert_trees_all_close(jax.jit(spread)(0.7, x), expected, rtol=1e-5)
