"""Computes values of a graph: at the full batch, or for the examples of one microbatch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.errors import AnybatchError
from anybatch.reading import positions, source
from anybatch.reading.graph import Node, Value
from anybatch.reading.reader import Outcome, Reader
from anybatch.reading.selection import Lookup
from anybatch.reading.states import SUM, WHOLE, Rows, RuleFailed, State, failure_of, take_rows

_MAX_DEPTH = 60  # operations that a whole value is followed back through, in search of rows that are cheap


class FullBatch:
    """Computes values at the full batch, each when it is first asked for.

    Args:
      known: values that are given: the inputs, and for the head also what the microbatches made.
      draw: where to note which random numbers are drawn.
    """

    def __init__(self, known: Mapping[Value, Any], draw: positions.Draw | None = None) -> None:
        self.known, self.draw = dict(known), draw

    def __getitem__(self, value: Value) -> Any:
        if value.is_constant:
            return value.known
        if value not in self.known:
            self._compute(value)
        return self.known[value]

    def _compute(self, wanted: Value) -> None:
        nodes: dict[int, Node] = {}
        pending = [wanted]
        while pending:
            value = pending.pop()
            if value.is_constant or value in self.known:
                continue
            if value.node is None:
                raise KeyError("an input that was not given")
            if value.node.index not in nodes:
                nodes[value.node.index] = value.node
                pending.extend(value.node.inputs)
        for index in sorted(nodes):
            self.run(nodes[index])

    def run(self, node: Node) -> None:
        """Computes one node, whose operands are known."""
        if self.draw is not None and node.name == "random_bits":
            self.draw.note(node, self.draw.at_once)
        for output, result in zip(node.outputs, node([self[value] for value in node.inputs]), strict=True):
            self.known.setdefault(output, result)


class Microbatch:
    """Computes the values of the prefix for `size` examples from `start`.

    Args:
      reader: the states of the values.
      start: the index in the batch of the first example, which may be known at run time only.
      size: the number of examples.
      known: values of the inputs: for those with rows, the rows of these examples.
      whole: values at the full batch: of inputs with rows, and of what was computed before.
      draw: how to draw random numbers of which only some rows are needed.
      runs: of how many runs of consecutive examples it is made; `start` is in the first.
      selection: the rows that are counted as examples, if not those of the batch; see `Fact`.
      looks_up: whether `whole` holds the full batch, so that selected rows can be read from it.
    """

    def __init__(
        self,
        reader: Reader,
        start: Any,
        size: int,
        known: Mapping[Value, Any],
        whole: Mapping[Value, Any],
        draw: "positions.Draw",
        runs: int = 1,
        selection: int | None = None,
        looks_up: bool = False,
    ) -> None:
        self.selection, self.num_examples = selection, reader.count(selection)
        self.reader, self.start, self.size, self.draw, self.runs = reader, start, size, draw, runs
        self.known = dict(known)
        wholes = {value: array for value, array in known.items() if reader.state(value) == WHOLE}
        self.whole = FullBatch({**wholes, **whole}, draw)
        self._rows: dict[tuple[Value, Rows], Any] = {}
        self._read_whole: Collection[Value] = ()
        self._depth = 0
        self._lookup = Lookup(self.whole) if looks_up else None

    def nested(self, reader: Reader, operands: Sequence[Any], states: Sequence[State], start: Any = None) -> list[Any]:
        """The results of a nested function, in the given states.

        A function with derivatives of its own must not close over what is traced: it gets `start` as an argument.
        """
        inner = Microbatch(
            reader,
            self.start if start is None else start,
            self.size,
            dict(zip(reader.graph.inputs, operands, strict=True)),
            {},
            self.draw,
            self.runs,
        )
        inner.run(reader.graph.outputs)
        return [inner.as_state(output, state) for output, state in zip(reader.graph.outputs, states, strict=True)]

    def run(self, wanted: Sequence[Value]) -> None:
        """Computes the values wanted, except whole ones, which are computed when they are first used."""
        nodes: dict[int, Node] = {}
        pending = list(wanted)
        for node in self.reader.graph.nodes:
            outcome = self.reader.outcomes.get(node)
            if node.has_effects and outcome is not None and outcome.selection == self.selection:
                nodes[node.index] = node
                pending.extend(operand for operand in node.inputs if operand not in outcome.whole)
        while pending:
            value = pending.pop()
            if value.is_constant or value in self.known or value.node is None or value.node.index in nodes:
                continue
            if self.reader.top and self.reader.state(value) == WHOLE:
                continue
            if value in self.reader.cut_later:
                self.known[value] = self._rows_known_first(value)
                continue
            nodes[value.node.index] = value.node
            outcome = self.reader.outcomes.get(value.node)
            pending.extend(operand for operand in value.node.inputs if outcome is None or operand not in outcome.whole)
        for index in sorted(nodes):
            self._run_node(nodes[index])

    def _run_node(self, node: Node) -> None:
        outcome = self.reader.outcomes.get(node)
        if outcome is None:
            return
        self._read_whole = outcome.whole
        try:
            results = self._results(node, outcome)
        except (AnybatchError, jax.errors.JaxRuntimeError, FloatingPointError):
            raise
        except Exception as error:
            raise RuleFailed(source.blame(node, failure_of(node.name, error))) from error
        self._read_whole = ()
        for output, result in zip(node.outputs, results, strict=True):
            self.known[output] = result
            if self.reader.state(output) == WHOLE:  # the counter of a loop, for example
                self.whole.known[output] = result

    def _results(self, node: Node, outcome: Outcome) -> list[Any]:
        if outcome.run is not None:
            return outcome.run(self)
        takes = outcome.takes or [None] * len(node.inputs)
        operands = [self.value(operand, rows) for operand, rows in zip(node.inputs, takes, strict=True)]
        return node(operands, None if outcome.params is None else outcome.params(self.size))

    def value(self, value: Value, rows: Rows | None = None) -> Any:
        """A value for these examples. Of a whole one, all of it, or the given rows of these examples."""
        if self.reader.state(value) == WHOLE or value in self._read_whole:
            return self.whole[value] if rows is None else self.rows(value, rows)
        return self.known[value]

    def as_state(self, value: Value, state: State) -> Any:
        """A value for these examples, in a state that joins its own with those of other branches."""
        own = self.reader.state(value)
        if own == state:
            return self.value(value)
        if own == WHOLE and isinstance(state, Rows):
            return self.rows(value, state)
        if own == WHOLE and state == SUM:
            return jnp.zeros(value.shape, value.dtype)
        raise AssertionError(f"{own} is not {state}")

    def rows(self, value: Value, rows: Rows) -> Any:
        """The rows of these examples of a whole value, where possible without computing all of it."""
        if value.ndim == 0:
            return self.whole[value]
        key = (value, rows)
        if key not in self._rows:
            if value.shape[rows.axis] != rows.length(self.num_examples):
                raise AssertionError(f"{value} has no {rows}")
            direct = None
            node = None if value.is_constant or value in self.whole.known else value.node
            if node is not None and self._depth < _MAX_DEPTH:
                self._depth += 1
                direct = positions.compute_rows(self, node, value, rows)
                self._depth -= 1
            self._rows[key] = self.cut(self.whole[value], rows) if direct is None else direct
        return self._rows[key]

    def cut(self, array: Any, rows: State) -> Any:
        """The rows of these examples of an array that has those of the full batch."""
        assert isinstance(rows, Rows)
        return take_rows(jnp.asarray(array), rows, self.num_examples, self.start, self.size, self.runs)

    def _rows_known_first(self, value: Value) -> Any:
        """The rows of these examples of what is computed from data before the first microbatch.

        Rows that are selected from the data by their position are taken from the data, so that no copy is made of all.
        """
        rows, selected = self.reader.state(value), None
        assert isinstance(rows, Rows)
        if self._lookup is not None:
            numbers = self.numbers(lax.iota(jnp.int32, rows.length(self.size)), rows.inner)
            selected = self._lookup.rows(value, numbers, rows.axis)
        return self.cut(self.whole[value], rows) if selected is None else selected

    # Rows of the batch by their number, and rows of this microbatch: `inner` of them for each example.

    def numbers(self, counted: Any, inner: int) -> Any:
        """The numbers in the batch of rows that are counted here; with several blocks, through all of them."""
        own, all_of_run = self._run_lengths(counted.dtype, inner)
        first = jnp.asarray(self.start).astype(counted.dtype) * counted.dtype.type(inner)
        return counted // own * all_of_run + first + counted % own

    def counted(self, numbers: Any, inner: int) -> Any:
        """The reverse, for rows that are of this microbatch."""
        first = jnp.asarray(self.start).astype(numbers.dtype) * numbers.dtype.type(inner)
        if self.runs == 1:
            return numbers - first
        own, all_of_run = self._run_lengths(numbers.dtype, inner)
        return numbers // all_of_run * own + numbers % all_of_run - first

    def _run_lengths(self, dtype: Any, inner: int) -> tuple[Any, Any]:
        own, everyone = self.size // self.runs, self.num_examples // self.runs
        return dtype.type(own * inner), dtype.type(everyone * inner)
