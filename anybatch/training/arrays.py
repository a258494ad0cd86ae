"""The arrays of a step: separated from constants, checked, placed on devices, and made safe to donate."""

import collections
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from anybatch.call import placement
from anybatch.call.checks import describe, is_array
from anybatch.call.options import MeshOptions
from anybatch.distributed import global_batch
from anybatch.errors import InputError
from anybatch.jaxprs import avals
from anybatch.training.prefetch import to_device


class Constants(NamedTuple):
    """A pytree without its arrays. It is hashable, so it can be part of the key of a compiled program."""

    tree: Any
    values: tuple[Any, ...]  # one entry per leaf: the constant, or None where an array was
    types: tuple[Any, ...]  # tells apart constants that compare equal: True and 1, 0.0 and -0.0; empty without any


def split_arrays(tree: Any) -> tuple[list[Any], Constants]:
    """The arrays of a pytree, and the rest: Python numbers, strings and functions are constants of a program.

    >>> arrays, constants = split_arrays({"x": jnp.ones(2), "name": "adam"})
    >>> merge_arrays([array + 1 for array in arrays], constants)
    {'name': 'adam', 'x': Array([2., 2.], dtype=float32)}
    """
    leaves, structure = jax.tree.flatten(tree)
    if all(map(is_array, leaves)):
        return leaves, Constants(structure, (None,) * len(leaves), ())
    values = tuple(None if is_array(leaf) else leaf for leaf in leaves)
    types = tuple((type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else None) for leaf in values)
    return [leaf for leaf in leaves if is_array(leaf)], Constants(structure, values, types)


def merge_arrays(arrays: Sequence[Any], constants: Constants) -> Any:
    """The pytree that `split_arrays` split, with these arrays."""
    remaining = iter(arrays)
    leaves = [next(remaining) if leaf is None else leaf for leaf in constants.values]
    return jax.tree.unflatten(constants.tree, leaves)


def refuse_deleted(arrays: Iterable[Any], call: str) -> None:
    """Refuses a state whose arrays were donated to an earlier step. `call` is the call that was given it, as code."""
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
            raise InputError(
                "A state can be used once: its memory is donated to the state that the step returns",
                given=f"{call} with an array {describe(array)} that was deleted",
                remedy="Continue with the returned state: state, metrics = step(state, batch). To keep the old one, "
                "copy it first: kept = jax.tree.map(jnp.copy, state); or pass ab.train_step(..., donate=False), which "
                "takes the memory of two states.",
            )


def is_on_host(array: Any) -> bool:
    """Whether an array of JAX, or a tracer, is in the host's memory."""
    if placement.is_placed(array):
        return bool(array.sharding.memory_kind == placement.HOST)
    return avals.is_on_host(jax.typeof(array))


def is_large(array: Any) -> bool:
    """Whether it saves memory to have an array on the host."""
    return not avals.has_keys(array) and bool(array.nbytes >= placement.SMALL)


def place(array: jax.Array, *, on_host: bool) -> jax.Array:
    """An array in the host's memory, or on its devices. Its sharding stays. A small one is always on its devices."""
    on_host = on_host and is_large(array)
    if is_on_host(array) and not avals.is_on_host(jax.typeof(array)):
        # `make_array_from_callback`, and so Orbax, makes arrays whose type says that they are on the device.
        array = jax.block_until_ready(jax.device_put(array, array.sharding.with_memory_kind(placement.DEVICE)))
    if is_on_host(array) == on_host:
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(placement.HOST if on_host else placement.DEVICE))


