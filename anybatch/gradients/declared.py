"""Microbatch by microbatch in one `lax.scan`, into one gradient buffer."""

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
from anybatch.call.microbatches import Microbatches, loop_start, slice_examples
from anybatch.gradients import references, squared_norms
from anybatch.gradients.outputs import Outputs, ratio, wide_dtype
from anybatch.jaxprs import avals, in_place
from anybatch.mesh.executor import BatchPass, Executor, Shard
from anybatch.reading.states import Batched


@dataclasses.dataclass(frozen=True)
class DeclaredLoss:
    """What to compute: the loss at the sizes of the microbatches, and how their outputs make those of the batch."""

    size: int
    examples: int  # of the whole batch
    losses: Mapping[int, TracedLoss]  # by their numbers of examples: those of the ragged last microbatches, too
    reduction: str  # "sum", "mean" or "weighted"
    aux: Sequence[Combination]
    accumulator_dtype: Any
    noise: bool = False  # whether to find out the squares of their gradients, too

    @property
    def loss(self) -> TracedLoss:
        return self.losses[self.size]

    @functools.cached_property
    def outputs(self) -> Outputs:
        """How the outputs of the microbatches combine."""
        head = Combination("mean" if self.reduction == "mean" else "sum")
        combinations = [*[head] * self.loss.num_heads, *self.aux]
        return Outputs(self.loss, self.size, self.examples, combinations, self.accumulator_dtype)

    @functools.cached_property
    def seeds_shares(self) -> bool:
        """Whether the shares of the microbatches in a mean are put into the cotangents, or divided out at the end.

        Put in, they cost nothing, and the accumulators are the result as the loop leaves them; a division after
        the loop made XLA hold 0.75 of 7 GiB more. But a narrow loss would round its share to 8 or 11 bits.
        """
        return self.reduction == "mean" and jnp.finfo(self.loss.out_avals[0].dtype).bits >= 32

    @functools.cached_property
    def weighs_first(self) -> bool:
        """Whether the total weight must be known before the first gradient, at the price of a forward pass.

        Usually the gradient of the total is divided by the weight at the end. Not so if the weight has a gradient
        of its own; or if there is float16, in which an undivided gradient can overflow; or if, inside the user's
        `shard_map`, JAX adds up over the devices gradients that have different weights.
        """
        if self.reduction != "weighted":
            return False
        weight, wrt = self.loss.out_avals[1], self.loss.types.wrt
        uneven = any(avals.varying_axes(weight) - avals.varying_axes(jax.typeof(leaf)) for leaf in wrt)
        return uneven or self.loss.traced.uses_dtype(jnp.float16) or self.loss.weight_has_gradient

    @property
    def divides_at_end(self) -> bool:
        """Whether the gradient that the loop leaves is yet to be divided."""
        return self.reduction != "sum" and not self.seeds_shares and not self.weighs_first

    @property
    def has_effects(self) -> bool:
        """Whether the loss does anything beyond its results."""
        return self.loss.traced.has_effects


Consts = Mapping[int, Sequence[Any]]  # closed over by the losses, by their numbers of examples


