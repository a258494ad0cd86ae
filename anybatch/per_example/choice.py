"""For each parameter: norms from its factors, or from gradients that are computed for every example."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from anybatch.jaxprs.chosen_values import Body, Source
from anybatch.per_example.terms import (
    Convolution,
    Lookups,
    Multiplied,
    Product,
    Term,
    Value,
    common,
    terms_of,
    value_of,
)

# How many operations a device does while it moves a byte: about, and of devices that are good at it. Sums are float32
# whatever is multiplied, but narrow factors are multiplied as they are.
_OPERATIONS_PER_BYTE = {2: 160, 4: 12, 8: 6}
# The gradient of an example is written, read for its norm, and read for the sum.
_TIMES_MOVED = 3


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The gradient of one parameter: the terms that are kept for every example of a microbatch."""

    shape: tuple[int, ...]
    dtype: Any
    terms: tuple[Term, ...]

    @property
    def sources(self) -> list[Source]:
        """The values that must be computed for every example."""
        return [source for term in self.terms for source in term.sources]

    @property
    def products(self) -> list[Multiplied]:
        return [term for term in self.terms if isinstance(term, (Product, Convolution))]

    @property
    def lookups(self) -> list[Lookups]:
        return [term for term in self.terms if isinstance(term, Lookups)]

    @property
    def values(self) -> list[Value]:
        return [term for term in self.terms if isinstance(term, Value)]

    @property
    def how(self) -> str:
        """In a word: "gram", "rows", "direct", or "direct and rows"."""
        if self.products:
            return "gram"
        if not self.values:
            return "rows"
        return "direct and rows" if self.lookups else "direct"


def choose(body: Body, variable: Any, like: Any, prefer: str = "cost") -> Leaf:
    """What to keep of the gradient of a parameter.

    Args:
      body: the program of the gradient of one example.
      variable: the gradient, in it.
      like: the type of the parameter.
      prefer: "cost", or "gram" or "direct" wherever that can be.
    """
    terms = terms_of(body, variable)
    shape = tuple(variable.aval.shape)
    products = [term for term in terms if isinstance(term, (Product, Convolution))]
    lookups = [term for term in terms if isinstance(term, Lookups)]
    if any(term.path.axes != tuple(range(len(shape))) or term.path.steps_move for term in lookups):
        lookups = []
        products = []
        terms = [value_of(body, variable)]
    others = [term for term in terms if not isinstance(term, Lookups)]
    can_gram = bool(others) and len(products) == len(others) and are_aligned(terms)
    if (not others and lookups) or (can_gram and _prefers_gram(products, lookups, prefer)):
        return Leaf(shape, like.dtype, tuple(terms))
    if lookups and len(others) == 1:
        (other,) = others
        if isinstance(other, Product) and other.output is not None:
            other = Value(other.output, other.path)
        if isinstance(other, Value):
            return Leaf(shape, like.dtype, (other, *lookups))
    return Leaf(shape, like.dtype, (value_of(body, variable),))


def are_aligned(terms: Sequence[Term]) -> bool:
    """Whether products of different terms can be multiplied: all cut the parameter into the same two sides."""
    if len(terms) == 1:
        return True
    sides = {row_axes(term) for term in terms}
    return None not in sides and len(sides) == 1


def row_axes(term: Term) -> tuple[int, ...] | None:
    """The axes of the parameter on the same side of a term as its first one; None if sides are not in its order."""
    if isinstance(term, Lookups):
        return (0,)
    if not isinstance(term, Product) or term.path.axes is None or term.batch[0]:
        return None
    number = len(term.free(0))
    if not number or not term.free(1):
        return None
    on_left = [axis for axis, place in enumerate(term.path.axes) if place < number]
    on_right = [axis for axis, place in enumerate(term.path.axes) if place >= number]
    for side in (on_left, on_right):
        places = [term.path.axes[axis] for axis in side]
        if places != sorted(places):
            return None
    return tuple(on_left if 0 in on_left else on_right)


def _prefers_gram(products: Sequence[Multiplied], lookups: Sequence[Lookups], prefer: str) -> bool:
    if prefer != "cost":
        return prefer == "gram"
    return gram_cost(products, lookups) <= direct_cost(products)


def gram_cost(products: Sequence[Multiplied], lookups: Sequence[Lookups]) -> float:
    """About the bytes, or what takes as long, for the norm of one example from its factors."""
    own, looked_up = sum(each.summands for each in products), sum(each.number for each in lookups)
    copies, (rows, columns) = products[0].copies, products[0].widths
    summands = own + looked_up
    if summands == 1:
        return 0
    if looked_up:  # rows that are looked up need no products with others: they are others, or not
        rows, columns = lookups[0].shape[0], math.prod(lookups[0].shape[1:])
    size = max(np.dtype(dtype).itemsize for each in products for dtype in each.dtypes)
    operations = 2 * (own**2 * rows + summands**2 * columns) / _OPERATIONS_PER_BYTE.get(size, 6)
    matrices = 2 * 2 * 4 * summands**2  # two, written and read, in float32
    factors = 2 * (own * rows + summands * columns) * size  # read, scaled, read again
    return copies * (operations + matrices + factors)


def direct_cost(products: Sequence[Multiplied]) -> float:
    """The same from its gradient, computed and kept."""
    left, right = products[0].widths
    size = common(*products[0].dtypes).itemsize
    return float(_TIMES_MOVED * products[0].copies * left * right * size)


def kept_bytes(leaf: Leaf) -> int:
    """The bytes that are kept of one example: at most, since values that the backward pass keeps anyway count too."""
    total = 0
    for term in leaf.terms:
        if isinstance(term, (Product, Convolution)):
            total += sum(math.prod(s) * np.dtype(d).itemsize for s, d in zip(term.shapes, term.dtypes, strict=True))
        elif isinstance(term, Lookups):
            total += term.number * (4 + math.prod(leaf.shape[1:]) * np.dtype(term.dtype).itemsize)
        else:
            aval = term.value.variable.aval
            total += math.prod(leaf.shape) * np.dtype(aval.dtype).itemsize
    return total
