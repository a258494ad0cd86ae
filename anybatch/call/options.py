"""The options of a gradient that is spread over a mesh.

The options of a gradient, checked when the loss is wrapped and before any work is done.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from anybatch.call import aux_outputs
from anybatch.call.arguments import Roles
from anybatch.call.checks import one_of
from anybatch.call.memory import memory_budget
from anybatch.errors import InputError

EXAMPLE = 'jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))'


@dataclasses.dataclass(frozen=True)
class MeshOptions:
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


def mesh_options(mesh: Any, axis_name: Any, reduce: Any, param_specs: Any) -> MeshOptions | None:
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
    return MeshOptions(mesh, tuple(axes), reduce, param_specs)


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


REDUCTIONS = ("infer", "sum", "mean", "weighted")

# What a backward pass keeps of the forward pass, from most to least; the rest is computed again. They are JAX's own.
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user asked of `value_and_grad`, known to be sound as far as that can be known before a call."""

    roles: Roles
    has_aux: bool
    microbatch_size: int | str | None
    reduction: str
    aux_reduction: Any
    accumulator_dtype: Any
    on_coupled: str
    memory: Any
    objective: str
    remat: str | None
    over: MeshOptions | None  # a mesh, and how to use it
    reproducible: bool
    noise: bool = False  # whether the noise in the gradient is wanted, too

    @property
    def weighted(self) -> bool:
        return self.reduction == "weighted"

    @property
    def stacks_aux(self) -> bool:
        return self.has_aux and "stack" in jax.tree.leaves(self.aux_reduction)

    @property
    def aux_of_microbatches(self) -> bool:
        """Whether aux has values that are those of single microbatches."""
        return self.has_aux and bool({"stack", "last"} & set(jax.tree.leaves(self.aux_reduction)))

    @property
    def fixed_remat(self) -> str | None:
        """The policy for a microbatch size that is given: "auto" is for those that are planned."""
        return None if self.remat == "auto" else self.remat

    @property
    def fixed_reduce(self) -> str:
        """When gradients are added up over a mesh if nothing is planned: once, unless told otherwise."""
        return "each" if self.over is not None and self.over.reduce == "each" else "once"

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        *,
        roles: Roles,
        has_aux: bool,
        microbatch_size: Any,
        reduction: Any,
        aux_reduction: Any,
        accumulator_dtype: Any,
        memory: Any,
        on_coupled: Any,
        objective: Any = "speed",
        remat: Any = None,
        mesh: Any = None,
        axis_name: Any = "data",
        reduce: Any = "auto",
        param_specs: Any = None,
        reproducible: Any = False,
        noise: bool = False,
    ) -> "Options":
        """Checks the options.

        Raises:
          InputError: for a value that is not one of them.
        """
        if not callable(fun):
            raise InputError(
                "The loss must be a function",
                given=f"fun={fun!r}",
                remedy="Pass the function itself, not its result: value_and_grad(loss)(params, batch).",
            )
        one_of("reduction", reduction, REDUCTIONS)
        one_of("on_coupled", on_coupled, ("exact", "error"))
        one_of("objective", objective, ("memory", "speed"))
        if remat is not None:
            one_of("remat", remat, (*POLICIES, "auto"))
        aux_outputs.check_aux_reduction(aux_reduction)
        if aux_reduction is not None and not has_aux:
            raise InputError(
                "aux_reduction goes with has_aux=True",
                given=f"aux_reduction={aux_reduction!r} and has_aux={has_aux!r}",
                remedy="Pass has_aux=True for a loss that returns (loss, aux), or leave aux_reduction out.",
            )
        size = _microbatch_size(microbatch_size)
        if aux_reduction is not None and reduction == "infer" and size is not None:
            raise InputError(
                "aux_reduction goes with a declared reduction",
                given=f'aux_reduction={aux_reduction!r} and reduction="infer"',
                remedy="Leave it out: aux is read from the loss, and every leaf is that of the full batch. To combine "
                'those of the microbatches otherwise, declare reduction="mean", "sum" or "weighted" too.',
            )
        dtype = _accumulator_dtype(accumulator_dtype)
        if memory is not None:
            memory_budget(memory)  # raises for what no budget can be
        over = mesh_options(mesh, axis_name, reduce, param_specs)
        _check_reproducible(reproducible, size, reduce)
        _check_noise(noise, reduce)
        size_dependent = {"stack", "last"} & set(jax.tree.leaves(aux_reduction))
        if size == "auto" and size_dependent:
            raise InputError(
                "aux that depends on the microbatches needs a microbatch_size",
                given=f'aux_reduction={aux_reduction!r} and microbatch_size="auto"',
                remedy='Pass the number of examples at a time, e.g. microbatch_size=8, or combine by "mean" or "sum".',
            )
        return cls(
            roles=roles,
            has_aux=has_aux,
            microbatch_size=size,
            reduction=reduction,
            aux_reduction=aux_reduction,
            accumulator_dtype=dtype,
            on_coupled=on_coupled,
            memory=memory,
            objective=objective,
            remat=remat,
            over=over,
            reproducible=bool(reproducible),
            noise=noise,
        )


def _check_reproducible(reproducible: Any, size: Any, reduce: Any) -> None:
    if not isinstance(reproducible, bool):
        raise InputError(
            "reproducible must be True or False",
            given=f"reproducible={reproducible!r}",
            remedy="Pass reproducible=True for the same bits on 1, 2, 4, ... devices.",
        )
    if reproducible and not isinstance(size, int):
        raise InputError(
            "reproducible=True needs a microbatch_size: the bits are those of its microbatches",
            given=f"microbatch_size={size!r}",
            remedy="Pass the number of examples that a device takes at a time, e.g. microbatch_size=8.",
        )
    if reproducible and reduce == "each":
        raise InputError(
            'reproducible=True goes with reduce="once"',
            given='reduce="each", which adds up over the devices in every microbatch',
            remedy="Leave reduce out.",
        )


def _check_noise(noise: bool, reduce: Any) -> None:
    if noise and reduce == "each":
        raise InputError(
            'The noise scale goes with reduce="once": it needs the gradient of each microbatch on its own device',
            given='reduce="each", which adds up over the devices in every microbatch',
            remedy="Leave reduce out, or pass exact=True.",
        )


def _microbatch_size(given: Any) -> Any:
    if given is None or (isinstance(given, str) and given == "auto"):
        return given
    try:
        size = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        size = 0
    if size < 1:
        raise InputError(
            'microbatch_size must be a whole number of at least 1, None or "auto"',
            given=f"microbatch_size={given!r}",
            remedy="Pass the number of examples at a time, e.g. microbatch_size=8, or None for the full batch.",
        )
    return size


def _accumulator_dtype(given: Any) -> Any:
    try:
        if given is None or jax.dtypes.issubdtype(jnp.dtype(given), jnp.floating):
            return given if given is None else jax.dtypes.canonicalize_dtype(given)
    except TypeError:
        pass
    raise InputError(
        "accumulator_dtype must be a floating-point dtype or None",
        given=f"accumulator_dtype={given!r}",
        remedy="Use accumulator_dtype=jnp.float32, or None to sum each gradient in its own dtype.",
    )
