"""Rules of gathers, scatters and dynamic slices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from anybatch.jaxprs.graph import Node, Value
from anybatch.jaxprs.primitives import SCATTER_ADD
from anybatch.reading.coupling import Coupling, NotRowwise
from anybatch.reading.evaluation import constant_value
from anybatch.reading.reader import Reader, RuleResult, rule
from anybatch.reading.rules import ordering
from anybatch.reading.rules.elementwise import all_sums
from anybatch.reading.rules.shapes import takes_of
from anybatch.reading.states import INVARIANT, SUMMED, Batched, State, common_rows, refuse_sums, replaced


@rule("dynamic_slice")
def _dynamic_slice(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if any(state != INVARIANT for state in states[1:]):
        raise NotRowwise("where it slices depends on the batch")
    if states[0] == SUMMED:
        return RuleResult([SUMMED])
    rows, sizes = common_rows(states), node.params["slice_sizes"]
    if sizes[rows.axis] != node.inputs[0].shape[rows.axis]:
        raise NotRowwise("it takes some of the examples")
    return RuleResult(
        [rows], params=lambda size: {**node.params, "slice_sizes": replaced(sizes, rows.axis, rows.length(size))}
    )


@rule("dynamic_update_slice")
def _dynamic_update_slice(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if any(state != INVARIANT for state in states[2:]):
        raise NotRowwise("where it writes depends on the batch")
    refuse_sums(states)
    rows = common_rows(states)
    if node.inputs[0].shape[rows.axis] != node.inputs[1].shape[rows.axis]:
        raise NotRowwise("it overwrites some of the examples")
    return RuleResult([rows], [*takes_of(rows, states[:2]), *[None] * len(states[2:])])


def own_row_axis(reader: Reader, indices: Value, column: int, length: int) -> int | None:
    """The axis of `indices` along which that column of the index vectors counts 0, 1, 2, ... up to `length`.

    With it `logits[arange(N), labels]` is recognised: each example looks up in its own row.
    """
    value, node = indices, indices.node
    while node is not None and node.name in ("convert_element_type", "copy"):
        value = node.inputs[0]
        node = value.node
    if node is not None and node.name == "concatenate" and node.params["dimension"] == value.ndim - 1:
        for part in node.inputs:
            if column < part.shape[-1]:
                value = part
                break
            column -= part.shape[-1]
    if reader.state(value) != INVARIANT:
        return None
    known = constant_value(reader, value)
    if known is None:
        return None
    known = known[..., column]
    for axis in range(known.ndim):
        if known.shape[axis] == length:
            counted = np.arange(length).reshape([-1 if other == axis else 1 for other in range(known.ndim)])
            if np.array_equal(known, np.broadcast_to(counted, known.shape)):
                return axis
    return None


def _counted_from_here(indices: Any, column: int, microbatch: Any, inner: int) -> Any:
    """Index vectors in which that column is a row number in the microbatch, not in the batch."""
    is_column = np.arange(indices.shape[-1]) == column
    return jnp.where(jnp.broadcast_to(is_column, indices.shape), microbatch.counted(indices, inner), indices)


@rule("gather")
def _gather(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    operand, indices = states
    if operand == SUMMED:
        fill = node.params.get("fill_value")
        if isinstance(indices, Batched):
            raise NotRowwise(Coupling.FED_BACK)
        if indices != INVARIANT or (fill is not None and fill == fill and fill != 0):
            raise NotRowwise(Coupling.NOT_LINEAR)
        return RuleResult([SUMMED])
    if indices == SUMMED:
        raise NotRowwise("it looks up by an index that is a sum over the batch")
    if isinstance(indices, Batched) and indices.points is not None:
        return ordering.look_up(reader, node, states)
    if isinstance(indices, Batched) and indices.axis == node.inputs[1].ndim - 1:
        raise NotRowwise("its index vectors run along the batch")
    numbers = node.params["dimension_numbers"]
    looked_up = [axis for axis in range(node.outputs[0].ndim) if axis not in numbers.offset_dims]
    if not isinstance(operand, Batched):
        assert isinstance(indices, Batched)
        if indices.axis in numbers.start_indices_batching_dims:
            pair = list(numbers.start_indices_batching_dims).index(indices.axis)
            takes = [indices.at(numbers.operand_batching_dims[pair]), None]
            return RuleResult([indices.at(looked_up[indices.axis])], takes)
        return RuleResult([indices.at(looked_up[indices.axis])])  # a table of embeddings
    return _gather_from_rows(reader, node, operand, indices, looked_up)


def _gather_from_rows(
    reader: Reader, node: Node, operand: Batched, indices: State, looked_up: Sequence[int]
) -> RuleResult:
    params, (source, vectors) = node.params, node.inputs
    numbers, axis = params["dimension_numbers"], operand.axis
    if axis in numbers.operand_batching_dims:
        index_axis = numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(axis)]
        if isinstance(indices, Batched) and indices != operand.at(index_axis):
            raise NotRowwise("it looks up rows of other examples")
        return RuleResult([operand.at(looked_up[index_axis])], [None, operand.at(index_axis)])
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    windows = [dimension for dimension in range(source.ndim) if dimension not in gone]
    if axis in windows and axis not in numbers.start_index_map and params["slice_sizes"][axis] == source.shape[axis]:
        if indices != INVARIANT:
            raise NotRowwise("for each example it looks up from every example")
        sizes = params["slice_sizes"]
        return RuleResult(
            [operand.at(numbers.offset_dims[windows.index(axis)])],
            params=lambda size: {**params, "slice_sizes": replaced(sizes, axis, operand.length(size))},
        )
    if axis in numbers.collapsed_slice_dims and axis in numbers.start_index_map and operand.outer == 1:
        column = list(numbers.start_index_map).index(axis)
        index_axis = own_row_axis(reader, vectors, column, source.shape[axis])
        if index_axis is not None and indices in (INVARIANT, operand.at(index_axis)):
            rows, batched = operand.at(index_axis), None
            if index_axis in numbers.start_indices_batching_dims:
                # The same index along the batching axis, too: a diagonal.
                pair = list(numbers.start_indices_batching_dims).index(index_axis)
                batched = operand.at(numbers.operand_batching_dims[pair])

            def run(microbatch: Any) -> list[Any]:
                local = microbatch.value(vectors, rows)
                local = _counted_from_here(local, column, microbatch, operand.inner)
                array = microbatch.value(source)
                return node([array if batched is None else microbatch.cut(array, batched), local])

            return RuleResult([operand.at(looked_up[index_axis])], [None, rows], run=run)
    raise NotRowwise("it looks up rows of other examples")


@rule("scatter", *SCATTER_ADD, "scatter-mul", "scatter_mul", "scatter-min", "scatter_min")
@rule("scatter-max", "scatter_max", "scatter-sub", "scatter_sub")
def _scatter(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    operand, indices, updates = states
    if SUMMED in states:
        arrays = [node.inputs[0], node.inputs[2]]
        if node.name in SCATTER_ADD and indices == INVARIANT and all_sums(reader, arrays, [operand, updates]):
            return RuleResult([SUMMED])
        raise NotRowwise(
            Coupling.FED_BACK if any(isinstance(state, Batched) for state in states) else Coupling.NOT_LINEAR
        )
    if isinstance(indices, Batched) and indices.points is not None:
        return ordering.put_back(reader, node, states)
    attempts: tuple[Callable[..., RuleResult | None], ...] = (_batched, _in_windows, _into_own_rows, _into_segments)
    for attempt in attempts:
        outcome = attempt(reader, node, states)
        if outcome is not None:
            return outcome
    raise NotRowwise("it writes into rows of other examples")


def _update_axes(node: Node) -> list[int]:
    """The axes of the updates that correspond to those of the indices."""
    windows = node.params["dimension_numbers"].update_window_dims
    return [axis for axis in range(node.inputs[2].ndim) if axis not in windows]


def _are_at(states: Sequence[State], rows: Batched, axes: Sequence[int]) -> bool:
    return all(state in (INVARIANT, rows.at(axis)) for state, axis in zip(states, axes, strict=True))


def _batched(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult | None:
    """A scatter for each example, as `vmap` makes it."""
    numbers, update_axes = node.params["dimension_numbers"], _update_axes(node)
    first = next(state for state in states if isinstance(state, Batched))
    for axis, index_axis in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        axes = (axis, index_axis, update_axes[index_axis])
        if _are_at(states, first, axes):
            return RuleResult([first.at(axis)], [first.at(each) for each in axes])
    return None


def _in_windows(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult | None:
    """Updates of all examples at the same place: `x.at[:, 3].set(...)`."""
    operand, indices, updates = states
    numbers = node.params["dimension_numbers"]
    if indices != INVARIANT:
        return None
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = [axis for axis in range(node.inputs[0].ndim) if axis not in gone]
    if isinstance(operand, Batched):
        rows, axis = operand, operand.axis
    else:
        assert isinstance(updates, Batched)
        if updates.axis not in numbers.update_window_dims:
            return None
        rows, axis = updates, windows[list(numbers.update_window_dims).index(updates.axis)]
    if axis not in windows or axis in numbers.scatter_dims_to_operand_dims:
        return None
    update_axis = numbers.update_window_dims[windows.index(axis)]
    if node.inputs[2].shape[update_axis] != node.inputs[0].shape[axis]:
        return None
    if not _are_at((operand, updates), rows, (axis, update_axis)):
        return None
    return RuleResult([rows.at(axis)], [rows.at(axis), None, rows.at(update_axis)])


def _into_own_rows(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult | None:
    """Each example writes into its own row: `x.at[arange(N), labels].set(...)`."""
    numbers, update_axes = node.params["dimension_numbers"], _update_axes(node)
    target, vectors, _ = node.inputs
    rows = common_rows([state.at(0) if isinstance(state, Batched) else state for state in states])
    if rows.outer != 1:
        return None
    columns = list(numbers.scatter_dims_to_operand_dims)
    for axis in numbers.inserted_window_dims:
        if axis not in columns or target.shape[axis] != rows.length(reader.num_examples):
            continue
        column = columns.index(axis)
        index_axis = own_row_axis(reader, vectors, column, target.shape[axis])
        if index_axis is None or index_axis in numbers.scatter_indices_batching_dims:
            continue
        axes = (axis, index_axis, update_axes[index_axis])
        if not _are_at(states, rows, axes):
            continue

        def run(microbatch: Any, axes: Any = axes, column: int = column) -> list[Any]:
            operands = [microbatch.value(value, rows.at(each)) for value, each in zip(node.inputs, axes, strict=True)]
            operands[1] = _counted_from_here(operands[1], column, microbatch, rows.inner)
            return node(operands)

        return RuleResult([rows.at(axis)], [rows.at(each) for each in axes], run=run)
    return None


def _into_segments(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult | None:
    """Examples add to segments that start from zero: the result is summed."""
    operand, indices, updates = states
    if node.name not in SCATTER_ADD or operand != INVARIANT or not reader.is_zero(node.inputs[0]):
        return None
    update_axes = _update_axes(node)
    if isinstance(indices, Batched):
        index_axis = indices.axis
    else:
        assert isinstance(updates, Batched)
        if updates.axis not in update_axes:
            return None
        index_axis = update_axes.index(updates.axis)
    batched = node.params["dimension_numbers"].scatter_indices_batching_dims
    if index_axis >= node.inputs[1].ndim - 1 or index_axis in batched:
        return None
    rows = common_rows([state.at(0) if isinstance(state, Batched) else state for state in states])
    axes = (index_axis, update_axes[index_axis])
    if not _are_at((indices, updates), rows, axes):
        return None
    return RuleResult([SUMMED], [None, *(rows.at(axis) for axis in axes)])
