"""The weights of the microbatches of a loss that was read: their examples, or the weight of a weighted mean.

The noise scale is estimated from the gradients of microbatches, each with its weight. The weight is known for a mean or
a sum over the examples, for a function of one such mean, and for a ratio of sums whose denominator counts data.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from anybatch.errors import CoupledError, InputError
from anybatch.jaxprs.graph import Value, sources
from anybatch.reading.evaluation import Examples, constant_value
from anybatch.reading.report import form_of, scales
from anybatch.reading.split import PrefixInputs, Seeds, Split
from anybatch.reading.states import SUMMED

# Of one element, which a weight is. So not `transpose`, which `report` follows too.
_UNCHANGED = frozenset("convert_element_type reshape squeeze broadcast_in_dim copy copy_p neg reduce_precision".split())

_DECLARE = (
    'Declare how the loss uses its examples: reduction="weighted" for one that returns (total, weight), sums over the '
    'examples, or reduction="mean" for a mean over the examples.'
)


@dataclasses.dataclass(frozen=True, eq=False)
class MicrobatchWeights:
    """The weight of a microbatch: the number of its examples, or a sum over them."""

    weight: Value | None = None  # a sum over the examples, of data alone
    split: Split | None = None  # the split that has it

    def of_microbatch(self, given: PrefixInputs, examples: Examples) -> Any:
        """The weight of one microbatch. The arguments are those of `Split.prefix`."""
        if self.weight is None or self.split is None:
            return examples.size
        before = PrefixInputs(given.variables[: len(self.split.loss.types.wrt)], given.inputs, None, [], given.place)
        (weight,) = self.split.prefix(before, examples, [self.weight])
        return weight.reshape(())


def microbatch_weights(split: Split, later: Split) -> MicrobatchWeights:
    """The weights of the microbatches of a loss.

    Args:
      split: the loss, split as its gradient is computed.
      later: the loss, split so that sums of data alone are left to the microbatches.

    Raises:
      CoupledError: for a loss that looks across examples.
      InputError: for a loss whose microbatches have no known weight.
    """
    loss = later.graph.outputs[0]
    if split.loss_couples:
        where = f" at {split.reader.blames[0]}." if split.reader.blames else "."
        raise CoupledError(
            f"This loss looks across examples{where}\nThe noise scale is that of gradients of examples by themselves, "
            "which it does not have. Keep the examples apart there. Or declare it, which makes it another loss that "
            'looks across the examples of each microbatch by itself: reduction="mean".'
        )
    if split.hoisted:
        raise _unknown(split, "with a custom backward pass of parameters alone that is not linear")
    known_first = [value for value in sources([loss]) if value in later.reader.computed_first]
    if later.loss_couples or any(later.reader.uses_batch[value] for value in known_first):
        raise _unknown(split, "in which examples are divided by, or compared with, what is computed from all of them")
    if later.seeds == Seeds.NONE:
        return MicrobatchWeights()
    if _own_gradient_varies(later):
        raise _unknown(split, "that multiplies parameters by a function of sums over the examples")
    if later.seeds == Seeds.BEFORE:
        return MicrobatchWeights()
    if len(later.differentiated) > 1 or later.frontier[later.differentiated[0]].size > 1:
        raise _unknown(split, "of several sums")
    total = later.frontier[later.differentiated[0]]
    others = [value for value in _reached(later, loss) if value is not total]
    if not others:
        return MicrobatchWeights()
    if len(others) == 1 and _is_ratio(later, loss, total, others[0]):
        return MicrobatchWeights(others[0], later)
    raise _unknown(split, "with a denominator that is not known to count anything")


def _unknown(split: Split, what: str) -> InputError:
    return InputError(
        "The noise scale needs to know what each microbatch counts: its examples, or its weight",
        given=f"a loss that is a {form_of(split).words}, {what}",
        remedy=_DECLARE,
    )


def _reached(split: Split, loss: Value) -> list[Value]:
    """The values of the frontier that the loss depends on."""
    frontier = set(split.frontier)
    return [value for value in sources([loss], frontier.__contains__) if value in frontier]


def _own_gradient_varies(split: Split) -> bool:
    """Whether the head itself has a gradient of the parameters that depends on the examples."""
    first, last = split.num_consts, split.batch_positions.start

    def own_gradient(inputs: list[Any], known: list[Any], frontier: list[Any]) -> list[Any]:
        def head(wrt: list[Any]) -> Any:
            return split.head([*inputs[:first], *wrt, *inputs[last:]], known, [], frontier, num_outputs=1)[0]

        return jax.grad(head)(inputs[first:last])

    return any(
        any(frontier) or any(inputs[position] for position in split.batch_positions)
        for inputs, _, frontier in split.uses_of(own_gradient)
    )


def _is_ratio(split: Split, loss: Value, total: Value, weight: Value) -> bool:
    """Whether the loss is `total / weight`, up to constant factors, terms without examples, and a least weight."""
    if weight.size != 1 or split.reader.state(weight) != SUMMED:
        return False
    product = _follow(split, loss)
    if product.node is None or product.node.name not in ("mul", "div"):
        return False
    one, other = product.node.inputs
    if product.node.name == "div":
        return _follow(split, one) is total and _power(split, other, weight) == 1
    return (_follow(split, one) is total and _power(split, other, weight) == -1) or (
        _follow(split, other) is total and _power(split, one, weight) == -1
    )


def _follow(split: Split, value: Value) -> Value:
    """Follows a value back through constant factors, casts and terms without examples."""
    frontier = set(split.frontier)
    while value not in frontier and value.node is not None:
        node = value.node
        operands = [operand for operand in node.inputs if split.reader.depends_on_batch(operand)]
        if len(operands) != 1:
            break
        if not scales(node, operands[0]) and node.name not in {"add", "add_any", "sub", *_UNCHANGED}:
            break
        value = operands[0]
    return value


def _power(split: Split, value: Value, weight: Value) -> int | None:
    """1 if a value is proportional to the weight, -1 if its inverse is; tested on large weights. Otherwise None."""
    at: list[float] = []
    for number in (64, 128, 1024):
        given = np.full(weight.shape, number, weight.dtype)
        found = constant_value(split.reader, value, {weight: given})
        if found is None or found.size != 1:
            return None
        at.append(float(found.reshape(())))
    if not all(np.isfinite(at)) or not all(at):
        return None
    for power in (1, -1):
        if np.allclose([at[1] / at[0], at[2] / at[0]], [2.0**power, 16.0**power], rtol=1e-4):
            return power
    return None
