"""Follows the batch axis through a graph and gives every value its state.

`Reader` visits the nodes in order. For each it looks up the rule of its primitive in a `Rulebook`; the rule returns the
states of the results, or raises `NotRowwise`, which makes the node part of the head. `RULES` is the table of rules, and
the modules in `rules/` fill it with `@rule("name")`.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.errors import RuleFailedWarning, user_stacklevel
from anybatch.jaxprs.graph import Graph, Node, Value, opened_function
from anybatch.jaxprs.primitives import ELEMENTWISE, REMAT
from anybatch.reading.states import (
    INVARIANT,
    SUMMED,
    Batched,
    Blame,
    Coupling,
    Head,
    NotRowwise,
    State,
    blame_of,
    failure_of,
    refuse_sums,
)

# A selection of few rows, such as anchors, is read as invariant: at most 16 rows, and at most this share of the batch.
FEW_ROWS, SMALL_PART = 16, 1 / 16

MAX_UNROLLED = 64  # iterations of a scan that may be unrolled to find the one that combines examples


class NeedsInlining(Exception):
    """Raised to read the loss again, with a checkpoint inlined or a scan unrolled."""

    def __init__(self, equation: Any, function: Any) -> None:
        super().__init__()
        self.equation, self.function = equation, function


@dataclasses.dataclass
class RuleResult:
    """What a rule returns for a node."""

    states: Sequence[State]  # of its outputs
    takes: Sequence[Batched | None] | None = None  # the rows of invariant operands that a microbatch takes; None: all
    params: Callable[[int], dict[str, Any]] | None = None  # of the equation, for a number of examples, if these differ
    run: Callable[[Any], list[Any]] | None = None  # computes it for a microbatch, if that is another equation
    scales: bool = True  # whether its derivative is linear in the cotangent. That of a custom_vjp may not be.
    in_full: frozenset[Value] = frozenset()  # batched operands, computed first, of which a microbatch reads all rows
    reorders: bool = False  # it sorts rows or looks up sorted ones: the rule itself has checked their order
    selection: int | None = None  # of its batched operands, see `Fact`


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known of a value.

    The selection tells which rows the value has or sums over. None: the examples of the batch. An integer M: M rows
    that the loss selected from its data, for example by `x[::2]`. Values with different M have different loops.
    """

    state: State
    moves: bool = False  # it depends on the differentiated arguments
    has_gradient: bool = False  # a gradient flows through it: it moves, is inexact, without `stop_gradient` in between
    is_zero: bool = False  # it is known to be zero
    selection: int | None = None


@dataclasses.dataclass(frozen=True)
class Rulebook:
    """The rule of each primitive, by its name; and whether the backward pass of a node can run per microbatch."""

    rules: dict[str, Callable[["Reader", Node, Sequence[State]], RuleResult]]
    has_linear_backward: Callable[["Reader", Node], bool]


