"""The errors and warnings of anybatch.

Every error message has three parts: what must hold, what was given (by name, with its value), and what to do, as code
that can be typed.
"""

import os
import sys
import warnings


class AnybatchError(Exception):
    """The base class of all errors that anybatch raises deliberately."""


class InputError(AnybatchError, ValueError, TypeError):
    """An argument is not allowed. It is raised before any work is done.

    It is both a `ValueError` and a `TypeError`, because JAX raises the one for some of these mistakes and the other for
    the rest. An `except` clause that was written for `jax.value_and_grad` keeps working.

    Args:
      must: what must hold, as a sentence without its full stop.
      given: what was given instead, by name and with its value. Several lines become a table.
      remedy: what to do, as sentences with code that can be typed.
    """

    def __init__(self, must: str, *, given: str, remedy: str) -> None:
        self.must, self.given, self.remedy = must, given, remedy
        super().__init__(_three_parts(must, given, remedy))


class CoupledError(AnybatchError, ValueError):
    """The loss looks across examples, where that is not allowed.

    That is with `on_coupled="error"`, for a noise scale, and with `keep_batch_dim=True`, where every example is a batch
    of one.
    """


class HeadTooLargeError(AnybatchError, MemoryError):
    """The part of the loss that is computed from the full batch does not fit the memory."""


class NothingFitsError(AnybatchError, MemoryError):
    """No strategy for a gradient fits the memory. The message has the table of the plan, and what to do."""


class TightMemoryWarning(UserWarning):
    """Another strategy was used, because memory ran out or was about to, or because XLA could not compile a program.

    It has smaller microbatches or another method. The gradient is the same.
    """


class LargeHeadWarning(UserWarning):
    """Most of a model is computed from the full batch, so that microbatches save little memory."""


class RuleFailedWarning(UserWarning):
    """An operation could not be computed in microbatches, although anybatch has a rule for it.

    It is computed from the full batch instead. The gradient is exact, and takes more memory. The rule has an error:
    please report it, or correct it if you registered it with `anybatch.register_rule`.
    """


class NotAvailableError(AnybatchError, NotImplementedError):
    """An option is not available in this version. The message says what to use instead."""

    def __init__(self, option: str, *, remedy: str) -> None:
        self.option, self.remedy = option, remedy
        super().__init__(f"{option} is not available in this version of anybatch.\n{remedy}")


def _three_parts(must: str, given: str, remedy: str) -> str:
    if "\n" in given:
        given = "\n" + "\n".join("    " + line for line in given.splitlines())
        return f"{must}, got{given}\n{remedy}"
    return f"{must}, got {given}.\n{remedy}"


def install(extra: str) -> str:
    """The command that installs one of the extras of anybatch, for an error message."""
    return f'pip install ".[{extra}]"  # in your clone of anybatch'


def user_stacklevel() -> int:
    """The `stacklevel` of a warning that shows the first line outside of anybatch and JAX."""
    level, frame = 1, sys._getframe(1)
    own = tuple(os.path.dirname(file or "") + os.sep for file in (__file__, sys.modules["jax"].__file__))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        level, frame = level + 1, frame.f_back
    return level


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Gives a warning that shows the first line outside of anybatch and JAX."""
    warnings.warn(text, category, stacklevel=user_stacklevel())
