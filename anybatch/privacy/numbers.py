"""Checks of the numbers that a privacy guarantee rests on: Python constants that cannot depend on the data."""

import math
from typing import Any

import jax

from anybatch.errors import InputError


def constant(name: str, value: Any, *, example: str) -> float:
    """A Python number as a float.

    Raises:
      InputError: if it is not a number, or is a JAX array, which could depend on the data.
    """
    if isinstance(value, jax.Array):
        raise InputError(
            f"{name} must be a Python number: the guarantee rests on it, so that it must not depend on the data",
            given=f"{name}={_briefly(value)}",
            remedy=f"Pass a constant, e.g. {name}={example}.",
        )
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise InputError(
            f"{name} must be a number", given=f"{name}={value!r}", remedy=f"Pass a constant, e.g. {name}={example}."
        )
    return number


def positive(name: str, value: Any, *, example: str) -> float:
    """A positive, finite Python number as a float."""
    number = constant(name, value, example=example)
    if not 0 < number < math.inf:
        raise InputError(
            f"{name} must be positive and finite", given=f"{name}={value!r}", remedy=f"For example {name}={example}."
        )
    return number


def probability(name: str, value: Any, *, example: str, or_one: bool = False) -> float:
    """A Python number between 0 and 1, as a float. 0 is not allowed, and 1 only with `or_one`."""
    number = constant(name, value, example=example)
    if not (0 < number < 1 or (or_one and number == 1)):
        raise InputError(
            f"{name} must be above 0 and {'at most' if or_one else 'below'} 1",
            given=f"{name}={value!r}",
            remedy=f"For example {name}={example}.",
        )
    return number


def largest_sample(num_examples: int, sampling_rate: float, *, failure: float) -> int:
    """The smallest batch size that a Poisson sample exceeds with a probability of at most `failure`.

    It uses Chernoff's bound, which holds for every number of examples: `P(X >= m) <= exp(-n KL(m/n | q))`.
    """
    few, many = math.ceil(num_examples * sampling_rate), num_examples
    while few < many:  # bisection
        size = (few + many) // 2
        if log_excess_probability(num_examples, sampling_rate, size) <= math.log(failure):
            many = size
        else:
            few = size + 1
    return few


def log_excess_probability(num_examples: int, sampling_rate: float, size: int) -> float:
    """A bound on the logarithm of the probability that a Poisson sample has more than `size` examples."""
    fraction, rate = (size + 1) / num_examples, sampling_rate
    if fraction > 1:
        return -math.inf
    if fraction <= rate:
        return 0.0
    rest = 0.0 if fraction == 1 else (1 - fraction) * math.log((1 - fraction) / (1 - rate))
    return -num_examples * (fraction * math.log(fraction / rate) + rest)


def _briefly(value: Any) -> str:
    return f"an array {value.dtype}{list(value.shape)}" + (" under jit" if isinstance(value, jax.core.Tracer) else "")
