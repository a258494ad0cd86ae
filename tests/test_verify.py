"""`verify`: right routes agree to rounding; each kind of wrong one is found, and its cause is named."""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from losses import LOSSES

import anybatch as ab
from anybatch import comparison, diagnosis
from anybatch.comparison import LeafDifference, Trial, difference
from anybatch.verify import DifferentGradientError, RouteCheck, Verification, verify
from anybatch.widening import WideLoss, widened

pytestmark = pytest.mark.thorough

CASES = {case.name: case for case in LOSSES}
READ_IT = "or leave reduction out: then anybatch reads the loss itself."

PARAMS = {"scale": jnp.float32(1.5), "w": jnp.asarray([0.3, -0.7, 1.1])}
BATCH = {
    "x": jnp.asarray(np.random.default_rng(0).normal(size=(10, 3)), jnp.float32),
    "mask": jnp.asarray([1, 1, 1, 1, 1, 1, 0, 1, 0, 1], bool),  # 4 + 3 + 1 of 8
}


def losses_of(params, batch):
    return (jnp.tanh(batch["x"] @ params["w"]) * params["scale"] - 0.5) ** 2


def mean_loss(params, batch):
    return jnp.mean(losses_of(params, batch))


def sum_loss(params, batch):
    return jnp.sum(losses_of(params, batch))


def masked_loss(params, batch):
    losses = losses_of(params, batch)
    return jnp.sum(jnp.where(batch["mask"], losses, jnp.zeros_like(losses))), jnp.sum(batch["mask"])


def masked_mean(params, batch):
    total, weight = masked_loss(params, batch)
    return total / weight.astype(total.dtype)


X = jnp.asarray([0.5, 1.25, -0.75, 2.5, -1.5, 0.3])


def line(w, x):
    return jnp.mean((w * x - 1) ** 2)


# Routes that agree.


@pytest.mark.parametrize("name", ["masked_mean", "token_mean", "custom_vjp"])
def test_right_declarations_agree(name):
    case = CASES[name]
    result = verify(case.loss, *case.problem(num_examples=10), reduction=case.reduction, microbatch_sizes=(3,))
    assert result.ok and result.diagnosis is None and result.raise_if_different() is result
    (route,) = result.routes
    assert result.dtype == "float64" and 0 <= route.gradient <= route.tolerance < 1e-13
    assert result.given_dtype == "float32" and 1e-9 < route.rounding <= route.expected_rounding < 1e-4


def test_a_loss_that_is_read_agrees():
    """Randomness and a ratio of sums too, with nothing declared."""

    def loss(params, batch, key):
        kept = batch["mask"] & jax.random.bernoulli(key, 0.7, batch["mask"].shape)
        return masked_mean(params, {**batch, "mask": kept})

    result = verify(loss, PARAMS, BATCH, jax.random.key(0), microbatch_sizes=(3,))
    assert result.raise_if_different().dtype == "float64"


def test_the_smallest_error_is_found_and_its_leaf_is_named(monkeypatch):
    """The control: a route that is off by 1e-12 in one leaf."""

    def off(fun, **options):
        right = ab.value_and_grad(fun, **options)

        def wrong(*args):
            value, gradient = right(*args)
            return value, {**gradient, "scale": gradient["scale"] * (1 + 1e-12)}

        return wrong

    monkeypatch.setattr(comparison, "value_and_grad", off)
    result = verify(mean_loss, PARAMS, BATCH, reduction="mean", microbatch_sizes=(3,))
    assert not result.ok
    assert result.routes[0].leaf == "params['scale']"
    assert result.routes[0].gradient == pytest.approx(1e-12, rel=0.01)
    assert [leaf.name for leaf in result.routes[0].leaves if not leaf.ok] == ["params['scale']"]
    assert result.diagnosis.startswith("No known cause explains it.")


