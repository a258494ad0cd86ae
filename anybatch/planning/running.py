"""Runs the planned strategy of a gradient, and falls back to smaller microbatches if memory runs out."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from anybatch.call.checks import warn
from anybatch.errors import TightMemoryWarning
from anybatch.jaxprs import versions
from anybatch.planning.measure import FAILURES
from anybatch.planning.planner import Planner
from anybatch.planning.problem import Problem
from anybatch.planning.strategy import Strategy


def run_as_planned(gradient: Problem) -> tuple[Strategy, list[Any]]:
    """Computes a gradient with the strategy that the planner chooses. Returns the strategy and the outputs.

    If memory runs out, because of another process or because free memory is fragmented, the microbatch is halved. If
    XLA cannot compile the program, another method is taken, or else the microbatch is halved. One warning says so, and
    later calls start with the strategy that worked. The examples, their order and the result stay the same.
    """
    options = gradient.options
    # A batch of one example has one microbatch size, but may need blocks, or activations that are computed again.
    has_choice = gradient.max_microbatch_size > 1 or (
        gradient.examples and "auto" in (options.block_size, options.remat)
    )
    if not has_choice or versions.is_jit_disabled():
        how = (options.fixed_remat, gradient.reduce_modes[0], gradient.methods[0], options.fixed_block_size)
        strategy = Strategy(gradient.max_microbatch_size, *how)
        return strategy, gradient.computation(strategy).ready_to_wait()()
    planner = Planner(gradient)
    decision = planner.decide()

    def ready(strategy: Strategy) -> Callable[[], list[Any]]:
        planned = decision.computation if strategy == decision.strategy else None
        return (planned or gradient.computation(strategy)).ready_to_wait()

    # One process cannot change its program without the others.
    strategy, outputs = run_until_it_fits(gradient, decision.strategy, ready, lambda: not planner.is_multiprocess)
    if strategy != decision.strategy:
        planner.remember(strategy)
    return strategy, outputs


def run_until_it_fits(
    gradient: Problem,
    strategy: Strategy,
    ready: Callable[[Strategy], Callable[[], Any]],
    may_change: Callable[[], bool],
) -> tuple[Strategy, Any]:
    """Runs a strategy, and others if it fails: by another method, or with microbatches of half the size.

    `ready` compiles a strategy, and returns a function that runs it and waits for its end. The program may be a
    training step around the gradient. After a failure, the error is raised unless `may_change()`.

    Returns the strategy that worked, and its outputs. If it is not the first, a warning says so.
    """
    reasons: list[str] = []
    while True:
        is_compiled = False
        try:
            run = ready(strategy)
            is_compiled = True
            outputs = run()
            break
        except jax.errors.JaxRuntimeError as error:
            ran_out, other = versions.is_out_of_memory(error), halved(gradient, strategy)
            if not is_compiled:
                other = _by_another_method(gradient, strategy) or other
            is_hopeless = not ran_out and (is_compiled or len(reasons) == FAILURES)
            if other is None or is_hopeless or not may_change():
                raise
            ran_out_of_memory = (
                f"Memory ran out at {strategy}, though it should have fit: another process may use the device, or its "
                "free memory may be fragmented."
            )
            reasons.append(ran_out_of_memory if is_compiled else not_compiled(strategy, error))
        strategy = other
    if reasons:
        draws = ", except for random numbers drawn per microbatch" if gradient.draws_per_microbatch else ""
        warn(
            f"{reasons[0]} Continuing with {strategy}; the gradient is the same{draws}.\n"
            f"To start with this, pass {strategy}, or a smaller memory=.",
            TightMemoryWarning,
        )
    return strategy, outputs


def run_first_that_compiles(gradient: Problem, strategies: Sequence[Strategy]) -> tuple[Strategy, list[Any]]:
    """Computes a gradient with the first strategy that XLA can compile. Returns the strategy and the outputs.

    A warning names each strategy that could not be compiled. If XLA can compile none, the error is that of the first.
    """
    errors: dict[Strategy, Exception] = {}
    for strategy in strategies:
        try:
            run = gradient.computation(strategy).ready_to_wait()
        except jax.errors.JaxRuntimeError as error:
            errors[strategy] = error
            continue
        for failed, why in errors.items():
            warn(
                f"{not_compiled(failed, why)} Continuing with {strategy}; the result is the same.",
                TightMemoryWarning,
            )
        return strategy, run()
    raise next(iter(errors.values()))


def not_compiled(strategy: Strategy, error: Exception) -> str:
    """A sentence that says that XLA cannot compile a strategy, and why."""
    return f"XLA cannot compile {strategy}: {str(error).partition(chr(10))[0][:200]}."


def _by_another_method(gradient: Problem, strategy: Strategy) -> Strategy | None:
    """The strategy with the next method of the gradient; None if there is none."""
    methods = gradient.methods
    following = methods[methods.index(strategy.method) + 1 :] if strategy.method in methods else ()
    return dataclasses.replace(strategy, method=following[0]) if following else None


def halved(gradient: Problem, strategy: Strategy) -> Strategy | None:
    """The strategy with microbatches, or else blocks, of half the size; None if there is no smaller one."""
    size = gradient.max_microbatch_size if gradient.is_full_batch(strategy) else strategy.microbatch_size
    multiple = gradient.size_multiple
    if size is None or size <= multiple:
        block_size = (strategy.block_size or 0) // 2
        return dataclasses.replace(strategy, block_size=block_size) if block_size else None
    return Strategy(-(-size // (2 * multiple)) * multiple, *strategy.variant)
