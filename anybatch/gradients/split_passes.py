"""The gradient of a loss that was read and split: its prefix microbatch by microbatch, its head once.

The prefix computes the frontier from the examples: sums over them and rows of them. The head computes the loss from the
frontier. `Prefix` has the loops over the microbatches of one shard, forward or backward. `Passes` runs these loops on
an executor. `value_and_grad`, at the end, decides whether one pass is enough or two are needed.
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
    """The inputs of a pass over one shard."""

    variables: list[Any]  # differentiated: the parameters, then the values that were hoisted out of the prefix
    inputs: list[Any]  # all inputs of the loss, with the examples of the shard
    known: list[Any]  # values that were computed before, from data alone
    selected: list[
        Any
    ]  # the rows of the shard of those values of `known` that a selection indexes; empty on one device
    first: list[Any]  # the index in the batch of the first example, if it is traced; otherwise empty

    @property
    def origin(self) -> Any:
        """The index in the batch of the first example, or None if it is 0."""
        return self.first[0] if self.first else None

    @property
    def lists(self) -> tuple[list[Any], ...]:
        """All fields, in order."""
        return self.variables, self.inputs, self.known, self.selected, self.first

    @property
    def types(self) -> "PassInputs":
        """The types of all arrays."""
        return PassInputs(*([avals.abstract(jax.typeof(leaf)) for leaf in arrays] for arrays in self.lists))


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The prefix of a loss for the microbatches of one shard, and the loops over them."""

    split: Split
    microbatches: Microbatches
    accumulator_dtype: Any
    inputs: PassInputs
    shard: Shard
    remat: str | None = None  # a policy of jax.checkpoint for the backward pass
    weights: MicrobatchWeights | None = None  # of the microbatches, if the squares of their gradients are wanted
    selection: int | None = None  # the number of selected rows that the loop runs over; None for the examples

    @functools.cached_property
    def _positions(self) -> list[int]:
        """The positions in the frontier of the values that this prefix computes."""
        return self.split.selections.get(self.selection, [])

    @functools.cached_property
    def states(self) -> list[State]:
        """The states of these values: batched or summed."""
        return [self.split.states[position] for position in self._positions]

    def _trace(self, size: int) -> tracing.Traced:
        split, types = self.split, self.inputs.types
        if self.shard.examples < size:  # an empty shard: the prefix is traced for its types, and never called
            self._add_rows(types, size)
        variables = jax.eval_shape(self.shard.gather, types.variables) if self.shard.is_sharded else types.variables
        leaves, tree = jax.tree.flatten((variables, *types.lists[1:]))
        first, num_wrt = split.num_consts, len(split.loss.types.wrt)

        def prefix(*flat: Any) -> list[Any]:
            *arrays, start = flat
            variables, inputs, known, selected, first_example = jax.tree.unflatten(tree, arrays)
            inputs[first : first + num_wrt] = variables[:num_wrt]
            origin = PassInputs(variables, inputs, known, selected, first_example).origin
            wanted = [split.frontier[position] for position in self._positions]
            hoisted, runs = variables[num_wrt:], self.microbatches.runs
            return split.prefix(inputs, known, hoisted, start, size, wanted, origin, runs, self.selection, selected)

        start = jax.ShapeDtypeStruct((), jnp.int32)
        traced, consts = tracing.trace(prefix, *leaves, start)
        if self.remat is not None:
            const_types = [avals.abstract(jax.typeof(const)) for const in consts]
            traced = blocks.rematerialised(traced, const_types, [*leaves, start], self.remat)
        if consts:  # constants of the loss
            return dataclasses.replace(traced, bound=tuple(consts))
        return traced

    def _add_rows(self, types: PassInputs, size: int) -> None:
        """Changes the types of an empty shard to those of one microbatch."""
        if types.selected and self.selection is not None:
            for index, rows in enumerate(self.split.selected_first(self.selection).values()):
                array = types.selected[index]
                types.selected[index] = array.update(shape=replaced(array.shape, rows.axis, rows.length(size)))
        elif self.selection is None:
            for position in self.split.batch_positions:
                array = types.inputs[position]
                types.inputs[position] = array.update(shape=(size, *array.shape[1:]))

    @functools.cached_property
    def traced(self) -> tracing.Traced:
        """The prefix for a complete microbatch."""
        return self._trace(self.microbatches.size)

    @functools.cached_property
    def traced_last(self) -> tracing.Traced | None:
        """The prefix for the smaller last microbatch, if there is one."""
        return self._trace(self.microbatches.remainder) if self.microbatches.remainder else None

    def forward(self) -> list[Any]:
        """The values of the frontier for this shard."""

        def run(traced: tracing.Traced, start: Any) -> list[Any]:
            # By jax.vjp, as in a backward pass: a custom_vjp function may compute its forward pass differently there.
            variables = self.shard.gather(self.inputs.variables)
            return jax.vjp(lambda variables: self._call(traced, variables, start), variables)[0]

        last = None if self.traced_last is None else run(self.traced_last, self.microbatches.last_start)

        def step(carry: Any, _: None) -> tuple[Any, list[Any]]:
            first, sums = carry
            with jax.named_scope("anybatch_forward"):
                made = run(self.traced, first)
            return (first + self.microbatches.step, self._add(sums, made)), self._emitted(made)

        start = jnp.zeros((), jnp.int32)
        (_, sums), emitted = self._loop(step, (start, self._zeros(last)))
        return self._finish(sums, emitted, last)

    def _loop(self, step: Any, carry: Any) -> tuple[Any, list[Any]]:
        """`lax.scan` over the complete microbatches, if there are any."""
        if self.microbatches.complete:
            return lax.scan(step, carry, length=self.microbatches.complete)
        return carry, [jnp.zeros((0, *aval.shape), aval.dtype) for aval in self._emitted(self.traced.out_avals)]

    def backward(self, seeds: Sequence[Any], *, mutate: bool, keeps_frontier: bool) -> tuple[list[Any], ...]:
        """The gradient with respect to the variables, the frontier, and the squares of the microbatches.

        Args:
          seeds: the cotangents of the differentiated values of the frontier; of batched values, the rows of the shard.
          mutate: whether to accumulate the gradient in references.
          keeps_frontier: whether to return the frontier; otherwise the second result is empty.

        Returns:
          The gradient, the frontier, and the sums of `squared_norms`, which are empty without `weights`.
        """
        variables, microbatches = self.inputs.variables, self.microbatches
        positions = [index for index, position in enumerate(self._positions) if position in self.split.differentiated]
        wide = [wide_dtype(leaf.dtype, self.accumulator_dtype) for leaf in variables]
        is_direct = self.shard.in_place([leaf.dtype == dtype for leaf, dtype in zip(variables, wide, strict=True)])
        written_in_place = references.written_in_place(self.traced, is_direct) if mutate else []

        def run(
            traced: tracing.Traced, start: Any, size: int, written_in_place: list[bool] | None = None
        ) -> tuple[list[Any], Any, list[Any]]:
            def of_wide(wide_variables: list[Any]) -> tuple[list[Any], list[Any]]:
                gathered = self.shard.gather(wide_variables)  # still wide, so that devices sum wide gradients too
                narrow = [leaf.astype(like.dtype) for leaf, like in zip(gathered, variables, strict=True)]
                made = self._call(traced, narrow, start)
                return [made[position] for position in positions], made

            # Differentiating with respect to wide arrays makes autodiff itself sum in the wide dtype.
            point = [leaf.astype(dtype) for leaf, dtype in zip(variables, wide, strict=True)]
            fun = of_wide if written_in_place is None else references.shielded(of_wide, written_in_place)
            _, pullback, made = jax.vjp(fun, point, has_aux=True)
            own_seeds = []
            for position, seed in zip(positions, seeds, strict=True):
                state = self.states[position]
                if isinstance(state, Batched):
                    seed = take_rows(seed, state, microbatches.examples, start, size, microbatches.runs)
                own_seeds.append(seed)
            return made, pullback, own_seeds

        def add(totals: Sequence[Any], in_place: list[bool], *, mutate: bool) -> list[Any]:
            _, pullback, own_seeds = run(self.traced, 0, microbatches.size, in_place if mutate else None)
            return references.add(pullback, own_seeds, totals, mutate=mutate)

        if microbatches.complete and references.reach_nested_functions(self.traced, written_in_place):
            types = [jax.typeof(leaf).update(dtype=dtype) for leaf, dtype in zip(variables, wide, strict=True)]
            written_in_place = references.with_same_terms(add, types, written_in_place)

        # The smaller last microbatch comes first: its gradient is where the accumulator starts.
        last: list[Any] | None = None
        noise = [] if self.weights is None else squared_norms.zeros(wide)
        if self.traced_last is None:
            grads = [jnp.zeros_like(leaf, dtype) for leaf, dtype in zip(variables, wide, strict=True)]
        else:
            with jax.named_scope("anybatch_last_microbatch"):
                last, pullback, own_seeds = run(self.traced_last, microbatches.last_start, microbatches.remainder)
                (grads,) = pullback(own_seeds)
            noise = self._with_square(noise, grads, microbatches.last_start, microbatches.remainder)
        start, grads = loop_start(microbatches, grads)
        accumulators = [jax.new_ref(leaf) for leaf in grads] if mutate else None

        def step(carry: Any, _: None) -> tuple[Any, list[Any]]:
            first, sums, grads, noise = carry
            with jax.named_scope("anybatch_microbatch"):
                made, pullback, own_seeds = run(
                    self.traced, first, microbatches.size, written_in_place if mutate else None
                )
                if accumulators is not None:
                    pullback.with_refs(accumulators)(own_seeds)
                else:
                    own = self.shard.unfused(pullback(own_seeds)[0])
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
        inputs, runs = self.inputs.inputs, self.microbatches.runs
        return squared_norms.add(
            noise, grads, self.weights.of_microbatch(inputs, start, size, self.inputs.origin, runs)
        )

    def _call(self, traced: tracing.Traced, variables: list[Any], start: Any) -> list[Any]:
        arrays = jax.tree.leaves((variables, *self.inputs.lists[1:]))
        return traced(traced.bound, *arrays, jnp.asarray(start, jnp.int32))

    # The frontier: sums are carried through the loop, and every microbatch emits its rows.

    def _zeros(self, last: Sequence[Any] | None) -> list[Any]:
        types = self.traced.out_avals
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
        size, remainder, runs = self.microbatches.size, self.microbatches.remainder, self.microbatches.runs
        frontier = []
        for position, state in enumerate(self.states):
            if isinstance(state, Batched):
                last_rows = None if last is None else last[position]
                frontier.append(put_rows(next(stacked), last_rows, state, size, remainder, runs))
            else:
                frontier.append(next(carried))
        return frontier


