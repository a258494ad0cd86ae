"""A compiled step that fits the memory: checked before it runs, and made smaller if memory runs out all the same."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from anybatch import compat
from anybatch.computation import Gradient
from anybatch.planning.strategy import Way
from anybatch.errors import NothingFitsError, TightMemoryWarning, user_stacklevel
from anybatch.memory import memory_budget, memory_left, readable
from anybatch.planning.measure import FAILURES
from anybatch.planning.running import halved, not_compiled


class FittingProgram:
    """A step as a compiled program, with microbatches that let it fit.

    The gradient was planned by itself. Here the whole step counts: what XLA says it takes, with the state, the batch
    and the update. Nothing runs to find out.

    Args:
      make: makes the program for a way.
      way: to begin with.
      gradient: of the step.
      memory: what the whole step may take, if somebody named it.
      note: is told the way that is gone in the end.
    """

    def __init__(
        self,
        make: Callable[[Way], Any],
        way: Way,
        gradient: Gradient,
        memory: Any,
        note: Callable[[Way], None] = lambda way: None,
    ) -> None:
        self.way = way
        self._memory, self._note = memory, note
        self._make: Any = make
        self._gradient: Any = gradient
        self._program: Any = None
        self._has_run = False

    def __call__(self, arrays: list[Any], rows: list[Any]) -> Any:
        if not self._has_run:
            return self._first(arrays, rows)
        return self._program(arrays, rows)

    def compile(self, arrays: list[Any], rows: list[Any], *, is_adopted: bool = False) -> None:
        """Compiles it, with smaller microbatches until it fits.

        Args:
          arrays: of the state.
          rows: of the batch.
          is_adopted: whether the way was chosen by another process, whose bits would be others.

        Raises:
          NothingFitsError: if not even the smallest fits the memory that somebody named.
        """
        failures = 0
        while True:
            self._program = self._make(self.way)
            smaller = halved(self._gradient, self.way)
            try:
                stats = self._program.lower(arrays, rows).compile().memory_analysis()
            except jax.errors.JaxRuntimeError as error:
                failures += not compat.is_out_of_memory(error)
                if smaller is None or failures > FAILURES:
                    raise
                excess: str | None = not_compiled(self.way, error)
            else:
                excess = None if stats is None else self._excess(stats)
            if excess is None:
                break
            if smaller is None:
                if self._is_named:
                    raise NothingFitsError(f"{excess}\n{self._ways_out(arrays, rows, stats)}")
                warnings.warn(excess, TightMemoryWarning, stacklevel=user_stacklevel())
                break
            if is_adopted:
                warnings.warn(
                    f"{excess}\nThe run that goes on here had more. Going on with {smaller}: the gradient is the same, "
                    "but for the last bits.",
                    TightMemoryWarning,
                    stacklevel=user_stacklevel(),
                )
            self.way = smaller
        self._note(self.way)

    def _ways_out(self, arrays: list[Any], rows: list[Any], stats: Any) -> str:
        """What lets the step fit, as far as it was tried."""
        ways = [f"Pass memory={self._needed(stats)} (bytes) or more", "spread the state over a mesh (mesh=)"]
        if self.way.remat is None and self._gradient.settings.remat is None:
            twice = self._make(dataclasses.replace(self.way, remat="nothing_saveable"))
            if self._excess(twice.lower(arrays, rows).compile().memory_analysis()) is None:
                ways.append('pass remat="auto", which computes activations twice instead of keeping them, and fits')
        return f"{', or '.join(ways)}."

    @property
    def _is_named(self) -> bool:
        return self._memory is not None and not (isinstance(self._memory, str) and "%" in self._memory)

    def _excess(self, stats: Any) -> str | None:
        """By how much the step is too large, in words."""
        needed = self._needed(stats)
        if self._is_named:
            allowed, where = memory_budget(self._memory), f"memory={self._memory!r}"
        else:
            if jax.process_count() > 1:  # all of them must decide alike, and each has something else left
                return None
            allowed, where = memory_left(self._gradient.devices), "what is left"
        if allowed is None or needed <= allowed:
            return None
        parts = f"{readable(stats.argument_size_in_bytes)} of it for the state and the batch"
        return f"A step with {self.way} needs {readable(needed)}, {parts}: more than {readable(allowed)} ({where})."

    def _needed(self, stats: Any) -> int:
        """The bytes that count: of memory that somebody named, the state and the batch too; else what is new."""
        new = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        return int(new + stats.argument_size_in_bytes if self._is_named else new)

    def _first(self, arrays: list[Any], rows: list[Any]) -> Any:
        """Whether memory suffices shows for certain only when the program has run."""
        begun_with = self.way
        while True:
            try:
                results = self._program(arrays, rows)
                jax.block_until_ready(results)
                break
            except jax.errors.JaxRuntimeError as error:
                smaller = halved(self._gradient, self.way)
                if (
                    smaller is None
                    or not compat.is_out_of_memory(error)
                    or jax.process_count() > 1
                    or _any_gone(arrays)
                ):
                    raise
            self.way = smaller
            self._program = self._make(smaller)
        self._has_run = True
        self._note(self.way)
        self._make = self._gradient = None  # they know the arrays of the first call, which may go now
        if self.way != begun_with:
            warnings.warn(
                f"Memory ran out at {begun_with}, though it should have fit: another process may use the device, or no "
                f"gap between the arrays on it is large enough. Going on with {self.way}; the gradient is the same.\n"
                f"To begin there, pass {self.way}, or a smaller memory=.",
                TightMemoryWarning,
                stacklevel=user_stacklevel(),
            )
        return results


def _any_gone(arrays: Sequence[Any]) -> bool:
    """Whether a program that failed has taken the memory of its arguments with it."""
    return any(array.is_deleted() for array in arrays)
