"""Random numbers from keys that differ from example to example."""

from collections.abc import Sequence

from anybatch import compat
from anybatch.reading.graph import Node
from anybatch.reading.reader import Outcome, Reader
from anybatch.reading.rules.table import rule
from anybatch.reading.states import NotRowwise, State, only_rows, refuse_sums


@rule("random_bits", "random_split")
def _draw(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    refuse_sums(states)
    _refuse_other_generators(node)
    return Outcome([only_rows(states)])


def _refuse_other_generators(node: Node) -> None:
    if not compat.is_threefry(node.inputs[0].dtype):
        # Under vmap, the hardware's generator draws for all keys at once, from the first of them.
        raise NotRowwise(f"numbers from several keys of the generator {node.inputs[0].dtype} depend on one another")


@rule("random_wrap")
def _wrap(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    refuse_sums(states)
    rows = only_rows(states)
    if rows.axis >= node.outputs[0].ndim:
        raise NotRowwise("it makes one key from several examples")
    return Outcome([rows])


@rule("random_unwrap", "random_seed")
def _unwrap(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    refuse_sums(states)
    return Outcome([only_rows(states)])


@rule("threefry2x32")
def _threefry(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    refuse_sums(states)
    rows = only_rows(states)
    size = node.outputs[0].shape[rows.axis]
    if any(value.ndim not in (0, node.outputs[0].ndim) for value in node.inputs):
        raise NotRowwise("it changes the rank of an operand")
    takes = [rows if value.ndim and value.shape[rows.axis] == size else None for value in node.inputs]
    return Outcome([rows] * len(node.outputs), takes)


@rule("random_gamma")
def _gamma(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    refuse_sums(states)
    rows = only_rows(states)
    keys, alphas = node.inputs
    _refuse_other_generators(node)
    if rows.axis >= keys.ndim or keys.shape != alphas.shape:
        raise NotRowwise("it draws for several examples from one key")
    return Outcome([rows] * len(node.outputs), [rows, rows])