def rows_of_data(split: Split, microbatches: Microbatches, inputs: PassInputs) -> list[Any]:
    """The values that must be known before the first pass: rows computed from data alone, for one shard."""
    wanted = split.gathered_first

    def run(start: Any, size: int) -> list[Any]:
        return split.prefix(inputs.inputs, None, [], start, size, wanted, inputs.origin, microbatches.runs)

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
    """The passes over the batch of one loss, on an executor."""

    split: Split
    size: int  # of the microbatches
    accumulator_dtype: Any
    executor: Executor
    remat: str | None = None
    weights: MicrobatchWeights | None = None  # of the microbatches, if the gradient noise is wanted

    def _run(
        self,
        fun: Any,
        variables: list[Any],
        inputs: list[Any],
        known: list[Any],
        seeds: list[Any],
        output_layouts: list[OutputLayout],
        selection: int | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Calls `fun(shard, inputs, seeds)` for every shard, and combines the results.

        Args:
          fun: a function that returns sums and rows.
          variables: as in `PassInputs`.
          inputs: as in `PassInputs`, with all examples.
          known: as in `PassInputs`.
          seeds: the cotangents of the values that this selection computes; empty for a forward pass.
          output_layouts: the layouts of the rows that `fun` returns.
          selection: the number of selected rows to run over; None for the examples.
        """
        batch, split = self.split.batch_positions, self.split
        executor = self.executor if selection is None else self.executor.for_rows(selection)
        selected = {} if selection is None or executor.has_all_examples else split.selected_first(selection)
        states = [split.states[position] for position in self._differentiated(selection)[: len(seeds)]]
        in_rows = [isinstance(state, Batched) for state in states]
        others = [*inputs[: batch.start], *inputs[batch.stop :]]
        invariant, tree = jax.tree.flatten(
            (variables, others, known, [seed for seed, has in zip(seeds, in_rows, strict=True) if not has])
        )
        # A device gets its selected rows. The arrays that they are selected from are replicated, in `known`.
        row_layouts = list(selected.values()) if selected else [Batched(0)] * len(batch)
        row_layouts += [state for state in states if isinstance(state, Batched)]
        rows = [known[index] for index in selected] if selected else list(inputs[batch.start : batch.stop])
        num_rows = len(rows)
        rows += [seed for seed, has in zip(seeds, in_rows, strict=True) if has]

        def of_shard(shard: Shard, invariant: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            variables, others, known, sums = jax.tree.unflatten(tree, invariant)
            own = rows[:num_rows]
            # A loop over selected rows does not read the examples, so placeholders will do.
            examples = [jnp.zeros(())] * len(batch) if selected else own
            inputs = [*others[: batch.start], *examples, *others[batch.start :]]
            of_sums, of_rows = iter(sums), iter(rows[num_rows:])
            own_seeds = [next(of_rows if has else of_sums) for has in in_rows]
            first = shard.traced_values[:1]
            return fun(shard, PassInputs(variables, inputs, known, own if selected else [], first), own_seeds)

        num_variables = len(variables) if seeds else 0
        return executor(BatchPass(of_shard, invariant, rows, row_layouts, output_layouts, num_variables))

    def _differentiated(self, selection: int | None) -> list[int]:
        """The positions in the frontier of the differentiated values that a selection computes."""
        made = self.split.selections.get(selection, [])
        return [position for position in self.split.differentiated if position in made]

    def _microbatches(self, shard: Shard) -> Microbatches:
        return Microbatches(shard.examples, max(1, min(self.size, shard.examples)), shard.runs)

    def rows_of_data(self, inputs: list[Any]) -> list[Any]:
        """The values that must be known before the first pass: rows computed from data alone."""
        wanted = self.split.gathered_first
        if not wanted:
            return []

        def gather(shard: Shard, inputs: PassInputs, _: list[Any]) -> tuple[list[Any], list[Any]]:
            return [], rows_of_data(self.split, self._microbatches(shard), inputs)

        output_layouts = [
            OutputLayout(state) for state in map(self.split.reader.state, wanted) if isinstance(state, Batched)
        ]
        return self._run(gather, [], inputs, [], [], output_layouts)[1]

    def forward(self, variables: list[Any], inputs: list[Any], known: list[Any]) -> list[Any]:
        """The frontier, in a pass without gradients."""
        made: dict[int, Any] = {}
        for selection, positions in self.split.selections.items():
            made.update(zip(positions, self._forward(variables, inputs, known, selection), strict=True))
        return [made[position] for position in range(len(made))]

    def _forward(self, variables: list[Any], inputs: list[Any], known: list[Any], selection: int | None) -> list[Any]:
        """The values of the frontier that one selection computes."""

        def forward(shard: Shard, inputs: PassInputs, _: list[Any]) -> tuple[list[Any], list[Any]]:
            return self._sums_and_rows(self._prefix(shard, inputs, selection).forward(), selection)

        found = self._run(forward, variables, inputs, known, [], self._output_layouts(selection), selection)
        return self._frontier(*found, selection)

    def backward(
        self, variables: list[Any], inputs: list[Any], known: list[Any], seeds: list[Any], *, keeps_frontier: bool
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradient with respect to the variables; the frontier, if kept; the squares, if there are weights."""
        made: dict[int, Any] = {}
        total: list[Any] | None = None
        noise: list[Any] = []
        assert self.weights is None or list(self.split.selections) == [None]  # noise is measured on the examples only
        seed_at = dict(zip(self.split.differentiated, seeds, strict=True))
        for selection, positions in self.split.selections.items():
            own_seeds = [seed_at[position] for position in self._differentiated(selection)]
            if own_seeds:
                grads, frontier, noise = self._backward(variables, inputs, known, own_seeds, keeps_frontier, selection)
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
        """`backward` for one selection."""
        num_own = len(variables) + (0 if self.weights is None else squared_norms.CARRIED)

        def backward(shard: Shard, inputs: PassInputs, seeds: list[Any]) -> tuple[list[Any], list[Any]]:
            leaves, tree = jax.tree.flatten((*inputs.lists, seeds))
            static = shard.static

            def compute(*flat: Any, mutate: bool) -> list[Any]:
                *arrays, seeds = jax.tree.unflatten(tree, flat)
                prefix = self._prefix(static, PassInputs(*arrays), selection)
                grads, frontier, noise = prefix.backward(seeds, mutate=mutate, keeps_frontier=keeps_frontier)
                return [*grads, *noise, *frontier]

            leaves = [jnp.asarray(leaf) for leaf in leaves]
            # The in-place primitive would hide effects. And it never has the gradient of a single microbatch, which a
            # fixed order and the squares need.
            if self.split.loss.traced.has_effects or shard.fixed_order or self.weights is not None:
                results = compute(*leaves, mutate=False)
            else:
                results = in_place.call(
                    functools.partial(compute, mutate=True), functools.partial(compute, mutate=False), *leaves
                )
            own, frontier = results[:num_own], results[num_own:]
            sums, rows = self._sums_and_rows(frontier, selection) if keeps_frontier else ([], [])
            return [*own, *sums], rows

        output_layouts = self._output_layouts(selection) if keeps_frontier else []
        sums, rows = self._run(backward, variables, inputs, known, seeds, output_layouts, selection)
        grads, noise, sums = sums[: len(variables)], sums[len(variables) : num_own], sums[num_own:]
        return grads, self._frontier(sums, rows, selection) if keeps_frontier else [], noise

    def _prefix(self, shard: Shard, inputs: PassInputs, selection: int | None) -> Prefix:
        microbatches, dtype = self._microbatches(shard), self.accumulator_dtype
        return Prefix(self.split, microbatches, dtype, inputs, shard, self.remat, self.weights, selection)

    def _states(self, selection: int | None) -> list[State]:
        return [self.split.states[position] for position in self.split.selections[selection]]

    def _output_layouts(self, selection: int | None) -> list[OutputLayout]:
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
    """The value, the aux leaves, the gradient leaves and, with weights, the summary of the gradient noise.

    One pass over the batch is enough if the gradient of the head does not depend on the frontier (`Seeds.BEFORE`), or
    is a single factor that can be applied at the end (`Seeds.AFTER`). Otherwise there are two: the first computes the
    frontier without gradients, the second the gradient, from the same examples and random numbers.

    Memory: one gradient in the accumulator's dtype, the temporaries of one microbatch, and those of the head, with the
    rows of the frontier. The noise needs the gradient of one microbatch more.
    """
    split, run_once = passes.split, passes.executor.run_once
    inputs = [jnp.asarray(leaf) for leaf in split.inputs(consts, arrays)]
    first, num_wrt = split.num_consts, len(split.loss.types.wrt)
    wrt = inputs[first : first + num_wrt]
    in_order = list(inputs)
    for position in split.batch_positions:
        in_order[position] = passes.executor.in_batch_order(inputs[position])
    known = run_once(split.compute_first, in_order, passes.rows_of_data(inputs))

    def with_wrt(inputs: Sequence[Any], wrt: Sequence[Any]) -> list[Any]:
        return [*inputs[:first], *wrt, *inputs[first + num_wrt :]]

    def compute_hoisted(wrt: list[Any]) -> list[Any]:
        return run_once(
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
                values = [now.get(position, value) for position, value in enumerate(frontier)]
                parameters = with_wrt(inputs, variables[:num_wrt])
                value, *aux = split.head(parameters, known, variables[num_wrt:], values, num_outputs)
                return value, aux

            moving = [frontier[position] for position in split.differentiated]
            value, pullback, aux = jax.vjp(head, variables, moving, has_aux=True)
            return value, aux, *pullback(jnp.ones_like(value))

        with jax.named_scope("anybatch_head"):
            return run_once(differentiated, in_order, known, variables, list(frontier))

    factor: Any = None
    summed: list[Any] = []
    noise: list[Any] = []
    if split.seeds == Seeds.NONE:
        frontier = passes.forward(variables, inputs, known) if split.frontier else []
        value, aux, grads, _ = differentiated_head(frontier)
    elif split.seeds == Seeds.BEFORE:
        # The gradient of the head does not depend on the frontier, so placeholders will do.
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
    """The summary of the gradient noise, in the scale of the gradient."""
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
