"""The options of `value_and_grad`, as frozen dataclasses. They are checked when a loss is wrapped, before any work.

`Options` has all of them. `MeshOptions` has those of a mesh, and is what the folder `mesh` works with.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from anybatch.call import aux_outputs
from anybatch.call.arguments import NOTHING, ROLES, Roles
from anybatch.call.checks import one_of, whole_number
from anybatch.call.memory import memory_budget
from anybatch.call.placement import axes_of
from anybatch.errors import InputError

EXAMPLE_MESH = 'jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))'


@dataclasses.dataclass(frozen=True)
class MeshOptions:
    """A mesh, its axes over which the batch is sharded, and when gradients are summed over them."""

    user_mesh: Mesh
    axes: tuple[str, ...]
    reduce: str  # "once", "each" or "auto"
    param_specs: Any  # a PartitionSpec or a tree of them; None to read them from the arrays

    @classmethod
    def of(cls, mesh: Any, axis_name: Any, reduce: Any, param_specs: Any) -> Self | None:
        """The checked options of a mesh, or None without a mesh."""
        one_of("reduce", reduce, ("auto", "once", "each"))
        if mesh is None:
            if reduce != "auto" or param_specs is not None:
                name, value = ("reduce", reduce) if reduce != "auto" else ("param_specs", param_specs)
                raise InputError(
                    f"{name} needs a mesh",
                    given=f"{name}={value!r} and mesh=None",
                    remedy=f"Pass mesh={EXAMPLE_MESH}, or leave {name} out.",
                )
            return None
        if not isinstance(mesh, Mesh) or mesh.empty:
            raise InputError(
                "mesh must be a jax.sharding.Mesh with devices",
                given=f"mesh={mesh!r}",
                remedy=f"For example mesh={EXAMPLE_MESH}.",
            )
        axes = (axis_name,) if isinstance(axis_name, str) else axis_name
        if not isinstance(axes, (tuple, list)) or not axes or not all(name in mesh.axis_names for name in axes):
            raise InputError(
                "axis_name must be an axis of the mesh, or a tuple of axes",
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
        return cls(mesh, tuple(axes), reduce, param_specs)

    @property
    def mesh(self) -> Mesh:
        """The user's mesh with all axes automatic: XLA decides how arrays are sharded over them."""
        automatic = (AxisType.Auto,) * len(self.user_mesh.axis_names)
        return Mesh(self.user_mesh.devices, self.user_mesh.axis_names, axis_types=automatic)

    @property
    def is_explicit(self) -> bool:
        """True if the user's mesh has axes that are not automatic."""
        return self.mesh != self.user_mesh

    @property
    def devices(self) -> int:
        """The number of shards of the batch: the product of the sizes of `axes`."""
        return math.prod(self.user_mesh.shape[name] for name in self.axes)

    def __str__(self) -> str:
        axes = ", ".join(f"{name}: {size}" for name, size in self.user_mesh.shape.items())
        return f"mesh ({axes}), examples over {' and '.join(self.axes)}"


def is_spec(value: Any) -> bool:
    """True for a leaf of `param_specs`: the sharding of one array, or None."""
    return value is None or isinstance(value, (PartitionSpec, NamedSharding))


def _check_specs(param_specs: Any, mesh: Mesh) -> None:
    for each in jax.tree.leaves(param_specs, is_leaf=is_spec):
        spec = each.spec if isinstance(each, NamedSharding) else each
        if not is_spec(each) or any(name not in mesh.axis_names for names in axes_of(spec) for name in names):
            raise InputError(
                "param_specs must be a jax.sharding.PartitionSpec of axes of the mesh, or a tree of them",
                given=f"{each!r} for a mesh with the axes {mesh.axis_names}",
                remedy='For example param_specs={"w": jax.sharding.PartitionSpec("data", None), "b": None}.',
            )


REDUCTIONS = ("infer", "sum", "mean", "weighted")

# Policies of `jax.checkpoint`, from the one that keeps the most activations to the one that keeps the fewest.
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")

# The value of `remat` that computes activations again, and keeps those between the layers of a loop on the host.
OFFLOAD = "offload"

