"""A loss with a declared reduction, split without reading it: the loss runs per microbatch, and its head is trivial.

`DeclaredSplit` has what `Split` has for a loss that was read. Its frontier are the outputs of the microbatches: the
total, the weight if there is one, and the aux leaves. Its head divides the total.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.call.arguments import Arrays
from anybatch.call.aux_outputs import Combination
from anybatch.call.loss import TracedLoss
from anybatch.call.microbatches import slice_examples
from anybatch.gradients.accumulate import Kind, Output
from anybatch.jaxprs import avals, tracing
from anybatch.jaxprs.graph import Value
from anybatch.mesh.executor import Shard
from anybatch.reading.evaluation import Examples
from anybatch.reading.split import PrefixInputs, Seeds
from anybatch.reading.states import Batched


def ratio(total: jax.Array, weight: jax.Array) -> jax.Array:
    """`total / weight` in the dtype of the total. A weight of 0 divides by 1, and so gives 0 rather than NaN."""
    wide = avals.wide_dtype(total.dtype, jnp.float32)  # a weight of 65,520 overflows float16
    weight = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    return (total.astype(wide) / weight.astype(wide)).astype(total.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class DeclaredSplit:
    """The loss, traced for the sizes of the microbatches, and how to combine their outputs."""

    size: int  # of a complete microbatch
    examples: int  # of the full batch
    losses: Mapping[int, TracedLoss]  # by number of examples: also those of the smaller last microbatches
    reduction: str  # "sum", "mean" or "weighted"
    aux: Sequence[Combination]
    accumulator_dtype: Any

    # Nothing is computed before the first microbatch, and every loop is over the examples.
    hoisted = known_first = gathered_first = ()

    @property
    def loss(self) -> TracedLoss:
        return self.losses[self.size]

    @property
    def num_consts(self) -> int:
        return sum(len(loss.const_types) for loss in self.losses.values())

    @property
    def batch_positions(self) -> range:
        first = self.num_consts + len(self.loss.types.wrt)
        return range(first, first + len(self.loss.types.batch))

    @property
    def combinations(self) -> list[Combination]:
        head = Combination("mean" if self.reduction == "mean" else "sum")
        return [*[head] * self.loss.num_heads, *self.aux]

    @functools.cached_property
    def outputs(self) -> list[Output]:
        """How the loop combines the outputs of the prefix. A mean is a sum of weighted values, divided by the head."""
        kinds = {"mean": Kind.SUM, "sum": Kind.SUM, "last": Kind.LAST, "stack": Kind.STACK, "rows": Kind.ROWS}
        return [Output(kinds[each.kind], Batched(each.axis)) for each in self.combinations]

    @functools.cached_property
    def frontier(self) -> list[Value]:
        """The outputs of the microbatches. Sums are wide, so that the head divides them before they are rounded."""
        types = enumerate(self.loss.out_avals)
        return [Value(aval.update(dtype=self._wide(position, aval.dtype))) for position, aval in types]

    @property
    def selections(self) -> dict[int | None, list[int]]:
        return {None: list(range(len(self.outputs)))}

    @functools.cached_property
    def differentiated(self) -> list[int]:
        """The total, and the weight if its gradient is needed."""
        return [0, 1] if self.seeds is Seeds.BETWEEN and self.loss.weight_is_inexact else [0]

    @functools.cached_property
    def seeds(self) -> Seeds:
        """When the cotangent of the total is known.

        That of a sum or mean is a constant. As a cotangent, the share of a microbatch in a mean costs nothing, and the
        accumulators hold the result when the loop ends; a division after the loop made XLA hold 0.75 GiB more, of
        7 GiB. But a float16 or bfloat16 loss would round its share, so that the sum is divided at the end.

        A weighted loss is divided at the end too. That is not possible if the weight has a gradient; if the loss uses
        float16, in which an undivided gradient can overflow; or if, inside the user's `shard_map`, JAX sums over the
        devices gradients that have different weights. Then a pass without gradients computes the total weight first.
        """
        if self.reduction == "sum":
            return Seeds.BEFORE
        if self.reduction == "mean":
            return Seeds.AFTER if self._is_narrow else Seeds.BEFORE
        weight, wrt = self.loss.out_avals[1], self.loss.types.wrt
        uneven = any(avals.varying_axes(weight) - avals.varying_axes(jax.typeof(leaf)) for leaf in wrt)
        needs_weight = uneven or self.loss.traced.uses_dtype(jnp.float16) or self.loss.weight_has_gradient
        return Seeds.BETWEEN if needs_weight else Seeds.AFTER

    @property
    def constant_seeds(self) -> list[jax.Array]:
        total = self.frontier[0]
        share = 1 if self.reduction == "sum" else self.size / self.examples
        return [avals.zeros_of(total.aval, total.dtype) + jnp.asarray(share, total.dtype)]

    @property
    def _is_narrow(self) -> bool:
        return jnp.finfo(self.loss.out_avals[0].dtype).bits < 32

    def gradient_scale(self, size: int) -> float:
        """The share of a microbatch in a mean, if it is not part of the total: rounded to bfloat16, it would be off."""
        return size / self.size if self.reduction == "mean" and self._is_narrow else 1

    def units(self, outputs: Sequence[Any], size: int) -> Any:
        """The weight of a microbatch in the gradient noise: its own, or the number of its examples."""
        return outputs[1] if self.loss.num_heads == 2 else size

    # Evaluation. The inputs are flat: the arrays that the losses close over, then the arguments by role.

    def inputs(self, consts: Mapping[int, Sequence[Any]], arrays: Arrays) -> list[Any]:
        return [*(const for size in self.losses for const in consts[size]), *jax.tree.leaves(arrays)]

    def compute_first(self, inputs: Sequence[Any], gathered: Sequence[Any]) -> list[Any]:
        return []

    compute_hoisted = compute_first

    def prefix(self, given: PrefixInputs, examples: Examples, wanted: Sequence[Value]) -> list[Any]:
        loss, sizes = self.losses[examples.size], list(self.losses)
        first = sum(len(self.losses[size].const_types) for size in sizes[: sizes.index(examples.size)])
        consts = given.inputs[first : first + len(loss.const_types)]
        arrays: Arrays = jax.tree.unflatten(jax.tree.structure(loss.types), given.inputs[self.num_consts :])
        arrays = arrays._replace(wrt=list(given.variables))
        index = examples.start if given.origin is None else given.origin + examples.start
        keys = [jax.random.fold_in(key, index) for key in arrays.keys]
        batch = slice_examples(arrays.batch, examples.start, examples.size, examples.runs)
        out = loss(consts, arrays._replace(batch=batch, keys=keys))
        terms = []
        for position, (value, how, output) in enumerate(zip(out, self.combinations, self.outputs, strict=True)):
            term = value.astype(self._wide(position, value.dtype)) if output.kind is Kind.SUM else value
            if how.kind == "mean" and self.loss.num_heads == 2:
                weight = out[1].astype(term.dtype)
                # The mean of a microbatch of weight 0 may be 0/0, and 0 * NaN is NaN.
                term = jnp.where(weight == 0, jnp.zeros_like(term), term * weight)
            elif how.kind == "mean" and examples.size != self.size:
                share = examples.size / self.size
                if position == 0 and self._is_narrow:  # `gradient_scale` is the share of the gradient
                    term = term + lax.stop_gradient(term * (share - 1))
                else:
                    term = term * share
            terms.append(term)
        return terms

    def head(
        self,
        inputs: Sequence[Any],
        known: Sequence[Any] | None,
        hoisted: Sequence[Any],
        frontier: Sequence[Any],
        num_outputs: int | None = None,
    ) -> list[Any]:
        """The loss and the aux leaves of the full batch, in the dtypes that the loss returns."""
        combined = []
        for total, how, aval in zip(frontier, self.combinations, self.loss.out_avals, strict=True):
            if how.kind == "mean":
                is_weighted = self.loss.num_heads == 2
                total = ratio(total, frontier[1]) if is_weighted else total / (self.examples / self.size)
            combined.append(total.astype(aval.dtype) if how.kind in ("mean", "sum") else total)
        if self.loss.num_heads == 2:
            dtype = self.loss.value_dtype
            combined[:2] = [ratio(frontier[0].astype(avals.wide_dtype(dtype, jnp.float32)), frontier[1]).astype(dtype)]
        return combined[:num_outputs]

    def _wide(self, position: int, dtype: Any) -> Any:
        """The dtype of an output in the frontier. The total and the weight are wide whatever the accumulator is."""
        if self.outputs[position].kind is not Kind.SUM:
            return dtype
        wide = avals.wide_dtype(dtype, self.accumulator_dtype)
        return avals.wide_dtype(wide, jnp.float32) if position < self.loss.num_heads else wide


@dataclasses.dataclass(frozen=True, eq=False)
class DeclaredPrefix:
    """The loss for the microbatches of one shard. It is a `MicrobatchProgram`."""

    split: DeclaredSplit
    given: PrefixInputs
    shard: Shard

    @property
    def variables(self) -> list[Any]:
        return self.given.variables

    def __call__(
        self,
        variables: list[Any],
        start: Any,
        size: int,
        cotangents: Sequence[Any] | None = None,
        totals: Sequence[Any] | None = None,
    ) -> list[Any]:
        given = dataclasses.replace(self.given, variables=variables)
        return self.split.prefix(given, Examples(start, size, self.shard.runs), self.split.frontier)

    def accumulated(self, size: int) -> list[int]:
        return []

    def traced(self, size: int, *, differentiated: bool = False, accumulates: bool = False) -> tracing.Traced:
        return self.split.losses[size].traced

    def out_avals(self, size: int) -> list[Any]:
        return [value.aval for value in self.split.frontier]

    def gradient_scale(self, size: int) -> float:
        return self.split.gradient_scale(size)

    def units(self, outputs: Sequence[Any], start: Any, size: int) -> Any:
        return self.split.units(outputs, size)
