"""Options are declared once, with the defaults that the signatures of the public functions show."""

import dataclasses
import inspect

import jax.numpy as jnp
import pytest

import anybatch as ab
from anybatch.call.options import Options
from anybatch.per_example.options import PerExampleOptions, Wants


def loss(w, x):
    return jnp.mean((w * x) ** 2)


def defaults_of(record):
    """The fields of a dataclass of options that have a default."""
    return {
        field.name: field.default
        for field in dataclasses.fields(record)
        if field.default is not dataclasses.MISSING and field.init
    }


def parameters_of(fun):
    """The parameters of a public function that are options, with their defaults."""
    parameters = dict(inspect.signature(fun).parameters)
    del parameters["fun"]
    return {name: parameter.default for name, parameter in parameters.items()}


def test_the_defaults_of_options_are_those_of_value_and_grad():
    internal = {"noise", "maps"}  # set by `noise_scale`, `train_step` and `map_batch`, not by users
    declared = defaults_of(Options)
    assert parameters_of(ab.value_and_grad) == {name: value for name, value in declared.items() if name not in internal}
    assert internal < set(declared)
    assert parameters_of(ab.map_batch).items() <= declared.items()


# What differs on purpose: clipping is for privacy, so gradients that are not finite must not spoil the sum.
DIFFERENT = {ab.clipped_grad: {"nan_safe": True, "clip_norm": inspect.Parameter.empty}}


@pytest.mark.parametrize(
    "fun", [ab.per_example_grads, ab.per_example_norms, ab.clipped_grad], ids=lambda fun: fun.__name__
)
def test_the_defaults_of_per_example_options_are_those_of_the_functions(fun):
    declared = defaults_of(PerExampleOptions)
    actual, different = parameters_of(fun), DIFFERENT.get(fun, {})
    assert set(actual) <= set(declared)
    assert {name: value for name, value in actual.items() if value != declared[name]} == different


def test_every_public_option_of_examples_belongs_to_some_function():
    """A field that no function takes would be an option that nobody can set."""
    taken = {
        name for fun in (ab.per_example_grads, ab.per_example_norms, ab.clipped_grad) for name in parameters_of(fun)
    }
    own = {field.name for field in dataclasses.fields(PerExampleOptions)} - {
        field.name for field in dataclasses.fields(Options)
    }
    assert own - taken == {"wants"}


@pytest.mark.parametrize(
    "wrap",
    [
        ab.value_and_grad,
        ab.grad,
        ab.per_example_grads,
        ab.per_example_norms,
        lambda fun, **options: ab.clipped_grad(fun, clip_norm=1.0, **options),
        lambda fun, **options: ab.clipped_value_and_grad(fun, clip_norm=1.0, **options),
        ab.noise_scale,
        lambda fun, **options: Options.of(fun, **options),
    ],
    ids="value_and_grad grad per_example_grads per_example_norms clipped clipped_value noise_scale of".split(),
)
def test_an_unknown_option_is_a_type_error_that_names_it(wrap):
    with pytest.raises(TypeError, match="microbatchsize"):
        wrap(loss, microbatchsize=2)


@pytest.mark.parametrize("fun", [3, None, "loss", jnp.ones(2)], ids=["int", "None", "str", "array"])
def test_the_loss_must_be_a_function(fun):
    with pytest.raises(ab.InputError, match="The loss must be a function, got fun="):
        ab.value_and_grad(fun)


def test_options_are_frozen_and_normalised():
    options = Options.of(loss, microbatch_size=jnp.int32(4), accumulator_dtype="float32")
    assert options.microbatch_size == 4 and type(options.microbatch_size) is int
    assert options.accumulator_dtype == jnp.float32
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.microbatch_size = 8


@pytest.mark.parametrize("option", ["objective", "on_coupled", "reduction", "remat", "reduce"])
def test_a_value_that_is_not_allowed_is_named_when_the_loss_is_wrapped(option):
    with pytest.raises(ab.InputError, match=f"{option} must be one of .*, got {option}='fastest'"):
        ab.value_and_grad(loss, **{option: "fastest"})


@pytest.mark.parametrize(
    "fun, record",
    [
        (ab.value_and_grad, Options),
        (ab.per_example_grads, PerExampleOptions),
        (ab.per_example_norms, PerExampleOptions),
        (ab.clipped_grad, PerExampleOptions),
    ],
    ids=lambda each: each.__name__,
)
def test_every_argument_arrives_in_the_options(monkeypatch, fun, record):
    """An argument that a function takes and does not pass on would be ignored without a word."""
    arrived = {}
    checked = record.of(loss, **({"wants": Wants.NORMS} if record is PerExampleOptions else {}))

    def of(cls, fun, /, **given):
        arrived.update(given)
        return checked

    monkeypatch.setattr(record, "of", classmethod(of))
    given = {name: object() for name in parameters_of(fun)}
    fun(loss, **given)
    assert {name: arrived.get(name) for name in given} == given