def value_and_grad(
    declared: DeclaredLoss, place: Executor, inputs: tuple[Consts, Arrays]
) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """The value, the aux leaves and the gradient leaves of the batch, and if it is wanted what tells its noise.

    Memory: one gradient in the accumulator's dtype and the temporaries of one microbatch, whatever the batch; for the
    noise also the gradient of one microbatch.
    """
    consts, arrays = inputs
    outputs = declared.outputs
    wrt = [jnp.asarray(leaf) for leaf in arrays.wrt]
    without_batch = (wrt, consts, arrays.keys, arrays.rest)
    first_ratio: list[Any] = []
    takes = [Batched(0)] * len(arrays.batch)
    if declared.weighs_first:
        leaves, tree = jax.tree.flatten(without_batch)

        def forward(shard: Shard, whole: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            return _totals(declared, shard, *_sorted(jax.tree.unflatten(tree, whole), rows)), []

        (total, weight), _ = place(BatchPass(forward, leaves, arrays.batch, takes))
        first_ratio = _ratio_of(total, weight)

    leaves, tree = jax.tree.flatten((*without_batch, first_ratio))

    def backward(shard: Shard, whole: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        anywhere, num_whole, num_inputs = shard.anywhere, len(whole), len(whole) + len(rows)

        def compute(*flat: Any, mutate: bool) -> list[Any]:
            *sorted_whole, factors = jax.tree.unflatten(tree, flat[:num_whole])
            own = _sorted(tuple(sorted_whole), list(flat[num_whole:num_inputs]))
            return _accumulate(declared, anywhere.at(flat[num_inputs:]), *own, factors, mutate)

        flat = [*whole, *rows, *shard.place]
        # A primitive of our own would hide effects; and in place there is no gradient of a microbatch by itself.
        if declared.has_effects or shard.fixed_order or declared.noise:
            results = compute(*flat, mutate=False)
        else:
            results = in_place.call(
                functools.partial(compute, mutate=True),
                functools.partial(compute, mutate=False),
                *map(jnp.asarray, flat),
            )
        num_sums = len(results) - len(outputs.gives())
        return results[:num_sums], results[num_sums:]

    sums, rows = place(BatchPass(backward, leaves, arrays.batch, takes, outputs.gives(), len(wrt)))
    grads, sums = sums[: len(wrt)], sums[len(wrt) :]
    sums, noise = (sums[: -squared_norms.CARRIED], sums[-squared_norms.CARRIED :]) if declared.noise else (sums, [])
    with jax.named_scope("anybatch_reduce"):
        if declared.divides_at_end:
            grads = [outputs.mean(grad, sums) for grad in grads]
        if noise:
            noise = _noise(declared, noise, grads, sums)
        grads = [grad.astype(leaf.dtype) for grad, leaf in zip(grads, wrt, strict=True)]
        value, *aux = outputs.finish(sums, rows)
    return value, aux, grads, noise


def _noise(declared: DeclaredLoss, noise: list[Any], grads: list[Any], sums: list[Any]) -> list[Any]:
    """The summary of the squares, in the scale of the gradient."""
    outputs = declared.outputs
    if declared.divides_at_end:
        factor = outputs.mean(jnp.ones_like(noise[0]), sums)
        noise = squared_norms.scaled(noise, factor * factor)
    square = squared_norms.square(grads)
    return squared_norms.summary(noise, square, square)


def _sorted(whole: tuple[Any, ...], batch: list[Any]) -> tuple[Consts, Arrays]:
    wrt, consts, keys, rest = whole
    return consts, Arrays(wrt, batch, keys, rest)


def _accumulate(
    declared: DeclaredLoss, shard: Shard, consts: Consts, arrays: Arrays, first_ratio: list[Any], mutate: bool
) -> list[Any]:
    """The gradient leaves, what else is added up, the rows; with `mutate`, the gradient is summed in references."""
    microbatches, outputs, wrt = Microbatches(shard.examples, declared.size, shard.runs), declared.outputs, arrays.wrt
    wide = [wide_dtype(leaf.dtype, declared.accumulator_dtype) for leaf in wrt]
    is_direct = shard.in_place([leaf.dtype == dtype for leaf, dtype in zip(wrt, wide, strict=True)])
    written_in_place = references.written_in_place(declared.loss.traced, is_direct) if mutate else []
    num_heads = 2 if first_ratio and declared.loss.weight_is_inexact else 1

    def with_square(noise: list[Any], grads: list[Any], size: int, out: list[Any]) -> list[Any]:
        return squared_norms.add(noise, grads, out[1] if outputs.weighted else size) if declared.noise else []

    def backward(size: int, row: Any, written_in_place: list[bool] | None = None) -> tuple[list[Any], Any, list[Any]]:
        """One microbatch: its outputs, its pullback, and the cotangents to pull back."""
        loss = declared.losses[size]

        def forward(wide_wrt: list[Any]) -> tuple[list[Any], list[Any]]:
            whole = shard.whole(wide_wrt)  # still wide, so that devices add up wide gradients too
            narrow = [leaf.astype(like.dtype) for leaf, like in zip(whole, wrt, strict=True)]
            out = loss(consts[size], _microbatch(arrays._replace(wrt=narrow), shard, row, size))
            return out[:num_heads], out

        # Widening what is differentiated makes autodiff itself add up in the wide dtype.
        wide_wrt = [leaf.astype(dtype) for leaf, dtype in zip(wrt, wide, strict=True)]
        fun = forward if written_in_place is None else references.shielded(forward, written_in_place)
        heads, pullback, out = jax.vjp(fun, wide_wrt, has_aux=True)
        share = size / declared.examples if declared.seeds_shares else 1
        seeds = [jnp.full_like(heads[0], share)]
        if first_ratio:
            seeds = [jnp.ones_like(head) * first_ratio[i].astype(head.dtype) for i, head in enumerate(heads)]
        return out, pullback, seeds

    def add(totals: Sequence[Any], in_place: list[bool], *, mutate: bool) -> list[Any]:
        _, pullback, seeds = backward(microbatches.size, 0, in_place if mutate else None)
        return references.add(pullback, seeds, totals, mutate=mutate)

    if microbatches.complete and references.reach_nested_functions(declared.loss.traced, written_in_place):
        types = [jax.typeof(leaf).update(dtype=dtype) for leaf, dtype in zip(wrt, wide, strict=True)]
        written_in_place = references.with_same_terms(add, types, written_in_place)

    # The ragged last microbatch comes first: its gradient is where the accumulator starts.
    last: list[Any] | None = None
    start: list[Any]
    noise = squared_norms.zeros(wide) if declared.noise else []
    if not microbatches.remainder:
        start = [jnp.zeros_like(leaf, dtype) for leaf, dtype in zip(wrt, wide, strict=True)]
    else:
        with jax.named_scope("anybatch_last_microbatch"):
            last, pullback, seeds = backward(microbatches.remainder, microbatches.last_start)
            (start,) = pullback(seeds)
        if declared.divides_at_end and not outputs.weighted:
            start = [grad * (microbatches.remainder / microbatches.size) for grad in start]
        noise = with_square(noise, start, microbatches.remainder, last)
    first_row, start = loop_start(microbatches, start)
    accumulators = [jax.new_ref(leaf) for leaf in start] if mutate else None

    def step(carry: Any, _: None) -> tuple[Any, list[Any]]:
        row, sums, grads, noise = carry
        with jax.named_scope("anybatch_microbatch"):
            out, pullback, seeds = backward(microbatches.size, row, written_in_place if mutate else None)
            if accumulators is not None:
                pullback.with_refs(accumulators)(seeds)
            else:
                own = shard.apart(pullback(seeds)[0])
                grads, noise = jax.tree.map(jnp.add, grads, own), with_square(noise, own, microbatches.size, out)
        return (row + microbatches.step, outputs.add(sums, out), grads, noise), outputs.emitted(out)

    carry = (first_row, outputs.start(microbatches, last), [] if mutate else start, noise)
    if microbatches.complete:
        (_, sums, grads, noise), emitted = lax.scan(step, carry, length=microbatches.complete)
    else:
        _, sums, grads, noise = carry
        emitted = [jnp.zeros((0, *aval.shape), aval.dtype) for aval in outputs.emitted(declared.loss.out_avals)]
    if accumulators is not None:
        grads = [jax.freeze(accumulator) for accumulator in accumulators]
    added, rows = outputs.of_part(sums, emitted, last, shard)
    return [*grads, *added, *noise, *rows]


def _totals(declared: DeclaredLoss, shard: Shard, consts: Consts, arrays: Arrays) -> list[Any]:
    """The total and the weight of a part, from a pass without gradients.

    It sees the same keys as the pass that follows, and so the same random numbers.
    """
    microbatches, types = Microbatches(shard.examples, declared.size, shard.runs), declared.loss.out_avals[:2]
    wide = [wide_dtype(aval.dtype, jnp.float32) for aval in types]

    def totals(size: int, row: Any) -> list[Any]:
        heads = declared.losses[size](consts[size], _microbatch(arrays, shard, row, size))[:2]
        return [head.astype(dtype) for head, dtype in zip(heads, wide, strict=True)]

    def step(carry: Any, _: None) -> tuple[Any, None]:
        row, sums = carry
        return (row + microbatches.step, jax.tree.map(jnp.add, sums, totals(microbatches.size, row))), None

    sums = [avals.zeros_of(aval, dtype) for aval, dtype in zip(types, wide, strict=True)]
    if microbatches.remainder:
        sums = totals(microbatches.remainder, microbatches.last_start)
    if microbatches.complete:
        (_, sums), _ = lax.scan(step, (jnp.zeros((), jnp.int32), sums), length=microbatches.complete)
    return sums


def _ratio_of(total: Any, weight: Any) -> list[jax.Array]:
    """The derivatives of `total / weight` with respect to both."""
    value = ratio(total, weight)
    # A weight of 0 is replaced by a constant, which has no gradient.
    return [ratio(jnp.ones_like(total), weight), jnp.where(weight == 0, jnp.zeros_like(value), -ratio(value, weight))]


def _microbatch(arrays: Arrays, shard: Shard, row: Any, size: int) -> Arrays:
    """The arrays that a microbatch sees: its own examples, and keys of its own."""
    keys = [jax.random.fold_in(key, shard.first + row) for key in arrays.keys]
    return arrays._replace(batch=slice_examples(arrays.batch, row, size, shard.runs), keys=keys)
