"""Splits a loss into a prefix, which runs per microbatch, and a head, which runs once.

    outputs = head(frontier, parameters)

The frontier is what the prefix computes for the head: sums over the batch, and rows of all examples.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call.arguments import Arrays
from anybatch.call.loss import TracedLoss
from anybatch.call.microbatches import slice_examples
from anybatch.jaxprs import avals, tracing
from anybatch.jaxprs.graph import Graph, Node, Value, sources
from anybatch.jaxprs.primitives import ELEMENTWISE
from anybatch.reading.evaluation import Examples, FullBatch, Microbatch
from anybatch.reading.positions import Draw
from anybatch.reading.reader import Reader
from anybatch.reading.states import INVARIANT, SUMMED, Batched, Head, State, take_rows

# Too costly to compute for the full batch. Rows of data that need these are computed per microbatch, and gathered.
HEAVY = frozenset("dot_general conv_general_dilated scan while cond pallas_call ragged_dot_general".split())
# The head can do these after gathering, so that the rows before them are gathered.
_MOVES = frozenset("transpose reshape squeeze broadcast_in_dim copy".split())


class Seeds(enum.Enum):
    """When the gradient of the head with respect to the frontier, the seeds of the prefix's backward pass, is known."""

    NONE = "none"  # there is none: the loss does not depend on the parameters through the batch
    BEFORE = "before"  # it does not depend on the frontier: one pass
    AFTER = "after"  # the frontier is one number, whose gradient is scaled by it at the end: one pass
    BETWEEN = "between"  # it depends on the frontier: two passes


