"""Runs a gradient as planned, and goes on with smaller microbatches if memory runs out all the same."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from anybatch.call.programs import PROGRAMS, CompiledProgram, can_run
from anybatch.errors import TightMemoryWarning, user_stacklevel
from anybatch.jaxprs import versions
from anybatch.planning.measure import FAILURES
from anybatch.planning.planner import Planner
from anybatch.planning.strategy import Planned, Strategy


def run_as_planned(gradient: Planned) -> tuple[Strategy, list[Any]]:
    """The way that was taken, and what the computation returned.

    Out of memory, because of another process or a gap between two arrays: the microbatch is halved. A program that XLA
    cannot compile: another method is taken, or else the microbatch is halved. A warning says so once, and the next call
    begins there. The examples, their order and the result stay the same.
    """
    if gradient.share <= 1 or versions.is_jit_disabled():
        strategy = Strategy(gradient.share, gradient.options.fixed_remat, gradient.reduces[0], gradient.methods[0])
        return strategy, _ready(gradient, strategy, None)()
    planner = Planner(gradient)
    decision = planner.decide()
    strategy, program = decision.strategy, decision.program
    reasons: list[str] = []
    while True:
        is_compiled = False
        try:
            run = _ready(gradient, strategy, program)
            is_compiled = True
            outputs = run()
            break
        except jax.errors.JaxRuntimeError as error:
            ran_out, other = versions.is_out_of_memory(error), halved(gradient, strategy)
            if not is_compiled:
                other = _by_another_method(gradient, strategy) or other
            is_hopeless = not ran_out and (is_compiled or len(reasons) == FAILURES)
            if other is None or is_hopeless or planner.is_shared:
                raise  # of several processes, one cannot go on otherwise than the others
            reasons.append(_ran_out(strategy) if is_compiled else not_compiled(strategy, error))
        strategy, program = other, None
    if reasons:
        planner.remember(strategy)
        draws = ", but for numbers that each microbatch draws" if gradient.draws_anew else ""
        warnings.warn(
            f"{reasons[0]} Going on with {strategy}; the gradient is the same{draws}.\n"
            f"To begin there, pass {strategy}, or a smaller memory=.",
            TightMemoryWarning,
            stacklevel=user_stacklevel(),
        )
    return strategy, outputs


def run_first_that_compiles(gradient: Planned, strategies: Sequence[Strategy]) -> tuple[Strategy, list[Any]]:
    """The first of some ways that XLA can compile, and what its computation returned. A warning names the others.

    Raises:
      JaxRuntimeError: that of the first of them, if it can compile none.
    """
    errors: dict[Strategy, Exception] = {}
    for strategy in strategies:
        try:
            run = _ready(gradient, strategy, None)
        except jax.errors.JaxRuntimeError as error:
            errors[strategy] = error
            continue
        for failed, why in errors.items():
            warnings.warn(
                f"{not_compiled(failed, why)} Going on with {strategy}; the result is the same.",
                TightMemoryWarning,
                stacklevel=user_stacklevel(),
            )
        return strategy, run()
    raise next(iter(errors.values()))


def _ran_out(strategy: Strategy) -> str:
    return (
        f"Memory ran out at {strategy}, though it should have fit: another process may use the device, or its free "
        "memory may be fragmented."
    )


def not_compiled(strategy: Strategy, error: Exception) -> str:
    """That XLA could not compile a way, and why, in one line."""
    return f"XLA cannot compile {strategy}: {str(error).partition(chr(10))[0][:200]}."


def _by_another_method(gradient: Planned, strategy: Strategy) -> Strategy | None:
    """The same size by the method that comes after this one; None if there is no other."""
    methods = gradient.methods
    following = methods[methods.index(strategy.method) + 1 :] if strategy.method in methods else ()
    return dataclasses.replace(strategy, method=following[0]) if following else None


def halved(gradient: Planned, strategy: Strategy) -> Strategy | None:
    """The same way with microbatches of half the size; None if there is no smaller one."""
    size = gradient.share if gradient.is_at_once(strategy) else strategy.microbatch_size
    unit = gradient.unit
    if size is None or size <= unit:
        return None
    return Strategy(-(-size // (2 * unit)) * unit, *strategy.variant)


def _ready(gradient: Planned, strategy: Strategy, program: CompiledProgram | None) -> Callable[[], list[Any]]:
    """A function that runs a way, once that is compiled."""
    computation = gradient.computation(strategy)
    if not can_run(*computation.leaves):
        return lambda: computation.fun(*computation.leaves)
    if program is None:
        program = PROGRAMS.compile(computation.fun, *computation.leaves, has_effects=computation.has_effects)
        PROGRAMS.keep(program)
    compiled = program
    # Whether memory sufficed shows only when the program has run.
    return lambda: jax.block_until_ready(compiled(*computation.leaves))
