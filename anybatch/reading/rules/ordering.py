"""Rules for examples that are sorted across the batch and put back, as a mixture of experts does with its tokens.

    order = argsort(experts)                         # the tokens, by the expert that they are for
    y = ragged_dot(x[order], weights, group_sizes)   # each group of them times the matrix of its expert
    y = y[argsort(order)]                            # back in the order of the batch

A microbatch that sorts its own tokens gets the same result for each of them, although its order differs. So rows may
be sorted if nothing that happens to them before they are put back depends on their position.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.jaxprs.graph import Node, Value
from anybatch.jaxprs.primitives import SCATTER_ADD
from anybatch.reading.coupling import NotRowwise
from anybatch.reading.evaluation import FullBatch, constant_value
from anybatch.reading.reader import Reader, RuleResult
from anybatch.reading.states import INVARIANT, SUMMED, Batched, State

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
    keys, length = reader.sorted_by[rows.order], rows.length(reader.num_examples)
    if not _is_below(keys, node.inputs[1].shape[0]) or not _counts(
        keys, node.inputs[2], node.inputs[1].shape[0], length
    ):
        raise NotRowwise("it multiplies groups of examples that are not those by which they were sorted")
    return RuleResult([rows], reorders=True)


def _is_below(keys: Value, num_groups: int) -> bool:
    """Whether the keys are known to be below `num_groups`: they are positions along an axis, as from `top_k`."""
    node = keys.node
    while node is not None and node.name in ("reshape", "squeeze", "convert_element_type", "copy", "slice"):
        node = node.inputs[0].node
    if node is None or node.name not in ("top_k", "argmax", "argmin"):
        return False
    axis = node.params["axes"][0] if "axes" in node.params else node.params.get("axis", -1)
    return node.inputs[0].shape[axis] <= num_groups


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
