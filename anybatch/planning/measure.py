"""The bytes of a way of computing a gradient, from its compiled program, and its seconds, from the device."""

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from anybatch.call import placement
from anybatch.call.options import POLICIES
from anybatch.call.placement import local_bytes
from anybatch.call.programs import PROGRAMS, CompiledProgram, can_run
from anybatch.errors import AnybatchError
from anybatch.jaxprs import avals, versions
from anybatch.jaxprs.bytes_written import uses, written_bytes
from anybatch.mesh.call_shardings import CallShardings
from anybatch.planning.strategy import Computation, Planned, Strategy


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What a compiled gradient takes on a device, by kind, as XLA counts it."""

    parameters: int  # what is differentiated
    batch: int
    others: int  # all other arguments, and what the loss closes over
    gradients: int
    results: int  # the value and aux
    activations: int  # whatever the program needs in between

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    @property
    def arguments(self) -> int:
        return self.parameters + self.batch + self.others


class Workbench:
    """Compiles and times ways of computing one gradient, each once."""

    def __init__(self, gradient: Planned, known: dict[str, Any] | None = None) -> None:
        self.gradient = gradient
        self.can_run = can_run(*jax.tree.leaves(gradient.arguments.arrays))
        self.compilations = 0
        self.bytes: dict[Strategy, Bytes | None] = {}
        self.seconds: dict[Strategy, float] = {}
        self.programs: dict[Strategy, CompiledProgram] = {}
        self.text_hashes: dict[Strategy, str | None] = {}
        self._repeats: dict[Strategy, int] = {}
        self.routes: dict[Strategy, str] = {}
        self.failures: dict[Strategy, Exception] = {}  # why XLA could not compile some, where it was not for memory
        self.taken: dict[Strategy, list[float]] = {}  # the times of the last race, one by one
        # Of a record that is damaged, what comes before the damage is used.
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            for entry in (known or {}).get("ways", []):
                self._recall(entry)

    def _recall(self, entry: dict[str, Any]) -> None:
        """Takes over what an earlier bench has recorded of a way."""
        size, remat, reduce, found = entry["size"], entry["remat"], entry["reduce"], entry["bytes"]
        if not isinstance(size, int) or not 0 < size <= self.gradient.share:
            raise ValueError(entry)
        if remat not in (None, *POLICIES) or reduce not in ("once", "each"):
            raise ValueError(entry)
        method = entry.get("method")
        if method not in self.gradient.methods:
            raise ValueError(entry)
        strategy = Strategy(size, remat, reduce, method)
        kinds = None if found is None else Bytes(**{name: int(number) for name, number in found.items()})
        seconds = None if entry["seconds"] is None else float(entry["seconds"])
        is_time = seconds is None or 0 < seconds < math.inf
        if not is_time or (kinds is not None and kinds.total < 0):
            raise ValueError(entry)
        self.bytes[strategy], self.text_hashes[strategy], self.routes[strategy] = (
            kinds,
            entry["program"],
            str(entry["route"]),
        )
        if seconds is not None:
            self.seconds[strategy] = seconds

    def record(self) -> list[dict[str, Any]]:
        """What is known, to be kept on disk."""
        return [
            {
                "size": strategy.microbatch_size,
                **strategy.variant._asdict(),
                "bytes": None if found is None else dataclasses.asdict(found),
                "seconds": seconds if math.isfinite(seconds := self.seconds.get(strategy, math.inf)) else None,
                "program": self.text_hashes.get(strategy),
                "route": self.route(strategy),
            }
            for strategy, found in self.bytes.items()
        ]

    def route(self, strategy: Strategy) -> str:
        """What a way does, in words; the loss is read only if no other microbatch size has told it."""
        if strategy not in self.routes:
            alike = [
                self.routes[other]
                for other in self.routes
                if not self.gradient.is_at_once(other) and other.method == strategy.method
            ]
            self.routes[strategy] = (
                alike[0] if alike and not self.gradient.is_at_once(strategy) else self.gradient.route(strategy)
            )
        return self.routes[strategy]

    def bytes_of(self, strategy: Strategy) -> Bytes | None:
        """The bytes of a way; None if XLA cannot compile it, for want of memory or for another reason."""
        if strategy not in self.bytes and self._is_hopeless(strategy):
            return None
        if strategy not in self.bytes:
            self._compile(strategy)
        return self.bytes[strategy]

    def _is_hopeless(self, strategy: Strategy) -> bool:
        """Whether XLA has failed with several sizes of this style and compiled none, so that others are not tried."""
        failed = [other for other in self.failures if other.variant == strategy.variant]
        is_known = any(found is not None for other, found in self.bytes.items() if other.variant == strategy.variant)
        return len(failed) >= FAILURES and not is_known

    def program(self, strategy: Strategy) -> CompiledProgram:
        """A program that can be run."""
        if strategy not in self.programs:
            self._compile(strategy)
        if strategy not in self.programs:
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {strategy} could not be compiled")
        return self.programs[strategy]

    def _compile(self, strategy: Strategy) -> None:
        try:
            computation = self.gradient.computation(strategy)
        except Exception as error:
            if not isinstance(error, AnybatchError):
                error.add_note(f'microbatch_size="auto" has tried {strategy}. Pass a size that the loss takes.')
            raise
        self.compilations += 1
        try:
            if self.can_run:
                program = PROGRAMS.compile(computation.fun, *computation.leaves, has_effects=computation.has_effects)
                self.programs[strategy], self.text_hashes[strategy] = program, program.text_hash
                compiled = program.executable
            else:
                compiled = compile_for_types(computation, self.gradient.shardings)
        except jax.errors.JaxRuntimeError as error:
            # Not every program that is right compiles: a kernel may ask for more than a device has.
            self.bytes[strategy] = None
            if not versions.is_out_of_memory(error):
                self.failures[strategy] = error
            return
        self.bytes[strategy] = count_bytes(compiled, self.gradient)

    def race(self, strategies: Sequence[Strategy], rounds: int) -> dict[Strategy, float]:
        """The seconds of some ways, taken in turns, so that whatever slows the device slows all of them.

        A way that runs out of memory all the same has infinite seconds, and no bytes.
        """
        leaves = {strategy: self.gradient.computation(strategy).leaves for strategy in strategies}
        taken: dict[Strategy, list[float]] = {strategy: [] for strategy in strategies}
        self.taken = taken
        on_host = (self.gradient.devices or jax.local_devices())[0].platform == "cpu"

        def seconds(strategy: Strategy, repeats: int) -> float:
            return _seconds(lambda: self.program(strategy)(*leaves[strategy]), repeats)

        for strategy in strategies:
            if strategy in self._repeats:
                continue
            try:
                seconds(strategy, 1)  # the first time is always slow
                once = seconds(strategy, 1)
            except jax.errors.JaxRuntimeError as error:
                if not versions.is_out_of_memory(error):
                    raise
                self.bytes[strategy] = None
            else:
                telling = TELLING_ON_HOST if on_host else TELLING
                self._repeats[strategy] = max(1, min(100, math.ceil(telling / max(once, 1e-6))))
        able = [strategy for strategy in strategies if strategy in self._repeats]
        warm = 0.0 if on_host or not able else WARM_UP
        while warm > 0:
            warm -= sum(seconds(strategy, 1) for strategy in able)
        for _ in range(rounds):
            for strategy in able:
                if not on_host:
                    seconds(strategy, 1)  # so that it does not profit from a neighbour that let the device cool
                taken[strategy].append(seconds(strategy, self._repeats[strategy]))
        return {strategy: statistics.median(each) if each else math.inf for strategy, each in taken.items()}


# After as many sizes that XLA cannot compile, no others are tried.
FAILURES = 3

# Seconds that a turn lasts. A clock and a scheduler say little about less. And a GPU runs at the pace that its power
# and heat allow: a program that follows a lighter one is faster than it would be by itself, at first.
TELLING_ON_HOST = 5e-3
TELLING = 0.25

# Seconds to find that pace again after a rest, in which something was compiled.
WARM_UP = 1.0


def _seconds(run: Callable[[], Any], repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        jax.block_until_ready(run())
    return (time.perf_counter() - start) / repeats


def compile_for_types(computation: Computation, shardings: CallShardings | None = None) -> Any:
    """Compiles a computation whose arrays have no values yet, for the devices that they will be on.

    Args:
      computation: the computation.
      shardings: its mesh, if it has one: it then knows where its arrays will be.
    """
    if shardings is not None:
        placed = shardings.placed_types(computation.leaves)
        return versions.elsewhere(lambda: jax.jit(lambda *flat: computation.fun(*flat)).lower(*placed).compile())
    types = [avals.abstract(jax.typeof(leaf)) for leaf in computation.leaves]
    mesh = placement.mesh_of(computation.leaves)
    if any(avals.vmapped_copies(leaf) > 1 for leaf in computation.leaves):
        return placement.compile_in_vmap(computation.fun, computation.leaves, types)
    if jax.sharding.get_abstract_mesh().manual_axes:
        return placement.compile_in_shard_map(computation.fun, types)
    if not mesh.empty:
        return placement.compile_on_mesh(computation.fun, types, mesh)
    return jax.jit(lambda *flat: computation.fun(*flat)).lower(*types).compile()


def count_bytes(compiled: Any, gradient: Planned) -> Bytes:
    """The bytes of a compiled gradient on one device."""
    analysis = compiled.memory_analysis()
    parameters, batch = gradient.local_bytes("wrt"), gradient.local_bytes("batch")
    arguments = max(analysis.argument_size_in_bytes, parameters + batch)
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    each_gradient = parameters
    if gradient.shardings is None:
        each_gradient = sum(local_bytes(leaf) // avals.vmapped_copies(leaf) for leaf in gradient.arguments.arrays.wrt)
    gradients = min(gradient.copies * each_gradient, outputs)
    return Bytes(
        parameters=parameters,
        batch=batch,
        others=arguments - parameters - batch,
        gradients=gradients,
        results=outputs - gradients,
        activations=analysis.temp_size_in_bytes,
    )


def estimate(gradient: Planned) -> tuple[int, float]:
    """About what a gradient takes for no examples, and for each more: from its program, before anything is compiled."""
    start = _arguments(gradient) + gradient.local_bytes("wrt")
    return start, gradient.copies * gradient.written(written_bytes) / max(1, gradient.examples)


# The values of the forward pass, those of the backward pass, copies of both in another layout, scratch.
GENEROUS = 32


def generous_bytes(gradient: Planned) -> int | None:
    """More than a gradient takes, all at once: every value that the program of its loss names, many times over.

    It is generous and no proof: scratch of a kernel has no bound. None where a part of the program is not to be seen:
    derivatives of one's own.
    """
    jaxpr = gradient.loss.traced.jaxpr
    if uses(jaxpr, "custom_vjp"):
        return None
    written = gradient.copies * gradient.written(functools.partial(written_bytes, fused=frozenset()))
    return 8 * _arguments(gradient) + GENEROUS * -(-written // gradient.spread_over)


def _arguments(gradient: Planned) -> int:
    return sum(gradient.local_bytes(role) for role in gradient.arguments.arrays._fields)
