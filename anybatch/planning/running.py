"""Runs a gradient as planned, and goes on with smaller microbatches if memory runs out all the same."""

import warnings
from typing import Any

import jax

from anybatch import compat
from anybatch.computation import Gradient, Way
from anybatch.errors import TightMemoryWarning, user_stacklevel
from anybatch.planning.planner import Planner
from anybatch.programs import PROGRAMS, Program, can_run


def run_as_planned(gradient: Gradient) -> tuple[Way, list[Any]]:
    """The way that was taken, and what the computation returned.

    Out of memory, because of another process or a gap between two arrays: the microbatch is halved, a warning says so
    once, and the next call begins there. The examples, their order and the result stay the same.
    """
    if gradient.share <= 1 or compat.is_jit_disabled():
        way = Way(gradient.share, gradient.settings.fixed_remat, gradient.reduces[0], gradient.methods[0])
        return way, _run(gradient, way, None)
    planner = Planner(gradient)
    decision = planner.decide()
    way, program = decision.way, decision.program
    failed: list[Way] = []
    while True:
        try:
            outputs = _run(gradient, way, program)
            break
        except jax.errors.JaxRuntimeError as error:
            smaller = halved(gradient, way)
            if smaller is None or not compat.is_out_of_memory(error) or planner.is_shared:
                raise  # of several processes, one cannot go on otherwise than the others
            failed.append(way)
        way, program = smaller, None
    if failed:
        planner.remember(way)
        draws = ", but for numbers that each microbatch draws" if gradient.draws_anew else ""
        warnings.warn(
            f"Memory ran out at {failed[0]}, though it should have fit: another process may use the device, or no "
            f"gap between the arrays on it is large enough. Going on with {way}; the gradient is the same{draws}.\n"
            f"To begin there, pass {way}, or a smaller memory=.",
            TightMemoryWarning,
            stacklevel=user_stacklevel(),
        )
    return way, outputs


def halved(gradient: Gradient, way: Way) -> Way | None:
    """The same way with microbatches of half the size; None if there is no smaller one."""
    size = gradient.share if gradient.is_at_once(way) else way.microbatch_size
    unit = gradient.unit
    if size is None or size <= unit:
        return None
    return Way(-(-size // (2 * unit)) * unit, *way.style)


def _run(gradient: Gradient, way: Way, program: Program | None) -> list[Any]:
    computation = gradient.computation(way)
    if not can_run(*computation.leaves):
        return computation.fun(*computation.leaves)
    if program is None:
        program = PROGRAMS.compile(computation.fun, *computation.leaves, has_effects=computation.has_effects)
        PROGRAMS.keep(program)
    # Whether memory sufficed shows only when the program has run.
    return jax.block_until_ready(program(*computation.leaves))
