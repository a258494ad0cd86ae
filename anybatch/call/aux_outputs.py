"""How the aux leaves of the microbatches are combined into those of the full batch, for a declared reduction."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from anybatch.call.checks import named_leaves
from anybatch.call.loss import TracedLoss
from anybatch.errors import InputError

REDUCTIONS = ("stack", "mean", "sum", "last")


@dataclasses.dataclass(frozen=True)
class Combination:
    """How one output of the microbatches is combined: as "rows" along `axis`, or by one of `REDUCTIONS`."""

    kind: str
    axis: int = 0


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class NewState:
    """The aux leaves that are the state of a model after a call: running averages, counts of random streams."""

    values: Any  # a pytree of arrays
    about: Any = None  # static information from tracing the loss. It must support `==`.

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.values,), self.about

    @classmethod
    def tree_unflatten(cls, about: Any, values: Sequence[Any]) -> "NewState":
        return cls(values[0], about)


def check_new_state(loss: TracedLoss, full_batch: TracedLoss) -> None:
    """Checks that the loss of a microbatch leaves a model in the same state as that of the full batch.

    It may count calls, say. It must not depend on the examples or on their number.
    """
    aux = jax.tree.unflatten(loss.aux_tree, range(loss.aux_tree.num_leaves))
    nodes = jax.tree.leaves(aux, is_leaf=lambda node: isinstance(node, NewState))
    first, count = len(loss.types.wrt), len(loss.types.batch)
    for state in (node for node in nodes if isinstance(node, NewState)):
        is_nnx = state.about is not None
        variables = state.values.items() if is_nnx else ()  # each leaf gets the name of its variable
        named = [(name, leaf) for name, value in variables for leaf in jax.tree.leaves(value)]
        named = named if is_nnx else named_leaves("model_state", state.values)
        for name, position in named:
            output = loss.num_heads + position
            is_known = loss.aux_tree == full_batch.aux_tree
            texts = [each.traced.text_of(output) for each in (loss, full_batch)] if is_known else ["", "other"]
            if any(loss.traced.inputs_used_by(output)[first : first + count]) or texts[0] != texts[1]:
                raise InputError(
                    "With a declared reduction, the state of a model must not depend on the batch: each microbatch "
                    "would compute a different one",
                    given=f"{name} = {loss.aux_avals[position][1].str_short()}, such as a running average",
                    remedy='Leave reduction out: reduction="infer" computes it from the full batch. Or return it as '
                    + (FROM_A_MODEL_IN_THE_LOSS if is_nnx else 'aux, without has_state, with aux_reduction="mean".'),
                )


# Code for an error message: how to average the state of an NNX model over the microbatches.
FROM_A_MODEL_IN_THE_LOSS = """aux, from a model that is made in the loss:
graphdef, params, rest = nnx.split(model, nnx.Param, ...)
def loss_of_params(params, batch):
    model = nnx.merge(graphdef, params, rest, copy=True)
    return loss(model, batch), nnx.state(model, nnx.BatchStat)
