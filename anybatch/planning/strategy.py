"""Strategies: how one gradient can be computed, and what the planner must know about a gradient to choose one."""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from anybatch.call.caches import PROGRAMS, CompiledProgram, can_run


class Route(enum.StrEnum):
    """What a strategy does with the batch, in the words that the table of a plan shows."""

    FULL_BATCH = "full batch"
    ONE_PASS = "one pass"
    TWO_PASSES = "two passes"
    FACTORED = "factored"  # per-example gradients, kept as the factors of each parameter's gradient
    VMAP = "vmap(grad)"  # per-example gradients, each as one array


class Variant(NamedTuple):
    """A strategy's choices other than its microbatch size."""

    remat: str | None = None  # a policy of jax.checkpoint
    reduce: str = "once"  # on a mesh, when gradients are added up over devices: "once", or after "each" microbatch
    method: str | None = None  # for per-example gradients: "factored" or "vmap"


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How to compute a gradient: a microbatch size and a `Variant`. Prints as the options that choose it.

    >>> print(Strategy(8, "dots_saveable"))
    microbatch_size=8, remat="dots_saveable"
    """

    microbatch_size: int | None  # None or at least the number of examples: the full batch
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


@dataclasses.dataclass(eq=False)
class Computation:
    """A gradient by one strategy: a function of flat arrays, these arrays, and the program that it was compiled to.

    The planner compiles and measures it, and the caller runs the same object, so that nothing is compiled twice.
    """

    fun: Callable[..., list[Any]]
    leaves: list[Any]
    has_effects: bool
    program: CompiledProgram | None = None

    def compile(self) -> CompiledProgram:
        """The compiled program. It is not yet in the cache of programs."""
        if self.program is None:
            self.program = PROGRAMS.compile(self.fun, *self.leaves, has_effects=self.has_effects)
        return self.program

    def ready(self) -> Callable[[], list[Any]]:
        """Compiles it, unless it is called while JAX traces a larger program. Returns a function that runs it."""
        if not can_run(*self.leaves):
            return lambda: self.fun(*self.leaves)
        program = self.compile()
        PROGRAMS.keep(program)
        return lambda: program(*self.leaves)

    def ready_to_wait(self) -> Callable[[], list[Any]]:
        """As `ready`; the first run of a program waits for its end. Memory may run out at any time until then."""
        run = self.ready()

        def run_and_wait() -> list[Any]:
            outputs = run()
            if self.program is not None and not self.program.has_run:
                jax.block_until_ready(outputs)
                self.program.has_run = True
            return outputs

        return run_and_wait


class PlannableGradient(Protocol):
    """What the planner asks of the gradient of one call. `Gradient` and `ExampleGradient` implement it."""

    options: Any
    arguments: Any
    shardings: Any
    examples: int

    @property
    def max_microbatch_size(self) -> int:
        """The number of examples; on a mesh, the largest number on one device."""
        ...

    @property
    def size_multiple(self) -> int:
        """The number that microbatch sizes should be multiples of: the devices that the batch is sharded over."""
        ...

    @property
    def loss(self) -> Any:
        """The traced loss of the full batch."""
        ...

    @property
    def devices(self) -> list[Any]:
        """The devices of this process that it runs on; empty if its arrays do not say."""
        ...

    @property
    def num_batch_shards(self) -> int:
        """The number of devices that `mesh=` shards the batch over; 1 without a mesh."""
        ...

    @property
    def vmap_copies(self) -> int:
        """How many gradients run together, because the call is inside `vmap`."""
        ...

    @property
    def checked_reading(self) -> Any:
        """The reading of the loss, refused with an error where the options say so; None for single examples."""
        ...

    @property
    def is_coupled(self) -> bool:
        """True if every strategy computes part of the loss from the full batch."""
        ...

    @property
    def draws_per_microbatch(self) -> bool:
        """True if random draws may depend on the microbatch size."""
        ...

    @property
    def reduce_modes(self) -> tuple[str, ...]:
        """The choices for `Variant.reduce`, the one that communicates least first."""
        ...

    @property
    def methods(self) -> tuple[str | None, ...]:
        """The choices for `Variant.method`, the one that is likely fastest first."""
        ...

    @property
    def noun(self) -> str:
        """What is computed, for the title of a plan: "gradient" or "clipped gradient"."""
        ...

    @property
    def note(self) -> str:
        """A remark for the plan; may be empty."""
        ...

    @property
    def identity(self) -> Sequence[Any]:
        """What else memory and time depend on, beside the loss, its arguments and the options."""
        ...

    def bytes_written(self, count: Callable[[Any], int]) -> int:
        """The bytes that the loss of the full batch writes; `count` counts those of one jaxpr."""
        ...

    def local_bytes(self, role: str) -> int:
        """The bytes of the arguments with this role on one device."""
        ...

    def is_full_batch(self, strategy: Strategy) -> bool:
        """True if one microbatch of this strategy holds all examples (of a device)."""
        ...

    def route(self, strategy: Strategy) -> Route: ...
    def computation(self, strategy: Strategy) -> Computation: ...

    def context(self) -> Any:
        """The context manager in which it must be traced, compiled and run."""
        ...


@runtime_checkable
class PlannableFunction(Protocol):
    """A transformed loss that says itself how it is planned, such as the result of `clipped_grad`."""

    def to_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, memory: Any, objective: Any
    ) -> tuple[Callable[..., PlannableGradient], tuple[Any, ...], dict[str, Any]]:
        """Returns a function that makes the gradient of a call, and the arguments to call it with."""
        ...