def test_arguments_in_other_places():
    def loss(batch, v, w, *, power):
        return jnp.mean(jnp.abs(batch["x"] * w + v) ** power)

    result = verify(
        loss, {"x": X}, 0.25, 2.0, argnums=(2, 1), batch_argnums=0, reduction="mean", microbatch_sizes=4, power=3
    )
    assert result.ok
    assert [leaf.name for leaf in result.routes[0].leaves] == ["w", "v", "value"]


# Which sizes, how many examples.


def test_default_sizes_divide_or_do_not():
    result = verify(line, 2.0, jnp.tile(X, 2), reduction="mean")
    assert [route.name for route in result.routes] == [f"microbatch_size={size}" for size in (1, 4, 5, 12)]


@pytest.mark.parametrize("examples, names", [(1, [1]), (2, [1, 2]), (3, [1, 2, 3])])
def test_default_sizes_of_few_examples(examples, names):
    result = verify(line, 2.0, X[:examples], reduction="mean")
    assert result.ok
    assert [route.name for route in result.routes] == [f"microbatch_size={size}" for size in names]


@pytest.mark.parametrize("options, used", [({"sample": 7}, 7), ({"sample": 999}, 200), ({"microbatch_sizes": 50}, 101)])
def test_the_first_examples_are_used(options, used):
    """By default enough for microbatches of the sizes given."""
    result = verify(add_up, 1.0, jnp.arange(200.0), reduction="sum", **{"microbatch_sizes": 3, **options})
    assert (result.num_examples, result.batch_size) == (used, 200)


def test_at_most_64_examples_by_default():
    result = verify(line, 2.0, jnp.linspace(0.1, 1, 70), reduction="mean", microbatch_sizes=9)
    assert result.num_examples == 64
    assert str(result).startswith("64 examples (the first 64 of 70) in microbatches, against jax.value_and_grad")


def test_a_loss_that_takes_no_fewer_examples_says_so():
    def loss(w, x):
        return jnp.mean((w * x.reshape(35, 2)) ** 2)

    with pytest.raises(TypeError) as caught:
        verify(loss, 2.0, jnp.linspace(0.1, 1, 70), reduction="mean", microbatch_sizes=14)
    assert caught.value.__notes__[-1] == (
        "verify computed the loss for the first 64 of the 70 examples. If it takes no fewer, pass sample=70."
    )


# Diagnoses: declarations.


def test_a_mean_declared_as_a_sum():
    result = verify(mean_loss, PARAMS, BATCH, reduction="sum", microbatch_sizes=(3, 5))
    assert not result.ok and result.given_dtype is None
    assert result.diagnosis == (
        'The loss is a mean over its examples, and reduction="sum" was declared. With microbatch_size=5 the gradient '
        f'is 2 times too large, for 2 microbatches. With reduction="mean" it agrees.\nPass reduction="mean", {READ_IT}'
    )


def test_a_sum_declared_as_a_mean_that_is_ragged():
    result = verify(sum_loss, PARAMS, BATCH, reduction="mean", microbatch_sizes=3)
    assert result.diagnosis == (
        'The loss is a sum over its examples, and reduction="mean" was declared. With reduction="sum" it agrees.\n'
        f'Pass reduction="sum", {READ_IT}'
    )


def test_a_wrong_declaration_does_no_harm_to_one_microbatch():
    """The control: at the full batch, sum and mean are the same."""
    assert verify(sum_loss, PARAMS, BATCH, reduction="mean", microbatch_sizes=10).ok


@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_a_mean_of_means(declared):
    result = verify(masked_mean, PARAMS, BATCH, reduction=declared, microbatch_sizes=4)
    assert result.diagnosis == (
        "A mean of means over unequal counts: of 3 microbatches the full batch weighs 0.500, 0.375, 0.125, and of its "
        "examples they have 0.400, 0.400, 0.200. The loss divides by something other than the number of examples, as "
        f'tokens or the unmasked.\nReturn (total, weight) and pass reduction="weighted", {READ_IT}'
    )


def test_the_same_declared_as_weighted():
    """The control."""
    assert verify(masked_loss, PARAMS, BATCH, reduction="weighted", microbatch_sizes=4).ok


