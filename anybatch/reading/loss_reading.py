"""Reads a loss that was traced at the full batch, and splits it into a prefix and a head."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch import compat
from anybatch.errors import InputError
from anybatch.loss import TracedLoss
from anybatch.reading import source
from anybatch.reading.graph import Graph
from anybatch.reading.positions import Draw
from anybatch.reading.reader import Fact, NeedsInlining, Reader
from anybatch.reading.rulebook import RULEBOOK
from anybatch.reading.split import Seeds, Split
from anybatch.reading.states import WHOLE, Rows

_MAX_HINT = 1 << 20  # elements of an array that is looked at before anything runs

# Prints, and the names of mesh axes, which are noted as effects too.
_HARMLESS_EFFECTS = ("DebugEffect", "OrderedDebugEffect", "NamedAxisEffect")


def split_loss_in_one_pass(loss: TracedLoss, consts: Sequence[Any], **options: Any) -> Split:
    """Like `split_loss`, but nothing is summed before the microbatches if one pass over them is enough all the same.

    On many devices a sum is an exchange. The sum of a mask can join that of the gradients, unless examples are
    divided by it.
    """
    split = split_loss(loss, consts, **options, sums_data_later=True)
    if split.seeds != Seeds.BETWEEN and not split.head_couples:
        return split
    return split_loss(loss, consts, **options)


def split_loss(
    loss: TracedLoss,
    consts: Sequence[Any],
    *,
    fresh_draws: bool = False,
    sums_data_later: bool = False,
    may_select: bool = False,
    failed: Mapping[str, str] | None = None,
) -> Split:
    """Reads a loss that was traced at the full batch, and splits it.

    Args:
      loss: the loss.
      consts: what it closes over; arrays among them that are known already help.
      fresh_draws: whether a microbatch may draw its own random numbers, where it cannot draw those of the batch.
      sums_data_later: whether sums of data alone are left to the microbatches.
      may_select: whether rows that the loss selects from its data may have a loop of their own.
      failed: primitives whose rules are not to be used, and why.
    """
    wrt, batch, keys, rest = loss.types
    moving = [Fact(WHOLE, True, jax.dtypes.issubdtype(leaf.dtype, np.inexact)) for leaf in wrt]
    facts = [
        *[Fact(WHOLE)] * len(loss.const_types),
        *moving,
        *[Fact(Rows(0))] * len(batch),
        *[Fact(WHOLE)] * (len(keys) + len(rest)),
    ]
    opened: dict[int, Any] = {}
    may_reorder = _multiplies_groups(loss.traced.jaxpr)
    while True:
        graph = Graph(loss.traced.jaxpr, opened)
        for value, const in zip(graph.inputs, consts, strict=False):
            if isinstance(const, (np.ndarray, jax.Array)) and not isinstance(const, jax.core.Tracer):
                if not value.is_key and value.size <= _MAX_HINT:
                    value.hint = const
        _refuse_mutation(graph)
        try:
            reader = Reader(
                graph,
                loss.num_examples,
                facts,
                RULEBOOK,
                top=True,
                may_reorder=may_reorder,
                sums_data_later=sums_data_later,
                may_select=may_select,
                failed=failed,
            )
        except NeedsInlining as request:
            opened[id(request.equation)] = request.equation, request.function
            continue
        split = Split(loss, reader, Draw(fresh_draws))
        if any(isinstance(state, Rows) and not state.in_batch_order for state in split.states):
            may_reorder = False  # what is sorted does not stay among those who know the order
            continue
        return split


def _multiplies_groups(jaxpr: Any) -> bool:
    """Whether there is a product of sorted groups in it, at any depth: what sorting in microbatches is for."""
    return any(
        equation.primitive.name == "ragged_dot_general" or any(map(_multiplies_groups, compat.jaxprs_in(equation)))
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def _refuse_mutation(graph: Graph) -> None:
    for node in graph.nodes:
        harmful = [effect for effect in node.equation.effects if type(effect).__name__ not in _HARMLESS_EFFECTS]
        if harmful:
            place = source.locate(node)
            raise InputError(
                "A loss that is read must be a function of its arguments, without effects",
                given=f"{node.name} at {place.file}:{place.line} in {place.function}",
                remedy='Take it out of the loss, or declare how the loss uses its examples: reduction="mean" or "sum".',
            )
