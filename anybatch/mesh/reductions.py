"""Adds up what the devices of a mesh have computed: in one collective, or in an order that is always the same."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

# Elements of an array that is moved into another dtype to be added up along with the gradients.
SMALL = 4096

# A whole number is added up as its bytes, each a float: exact while no sum of bytes reaches the first gap between
# whole numbers, at 2**24.
_BYTE = 8
_MOST_DEVICES = 2**16


def add_up(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sums of arrays over mesh axes, in as few collectives as there are dtypes of large arrays: mostly one.

    XLA joins all-reduces of one dtype into one. So a count, or a loss in float32 beside gradients in float64, is
    carried in the dtype of the largest arrays, without any loss.
    """
    carrier = _carrier(arrays)
    if carrier is None or math.prod(map(lax.axis_size, axes)) > _MOST_DEVICES:
        return list(lax.psum(tuple(arrays), axes))
    packed = [_pack(array, carrier) for array in arrays]
    summed = lax.psum(packed, axes)
    return [_unpack(each, array, carrier) for each, array in zip(summed, arrays, strict=True)]


def _carrier(arrays: Sequence[jax.Array]) -> Any:
    """The floating-point dtype with the most bytes among those that hold small whole numbers without loss."""
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
    # Narrower numbers lose nothing; wider ones would.
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
    wide = jnp.dtype(jnp.uint64 if like.dtype.itemsize == 8 else jnp.uint32)  # a sum of bytes is no byte
    total = jnp.zeros(like.shape, wide)
    for position in range(like.dtype.itemsize):  # wraps around as the sum of the numbers would
        total = total + (summed[position].astype(wide) << wide.type(_BYTE * position))
    return lax.bitcast_convert_type(total.astype(f"uint{8 * like.dtype.itemsize}"), like.dtype)


def names_at(spec: PartitionSpec | None, axes: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Which dimensions of an array are spread over which of some mesh axes."""
    found = {}
    for dimension, names in enumerate(_names(spec)):
        if kept := tuple(name for name in names if name in axes):
            found[dimension] = kept
    return found


def _names(spec: PartitionSpec | None) -> list[tuple[str, ...]]:
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec or ()]


@dataclasses.dataclass(frozen=True)
class Shards:
    """How an array is spread: over axes of the mesh that have examples, and perhaps over others.

    A dimension that is spread over several axes is cut by them one after the other. Unfolded, it has a dimension for
    each of these cuts and one for what is left, so that each axis has one to be gathered or scattered along.
    """

    spec: PartitionSpec
    mesh: Mesh
    axes: tuple[str, ...]  # those with examples

    @property
    def _cuts(self) -> list[tuple[str, ...]]:
        return _names(self.spec)

    @property
    def others(self) -> tuple[str, ...]:
        """The other axes that it is spread over."""
        return tuple(name for names in self._cuts for name in names if name not in self.axes)

    def unfold(self, array: jax.Array, cut: Sequence[str]) -> jax.Array:
        """An array of which a device has the shards along the axes `cut`, with a dimension for every cut."""
        shape: list[int] = []
        for size, names in zip(array.shape, [*self._cuts, *[()] * array.ndim], strict=False):
            sizes = [1 if name in cut else self.mesh.shape[name] for name in names]
            shape += [*sizes, size // math.prod(sizes)]
        return array.reshape(shape)

    def fold(self, array: jax.Array) -> jax.Array:
        """The reverse."""
        shape, position = [], 0
        for names in [*self._cuts, *[()] * (array.ndim - sum(map(len, self._cuts)) - len(self._cuts))]:
            shape.append(math.prod(array.shape[position : position + len(names) + 1]))
            position += len(names) + 1
        return array.reshape(shape)

    def unfolded_spec(self, axes: Sequence[str]) -> PartitionSpec:
        """How it is spread over some axes, once it is unfolded."""
        entries = [[*(name if name in axes else None for name in names), None] for names in self._cuts]
        return PartitionSpec(*(entry for each in entries for entry in each))

    def _along(self) -> list[tuple[int, str]]:
        """The dimensions of the cuts by axes with examples, once it is unfolded."""
        names = [name for several in self._cuts for name in (*several, None)]
        return [(position, name) for position, name in enumerate(names) if name in self.axes and name is not None]

    def scatter(self, unfolded: jax.Array, *, in_order: bool = False) -> jax.Array:
        """The sum of an unfolded array over the axes with examples, of which each device keeps its shard."""
        left = list(self.axes)
        for position, name in self._along():
            if in_order:
                unfolded = _scatter_in_order(unfolded, name, position)
            else:
                unfolded = lax.psum_scatter(unfolded, name, scatter_dimension=position, tiled=True)
            left.remove(name)
        if left and in_order:
            (unfolded,) = add_up_in_order([unfolded], tuple(left))
        elif left:
            unfolded = lax.psum(unfolded, tuple(left))
        return unfolded

    def gather(self, unfolded: jax.Array) -> jax.Array:
        """An unfolded array whole along the axes with examples; the transpose of `scatter` along these."""
        for position, name in self._along():
            unfolded = lax.all_gather(unfolded, name, axis=position, tiled=True)
        return unfolded


def tree_sum(rows: jax.Array) -> jax.Array:
    """The sum of 2**k rows by a tree: neighbours first."""
    while rows.shape[0] > 1:
        rows = lax.optimization_barrier(rows[0::2] + rows[1::2])
    return rows[0]


def add_up_in_order(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sums over mesh axes with 2**k devices, always added by the same tree over the devices.

    Each device adds up a slice of the numbers and hands it to the others: as many bytes as a ring sends.
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
    """The sum over an axis of arrays that are cut by it along a dimension; each device keeps its slice."""
    if lax.axis_size(name) == 1:
        return array
    slices = jnp.moveaxis(array, dimension, 0)
    return jnp.expand_dims(tree_sum(lax.all_to_all(slices, name, 0, 0)), dimension)
