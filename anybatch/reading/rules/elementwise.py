"""Rules of operations on single elements: arithmetic, reshape, transpose, slice, concatenate, random numbers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.jaxprs import avals
from anybatch.jaxprs.graph import Node, Value
from anybatch.jaxprs.primitives import ELEMENTWISE
from anybatch.reading.positions import reshaped
from anybatch.reading.reader import Reader, RuleResult, rule
from anybatch.reading.states import INVARIANT, SUMMED, Batched, NotRowwise, State, common_rows, refuse_sums, replaced

# Linear in their one operand.
LINEAR = frozenset("neg real imag copy copy_p name stop_gradient sharding_constraint sharding_hint pvary pcast".split())


@rule(*ELEMENTWISE, "threefry2x32")
def elementwise(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """Batched operands have a batched result. Summed ones have a summed result if the operation is linear in them."""
    if SUMMED in states and _is_linear(reader, node, states):
        return RuleResult([SUMMED] * len(node.outputs))
    refuse_sums(states)
    rows = common_rows(states)
    output = node.outputs[0]
    size = output.shape[rows.axis]
    for value, state in zip(node.inputs, states, strict=True):
        if value.ndim != output.ndim and (value.ndim != 0 or isinstance(state, Batched)):
            raise NotRowwise("it changes the rank of an operand")
    takes = [rows if value.ndim and value.shape[rows.axis] == size else None for value in node.inputs]
    return RuleResult([rows] * len(node.outputs), takes)


def _is_linear(reader: Reader, node: Node, states: Sequence[State]) -> bool:
    """Whether the outputs are additive in the summed operands."""
    name = node.name
    if any(isinstance(state, Batched) for state in states):
        return False
    if name in LINEAR:
        return True
    if name == "convert_element_type":
        return _keeps_precision(node.inputs[0], node.outputs[0])
    if name in ("add", "add_any", "sub", "complex"):
        return all_sums(reader, node.inputs, states)
    if name == "mul":
        return list(states).count(SUMMED) == 1
    if name == "div":
        return states[0] == SUMMED and states[1] == INVARIANT and node.outputs[0].is_inexact
    if name == "select_n":
        return states[0] == INVARIANT and all_sums(reader, node.inputs[1:], states[1:])
    return False


def all_sums(reader: Reader, values: Sequence[Value], states: Sequence[State]) -> bool:
    """Whether every value is summed. Zeros count as summed."""
    return all(
        state == SUMMED or (state == INVARIANT and reader.is_zero(value))
        for value, state in zip(values, states, strict=True)
    )


def _keeps_precision(old: Value, new: Value) -> bool:
    """Whether a sum may be cast before it is added up over the microbatches: the cast must not round."""
    bits = [jnp.dtype(value.dtype).itemsize for value in (old, new)]
    if all(jax.dtypes.issubdtype(value.dtype, np.integer) for value in (old, new)):
        return bits[1] <= bits[0]  # integers that get narrower wrap around to the same result, before and after
    if not old.is_inexact or not new.is_inexact:
        return False
    is_complex = [jax.dtypes.issubdtype(value.dtype, np.complexfloating) for value in (old, new)]
    if is_complex[0] and not is_complex[1]:
        return False
    return jnp.finfo(new.dtype).bits >= jnp.finfo(old.dtype).bits


@rule("debug_callback", "debug_print")
def _debug(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    return RuleResult([])  # each microbatch prints its own values


@rule(
    "bitcast_convert_type", "random_bits", "random_split", "random_wrap", "random_unwrap", "random_seed", linear=False
)
def _same_axes(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """The result has the axes of the one operand, and perhaps others after them."""
    rows = common_rows(states)
    if node.name in ("random_bits", "random_split"):
        _refuse_other_generators(node)
    if node.name == "bitcast_convert_type" and node.outputs[0].shape != node.inputs[0].shape:
        raise NotRowwise("it changes the shape while it changes the type")
    if rows.axis >= node.outputs[0].ndim:
        raise NotRowwise("it makes one key from several examples")
    return RuleResult([rows])


def _refuse_other_generators(node: Node) -> None:
    if not avals.is_threefry(node.inputs[0].dtype):
        # Under vmap, the hardware's generator draws for all keys from the first one.
        raise NotRowwise(f"numbers from several keys of the generator {node.inputs[0].dtype} depend on one another")


@rule("random_gamma", linear=False)
def _gamma(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    _refuse_other_generators(node)
    if node.inputs[0].shape != node.inputs[1].shape:
        raise NotRowwise("it draws for several examples from one key")
    return elementwise(reader, node, states)


def without(axes: Sequence[int], axis: int) -> int:
    """The position of `axis` after `axes` are removed."""
    return axis - sum(gone < axis for gone in axes)


@rule("broadcast_in_dim", linear=True)
def _broadcast(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows = common_rows(states[:1])
    axis, shape = node.params["broadcast_dimensions"][rows.axis], node.params["shape"]
    if len(node.inputs) > 1 or shape[axis] != node.inputs[0].shape[rows.axis]:
        raise NotRowwise("it repeats one example for others")
    return RuleResult(
        [rows.at(axis)],
        params=lambda size: {**node.params, "shape": replaced(shape, axis, rows.length(size))},
    )


@rule("reshape", linear=True)
def _reshape(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    shape, new, before = node.inputs[0].shape, node.params["new_sizes"], common_rows(states[:1])
    order = node.params.get("dimensions") or range(len(shape))  # it may transpose first
    transposed = tuple(shape[axis] for axis in order)
    rows = reshaped(transposed, new, before.at(list(order).index(before.axis)), reader.num_examples)
    if rows is None:
        raise NotRowwise(f"reshaping {node.inputs[0].shape} to {tuple(new)} does not keep one row for each example")
    return RuleResult(
        [rows], params=lambda size: {**node.params, "new_sizes": replaced(new, rows.axis, rows.length(size))}
    )


@rule("transpose", linear=True)
def _transpose(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows = common_rows(states)
    return RuleResult([rows.at(list(node.params["permutation"]).index(rows.axis))])


@rule("squeeze", linear=True)
def _squeeze(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows = common_rows(states)
    gone = [axis % node.inputs[0].ndim for axis in node.params["dimensions"]]
    if rows.axis in gone:
        raise NotRowwise("it drops the batch axis, which happens to have one example")
    return RuleResult([rows.at(without(gone, rows.axis))])


@rule("tile", linear=True)
def _tile(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
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
        return RuleResult([rows], [rows] * len(states))
    if any(rows.axis != dimension or rows.inner != first.inner for rows in all_rows):
        raise NotRowwise("it joins examples along different axes")
    # Two views of a batch, one after the other: blocks of N examples each.
    takes = []
    for value in node.inputs:
        blocks, rest = divmod(value.shape[dimension], reader.num_examples * first.inner)
        if rest or not blocks:
            raise NotRowwise("it appends further rows to those of the examples")
        takes.append(Batched(dimension, blocks, first.inner))
    return RuleResult([Batched(dimension, sum(rows.outer for rows in takes), first.inner)], takes)


@rule("stack")
def _stack(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if SUMMED in states:
        return _join_sums(reader, node, states)
    rows = common_rows(states)
    return RuleResult([rows.at(rows.axis + (node.params["axis"] <= rows.axis))], [rows] * len(states))


def _join_sums(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if all_sums(reader, node.inputs, states):
        return RuleResult([SUMMED])
    if any(isinstance(state, Batched) for state in states):
        refuse_sums(states)
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


@rule("slice", linear=True)
def _slice(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
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


@rule("split", linear=True)
def _split(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
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


@rule("unstack", linear=True)
def _unstack(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows, axis = common_rows(states), node.params["axis"]
    if axis == rows.axis:
        raise NotRowwise("it takes the examples apart")
    return RuleResult([rows.at(rows.axis - (axis < rows.axis))] * len(node.outputs))
