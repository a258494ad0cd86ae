"""The types that JAX gives to arrays: avals, PRNG keys, references, shardings, and the `vmap`s around a value."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def type_of(leaf: Any) -> Any:
    """`jax.typeof`, also for an array of a batch on the host, which JAX does not know (`call/host_batch.py`)."""
    on_host = getattr(leaf, "type_on_host", None)
    return jax.typeof(leaf) if on_host is None else on_host


def abstract(aval: Any, num_rows: int | None = None) -> jax.ShapeDtypeStruct:
    """An aval, as `jax.typeof` returns it, as a `jax.ShapeDtypeStruct` to trace with; axis 0 may get another size."""
    shape = aval.shape if num_rows is None else (num_rows, *aval.shape[1:])
    placement = {}
    if not aval.sharding.mesh.empty:  # inside shard_map, or on a mesh with explicit axes
        placement = {"sharding": aval.sharding, "manual_axis_type": aval.manual_axis_type}
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type, **placement)


def one_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The type of one row of arrays of a type, as `abstract` gives it."""
    placement = {}
    if not aval.sharding.mesh.empty:
        sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec(*aval.sharding.spec[1:]))
        placement = {"sharding": sharding, "manual_axis_type": aval.manual_axis_type}
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype, weak_type=aval.weak_type, **placement)


def bare(array: Any) -> Any:
    """The aval of an array, without its sharding and without the mesh axes it varies over."""
    return bare_type(type_of(array))


def bare_type(aval: Any) -> Any:
    """An aval without its sharding and without the mesh axes it varies over."""
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def is_inexact(aval: Any) -> bool:
    """Whether values of a type are floating-point or complex numbers."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jnp.inexact)


def is_on_host(aval: Any) -> bool:
    """Whether values of a type are in the host's memory, for the program of an accelerator."""
    return bool(getattr(aval, "memory_space", None) == jax.memory.Space.Host)


def is_ref(value: Any) -> bool:
    """Whether a value is a reference to an array that can be written to, such as `jax.new_ref` returns."""
    return "Ref" in type(type_of(value)).__name__


def as_weak(array: jax.Array, like: Any) -> jax.Array:
    """`array`, weakly typed if `like` is, as the gradient with respect to a Python number is."""
    if not getattr(like, "weak_type", False) or array.weak_type:
        return array
    primitive: Any = jax.lax.convert_element_type_p
    return primitive.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def varying_axes(aval: Any) -> frozenset[str]:
    """The mesh axes of the `shard_map` around us over which a value differs from device to device."""
    return aval.manual_axis_type.varying


def zeros_of(aval: Any, dtype: Any) -> jax.Array:
    """Zeros of the shape of `aval` that vary over the same mesh axes, as the carry of a scan must."""
    zeros = jnp.zeros(aval.shape, dtype)
    varying = varying_axes(aval)
    return jax.lax.pcast(zeros, tuple(varying), to="varying") if varying else zeros


def wide_dtype(dtype: Any, accumulator_dtype: Any) -> Any:
    """The dtype in which values of `dtype` are summed: `accumulator_dtype`, unless that would be narrower."""
    if accumulator_dtype is None or not jax.dtypes.issubdtype(dtype, jnp.inexact):
        return dtype
    if jnp.finfo(dtype).bits >= jnp.finfo(accumulator_dtype).bits:
        return dtype
    is_complex = jax.dtypes.issubdtype(dtype, jnp.complexfloating)
    return jnp.complex128 if is_complex else accumulator_dtype


# PRNG keys.


def has_keys(array: Any) -> bool:
    """Whether an array, or one of that type, is made of PRNG keys."""
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def key_impl(key_dtype: Any) -> str:
    """The name of the generator of keys of that dtype, as `jax.random.key(seed, impl=...)` takes it."""
    return key_dtype._impl.name


def is_threefry(key_dtype: Any) -> bool:
    """Whether keys are of JAX's default generator, which under `vmap` draws for each key independently."""
    return str(key_dtype) == "key<fry>"


def draws_by_counter(key_dtype: Any) -> bool:
    """Whether each random bit depends only on the key and on the position of the bit in the draw."""
    config: Any = jax.config
    return is_threefry(key_dtype) and bool(config.jax_threefry_partitionable)


def threefry2x32(key_0: Any, key_1: Any, high: Any, low: Any) -> tuple[Any, Any]:
    """Random bits of the threefry generator, from the two halves of a key and the two halves of a counter."""
    from jax.extend.random import threefry2x32_p

    first, second = threefry2x32_p.bind(key_0, key_1, high, low)
    return first, second


# The `vmap`s around a value.


def vmap_levels(array: Any) -> dict[int, int]:
    """The `vmap`s around us that map a value, the innermost first: an id for each, and how many copies it makes."""
    levels: dict[int, int] = {}
    while isinstance(array, jax.core.Tracer):
        if isinstance(getattr(array, "batch_dim", None), int):
            levels[id(getattr(array._trace, "tag", array._trace))] = array.val.shape[array.batch_dim]
            array = array.val
        else:  # a tracer of derivatives has a primal value, which may be traced by a vmap around
            array = getattr(array, "primal", getattr(array, "val", None))
    return levels


def vmapped_copies(*arrays: Any) -> int:
    """How many copies of these values there are together, where inside one `vmap` or several each looks like one."""
    together: dict[int, int] = {}
    for array in arrays:
        together |= vmap_levels(array)
    return math.prod(together.values())
