"""Computes values of a graph: for the full batch, or for the examples of one microbatch.

`FullBatch` evaluates the equations as they are. `Microbatch` evaluates them as their rules say. `Lookup` computes rows
of data that a loss selects from its batch, as `x[::2]` and `jnp.roll(x, 1, 0)` do, without a copy of all rows.
`constant_value` computes values that depend on neither the batch nor the parameters, while the loss is read.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.errors import AnybatchError
from anybatch.jaxprs.graph import Node, Value, sources
from anybatch.jaxprs.primitives import ELEMENTWISE, MOVES
from anybatch.reading import positions
from anybatch.reading.reader import Reader, RuleResult
from anybatch.reading.states import INVARIANT, SUMMED, Batched, RuleFailed, State, failure_of, replaced, take_rows

_MAX_DEPTH = 60  # operations that an invariant value is followed back through, in search of rows that are cheap
_MAX_STEPS = 200  # operations that the rows of one value are followed back through, before all of it is computed
_MAX_PARTS = 4  # of a concatenation: rows of every part are looked up, and most of them dropped
_MAX_SIZE = 1 << 22  # elements of a constant that is computed while the loss is read
_MAX_CONSTANT_DEPTH = 60  # operations that such a constant is computed by


class FullBatch:
    """Computes values for the full batch from known ones, each when it is first asked for. Notes what is drawn.

    On a mesh, XLA divides the work among the devices. Then `rows_of` tells the axis of a value that has the rows of the
    examples, or None.
    """

    def __init__(
        self,
        known: Mapping[Value, Any],
        draw: positions.Draw | None = None,
        rows_of: Callable[[Value], int | None] | None = None,
    ) -> None:
        self.known, self.draw, self.rows_of = dict(known), draw, rows_of

    def __getitem__(self, value: Value) -> Any:
        if value.is_constant:
            return value.known
        if value not in self.known:
            self._compute(value)
        return self.known[value]

    def _compute(self, wanted: Value) -> None:
        nodes: dict[int, Node] = {}
        for value in sources([wanted], self.known.__contains__):
            if value.node is not None and value not in self.known:
                nodes[value.node.index] = value.node
            elif value not in self.known:
                raise KeyError("an input that was not given")
        for index in sorted(nodes):
            self.run(nodes[index])

    def run(self, node: Node) -> None:
        """Computes one node."""
        if self.draw is not None and node.name == "random_bits":
            self.draw.note(node, self.draw.for_full_batch)
        operands = [self[value] for value in node.inputs]
        results = node(operands) if self.rows_of is None else _divided(node, operands, self.rows_of)
        for output, result in zip(node.outputs, results, strict=True):
            self.known.setdefault(output, result)


def _divided(node: Node, operands: list[Any], rows_of: Callable[[Value], int | None]) -> list[Any]:
    """The results of a node that XLA divides among devices, where it would give others than on one device."""
    results = node(operands)
    name = node.name.replace("-", "_")
    is_over_rows = rows_of(node.inputs[0]) in node.params["axes"] if name in ("reduce_max", "reduce_min") else None
    if name in ("scatter_max", "scatter_min"):
        is_over_rows = any(rows_of(value) is not None for value in node.inputs)
    if not is_over_rows or not jax.dtypes.issubdtype(results[0].dtype, np.floating):
        return results
    # The largest or smallest number over devices leaves out NaN. Its gradient is multiplied by NaN, too.
    largest = 1 if name.endswith("max") else -1
    flags = [
        largest * jnp.isnan(each).astype(each.dtype) if jax.dtypes.issubdtype(each.dtype, np.floating) else each
        for each in operands
    ]
    (has_nan,) = node(flags)
    return [jnp.where(has_nan == largest, np.nan, 1).astype(results[0].dtype) * results[0]]


class Examples(NamedTuple):
    """The examples of a microbatch."""

    start: Any  # the index in the batch of the first example. It may be traced.
    size: int
    runs: int = 1  # of consecutive examples that they are made of; `start` is in the first
    selection: int | None = None  # the rows that count as examples, if they are not those of the batch; see `Fact`


class Microbatch:
    """Computes the values of the prefix for the examples of a microbatch.

    `known` has the inputs, of which batched ones have the rows of these examples only. `full` has values of the full
    batch: batched inputs, and values that were computed before. If `looks_up`, it has all batched inputs, so that
    selected rows can be looked up in them.
    """

    def __init__(
        self,
        reader: Reader,
        examples: Examples,
        known: Mapping[Value, Any],
        full: Mapping[Value, Any],
        draw: positions.Draw,
        looks_up: bool = False,
    ) -> None:
        self.reader, self.draw = reader, draw
        self.start, self.size, self.runs, self.selection = examples
        self.num_examples = reader.count(self.selection)
        self.known = dict(known)
        invariant = {value: array for value, array in known.items() if reader.state(value) == INVARIANT}
        self.full_batch = FullBatch({**invariant, **full}, draw)
        self._rows: dict[tuple[Value, Batched], Any] = {}
        self._in_full: Collection[Value] = ()
        self._depth = 0
        self._lookup = Lookup(self.full_batch) if looks_up else None

    def nested(self, reader: Reader, operands: Sequence[Any], states: Sequence[State], start: Any = None) -> list[Any]:
        """The results of a nested function, in the given states.

        A function with a custom derivative must not close over tracers, so it gets `start` as an argument.
        """
        inner = Microbatch(
            reader,
            Examples(self.start if start is None else start, self.size, self.runs),
            known=dict(zip(reader.graph.inputs, operands, strict=True)),
            full={},
            draw=self.draw,
        )
        inner.run(reader.graph.outputs)
        return [inner.as_state(output, state) for output, state in zip(reader.graph.outputs, states, strict=True)]

    def run(self, wanted: Sequence[Value]) -> None:
        """Computes the wanted values. Invariant ones are computed when they are first used."""
        outcomes, pending = self.reader.outcomes, list(wanted)
        nodes = {
            node.index: node
            for node, outcome in outcomes.items()
            if node.has_effects and outcome.selection == self.selection
        }
        for node in nodes.values():
            pending.extend(operand for operand in node.inputs if operand not in outcomes[node].in_full)
        while pending:
            value = pending.pop()
            if value.is_constant or value in self.known or value.node is None or value.node.index in nodes:
                continue
            if self.reader.top and self.reader.state(value) == INVARIANT:
                continue
            if value in self.reader.cut_later:
                self.known[value] = self._rows_known_first(value)
                continue
            nodes[value.node.index] = value.node
            in_full = outcomes[value.node].in_full if value.node in outcomes else ()
            pending.extend(operand for operand in value.node.inputs if operand not in in_full)
        for index in sorted(nodes):
            self._run_node(nodes[index])

    def _run_node(self, node: Node) -> None:
        outcome = self.reader.outcomes.get(node)
        if outcome is None:
            return
        self._in_full = outcome.in_full
        try:
            results = self._results(node, outcome)
        except (AnybatchError, jax.errors.JaxRuntimeError, FloatingPointError):
            raise
        except Exception as error:
            raise RuleFailed(failure_of(node, error)) from error
        self._in_full = ()
        for output, result in zip(node.outputs, results, strict=True):
            self.known[output] = result
            if self.reader.state(output) == INVARIANT:  # the counter of a loop, for example
                self.full_batch.known[output] = result

    def _results(self, node: Node, outcome: RuleResult) -> list[Any]:
        if outcome.run is not None:
            return outcome.run(self)
        takes = outcome.takes or [None] * len(node.inputs)
        operands = [self.value(operand, rows) for operand, rows in zip(node.inputs, takes, strict=True)]
        return node(operands, None if outcome.params is None else outcome.params(self.size))

    def value(self, value: Value, rows: Batched | None = None) -> Any:
        """A value for these examples. If it is invariant: all of it, or, with `rows`, the rows of these examples."""
        if self.reader.state(value) == INVARIANT or value in self._in_full:
            return self.full_batch[value] if rows is None else self.rows(value, rows)
        return self.known[value]

    def as_state(self, value: Value, state: State) -> Any:
        """A value for these examples, in the state that all branches have in common."""
        own = self.reader.state(value)
        if own == state:
            return self.value(value)
        if own == INVARIANT and isinstance(state, Batched):
            return self.rows(value, state)
        if own == INVARIANT and state == SUMMED:
            return jnp.zeros(value.shape, value.dtype)
        raise AssertionError(f"{own} is not {state}")

    def rows(self, value: Value, rows: Batched) -> Any:
        """The rows of these examples, of an invariant value. Where possible, the other rows are not computed."""
        if value.ndim == 0:
            return self.full_batch[value]
        key = (value, rows)
        if key not in self._rows:
            if value.shape[rows.axis] != rows.length(self.num_examples):
                raise AssertionError(f"{value} has no {rows}")
            direct = None
            node = None if value.is_constant or value in self.full_batch.known else value.node
            if node is not None and self._depth < _MAX_DEPTH:
                self._depth += 1
                direct = positions.compute_rows(self, node, value, rows)
                self._depth -= 1
            self._rows[key] = self.cut(self.full_batch[value], rows) if direct is None else direct
        return self._rows[key]

    def cut(self, array: Any, rows: State) -> Any:
        """The rows of these examples, of an array of the full batch."""
        assert isinstance(rows, Batched)
        return take_rows(jnp.asarray(array), rows, self.num_examples, self.start, self.size, self.runs)

    def _rows_known_first(self, value: Value) -> Any:
        """The rows of these examples, of a value that is computed from data before the first microbatch.

        Rows that are selected from the data by their positions are looked up in the data, without a copy of all rows.
        """
        rows, selected = self.reader.state(value), None
        assert isinstance(rows, Batched)
        if self._lookup is not None:
            numbers = self.numbers(lax.iota(jnp.int32, rows.length(self.size)), rows.inner)
            selected = self._lookup.rows(value, numbers, rows.axis)
        return self.cut(self.full_batch[value], rows) if selected is None else selected

    # A row has a number in the batch, and a number in this microbatch. There are `inner` rows for each example.

    def numbers(self, counted: Any, inner: int) -> Any:
        """The numbers in the batch of rows with the given numbers in this microbatch."""
        own, all_of_run = self._run_lengths(counted.dtype, inner)
        first = jnp.asarray(self.start).astype(counted.dtype) * counted.dtype.type(inner)
        return counted // own * all_of_run + first + counted % own

    def _run_lengths(self, dtype: Any, inner: int) -> tuple[Any, Any]:
        own, everyone = self.size // self.runs, self.num_examples // self.runs
        return dtype.type(own * inner), dtype.type(everyone * inner)


class Lookup:
    """Computes rows of data at given positions, from rows of the operands where that is possible."""

    def __init__(self, known: FullBatch) -> None:
        self._known = known
        self._found: dict[tuple[Value, int, int], tuple[Any, Any]] = {}
        self._depth = self._steps = 0

    def rows(self, value: Value, numbers: Any, axis: int) -> Any:
        """The rows of these numbers along an axis, of a value of data alone; None if all must be computed first."""
        if self._depth == 0:
            self._steps = 0
        key = (value, id(numbers), axis)
        if key not in self._found:  # keeps the numbers alive, whose id is part of the key
            self._steps += 1
            # Each shift asks for rows at new numbers: the steps of a program with many shifts grow exponentially.
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
        """The rows of a result of a node, from rows of its operands."""
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
        axes = positions.axes_of_operands(node, value, axis)
        if axes in (None, [None]) or node.name not in ELEMENTWISE | {"broadcast_in_dim"}:
            return None
        operands = [
            self._known[operand] if before is None else self.rows(operand, numbers, before)
            for operand, before in zip(node.inputs, axes or (), strict=True)
        ]
        if any(operand is None for operand in operands):
            return None
        return node(operands, positions.with_length(node, axis, numbers.size))[0]

    def _dynamically_sliced(self, node: Node, numbers: Any, axis: int) -> Any:
        source, *starts = node.inputs
        sizes = node.params["slice_sizes"]
        at = [self._known[start] for start in starts]
        start = jnp.asarray(at[axis])
        if start.dtype.itemsize < numbers.dtype.itemsize:
            start = start.astype(numbers.dtype)  # a narrow dtype may not hold the last start
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
        """The rows of a gather, along an axis of its indices."""
        source, indices = node.inputs
        dimensions = node.params["dimension_numbers"]
        looked_up = [dimension for dimension in range(node.outputs[0].ndim) if dimension not in dimensions.offset_dims]
        if axis not in looked_up or dimensions.start_indices_batching_dims:
            return None
        if source not in self._known.known:
            return None  # any row of the source may be needed, so it must be in memory already
        mine = self.rows(indices, numbers, looked_up.index(axis))
        if mine is None:
            mine = jnp.take(jnp.asarray(self._known[indices]), numbers, looked_up.index(axis), mode="clip")
        return node([self._known[source], mine])[0]


def _sliced(node: Node, found: Any, axis: int) -> Any:
    """A slice along the other axes only, of rows that are already sliced."""
    params = dict(node.params)
    for name, number in (("start_indices", 0), ("limit_indices", found.shape[axis]), ("strides", 1)):
        if params[name] is not None:
            params[name] = replaced(params[name], axis, number)
    return node([found], params)[0]


def _along(flags: Any, axis: int, like: Any) -> Any:
    """Flags of rows, broadcast to the shape of an array with these rows."""
    return lax.broadcast_in_dim(flags, like.shape, [axis])


def constant_value(
    reader: Reader, value: Value, given: Mapping[Value, Any] | None = None
) -> np.ndarray[Any, Any] | None:
    """The value, if it is computed from constants and `given` values alone; otherwise None."""
    known: dict[Value, Any] = dict(given or {})

    def evaluate(value: Value, depth: int) -> Any:
        if value.is_constant:
            return None if isinstance(value.known, jax.core.Tracer) else value.known
        if value in known:
            return known[value]
        known[value] = None  # each value is asked once, also if it is not known in the end
        node = value.node
        if value.hint is not None:
            return value.hint
        if node is None or depth > _MAX_CONSTANT_DEPTH or value.size > _MAX_SIZE:
            return None
        if node.name not in ELEMENTWISE | MOVES:
            return None
        operands = [evaluate(operand, depth + 1) for operand in node.inputs]
        if any(operand is None for operand in operands):
            return None
        with jax.ensure_compile_time_eval():
            known.update(zip(node.outputs, node(operands), strict=True))
        return known[value]

    if value.size > _MAX_SIZE or value.is_key:
        return None
    try:
        found = evaluate(value, 0)
        return None if found is None else np.asarray(found)
    except Exception:  # it cannot be evaluated ahead of time, for example in a shard_map without jit
        return None