def ready_to_donate(
    arrays: Sequence[Any], over: MeshOptions | None, *, copy: bool, on_host: Sequence[bool]
) -> list[Any]:
    """The arrays of a state, in a form that every step returns again, so that the second step does not recompile.

    They are JAX arrays without weak types, on the mesh if there is one, and all committed if one of them is. Those that
    are `on_host` are moved to the host's memory, and others from there to the device.

    If `copy`, arrays that share memory with others in the list are copied, so that each can be donated. Arrays of numpy
    are always copied.
    """
    seen: set[int] = set()
    ready = []
    # Uncommitted arrays go to the device of the committed ones first: to be on the host commits an array to its device.
    fixed = [array.sharding for array in arrays if isinstance(array, jax.Array) and array.committed]
    is_single = over is None and fixed and len(fixed[0].device_set) == 1
    device = fixed[0].with_memory_kind(placement.DEVICE) if is_single else None
    for array, is_hosted in zip(arrays, on_host, strict=True):
        if not isinstance(array, jax.Array):
            array = jnp.array(array, copy=True)
        elif array.aval.weak_type:
            array = jnp.asarray(array, array.dtype)
        if device is not None and not array.committed:
            array = jax.device_put(array, device)
        array = place(_on_mesh(array, over), on_host=is_hosted)
        if copy and _buffer(array) in seen:
            array = array.copy()
        seen.add(_buffer(array))
        ready.append(array)
    # If one argument of a program is committed to a device, all its results are.
    committed = [array for array in ready if array.committed]
    if committed and over is None and len(committed[0].sharding.device_set) == 1:
        device = committed[0].sharding.with_memory_kind(placement.DEVICE)
        ready = [array if array.committed else jax.device_put(array, device) for array in ready]
    return ready


def moved_arrays(before: Sequence[Any], after: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays of a state that `ready_to_donate` has moved to the host or back, which nothing else holds."""
    buffers = collections.Counter(_buffer(array) for array in before if isinstance(array, jax.Array))
    return [
        old
        for old, new in zip(before, after, strict=True)
        if isinstance(old, jax.Array) and is_on_host(old) != is_on_host(new) and buffers[_buffer(old)] == 1
    ]


def unshared(arrays: Sequence[Any]) -> list[Any]:
    """The arrays of NNX objects, with copies of those that are also referenced elsewhere, e.g. by a clone of a model.

    A step donates the arrays that it is given. The NNX objects of its state get new ones. Clones of these objects, and
    variables that an array was assigned to, would be left with deleted arrays. So each array must be referenced by this
    list and by one NNX variable only.
    """
    return [
        array.copy() if isinstance(array, jax.Array) and count > _TWO_REFERENCES else array
        for array, count in zip(arrays, _references(arrays), strict=True)
    ]


def _references(values: Sequence[Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


_TWO_REFERENCES = _references([object()])[0] + 1  # measured, since Python holds references while it counts them


def put_batch(rows: Sequence[Any], over: MeshOptions | None, *, copy: bool = False) -> list[Any]:
    """The arrays of a batch, sharded over the mesh axes that have different examples. Each process passes its own.

    On a mesh of several processes, a device on the host uses arrays of numpy in place, unless `copy` is True.
    """
    if over is None:
        return list(rows)  # jit transfers them
    if jax.process_count() == 1:
        return [_sharded(row, over) for row in rows]
    if copy:
        rows = [np.array(row) if isinstance(row, np.ndarray) else row for row in rows]
    local = [row for row in rows if not (isinstance(row, jax.Array) and not row.is_fully_addressable)]
    if not local:
        return list(rows)
    if len(over.axes) > 1:
        raise InputError(
            "Over several axes of a mesh, the batches of several processes must be global arrays",
            given=f"rows on the host and axis_name={over.axes}",
            remedy="Make them global first: jax.make_array_from_process_local_data(sharding, rows).",
        )
    made_global = iter(global_batch(local, over.user_mesh, over.axes[0]))
    return [next(made_global) if any(row is each for each in local) else row for row in rows]


def _sharded(row: Any, over: MeshOptions) -> Any:
    if placement.is_placed(row) and row.sharding.device_set == set(over.user_mesh.devices.flat):
        return row
    shape = np.shape(row)
    is_even = bool(shape) and shape[0] > 0 and shape[0] % over.devices == 0
    spec = PartitionSpec(over.axes) if is_even else PartitionSpec()
    sharding = NamedSharding(over.user_mesh, spec)
    return jax.device_put(row, sharding) if isinstance(row, jax.Array) else to_device(row, sharding)


def _on_mesh(array: Any, over: MeshOptions | None) -> Any:
    if over is None or array.sharding.device_set == set(over.user_mesh.devices.flat):
        return array
    return jax.device_put(array, NamedSharding(over.user_mesh, PartitionSpec()))


def _buffer(array: Any) -> int:
    """A number that is equal for two arrays that share memory."""
    try:
        return array.addressable_shards[0].data.unsafe_buffer_pointer() if array.size else id(array)
    except (AttributeError, ValueError, IndexError, jax.errors.JaxRuntimeError):  # PRNG keys; other runtimes
        return id(array)
