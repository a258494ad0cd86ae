"""Passes over a batch that is spread over a mesh: every device takes its examples, and one sum joins the results."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from anybatch.jaxprs import avals
from anybatch.mesh import fixed_order, reductions
from anybatch.mesh.executor import BatchPass, OutputLayout, Shard, merge_axis, split_axis
from anybatch.reading.states import Batched, take_rows


@dataclasses.dataclass(frozen=True, eq=False)
class Spread:
    """Examples over the devices along some axes of a mesh, in order, as evenly as can be.

    A pass runs by itself on every device: nothing is exchanged before its end, but with `reduce="each"` the gradients
    of parameters that are spread over the same axes. What it leaves is added up once, after it.
    """

    mesh: jax.sharding.Mesh
    axes: tuple[str, ...]
    examples: int
    specs: Sequence[PartitionSpec | None] = ()  # how what is differentiated is spread, where that is known
    reduce: str = "once"
    num_groups: int | None = None  # of examples, in a fixed order of summation

    @functools.cached_property
    def devices(self) -> int:
        """The number of devices that have examples of their own."""
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def share(self) -> int:
        """The most examples that a device has."""
        return -(-self.examples // self.devices)

    @property
    def counts(self) -> list[int]:
        """The numbers of examples that there are on a device, the largest first: one, or two that differ by one."""
        fewest = self.examples // self.devices
        return [fewest] if self.examples % self.devices == 0 else [fewest + 1, fewest]

    @property
    def with_more(self) -> int:
        """How many devices, the first ones, have one example more than the others."""
        return self.examples % self.devices

    def __call__(self, batch_pass: BatchPass) -> tuple[list[Any], list[Any]]:
        """The sums over all examples, and the rows of all of them in the order of the batch."""
        whole, rows, takes, gives, variables = (
            batch_pass.whole,
            batch_pass.rows,
            batch_pass.takes,
            batch_pass.gives,
            batch_pass.variables,
        )
        specs = [*self.specs, *[None] * variables][:variables]
        sharded = [bool(reductions.names_at(spec, self.axes)) for spec in specs]
        stays = [self.reduce == "each" and each for each in sharded]
        in_whole = [
            self._on_devices(spec) if each else PartitionSpec() for spec, each in zip(specs, stays, strict=True)
        ]
        in_whole += [PartitionSpec()] * (len(whole) - variables)
        entering = [self._enter(array, each) for array, each in zip(rows, takes, strict=True)]
        by_hand = set(self.axes) == set(self.mesh.axis_names)

        def on_device(whole: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
            gathered = functools.partial(self._gathered, specs=specs, stays=stays)
            of_device = functools.partial(self._part, whole=gathered, is_shard=stays) if any(stays) else self._part
            sums, made = self._run(batch_pass, of_device, whole, rows)
            grads, others = sums[:variables], sums[variables:]
            grads, others = self._join(grads, others, specs, sharded, stays, scatters=by_hand)
            return grads, others, [self._split(each, layout) for each, layout in zip(made, gives, strict=True)]

        later = [each and not stay and not by_hand for each, stay in zip(sharded, stays, strict=True)]
        out_grads = [
            PartitionSpec(self.axes) if late else self._on_devices(spec) if each else PartitionSpec()
            for spec, each, late in zip(specs, sharded, later, strict=True)
        ]
        grads, others, made = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(in_whole, [spec for _, spec in entering]),
            out_specs=(out_grads, PartitionSpec(), [self._spec_of_rows(layout.rows) for layout in gives]),
            axis_names=set(self.axes),
            check_vma=False,
        )(list(whole), [array for array, _ in entering])
        if any(later):
            grads = self._scatter_later(grads, specs, later)
        return [*grads, *others], [self._leave(each, layout) for each, layout in zip(made, gives, strict=True)]

    def in_order(self, examples: Any) -> Any:
        """Examples as the batch has them, without the rows that make uneven ones even."""
        if not self._is_laid_out(examples, Batched(0)) or len(self.counts) == 1:
            return examples
        return jnp.take(examples, self._kept(*self.counts), axis=0)

    def once(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of whole arrays, over which XLA spreads the work as it likes.

        But where bits matter every device does all of it: sums over pieces would depend on how many there are.
        """
        if self.num_groups is None:
            return fun(*arguments)
        everywhere = PartitionSpec()
        run = jax.shard_map(
            fun,
            mesh=self.mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            axis_names=set(self.axes),
            check_vma=False,
        )
        return run(*arguments)

    def of_rows(self, number: int) -> "Spread":
        """So many rows that are selected from the examples, over the same devices."""
        return dataclasses.replace(self, examples=number, reduce="once")

    @property
    def has_all_examples(self) -> bool:
        """False: each device has only its own examples."""
        return False

    # On a device.

    def _part(self, examples: int, index: Any, **more: Any) -> Shard:
        """The examples of a device: consecutive ones, the first devices having one more if they are uneven."""
        first = index * examples
        if len(self.counts) == 2 and examples != self.counts[0]:
            first = first + self.with_more
        last_device = self.devices - 1 if self.counts[-1] else self.with_more - 1
        return Shard(first, examples, is_last=index == last_device, **more)

    def _run(
        self, batch_pass: BatchPass, of_device: Any, whole: list[Any], rows: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        fun, takes, gives = batch_pass.fun, batch_pass.takes, batch_pass.gives
        index = jnp.asarray(lax.axis_index(self.axes), jnp.int32)
        if self.num_groups is not None:
            mine = [self._merge(array, each, self.share) for array, each in zip(rows, takes, strict=True)]
            shard = of_device(self.share, index)
            return fixed_order.in_fixed_order(
                batch_pass, shard, self.num_groups // self.devices, self.examples, whole, mine
            )

        def with_examples(examples: int) -> tuple[list[Any], list[Any]]:
            shard = of_device(examples, index)
            mine = [self._mine(array, each, shard) for array, each in zip(rows, takes, strict=True)]
            sums, made = fun(shard, whole, mine)
            return sums, [self._fill(each, layout, examples) for each, layout in zip(made, gives, strict=True)]

        if len(self.counts) == 1:
            return with_examples(self.counts[0])
        if self.mesh.size > self.devices:
            return self._one_more(batch_pass, of_device, whole, rows, index)
        branches = [functools.partial(with_examples, count) for count in self.counts]
        return lax.cond(index < self.with_more, *branches)

    def _one_more(
        self, batch_pass: BatchPass, of_device: Any, whole: list[Any], rows: list[Any], index: Any
    ) -> tuple[list[Any], list[Any]]:
        """Uneven examples where the model exchanges something too: all devices must do the same, or some wait forever.

        So all take the examples that they have alike, then one more; those that have none take one of a neighbour,
        and what comes of it is not counted.
        """
        fun, fewest = batch_pass.fun, self.counts[1]
        has_more = index < self.with_more
        mine = of_device(fewest, index)
        first = index * fewest + jnp.minimum(index, self.with_more)
        extra = jnp.minimum(first + fewest, self.examples - 1)
        alike = dataclasses.replace(mine, first=first, is_last=mine.is_last & ~has_more)
        single = dataclasses.replace(mine, first=extra, examples=1, is_last=mine.is_last & has_more)

        def taken(shard: Shard, start: int) -> list[Any]:
            return [
                array[start : start + shard.examples]
                if self._is_own(array, each)
                else take_rows(array, each, self.examples, shard.first, shard.examples)
                for array, each in zip(rows, batch_pass.takes, strict=True)
            ]

        sums, made = fun(single, whole, taken(single, fewest))
        sums = [jnp.where(has_more, each, jnp.zeros_like(each)) for each in sums]
        if not fewest:
            return sums, made
        most_sums, most_made = fun(alike, whole, taken(alike, 0))
        return (
            [one + other for one, other in zip(most_sums, sums, strict=True)],
            [
                _after(one, other, layout.rows)
                for one, other, layout in zip(most_made, made, batch_pass.gives, strict=True)
            ],
        )

    def _is_own(self, array: Any, rows: Batched) -> bool:
        """Whether an array has the rows of this device alone, of uneven examples that were laid out."""
        return rows == Batched(0) and array.shape[0] == self.share != self.examples

    def _gathered(self, variables: list[Any], *, specs: list[Any], stays: list[bool]) -> list[Any]:
        """What is differentiated, from this device's shards of it."""
        return [
            self._gather(leaf, spec) if stay else leaf for leaf, spec, stay in zip(variables, specs, stays, strict=True)
        ]

    def _gather(self, shard: Any, spec: PartitionSpec) -> Any:
        # Of a dimension that is cut by several axes, a device has been given what those with examples cut first.
        entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
        in_turn = [sorted(names, key=lambda name: name not in self.axes) for names in entries]
        shards = self._shards(PartitionSpec(*(tuple(names) or None for names in in_turn)))
        others = set(shards.others)
        if not others:
            return shards.fold(shards.gather(shards.unfold(shard, self.axes)))
        # An array that XLA spreads over other axes would be gathered over these, too: so they are taken by hand.
        nested = jax.shard_map(
            lambda shard: shards.gather(shards.unfold(shard, self.mesh.axis_names)),
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=self._on_devices(spec, shards.others),
            out_specs=shards.unfolded_spec(shards.others),
            axis_names=others,
            check_vma=False,
        )
        return shards.fold(nested(shard))

    def _shards(self, spec: PartitionSpec) -> reductions.Shards:
        return reductions.Shards(spec, self.mesh, self.axes)

    def _join(
        self,
        grads: list[Any],
        others: list[Any],
        specs: list[Any],
        sharded: list[bool],
        stays: list[bool],
        *,
        scatters: bool,
    ) -> tuple[list[Any], list[Any]]:
        """Adds up over the devices: all that is whole in one collective, and what is spread as it is spread."""
        in_order = self.num_groups is not None
        together = [grad for grad, each in zip(grads, sharded, strict=True) if not each]
        add_up = reductions.add_up_in_order if in_order else reductions.add_up
        summed = add_up([*together, *others], self.axes) if together or others else []
        of_whole = iter(summed[: len(together)])
        joined = []
        for grad, spec, each, stay in zip(grads, specs, sharded, stays, strict=True):
            if not each:
                joined.append(next(of_whole))
            elif stay:  # over these axes it was added up in every microbatch
                names = {name for several in reductions.names_at(spec, self.axes).values() for name in several}
                rest = tuple(name for name in self.axes if name not in names)
                joined.append(lax.psum(grad, rest) if rest else grad)
            elif scatters:
                shards = self._shards(spec)
                joined.append(shards.fold(shards.scatter(shards.unfold(grad, ()), in_order=in_order)))
            else:
                joined.append(self._shards(spec).unfold(grad, ())[None])
        return joined, summed[len(together) :]

    def _scatter_later(self, grads: list[Any], specs: list[Any], later: list[bool]) -> list[Any]:
        """Adds up gradients that are also spread over axes of the model: with all axes at hand, none is gathered."""
        waiting = [grad for grad, late in zip(grads, later, strict=True) if late]
        their = [self._shards(spec) for spec, late in zip(specs, later, strict=True) if late]

        def scatter(partial: list[Any]) -> list[Any]:
            in_order = self.num_groups is not None
            return [
                each.fold(each.scatter(grad[0], in_order=in_order)) for grad, each in zip(partial, their, strict=True)
            ]

        outside = [PartitionSpec(self.axes, *each.unfolded_spec(each.others)) for each in their]
        inside = [each.spec for each in their]
        run = jax.shard_map(scatter, mesh=self.mesh, in_specs=(outside,), out_specs=inside, check_vma=False)
        scattered = iter(run(waiting))
        return [next(scattered) if late else grad for grad, late in zip(grads, later, strict=True)]

    def _on_devices(self, spec: Any, axes: tuple[str, ...] | None = None) -> PartitionSpec:
        """What of a spec is about some axes: those of the examples, if not told otherwise."""
        found = reductions.names_at(spec, self.axes if axes is None else axes)
        return PartitionSpec(*(found.get(dimension) for dimension in range(len(spec))))

    # Rows of the examples, on their way to the devices and back.

    def _enter(self, array: Any, rows: Batched) -> tuple[Any, PartitionSpec]:
        """An array with rows as it goes in, and how it is spread: by examples, or whole if these are uneven."""
        if len(self.counts) == 2 and not self._is_laid_out(array, rows):
            return array, PartitionSpec()
        return self._split(array, rows), self._spec_of_rows(rows)

    def _is_laid_out(self, array: Any, rows: Batched) -> bool:
        """Whether uneven examples have been laid out already, so that each device has the same number of rows."""
        return rows == Batched(0) and array.shape[0] == self.devices * self.share

    def _mine(self, array: Any, rows: Batched, shard: Shard) -> Any:
        """The rows of the examples of a device, from what has gone in."""
        if len(self.counts) == 1:
            return self._merge(array, rows, shard.examples)
        if self._is_own(array, rows):
            return array[: shard.examples]
        return take_rows(array, rows, self.examples, shard.first, shard.examples)

    def _fill(self, array: Any, layout: OutputLayout, examples: int) -> Any:
        """Rows of uneven examples, with as many as on the device that has the most."""
        missing = layout.count(self.share) - layout.count(examples)
        if not missing:
            return array
        if avals.has_keys(array):
            return _rewrapped(array, lambda data: self._fill(data, layout, examples))
        split = split_axis(array, layout.rows, layout.count(examples))
        widths = [(0, missing if axis == layout.rows.axis + 1 else 0) for axis in range(split.ndim)]
        return merge_axis(jnp.pad(split, widths), layout.rows)

    def _leave(self, array: Any, layout: OutputLayout) -> Any:
        """The rows of all examples, in order."""
        if len(self.counts) == 1:
            return merge_axis(array, layout.rows) if layout.rows.outer > 1 else array
        if avals.has_keys(array):
            return _rewrapped(array, lambda data: self._leave(data, layout))
        most, least = (layout.count(count) for count in self.counts)
        split = array if layout.rows.outer > 1 else split_axis(array, layout.rows, most * self.devices)
        return merge_axis(jnp.take(split, self._kept(most, least), axis=layout.rows.axis + 1), layout.rows)

    def _kept(self, most: int, least: int) -> Any:
        """Which rows are of examples, where each device has `most` of them, or `least` and some to fill up."""
        numbers = [most if device < self.with_more else least for device in range(self.devices)]
        return np.concatenate([device * most + np.arange(number) for device, number in enumerate(numbers)])

    def _split(self, array: Any, rows: Any) -> Any:
        rows = rows.rows if isinstance(rows, OutputLayout) else rows
        return split_axis(array, rows) if rows.outer > 1 else array

    def _merge(self, array: Any, rows: Batched, examples: int) -> Any:
        return merge_axis(array, rows) if rows.outer > 1 else array

    def _spec_of_rows(self, rows: Batched) -> PartitionSpec:
        before = rows.axis + (1 if rows.outer > 1 else 0)
        return PartitionSpec(*[None] * before, self.axes)


def _rewrapped(keys: Any, change: Callable[[Any], Any]) -> Any:
    """Keys, changed as numbers are, which they are made of: along a last axis of their own."""
    return jax.random.wrap_key_data(change(jax.random.key_data(keys)), impl=avals.key_impl(keys.dtype))


def _after(one: Any, other: Any, rows: Batched) -> Any:
    """The rows of some examples, and then those of others."""
    if avals.has_keys(one):
        numbers = _after(jax.random.key_data(one), jax.random.key_data(other), rows)
        return jax.random.wrap_key_data(numbers, impl=avals.key_impl(one.dtype))
    joined = jnp.concatenate([split_axis(one, rows), split_axis(other, rows)], rows.axis + 1)
    return merge_axis(joined, rows)
