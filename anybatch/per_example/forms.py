"""Chooses the form in which the per-example gradients of one parameter are kept: as their factors, or computed.

Norms and clipped sums can be computed from either form. Factors are kept where that is estimated to be cheaper.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from anybatch.jaxprs.chosen_values import Body
from anybatch.per_example.terms import (
    Convolution,
    DirectTerm,
    FactoredTerm,
    Lookups,
    Product,
    Recognizer,
    Term,
    common_dtype,
    shape_of,
)

# Roughly how many operations an accelerator does in the time in which it moves one byte, by the bytes of a factor's
# dtype. Narrow factors are multiplied in their own dtype and added up in float32.
_OPERATIONS_PER_BYTE = {2: 160, 4: 12, 8: 6}
# The gradient of an example is written, read for its norm, and read for the sum.
_TIMES_MOVED = 3


@dataclasses.dataclass(frozen=True)
class GradientForm:
    """How the per-example gradients of one parameter are kept: as the terms whose sum they are."""

    terms: tuple[Term, ...]

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


def choose_form(body: Body, variable: Any, prefer: str = "cost") -> GradientForm:
    """The form in which to keep the per-example gradients of a parameter, a variable of the program of one example.

    It is the cheaper one with `prefer="cost"`, and otherwise `"direct"`, except for looked-up rows.
    """
    rank, recognizer = len(variable.aval.shape), Recognizer(body)
    form = GradientForm(tuple(recognizer.terms(variable)))
    direct = GradientForm((recognizer.direct(variable),))
    products, lookups = form.products, form.lookups
    if any(term.path.axes != tuple(range(rank)) or term.path.rearranges for term in lookups):
        return direct  # rows of a looked-up table are not rows of the parameter
    others = [term for term in form.terms if not isinstance(term, Lookups)]
    # Products of different terms can be multiplied if all split the parameter's axes into the same two sides.
    sides = {_row_axes(term) for term in form.terms}
    are_aligned = len(form.terms) == 1 or (len(sides) == 1 and None not in sides)
    can_gram = bool(others) and len(products) == len(others) and are_aligned
    if not others or (can_gram and _prefers_gram(products, lookups, prefer)):
        return form
    if lookups and len(others) == 1:
        (term,) = others
        if isinstance(term, Product) and term.output is not None:
            term = DirectTerm(term.output, term.path)
        if isinstance(term, DirectTerm):
            return GradientForm((term, *lookups))
    return direct


def _row_axes(term: Term) -> tuple[int, ...] | None:
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
    return prefer == "cost" and gram_cost(products, lookups) <= direct_cost(products)


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
    sources = [source for term in form.terms for source in term.sources]
    return sum(math.prod(shape_of(each)) * np.dtype(each.variable.aval.dtype).itemsize for each in sources)
