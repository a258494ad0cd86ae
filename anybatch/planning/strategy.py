"""Strategies: how one gradient can be computed."""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax

from anybatch.call.caches import PROGRAMS, CompiledProgram, can_run


class Route(enum.StrEnum):
    """What a strategy does with the batch, in the words that the table of a plan shows."""

    FULL_BATCH = "full batch"
    ONE_PASS = "one pass"
    TWO_PASSES = "two passes"
    STREAMED = "from the host"  # in chunks that are copied to the device, in one pass or two
    FACTORED = "factored"  # per-example gradients, kept as the factors of each parameter's gradient
    VMAP = "vmap(grad)"  # per-example gradients, each as one array


class Variant(NamedTuple):
    """A strategy's choices other than its microbatch size."""

    remat: str | float | None = None  # a policy of jax.checkpoint, or the share of activations computed again
    reduce: str = "once"  # on a mesh, when gradients are added up over devices: "once", or after "each" microbatch
    method: str | None = None  # for per-example gradients: "factored" or "vmap"
    block_size: int | None = None  # rows of big values that are computed at a time; None: all


@dataclasses.dataclass(frozen=True)
class Strategy:
    """How to compute a gradient: a microbatch size and a `Variant`. Prints as the options that choose it.

    >>> print(Strategy(8, "dots_saveable"))
    microbatch_size=8, remat="dots_saveable"
    """

    microbatch_size: int | None  # None or at least the number of examples: the full batch
    remat: str | float | None = None
    reduce: str = "once"
    method: str | None = None
    block_size: int | None = None

    @classmethod
    def of_options(cls, options: Any) -> Self:
        """The strategy of a call that is not planned."""
        how = (options.fixed_remat, options.fixed_reduce, None, options.fixed_block_size)
        return cls(options.microbatch_size, *how)

    @property
    def variant(self) -> Variant:
        return Variant(self.remat, self.reduce, self.method, self.block_size)

    @property
    def remat_text(self) -> str:
        """The option `remat=` as code."""
        return f'remat="{self.remat}"' if isinstance(self.remat, str) else f"remat={self.remat:g}"

    def __str__(self) -> str:
        remat = "" if self.remat is None else f", {self.remat_text}"
        reduce = "" if self.reduce == "once" else f', reduce="{self.reduce}"'
        method = "" if self.method is None else f', method="{self.method}"'
        blocks = "" if self.block_size is None else f", block_size={self.block_size}"
        return f"microbatch_size={self.microbatch_size}{blocks}{remat}{reduce}{method}"


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