def test_a_mean_of_means_with_one_parameter():
    """Fewer equations than weights at one point: several are taken."""

    def loss(w, batch):
        return jnp.sum((w * batch["x"] - 1) ** 2 * batch["mask"]) / jnp.sum(batch["mask"])

    batch = {"x": X, "mask": jnp.asarray([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])}
    result = verify(loss, 2.0, batch, reduction="mean", microbatch_sizes=2)
    assert "the full batch weighs 0.500, 0.250, 0.250," in result.diagnosis


def test_a_mean_of_means_whose_weights_move_with_the_parameters():
    """No weights fit these gradients; the reading knows."""

    def loss(params, batch):
        losses, weights = losses_of(params, batch), jax.nn.softplus(batch["x"] @ params["w"])
        return jnp.sum(losses * weights) / jnp.sum(weights)

    result = verify(loss, PARAMS, BATCH, reduction="mean", microbatch_sizes=4)
    assert result.diagnosis.startswith("A mean of means over unequal counts: the loss is a ratio of sums")


def test_a_regulariser_in_a_sum():
    def loss(params, batch):
        return sum_loss(params, batch) + 0.01 * jnp.sum(params["w"] ** 2)

    result = verify(loss, PARAMS, BATCH, reduction="sum", microbatch_sizes=3)
    assert result.diagnosis.startswith("A term that does not depend on the examples, such as a regulariser, is counted")
    leaves = {leaf.name: leaf.ok for leaf in result.routes[0].leaves}
    assert not leaves["params['w']"] and leaves["params['scale']"]


@pytest.mark.parametrize("name", ["total", "weight"])
def test_heads_that_are_no_sums(name):
    def loss(w, batch):
        x, mask = batch
        total, weight = jnp.sum(w * x * mask), jnp.sum(mask)
        return (total / weight, weight) if name == "total" else (total, weight / x.shape[0])

    batch = jnp.asarray([1.0, 0.5, 0.5, 0.25, 0.75, 0.5]), jnp.asarray([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    numbers = {"total": ("0.5625", "1.5"), "weight": ("0.666667", "2")}[name]
    result = verify(loss, 1.0, batch, reduction="weighted", microbatch_sizes=2)
    assert result.diagnosis.startswith(
        f'With reduction="weighted" the loss returns two sums over the examples, and its {name} is none: '
        f"it is {numbers[0]} for the batch, and {numbers[1]} added up over microbatches of 2.\n"
    )


# Diagnoses: coupling.


def batch_normalised(params, batch):
    hidden = batch["x"] @ params["w"]
    hidden = hidden - jnp.mean(hidden)
    return jnp.mean(jnp.tanh(hidden) ** 2) * params["scale"]


def test_a_loss_that_looks_across_examples_is_told_its_line():
    lines, first = inspect.getsourcelines(batch_normalised)
    number = first + next(i for i, text in enumerate(lines) if "- jnp.mean" in text)
    result = verify(batch_normalised, PARAMS, BATCH, reduction="mean", microbatch_sizes=4)
    assert result.diagnosis.startswith("The loss looks across examples, which no mean does:\n")
    assert f"test_verify.py:{number} (sub): " in result.diagnosis
    assert result.diagnosis.endswith(diagnosis.ACROSS)
    assert verify(batch_normalised, PARAMS, BATCH, microbatch_sizes=4).ok


def test_a_loss_that_looks_across_examples_and_cannot_be_read(monkeypatch):
    def read(*_, **__):
        raise ValueError

    monkeypatch.setattr(diagnosis, "read", read)
    result = verify(batch_normalised, PARAMS, BATCH, reduction="mean", microbatch_sizes=4)
    assert "the gradient of the full batch is no combination of those of its microbatches" in result.diagnosis


# Diagnoses: randomness.


def dropout(params, batch, key):
    losses = losses_of(params, batch)
    return jnp.mean(losses * jax.random.bernoulli(key, 0.5, losses.shape).astype(losses.dtype))


def test_a_key_that_all_microbatches_share():
    result = verify(dropout, PARAMS, BATCH, jax.random.key(0), reduction="mean", microbatch_sizes=5)
    assert result.diagnosis.startswith("Randomness: params['scale'] of the full batch depends on a key")
    assert "all draw the same numbers" in result.diagnosis


@pytest.mark.parametrize("size", [5, 10])
def test_a_key_for_each_microbatch(size):
    key = jax.random.PRNGKey(0)
    result = verify(dropout, PARAMS, BATCH, key, reduction="mean", rng_argnums=2, microbatch_sizes=size)
    assert "each microbatch draws its own numbers. So it is equal in distribution only" in result.diagnosis


def test_a_key_that_is_closed_over():
    key = jax.random.key(0)
    result = verify(lambda p, b: dropout(p, b, key), PARAMS, BATCH, reduction="mean", microbatch_sizes=5)
    assert "from a key that is not among its arguments" in result.diagnosis


def test_a_key_that_the_gradient_does_not_depend_on_is_not_blamed():
    """The control: the numbers are drawn for all examples alike, and the declaration is wrong."""

    def loss(params, batch, key):
        return sum_loss(params, batch) * jax.random.uniform(key)

    result = verify(loss, PARAMS, BATCH, jax.random.key(0), reduction="mean", microbatch_sizes=5)
    assert result.diagnosis.startswith("The loss is a sum over its examples")


# Diagnoses: dtypes.


def add_up(w, x):
    return jnp.sum(w * x)


def test_a_sum_in_bfloat16_is_rounding():
    ones = jnp.ones(1024, jnp.bfloat16)
    options = {"reduction": "sum", "microbatch_sizes": 1, "sample": 1024}
    result = verify(add_up, jnp.bfloat16(1), ones, accumulator_dtype=None, **options)
    assert not result.ok
    assert result.routes[0].gradient == 0 and result.routes[0].rounding == 0.75
    assert result.diagnosis == (
        "Rounding: in float64 it is the same gradient; in bfloat16 w is off by 7.5e-01, "
        "and 6.3e-02 was to be expected.\n"
        "It is the sum over the microbatches: with accumulator_dtype=jnp.float32 it agrees."
    )
    assert verify(add_up, jnp.bfloat16(1), ones, **options).ok


def insists_on_bfloat16(params, batch):
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch["x"]))
    losses = jax.nn.softplus(narrow[1] @ narrow[0]["w"]).astype(jnp.float32)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