@dataclasses.dataclass(frozen=True, eq=False)
class PrefixInputs:
    """The inputs of the prefix of a loss, for one shard."""

    variables: list[Any]  # differentiated: the parameters, then the values that were hoisted out of the prefix
    inputs: list[Any]  # all inputs of the loss, with the examples of the shard
    known: list[Any] | None  # the values known first; None before they are computed
    selected: list[Any]  # the shard's rows of those of them that a selection indexes; empty if all rows are in `known`
    place: list[Any]  # the traced values of the shard, if it is one of several

    @property
    def origin(self) -> Any:
        """The index in the batch of the first example, or None if it is 0."""
        return self.place[0] if self.place else None

    @property
    def lists(self) -> tuple[Any, ...]:
        """All fields, in order."""
        return self.variables, self.inputs, self.known, self.selected, self.place

    @property
    def types(self) -> "PrefixInputs":
        """The types of all arrays."""
        return PrefixInputs(*jax.tree.map(lambda leaf: avals.abstract(jax.typeof(leaf)), self.lists))


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """The prefix, the frontier and the head of a loss that was read."""

    loss: TracedLoss
    reader: Reader
    draw: Draw

    @property
    def graph(self) -> Graph:
        return self.reader.graph

    @property
    def num_consts(self) -> int:
        return len(self.loss.const_types)

    @property
    def batch_positions(self) -> range:
        """The positions of the batch among the inputs."""
        first = self.num_consts + len(self.loss.types.wrt)
        return range(first, first + len(self.loss.types.batch))

    @functools.cached_property
    def head_nodes(self) -> list[Node]:
        """The nodes that are computed once, from the full batch."""
        return [node for node in self.graph.nodes if self._is_in_head(node)]

    def _is_in_head(self, node: Node) -> bool:
        if any(isinstance(self.reader.state(output), Head) for output in node.outputs):
            return True
        return node.has_effects and not node.outputs and node not in self.reader.outcomes

    @property
    def loss_couples(self) -> bool:
        """Whether the loss itself is a function of rows, and not of sums alone."""
        state = self.reader.state(self.graph.outputs[0])
        return isinstance(state, Head) and state.couples

    @property
    def head_couples(self) -> bool:
        """Whether any value of the head is one of rows, and not of sums alone."""
        states = [self.reader.state(output) for node in self.head_nodes for output in node.outputs]
        return any(isinstance(state, Head) and state.couples for state in states)

    @functools.cached_property
    def full_batch_nodes(self) -> list[Node]:
        """All nodes that run on the full batch.

        These are the nodes of the head, those that are computed before the first microbatch, and those that compute
        with parameters and with data that is known by then.
        """
        gathered = set(self.gathered_first)
        found = dict.fromkeys([*self.head_nodes, *filter(self._combines_full_batch, self.graph.nodes)])

        def is_last(value: Value) -> bool:
            return value.node in found or value in gathered or not self.reader.uses_batch[value]

        known_first = [value.node for value in sources(self.known_first, is_last) if not is_last(value)]
        return list(dict.fromkeys([*found, *(node for node in known_first if node is not None)]))

    def _combines_full_batch(self, node: Node) -> bool:
        """Whether parameters meet data of the full batch in a node outside of the microbatches."""
        return any(
            self.reader.state(output) == INVARIANT and self.reader.moves(output) and self.reader.uses_batch[output]
            for output in node.outputs
            if id(output) in self.graph.live  # a loop may carry a counter or a key that nobody reads after it
        )

    @functools.cached_property
    def head_has_layers(self) -> bool:
        """Whether layers of the model run on the full batch: products of the batch with parameters."""

        def is_layer(node: Node) -> bool:
            batch = list(map(self.reader.depends_on_batch, node.inputs))
            parameters = [
                self.reader.moves(value) and value.ndim > 1 and not uses_batch
                for value, uses_batch in zip(node.inputs, batch, strict=True)
            ]
            return node.name in HEAVY and any(batch) and any(parameters)

        return any(map(is_layer, self.full_batch_nodes))

    @functools.cached_property
    def frontier(self) -> list[Value]:
        """The values that the prefix computes for the head: sums that are added up, and rows that are gathered."""
        found: dict[Value, None] = {}
        used = [*self.graph.outputs, *(value for node in self.head_nodes for value in node.inputs)]
        for value in used:
            if value.is_constant or value in found or value in self.known_first:
                continue
            state = self.reader.state(value)
            if isinstance(state, Batched):
                value = self._before_moves(value)
            if state == SUMMED or (isinstance(state, Batched) and value.node is not None):
                found[value] = None
        return [value for value in found if not self._follows_from(value, found)]

    def _before_moves(self, value: Value) -> Value:
        """The value before transposes, reshapes and the like, which is gathered: the head then moves its elements."""
        while value.node is not None and value.node.name in _MOVES and value not in self.reader.cut_later:
            (operand, *others) = value.node.inputs
            if others or not isinstance(self.reader.state(operand), Batched) or operand.num_bytes > value.num_bytes:
                break
            value = operand
        return value

    def _follows_from(self, value: Value, found: Mapping[Value, None]) -> bool:
        """Whether the head can cheaply compute these rows from others, so that they need not be gathered."""
        node = value.node
        if node is None or not isinstance(self.reader.state(value), Batched) or node.name not in ELEMENTWISE:
            return False
        return all(operand.is_constant or operand.node is None or operand in found for operand in node.inputs)

    @functools.cached_property
    def selections(self) -> dict[int | None, list[int]]:
        """The positions of the values of the frontier, by their selection. Each selection has its own loop."""
        found: dict[int | None, list[int]] = {}
        for position, value in enumerate(self.frontier):
            found.setdefault(self.reader.selection(value), []).append(position)
        for node, outcome in self.reader.outcomes.items():
            if node.has_effects:  # a print must happen, even if its loop computes nothing else
                found.setdefault(outcome.selection, [])
        return found

    def selected_first(self, selection: int) -> dict[int, Batched]:
        """The positions and the states of those values known first that have rows of a selection."""
        states = [self.reader.state(value) for value in self.known_first]
        return {
            position: state
            for position, (value, state) in enumerate(zip(self.known_first, states, strict=True))
            if isinstance(state, Batched) and self.reader.selection(value) == selection
        }

    @property
    def states(self) -> list[State]:
        """The states of the frontier."""
        return [self.reader.state(value) for value in self.frontier]

    @functools.cached_property
    def differentiated(self) -> list[int]:
        """The positions of those values of the frontier that have a gradient and that the loss depends on."""
        reached = set(sources(self.graph.outputs[:1], set(self.frontier).__contains__))
        return [
            position
            for position, value in enumerate(self.frontier)
            if value in reached and self.reader.has_gradient(value)
        ]

    @functools.cached_property
    def hoisted(self) -> list[Value]:
        """Values of parameters alone that are computed and differentiated once, not per microbatch."""
        return [output for node in self.reader.hoisted for output in node.outputs if self.reader.has_gradient(output)]

    @functools.cached_property
    def known_first(self) -> list[Value]:
        """Values of data alone, for all examples, that are computed before the first microbatch, or inputs."""
        values = [*self.graph.inputs, *(value for node in self.graph.nodes for value in node.outputs)]
        return [value for value in values if value in self.reader.computed_first]

    @functools.cached_property
    def gathered_first(self) -> list[Value]:
        """Costly rows of data alone that the values known first are computed from. They are computed per microbatch."""

        @functools.cache
        def is_gathered(value: Value) -> bool:
            state = self.reader.state(value)
            is_rows = isinstance(state, Batched) and state.in_batch_order and value not in self.reader.cut_later
            if not is_rows or self.reader.selection(value) is not None:
                return False
            before = ancestors(value)
            outputs = {output for node in before for output in node.outputs if output is not value}
            costs_much = any(node.name in HEAVY for node in before if node in self.reader.outcomes)
            return costs_much and self.reader.computed_first.isdisjoint(outputs)

        return [value for value in sources(self.known_first, is_gathered) if is_gathered(value)]

    @functools.cached_property
    def seeds(self) -> Seeds:
        """When the gradient with respect to the frontier is known."""
        if not self.differentiated:
            return Seeds.NONE
        if not self._seeds_depend_on_frontier():
            return Seeds.BEFORE
        if len(self.differentiated) == 1:
            value = self.frontier[self.differentiated[0]]
            if value.size == 1 and self.reader.state(value) == SUMMED and self._may_scale_later(value):
                return Seeds.AFTER
        return Seeds.BETWEEN

    def _may_scale_later(self, value: Value) -> bool:
        """Whether the gradient of a sum may be computed first, and multiplied by a factor at the end.

        It may not if the sum is complex, which has a gradient in two directions; if a backward pass is not linear; with
        float16, in which an undivided gradient can overflow; or inside the user's `shard_map` if JAX adds up gradients
        over devices that have different factors.
        """
        axes = avals.varying_axes(value.aval)
        uneven = any(axes - avals.varying_axes(jax.typeof(leaf)) for leaf in self.loss.types.wrt)
        is_complex = jax.dtypes.issubdtype(value.dtype, jnp.complexfloating)
        return self.reader.scales and not is_complex and not uneven and not self.loss.traced.uses_dtype(jnp.float16)

    def _seeds_depend_on_frontier(self) -> bool:
        def seeds(inputs: list[Any], known: list[Any], made: list[Any]) -> list[Any]:
            def loss(moving: Sequence[Any]) -> Any:
                now = dict(zip(self.differentiated, moving, strict=True))
                frontier = [now.get(position, value) for position, value in enumerate(made)]
                return self.head(inputs, known, [], frontier, num_outputs=1)[0]

            return jax.grad(loss)([made[position] for position in self.differentiated])

        return any(any(frontier) for _, _, frontier in self.uses_of(seeds))

    def uses_of(self, fun: Callable[..., list[Any]]) -> list[tuple[list[bool], list[bool], list[bool]]]:
        """For each result of a function of the inputs, the values known first and the frontier: which of them it uses.

        A result that is computed from a value but does not depend on it, as 0 * x, counts as using it.
        """
        groups = self.graph.inputs, self.known_first, self.frontier
        types, tree = jax.tree.flatten([[value.type for value in group] for group in groups])
        traced, _ = tracing.trace(lambda *flat: fun(*jax.tree.unflatten(tree, flat)), *types)
        uses = [traced.inputs_used_by(output) for output in range(len(traced.out_avals))]
        return [tuple(jax.tree.unflatten(tree, used)) for used in uses]

    # Evaluation. The inputs are flat: the arrays that the loss closes over, then its arguments by role.

    def inputs(self, consts: Sequence[Any], arrays: Arrays) -> list[Any]:
        """The inputs of the graph."""
        return [*consts, *jax.tree.leaves(arrays)]

    def compute_first(self, inputs: Sequence[Any], gathered: Sequence[Any]) -> list[Any]:
        """The values known first."""
        given = dict(zip([*self.graph.inputs, *self.gathered_first], [*inputs, *gathered], strict=True))
        full = self._full_batch(given)
        return [full[value] for value in self.known_first]

    def compute_hoisted(self, inputs: Sequence[Any], known: Sequence[Any]) -> list[Any]:
        """The hoisted values."""
        given = dict(zip([*self.graph.inputs, *self.known_first], [*inputs, *known], strict=True))
        full = self._full_batch(given)
        return [full[value] for value in self.hoisted]

    def _full_batch(self, given: Mapping[Value, Any]) -> FullBatch:
        def rows_of(value: Value) -> int | None:
            state = None if value.is_constant else self.reader.state(value)
            return state.axis if isinstance(state, Batched) else None

        return FullBatch(given, self.draw, rows_of if self.loss.on_mesh else None)

    def _known(self, known: Sequence[Any] | None, hoisted: Sequence[Any]) -> dict[Value, Any]:
        """The values known first, unless they are None, and the hoisted ones, unless there are none."""
        given = {} if known is None else dict(zip(self.known_first, known, strict=True))
        return given | dict(zip(self.hoisted, hoisted, strict=True)) if hoisted else given

    def prefix(self, given: PrefixInputs, examples: Examples, wanted: Sequence[Value]) -> list[Any]:
        """The wanted values of the prefix, for the examples of one microbatch, as they are numbered in the inputs."""
        start, size, selection = examples.start, examples.size, examples.selection
        full = self._known(given.known, given.variables[len(self.loss.types.wrt) :])
        mine = dict(zip(self.graph.inputs, given.inputs, strict=True))
        if given.origin is None:
            full |= {value: array for value, array in mine.items() if isinstance(self.reader.state(value), Batched)}
        if selection is None:
            batch = [given.inputs[position] for position in self.batch_positions]
            taken = slice_examples(batch, start, size, examples.runs)
            mine.update(zip((self.graph.inputs[position] for position in self.batch_positions), taken, strict=True))
        elif given.selected:
            for (position, rows), array in zip(self.selected_first(selection).items(), given.selected, strict=True):
                number = array.shape[rows.axis] // (rows.outer * rows.inner)
                mine[self.known_first[position]] = take_rows(array, rows, number, start, size)
        index = start if given.origin is None else given.origin + start
        microbatch = Microbatch(
            self.reader, examples._replace(start=index), mine, full, self.draw, looks_up=given.origin is None
        )
        microbatch.run(wanted)
        return [jnp.asarray(microbatch.value(value)) for value in wanted]

    def head(
        self,
        inputs: Sequence[Any],
        known: Sequence[Any] | None,
        hoisted: Sequence[Any],
        frontier: Sequence[Any],
        num_outputs: int | None = None,
    ) -> list[Any]:
        """The outputs of the loss, from the frontier of the full batch. `known` is None before it is computed."""
        given = dict(zip(self.graph.inputs, inputs, strict=True)) | self._known(known, hoisted)
        full = self._full_batch(given | dict(zip(self.frontier, frontier, strict=True)))
        outputs = [jnp.asarray(full[value]) for value in self.graph.outputs[:num_outputs]]
        if num_outputs is None:
            for node in self.head_nodes:
                if node.has_effects and not node.outputs:
                    full.run(node)
        return outputs


def ancestors(value: Value) -> set[Node]:
    """All nodes that a value depends on."""
    return {found.node for found in sources([value]) if found.node is not None}
