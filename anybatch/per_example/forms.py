"""Chooses the form in which the per-example gradients of one parameter are kept: as their factors, or computed.

Norms and clipped sums can be computed from either form. Factors are kept where that is estimated to be cheaper.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from anybatch.jaxprs.chosen_values import Body, Source
from anybatch.per_example.terms import (
    Convolution,
    DirectTerm,
    FactoredTerm,
    Lookups,
    Product,
    Term,
    common_dtype,
    direct_term,
    terms_of,
)

# Roughly how many operations an accelerator does in the time in which it moves one byte, by the bytes of a factor's
# dtype. Narrow factors are multiplied in their own dtype and added up in float32.
_OPERATIONS_PER_BYTE = {2: 160, 4: 12, 8: 6}
# The gradient of an example is written, read for its norm, and read for the sum.
_TIMES_MOVED = 3


@dataclasses.dataclass(frozen=True)
class GradientForm:
    """How the per-example gradients of one parameter are kept: as the terms whose sum they are."""

    shape: tuple[int, ...]
    dtype: Any
    terms: tuple[Term, ...]

    @property
    def sources(self) -> list[Source]:
        """The values that must be computed for every example."""
        return [source for term in self.terms for source in term.sources]

    @property
    def products(self) -> list[FactoredTerm]:
        return [term for term in self.terms if isinstance(term, (Product, Convolution))]

    @property
    def lookups(self) -> list[Lookups]:
        return [term for term in self.terms if isinstance(term, Lookups)]

    @property
    def direct_terms(self) -> list[DirectTerm]:
        return [term for term in self.terms if isinstance(term, DirectTerm)]

    @property
    def kind(self) -> str:
        """In a word: "gram", "rows", "direct", or "direct and rows"."""
        if self.products:
            return "gram"
        if not self.direct_terms:
            return "rows"
        return "direct and rows" if self.lookups else "direct"


def choose_form(body: Body, variable: Any, like: Any, prefer: str = "cost") -> GradientForm:
    """The form in which to keep the per-example gradients of a parameter.

    Args:
      body: the program of the gradient of one example.
      variable: the gradient with respect to the parameter, a variable of that program.
      like: the type of the parameter.
      prefer: `"cost"` takes the cheaper form. `"gram"` and `"direct"` take that form wherever it is possible.
    """
    shape = tuple(variable.aval.shape)
    terms = terms_of(body, variable)
    if not all(_keeps_rows(term, len(shape)) for term in terms if isinstance(term, Lookups)):
        terms = [direct_term(body, variable)]
    lookups = [term for term in terms if isinstance(term, Lookups)]
    products = [term for term in terms if isinstance(term, (Product, Convolution))]
    others = [term for term in terms if not isinstance(term, Lookups)]
    can_gram = bool(others) and len(products) == len(others) and are_aligned(terms)
    if (not others and lookups) or (can_gram and _prefers_gram(products, lookups, prefer)):
        return GradientForm(shape, like.dtype, tuple(terms))
    if lookups and len(others) == 1:
        computed = _computed(others[0])
        if computed is not None:
            return GradientForm(shape, like.dtype, (computed, *lookups))
    return GradientForm(shape, like.dtype, (direct_term(body, variable),))


def _computed(term: Term) -> DirectTerm | None:
    """A term as a value of the program, if it is one."""
    if isinstance(term, Product) and term.output is not None:
        return DirectTerm(term.output, term.path)
    return term if isinstance(term, DirectTerm) else None


def _keeps_rows(term: Lookups, rank: int) -> bool:
    """True if rows of the looked-up table are rows of the parameter."""
    return term.path.axes == tuple(range(rank)) and not term.path.rearranges


def are_aligned(terms: Sequence[Term]) -> bool:
    """True if products of different terms can be multiplied: all split the parameter's axes into the same two sides."""
    if len(terms) == 1:
        return True
    sides = {row_axes(term) for term in terms}
    return None not in sides and len(sides) == 1


def row_axes(term: Term) -> tuple[int, ...] | None:
    """The parameter's axes on the same side of a term as its first axis; None if a side has them out of order."""
    if isinstance(term, Lookups):
        return (0,)
    if not isinstance(term, Product) or term.path.axes is None or term.batch[0]:
        return None
    number = len(term.free(0))
    if not number or not term.free(1):
        return None
    on_left = [axis for axis, source in enumerate(term.path.axes) if source < number]
    on_right = [axis for axis, source in enumerate(term.path.axes) if source >= number]
    for side in (on_left, on_right):
        sources = [term.path.axes[axis] for axis in side]
        if sources != sorted(sources):
            return None
    return tuple(on_left if 0 in on_left else on_right)


def _prefers_gram(products: Sequence[FactoredTerm], lookups: Sequence[Lookups], prefer: str) -> bool:
    if prefer != "cost":
        return prefer == "gram"
    return gram_cost(products, lookups) <= direct_cost(products)


def gram_cost(products: Sequence[FactoredTerm], lookups: Sequence[Lookups]) -> float:
    """An estimate of the cost of one example's norm and weighted sum from its factors.

    The unit is bytes moved. Operations count as the bytes that are moved in the same time.
    """
    multiplied, looked_up = sum(each.summands for each in products), sum(each.number for each in lookups)
    copies, (rows, columns) = products[0].copies, products[0].widths
    summands = multiplied + looked_up
    if summands == 1:
        return 0
    if looked_up:  # two looked-up rows are the same row of the table or not: that takes no product
        rows, columns = lookups[0].shape[0], math.prod(lookups[0].shape[1:])
    size = max(np.dtype(dtype).itemsize for each in products for dtype in each.dtypes)
    operations = 2 * (multiplied**2 * rows + summands**2 * columns) / _OPERATIONS_PER_BYTE.get(size, 6)
    matrices = 2 * 2 * 4 * summands**2  # two, written and read, in float32
    factors = 2 * (multiplied * rows + summands * columns) * size  # read, scaled, read again
    return copies * (operations + matrices + factors)


def direct_cost(products: Sequence[FactoredTerm]) -> float:
    """An estimate of the same cost, in the same unit, if the gradient is computed and kept."""
    left, right = products[0].widths
    size = common_dtype(*products[0].dtypes).itemsize
    return float(_TIMES_MOVED * products[0].copies * left * right * size)


def kept_bytes(form: GradientForm) -> int:
    """The bytes that are kept of one example: an upper bound, since the backward pass may keep some values anyway."""
    total = 0
    for term in form.terms:
        if isinstance(term, (Product, Convolution)):
            total += sum(math.prod(s) * np.dtype(d).itemsize for s, d in zip(term.shapes, term.dtypes, strict=True))
        elif isinstance(term, Lookups):
            total += term.number * (4 + math.prod(form.shape[1:]) * np.dtype(term.dtype).itemsize)
        else:
            total += math.prod(form.shape) * np.dtype(term.source.variable.aval.dtype).itemsize
    return total