def test_a_loss_that_insists_on_bfloat16_is_compared_in_float64():
    batch = {"x": BATCH["x"], "mask": jnp.ones(10)}
    result = verify(insists_on_bfloat16, PARAMS, batch, reduction="weighted", microbatch_sizes=4)
    assert result.ok and result.dtype == "float64" and result.given_dtype == "bfloat16"
    assert result.notes[0] == "The loss computes in bfloat16; all of it was done in float64 to compare the routes."
    assert result.routes[0].gradient < 1e-14 < 1e-4 < result.routes[0].rounding


def test_an_error_that_bfloat16_would_hide_is_found():
    """A mean of means whose counts differ by little: too little to be told from rounding in bfloat16."""

    def mean_of_means(params, batch):
        total, weight = insists_on_bfloat16(params, batch)
        return total / weight

    batch = {"x": BATCH["x"], "mask": 1 + 0.01 * jnp.arange(10.0)}
    result = verify(mean_of_means, PARAMS, batch, reduction="mean", microbatch_sizes=4)
    assert result.diagnosis.startswith("A mean of means")
    assert result.routes[0].gradient < 0.05 < math.sqrt(jnp.finfo(jnp.bfloat16).eps)


def test_a_loss_that_does_not_take_float64():
    """Under strict promotion a float32 constant and float64 do not mix; the loss is traced as given then."""

    def loss(w, x):
        return jnp.mean((w * x - jnp.float32(1)) ** 2)

    result = verify(loss, jnp.float32(2), X, reduction="mean", microbatch_sizes=4)
    assert result.ok and result.dtype == "float64" and "computes in float32" in result.notes[0]
    assert not verify(loss, jnp.float32(2), X, reduction="sum", microbatch_sizes=4).ok


