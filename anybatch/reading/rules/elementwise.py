"""Rules of elementwise operations, and of random numbers that are drawn from a key for each example."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.jaxprs import avals
from anybatch.jaxprs.graph import Node, Value
from anybatch.jaxprs.primitives import ELEMENTWISE
from anybatch.reading.coupling import Coupling, NotRowwise
from anybatch.reading.reader import Reader, RuleResult, rule
from anybatch.reading.states import INVARIANT, SUMMED, Batched, State, common_rows, refuse_sums

# Linear in their one operand.
LINEAR = frozenset("neg real imag copy copy_p name stop_gradient sharding_constraint sharding_hint pvary pcast".split())


@rule(*ELEMENTWISE)
def elementwise(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """Batched operands have a batched result. Summed ones have a summed result if the operation is linear in them."""
    if SUMMED in states:
        return _of_sums(reader, node, states)
    rows = common_rows(states)
    output = node.outputs[0]
    size = output.shape[rows.axis]
    takes: list[Batched | None] = []
    for value, state in zip(node.inputs, states, strict=True):
        if value.ndim != output.ndim and (value.ndim != 0 or isinstance(state, Batched)):
            raise NotRowwise("it changes the rank of an operand")
        if isinstance(state, Batched):
            takes.append(None)
        else:
            takes.append(rows if value.ndim and value.shape[rows.axis] == size else None)
    return RuleResult([rows] * len(node.outputs), takes)


def _of_sums(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if any(isinstance(state, Batched) for state in states):
        raise NotRowwise(Coupling.FED_BACK)
    if not _is_linear(reader, node, states):
        raise NotRowwise(Coupling.NOT_LINEAR)
    return RuleResult([SUMMED] * len(node.outputs))


def _is_linear(reader: Reader, node: Node, states: Sequence[State]) -> bool:
    """Whether the outputs are additive in the summed operands."""
    name = node.name
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


@rule("bitcast_convert_type")
def _bitcast(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    refuse_sums(states)
    if node.outputs[0].shape != node.inputs[0].shape:
        raise NotRowwise("it changes the shape while it changes the type")
    return RuleResult([common_rows(states)])


@rule("debug_callback", "debug_print")
def _debug(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    return RuleResult([])  # each microbatch prints its own values


@rule("random_bits", "random_split")
def _draw(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    refuse_sums(states)
    _refuse_other_generators(node)
    return RuleResult([common_rows(states)])


def _refuse_other_generators(node: Node) -> None:
    if not avals.is_threefry(node.inputs[0].dtype):
        # Under vmap, the hardware's generator draws for all keys from the first one.
        raise NotRowwise(f"numbers from several keys of the generator {node.inputs[0].dtype} depend on one another")


@rule("random_wrap")
def _wrap(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    refuse_sums(states)
    rows = common_rows(states)
    if rows.axis >= node.outputs[0].ndim:
        raise NotRowwise("it makes one key from several examples")
    return RuleResult([rows])


@rule("random_unwrap", "random_seed")
def _unwrap(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    refuse_sums(states)
    return RuleResult([common_rows(states)])


@rule("threefry2x32")
def _threefry(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    refuse_sums(states)
    rows = common_rows(states)
    size = node.outputs[0].shape[rows.axis]
    if any(value.ndim not in (0, node.outputs[0].ndim) for value in node.inputs):
        raise NotRowwise("it changes the rank of an operand")
    takes = [rows if value.ndim and value.shape[rows.axis] == size else None for value in node.inputs]
    return RuleResult([rows] * len(node.outputs), takes)


@rule("random_gamma")
def _gamma(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    refuse_sums(states)
    rows = common_rows(states)
    keys, alphas = node.inputs
    _refuse_other_generators(node)
    if rows.axis >= keys.ndim or keys.shape != alphas.shape:
        raise NotRowwise("it draws for several examples from one key")
    return RuleResult([rows] * len(node.outputs), [rows, rows])
