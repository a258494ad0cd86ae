"""The one loop over the microbatches of a shard: it adds up sums and gradients, and joins rows.

`over_microbatches` is the loop itself. `Accumulation` runs a program for every microbatch and combines its outputs,
without gradients (`forward`) or with them (`backward`), in references where that is safe.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.call.microbatches import Microbatches
from anybatch.gradients import references, squared_norms
from anybatch.jaxprs import avals, tracing
from anybatch.mesh.executor import OutputLayout, Shard
from anybatch.reading.states import Batched, put_rows, take_rows

Step = Callable[[Any, Any, int], tuple[Any, Any]]


def over_microbatches(
    microbatches: Microbatches,
    step: Step,
    carry: Any,
    *,
    before_loop: Callable[[Any], Any] | None = None,
    scan: Callable[..., Any] = lax.scan,
) -> tuple[Any, Any, Any]:
    """Calls `step(carry, start, size)` for the smaller last microbatch, if there is one, and then for all others.

    The last microbatch comes first, so that the loop starts from its results. A step returns the new carry and what the
    microbatch emits; `start` is the index of its first example. `before_loop` changes the carry between the last
    microbatch and the loop, and `scan` runs the loop.

    Returns the carry, what the complete microbatches emitted, stacked, and what the last one emitted. The latter two
    are None if there are no such microbatches.
    """
    start, last = jnp.zeros((), jnp.int32), None
    if microbatches.remainder:
        with jax.named_scope("anybatch_last_microbatch"):
            carry, last = step(carry, microbatches.last_start, microbatches.remainder)
        if microbatches.complete == 1:
            # XLA unrolls a loop of one iteration, and may then hold the activations of both microbatches at once.
            # The barrier makes that iteration wait for these results.
            start, carry = _barrier(start, carry)
    if before_loop is not None:
        carry = before_loop(carry)
    if not microbatches.complete:
        return carry, None, last

    def turn(state: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], Any]:
        start, carry = state
        with jax.named_scope("anybatch_microbatch"):
            carry, emitted = step(carry, start, microbatches.size)
        return (start + microbatches.step, carry), emitted

    (_, carry), stacked = scan(turn, (start, carry), length=microbatches.complete)
    return carry, stacked, last


def _barrier(start: Any, carry: Any) -> tuple[Any, Any]:
    leaves, tree = jax.tree.flatten(carry)
    # Not for arrays that vary over axes of the user's `shard_map`: `start` would vary over them too.
    waited = [
        index
        for index, leaf in enumerate(leaves)
        if not avals.has_keys(leaf) and not avals.varying_axes(jax.typeof(leaf))
    ]
    start, arrays = lax.optimization_barrier((start, [leaves[index] for index in waited]))
    for index, array in zip(waited, arrays, strict=True):
        leaves[index] = array
    return start, jax.tree.unflatten(tree, leaves)


FIRST_AXIS = Batched(0)


class Kind(enum.Enum):
    """How an output of the microbatches is combined."""

    SUM = "sum"  # added up, in the accumulator's dtype
    LAST = "last"  # that of the last microbatch
    ROWS = "rows"  # rows of the examples, in the order of the batch
    STACK = "stack"  # one row for each microbatch


@dataclasses.dataclass(frozen=True)
class Output:
    """How one output of the microbatches is combined, and where it has its rows."""

    kind: Kind
    rows: Batched = FIRST_AXIS

    @property
    def is_carried(self) -> bool:
        """True if the loop carries one value, which is then summed over shards. Others are emitted and joined."""
        return self.kind in (Kind.SUM, Kind.LAST)

    def layout(self, size: int) -> OutputLayout:
        """The layout of its rows, for microbatches of this size."""
        if self.kind is Kind.STACK:
            return OutputLayout(self.rows, lambda examples: Microbatches(examples, size).number)
        return OutputLayout(self.rows)

    def join(self, stacked: Any, last: Any, microbatches: Microbatches) -> Any:
        """The rows of the complete microbatches and of the smaller last one, in the order of the batch."""
        if self.kind is Kind.STACK:
            return put_rows(
                None if stacked is None else stacked[:, None], None if last is None else last[None], self.rows, 1, 1
            )
        return put_rows(stacked, last, self.rows, microbatches.size, microbatches.remainder, microbatches.runs)


class MicrobatchProgram(Protocol):
    """The part of a loss that runs per microbatch."""

    @property
    def variables(self) -> list[Any]:
        """The arrays that it is differentiated with respect to."""

    def traced(self, size: int, *, differentiated: bool = False, accumulates: bool = False) -> tracing.Traced:
        """The program for microbatches of `size` examples. Its first arguments are the variables."""

    def __call__(
        self,
        variables: list[Any],
        start: Any,
        size: int,
        cotangents: Sequence[Any] | None = None,
        totals: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Its outputs for `size` examples from `start` on. With cotangents, it is differentiated with just these.

        With `totals`, the accumulators of the variables in `accumulated`, these follow the outputs, with a part of the
        gradient added. The other part is the program's derivative.
        """

    def accumulated(self, size: int) -> list[int]:
        """The variables whose gradient, or a part of it, the program itself can add to accumulators."""

    def out_avals(self, size: int) -> list[Any]:
        """The types of its outputs for `size` examples."""

    def gradient_scale(self, size: int) -> float:
        """The factor that the gradient of a microbatch is multiplied by."""

    def units(self, outputs: Sequence[Any], start: Any, size: int) -> Any:
        """The weight of a microbatch in the gradient noise, or None if the noise is not wanted."""


