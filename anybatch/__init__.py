"""The exact gradient of any batch, on the memory you have."""

from anybatch import recipes as recipes
from anybatch.errors import AnybatchError as AnybatchError
from anybatch.errors import InputError as InputError
from anybatch.errors import NotAvailableError as NotAvailableError
from anybatch.gradient import grad as grad
from anybatch.gradient import value_and_grad as value_and_grad

__version__ = "0.1.0"
