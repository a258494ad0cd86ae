"""Rules of checkpoints, branches and loops. All of the functions inside them must run per microbatch."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
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

    return RuleResult(found, run=run, scales=inner.scales)


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

    return RuleResult(found, run=run, scales=all(inner.scales for inner in inners.values()))


def _refuse_orders(states: Sequence[State]) -> None:
    """Raises for sorted rows: the next iteration, or another branch, has another order."""
    if any(isinstance(state, Batched) and not state.in_batch_order for state in states):
        raise NotRowwise("it carries examples on that were sorted across the batch")


def _zeros(inner: Reader) -> list[bool]:
    return [inner.is_zero(output) for output in inner.graph.outputs]


@rule("while")
def _while(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    params, facts = node.params, _facts(reader, node, states)
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry, body = _settled(
        facts[last:], lambda carry: reader.nested(node, params["body_jaxpr"], [*facts[first:last], *carry])
    )
    condition = reader.nested(node, params["cond_jaxpr"], [*facts[:first], *carry])
    if condition.output_states() != [INVARIANT]:
        raise NotRowwise("how often the loop runs depends on the batch")
    found = [fact.state for fact in carry]
    _refuse_orders(found)
    takes = [*[None] * last, *_batched(found)]

    def run(microbatch: Any) -> list[Any]:
        operands = [microbatch.value(value, rows) for value, rows in zip(node.inputs, takes, strict=True)]
        return lax.while_loop(
            lambda carried: microbatch.nested(condition, [*operands[:first], *carried], [INVARIANT])[0],
            lambda carried: microbatch.nested(body, [*operands[first:last], *carried], found),
            operands[last:],
        )

    return RuleResult(found, takes, run=run)


def _settled(carry: list[Fact], read_body: Callable[[list[Fact]], Reader]) -> tuple[list[Fact], Reader]:
    """What a loop carries, in states that no iteration changes, and its body, read with these."""
    for _ in range(8 + 3 * len(carry)):
        body = read_body(carry)
        after = [_joined(fact, body, output) for fact, output in zip(carry, body.graph.outputs, strict=False)]
        if after == carry:
            return carry, body
        carry = after
    raise NotRowwise("the state of what the loop carries changes from one iteration to the next")


def _joined(before: Fact, body: Reader, output: Value) -> Fact:
    """The fact about a carried value that holds both before and after an iteration."""
    after, is_zero = body.fact(output), body.is_zero(output)
    state = join(before.state, after.state, before.is_zero, is_zero)
    # A carry that starts from zero is taken to stay zero until an iteration changes it.
    stays_zero = before.is_zero and is_zero and state == INVARIANT
    return Fact(state, before.moves or after.moves, before.has_gradient or after.has_gradient, stays_zero)


def _batched(states: Sequence[State]) -> list[Batched | None]:
    return [state if isinstance(state, Batched) else None for state in states]


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
    carry, body = _settled(
        initial, lambda carry: reader.nested(node, params["jaxpr"], [*facts[:num_consts], *carry, *scanned])
    )
    for fact, start in zip(carry, initial, strict=True):
        # Its start would be added once for each microbatch.
        if fact.state == SUMMED and start.state == INVARIANT and not start.is_zero:
            raise NotRowwise("it adds a sum over the batch to a value that does not start from zero")
    carried = [fact.state for fact in carry]
    emitted = body.output_states()[num_carry:]
    _refuse_orders([*carried, *emitted])
    found = [*carried, *(state.at(state.axis + 1) if isinstance(state, Batched) else state for state in emitted)]
    takes = [*[None] * num_consts, *_batched(carried), *[None] * (len(states) - first)]

    def run(microbatch: Any) -> list[Any]:
        operands = [microbatch.value(value, rows) for value, rows in zip(node.inputs, takes, strict=True)]
        # A sum starts from zero in each microbatch.
        return _run_scan(
            params,
            lambda *flat: microbatch.nested(body, flat, [*carried, *emitted]),
            operands,
            length=params["length"],
            unroll=params["unroll"],
        )

    return RuleResult(found, takes, run=run, scales=body.scales)


def _run_scan(params: dict[str, Any], body: Callable[..., list[Any]], operands: list[Any], **options: Any) -> list[Any]:
    num_consts, num_carry = interpreter.scan_counts(params)
    first = num_consts + num_carry

    def step(carry: Any, slices: Any) -> tuple[Any, Any]:
        results = body(*operands[:num_consts], *carry, *slices)
        return results[:num_carry], results[num_carry:]

    start = list(map(jnp.asarray, operands[num_consts:first]))
    last, stacked = lax.scan(step, start, operands[first:], reverse=params["reverse"], **options)
    return [*last, *stacked]


def _scan_over_examples(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """`lax.map` over the examples, or a scan whose iterations see one example each and add to sums."""
    params = node.params
    num_consts, num_carry = interpreter.scan_counts(params)
    first = num_consts + num_carry
    rows = common_rows(states[first:])
    if rows.axis != 0 or rows.outer != 1 or any(state != INVARIANT for state in states[:first]):
        raise NotRowwise("it goes over the examples with other values of the batch at hand", unroll=False)
    graph = Graph(params["jaxpr"])
    starts = node.inputs[num_consts:first]
    carried = [
        _carried_over_examples(graph, before, after, reader.is_zero(start))
        for before, after, start in zip(graph.inputs[num_consts:first], graph.outputs, starts, strict=False)
    ]
    takes = [*[None] * first, *[rows] * len(states[first:])]

    def run(microbatch: Any) -> list[Any]:
        operands = [microbatch.value(value, take) for value, take in zip(node.inputs, takes, strict=True)]
        body = interpreter.as_function(params["jaxpr"])
        length = rows.length(microbatch.size)
        return _run_scan(params, lambda *flat: list(map(jnp.asarray, body(*flat))), operands, length=length)

    found: list[State] = [*carried, *[rows] * (len(node.outputs) - num_carry)]
    return RuleResult(found, takes, run=run, scales=not contains_custom_vjp(node))


def _carried_over_examples(graph: Graph, before: Value, after: Value, starts_from_zero: bool) -> State:
    """The state of a value carried from example to example: invariant if none changes it, summed if each adds to it."""
    if after is before:
        return INVARIANT
    used = [*graph.outputs, *(value for node in graph.nodes for value in node.inputs)]
    uses = collections.Counter(map(id, used))

    def before_casts(value: Value) -> Value:
        """A weakly typed zero is cast to the dtype that it has, before or after the addition."""
        while uses[id(value)] == 1 and value.node is not None and value.node.name == "convert_element_type":
            if value.node.inputs[0].dtype != value.dtype:
                break
            value = value.node.inputs[0]
        return value

    total = before_casts(after)
    if starts_from_zero and uses[id(total)] == uses[id(before)] == 1 and total.shape == before.shape:
        if total.node is not None and total.node.name in ("add", "add_any"):
            if any(before_casts(operand) is before for operand in total.node.inputs):
                return SUMMED
    raise NotRowwise("it carries something from one example to the next", unroll=False)