@dataclasses.dataclass(frozen=True, eq=False)
class Accumulation:
    """A program and the microbatches of one shard to run it for."""

    program: MicrobatchProgram
    microbatches: Microbatches
    shard: Shard
    outputs: Sequence[Output]
    accumulator_dtype: Any
    differentiated: Sequence[int] = ()  # which outputs have a cotangent
    measures_noise: bool = False  # whether to add up the squares of the gradients of the microbatches

    def forward(self) -> list[Any]:
        def step(sums: list[Any], start: Any, size: int) -> tuple[list[Any], list[Any]]:
            # By jax.vjp, as in a backward pass: a custom_vjp function may compute its forward pass differently there.
            variables = self.shard.gather(self.program.variables)
            out, _ = jax.vjp(lambda variables: self.program(variables, start, size), variables)
            return self._add(sums, out, size), self._emitted(out)

        return self._finish(*over_microbatches(self.microbatches, step, self._zeros()))

    def backward(
        self, seeds: Sequence[Any], *, mutate: bool, keeps_outputs: bool
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradient with respect to the variables, the outputs if they are kept, and the sums of `squared_norms`.

        `seeds` are the cotangents of the differentiated outputs; of rows, those of the shard. `mutate` says whether to
        accumulate the gradient in references.
        """
        variables, wide = self.program.variables, self._wide_dtypes
        # A reference gets the gradient as it is, so one that must be scaled is added by value.
        mutate = mutate and self.program.gradient_scale(self.microbatches.size) == 1
        written_in_place = self._written_in_place(seeds) if mutate else []
        accumulators: list[Any] | None = None

        def step(carry: Any, start: Any, size: int) -> tuple[Any, list[Any]]:
            sums, grads, noise = carry
            if accumulators is not None:
                own_parts = [accumulators[position] for position in self.program.accumulated(size)]
                totals = [part[...] for part in own_parts]
                out, pullback, cotangents, totals = self._differentiate(seeds, start, size, written_in_place, totals)
                for part, total in zip(own_parts, totals, strict=True):
                    part[...] = total
                pullback.with_refs(accumulators)(cotangents)
            else:
                out, pullback, cotangents, _ = self._differentiate(seeds, start, size)
                own = self.shard.unfused(pullback(cotangents)[0])
                scale = self.program.gradient_scale(size)
                own = own if scale == 1 else [grad * scale for grad in own]
                if self.measures_noise:
                    noise = squared_norms.add(noise, own, self.program.units(out, start, size))
                grads = own if grads is None else jax.tree.map(jnp.add, grads, own)
            kept = (self._add(sums, out, size), self._emitted(out)) if keeps_outputs else ([], [])
            return (kept[0], grads, noise), kept[1]

        def open_accumulators(carry: Any) -> Any:
            nonlocal accumulators
            sums, grads, noise = carry
            if grads is None:
                grads = [jnp.zeros_like(leaf, dtype) for leaf, dtype in zip(variables, wide, strict=True)]
            if mutate:
                accumulators, grads = [jax.new_ref(leaf) for leaf in grads], []
            return sums, grads, noise

        noise = squared_norms.zeros(wide) if self.measures_noise else []
        carry = (self._zeros() if keeps_outputs else [], None, noise)
        (sums, grads, noise), *emitted = over_microbatches(
            self.microbatches, step, carry, before_loop=open_accumulators
        )
        if accumulators is not None:
            grads = [jax.freeze(accumulator) for accumulator in accumulators]
        return grads, self._finish(sums, *emitted) if keeps_outputs else [], noise

    @property
    def _wide_dtypes(self) -> list[Any]:
        return [avals.wide_dtype(leaf.dtype, self.accumulator_dtype) for leaf in self.program.variables]

    def _differentiate(
        self,
        seeds: Sequence[Any],
        start: Any,
        size: int,
        in_place: list[bool] | None = None,
        totals: Sequence[Any] | None = None,
    ) -> tuple[list[Any], Any, list[Any], list[Any]]:
        """The outputs of a microbatch, its pullback, the cotangents for the pullback, and the new totals."""
        variables, microbatches = self.program.variables, self.microbatches
        cotangents = []
        for position, seed in zip(self.differentiated, seeds, strict=True):
            output = self.outputs[position]
            if not output.is_carried:
                seed = take_rows(seed, output.rows, microbatches.examples, start, size, microbatches.runs)
            cotangents.append(seed)

        def of_wide(wide_variables: list[Any]) -> tuple[list[Any], list[Any]]:
            gathered = self.shard.gather(wide_variables)  # still wide, so that devices sum wide gradients too
            narrow = [leaf.astype(like.dtype) for leaf, like in zip(gathered, variables, strict=True)]
            out = self.program(narrow, start, size, cotangents, totals)
            return [out[position] for position in self.differentiated], out

        # Differentiating with respect to wide arrays makes autodiff itself sum in the wide dtype.
        point = [leaf.astype(dtype) for leaf, dtype in zip(variables, self._wide_dtypes, strict=True)]
        fun = of_wide if in_place is None else references.shielded(of_wide, in_place)
        _, pullback, out = jax.vjp(fun, point, has_aux=True)
        return out[: len(self.outputs)], pullback, cotangents, out[len(self.outputs) :]

    def _written_in_place(self, seeds: Sequence[Any]) -> list[bool]:
        """Which gradients the backward pass adds to their accumulators in place."""
        size, variables, wide = self.microbatches.size, self.program.variables, self._wide_dtypes
        traced = self.program.traced(size, differentiated=True, accumulates=True)
        is_direct = self.shard.in_place([leaf.dtype == dtype for leaf, dtype in zip(variables, wide, strict=True)])
        in_place = references.written_in_place(traced, is_direct)
        if not self.microbatches.complete or not references.reach_nested_functions(traced, in_place):
            return in_place

        def add(totals: Sequence[Any], in_place: list[bool], *, mutate: bool) -> list[Any]:
            # What the program adds to accumulators by itself is the same in both.
            parts = [jnp.zeros(types[position].shape, types[position].dtype) for position in own_parts]
            _, pullback, cotangents, _ = self._differentiate(seeds, 0, size, in_place if mutate else None, parts)
            return references.add(pullback, cotangents, totals, mutate=mutate)

        own_parts = self.program.accumulated(size)
        types = [jax.typeof(leaf).update(dtype=dtype) for leaf, dtype in zip(variables, wide, strict=True)]
        return references.with_same_terms(add, types, in_place)

    # The outputs: sums are carried through the loop, and every microbatch emits its rows.

    def _zeros(self) -> list[Any]:
        types = zip(self.outputs, self.program.out_avals(self.microbatches.size), strict=True)
        return [
            avals.zeros_of(
                aval, aval.dtype if output.kind is Kind.LAST else avals.wide_dtype(aval.dtype, self.accumulator_dtype)
            )
            for output, aval in types
            if output.is_carried
        ]

    def _add(self, sums: Sequence[Any], out: Sequence[Any], size: int) -> list[Any]:
        # The smaller last microbatch is computed first.
        is_last = not self.microbatches.remainder or size == self.microbatches.remainder
        carried = [(output, new) for output, new in zip(self.outputs, out, strict=True) if output.is_carried]
        added = []
        for (output, new), old in zip(carried, sums, strict=True):
            if output.kind is Kind.LAST:
                added.append(new if is_last else old)
            else:
                added.append(old + new.astype(old.dtype))
        return added

    def _emitted(self, out: Sequence[Any]) -> list[Any]:
        return [value for value, output in zip(out, self.outputs, strict=True) if not output.is_carried]

    def _finish(self, sums: Sequence[Any], stacked: Any, last: Any) -> list[Any]:
        if stacked is None and last is None:  # no examples
            types = self._emitted(self.program.out_avals(self.microbatches.size))
            stacked = [jnp.zeros((0, *aval.shape), aval.dtype) for aval in types]
        carried = iter(sums)
        number = sum(not output.is_carried for output in self.outputs)
        emitted = zip(stacked or [None] * number, last or [None] * number, strict=True)
        results = []
        for output in self.outputs:
            if not output.is_carried:
                results.append(output.join(*next(emitted), self.microbatches))
            elif output.kind is Kind.LAST:
                results.append(self._of_last_shard(next(carried)))
            else:
                results.append(next(carried))
        return results

    def _of_last_shard(self, newest: Any) -> Any:
        """The value as a term of a sum over shards: zeros, unless the last example of the batch is in this shard."""
        if self.shard.is_last is True:
            return newest
        numbers = jax.random.key_data(newest) if avals.has_keys(newest) else newest
        return jnp.where(self.shard.is_last, numbers, jnp.zeros_like(numbers))
