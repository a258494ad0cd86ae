"""Rules of gathers, scatters, dynamic slices and sorts.

Examples may be sorted across the batch and put back, as a mixture of experts does with its tokens:

    order = argsort(experts)                         # the tokens, by the expert that they are for
    y = ragged_dot(x[order], weights, group_sizes)   # each group of them times the matrix of its expert
    y = y[argsort(order)]                            # back in the order of the batch

A microbatch that sorts its own tokens gets the same result for each of them, although its order differs. So rows may
be sorted if nothing that happens to them before they are put back depends on their position.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.jaxprs.graph import Node, Value
from anybatch.jaxprs.primitives import SCATTER_ADD
from anybatch.reading.evaluation import FullBatch, constant_value
from anybatch.reading.reader import Reader, RuleResult, rule
from anybatch.reading.rules.elementwise import all_sums
from anybatch.reading.states import INVARIANT, SUMMED, Batched, NotRowwise, State, common_rows, refuse_sums, replaced

_numbers = itertools.count(1)


def sort_rows(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """A sort of the examples by one key, together with their positions or other values of theirs."""
    rows = states[0]
    simple = (
        reader.options.may_reorder
        and isinstance(rows, Batched)
        and rows.outer == 1
        and node.params["num_keys"] == 1
        and all(value.ndim == 1 for value in node.inputs)
    )
    if not simple:
        raise NotRowwise("it sorts the examples")
    assert isinstance(rows, Batched)
    length = rows.length(reader.num_examples)
    counts = [
        position
        for position, (value, state) in enumerate(zip(node.inputs, states, strict=True))
        if state == INVARIANT and _is(constant_value(reader, value), np.arange(length))
    ]
    if any(state != rows and position not in counts for position, state in enumerate(states)):
        raise NotRowwise("it sorts the examples")
    if rows.points is None and rows.order == 0:
        found = _new_order(reader, node, rows, counts)
    else:
        found = _inverse_order(reader, node, rows, counts)

    def run(microbatch: Any) -> list[Any]:
        own = rows.length(microbatch.size)
        operands = [
            lax.iota(value.dtype, own) if position in counts else microbatch.value(value)
            for position, value in enumerate(node.inputs)
        ]
        return node(operands)

    return RuleResult(found, run=run, reorders=True)


def _new_order(reader: Reader, node: Node, rows: Batched, counts: Sequence[int]) -> list[State]:
    order = next(_numbers)
    reader.sorted_by[order] = node.inputs[0]
    found: list[State] = []
    for position, output in enumerate(node.outputs):
        points = rows.order if position in counts else None
        found.append(Batched(0, 1, rows.inner, order, points))
        if points is not None:
            reader.pointers[order, points] = output
    return found


def _inverse_order(reader: Reader, node: Node, rows: Batched, counts: Sequence[int]) -> list[State]:
    """Sorting the positions that a sort returned gives the position to which each row went."""
    length = rows.length(reader.num_examples)
    base = reader.pointers.get((rows.order, rows.points))
    is_permutation = base is not None and _is(
        constant_value(reader, node.inputs[0], {base: np.arange(length)}), np.arange(length)
    )
    if not is_permutation or rows.points is None or id(node.outputs[0]) in reader.graph.live:
        raise NotRowwise("it sorts the examples")
    back = Batched(0, 1, rows.inner, rows.points, rows.order)
    for position in counts:
        reader.pointers[rows.points, rows.order] = node.outputs[position]
    return [back] * len(node.outputs)


def _rows_per_target(reader: Reader, indices: Value, rows: Batched, target: Value) -> int:
    """The number of positions that point at each row of `target`; with `order // 2` it is 2."""
    length = rows.length(reader.num_examples)
    base = reader.pointers.get((rows.order, rows.points))
    each, rest = divmod(length, target.shape[0])
    if base is None or rest or indices.shape != (length, 1) or target.shape[0] % reader.num_examples:
        raise NotRowwise("it looks up rows of other examples")
    known = constant_value(reader, indices, {base: np.arange(length, dtype=np.int64)})
    if not _is(known, (np.arange(length) // each)[:, None]):
        raise NotRowwise("it looks up rows of other examples")
    return each


def look_up(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """A gather by the positions that a sort returned."""
    operand, indices = states
    numbers, params = node.params["dimension_numbers"], node.params
    assert isinstance(indices, Batched)
    source = node.inputs[0]
    each = _rows_per_target(reader, node.inputs[1], indices, source)
    fits = (
        isinstance(operand, Batched)
        and (operand.axis, operand.outer, operand.points) == (0, 1, None)
        and operand.order == indices.points
        and operand.inner * each == indices.inner
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(params["slice_sizes"]) == (1, *source.shape[1:])
    )
    if not fits:
        raise NotRowwise("it looks up rows of other examples")
    axis = next(axis for axis in range(node.outputs[0].ndim) if axis not in numbers.offset_dims)
    return RuleResult([Batched(axis, 1, indices.inner, indices.order)], reorders=True)


def put_back(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """A scatter to the positions that a sort returned: each row to its own place, or several added up in one place."""
    operand, indices, updates = states
    numbers = node.params["dimension_numbers"]
    assert isinstance(indices, Batched)
    target, vectors, values = node.inputs
    each = _rows_per_target(reader, vectors, indices, target)
    adds = node.name in SCATTER_ADD
    place = Batched(0, 1, indices.inner // each, indices.points or 0)
    windows = tuple(range(1, target.ndim))
    fits = (
        (adds or (node.name == "scatter" and each == 1))
        and updates == Batched(0, 1, indices.inner, indices.order)
        and (operand == place or (operand == INVARIANT and reader.is_zero(target)))
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and tuple(numbers.update_window_dims) == windows
        and not numbers.operand_batching_dims
        and values.shape[1:] == target.shape[1:]
    )
    if not fits:
        raise NotRowwise("it writes into rows of other examples")
    return RuleResult([place], [Batched(0, 1, place.inner), None, None], reorders=True)


def multiply_groups(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """A product of sorted rows in groups. The groups must be those that the rows were sorted by."""
    numbers = node.params["ragged_dot_dimension_numbers"]
    rows, weights, sizes = states
    fits = (
        isinstance(rows, Batched)
        and rows.order in reader.sorted_by
        and rows.points is None
        and (weights, sizes) == (INVARIANT, SUMMED)
        and tuple(numbers.lhs_ragged_dimensions) == (rows.axis,) == (0,)
        and not any(numbers.dot_dimension_numbers[1])
        and tuple(numbers.rhs_group_dimensions) == (0,)
    )
    if not fits:
        raise NotRowwise("it multiplies examples in groups that are formed across the batch")
    assert isinstance(rows, Batched)
    keys, length, num_groups = reader.sorted_by[rows.order], rows.length(reader.num_examples), node.inputs[1].shape[0]
    if not _is_below(keys, num_groups) or not _counts(keys, node.inputs[2], num_groups, length):
        raise NotRowwise("it multiplies groups of examples that are not those by which they were sorted")
    return RuleResult([rows], reorders=True)


def _is_below(keys: Value, num_groups: int) -> bool:
    """Whether the keys are known to be 0 or more and below `num_groups`: they are positions, as from `top_k`."""
    narrowest = _largest(keys)
    while keys.node is not None and keys.node.name in ("reshape", "squeeze", "convert_element_type", "copy", "slice"):
        keys = keys.node.inputs[0]
        narrowest = min(narrowest, _largest(keys))
    node = keys.node
    # top_k returns the largest values, then their positions.
    if node is None or node.name not in ("top_k", "argmax", "argmin") or keys is not node.outputs[-1]:
        return False
    axis = node.params["axes"][0] if "axes" in node.params else node.params.get("axis", -1)
    return node.inputs[0].shape[axis] <= min(num_groups, narrowest + 1)


def _largest(value: Value) -> int:
    """The largest integer that the dtype of a value can hold; 0 for other dtypes, which may round."""
    return int(jnp.iinfo(value.dtype).max) if jax.dtypes.issubdtype(value.dtype, np.integer) else 0


def _counts(keys: Value, sizes: Value, num_groups: int, length: int) -> bool:
    """Whether `sizes` counts how often each key occurs. Tested with keys that are equal, in turn, and random."""
    random = np.random.default_rng(0)
    trials = [np.full(length, group) for group in {0, num_groups // 2, num_groups - 1}]
    trials += [np.arange(length) % num_groups, np.sort(random.integers(0, num_groups, length))]
    trials += [random.integers(0, num_groups, length), random.integers(0, num_groups, length) ** 2 % num_groups]
    if not jax.dtypes.issubdtype(keys.dtype, np.integer) or sizes.shape != (num_groups,):
        return False
    try:
        with jax.ensure_compile_time_eval():
            return all(
                _is(FullBatch({keys: jnp.asarray(trial, keys.dtype)})[sizes], np.bincount(trial, minlength=num_groups))
                for trial in trials
            )
    except KeyError:  # the sizes depend on something else as well
        return False


def _is(found: Any, expected: np.ndarray[Any, Any]) -> bool:
    return found is not None and np.array_equal(np.asarray(found), expected)


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
    return RuleResult([rows], [rows, rows, *[None] * len(states[2:])])


def _with_column(indices: Value, column: int) -> tuple[Value, int]:
    """The value that a column of index vectors comes from, and the column of it."""
    value, node = indices, indices.node
    while node is not None:
        if node.name in ("convert_element_type", "copy"):
            value = node.inputs[0]
        elif node.name == "concatenate" and node.params["dimension"] == value.ndim - 1:
            ends = list(itertools.accumulate(part.shape[-1] for part in node.inputs))
            number = next(number for number, end in enumerate(ends) if column < end)
            value, column = node.inputs[number], column - (ends[number] - node.inputs[number].shape[-1])
        elif node.name == "slice" and node.inputs[0].shape[:-1] == value.shape[:-1] and not node.params["strides"]:
            value, column = node.inputs[0], column + node.params["start_indices"][-1]
        else:
            break
        node = value.node
    return value, column


def own_row_axis(reader: Reader, indices: Value, column: int, length: int) -> int | None:
    """The axis of `indices` along which that column of the index vectors counts 0, 1, 2, ... up to `length`.

    With it `logits[arange(N), labels]` is recognised: each example looks up in its own row.
    """
    value, column = _with_column(indices, column)
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


def _counted_from_here(indices: Any, column: int, axis: int) -> Any:
    """Index vectors in which that column, which counts along an axis, is a row number in the microbatch."""
    counted = lax.broadcasted_iota(indices.dtype, (*indices.shape[:-1], 1), axis)
    parts = [indices[..., :column], counted, indices[..., column + 1 :]]
    return lax.concatenate([part for part in parts if part.shape[-1]], indices.ndim - 1)


@rule("gather")
def _gather(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    operand, indices = states
    if operand == SUMMED:
        fill = node.params.get("fill_value")
        if indices == INVARIANT and (fill is None or fill != fill or fill == 0):
            return RuleResult([SUMMED])
        refuse_sums(states)
    if indices == SUMMED:
        raise NotRowwise("it looks up by an index that is a sum over the batch")
    if isinstance(indices, Batched) and indices.points is not None:
        return look_up(reader, node, states)
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
                local = _counted_from_here(local, column, index_axis)
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
        refuse_sums(states)
    if isinstance(indices, Batched) and indices.points is not None:
        return put_back(reader, node, states)
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
            operands[1] = _counted_from_here(operands[1], column, axes[1])
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
