"""Finds big values of a program, such as logits, and an axis along which they can be computed block by block.

Big values have rows along other axes than the batch axis too. The logits of one example have rows along its tokens. The
matrix of all pairs of a contrastive loss has rows along either axis. A *region* is a part of a program that has big
values and computes the rows along such an axis separately, so that it can be computed one block of rows at a time:

  1. A value is *big* if it depends on data and has more bytes than a threshold. A *root* is a big value that is
     computed from values that are not big.
  2. For each root and each of its axes there is a hypothesis: "this value has rows along that axis". The states of the
     operands are found by trial: the rule of the primitive is asked under each assignment of rows or invariant to its
     operands, until the root gets the rows that are wanted. Operands that are not big become *sources*, of which each
     block takes rows. Big ones are traced back further.
  3. What follows from the root is read by the same rules as along the batch, on clones of the nodes. Clones are needed,
     because one value can be rows and invariant at once, as in `z @ z.T`. All values of the program itself are
     invariant to a region.
  4. *Exits* are the values that the rest of the program takes from a region. They are not big, and under the
     hypothesis they are rows, or sums over the rows. A hypothesis with exits is a region. A big value for which no
     hypothesis works is computed in full.

`Regions` does this for the graph of a program, and `blocks.py` runs it.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from anybatch.jaxprs import interpreter, source
from anybatch.jaxprs.graph import Graph, Node, Value, operands_of, sources
from anybatch.jaxprs.primitives import ELEMENTWISE, STEPS, WITHOUT_GRADIENT
from anybatch.reading.reader import Fact, NeedsInlining, Reader, ReadOptions, RuleResult
from anybatch.reading.rules import RULEBOOK
from anybatch.reading.split import HEAVY
from anybatch.reading.states import INVARIANT, SUMMED, Batched, Head, NotRowwise, State

MAX_TRIALS = 256  # assignments of states to the operands of one node
MAX_MERGED = 8  # ways in which rows may be merged with another axis of an operand
MAX_ROOTS = 64  # roots that hypotheses are made for, the largest first


class _Clones:
    """Stands in for the graph of a `RegionReader`: it holds the nodes that were read so far."""

    def __init__(self) -> None:
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []
        self.live = _AllBut()


class _AllBut(set[int]):
    """A set of all numbers except those that are added to it, which are the ids of values that nothing uses."""

    def __contains__(self, number: object) -> bool:
        return not super().__contains__(number)


class RegionReader(Reader):
    """Finds out how values depend on the rows of a big value: a `Reader` that starts in the middle of a program.

    It is given the nodes to read one by one, as clones.

    Args:
      facts: what is known of the values of the program, which are all invariant.
      length: the number of rows.
    """

    def __init__(self, facts: dict[Value, Fact], length: int) -> None:
        graph: Any = _Clones()
        super().__init__(graph, length, [], RULEBOOK, ReadOptions(sums_data_later=True), top=True)
        self.facts = dict(facts)
        self.uses_batch = dict.fromkeys(facts, False)

    # Invariant values are computed outside of the region, so that these questions do not arise.

    def _hoist_if_needed(self, node: Node) -> None:
        pass

    def _is_computed_first(self, state: State) -> bool:
        return False

    def _read_data_in_full(self, *_: Any, **__: Any) -> RuleResult | None:
        return None

    def add_source(self, value: Value, fact: Fact) -> None:
        """Adds a value that stands for rows of a value of the program."""
        self.facts[value], self.uses_batch[value] = fact, True

    def visit(self, node: Node) -> None:
        """Reads a node."""
        try:
            self._visit(node)
        except NeedsInlining:  # unrolling a loop is not worth it
            for output in node.outputs:
                self.facts[output] = Fact(Head(True), True, output.is_inexact)
                self.uses_batch[output] = True
        self.graph.nodes.append(node)

    def try_states(self, node: Node, states: Sequence[State], position: int) -> State | None:
        """The state of an output of a node, if its operands have these states; None if its rule refuses them."""
        rule = self.rulebook.rules.get(node.name)
        if rule is None:
            return None
        try:
            return self._guarded(rule, node, states).states[position]
        except (NotRowwise, NeedsInlining):
            return None


class Region:
    """A part of a program around a big value, which may be computed one block of rows at a time.

    It starts as a hypothesis, that the big value has rows along one axis. `holds` says whether these rows can be
    computed separately. `Regions` then chooses its exits, the values that the rest of the program takes from it.

    Args:
      program: the program.
      root: the big value.
      axis: the axis of its rows.
      reads_on: whether to read what follows from the root.
    """

    def __init__(self, program: "Regions", root: Value, axis: int, *, reads_on: bool = True) -> None:
        self.program, self.root, self.axis, self.length = program, root, axis, root.shape[axis]
        self.reader = RegionReader(program.facts, self.length)
        self.sources: dict[Value, tuple[Value, Batched]] = {}  # the stand-in for rows of a value of the program
        self.clone: dict[Value, Value] = {}
        self.original: dict[Node, Node] = {}  # the node of the program that a clone is one of
        self.exits: list[Value] = []
        self._made: dict[tuple[Value, Batched], Value | None] = {}
        self.grown: set[Value] = set()
        self._interior = program.descendants(program.big_roots(root))
        started = self._rows_of(root, Batched(axis))
        self.holds = started is not None
        if started is not None:
            self.clone[root] = started
            if reads_on:
                self._read_on()

    def with_exits(self, exits: list[Value]) -> "Region":
        """The same hypothesis, with other exits."""
        other = Region.__new__(Region)
        other.__dict__.update(self.__dict__)
        other.exits = exits
        other.__dict__.pop("needs", None)
        return other

    def state(self, value: Value) -> State:
        return self.reader.state(self.clone[value]) if value in self.clone else INVARIANT

    # Forwards from the root.

    def _read_on(self) -> None:
        after = self.program.descendants({self.root})
        for node in self.program.graph.nodes:
            if self.root in node.outputs or not any(output in after for output in node.outputs):
                continue
            if not any(value in self.clone for value in node.inputs):
                continue
            cloned = self._visit(node, [self.clone.get(value, value) for value in node.inputs])
            if self._is_refused(cloned):
                cloned = self._with_small_operands_invariant(node) or cloned
            for output, copy in zip(node.outputs, cloned.outputs, strict=True):
                # A refused value that is not big is computed outside, and is invariant to what follows. So is what a
                # loop computes from invariant values.
                state = self.reader.state(copy)
                if state != INVARIANT and (output in self.program.big or not isinstance(state, Head)):
                    self.clone[output] = copy

    def _is_refused(self, node: Node) -> bool:
        return any(isinstance(self.reader.state(output), Head) for output in node.outputs)

    def _with_small_operands_invariant(self, node: Node) -> Node | None:
        """The node with small operands invariant, as they are once the loop that makes them is over: `x - mean(x)`."""
        big = self.program.big
        if not any(value in big for value in (*node.inputs, *node.outputs)):
            return None
        for keeps_rows in (True, False):
            inputs = [
                self.clone[value]
                if value in self.clone and (value in big or (keeps_rows and isinstance(self.state(value), Batched)))
                else value
                for value in node.inputs
            ]
            if any(not value.is_constant and value not in self.program.facts for value in inputs):
                cloned = self._visit(node, inputs)
                if not self._is_refused(cloned):
                    return cloned
        return None

    def _visit(self, node: Node, inputs: list[Value]) -> Node:
        """Reads a clone of a node. Invariant operands of which it takes rows become rows, where that saves memory."""
        cloned = self._cloned(node, inputs)
        outcome = self.reader.outcomes.get(cloned)
        takes = (outcome.takes if outcome is not None else None) or self._alike(inputs)
        better = list(inputs)
        for position, (value, rows) in enumerate(zip(inputs, takes, strict=True)):
            if rows is None or value.is_constant or value not in self.program.facts:
                continue
            if value in self.program.big or self.program.facts[value].has_gradient or self.program.divides_rows:
                better[position] = self._rows_of(value, rows) or value
        if better == inputs:
            return cloned
        again = self._cloned(node, better)
        pairs = zip(again.outputs, cloned.outputs, strict=True)
        return again if all(self.reader.state(one) == self.reader.state(other) for one, other in pairs) else cloned

    def _alike(self, inputs: Sequence[Value]) -> list[Batched | None]:
        """For big operands in full, the rows of another operand of their shape, as in `jnp.logaddexp(x, y)`.

        The rule of a nested function does not say which rows it takes.
        """
        own = [value for value in inputs if not value.is_constant and value not in self.program.facts]
        states = {value.shape: self.reader.state(value) for value in own}
        found = (states.get(value.shape) if value in self.program.big else None for value in inputs)
        return [state if isinstance(state, Batched) else None for state in found]

    def _cloned(self, node: Node, inputs: list[Value]) -> Node:
        cloned = Node(node.equation, inputs, node.calls, self.program.next_index())
        unused = (copy for output, copy in zip(node.outputs, cloned.outputs, strict=True) if self._is_unused(output))
        self.reader.graph.live.update(map(id, unused))
        self.reader.visit(cloned)
        self.original[cloned] = node
        return cloned

    def _is_unused(self, value: Value) -> bool:
        return id(value) not in self.program.graph.live

    # Backwards from values of the program.

    def _rows_of(self, value: Value, rows: Batched) -> Value | None:
        """A value of the region that has the given rows of a value of the program; None if there is none."""
        key = value, rows
        if key in self._made:
            return self._made[key]
        self._made[key] = None
        program = self.program
        if value in program.big or (value in self._interior and value.node is not None):
            before = self._interior
            self._interior = before | program.descendants(program.big_roots(value))
            self._made[key] = self._grown(value, rows)
            self._interior = before
            if self._made[key] is not None:
                self.grown.add(value)
        elif program.is_cheap(value) and (cheap := self._grown(value, rows)) is not None:
            self._made[key] = cheap
        elif program.is_divisible(value):
            source = Value(value.aval)
            self.reader.add_source(source, dataclasses.replace(program.facts[value], state=rows))
            self.sources[source] = value, rows
            self._made[key] = source
        return self._made[key]

    def _grown(self, value: Value, rows: Batched) -> Value | None:
        """Clones the node that makes a value, with states of its operands for which the value has the wanted rows."""
        node = value.node
        if node is None or node.has_effects:
            return None
        position = node.outputs.index(value)
        assignments = itertools.islice(itertools.product(*map(self._possible_states, node.inputs)), MAX_TRIALS)
        by_rows = sorted(assignments, key=lambda states: -sum(isinstance(state, Batched) for state in states))
        for states in by_rows:
            if all(state == INVARIANT for state in states):
                continue
            # A stand-in for each operand, so that one value can be rows here and invariant there, as in z @ z.T.
            stand_ins = [self._stand_in(operand, state) for operand, state in zip(node.inputs, states, strict=True)]
            trial = Node(node.equation, stand_ins, node.calls, 0)
            if self.reader.try_states(trial, states, position) != rows:
                continue
            inputs = [
                (self._rows_of(operand, state) or operand) if isinstance(state, Batched) else operand
                for operand, state in zip(node.inputs, states, strict=True)
            ]
            cloned = self._cloned(node, inputs)
            if self.reader.state(cloned.outputs[position]) == rows:
                return cloned.outputs[position]
        return None

    def _stand_in(self, operand: Value, state: State) -> Value:
        if state == INVARIANT:
            return operand
        stand_in = Value(operand.aval)
        self.reader.add_source(stand_in, dataclasses.replace(self.program.facts[operand], state=state))
        return stand_in

    def _possible_states(self, operand: Value) -> list[State]:
        possible: list[State] = []
        if self.program.is_divisible(operand):
            for axis, size in enumerate(operand.shape):
                merged, rest = divmod(size, self.length)
                if merged and not rest:
                    outers = [outer for outer in range(1, merged + 1) if merged % outer == 0][:MAX_MERGED]
                    possible += [Batched(axis, outer, merged // outer) for outer in outers]
        return [*possible, INVARIANT]

    # What it needs, once its exits are known.

    @functools.cached_property
    def follows_from_big(self) -> set[Value]:
        """The values that follow from large ones, without costly operations on small values between."""
        is_large, after, costly = self.program.is_large, set(), set()
        for node in self.reader.graph.nodes:
            follows = any(is_large(value) or value in after for value in node.inputs if self._is_own(value))
            has_large = any(map(is_large, (*node.inputs, *node.outputs)))
            is_costly = any(value in costly for value in node.inputs) or node.name in HEAVY
            for output in node.outputs:
                if is_large(output):
                    after.add(output)
                elif follows:
                    after.add(output)
                    if is_costly and not has_large:
                        costly.add(output)
        return after - costly

    @property
    def own_originals(self) -> set[Value]:
        """The values of the program that the region computes."""
        return {output for node in self.needs.nodes for output in self.original[node].outputs}

    def _is_own(self, value: Value) -> bool:
        return not value.is_constant and value not in self.sources and value not in self.program.facts

    @functools.cached_property
    def needs(self) -> "Needs":
        """What the exits are computed from. It is cached: read it when the exits are complete."""
        return Needs(self)

    @property
    def differentiated(self) -> list[int]:
        """The positions of the exits that the loss has a gradient with respect to."""
        return [position for position, value in enumerate(self.exits) if value in self.program.differentiated_exits]


class Needs:
    """What the results of a region are computed from: nodes, rows of some values, and other values in full."""

    def __init__(self, region: Region) -> None:
        program = region.program
        self.wanted = [region.clone[value] for value in region.exits]
        self.entries: dict[Value, None] = {}  # invariant values
        self.sources: dict[Value, None] = {}
        nodes: dict[Node, None] = {}
        seen: set[Value] = set()
        pending = list(self.wanted)
        while pending:
            value = pending.pop()
            if value.is_constant or value in seen:
                continue
            seen.add(value)
            if value in region.sources:
                self.sources[value] = None
            elif value in program.facts:
                self._enter(program, value)
            else:
                assert value.node is not None
                nodes[value.node] = None
                pending.extend(value.node.inputs)
        self.nodes = list(nodes)
        # Nodes with a custom backward pass that is not linear: it must be given the whole cotangent at once.
        outcomes = region.reader.outcomes
        self.not_linear = [region.original[node] for node in nodes if node in outcomes and not outcomes[node].scales]
        # A value that is divided along the same rows twice is divided once.
        self.cuts = list(dict.fromkeys(region.sources[source] for source in self.sources))

    def _enter(self, program: "Regions", value: Value) -> None:
        pending = [value]
        while pending:
            value = pending.pop()
            if value.is_constant or value in self.entries or value in program.from_constants:
                continue
            variable = program.variable_of(value)
            if variable is not None:
                self.entries[variable] = None
            # Masks, casts and random numbers: each block computes its rows from what they are made of.
            elif value.node is not None and (program.is_cheap(value) or program.is_big_without_data(value)):
                pending.extend(value.node.inputs)
            else:
                self.entries[value] = None

    @property
    def before(self) -> list[Value]:
        """The values of the program that must be known before."""
        return [*(value for value, _ in self.cuts), *self.entries]


class Regions:
    """Finds the big values of a program, and the regions that compute them in blocks of rows.

    Args:
      jaxpr: the program.
      of_data: for each input, whether it depends on the examples.
      moves: for each input, whether the program is differentiated with respect to it.
      threshold: a value that depends on the examples is big if it has more bytes than this.
      losses: the positions of the outputs that are differentiated.
      opened: nested functions to inline, as `Graph` takes them.
      is_survey: whether one of several big values of the same line and shape is enough, as for a report.
      divides_rows: whether the rows of a region are divided among devices, which have arrays sharded along their first
        axis. Then rows along this axis are preferred, since they need not be moved.
    """

    def __init__(
        self,
        jaxpr: Any,
        of_data: Sequence[bool],
        moves: Sequence[bool],
        threshold: int,
        losses: Sequence[int],
        opened: Any = None,
        is_survey: bool = False,
        divides_rows: bool = False,
    ) -> None:
        self.graph, self._losses, self._is_survey = Graph(jaxpr, opened), list(losses), is_survey
        self.divides_rows = divides_rows
        self._index = itertools.count(len(self.graph.nodes))
        self.facts: dict[Value, Fact] = {}
        self.of_data: set[Value] = set()
        self.from_constants: set[Value] = set()
        self._made_of: dict[Value, int] = {}  # the bytes that a value without parameters follows from elementwise
        self.with_derivative: set[Value] = set()  # with respect to some input, be it differentiated or not
        self.consumers: dict[Value, list[Node]] = {}
        for value, data, moving in zip(self.graph.inputs, of_data, moves, strict=True):
            self.facts[value] = Fact(INVARIANT, moving, moving and value.is_inexact)
            if data:
                self.of_data.add(value)
            if value.is_inexact:
                self.with_derivative.add(value)
        for node in self.graph.nodes:
            self._follow(node)
        computed = [output for node in self.graph.nodes for output in node.outputs]
        self.threshold = threshold
        self._large: dict[Value, bool] = {}
        self.big = {value for value in computed if value in self.of_data and self.is_large(value)}
        self._descendants: dict[Value, set[Value]] = {}
        self._after_big: dict[tuple[Value, int], set[Value]] = {}  # of a hypothesis
        self.slices = self._sliced()
        self.regions: list[Region] = []
        self.in_full: list[Value] = []  # big values that no region computes
        if self.big and not self.slices:
            self._cover()

    def _follow(self, node: Node) -> None:
        inputs = [value for value in node.inputs if not value.is_constant]
        moving = any(self.facts[value].moves for value in inputs)
        has_gradient = any(self.facts[value].has_gradient for value in inputs) and node.name not in WITHOUT_GRADIENT
        for value in inputs:
            self.consumers.setdefault(value, []).append(node)
        for output in node.outputs:
            self.facts[output] = Fact(INVARIANT, moving, has_gradient and output.is_inexact)
            if any(value in self.of_data for value in inputs):
                self.of_data.add(output)
            if all(value in self.from_constants for value in inputs):
                self.from_constants.add(output)
            if output.is_inexact and node.name not in WITHOUT_GRADIENT:
                self.with_derivative.update([output] if self.with_derivative.intersection(inputs) else [])
            if not moving and node.name in ELEMENTWISE | {"broadcast_in_dim"}:
                self._made_of[output] = min(output.num_bytes, self._bytes_read(node))

    def next_index(self) -> int:
        """The number of a new node, which is later than all others."""
        return next(self._index)

    # Properties of values.

    def is_divisible(self, value: Value) -> bool:
        """Whether rows of a value may be taken: it is not computed from constants alone."""
        return not value.is_constant and not value.is_key and value not in self.from_constants

    def is_cheap(self, value: Value) -> bool:
        """Whether a value follows elementwise from values with fewer bytes: a cast, or a mask of indices."""
        node = value.node
        if value.is_constant or node is None or node.name not in ELEMENTWISE | {"broadcast_in_dim"}:
            return False
        return self._bytes_read(node) < value.num_bytes

    def _bytes_read(self, node: Node) -> int:
        """The bytes that a node reads, counting what labels are made of in the place of a mask or a one-hot vector."""
        inputs = {value for value in node.inputs if value not in self.from_constants}
        return sum(self._made_of.get(value, value.num_bytes) for value in inputs)

    def is_big_without_data(self, value: Value) -> bool:
        """Whether a value is large and depends on neither data nor parameters: random numbers, for example."""
        return value not in self.of_data and not self.facts[value].moves and self.is_large(value)

    def is_large(self, value: Value) -> bool:
        """Whether a value has more bytes than the threshold, whatever it depends on."""
        if value not in self._large:
            self._large[value] = weight(value) > self.threshold
        return self._large[value]

    def variable_of(self, value: Value) -> Value | None:
        """The differentiated input that a value is a cast or a transpose of; None if it is not one.

        A region reads that input itself, so that it can add to the gradient of the input directly.
        """
        while value.node is not None and value.node.name in ("convert_element_type", "transpose"):
            (value,) = value.node.inputs
            if value.is_constant:
                return None
        return value if value.node is None and self.facts[value].has_gradient else None

    def descendants(self, roots: set[Value]) -> set[Value]:
        """All values that depend on one of these."""
        found: set[Value] = set()
        for root in roots:
            if root not in self._descendants:
                mine: set[Value] = set()
                pending = [root]
                while pending:
                    value = pending.pop()
                    if value not in mine:
                        mine.add(value)
                        pending.extend(output for node in self.consumers.get(value, []) for output in node.outputs)
                self._descendants[root] = mine
            found |= self._descendants[root]
        return found

    def big_roots(self, value: Value) -> set[Value]:
        """The roots that a big value comes from, through big values alone."""

        def big_operands(value: Value) -> list[Value]:
            return [operand for operand in operands_of(value) if operand in self.big]

        start = [value] if value in self.big else []
        return {each for each in sources(start, operands=big_operands) if not big_operands(each)}

    # Slices of big values, such as logits[:, :-1]. They are computed from slices of what these are computed from.

    def _sliced(self) -> dict[Value, tuple[Region, int, int]]:
        found: dict[Value, tuple[Region, int, int]] = {}
        for node in self.graph.nodes:
            if node.name != "slice" or node.inputs[0] not in self.big or set(node.params["strides"] or (1,)) != {1}:
                continue
            (operand,), (output,) = node.inputs, node.outputs
            axes = [axis for axis in range(output.ndim) if output.shape[axis] != operand.shape[axis]]
            if len(axes) != 1 or len(self.consumers[operand]) > 1 or output.size == 0:
                continue
            region = Region(self, operand, axes[0], reads_on=False)
            region.exits = [operand] if region.holds else []
            if region.holds and not region.needs.not_linear:
                found[output] = region, node.params["start_indices"][axes[0]], output.shape[axes[0]]
        return found

    # Which hypotheses become regions.

    def _cover(self) -> None:
        """Chooses regions for the big values, from the outputs backwards."""
        roots = [
            output
            for node in self.graph.nodes
            for output in node.outputs
            if output in self.big and not any(operand in self.big for operand in node.inputs)
        ]
        after_big = self.descendants(set(roots))
        hypotheses = self._hypotheses(sorted(roots, key=weight, reverse=True)[:MAX_ROOTS])
        regions = list(hypotheses)
        seen: set[Value] = set()
        pending = list(self.graph.outputs)
        # The latest first: what a region needs is asked of the others after all of its own exits are known.
        while pending:
            pending.sort(key=lambda value: -1 if value.node is None else value.node.index)
            value = pending.pop()
            if value in seen or value.is_constant or value.node is None:
                continue
            seen.add(value)
            region = self._explained(value, hypotheses) if value in after_big and value not in self.big else None
            if region is None:
                self.in_full += [value] if value in self.big else []
                pending.extend(value.node.inputs)
                continue
            if self._waits_for_itself(region, value):  # it needs results of an earlier loop over the same blocks
                region = region.with_exits([])
                regions.append(region)
            region.exits.append(value)
            region.__dict__.pop("needs", None)
            pending.extend(region.needs.before)
        self.regions = [region for region in regions if region.exits]

    def _hypotheses(self, roots: Sequence[Value]) -> list[Region]:
        if self._is_survey:
            places = {root: source.locate(root.node) for root in roots if root.node is not None}
            roots = list({(root.shape, place): root for root, place in places.items()}.values())
        self._roots = roots
        found = [
            Region(self, root, axis)
            for root in roots
            for axis in sorted(range(root.ndim), key=lambda axis: -root.shape[axis])
            if root.shape[axis] > 1
        ]
        return [region for region in found if region.holds]

    def _explained(self, value: Value, hypotheses: Sequence[Region]) -> Region | None:
        """The region that a value is an exit of."""
        fits = [region for region in hypotheses if self._is_exit(region, value) and self._saves(region, value)]
        if not fits:
            return None
        best = min(fits, key=lambda region: self._cost(region, value))
        assert value.node is not None
        has_big_operand = any(operand in self.big for operand in value.node.inputs)
        if self._cost(best, value)[0] and not has_big_operand:
            return None  # it waits for another loop; perhaps its operands do not
        return best

    def _is_exit(self, region: Region, value: Value) -> bool:
        state = region.state(value)
        return state == SUMMED or (isinstance(state, Batched) and state.in_batch_order)

    def _saves(self, region: Region, value: Value) -> bool:
        """Whether a value follows from big values of the region, without costly operations on small ones between."""
        return region.clone[value] in region.follows_from_big

    def _cost(self, region: Region, value: Value) -> tuple[int, int, int, bool, bool, int]:
        """What must be known before, big values in full, the costly nodes; then a loop that exists, and many rows.

        If rows are divided among devices, arrays that have to be moved come before the last two.
        """
        needs = region.with_exits([value]).needs
        after = self._after_big_of(region)
        waits = sum(each in after for each in needs.before)
        in_full = sum(weight(each) for each in needs.before if each in self.big)
        costly = sum(node.name in HEAVY for node in needs.nodes)
        moves_rows = self.divides_rows and any(rows.axis > 0 or rows.outer > 1 for _, rows in needs.cuts)
        return waits, in_full, costly, moves_rows, not region.exits, -region.length

    def _waits_for_itself(self, region: Region, value: Value) -> bool:
        after = self.descendants({region.root})
        return any(each in after for each in region.with_exits([value]).needs.before)

    def _after_big_of(self, region: Region) -> set[Value]:
        """What follows from the big values of a region."""
        key = region.root, region.axis
        if key not in self._after_big:
            roots = {root for root in self._roots if root in region.clone or root in region.grown}
            self._after_big[key] = self.descendants(roots)
        return self._after_big[key]

    @functools.cached_property
    def differentiated_exits(self) -> set[Value]:
        """The exits that the losses depend on, and that have a gradient."""
        losses = [self.graph.outputs[position] for position in self._losses]
        reached = sources(losses, operands=self.operands_of)
        return {value for value in reached if value in self.region_of and self.facts[value].has_gradient}

    def keep(self, gains: Callable[[Region], bool]) -> None:
        """Drops regions that save no memory, or that would wait for one another, not be exact, or raise an error."""
        self._keep_only([region for region in self.regions if gains(region)])
        while wrong := (
            self._waiting_in_a_circle()
            or self._dividing_a_cotangent()
            or self._before_a_loop()
            or self._computing_differently()
        ):
            self._keep_only([region for region in self.regions if region is not wrong])

    def _keep_only(self, regions: list[Region]) -> None:
        self.regions = regions
        for name in ("region_of", "differentiated_exits"):  # what depends on the regions
            self.__dict__.pop(name, None)

    def _waiting_in_a_circle(self) -> Region | None:
        """A region that needs one of its own results; None if there is none."""
        done: set[Value] = set()
        path: set[Value] = set()
        stack = [(value, False) for value in self.graph.outputs]
        while stack:
            value, is_left = stack.pop()
            if is_left:
                path.discard(value)
                done.add(value)
            elif not value.is_constant and value not in done:
                region = self.region_of.get(value)
                mine = [value] if region is None else region.exits
                if any(each in path for each in mine):
                    return next(self.region_of[each] for each in path if each in self.region_of)
                path.add(value)
                stack.append((value, True))
                stack.extend((operand, False) for operand in self.operands_of(value))
        return None

    def _dividing_a_cotangent(self) -> Region | None:
        """A region with a backward pass that is not linear, of a value that is computed elsewhere too; None if none."""
        used = [(node, region) for region in self.regions for node in region.needs.not_linear]
        if not used:
            return None
        outside = {value.node for value in self.computed() if value not in self.region_of}
        times = collections.Counter(node for node, _ in used)
        return next((region for node, region in used if node in outside or times[node] > 1), None)

    def _computing_differently(self) -> Region | None:
        """A region with a big value that is computed elsewhere too, if the results of both are compared; None if none.

        As in `x == x.max(0)`, if `x` is computed from blocks of rows, and the maximum from blocks of columns. A value
        that is computed twice, from blocks of other shapes, may differ by a rounding error, and is then neither equal
        to itself nor the largest.
        """
        places = collections.Counter(value for value in self.computed() if value in self.big)
        inside = {region: region.own_originals for region in self.regions}
        for originals in inside.values():
            places.update(value for value in originals if value in self.big)
        twice = {value for value, number in places.items() if number > 1}
        return _Origins(self, twice).conflict() if twice else None

    def _before_a_loop(self) -> Region | None:
        """A region with a result that is not differentiated, in a loop that cannot be; None if there is none.

        JAX takes all results of a region to be differentiated. Of those without any derivative it is told otherwise.
        """
        for region in self.regions:
            fixed = {value for value in region.exits if value in self.with_derivative}
            fixed = {value for value in fixed if not self.facts[value].has_gradient} if region.differentiated else set()
            nodes = (node for value in self.descendants(fixed) for node in self.consumers.get(value, ()))
            if any(node.name in ("while", "pure_callback") for node in nodes):
                return region
        return None

    def computed(self) -> set[Value]:
        """The values that are computed for the outputs, without those inside of regions."""
        found: set[Value] = set()
        pending = list(self.graph.outputs)
        while pending:
            value = pending.pop()
            if not value.is_constant and value not in found:
                found.add(value)
                pending.extend(self.operands_of(value))
        return found

    def operands_of(self, value: Value) -> Sequence[Value]:
        """What a value of the program is computed from: its region's needs, or the operands of its node."""
        region = self.region_of.get(value)
        return operands_of(value) if region is None else region.needs.before

    @functools.cached_property
    def region_of(self) -> dict[Value, Region]:
        """The region of each exit; for a slice, the part of the program that it is computed from."""
        found = {value: region for region in self.regions for value in region.exits}
        return found | {value: region for value, (region, _, _) in self.slices.items()}


