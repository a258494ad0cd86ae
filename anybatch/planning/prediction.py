"""Predicts the memory and the time of a gradient from its jaxpr, before anything is compiled.

`predict` goes through a traced program in its order, as XLA's buffer assignment would. A value takes memory from the
equation that computes it to the last one that reads it. A value that XLA computes inside the equation that reads it
takes none, but what it is computed from stays in memory until then. Each equation with a result in memory is a kernel,
with its FLOPs and the bytes that it reads and writes.

`Predictions` has the predictions for the strategies of one gradient. What the jaxpr does not show is how XLA orders and
fuses the program. So each prediction is corrected by what XLA found for a strategy like it, once one was compiled.
"""

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.memory import default_device
from anybatch.jaxprs import avals, interpreter
from anybatch.jaxprs.graph import num_bytes, written_bytes
from anybatch.jaxprs.primitives import CALLS, CUSTOM_JVP, CUSTOM_VJP, ELEMENTWISE, MOVES, REMAT, called_jaxpr
from anybatch.planning.measure import Bytes
from anybatch.planning.problem import Problem
from anybatch.planning.strategy import Strategy

# Functions whose equations are written in their place.
_INLINED = CALLS | CUSTOM_JVP | CUSTOM_VJP | REMAT
_INLINED |= {"accumulate_in_place", "core_closed_call", "call", "custom_vmap_call"}

# XLA computes these inside the kernels that read their results, once for each of these kernels.
_FUSED = ELEMENTWISE | MOVES | {"gather", "dynamic_slice"}

# Of these, those that take so long that their results are kept if two kernels read them.
_SLOW = frozenset(
    """acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma div erf erf_inv erfc exp exp2 expm1 lgamma log log1p
    log2 logistic pow rem rsqrt sin sinh sqrt tan tanh""".split()
)

# The result is the same bytes in another shape. (XLA gives operands of products the layout that these need.)
_RENAMED = frozenset("copy_p name pcast pvary reshape sharding_constraint squeeze stop_gradient transpose".split())

# Kernels that compute their operands themselves, if these are fused.
_TAKES_FUSED = frozenset(
    """addupdate argmax argmin dynamic_update_slice reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum
    swap""".split()
)

# Kernels that write their result into the memory of an operand that nobody reads later.
_IN_PLACE = _FUSED | {"cond", "dynamic_update_slice", "new_ref", "scan", "scatter", "scatter-add", "while"}

_NEW_REF = frozenset(("new_ref", "ref_new"))
_FREEZE = frozenset(("freeze", "ref_freeze"))
_WRITES_REF = frozenset(("addupdate", "swap"))

# A value that is computed from more buffers than this has one of its own.
_MOST_BUFFERS = 8


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one equation computes, together with everything that is fused into it."""

    flops: float
    num_bytes: int  # read and written
    times: int = 1  # how often it runs
    is_copy: bool = False  # between the memory of the device and that of the host, while other kernels run


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The memory of a program beside its arguments, at its peak, and its kernels."""

    peak: int
    kernels: tuple[Kernel, ...]

    def seconds(self, speed: "Speed") -> float:
        """The time of all kernels, one after the other, or that of all copies to and from the host if it is longer."""
        seconds = {True: 0.0, False: 0.0}
        for kernel in self.kernels:
            moving = kernel.num_bytes / (speed.copied_bytes if kernel.is_copy else speed.num_bytes)
            seconds[kernel.is_copy] += kernel.times * (max(kernel.flops / speed.flops, moving) + speed.start)
        return max(*seconds.values(), speed.start)  # to run anything takes time


@dataclasses.dataclass(frozen=True)
class Speed:
    """What a device does in a second: FLOPs of 16 bits, and bytes moved. And the seconds to start a kernel.

    `copied_bytes` are moved between the device and the host, in one direction.
    """

    flops: float
    num_bytes: float
    start: float
    copied_bytes: float


