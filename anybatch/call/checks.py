"""Names and kinds of the leaves of a pytree.

What options of many functions must be, checked the same way and said in the same words.

Numbers that a guarantee rests on, checked: known before anything runs, and the same whatever the data are.
"""

import dataclasses
import math
import operator
import os
from typing import Any

import jax
import numpy as np

from anybatch.errors import InputError


def named_leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    """The leaves of `tree` with the expression a user would type to reach each of them.

    >>> named_leaves("batch", {"x": 1, "pair": (2, 3)})
    [("batch['pair'][0]", 2), ("batch['pair'][1]", 3), ("batch['x']", 1)]
    """
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def is_array(leaf: Any) -> bool:
    """Whether a leaf can be an input of a compiled program; Python numbers and strings are constants of it."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return True
    return hasattr(leaf, "__jax_array__") and hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is one PRNG key: `jax.random.key(0)`, or the older `jax.random.PRNGKey(0)`."""
    if not is_array(leaf):
        return False
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.shape == ()
    return leaf.dtype == np.uint32 and leaf.ndim == 1 and leaf.shape[0] in (2, 4)


def describe(leaf: Any) -> str:
    """The dtype and shape of an array, or the value of anything else: what an error message shows.

    >>> describe(np.zeros((3, 2), np.float32)), describe("adam")
    ('float32[3,2]', "'adam'")
    """
    if is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return repr(leaf)


def one_of(name: str, given: Any, choices: tuple[str, ...]) -> None:
    """Raises an InputError for what is not one of the choices."""
    if not isinstance(given, str) or given not in choices:
        raise InputError(
            f"{name} must be one of {', '.join(map(repr, choices))}",
            given=f"{name}={given!r}",
            remedy=f'Choose one of them, e.g. {name}="{choices[-1]}".',
        )


def must_be_path(name: str, given: Any, example: str) -> None:
    """Raises an InputError for what is not the path of a file or a folder."""
    is_path = isinstance(given, (str, os.PathLike)) and isinstance(os.fspath(given), str)
    if not is_path or not os.fspath(given) or "\0" in os.fspath(given):
        raise InputError(
            f"{name} must be a path: a text, or a pathlib.Path",
            given=f"{name}={given!r}",
            remedy=f"For example {name}={example!r}.",
        )


def whole_number(name: str, given: Any, at_least: int = 0, *, example: str | None = None) -> int:
    """A whole number, as an int; an InputError for anything else.

    >>> whole_number("steps", np.int64(3))
    3
    """
    try:
        number = at_least - 1 if isinstance(given, (bool, np.bool_)) else operator.index(given)
    except TypeError:
        number = at_least - 1
    if number < at_least:
        raise InputError(
            f"{name} must be a whole number of at least {at_least}",
            given=f"{name}={given!r}",
            remedy=f"For example {name}={example or max(at_least, 1)}.",
        )
    return number


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the doctor's."""

    subject: str
    text: str
    is_well: bool = True
    remedy: str = ""


def constant(name: str, value: Any, *, example: str) -> float:
    """A number that is known now.

    Raises:
      InputError: for what is not a number, or only known when a program runs: that may depend on the data.
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
    """A positive, finite number that is known now."""
    number = constant(name, value, example=example)
    if not 0 < number < math.inf:
        raise InputError(
            f"{name} must be positive and finite", given=f"{name}={value!r}", remedy=f"For example {name}={example}."
        )
    return number


def probability(name: str, value: Any, *, example: str, or_one: bool = False) -> float:
    """A number above 0 and below 1; or 1, where that makes sense."""
    number = constant(name, value, example=example)
    if not (0 < number < 1 or (or_one and number == 1)):
        raise InputError(
            f"{name} must be above 0 and {'at most' if or_one else 'below'} 1",
            given=f"{name}={value!r}",
            remedy=f"For example {name}={example}.",
        )
    return number


def most_of(num_examples: int, sampling_rate: float, *, failure: float) -> int:
    """A number of examples that a Poisson sample exceeds with a probability of at most `failure`.

    By the bound of Chernoff, which holds for every number of examples: `P(X >= m) <= exp(-n KL(m/n | q))`.
    """
    few, many = math.ceil(num_examples * sampling_rate), num_examples
    while few < many:  # the smallest size whose excess is improbable enough
        size = (few + many) // 2
        if log_of_excess(num_examples, sampling_rate, size) <= math.log(failure):
            many = size
        else:
            few = size + 1
    return few


def log_of_excess(num_examples: int, sampling_rate: float, size: int) -> float:
    """A bound on the logarithm of the probability that a Poisson sample has more than `size` examples."""
    part, rate = (size + 1) / num_examples, sampling_rate
    if part > 1:
        return -math.inf
    if part <= rate:
        return 0.0
    rest = 0.0 if part == 1 else (1 - part) * math.log((1 - part) / (1 - rate))
    return -num_examples * (part * math.log(part / rate) + rest)


def _briefly(value: Any) -> str:
    return f"an array {value.dtype}{list(value.shape)}" + (" under jit" if isinstance(value, jax.core.Tracer) else "")
