"""The gradient of a loss with a declared reduction: one `lax.scan` over the microbatches, into one gradient buffer."""

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
    """The loss, traced for the sizes of the microbatches, and how to combine the outputs of the microbatches."""

    size: int  # of a complete microbatch
    examples: int  # of the full batch
    losses: Mapping[int, TracedLoss]  # by number of examples: also those of the smaller last microbatches
    reduction: str  # "sum", "mean" or "weighted"
    aux: Sequence[Combination]
    accumulator_dtype: Any
    noise: bool = False  # whether to also sum the squares of the gradients of the microbatches

    @property
    def loss(self) -> TracedLoss:
        """The loss of a complete microbatch."""
        return self.losses[self.size]

    @functools.cached_property
    def outputs(self) -> Outputs:
        """How to combine the outputs of the microbatches."""
        head = Combination("mean" if self.reduction == "mean" else "sum")
        combinations = [*[head] * self.loss.num_heads, *self.aux]
        return Outputs(self.loss, self.size, self.examples, combinations, self.accumulator_dtype)

    @functools.cached_property
    def seeds_shares(self) -> bool:
        """True if the weight of a microbatch in a mean is its cotangent. Otherwise the sum is divided at the end.

        As cotangents the weights cost nothing, and the accumulators hold the result when the loop ends; a division
        after the loop made XLA hold 0.75 GiB more, of 7 GiB. But a float16 or bfloat16 loss would round its weight.
        """
        return self.reduction == "mean" and jnp.finfo(self.loss.out_avals[0].dtype).bits >= 32

    @functools.cached_property
    def weighs_first(self) -> bool:
        """True if the total weight must be known before the first gradient, which costs a forward pass.

        Usually the gradient of the total is divided by the weight at the end. That is not possible if the weight has a
        gradient too; if the loss uses float16, in which an undivided gradient can overflow; or if, inside the user's
        `shard_map`, JAX sums over the devices gradients that have different weights.
        """
        if self.reduction != "weighted":
            return False
        weight, wrt = self.loss.out_avals[1], self.loss.types.wrt
        uneven = any(avals.varying_axes(weight) - avals.varying_axes(jax.typeof(leaf)) for leaf in wrt)
        return uneven or self.loss.traced.uses_dtype(jnp.float16) or self.loss.weight_has_gradient

    @property
    def divides_at_end(self) -> bool:
        """True if the gradient must be divided after the loop."""
        return self.reduction != "sum" and not self.seeds_shares and not self.weighs_first

    @property
    def has_effects(self) -> bool:
        """True if the loss has side effects, such as `jax.debug.print`."""
        return self.loss.traced.has_effects


Consts = Mapping[int, Sequence[Any]]  # the arrays that the losses close over, by number of examples