@dataclasses.dataclass(frozen=True)
class ReadOptions:
    """How a loss is read."""

    may_reorder: bool = False  # a microbatch may sort its own examples where the loss sorts those of the batch
    # Sums of data alone are added up over the microbatches, as all others are, and not computed before the first one.
    sums_data_later: bool = False
    # Functions with custom derivatives are differentiated here, and not when an outer `grad` asks for it.
    reads_derivatives: bool = True
    may_select: bool = False  # rows that are selected from the data may have a loop of their own
    # Primitives that could not be computed as their rules say, and why. They are taken to couple examples.
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Reader:
    """The states of all values of a graph, which was traced at `num_examples`. The facts are those of its inputs.

    `top` is True for the loss itself, and False for a function nested in it, all of which must run per microbatch.
    """

    def __init__(
        self,
        graph: Graph,
        num_examples: int,
        facts: Sequence[Fact],
        rulebook: Rulebook,
        options: ReadOptions,
        *,
        top: bool = False,
    ) -> None:
        self.graph, self.rulebook, self.options, self.top = graph, rulebook, options, top
        self.batch_size = num_examples
        self.num_examples = num_examples  # while a rule is applied, the number of rows of the selection at hand
        self.facts = dict(zip(graph.inputs, facts, strict=True))
        self.uses_batch = {value: fact.state != INVARIANT for value, fact in self.facts.items()}
        self.sorted_by: dict[int, Value] = {}  # the sort keys of each order
        self.pointers: dict[tuple[int, int | None], Value] = {}  # the positions that a sort returns
        self.outcomes: dict[Node, RuleResult] = {}
        self._zeros: dict[Value, bool] = {}
        self.blames: list[Blame] = []
        self.rearranged: dict[Node, Blame] = {}  # lines that select, sort or shift rows of data alone
        self.kept_in_full: dict[Value, Blame] = {}  # selections that every microbatch reads in full
        self.computed_first: set[Value] = set()  # from data alone, before the first microbatch
        self.cut_later: set[Value] = set()  # those of them whose rows are then sliced like the batch itself
        self.hoisted: list[Node] = []  # of parameters alone, with a derivative that cannot run per microbatch
        for node in graph.nodes:
            self._visit(node)

    def fact(self, value: Value) -> Fact:
        return Fact(INVARIANT) if value.is_constant else self.facts[value]

    def state(self, value: Value) -> State:
        return INVARIANT if value.is_constant else self.facts[value].state

    def moves(self, value: Value) -> bool:
        """Whether a value depends on the differentiated arguments."""
        return not value.is_constant and self.facts[value].moves

    def has_gradient(self, value: Value) -> bool:
        return not value.is_constant and self.facts[value].has_gradient

    def depends_on_batch(self, value: Value) -> bool:
        return not value.is_constant and self.uses_batch[value]

    def selection(self, value: Value) -> int | None:
        """The selection of a value, see `Fact`."""
        return None if value.is_constant else self.facts[value].selection

    def count(self, selection: int | None) -> int:
        """The number of examples, or of rows selected from them."""
        return self.batch_size if selection is None else selection

    def output_states(self) -> list[State]:
        return [self.state(value) for value in self.graph.outputs]

    def nested(self, node: Node, jaxpr: Any, facts: Sequence[Fact], reads_derivatives: bool | None = None) -> "Reader":
        """Reads a function inside a node. All of it must run per microbatch."""
        # Only the loss itself leaves sums to the microbatches, or has loops of its own for selections.
        options = dataclasses.replace(self.options, sums_data_later=False, may_select=False)
        if reads_derivatives is not None:
            options = dataclasses.replace(options, reads_derivatives=reads_derivatives)
        graph = Graph(jaxpr, calls=(*node.calls, node.equation))
        return Reader(graph, self.num_examples, facts, self.rulebook, options)

    @property
    def scales(self) -> bool:
        """Whether all derivatives in the graph are linear in the cotangent."""
        return all(outcome.scales for outcome in self.outcomes.values())

    def _visit(self, node: Node) -> None:
        states = [self.state(value) for value in node.inputs]
        moves = any(map(self.moves, node.inputs))
        has_gradient = any(map(self.has_gradient, node.inputs)) and node.name != "stop_gradient"
        uses_batch = any(map(self.depends_on_batch, node.inputs))
        selection: int | None = None
        if all(state == INVARIANT for state in states):
            found: list[State] = [INVARIANT] * len(node.outputs)
            if has_gradient:
                self._hoist_if_needed(node)
            self._follow_kept_in_full(node, moves)
        else:
            try:
                outcome = self._apply_rule(node, states, moves)
                found, selection = list(outcome.states), outcome.selection
                self.outcomes[node] = outcome
            except NotRowwise as refusal:
                found = self._refused(node, states, moves, refusal)
        for output, state in zip(node.outputs, found, strict=True):
            of = selection
            if self.top and not moves and self._is_computed_first(state):
                state, of = self._compute_first(output, state, node, states)
            self.facts[output] = Fact(state, moves, has_gradient and output.is_inexact, selection=of)
            self.uses_batch[output] = uses_batch

    def _is_computed_first(self, state: State) -> bool:
        """Whether a value of data alone in this state is computed before the first microbatch."""
        if not self.options.sums_data_later:
            return state == SUMMED or isinstance(state, Head)
        # A function of sums alone can wait until the sums are there.
        return isinstance(state, Head) and state.couples

    def _apply_rule(self, node: Node, states: Sequence[State], moves: bool) -> RuleResult:
        if any(isinstance(state, Head) for state in states):
            has_rows = any(isinstance(state, Batched) for state in states)
            raise NotRowwise(Coupling.FED_BACK if has_rows else "it depends on values of the full batch")
        if node.name in self.options.failed:
            raise NotRowwise(self.options.failed[node.name], reason=Coupling.RULE_FAILED)
        rule = self.rulebook.rules.get(node.name)
        if rule is None:
            raise NotRowwise(
                f"there is no rule for the primitive {node.name!r}, so it must be taken to couple examples",
                reason=Coupling.NO_RULE,
            )
        try:
            outcome = self._guarded(rule, node, states)
        except NotRowwise:
            selected = self._read_data_in_full(rule, node, states, moves, selected_only=True)
            with_data_in_full = selected or self._read_data_in_full(rule, node, states, moves)
            if with_data_in_full is None:
                raise
            outcome = with_data_in_full
        if self.top and moves and not all(state == INVARIANT for state in outcome.states):
            outputs = zip(node.outputs, outcome.states, strict=True)
            if any(state == INVARIANT and id(output) in self.graph.live for output, state in outputs):
                raise NotRowwise("one equation returns both values of the examples and values of the parameters alone")
        return outcome

    def _read_data_in_full(
        self, rule: Any, node: Node, states: Sequence[State], moves: bool, *, selected_only: bool = False
    ) -> RuleResult | None:
        """Reads operands of data alone as invariant. They are computed before the first microbatch, for all examples.

        With `selected_only`, only those with rows of a selection.
        """
        data = [
            isinstance(state, Batched)
            and not self.moves(value)
            and (not selected_only or self.selection(value) is not None)
            for value, state in zip(node.inputs, states, strict=True)
        ]
        if not (self.top and (moves or selected_only) and any(data)):
            return None
        as_invariant = [INVARIANT if is_data else state for is_data, state in zip(data, states, strict=True)]
        if all(state == INVARIANT for state in as_invariant):
            return None
        try:
            outcome = self._guarded(rule, node, as_invariant)
        except NotRowwise:
            return None
        outcome.in_full = frozenset(value for value, is_data in zip(node.inputs, data, strict=True) if is_data)
        self.computed_first |= outcome.in_full
        return outcome

    def _guarded(self, rule: Any, node: Node, states: Sequence[State]) -> RuleResult:
        selections = {
            self.selection(value)
            for value, state in zip(node.inputs, states, strict=True)
            if state == SUMMED or isinstance(state, Batched)
        }
        if len(selections) > 1:
            raise NotRowwise("it combines rows that are selected from the batch in different ways")
        (selection,) = selections or {None}
        self.num_examples = self.count(selection)
        try:
            outcome = rule(self, node, states)
            _check_order(node, states, outcome)
            outcome.selection = selection
            return outcome
        except (NotRowwise, NeedsInlining):
            raise
        except Exception as error:  # a rule that fails must not lead to a wrong gradient
            blame = failure_of(node, error)
            warn_of_failed_rule(blame)
            raise NotRowwise(blame.why, reason=blame.reason) from error
        finally:
            self.num_examples = self.batch_size

    def _refused(self, node: Node, states: Sequence[State], moves: bool, refusal: NotRowwise) -> list[State]:
        """The states of the outputs of a node that cannot run per microbatch: it belongs to the head."""
        coupled_before = any(isinstance(state, Head) and state.couples for state in states)
        couples = coupled_before or any(isinstance(state, Batched) for state in states)
        blame = refusal.blame
        if blame is None or not blame.file:  # some equations inside others have no source line
            blame = blame_of(node, refusal.why, refusal.reason)
        if not self.top:
            raise NotRowwise(refusal.why, reason=refusal.reason, blame=blame)
        in_head = any(isinstance(state, Head) for state in states)
        if refusal.unroll and moves and not in_head and _can_be_opened(node):
            raise NeedsInlining(node.equation, opened_function(node))
        if couples and not coupled_before:
            if moves:
                self.blames.append(blame)
            else:
                self.rearranged[node] = blame
        return [Head(couples)] * len(node.outputs)

    def _compute_first(
        self, output: Value, state: State, node: Node, operand_states: Sequence[State]
    ) -> tuple[State, int | None]:
        """The state of data alone that is computed before the first microbatch: batched if its rows can be sliced."""
        self.computed_first.add(output)
        operands = zip(node.inputs, operand_states, strict=True)
        value, rows = next(((value, rows) for value, rows in operands if isinstance(rows, Batched)), (None, None))
        if state == SUMMED or value is None or rows is None or not rows.in_batch_order or rows.axis >= output.ndim:
            return INVARIANT, None
        length, selection = output.shape[rows.axis], self.selection(value)
        if length == rows.length(self.count(selection)):
            self.cut_later.add(output)
            return rows, selection
        if length <= max(1, min(FEW_ROWS, SMALL_PART * self.batch_size)):
            return INVARIANT, None
        if length != self.batch_size and not self.options.may_select:
            self.kept_in_full[output] = self.rearranged.get(node) or blame_of(node, "it selects rows of the batch")
            return INVARIANT, None
        self.cut_later.add(output)
        return Batched(rows.axis), None if length == self.batch_size else length

    def _follow_kept_in_full(self, node: Node, moves: bool) -> None:
        """Blames a selection of the batch that every microbatch reads in full, where parameters meet it."""
        blame = next((self.kept_in_full[value] for value in node.inputs if value in self.kept_in_full), None)
        if blame is not None and moves:
            self.blames.append(blame)
        elif blame is not None:
            self.kept_in_full.update(dict.fromkeys(node.outputs, blame))

    def _hoist_if_needed(self, node: Node) -> None:
        """Hoists a node of parameters alone if its backward pass is not linear: it needs the sum of all gradients."""
        if self.rulebook.has_linear_backward(self, node):
            return
        if not self.top:
            why = "a custom backward pass of parameters is not linear in the gradient"
            raise NotRowwise(why, blame=blame_of(node, why))
        self.hoisted.append(node)

    def is_zero(self, value: Value) -> bool:
        """Whether an invariant value is known to be zero everywhere."""
        seen: set[Value] = set()
        pending = [value]
        while pending:  # without recursion: a loss may add up thousands of terms
            other = pending.pop()
            if other in seen or self._zeros.get(other, False):
                continue
            seen.add(other)
            needed = self._zero_if(other) if self._zeros.get(other, True) else None
            if needed is None:
                self._zeros[value] = False
                return False
            pending.extend(needed)
        self._zeros.update(dict.fromkeys(seen, True))
        return True

    def _zero_if(self, value: Value) -> Sequence[Value] | None:
        """Values that make this one zero if all of them are zero; None if this one is not known to be zero."""
        known = value.known if value.is_constant else value.hint
        if known is not None:
            is_zero = not value.is_key and isinstance(known, (np.ndarray, jax.Array)) and not np.any(np.asarray(known))
            return () if is_zero else None
        if value.is_constant or self.state(value) != INVARIANT:
            return None
        node = value.node
        if node is None:
            return () if self.facts[value].is_zero else None
        if node.name in _KEEP_ZERO:
            return node.inputs[:1]
        return node.inputs if node.name in _ADD_ZEROS else None


