"""Rules of functions with a custom derivative. The derivative must run per microbatch, too."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from anybatch.errors import InputError
from anybatch.jaxprs import interpreter
from anybatch.jaxprs.graph import Node, uses
from anybatch.jaxprs.primitives import CUSTOM_JVP, CUSTOM_VJP
from anybatch.reading.reader import Fact, Reader, RuleResult, rule
from anybatch.reading.rules.elementwise import all_sums
from anybatch.reading.states import INVARIANT, SUMMED, Batched, Coupling, NotRowwise, State, blame_of, refuse_sums

Part = TypeVar("Part")


def contains_custom_vjp(node: Node) -> bool:
    """Whether a node has a custom_vjp inside, at any depth."""
    return any(uses(jaxpr, name) for jaxpr in interpreter.jaxprs_in(node.equation) for name in CUSTOM_VJP)


def has_linear_backward(reader: Reader, node: Node) -> bool:
    """Whether the backward pass of a node is linear in the cotangents. It is, unless a custom_vjp is not."""
    if node.name not in CUSTOM_VJP and not contains_custom_vjp(node):
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
    """The forward and the backward pass of a node, as JAX derives them, traced at the full batch."""

    def __init__(self, node: Node, differentiated: Sequence[int], results: Sequence[int]) -> None:
        self.node = node
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
        """Whether the backward pass is linear in the cotangents: summed cotangents must have summed results."""
        facts = [*[Fact(INVARIANT, True)] * self.num_residuals, *[Fact(SUMMED, True)] * self.num_outputs]
        try:
            inner = reader.nested(self.node, self.backward, facts)
        except NotRowwise:
            return False
        return all_sums(inner, inner.graph.outputs, inner.output_states())


def _must_have(inner: Reader, wanted: Sequence[State], why: str) -> None:
    for output, state, goal in zip(inner.graph.outputs, inner.output_states(), wanted, strict=False):
        fits = state == goal or (state == INVARIANT and isinstance(goal, Batched) and goal.in_batch_order)
        if not fits and not (state == INVARIANT and goal == SUMMED and inner.is_zero(output)):
            raise NotRowwise(why)


def _read_part(reader: Reader, node: Node, jaxpr: Any, states: Sequence[State]) -> Reader:
    """Reads a function with a custom derivative, or that derivative."""
    return reader.nested(node, jaxpr, [Fact(state, True) for state in states], reads_derivatives=False)


def _read_primal(reader: Reader, node: Node, states: Sequence[State]) -> tuple[Reader, bool, list[int], list[int]]:
    """Reads the function itself; whether its derivative is needed; with respect to which operands, of which results."""
    refuse_sums(states)
    primal = _read_part(reader, node, node.params["call_jaxpr"], states)
    inexact = [position for position, value in enumerate(node.inputs) if value.is_inexact]
    moving = [position for position in inexact if reader.has_gradient(node.inputs[position])]
    results = [position for position, value in enumerate(node.outputs) if value.is_inexact]
    needed = reader.options.reads_derivatives and bool(moving and results)
    # If the derivative is not needed now, an outer `grad` may ask for it with respect to any operand.
    return primal, needed, moving if needed else inexact, results


def _read_when_asked(read: Callable[[], Part], node: Node, needed: bool) -> Callable[[], Part]:
    """Reads a derivative now if it is needed, or else when JAX asks for it: some derivatives contain themselves."""
    cached = functools.cache(read)
    if needed:
        cached()
        return cached

    def later() -> Part:
        try:
            return cached()
        except NotRowwise as refusal:
            raise InputError(
                "To be differentiated once more, a function with a custom derivative must keep examples apart",
                given=str(blame_of(node, refusal.why)),
                remedy='Declare how the loss uses its examples: reduction="mean", "sum" or "weighted".',
            ) from None

    return later


@rule(*CUSTOM_JVP)
def _custom_jvp(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    primal, needed, moving, results = _read_primal(reader, node, states)
    found = primal.output_states()
    goal = [*found, *(found[position] for position in results)]

    def jvp(operands: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        def of_moving(*values: Any) -> list[Any]:
            outputs = node(_replace(operands, moving, values))
            return [outputs[position] for position in results]

        outputs, pushed = jax.jvp(of_moving, tuple(operands[position] for position in moving), tuple(tangents))
        # The outputs are those of the custom rule, as under jax.grad.
        return _replace(node(operands), results, outputs), pushed

    def read() -> Reader:
        types = [value.type for value in node.inputs]
        traced = jax.make_jaxpr(jvp)(types, [types[position] for position in moving])
        tangent = _read_part(reader, node, traced, [*states, *(states[position] for position in moving)])
        _must_have(tangent, goal, "its custom derivative combines examples")
        return tangent

    tangent = _read_when_asked(read, node, needed)

    def run(microbatch: Any) -> list[Any]:
        @jax.custom_jvp
        def function(start: Any, *operands: Any) -> tuple[Any, ...]:
            return tuple(microbatch.nested(primal, operands, found, start))

        @function.defjvp
        def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            (start, *points), (_, *directions) = primals, tangents
            moved = [directions[position] for position in moving]
            pushed = microbatch.nested(tangent(), [*points, *moved], goal, start)
            outputs = pushed[: len(found)]
            still = [np.zeros(np.shape(output), jax.dtypes.float0) for output in outputs]
            return tuple(outputs), tuple(_replace(still, results, pushed[len(found) :]))

        return list(function(microbatch.start, *(microbatch.value(value) for value in node.inputs)))

    return RuleResult(found, run=run)


def _of_backward(refusal: NotRowwise, why: str) -> NotRowwise:
    """The refusal of a custom_vjp for what an equation of its backward pass was refused for."""
    text = f"{why}: {refusal.why}"
    if refusal.reason is not Coupling.NO_RULE or refusal.blame is None:
        return NotRowwise(text)
    # The primitive to register a rule for is the one inside, not custom_vjp_call.
    return NotRowwise(text, reason=refusal.reason, blame=dataclasses.replace(refusal.blame, why=text))


class _Derivative(NamedTuple):
    """The readers of the passes of a custom_vjp."""

    forward: Reader
    backward: Reader
    saved: list[State]
    num_outputs: int
    is_linear: bool


@rule(*CUSTOM_VJP)
def _custom_vjp(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    primal, needed, moving, results = _read_primal(reader, node, states)
    found = primal.output_states()
    outputs = [found[position] for position in results]
    goal = [states[position] if isinstance(states[position], Batched) else SUMMED for position in moving]

    def read() -> _Derivative:
        passes = _Passes(node, moving, results)
        forward = _read_part(reader, node, passes.forward, states)
        saved = forward.output_states()[passes.num_outputs :]
        _must_have(forward, outputs, "its custom forward pass combines examples")
        # The cotangent of a batched value is batched. That of a sum is the same for every microbatch. That of an
        # invariant value is the sum of what each microbatch contributes.
        seeds = [state if isinstance(state, Batched) else INVARIANT if state == SUMMED else SUMMED for state in outputs]
        why = "its custom backward pass combines examples"
        try:
            backward = _read_part(reader, node, passes.backward, [*saved, *seeds])
        except NotRowwise as refusal:
            raise _of_backward(refusal, why) from None
        _must_have(backward, goal, why)
        return _Derivative(forward, backward, saved, passes.num_outputs, passes.is_linear(reader))

    derivative = _read_when_asked(read, node, needed)

    def run(microbatch: Any) -> list[Any]:
        @jax.custom_vjp
        def function(start: Any, *operands: Any) -> tuple[Any, ...]:
            return tuple(microbatch.nested(primal, operands, found, start))

        def run_forward(start: Any, *operands: Any) -> tuple[Any, Any]:
            forward, _, saved, num_outputs, _ = derivative()
            made_and_saved = microbatch.nested(forward, operands, [*outputs, *saved], start)
            made = made_and_saved[:num_outputs]
            if len(results) != len(found):
                made = _replace(microbatch.nested(primal, operands, found, start), results, made)
            return tuple(made), (start, *made_and_saved[num_outputs:])

        def run_backward(kept: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            start, *residuals = kept
            seeds = [cotangents[position] for position in results]
            pulled = microbatch.nested(derivative().backward, [*residuals, *seeds], goal, start)
            return None, *_replace([None] * len(node.inputs), moving, pulled)

        function.defvjp(run_forward, run_backward)
        return list(function(microbatch.start, *(microbatch.value(value) for value in node.inputs)))

    return RuleResult(found, run=run, scales=not needed or derivative().is_linear)