def value_and_grad(
    declared: DeclaredLoss, executor: Executor, inputs: tuple[Consts, Arrays]
) -> tuple[Any, list[Any], list[Any], list[Any]]:
    """The value, the aux leaves, the gradient leaves and, with `noise`, the summary of the gradient noise.

    Memory: one gradient in the accumulator's dtype and the temporaries of one microbatch, whatever the size of the
    batch. The noise needs the gradient of one microbatch more.
    """
    consts, arrays = inputs
    outputs = declared.outputs
    wrt = [jnp.asarray(leaf) for leaf in arrays.wrt]
    without_batch = (wrt, consts, arrays.keys, arrays.rest)
    first_ratio: list[Any] = []
    row_layouts = [Batched(0)] * len(arrays.batch)
    if declared.weighs_first:
        leaves, tree = jax.tree.flatten(without_batch)

        def forward(shard: Shard, invariant: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            return _totals(declared, shard, *_sorted(jax.tree.unflatten(tree, invariant), rows)), []

        (total, weight), _ = executor(BatchPass(forward, leaves, arrays.batch, row_layouts))
        first_ratio = _ratio_of(total, weight)

    leaves, tree = jax.tree.flatten((*without_batch, first_ratio))

    def backward(shard: Shard, invariant: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        static, num_invariant, num_inputs = shard.static, len(invariant), len(invariant) + len(rows)

        def compute(*flat: Any, mutate: bool) -> list[Any]:
            *without_batch, factors = jax.tree.unflatten(tree, flat[:num_invariant])
            own = _sorted(tuple(without_batch), list(flat[num_invariant:num_inputs]))
            return _accumulate(declared, static.with_traced_values(flat[num_inputs:]), *own, factors, mutate)

        flat = [*invariant, *rows, *shard.traced_values]
        # The in-place primitive would hide effects. And it never has the gradient of a single microbatch, which a fixed
        # order and the noise need.
        if declared.has_effects or shard.fixed_order or declared.noise:
            results = compute(*flat, mutate=False)
        else:
            results = in_place.call(
                functools.partial(compute, mutate=True),
                functools.partial(compute, mutate=False),
                *map(jnp.asarray, flat),
            )
        num_sums = len(results) - len(outputs.layouts())
        return results[:num_sums], results[num_sums:]

    sums, rows = executor(BatchPass(backward, leaves, arrays.batch, row_layouts, outputs.layouts(), len(wrt)))
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
    """The summary of the gradient noise, in the scale of the gradient."""
    outputs = declared.outputs
    if declared.divides_at_end:
        factor = outputs.mean(jnp.ones_like(noise[0]), sums)
        noise = squared_norms.scaled(noise, factor * factor)
    square = squared_norms.square(grads)
    return squared_norms.summary(noise, square, square)


def _sorted(without_batch: tuple[Any, ...], batch: list[Any]) -> tuple[Consts, Arrays]:
    wrt, consts, keys, rest = without_batch
    return consts, Arrays(wrt, batch, keys, rest)


def _accumulate(
    declared: DeclaredLoss, shard: Shard, consts: Consts, arrays: Arrays, first_ratio: list[Any], mutate: bool
) -> list[Any]:
    """The sums and rows of one shard: the gradient, the other sums, the noise, then the rows.

    Args:
      declared: the loss.
      shard: which examples.
      consts: the arrays that the losses close over.
      arrays: the arrays of the shard.
      first_ratio: the derivatives of `total / weight`, if the total weight is known; otherwise empty.
      mutate: whether to accumulate the gradient in references.
    """
    microbatches, outputs, wrt = Microbatches(shard.examples, declared.size, shard.runs), declared.outputs, arrays.wrt
    wide = [wide_dtype(leaf.dtype, declared.accumulator_dtype) for leaf in wrt]
    is_direct = shard.in_place([leaf.dtype == dtype for leaf, dtype in zip(wrt, wide, strict=True)])
    written_in_place = references.written_in_place(declared.loss.traced, is_direct) if mutate else []
    num_heads = 2 if first_ratio and declared.loss.weight_is_inexact else 1

    def with_square(noise: list[Any], grads: list[Any], size: int, out: list[Any]) -> list[Any]:
        return squared_norms.add(noise, grads, out[1] if outputs.weighted else size) if declared.noise else []

    def backward(size: int, row: Any, written_in_place: list[bool] | None = None) -> tuple[list[Any], Any, list[Any]]:
        """One microbatch: its outputs, its pullback, and the cotangents for the pullback."""
        loss = declared.losses[size]

        def forward(wide_wrt: list[Any]) -> tuple[list[Any], list[Any]]:
            gathered = shard.gather(wide_wrt)  # still wide, so that devices sum wide gradients too
            narrow = [leaf.astype(like.dtype) for leaf, like in zip(gathered, wrt, strict=True)]
            out = loss(consts[size], _microbatch(arrays._replace(wrt=narrow), shard, row, size))
            return out[:num_heads], out

        # Differentiating with respect to wide arrays makes autodiff itself sum in the wide dtype.
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

    # The smaller last microbatch comes first: its gradient is where the accumulator starts.
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
                own = shard.unfused(pullback(seeds)[0])
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
    added, rows = outputs.of_shard(sums, emitted, last, shard)
    return [*grads, *added, *noise, *rows]


def _totals(declared: DeclaredLoss, shard: Shard, consts: Consts, arrays: Arrays) -> list[Any]:
    """The total and the weight of a shard, from a pass without gradients.

    It gets the same keys as the pass that follows, and so draws the same random numbers.
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
    # `ratio` replaces a weight of 0 by a constant, which has no gradient.
    return [ratio(jnp.ones_like(total), weight), jnp.where(weight == 0, jnp.zeros_like(value), -ratio(value, weight))]


def _microbatch(arrays: Arrays, shard: Shard, row: Any, size: int) -> Arrays:
    """The arrays of one microbatch: its examples, and keys that are folded with the index of its first example."""
    keys = [jax.random.fold_in(key, shard.first + row) for key in arrays.keys]
    return arrays._replace(batch=slice_examples(arrays.batch, row, size, shard.runs), keys=keys)
