"""A loss that was read: its prefix microbatch by microbatch, in one pass or two, and its head once."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anybatch import compat
from anybatch.arguments import Arrays
from anybatch.batch import Cut
from anybatch.reading.split import Seeds, Split
from anybatch.reading.states import Rows, State
from anybatch.reading.units import Units
from anybatch.routes import in_place, squares
from anybatch.routes.parts import Give, Part, Place, Work
from anybatch.routes.passes import Given, Prefix, gather_rows


@dataclasses.dataclass(frozen=True, eq=False)
class Passes:
    """The passes over the microbatches of one loss, at some place."""

    split: Split
    size: int  # of the microbatches
    accumulator_dtype: Any
    place: Place
    remat: str | None = None
    units: Units | None = None  # what microbatches count, if the noise in the gradient is wanted

    def _run(
        self,
        fun: Any,
        variables: list[Any],
        inputs: list[Any],
        known: list[Any],
        seeds: list[Any],
        gives: list[Give],
        selection: int | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Calls `fun(part, given, seeds)` wherever there are examples; `seeds` are those of the selection."""
        batch, split = self.split.batch_positions, self.split
        place = self.place if selection is None else self.place.of_rows(selection)
        selected = {} if selection is None or place.has_all_examples else split.selected_first(selection)
        states = [split.states[position] for position in self._differentiated(selection)[: len(seeds)]]
        in_rows = [isinstance(state, Rows) for state in states]
        others = [*inputs[: batch.start], *inputs[batch.stop :]]
        whole, tree = jax.tree.flatten(
            (variables, others, known, [seed for seed, has in zip(seeds, in_rows, strict=True) if not has])
        )
        # The rows of a selection are those of the devices; what they are selected from is known as a whole.
        takes = list(selected.values()) if selected else [Rows(0)] * len(batch)
        takes += [state for state in states if isinstance(state, Rows)]
        rows = [known[index] for index in selected] if selected else list(inputs[batch.start : batch.stop])
        num_rows = len(rows)
        rows += [seed for seed, has in zip(seeds, in_rows, strict=True) if has]

        def of_part(part: Part, whole: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            variables, others, known, sums = jax.tree.unflatten(tree, whole)
            own = rows[:num_rows]
            # A loop over selected rows reads nothing else, so that the examples are placeholders.
            examples = [jnp.zeros(())] * len(batch) if selected else own
            inputs = [*others[: batch.start], *examples, *others[batch.start :]]
            of_sums, of_rows = iter(sums), iter(rows[num_rows:])
            mine = [next(of_rows if has else of_sums) for has in in_rows]
            return fun(part, Given(variables, inputs, known, own if selected else [], part.place[:1]), mine)

        return place(Work(of_part, whole, rows, takes, gives, len(variables) if seeds else 0))

    def _differentiated(self, selection: int | None) -> list[int]:
        """The positions in the frontier of what a selection makes and has a gradient."""
        made = self.split.selections.get(selection, [])
        return [position for position in self.split.differentiated if position in made]

    def _cut(self, part: Part) -> Cut:
        return Cut(part.examples, max(1, min(self.size, part.examples)), part.runs)

    def rows_of_data(self, inputs: list[Any]) -> list[Any]:
        """The rows that are computed before anything else."""
        wanted = self.split.gathered_first
        if not wanted:
            return []

        def gather(part: Part, given: Given, _: list[Any]) -> tuple[list[Any], list[Any]]:
            return [], gather_rows(self.split, self._cut(part), given)

        gives = [Give(state) for state in map(self.split.reader.state, wanted) if isinstance(state, Rows)]
        return self._run(gather, [], inputs, [], [], gives)[1]

    def forward(self, variables: list[Any], inputs: list[Any], known: list[Any]) -> list[Any]:
        """The frontier."""
        made: dict[int, Any] = {}
        for selection, positions in self.split.selections.items():
            made.update(zip(positions, self._forward(variables, inputs, known, selection), strict=True))
        return [made[position] for position in range(len(made))]

    def _forward(self, variables: list[Any], inputs: list[Any], known: list[Any], selection: int | None) -> list[Any]:
        """What one selection makes of the frontier."""

        def forward(part: Part, given: Given, _: list[Any]) -> tuple[list[Any], list[Any]]:
            return self._sums_and_rows(self._prefix(part, given, selection).forward(), selection)

        found = self._run(forward, variables, inputs, known, [], self._gives(selection), selection)
        return self._frontier(*found, selection)

    def backward(
        self, variables: list[Any], inputs: list[Any], known: list[Any], seeds: list[Any], *, keeps_frontier: bool
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradient with respect to the variables, and if they are wanted the frontier and the sums of squares."""
        made: dict[int, Any] = {}
        total: list[Any] | None = None
        noise: list[Any] = []
        assert self.units is None or list(self.split.selections) == [None]  # noise is told by the batch itself
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
        num_own = len(variables) + (0 if self.units is None else squares.CARRIED)

        def backward(part: Part, given: Given, seeds: list[Any]) -> tuple[list[Any], list[Any]]:
            arrays = (given.variables, given.inputs, given.known, given.selected, given.place, seeds)
            leaves, tree = jax.tree.flatten(arrays)
            anywhere = part.anywhere

            def compute(*flat: Any, mutate: bool) -> list[Any]:
                *arrays, seeds = jax.tree.unflatten(tree, flat)
                prefix = self._prefix(anywhere, Given(*arrays), selection)
                grads, frontier, noise = prefix.backward(seeds, mutate=mutate, keeps_frontier=keeps_frontier)
                return [*grads, *noise, *frontier]

            leaves = [jnp.asarray(leaf) for leaf in leaves]
            # A primitive of our own would hide effects; and in place there is no gradient of a microbatch by itself.
            if self.split.loss.traced.has_effects or part.fixed_order or self.units is not None:
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

    def _prefix(self, part: Part, given: Given, selection: int | None) -> Prefix:
        cut, dtype = self._cut(part), self.accumulator_dtype
        return Prefix(self.split, cut, dtype, given, part, self.remat, self.units, selection)

    def _states(self, selection: int | None) -> list[State]:
        return [self.split.states[position] for position in self.split.selections[selection]]

    def _gives(self, selection: int | None) -> list[Give]:
        return [Give(state) for state in self._states(selection) if isinstance(state, Rows)]

    def _sums_and_rows(self, frontier: Sequence[Any], selection: int | None) -> tuple[list[Any], list[Any]]:
        with_rows = [isinstance(state, Rows) for state in self._states(selection)]
        sums = [value for value, has in zip(frontier, with_rows, strict=True) if not has]
        return sums, [value for value, has in zip(frontier, with_rows, strict=True) if has]

    def _frontier(self, sums: Sequence[Any], rows: Sequence[Any], selection: int | None) -> list[Any]:
        of_sums, of_rows = iter(sums), iter(rows)
        values = [self.split.frontier[position] for position in self.split.selections[selection]]
        return [
            next(of_rows) if isinstance(state, Rows) else next(of_sums).astype(value.dtype)
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
        if passes.units is not None:
            noise = _noise(split.loss.num_examples, noise, summed, own, factor)
        return value, aux, [grad.astype(leaf.dtype) for grad, leaf in zip(own, wrt, strict=True)], noise


def _noise(examples: int, sums: list[Any], summed: list[Any], grads: list[Any], factor: Any) -> list[Any]:
    """The summary of the squares, in the scale of the gradient."""
    of_all = squares.square(grads)
    if not sums:  # the gradient does not depend on the examples
        return [jnp.zeros_like(of_all), of_all, *(jnp.asarray(count, of_all.dtype) for count in (examples, examples))]
    of_data = squares.square(summed)
    if factor is not None:
        scale = jnp.square(factor.astype(of_data.dtype))
        sums, of_data = squares.scaled(sums, scale), of_data * scale
    return squares.summary(sums, of_data, of_all)


def _plus(total: jax.Array, grad: jax.Array) -> jax.Array:
    return total + grad.astype(total.dtype)


def _placeholder(value: Any) -> Any:
    if value.is_key:
        data = jax.eval_shape(jax.random.key_data, value.type)
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=compat.key_impl(value.dtype))
    return compat.zeros_of(value.aval, value.dtype)
