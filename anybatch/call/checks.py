"""Small checks that many modules share, so that the same mistake gives the same error message everywhere.

First come the leaves of a pytree (what a leaf is called, and whether it is an array), then the values of options, then
warnings and the record of one line that `anybatch doctor` prints.
"""

import dataclasses
import operator
import os
import warnings
from typing import Any

import jax
import numpy as np

from anybatch.errors import InputError, user_stacklevel


def named_leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a pytree, each with the expression that a user would type to reach it.

    >>> named_leaves("batch", {"x": 1, "pair": (2, 3)})
    [("batch['pair'][0]", 2), ("batch['pair'][1]", 3), ("batch['x']", 1)]
    """
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def is_array(leaf: Any) -> bool:
    """True for arrays, which are inputs of a compiled program. Python numbers and strings are constants of it."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return True
    return hasattr(leaf, "__jax_array__") and hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def has_jax_type(array: Any) -> bool:
    """True if JAX has arrays of this dtype: not for text, dates, records, or numbers in another byte order."""
    try:
        jax.typeof(array)
    except TypeError:
        return False
    return True


def is_key(leaf: Any) -> bool:
    """True for a single PRNG key: `jax.random.key(0)`, or the older `jax.random.PRNGKey(0)`."""
    if not is_array(leaf):
        return False
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.shape == ()
    return leaf.dtype == np.uint32 and leaf.ndim == 1 and leaf.shape[0] in (2, 4)


def describe(leaf: Any) -> str:
    """How an error message shows a leaf: the dtype and shape of an array, or the value of anything else.

    >>> describe(np.zeros((3, 2), np.float32)), describe("adam")
    ('float32[3,2]', "'adam'")
    """
    if is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return repr(leaf)


def one_of(name: str, given: Any, choices: tuple[str, ...]) -> None:
    """Raises an InputError unless `given` is one of the choices."""
    if not isinstance(given, str) or given not in choices:
        raise InputError(
            f"{name} must be one of {', '.join(map(repr, choices))}",
            given=f"{name}={given!r}",
            remedy=f'Choose one of them, e.g. {name}="{choices[-1]}".',
        )


def must_be_path(name: str, given: Any, example: str) -> None:
    """Raises an InputError unless `given` can be the path of a file or a folder."""
    is_path = isinstance(given, (str, os.PathLike)) and isinstance(os.fspath(given), str)
    if not is_path or not os.fspath(given) or "\0" in os.fspath(given):
        raise InputError(
            f"{name} must be a path: a string, or a pathlib.Path",
            given=f"{name}={given!r}",
            remedy=f"For example {name}={example!r}.",
        )


def whole_number(name: str, given: Any, at_least: int = 0, *, example: str | None = None) -> int:
    """`given` as an int. Raises an InputError if it is not a whole number of at least `at_least`.

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


def warn(text: str, category: type[Warning]) -> None:
    """Warns at the line of the user that calls anybatch."""
    warnings.warn(text, category, stacklevel=user_stacklevel())


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line that `anybatch doctor` prints."""

    subject: str
    text: str
    is_well: bool = True
    remedy: str = ""
