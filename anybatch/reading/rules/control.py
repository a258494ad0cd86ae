"""Rules of checkpoints, branches and loops. All of the functions inside them must run per microbatch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.jaxprs import interpreter, versions
from anybatch.jaxprs.graph import Graph, Node, Value
from anybatch.jaxprs.primitives import REMAT
from anybatch.reading.reader import Fact, Reader, RuleResult, rule
from anybatch.reading.rules.derivatives import contains_custom_vjp
from anybatch.reading.states import INVARIANT, SUMMED, Batched, NotRowwise, State, common_rows, join


def _facts(reader: Reader, node: Node, states: Sequence[State]) -> list[Fact]:
    """The facts about the operands of a node, for the function inside it."""
    return [
        dataclasses.replace(reader.fact(value), state=state, is_zero=False)
        for value, state in zip(node.inputs, states, strict=True)
    ]


@rule(*REMAT)
def _checkpoint(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    inner = reader.nested(node, node.params["jaxpr"], _facts(reader, node, states))
    found = inner.output_states()
    options = {name: node.params[name] for name in ("prevent_cse", "policy") if name in node.params}

    def run(microbatch: Any) -> list[Any]:
        checkpointed = jax.checkpoint(lambda *operands: microbatch.nested(inner, operands, found), **options)
        return checkpointed(*(microbatch.value(value) for value in node.inputs))

    return RuleResult(found, run=run, scales=inner.scales, nested=[inner])


@rule("cond")
def _branches(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if states[0] != INVARIANT:
        raise NotRowwise("which branch it takes depends on the batch")
    everywhere = range(len(node.params["branches"]))
    try:
        return _some_branches(reader, node, states, everywhere)
    except NotRowwise:
        here = _branches_of_this_machine(node)
        if len(here) in (0, len(everywhere)):
            raise
        return _some_branches(reader, node, states, here)


def _branches_of_this_machine(node: Node) -> list[int]:
    """The branches of `lax.platform_dependent` for the platforms of this process; all branches of any other `cond`.

    `jnp.diagonal` for example has a branch for Mosaic, which masks and sums, and one for other platforms, a lookup.
    """
    branches = node.params.get("branches_platforms") or [None] * len(node.params["branches"])
    available, named = versions.platforms(), {name for names in branches for name in names or ()}
    elsewhere = "branches_platforms" in node.params and available <= named  # so that no default is taken
    return [
        number
        for number, names in enumerate(branches)
        if (not elsewhere if names is None else not available.isdisjoint(names))
    ]


def _some_branches(reader: Reader, node: Node, states: Sequence[State], numbers: Sequence[int]) -> RuleResult:
    """Reads the branches of these numbers. The others are for other platforms."""
    facts = _facts(reader, node, states)[1:]
    inners = {number: reader.nested(node, node.params["branches"][number], facts) for number in numbers}
    first, *others = inners.values()
    found, zero = first.output_states(), _zeros(first)
    for inner in others:
        other_zero = _zeros(inner)
        found = [join(*each) for each in zip(found, inner.output_states(), zero, other_zero, strict=True)]
        zero = [one and other for one, other in zip(zero, other_zero, strict=True)]
    _refuse_orders(found)

    def run(microbatch: Any) -> list[Any]:
        index, *operands = (microbatch.value(value) for value in node.inputs)
        if not others:
            return microbatch.nested(first, operands, found)
        # Branches for other platforms compute the same.
        chosen = [inners.get(number, first) for number in range(len(node.params["branches"]))]
        branches = [lambda *args, inner=inner: microbatch.nested(inner, args, found) for inner in chosen]
        return lax.switch(jnp.asarray(index).astype(jnp.int32), branches, *operands)

    return RuleResult(
        found, run=run, scales=all(inner.scales for inner in inners.values()), nested=list(inners.values())
    )


def _refuse_orders(states: Sequence[State]) -> None:
    """Raises for sorted rows: the next iteration, or another branch, has another order."""
    if any(isinstance(state, Batched) and not state.in_batch_order for state in states):
        raise NotRowwise("it carries examples on that were sorted across the batch")


def _zeros(inner: Reader) -> list[bool]:
    return [inner.is_zero(output) for output in inner.graph.outputs]


@rule("while")
def _while(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    params, facts = node.params, _facts(reader, node, states)
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    cond_consts, body_consts, carry = facts[: split[0]], facts[split[0] : split[1]], facts[split[1] :]
    for _ in range(4 + 2 * len(carry)):
        condition = reader.nested(node, params["cond_jaxpr"], [*cond_consts, *carry])
        if condition.output_states() != [INVARIANT]:
            raise NotRowwise("how often the loop runs depends on the batch")
        body = reader.nested(node, params["body_jaxpr"], [*body_consts, *carry])
        after = [_joined(fact, body.fact(output)) for fact, output in zip(carry, body.graph.outputs, strict=True)]
        if after == carry:
            break
        carry = after
    else:
        raise NotRowwise("the state of what the loop carries changes from one iteration to the next")
    found = [fact.state for fact in carry]
    _refuse_orders(found)
    takes = [*[None] * split[1], *(state if isinstance(state, Batched) else None for state in found)]

    def run(microbatch: Any) -> list[Any]:
        operands = [microbatch.value(value, rows) for value, rows in zip(node.inputs, takes, strict=True)]
        return lax.while_loop(
            lambda carried: microbatch.nested(condition, [*operands[: split[0]], *carried], [INVARIANT])[0],
            lambda carried: microbatch.nested(body, [*operands[split[0] : split[1]], *carried], found),
            operands[split[1] :],
        )

    return RuleResult(found, takes, run=run, nested=[condition, body])


def _joined(before: Fact, after: Fact) -> Fact:
    """The fact about a carried value that holds both before and after an iteration."""
    zero = before.is_zero and after.is_zero
    state = join(before.state, after.state, before.is_zero, after.is_zero)
    return Fact(state, before.moves or after.moves, before.has_gradient or after.has_gradient, zero)


@rule("scan")
def _scan(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    params = node.params
    num_consts, num_carry = interpreter.scan_counts(params)
    first = num_consts + num_carry
    if any(isinstance(state, Batched) and state.axis == 0 for state in states[first:]):
        return _scan_over_examples(reader, node, states)
    facts = _facts(reader, node, states)
    initial = [
        dataclasses.replace(fact, is_zero=fact.state == INVARIANT and reader.is_zero(value))
        for fact, value in zip(facts[num_consts:first], node.inputs[num_consts:first], strict=True)
    ]
    scanned = [
        dataclasses.replace(fact, state=fact.state.at(fact.state.axis - 1)) if isinstance(fact.state, Batched) else fact
        for fact in facts[first:]
    ]
    carry = initial
    for _ in range(8 + 3 * num_carry):
        # A carry that starts from zero is taken to stay zero until an iteration changes it.
        body = reader.nested(node, params["jaxpr"], [*facts[:num_consts], *carry, *scanned])
        after = [
            _joined(fact, dataclasses.replace(body.fact(output), is_zero=body.is_zero(output)))
            for fact, output in zip(carry, body.graph.outputs, strict=False)
        ]
        after = [dataclasses.replace(fact, is_zero=fact.is_zero and fact.state == INVARIANT) for fact in after]
        if after == carry:
            break
        carry = after
    else:
        raise NotRowwise("the state of what the loop carries changes from one iteration to the next")
    for fact, start in zip(carry, initial, strict=True):
        # Its start would be added once for each microbatch.
        if fact.state == SUMMED and start.state == INVARIANT and not start.is_zero:
            raise NotRowwise("it adds a sum over the batch to a value that does not start from zero")
    carried = [fact.state for fact in carry]
    emitted = body.output_states()[num_carry:]
    _refuse_orders([*carried, *emitted])
    found = [*carried, *(state.at(state.axis + 1) if isinstance(state, Batched) else state for state in emitted)]
    takes = [
        *[None] * num_consts,
        *(state if isinstance(state, Batched) else None for state in carried),
        *[None] * (len(states) - first),
    ]

    def run(microbatch: Any) -> list[Any]:
        operands = [microbatch.value(value, rows) for value, rows in zip(node.inputs, takes, strict=True)]
        # A sum starts from zero in each microbatch.
        consts, start, arrays = operands[:num_consts], operands[num_consts:first], operands[first:]

        def step(carry: Any, slices: Any) -> tuple[Any, Any]:
            results = microbatch.nested(body, [*consts, *carry, *slices], [*carried, *emitted])
            return results[:num_carry], results[num_carry:]

        options = {name: params[name] for name in ("length", "reverse", "unroll") if name in params}
        last, stacked = lax.scan(step, list(map(jnp.asarray, start)), arrays, **options)
        return [*last, *stacked]

    return RuleResult(found, takes, run=run, scales=body.scales, nested=[body])


def _scan_over_examples(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """`lax.map` over the examples, or a scan whose iterations see one example each and add to sums."""
    params = node.params
    num_consts, num_carry = interpreter.scan_counts(params)
    first = num_consts + num_carry
    rows = common_rows(states[first:])
    if rows.axis != 0 or rows.outer != 1 or any(state != INVARIANT for state in states[:first]):
        raise NotRowwise("it goes over the examples with other values of the batch at hand", unroll=False)
    graph = Graph(params["jaxpr"])
    carried = [
        _carried_over_examples(
            graph, number, graph.inputs[num_consts + number], reader, node.inputs[num_consts + number]
        )
        for number in range(num_carry)
    ]
    takes = [*[None] * first, *(rows if state == INVARIANT else None for state in states[first:])]

    def run(microbatch: Any) -> list[Any]:
        operands = [microbatch.value(value, take) for value, take in zip(node.inputs, takes, strict=True)]
        body = interpreter.as_function(params["jaxpr"])

        def step(carry: Any, slices: Any) -> tuple[Any, Any]:
            results = list(map(jnp.asarray, body(*operands[:num_consts], *carry, *slices)))
            return results[:num_carry], results[num_carry:]

        start = list(map(jnp.asarray, operands[num_consts:first]))
        length = rows.length(microbatch.size)
        last, stacked = lax.scan(step, start, operands[first:], length=length, reverse=params["reverse"])
        return [*last, *stacked]

    found: list[State] = [*carried, *[rows] * (len(node.outputs) - num_carry)]
    return RuleResult(found, takes, run=run, scales=not contains_custom_vjp(node))


def _carried_over_examples(graph: Graph, number: int, before: Value, reader: Reader, start: Value) -> State:
    """The state of a value carried from example to example: invariant if none changes it, summed if each adds to it."""
    after = graph.outputs[number]
    if after is before:
        return INVARIANT
    uses = [(node, value) for node in graph.nodes for value in node.inputs]
    is_output = [sum(output is value for output in graph.outputs) for value in (before, after)]
    if is_output == [0, 1] and not any(value is after for _, value in uses) and reader.is_zero(start):
        # A weakly typed zero is cast to the dtype that it has, before or after the addition.
        while after.node is not None and _is_cast_to_itself(after.node):
            after = after.node.inputs[0]
        added, node = before, _only_user(uses, before)
        while node is not None and _is_cast_to_itself(node):
            added = node.outputs[0]
            node = _only_user(uses, added)
        if node is not None and node is after.node and node.name in ("add", "add_any"):
            if sum(operand is added for operand in node.inputs) == 1 and added.shape == after.shape:
                if sum(value is after for _, value in uses) <= 1:
                    return SUMMED
    raise NotRowwise("it carries something from one example to the next", unroll=False)


def _is_cast_to_itself(node: Node) -> bool:
    return node.name == "convert_element_type" and node.inputs[0].dtype == node.outputs[0].dtype


def _only_user(uses: Sequence[tuple[Node, Value]], value: Value) -> Node | None:
    users = [node for node, used in uses if used is value]
    return users[0] if len(users) == 1 else None
