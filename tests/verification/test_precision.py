"""`verify`: rounding is told from an error, in every dtype."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import mesh_of
from cases.verified import BATCH, CASES, PARAMS, X, add_up, line, masked_mean
from jax import lax

from anybatch.verification.comparison import Trial, WideLoss, difference, widened
from anybatch.verification.verify import verify

# Diagnoses: dtypes.


def test_a_sum_in_bfloat16_is_rounding():
    ones = jnp.ones(1024, jnp.bfloat16)
    options = {"reduction": "sum", "microbatch_sizes": 1, "sample": 1024}
    result = verify(add_up, jnp.bfloat16(1), ones, accumulator_dtype=None, **options)
    assert not result.ok
    assert result.routes[0].gradient == 0 and result.routes[0].rounding == 0.75
    assert result.diagnosis == (
        "Rounding: in float64 the gradients agree. In bfloat16, w is off by 7.5e-01, and 6.3e-02 is expected.\n"
        "The cause is the sum over the microbatches: with accumulator_dtype=jnp.float32 it agrees."
    )
    assert verify(add_up, jnp.bfloat16(1), ones, **options).ok


def test_the_worst_rounding_is_named_with_a_mesh_too():
    """Two devices add up half as many microbatches each, and lose less."""
    ones = jnp.ones(1024, jnp.bfloat16)
    options = {"reduction": "sum", "microbatch_sizes": 1, "sample": 1024, "meshes": mesh_of(2)}
    result = verify(add_up, jnp.bfloat16(1), ones, accumulator_dtype=None, **options)
    assert [route.rounding for route in result.routes] == [0.75, 0.5]
    assert "w is off by 7.5e-01" in result.diagnosis


def insists_on_bfloat16(params, batch):
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch["x"]))
    losses = jax.nn.softplus(narrow[1] @ narrow[0]["w"]).astype(jnp.float32)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def test_a_loss_that_insists_on_bfloat16_is_compared_in_float64():
    batch = {"x": BATCH["x"], "mask": jnp.ones(10)}
    result = verify(insists_on_bfloat16, PARAMS, batch, reduction="weighted", microbatch_sizes=4)
    assert result.ok and result.dtype == "float64" and result.given_dtype == "bfloat16"
    assert result.notes[0] == "The loss computes in bfloat16; to compare the routes, all of it was computed in float64."
    assert result.routes[0].gradient < 1e-14 < 1e-4 < result.routes[0].rounding


def test_an_error_that_bfloat16_would_hide_is_found():
    """A mean of means whose counts differ so little that in bfloat16 it looks like rounding."""

    def mean_of_means(params, batch):
        total, weight = insists_on_bfloat16(params, batch)
        return total / weight

    batch = {"x": BATCH["x"], "mask": 1 + 0.01 * jnp.arange(10.0)}
    result = verify(mean_of_means, PARAMS, batch, reduction="mean", microbatch_sizes=4)
    assert result.diagnosis.startswith("A mean of means")
    assert result.routes[0].gradient < 0.05 < math.sqrt(jnp.finfo(jnp.bfloat16).eps)


def test_a_loss_that_does_not_take_float64():
    """Under strict promotion a float32 constant and float64 do not mix, so the loss is traced as given."""

    def loss(w, x):
        return jnp.mean((w * x - jnp.float32(1)) ** 2)

    result = verify(loss, jnp.float32(2), X, reduction="mean", microbatch_sizes=4)
    assert result.ok and result.dtype == "float64" and "computes in float32" in result.notes[0]
    assert not verify(loss, jnp.float32(2), X, reduction="sum", microbatch_sizes=4).ok


def total_of_kernel(x):
    """A sum with a function inside, as kernels have: it cannot be computed in another dtype."""
    return lax.reduce(x, np.float32(0), lambda a, b: a + b, (0,))


def test_what_cannot_be_computed_in_float64_is_compared_as_given():
    def loss(w, batch):
        x, weights = batch
        return jnp.sum((w * x) ** 2 * weights), total_of_kernel(lax.stop_gradient(weights))

    weights = jnp.asarray(np.random.default_rng(0).uniform(0, 1, 64), jnp.float32)
    result = verify(loss, jnp.float32(2), (weights, weights), reduction="weighted", microbatch_sizes=7)
    assert result.ok and result.dtype == "float32" and result.given_dtype is None
    assert result.notes == ("Not compared in float64: the loss uses reduce, which cannot be computed in float64.",)


def test_float64_that_fails_is_said(monkeypatch):
    def fail(self):
        raise RuntimeError("no such dtype here\nand more")

    monkeypatch.setattr(Trial, "to_float64", fail)
    result = verify(line, 2.0, X, reduction="mean", microbatch_sizes=4)
    assert result.ok and result.dtype == "float32"
    assert result.notes == ("Not compared in float64: it raised RuntimeError: no such dtype here.",)
    wrong = verify(line, 2.0, X, reduction="sum", microbatch_sizes=4)
    assert wrong.diagnosis.startswith("The loss is a mean over its examples")


def test_with_x64_there_is_one_precision(float64):
    result = verify(line, 2.0, X.astype(jnp.float64), reduction="mean", microbatch_sizes=4)
    assert result.ok and result.dtype == "float64" and result.given_dtype is None and result.notes == ()


def test_a_gradient_that_rounding_determines_is_called_so(float64):
    """At the minimum of a fit, the gradient is nothing but rounding."""
    x = np.random.default_rng(0).normal(size=(12, 3))
    y = x @ np.ones(3) + np.random.default_rng(1).normal(size=12)
    best = jnp.asarray(np.linalg.lstsq(x, y, rcond=None)[0])
    batch = {"x": jnp.asarray(x), "y": jnp.asarray(y)}

    def fit(w, batch):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    result = verify(fit, best, batch, reduction="mean", microbatch_sizes=(1, 5))
    assert not result.ok
    assert result.diagnosis.startswith("Rounding: this gradient is not determined in float64.")
    assert verify(fit, best + 0.01, batch, reduction="mean", microbatch_sizes=(1, 5)).ok


def test_a_full_batch_that_is_off_itself_is_noted():
    x = jnp.concatenate([jnp.ones(1), jnp.full(511, 2.0**-9)]).astype(jnp.bfloat16)

    def loss(w, x):
        return lax.scan(lambda total, x: (total + w * x, None), jnp.zeros_like(w), x)[0]

    result = verify(loss, jnp.bfloat16(1), x, reduction="sum", microbatch_sizes=512, sample=512)
    assert result.notes[0].startswith("In bfloat16 the gradient of the full batch itself is off by ")
    assert result.notes[0].endswith(", at w.")


# NaN, infinities and zeros.


@pytest.mark.parametrize(
    "actual, expected, result",
    [
        ([1.0, 2.0], [1.0, 2.0], 0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([math.nan, 2.0], [math.nan, 2.0], 0),
        ([math.nan, 2.2], [math.nan, 2.0], 0.1),
        ([1.0, math.nan], [1.0, 2.0], math.inf),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([math.inf, 2.0], [math.inf, 2.0], 0),
        ([math.inf, 2.0], [-math.inf, 2.0], math.inf),
        ([0.0, 0.0], [0.0, 0.0], 0),
        ([0.0, 1e-300], [0.0, 0.0], math.inf),
        ([1.0], [1.0, 1.0], math.inf),
        ([], [], 0),
    ],
)
def test_relative_difference(actual, expected, result):
    assert difference(np.asarray(actual), np.asarray(expected)) == pytest.approx(result)


def test_a_difference_below_the_floor_is_relative_to_it():
    assert difference(np.asarray([2e-9]), np.asarray([1e-9]), floor=1e-3) == pytest.approx(1e-6)


def test_what_is_not_a_number_in_both_is_the_same():
    result = verify(lambda w, x: jnp.mean(w * jnp.log(x)), 1.0, X, reduction="mean", microbatch_sizes=4)
    assert result.ok
    assert result.notes[0].startswith("The gradient of the full batch itself is not finite")


def test_what_is_not_a_number_in_a_microbatch_only_is_different():
    batch = {**BATCH, "mask": jnp.arange(10) > 4}
    result = verify(masked_mean, PARAMS, batch, reduction="mean", microbatch_sizes=5)
    assert result.routes[0].value == math.inf and not result.ok


def test_a_gradient_that_is_zero_but_for_rounding():
    """A bias added to all logits, which a softmax ignores, beside weights that matter."""

    def loss(params, batch):
        logits = batch["x"] @ params["w"] + params["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)), jnp.float32), "bias": jnp.ones((1, 1))}
    assert verify(loss, params, BATCH, reduction="mean", microbatch_sizes=(3,)).ok
    zero = verify(lambda w, x: 0 * line(w, x), 2.0, X, reduction="mean", microbatch_sizes=4)
    assert zero.ok and zero.routes[0].gradient == 0


# The loss in double precision.


def control_flow(dtype):
    """A scan, a while loop, a cond, a scatter, a sort, and custom derivatives with integers, all in one dtype."""

    def loss(w, batch):
        w, x, ids = w.astype(dtype), batch["x"].astype(dtype), batch["ids"]
        table = jnp.zeros((4, 1), dtype).at[ids].add(x[:, None]) * w
        x, _ = lax.scan(lambda carry, step: (jnp.sin(carry * step), None), x, jnp.asarray([0.5, 1.5], dtype))
        _, x = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * jnp.asarray(0.75, dtype)), (0, x))
        x = lax.cond(x[0] > 0, lambda x: jnp.cos(x), lambda x: x * x, x) * w
        x = jnp.sort(jax.checkpoint(jax.nn.silu)(x)) + jax.nn.relu(x) + scaled(x, ids) + doubled(x, ids)
        return jnp.sum(x) + jnp.sum(table)

    return loss


@jax.custom_jvp
def scaled(x, ids):
    return x * ids.astype(x.dtype)


@scaled.defjvp
def _(primals, tangents):
    x, ids = primals
    return scaled(x, ids), 3 * tangents[0] * ids.astype(x.dtype)


@jax.custom_vjp
def doubled(x, ids):
    return x * ids.astype(x.dtype)


doubled.defvjp(lambda x, ids: (doubled(x, ids), ids), lambda ids, g: (2 * g * ids.astype(g.dtype), None))


@pytest.mark.full
@pytest.mark.parametrize("traces_given", [False, True])
def test_a_loss_that_insists_on_bfloat16_becomes_the_one_that_insists_on_float64(traces_given):
    problem = jnp.float32(1.5), {"x": X, "ids": jnp.asarray([0, 1, 3, 1, 2, 0])}
    narrow = jax.value_and_grad(control_flow(jnp.bfloat16))(*problem)
    wide_loss = WideLoss(control_flow(jnp.bfloat16), problem, {})
    assert wide_loss.recomputed and not wide_loss.traces_given
    wide_loss.traces_given = traces_given
    with jax.enable_x64(True):
        problem = jax.tree.map(widened, problem)
        actual = jax.jit(jax.value_and_grad(wide_loss))(*problem)
        expected = jax.jit(jax.value_and_grad(control_flow(jnp.float64)))(*problem)
    assert not wide_loss.narrow
    np.testing.assert_allclose(actual, expected, rtol=1e-14)
    assert abs(float(narrow[1]) / float(expected[1]) - 1) > 1e-4  # the control


@pytest.mark.parametrize("traces_given", [False, True])
@pytest.mark.parametrize("name", ["token_mean", "scanned_layers_remat", "custom_vjp", "weight_of_params"])
def test_losses_in_float64(name, traces_given):
    case = CASES[name]
    problem = case.problem(num_examples=4, dtype=jnp.bfloat16)
    wide_loss = WideLoss(case.oracle, problem, {})
    assert not wide_loss.recomputed  # these take float64 as they are
    wide_loss.recomputed, wide_loss.traces_given = True, traces_given
    with jax.enable_x64(True):
        problem = jax.tree.map(widened, problem)
        actual, expected = (jax.tree.leaves(jax.jit(jax.grad(f))(*problem)) for f in (wide_loss, case.oracle))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-15)
