"""The gradient of one call, as a function of flat arrays, for each strategy that can compute it.

`Gradient` is a `Problem` with what was read of its loss. `Gradient.computation(strategy)` returns the function to
compile and run: the full batch at once (here), or passes over its microbatches (`split_passes.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call import aux_outputs
from anybatch.call.arguments import Arguments, Arrays
from anybatch.call.loss import TracedLoss
from anybatch.call.microbatches import Microbatches
from anybatch.call.options import Options
from anybatch.errors import InputError
from anybatch.gradients import declared, head_budget, remat, split_passes, squared_norms
from anybatch.gradients.accumulate import wide_dtype
from anybatch.gradients.declared import ratio
from anybatch.gradients.problem import Problem
from anybatch.jaxprs import avals
from anybatch.planning.budget import left_for_head
from anybatch.planning.strategy import Computation, Route, Strategy
from anybatch.reading.microbatch_weights import MicrobatchWeights, microbatch_weights
from anybatch.reading.read import split_loss, split_loss_in_one_pass
from anybatch.reading.reader import warn_of_failed_rule
from anybatch.reading.report import Reading
from anybatch.reading.split import Split
from anybatch.reading.states import RuleFailed


class Gradient(Problem):
    """The gradient of one call, to be computed with any strategy."""

    def __init__(self, fun: Callable[..., Any], options: Options, arguments: Arguments) -> None:
        if options.reduction != "infer" and options.microbatch_size is not None:
            arguments.refuse_unnamed_rows("microbatch")
        super().__init__(fun, options, arguments)
        self._failed: dict[str, str] = {}  # primitives whose rule failed when it was run, and why

    @property
    def draws_per_microbatch(self) -> bool:
        """True if random numbers may depend on the microbatch size."""
        return bool(self.arguments.arrays.keys)

    def bytes_written(self, count: Callable[[Any], int]) -> int:
        """The bytes that the loss of the full batch writes. `count` counts those of a jaxpr."""
        return count(self.loss.traced.jaxpr)

    @functools.cached_property
    def split(self) -> Split:
        """The loss, read and split into a prefix and a head."""
        loss, consts = self.trace(self.examples)
        fresh = bool(self.arguments.arrays.keys)
        # Gradient noise is measured on microbatches of examples, and a fixed order is one of examples. Neither is
        # defined for rows that are selected from them.
        may_select = not self.options.noise and not self.options.reproducible
        split = split_loss_in_one_pass if self._always_in_passes else split_loss
        return split(loss, consts, fresh_draws=fresh, may_select=may_select, failed=self._failed)

    @functools.cached_property
    def checked_reading(self) -> Reading:
        """The reading of the loss, after checking that its head, which sees the full batch, fits the memory."""
        return head_budget.check_head(self.split, on_coupled=self.options.on_coupled, left=lambda: left_for_head(self))

    @functools.cached_property
    def weights(self) -> MicrobatchWeights | None:
        """The weights of the microbatches of a loss that was read, if the gradient noise is wanted."""
        if not self.options.noise or self.options.reduction != "infer":
            return None
        # A second reading, in which sums over data alone are computed in each microbatch.
        fresh = bool(self.arguments.arrays.keys)
        again = split_loss(*self.trace(self.examples), fresh_draws=fresh, sums_data_later=True, failed=self._failed)
        return microbatch_weights(self.split, again)

    @property
    def is_coupled(self) -> bool:
        """True if every strategy computes a part of the loss from the full batch."""
        return self.options.reduction == "infer" and not self.checked_reading.separable

    @property
    def reduce_modes(self) -> tuple[str, ...]:
        """The possible values of `reduce`, the one that sends the fewest bytes first."""
        shardings = self.shardings
        if shardings is None or shardings.options.reduce != "auto" or self.options.noise:
            return (self.options.fixed_reduce,)
        is_even = self.examples % shardings.options.devices == 0
        return ("once", "each") if shardings.is_sharded and is_even else ("once",)

    @property
    def methods(self) -> tuple[str | None, ...]:
        """The methods to choose from, the likely fastest first. Only per-example gradients have any."""
        return (None,)

    @property
    def noun(self) -> str:
        """What is computed, as a plan calls it."""
        return "gradient"

    @property
    def identity(self) -> Sequence[Any]:
        """What bytes and times depend on, besides the loss, its arguments and the options: part of a plan's key."""
        return ()

    @property
    def note(self) -> str:
        """A remark that a plan prints."""
        return ""

    def route(self, strategy: Strategy) -> Route:
        """What a strategy does with the batch."""
        if self.is_full_batch(strategy):
            return Route.FULL_BATCH
        if self.options.reduction == "infer" and self.checked_reading.passes == 2:
            return Route.TWO_PASSES
        return Route.ONE_PASS

    def computation(self, strategy: Strategy) -> Computation:
        """The function that a strategy compiles and runs, and its arrays.

        Raises:
          InputError: for a loss that this strategy cannot compute.
          CoupledError: for a loss that looks across examples, with `on_coupled="error"` or if the noise is wanted.
          HeadTooLargeError: if the head, which is computed from the full batch, does not fit the memory.
        """
        if self.options.noise:
            _ = self.weights  # raises for a loss whose microbatches have no weights, whatever the strategy
        if self.is_full_batch(strategy) and not self._always_in_passes:
            compute, inputs = self._full_batch(strategy)
        else:
            compute, inputs = self._passes(strategy)
        leaves, tree = jax.tree.flatten(inputs)
        # Of a microbatch, if the reduction is declared: the loss may fail for the full batch.
        loss = self._first_loss(strategy)

        def flat_compute(*flat: Any) -> list[Any]:
            value, aux, grads, noise = compute(jax.tree.unflatten(tree, flat))
            if loss.num_heads == 1:
                value = avals.as_weak(value, loss.out_avals[0])
            if self.shardings is not None:
                grads = self.shardings.as_parameters(grads)
            aux = map(avals.as_weak, aux, loss.out_avals[loss.num_heads :])
            return [value, *aux, *noise, *map(avals.as_weak, grads, loss.types.wrt)]

        compute_flat: Any = flat_compute
        if self.shardings is not None:
            compute_flat = self.shardings.without_types(flat_compute, loss.aux_tree.num_leaves + self._num_noise)
        return Computation(compute_flat, leaves, loss.traced.has_effects)

    @property
    def _num_noise(self) -> int:
        """The number of outputs that describe the gradient noise."""
        return squared_norms.SUMMARY if self.options.noise else 0

    @property
    def _always_in_passes(self) -> bool:
        """True if an executor is used even if one microbatch holds all examples: on a mesh, or in a fixed order.

        An empty batch is never computed like that: its loss is what the user's function returns for no examples, such
        as NaN for a mean, and a sum over devices would return 0.
        """
        return self.examples > 0 and (self.shardings is not None or self.options.reproducible)

    def results(self, strategy: Strategy, outputs: list[Any]) -> tuple[Any, Any, Any, list[Any]]:
        """The value, aux, gradient and the summary of the noise, from the outputs of the computation."""
        loss = self._first_loss(strategy)
        value, *rest = outputs if self.shardings is None else self.shardings.returned(outputs)
        num_aux = loss.aux_tree.num_leaves
        aux = jax.tree.unflatten(loss.aux_tree, rest[:num_aux])
        noise, grads = rest[num_aux : num_aux + self._num_noise], rest[num_aux + self._num_noise :]
        return value, aux, self.arguments.as_gradient(grads), noise

    def _first_loss(self, strategy: Strategy) -> TracedLoss:
        if self.options.reduction == "infer" or (self.is_full_batch(strategy) and not self._always_in_passes):
            return self.loss
        return self.trace(self.size(strategy))[0]

    def _full_batch(self, strategy: Strategy) -> tuple[Callable[[Any], Any], Any]:
        options = self.options
        loss, consts = self.trace(self.examples)
        stacked = [False] * loss.aux_tree.num_leaves
        if options.stacks_aux:
            # A single microbatch is stacked too. Only a trace for another size shows which leaves have rows.
            combinations = aux_outputs.combine_aux(loss, self.trace(self.examples + 1)[0], options.aux_reduction)
            stacked = [how.kind == "stack" for how in combinations]
        fresh_keys = strategy.microbatch_size is not None and options.reduction != "infer"
        compute = functools.partial(
            _compute_full_batch, _with_remat(loss, strategy.remat), fresh_keys=fresh_keys, stacked=stacked
        )
        noise = squared_norms.unknown if options.noise else lambda _: []
        return lambda inputs: (*compute(inputs), noise(min(1, self.examples))), (consts, self.arguments.arrays)

    def _passes(self, strategy: Strategy) -> tuple[Callable[[Any], Any], Any]:
        """The function that computes the gradient in passes over the microbatches, and its inputs."""
        if self.options.reduction == "infer":
            assert self.checked_reading is not None
            consts, weights = self.trace(self.examples)[1], self.weights
            split: split_passes.AnySplit = self.split
        else:
            weights = None
            split, consts = self._declared(self.size(strategy), strategy.remat)
        passes = split_passes.Passes(
            split,
            self.size(strategy),
            self.options.accumulator_dtype,
            self.executor(strategy),
            strategy.remat,
            weights,
            self.options.noise,
        )

        def compute(inputs: Any) -> Any:
            try:
                return split_passes.value_and_grad(passes, *inputs)
            except RuleFailed as failure:
                return self._without_rule(failure, strategy, inputs)

        return compute, (consts, self.arguments.arrays)

    def _without_rule(self, failure: RuleFailed, strategy: Strategy, inputs: Any) -> Any:
        """Reads the loss again without the rule that failed, and computes that primitive from the full batch."""
        self._failed[failure.blame.primitive] = failure.blame.why
        for name in ("split", "checked_reading", "weights"):  # cached properties that depend on what was read
            self.__dict__.pop(name, None)
        compute, _ = self._passes(strategy)
        results = compute(inputs)  # may raise the loss's own error, before the warning
        warn_of_failed_rule(failure.blame)
        return results

    def _declared(self, size: int, policy: str | None) -> tuple[declared.DeclaredSplit, dict[int, Any]]:
        """The split of a loss with a declared reduction, and the arrays that it closes over at each size."""
        options = self.options
        counts = [self.examples] if self.shardings is None else self.shardings.executor(self.examples).counts
        more = [1] if self.shardings is not None and self.shardings.takes_one_more(self.examples) else []
        sizes = sorted({size, *(Microbatches(count, size).remainder for count in [*counts, *more])} - {0})
        traced = {each: self.trace(each) for each in sizes}
        loss = traced[size][0]
        combinations = []
        if options.has_aux:
            aux_outputs.check_new_state(loss, self.trace(self.examples)[0])
            combinations = aux_outputs.combine_aux(loss, self.trace(self.examples)[0], options.aux_reduction)
            for last_loss, _ in traced.values():
                aux_outputs.check_remainder(loss, last_loss, combinations)
        if options.stacks_aux and self.shardings is not None and self.shardings.takes_one_more(self.examples):
            raise InputError(
                'aux_reduction="stack" on a mesh with other axes needs the same number of examples on every device',
                given=f"{self.examples} examples for {self.num_batch_shards} devices",
                remedy="Pass a batch whose size is a multiple of that, or use another aux_reduction for that leaf.",
            )
        losses = {each: _with_remat(loss, policy) for each, (loss, _) in traced.items()}
        split = declared.DeclaredSplit(
            size, self.examples, losses, options.reduction, combinations, options.accumulator_dtype
        )
        return split, {each: consts for each, (_, consts) in traced.items()}