# The first is a fit to the times of two GPTs on an H200, in microbatches of 1 to 64: all ten within 7%. Strategies are
# compared by it, so only the ratios of its numbers matter.
# Copies to the host were not measured: a bus of 64 GB/s in each direction is taken to reach 40.
ACCELERATOR = Speed(flops=740e12, num_bytes=4.3e12, start=1e-6, copied_bytes=40e9)
CPU = Speed(flops=200e9, num_bytes=20e9, start=3e-7, copied_bytes=20e9)

# XLA's bytes over the predicted ones, before anything was compiled: on a CPU, it makes more copies.
PRIOR = {True: 1.2, False: 1.0}


class Predictions:
    """The predicted bytes and seconds of the strategies of one gradient.

    Two sizes are traced, and the full batch. Others lie on a line: every value of a microbatch grows with it.
    """

    def __init__(self, gradient: Problem, known: dict[str, Any] | None = None) -> None:
        """Starts from the record `known` that was loaded from disk, with what `record` returned under "predictions"."""
        self.gradient = gradient
        device = (gradient.devices or [default_device()])[0]
        self.on_cpu = device.platform == "cpu"
        self.speed = CPU if self.on_cpu else ACCELERATOR
        self._argument_bytes = gradient.argument_bytes
        self._traced: dict[Strategy, tuple[int, float] | None] = {}  # None where tracing failed
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            for entry in (known or {}).get("predictions", []):
                peak, seconds = int(entry.pop("peak")), float(entry.pop("seconds"))
                if peak >= 0 and 0 <= seconds < math.inf:
                    self._traced[Strategy(**entry)] = peak, seconds

    def record(self) -> list[dict[str, Any]]:
        """The predictions of the strategies that were traced, as JSON values to keep on disk."""
        return [
            dataclasses.asdict(strategy) | {"peak": peak, "seconds": seconds}
            for strategy, (peak, seconds) in _found(self._traced).items()
        ]

    def total(self, strategy: Strategy, compiled: Mapping[Strategy, Bytes | None]) -> int:
        """The bytes of a strategy with its arguments, corrected by those of the strategies that were `compiled`."""
        known = {each: found for each, found in compiled.items() if found is not None}
        arguments = max((found.arguments for found in known.values()), default=self._argument_bytes)
        taken = {each: max(0, found.total - found.arguments) for each, found in known.items()}
        alike = [each for each in taken if each.variant == strategy.variant and self.has_loop(each)]
        if self.has_loop(strategy) and len(alike) > 1:
            # On the line through the two nearest sizes: a part of the memory is the same for all sizes.
            first, second = sorted(alike, key=lambda each: self.distance(strategy, each))[:2]
            rise = (taken[second] - taken[first]) / (self._size(second) - self._size(first))
            return arguments + max(0, int(taken[first] + max(0.0, rise) * (self._size(strategy) - self._size(first))))
        ratios = {each: number / max(1, self._peak(each)) for each, number in taken.items()}
        if self.has_loop(strategy) and alike:
            ratios = {each: ratios[each] for each in alike}
        return arguments + int(self._peak(strategy) * self._ratio(strategy, ratios, PRIOR[self.on_cpu]))

    def has_loop(self, strategy: Strategy) -> bool:
        """True if there are at least two complete microbatches. Without a loop, XLA orders the program differently."""
        return self.gradient.max_microbatch_size // self._size(strategy) > 1

    def seconds(self, strategy: Strategy, timed: Mapping[Strategy, float] | None = None) -> float:
        """The seconds of a strategy, corrected by those of the strategies that were `timed`."""
        size, examples = self._size(strategy), self.gradient.max_microbatch_size
        predicted = self._seconds(strategy, size) * (examples // size)
        if examples % size:
            predicted += self._seconds(strategy, examples % size)
        known = {each: seconds for each, seconds in (timed or {}).items() if math.isfinite(seconds)}
        return predicted * self._ratio(strategy, {each: known[each] / self.seconds(each) for each in known}, 1.0)

    def _ratio(self, strategy: Strategy, ratios: Mapping[Strategy, float], unknown: float) -> float:
        """The ratio for a strategy: between those of the two nearest sizes of its variant, or that of another one."""
        if not ratios:
            return unknown
        size = self._size(strategy)
        alike = sorted((self._size(each), ratio) for each, ratio in ratios.items() if each.variant == strategy.variant)
        below = [point for point in alike if point[0] <= size]
        above = [point for point in alike if point[0] >= size]
        if not below and not above:
            return ratios[min(ratios, key=lambda each: self.distance(strategy, each))]
        if not below or not above or below[-1][0] == above[0][0]:
            return (below[-1:] or above[:1])[0][1]
        (low, at_low), (high, at_high) = below[-1], above[0]
        share = math.log(size / low) / math.log(high / low)
        return at_low + share * (at_high - at_low)

    def distance(self, strategy: Strategy, other: Strategy) -> tuple[int, float]:
        """The number of choices in which they differ beside the size, and the logarithm of the ratio of their sizes."""
        differences = sum(a != b for a, b in zip(strategy.variant, other.variant, strict=True))
        return differences, abs(math.log(self._size(strategy) / self._size(other)))

    def _size(self, strategy: Strategy) -> int:
        return self.gradient.size(strategy)

    # Predictions without corrections.

    def _peak(self, strategy: Strategy) -> float:
        size = self._size(strategy)
        if not self.has_loop(strategy) and strategy.remat is None:
            return self._estimates([strategy])[strategy][0]
        return self._on_line(strategy, size, lambda each, estimate: estimate[0])

    def _seconds(self, strategy: Strategy, size: int) -> float:
        """The seconds of a microbatch of this size."""
        number = self.gradient.max_microbatch_size
        if size == number and strategy.remat is None:
            full = Strategy(size, *strategy.variant)
            return self._estimates([full])[full][1]
        return self._on_line(strategy, size, lambda each, estimate: estimate[1] * self._size(each) / number)

    def _on_line(self, strategy: Strategy, size: int, value: Callable[[Strategy, tuple[int, float]], float]) -> float:
        """The value at a size, on the line through the values of the variant at the two sizes that are traced.

        If activations are computed again, only the larger one is traced: what no size changes, recomputation does not
        change either.
        """
        low, high = self._anchors
        variant = strategy.variant
        largest = Strategy(high, *variant)
        if low == high:
            return value(largest, self._estimates([largest])[largest]) * size / high
        kept = variant._replace(remat=None)
        estimates = self._estimates([largest, Strategy(low, *kept), Strategy(high, *kept)])
        values = {each: value(each, estimate) for each, estimate in estimates.items()}
        at_low, at_high = values[Strategy(low, *kept)], values[largest]
        if variant.remat is not None:
            rise = (values[Strategy(high, *kept)] - at_low) / (high - low)
            low, at_low = 0, at_low - rise * low
        # A larger microbatch takes no less, and one of no examples would take nothing or more.
        rise = min(max(0.0, at_high - at_low) / (high - low), at_high / high)
        return at_high - rise * (high - size)

    @property
    def _anchors(self) -> tuple[int, int]:
        """The sizes that are traced: the smallest, and a large one with at least three microbatches, or else two."""
        examples, multiple = self.gradient.max_microbatch_size, self.gradient.size_multiple
        high = examples // 4 if examples % (4 * multiple) == 0 else -(-examples // (3 * multiple)) * multiple
        if high <= multiple:
            high = examples // (2 * multiple) * multiple
        return (multiple, high) if multiple < high < examples else (multiple, multiple)

    def _estimates(self, strategies: Sequence[Strategy]) -> dict[Strategy, tuple[int, float]]:
        """The bytes at the peak beside the arguments, and the seconds, for each of the strategies.

        If one of them cannot be traced, all are crude ones, which are at least in proportion to one another.
        """
        traced = {strategy: self._trace(strategy) for strategy in strategies}
        if None in traced.values():
            return {strategy: self._crude(strategy) for strategy in strategies}
        return _found(traced)

    def _crude(self, strategy: Strategy) -> tuple[int, float]:
        """What the loss alone tells, without its gradient."""
        gradient, size = self.gradient, self._size(strategy)
        written = gradient.vmap_copies * gradient.bytes_written(written_bytes)
        return gradient.local_bytes("wrt") + written * size // max(1, gradient.examples), 1.0 / size

    def _trace(self, strategy: Strategy) -> tuple[int, float] | None:
        """The bytes at the peak beside the arguments, and the seconds; None if the program cannot be traced."""
        if strategy not in self._traced:
            gradient = self.gradient
            try:
                computation = gradient.computation(strategy)
                types = [avals.abstract(jax.typeof(leaf)) for leaf in computation.leaves]
                if gradient.shardings is not None:
                    types = gradient.shardings.placed_types(computation.leaves)
                jaxpr = jax.make_jaxpr(lambda *flat: computation.fun(*flat))(*types)
            except Exception:  # a part of a program that cannot be traced by itself
                self._traced[strategy] = None
            else:
                found = predict(jaxpr, on_cpu=self.on_cpu)
                self._traced[strategy] = (
                    gradient.vmap_copies * found.peak,
                    gradient.vmap_copies * found.seconds(self.speed),
                )
        return self._traced[strategy]


def _found(traced: Mapping[Strategy, tuple[int, float] | None]) -> dict[Strategy, tuple[int, float]]:
    return {strategy: estimate for strategy, estimate in traced.items() if estimate is not None}


def predict(jaxpr: Any, *, on_cpu: bool) -> Prediction:
    """The prediction for a program on one device, which is a CPU or an accelerator."""
    program = _Program(on_cpu)
    inputs = [_input(num_bytes(variable.aval)) for variable in interpreter.unbound_inputs_of(jaxpr)]
    return program.run(program.add(jaxpr, inputs))


def seconds_alone(equation: Any) -> float:
    """The predicted seconds of one equation on an accelerator, without any other."""
    program = _Program(on_cpu=False)
    results = program._add_equation(equation, [_input(num_bytes(operand.aval)) for operand in equation.invars])
    return program.run(results).seconds(ACCELERATOR)


class _Value:
    """A value of the program. `buffers` hold it, or what it is computed from where it is read."""

    __slots__ = ("buffers", "is_carried", "maker", "num_bytes", "read_bytes")

    def __init__(self, size: int, maker: "_Operation | None" = None) -> None:
        self.num_bytes = self.read_bytes = size  # of inputs, `num_bytes` is 0: they are in memory anyway
        self.maker = maker
        self.is_carried = False  # its memory is that of a value that a loop carries, which is counted outside
        self.buffers: list[_Value] = [self] if maker is None else []

    @property
    def is_constant(self) -> bool:
        return self.maker is None and not self.buffers

    @property
    def is_in_memory(self) -> bool:
        return len(self.buffers) == 1 and self.buffers[0] is self


@dataclasses.dataclass(eq=False, slots=True)
class _Operation:
    name: str
    operands: Sequence[_Value]
    results: Sequence[_Value] = ()
    scratch: int = 0  # bytes besides the results: copies of operands, or the peak of a loop's body
    flops: float = 0.0
    inner: tuple[Kernel, ...] = ()
    carried: Sequence[tuple[_Value, _Value]] = ()  # an operand and the result that a loop makes of it
    has_effects: bool = False

    @property
    def is_run(self) -> bool:
        """True if it is a kernel, and not computed inside those that read its results."""
        return self.name in _WRITES_REF or not self.results or any(each.is_in_memory for each in self.results)


class _Program:
    """The operations of a jaxpr, with calls inlined."""

    def __init__(self, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.operations: list[_Operation] = []
        self._computed: dict[Any, Sequence[_Value]] = {}
        self._constants: dict[Any, _Value] = {}

    def add(self, jaxpr: Any, inputs: Sequence[_Value]) -> list[_Value]:
        """Adds the equations of a jaxpr. Returns its results."""
        return interpreter.interpret(jaxpr, inputs, self._add_equation, self._constant)

    def _constant(self, constant: Any, aval: Any) -> _Value:
        """A constant. Equal numbers are the same value, so that operations on them are recognised as equal."""
        is_number = np.ndim(constant) == 0 and not isinstance(constant, jax.core.Tracer)
        key = (str(aval), str(constant)) if is_number else id(constant)
        if key not in self._constants:
            self._constants[key] = _Value(0)
            self._constants[key].buffers = []
        return self._constants[key]

    def _num_bytes(self, aval: Any) -> int:
        """The bytes of a value on the device. XLA's compiler for CPUs computes narrow floats as float32."""
        if avals.is_on_host(aval) and not self.on_cpu:
            return 0
        size = num_bytes(aval)
        is_narrow = self.on_cpu and size and jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4
        return size * 4 // aval.dtype.itemsize if is_narrow else size

    def _add_equation(self, equation: Any, operands: list[_Value]) -> Sequence[_Value]:
        name = equation.primitive.name
        if name in _INLINED:
            return self.add(called_jaxpr(equation), operands)
        if name in _FREEZE:
            return operands[:1]
        if name == "optimization_barrier":
            self.operations.append(_Operation(name, operands, has_effects=True))
            return operands
        key = None
        is_constant = all(operand.is_constant for operand in operands)
        if self.on_cpu and not is_constant and not equation.effects and not interpreter.jaxprs_in(equation):
            # XLA's compiler for CPUs removes the barriers of jax.checkpoint, and then merges equal operations. But each
            # reader that writes into an array of zeros gets its own.
            key = (name, *operands, str(equation.params))
            if key in self._computed:
                return self._computed[key]
        operation = _Operation("new_ref" if name in _NEW_REF else name, operands, has_effects=bool(equation.effects))
        operation.results = [_Value(self._num_bytes(output.aval), operation) for output in equation.outvars]
        if name in _NEW_REF:
            operation.results[0].num_bytes = operation.results[0].read_bytes = operands[0].read_bytes
        self._look_inside(equation, operation)
        self.operations.append(operation)
        if key is not None:
            self._computed[key] = operation.results
        return operation.results

    def _look_inside(self, equation: Any, operation: _Operation) -> None:
        """Sets what an operation needs besides its operands and results."""
        name, params, operands = operation.name, equation.params, operation.operands
        if name == "scan":
            consts, carry = interpreter.scan_counts(params)
            self._set_loop(operation, params["jaxpr"], consts, consts + carry, params["length"])
        elif name == "while":
            first = params["cond_nconsts"]
            # How often it runs is not known.
            self._set_loop(operation, params["body_jaxpr"], params["body_nconsts"], len(operands) - first, 1, first)
        elif name == "cond":
            branches = [predict(branch, on_cpu=self.on_cpu) for branch in params["branches"]]
            longest = max(branches, key=lambda branch: sum(kernel.num_bytes for kernel in branch.kernels))
            operation.scratch, operation.inner = max(branch.peak for branch in branches), longest.kernels
        elif name == "shard_map":
            inside = predict(params["jaxpr"], on_cpu=self.on_cpu)
            operation.scratch, operation.inner = inside.peak, inside.kernels
        elif name == "dot_general":
            operation.flops = _product_flops(equation)
            operation.scratch = _copied_operands(equation) if self.on_cpu else 0
        elif name == "conv_general_dilated":
            operation.flops = _convolution_flops(equation)
            operation.scratch = _copied_images(equation) if self.on_cpu else 0
        elif name.startswith("select_and_") and self.on_cpu:  # the positions along every axis, and two copies
            operation.scratch = (2 + len(equation.invars[-1].aval.shape)) * operands[-1].read_bytes

    def _set_loop(
        self, operation: _Operation, body: Any, carried: int, scanned: int, iterations: int, first: int = 0
    ) -> None:
        """Sets what a loop needs. `carried` and `scanned` are where these kinds of operands begin, from `first` on."""
        inside = _Program(self.on_cpu)
        inputs = []
        for position, variable in enumerate(interpreter.unbound_inputs_of(body)):
            value = _input(num_bytes(variable.aval))
            if position >= scanned:  # a slice of an array, which is computed where it is read
                taken = _Operation("dynamic_slice", [value])
                value = _Value(value.read_bytes, taken)
                taken.results = [value]
                inside.operations.append(taken)
            elif position >= carried:
                value.is_carried, value.num_bytes = True, value.read_bytes
            inputs.append(value)
        results = inside.add(body, inputs)
        number = scanned - carried
        # What a scan emits is written into the stacked array at once.
        found = inside.run(results[:number], results[number:])
        operation.scratch = found.peak
        operation.inner = tuple(dataclasses.replace(each, times=each.times * iterations) for each in found.kernels)
        operation.carried = list(zip(operation.operands[first + carried :], operation.results[:number], strict=False))

    # How values are computed: fused, or by a kernel that puts them into memory.

    def run(self, outputs: Sequence[_Value], emitted: Sequence[_Value] = ()) -> Prediction:
        """The prediction for the program with these outputs. Those that are `emitted` need not be in memory."""
        operations = _live(self.operations, [*outputs, *emitted])
        _choose_buffers(operations, outputs, emitted)
        last = _last_reads(operations, [*outputs, *emitted])
        now = peak = 0
        kernels: list[Kernel] = []
        for position, operation in enumerate(operations):
            if not operation.is_run:
                continue
            read = list(dict.fromkeys(buffer for operand in operation.operands for buffer in operand.buffers))
            ending = [buffer for buffer in read if last.get(buffer) == position and buffer.num_bytes]
            made = [result for result in operation.results if result.is_in_memory]
            for result in made:
                reused = _reused(operation, result, ending)
                if reused is None:
                    now += result.num_bytes
                else:
                    ending.remove(reused)
                    result.is_carried = reused.is_carried
                    if not reused.is_carried:
                        now += result.num_bytes - reused.num_bytes
            peak = max(peak, now + operation.scratch)
            now -= sum(buffer.num_bytes for buffer in ending if not buffer.is_carried)
            now -= sum(result.num_bytes for result in made if result not in last and not result.is_carried)
            kernels.extend(operation.inner)
            if not operation.inner and operation.name != "optimization_barrier":
                sizes = [buffer.read_bytes for buffer in read], [result.read_bytes for result in made]
                if operation.name == "device_put":
                    kernels.append(Kernel(0.0, max(map(sum, sizes)), is_copy=True))
                else:
                    kernels.append(Kernel(operation.flops, sum(map(sum, sizes))))
        return Prediction(max(peak, now), tuple(kernels))


def _input(size: int) -> _Value:
    """An input, which is in memory anyway."""
    value = _Value(0)
    value.read_bytes = size
    return value


def _live(operations: Sequence[_Operation], outputs: Sequence[_Value]) -> list[_Operation]:
    """The operations that the outputs need, and those with effects."""
    needed, kept = set(outputs), []
    for operation in reversed(operations):
        if operation.has_effects or not needed.isdisjoint(operation.results):
            # A barrier reads what is needed anyway.
            if operation.name != "optimization_barrier":
                needed.update(operation.operands)
            kept.append(operation)
    return kept[::-1]


def _choose_buffers(operations: Sequence[_Operation], outputs: Sequence[_Value], emitted: Sequence[_Value]) -> None:
    """Decides which values have a buffer of their own."""
    stored = _stored(operations, outputs)
    readers = collections.Counter([*emitted, *(operand for each in operations for operand in each.operands)])
    for operation in operations:
        name = operation.name
        for result in operation.results:
            if name in _RENAMED:
                result.buffers = operation.operands[0].buffers
                continue
            result.buffers = [result]
            is_kept = result in stored or (name in _SLOW and readers[result] > 1)
            if name in _FUSED and not is_kept:
                read = dict.fromkeys(buffer for operand in operation.operands for buffer in operand.buffers)
                result.buffers = list(read) if len(read) <= _MOST_BUFFERS else [result]


def _stored(operations: Sequence[_Operation], outputs: Sequence[_Value]) -> set[_Value]:
    """The values that must be in memory: outputs, and operands of kernels that do not compute them themselves."""
    stored = set()
    kernels = [each for each in operations if each.name not in _FUSED and each.name not in _TAKES_FUSED]
    for value in [*outputs, *(operand for each in kernels for operand in each.operands)]:
        while value.maker is not None and value.maker.name in _RENAMED:
            value = value.maker.operands[0]
        stored.add(value)
    return stored


def _last_reads(operations: Sequence[_Operation], outputs: Iterable[_Value]) -> dict[_Value, int]:
    """The position of the last kernel that reads each buffer. Outputs are read after the last one."""
    last: dict[_Value, int] = {}
    for position, operation in enumerate(operations):
        if operation.is_run and operation.name != "optimization_barrier":
            for operand in operation.operands:
                last.update(dict.fromkeys(operand.buffers, position))
    for output in outputs:
        last.update(dict.fromkeys(output.buffers, len(operations)))
    return last


def _reused(operation: _Operation, result: _Value, ending: Sequence[_Value]) -> _Value | None:
    """The buffer, no longer needed, that a result is written into; None if it needs memory of its own."""
    if operation.name not in _IN_PLACE:
        return None
    candidates = list(ending)
    if operation.name in ("scan", "while"):
        sources = [operand.buffers for operand, after in operation.carried if after is result]
        candidates = [buffer for buffer in ending if any(buffer in buffers for buffers in sources)]
    return next((buffer for buffer in candidates if buffer.num_bytes >= result.num_bytes), None)


# FLOPs, and copies that a CPU makes.


def _product_flops(equation: Any) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(result) * math.prod(left[axis] for axis in contracted) * _slowness(equation)


def _copied_operands(equation: Any) -> int:
    """The bytes of operands of a product that are copied, since their axes are in another order than products need."""
    contracted, batch = equation.params["dimension_numbers"]
    copied = 0
    for operand, summed, shared in zip(equation.invars, contracted, batch, strict=True):
        axes = range(len(operand.aval.shape))
        free = [axis for axis in axes if axis not in summed and axis not in shared]
        if list(axes) not in ([*shared, *free, *summed], [*shared, *summed, *free]):
            copied += num_bytes(operand.aval)
    return copied


def _convolution_flops(equation: Any) -> float:
    kernel, spec = equation.invars[1].aval.shape, equation.params["dimension_numbers"].rhs_spec
    outputs = math.prod(equation.outvars[0].aval.shape)
    return 2.0 * outputs * math.prod(kernel) / max(1, kernel[spec[0]]) * _slowness(equation)


def _slowness(equation: Any) -> float:
    """How much longer a product takes than one of 16 bits."""
    return max(1.0, equation.invars[0].aval.dtype.itemsize / 2)


def _copied_images(equation: Any) -> int:
    """The bytes of arrays of a convolution that are copied, since their channels are not last."""
    spec = equation.params["dimension_numbers"]
    rank = len(spec.lhs_spec)
    channels_last = (0, rank - 1, *range(1, rank - 1))
    arrays = [(spec.lhs_spec, channels_last, equation.invars[0]), (spec.out_spec, channels_last, equation.outvars[0])]
    arrays.append((spec.rhs_spec, (rank - 1, rank - 2, *range(rank - 2)), equation.invars[1]))
    return sum(num_bytes(array.aval) for given, usual, array in arrays if tuple(given) != usual)
