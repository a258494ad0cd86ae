"""Follows the batch axis through a graph, node by node, and gives every value its state.

The table of rules: for each primitive, how it treats the batch axis.
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
from anybatch.reading import coupling
from anybatch.reading.coupling import Blame, Coupling, NotRowwise, failure_of
from anybatch.reading.states import INVARIANT, SUMMED, Batched, Head, State

# A selection of few rows, such as anchors, is read as a whole value: at most so many, and a small part of the batch.
FEW_ROWS, SMALL_PART = 16, 1 / 16

MAX_UNROLLED = 64  # steps of a loop that may be unrolled to find the one that brings examples together


class NeedsInlining(Exception):
    """Raised to start over with a checkpoint looked into, or a loop unrolled."""

    def __init__(self, equation: Any, function: Any) -> None:
        super().__init__()
        self.equation, self.function = equation, function


@dataclasses.dataclass
class RuleResult:
    """What a rule found out about a node.

    Args:
      states: those of its outputs.
      takes: for each operand that is whole, the rows of it that a microbatch takes; None: all of it.
      params: the parameters of the equation at a number of examples, where they hold shapes.
      run: computes the node in a microbatch, where that is not the same equation with other parameters.
      scales: whether its derivative is linear in the cotangent; that of a custom_vjp may not be.
      nested: the readings of the functions inside it.
      whole: operands with rows that are read whole, which their values allow.
      reorders: whether it sorts rows, or looks up sorted ones, so that the order of its results is its own affair.
      selection: the selection of its operands with rows, see `Fact`.
    """

    states: Sequence[State]
    takes: Sequence[Batched | None] | None = None
    params: Callable[[int], dict[str, Any]] | None = None
    run: Callable[[Any], list[Any]] | None = None
    scales: bool = True
    nested: Sequence["Reader"] = ()
    whole: frozenset[Value] = frozenset()
    reorders: bool = False
    selection: int | None = None


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known of a value.

    Args:
      state: how it follows from microbatches, see `states`.
      moves: whether it depends on what the gradient is taken with respect to.
      has_gradient: whether it has a gradient.
      is_zero: whether it is known to be zero.
      selection: which rows the value has or sums over. None: the examples of the batch. An integer M: the M rows that
        the loss selected from its data, as by `x[::2]`. Values with different M are computed in different loops.
    """

    state: State
    moves: bool = False
    has_gradient: bool = False
    is_zero: bool = False
    selection: int | None = None


@dataclasses.dataclass(frozen=True)
class Rulebook:
    """How to read each primitive, by its name; and whether the backward pass of a node can be taken in parts."""

    rules: dict[str, Callable[["Reader", Node, Sequence[State]], RuleResult]]
    has_linear_backward: Callable[["Reader", Node], bool]


