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
import numpy as np
from jax.sharding import PartitionSpec

from anybatch.call import aux_outputs, placement
from anybatch.call.arguments import Arguments, Arrays
from anybatch.call.caches import can_run
from anybatch.call.host_batch import HostRows, refuse_rows
from anybatch.call.loss import TracedLoss
from anybatch.call.microbatches import Microbatches
from anybatch.call.options import Options
from anybatch.errors import InputError
from anybatch.gradients import declared, head_budget, remat, split_passes, squared_norms, streaming
from anybatch.gradients.declared import ratio
from anybatch.jaxprs import avals
from anybatch.mesh.executor import Executor
from anybatch.planning.budget import budget_of, left_for_head
from anybatch.planning.measure import Bytes
from anybatch.planning.problem import CHUNK_SHARE, Problem
from anybatch.planning.strategy import Computation, Route, Strategy
from anybatch.reading import blocks
from anybatch.reading.microbatch_weights import MicrobatchWeights, microbatch_weights
from anybatch.reading.read import split_loss, split_loss_in_one_pass
from anybatch.reading.reader import warn_of_failed_rule
from anybatch.reading.report import Reading
from anybatch.reading.split import Split
from anybatch.reading.states import RuleFailed


class Gradient(Problem):
    """The gradient of one call, to be computed with any strategy."""

    def __init__(
        self, fun: Callable[..., Any], options: Options, arguments: Arguments, *, may_stream: bool = True
    ) -> None:
        """Makes the gradient of a call. `may_stream` says whether a large batch may stay on the host."""
        if options.reduction != "infer" and options.microbatch_size is not None:
            arguments.refuse_unnamed_rows("microbatch")
        if any(isinstance(leaf, HostRows) for leaf in arguments.arrays.batch):
            _check_host_batch(options)
        for leaf in (each for each in arguments.leaves if each.role != "batch"):
            refuse_rows(leaf.name, leaf.value)
        super().__init__(fun, options, arguments)
        self._may_stream = may_stream
        self._failed: dict[str, str] = {}  # primitives whose rule failed when it was run, and why
        self.measured: list[Bytes] | None = None  # for a batch on the host: collects bytes in place of running it

    @functools.cached_property
    def is_streamed(self) -> bool:
        """True if the batch is on the host and takes more than half of the memory that is left for it."""
        batch = self.arguments.arrays.batch
        if any(isinstance(leaf, HostRows) for leaf in batch):
            return True
        options = self.options
        if not self._may_stream or self.shardings is not None or options.noise or options.reproducible:
            return False
        if not self.examples or not all(isinstance(leaf, np.ndarray) for leaf in batch):
            return False
        leaves = jax.tree.leaves(self.arguments.arrays)
        if not can_run(*leaves) or len(placement.committed_devices(leaves)) > 1:
            return False
        allowed = budget_of(self).allowed
        others = sum(map(self.local_bytes, ("wrt", "wrt", "keys", "rest")))  # the gradient is like the parameters
        return allowed is not None and 2 * self.local_bytes("batch") > allowed - others

    def local_bytes(self, role: str) -> int:
        # Of a batch that is streamed, chunks are on the device.
        if role == "batch" and self.__dict__.get("is_streamed"):
            allowed = budget_of(self).allowed
            return 0 if allowed is None else allowed // CHUNK_SHARE
        return super().local_bytes(role)

    def executor(self, strategy: Strategy) -> Executor:
        return streaming.executor_of(self, strategy) if self.is_streamed else super().executor(strategy)

    @functools.cached_property
    def split(self) -> Split:
        """The loss, read and split into a prefix and a head."""
        # Gradient noise is measured on microbatches of examples, and a fixed order is one of examples. Neither is
        # defined for rows that are selected from them.
        may_select = not self.options.noise and not self.options.reproducible and not self.is_streamed
        split: Any = split_loss_in_one_pass if self._always_in_passes else split_loss
        if self.is_streamed or self.options.maps:
            # What is computed first runs on the full batch. A function that is mapped may consist of nothing else.
            split = functools.partial(split_loss, sums_data_later=True)
        fresh = self.draws_per_microbatch
        return split(*self.trace(self.examples), fresh_draws=fresh, may_select=may_select, failed=self._failed)

    @functools.cached_property
    def checked_reading(self) -> Reading:
        """The reading of the loss, after checking that its head, which sees the full batch, fits the memory."""
        options = self.options
        # Blocks are chosen by plans only.
        may_choose = options.microbatch_size == "auto" and options.block_size == "auto"
        return head_budget.check_head(
            self.split,
            on_coupled=options.on_coupled,
            left=lambda: left_for_head(self),
            block_sizes=self.block_sizes if may_choose else lambda _: (options.fixed_block_size,),
        )

    @functools.cached_property
    def weights(self) -> MicrobatchWeights | None:
        """The weights of the microbatches of a loss that was read, if the gradient noise is wanted."""
        if not self.options.noise or self.options.reduction != "infer":
            return None
        # A second reading, in which sums over data alone are computed in each microbatch.
        fresh = self.draws_per_microbatch
        again = split_loss(*self.trace(self.examples), fresh_draws=fresh, sums_data_later=True, failed=self._failed)
        return microbatch_weights(self.split, again)

    @property
    def is_coupled(self) -> bool:
        return self.options.reduction == "infer" and not self.checked_reading.separable

    @property
    def _largest_value(self) -> int:
        largest = super()._largest_value
        is_coupled = self.options.reduction == "infer" and self.split.loss_couples
        return largest if is_coupled else -(-largest // max(1, self.examples))

    def _wide_values(self, least: int) -> list[blocks.WideValue]:
        if self.options.reduction == "infer":
            return blocks.wide_values(self.split, least)
        return super()._wide_values(least)

    @property
    def reduce_modes(self) -> tuple[str, ...]:
        shardings = self.shardings
        if shardings is None or shardings.options.reduce != "auto" or self.options.noise:
            return (self.options.fixed_reduce,)
        is_even = self.examples % shardings.options.devices == 0
        return ("once", "each") if shardings.is_sharded and is_even else ("once",)

    def route(self, strategy: Strategy) -> Route:
        if self.is_full_batch(strategy):
            return Route.FULL_BATCH
        if self.options.reduction == "infer" and self.checked_reading.passes == 2:
            return Route.TWO_PASSES
        return Route.ONE_PASS

    def computation(self, strategy: Strategy) -> Computation:
        """As in `Problem`. Refuses a loss that this strategy cannot compute, or whose head does not fit the memory."""
        if self.options.noise:
            _ = self.weights  # raises for a loss whose microbatches have no weights, whatever the strategy
        make = self._full_batch if self._at_once(strategy) else self._passes
        compute, consts = make(strategy)
        arrays = self.arguments.arrays
        if self.is_streamed:
            arrays = arrays._replace(batch=list(map(streaming.on_host, arrays.batch)))
        leaves, tree = jax.tree.flatten((consts, arrays))
        # Of a microbatch, if the reduction is declared: the loss may fail for the full batch.
        loss = self._first_loss(strategy)

        def flat_compute(*flat: Any) -> list[Any]:
            value, aux, grads, noise = compute(*jax.tree.unflatten(tree, flat))
            if loss.num_heads == 1:
                value = avals.as_weak(value, loss.out_avals[0])
            if self.shardings is not None:
                grads = self.shardings.as_parameters(grads)
            aux = map(avals.as_weak, aux, loss.out_avals[loss.num_heads :])
            return [value, *aux, *noise, *map(avals.as_weak, grads, loss.types.wrt)]

        compute_flat: Any = flat_compute
        if self.shardings is not None:
            specs = [PartitionSpec()] * (1 + loss.aux_tree.num_leaves + self._num_noise)
            specs += [spec or PartitionSpec() for spec in self.shardings.specs]
            compute_flat = self.shardings.with_specs(flat_compute, specs)
        return Computation(compute_flat, leaves, loss.traced.has_effects)

    @property
    def _num_noise(self) -> int:
        return squared_norms.SUMMARY if self.options.noise else 0

    @property
    def _always_in_passes(self) -> bool:
        """True if an executor is used even if one microbatch holds all examples: on a mesh, or in a fixed order.

        An empty batch is never computed like that: its loss is what the user's function returns for no examples, such
        as NaN for a mean, and a sum over devices would return 0.
        """
        return self.examples > 0 and (self.shardings is not None or self.options.reproducible or self.is_streamed)

    def results(self, strategy: Strategy, outputs: list[Any]) -> tuple[Any, Any, Any, list[Any]]:
        """The value, aux, gradient and the summary of the noise, from the outputs of the computation."""
        loss = self._first_loss(strategy)
        value, *rest = outputs if self.shardings is None else self.shardings.returned(outputs)
        num_aux = loss.aux_tree.num_leaves
        aux = jax.tree.unflatten(loss.aux_tree, rest[:num_aux])
        noise, grads = rest[num_aux : num_aux + self._num_noise], rest[num_aux + self._num_noise :]
        return value, aux, self.arguments.as_gradient(grads), noise

    def _at_once(self, strategy: Strategy) -> bool:
        """True if `jax.value_and_grad` of the loss computes it."""
        if not self.is_full_batch(strategy) or self._always_in_passes:
            return False
        # The passes compute the blocks. But they draw other random numbers for a declared loss in one piece.
        is_in_one_piece = self.options.reduction != "infer" and strategy.microbatch_size is None
        return strategy.block_size is None or is_in_one_piece or not self.examples

    def _first_loss(self, strategy: Strategy) -> TracedLoss:
        if self.options.reduction == "infer" or self._at_once(strategy):
            return self.loss
        return self.trace(self.size(strategy))[0]

    def _full_batch(self, strategy: Strategy) -> tuple[Callable[[Any, Arrays], Any], Any]:
        """The function that computes the gradient by one `jax.value_and_grad`, and the arrays that it closes over."""
        options = self.options
        loss, consts = self.trace(self.examples)
        stacked = [False] * loss.aux_tree.num_leaves
        if options.stacks_aux:
            # A single microbatch is stacked too. Only a trace for another size shows which leaves have rows.
            combinations = aux_outputs.combine_aux(loss, self.trace(self.examples + 1)[0], options.aux_reduction)
            stacked = [how.kind == "stack" for how in combinations]
        fresh_keys = strategy.microbatch_size is not None and options.reduction != "infer"
        loss = _with_remat(loss, strategy.remat)

        def compute(consts: Any, arrays: Arrays) -> tuple[Any, list[Any], list[Any], list[Any]]:
            if fresh_keys:
                arrays = arrays._replace(keys=[jax.random.fold_in(key, 0) for key in arrays.keys])
            value, aux, grads = _value_and_grad(loss, consts, arrays)
            aux = [leaf[None] if stack else leaf for leaf, stack in zip(aux, stacked, strict=True)]
            return value, aux, grads, squared_norms.unknown(min(1, self.examples)) if options.noise else []

        return compute, consts

    def _passes(self, strategy: Strategy) -> tuple[Callable[[Any, Arrays], Any], Any]:
        """The function that computes the gradient in passes over the microbatches, and the arrays it closes over."""
        if self.options.reduction == "infer":
            assert self.checked_reading is not None
            consts, weights = self.trace(self.examples)[1], self.weights
            split: split_passes.AnySplit = self.split
        else:
            weights = None
            # With blocks, the policy is for the program in blocks, and not for the loss.
            policy = strategy.remat if strategy.block_size is None else None
            split, consts = self._declared(self.size(strategy), policy)
        passes = split_passes.Passes(
            split,
            self.size(strategy),
            self.options.accumulator_dtype,
            self.executor(strategy),
            strategy.remat,
            strategy.block_size,
            weights,
            self.options.noise,
        )

        def compute(consts: Any, arrays: Arrays) -> Any:
            try:
                return split_passes.value_and_grad(passes, consts, arrays)
            except RuleFailed as failure:
                if strategy.block_size is not None:  # it may be a rule of the blocks that failed
                    warn_of_failed_rule(failure.blame)
                    return self._passes(dataclasses.replace(strategy, block_size=None))[0](consts, arrays)
                # Reads the loss again without the rule that failed, and computes that primitive from the full batch.
                blame = failure.blame
            self._failed[blame.primitive] = blame.why
            for name in ("split", "checked_reading", "weights"):  # cached properties that depend on what was read
                self.__dict__.pop(name, None)
            compute_again, _ = self._passes(strategy)
            results = compute_again(consts, arrays)  # may raise the loss's own error, before the warning
            warn_of_failed_rule(blame)
            return results

        return compute, consts

    def _declared(self, size: int, policy: str | float | None) -> tuple[declared.DeclaredSplit, dict[int, Any]]:
        """The split of a loss with a declared reduction, and the arrays that it closes over at each size."""
        options = self.options
        counts = [self.examples] if self.shardings is None else self.shardings.executor(self.examples).counts
        takes_one_more = self.shardings is not None and self.shardings.takes_one_more(self.examples)
        counts = [*counts, 1] if takes_one_more else counts
        sizes = sorted({size, *(Microbatches(count, size).remainder for count in counts)} - {0})
        traced = {each: self.trace(each) for each in sizes}
        loss = traced[size][0]
        combinations = []
        if options.has_aux:
            aux_outputs.check_new_state(loss, self.loss)
            # If one microbatch has all examples, only a trace for another size shows which leaves have rows.
            may_have_rows = any(self.examples in aval.shape for _, aval in loss.aux_avals)
            other = self.trace(self.examples + 1)[0] if size == self.examples and may_have_rows else self.loss
            combinations = aux_outputs.combine_aux(loss, other, options.aux_reduction)
            for last_loss, _ in traced.values():
                aux_outputs.check_remainder(loss, last_loss, combinations)
        if options.stacks_aux and takes_one_more:
            raise InputError(
                'aux_reduction="stack" on a mesh with other axes needs the same number of examples on every device',
                given=f"{self.examples} examples for {self.num_batch_shards} devices",
                remedy="Pass a batch whose size is a multiple of that, or use another aux_reduction for that leaf.",
            )
        losses = {each: _with_remat(loss, policy) for each, (loss, _) in traced.items()}
        dtype = options.accumulator_dtype
        split = declared.DeclaredSplit(size, self.examples, losses, options.reduction, combinations, dtype)
        return split, {each: consts for each, (_, consts) in traced.items()}


def _check_host_batch(options: Options) -> None:
    given = {"mesh": options.mesh is not None, "reproducible": options.reproducible, "noise": options.noise}
    for name in (name for name, is_given in given.items() if is_given):
        raise InputError(
            f"A HostBatch is computed on one device, without {name}=",
            given=f"a HostBatch and {name}={getattr(options, name)!r}",
            remedy=f"Leave {name} out, or pass arrays.",
        )


def _with_remat(loss: TracedLoss, policy: str | float | None) -> TracedLoss:
    if policy is None:
        return loss
    traced = remat.rematerialised(loss.traced, loss.const_types, policy)
    return dataclasses.replace(loss, traced=traced)


def _value_and_grad(loss: TracedLoss, consts: Sequence[Any], arrays: Arrays) -> tuple[Any, list[Any], list[Any]]:
    """The value, the aux leaves and the gradient leaves, by one `jax.value_and_grad` of the full batch."""

    def of_wrt(wrt: list[Any]) -> tuple[Any, list[Any]]:
        outputs = loss(consts, arrays._replace(wrt=wrt))
        if loss.num_heads == 1:
            return outputs[0], outputs[1:]
        total, weight, *aux = outputs
        dtype = loss.value_dtype
        return ratio(total.astype(avals.wide_dtype(dtype, jnp.float32)), weight).astype(dtype), aux

    (value, aux), grads = jax.value_and_grad(of_wrt, has_aux=True)(arrays.wrt)
    return value, aux, grads
