"""`help()` of a public function explains every argument by itself."""

import inspect
import re

import pytest

import anybatch as ab
from anybatch import privacy

FUNCTIONS = [
    ab.per_example_grads,
    ab.per_example_norms,
    ab.clipped_grad,
    ab.clipped_value_and_grad,
    privacy.private_grad,
    privacy.dp_sgd,
    privacy.poisson_batches,
    privacy.epsilon,
    privacy.noise_multiplier,
    privacy.add_noise,
]


def documented(function):
    """The text for each argument in the section "Args" of a docstring."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(function), re.MULTILINE | re.DOTALL).group(1)
    entries = re.findall(r"^  (\*{0,2}\w+): (.*?)(?=^  \*{0,2}\w+:|\Z)", section, re.MULTILINE | re.DOTALL)
    return dict(entries)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_argument_is_explained(function):
    parameters = inspect.signature(function).parameters.values()
    names = ["**" * (each.kind is each.VAR_KEYWORD) + each.name for each in parameters]
    entries = documented(function)
    assert list(entries) == names
    assert not [name for name, text in entries.items() if len(text.split()) < 4 or "see there" in text]


@pytest.mark.parametrize("function", [privacy.private_grad, privacy.dp_sgd], ids=lambda function: function.__name__)
def test_every_option_that_is_passed_on_is_explained(function):
    ours = inspect.signature(function).parameters
    passed_on = [name for name in inspect.signature(ab.clipped_grad).parameters if name not in (*ours, "argnums")]
    text = documented(function)["**options"]
    assert not [name for name in passed_on if f"`{name}`" not in text]
