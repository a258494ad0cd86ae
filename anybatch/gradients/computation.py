"""The whole batch at once: what `jax.value_and_grad` does.

One gradient as a function of flat arrays, for each of the ways to compute it.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call import aux_outputs, placement
from anybatch.call.arguments import Arguments, Arrays
from anybatch.call.loss import TracedLoss, trace_loss
from anybatch.call.microbatches import Microbatches
from anybatch.call.options import Options
from anybatch.errors import InputError
from anybatch.gradients import declared as scan
from anybatch.gradients import head_budget, remat, split_passes, squared_norms
from anybatch.gradients.outputs import ratio, wide_dtype
from anybatch.jaxprs import avals
from anybatch.mesh import executor as parts
from anybatch.mesh import fixed_order
from anybatch.mesh.call_shardings import CallShardings, groups_of
from anybatch.planning.strategy import Computation, Route, Strategy
from anybatch.reading.coupling import RuleFailed
from anybatch.reading.microbatch_weights import MicrobatchWeights, microbatch_weights
from anybatch.reading.read import split_loss, split_loss_in_one_pass
from anybatch.reading.reader import warn_of_failed_rule
from anybatch.reading.report import Reading
from anybatch.reading.split import Split


def value_and_grad(loss: TracedLoss, consts: Sequence[Any], arrays: Arrays) -> tuple[Any, list[Any], list[Any]]:
    """The value, the aux leaves and the gradient leaves, for all examples in one piece."""

    def of_wrt(wrt: list[Any]) -> tuple[Any, list[Any]]:
        outputs = loss(consts, arrays._replace(wrt=wrt))
        if loss.num_heads == 1:
            return outputs[0], outputs[1:]
        total, weight, *aux = outputs
        dtype = loss.value_dtype
        return ratio(total.astype(wide_dtype(dtype, jnp.float32)), weight).astype(dtype), aux

    (value, aux), grads = jax.value_and_grad(of_wrt, has_aux=True)(arrays.wrt)
    return value, aux, grads


class Gradient:
    """The gradient that one call asks for, to be computed in any way."""

    def __init__(self, fun: Callable[..., Any], options: Options, arguments: Arguments) -> None:
        if options.reduction != "infer" and options.microbatch_size is not None:
            arguments.refuse_unnamed_rows("microbatch")
        self.examples = arguments.num_examples
        self.shardings = None if options.mesh_options is None else CallShardings(options.mesh_options, arguments)
        self.options = options
        self.arguments = arguments if self.shardings is None else self.shardings.arguments
        self._traced: dict[int, tuple[TracedLoss, Any]] = {}  # by the number of examples
        self._fun = fun
        self._failed: dict[str, str] = {}  # primitives that could not be computed as they were read, and why

    def _trace(self, num_examples: int) -> tuple[TracedLoss, Any]:
        # Not by functools.cache of a method: a cycle would keep the arguments, the batch too, until it is collected.
        if num_examples not in self._traced:
            self._traced[num_examples] = self._trace_loss(num_examples)
        return self._traced[num_examples]

    def _trace_loss(self, num_examples: int) -> tuple[TracedLoss, Any]:
        how: dict[str, Any] = {"weighted": self.options.weighted, "has_aux": self.options.has_aux}
        if self.shardings is None:
            return trace_loss(self._fun, self.arguments, num_examples, **how)
        with self.shardings.watched():
            traced, consts = trace_loss(
                self._fun, self.arguments, num_examples, **how, on_mesh=(self.shardings.mesh, self.shardings.over.axes)
            )
        return traced, self.shardings.placed(consts)

    def context(self) -> Any:
        """What must be around it when it is traced, compiled and run."""
        return contextlib.nullcontext() if self.shardings is None else self.shardings.context()

    @property
    def max_microbatch_size(self) -> int:
        """The most examples at a time: all of them; on a mesh, the most that a device has."""
        return self.examples if self.shardings is None else self.shardings.share(self.examples)

    @property
    def loss(self) -> TracedLoss:
        """The loss of the whole batch."""
        return self._trace(self.examples)[0]

    @property
    def ignores_batch(self) -> bool:
        """Whether the loss, as it was traced, is not computed from any array of the batch."""
        for loss, _ in self._traced.values():
            first, count = len(loss.types.wrt), len(loss.types.batch)
            if any(any(loss.traced.inputs_used_by(head)[first : first + count]) for head in range(loss.num_heads)):
                return False
        return bool(self._traced)

    @property
    def draws_per_microbatch(self) -> bool:
        """Whether random numbers may depend on the size of the microbatches."""
        return bool(self.arguments.arrays.keys)

    def bytes_written(self, count: Callable[[Any], int]) -> int:
        """The bytes that the loss of the whole batch writes, as `count` counts those of a program."""
        return count(self.loss.traced.jaxpr)

    @functools.cached_property
    def vmap_copies(self) -> int:
        """How many gradients are computed at once: one, or as many as the `vmap` around us makes of it."""
        _, consts = self._trace(self.examples)
        return avals.vmapped_copies(*consts, *jax.tree.leaves(self.arguments.arrays))

    @property
    def devices(self) -> list[Any]:
        """The devices of this process that it runs on, as far as its arrays say."""
        if self.shardings is not None:
            return list(self.shardings.mesh.local_devices)
        return placement.devices_of(jax.tree.leaves(self.arguments.arrays))

    @property
    def num_batch_shards(self) -> int:
        """How many devices have examples of their own, without which their arrays would say so."""
        return 1 if self.shardings is None else self.shardings.over.devices

    def local_bytes(self, role: str) -> int:
        """The bytes of the arguments of a role on one device."""
        leaves = getattr(self.arguments.arrays, role)
        known = sum(map(placement.local_bytes, leaves))
        if self.shardings is None or self.shardings.is_eager:
            return known
        if role == "batch":
            return -(-known // self.num_batch_shards)
        return self.shardings.shard_bytes(leaves) if role == "wrt" else known

    @functools.cached_property
    def size_multiple(self) -> int:
        """What microbatch sizes had better be multiples of: the devices that the examples are spread over."""
        if self.shardings is not None:
            return 1
        parts = max((placement.num_row_shards(leaf) for leaf in self.arguments.arrays.batch), default=1)
        return parts if self.examples % parts == 0 and self.examples else 1

    @functools.cached_property
    def split(self) -> Split:
        """The loss, read."""
        loss, consts = self._trace(self.examples)
        fresh = bool(self.arguments.arrays.keys)
        # Noise is told by microbatches of the batch itself, and a fixed order of sums is one of its examples.
        may_select = not self.options.noise and not self.options.reproducible
        split = split_loss_in_one_pass if self._is_in_parts else split_loss
        return split(loss, consts, fresh_draws=fresh, may_select=may_select, failed=self._failed)

    @functools.cached_property
    def checked_reading(self) -> Reading:
        """What was read, once it is known that the part of the loss that sees the whole batch fits."""
        return head_budget.check_head(self.split, on_coupled=self.options.on_coupled, memory=self.options.memory)

    @functools.cached_property
    def weights(self) -> MicrobatchWeights | None:
        """What microbatches of a loss that was read count, if the noise in its gradient is wanted."""
        if not self.options.noise or self.options.reduction != "infer":
            return None
        # Read once more, so that sums of data alone are known for each microbatch.
        fresh = bool(self.arguments.arrays.keys)
        again = split_loss(*self._trace(self.examples), fresh_draws=fresh, sums_data_later=True, failed=self._failed)
        return microbatch_weights(self.split, again)

    @property
    def is_coupled(self) -> bool:
        """Whether part of the loss is computed from the whole batch at once, in every way."""
        return self.options.reduction == "infer" and not self.checked_reading.separable

    def is_full_batch(self, strategy: Strategy) -> bool:
        """Whether a way takes all examples at once."""
        return strategy.microbatch_size is None or self.max_microbatch_size <= strategy.microbatch_size

    @property
    def reduce_modes(self) -> tuple[str, ...]:
        """When gradients may be added up over a mesh, what sends least first."""
        shardings = self.shardings
        if shardings is None or shardings.over.reduce != "auto" or self.options.noise:
            return (self.options.fixed_reduce,)
        is_even = self.examples % shardings.over.devices == 0
        return ("once", "each") if shardings.is_sharded and is_even else ("once",)

    @property
    def methods(self) -> tuple[str | None, ...]:
        """What there is to choose from beside sizes and styles, what is likely to be fastest first."""
        return (None,)

    @property
    def noun(self) -> str:
        """What is computed, in words."""
        return "gradient"

    @property
    def identity(self) -> Sequence[Any]:
        """What decides about bytes and times beside the loss, its arguments and the options."""
        return ()

    @property
    def note(self) -> str:
        """What there is to say about it, for people."""
        return ""

    def route(self, strategy: Strategy) -> Route:
        """What a strategy does with the batch."""
        if self.is_full_batch(strategy):
            return Route.FULL_BATCH
        if self.options.reduction == "infer" and self.checked_reading.passes == 2:
            return Route.TWO_PASSES
        return Route.ONE_PASS

    def computation(self, strategy: Strategy) -> Computation:
        """What is to be compiled and run.

        Raises:
          InputError: for a loss that this way cannot compute.
          CoupledError: as the options have it; if the noise is wanted, for every loss that looks across examples.
          HeadTooLargeError: if what must be computed from the whole batch at once does not fit.
        """
        weights = self.weights
        if self.is_full_batch(strategy) and not self._is_in_parts:
            compute, inputs = self._at_once(strategy)
        elif self.options.reduction == "infer":
            compute, inputs = self._as_read(strategy, weights)
        else:
            compute, inputs = self._as_declared(strategy)
        leaves, tree = jax.tree.flatten(inputs)
        # Not always that of the whole batch: a declared loss may not even exist there.
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
        """How many numbers tell of the noise."""
        return squared_norms.SUMMARY if self.options.noise else 0

    @property
    def _is_in_parts(self) -> bool:
        """Whether examples are computed in parts even where a microbatch has room for them all.

        No examples have no parts: their loss is whatever the user's function makes of an empty batch, such as NaN for a
        mean, and no sum over devices tells that.
        """
        return self.examples > 0 and (self.shardings is not None or self.options.reproducible)

    def _size(self, strategy: Strategy) -> int:
        """The examples of a microbatch."""
        return (
            self.max_microbatch_size
            if strategy.microbatch_size is None
            else max(1, min(self.max_microbatch_size, strategy.microbatch_size))
        )

    def _place(self, strategy: Strategy) -> parts.Executor:
        """Where passes over the examples run."""
        number = None
        if self.options.reproducible:
            assert strategy.microbatch_size is not None
            number = groups_of(self.examples, strategy.microbatch_size, self.num_batch_shards)
        if self.shardings is not None:
            return self.shardings.spread(self.examples, reduce=strategy.reduce, num_groups=number)
        if number is not None:
            return fixed_order.InGroups(self.examples, number=number)
        return parts.LocalExecutor(self.examples, self._runs(self._size(strategy)))

    def _runs(self, size: int) -> int:
        """Of how many runs of examples a microbatch is made, so that a batch on many devices need not be moved.

        Under `jit` arrays do not always tell on how many: any number of devices that divides the runs is served. The
        same outside, so that both compute the same. But a loss that was declared sees consecutive examples unless its
        batch is known to be spread; so does one with effects, and one whose microbatches have keys or results of their
        own.
        """
        batch, options = self.arguments.arrays.batch, self.options
        mesh = placement.mesh_of(batch)
        declared = options.reduction != "infer"
        if declared and (mesh.empty or self.arguments.arrays.keys or options.aux_of_microbatches):
            return 1
        if not declared and self.loss.traced.has_effects:
            return 1
        if mesh.manual_axes or mesh.explicit_axes:  # inside shard_map, or with types that say where rows are
            return 1
        devices = jax.device_count() if mesh.empty else mesh.size
        return math.gcd(devices, size, self.examples)

    def results(self, strategy: Strategy, outputs: list[Any]) -> tuple[Any, Any, Any, list[Any]]:
        """The value, aux and gradient, and what tells of the noise, from what the computation returned."""
        loss = self._first_loss(strategy)
        value, *rest = outputs if self.shardings is None else self.shardings.returned(outputs)
        num_aux = loss.aux_tree.num_leaves
        aux = jax.tree.unflatten(loss.aux_tree, rest[:num_aux])
        noise, grads = rest[num_aux : num_aux + self._num_noise], rest[num_aux + self._num_noise :]
        return value, aux, self.arguments.as_gradient(grads), noise

    def _first_loss(self, strategy: Strategy) -> TracedLoss:
        if self.options.reduction == "infer" or (self.is_full_batch(strategy) and not self._is_in_parts):
            return self.loss
        return self._trace(self._size(strategy))[0]

    def _at_once(self, strategy: Strategy) -> tuple[Callable[[Any], Any], Any]:
        options = self.options
        loss, consts = self._trace(self.examples)
        stacked = [False] * loss.aux_tree.num_leaves
        if options.stacks_aux:
            # One microbatch is stacked too; whether a leaf has rows shows only at another size.
            combinations = aux_outputs.combine_aux(loss, self._trace(self.examples + 1)[0], options.aux_reduction)
            stacked = [how.kind == "stack" for how in combinations]
        fresh_keys = strategy.microbatch_size is not None and options.reduction != "infer"
        compute = functools.partial(_all_at_once, _with_remat(loss, strategy), fresh_keys=fresh_keys, stacked=stacked)
        noise = squared_norms.untold if options.noise else lambda _: []
        return lambda inputs: (*compute(inputs), noise(min(1, self.examples))), (consts, self.arguments.arrays)

    def _as_read(self, strategy: Strategy, weights: MicrobatchWeights | None) -> tuple[Callable[[Any], Any], Any]:
        assert self.checked_reading is not None
        dtype = self.options.accumulator_dtype
        passes = split_passes.Passes(
            self.split, self._size(strategy), dtype, self._place(strategy), strategy.remat, weights
        )

        def compute(inputs: Any) -> Any:
            try:
                return split_passes.value_and_grad(passes, *inputs)
            except RuleFailed as failure:
                return self._without_rule(failure, strategy, inputs)

        return compute, (self._trace(self.examples)[1], self.arguments.arrays)

    def _without_rule(self, failure: RuleFailed, strategy: Strategy, inputs: Any) -> Any:
        """Computes from the whole batch at once what a rule said can be computed in microbatches, and cannot."""
        self._failed[failure.blame.primitive] = failure.blame.why
        for name in ("split", "checked_reading", "weights"):
            self.__dict__.pop(name, None)
        compute, _ = self._as_read(strategy, self.weights)
        results = compute(inputs)  # or raises what the loss raises by itself
        warn_of_failed_rule(failure.blame)
        return results

    def _as_declared(self, strategy: Strategy) -> tuple[Callable[[Any], Any], Any]:
        options, size = self.options, self._size(strategy)
        counts = [self.examples] if self.shardings is None else self.shardings.spread(self.examples).counts
        more = [1] if self.shardings is not None and self.shardings.takes_one_more(self.examples) else []
        sizes = sorted({size, *(Microbatches(count, size).remainder for count in [*counts, *more])} - {0})
        traced = {each: self._trace(each) for each in sizes}
        loss = traced[size][0]
        combinations = []
        if options.has_aux:
            aux_outputs.check_new_state(loss, self._trace(self.examples)[0])
            combinations = aux_outputs.combine_aux(loss, self._trace(self.examples)[0], options.aux_reduction)
            for last_loss, _ in traced.values():
                aux_outputs.check_remainder(loss, last_loss, combinations)
        if options.stacks_aux and self.shardings is not None and self.shardings.takes_one_more(self.examples):
            raise InputError(
                'aux_reduction="stack" on a mesh with axes of the model needs as many examples on every device',
                given=f"{self.examples} examples for {self.num_batch_shards} devices",
                remedy="Pass a batch that divides the devices, or combine that leaf otherwise.",
            )
        losses = {each: _with_remat(last_loss, strategy) for each, (last_loss, _) in traced.items()}
        microbatches = scan.DeclaredLoss(
            size, self.examples, losses, options.reduction, combinations, options.accumulator_dtype, options.noise
        )
        consts = {each: consts for each, (_, consts) in traced.items()}
        compute = functools.partial(scan.value_and_grad, microbatches, self._place(strategy))
        return compute, (consts, self.arguments.arrays)


def _with_remat(loss: TracedLoss, strategy: Strategy) -> TracedLoss:
    if strategy.remat is None:
        return loss
    traced = remat.rematerialised(loss.traced, loss.const_types, jax.tree.leaves(loss.types), strategy.remat)
    return dataclasses.replace(loss, traced=traced)


def _all_at_once(loss: TracedLoss, inputs: Any, *, fresh_keys: bool, stacked: list[bool]) -> tuple[Any, Any, Any]:
    consts, arrays = inputs
    if fresh_keys:
        arrays = arrays._replace(keys=[jax.random.fold_in(key, 0) for key in arrays.keys])
    value, aux, grads = value_and_grad(loss, consts, arrays)
    return value, [leaf[None] if stack else leaf for leaf, stack in zip(aux, stacked, strict=True)], grads
