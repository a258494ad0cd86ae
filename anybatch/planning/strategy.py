"""Strategies: the ways to compute one gradient, as records, and what the planner asks of a gradient."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Variant(NamedTuple):
    """What there is to decide about a way beside the size of the microbatches."""

    remat: str | None = None  # a policy of jax.checkpoint
    reduce: str = "once"  # on a mesh, when gradients are added up: "once", or in "each" microbatch
    method: str | None = None  # of per-example gradients: "factored" or "vmap"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A way to compute a gradient.

    >>> print(Way(8, "dots_saveable"))
    microbatch_size=8, remat="dots_saveable"
    """

    microbatch_size: int | None  # None, or no less than the examples there are: all of them at once
    remat: str | None = None
    reduce: str = "once"
    method: str | None = None

    @property
    def variant(self) -> Variant:
        return Variant(self.remat, self.reduce, self.method)

    def __str__(self) -> str:
        remat = "" if self.remat is None else f', remat="{self.remat}"'
        reduce = "" if self.reduce == "once" else f', reduce="{self.reduce}"'
        method = "" if self.method is None else f', method="{self.method}"'
        return f"microbatch_size={self.microbatch_size}{remat}{reduce}{method}"


@dataclasses.dataclass(frozen=True)
class Computation:
    """A gradient, ready to compile and run: a function of arrays, and the arrays."""

    fun: Callable[..., list[Any]]
    leaves: list[Any]
    has_effects: bool


class Planned(Protocol):
    """What the planner needs to know of a gradient: `Gradient` and `ExampleGradient` provide it."""

    options: Any
    arguments: Any
    shardings: Any
    examples: int

    @property
    def share(self) -> int: ...
    @property
    def unit(self) -> int: ...
    @property
    def loss(self) -> Any: ...
    @property
    def devices(self) -> list[Any]: ...
    @property
    def spread_over(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def checked_reading(self) -> Any: ...
    @property
    def is_coupled(self) -> bool: ...
    @property
    def draws_anew(self) -> bool: ...
    @property
    def reduces(self) -> tuple[str, ...]: ...
    @property
    def methods(self) -> tuple[str | None, ...]: ...
    @property
    def noun(self) -> str: ...
    @property
    def note(self) -> str: ...
    @property
    def identity(self) -> Sequence[Any]: ...

    def written(self, count: Callable[[Any], int]) -> int: ...
    def local_bytes(self, role: str) -> int: ...
    def is_at_once(self, strategy: Strategy) -> bool: ...
    def route(self, strategy: Strategy) -> str: ...
    def computation(self, strategy: Strategy) -> Computation: ...
    def context(self) -> Any: ...


@runtime_checkable
class PlannedFunction(Protocol):
    """A wrapped loss that says itself what there is to plan, such as that of `clipped_grad`."""

    def to_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, memory: Any, objective: Any
    ) -> tuple[Callable[..., Planned], tuple[Any, ...], dict[str, Any]]:
        """A function that makes the gradient of a call, and the arguments to call it with."""
        ...
