"""Rows of data at given positions, where a loss selects rows from its batch: `x[::2]`, `x[1:]`, `jnp.roll(x, 1, 0)`.

Such data is known before the first microbatch. Its rows for one microbatch are looked up where they came from.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from anybatch.reading.graph import ELEMENTWISE, Node, Value
from anybatch.reading.states import replaced


def rows_at(known: Any, value: Value, numbers: Any, axis: int) -> Any:
    """The rows of a value along an axis, or None if all of it must be computed first.

    Args:
      known: values at the full batch: `known[value]` computes one, and `known.known` holds those that are there.
      value: the value, of data alone.
      numbers: the numbers of the rows, all of them within the value.
      axis: the axis of the rows.
    """
    if value.is_key:
        return None
    node = None if value.is_constant else value.node
    found = None if node is None else _rows_of(known, node, value, numbers, axis)
    if found is None and (value.is_constant or value in known.known):
        return jnp.take(jnp.asarray(known[value]), numbers, axis, mode="clip")
    return found


def _rows_of(known: Any, node: Node, value: Value, numbers: Any, axis: int) -> Any:
    """The rows of what a node computes, from those of its operands."""
    params = node.params
    if node.name == "slice":
        stride = params["strides"][axis] if params["strides"] else 1
        found = rows_at(known, node.inputs[0], params["start_indices"][axis] + numbers * stride, axis)
        return None if found is None else _sliced(node, found, axis)
    if node.name == "dynamic_slice" and all(start in known.known or start.is_constant for start in node.inputs[1:]):
        source, *starts = node.inputs
        sizes = node.params["slice_sizes"]
        first = jnp.clip(jnp.asarray(known[starts[axis]], numbers.dtype), 0, source.shape[axis] - sizes[axis])
        found = rows_at(known, source, first + numbers, axis)
        smaller = {**params, "slice_sizes": replaced(sizes, axis, numbers.size)}
        zero = jnp.zeros((), jnp.result_type(known[starts[axis]]))
        at = [zero if dimension == axis else known[start] for dimension, start in enumerate(starts)]
        return None if found is None else node([found, *at], smaller)[0]
    if node.name == "rev":
        reversed_numbers = value.shape[axis] - 1 - numbers if axis in params["dimensions"] else numbers
        found = rows_at(known, node.inputs[0], reversed_numbers, axis)
        others = tuple(dimension for dimension in params["dimensions"] if dimension != axis)
        return None if found is None else node([found], {**params, "dimensions": others})[0]
    if node.name == "pad":
        return _padded(known, node, numbers, axis)
    if node.name == "concatenate" and params["dimension"] == axis:
        return _joined(known, node, numbers, axis)
    if node.name == "gather":
        return _gathered(known, node, numbers, axis)
    if node.name == "broadcast_in_dim" and len(node.inputs) == 1 and axis in params["broadcast_dimensions"]:
        before = list(params["broadcast_dimensions"]).index(axis)
        if node.inputs[0].shape[before] != value.shape[axis]:
            return None
        found = rows_at(known, node.inputs[0], numbers, before)
        smaller = {**params, "shape": replaced(params["shape"], axis, numbers.size)}
        return None if found is None else node([found], smaller)[0]
    if node.name in ELEMENTWISE and all(operand.shape in ((), value.shape) for operand in node.inputs):
        operands = [
            rows_at(known, operand, numbers, axis) if operand.ndim else known[operand] for operand in node.inputs
        ]
        return None if any(operand is None for operand in operands) else node(operands)[0]
    return None


def _sliced(node: Node, found: Any, axis: int) -> Any:
    """What a slice does along the other axes."""
    params = dict(node.params)
    for name, number in (("start_indices", 0), ("limit_indices", found.shape[axis]), ("strides", 1)):
        if params[name] is not None:
            params[name] = replaced(params[name], axis, number)
    return node([found], params)[0]


def _padded(known: Any, node: Node, numbers: Any, axis: int) -> Any:
    operand, value = node.inputs
    low, _, inside = node.params["padding_config"][axis]
    if operand.shape[axis] == 0:
        return None
    row, between = jnp.divmod(numbers - low, inside + 1)
    is_row = (between == 0) & (row >= 0) & (row < operand.shape[axis])
    found = rows_at(known, operand, jnp.where(is_row, row, 0), axis)
    if found is None:
        return None
    config = list(node.params["padding_config"])
    config[axis] = (0, 0, 0)
    found = node([found, known[value]], {**node.params, "padding_config": tuple(config)})[0]
    filler = jnp.broadcast_to(jnp.asarray(known[value], found.dtype), found.shape)
    return jnp.where(_along(is_row, axis, found), found, filler)


def _joined(known: Any, node: Node, numbers: Any, axis: int) -> Any:
    first, joined = 0, None
    for part in node.inputs:
        length = part.shape[axis]
        if not length:
            continue
        found = rows_at(known, part, jnp.clip(numbers - first, 0, length - 1), axis)
        if found is None:
            return None
        joined = found if joined is None else jnp.where(_along(numbers >= first, axis, found), found, joined)
        first += length
    return joined


def _gathered(known: Any, node: Node, numbers: Any, axis: int) -> Any:
    """The rows that an array of indices looks up, along the axis of these indices."""
    source, indices = node.inputs
    dimensions = node.params["dimension_numbers"]
    looked_up = [dimension for dimension in range(node.outputs[0].ndim) if dimension not in dimensions.offset_dims]
    if axis not in looked_up or dimensions.start_indices_batching_dims:
        return None
    if source not in known.known:
        return None  # all of it is needed: it must be one of the arrays that were given, or a copy has to be made
    mine = rows_at(known, indices, numbers, looked_up.index(axis))
    if mine is None:
        mine = jnp.take(jnp.asarray(known[indices]), numbers, looked_up.index(axis), mode="clip")
    return node([known[source], mine])[0]


def _along(flags: Any, axis: int, like: Any) -> Any:
    """Flags of rows, in the shape of an array with these rows."""
    return lax.broadcast_in_dim(flags, like.shape, [axis])
