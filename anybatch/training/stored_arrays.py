"""The arrays of a checkpoint, and Orbax: described, copied, compared with what is wanted, put where they belong."""

import asyncio
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from anybatch import compat
from anybatch.errors import InputError

# What the storage format of Orbax has no name for.
_NOT_STORABLE = ("uint2", "uint4", "float8_e4m3")

_MOST_LINES = 10


def described(arrays: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each of them is, as JSON can say it.

    >>> described({"w": np.zeros((2, 3), np.float32)})
    {'w': {'shape': [2, 3], 'dtype': 'float32'}}

    Raises:
      InputError: for what is not a mapping of names to arrays that can be stored.
    """
    if not isinstance(arrays, Mapping) or not arrays:
        raise InputError(
            "The arrays of a checkpoint must be a dictionary of at least one",
            given=f"arrays={arrays!r}" if isinstance(arrays, Mapping) else f"a {type(arrays).__name__}",
            remedy='Pass them by name, e.g. {"w": w}.',
        )
    return {name: _described(name, value) for name, value in arrays.items()}


def _described(name: Any, value: Any) -> dict[str, Any]:
    if not isinstance(name, str) or not name:
        raise InputError(
            "The name of an array must be a string, and not empty",
            given=f"{name!r}",
            remedy=f'Name it, e.g. {{"{name or "w"}": ...}}.',
        )
    value = np.asarray(value) if isinstance(value, (bool, int, float, complex)) else value
    shape: Any = getattr(value, "shape", None)
    dtype: Any = getattr(value, "dtype", None)
    if shape is None or dtype is None or not (compat.has_keys(value) or _is_storable(np.dtype(dtype))):
        raise InputError(
            "A checkpoint holds numbers, and arrays of numbers or keys, of a dtype that can be stored",
            given=f"{name}: {type(value).__name__}" + (f" of dtype {dtype}" if dtype is not None else ""),
            remedy="Leave it out, put text and the like into the record, or convert it: array.astype(jnp.uint8).",
        )
    return {"shape": [int(size) for size in shape], "dtype": str(dtype)}


def _is_storable(dtype: Any) -> bool:
    is_number = jax.dtypes.issubdtype(dtype, np.number) or jax.dtypes.issubdtype(dtype, np.bool_)
    return bool(is_number) and str(dtype) not in _NOT_STORABLE


def is_empty(description: Mapping[str, Any]) -> bool:
    """Whether an array has no elements; those are not stored."""
    return 0 in description["shape"]


def num_bytes(value: Any) -> int:
    """The bytes of an array on the disk, at most: they are compressed."""
    shape, dtype = _numbers(value)
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def copied(value: Any) -> Any:
    """What is handed to Orbax: an array of numbers that no later change of `value` can reach.

    From an accelerator, Orbax itself has fetched everything before it returns. On the CPU it would take views; JAX
    would then not overwrite what has a view, and so copy in every donating call until the write is done.
    """
    if not isinstance(value, jax.Array):
        array = np.array(value)
        return array.astype(array.dtype.newbyteorder("="))
    numbers = jax.random.key_data(value) if compat.has_keys(value) else value
    if jax.process_count() > 1 and numbers.is_fully_addressable:
        return np.array(numbers)  # each process has one of its own, and Orbax writes that of the first
    sharding: Any = numbers.sharding
    if sharding.memory_kind == "device" and all(device.platform != "cpu" for device in sharding.device_set):
        return numbers
    shards = [jax.device_put(shard.data, shard.device, may_alias=False) for shard in numbers.addressable_shards]
    return jax.make_array_from_single_device_arrays(numbers.shape, sharding, shards)


def way(ocp: Any, like: Any) -> Any:
    """How Orbax is to restore an array: onto the devices of `like`, or for the host."""
    sharding = _sharding(like)
    if sharding is None:
        return ocp.RestoreArgs(restore_type=np.ndarray)
    shape, dtype = _numbers(like)
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape, dtype=dtype)


def placed(array: Any, like: Any) -> Any:
    """What Orbax has restored, or None for an array without elements, as `like` is: its kind, and where it lies."""
    shape, dtype = _numbers(like)
    array = np.zeros(shape, dtype) if array is None else array
    if not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        return np.asarray(array)
    sharding = _sharding(like)
    if not isinstance(array, jax.Array):
        # An array that was never told where to lie must not be told so by a checkpoint: programs would be compiled
        # anew for it, and refuse to combine it with arrays on other devices.
        array = jax.device_put(array, may_alias=False) if sharding is None else _spread(array, sharding)
    if compat.has_keys(like):
        return jax.random.wrap_key_data(array, impl=compat.key_impl(like.dtype))
    return compat.as_weak(array, like)


def compare(saved: Mapping[str, Any], wanted: Mapping[str, Any], path: os.PathLike[str]) -> None:
    """Raises an InputError that lists what differs, if anything does."""
    lines = []
    for name in [*wanted, *(name for name in saved if name not in wanted)]:
        there, here = saved.get(name), wanted.get(name)
        if there is None:
            lines.append(f"{name}: {_type(here)}, which the checkpoint does not have")
        elif here is None:
            lines.append(f"{name}: {_type(there)} in the checkpoint, and not in the state")
        elif there != here:
            lines.append(f"{name}: {_type(there)} in the checkpoint, {_type(here)} in the state")
    if not lines:
        return
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], f"and {len(lines) - _MOST_LINES + 1} more"]
    raise InputError(
        f"The checkpoint must be of the same arrays as the state that goes on from it ({path})",
        given="\n".join([*lines, ""]),
        remedy="Go on with the model and optimizer that it was saved with; or begin anew in another folder, e.g. "
        'checkpoints="run2".',
    )


def _type(description: Any) -> str:
    return f"{description['dtype']}[{','.join(map(str, description['shape']))}]"


def _numbers(value: Any) -> tuple[tuple[int, ...], Any]:
    """The shape and dtype that is stored: for keys, of the numbers that they are made of."""
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
    if compat.has_keys(value):
        value = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(value.shape, value.dtype))
    return tuple(value.shape), np.dtype(value.dtype)


def _sharding(like: Any) -> Any:
    if isinstance(like, jax.Array):
        return like.sharding if like.committed else None
    return getattr(like, "sharding", None)


def _spread(array: Any, sharding: Any) -> Any:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def orbax() -> Any:
    """The package, or an InputError that says how to get it."""
    try:
        return importlib.import_module("orbax.checkpoint")
    except ImportError as error:
        raise InputError(
            "Checkpoints need Orbax",
            given=f"no module {error.name}",
            remedy='Install it: pip install "anybatch[train]".',
        ) from error


def unnested(fun: Callable[[], Any]) -> Any:
    """Calls a function of Orbax. In a notebook an event loop runs, which Orbax would change; a new thread has none."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return fun()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(fun).result()


class Silence(logging.Filter):
    """Keeps what Orbax logs to itself: what matters of it is raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname
