"""The devices and shardings of arrays, and compiling a function for the devices that its arguments are on."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.jaxprs import avals, versions

HOST, DEVICE = "pinned_host", "device"  # JAX's names for these kinds of memory

# Arrays of fewer bytes stay on the device: copying them to the host takes longer than reading them, and saves nothing.
SMALL = 64 * 1024


def is_placed(leaf: Any) -> bool:
    """True for an array on devices, as opposed to a tracer or a NumPy array."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def devices_of(leaves: Iterable[Any]) -> list[Any]:
    """The local devices of some arrays, or of the mesh in their types. Empty if they name no devices."""
    leaves = list(leaves)
    found: set[Any] = {device for leaf in leaves if is_placed(leaf) for device in leaf.sharding.device_set}
    mesh = mesh_of(leaves)
    if not found and not mesh.empty:
        found = set(jax.devices()[: mesh.size])
    return sorted((each for each in found if each.process_index == jax.process_index()), key=lambda each: each.id)


def committed_devices(leaves: Iterable[Any]) -> list[Any]:
    """The devices of those arrays that JAX does not move by itself. Empty if there are none."""
    committed = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.committed]
    return sorted({device for leaf in committed for device in leaf.sharding.device_set}, key=lambda each: each.id)


def mesh_of(leaves: Iterable[Any]) -> Any:
    """The abstract mesh in the types of arrays, or else the surrounding one. It has no devices."""
    meshes = [avals.type_of(leaf).sharding.mesh for leaf in leaves]
    return next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())


def describe_placed(leaf: Any) -> str:
    """The type of an array, with its sharding if it is on several devices. The text is the same in every process."""
    aval = avals.type_of(leaf)
    if is_placed(leaf):
        sharding = leaf.sharding
        return f"{aval} {sharding}" if len(sharding.device_set) > 1 else str(aval)
    return str(aval) if aval.sharding.mesh.empty else f"{aval} {aval.sharding}"