def total_of_kernel(x):
    """A sum that has a function inside, as a kernel has: it is not known how to compute it in another dtype."""
    return lax.reduce(x, np.float32(0), lambda a, b: a + b, (0,))


def test_what_cannot_be_computed_in_float64_is_compared_as_given():
    def loss(w, batch):
        x, weights = batch
        return jnp.sum((w * x) ** 2 * weights), total_of_kernel(lax.stop_gradient(weights))

    weights = jnp.asarray(np.random.default_rng(0).uniform(0, 1, 64), jnp.float32)
    result = verify(loss, jnp.float32(2), (weights, weights), reduction="weighted", microbatch_sizes=7)
    assert result.ok and result.dtype == "float32" and result.given_dtype is None
    assert result.notes == ("Not compared in float64: the loss has reduce, in dtypes of their own.",)


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
    """At its minimum, the gradient of a fit is rounding and nothing else."""
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
    assert result.notes[0].startswith("In bfloat16 the gradient of the full batch is off by ")
    assert result.notes[0].endswith(" itself, at w.")


# Numbers that are none, and zeros.


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
    """A bias of all logits, which a softmax does not see, beside weights that it does."""

    def loss(params, batch):
        logits = batch["x"] @ params["w"] + params["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    params = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(3, 3)), jnp.float32), "bias": jnp.ones((1, 1))}
    assert verify(loss, params, BATCH, reduction="mean", microbatch_sizes=(3,)).ok
    zero = verify(lambda w, x: 0 * line(w, x), 2.0, X, reduction="mean", microbatch_sizes=4)
    assert zero.ok and zero.routes[0].gradient == 0


# aux.


def with_aux(w, x):
    aux = {"rows": w * x, "count": jnp.float32(x.shape[0]), "mean": jnp.mean(x), "largest": jnp.max(x)}
    return line(w, x), aux


def test_aux_is_compared():
    declared = {"rows": None, "count": "sum", "mean": "mean", "largest": "last"}
    options = {"has_aux": True, "reduction": "mean", "microbatch_sizes": 4}
    result = verify(with_aux, 2.0, X, aux_reduction=declared, **options)
    assert result.ok and result.routes[0].aux < 1e-14
    assert [leaf.name for leaf in result.routes[0].leaves][2:] == ["aux['count']", "aux['mean']", "aux['rows']"]

    result = verify(with_aux, 2.0, X, aux_reduction={**declared, "count": "mean"}, **options)
    assert not result.ok and result.routes[0].aux == pytest.approx(4 / 9)
    assert result.diagnosis == (
        "The gradient is right, and aux['count'] is not: it is a sum over the examples, and "
        'aux_reduction="mean" was declared. With aux_reduction="sum" it agrees.\n'
        f"Pass that for it, {READ_IT}"
    )

    result = verify(with_aux, 2.0, X, aux_reduction={**declared, "largest": "mean"}, **options)
    assert "aux['largest'] is not: over the examples it is neither a mean nor a sum." in result.diagnosis
    assert verify(with_aux, 2.0, X, has_aux=True, microbatch_sizes=4).ok


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


# What is returned.


def example(ok=True, aux=None):
    leaf = LeafDifference("w['<a>']", 0.5, 1e-14)
    routes = (
        RouteCheck("microbatch_size=1", True, 0.0, "w['<a>']", 1e-14, 2e-16, aux, (leaf,), 1e-7, 2e-6),
        RouteCheck("microbatch_size=10", ok, math.inf, "v", 1e-14, 0.0, aux, (leaf,), 1e-7, 2e-6),
    )
    return Verification(ok, routes, 10, 10, "float64", "float32", ("A note.",), None if ok else "Because.\nDo this.")


def test_it_prints_as_a_table():
    assert str(example()) == repr(example())
    assert str(example(ok=False, aux=0.25)) == (
        "10 examples (all) in microbatches, against jax.value_and_grad of them at once: "
        "relative differences in float64\n\n"
        "route               gradient  worst at  allowed    value      aux  in float32  allowed\n"
        "microbatch_size=1          0  w['<a>']  1.0e-14  2.0e-16  2.5e-01     1.0e-07  2.0e-06       same\n"
        "microbatch_size=10       inf  v         1.0e-14        0  2.5e-01     1.0e-07  2.0e-06  DIFFERENT\n"
        "\n"
        "A note.\n"
        "Because.\n"
        "Do this."
    )
    assert str(example()).endswith("\nAll routes give the gradient of the full batch.")


def test_it_renders_in_a_notebook():
    text = example(ok=False)._repr_html_()
    assert "<td>w[&#x27;&lt;a&gt;&#x27;]</td>" in text and "<a>" not in text
    assert text.count("<tr") == 3 and text.count("<tr style") == 1
    assert "<p>Because.<br>Do this.</p>" in text


def test_it_raises_where_routes_differ():
    assert example().raise_if_different() == example()
    with pytest.raises(DifferentGradientError) as caught:
        example(ok=False).raise_if_different()
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, ab.AnybatchError)
    assert str(caught.value) == str(example(ok=False))