# The shares of the activations that `remat="auto"` considers to compute again.
SHARES = (0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `value_and_grad`, with their defaults. `Options.of` checks them.

    To add an option, add a field here, a check in `_checked` if it needs one, and a documented argument of
    `value_and_grad`. `plan`, `explain`, `grad`, `noise_scale` and `train_step` accept it without further changes.
    """

    argnums: Any = 0
    has_aux: bool = False
    batch_argnums: Any = 1
    batch_argnames: Any = ()
    rng_argnums: Any = ()
    microbatch_size: Any = "auto"  # an int, None for the full batch, or "auto"
    block_size: Any = "auto"  # an int, None for big values in full, or "auto"
    reduction: str = "infer"
    aux_reduction: Any = None
    memory: Any = None
    objective: str = "speed"
    remat: str | float | None = "auto"
    accumulator_dtype: Any = jnp.float32
    mesh: Any = None
    axis_name: Any = "data"
    reduce: str = "auto"
    param_specs: Any = None
    reproducible: bool = False
    on_coupled: str = "exact"
    noise: bool = False  # whether to also estimate the gradient noise; set by `noise_scale` and `train_step`
    maps: bool = False  # whether the function itself is computed, and no gradient; set by `map_batch`

    @classmethod
    def of(cls, fun: Callable[..., Any], /, **options: Any) -> Self:
        """The checked options of a user for the loss `fun`. A name that is not an option raises a TypeError."""
        if not callable(fun):
            raise InputError(
                "The loss must be a function",
                given=f"fun={fun!r}",
                remedy="Pass the function itself, not its result: value_and_grad(loss)(params, batch).",
            )
        unknown = [name for name in options if name not in cls.__dataclass_fields__]
        if unknown:
            raise TypeError(f"got an unexpected keyword argument {unknown[0]!r}")
        return cls(**options)._checked()

    @functools.cached_property
    def roles(self) -> Roles:
        """Which arguments are differentiated, which carry the batch, and which are PRNG keys."""
        chosen = {name: getattr(self, name) for name in ROLES}
        return Roles.of(**chosen | {"argnums": NOTHING} if self.maps else chosen)

    @functools.cached_property
    def mesh_options(self) -> MeshOptions | None:
        return MeshOptions.of(self.mesh, self.axis_name, self.reduce, self.param_specs)

    def to_plan(self, memory: Any, objective: Any) -> Self:
        """These options for a plan, which chooses the microbatch size, with the memory and the objective of `plan`."""
        one_of("objective", objective, ("memory", "speed"))
        memory = self.memory if memory is None else memory
        return dataclasses.replace(self, microbatch_size="auto", memory=memory, objective=objective)

    @property
    def weighted(self) -> bool:
        return self.reduction == "weighted"

    @property
    def stacks_aux(self) -> bool:
        return self.has_aux and "stack" in jax.tree.leaves(self.aux_reduction)

    @property
    def aux_of_microbatches(self) -> bool:
        """True if aux depends on how the batch is divided: a leaf is stacked, or is that of the last microbatch."""
        return self.has_aux and not {"stack", "last"}.isdisjoint(jax.tree.leaves(self.aux_reduction))

    @property
    def fixed_remat(self) -> str | float | None:
        """The value of `remat` for a call that is not planned: "auto" is for plans only."""
        return None if self.remat == "auto" else self.remat

    @property
    def fixed_block_size(self) -> int | None:
        """The block size of a call that is not planned: "auto" is for plans only."""
        return None if self.block_size == "auto" else self.block_size

    @property
    def fixed_reduce(self) -> str:
        """The value of `reduce` for a call that is not planned: "once", unless the user chose "each"."""
        return "each" if self.reduce == "each" else "once"

    def _checked(self) -> Self:
        """These options with normalised values. Raises an InputError for values that are not allowed."""
        assert self.roles  # raises for positions that are not integers or have two roles
        one_of("reduction", self.reduction, REDUCTIONS)
        one_of("on_coupled", self.on_coupled, ("exact", "error"))
        one_of("objective", self.objective, ("memory", "speed"))
        remat = float(self.remat) if self.remat == 1 and not isinstance(self.remat, bool) else self.remat
        _check_remat(remat)
        size = _size("microbatch_size", self.microbatch_size, "examples at a time", "the full batch")
        block_size = _size("block_size", self.block_size, "rows of a block", "big values in full")
        self._check_aux(size)
        dtype = _accumulator_dtype(self.accumulator_dtype)
        if self.memory is not None:
            memory_budget(self.memory)  # raises for a value that is not allowed
        _ = self.mesh_options  # raises for a value that is not allowed
        self._check_reproducible(size)
        if self.noise and self.reduce == "each":
            raise InputError(
                'The noise scale needs reduce="once", which keeps the gradient of each microbatch on its device',
                given='reduce="each", which sums over the devices in every microbatch',
                remedy="Leave reduce out, or pass exact=True.",
            )
        changes = {"microbatch_size": size, "block_size": block_size, "remat": remat, "accumulator_dtype": dtype}
        return dataclasses.replace(self, **changes)

    def _check_aux(self, size: Any) -> None:
        aux_outputs.check_aux_reduction(self.aux_reduction)
        if self.aux_reduction is None:
            return
        if not self.has_aux:
            raise InputError(
                "aux_reduction needs has_aux=True",
                given=f"aux_reduction={self.aux_reduction!r} and has_aux={self.has_aux!r}",
                remedy="Pass has_aux=True for a loss that returns (loss, aux), or leave aux_reduction out.",
            )
        if self.reduction == "infer" and size is not None:
            raise InputError(
                "aux_reduction needs a declared reduction",
                given=f'aux_reduction={self.aux_reduction!r} and reduction="infer"',
                remedy='Leave it out: with reduction="infer" every aux leaf equals that of the full batch. To combine '
                'the leaves of the microbatches yourself, also declare reduction="mean", "sum" or "weighted".',
            )
        if size == "auto" and self.aux_of_microbatches:
            raise InputError(
                'aux_reduction="stack" or "last" needs a microbatch_size, on which the result depends',
                given=f'aux_reduction={self.aux_reduction!r} and microbatch_size="auto"',
                remedy='Pass the number of examples at a time, e.g. microbatch_size=8, or use "mean" or "sum".',
            )

    def _check_reproducible(self, size: Any) -> None:
        if not isinstance(self.reproducible, bool):
            raise InputError(
                "reproducible must be True or False",
                given=f"reproducible={self.reproducible!r}",
                remedy="Pass reproducible=True for the same bits on 1, 2, 4, ... devices.",
            )
        if self.reproducible and not isinstance(size, int):
            raise InputError(
                "reproducible=True needs a microbatch_size, on which the bits of the result depend",
                given=f"microbatch_size={size!r}",
                remedy="Pass the number of examples that a device takes at a time, e.g. microbatch_size=8.",
            )
        if self.reproducible and self.reduce == "each":
            raise InputError(
                'reproducible=True needs reduce="once"',
                given='reduce="each", which sums over the devices in every microbatch',
                remedy="Leave reduce out.",
            )


def is_remat(value: Any) -> bool:
    """True for None, a policy, "offload", or the share of the activations that is computed again."""
    is_share = isinstance(value, float) and 0 < value <= 1
    return value is None or is_share or (isinstance(value, str) and value in (*POLICIES, OFFLOAD))


def _check_remat(value: Any) -> None:
    if not is_remat(value) and value != "auto":
        names = ", ".join(f'"{name}"' for name in (OFFLOAD, *POLICIES))
        raise InputError(
            f'remat must be one of None, "auto", a share above 0 and at most 1, {names}',
            given=f"remat={value!r}",
            remedy="Pass remat=0.5 to compute half of the activations again, or None to keep all of them.",
        )


def _size(name: str, value: Any, unit: str, none: str) -> Any:
    """A number, None or "auto". `unit` says what it counts, and `none` what None means."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    try:
        return whole_number(name, value, 1)
    except InputError as error:
        raise InputError(
            f'{error.must}, None or "auto"',
            given=error.given,
            remedy=f"Pass the number of {unit}, e.g. {name}=8, or None for {none}.",
        ) from None


def _accumulator_dtype(value: Any) -> Any:
    if value is None:
        return None
    with contextlib.suppress(TypeError):
        if jax.dtypes.issubdtype(jnp.dtype(value), jnp.floating):
            return jax.dtypes.canonicalize_dtype(value)
    raise InputError(
        "accumulator_dtype must be a floating-point dtype or None",
        given=f"accumulator_dtype={value!r}",
        remedy="Use accumulator_dtype=jnp.float32, or None to sum each gradient in its own dtype.",
    )
