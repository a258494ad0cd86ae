"""The memory of a strategy, from its compiled program, and its time, from running it.

`Measurements` compiles and times the strategies of one gradient, and keeps the results. `generous_bytes` tells about
memory before anything is compiled.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from anybatch.call import placement
from anybatch.call.caches import can_run
from anybatch.call.memory import bytes_in_use
from anybatch.call.options import is_remat
from anybatch.call.placement import local_bytes
from anybatch.errors import AnybatchError
from anybatch.jaxprs import avals, versions
from anybatch.jaxprs.graph import uses, written_bytes
from anybatch.mesh.call_shardings import CallShardings
from anybatch.planning.problem import Problem
from anybatch.planning.strategy import Computation, Route, Strategy

# After this many sizes that XLA cannot compile, no others are tried.
FAILURES = 3

# The least seconds that a turn of a race lasts: shorter ones say little about a program. On a GPU a turn must be long,
# since its clock follows power and heat: after a lighter program, any program is faster at first.
MIN_TURN_SECONDS = 0.25
MIN_TURN_SECONDS_ON_CPU = 5e-3

# Seconds to warm a GPU up again, after it was idle while something was compiled.
WARM_UP_SECONDS = 1.0

# `generous_bytes` counts every value of the loss this many times: for the forward pass, the backward pass, copies of
# both in another layout, and scratch.
GENEROUS = 32


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The bytes that a compiled gradient takes on one device, by kind, as XLA counts them."""

    parameters: int  # the differentiated arguments
    batch: int
    others: int  # all other arguments, and the arrays that the loss closes over
    gradients: int
    results: int  # the value and aux
    activations: int  # the program's temporaries

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    @property
    def arguments(self) -> int:
        return self.parameters + self.batch + self.others


class Measurements:
    """Compiles and times the strategies of one gradient, each once, and keeps the results."""

    def __init__(self, gradient: Problem, known: dict[str, Any] | None = None) -> None:
        """Starts from the record `known` that was loaded from disk, with what `record` returned under "strategies"."""
        self.gradient = gradient
        self.can_run = can_run(*jax.tree.leaves(gradient.arguments.arrays))
        self.compilations = 0
        self.compile_seconds = 0.0  # of the last compilation
        self.bytes: dict[Strategy, Bytes | None] = {}  # None where it cannot be compiled
        self.seconds: dict[Strategy, float] = {}
        self.computations: dict[Strategy, Computation] = {}  # those that were compiled
        self.text_hashes: dict[Strategy, str | None] = {}
        self._repeats: dict[Strategy, int] = {}
        self.routes: dict[Strategy, Route] = {}
        self.failures: dict[Strategy, Exception] = {}  # errors of XLA other than running out of memory
        self.taken: dict[Strategy, list[float]] = {}  # all times of the last race
        # The bytes that XLA took on a device while it compiled, beside the arrays there. It takes them to tune kernels.
        # Only new peaks of the process are known.
        self.tuning: dict[Strategy, int] = {}
        # Of a damaged record, the entries before the damage are used.
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            for entry in (known or {}).get("strategies", []):
                self._recall(entry)

    def _recall(self, entry: dict[str, Any]) -> None:
        """Takes over one entry that `record` made earlier. Raises a ValueError if it makes no sense here."""
        size, remat, reduce, method = entry["size"], entry["remat"], entry["reduce"], entry.get("method")
        block_size = entry.get("block_size")
        strategy, found = Strategy(size, remat, reduce, method, block_size), entry["bytes"]
        kinds = None if found is None else Bytes(**{name: int(number) for name, number in found.items()})
        seconds = None if entry["seconds"] is None else float(entry["seconds"])
        makes_sense = (
            isinstance(size, int)
            and 0 < size <= self.gradient.max_microbatch_size
            and is_remat(remat)
            and reduce in ("once", "each")
            and method in self.gradient.methods
            and (block_size is None or (isinstance(block_size, int) and block_size > 0))
            and (seconds is None or 0 < seconds < math.inf)
            and (kinds is None or kinds.total >= 0)
        )
        if not makes_sense:
            raise ValueError(entry)
        self.routes[strategy] = Route(entry["route"])
        self.bytes[strategy], self.text_hashes[strategy] = kinds, entry["program"]
        if seconds is not None:
            self.seconds[strategy] = seconds

    def record(self) -> list[dict[str, Any]]:
        """Everything measured, as JSON values to keep on disk."""
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

    def route(self, strategy: Strategy) -> Route:
        """The route of a strategy. The loss is read only if no other microbatch size has told the route."""
        if strategy not in self.routes:
            is_full_batch = self.gradient.is_full_batch
            known = self.routes.items() if not is_full_batch(strategy) else ()
            alike = [route for other, route in known if not is_full_batch(other) and other.method == strategy.method]
            self.routes[strategy] = alike[0] if alike else self.gradient.route(strategy)
        return self.routes[strategy]

    def bytes_of(self, strategy: Strategy) -> Bytes | None:
        """The bytes of a strategy, which is compiled if necessary; None if XLA cannot compile it."""
        failed = [other for other in self.failures if _is_alike(other, strategy)]
        is_known = any(found is not None for other, found in self.bytes.items() if _is_alike(other, strategy))
        is_hopeless = len(failed) >= FAILURES and not is_known
        if strategy not in self.bytes and not is_hopeless:
            self._compile(strategy)
        return self.bytes.get(strategy)

    def computation(self, strategy: Strategy) -> Computation:
        """The compiled computation of a strategy. Raises a JaxRuntimeError if XLA cannot compile it."""
        if strategy not in self.computations:
            self._compile(strategy)
        if strategy not in self.computations:
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {strategy} could not be compiled")
        return self.computations[strategy]

    def _compile(self, strategy: Strategy) -> None:
        try:
            computation = self.gradient.computation(strategy)
        except Exception as error:
            if not isinstance(error, AnybatchError):
                error.add_note(f'microbatch_size="auto" has tried {strategy}. Pass a size that the loss takes.')
            raise
        self.compilations += 1
        start, before = time.perf_counter(), bytes_in_use(self.gradient.devices)
        try:
            if self.can_run:
                compiled = computation.compile().executable
                self.computations[strategy] = computation
                self.text_hashes[strategy] = computation.compile().text_hash
            else:
                compiled = compile_for_types(computation, self.gradient.shardings)
        except jax.errors.JaxRuntimeError as error:
            # Even a correct program may fail to compile: a kernel may need more than the device has.
            self.bytes[strategy] = None
            if not versions.is_out_of_memory(error):
                self.failures[strategy] = error
            return
        finally:
            self.compile_seconds = time.perf_counter() - start
            after = bytes_in_use(self.gradient.devices)
            if before is not None and after is not None and after[1] > before[1]:
                self.tuning[strategy] = after[1] - before[0]
        self.bytes[strategy] = count_bytes(compiled, self.gradient)

    def race(self, strategies: Sequence[Strategy], rounds: int) -> dict[Strategy, float]:
        """The seconds of each strategy. They run in turns, so that whatever slows the device slows all of them.

        These are the median of the rounds, or their minimum on a CPU, where other processes take time.
        A strategy that runs out of memory gets infinite seconds, and its bytes become None.
        """
        on_cpu = (self.gradient.devices or jax.local_devices())[0].platform == "cpu"
        for strategy in strategies:
            self._find_repeats(strategy, MIN_TURN_SECONDS_ON_CPU if on_cpu else MIN_TURN_SECONDS)
        able = [strategy for strategy in strategies if strategy in self._repeats]
        taken: dict[Strategy, list[float]] = {strategy: [] for strategy in strategies}
        self.taken = taken
        left = 0.0 if on_cpu or not able else WARM_UP_SECONDS
        while left > 0:
            left -= sum(map(self._mean_seconds, able))
        for _ in range(rounds):
            for strategy in able:
                if not on_cpu:
                    self._mean_seconds(strategy)  # it may profit from a device that the program before let cool
                taken[strategy].append(self._mean_seconds(strategy, self._repeats[strategy]))
        middle = min if on_cpu else statistics.median
        return {strategy: middle(each) if each else math.inf for strategy, each in taken.items()}

    def _find_repeats(self, strategy: Strategy, least: float) -> None:
        """Finds out how often a turn must repeat a strategy to last `least` seconds, unless it runs out of memory."""
        if strategy in self._repeats:
            return
        try:
            self._mean_seconds(strategy)  # the first run is always slow
            once = self._mean_seconds(strategy)
        except jax.errors.JaxRuntimeError as error:
            if not versions.is_out_of_memory(error):
                raise
            self.bytes[strategy] = None
        else:
            self._repeats[strategy] = max(1, min(100, math.ceil(least / max(once, 1e-6))))

    def _mean_seconds(self, strategy: Strategy, repeats: int = 1) -> float:
        computation = self.computation(strategy)
        program = computation.compile()
        start = time.perf_counter()
        for _ in range(repeats):
            jax.block_until_ready(program(*computation.leaves))
        return (time.perf_counter() - start) / repeats


