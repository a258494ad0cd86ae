"""The executor for a mesh: each device runs the pass for its examples, and one reduction adds up the results.

The reductions come first in this file: sums over devices inside `shard_map`, in one collective or in a fixed order.
"""

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from anybatch.call.placement import axes_of
from anybatch.jaxprs import avals
from anybatch.mesh.executor import BatchPass, Executor, OutputLayout, Shard, in_fixed_order, merge_axis, split_axis
from anybatch.reading.block_loop import OfRows, OverRows
from anybatch.reading.states import Batched, take_rows

# Arrays of at most this many elements are converted to the dtype of the gradients, to be summed in the same collective.
SMALL = 4096

# An integer is summed as its bytes, each of them a float. That is exact as long as no sum of bytes reaches 2**24, from
# which on float32 does not hold every integer.
_BYTE = 8
_MOST_DEVICES = 2**16


def sum_over(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sums of arrays over mesh axes, in one collective for each dtype of large arrays: usually one.

    XLA combines all-reduces of the same dtype. So small arrays, such as a count, or a float32 loss with float64
    gradients, are converted to the dtype of the largest arrays. Nothing is rounded.
    """
    carrier = _carrier(arrays)
    if carrier is None or math.prod(map(lax.axis_size, axes)) > _MOST_DEVICES:
        return list(lax.psum(tuple(arrays), axes))
    packed = [_pack(array, carrier) for array in arrays]
    summed = lax.psum(packed, axes)
    return [_unpack(each, array, carrier) for each, array in zip(summed, arrays, strict=True)]


def _carrier(arrays: Sequence[jax.Array]) -> Any:
    """The dtype that small arrays are converted to: float32 or float64, whichever has more bytes among the arrays."""
    sizes: dict[Any, int] = {}
    for array in arrays:
        if array.dtype in (jnp.float32, jnp.float64):
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size * array.dtype.itemsize
    if not sizes:
        return None
    small = all(array.size <= SMALL for array in arrays)
    return max(sizes, key=lambda dtype: dtype.itemsize if small else sizes[dtype])


def _is_packed(array: jax.Array, carrier: Any) -> bool:
    if array.dtype == carrier or array.size > SMALL:
        return False
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return True
    # Of floats only narrower ones: wider ones would be rounded.
    return jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < carrier.itemsize


def _pack(array: jax.Array, carrier: Any) -> jax.Array:
    if not _is_packed(array, carrier):
        return array
    if not jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(carrier)
    unsigned = lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
    shifts = [_BYTE * position for position in range(array.dtype.itemsize)]
    return jnp.stack([((unsigned >> shift) & 0xFF).astype(carrier) for shift in map(unsigned.dtype.type, shifts)])


def _unpack(summed: jax.Array, like: jax.Array, carrier: Any) -> jax.Array:
    if not _is_packed(like, carrier):
        return summed
    if jnp.issubdtype(like.dtype, jnp.floating):
        return summed.astype(like.dtype)
    if like.dtype == jnp.bool_:
        return summed > 0
    wide = jnp.dtype(jnp.uint64 if like.dtype.itemsize == 8 else jnp.uint32)  # a sum of bytes needs more than a byte
    total = jnp.zeros(like.shape, wide)
    for position in range(like.dtype.itemsize):  # wraps around like a sum of integers
        total = total + (summed[position].astype(wide) << wide.type(_BYTE * position))
    return lax.bitcast_convert_type(total.astype(f"uint{8 * like.dtype.itemsize}"), like.dtype)


def names_at(spec: PartitionSpec | None, axes: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """The mesh axes, among `axes`, over which each dimension of an array is sharded. Other dimensions are left out."""
    found = {}
    for dimension, names in enumerate(axes_of(spec)):
        if kept := tuple(name for name in names if name in axes):
            found[dimension] = kept
    return found


@dataclasses.dataclass(frozen=True)
class Shards:
    """The sharding of an array, over axes of the batch and perhaps over other axes of the mesh.

    A dimension can be sharded over several axes, one after the other. `unfold` reshapes it into one dimension for each
    of these axes and one for the rest, so that there is a dimension to gather or scatter along for every axis.
    """

    spec: PartitionSpec
    mesh: Mesh
    axes: tuple[str, ...]  # of the batch

    @property
    def _axis_names(self) -> list[tuple[str, ...]]:
        return axes_of(self.spec)

    @property
    def others(self) -> tuple[str, ...]:
        """The other axes that shard the array."""
        return tuple(name for names in self._axis_names for name in names if name not in self.axes)

    def unfold(self, array: jax.Array, local: Sequence[str]) -> jax.Array:
        """Adds a dimension for every axis that shards the array. Along the axes `local`, the device has one shard."""
        shape: list[int] = []
        for size, names in zip(array.shape, [*self._axis_names, *[()] * array.ndim], strict=False):
            sizes = [1 if name in local else self.mesh.shape[name] for name in names]
            shape += [*sizes, size // math.prod(sizes)]
        return array.reshape(shape)

    def fold(self, array: jax.Array) -> jax.Array:
        """The inverse of `unfold`."""
        shape, position = [], 0
        unsharded = array.ndim - sum(map(len, self._axis_names)) - len(self._axis_names)
        for names in [*self._axis_names, *[()] * unsharded]:
            shape.append(math.prod(array.shape[position : position + len(names) + 1]))
            position += len(names) + 1
        return array.reshape(shape)

    def unfolded_spec(self, axes: Sequence[str]) -> PartitionSpec:
        entries = [[*(name if name in axes else None for name in names), None] for names in self._axis_names]
        return PartitionSpec(*(entry for each in entries for entry in each))

    def _along(self) -> list[tuple[int, str]]:
        """The dimensions of the unfolded array that belong to axes of the batch, with the names of these axes."""
        names = [name for several in self._axis_names for name in (*several, None)]
        return [(position, name) for position, name in enumerate(names) if name in self.axes and name is not None]

    def scatter(self, unfolded: jax.Array, *, in_order: bool = False) -> jax.Array:
        """The sum of an unfolded array over the axes of the batch. Each device keeps its shard of it."""
        left = list(self.axes)
        for position, name in self._along():
            if in_order:
                unfolded = _scatter_in_order(unfolded, name, position)
            else:
                unfolded = lax.psum_scatter(unfolded, name, scatter_dimension=position, tiled=True)
            left.remove(name)
        if left and in_order:
            (unfolded,) = sum_in_order([unfolded], tuple(left))
        elif left:
            unfolded = lax.psum(unfolded, tuple(left))
        return unfolded

    def gather(self, unfolded: jax.Array) -> jax.Array:
        """All-gathers an unfolded array along the axes of the batch: the transpose of `scatter`."""
        for position, name in self._along():
            unfolded = lax.all_gather(unfolded, name, axis=position, tiled=True)
        return unfolded


def tree_sum(rows: jax.Array) -> jax.Array:
    """The sum of 2**k rows by a binary tree that adds neighbours first."""
    while rows.shape[0] > 1:
        rows = lax.optimization_barrier(rows[0::2] + rows[1::2])
    return rows[0]


def sum_in_order(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sums of arrays over mesh axes with 2**k devices, always by the same tree over the devices.

    Each device sums a slice of the numbers and sends it to the others. That sends as many bytes as a ring all-reduce.
    """
    devices = math.prod(map(lax.axis_size, axes))
    if devices == 1:
        return list(arrays)
    summed: list[Any] = [None] * len(arrays)
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        mine = [position for position, array in enumerate(arrays) if array.dtype == dtype]
        is_bool = dtype == jnp.bool_
        flat = jnp.concatenate([arrays[position].astype(jnp.int32 if is_bool else dtype).ravel() for position in mine])
        length = flat.size
        slices = jnp.pad(flat, (0, -length % devices)).reshape(devices, -1)
        own = tree_sum(lax.all_to_all(slices, axes, 0, 0))
        total = lax.all_gather(own, axes, tiled=True)[:length]
        start = 0
        for position in mine:
            array = arrays[position]
            summed[position] = total[start : start + array.size].reshape(array.shape).astype(dtype)
            start += array.size
    return summed


def _scatter_in_order(array: jax.Array, name: str, dimension: int) -> jax.Array:
    """The sum of an array over a mesh axis. Each device keeps one slice of it along a dimension."""
    if lax.axis_size(name) == 1:
        return array
    slices = jnp.moveaxis(array, dimension, 0)
    return jnp.expand_dims(tree_sum(lax.all_to_all(slices, name, 0, 0)), dimension)


class Summation(enum.Enum):
    """How the gradient of a parameter is summed over the devices."""

    TOGETHER = enum.auto()  # with all other unsharded arrays, in one collective after the pass
    EACH = enum.auto()  # in every microbatch, which scatters it: the parameter is sharded over axes of the batch
    SCATTER = enum.auto()  # after the pass, by a reduce-scatter
    LATER = enum.auto()  # likewise, in a second shard_map: axes of the model shard it, too


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A differentiated array on the mesh."""

    spec: PartitionSpec | None  # as far as it is known
    summation: Summation

    @property
    def enters_sharded(self) -> bool:
        """True if each device gets its shard, and gathers the others in every microbatch."""
        return self.summation is Summation.EACH


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ShardedExecutor(Executor):
    """Runs a pass inside `shard_map`. The batch is sharded over axes of a mesh, in order and as evenly as possible.

    Devices exchange nothing before the end of the pass, except with `reduce="each"` the parameters that are sharded
    over the same axes, and their gradients. After the pass, its sums are added up over the devices once.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    specs: Sequence[PartitionSpec | None] = ()  # of the differentiated arrays, as far as they are known
    reduce: str = "once"

    @functools.cached_property
    def devices(self) -> int:
        return math.prod(self.mesh.shape[name] for name in self.axes)

    @property
    def share(self) -> int:
        return -(-self.examples // self.devices)

    @property
    def counts(self) -> list[int]:
        """The different numbers of examples on a device, the larger first: one number, or two that differ by one."""
        fewest = self.examples // self.devices
        return [fewest] if self.examples % self.devices == 0 else [fewest + 1, fewest]

    @property
    def with_more(self) -> int:
        """The number of devices, the first ones, that have one example more than the others; 0 if all have the same."""
        return self.examples % self.devices

    def __call__(self, batch_pass: BatchPass) -> tuple[list[Any], list[Any]]:
        num_variables, layouts = batch_pass.num_variables, batch_pass.output_layouts
        parameters = [self._parameter(spec) for spec in [*self.specs, *[None] * num_variables][:num_variables]]
        in_specs = [self._restricted(each.spec) if each.enters_sharded else PartitionSpec() for each in parameters]
        in_specs += [PartitionSpec()] * (len(batch_pass.invariant) - num_variables)
        sharded_rows = [
            self._shard_rows(array, rows) for array, rows in zip(batch_pass.rows, batch_pass.row_layouts, strict=True)
        ]

        def on_device(invariant: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
            shard_of: Any = self._shard
            enter_sharded = [each.enters_sharded for each in parameters]
            if any(enter_sharded):
                gather = functools.partial(self._gather_variables, parameters=parameters)
                shard_of = functools.partial(self._shard, gather=gather, is_sharded=enter_sharded)
            sums, made = self._run(batch_pass, shard_of, invariant, rows)
            grads, others = self._reduce(sums[:num_variables], sums[num_variables:], parameters)
            return grads, others, [self._split(each, layout.rows) for each, layout in zip(made, layouts, strict=True)]

        grads, others, made = jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(in_specs, [spec for _, spec in sharded_rows]),
            out_specs=(
                list(map(self._spec_of_gradient, parameters)),
                PartitionSpec(),
                [self._spec_of_rows(layout.rows) for layout in layouts],
            ),
            axis_names=set(self.axes),
            check_vma=False,
        )(list(batch_pass.invariant), [array for array, _ in sharded_rows])
        if any(each.summation is Summation.LATER for each in parameters):
            grads = self._scatter_later(grads, parameters)
        return [*grads, *others], [self._gather_rows(each, layout) for each, layout in zip(made, layouts, strict=True)]

    def _parameter(self, spec: PartitionSpec | None) -> Parameter:
        if not names_at(spec, self.axes):
            return Parameter(spec, Summation.TOGETHER)
        if self.reduce == "each":
            return Parameter(spec, Summation.EACH)
        all_axes_manual = set(self.axes) == set(self.mesh.axis_names)
        return Parameter(spec, Summation.SCATTER if all_axes_manual else Summation.LATER)

    def _spec_of_gradient(self, parameter: Parameter) -> PartitionSpec:
        if parameter.summation is Summation.TOGETHER:
            return PartitionSpec()
        if parameter.summation is Summation.LATER:
            return PartitionSpec(self.axes)
        return self._restricted(parameter.spec)

    def in_batch_order(self, examples: Any) -> Any:
        if not self._is_padded(examples, Batched(0)) or len(self.counts) == 1:
            return examples
        return jnp.take(examples, self._row_indices(*self.counts), axis=0)

    def run_once(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of full arrays. XLA decides how to shard the work.

        In a fixed order, every device does all of the work: the bits of a sharded sum depend on the number of shards.
        """
        return fun(*arguments) if self.num_groups is None else self._on_every_device(fun, *arguments)

    def _on_every_device(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        everywhere = PartitionSpec()
        axes = set(self.axes)
        run = jax.shard_map(
            fun, mesh=self.mesh, in_specs=everywhere, out_specs=everywhere, axis_names=axes, check_vma=False
        )
        return run(*arguments)

    @property
    def over_rows(self) -> OverRows | None:
        """Divides rows among the devices, if the devices divide their number and that of the examples.

        Otherwise every device computes all rows. So it does without blocks: XLA does not shard the head of an uneven
        batch. In a fixed order, every device computes the whole head in any case.
        """
        return None if self.num_groups is not None else self._over_rows

    def _over_rows(
        self,
        fun: OfRows,
        length: int,
        invariant: list[Any],
        rows: list[Any],
        row_layouts: Sequence[Batched],
        output_layouts: Sequence[Batched],
    ) -> tuple[list[Any], list[Any]]:
        if self.examples % self.devices or length % self.devices:
            return self._on_every_device(functools.partial(fun, 0, length), invariant, rows)

        def of_shard(shard: Shard, invariant: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
            return fun(shard.first, shard.examples, invariant, rows)

        layouts = [OutputLayout(rows) for rows in output_layouts]
        return self.for_rows(length)(BatchPass(of_shard, invariant, rows, row_layouts, layouts))

    def for_rows(self, number: int) -> "ShardedExecutor":
        return dataclasses.replace(self, examples=number, reduce="once")

    @property
    def has_all_examples(self) -> bool:
        return False

    # On one device, inside shard_map.

    def _shard(self, examples: int, index: Any, **more: Any) -> Shard:
        """The consecutive examples of the device with this index. The first devices may have one more than others."""
        first = index * examples
        if len(self.counts) == 2 and examples != self.counts[0]:
            first = first + self.with_more
        last_device = self.devices - 1 if self.counts[-1] else self.with_more - 1
        return Shard(first, examples, is_last=index == last_device, **more)

    def _run(
        self, batch_pass: BatchPass, shard_of: Any, invariant: list[Any], rows: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        fun, row_layouts = batch_pass.fun, batch_pass.row_layouts
        index = jnp.asarray(lax.axis_index(self.axes), jnp.int32)
        if self.num_groups is not None:
            own_rows = [self._merge(array, each) for array, each in zip(rows, row_layouts, strict=True)]
            shard = shard_of(self.share, index)
            groups = self.num_groups // self.devices
            return in_fixed_order(batch_pass, shard, groups, self.examples, invariant, own_rows)

        def with_examples(examples: int) -> tuple[list[Any], list[Any]]:
            shard = shard_of(examples, index)
            own_rows = [self._rows_of(array, each, shard) for array, each in zip(rows, row_layouts, strict=True)]
            sums, made = fun(shard, invariant, own_rows)
            padded = zip(made, batch_pass.output_layouts, strict=True)
            return sums, [self._pad(each, layout, examples) for each, layout in padded]

        if len(self.counts) == 1:
            return with_examples(self.counts[0])
        if self.mesh.size > self.devices:
            return self._with_one_more(batch_pass, shard_of, invariant, rows, index)
        branches = [functools.partial(with_examples, count) for count in self.counts]
        return lax.cond(index < self.with_more, *branches)

    def _with_one_more(
        self, batch_pass: BatchPass, shard_of: Any, invariant: list[Any], rows: list[Any], index: Any
    ) -> tuple[list[Any], list[Any]]:
        """The sums and rows of this device for an uneven batch, on a mesh with other axes that the model may use.

        The model may run collectives over those axes, so all devices must run the same program, or some would wait
        forever. Each device runs the pass for the smaller number of examples, then for one more example. Devices that
        have no such example take one of a neighbour, and its results are not counted.
        """
        fun, fewest = batch_pass.fun, self.counts[1]
        has_more = index < self.with_more
        mine = shard_of(fewest, index)
        first = index * fewest + jnp.minimum(index, self.with_more)
        extra = jnp.minimum(first + fewest, self.examples - 1)
        alike = dataclasses.replace(mine, first=first, is_last=mine.is_last & ~has_more)
        single = dataclasses.replace(mine, first=extra, examples=1, is_last=mine.is_last & has_more)

        def rows_of(shard: Shard, start: int) -> list[Any]:
            layouts = batch_pass.row_layouts
            return [self._rows_of(array, each, shard, start) for array, each in zip(rows, layouts, strict=True)]

        sums, made = fun(single, invariant, rows_of(single, fewest))
        sums = [jnp.where(has_more, each, jnp.zeros_like(each)) for each in sums]
        if not fewest:
            return sums, made
        most_sums, most_made = fun(alike, invariant, rows_of(alike, 0))
        return (
            [one + other for one, other in zip(most_sums, sums, strict=True)],
            [
                _concatenate(one, other, layout.rows)
                for one, other, layout in zip(most_made, made, batch_pass.output_layouts, strict=True)
            ],
        )

    def _gather_variables(self, variables: list[Any], *, parameters: list[Parameter]) -> list[Any]:
        """The differentiated arrays, all-gathered where this device has a shard."""
        return [
            self._gather(leaf, each.spec) if each.enters_sharded else leaf
            for leaf, each in zip(variables, parameters, strict=True)
        ]

    def _gather(self, shard: Any, spec: Any) -> Any:
        # If several axes shard a dimension, shard_map has sharded it by those of the batch first.
        in_turn = [sorted(names, key=lambda name: name not in self.axes) for names in axes_of(spec)]
        shards = self._shards(PartitionSpec(*(tuple(names) or None for names in in_turn)))
        others = set(shards.others)
        if not others:
            return shards.fold(shards.gather(shards.unfold(shard, self.axes)))
        # XLA would gather an array that it shards over other axes over these, too. Making them manual prevents that.
        nested = jax.shard_map(
            lambda shard: shards.gather(shards.unfold(shard, self.mesh.axis_names)),
            mesh=jax.sharding.get_abstract_mesh(),
            in_specs=self._restricted(spec, shards.others),
            out_specs=shards.unfolded_spec(shards.others),
            axis_names=others,
            check_vma=False,
        )
        return shards.fold(nested(shard))

    def _shards(self, spec: Any) -> Shards:
        return Shards(spec, self.mesh, self.axes)

    def _reduce(self, grads: list[Any], others: list[Any], parameters: list[Parameter]) -> tuple[list[Any], list[Any]]:
        """Sums over devices: one collective for all unsharded arrays, a reduce-scatter for each sharded gradient."""
        in_order = self.num_groups is not None
        pairs = list(zip(grads, parameters, strict=True))
        together = [grad for grad, each in pairs if each.summation is Summation.TOGETHER]
        sum_arrays = sum_in_order if in_order else sum_over
        summed = sum_arrays([*together, *others], self.axes) if together or others else []
        unsharded = iter(summed[: len(together)])
        reduced = []
        for grad, each in pairs:
            if each.summation is Summation.TOGETHER:
                reduced.append(next(unsharded))
            elif each.summation is Summation.EACH:  # each microbatch has summed it over the axes that shard it
                names = {name for several in axes_of(each.spec) for name in several}
                rest = tuple(name for name in self.axes if name not in names)
                reduced.append(lax.psum(grad, rest) if rest else grad)
            elif each.summation is Summation.SCATTER:
                shards = self._shards(each.spec)
                reduced.append(shards.fold(shards.scatter(shards.unfold(grad, ()), in_order=in_order)))
            else:
                reduced.append(self._shards(each.spec).unfold(grad, ())[None])
        return reduced, summed[len(together) :]

    def _scatter_later(self, grads: list[Any], parameters: list[Parameter]) -> list[Any]:
        """Sums gradients that axes of the model shard, too. With all axes manual, XLA gathers none of them."""
        later = [each.summation is Summation.LATER for each in parameters]
        waiting = [grad for grad, late in zip(grads, later, strict=True) if late]
        their = [self._shards(each.spec) for each in parameters if each.summation is Summation.LATER]

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

    def _restricted(self, spec: Any, axes: tuple[str, ...] | None = None) -> PartitionSpec:
        """The spec restricted to some axes; by default, to those of the batch."""
        found = names_at(spec, self.axes if axes is None else axes)
        return PartitionSpec(*(found.get(dimension) for dimension in range(len(spec))))

    # Arrays with rows, on their way to the devices and back.

    def _shard_rows(self, array: Any, rows: Batched) -> tuple[Any, PartitionSpec]:
        """An array with rows as an input of shard_map, with its spec: sharded, or replicated if the batch is uneven."""
        if len(self.counts) == 2 and not self._is_padded(array, rows):
            return array, PartitionSpec()
        return self._split(array, rows), self._spec_of_rows(rows)

    def _is_padded(self, array: Any, rows: Batched) -> bool:
        """True if the batch was padded, so that each device has the same number of rows."""
        return rows == Batched(0) and array.shape[0] == self.devices * self.share

    def _rows_of(self, array: Any, rows: Batched, shard: Shard, start: int = 0) -> Any:
        """The rows of these examples of this device, from its `start`-th example on, from an input of shard_map."""
        if len(self.counts) == 1:
            return self._merge(array, rows)
        if rows == Batched(0) and array.shape[0] == self.share != self.examples:
            return array[start : start + shard.examples]  # an uneven batch was padded before: these are its own rows
        return take_rows(array, rows, self.examples, shard.first, shard.examples)

    def _pad(self, array: Any, layout: OutputLayout, examples: int) -> Any:
        """Pads the rows of this device to the largest number on a device."""
        missing = layout.count(self.share) - layout.count(examples)
        if not missing:
            return array
        if avals.has_keys(array):
            return _rewrapped(array, lambda data: self._pad(data, layout, examples))
        split = split_axis(array, layout.rows, layout.count(examples))
        widths = [(0, missing if axis == layout.rows.axis + 1 else 0) for axis in range(split.ndim)]
        return merge_axis(jnp.pad(split, widths), layout.rows)

    def _gather_rows(self, array: Any, layout: OutputLayout) -> Any:
        """The rows of all examples in the order of the batch, from an output of shard_map."""
        if len(self.counts) == 1:
            return self._merge(array, layout.rows)
        if avals.has_keys(array):
            return _rewrapped(array, lambda data: self._gather_rows(data, layout))
        most, least = (layout.count(count) for count in self.counts)
        split = array if layout.rows.outer > 1 else split_axis(array, layout.rows, most * self.devices)
        return merge_axis(jnp.take(split, self._row_indices(most, least), axis=layout.rows.axis + 1), layout.rows)

    def _row_indices(self, most: int, least: int) -> Any:
        """The indices of rows that are not padding: on the first devices all `most` rows, on the others `least`."""
        numbers = [most if device < self.with_more else least for device in range(self.devices)]
        return np.concatenate([device * most + np.arange(number) for device, number in enumerate(numbers)])

    def _split(self, array: Any, rows: Batched) -> Any:
        return split_axis(array, rows) if rows.outer > 1 else array

    def _merge(self, array: Any, rows: Batched) -> Any:
        return merge_axis(array, rows) if rows.outer > 1 else array

    def _spec_of_rows(self, rows: Batched) -> PartitionSpec:
        before = rows.axis + (1 if rows.outer > 1 else 0)
        return PartitionSpec(*[None] * before, self.axes)


def _rewrapped(keys: Any, change: Callable[[Any], Any]) -> Any:
    """Applies a function to the data of PRNG keys, which has one more axis."""
    return jax.random.wrap_key_data(change(jax.random.key_data(keys)), impl=avals.key_impl(keys.dtype))


def _concatenate(one: Any, other: Any, rows: Batched) -> Any:
    if avals.has_keys(one):
        return _rewrapped(one, lambda data: _concatenate(data, jax.random.key_data(other), rows))
    joined = jnp.concatenate([split_axis(one, rows), split_axis(other, rows)], rows.axis + 1)
    return merge_axis(joined, rows)
