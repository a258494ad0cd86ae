"""Passes over the microbatches of a loss that was split: forward, or forward and backward at once.

A loss that was read: its prefix microbatch by microbatch, in one pass or two, and its head once.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.call.arguments import Arrays
from anybatch.call.microbatches import Microbatches, loop_start
from anybatch.gradients import references, squared_norms
from anybatch.gradients import remat as blocks
from anybatch.gradients.outputs import wide_dtype
from anybatch.jaxprs import avals, in_place, tracing
from anybatch.mesh.executor import BatchPass, Executor, OutputLayout, Shard
from anybatch.reading.microbatch_weights import MicrobatchWeights
from anybatch.reading.split import Seeds, Split
from anybatch.reading.states import SUMMED, Batched, State, put_rows, replaced, take_rows


@dataclasses.dataclass(frozen=True, eq=False)
class PassInputs:
    """The arrays of one call, as the passes see them."""

    variables: list[Any]  # what is differentiated: the parameters, then what was hoisted from them
    inputs: list[Any]  # those of the loss, all of them, with the examples of the part at hand
    known: list[Any]  # what was computed from data alone
    selected: list[Any]  # values of `known` with rows of the selection, cut to those of the part; none if all are here
    place: list[Any]  # the index in the batch of the first example of the part, unless it is 0

    @property
    def origin(self) -> Any:
        """The index in the batch of the first example, None if it is 0."""
        return self.place[0] if self.place else None

    @property
    def types(self) -> "PassInputs":
        """Their types."""
        parts = (self.variables, self.inputs, self.known, self.selected, self.place)
        return PassInputs(*([avals.abstract(jax.typeof(leaf)) for leaf in shard] for shard in parts))


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The prefix of a loss at the sizes of the microbatches, traced."""

    split: Split
    microbatches: Microbatches
    accumulator_dtype: Any
    given: PassInputs
    shard: Shard
    remat: str | None = None  # a policy of jax.checkpoint for the backward pass
    weights: MicrobatchWeights | None = None  # what microbatches count, if the squares of their gradients are wanted
    selection: int | None = None  # the rows that are counted as examples, if not those of the batch

    @functools.cached_property
    def _positions(self) -> list[int]:
        """Which values of the frontier it makes."""
        return self.split.selections.get(self.selection, [])

    @functools.cached_property
    def states(self) -> list[State]:
        """Their states."""
        return [self.split.states[position] for position in self._positions]

    def _trace(self, size: int) -> tracing.Traced:
        split, types = self.split, self.given.types
        if self.shard.examples < size:  # there are none at all: it is traced for its types, and never called
            self._give_rows(types, size)
        variables = jax.eval_shape(self.shard.whole, types.variables) if self.shard.is_shard else types.variables
        leaves, tree = jax.tree.flatten((variables, types.inputs, types.known, types.selected, types.place))
        first, num_wrt = split.num_consts, len(split.loss.types.wrt)

        def prefix(*flat: Any) -> list[Any]:
            *arrays, start = flat
            variables, inputs, known, selected, place = jax.tree.unflatten(tree, arrays)
            inputs[first : first + num_wrt] = variables[:num_wrt]
            origin = PassInputs(variables, inputs, known, selected, place).origin
            wanted = [split.frontier[position] for position in self._positions]
            hoisted, runs = variables[num_wrt:], self.microbatches.runs
            return split.prefix(inputs, known, hoisted, start, size, wanted, origin, runs, self.selection, selected)

        start = jax.ShapeDtypeStruct((), jnp.int32)
        traced, consts = tracing.trace(prefix, *leaves, start)
        if self.remat is not None:
            const_types = [avals.abstract(jax.typeof(const)) for const in consts]
            traced = blocks.rematerialised(traced, const_types, [*leaves, start], self.remat)
        if consts:  # constants of the loss, which this module hands back to it
            return dataclasses.replace(traced, bound=tuple(consts))
        return traced

    def _give_rows(self, types: PassInputs, size: int) -> None:
        """Makes types of a part without rows those of one with as many as a microbatch has."""
        if types.selected and self.selection is not None:
            for index, rows in enumerate(self.split.selected_first(self.selection).values()):
                array = types.selected[index]
                types.selected[index] = array.update(shape=replaced(array.shape, rows.axis, rows.length(size)))
        elif self.selection is None:
            for position in self.split.batch_positions:
                array = types.inputs[position]
                types.inputs[position] = array.update(shape=(size, *array.shape[1:]))

    @functools.cached_property
    def whole(self) -> tracing.Traced:
        """At the size of the whole microbatches."""
        return self._trace(self.microbatches.size)

    @functools.cached_property
    def last(self) -> tracing.Traced | None:
        """At the size of the ragged last one."""
        return self._trace(self.microbatches.remainder) if self.microbatches.remainder else None

    def forward(self) -> list[Any]:
        """What the examples make of the frontier."""
        given = self.given

        def run(traced: tracing.Traced, start: Any) -> list[Any]:
            # As in a backward pass: a function with derivatives of its own may have another forward pass there.
            whole = self.shard.whole(given.variables)
            return jax.vjp(lambda variables: self._call(traced, variables, start), whole)[0]

        last = None if self.last is None else run(self.last, self.microbatches.last_start)

        def step(carry: Any, _: None) -> tuple[Any, list[Any]]:
            first, sums = carry
            with jax.named_scope("anybatch_forward"):
                made = run(self.whole, first)
            return (first + self.microbatches.step, self._add(sums, made)), self._emitted(made)

        start = jnp.zeros((), jnp.int32)
        (_, sums), emitted = self._loop(step, (start, self._zeros(last)))
        return self._finish(sums, emitted, last)

    def _loop(self, step: Any, carry: Any) -> tuple[Any, list[Any]]:
        """`lax.scan` over the whole microbatches, if there are any."""
        if self.microbatches.complete:
            return lax.scan(step, carry, length=self.microbatches.complete)
        return carry, [jnp.zeros((0, *aval.shape), aval.dtype) for aval in self._emitted(self.whole.out_avals)]

    def backward(self, seeds: Sequence[Any], *, mutate: bool, keeps_frontier: bool) -> tuple[list[Any], ...]:
        """The gradient with respect to the variables, and what the examples make of the frontier if it is wanted.

        Also the sums of the squares of the microbatches, if these are wanted.

        Args:
          seeds: the gradient with respect to those values of the frontier that are differentiated; of rows, those of
            the examples.
          mutate: whether to add the gradient up in references.
          keeps_frontier: whether the frontier is wanted.
        """
        given, microbatches = self.given, self.microbatches
        positions = [index for index, position in enumerate(self._positions) if position in self.split.differentiated]
        wide = [wide_dtype(leaf.dtype, self.accumulator_dtype) for leaf in given.variables]
        is_direct = self.shard.in_place(
            [leaf.dtype == dtype for leaf, dtype in zip(given.variables, wide, strict=True)]
        )
        written_in_place = references.written_in_place(self.whole, is_direct) if mutate else []

        def run(
            traced: tracing.Traced, start: Any, size: int, written_in_place: list[bool] | None = None
        ) -> tuple[list[Any], Any, list[Any]]:
            def of_wide(wide_variables: list[Any]) -> tuple[list[Any], list[Any]]:
                whole = self.shard.whole(wide_variables)  # still wide, so that devices add up wide gradients too
                narrow = [leaf.astype(own.dtype) for leaf, own in zip(whole, given.variables, strict=True)]
                made = self._call(traced, narrow, start)
                return [made[position] for position in positions], made

            # Widening what is differentiated makes autodiff itself add up in the wide dtype.
            point = [leaf.astype(dtype) for leaf, dtype in zip(given.variables, wide, strict=True)]
            fun = of_wide if written_in_place is None else references.shielded(of_wide, written_in_place)
            _, pullback, made = jax.vjp(fun, point, has_aux=True)
            mine = []
            for position, seed in zip(positions, seeds, strict=True):
                state = self.states[position]
                if isinstance(state, Batched):
                    seed = take_rows(seed, state, microbatches.examples, start, size, microbatches.runs)
                mine.append(seed)
            return made, pullback, mine

        def add(totals: Sequence[Any], in_place: list[bool], *, mutate: bool) -> list[Any]:
            _, pullback, mine = run(self.whole, 0, microbatches.size, in_place if mutate else None)
            return references.add(pullback, mine, totals, mutate=mutate)

        if microbatches.complete and references.reach_nested_functions(self.whole, written_in_place):
            types = [jax.typeof(leaf).update(dtype=dtype) for leaf, dtype in zip(given.variables, wide, strict=True)]
            written_in_place = references.with_same_terms(add, types, written_in_place)

        last: list[Any] | None = None
        noise = [] if self.weights is None else squared_norms.zeros(wide)
        if self.last is None:
            grads = [jnp.zeros_like(leaf, dtype) for leaf, dtype in zip(given.variables, wide, strict=True)]
        else:
            with jax.named_scope("anybatch_last_microbatch"):
                last, pullback, mine = run(self.last, microbatches.last_start, microbatches.remainder)
                (grads,) = pullback(mine)
            noise = self._with_square(noise, grads, microbatches.last_start, microbatches.remainder)
        start, grads = loop_start(microbatches, grads)
        accumulators = [jax.new_ref(leaf) for leaf in grads] if mutate else None

        def step(carry: Any, _: None) -> tuple[Any, list[Any]]:
            first, sums, grads, noise = carry
            with jax.named_scope("anybatch_microbatch"):
                made, pullback, mine = run(self.whole, first, microbatches.size, written_in_place if mutate else None)
                if accumulators is not None:
                    pullback.with_refs(accumulators)(mine)
                else:
                    own = self.shard.apart(pullback(mine)[0])
                    grads, noise = (
                        jax.tree.map(jnp.add, grads, own),
                        self._with_square(noise, own, first, microbatches.size),
                    )
            kept = (self._add(sums, made), self._emitted(made)) if keeps_frontier else ([], [])
            return (first + microbatches.step, kept[0], grads, noise), kept[1]

        sums = self._zeros(last) if keeps_frontier else []
        carry = (start, sums, [] if mutate else grads, noise)
        (_, sums, grads, noise), emitted = self._loop(step, carry)
        if accumulators is not None:
            grads = [jax.freeze(accumulator) for accumulator in accumulators]
        return grads, self._finish(sums, emitted, last) if keeps_frontier else [], noise

    def _with_square(self, noise: list[Any], grads: list[Any], start: Any, size: int) -> list[Any]:
        if self.weights is None:
            return []
        given = self.given
        return squared_norms.add(
            noise, grads, self.weights.of_microbatch(given.inputs, start, size, given.origin, self.microbatches.runs)
        )

    def _call(self, traced: tracing.Traced, variables: list[Any], start: Any) -> list[Any]:
        given, start = self.given, jnp.asarray(start, jnp.int32)
        arrays = (variables, given.inputs, given.known, given.selected, given.place)
        return traced(traced.bound, *jax.tree.leaves(arrays), start)

    # The frontier: sums are carried through the loop, rows are emitted by every microbatch.

    def _zeros(self, last: Sequence[Any] | None) -> list[Any]:
        types = self.whole.out_avals
        zeros = [
            avals.zeros_of(aval, wide_dtype(aval.dtype, self.accumulator_dtype))
            for aval, state in zip(types, self.states, strict=True)
            if state == SUMMED
        ]
        return zeros if last is None else self._add(zeros, last)

    def _add(self, sums: Sequence[Any], made: Sequence[Any]) -> list[Any]:
        new = [value for value, state in zip(made, self.states, strict=True) if state == SUMMED]
        return [old + value.astype(old.dtype) for old, value in zip(sums, new, strict=True)]

    def _emitted(self, made: Sequence[Any]) -> list[Any]:
        return [value for value, state in zip(made, self.states, strict=True) if isinstance(state, Batched)]

    def _finish(self, sums: Sequence[Any], emitted: Sequence[Any], last: Sequence[Any] | None) -> list[Any]:
        carried, stacked = iter(sums), iter(emitted)
        whole = []
        for position, state in enumerate(self.states):
            if isinstance(state, Batched):
                mine = None if last is None else last[position]
                whole.append(
                    put_rows(
                        next(stacked),
                        mine,
                        state,
                        self.microbatches.size,
                        self.microbatches.remainder,
                        self.microbatches.runs,
                    )
                )
            else:
                whole.append(next(carried))
        return whole