def warn_of_failed_rule(blame: Blame) -> None:
    """Warns that a rule failed, and says what is done instead."""
    warnings.warn(
        f"A rule of anybatch failed at {blame}.\nThe gradient is exact all the same. From that line on, the loss is "
        "computed from the full batch, which takes more memory. Please report it with the loss, or correct the rule if "
        "you registered it yourself.",
        RuleFailedWarning,
        stacklevel=user_stacklevel(),
    )


def _check_order(node: Node, states: Sequence[State], outcome: RuleResult) -> None:
    """Checks that sorted rows stay in their order, and that positions of rows are not used as numbers."""
    special = {state.at(0) for state in states if isinstance(state, Batched) and not state.in_batch_order}
    if not special or outcome.reorders:
        return
    why = "it uses the order in which examples were sorted across the batch"
    if any(state.at(0) not in special for state in outcome.states if isinstance(state, Batched)):
        raise NotRowwise(why)
    if any(rows is not None and state == INVARIANT for state, rows in zip(states, outcome.takes or (), strict=False)):
        raise NotRowwise(why)
    if any(rows.points is not None for rows in special) and node.name not in _KEEP_POSITIONS:
        raise NotRowwise(why)


_KEEP_POSITIONS = ELEMENTWISE | frozenset("broadcast_in_dim reshape squeeze".split())
_KEEP_ZERO = frozenset(
    "broadcast_in_dim reshape convert_element_type transpose squeeze slice neg stop_gradient copy copy_p".split()
)
_ADD_ZEROS = frozenset("mul add add_any sub concatenate".split())


def _can_be_opened(node: Node) -> bool:
    return node.name in REMAT or (node.name == "scan" and node.params["length"] <= MAX_UNROLLED)


Rule = Callable[[Reader, Node, Sequence[State]], RuleResult]

RULES: dict[str, Rule] = {}


def rule(*names: str, linear: bool | None = None) -> Callable[[Rule], Rule]:
    """Adds the decorated function to the table, as the rule of the primitives of these names.

    A rule is called with the states of the operands. At least one of them is batched or summed, and none is a head. It
    returns a `RuleResult`, or raises `NotRowwise`.

    Args:
      *names: the primitives.
      linear: True if the results are linear in the first operand: those of a sum are sums. False if they are not. In
        both cases the function is called without sums. With None it is called with sums, too.
    """

    def enter(function: Rule) -> Rule:
        def without_sums(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
            if linear and states[0] == SUMMED and all(state == INVARIANT for state in states[1:]):
                return RuleResult([SUMMED] * len(node.outputs))
            refuse_sums(states)
            return function(reader, node, states)

        RULES.update(dict.fromkeys(names, function if linear is None else without_sums))
        return function

    return enter