class _Origins:
    """Where the big values are computed that each value of a program depends on.

    Args:
      program: the program, in which no region waits for itself.
      twice: the big values that are computed in more than one place. A place is a region, or None outside of regions.
    """

    def __init__(self, program: Regions, twice: set[Value]) -> None:
        self._program, self._twice = program, twice
        self._origins: dict[Value, frozenset[tuple[Value, Region | None]]] = {}
        self._conflict: Region | None = None

    def conflict(self) -> Region | None:
        """A region that computes one of these values, if a step has operands from there and from another place."""
        stack = [(value, False) for value in self._program.graph.outputs]
        while stack and self._conflict is None:
            value, is_ready = stack.pop()
            if value.is_constant or value in self._origins:
                continue
            if not is_ready:
                stack.append((value, True))
                stack.extend((operand, False) for operand in self._program.operands_of(value))
            elif value in self._program.region_of:
                self._follow_region(self._program.region_of[value])
            elif value.node is None:
                self._origins[value] = frozenset()
            else:
                self._follow(value.node, value.node.inputs, value.node.outputs, None)
        return self._conflict

    def _of(self, value: Value) -> frozenset[tuple[Value, Region | None]]:
        # What is cheap to compute, such as a cast, is an input of a region without having been computed before.
        before = sources([value], is_last=lambda each: each in self._origins)
        known = [self._origins[each] for each in before if each in self._origins]
        return frozenset[tuple[Value, Region | None]]().union(*known)

    def _follow_region(self, region: Region) -> None:
        for node in sorted(region.needs.nodes, key=lambda node: node.index):
            inputs = [region.sources[value][0] if value in region.sources else value for value in node.inputs]
            self._follow(node, inputs, region.original[node].outputs, region)
        for value in region.exits:
            self._origins[value] = self._origins[region.clone[value]]

    def _follow(self, node: Node, inputs: Sequence[Value], originals: Sequence[Value], place: Region | None) -> None:
        given = frozenset[tuple[Value, Region | None]]().union(*map(self._of, inputs))
        times = collections.Counter(value for value, _ in given)
        if any(number > 1 for number in times.values()) and _has_step(node.equation):
            self._conflict = next(where for value, where in given if times[value] > 1 and where is not None)
        for output, original in zip(node.outputs, originals, strict=True):
            self._origins[output] = given | {(original, place)} if original in self._twice else given


def _has_step(equation: Any) -> bool:
    """Whether results of an equation may jump where an operand changes by a rounding error, as those of `==` do."""
    name, operands = equation.primitive.name, equation.invars
    if name == "is_finite" or (name == "ne" and operands[0] is operands[1]):
        return False
    takes_floats = any(jnp.issubdtype(operand.aval.dtype, jnp.inexact) for operand in operands)
    gives_others = any(not jnp.issubdtype(output.aval.dtype, jnp.inexact) for output in equation.outvars)
    if name in STEPS or (takes_floats and gives_others):
        return True
    return any(_has_step(each) for inner in interpreter.jaxprs_in(equation) for each in interpreter.equations_of(inner))


def weight(value: Value) -> int:
    """The bytes of a value. A mask counts as much as what it masks."""
    return max(value.num_bytes, 4 * value.size)