def gather_rows(split: Split, microbatches: Microbatches, given: PassInputs) -> list[Any]:
    """Rows of data alone, for the examples of a part, computed microbatch by microbatch."""
    wanted = split.gathered_first

    def run(start: Any, size: int) -> list[Any]:
        return split.prefix(given.inputs, None, [], start, size, wanted, given.origin, microbatches.runs)

    last = run(microbatches.last_start, microbatches.remainder) if microbatches.remainder else [None] * len(wanted)

    def step(start: Any, _: None) -> tuple[Any, list[Any]]:
        return start + microbatches.step, run(start, microbatches.size)

    _, stacked = lax.scan(step, jnp.zeros((), jnp.int32), length=microbatches.complete)
    states: list[Any] = [split.reader.state(value) for value in wanted]
    return [
        put_rows(*each, microbatches.size, microbatches.remainder, microbatches.runs)
        for each in zip(stacked, last, states, strict=True)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """The passes over the microbatches of one loss, at some place."""

    split: Split
    size: int  # of the microbatches
    accumulator_dtype: Any
    place: Executor
    remat: str | None = None
    weights: MicrobatchWeights | None = None  # what microbatches count, if the noise in the gradient is wanted

    def _run(
        self,
        fun: Any,
        variables: list[Any],
        inputs: list[Any],
        known: list[Any],
        seeds: list[Any],
        gives: list[OutputLayout],
        selection: int | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Calls `fun(part, given, seeds)` wherever there are examples; `seeds` are those of the selection."""
        batch, split = self.split.batch_positions, self.split
        place = self.place if selection is None else self.place.of_rows(selection)
        selected = {} if selection is None or place.has_all_examples else split.selected_first(selection)
        states = [split.states[position] for position in self._differentiated(selection)[: len(seeds)]]
        in_rows = [isinstance(state, Batched) for state in states]
        others = [*inputs[: batch.start], *inputs[batch.stop :]]
        whole, tree = jax.tree.flatten(
            (variables, others, known, [seed for seed, has in zip(seeds, in_rows, strict=True) if not has])
        )
        # The rows of a selection are those of the devices; what they are selected from is known as a whole.
        takes = list(selected.values()) if selected else [Batched(0)] * len(batch)
        takes += [state for state in states if isinstance(state, Batched)]
        rows = [known[index] for index in selected] if selected else list(inputs[batch.start : batch.stop])
        num_rows = len(rows)
        rows += [seed for seed, has in zip(seeds, in_rows, strict=True) if has]

        def of_part(shard: Shard, whole: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            variables, others, known, sums = jax.tree.unflatten(tree, whole)
            own = rows[:num_rows]
            # A loop over selected rows reads nothing else, so that the examples are placeholders.
            examples = [jnp.zeros(())] * len(batch) if selected else own
            inputs = [*others[: batch.start], *examples, *others[batch.start :]]
            of_sums, of_rows = iter(sums), iter(rows[num_rows:])
            mine = [next(of_rows if has else of_sums) for has in in_rows]
            return fun(shard, PassInputs(variables, inputs, known, own if selected else [], shard.place[:1]), mine)

        return place(BatchPass(of_part, whole, rows, takes, gives, len(variables) if seeds else 0))

    def _differentiated(self, selection: int | None) -> list[int]:
        """The positions in the frontier of what a selection makes and has a gradient."""
        made = self.split.selections.get(selection, [])
        return [position for position in self.split.differentiated if position in made]

    def _cut(self, shard: Shard) -> Microbatches:
        return Microbatches(shard.examples, max(1, min(self.size, shard.examples)), shard.runs)

    def rows_of_data(self, inputs: list[Any]) -> list[Any]:
        """The rows that are computed before anything else."""
        wanted = self.split.gathered_first
        if not wanted:
            return []

        def gather(shard: Shard, given: PassInputs, _: list[Any]) -> tuple[list[Any], list[Any]]:
            return [], gather_rows(self.split, self._cut(shard), given)

        gives = [OutputLayout(state) for state in map(self.split.reader.state, wanted) if isinstance(state, Batched)]
        return self._run(gather, [], inputs, [], [], gives)[1]

    def forward(self, variables: list[Any], inputs: list[Any], known: list[Any]) -> list[Any]:
        """The frontier."""
        made: dict[int, Any] = {}
        for selection, positions in self.split.selections.items():
            made.update(zip(positions, self._forward(variables, inputs, known, selection), strict=True))
        return [made[position] for position in range(len(made))]

    def _forward(self, variables: list[Any], inputs: list[Any], known: list[Any], selection: int | None) -> list[Any]:
        """What one selection makes of the frontier."""

        def forward(shard: Shard, given: PassInputs, _: list[Any]) -> tuple[list[Any], list[Any]]:
            return self._sums_and_rows(self._prefix(shard, given, selection).forward(), selection)

        found = self._run(forward, variables, inputs, known, [], self._gives(selection), selection)
        return self._frontier(*found, selection)

    def backward(
        self, variables: list[Any], inputs: list[Any], known: list[Any], seeds: list[Any], *, keeps_frontier: bool
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradient with respect to the variables, and if they are wanted the frontier and the sums of squares."""
        made: dict[int, Any] = {}
        total: list[Any] | None = None
        noise: list[Any] = []
        assert self.weights is None or list(self.split.selections) == [None]  # noise is told by the batch itself
        seed_at = dict(zip(self.split.differentiated, seeds, strict=True))
        for selection, positions in self.split.selections.items():
            mine = [seed_at[position] for position in self._differentiated(selection)]
            if mine:
                grads, frontier, noise = self._backward(variables, inputs, known, mine, keeps_frontier, selection)
                total = grads if total is None else [_plus(one, other) for one, other in zip(total, grads, strict=True)]
                made.update(zip(positions, frontier, strict=False))
            elif keeps_frontier:
                made.update(zip(positions, self._forward(variables, inputs, known, selection), strict=True))
        assert total is not None
        return total, [made[position] for position in range(len(made))], noise

    def _backward(
        self,
        variables: list[Any],
        inputs: list[Any],
        known: list[Any],
        seeds: list[Any],
        keeps_frontier: bool,
        selection: int | None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """What one selection makes of them."""
        num_own = len(variables) + (0 if self.weights is None else squared_norms.CARRIED)

        def backward(shard: Shard, given: PassInputs, seeds: list[Any]) -> tuple[list[Any], list[Any]]:
            arrays = (given.variables, given.inputs, given.known, given.selected, given.place, seeds)
            leaves, tree = jax.tree.flatten(arrays)
            anywhere = shard.anywhere

            def compute(*flat: Any, mutate: bool) -> list[Any]:
                *arrays, seeds = jax.tree.unflatten(tree, flat)
                prefix = self._prefix(anywhere, PassInputs(*arrays), selection)
                grads, frontier, noise = prefix.backward(seeds, mutate=mutate, keeps_frontier=keeps_frontier)
                return [*grads, *noise, *frontier]

            leaves = [jnp.asarray(leaf) for leaf in leaves]
            # A primitive of our own would hide effects; and in place there is no gradient of a microbatch by itself.
            if self.split.loss.traced.has_effects or shard.fixed_order or self.weights is not None:
                results = compute(*leaves, mutate=False)
            else:
                results = in_place.call(
                    functools.partial(compute, mutate=True), functools.partial(compute, mutate=False), *leaves
                )
            own, frontier = results[:num_own], results[num_own:]
            sums, rows = self._sums_and_rows(frontier, selection) if keeps_frontier else ([], [])
            return [*own, *sums], rows

        gives = self._gives(selection) if keeps_frontier else []
        sums, rows = self._run(backward, variables, inputs, known, seeds, gives, selection)
        grads, noise, sums = sums[: len(variables)], sums[len(variables) : num_own], sums[num_own:]
        return grads, self._frontier(sums, rows, selection) if keeps_frontier else [], noise

    def _prefix(self, shard: Shard, given: PassInputs, selection: int | None) -> Prefix:
        microbatches, dtype = self._cut(shard), self.accumulator_dtype
        return Prefix(self.split, microbatches, dtype, given, shard, self.remat, self.weights, selection)

    def _states(self, selection: int | None) -> list[State]:
        return [self.split.states[position] for position in self.split.selections[selection]]

    def _gives(self, selection: int | None) -> list[OutputLayout]:
        return [OutputLayout(state) for state in self._states(selection) if isinstance(state, Batched)]

    def _sums_and_rows(self, frontier: Sequence[Any], selection: int | None) -> tuple[list[Any], list[Any]]:
        with_rows = [isinstance(state, Batched) for state in self._states(selection)]
        sums = [value for value, has in zip(frontier, with_rows, strict=True) if not has]
        return sums, [value for value, has in zip(frontier, with_rows, strict=True) if has]

    def _frontier(self, sums: Sequence[Any], rows: Sequence[Any], selection: int | None) -> list[Any]:
        of_sums, of_rows = iter(sums), iter(rows)
        values = [self.split.frontier[position] for position in self.split.selections[selection]]
        return [
            next(of_rows) if isinstance(state, Batched) else next(of_sums).astype(value.dtype)
            for state, value in zip(self._states(selection), values, strict=True)
        ]


def value_and_grad(
    passes: Passes, consts: Sequence[Any], arrays: Arrays
) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """The value, the aux leaves and the gradient leaves of the batch, and if it is wanted what tells its noise.

    One pass: where the gradient of the head is known before or is a single factor. Else two: the first, without
    gradients, makes the frontier; the second sees the same examples and random numbers again.

    Memory: one gradient in the accumulator's dtype, the temporaries of one microbatch, and the head: the rows of
    the frontier, if there are any, and what is computed from them; for the noise also the gradient of one microbatch.
    """
    split, once = passes.split, passes.place.once
    inputs = [jnp.asarray(leaf) for leaf in split.inputs(consts, arrays)]
    first, num_wrt = split.num_consts, len(split.loss.types.wrt)
    wrt = inputs[first : first + num_wrt]
    in_order = list(inputs)
    for position in split.batch_positions:
        in_order[position] = passes.place.in_order(inputs[position])
    known = once(split.compute_first, in_order, passes.rows_of_data(inputs))

    def with_wrt(inputs: Sequence[Any], wrt: Sequence[Any]) -> list[Any]:
        return [*inputs[:first], *wrt, *inputs[first + num_wrt :]]

    def compute_hoisted(wrt: list[Any]) -> list[Any]:
        return once(
            lambda inputs, wrt, known: split.compute_hoisted(with_wrt(inputs, wrt), known), in_order, wrt, known
        )

    hoisted, pull_hoisted = jax.vjp(compute_hoisted, wrt) if split.hoisted else ([], None)
    variables = [*wrt, *hoisted]

    def differentiated_head(
        frontier: Sequence[Any], num_outputs: int | None = None
    ) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """The loss, the aux leaves, and the gradients with respect to the variables and to the frontier."""

        def differentiated(inputs: Any, known: Any, variables: Any, frontier: Any) -> Any:
            def head(variables: Sequence[Any], moving: Sequence[Any]) -> tuple[Any, list[Any]]:
                now = dict(zip(split.differentiated, moving, strict=True))
                whole = [now.get(position, value) for position, value in enumerate(frontier)]
                parameters = with_wrt(inputs, variables[:num_wrt])
                value, *aux = split.head(parameters, known, variables[num_wrt:], whole, num_outputs)
                return value, aux

            moving = [frontier[position] for position in split.differentiated]
            value, pullback, aux = jax.vjp(head, variables, moving, has_aux=True)
            return value, aux, *pullback(jnp.ones_like(value))

        with jax.named_scope("anybatch_head"):
            return once(differentiated, in_order, known, variables, list(frontier))

    factor: Any = None
    summed: list[Any] = []
    noise: list[Any] = []
    if split.seeds == Seeds.NONE:
        frontier = passes.forward(variables, inputs, known) if split.frontier else []
        value, aux, grads, _ = differentiated_head(frontier)
    elif split.seeds == Seeds.BEFORE:
        # The gradient of the head does not depend on the frontier: any will do to find it.
        seeds = differentiated_head([_placeholder(value) for value in split.frontier], num_outputs=1)[3]
        summed, frontier, noise = passes.backward(variables, inputs, known, seeds, keeps_frontier=True)
        value, aux, grads, _ = differentiated_head(frontier)
        grads = [_plus(total, grad) for total, grad in zip(summed, grads, strict=True)]
    elif split.seeds == Seeds.AFTER:
        ones = [jnp.ones_like(_placeholder(split.frontier[position])) for position in split.differentiated]
        summed, frontier, noise = passes.backward(variables, inputs, known, ones, keeps_frontier=True)
        value, aux, grads, (factor,) = differentiated_head(frontier)
        factor = factor.reshape(())
        grads = [_plus(total * factor.astype(total.dtype), grad) for total, grad in zip(summed, grads, strict=True)]
    else:
        frontier = passes.forward(variables, inputs, known)
        value, aux, grads, seeds = differentiated_head(frontier)
        summed, _, noise = passes.backward(variables, inputs, known, seeds, keeps_frontier=False)
        grads = [_plus(total, grad) for total, grad in zip(summed, grads, strict=True)]

    with jax.named_scope("anybatch_reduce"):
        own, of_hoisted = grads[:num_wrt], grads[num_wrt:]
        if pull_hoisted is not None:
            (pulled,) = pull_hoisted([grad.astype(leaf.dtype) for grad, leaf in zip(of_hoisted, hoisted, strict=True)])
            own = [_plus(grad, more) for grad, more in zip(own, pulled, strict=True)]
        if passes.weights is not None:
            noise = _noise(split.loss.num_examples, noise, summed, own, factor)
        return value, aux, [grad.astype(leaf.dtype) for grad, leaf in zip(own, wrt, strict=True)], noise


def _noise(examples: int, sums: list[Any], summed: list[Any], grads: list[Any], factor: Any) -> list[Any]:
    """The summary of the squares, in the scale of the gradient."""
    of_all = squared_norms.square(grads)
    if not sums:  # the gradient does not depend on the examples
        return [jnp.zeros_like(of_all), of_all, *(jnp.asarray(count, of_all.dtype) for count in (examples, examples))]
    of_data = squared_norms.square(summed)
    if factor is not None:
        scale = jnp.square(factor.astype(of_data.dtype))
        sums, of_data = squared_norms.scaled(sums, scale), of_data * scale
    return squared_norms.summary(sums, of_data, of_all)


def _plus(total: jax.Array, grad: jax.Array) -> jax.Array:
    return total + grad.astype(total.dtype)


def _placeholder(value: Any) -> Any:
    if value.is_key:
        data = jax.eval_shape(jax.random.key_data, value.type)
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=avals.key_impl(value.dtype))
    return avals.zeros_of(value.aval, value.dtype)
