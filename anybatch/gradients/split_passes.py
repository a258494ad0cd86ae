"""The gradient of a loss that is split: its prefix microbatch by microbatch, its head once.

The prefix computes the frontier from the examples: sums over them and rows of them. The head computes the loss from the
frontier. `Prefix` is the program of one microbatch, which the loop of `accumulate.py` runs. `Passes` runs this loop on
an executor. `value_and_grad`, at the end, decides whether one pass is enough or two are needed. A loss with a declared
reduction is computed in the same way, with the split of `declared.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anybatch.call.arguments import Arrays
from anybatch.call.host_batch import HostRows
from anybatch.call.microbatches import Microbatches
from anybatch.gradients import remat, squared_norms
from anybatch.gradients.accumulate import Accumulation, Kind, MicrobatchProgram, Output
from anybatch.gradients.declared import DeclaredPrefix, DeclaredSplit
from anybatch.jaxprs import avals, in_place, paddings, tracing
from anybatch.jaxprs.graph import Value
from anybatch.mesh.executor import BatchPass, Executor, OutputLayout, Shard
from anybatch.reading import blocks
from anybatch.reading.evaluation import Examples
from anybatch.reading.microbatch_weights import MicrobatchWeights
from anybatch.reading.split import PrefixInputs, Seeds, Split
from anybatch.reading.states import Batched, State, replaced

AnySplit = Split | DeclaredSplit


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The prefix of a loss that was read, for the microbatches of one shard. It is a `MicrobatchProgram`."""

    split: AnySplit
    wanted: Sequence[Value]  # the values to compute
    given: PrefixInputs
    shard: Shard
    selection: int | None = None  # the number of selected rows that the loop runs over; None for the examples
    differentiated: Sequence[int] = ()  # the positions of the wanted values that have a gradient
    remat: str | float | None = None  # a policy of jax.checkpoint for the backward pass
    block_size: int | None = None  # the rows of a block of big values; None if these are computed in full
    weights: MicrobatchWeights | None = None  # of the microbatches, if the squares of their gradients are wanted
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)  # of this loss, by size and types

    @property
    def variables(self) -> list[Any]:
        """The parameters, then the hoisted values."""
        return self.given.variables

    def __call__(
        self,
        variables: list[Any],
        start: Any,
        size: int,
        cotangents: Sequence[Any] | None = None,
        totals: Sequence[Any] | None = None,
    ) -> list[Any]:
        traced = self.traced(size, differentiated=cotangents is not None, accumulates=totals is not None)
        arrays = jax.tree.leaves((variables, *self.given.lists[1:]))
        # Blocks take their gradient in the forward pass, from cotangents that are known by then.
        known = [] if cotangents is None or self.block_size is None else [*cotangents, *(totals or ())]
        return traced(traced.bound, *arrays, jnp.asarray(start, jnp.int32), *known)

    @functools.cached_property
    def _traced(self) -> dict[Any, tuple[tracing.Traced, list[int]]]:
        return {}

    def traced(self, size: int, *, differentiated: bool = False, accumulates: bool = False) -> tracing.Traced:
        """The prefix for microbatches of this size. Both forms of a backward pass, and all shards, share it."""
        return self._in_form(size, differentiated, accumulates)[0]

    def accumulated(self, size: int) -> list[int]:
        return self._in_form(size, True, True)[1]

    def _in_form(self, size: int, differentiated: bool, accumulates: bool) -> tuple[tracing.Traced, list[int]]:
        if self.block_size is None and self.remat is None:
            return self._as_it_is(size), []
        takes_cotangents = differentiated and self.block_size is not None
        # Arrays that are gathered from the devices have no second copy.
        accumulates = takes_cotangents and accumulates and not self.shard.is_sharded
        form = (size, takes_cotangents, accumulates)
        return self._kept(form, lambda: self._transformed(*form))

    def _as_it_is(self, size: int) -> tracing.Traced:
        """The prefix without blocks and without `remat`."""
        return self._kept((size,), lambda: (self._trace(size), []))[0]

    def _kept(
        self, form: Any, make: Callable[[], tuple[tracing.Traced, list[int]]]
    ) -> tuple[tracing.Traced, list[int]]:
        if form not in self._traced:
            key = (form, self.selection, self.shard.runs, *jax.tree.leaves(self.given.types.lists))
            made = self._traced[form] = self.programs.get(key) or make()
            if not any(isinstance(const, jax.core.Tracer) for const in made[0].bound):
                self.programs[key] = made
        return self._traced[form]

    def _trace(self, size: int) -> tracing.Traced:
        split, types = self.split, self.given.types
        if self.shard.examples < size:  # an empty shard: the prefix is traced for its types, and never called
            self._add_rows(types, size)
        variables = jax.eval_shape(self.shard.gather, types.variables) if self.shard.is_sharded else types.variables
        leaves, tree = jax.tree.flatten((variables, *types.lists[1:]))
        first, num_wrt = split.num_consts, len(split.loss.types.wrt)

        def prefix(*flat: Any) -> list[Any]:
            *arrays, start = flat
            given = PrefixInputs(*jax.tree.unflatten(tree, arrays))
            given.inputs[first : first + num_wrt] = given.variables[:num_wrt] or given.inputs[first : first + num_wrt]
            return split.prefix(given, Examples(start, size, self.shard.runs, self.selection), self.wanted)

        traced, consts = tracing.trace(prefix, *leaves, jax.ShapeDtypeStruct((), jnp.int32))
        return dataclasses.replace(traced, bound=tuple(consts)) if consts else traced  # constants of the loss

    def _transformed(self, size: int, takes_cotangents: bool, accumulates: bool) -> tuple[tracing.Traced, list[int]]:
        """The prefix with its big values in blocks, and with activations that are computed again."""
        traced = self._as_it_is(size)
        accumulated: list[int] = []
        const_types = [avals.abstract(jax.typeof(const)) for const in traced.bound]
        if self.block_size is not None:
            takes = self.differentiated if takes_cotangents else None
            # The parameters are among the inputs once more, where they are not differentiated.
            first, number = len(self.variables) + self.split.num_consts, len(self.split.loss.types.wrt)
            copies = {position: first + position for position in range(number)} if accumulates else {}
            roles = self._roles(self.given.types)
            traced, accumulated = blocks.in_blocks(traced, const_types, roles, self.block_size, takes, copies)
        if self.remat is not None:
            traced = remat.rematerialised(traced, const_types, self.remat)
        return traced, accumulated

    def _roles(self, types: PrefixInputs) -> blocks.Roles:
        """The roles of the arguments of the traced prefix."""
        variables, inputs, known, selected, place = map(len, map(jax.tree.leaves, types.lists))
        batch = [position in self.split.batch_positions for position in range(inputs)]
        of_data = [*[False] * variables, *batch, *[True] * (known + selected), *[False] * (place + 1)]
        return blocks.Roles(tuple(of_data), tuple(position < variables for position in range(len(of_data))))

    def _add_rows(self, types: PrefixInputs, size: int) -> None:
        """Changes the types of an empty shard to those of one microbatch."""
        if types.selected and self.selection is not None:
            assert isinstance(self.split, Split)
            for index, rows in enumerate(self.split.selected_first(self.selection).values()):
                array = types.selected[index]
                types.selected[index] = array.update(shape=replaced(array.shape, rows.axis, rows.length(size)))
        elif self.selection is None:
            for position in self.split.batch_positions:
                array = types.inputs[position]
                types.inputs[position] = array.update(shape=(size, *array.shape[1:]))

    def out_avals(self, size: int) -> list[Any]:
        return self._as_it_is(size).out_avals

    def gradient_scale(self, size: int) -> float:
        # The weight of a microbatch is part of a loss that was read.
        return self.split.gradient_scale(size) if isinstance(self.split, DeclaredSplit) else 1

    def units(self, outputs: Sequence[Any], start: Any, size: int) -> Any:
        """The weight of a microbatch in the gradient noise: its examples, or a sum over them."""
        if isinstance(self.split, DeclaredSplit):
            return self.split.units(outputs, size)
        assert self.weights is not None
        return self.weights.of_microbatch(self.given, Examples(start, size, self.shard.runs))


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """The passes over the batch of one loss, on an executor."""

    split: AnySplit
    size: int  # of the microbatches
    accumulator_dtype: Any
    executor: Executor
    remat: str | float | None = None  # of a loss that was read
    block_size: int | None = None
    weights: MicrobatchWeights | None = None  # of the microbatches of a loss that was read, if the noise is wanted
    measures_noise: bool = False

    @functools.cached_property
    def _programs(self) -> dict[Any, Any]:
        return {}

    @functools.cached_property
    def outputs(self) -> list[Output]:
        """How the loop combines the values of the frontier."""
        if isinstance(self.split, DeclaredSplit):
            return self.split.outputs
        return [_output(state) for state in self.split.states]

    def _run(
        self,
        fun: Any,
        variables: list[Any],
        inputs: list[Any],
        known: list[Any] | None,
        seeds: list[Any],
        output_layouts: list[OutputLayout],
        selection: int | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Calls `fun(shard, given, seeds)`, which returns sums and rows, for every shard, and combines the results.

        `variables`, `inputs` (here with all examples) and `known` are those of `PrefixInputs`. `seeds` are the
        cotangents of the values that this selection of rows computes; there are none in a forward pass.
        `output_layouts` are those of the rows that `fun` returns.
        """
        batch, split = self.split.batch_positions, self.split
        executor = self.executor if selection is None else self.executor.for_rows(selection)
        selected: dict[int, Batched] = {}
        if isinstance(split, Split) and selection is not None and not executor.has_all_examples:
            selected = split.selected_first(selection)
        outputs = [self.outputs[position] for position in self._differentiated(selection)[: len(seeds)]]
        in_rows = [not output.is_carried for output in outputs]
        others = [*inputs[: batch.start], *inputs[batch.stop :]]
        invariant, tree = jax.tree.flatten(
            (variables, others, known, [seed for seed, has in zip(seeds, in_rows, strict=True) if not has])
        )
        # A device gets its selected rows. The arrays that they are selected from are replicated, in `known`.
        row_layouts = list(selected.values()) if selected else [Batched(0)] * len(batch)
        row_layouts += [output.rows for output in outputs if not output.is_carried]
        rows = list(inputs[batch.start : batch.stop])
        if selected:
            assert known is not None
            rows = [known[index] for index in selected]
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
            given = PrefixInputs(variables, inputs, known, own if selected else [], shard.traced_values)
            return fun(shard, given, own_seeds)

        num_variables = len(variables) if seeds else 0
        return executor(BatchPass(of_shard, invariant, rows, row_layouts, output_layouts, num_variables))

    def _differentiated(self, selection: int | None) -> list[int]:
        """The positions in the frontier of the differentiated values that a selection computes."""
        made = self.split.selections.get(selection, [])
        return [position for position in self.split.differentiated if position in made]

    def _microbatches(self, shard: Shard) -> Microbatches:
        size = min(self.size, shard.examples) or self.size
        return Microbatches(shard.examples, size, shard.runs)

    def rows_of_data(self, inputs: list[Any]) -> list[Any]:
        """The values that must be known before the first pass: rows computed from data alone."""
        wanted = self.split.gathered_first
        if not wanted:
            return []
        split = self.split
        assert isinstance(split, Split)
        outputs = [_output(split.reader.state(value)) for value in wanted]

        def gather(shard: Shard, given: PrefixInputs, _: list[Any]) -> tuple[list[Any], list[Any]]:
            program = Prefix(split, wanted, given, shard)
            return [], Accumulation(program, self._microbatches(shard), shard, outputs, None).forward()

        return self._run(gather, [], inputs, None, [], [OutputLayout(output.rows) for output in outputs])[1]

    def forward(self, variables: list[Any], inputs: list[Any], known: list[Any]) -> list[Any]:
        """The frontier, in a pass without gradients."""
        made: dict[int, Any] = {}
        for selection, positions in self.split.selections.items():
            made.update(zip(positions, self._forward(variables, inputs, known, selection), strict=True))
        return [made[position] for position in range(len(made))]

    def _forward(self, variables: list[Any], inputs: list[Any], known: list[Any], selection: int | None) -> list[Any]:
        """The values of the frontier that one selection computes."""

        def forward(shard: Shard, given: PrefixInputs, _: list[Any]) -> tuple[list[Any], list[Any]]:
            return self._sums_and_rows(self._accumulation(shard, given, selection).forward(), selection)

        found = self._run(forward, variables, inputs, known, [], self._output_layouts(selection), selection)
        return self._frontier(*found, selection)

    def backward(
        self, variables: list[Any], inputs: list[Any], known: list[Any], seeds: list[Any], *, keeps_frontier: bool
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradient with respect to the variables; the frontier, if kept; the squares, if there are weights."""
        made: dict[int, Any] = {}
        total: list[Any] | None = None
        noise: list[Any] = []
        assert not self.measures_noise or list(self.split.selections) == [None]  # noise is measured on examples only
        seed_at = dict(zip(self.split.differentiated, seeds, strict=True))
        for selection, positions in self.split.selections.items():
            own_seeds = [seed_at[position] for position in self._differentiated(selection)]
            if own_seeds:
                grads, frontier, noise = self._backward(variables, inputs, known, own_seeds, keeps_frontier, selection)
                total = grads if total is None else _plus(total, grads)
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
        num_own = len(variables) + (squared_norms.CARRIED if self.measures_noise else 0)

        def backward(shard: Shard, given: PrefixInputs, seeds: list[Any]) -> tuple[list[Any], list[Any]]:
            leaves, tree = jax.tree.flatten((*given.lists, seeds))
            static = shard.static

            def compute(*flat: Any, mutate: bool) -> list[Any]:
                *arrays, seeds = jax.tree.unflatten(tree, flat)
                given = PrefixInputs(*arrays)
                loop = self._accumulation(static.with_traced_values(given.place), given, selection)
                grads, frontier, noise = loop.backward(seeds, mutate=mutate, keeps_outputs=keeps_frontier)
                return [*grads, *noise, *frontier]

            leaves = list(map(_as_array, leaves))
            # The in-place primitive would hide effects. And it never has the gradient of a single microbatch, which a
            # fixed order and the squares need.
            if self.split.loss.traced.has_effects or shard.fixed_order or self.measures_noise:
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

    def _accumulation(self, shard: Shard, given: PrefixInputs, selection: int | None) -> Accumulation:
        """The loop over the microbatches of a shard, for the values that a selection computes."""
        split, positions = self.split, self.split.selections[selection]
        differentiated = [index for index, position in enumerate(positions) if position in split.differentiated]
        program: MicrobatchProgram
        if isinstance(split, DeclaredSplit) and self.block_size is None:
            program = DeclaredPrefix(split, given, shard)
        else:
            wanted = [split.frontier[position] for position in positions]
            how = (self.remat, self.block_size, self.weights, self._programs)
            program = Prefix(split, wanted, given, shard, selection, differentiated, *how)
        return Accumulation(
            program,
            self._microbatches(shard),
            shard,
            self._outputs(selection),
            self.accumulator_dtype,
            differentiated,
            self.measures_noise,
        )

    def _outputs(self, selection: int | None) -> list[Output]:
        return [self.outputs[position] for position in self.split.selections[selection]]

    def _output_layouts(self, selection: int | None) -> list[OutputLayout]:
        return [output.layout(self.size) for output in self._outputs(selection) if not output.is_carried]

    def _sums_and_rows(self, frontier: Sequence[Any], selection: int | None) -> tuple[list[Any], list[Any]]:
        pairs = list(zip(frontier, self._outputs(selection), strict=True))
        sums = [value for value, output in pairs if output.is_carried]
        return sums, [value for value, output in pairs if not output.is_carried]

    def _frontier(self, sums: Sequence[Any], rows: Sequence[Any], selection: int | None) -> list[Any]:
        of_sums, of_rows = iter(sums), iter(rows)
        frontier = []
        for position, output in zip(self.split.selections[selection], self._outputs(selection), strict=True):
            value = self.split.frontier[position]
            if not output.is_carried:
                frontier.append(next(of_rows))
            elif value.is_key:
                key = next(of_sums)  # of the last shard: summed as numbers
                is_key = avals.has_keys(key)
                frontier.append(key if is_key else jax.random.wrap_key_data(key, impl=avals.key_impl(value.dtype)))
            else:
                frontier.append(next(of_sums).astype(value.dtype))
        return frontier


def _output(state: State) -> Output:
    return Output(Kind.ROWS, state) if isinstance(state, Batched) else Output(Kind.SUM)


def value_and_grad(passes: Passes, consts: Any, arrays: Arrays) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """The value, the aux leaves, the gradient leaves and, with weights, the summary of the gradient noise.

    One pass over the batch is enough if the gradient of the head does not depend on the frontier (`Seeds.BEFORE`), or
    is a single factor that can be applied at the end (`Seeds.AFTER`). Otherwise there are two: the first computes the
    frontier without gradients, the second the gradient, from the same examples and random numbers.

    Memory: one gradient in the accumulator's dtype, the temporaries of one microbatch, and those of the head, with the
    rows of the frontier. The noise needs the gradient of one microbatch more.
    """
    call = _Call(passes, consts, arrays)
    found = call.differentiate()
    num_wrt = len(call.wrt)
    with jax.named_scope("anybatch_reduce"):
        own = call.with_hoisted(found.grads[:num_wrt], found.grads[num_wrt:])
        noise = found.noise
        if passes.measures_noise:
            noise = _noise(passes.split.loss.num_examples, noise, found.summed, own, found.factor)
        grads = [grad.astype(leaf.dtype) for grad, leaf in zip(own, call.wrt, strict=True)]
    return found.value, found.aux, grads, noise


class _Differentiated(NamedTuple):
    """The results of all passes over the batch."""

    value: Any
    aux: list[Any]
    grads: list[Any]  # with respect to the variables
    summed: list[Any]  # the part of `grads` that was summed over microbatches, before the factor
    noise: list[Any]
    factor: Any = None  # what the sum is multiplied by, if that was not known before the pass


class _Call:
    """The inputs of one call, and the values that are computed before the first pass."""

    def __init__(self, passes: Passes, consts: Any, arrays: Arrays) -> None:
        split = self.split = passes.split
        self.passes = passes
        self.inputs = [_as_array(leaf) for leaf in split.inputs(consts, arrays)]
        self._first = split.num_consts
        self.wrt = self.inputs[self._first : self._first + len(split.loss.types.wrt)]
        self._in_order = list(self.inputs)
        for position in split.batch_positions:
            self._in_order[position] = passes.executor.in_batch_order(self.inputs[position])
        self.known = self.run_once(split.compute_first, self._in_order, passes.rows_of_data(self.inputs))
        self._hoisted: list[Any] = []
        self._pull_hoisted: Any = None
        if split.hoisted:
            self._hoisted, self._pull_hoisted = jax.vjp(self._compute_hoisted, self.wrt)
        self.variables = [*self.wrt, *self._hoisted]

    def run_once(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of full arrays. On a mesh, XLA divides the work among the devices."""
        loss = self.split.loss
        if loss.on_mesh and paddings.may_mix_up(loss.traced.jaxpr):
            fun = paddings.kept_apart(fun)
        return self.passes.executor.run_once(fun, *arguments)

    def _with_wrt(self, inputs: Sequence[Any], wrt: Sequence[Any]) -> list[Any]:
        return [*inputs[: self._first], *wrt, *inputs[self._first + len(self.wrt) :]]

    def _compute_hoisted(self, wrt: list[Any]) -> list[Any]:
        def compute(inputs: list[Any], wrt: list[Any], known: list[Any]) -> list[Any]:
            return self.split.compute_hoisted(self._with_wrt(inputs, wrt), known)

        return self.run_once(compute, self._in_order, wrt, self.known)

    def with_hoisted(self, grads: list[Any], of_hoisted: list[Any]) -> list[Any]:
        """The gradient with respect to the parameters, with that through the hoisted values."""
        if self._pull_hoisted is None:
            return grads
        narrow = [grad.astype(leaf.dtype) for grad, leaf in zip(of_hoisted, self._hoisted, strict=True)]
        return _plus(grads, self._pull_hoisted(narrow)[0])

    def differentiate(self) -> _Differentiated:
        """Runs the passes over the batch and the head."""
        split, passes = self.split, self.passes
        given = (self.variables, self.inputs, self.known)
        if isinstance(split, DeclaredSplit) and split.seeds == Seeds.BEFORE:
            # As below, and less to trace: the gradient of this head is a constant.
            summed, frontier, noise = passes.backward(*given, split.constant_seeds, keeps_frontier=True)
            with jax.named_scope("anybatch_head"):
                value, *aux = self.run_once(split.head, [], self.known, [], frontier)
            return _Differentiated(value, aux, summed, summed, noise)
        if split.seeds == Seeds.NONE:
            frontier = passes.forward(*given) if split.frontier else []
            return _Differentiated(*self._head(frontier)[:3], summed=[], noise=[])
        if split.seeds == Seeds.BETWEEN:
            value, aux, grads, seeds = self._head(passes.forward(*given))
            summed, _, noise = passes.backward(*given, seeds, keeps_frontier=False)
            return _Differentiated(value, aux, _plus(summed, grads), summed, noise)
        placeholders = [_placeholder(value) for value in split.frontier]
        if split.seeds == Seeds.BEFORE:
            # The gradient of the head does not depend on the frontier, so placeholders will do.
            seeds = self._head(placeholders, num_outputs=1)[3]
            summed, frontier, noise = passes.backward(*given, seeds, keeps_frontier=True)
            value, aux, grads, _ = self._head(frontier)
            return _Differentiated(value, aux, _plus(summed, grads), summed, noise)
        ones = [jnp.ones_like(placeholders[position]) for position in split.differentiated]
        summed, frontier, noise = passes.backward(*given, ones, keeps_frontier=True)
        value, aux, grads, (factor,) = self._head(frontier)
        factor = factor.reshape(())
        scaled = [total * factor.astype(total.dtype) for total in summed]
        return _Differentiated(value, aux, _plus(scaled, grads), summed, noise, factor)

    def _head(
        self, frontier: Sequence[Any], num_outputs: int | None = None
    ) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """The loss, the aux leaves, and the gradients with respect to the variables and to the frontier."""
        split, num_wrt = self.split, len(self.wrt)

        def differentiated(inputs: Any, known: Any, variables: Any, frontier: Any) -> Any:
            def of_arrays(inputs: Any, known: Any, variables: Any, frontier: Any) -> list[Any]:
                parameters = self._with_wrt(inputs, variables[:num_wrt])
                return split.head(parameters, known, variables[num_wrt:], frontier, num_outputs)

            if self.passes.block_size is not None:
                of_arrays = self._in_blocks(of_arrays, inputs, known, variables, frontier)

            def head(variables: Sequence[Any], moving: Sequence[Any]) -> tuple[Any, list[Any]]:
                now = dict(zip(split.differentiated, moving, strict=True))
                values = [now.get(position, value) for position, value in enumerate(frontier)]
                value, *aux = of_arrays(inputs, known, variables, values)
                return value, aux

            moving = [frontier[position] for position in split.differentiated]
            value, pullback, aux = jax.vjp(head, variables, moving, has_aux=True)
            return value, aux, *pullback(jnp.ones_like(value))

        with jax.named_scope("anybatch_head"):
            return self.run_once(differentiated, self._in_order, self.known, self.variables, list(frontier))

    def _in_blocks(self, head: Any, *arrays: list[Any]) -> Any:
        """The head with its big values in blocks, as a function that is differentiated with a cotangent of 1."""
        if isinstance(self.split, DeclaredSplit):  # its head only divides
            return head
        assert self.passes.block_size is not None
        roles = blocks.head_roles(self.split, len(arrays[1]), len(arrays[2]))
        return blocks.blocked(head, arrays, roles, self.passes.block_size, self.passes.executor.over_rows)


def _noise(examples: int, sums: list[Any], summed: list[Any], grads: list[Any], factor: Any) -> list[Any]:
    """The summary of the gradient noise, in the scale of the gradient."""
    of_all = squared_norms.square(grads)
    if not sums:  # the gradient does not depend on the examples
        return [jnp.zeros_like(of_all), of_all, *(jnp.asarray(count, of_all.dtype) for count in (examples, examples))]
    of_data = squared_norms.square(summed)
    if factor is not None:
        scale = jnp.square(factor.astype(of_data.dtype))
        sums, of_data = [sums[0] * scale, *sums[1:]], of_data * scale
    return squared_norms.summary(sums, of_data, of_all)


def _plus(totals: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """The sums of two gradients, in the dtypes of the first."""
    return [total + grad.astype(total.dtype) for total, grad in zip(totals, grads, strict=True)]


def _as_array(leaf: Any) -> Any:
    """The leaf as an array, unless it is on the host, or a reference that the loss writes to."""
    return leaf if isinstance(leaf, HostRows) or avals.is_ref(leaf) else jnp.asarray(leaf)


def _placeholder(value: Any) -> Any:
    if value.is_key:
        data = jax.eval_shape(jax.random.key_data, value.type)
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=avals.key_impl(value.dtype))
    return avals.zeros_of(value.aval, value.dtype)
