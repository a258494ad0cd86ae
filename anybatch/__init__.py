"""The exact gradient of any batch, on the memory you have."""

from anybatch import recipes
from anybatch.errors import (
    AnybatchError,
    CoupledError,
    HeadTooLargeError,
    InputError,
    LargeHeadWarning,
    NotAvailableError,
)
from anybatch.gradient import grad, value_and_grad
from anybatch.read import read
from anybatch.reading.report import Reading
from anybatch.reading.rulebook import register_rule
from anybatch.reading.states import NotRowwise
from anybatch.verify import DifferentGradientError, Verification, verify

__version__ = "0.2.0"

__all__ = [
    "AnybatchError",
    "CoupledError",
    "DifferentGradientError",
    "HeadTooLargeError",
    "InputError",
    "LargeHeadWarning",
    "NotAvailableError",
    "NotRowwise",
    "Reading",
    "Verification",
    "grad",
    "read",
    "recipes",
    "register_rule",
    "value_and_grad",
    "verify",
]
