"""The state of a value relative to the batch axis: invariant, batched, summed or head.

Every value in a loss has a state. It says how to get the value of the full batch when the same equations are evaluated
for one microbatch at a time:

  Invariant   the same in every microbatch. It does not depend on the examples; it may depend on parameters.
  Batched     rows for each example, computed from that example and from invariant values: concatenate them.
  Summed      a sum over the examples: add up the values of the microbatches.
  Head        anything else. It is computed once, from the full batch.

Invariant, batched and summed values make up the prefix of a loss, which runs per microbatch. The others are its head.

A rule that refuses an equation raises `NotRowwise`, with a reason in words and, where other code treats it differently,
a member of `Coupling`. The reading keeps it as a `Blame`: the user's line, the primitive and the reason.
"""

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.errors import AnybatchError
from anybatch.jaxprs import source
from anybatch.jaxprs.graph import Node


class Coupling(enum.StrEnum):
    """The reasons that other code tells apart. The value is the text for reasons that need no details."""

    FED_BACK = "it combines each example with a sum or mean over the batch"
    NOT_LINEAR = "it is not linear in a sum over the batch"
    NO_RULE = "there is no rule for its primitive"
    RULE_FAILED = "the rule for its primitive failed"
    OTHER = "it combines examples"


@dataclasses.dataclass(frozen=True)
class Blame:
    """A source line that combines examples, so that it cannot be computed per microbatch."""

    file: str
    line: int
    function: str
    primitive: str
    why: str
    inside: str = ""  # the library function that the line calls, if the equation is not of the line itself
    reason: Coupling = Coupling.OTHER

    @property
    def place(self) -> str:
        """File and line, in the form that editors and terminals turn into a link."""
        return f"{self.file}:{self.line}" if self.file else "an unknown line"

    def __str__(self) -> str:
        inside = f", inside {self.inside}" if self.inside else ""
        function = f" in {self.function}" if self.function else ""
        return f"{self.place}{function} ({self.primitive}{inside}): {self.why}"


def blame_of(node: Node, why: str, reason: Coupling = Coupling.OTHER) -> Blame:
    """Blames the user's line that a node comes from."""
    place = source.locate(node)
    return Blame(place.file, place.line, place.function, node.name, why, place.inside, reason)


class NotRowwise(Exception):
    """Raised by a rule: the equation cannot be computed microbatch by microbatch.

    Args:
      why: the reason, in words for the user; or a `Coupling`, whose text is used.
      reason: the reason as a `Coupling`, where `why` is a text.
      blame: the line to blame, if it is known better than the line of the equation at hand.
      unroll: whether unrolling the loop or inlining the function at hand may help.
    """

    def __init__(
        self, why: str, *, reason: Coupling = Coupling.OTHER, blame: Blame | None = None, unroll: bool = True
    ) -> None:
        super().__init__(str(why))
        self.why = str(why)
        self.reason = why if isinstance(why, Coupling) else reason
        self.blame, self.unroll = blame, unroll


class RuleFailed(AnybatchError):
    """Raised while a microbatch is computed: the rule accepted an equation that then could not be computed."""

    def __init__(self, blame: Blame) -> None:
        super().__init__(str(blame))
        self.blame = blame


def failure_of(node: Node, error: Exception) -> Blame:
    """Blames the user's line of an equation whose rule raised an unexpected error."""
    why = f"the rule for the primitive {node.name!r} failed ({type(error).__name__}: {error})"
    return blame_of(node, why, Coupling.RULE_FAILED)


@dataclasses.dataclass(frozen=True)
class Invariant:
    """The same in every microbatch."""

    def __str__(self) -> str:
        return "invariant"


@dataclasses.dataclass(frozen=True)
class Batched:
    """Rows for each example along `axis`. The axis may be merged with others: it has `outer` x N x `inner` rows.

    Activations of shape (N, T, D) reshaped to (N * T, D) have inner=T. Two views of a batch, one after the other in an
    array of 2 * N rows, have outer=2.

    Rows may be sorted, for example tokens by their expert. A microbatch sorts its own rows, so its order differs from
    that of the full batch. `order` is the number of the sort; 0 is the order of the batch. Values may also be positions
    of rows in an array of some order, whose number is `points`. Such values may only be used to look rows up.
    """

    axis: int
    outer: int = 1
    inner: int = 1
    order: int = 0
    points: int | None = None

    def at(self, axis: int) -> "Batched":
        """The same rows, along another axis."""
        return dataclasses.replace(self, axis=axis)

    @property
    def in_batch_order(self) -> bool:
        """True if the rows are in the order of the batch and are not positions, which is the common case."""
        return self.order == 0 and self.points is None

    def length(self, num_examples: int) -> int:
        """The size of the axis for this number of examples."""
        return self.outer * num_examples * self.inner

    def __str__(self) -> str:
        merged = "" if self.outer == self.inner == 1 else f", {self.outer} x N x {self.inner}"
        return f"rows along axis {self.axis}{merged}"


