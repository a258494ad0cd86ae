"""The exact gradient of any batch, on the memory you have."""

from anybatch import collectives, distributed, privacy, recipes
from anybatch.errors import (
    AnybatchError,
    CoupledError,
    HeadTooLargeError,
    InputError,
    LargeHeadWarning,
    NotAvailableError,
    NothingFitsError,
    TightMemoryWarning,
)
from anybatch.gradient import grad, value_and_grad
from anybatch.plan import explain, plan
from anybatch.planning.report import Plan
from anybatch.read import read
from anybatch.reading.report import Reading
from anybatch.reading.rulebook import register_rule
from anybatch.reading.states import NotRowwise
from anybatch.verify import DifferentGradientError, Verification, verify
from anybatch.version import __version__

__all__ = [
    "AnybatchError",
    "CoupledError",
    "DifferentGradientError",
    "HeadTooLargeError",
    "InputError",
    "LargeHeadWarning",
    "NotAvailableError",
    "NotRowwise",
    "NothingFitsError",
    "Plan",
    "Reading",
    "TightMemoryWarning",
    "Verification",
    "__version__",
    "collectives",
    "distributed",
    "explain",
    "grad",
    "plan",
    "privacy",
    "read",
    "recipes",
    "register_rule",
    "value_and_grad",
    "verify",
]
