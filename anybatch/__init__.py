"""The exact gradient of any batch, on the memory you have."""

from anybatch import recipes
from anybatch.errors import AnybatchError, InputError, NotAvailableError
from anybatch.gradient import grad, value_and_grad

__version__ = "0.1.0"

__all__ = ["AnybatchError", "InputError", "NotAvailableError", "grad", "recipes", "value_and_grad"]
