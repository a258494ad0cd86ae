"""Microbatch by microbatch in one `lax.scan`, into one gradient buffer."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from anybatch import compat
from anybatch.arguments import Arrays
from anybatch.auxiliary import Combination
from anybatch.batch import Cut, first_start, take
from anybatch.loss import TracedLoss
from anybatch.routes import in_place, references
from anybatch.routes.outputs import Outputs, ratio, wide_dtype


@dataclasses.dataclass(frozen=True)
class Microbatches:
    """What to compute: the loss at the size of the microbatches, and how their outputs make those of the batch."""

    cut: Cut
    loss: TracedLoss
    last_loss: TracedLoss | None  # at the size of the ragged last microbatch, if there is one
    reduction: str  # "sum", "mean" or "weighted"
    aux: Sequence[Combination]
    accumulator_dtype: Any

    @functools.cached_property
    def outputs(self) -> Outputs:
        """How the outputs of the microbatches combine."""
        head = Combination("mean" if self.reduction == "mean" else "sum")
        return Outputs(self.loss, self.cut, [*[head] * self.loss.num_heads, *self.aux], self.accumulator_dtype)

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
        uneven = any(compat.varying_axes(weight) - compat.varying_axes(jax.typeof(leaf)) for leaf in wrt)
        return uneven or self.loss.traced.uses_dtype(jnp.float16) or self.loss.weight_has_gradient

    @functools.cached_property
    def written_in_place(self) -> list[bool]:
        """Which gradients the backward pass may add to their accumulators by itself."""
        return references.written_in_place(self.loss.traced, len(self.loss.types.wrt))

    @property
    def has_effects(self) -> bool:
        """Whether the loss does anything beyond its results."""
        return self.loss.traced.has_effects


class Inputs(NamedTuple):
    """All arrays that enter the computation. A pytree."""

    consts: Sequence[Any]  # closed over by the loss
    last_consts: Sequence[Any]  # closed over by the loss at the size of the last microbatch
    arrays: Arrays


def value_and_grad(microbatches: Microbatches, inputs: Inputs) -> tuple[Any, list[Any], list[Any]]:
    """The value, the aux leaves and the gradient leaves of the batch.

    Memory: one gradient in the accumulator's dtype and the temporaries of one microbatch, whatever the batch.
    """
    leaves, tree = jax.tree.flatten(inputs)

    def accumulate(*flat: Any, mutate: bool) -> list[Any]:
        return _accumulate(microbatches, jax.tree.unflatten(tree, flat), mutate)

    if microbatches.has_effects:  # a primitive of our own would hide them
        flat_results = accumulate(*leaves, mutate=False)
    else:
        flat_results = in_place.call(
            lambda *flat: accumulate(*flat, mutate=True),
            lambda *flat: accumulate(*flat, mutate=False),
            *map(jnp.asarray, leaves),
        )
    num_grads = len(inputs.arrays.wrt)
    value, *aux = flat_results[num_grads:]
    return value, aux, flat_results[:num_grads]


def _accumulate(microbatches: Microbatches, inputs: Inputs, mutate: bool) -> list[Any]:
    """The gradient leaves, the value, the aux leaves; with `mutate`, the gradient is summed in references."""
    cut, outputs, wrt = microbatches.cut, microbatches.outputs, [jnp.asarray(leaf) for leaf in inputs.arrays.wrt]
    wide = [wide_dtype(leaf.dtype, microbatches.accumulator_dtype) for leaf in wrt]
    first_ratio = _forward_ratio(microbatches, inputs) if microbatches.weighs_first else None
    shielded = functools.partial(references.shielded, written_in_place=microbatches.written_in_place)
    num_heads = 2 if first_ratio is not None and microbatches.loss.weight_is_inexact else 1

    def backward(loss: TracedLoss, consts: Sequence[Any], start: Any) -> tuple[list[Any], Any, list[Any]]:
        """One microbatch: its outputs, its pullback, and the cotangents to pull back."""

        def forward(wide_wrt: list[Any]) -> tuple[list[Any], list[Any]]:
            narrow = [leaf.astype(like.dtype) for leaf, like in zip(wide_wrt, wrt, strict=True)]
            out = loss(consts, _microbatch(inputs.arrays._replace(wrt=narrow), start, loss.num_examples))
            return out[:num_heads], out

        # Widening what is differentiated makes autodiff itself add up in the wide dtype.
        wide_wrt = [leaf.astype(dtype) for leaf, dtype in zip(wrt, wide, strict=True)]
        heads, pullback, out = jax.vjp(shielded(forward) if mutate else forward, wide_wrt, has_aux=True)
        share = loss.num_examples / cut.examples if microbatches.seeds_shares else 1
        seeds = [jnp.full_like(heads[0], share)]
        if first_ratio is not None:
            seeds = [jnp.ones_like(head) * first_ratio[i].astype(head.dtype) for i, head in enumerate(heads)]
        return out, pullback, seeds

    # The ragged last microbatch comes first: its gradient is where the accumulator starts.
    divides_at_end = microbatches.reduction != "sum" and not microbatches.seeds_shares and first_ratio is None
    last: list[Any] | None = None
    start: list[Any]
    if microbatches.last_loss is None:
        start = [jnp.zeros_like(leaf, dtype) for leaf, dtype in zip(wrt, wide, strict=True)]
    else:
        with jax.named_scope("anybatch_last_microbatch"):
            last, pullback, seeds = backward(microbatches.last_loss, inputs.last_consts, cut.whole * cut.size)
            (start,) = pullback(seeds)
        if divides_at_end and not outputs.weighted:
            start = [grad * (cut.remainder / cut.size) for grad in start]
    first_index, start = first_start(cut, start)
    accumulators = [jax.new_ref(leaf) for leaf in start] if mutate else None

    def step(carry: Any, _: None) -> tuple[Any, list[Any]]:
        first, sums, grads = carry
        with jax.named_scope("anybatch_microbatch"):
            out, pullback, seeds = backward(microbatches.loss, inputs.consts, first)
            if accumulators is not None:
                pullback.with_refs(accumulators)(seeds)
            else:
                grads = jax.tree.map(jnp.add, grads, pullback(seeds)[0])
        return (first + cut.size, outputs.add(sums, out), grads), outputs.emitted(out)

    carry = (first_index, outputs.start(last), [] if mutate else start)
    (_, sums, grads), emitted = lax.scan(step, carry, length=cut.whole)
    if accumulators is not None:
        grads = [jax.freeze(accumulator) for accumulator in accumulators]
    with jax.named_scope("anybatch_reduce"):
        if divides_at_end:
            grads = [outputs.mean(grad, sums) for grad in grads]
        grads = [grad.astype(leaf.dtype) for grad, leaf in zip(grads, wrt, strict=True)]
        return [*grads, *outputs.finish(sums, emitted, last)]


def _forward_ratio(microbatches: Microbatches, inputs: Inputs) -> list[jax.Array]:
    """The derivatives of `total / weight` with respect to both, from a pass without gradients.

    It sees the same keys as the pass that follows, and so the same random numbers.
    """
    cut, avals = microbatches.cut, microbatches.loss.out_avals[:2]
    wide = [wide_dtype(aval.dtype, jnp.float32) for aval in avals]

    def totals(loss: TracedLoss, consts: Sequence[Any], start: Any) -> list[Any]:
        heads = loss(consts, _microbatch(inputs.arrays, start, loss.num_examples))[:2]
        return [head.astype(dtype) for head, dtype in zip(heads, wide, strict=True)]

    def step(carry: Any, _: None) -> tuple[Any, None]:
        first, sums = carry
        return (first + cut.size, jax.tree.map(jnp.add, sums, totals(microbatches.loss, inputs.consts, first))), None

    sums = [compat.zeros_of(aval, dtype) for aval, dtype in zip(avals, wide, strict=True)]
    if microbatches.last_loss is not None:
        sums = totals(microbatches.last_loss, inputs.last_consts, cut.whole * cut.size)
    (_, (total, weight)), _ = lax.scan(step, (jnp.zeros((), jnp.int32), sums), length=cut.whole)
    value = ratio(total, weight)
    # A weight of 0 is replaced by a constant, which has no gradient.
    return [ratio(jnp.ones_like(total), weight), jnp.where(weight == 0, jnp.zeros_like(value), -ratio(value, weight))]


def _microbatch(arrays: Arrays, start: Any, size: int) -> Arrays:
    """The arrays that a microbatch sees: its own examples, and keys of its own."""
    keys = [jax.random.fold_in(key, start) for key in arrays.keys]
    return arrays._replace(batch=take(arrays.batch, start, size), keys=keys)
