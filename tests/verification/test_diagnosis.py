"""`verify`: each kind of wrong route is found, and its cause is named."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from cases.verified import BATCH, PARAMS, READ_IT, X, losses_of, masked_loss, masked_mean, mean_loss, sum_loss

from anybatch.jaxprs import in_place
from anybatch.verification import diagnosis
from anybatch.verification.verify import verify

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


@pytest.mark.full
@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_a_mean_of_means(declared):
    result = verify(masked_mean, PARAMS, BATCH, reduction=declared, microbatch_sizes=4)
    assert result.diagnosis == (
        "A mean of means over unequal counts: in the full batch, 3 microbatches have the weights 0.500, 0.375, 0.125, "
        "and they have 0.400, 0.400, 0.200 of the examples. The loss divides by something other than the number of "
        "examples, such as the number of tokens or of unmasked entries.\n"
        f'Return (total, weight) and pass reduction="weighted", {READ_IT}'
    )


def test_the_same_declared_as_weighted():
    """The control."""
    assert verify(masked_loss, PARAMS, BATCH, reduction="weighted", microbatch_sizes=4).ok


def test_a_mean_of_means_with_one_parameter():
    """One point gives fewer equations than there are weights, so several are taken."""

    def loss(w, batch):
        return jnp.sum((w * batch["x"] - 1) ** 2 * batch["mask"]) / jnp.sum(batch["mask"])

    batch = {"x": X, "mask": jnp.asarray([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])}
    result = verify(loss, 2.0, batch, reduction="mean", microbatch_sizes=2)
    assert "microbatches have the weights 0.500, 0.250, 0.250," in result.diagnosis


def test_a_mean_of_means_whose_weights_move_with_the_parameters():
    """No constant weights fit these gradients, but the reading tells."""

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
def test_a_total_or_weight_that_is_no_sum(name):
    def loss(w, batch):
        x, mask = batch
        total, weight = jnp.sum(w * x * mask), jnp.sum(mask)
        return (total / weight, weight) if name == "total" else (total, weight / x.shape[0])

    batch = jnp.asarray([1.0, 0.5, 0.5, 0.25, 0.75, 0.5]), jnp.asarray([1.0, 1.0, 0.0, 1.0, 0.0, 1.0])
    numbers = {"total": ("0.5625", "1.5"), "weight": ("0.666667", "2")}[name]
    result = verify(loss, 1.0, batch, reduction="weighted", microbatch_sizes=2)
    assert result.diagnosis.startswith(
        f'With reduction="weighted" the loss must return two sums over the examples. Its {name} is not one: '
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
    assert result.diagnosis.startswith("The loss looks across examples, so it is not a mean over them:\n")
    assert f"test_diagnosis.py:{number} (sub): " in result.diagnosis
    assert result.diagnosis.endswith(diagnosis.ACROSS)
    assert verify(batch_normalised, PARAMS, BATCH, microbatch_sizes=4).ok


def test_a_loss_that_looks_across_examples_and_cannot_be_read(monkeypatch):
    def read(*_, **__):
        raise ValueError

    monkeypatch.setattr(diagnosis, "read", read)
    result = verify(batch_normalised, PARAMS, BATCH, reduction="mean", microbatch_sizes=4)
    assert "no weights combine the gradients of its microbatches to that of the full batch" in result.diagnosis


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
    assert "each microbatch draws its own numbers. So the results agree in distribution only" in result.diagnosis


def test_a_key_that_is_closed_over():
    key = jax.random.key(0)
    result = verify(lambda p, b: dropout(p, b, key), PARAMS, BATCH, reduction="mean", microbatch_sizes=5)
    assert "from a key that is not among its arguments" in result.diagnosis


def test_a_key_that_the_gradient_does_not_depend_on_is_not_blamed():
    """The control: one number is drawn for all examples, and the declaration is wrong."""

    def loss(params, batch, key):
        return sum_loss(params, batch) * jax.random.uniform(key)

    result = verify(loss, PARAMS, BATCH, jax.random.key(0), reduction="mean", microbatch_sizes=5)
    assert result.diagnosis.startswith("The loss is a sum over its examples")


def test_nothing_is_advised_that_is_wrong_too(monkeypatch):
    """Here every accumulation swaps two gradients, whatever is declared: only the full batch is right."""

    def swapped(in_place_fun, pure, *arrays):
        first, second, *rest = pure(*arrays)
        return [second, first, *rest]

    monkeypatch.setattr(in_place, "call", swapped)
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0, -1.0])}
    x = jnp.arange(1.0, 9.0).reshape(4, 2)

    def loss(params, x):
        return jnp.mean(jnp.sum(x * params["a"][None] + jnp.sin(x * params["b"][None]), axis=1))

    read = verify(loss, params, x, microbatch_sizes=2)
    assert not read.ok
    assert "Until then pass microbatch_size=None, which computes the full batch without microbatches." in read.diagnosis
    assert "reduction=" not in read.diagnosis
    declared = verify(loss, params, x, microbatch_sizes=2, reduction="mean")
    assert not declared.ok
    assert "leave reduction out" not in declared.diagnosis.lower()
