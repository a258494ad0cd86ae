"""What the gradient of one example with respect to one parameter is made of: products, looked-up rows, plain values."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from anybatch import compat
from anybatch.factors.evaluation import Source


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation that moves the entries of an array and changes none; of several arrays, below `lifts` axes."""

    equation: Any
    lifts: int = 0

    def __call__(self, array: Any) -> Any:
        def move(array: Any) -> Any:
            params = self.equation.params
            if self.equation.primitive.name in CASTS:
                return array  # sums are wide, whatever the dtype of the terms
            return compat.evaluate(self.equation, [array], params)[0]

        for _ in range(self.lifts):
            move = jax.vmap(move)
        return move(array)


CASTS = ("convert_element_type", "copy", "copy_p", "sharding_constraint", "sharding_hint")


@dataclasses.dataclass(frozen=True)
class Way:
    """From a term as it is computed to the parameter that it belongs to."""

    # Where each axis of the parameter is in the term; None once a reshape has mixed them.
    axes: tuple[int, ...] | None
    steps: tuple[Step, ...] = ()  # in the order in which they are taken
    scale: float = 1.0  # a number that all of it is multiplied by

    def __call__(self, array: Any) -> Any:
        for step in self.steps:
            array = step(array)
        return array if self.scale == 1 else array * self.scale

    @property
    def steps_move(self) -> bool:
        """Whether it does more than cast and scale."""
        return any(step.equation.primitive.name not in CASTS for step in self.steps)

    def lifted(self) -> "Way":
        """The way of a term that a loop stacks up, and whose parameter has a layer for each turn of it."""
        axes = None if self.axes is None else (0, *(axis + 1 for axis in self.axes))
        return dataclasses.replace(self, axes=axes, steps=tuple(Step(s.equation, s.lifts + 1) for s in self.steps))

    def then(self, outer: "Way") -> "Way":
        """First this one, then another that begins where this one ends."""
        axes = None
        if self.axes is not None and outer.axes is not None:
            axes = tuple(self.axes[axis] for axis in outer.axes)
        return Way(axes, (*self.steps, *outer.steps), self.scale * outer.scale)


@dataclasses.dataclass(frozen=True)
class Factors:
    """Two arrays that are multiplied, and the way from their product to the parameter."""

    left: Source
    right: Source
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[Any, Any]
    way: Way

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.left, self.right


@dataclasses.dataclass(frozen=True)
class Product(Factors):
    """`dot_general(left, right)`: a sum of outer products over the contracted axes."""

    output: Source | None  # what it makes, where that is a value of the program
    contract: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]
    precision: Any

    @property
    def summands(self) -> int:
        """How many outer products are added up."""
        return math.prod(self.shapes[0][axis] for axis in self.contract[0])

    @property
    def copies(self) -> int:
        """How many such sums there are, along axes that both sides have."""
        return math.prod(self.shapes[0][axis] for axis in self.batch[0])

    @property
    def widths(self) -> tuple[int, int]:
        """The entries of a vector on the left, and of one on the right."""
        left, right = (math.prod(shape) // max(1, self.summands * self.copies) for shape in self.shapes)
        return left, right

    @property
    def product_shape(self) -> tuple[int, ...]:
        """The shape of what it makes: the copies, then what is free on the left, then on the right."""
        free = [self.shapes[side][axis] for side in (0, 1) for axis in self.free(side)]
        return (*(self.shapes[0][axis] for axis in self.batch[0]), *free)

    def free(self, side: int) -> list[int]:
        """The axes of a side that are neither contracted nor shared."""
        taken = {*self.contract[side], *self.batch[side]}
        return [axis for axis in range(len(self.shapes[side])) if axis not in taken]

    def in_loop(self, loop: Any, turns: int, *, adds_up: bool) -> "Product":
        """The same of all turns of a loop, which adds them up or stacks them."""

        def shifted(axes: tuple[tuple[int, ...], ...], more: bool) -> Any:
            return tuple((*((0,) if more else ()), *(axis + 1 for axis in side)) for side in axes)

        return dataclasses.replace(
            self,
            left=self.left.inside(loop),
            right=self.right.inside(loop),
            output=None if adds_up or self.output is None else self.output.inside(loop),
            shapes=((turns, *self.shapes[0]), (turns, *self.shapes[1])),
            contract=shifted(self.contract, adds_up),
            batch=shifted(self.batch, not adds_up),
            way=self.way if adds_up else self.way.lifted(),
        )


@dataclasses.dataclass(frozen=True)
class Convolution(Factors):
    """`conv_general_dilated(left, right)`: a product, of the windows of the left with the right."""

    params: dict[str, Any]
    made: tuple[int, ...]  # the shape of what it makes
    copies = 1

    @property
    def summands(self) -> int:
        """How many outer products are added up: the entries of the right, for each of its outputs."""
        return math.prod(self.shapes[1]) // self.outputs

    @property
    def outputs(self) -> int:
        """How many there are on the right: in the gradient of a layer, the channels that it makes."""
        return self.shapes[1][self.params["dimension_numbers"].rhs_spec[0]]

    @property
    def widths(self) -> tuple[int, int]:
        """The entries of a vector on the left, and of one on the right."""
        return math.prod(self.made) // self.outputs, self.outputs


@dataclasses.dataclass(frozen=True)
class Lookups:
    """Rows that are added to those of a table at some indices: the gradient of an embedding."""

    index: Source
    update: Source
    shape: tuple[int, ...]  # of the table
    number: int  # of indices
    dtype: Any
    clips: bool  # whether indices beyond the table mean its last row; otherwise they mean none
    way: Way

    @property
    def sources(self) -> tuple[Source, ...]:
        return self.index, self.update

    def in_loop(self, loop: Any, turns: int, *, adds_up: bool) -> "Lookups":
        """The same of all turns of a loop that adds them up."""
        assert adds_up  # rows of a stack of tables are not kept as rows
        return dataclasses.replace(
            self, index=self.index.inside(loop), update=self.update.inside(loop), number=turns * self.number
        )


@dataclasses.dataclass(frozen=True)
class Value:
    """A term that is computed as it is, for every example."""

    value: Source
    way: Way

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.value,)

    def in_loop(self, loop: Any) -> "Value":
        """The same of all turns of a loop that stacks them."""
        return Value(self.value.inside(loop), self.way.lifted())


Multiplied = Product | Convolution
Term = Product | Convolution | Lookups | Value


def identity(rank: int) -> Way:
    """The way of a term that is the gradient of its parameter as it is."""
    return Way(tuple(range(rank)))


def with_way(terms: Sequence[Term], outer: Way) -> list[Term]:
    """Terms of a value that itself has a way to go."""
    return [dataclasses.replace(term, way=term.way.then(outer)) for term in terms]