def _is_alike(strategy: Strategy, other: Strategy) -> bool:
    """True if they differ only by the microbatch size and by what is computed again."""
    return strategy.variant._replace(remat=None) == other.variant._replace(remat=None)


def compile_for_types(computation: Computation, shardings: CallShardings | None = None) -> Any:
    """Compiles a computation whose arrays are tracers or shapes, for the devices that they, or `mesh=`, name."""
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


def count_bytes(compiled: Any, gradient: Problem) -> Bytes:
    """The bytes of a compiled gradient on one device."""
    analysis = compiled.memory_analysis()
    parameters, batch = gradient.local_bytes("wrt"), gradient.local_bytes("batch")
    arguments = max(analysis.argument_size_in_bytes, parameters + batch)
    outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    each_gradient = parameters
    if gradient.shardings is None:
        each_gradient = sum(local_bytes(leaf) // avals.vmapped_copies(leaf) for leaf in gradient.arguments.arrays.wrt)
    gradients = min(gradient.vmap_copies * each_gradient, outputs)
    return Bytes(
        parameters=parameters,
        batch=batch,
        others=arguments - parameters - batch,
        gradients=gradients,
        results=outputs - gradients,
        activations=analysis.temp_size_in_bytes,
    )


def generous_bytes(gradient: Problem) -> int | None:
    """More bytes than the full-batch gradient should take: every value in the jaxpr of the loss, counted many times.

    This is no proof, since the scratch of a kernel has no bound. Returns None for a loss with a `custom_vjp`, whose
    derivative the jaxpr does not show.
    """
    if uses(gradient.loss.traced.jaxpr, "custom_vjp"):
        return None
    written = gradient.vmap_copies * gradient.bytes_written(functools.partial(written_bytes, fused=frozenset()))
    return 8 * gradient.argument_bytes + GENEROUS * -(-written // gradient.num_batch_shards)
