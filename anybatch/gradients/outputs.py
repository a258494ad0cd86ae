"""Combines the outputs of the microbatches: the loss, its weight, and the aux leaves, for a declared reduction.

An output is carried through the loop as a running sum ("sum", "mean") or as its newest value ("last"), or every
microbatch emits it ("rows", "stack").
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call.aux_outputs import Combination
from anybatch.call.loss import TracedLoss
from anybatch.call.microbatches import Microbatches, join_rows
from anybatch.jaxprs import avals
from anybatch.mesh.executor import OutputLayout, Shard
from anybatch.reading.states import Batched

CARRIED = ("sum", "mean", "last")


def wide_dtype(dtype: Any, accumulator_dtype: Any) -> Any:
    """The dtype in which values of `dtype` are summed: `accumulator_dtype`, unless that would be narrower."""
    if accumulator_dtype is None or not jax.dtypes.issubdtype(dtype, jnp.inexact):
        return dtype
    if jnp.finfo(dtype).bits >= jnp.finfo(accumulator_dtype).bits:
        return dtype
    is_complex = jax.dtypes.issubdtype(dtype, jnp.complexfloating)
    return jnp.complex128 if is_complex else accumulator_dtype


def ratio(total: jax.Array, weight: jax.Array) -> jax.Array:
    """`total / weight` in the dtype of the total. A weight of 0 divides by 1, and so gives 0 rather than NaN."""
    wide = wide_dtype(total.dtype, jnp.float32)  # a weight of 65,520 overflows float16
    weight = jnp.where(weight == 0, jnp.ones_like(weight), weight)
    return (total.astype(wide) / weight.astype(wide)).astype(total.dtype)


@dataclasses.dataclass(frozen=True)
class Outputs:
    """Combines the flat outputs of a loss: the loss itself or (total, weight), then the aux leaves."""

    loss: TracedLoss
    size: int  # of a complete microbatch
    examples: int  # of the full batch
    combinations: Sequence[Combination]
    accumulator_dtype: Any

    @property
    def weighted(self) -> bool:
        """True if the loss returns (total, weight)."""
        return self.loss.num_heads == 2

    def start(self, microbatches: Microbatches, last: Sequence[Any] | None) -> list[Any]:
        """The carry before the loop: zeros, or the outputs of the smaller last microbatch."""
        kinds = self._select([how.kind for how in self.combinations], CARRIED)
        zeros = [
            avals.zeros_of(aval, aval.dtype if kind == "last" else self._wide(aval.dtype))
            for kind, aval in zip(kinds, self._select(self.loss.out_avals, CARRIED), strict=True)
        ]
        return zeros if last is None else self._add(zeros, last, microbatches.remainder / self.size)

    def add(self, carry: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """The carry after one more complete microbatch."""
        return self._add(carry, outputs, 1)

    def emitted(self, outputs: Sequence[Any]) -> list[Any]:
        """The outputs that every microbatch emits."""
        return self._select(outputs, ("rows", "stack"))

    def of_shard(
        self, carry: Sequence[Any], stacked: Sequence[Any], last: Sequence[Any] | None, shard: Shard
    ) -> tuple[list[Any], list[Any]]:
        """The sums and rows of one shard: the executor adds the former over shards, and concatenates the latter.

        Args:
          carry: the carry after the loop of this shard.
          stacked: the outputs that its microbatches emitted.
          last: the outputs of its smaller last microbatch, if it has one.
          shard: the shard.
        """
        carried, emitted = iter(carry), iter(stacked)
        sums, rows = [], []
        for position, how in enumerate(self.combinations):
            of_last = None if last is None else last[position]
            if how.kind == "rows":
                rows.append(join_rows(next(emitted), of_last, how.axis, shard.runs))
            elif how.kind == "stack":
                rows.append(join_rows(next(emitted)[:, None], None if of_last is None else of_last[None], 0))
            elif how.kind == "last":
                newest = next(carried)
                newest = newest if of_last is None else of_last
                if shard.is_last is not True:
                    numbers = jax.random.key_data(newest) if avals.has_keys(newest) else newest
                    newest = jnp.where(shard.is_last, numbers, jnp.zeros_like(numbers))
                sums.append(newest)
            else:
                sums.append(next(carried))
        return sums, rows

    def layouts(self) -> list[OutputLayout]:
        """The layouts of the rows of `of_shard`."""

        def microbatches(examples: int) -> int:
            return Microbatches(examples, self.size).number

        emitted = [how for how in self.combinations if how.kind not in CARRIED]
        return [
            OutputLayout(Batched(0), microbatches) if how.kind == "stack" else OutputLayout(Batched(how.axis))
            for how in emitted
        ]

    def finish(self, sums: Sequence[Any], rows: Sequence[Any]) -> list[Any]:
        """The value of the loss and the aux leaves of the full batch, in the dtypes that the loss returns."""
        carried, emitted = iter(sums), iter(rows)
        combined = []
        for how, aval in zip(self.combinations, self.loss.out_avals, strict=True):
            if how.kind not in CARRIED:
                combined.append(next(emitted))
                continue
            total = next(carried)
            if avals.has_keys(aval) and not avals.has_keys(total):
                combined.append(jax.random.wrap_key_data(total, impl=avals.key_impl(aval.dtype)))
                continue
            combined.append((self.mean(total, sums) if how.kind == "mean" else total).astype(aval.dtype))
        if self.weighted:
            dtype = self.loss.value_dtype
            combined[:2] = [ratio(sums[0].astype(wide_dtype(dtype, jnp.float32)), sums[1]).astype(dtype)]
        return combined

    def mean(self, total: jax.Array, sums: Sequence[Any]) -> jax.Array:
        """A sum over the microbatches, divided once: by the total weight, or by the number of microbatches."""
        if self.weighted:
            return ratio(total, sums[1])
        return total / (self.examples / self.size)

    def _add(self, carry: Sequence[Any], outputs: Sequence[Any], share: float) -> list[Any]:
        added = []
        kinds = self._select([how.kind for how in self.combinations], CARRIED)
        for kind, old, new in zip(kinds, carry, self._select(outputs, CARRIED), strict=True):
            if kind == "last":
                added.append(new)
                continue
            new = new.astype(old.dtype)
            if kind == "mean" and self.weighted:
                weight = outputs[1].astype(old.dtype)
                # The mean of a microbatch of weight 0 may be 0/0, and 0 * NaN is NaN.
                new = jnp.where(weight == 0, jnp.zeros_like(new), new * weight)
            elif kind == "mean" and share != 1:
                new = new * share
            added.append(old + new)
        return added

    def _select(self, values: Sequence[Any], kinds: Sequence[str]) -> list[Any]:
        return [value for value, how in zip(values, self.combinations, strict=True) if how.kind in kinds]

    def _wide(self, dtype: Any) -> Any:
        return wide_dtype(dtype, self.accumulator_dtype)
