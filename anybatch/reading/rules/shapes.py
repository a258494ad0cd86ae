"""Rules of operations that move elements: reshape, transpose, slice, concatenate and the like."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from anybatch.jaxprs.graph import Node
from anybatch.reading.coupling import Coupling, NotRowwise
from anybatch.reading.positions import reshaped
from anybatch.reading.reader import Reader, RuleResult, rule
from anybatch.reading.rules.elementwise import all_sums
from anybatch.reading.states import INVARIANT, SUMMED, Batched, State, common_rows, refuse_sums, replaced


def takes_of(rows: Batched, states: Sequence[State]) -> list[Batched | None]:
    """What a microbatch takes of each operand, if all have the batch axis: of invariant ones, its rows."""
    return [rows if state == INVARIANT else None for state in states]


def without(axes: Sequence[int], axis: int) -> int:
    """The position of `axis` after `axes` are removed."""
    return axis - sum(gone < axis for gone in axes)


@rule("broadcast_in_dim")
def _broadcast(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] == SUMMED:
        return RuleResult([SUMMED])
    rows = common_rows(states[:1])
    axis, shape = node.params["broadcast_dimensions"][rows.axis], node.params["shape"]
    if len(node.inputs) > 1 or shape[axis] != node.inputs[0].shape[rows.axis]:
        raise NotRowwise("it repeats one example for others")
    return RuleResult(
        [rows.at(axis)],
        params=lambda size: {**node.params, "shape": replaced(shape, axis, rows.length(size))},
    )


@rule("reshape")
def _reshape(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] == SUMMED:
        return RuleResult([SUMMED])
    shape, new, before = node.inputs[0].shape, node.params["new_sizes"], common_rows(states[:1])
    order = node.params.get("dimensions") or range(len(shape))  # it may transpose first
    transposed = tuple(shape[axis] for axis in order)
    rows = reshaped(transposed, new, before.at(list(order).index(before.axis)), reader.num_examples)
    if rows is None:
        raise NotRowwise(f"reshaping {node.inputs[0].shape} to {tuple(new)} does not keep one row for each example")
    return RuleResult(
        [rows], params=lambda size: {**node.params, "new_sizes": replaced(new, rows.axis, rows.length(size))}
    )


@rule("transpose")
def _transpose(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] == SUMMED:
        return RuleResult([SUMMED])
    rows = common_rows(states)
    return RuleResult([rows.at(list(node.params["permutation"]).index(rows.axis))])


@rule("squeeze")
def _squeeze(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] == SUMMED:
        return RuleResult([SUMMED])
    rows = common_rows(states)
    gone = [axis % node.inputs[0].ndim for axis in node.params["dimensions"]]
    if rows.axis in gone:
        raise NotRowwise("it drops the batch axis, which happens to have one example")
    return RuleResult([rows.at(without(gone, rows.axis))])


@rule("rev")
def _rev(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] == SUMMED:
        return RuleResult([SUMMED])
    rows = common_rows(states)
    if rows.axis in node.params["dimensions"]:
        raise NotRowwise("it reverses the order of the examples")
    return RuleResult([rows])


@rule("tile")
def _tile(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] == SUMMED:
        return RuleResult([SUMMED])
    rows = common_rows(states)
    return RuleResult([dataclasses.replace(rows, outer=rows.outer * node.params["reps"][rows.axis])])


@rule("concatenate")
def _concatenate(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if SUMMED in states:
        return _join_sums(reader, node, states)
    dimension = node.params["dimension"]
    all_rows = [state for state in states if isinstance(state, Batched)]
    first = all_rows[0]
    if first.axis != dimension:
        rows = common_rows(states)
        return RuleResult([rows], takes_of(rows, states))
    if any(rows.axis != dimension or rows.inner != first.inner for rows in all_rows):
        raise NotRowwise("it joins examples along different axes")
    # Two views of a batch, one after the other: blocks of N examples each.
    outer = 0
    takes: list[Batched | None] = []
    for value, state in zip(node.inputs, states, strict=True):
        if isinstance(state, Batched):
            outer += state.outer
            takes.append(None)
            continue
        blocks, rest = divmod(value.shape[dimension], reader.num_examples * first.inner)
        if rest or not blocks:
            raise NotRowwise("it appends further rows to those of the examples")
        outer += blocks
        takes.append(Batched(dimension, blocks, first.inner))
    return RuleResult([Batched(dimension, outer, first.inner)], takes)


@rule("stack")
def _stack(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if SUMMED in states:
        return _join_sums(reader, node, states)
    rows = common_rows(states)
    return RuleResult([rows.at(rows.axis + (node.params["axis"] <= rows.axis))], takes_of(rows, states))


def _join_sums(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if all_sums(reader, node.inputs, states):
        return RuleResult([SUMMED])
    if any(isinstance(state, Batched) for state in states):
        raise NotRowwise(Coupling.FED_BACK)
    raise NotRowwise("it joins a sum over the batch with other values")


@rule("pad")
def _pad(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] == SUMMED and states[1] == INVARIANT and reader.is_zero(node.inputs[1]):
        return RuleResult([SUMMED])
    refuse_sums(states)
    if not isinstance(states[0], Batched) or states[1] != INVARIANT:
        raise NotRowwise("it pads with a value of the batch")
    if tuple(node.params["padding_config"][states[0].axis]) != (0, 0, 0):
        raise NotRowwise("it pads the batch with further rows")
    return RuleResult([states[0]])


@rule("slice")
def _slice(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] == SUMMED:
        return RuleResult([SUMMED])
    rows, params = common_rows(states), node.params
    axis, block = rows.axis, reader.num_examples * rows.inner
    first, limit = params["start_indices"][axis], params["limit_indices"][axis]
    stride = params["strides"][axis] if params["strides"] else 1
    if stride != 1 or first % block or limit % block or limit <= first:
        raise NotRowwise("it takes some of the examples")

    def smaller(size: int) -> dict[str, Any]:
        starts = replaced(params["start_indices"], axis, first // block * size * rows.inner)
        limits = replaced(params["limit_indices"], axis, limit // block * size * rows.inner)
        return {**params, "start_indices": starts, "limit_indices": limits}

    return RuleResult([dataclasses.replace(rows, outer=(limit - first) // block)], params=smaller)


@rule("split")
def _split(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] == SUMMED:
        return RuleResult([SUMMED] * len(node.outputs))
    rows, params = common_rows(states), node.params
    if params["axis"] != rows.axis:
        return RuleResult([rows] * len(node.outputs))
    block = reader.num_examples * rows.inner
    if any(part % block or not part for part in params["sizes"]):
        raise NotRowwise("it splits the examples into groups")
    return RuleResult(
        [dataclasses.replace(rows, outer=part // block) for part in params["sizes"]],
        params=lambda size: {**params, "sizes": tuple(part // block * size * rows.inner for part in params["sizes"])},
    )


@rule("unstack")
def _unstack(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] == SUMMED:
        return RuleResult([SUMMED] * len(node.outputs))
    rows, axis = common_rows(states), node.params["axis"]
    if axis == rows.axis:
        raise NotRowwise("it takes the examples apart")
    return RuleResult([rows.at(rows.axis - (axis < rows.axis))] * len(node.outputs))
