"""What the author of an exercise declares in its `check.py`, the traced program that its rules see, and the verdict.

The `check.py` of an exercise defines `check`, a `Check`: cases, a reference, known mistakes, and further requirements.
Only the grader runs it, in a process that never runs the learner's code. Requirements are checked in this order, and
the learner reads the first failure:

file and signature, structure, shape and dtype, value, errors, invariances, finite differences, program, memory,
collectives.

A `Program` is the learner's traced function as plain data: its operations, their sizes, and what they are nested in.
The process that ran the learner's code reports it. Operations whose results are not used are left out.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Calls that only contain a program. Their operations count as if they were written in place of the call.
TRANSPARENT = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    )
)
# Operations that move elements or create constants. Every other operation computes.
MOVES = frozenset(
    (
        *("reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice", "copy"),
        *("convert_element_type", "concatenate", "rev", "iota", "device_put", "sharding_constraint", "copy_p"),
        *("dynamic_update_slice", "split", "stop_gradient", "optimization_barrier", "select_n", "pvary", "pad"),
        *("gather", "scatter", "stack", "tile", "reshard", "pbroadcast", "pcast"),
    )
)


@dataclasses.dataclass(frozen=True)
class Array:
    """The shape and dtype of a value in a program."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a traced program.

    Args:
      name: the name of JAX's primitive: "scan", "shard_map", "dot_general", "add".
      inputs: the shapes and dtypes of its inputs.
      outputs: the shapes and dtypes of its outputs.
      params: its parameters that are numbers, strings or lists of these. A scan has length, reverse, num_carry and
        num_consts; a shard_map has devices (their number) and axes (the names of the mesh's axes).
      bodies: the programs inside of it.
      inside: the names of the operations around it, outermost first, without calls such as jit.
    """

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    params: dict[str, Any]
    bodies: tuple["Program", ...]
    inside: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of elements of its largest input or output."""
        return max((array.size for array in (*self.inputs, *self.outputs)), default=0)

    @property
    def stacked(self) -> tuple[Array, ...]:
        """The stacked outputs of a scan, without its carry."""
        return self.outputs[self.params["num_carry"] :] if self.name == "scan" else ()


@dataclasses.dataclass(frozen=True)
class Response:
    """A program's answer for two sets of arguments, and for the second while selected operations are held.

    Args:
      before: the arrays of the answer for the first arguments.
      after: the arrays of the answer for the other arguments.
      held: the same as `after`, while every selected operation returns what it returned for the first arguments.
    """

    before: tuple[np.ndarray, ...]
    after: tuple[np.ndarray, ...]
    held: tuple[np.ndarray, ...]

    def shares(self, part: Callable[[np.ndarray], np.ndarray] = lambda leaf: leaf) -> tuple[float, ...]:
        """For each array, the share of its change that bypasses the held operations, from 0 to 1.

        Args:
          part: selects a part of each array to look at; all of it by default.

        >>> response = Response((np.zeros(2),), (np.array([4.0, 2.0]),), (np.array([1.0, 0.0]),))
        >>> response.shares(), response.shares(lambda leaf: leaf[1:])
        ((0.25,), (0.0,))
        """
        return tuple(
            _share(*(part(each).astype(np.float64) for each in leaves))
            for leaves in zip(self.before, self.after, self.held, strict=True)
        )


def _share(before: np.ndarray, after: np.ndarray, held: np.ndarray) -> float:
    moved = np.abs(held - before)
    if not np.all(np.isfinite(moved)):
        return 1.0
    around, in_all = (float(np.max(each, initial=0.0)) for each in (moved, np.abs(after - before)))
    return 0.0 if around == 0 else min(1.0, around / in_all) if in_all > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced function: its operations in order, including those nested in others.

    Args:
      operations: the outermost operations.
      devices: the number of devices when it was traced.
      respond: runs the program again in the process that traced it; see `response`.

    >>> inner = Operation("add", (), (), {}, (), ("scan",))
    >>> program = Program((Operation("scan", (), (), {"num_carry": 0}, (Program((inner,)),), ()),))
    >>> program.count("add"), program.count("add", inside="scan"), program.count("add", outside="scan")
    (1, 1, 0)
    """

    operations: tuple[Operation, ...]
    devices: int = 1
    respond: Callable[..., Response | None] | None = dataclasses.field(default=None, repr=False, compare=False)

    @classmethod
    def read(
        cls,
        record: Any,
        devices: int = 1,
        inside: tuple[str, ...] = (),
        respond: Callable[..., Response | None] | None = None,
    ) -> "Program":
        """Makes a program from its report in plain data."""
        return cls(tuple(_operation(each, devices, inside) for each in record), devices, respond)

    def response(
        self, selects: Sequence[Mapping[str, Any]], args: tuple[Any, ...], others: tuple[Any, ...]
    ) -> Response | None:
        """Runs the program with other arguments while some operations keep their results.

        Args:
          selects: which operations are held: those that match one of these dicts. A dict has any of these keys:
            `names`, a list of JAX's primitives;
            `turns`, a list of lengths of a scan;
            `stack`, a regular expression for the transformations that made the operation, as JAX names them ("jvp" is
            in everything that `jax.grad` makes);
            `around`, such an expression that matches something inside of the operation and not the operation itself;
            `holding`, the name of an operation inside of it;
            `inside`, the name of an operation around it;
            `size`, the smallest number of elements of its largest array;
            `given`, True if the operation may still respond to inputs that were computed from the arguments and
            reduced, such as a sum.
          args: the arguments of a case.
          others: other arguments, with the same shapes and dtypes.

        Returns:
          The answers, or None if the answer cannot change.
        """
        assert self.respond is not None
        return self.respond(list(selects), args, others, False)

    def distorted(self, selects: Sequence[Mapping[str, Any]], args: tuple[Any, ...]) -> Response | None:
        """Runs the program with the results of some operations made 5% to 45% larger; None if that changes nothing."""
        assert self.respond is not None
        return self.respond(list(selects), args, args, True)

    def __iter__(self) -> Iterator[Operation]:
        """Yields all operations, each before the ones nested in it."""
        for operation in self.operations:
            yield operation
            for body in operation.bodies:
                yield from body

    def find(self, *names: str, inside: str | None = None, outside: str | None = None) -> list[Operation]:
        """The operations with one of these names (any name if none is given), inside or outside of another one."""
        return [
            operation
            for operation in self
            if (not names or operation.name in names)
            and operation.name not in TRANSPARENT
            and (inside is None or inside in operation.inside)
            and (outside is None or outside not in operation.inside)
        ]

    def count(self, *names: str, inside: str | None = None, outside: str | None = None) -> int:
        """The number of operations that `find` returns."""
        return len(self.find(*names, inside=inside, outside=outside))


def _operation(record: Any, devices: int, inside: tuple[str, ...]) -> Operation:
    name = record["name"]
    within = inside if name in TRANSPARENT else (*inside, name)
    inputs, outputs = (
        tuple(Array(tuple(shape), dtype) for shape, dtype in record[which]) for which in ("inputs", "outputs")
    )
    bodies = tuple(Program.read(body, devices, within) for body in record["bodies"])
    return Operation(name, inputs, outputs, record["params"], bodies, inside)


Arguments = tuple[Any, ...]
Rule = Callable[[Program, Arguments], str | None]


@dataclasses.dataclass(frozen=True)
class Case:
    """Arguments for the learner's function.

    Args:
      args: the positional arguments. numpy arrays, also in dicts, lists and tuples, are traced; Python numbers and
        strings are passed as they are. Cases with the same shapes share one compilation.
      note: what is special about the case, shown if it fails: "12 examples in 4 microbatches".
      devices: the numbers of devices to call it on; None for all of the check's.
    """

    args: Arguments
    note: str = ""
    devices: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Raises:
    """Arguments for which the learner's function must raise an error.

    Args:
      args: the positional arguments.
      mentions: strings that the error message must contain, such as the numbers that do not fit.
      note: what is wrong with the arguments: "10 examples in 4 microbatches".
      error: the name of the exception, or of one of its base classes.
    """

    args: Arguments
    mentions: tuple[str, ...] = ()
    note: str = ""
    error: str = "ValueError"


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A common mistake, recognised by the wrong answer it gives.

    Args:
      name: the mistake in a few words: "the mean of the microbatches".
      answer: a function of the reference's arguments that returns the wrong answer, or None where the mistake makes no
        difference.
      says: one or two sentences for the learner, or a function of the arguments that returns them.
    """

    name: str
    answer: Callable[..., Any]
    says: str | Callable[..., str]


@dataclasses.dataclass(frozen=True)
class Same:
    """An invariance: a change of the arguments that must not change the answer.

    Args:
      what: what makes no difference: "the number of microbatches".
      change: a function of a random generator and the first case's arguments that returns changed arguments.
      then: a function of the first answer, the arguments and the changed arguments that returns the answer that is
        expected now, if it does change: its rows permuted, for example.
      says: what the learner should look at if the answers differ.
    """

    what: str
    change: Callable[[np.random.Generator, Arguments], Arguments]
    then: Callable[[Any, Arguments, Arguments], Any] | None = None
    says: str = ""


@dataclasses.dataclass(frozen=True)
class Differences:
    """Checks a gradient in the answer against finite differences of a value in the answer, along a random direction.

    Args:
      value: takes an answer and returns the value that was differentiated.
      gradient: takes an answer and returns the gradient, with the structure of the argument.
      argument: the position of the argument that the gradient is with respect to.
    """

    value: Callable[[Any], Any]
    gradient: Callable[[Any], Any]
    argument: int = 0


@dataclasses.dataclass(frozen=True)
class Slope:
    """Requires that memory does not grow with the batch: XLA's temporaries, at two batch sizes.

    Args:
      args: a function of a random generator and an integer k that returns arguments with a batch k times as large, in
        microbatches of the same size. The answer for the larger batch is also compared with the reference.
      says: what usually takes the memory, and how to avoid it.
      times: how many times as large the larger batch is.
      limit: the factor by which the temporaries may grow.
      floor: growth below this number of bytes is ignored.
      slack: the temporaries may be at most this many times those of the exercise's solution, at the same batch size.
        This finds waste that does not depend on the batch size.
      room: bytes allowed on top of that, for correct programs that XLA compiles less tightly than the solution.
        Default: `floor`.
      full_batch: the name of a file in `mistakes/`, without the suffix, that computes the full batch at once. Its
        temporaries are shown beside the learner's. Default: none are shown.
    """

    args: Callable[[np.random.Generator, int], Arguments]
    says: str
    times: int = 4
    limit: float = 1.05
    floor: int = 4096
    slack: float = 2.5
    room: int | None = None
    full_batch: str = ""


@dataclasses.dataclass(frozen=True)
class Collectives:
    """The collectives that the compiled function may execute; one in a loop counts once for each iteration.

    Args:
      exactly: kind -> how often, such as {"all-reduce": 1}. No other kind is allowed.
      says: why, and how to fix it; or a function that takes the counts that were found (kind -> how often) and returns
        that.
      args: a function of a random generator that returns the arguments. Default: those of the first case.
      devices: the number of devices.
      largest: the most bytes that all collectives together may transfer on one device; None for no limit.
      slack: each device may do at most this many times the multiplications of the exercise's solution; None for no
        limit. This finds devices that repeat each other's work, which one all-reduce at the end would hide.
    """

    exactly: Mapping[str, int]
    says: str | Callable[[Mapping[str, int]], str]
    args: Callable[[np.random.Generator], Arguments] | None = None
    devices: int = 8
    largest: int | None = None
    slack: float | None = None


@dataclasses.dataclass(frozen=True)
class Check:
    """Everything that is checked of one exercise.

    Args:
      function: the name of the learner's function.
      parameters: the names of its parameters, in order.
      cases: a function of a random generator that returns the cases: at least one `Case`, the simplest one first.
      reference: a function of a case's arguments that returns the right answer, computed with numpy. It gets
        floating-point arrays in float64. It is called again with arguments changed by a rounding error of float32; how
        much its result changes decides the tolerance for the learner's answer.
      dtypes: the dtypes of the answer's arrays: one name for all, or a tree like the answer.
      mistakes: known mistakes, to be named if they are made.
      same: invariances.
      differences: a comparison of a gradient with finite differences.
      program: rules for the traced program; each returns what is wrong, or None. See `anybatch.learn.rules`.
      memory: the requirement that memory does not grow with the batch.
      collectives: the collectives that may be executed.
      devices: the numbers of simulated devices to run the function on, each in a separate process.
      is_compiled: whether the function runs under `jax.jit`, as it should in nearly every exercise.
    """

    function: str
    parameters: tuple[str, ...]
    cases: Callable[[np.random.Generator], Sequence[Case | Raises]]
    reference: Callable[..., Any]
    dtypes: Any = "float32"
    mistakes: Sequence[Mistake] = ()
    same: Sequence[Same] = ()
    differences: Differences | None = None
    program: Sequence[Rule] = ()
    memory: Slope | None = None
    collectives: Collectives | None = None
    devices: tuple[int, ...] = (1,)
    is_compiled: bool = True


STAGES = (
    *("file", "signature", "run", "structure", "shape", "value", "errors", "invariance", "differences"),
    *("program", "memory", "collectives", "limits"),
)


MOST_NUMBERS = 1024  # of each array that a verdict shows


@dataclasses.dataclass(frozen=True)
class ShownArray:
    """One array of an answer beside the expected one. The numbers are flattened, and the last ones may be left out.

    Args:
      path: where the array is in the answer, as JAX writes it: "['w']". Empty if the answer is one array.
      shape: the shape of the complete array.
      yours: the first numbers of the learner's array, at most `MOST_NUMBERS`.
      expected: the numbers that are expected there.
      tolerance: how far a number may be off.
      left_out: how many numbers of the array are not in `yours` and `expected`.
    """

    path: str
    shape: tuple[int, ...]
    yours: tuple[float, ...]
    expected: tuple[float, ...]
    tolerance: float
    left_out: int = 0

    @property
    def is_off(self) -> tuple[bool, ...]:
        """For each shown number, whether it is wrong: off by more than the tolerance, or not finite.

        >>> ShownArray("", (3,), (1.0, 2.5, math.nan), (1.0, 2.0, 3.0), 1e-6).is_off
        (False, True, True)
        """
        pairs = zip(self.yours, self.expected, strict=True)
        return tuple(not abs(mine - theirs) <= self.tolerance for mine, theirs in pairs)


@dataclasses.dataclass(frozen=True)
class MemoryShown:
    """XLA's temporaries, in bytes, for several batch sizes. What is not known is an empty tuple.

    Args:
      times: the batch sizes, as multiples of the smallest.
      yours: the temporaries of the learner's function for each of them.
      reference: those of the exercise's solution.
      full_batch: those of a program that computes the full batch at once; see `Slope.full_batch`.
    """

    times: tuple[int, ...]
    yours: tuple[int, ...] = ()
    reference: tuple[int, ...] = ()
    full_batch: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class CollectivesShown:
    """The collectives that the learner's function executes, and those that it must execute.

    Args:
      devices: the number of devices.
      yours: for each collective in the compiled program: its kind, how often one run executes it (-1 if that depends on
        a loop of unknown length), and the bytes of its result on one device.
      wanted: each kind that must be executed, and how often.
    """

    devices: int
    yours: tuple[tuple[str, int, int], ...] = ()
    wanted: tuple[tuple[str, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The numbers behind a verdict.

    Args:
      arrays: the answer beside the expected one, for the case whose numbers are wrong; for the first case if the values
        of all cases are right. Empty if the answer has the wrong structure, shape or dtype.
      memory: the temporaries, if they were measured.
      collectives: the collectives, if they were counted.
    """

    arrays: tuple[ShownArray, ...] = ()
    memory: MemoryShown | None = None
    collectives: CollectivesShown | None = None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of one check.

    Args:
      exercise: the name of the exercise.
      passed: whether every stage passed.
      stage: the stage that failed, one of `STAGES`; empty if none did.
      title: what is wrong, in one line.
      text: the explanation, which may have several lines.
      mistake: the name of the known mistake, if it is one.
      line: the line number in the learner's file.
      source_line: the text of that line.
      prints: the beginning of what the learner's code printed.
      prints_dropped: how many printed bytes are not in `prints`.
      seconds: how long the check took.
      seed: the seed of the cases; with it, the same cases can be drawn again.
      done: the stages that passed, each with what it found.
      started: False if the learner's function still raises NotImplementedError.
      evidence: the numbers that were compared, up to the stage that failed.
    """

    exercise: str
    passed: bool
    stage: str = ""
    title: str = ""
    text: str = ""
    mistake: str | None = None
    line: int | None = None
    source_line: str | None = None
    prints: str = ""
    prints_dropped: int = 0
    seconds: float = 0.0
    seed: int = 0
    done: tuple[tuple[str, str], ...] = ()
    started: bool = True
    evidence: Evidence = Evidence()

    def as_json(self) -> dict[str, Any]:
        """The verdict as dicts, lists, strings and numbers, for other programs.

        JSON has no NaN, so numbers that are not finite are the strings "NaN", "Infinity" and "-Infinity". `float` in
        Python and `Number` in JavaScript read them.
        """
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
