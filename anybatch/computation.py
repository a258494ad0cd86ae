"""One gradient as a function of flat arrays, for each of the ways to compute it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from anybatch import auxiliary, compat, limits, placement
from anybatch.arguments import Arguments
from anybatch.batch import Cut
from anybatch.loss import TracedLoss, trace_loss
from anybatch.reading.loss_reading import split_loss
from anybatch.reading.report import Reading
from anybatch.reading.split import Split
from anybatch.routes import blocks, full, scan, split_passes
from anybatch.settings import Settings


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to compute a gradient.

    >>> print(Way(8, "dots_saveable"))
    microbatch_size=8, remat="dots_saveable"
    """

    microbatch_size: int | None  # None, or no less than the examples there are: all of them at once
    remat: str | None = None  # a policy of jax.checkpoint

    def __str__(self) -> str:
        remat = "" if self.remat is None else f', remat="{self.remat}"'
        return f"microbatch_size={self.microbatch_size}{remat}"


@dataclasses.dataclass(frozen=True)
class Computation:
    """A gradient, ready to compile and run: a function of arrays, and the arrays."""

    fun: Callable[..., list[Any]]
    leaves: list[Any]
    has_effects: bool


class Gradient:
    """The gradient that one call asks for, to be computed in any way."""

    def __init__(self, fun: Callable[..., Any], settings: Settings, arguments: Arguments) -> None:
        self.settings, self.arguments = settings, arguments
        self.examples = arguments.num_examples
        self._trace = functools.cache(
            functools.partial(trace_loss, fun, arguments, weighted=settings.weighted, has_aux=settings.has_aux)
        )

    @property
    def loss(self) -> TracedLoss:
        """The loss of the whole batch."""
        return self._trace(self.examples)[0]

    @functools.cached_property
    def copies(self) -> int:
        """How many gradients are computed at once: one, or as many as the `vmap` around us makes of it."""
        _, consts = self._trace(self.examples)
        return compat.vmapped_copies(*consts, *jax.tree.leaves(self.arguments.arrays))

    @functools.cached_property
    def unit(self) -> int:
        """What microbatch sizes had better be multiples of: the devices that the examples are spread over."""
        parts = max((placement.parts_of_rows(leaf) for leaf in self.arguments.arrays.batch), default=1)
        return parts if self.examples % parts == 0 and self.examples else 1

    @functools.cached_property
    def split(self) -> Split:
        """The loss, read."""
        loss, consts = self._trace(self.examples)
        return split_loss(loss, consts, fresh_draws=bool(self.arguments.arrays.keys))

    @functools.cached_property
    def checked_reading(self) -> Reading:
        """What was read, once it is known that the part of the loss that sees the whole batch fits."""
        return limits.check_head(self.split, on_coupled=self.settings.on_coupled, memory=self.settings.memory)

    def is_at_once(self, way: Way) -> bool:
        """Whether a way takes all examples at once."""
        return way.microbatch_size is None or self.examples <= way.microbatch_size

    def route(self, way: Way) -> str:
        """What a way does, in words."""
        if self.is_at_once(way):
            return "all at once"
        if self.settings.reduction == "infer" and self.checked_reading.passes == 2:
            return "two passes"
        return "one pass"

    def computation(self, way: Way) -> Computation:
        """What is to be compiled and run.

        Raises:
          InputError: for a loss that this way cannot compute.
          CoupledError: as the settings have it.
          HeadTooLargeError: if what must be computed from the whole batch at once does not fit.
        """
        if self.is_at_once(way):
            compute, inputs = self._at_once(way)
        elif self.settings.reduction == "infer":
            compute, inputs = self._as_read(way)
        else:
            compute, inputs = self._as_declared(way)
        leaves, tree = jax.tree.flatten(inputs)
        # Not always that of the whole batch: a declared loss may not even exist there.
        loss = self._first_loss(way)

        def flat_compute(*flat: Any) -> list[Any]:
            value, aux, grads = compute(jax.tree.unflatten(tree, flat))
            types = [*loss.out_avals[loss.num_heads :], *loss.types.wrt]
            if loss.num_heads == 1:
                value = compat.as_weak(value, loss.out_avals[0])
            return [value, *map(compat.as_weak, [*aux, *grads], types)]

        return Computation(flat_compute, leaves, loss.traced.has_effects)

    def results(self, way: Way, outputs: list[Any]) -> tuple[Any, Any, Any]:
        """The value, aux and gradient, from what the computation returned."""
        loss = self._first_loss(way)
        value, *rest = outputs
        num_aux = loss.aux_tree.num_leaves
        aux = jax.tree.unflatten(loss.aux_tree, rest[:num_aux])
        return value, aux, self.arguments.as_gradient(rest[num_aux:])

    def _first_loss(self, way: Way) -> TracedLoss:
        if self.settings.reduction == "infer" or self.is_at_once(way):
            return self.loss
        assert way.microbatch_size is not None
        return self._trace(way.microbatch_size)[0]

    def _at_once(self, way: Way) -> tuple[Callable[[Any], Any], Any]:
        settings = self.settings
        loss, consts = self._trace(self.examples)
        stacked = [False] * loss.aux_tree.num_leaves
        if settings.stacks_aux:
            # One microbatch is stacked too; whether a leaf has rows shows only at another size.
            combinations = auxiliary.combine_aux(loss, self._trace(self.examples + 1)[0], settings.aux_reduction)
            stacked = [how.kind == "stack" for how in combinations]
        fresh_keys = way.microbatch_size is not None and settings.reduction != "infer"
        compute = functools.partial(_all_at_once, _with_remat(loss, way), fresh_keys=fresh_keys, stacked=stacked)
        return compute, (consts, self.arguments.arrays)

    def _as_read(self, way: Way) -> tuple[Callable[[Any], Any], Any]:
        assert way.microbatch_size is not None and self.checked_reading is not None
        cut = Cut(self.examples, way.microbatch_size)
        compute = functools.partial(
            split_passes.value_and_grad, self.split, cut, self.settings.accumulator_dtype, remat=way.remat
        )
        return lambda inputs: compute(*inputs), (self._trace(self.examples)[1], self.arguments.arrays)

    def _as_declared(self, way: Way) -> tuple[Callable[[Any], Any], Any]:
        settings, size = self.settings, way.microbatch_size
        assert size is not None
        loss, consts = self._trace(size)
        cut = Cut(self.examples, size)
        last_loss, last_consts = self._trace(cut.remainder) if cut.remainder else (None, ())
        combinations = []
        if settings.has_aux:
            combinations = auxiliary.combine_aux(loss, self._trace(self.examples)[0], settings.aux_reduction)
            if last_loss is not None:
                auxiliary.check_remainder(loss, last_loss, combinations)
        last_loss = None if last_loss is None else _with_remat(last_loss, way)
        microbatches = scan.Microbatches(
            cut, _with_remat(loss, way), last_loss, settings.reduction, combinations, settings.accumulator_dtype
        )
        inputs = scan.Inputs(consts, last_consts, self.arguments.arrays)
        return functools.partial(scan.value_and_grad, microbatches), inputs


def _with_remat(loss: TracedLoss, way: Way) -> TracedLoss:
    if way.remat is None:
        return loss
    traced = blocks.rematerialised(loss.traced, loss.const_types, jax.tree.leaves(loss.types), way.remat)
    return dataclasses.replace(loss, traced=traced)


def _all_at_once(loss: TracedLoss, inputs: Any, *, fresh_keys: bool, stacked: list[bool]) -> tuple[Any, Any, Any]:
    consts, arrays = inputs
    if fresh_keys:
        arrays = arrays._replace(keys=[jax.random.fold_in(key, 0) for key in arrays.keys])
    value, aux, grads = full.value_and_grad(loss, consts, arrays)
    return value, [leaf[None] if stack else leaf for leaf, stack in zip(aux, stacked, strict=True)], grads
