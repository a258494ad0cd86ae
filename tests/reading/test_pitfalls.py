"""Losses that were read wrong once, or might have been."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import anybatch as ab
from anybatch.reading import positions
from anybatch.reading.reader import RuleResult
from anybatch.reading.rules import RULES

X = np.sin(np.arange(18.0)).reshape(6, 3)
W = np.array([0.7, -1.2, 2.1])


def assert_exact(loss, *args, sizes=(2, 4), rtol=1e-11, **options):
    expected = jax.value_and_grad(loss)(*args)
    for size in sizes:
        actual = ab.value_and_grad(loss, microbatch_size=size, **options)(*args)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=1e-12), actual, expected)


def test_one_complex_sum_has_a_gradient_in_two_directions(float64):
    assert_exact(lambda w, x: jnp.abs(jnp.sum(jnp.exp(lax.complex(jnp.zeros(6), x @ w)))) ** 2, W, X)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_a_key_for_each_example_of_a_generator_that_draws_for_all_at_once(impl, float64):
    key = jax.random.key(0, impl=impl)

    def loss(w, x):
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(jax.random.split(key, 6))
        return jnp.mean(((x + noise) @ w) ** 2)

    assert_exact(loss, W, X)


def test_draws_that_are_not_numbered_are_drawn_at_once(float64):
    with jax.threefry_partitionable(False):
        assert_exact(lambda w, x: jnp.mean((x * jax.random.normal(jax.random.key(0), x.shape)) @ w) ** 2, W, X)


def test_draws_of_a_batch_that_is_spread_over_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def loss(w, x):
        return jnp.mean(jnp.where(jax.random.bernoulli(jax.random.key(3), 0.7, x.shape), x, 0.0) @ w) ** 2

    w, x = W.astype(np.float32), X.astype(np.float32)
    expected = jax.grad(loss)(w, x)
    actual = jax.jit(ab.grad(loss, microbatch_size=4))(w, jax.device_put(x, spread))
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


@pytest.mark.parametrize("stride", [1, 3, 65537, 2**32 - 1, 2**32 + 7, 2**40 + 12345])
def test_counters_of_64_bits(stride):
    position = np.array([0, 1, 65535, 65536, 2**31, 2**32 - 1], np.uint32)
    low, high = positions._times(jnp.asarray(position), stride)
    expected = [int(number) * stride % 2**64 for number in position]
    assert [int(h) * 2**32 + int(n) for n, h in zip(low, high, strict=True)] == expected


def normalized(h):
    return (h - h.mean(0, keepdims=True)) / jnp.sqrt(h.var(0, keepdims=True) + 1e-3)


def test_a_loop_in_a_loop_that_both_must_be_opened(float64):
    def inner(h, w):
        return lax.scan(lambda h, _: (jax.checkpoint(normalized)(jnp.tanh(h @ w)), None), h, None, length=2)[0]

    def loss(weights, x):
        return jnp.mean(lax.scan(lambda h, w: (inner(h, w), None), x, weights)[0] ** 3)

    assert_exact(loss, np.sin(np.arange(18.0)).reshape(2, 3, 3), X, rtol=1e-9)


@jax.custom_vjp
def straight_through(x):
    return jnp.round(x)


straight_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))


@jax.custom_vjp
def around_straight_through(x):
    return straight_through(x) * x


around_straight_through.defvjp(
    lambda x: (straight_through(x) * x, x), lambda x, g: (g * jnp.sin(straight_through(x) * x),)
)


def test_second_derivatives_through_derivatives_of_ones_own(float64):
    def loss(w, x):
        return jnp.mean(around_straight_through(x * w[None]) ** 2)

    def second(value_and_grad):
        return jax.grad(lambda w: jnp.sum(value_and_grad(w, X)[1] ** 2))(jnp.asarray(W))

    expected = second(jax.value_and_grad(loss))
    np.testing.assert_allclose(second(ab.value_and_grad(loss, microbatch_size=4)), expected, rtol=1e-11)
    assert np.any(expected != 0)


def test_numbers_that_are_drawn_in_parts_are_not_drawn_at_once_as_well():
    def loss(w, x, key):
        noise = jax.random.normal(key, (6, 3))
        return jnp.sum((x @ w) * noise.sum(1)) - jnp.sum((x @ w) * jnp.cumsum(noise, 1)[:, -1])

    args = (W.astype(np.float32), X.astype(np.float32))
    with pytest.raises(ab.InputError, match="must not be used for the full batch as well"):
        ab.value_and_grad(loss, microbatch_size=2, rng_argnums=2)(*args, jax.random.key(0, impl="rbg"))
    assert_exact(loss, *args, jax.random.key(0), rtol=1e-4)  # of the default generator they are the same


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}])
def test_the_gradient_of_a_python_number_is_weak(options):
    def loss(w, x):
        return jnp.sum(w * x[:, 0])

    x = X.astype(np.float32)
    expected = jax.value_and_grad(loss)(1.5, x)
    actual = ab.value_and_grad(loss, microbatch_size=2, **options)(1.5, x)
    assert [leaf.aval for leaf in actual] == [leaf.aval for leaf in expected]
    assert actual[1].weak_type


@jax.custom_vjp
def fused(w, x):
    return jnp.mean((x @ w) ** 2)


def fused_forward(w, x):
    return fused(w, x), jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


fused.defvjp(fused_forward, lambda gradient, g: (g * gradient, None))


def test_a_forward_pass_that_saves_the_gradient(float64):
    assert ab.read(lambda w, x: fused(w, x), W, X).passes == 1
    assert_exact(lambda w, x: fused(w, x), W, X)
    assert_exact(lambda w, x: jnp.sqrt(fused(w, x)), W, X)


@jax.custom_vjp
def fused_wrongly(w, x):
    return jnp.mean((x @ w) ** 2)


fused_wrongly.defvjp(fused_forward, lambda gradient, g: (g * jnp.tanh(gradient), None))


def test_a_saved_sum_that_is_not_used_linearly_is_the_heads(float64):
    assert not ab.read(lambda w, x: fused_wrongly(w, x), W, X).separable
    assert_exact(lambda w, x: fused_wrongly(w, x), W, X)


def test_a_loss_in_a_mesh_whose_factors_differ_from_device_to_device(float64):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread, whole = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()

    def loss(w, x):
        return jnp.sqrt(jnp.mean((x @ w) ** 2))

    def gradient(value_and_grad):
        local = jax.shard_map(
            lambda w, x: value_and_grad(w, x)[1], mesh=mesh, in_specs=(whole, spread), out_specs=whole
        )
        return jax.jit(local)(jnp.asarray(W), jnp.asarray(X))

    expected = gradient(jax.value_and_grad(loss))
    np.testing.assert_allclose(gradient(ab.value_and_grad(loss, microbatch_size=2)), expected, rtol=1e-12)


def test_a_derivative_that_contains_itself_is_read_once(float64):
    """The rule of `sinc` calls the next derivative of `sinc`, which has a rule, which calls the next."""
    assert_exact(lambda w, x: jnp.mean(jnp.sinc(x @ w)), W, X, sizes=(4,))


def test_the_derivative_by_the_batch_of_a_function_of_data_alone(float64):
    def loss(w, x):
        return jnp.mean((straight_through(3 * x) @ w) ** 2)

    expected = jax.grad(loss, argnums=1)(W, X)
    actual = jax.grad(lambda x: ab.value_and_grad(loss, microbatch_size=4)(W, x)[0])(jnp.asarray(X))
    np.testing.assert_allclose(actual, expected, rtol=1e-12)
    assert np.any(expected != 0)


@jax.custom_vjp
def centred_gradient(x):
    return 2 * x


centred_gradient.defvjp(lambda x: (2 * x, None), lambda _, g: (g - g.mean(0, keepdims=True),))


def test_a_derivative_that_mixes_examples_is_an_error_when_it_is_asked_for_too_late(float64):
    """Of data alone, it was not needed; by the batch, it cannot be taken in parts."""

    def loss(w, x):
        return jnp.mean((centred_gradient(x) @ w) ** 2)

    assert_exact(loss, W, X)
    with pytest.raises(ab.InputError, match="must keep examples apart") as error:
        jax.grad(lambda x: ab.value_and_grad(loss, microbatch_size=4)(W, x)[0])(jnp.asarray(X))
    assert __file__ in str(error.value)


def test_a_sum_over_a_scan_that_starts_from_a_python_zero(float64):
    def loss(w, x):
        return lax.scan(lambda total, row: (total + jnp.tanh(row @ w), None), 0.0, x)[0]

    assert ab.read(loss, W, X).kind == "sum over 6 examples"
    assert_exact(loss, W, X)


def test_a_scan_that_is_nearly_a_sum(float64):
    """The controls: what is carried is used, or halved, or does not start from zero."""

    def used(w, x):
        return lax.scan(lambda total, row: (total + jnp.tanh(row @ w + total), None), 0.0, x)[0]

    def halved(w, x):
        return lax.scan(lambda total, row: (total / 2 + jnp.tanh(row @ w), None), 0.0, x)[0]

    def started(w, x):
        return lax.scan(lambda total, row: (total + jnp.tanh(row @ w), None), 1.5, x)[0]

    for loss in (used, halved, started):
        assert ab.read(loss, W, X).kind == "couples examples"
        assert_exact(loss, W, X, sizes=(4,))


def test_a_convolution_with_a_kernel_for_each_example(float64):
    def convolved(image, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(image[None], kernel, (1, 1), "SAME", dimension_numbers=numbers)[0]

    def loss(w, images):
        kernels = (images.mean((1, 2)) @ w).reshape(6, 3, 3, 2, 4)
        return jnp.mean(jax.vmap(convolved)(images, kernels) ** 2)

    w, images = np.sin(np.arange(144.0)).reshape(2, 72), np.cos(np.arange(192.0)).reshape(6, 4, 4, 2)
    assert ab.read(loss, w, images).passes == 1
    assert_exact(loss, w, images, sizes=(4,))


@pytest.mark.full
def test_a_long_chain_of_operations_on_positions(float64):
    def loss(w, x):
        positions = jnp.arange(6.0)
        for _ in range(700):
            positions = jnp.sin(positions) + 0.1
        return jnp.mean((x @ w) * positions)

    assert_exact(loss, W, X, sizes=(4,))


@pytest.mark.full
def test_a_thousand_terms_are_described_without_running_out_of_stack():
    def loss(w, x):
        total = jnp.zeros(())
        for number in range(1500):
            total = total + jnp.sum(w) * number
        return jnp.mean(x @ w) + total

    args = (W.astype(np.float32), X.astype(np.float32))
    assert ab.read(loss, *args).kind == "mean over 6 examples, plus a term of the parameters"


def fails_when_read(reader, node, states):
    raise IndexError("no such axis")


def fails_when_computed(reader, node, states):
    def run(microbatch):
        raise IndexError("no such axis")

    return RuleResult([states[0]], run=run)


def in_a_loop(w, x):
    return jnp.mean(lax.scan(lambda h, _: (jnp.sinh(h * w[None]), None), x, None, length=2)[0])


def in_a_checkpoint(w, x):
    return jnp.mean(jax.checkpoint(jnp.sinh)(x * w[None]) ** 2)


def by_itself(w, x):
    return jnp.mean(jnp.sinh(x * w[None]) ** 2)


@pytest.mark.parametrize("loss", [by_itself, in_a_loop, in_a_checkpoint])
@pytest.mark.parametrize("rule", [fails_when_read, fails_when_computed])
def test_a_rule_that_fails_is_told_and_the_gradient_is_exact(rule, loss, monkeypatch, float64):
    monkeypatch.setitem(RULES, "sinh", rule)
    with pytest.warns(ab.RuleFailedWarning, match=r"'sinh' failed \(IndexError: no such axis\)") as caught:
        assert_exact(loss, W, 0.1 * X)
    message = str(caught[0].message)
    assert f"{__file__}:{inspect.getsourcelines(loss)[1] + 1} in {loss.__name__}" in message
    assert "gradient is exact" in message and "computed from the full batch" in message and "report it" in message


def test_a_rule_that_fails_is_an_error_where_coupling_is(monkeypatch, float64):
    monkeypatch.setitem(RULES, "sinh", fails_when_computed)
    with pytest.raises(ab.CoupledError, match="the rule for the primitive 'sinh' failed"):
        ab.value_and_grad(by_itself, microbatch_size=2, on_coupled="error")(W, X)


def test_after_a_rule_fails_the_noise_is_not_that_of_the_first_reading(monkeypatch, float64):
    """Without the rule the loss looks across examples, and such a loss has no noise scale."""
    monkeypatch.setitem(RULES, "sinh", fails_when_computed)
    with pytest.raises(ab.CoupledError):
        ab.noise_scale(by_itself, microbatch_size=2)(W, 0.1 * X)


def test_an_error_of_the_loss_itself_is_not_taken_for_one_of_a_rule():
    def loss(w, x):
        h = x * w[None]
        return jnp.mean(h.at[:, np.array([0, 0])].multiply(h[:, :2]))

    with pytest.raises(NotImplementedError, match="scatter_mul gradients") as expected:
        jax.grad(loss)(W, X)
    with pytest.raises(NotImplementedError, match="scatter_mul gradients") as error:
        ab.grad(loss, microbatch_size=2)(W, X)
    assert str(error.value) == str(expected.value)
