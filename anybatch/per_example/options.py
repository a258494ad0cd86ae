"""The options of per-example gradients, checked when the loss is wrapped and before any work is done."""

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from anybatch.call.checks import one_of
from anybatch.call.options import Options
from anybatch.errors import InputError


class Wants(enum.Enum):
    """What is computed from the gradients of single examples."""

    GRADIENTS = "gradients"
    NORMS = "norms"
    SUM = "sum"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerExampleOptions(Options):
    """The options of `per_example_grads`, `per_example_norms` and `clipped_grad`, with those of every gradient."""

    wants: Wants
    reduction: str = "sum"
    method: str = "auto"
    keep_batch_dim: bool = False
    nan_safe: bool = False
    transform: Callable[[Any], Any] | None = None
    return_values: bool = False
    return_norms: bool = False
    per_leaf: bool = False
    strict: bool = False
    clip_norm: float = math.inf
    normalize_by: float = 1.0

    @property
    def returns_examples(self) -> bool:
        """True if a `PerExample` is returned beside the result."""
        return self.return_values or self.return_norms

    @property
    def keeps_norms(self) -> bool:
        """True if the norms of all examples are returned."""
        return self.wants is Wants.NORMS or self.return_norms

    @property
    def sensitivity(self) -> float:
        """The most that adding or removing one example changes the result."""
        return self.clip_norm / self.normalize_by if self.nan_safe else math.inf

    def _checked(self) -> Self:
        for name in ("keep_batch_dim", "nan_safe", "return_values", "return_norms", "per_leaf", "strict"):
            given = getattr(self, name)
            if not isinstance(given, bool):
                raise InputError(
                    f"{name} must be True or False",
                    given=f"{name}={given!r}",
                    remedy=f"Pass {name}=True, or leave it out.",
                )
        one_of("method", self.method, ("auto", "factored", "vmap"))
        if self.transform is not None and not callable(self.transform):
            raise InputError(
                "transform must be a function of the gradient of one example",
                given=f"transform={self.transform!r}",
                remedy="Pass a function, e.g. transform=lambda grad: jax.tree.map(jnp.sign, grad).",
            )
        if self.transform is not None and self.method == "factored":
            raise InputError(
                "transform needs the gradient of each example, which method='factored' does not compute",
                given='method="factored"',
                remedy="Leave method out.",
            )
        remedy = "Pass the largest norm that the gradient of an example may have, e.g. 1.0."
        clip_norm = _positive("clip_norm", self.clip_norm, remedy)
        remedy = "Pass the divisor of the sum, e.g. the expected batch size."
        normalize_by = _positive("normalize_by", self.normalize_by, remedy)
        return dataclasses.replace(super()._checked(), clip_norm=clip_norm, normalize_by=normalize_by)


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
