"""Where arrays lie, and what that means for a program on one of the devices."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from anybatch import compat


def devices_of(leaves: Iterable[Any]) -> list[Any]:
    """The devices of this process that arrays lie on; none for arrays that have no values yet."""
    placed = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
    found: set[Any] = {device for leaf in placed for device in leaf.sharding.device_set}
    return sorted((each for each in found if each.process_index == jax.process_index()), key=lambda each: each.id)


def local_bytes(leaf: Any) -> int:
    """The bytes of an array on one of the devices that it lies on."""
    aval = jax.typeof(leaf)
    shape = aval.shape
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        shape = leaf.sharding.shard_shape(shape)
    is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return math.prod(shape) * (8 if is_key else np.dtype(aval.dtype).itemsize)


def parts_of_rows(array: Any) -> int:
    """Over how many devices the rows of an array are spread: where it lies, or as its type says."""
    if isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer):
        local = array.sharding.shard_shape(array.shape)
        return -(-array.shape[0] // local[0]) if local[0] else 1
    sharding = jax.typeof(array).sharding
    if sharding.mesh.empty or not sharding.spec or sharding.spec[0] is None:
        return 1
    names = sharding.spec[0]
    return math.prod(sharding.mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))


def compile_in_shard_map(fun: Callable[..., list[Any]], types: Sequence[Any]) -> Any:
    """Compiles a function of types as they are inside the `shard_map` around us, as one device will run it."""
    abstract_mesh = jax.sharding.get_abstract_mesh()
    number = abstract_mesh.size
    devices = np.asarray(jax.devices()[:number]).reshape(abstract_mesh.axis_sizes)
    mesh = jax.sharding.Mesh(devices, abstract_mesh.axis_names)

    def spec(varying: frozenset[str]) -> Any:
        """An axis in front for the devices over which a value differs."""
        axes = tuple(name for name in mesh.axis_names if name in varying)
        return jax.sharding.PartitionSpec(axes) if axes else jax.sharding.PartitionSpec()

    differs = [compat.varying_axes(each) for each in types]
    counts = [math.prod(mesh.shape[name] for name in varying) for varying in differs]
    outside = [
        jax.ShapeDtypeStruct(
            (count, *each.shape) if varying else each.shape,
            each.dtype,
            weak_type=each.weak_type,
            sharding=jax.sharding.NamedSharding(mesh, spec(varying)),
        )
        for each, varying, count in zip(types, differs, counts, strict=True)
    ]

    def on_device(*flat: Any) -> list[Any]:
        results = fun(*(leaf[0] if varying else leaf for leaf, varying in zip(flat, differs, strict=True)))
        return [jax.lax.pcast(leaf, _missing(leaf, mesh), to="varying")[None] for leaf in results]

    everywhere = jax.sharding.PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=tuple(map(spec, differs)), out_specs=everywhere, axis_names=set(mesh.axis_names)
    )
    return compat.elsewhere(lambda: jax.jit(mapped).lower(*outside).compile())


def _missing(leaf: Any, mesh: Any) -> tuple[str, ...]:
    varying = compat.varying_axes(jax.typeof(leaf))
    return tuple(name for name in mesh.axis_names if name not in varying)
