"""What anybatch raises, and how it is worded.

Every message has three parts: what must hold, what was given (by name, with its value), and the
ways out, as code one can type.
"""

import os
import sys


class AnybatchError(Exception):
    """The base of every error that anybatch raises on purpose."""


class InputError(AnybatchError, ValueError, TypeError):
    """An argument that anybatch cannot work with, found before any work is done.

    It is a `ValueError` and a `TypeError` at once. JAX raises the one for some of these mistakes and
    the other for the rest; an `except` clause written for `jax.value_and_grad` goes on working.

    Args:
      must: what must hold, as a sentence without its full stop.
      given: what was given instead, by name and with its value. Several lines become a table.
      remedy: the ways out, as sentences with code that can be typed.
    """

    def __init__(self, must: str, *, given: str, remedy: str) -> None:
        self.must, self.given, self.remedy = must, given, remedy
        super().__init__(_three_parts(must, given, remedy))


class CoupledError(AnybatchError, ValueError):
    """A loss that looks across examples, where it must not.

    With `on_coupled="error"`; for a noise scale; or with `keep_batch_dim=True`, where every example is taken by itself.
    """


class HeadTooLargeError(AnybatchError, MemoryError):
    """What a loss computes from the whole batch at once does not fit the memory."""


class NothingFitsError(AnybatchError, MemoryError):
    """No way of computing a gradient fits the memory; the message has the table of the plan, and the ways out."""


class TightMemoryWarning(UserWarning):
    """Memory ran out, or will as far as can be seen, or XLA could not compile a program, so that another was taken.

    It has smaller microbatches, or another method. The gradient is the same.
    """


class LargeHeadWarning(UserWarning):
    """Most of a model is computed from the whole batch at once, so that microbatches save little memory."""


class RuleFailedWarning(UserWarning):
    """An operation could not be computed microbatch by microbatch, though anybatch has a rule for it.

    It is computed from the whole batch at once instead. The gradient is exact, and takes more memory. The rule has an
    error: please report it, or correct it if you registered it with `anybatch.register_rule`.
    """


class NotAvailableError(AnybatchError, NotImplementedError):
    """A documented option that this version does not have yet; the message says what to use instead."""

    def __init__(self, option: str, *, remedy: str) -> None:
        self.option, self.remedy = option, remedy
        super().__init__(f"{option} is not available in this version of anybatch.\n{remedy}")


def _three_parts(must: str, given: str, remedy: str) -> str:
    if "\n" in given:
        given = "\n" + "\n".join("    " + line for line in given.splitlines())
        return f"{must}, got{given}\n{remedy}"
    return f"{must}, got {given}.\n{remedy}"


def user_stacklevel() -> int:
    """For a warning: how far up the caller is whose code is not ours or JAX's."""
    level, frame = 1, sys._getframe(1)
    own = tuple(os.path.dirname(file or "") + os.sep for file in (__file__, sys.modules["jax"].__file__))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        level, frame = level + 1, frame.f_back
    return level
