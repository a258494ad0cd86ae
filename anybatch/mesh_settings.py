"""The options of a gradient that is spread over a mesh."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from anybatch.errors import InputError

EXAMPLE = 'jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))'


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """A mesh, the axes over which examples are spread, and how gradients are added up."""

    given: Mesh
    axes: tuple[str, ...]
    reduce: str  # "once", "each" or "auto"
    param_specs: Any  # a PartitionSpec or a tree of them, None where they are read from the arrays

    @property
    def mesh(self) -> Mesh:
        """The same devices, with axes that XLA spreads arrays over by itself, whatever those of the one given are."""
        automatic = (AxisType.Auto,) * len(self.given.axis_names)
        return Mesh(self.given.devices, self.given.axis_names, axis_types=automatic)

    @property
    def is_explicit(self) -> bool:
        return self.mesh != self.given

    @property
    def devices(self) -> int:
        """The number of devices that have examples of their own."""
        return math.prod(self.given.shape[name] for name in self.axes)

    def __str__(self) -> str:
        axes = ", ".join(f"{name}: {size}" for name, size in self.given.shape.items())
        return f"mesh ({axes}), examples over {' and '.join(self.axes)}"


def mesh_settings(mesh: Any, axis_name: Any, reduce: Any, param_specs: Any) -> MeshSettings | None:
    """Checks the options; None without a mesh.

    Raises:
      InputError: for what cannot be worked with.
    """
    if not isinstance(reduce, str) or reduce not in ("auto", "once", "each"):
        raise InputError(
            "reduce must be one of 'auto', 'once', 'each'",
            given=f"reduce={reduce!r}",
            remedy='Leave it out, or choose reduce="once" for the least traffic or reduce="each" for the least memory.',
        )
    if mesh is None:
        if reduce != "auto" or param_specs is not None:
            name, value = ("reduce", reduce) if reduce != "auto" else ("param_specs", param_specs)
            raise InputError(
                f"{name} goes with a mesh",
                given=f"{name}={value!r} and mesh=None",
                remedy=f"Pass mesh={EXAMPLE}, or leave {name} out.",
            )
        return None
    if not isinstance(mesh, Mesh) or mesh.empty:
        raise InputError(
            "mesh must be a jax.sharding.Mesh with devices",
            given=f"mesh={mesh!r}",
            remedy=f"For example mesh={EXAMPLE}.",
        )
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if not isinstance(axes, (tuple, list)) or not axes or not all(name in mesh.axis_names for name in axes):
        raise InputError(
            "axis_name must be an axis of the mesh, or a tuple of such",
            given=f"axis_name={axis_name!r} for a mesh with the axes {mesh.axis_names}",
            remedy=f"For example axis_name={mesh.axis_names[0]!r}, or name the axis of the mesh {axis_name!r}.",
        )
    if len(set(axes)) != len(axes):
        raise InputError(
            "axis_name must not name an axis twice",
            given=f"axis_name={axis_name!r}",
            remedy=f"For example axis_name={tuple(dict.fromkeys(axes))!r}.",
        )
    _check_specs(param_specs, mesh)
    return MeshSettings(mesh, tuple(axes), reduce, param_specs)


def is_spec(value: Any) -> bool:
    """Whether a value says how one array is spread."""
    return value is None or isinstance(value, (PartitionSpec, NamedSharding))


def _check_specs(param_specs: Any, mesh: Mesh) -> None:
    for each in jax.tree.leaves(param_specs, is_leaf=is_spec):
        spec = each.spec if isinstance(each, NamedSharding) else each
        names = [name for entry in spec or () for name in ((entry,) if isinstance(entry, str) else entry or ())]
        if not is_spec(each) or any(name not in mesh.axis_names for name in names):
            raise InputError(
                "param_specs must be a jax.sharding.PartitionSpec of axes of the mesh, or a tree of them",
                given=f"{each!r} for a mesh with the axes {mesh.axis_names}",
                remedy='For example param_specs={"w": jax.sharding.PartitionSpec("data", None), "b": None}.',
            )
