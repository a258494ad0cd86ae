"""Functions with a derivative of their own: the derivative must keep the examples apart as well."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from anybatch import compat
from anybatch.reading.graph import Node, Value
from anybatch.reading.reader import Fact, Outcome, Reader
from anybatch.reading.rules.table import rule
from anybatch.reading.states import SUM, WHOLE, NotRowwise, Rows, State, refuse_sums


def contains_custom_vjp(node_or_equation: Any) -> bool:
    """Whether a backward pass that somebody wrote is in it, at any depth."""
    equation = getattr(node_or_equation, "equation", node_or_equation)
    return any(
        inner.primitive.name.startswith("custom_vjp_call") or contains_custom_vjp(inner)
        for jaxpr in compat.jaxprs_in(equation)
        for inner in jaxpr.eqns
    )


def has_linear_backward(reader: Reader, node: Node) -> bool:
    """Whether the gradient of a sum of cotangents is the sum of their gradients, as it is unless somebody wrote it."""
    if not node.name.startswith("custom_vjp_call") and not contains_custom_vjp(node):
        return True
    differentiated = [
        position for position, value in enumerate(node.inputs) if reader.has_gradient(value) and value.is_inexact
    ]
    results = [position for position, value in enumerate(node.outputs) if value.is_inexact]
    if not differentiated or not results:
        return True
    try:
        return _Passes(node, differentiated, results).is_linear(reader)
    except Exception:  # not known to be linear
        return False


def _replace(values: Sequence[Any], positions: Sequence[int], new: Sequence[Any]) -> list[Any]:
    replaced = dict(zip(positions, new, strict=True))
    return [replaced.get(position, value) for position, value in enumerate(values)]


class _Passes:
    """The forward and the backward pass of a node, as JAX makes them, traced at the full batch."""

    def __init__(self, node: Node, differentiated: Sequence[int], results: Sequence[int]) -> None:
        tree: Any = None

        def forward(*operands: Any) -> tuple[Any, Any]:
            nonlocal tree

            def of_differentiated(*moving: Any) -> list[Any]:
                outputs = node(_replace(operands, differentiated, moving))
                return [outputs[position] for position in results]

            outputs, pullback = jax.vjp(of_differentiated, *(operands[position] for position in differentiated))
            leaves, tree = jax.tree.flatten(pullback)
            return outputs, leaves

        types = [value.type for value in node.inputs]
        self.forward, (outputs, residuals) = jax.make_jaxpr(forward, return_shape=True)(*types)
        self.backward = jax.make_jaxpr(lambda saved, seeds: tree.unflatten(saved)(seeds))(residuals, outputs)
        self.num_residuals, self.num_outputs = len(residuals), len(outputs)

    def is_linear(self, reader: Reader) -> bool:
        """Whether the backward pass is linear in the cotangents. The rules for sums are those of linear maps."""
        facts = [*[Fact(WHOLE, True)] * self.num_residuals, *[Fact(SUM, True)] * self.num_outputs]
        try:
            inner = reader.nested(self.backward, facts)
        except NotRowwise:
            return False
        return all(
            state == SUM or (state == WHOLE and inner.is_zero(output))
            for output, state in zip(inner.graph.outputs, inner.output_states(), strict=True)
        )


def _must_have(inner: Reader, found: Sequence[State], wanted: Sequence[State], why: str) -> None:
    for output, state, goal in zip(inner.graph.outputs, found, wanted, strict=False):
        fits = state == goal or (state == WHOLE and isinstance(goal, Rows) and goal.in_batch_order)
        if not fits and not (state == WHOLE and goal == SUM and inner.is_zero(output)):
            raise NotRowwise(why)


def _read_function(reader: Reader, jaxpr: Any, states: Sequence[State]) -> Reader:
    """Reads a part of a function with derivatives of its own, which may itself be differentiated by an outer `grad`."""
    variables, consts, _ = compat.open_jaxpr(jaxpr)
    inexact = [Value(variable.aval).is_inexact for variable in variables[len(consts) :]]
    try:
        facts = [Fact(state, True, is_inexact) for state, is_inexact in zip(states, inexact, strict=True)]
        return reader.nested(jaxpr, facts)
    except NotRowwise:  # one that cannot be differentiated again may still have a first derivative
        return reader.nested(jaxpr, [Fact(state, True) for state in states])


def _read_primal(reader: Reader, node: Node, states: Sequence[State]) -> tuple[Reader, list[int], list[int]]:
    """The function itself; which operands are differentiated; which results have a derivative."""
    refuse_sums(states)
    primal = _read_function(reader, node.params["call_jaxpr"], states)
    differentiated = [
        position for position, value in enumerate(node.inputs) if reader.has_gradient(value) and value.is_inexact
    ]
    results = [position for position, value in enumerate(node.outputs) if value.is_inexact]
    return primal, differentiated, results


@rule("custom_jvp_call")
def _custom_jvp(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    primal, differentiated, results = _read_primal(reader, node, states)
    found = primal.output_states()

    def run_primal(microbatch: Any) -> list[Any]:
        return microbatch.nested(primal, [microbatch.value(value) for value in node.inputs], found)

    if not differentiated:
        return Outcome(found, run=run_primal, nested=[primal])

    def jvp(operands: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        def of_differentiated(*moving: Any) -> list[Any]:
            outputs = node(_replace(operands, differentiated, moving))
            return [outputs[position] for position in results]

        points = tuple(operands[position] for position in differentiated)
        outputs, pushed = jax.jvp(of_differentiated, points, tuple(tangents))
        return _replace(node(operands), results, outputs), pushed  # the outputs are the rule's own, as under jax.grad

    types = [value.type for value in node.inputs]
    traced = jax.make_jaxpr(jvp)(types, [types[position] for position in differentiated])
    tangent = _read_function(reader, traced, [*states, *(states[position] for position in differentiated)])
    goal = [*found, *(found[position] for position in results)]
    _must_have(tangent, tangent.output_states(), goal, "the derivative that was written for it mixes examples")

    def run(microbatch: Any) -> list[Any]:
        @jax.custom_jvp
        def function(start: Any, *operands: Any) -> tuple[Any, ...]:
            return tuple(microbatch.nested(primal, operands, found, start))

        @function.defjvp
        def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            (start, *points), (_, *directions) = primals, tangents
            moving_operands = [directions[position] for position in differentiated]
            pushed = microbatch.nested(tangent, [*points, *moving_operands], goal, start)
            outputs = pushed[: len(found)]
            moving = dict(zip(results, pushed[len(found) :], strict=True))
            still = [np.zeros(np.shape(output), jax.dtypes.float0) for output in outputs]
            return tuple(outputs), tuple(moving.get(position, zero) for position, zero in enumerate(still))

        return list(function(microbatch.start, *(microbatch.value(value) for value in node.inputs)))

    return Outcome(found, run=run, nested=[primal])


@rule("custom_vjp_call", "custom_vjp_call_jaxpr")
def _custom_vjp(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    primal, differentiated, results = _read_primal(reader, node, states)
    found = primal.output_states()
    if not differentiated or not results:
        return Outcome(
            found,
            run=lambda microbatch: microbatch.nested(primal, [microbatch.value(value) for value in node.inputs], found),
            nested=[primal],
        )
    passes = _Passes(node, differentiated, results)
    forward = _read_function(reader, passes.forward, states)
    outputs, saved = [found[position] for position in results], forward.output_states()[passes.num_outputs :]
    _must_have(forward, forward.output_states(), outputs, "the forward pass that was written for it mixes examples")
    # The cotangent of rows has rows. That of a sum is the same for every microbatch, and that of a whole value is
    # made of what each microbatch contributes.
    seeds = [state if isinstance(state, Rows) else WHOLE if state == SUM else SUM for state in outputs]
    why = "the backward pass that was written for it mixes examples"
    try:
        backward = _read_function(reader, passes.backward, [*saved, *seeds])
    except NotRowwise as refusal:
        raise NotRowwise(f"{why}: {refusal.why}") from None
    goal = [states[position] if isinstance(states[position], Rows) else SUM for position in differentiated]
    _must_have(backward, backward.output_states(), goal, why)

    def run(microbatch: Any) -> list[Any]:
        @jax.custom_vjp
        def function(start: Any, *operands: Any) -> tuple[Any, ...]:
            return tuple(microbatch.nested(primal, operands, found, start))

        def run_forward(start: Any, *operands: Any) -> tuple[Any, Any]:
            results_and_saved = microbatch.nested(forward, operands, [*outputs, *saved], start)
            made = results_and_saved[: passes.num_outputs]
            if len(results) != len(found):
                made = _replace(microbatch.nested(primal, operands, found, start), results, made)
            return tuple(made), (start, *results_and_saved[passes.num_outputs :])

        def run_backward(kept: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            start, *residuals = kept
            seeds = [cotangents[position] for position in results]
            pulled = microbatch.nested(backward, [*residuals, *seeds], goal, start)
            return None, *_replace([None] * len(node.inputs), differentiated, pulled)

        function.defvjp(run_forward, run_backward)
        return list(function(microbatch.start, *(microbatch.value(value) for value in node.inputs)))

    return Outcome(found, run=run, scales=passes.is_linear(reader), nested=[primal])