def _with_remat(loss: TracedLoss, policy: str | None) -> TracedLoss:
    if policy is None:
        return loss
    traced = remat.rematerialised(loss.traced, loss.const_types, jax.tree.leaves(loss.types), policy)
    return dataclasses.replace(loss, traced=traced)


def _compute_full_batch(
    loss: TracedLoss, inputs: Any, *, fresh_keys: bool, stacked: list[bool]
) -> tuple[Any, Any, Any]:
    consts, arrays = inputs
    if fresh_keys:
        arrays = arrays._replace(keys=[jax.random.fold_in(key, 0) for key in arrays.keys])
    value, aux, grads = _value_and_grad(loss, consts, arrays)
    return value, [leaf[None] if stack else leaf for leaf, stack in zip(aux, stacked, strict=True)], grads


def _value_and_grad(loss: TracedLoss, consts: Sequence[Any], arrays: Arrays) -> tuple[Any, list[Any], list[Any]]:
    """The value, the aux leaves and the gradient leaves, by one `jax.value_and_grad` of the full batch."""

    def of_wrt(wrt: list[Any]) -> tuple[Any, list[Any]]:
        outputs = loss(consts, arrays._replace(wrt=wrt))
        if loss.num_heads == 1:
            return outputs[0], outputs[1:]
        total, weight, *aux = outputs
        dtype = loss.value_dtype
        return ratio(total.astype(wide_dtype(dtype, jnp.float32)), weight).astype(dtype), aux

    (value, aux), grads = jax.value_and_grad(of_wrt, has_aux=True)(arrays.wrt)
    return value, aux, grads
