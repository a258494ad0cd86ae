"""The options of per-example gradients, checked when the loss is wrapped and before any work is done."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call.arguments import Roles
from anybatch.call.options import Options
from anybatch.errors import InputError

METHODS = ("auto", "vmap", "factored")


@dataclasses.dataclass(frozen=True)
class PerExampleOptions:
    """What a user asked of per-example gradients, known to be sound as far as that can be known before a call."""

    common: Options  # what they have in common with other gradients
    wants: str  # "gradients", "norms" or "sum"
    method: str
    keep_batch_dim: bool
    nan_safe: bool
    transform: Callable[[Any], Any] | None
    return_values: bool
    return_norms: bool
    per_leaf: bool = False
    strict: bool = False
    clip_norm: float = math.inf
    normalize_by: float = 1.0

    @property
    def returns_examples(self) -> bool:
        """Whether losses, norms and aux are returned beside the result."""
        return self.return_values or self.return_norms

    @property
    def sensitivity(self) -> float:
        """The most that one example, added or removed, changes the result by."""
        return self.clip_norm / self.normalize_by if self.nan_safe else math.inf

    @classmethod
    def of(
        cls,
        fun: Callable[..., Any],
        *,
        wants: str,
        argnums: Any,
        has_aux: bool,
        batch_argnums: Any,
        batch_argnames: Any,
        rng_argnums: Any,
        keep_batch_dim: Any,
        microbatch_size: Any,
        method: Any,
        transform: Any,
        nan_safe: Any,
        return_values: Any,
        return_norms: Any,
        accumulator_dtype: Any,
        memory: Any,
        mesh: Any,
        axis_name: Any,
        param_specs: Any,
        objective: Any = "speed",
        per_leaf: Any = False,
        strict: Any = False,
        clip_norm: Any = math.inf,
        normalize_by: Any = 1.0,
    ) -> "PerExampleOptions":
        """Checks the options.

        Raises:
          InputError: for a value that is not one of them.
        """
        flags = {
            "keep_batch_dim": keep_batch_dim,
            "nan_safe": nan_safe,
            "return_values": return_values,
            "return_norms": return_norms,
            "per_leaf": per_leaf,
            "strict": strict,
        }
        for name, given in flags.items():
            if not isinstance(given, bool):
                raise InputError(
                    f"{name} must be True or False", given=f"{name}={given!r}", remedy=f"Pass {name}=True or leave it."
                )
        if method not in METHODS or not isinstance(method, str):
            raise InputError(
                f"method must be one of {', '.join(map(repr, METHODS))}",
                given=f"method={method!r}",
                remedy='Leave it out, or pass method="vmap" to have every gradient computed by itself.',
            )
        if transform is not None and not callable(transform):
            raise InputError(
                "transform must be a function of the gradient of one example",
                given=f"transform={transform!r}",
                remedy="Pass a function, e.g. transform=lambda grad: jax.tree.map(jnp.sign, grad).",
            )
        if transform is not None and method == "factored":
            raise InputError(
                "transform needs the gradient of each example as it is",
                given='method="factored"',
                remedy="Leave method out.",
            )
        common = Options.of(
            fun,
            roles=Roles.of(
                argnums=argnums, batch_argnums=batch_argnums, rng_argnums=rng_argnums, batch_argnames=batch_argnames
            ),
            has_aux=has_aux,
            microbatch_size=microbatch_size,
            reduction="sum",
            aux_reduction=None,
            accumulator_dtype=accumulator_dtype,
            memory=memory,
            on_coupled="exact",
            objective=objective,
            mesh=mesh,
            axis_name=axis_name,
            param_specs=param_specs,
        )
        return cls(
            common=common,
            wants=wants,
            method=method,
            keep_batch_dim=keep_batch_dim,
            nan_safe=nan_safe,
            transform=transform,
            return_values=return_values,
            return_norms=return_norms,
            per_leaf=per_leaf,
            strict=strict,
            clip_norm=_positive("clip_norm", clip_norm, "Pass the largest norm that an example may have, e.g. 1.0."),
            normalize_by=_positive(
                "normalize_by", normalize_by, "Pass what the sum is to be divided by, e.g. the expected batch size."
            ),
        )


def _positive(name: str, given: Any, remedy: str) -> float:
    if isinstance(given, jax.core.Tracer):
        raise InputError(
            f"{name} must be known when the loss is wrapped",
            given=f"{name}={given}, which is traced",
            remedy=f"Wrap the loss outside of jit, with {name} a Python number.",
        )
    is_number = isinstance(given, (int, float)) or (hasattr(given, "dtype") and jnp.ndim(given) == 0)
    try:
        number = math.nan if isinstance(given, bool) or not is_number else float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not number > 0 or (name == "normalize_by" and math.isinf(number)):
        raise InputError(f"{name} must be a number above 0", given=f"{name}={given!r}", remedy=remedy)
    return number