def local_bytes(leaf: Any) -> int:
    """The bytes of an array on one of its devices. Inside `vmap`, those of all copies."""
    aval = avals.type_of(leaf)
    shape = aval.shape
    if is_placed(leaf):
        shape = leaf.sharding.shard_shape(shape)
    else:
        shape = tuple(-(-each // _num_shards(aval, axis)) for axis, each in enumerate(shape))
    is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return avals.vmapped_copies(leaf) * math.prod(shape) * (8 if is_key else np.dtype(aval.dtype).itemsize)


def num_row_shards(array: Any) -> int:
    """The number of shards of an array along axis 0, by its sharding or its type."""
    if is_placed(array):
        local = array.sharding.shard_shape(array.shape)
        return -(-array.shape[0] // local[0]) if local[0] else 1
    return _num_shards(avals.type_of(array), 0)


def _num_shards(aval: Any, axis: int) -> int:
    """The number of shards of an axis, by the sharding in a type. 1 if its mesh has no explicit axes."""
    mesh, names = aval.sharding.mesh, axes_of(aval.sharding.spec)
    return 1 if mesh.empty or axis >= len(names) else math.prod(mesh.shape[name] for name in names[axis])


def axes_of(spec: Any) -> list[tuple[str, ...]]:
    """The axes of the mesh that shard each dimension of an array, by its PartitionSpec, or None for no axes."""
    return [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec or ()]


def spec_on(leaf: Any, mesh: Any) -> Any:
    """The PartitionSpec of an array on a mesh, by its sharding or its type. None if neither tells."""
    sharding = leaf.sharding if is_placed(leaf) else jax.typeof(leaf).sharding
    if not is_placed(leaf) and not sharding.mesh.explicit_axes:
        return None  # with automatic axes the spec in a type is empty, however the array is sharded
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.empty:
        return None
    return sharding.spec if dict(sharding.mesh.shape) == dict(mesh.shape) else None


def put(leaf: Any, mesh: Any, spec: Any) -> Any:
    """Puts an array on a mesh with this PartitionSpec, without a copy if it already has this sharding."""
    sharding = jax.sharding.NamedSharding(mesh, spec)
    if is_placed(leaf) and leaf.sharding.device_set == sharding.device_set:
        if leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return jax.device_put(leaf, sharding)  # the same buffers
        return leaf if jax.process_count() > 1 else jax.device_put(leaf, sharding)
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = put(jax.random.key_data(leaf), mesh, jax.sharding.PartitionSpec(*spec, None))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)  # every process has the full array
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def compile_on_mesh(fun: Callable[..., list[Any]], types: Sequence[Any], abstract_mesh: Any) -> Any:
    """Compiles a function whose arguments have shardings over an abstract mesh, for the devices of this machine."""
    mesh = _with_devices(abstract_mesh, abstract_mesh.axis_types)
    specs = [jax.sharding.PartitionSpec() if each.sharding is None else each.sharding.spec for each in types]
    shardings = [jax.sharding.NamedSharding(mesh, spec) for spec in specs]
    outside = list(map(with_sharding, types, shardings))

    def compile_inside() -> Any:
        with jax.set_mesh(mesh):
            return jax.jit(lambda *flat: fun(*flat)).lower(*outside).compile()

    return versions.elsewhere(compile_inside)


def compile_in_vmap(fun: Callable[..., list[Any]], leaves: Sequence[Any], types: Sequence[Any]) -> Any:
    """Compiles a function as the surrounding `vmap`s will run it: with the batch axes that they trace."""
    mapped = [avals.vmap_levels(leaf) for leaf in leaves]
    depths: dict[int, int] = {}
    for levels in mapped:
        for depth, level in enumerate(levels):
            depths[level] = max(depth, depths.get(level, 0))
    for level in sorted(depths, key=depths.__getitem__):  # from the innermost to the outermost
        fun = jax.vmap(fun, in_axes=tuple(0 if level in levels else None for levels in mapped))
    outermost_first = [sorted(levels, key=depths.__getitem__, reverse=True) for levels in mapped]
    outside = [
        with_sharding(each, None, [levels[level] for level in order])
        for each, levels, order in zip(types, mapped, outermost_first, strict=True)
    ]
    return versions.elsewhere(lambda: jax.jit(fun).lower(*outside).compile())


def with_sharding(each: Any, sharding: Any, more_axes: Sequence[int] = ()) -> jax.ShapeDtypeStruct:
    """A type with another sharding, or none, and with more axes in front."""
    return jax.ShapeDtypeStruct((*more_axes, *each.shape), each.dtype, weak_type=each.weak_type, sharding=sharding)


def _with_devices(abstract_mesh: Any, axis_types: Any) -> Any:
    devices = np.asarray(jax.devices()[: abstract_mesh.size]).reshape(abstract_mesh.axis_sizes)
    return jax.sharding.Mesh(devices, abstract_mesh.axis_names, axis_types=axis_types)


def compile_in_shard_map(fun: Callable[..., list[Any]], types: Sequence[Any]) -> Any:
    """Compiles a function as one device will run it inside the surrounding `shard_map`."""
    mesh = _with_devices(jax.sharding.get_abstract_mesh(), None)

    def spec(varying: frozenset[str]) -> Any:
        """The spec of a value with a new leading axis, sharded over the mesh axes over which the value varies."""
        axes = tuple(name for name in mesh.axis_names if name in varying)
        return jax.sharding.PartitionSpec(axes) if axes else jax.sharding.PartitionSpec()

    differs = [avals.varying_axes(each) for each in types]
    counts = [[math.prod(mesh.shape[name] for name in varying)] if varying else [] for varying in differs]
    specs = [spec(varying) for varying in differs]
    shardings = [jax.sharding.NamedSharding(mesh, each) for each in specs]
    outside = list(map(with_sharding, types, shardings, counts))

    def on_device(*flat: Any) -> list[Any]:
        results = fun(*(leaf[0] if varying else leaf for leaf, varying in zip(flat, differs, strict=True)))
        varying = [avals.varying_axes(jax.typeof(leaf)) for leaf in results]
        missing = [tuple(name for name in mesh.axis_names if name not in names) for names in varying]
        return [jax.lax.pcast(leaf, names, to="varying")[None] for leaf, names in zip(results, missing, strict=True)]

    everywhere = jax.sharding.PartitionSpec(mesh.axis_names)
    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=tuple(specs), out_specs=everywhere, axis_names=set(mesh.axis_names)
    )
    return versions.elsewhere(lambda: jax.jit(mapped).lower(*outside).compile())
