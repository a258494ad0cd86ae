"""Adds up what the devices of a mesh have computed: in one collective, or in an order that is always the same."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

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
    unsigned = jnp.dtype(f"uint{8 * like.dtype.itemsize}")
    total = jnp.zeros(like.shape, unsigned)
    for position in range(like.dtype.itemsize):  # wraps around as the sum of the numbers would
        total = total + (summed[position].astype(unsigned) << unsigned.type(_BYTE * position))
    return lax.bitcast_convert_type(total, like.dtype)


def names_at(spec: PartitionSpec | None, axes: tuple[str, ...]) -> dict[int, tuple[str, ...]]:
    """Which dimensions of an array are spread over which of some mesh axes."""
    found = {}
    for dimension, entry in enumerate(spec or ()):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        if kept := tuple(name for name in names if name in axes):
            found[dimension] = kept
    return found


def scatter(array: jax.Array, spec: PartitionSpec, axes: tuple[str, ...], *, in_order: bool = False) -> jax.Array:
    """The sum of an array over mesh axes, of which each device keeps its own shard."""
    left = set(axes)
    for dimension, names in names_at(spec, axes).items():
        if in_order:
            array = _scatter_in_order(array, names, dimension)
        else:
            array = lax.psum_scatter(array, names, scatter_dimension=dimension, tiled=True)
        left -= set(names)
    rest = tuple(name for name in axes if name in left)
    if not rest:
        return array
    return add_up_in_order([array], rest)[0] if in_order else lax.psum(array, rest)


def gather(shard: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    """A whole array from its shards; its transpose adds up gradients, and keeps this device's shard of them."""
    for dimension, names in names_at(spec, axes).items():
        shard = lax.all_gather(shard, names, axis=dimension, tiled=True)
    return shard


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


def _scatter_in_order(array: jax.Array, names: tuple[str, ...], dimension: int) -> jax.Array:
    devices = math.prod(map(lax.axis_size, names))
    if devices == 1:
        return array
    moved = jnp.moveaxis(array, dimension, 0)
    slices = moved.reshape(devices, moved.shape[0] // devices, *moved.shape[1:])
    return jnp.moveaxis(tree_sum(lax.all_to_all(slices, names, 0, 0)), 0, dimension)
