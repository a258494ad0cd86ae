"""Gradients of a batch that stays on the host: it is copied to the device in chunks, while the device computes.

A chunk is to the passes over the batch what the examples of one device are on a mesh: `StreamingExecutor` runs a pass
for one chunk after the other, adds up the sums, and concatenates the rows. Everything else runs once, on the device.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call import placement
from anybatch.call.caches import CAPACITY, PROGRAMS, Cache, CompiledProgram, can_run
from anybatch.call.host_batch import HostBatch, HostRows, in_chunks, no_tracers
from anybatch.call.memory import default_device, readable
from anybatch.errors import HeadTooLargeError, InputError, NothingFitsError
from anybatch.jaxprs import avals, tracing
from anybatch.mesh.executor import BatchPass, Executor, OutputLayout, Shard, merge_axis, split_axis
from anybatch.planning import store
from anybatch.planning.budget import budget_of
from anybatch.planning.measure import Bytes
from anybatch.planning.plan import Candidate, Devices, Plan
from anybatch.planning.planner import identity_of
from anybatch.planning.problem import CHUNK_SHARE, Problem
from anybatch.planning.running import run_until_it_fits
from anybatch.planning.strategy import Route, Strategy
from anybatch.reading.states import take_rows

# Chunks on the device at any time: one in use, one that the device computes next, one waiting, and one on its way.
IN_FLIGHT = 4

# A chunk is copied in slices of about so many bytes, at once. One copy alone is limited by the core of the host that
# moves its bytes to memory that the device can read.
SLICE_BYTES = 4 * 2**20
MOST_SLICES = 8

# With a fixed microbatch size, a chunk has as many microbatches as fit these bytes: small transfers are slow.
GOOD_CHUNK = 32 * 2**20


def compute_streamed(gradient: Any) -> tuple[Strategy, list[Any]]:
    """Computes a gradient whose batch is on the host. Returns the strategy and the outputs."""
    options, arrays = gradient.options, gradient.arguments.arrays
    host = _rows_on_host(gradient)
    if options.microbatch_size is None and (options.aux_of_microbatches or options.rng_argnums != ()):
        which = "rng_argnums" if options.rng_argnums != () else "aux_reduction"
        raise InputError(
            f"With {which}=, the result depends on the microbatches, and a batch on the host is never in one piece",
            given=f"{which}={getattr(options, which)!r} and microbatch_size=None",
            remedy="Pass the number of examples at a time, e.g. microbatch_size=8.",
        )
    if not can_run(*(leaf for leaf in jax.tree.leaves(arrays) if not isinstance(leaf, HostRows))):
        raise no_tracers(host[0])
    if isinstance(options.microbatch_size, int):
        strategy = Strategy.of_options(options)
        return strategy, _run(gradient, strategy)
    # None, too: the full batch is not on the device.
    sources = [leaf.source for leaf in host]
    may_repeat = not any(isinstance(source, HostBatch) and source.is_once for source in sources)
    choices = options.fixed_remat, options.fixed_block_size
    key = store.key_of(identity_of(gradient)), str(options.memory), choices  # the free memory differs from call to call
    strategy, outputs = run_until_it_fits(
        gradient,
        _CHOSEN.get(key) or _chosen(gradient),
        lambda strategy: lambda: jax.block_until_ready(_run(gradient, strategy)),
        lambda: may_repeat,
    )
    _CHOSEN.put(key, strategy)
    return strategy, outputs


# The strategies that were chosen in this process, by the program, its arguments and the option `memory=`.
_CHOSEN: Cache[Strategy] = Cache(CAPACITY)


def _chosen(gradient: Any) -> Strategy:
    plan = plan_streamed(gradient)
    if plan.chosen is None:
        raise NothingFitsError(str(plan))
    return plan.chosen.strategy


def on_host(leaf: Any) -> Any:
    """A leaf of the batch, as `HostRows` unless it is on the device already."""
    return leaf if isinstance(leaf, jax.Array) else HostRows.of_array(leaf)


def _rows_on_host(gradient: Any) -> list[HostRows]:
    """The arrays of the batch that are on the host."""
    return [leaf for leaf in map(on_host, gradient.arguments.arrays.batch) if isinstance(leaf, HostRows)]


def plan_streamed(gradient: Any) -> Plan:
    """The plan of a gradient whose batch is on the host: the largest microbatch, a power of two, that fits."""
    began, budget = time.perf_counter(), budget_of(gradient)
    row = max(1, sum(map(_row_bytes, _rows_on_host(gradient))))
    size = min(gradient.examples, max(1, _chunk_bytes(gradient) // row))
    size = 1 << (size.bit_length() - 1)
    how = (gradient.options.fixed_remat, gradient.reduce_modes[0], None, gradient.options.fixed_block_size)
    candidates: list[Candidate] = []
    while True:
        found = _measured(gradient, Strategy(size, *how))
        fits = None if budget.allowed is None else found.total <= budget.allowed
        candidates.append(Candidate(Route.STREAMED, size, *how, found, None, None, fits))
        if fits is not False or size == 1:
            break
        # The bytes are about linear in the size: jump near the size that fits, and at least halve it.
        size = min(size // 2, 1 << max(0, int(size * budget.allowed / found.total).bit_length() - 1))
    chosen = None if fits is False else candidates[-1]
    strategy = f"microbatch_size={size}"
    needed = f"even 1 example at a time needs {readable(found.total, at_least=True)}, and the budget is {budget}"
    devices = gradient.devices or [default_device()]
    return Plan(
        chosen=chosen,
        candidates=tuple(candidates),
        num_examples=gradient.examples,
        objective=gradient.options.objective,
        budget=budget.allowed,
        budget_source=budget.source,
        reason=f"Nothing fits: {needed}." if chosen is None else f"Chosen: {strategy}.",
        limits="The batch stays on the host, since it is too large for this memory: it is copied to the device in "
        f"chunks, while the device computes. {IN_FLIGHT} chunks take at most 1/{CHUNK_SHARE} of the budget.",
        advice="" if chosen is not None else _advice(gradient),
        devices=Devices(str(devices[0].device_kind)),
        compilations=len(candidates),
        planning_seconds=time.perf_counter() - began,
        noun=gradient.noun,
    )


def _advice(gradient: Any) -> str:
    again = "" if gradient.options.maps or gradient.options.fixed_remat is not None else ", or try remat=1.0"
    return f"Allow more with memory={again}."


def _measured(gradient: Any, strategy: Strategy) -> Bytes:
    """The bytes of the largest program of a strategy. Its passes over the batch are compiled, and not run."""
    gradient.measured = []
    try:
        _run(gradient, strategy)
        largest = max(gradient.measured, key=lambda found: found.total, default=Bytes(0, 0, 0, 0, 0, 0))
    finally:
        gradient.measured = None
    parameters = gradient.local_bytes("wrt")
    # The sums that the passes add up are gradients, for the most part.
    return dataclasses.replace(
        largest, parameters=parameters, gradients=parameters, others=max(0, largest.others - 2 * parameters)
    )


def _run(gradient: Any, strategy: Strategy) -> list[Any]:
    computation = gradient.computation(strategy)
    return computation.fun(*computation.leaves)


def executor_of(gradient: Any, strategy: Strategy) -> "StreamingExecutor":
    """The executor for chunks of one or more microbatches."""
    size, examples = gradient.size(strategy), gradient.examples
    row = max(1, sum(map(_row_bytes, _rows_on_host(gradient))))
    most = _chunk_bytes(gradient) // row
    several = max(1, min(GOOD_CHUNK // (row * size), most // size, -(-examples // size)))
    # Rows that the loss needs from all examples at once may take what is left for the head.
    allowed = budget_of(gradient).allowed
    devices = placement.committed_devices(jax.tree.leaves(gradient.arguments.arrays))
    if len(devices) > 1:
        raise InputError(
            "With a batch on the host, all other arguments must be on one device",
            given=f"arguments on {len(devices)} devices",
            remedy="Put them on one, e.g. jax.device_put(params, jax.devices()[0]), or pass arrays as the batch.",
        )
    device = next(iter(devices), None)
    return StreamingExecutor(examples, chunk=size * several, device=device, allowed=allowed, dry=gradient.measured)


def _row_bytes(leaf: Any) -> int:
    aval = avals.type_of(leaf)
    return int(np.prod(aval.shape[1:], dtype=np.int64)) * np.dtype(aval.dtype).itemsize


def _chunk_bytes(gradient: Problem) -> int:
    """The bytes that one chunk may take."""
    allowed = budget_of(gradient).allowed
    return GOOD_CHUNK if allowed is None else allowed // CHUNK_SHARE // IN_FLIGHT


@dataclasses.dataclass(frozen=True, eq=False)
class StreamingExecutor(Executor):
    """Runs passes over a batch on the host, chunk by chunk."""

    chunk: int = 1  # examples
    device: Any = None
    allowed: int | None = None  # the bytes of the budget
    dry: list[Bytes] | None = None  # a list to which the bytes of the programs are added, in place of running them

    @property
    def has_all_examples(self) -> bool:
        return False

    @functools.cached_property
    def _in_full(self) -> dict[int, Any]:
        """Arrays of the host that were copied to the device in full, by the id of their `HostRows`."""
        return {}

    @functools.cached_property
    def checksums(self) -> dict[int, list[int]]:
        """Those of the pieces that were read, by the id of their `HostBatch`: each pass must read the same ones."""
        return {}

    def run_once(self, fun: Callable[..., Any], *arguments: Any) -> Any:
        """As in `Executor`. Arrays on the host are copied in full if the function reads them, and otherwise not."""
        leaves, tree = jax.tree.flatten(arguments)
        host = {position: leaf for position, leaf in enumerate(leaves) if isinstance(leaf, HostRows)}
        used = self._used(fun, leaves, tree) if host else set()
        given = [leaf for position, leaf in enumerate(leaves) if position not in host]
        given += [self._copied(leaf) for position, leaf in host.items() if position in used]
        out_tree: Any = None

        def of_given(*flat: Any) -> list[Any]:
            nonlocal out_tree
            others, copied = iter(flat[: len(leaves) - len(host)]), iter(flat[len(leaves) - len(host) :])
            filled = []
            for position, leaf in enumerate(leaves):
                if position not in host:
                    filled.append(next(others))
                elif position in used:
                    filled.append(next(copied))
                else:  # XLA removes it, since nothing uses it
                    filled.append(jnp.zeros(leaf.shape, leaf.type_on_host.dtype))
            results, out_tree = jax.tree.flatten(fun(*jax.tree.unflatten(tree, filled)))
            return results

        if not given or not can_run(*given):
            results = jax.jit(of_given)(*given)
        else:
            program = PROGRAMS.compile(of_given, *given, has_effects=False)
            PROGRAMS.keep(program)
            results = program(*given)
        return jax.tree.unflatten(out_tree, results)

    def _used(self, fun: Callable[..., Any], leaves: Sequence[Any], tree: Any) -> set[int]:
        """The positions of the leaves that a function depends on."""
        types = [avals.abstract(avals.type_of(leaf)) for leaf in leaves]
        traced, _ = tracing.trace(lambda *flat: jax.tree.leaves(fun(*jax.tree.unflatten(tree, flat))), *types)
        uses = [traced.inputs_used_by(output) for output in range(len(traced.out_avals))]
        return {position for position in range(len(leaves)) if any(used[position] for used in uses)}

    def _copied(self, rows: HostRows) -> Any:
        if id(rows) not in self._in_full:
            needed = int(np.prod(rows.shape)) * np.dtype(rows.type_on_host.dtype).itemsize
            if self.allowed is not None and needed > self.allowed // 2:
                raise HeadTooLargeError(
                    "This function needs all examples of an array of the batch at once: "
                    f"{rows.type_on_host.str_short()}, {readable(needed)}, of a budget of {readable(self.allowed)}.\n"
                    "anybatch.read shows what it computes from all examples. Keep the examples separate there, or "
                    "allow more with memory=."
                )
            if isinstance(rows.source, np.ndarray):
                array = rows.source
            else:
                pieces = rows.source.open(self.checksums.setdefault(id(rows.source), []))
                array = np.concatenate([np.array(piece[rows.index]) for piece in pieces])
            (self._in_full[id(rows)],) = _put([array], self.device)
        return self._in_full[id(rows)]

    def __call__(self, batch_pass: BatchPass) -> tuple[list[Any], list[Any]]:
        run = _ChunkPass(self, batch_pass)
        return run.measure(self.dry) if self.dry is not None else run.compute()


class _ChunkPass:
    """One pass over the batch, chunk by chunk."""

    def __init__(self, executor: StreamingExecutor, batch_pass: BatchPass) -> None:
        self.executor, self.batch_pass = executor, batch_pass
        self.host = [row for row in batch_pass.rows if isinstance(row, HostRows)]
        self.on_device = [row for row in batch_pass.rows if not isinstance(row, HostRows)]
        self.invariant = list(batch_pass.invariant)
        self.size = min(executor.chunk, executor.examples)

    @functools.cached_property
    def types(self) -> tuple[list[Any], list[Any]]:
        """The types of the sums and of the rows of a chunk."""
        place = [jax.ShapeDtypeStruct((), np.int32), jax.ShapeDtypeStruct((), np.bool_)]
        chunk = [avals.abstract(row.type_on_host, self.size) for row in self.host]
        arguments = (*place, self.invariant, chunk, self.on_device)
        return jax.eval_shape(functools.partial(self._of_chunk, self.size), *arguments)

    def _slice_types(self, number: int) -> list[list[Any]]:
        """The types of the slices of each array of a chunk of so many examples."""
        types = []
        for row in self.host:
            borders = _slice_borders(number, _row_bytes(row))
            types.append([avals.abstract(row.type_on_host, end - begin) for begin, end in itertools.pairwise(borders)])
        return types

    def _of_chunk(
        self, number: int, start: Any, is_last: Any, invariant: list[Any], chunk: list[Any], on_device: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        of_host, of_device = iter(chunk), iter(on_device)
        rows = []
        for row, layout in zip(self.batch_pass.rows, self.batch_pass.row_layouts, strict=True):
            if isinstance(row, HostRows):
                rows.append(next(of_host))
            else:
                rows.append(take_rows(next(of_device), layout, self.executor.examples, start, number))
        return self.batch_pass.fun(Shard(start, number, is_last), invariant, rows)

    def _program(self, number: int) -> CompiledProgram:
        """The program for a chunk of so many examples: it adds to the sums, and returns the rows."""
        sums, _ = self.types
        slices = self._slice_types(number)
        counts = [len(sums), 2, len(self.invariant), *map(len, slices)]

        def step(*flat: Any) -> list[Any]:
            parts, rest = [], list(flat)
            for count in counts:
                parts.append(rest[:count])
                rest = rest[count:]
            totals, (start, is_last), invariant, *several = parts
            chunk = [each[0] if len(each) == 1 else jnp.concatenate(each) for each in several]
            added, rows = self._of_chunk(number, start, is_last, invariant, chunk, rest)
            # The last result tells when the step has ended: the sums are given on to the next step.
            return [*(total + one for total, one in zip(totals, added, strict=True)), *rows, start + number]

        place = [np.zeros((), np.int32), np.zeros((), np.bool_)]
        arrays = [*self._zeros(), *place, *self.invariant, *itertools.chain(*slices), *self.on_device]
        program = PROGRAMS.compile(step, *arrays, has_effects=False, donated=range(len(sums)))
        PROGRAMS.keep(program)
        return program

    def _zeros(self) -> list[Any]:
        return [jnp.zeros(aval.shape, aval.dtype, device=self.executor.device) for aval in self.types[0]]

    def compute(self) -> tuple[list[Any], list[Any]]:
        examples, start = self.executor.examples, 0
        totals, parts, ended = self._zeros(), [], collections.deque[Any]()
        programs: dict[int, CompiledProgram] = {}
        stop = threading.Event()
        chunks = in_chunks(self.host, self.size, self.executor.checksums, stop.is_set)
        for number, chunk in _transferred(chunks, list(map(_row_bytes, self.host)), self.executor.device, stop):
            if number not in programs:
                programs[number] = self._program(number)
            place = [np.asarray(start, np.int32), np.asarray(start + number == examples)]
            *results, token = programs[number](*totals, *place, *self.invariant, *chunk, *self.on_device)
            totals, rows = results[: len(totals)], results[len(totals) :]
            parts.append(rows)
            start += number
            ended.append(token)
            if len(ended) > 1:  # no more chunks wait on the device than the budget allows for
                jax.block_until_ready(ended.popleft())
        layouts = self.batch_pass.output_layouts
        by_output = zip(*parts, strict=True)
        return totals, [_joined(several, layout) for several, layout in zip(by_output, layouts, strict=True)]

    def measure(self, found: list[Bytes]) -> tuple[list[Any], list[Any]]:
        """Adds the bytes of the program to a list, and returns zeros."""
        program: Any = self._program(self.size).executable
        analysis = program.memory_analysis()
        chunk = self.size * sum(map(_row_bytes, self.host))
        outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        others = max(0, analysis.argument_size_in_bytes - chunk)
        found.append(Bytes(0, IN_FLIGHT * chunk, others, 0, outputs, analysis.temp_size_in_bytes))
        rows = []
        for aval, layout in zip(self.types[1], self.batch_pass.output_layouts, strict=True):
            axis, per_chunk = layout.rows.axis, layout.count(self.size)
            length = aval.shape[axis] // per_chunk * layout.count(self.executor.examples)
            rows.append(jnp.zeros((*aval.shape[:axis], length, *aval.shape[axis + 1 :]), aval.dtype))
        return self._zeros(), rows


def _transferred(
    chunks: Iterator[list[np.ndarray]], row_bytes: Sequence[int], device: Any, stop: threading.Event
) -> Iterator[tuple[int, list[Any]]]:
    """The chunks on the device, each as its number of examples and the slices of its arrays.

    A thread makes and copies the next two while the caller uses the one before. It asks for a chunk when the one before
    is copied, since the owner of the arrays may write over them. `stop` is set in the end, also by an error or Ctrl-C.
    """
    config: Any = jax.config
    has_x64, default = bool(config.jax_enable_x64), config.jax_default_device

    def transfer() -> tuple[int, list[Any]] | None:
        chunk = next(chunks, None)
        if chunk is None:
            return None
        number = chunk[0].shape[0]
        slices = []
        for leaf, each in zip(chunk, row_bytes, strict=True):
            borders = _slice_borders(number, each)
            slices += [leaf[begin:end] for begin, end in itertools.pairwise(borders)]
        with jax.enable_x64(has_x64), jax.default_device(default):  # a thread has its own
            return number, _put(slices, device)

    thread = concurrent.futures.ThreadPoolExecutor(1, "anybatch-stream")
    try:
        # With two of them, the thread need not wait for the caller between two chunks.
        coming = collections.deque([thread.submit(transfer), thread.submit(transfer)])
        while (chunk := coming.popleft().result()) is not None:
            coming.append(thread.submit(transfer))
            yield chunk
    finally:
        stop.set()
        thread.shutdown(cancel_futures=True)


def _slice_borders(number: int, row_bytes: int) -> list[int]:
    """Where an array of so many rows is divided into slices, with both ends."""
    slices = max(1, min(MOST_SLICES, number, number * row_bytes // SLICE_BYTES))
    return [number * index // slices for index in range(slices + 1)]


def _put(arrays: Sequence[np.ndarray], device: Any) -> list[Any]:
    """Copies arrays to a device, and waits: the owner of the arrays may then write over them."""
    platform = (device or default_device()).platform
    # On the CPU, JAX would share the memory of the arrays.
    copied = [np.array(array) if platform == "cpu" else np.asarray(array) for array in arrays]
    return jax.block_until_ready(jax.device_put(copied, device))


def _joined(parts: Sequence[Any], layout: OutputLayout) -> Any:
    """The rows of all chunks, in the order of the batch."""
    if len(parts) == 1:
        return parts[0]
    apart = [split_axis(part, layout.rows) for part in parts]
    return merge_axis(jnp.concatenate(apart, layout.rows.axis + 1), layout.rows)
