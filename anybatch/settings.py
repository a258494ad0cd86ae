"""The options of a gradient, checked when the loss is wrapped and before any work is done."""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anybatch import auxiliary
from anybatch.arguments import Roles
from anybatch.checks import one_of
from anybatch.errors import InputError
from anybatch.memory import memory_budget
from anybatch.mesh_settings import MeshSettings, mesh_settings

REDUCTIONS = ("infer", "sum", "mean", "weighted")

# What a backward pass keeps of the forward pass, from most to least; the rest is computed again. They are JAX's own.
POLICIES = ("dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")


@dataclasses.dataclass(frozen=True)
class Settings:
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
    over: MeshSettings | None  # a mesh, and how to use it
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
    ) -> "Settings":
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
        auxiliary.check_aux_reduction(aux_reduction)
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
        over = mesh_settings(mesh, axis_name, reduce, param_specs)
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
