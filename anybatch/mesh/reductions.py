"""Sums over the devices of a mesh, inside `shard_map`: in one collective, or in a fixed order."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

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
    return jnp.promote_types(*sizes) if small and len(sizes) == 2 else max(sizes, key=sizes.__getitem__)


def _is_packed(array: jax.Array, carrier: Any) -> bool:
    if array.dtype == carrier or array.size > SMALL:
        return False
    if jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == jnp.bool_:
        return True
    # Only narrower floats: wider ones would be rounded.
    return jnp.promote_types(array.dtype, carrier) == carrier


def _pack(array: jax.Array, carrier: Any) -> jax.Array:
    if not _is_packed(array, carrier):
        return array
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array.astype(carrier)
    if array.dtype == jnp.bool_:
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
    for dimension, names in enumerate(_names(spec)):
        if kept := tuple(name for name in names if name in axes):
            found[dimension] = kept
    return found


def _names(spec: PartitionSpec | None) -> list[tuple[str, ...]]:
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec or ()]


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
        return _names(self.spec)

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
        """The spec of the unfolded array over some axes."""
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