@dataclasses.dataclass(frozen=True)
class Summed:
    """A sum over the examples."""

    def __str__(self) -> str:
        return "a sum"


@dataclasses.dataclass(frozen=True)
class Head:
    """A function of the full batch. It `couples` the examples if it is a function of rows, and not only of sums."""

    couples: bool

    def __str__(self) -> str:
        return "coupled" if self.couples else "a function of sums"


State: TypeAlias = Invariant | Batched | Summed | Head
INVARIANT, SUMMED = Invariant(), Summed()


def join(one: State, other: State, one_is_zero: bool = False, other_is_zero: bool = False) -> State:
    """The state of a value that is sometimes `one` and sometimes `other`: a loop's carry, a branch's result."""
    if one == other:
        return one
    for state, is_zero, wider in ((one, one_is_zero, other), (other, other_is_zero, one)):
        if state == INVARIANT and isinstance(wider, Batched) and wider.in_batch_order:
            return wider
        if state == INVARIANT and wider == SUMMED and is_zero:
            return SUMMED
    raise NotRowwise(f"in a loop or a branch the same value is once {one} and once {other}")


def common_rows(states: Sequence[State]) -> Batched:
    """The state of the batched operands, which must have the same one."""
    rows = [state for state in states if isinstance(state, Batched)]
    for other in rows[1:]:
        if other != rows[0]:
            raise NotRowwise("it brings different examples together")
    return rows[0]


def refuse_sums(states: Sequence[State]) -> None:
    """Raises `NotRowwise` if an operand is summed. For rules of operations that are not linear."""
    if SUMMED in states:
        raise NotRowwise(
            Coupling.FED_BACK if any(isinstance(state, Batched) for state in states) else Coupling.NOT_LINEAR
        )


def take_rows(array: jax.Array, rows: Batched, num_examples: int, start: Any, size: int, runs: int = 1) -> jax.Array:
    """The rows of `size` examples from `start`, of an array of the full batch. `runs` is as in `Microbatch`."""
    axis, outer, inner = rows.axis, rows.outer * runs, rows.inner
    num_examples, size = num_examples // runs, size // runs
    if outer == 1:
        return lax.dynamic_slice_in_dim(array, start * inner, size * inner, axis)
    before, after = array.shape[:axis], array.shape[axis + 1 :]
    blocks = array.reshape(*before, outer, num_examples, inner, *after)
    taken = lax.dynamic_slice_in_dim(blocks, start, size, axis + 1)
    return taken.reshape(*before, outer * size * inner, *after)


def put_rows(
    stacked: jax.Array | None, last: jax.Array | None, rows: Batched, size: int, remainder: int, runs: int = 1
) -> jax.Array:
    """The array of the full batch, from the arrays of its microbatches.

    Args:
      stacked: the arrays of the complete microbatches, stacked along axis 0.
      last: the array of the ragged last microbatch, if there is one.
      rows: where the examples are in the array of a microbatch.
      size: the number of examples in a complete microbatch.
      remainder: the number of examples in the ragged last one.
      runs: the number of runs of consecutive examples in each.
    """
    axis, outer, inner = rows.axis, rows.outer * runs, rows.inner
    size, remainder = size // runs, remainder // runs
    parts = []
    for array, examples in ((stacked, size), (None if last is None else last[None], remainder)):
        if array is None or (array.shape[0] == 0 and last is not None):
            continue
        number, shape = array.shape[0], array.shape[1:]
        blocks = array.reshape(number, *shape[:axis], outer, examples * inner, *shape[axis + 1 :])
        blocks = jnp.moveaxis(blocks, 0, axis + 1)
        parts.append(blocks.reshape(*shape[:axis], outer, number * examples * inner, *shape[axis + 1 :]))
    joined = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis + 1)
    return joined.reshape(*joined.shape[:axis], outer * joined.shape[axis + 1], *joined.shape[axis + 2 :])


def replaced(sizes: Sequence[int], position: int, size: int) -> tuple[int, ...]:
    """`sizes` with `size` at `position`."""
    return (*sizes[:position], size, *sizes[position + 1 :])