fun = ab.value_and_grad(loss_of_params, has_aux=True, reduction="mean", aux_reduction="mean")
(value, averages), grads = fun(params, batch)
nnx.update(model, averages)"""


def combine_aux(microbatch: TracedLoss, full_batch: TracedLoss, aux_reduction: Any) -> list[Combination]:
    """How to combine each aux leaf: leaves with a row for each example are recognised, others need `aux_reduction`.

    A leaf has rows if one of its axes has the size of the microbatch when the loss is traced for a microbatch, and the
    size of the batch when it is traced for the batch. Comparing two traces avoids mistaking an axis for the batch axis
    because it happens to have the same length.
    """
    _check_same_tree(microbatch, full_batch)
    declared = _declared_for_each_leaf(aux_reduction, microbatch.aux_tree)
    combinations = []
    for (name, small), (_, large), reduction in zip(microbatch.aux_avals, full_batch.aux_avals, declared, strict=True):
        sizes = (microbatch.num_examples, full_batch.num_examples)
        if small.shape == large.shape:
            combinations.append(_by_declaration(name, small, reduction))
        elif (axis := _only_axis_that_grows(small.shape, large.shape, sizes)) is not None:
            combinations.append(Combination("rows", axis))
        else:
            raise InputError(
                "Every aux leaf must have a row for each example along one axis, or one shape for every batch",
                given=f"{name}: {small.str_short()} for {sizes[0]} examples and {large.str_short()} for {sizes[1]}",
                remedy="Give it one axis of the number of examples, or reduce it over them, or leave it out.",
            )
    return combinations


def check_remainder(microbatch: TracedLoss, remainder: TracedLoss, combinations: Sequence[Combination]) -> None:
    """Checks that the aux leaves of the smaller last microbatch have the types of the others."""
    _check_same_tree(microbatch, remainder)
    leaves = zip(microbatch.aux_avals, remainder.aux_avals, combinations, strict=True)
    for (name, small), (_, last), combination in leaves:
        expected = list(small.shape)
        if combination.kind == "rows":
            expected[combination.axis] = remainder.num_examples
        if list(last.shape) != expected or last.dtype != small.dtype:
            raise InputError(
                "Every aux leaf must have the same type in the smaller last microbatch",
                given=f"{name}: {small.str_short()} for {microbatch.num_examples} examples "
                f"and {last.str_short()} for {remainder.num_examples}",
                remedy="Use a microbatch_size that divides the batch, or leave that leaf out of aux.",
            )


def check_aux_reduction(aux_reduction: Any) -> None:
    """Checks the names in `aux_reduction`. This needs no call."""
    for leaf in jax.tree.leaves(aux_reduction):
        if not isinstance(leaf, str) or leaf not in REDUCTIONS:
            raise InputError(
                f"aux_reduction must be one of {', '.join(map(repr, REDUCTIONS))}, or a tree of them",
                given=f"aux_reduction={aux_reduction!r}",
                remedy='For example aux_reduction="mean", or aux_reduction={"accuracy": "mean", "tokens": "sum"}.',
            )


def _only_axis_that_grows(small: tuple[int, ...], large: tuple[int, ...], sizes: tuple[int, int]) -> int | None:
    """The one axis that differs between two shapes and has these sizes, or None."""
    if len(small) != len(large):
        return None
    grown = [axis for axis, pair in enumerate(zip(small, large, strict=True)) if pair[0] != pair[1]]
    return grown[0] if len(grown) == 1 and (small[grown[0]], large[grown[0]]) == sizes else None


def _declared_for_each_leaf(aux_reduction: Any, aux_tree: Any) -> list[str | None]:
    # To JAX, None is a tree without leaves. Here it stands for leaves that need no reduction.
    names = jax.tree.map(lambda name: name or "", aux_reduction, is_leaf=lambda name: name is None)
    try:
        aux = jax.tree.unflatten(aux_tree, [object()] * aux_tree.num_leaves)
        return [name or None for name in jax.tree.leaves(jax.tree.broadcast(names, aux))]
    except ValueError:
        raise InputError(
            "aux_reduction must be one name, or a tree of names that is a prefix of aux",
            given=f"aux_reduction={aux_reduction!r} for aux {aux_tree}",
            remedy='For example aux_reduction="mean", or aux_reduction={"accuracy": "mean", "logits": None} '
            "with None for leaves that have a row for each example.",
        ) from None


def _by_declaration(name: str, aval: Any, reduction: str | None) -> Combination:
    if reduction is None:
        raise InputError(
            "Every aux leaf without a row for each example needs an aux_reduction",
            given=f"none for {name}, {aval.str_short()}",
            remedy="Say how to combine the values of the microbatches: aux_reduction="
            '"mean", "sum", "last" or "stack", for all leaves or as a tree like aux.',
        )
    kinds = {"mean": (np.inexact,), "sum": (np.inexact, np.integer)}.get(reduction)
    if kinds is not None and not any(jax.dtypes.issubdtype(aval.dtype, kind) for kind in kinds):
        raise InputError(
            f'aux_reduction="{reduction}" needs {"floating-point numbers" if reduction == "mean" else "numbers"}',
            given=f"{name}, {aval.str_short()}",
            remedy='Cast that leaf in the loss, e.g. x.astype(jnp.float32), or use "stack" or "last".',
        )
    return Combination(reduction)


def _check_same_tree(one: TracedLoss, other: TracedLoss) -> None:
    if one.aux_tree != other.aux_tree:
        raise InputError(
            "aux must have the same tree for every number of examples",
            given="\n".join(f"for {loss.num_examples} examples: {loss.aux_tree}" for loss in (one, other)),
            remedy="Return the same keys whatever the size of the batch.",
        )
