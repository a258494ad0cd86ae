"""What options of many functions must be, checked the same way and said in the same words."""

import dataclasses
import operator
import os
from typing import Any

import numpy as np

from anybatch.errors import InputError


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


def whole(name: str, given: Any, at_least: int = 0, *, example: str | None = None) -> int:
    """A whole number, as an int; an InputError for anything else.

    >>> whole("steps", np.int64(3))
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