def test_it_holds_no_arrays():
    result = verify(line, 2.0, X, reduction="mean", microbatch_sizes=4)
    leaves = jax.tree.leaves(dataclasses.asdict(result))
    assert {type(leaf) for leaf in leaves} <= {bool, int, float, str}
    assert len(leaves) > 15
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.ok = False


# Bad input.


def text_of(make):
    with pytest.raises(ab.InputError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize("sizes", [0, (2, -1), "8", 2.5, (), True, None])
def test_microbatch_sizes(sizes):
    given = () if sizes is None else sizes
    assert text_of(lambda: verify(line, 2.0, X, reduction="mean", microbatch_sizes=given)) == (
        f"microbatch_sizes must be whole numbers of at least 1, got microbatch_sizes={given!r}.\n"
        "Pass the sizes to try, e.g. microbatch_sizes=(1, 8, 24), or leave it out."
    )


@pytest.mark.parametrize("sample", [0, -1, 2.5, "all", True])
def test_sample(sample):
    assert text_of(lambda: verify(line, 2.0, X, reduction="mean", sample=sample)) == (
        f"sample must be a whole number of at least 1, or None, got sample={sample!r}.\n"
        "Pass how many examples of the batch to use, e.g. sample=32, or leave it out."
    )


def test_an_empty_batch():
    assert text_of(lambda: verify(line, 2.0, X[:0], reduction="mean")) == (
        "The batch needs at least one example, got arrays of 0 examples.\nPass a batch as you would train on."
    )


def test_inside_jit():
    text = text_of(lambda: jax.jit(lambda w: verify(line, w, X, reduction="mean"))(2.0))
    assert text == (
        "verify compares values, so its arguments must have some, got w inside a jit, grad or vmap.\n"
        "Call it outside, once, before training: ab.verify(loss, params, batch).raise_if_different()."
    )


def test_meshes_are_not_available():
    with pytest.raises(ab.NotAvailableError) as caught:
        verify(line, 2.0, X, reduction="mean", meshes=["any"])
    assert str(caught.value) == (
        "meshes= is not available in this version of anybatch.\nLeave it out; the routes are compared on one device."
    )


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: verify(3.0, 2.0, X), "The loss must be a function, got fun=3.0."),
        (lambda: verify(line, 2.0, X, reduction="median"), "reduction must be one of"),
        (lambda: verify(line, 2.0, X, batch_argnums=0), "must not overlap"),
        (lambda: verify(line, 2.0, x=X), "Pass that argument by position"),
        (lambda: verify(lambda w, x: w * x, 2.0, X), "The loss must return a scalar"),
        (lambda: verify(line, 2.0, X, reduction="weighted"), "the loss must return a pair (total, weight)"),
        (lambda: verify(with_aux, 2.0, X, reduction="mean", has_aux=True), "needs an aux_reduction"),
    ],
)
def test_what_value_and_grad_refuses_is_refused(call, text):
    assert text in text_of(call)
