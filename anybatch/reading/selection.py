"""Rows of data at given positions, where a loss selects rows from its batch: `x[::2]`, `x[1:]`, `jnp.roll(x, 1, 0)`.

Such data is known before the first microbatch. Its rows for one microbatch are looked up where they came from, so that
no copy is made of all of it.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

from anybatch.reading.graph import ELEMENTWISE, Node, Value
from anybatch.reading.states import replaced

_MAX_STEPS = 200  # operations that the rows of one value are followed back through, before all of it is computed
_MAX_PARTS = 4  # of a concatenation: rows of every part are looked up, and most of them dropped


class Lookup:
    """Looks up rows of data.

    Args:
      known: values at the full batch: `known[value]` computes one, and `known.known` holds those that are there.
    """

    def __init__(self, known: Any) -> None:
        self._known = known
        self._found: dict[tuple[Value, int, int], tuple[Any, Any]] = {}
        self._depth = self._steps = 0

    def rows(self, value: Value, numbers: Any, axis: int) -> Any:
        """The rows of a value along an axis, or None if they can only be taken from the whole computed value.

        Args:
          value: the value, of data alone.
          numbers: the numbers of the rows, all of them within the value.
          axis: the axis of the rows.
        """
        if self._depth == 0:
            self._steps = 0
        key = (value, id(numbers), axis)
        if key not in self._found:  # with the numbers, which must live as long as their identity is a key
            self._steps += 1
            # Rows of neighbours are looked up at other numbers: many steps of such a program double each time.
            if value.is_key or self._steps > _MAX_STEPS:
                return None
            self._depth += 1
            self._found[key] = (numbers, self._look_up(value, numbers, axis))
            self._depth -= 1
        return self._found[key][1]

    def _look_up(self, value: Value, numbers: Any, axis: int) -> Any:
        node = None if value.is_constant else value.node
        found = None if node is None else self._rows_of(node, value, numbers, axis)
        if found is None and (value.is_constant or value in self._known.known):
            return jnp.take(jnp.asarray(self._known[value]), numbers, axis, mode="clip")
        return found

    def _rows_of(self, node: Node, value: Value, numbers: Any, axis: int) -> Any:
        """The rows of what a node computes, from those of its operands."""
        params = node.params
        if node.name == "slice":
            first, stride = params["start_indices"][axis], params["strides"][axis] if params["strides"] else 1
            found = self.rows(node.inputs[0], numbers if (first, stride) == (0, 1) else first + numbers * stride, axis)
            return None if found is None else _sliced(node, found, axis)
        if node.name == "dynamic_slice":
            return self._dynamically_sliced(node, numbers, axis)
        if node.name == "rev":
            numbers = value.shape[axis] - 1 - numbers if axis in params["dimensions"] else numbers
            found = self.rows(node.inputs[0], numbers, axis)
            others = tuple(dimension for dimension in params["dimensions"] if dimension != axis)
            return None if found is None else node([found], {**params, "dimensions": others})[0]
        if node.name == "pad":
            return self._padded(node, numbers, axis)
        if node.name == "concatenate" and params["dimension"] == axis and len(node.inputs) <= _MAX_PARTS:
            return self._joined(node, numbers, axis)
        if node.name == "gather":
            return self._gathered(node, numbers, axis)
        if node.name == "broadcast_in_dim" and len(node.inputs) == 1 and axis in params["broadcast_dimensions"]:
            before = list(params["broadcast_dimensions"]).index(axis)
            if node.inputs[0].shape[before] != value.shape[axis]:
                return None
            found = self.rows(node.inputs[0], numbers, before)
            smaller = {**params, "shape": replaced(params["shape"], axis, numbers.size)}
            return None if found is None else node([found], smaller)[0]
        if node.name in ELEMENTWISE and all(operand.shape in ((), value.shape) for operand in node.inputs):
            operands = [
                self.rows(operand, numbers, axis) if operand.ndim else self._known[operand] for operand in node.inputs
            ]
            return None if any(operand is None for operand in operands) else node(operands)[0]
        return None

    def _dynamically_sliced(self, node: Node, numbers: Any, axis: int) -> Any:
        source, *starts = node.inputs
        sizes = node.params["slice_sizes"]
        at = [self._known[start] for start in starts]
        start = jnp.asarray(at[axis])
        if start.dtype.itemsize < numbers.dtype.itemsize:
            start = start.astype(numbers.dtype)  # a narrow one may not hold the last start
        first = jnp.clip(start, 0, source.shape[axis] - sizes[axis]).astype(numbers.dtype)
        found = self.rows(source, first + numbers, axis)
        at[axis] = jnp.zeros((), jnp.result_type(at[axis]))
        smaller = {**node.params, "slice_sizes": replaced(sizes, axis, numbers.size)}
        return None if found is None else node([found, *at], smaller)[0]

    def _padded(self, node: Node, numbers: Any, axis: int) -> Any:
        operand, value = node.inputs
        low, _, inside = node.params["padding_config"][axis]
        if operand.shape[axis] == 0:
            return None
        row, between = jnp.divmod(numbers - low, inside + 1)
        is_row = (between == 0) & (row >= 0) & (row < operand.shape[axis])
        found = self.rows(operand, jnp.where(is_row, row, 0), axis)
        if found is None:
            return None
        config = list(node.params["padding_config"])
        config[axis] = (0, 0, 0)
        filler = self._known[value]
        found = node([found, filler], {**node.params, "padding_config": tuple(config)})[0]
        return jnp.where(_along(is_row, axis, found), found, jnp.broadcast_to(filler, found.shape))

    def _joined(self, node: Node, numbers: Any, axis: int) -> Any:
        first, joined = 0, None
        for part in node.inputs:
            length = part.shape[axis]
            if not length:
                continue
            found = self.rows(part, jnp.clip(numbers - first, 0, length - 1), axis)
            if found is None:
                return None
            joined = found if joined is None else jnp.where(_along(numbers >= first, axis, found), found, joined)
            first += length
        return joined

    def _gathered(self, node: Node, numbers: Any, axis: int) -> Any:
        """The rows that an array of indices looks up, along the axis of these indices."""
        source, indices = node.inputs
        dimensions = node.params["dimension_numbers"]
        looked_up = [dimension for dimension in range(node.outputs[0].ndim) if dimension not in dimensions.offset_dims]
        if axis not in looked_up or dimensions.start_indices_batching_dims:
            return None
        if source not in self._known.known:
            return None  # any row of the source may be asked for, so that it must be in memory already
        mine = self.rows(indices, numbers, looked_up.index(axis))
        if mine is None:
            mine = jnp.take(jnp.asarray(self._known[indices]), numbers, looked_up.index(axis), mode="clip")
        return node([self._known[source], mine])[0]


def _sliced(node: Node, found: Any, axis: int) -> Any:
    """What a slice does along the other axes."""
    params = dict(node.params)
    for name, number in (("start_indices", 0), ("limit_indices", found.shape[axis]), ("strides", 1)):
        if params[name] is not None:
            params[name] = replaced(params[name], axis, number)
    return node([found], params)[0]


def _along(flags: Any, axis: int, like: Any) -> Any:
    """Flags of rows, in the shape of an array with these rows."""
    return lax.broadcast_in_dim(flags, like.shape, [axis])
