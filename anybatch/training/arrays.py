"""The arrays of a step, where the step wants them."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from anybatch.call import placement
from anybatch.call.checks import describe
from anybatch.call.options import MeshOptions
from anybatch.distributed import global_batch
from anybatch.errors import InputError
from anybatch.training.feed import to_device


def ready_to_donate(arrays: Sequence[Any], over: MeshOptions | None, *, copy: bool) -> list[Any]:
    """The arrays of a state, such that a program may take their memory and the next step need not be compiled anew.

    On the mesh, if there is one; with types that do not change from step to step; and, if they are to be used up
    (`copy`), each with memory of its own: a state may have an array twice, and a numpy array is the user's.
    """
    seen: set[int] = set()
    ready = []
    # What comes out of a program is on its device for good if any of its arguments is.
    fixed = [array for array in arrays if isinstance(array, jax.Array) and array.committed]
    device = fixed[0].sharding if fixed and over is None and len(fixed[0].sharding.device_set) == 1 else None
    for array in arrays:
        if not isinstance(array, jax.Array):
            array = jnp.array(array, copy=True)
        elif array.aval.weak_type:
            array = jnp.asarray(array, array.dtype)
        array = _on_mesh(array, over)
        if device is not None and not array.committed:
            array = jax.device_put(array, device)
        if copy and _memory(array) in seen:
            array = array.copy()
        seen.add(_memory(array))
        ready.append(array)
    return ready


def unshared(arrays: Sequence[Any]) -> list[Any]:
    """The arrays of objects of NNX, with copies of those that something else holds too, such as a clone of a model.

    A step uses up the arrays that it is given. An object that is changed in place has others afterwards; its clones,
    and whoever took an array out of it, do not.

    Args:
      arrays: each of them held by this list and by one variable.
    """
    return [
        array.copy() if isinstance(array, jax.Array) and count > _HELD_BY_TWO else array
        for array, count in zip(arrays, _references(arrays), strict=True)
    ]


def _references(values: Sequence[Any]) -> list[int]:
    return [sys.getrefcount(value) for value in values]


_HELD_BY_TWO = _references([object()])[0] + 1  # what Python itself holds while it counts is among them


def refuse_deleted(arrays: Iterable[Any], call: str) -> None:
    """Refuses a state whose arrays are gone: another step has used up their memory.

    Args:
      arrays: of the state.
      call: what it was passed to, in code.

    Raises:
      InputError: if one of them was deleted.
    """
    for array in arrays:
        if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer) and array.is_deleted():
            raise InputError(
                "A state can be used once: its memory is donated to the state that the step returns",
                given=f"{call} with an array {describe(array)} that was deleted",
                remedy="Go on from the state that was returned: state, metrics = step(state, batch). To keep the "
                "earlier one, copy it before: kept = jax.tree.map(jnp.copy, state); or pass "
                "ab.train_step(..., donate=False), which takes the memory of two states.",
            )


def put_batch(rows: Sequence[Any], over: MeshOptions | None, *, copy: bool = False) -> list[Any]:
    """The arrays of a batch: on the device, or over those of the mesh that have examples of their own.

    Args:
      rows: with the examples along axis 0. Each process has its own.
      over: the mesh, if there is one.
      copy: whether to copy what is on the host, even where the device could use it in place.
    """
    if over is None:
        return to_device(list(rows)) if copy else list(rows)  # jit puts them where they belong
    if jax.process_count() > 1:
        local = [row for row in rows if not (isinstance(row, jax.Array) and not row.is_fully_addressable)]
        if local:
            if len(over.axes) > 1:
                raise InputError(
                    "Over several axes of a mesh, the batches of several processes must be global arrays",
                    given=f"rows on the host and axis_name={over.axes}",
                    remedy="Put them together with jax.make_array_from_process_local_data first.",
                )
            together = iter(global_batch(local, over.user_mesh, over.axes[0]))
            return [next(together) if any(row is each for each in local) else row for row in rows]
        return list(rows)
    return [_over_mesh(row, over) for row in rows]


def _over_mesh(row: Any, over: MeshOptions) -> Any:
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


def _memory(array: Any) -> int:
    """Tells arrays that share their memory."""
    try:
        return array.addressable_shards[0].data.unsafe_buffer_pointer() if array.size else id(array)
    except (AttributeError, ValueError, IndexError, jax.errors.JaxRuntimeError):  # PRNG keys; other runtimes
        return id(array)