class Reader:
    """The states of all values of a graph.

    Args:
      graph: the function.
      num_examples: the size of the batch that it was traced at.
      facts: what is known of its inputs.
      rulebook: how to read each primitive.
      top: whether this is the loss itself, or a function nested in it, which must be row-wise throughout.
      may_reorder: whether examples may be sorted, each microbatch for itself.
      sums_data_later: whether a sum over the batch of data alone is left to the microbatches, as all other sums are,
        rather than computed before the first one.
      reads_derivatives: whether functions with derivatives of their own are differentiated here; if not, their
        derivatives are read when an outer `grad` asks for them.
      may_select: whether rows that are selected from the data may have a loop of their own.
      failed: primitives that could not be computed as their rules say, and why. They are taken to mix examples.
    """

    def __init__(
        self,
        graph: Graph,
        num_examples: int,
        facts: Sequence[Fact],
        rulebook: Rulebook,
        *,
        top: bool = False,
        may_reorder: bool = False,
        sums_data_later: bool = False,
        reads_derivatives: bool = True,
        may_select: bool = False,
        failed: Mapping[str, str] | None = None,
    ) -> None:
        self.failed = failed or {}
        self.may_select = may_select
        self.sums_data_later = sums_data_later
        self.reads_derivatives = reads_derivatives
        self.graph, self.rulebook, self.top = graph, rulebook, top
        self.batch_size = num_examples
        self.num_examples = num_examples  # while a rule is applied, those of the selection at hand
        self.facts = dict(zip(graph.inputs, facts, strict=True))
        self.uses_batch = {value: fact.state != INVARIANT for value, fact in self.facts.items()}
        self.may_reorder = may_reorder
        self.sorted_by: dict[int, Value] = {}  # the keys of each order
        self.pointers: dict[tuple[int, int | None], Value] = {}  # the positions that a sort itself makes
        self.outcomes: dict[Node, RuleResult] = {}
        self._zeros: dict[Value, bool] = {}
        self.blames: list[Blame] = []
        self.rearranged: dict[Node, Blame] = {}  # selects, sorts or shifts rows of data alone
        self.kept_whole: dict[Value, Blame] = {}  # selections that are computed with at full size
        self.computed_first: set[Value] = set()  # from data alone, once, before the first microbatch
        self.cut_later: set[Value] = set()  # those of them that then are cut into rows like the batch itself
        self.hoisted: list[Node] = []  # of parameters alone, with a derivative that cannot be taken in parts
        for node in graph.nodes:
            self._visit(node)

    def fact(self, value: Value) -> Fact:
        return Fact(INVARIANT) if value.is_constant else self.facts[value]

    def state(self, value: Value) -> State:
        return INVARIANT if value.is_constant else self.facts[value].state

    def moves(self, value: Value) -> bool:
        """Whether it depends on what the gradient is taken with respect to."""
        return not value.is_constant and self.facts[value].moves

    def has_gradient(self, value: Value) -> bool:
        return not value.is_constant and self.facts[value].has_gradient

    def selection(self, value: Value) -> int | None:
        """Which rows a value has, as `Fact` says."""
        return None if value.is_constant else self.facts[value].selection

    def count(self, selection: int | None) -> int:
        """The number of examples, or of the rows that are selected from them."""
        return self.batch_size if selection is None else selection

    def output_states(self) -> list[State]:
        return [self.state(value) for value in self.graph.outputs]

    def nested(self, node: Node, jaxpr: Any, facts: Sequence[Fact], reads_derivatives: bool | None = None) -> "Reader":
        """Reads a function inside a node. It must be row-wise throughout."""
        if reads_derivatives is None:
            reads_derivatives = self.reads_derivatives
        options: dict[str, Any] = {"may_reorder": self.may_reorder, "reads_derivatives": reads_derivatives}
        options["failed"] = self.failed
        graph = Graph(jaxpr, calls=(*node.calls, node.equation))
        return Reader(graph, self.num_examples, facts, self.rulebook, **options)

    @property
    def scales(self) -> bool:
        """Whether every derivative in it is linear in the cotangent."""
        return all(outcome.scales for outcome in self.outcomes.values())

    def _visit(self, node: Node) -> None:
        states = [self.state(value) for value in node.inputs]
        moves = any(map(self.moves, node.inputs))
        has_gradient = any(map(self.has_gradient, node.inputs)) and node.name != "stop_gradient"
        uses_batch = any(not value.is_constant and self.uses_batch[value] for value in node.inputs)
        selection: int | None = None
        if all(state == INVARIANT for state in states):
            found: list[State] = [INVARIANT] * len(node.outputs)
            if has_gradient:
                self._hoist_if_needed(node)
            self._follow_kept_whole(node, moves)
        else:
            try:
                outcome = self._apply_rule(node, states, moves)
                found, selection = list(outcome.states), outcome.selection
                self.outcomes[node] = outcome
            except NotRowwise as refusal:
                found = self._refused(node, states, moves, refusal)
        for output, state in zip(node.outputs, found, strict=True):
            of = selection
            if self.top and not moves and self._is_computed_first(state, states):
                state, of = self._compute_first(output, state, node, states)
            self.facts[output] = Fact(state, moves, has_gradient and output.is_inexact, selection=of)
            self.uses_batch[output] = uses_batch

    def _is_computed_first(self, state: State, states: Sequence[State]) -> bool:
        """Whether data alone in some state must, or had better, be known before the first microbatch."""
        if not self.sums_data_later:
            return state == SUMMED or isinstance(state, Head)
        # What is computed from sums alone can wait, as they do.
        return isinstance(state, Head) and state.couples

    def _apply_rule(self, node: Node, states: Sequence[State], moves: bool) -> RuleResult:
        if any(isinstance(state, Head) for state in states):
            has_rows = any(isinstance(state, Batched) for state in states)
            raise NotRowwise(Coupling.FED_BACK if has_rows else "it depends on values of the whole batch")
        if node.name in self.failed:
            raise NotRowwise(self.failed[node.name], reason=Coupling.RULE_FAILED)
        rule = self.rulebook.rules.get(node.name)
        if rule is None:
            raise NotRowwise(
                f"there is no rule for the primitive {node.name!r}, so that it must be taken to mix examples",
                reason=Coupling.NO_RULE,
            )
        try:
            outcome = self._guarded(rule, node, states)
        except NotRowwise:
            selected = self._read_data_whole(rule, node, states, moves, selected_only=True)
            with_data_whole = selected or self._read_data_whole(rule, node, states, moves)
            if with_data_whole is None:
                raise
            outcome = with_data_whole
        if self.top and moves and not all(state == INVARIANT for state in outcome.states):
            live = [state for output, state in zip(node.outputs, outcome.states, strict=True) if self._is_live(output)]
            if INVARIANT in live:
                raise NotRowwise("one equation returns values of the examples beside values of the parameters alone")
        return outcome

    def _read_data_whole(
        self, rule: Any, node: Node, states: Sequence[State], moves: bool, *, selected_only: bool = False
    ) -> RuleResult | None:
        """Reads operands that are data alone as whole values: they can be computed before the first microbatch.

        With `selected_only`, only those that have rows of a selection.
        """
        data = [
            isinstance(state, Batched)
            and not self.moves(value)
            and (not selected_only or self.selection(value) is not None)
            for value, state in zip(node.inputs, states, strict=True)
        ]
        if not (self.top and (moves or selected_only) and any(data)):
            return None
        as_whole = [INVARIANT if whole else state for whole, state in zip(data, states, strict=True)]
        if all(state == INVARIANT for state in as_whole):
            return None
        try:
            outcome = self._guarded(rule, node, as_whole)
        except NotRowwise:
            return None
        outcome.whole = frozenset(value for value, whole in zip(node.inputs, data, strict=True) if whole)
        self.computed_first |= outcome.whole
        return outcome

    def _guarded(self, rule: Any, node: Node, states: Sequence[State]) -> RuleResult:
        selections = {
            self.selection(value)
            for value, state in zip(node.inputs, states, strict=True)
            if state == SUMMED or isinstance(state, Batched)
        }
        if len(selections) > 1:
            raise NotRowwise("it brings together rows that are selected from the batch in different ways")
        (selection,) = selections or {None}
        self.num_examples = self.count(selection)
        try:
            outcome = rule(self, node, states)
            _check_order(node, states, outcome)
            outcome.selection = selection
            return outcome
        except (NotRowwise, NeedsInlining):
            raise
        except Exception as error:  # a rule that fails must not become a gradient that is wrong
            why = failure_of(node.name, error)
            warn_of_failed_rule(coupling.blame(node, why, Coupling.RULE_FAILED))
            raise NotRowwise(why, reason=Coupling.RULE_FAILED) from error
        finally:
            self.num_examples = self.batch_size

    def _refused(self, node: Node, states: Sequence[State], moves: bool, refusal: NotRowwise) -> list[State]:
        """What cannot be done microbatch by microbatch belongs to the head."""
        coupled_before = any(isinstance(state, Head) and state.couples for state in states)
        couples = coupled_before or any(isinstance(state, Batched) for state in states)
        blame = refusal.blame
        if blame is None or not blame.file:  # some equations inside others have no line of their own
            blame = coupling.blame(node, refusal.why, refusal.reason)
        if not self.top:
            raise NotRowwise(refusal.why, reason=refusal.reason, blame=blame)
        mixed = any(isinstance(state, Head) for state in states)
        if refusal.unroll and moves and not mixed and _can_be_opened(node):
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
        """Data alone: computed before the first microbatch, at the full batch, and cut into rows if it has them."""
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
        if length != self.batch_size and not self.may_select:
            self.kept_whole[output] = self.rearranged.get(node) or coupling.blame(node, "it selects rows of the batch")
            return INVARIANT, None
        self.cut_later.add(output)
        return Batched(rows.axis), None if length == self.batch_size else length

    def _follow_kept_whole(self, node: Node, moves: bool) -> None:
        """Blames a selection of the batch that parameters meet as a whole."""
        blame = next((self.kept_whole[value] for value in node.inputs if value in self.kept_whole), None)
        if blame is not None and moves:
            self.blames.append(blame)
        elif blame is not None:
            self.kept_whole.update(dict.fromkeys(node.outputs, blame))

    def _hoist_if_needed(self, node: Node) -> None:
        """A custom backward pass of parameters alone that is not linear must see the whole gradient, once."""
        if self.rulebook.has_linear_backward(self, node):
            return
        if not self.top:
            why = "a custom backward pass of parameters is not linear in the gradient"
            raise NotRowwise(why, blame=coupling.blame(node, why))
        self.hoisted.append(node)

    def _is_live(self, value: Value) -> bool:
        return id(value) in self.graph.live

    def is_zero(self, value: Value) -> bool:
        """Whether a whole value is known to be zero everywhere."""
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
        """The values that make this one zero if all of them are zero; None if it is not known to be zero."""
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
    """Says that a rule failed, and what became of it."""
    warnings.warn(
        f"A rule of anybatch failed at {blame}.\nThe gradient is exact all the same. From that line on, the loss is "
        "computed from the whole batch at once, which takes more memory. Please report it with the loss, or correct "
        "the rule if you registered it yourself.",
        RuleFailedWarning,
        stacklevel=user_stacklevel(),
    )


def _check_order(node: Node, states: Sequence[State], outcome: RuleResult) -> None:
    """Rows that are sorted must stay as they are sorted, and positions of rows must not become numbers."""
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


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enters a function in the table, for the primitives of these names.

    It is called with the states of the operands, not all of which are whole and none of which is mixed. It
    returns the states of the outputs, or raises `NotRowwise`.
    """

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter
