"""A program that JAX traced, as plain data: which operations it has, how large, and inside of what.

It is what the process that ran the learner's code reports of it. Operations whose results nobody uses are not in it.

What an author declares of an exercise: cases, a reference, known mistakes, and what must hold beyond the value.

The file `check.py` of an exercise has one name, `check`, which is a `Check`. It is read by the grader alone, in a
process in which the learner's code never runs. Whatever is declared is checked in one order, and the first failure
is what the learner reads:

file and signature, structure, shape and dtype, value, invariances, finite differences, program, memory, collectives.

What became of one check.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Calls that only hold a program: what is in them is as if it were written where they are.
TRANSPARENT = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    )
)
# These move numbers or make constants; everything else computes.
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
    """The type of a value."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation.

    Args:
      name: of JAX's primitive: "scan", "shard_map", "dot_general", "add".
      inputs: their types.
      outputs: their types.
      params: those of its parameters that are numbers, names or lists of them; of a scan: length, reverse, num_carry,
        num_consts; of a shard_map: devices (how many), axes (names of the mesh).
      bodies: the programs inside.
      inside: the names of the operations around it, the outermost first, without mere calls.
    """

    name: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    params: dict[str, Any]
    bodies: tuple["Program", ...]
    inside: tuple[str, ...]

    @property
    def size(self) -> int:
        """The numbers in its largest array, in or out."""
        return max((array.size for array in (*self.inputs, *self.outputs)), default=0)

    @property
    def stacked(self) -> tuple[Array, ...]:
        """What a scan puts out for every turn, beside what it carries."""
        return self.outputs[self.params["num_carry"] :] if self.name == "scan" else ()


@dataclasses.dataclass(frozen=True)
class Response:
    """How the answer of a program responds to other arguments, once as it is, and once with operations held still.

    Args:
      before: the arrays of the answer.
      after: those for the other arguments.
      held: those for the other arguments, while every held operation returns what it returned before.
    """

    before: tuple[np.ndarray, ...]
    after: tuple[np.ndarray, ...]
    held: tuple[np.ndarray, ...]

    def shares(self, part: Callable[[np.ndarray], np.ndarray] = lambda leaf: leaf) -> tuple[float, ...]:
        """For a part of each array, how much of its response does not come through the held operations, from 0 to 1.

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
    """The operations of a function, in order, with those inside of others.

    Args:
      operations: the outermost.
      devices: how many there were when it was traced.
      respond: asks the process that has the program; see `response`.

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
        """The program that was reported in plain data."""
        return cls(tuple(_operation(each, devices, inside) for each in record), devices, respond)

    def response(
        self, selects: Sequence[Mapping[str, Any]], args: tuple[Any, ...], others: tuple[Any, ...]
    ) -> Response | None:
        """How the answer responds to other arguments while some operations are held still; None if not at all.

        Args:
          selects: which are held: those that fit one of these. A select is a dict with any of `names` (of JAX's
            primitives), `turns` (of a scan, a list), `stack` (a regular expression for the transformations that made
            the operation, as JAX names them: "jvp" is in all that `jax.grad` makes), `around` (such an expression for
            something inside of it), `holding` (the name of an operation in it), `inside` (of one around it),
            `size` (the least numbers in its largest array). With `given` it still responds to what it is given that
            was computed from the arguments, and is smaller than they are, as a sum is.
          args: the arguments of a case.
          others: arguments of the same shapes, with other numbers.
        """
        assert self.respond is not None
        return self.respond(list(selects), args, others, False)

    def distorted(self, selects: Sequence[Mapping[str, Any]], args: tuple[Any, ...]) -> Response | None:
        """How the answer responds if the results of some operations are made 5% to 45% larger; None if not at all."""
        assert self.respond is not None
        return self.respond(list(selects), args, args, True)

    def __iter__(self) -> Iterator[Operation]:
        """All operations, each before those inside of it."""
        for operation in self.operations:
            yield operation
            for body in operation.bodies:
                yield from body

    def find(self, *names: str, inside: str | None = None, outside: str | None = None) -> list[Operation]:
        """The operations of these names (of any, if none is given), inside or outside of others of a name."""
        return [
            operation
            for operation in self
            if (not names or operation.name in names)
            and operation.name not in TRANSPARENT
            and (inside is None or inside in operation.inside)
            and (outside is None or outside not in operation.inside)
        ]

    def count(self, *names: str, inside: str | None = None, outside: str | None = None) -> int:
        """How many there are."""
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
      args: what it is called with, by position. Arrays (of numpy, also inside of dicts, lists and tuples) are traced;
        Python numbers and strings are handed over as they are. Cases with the same shapes share one compilation.
      note: what is special about it, shown where it fails: "12 examples in 4 microbatches".
      devices: on how many devices it is called; None for all that the check names.
    """

    args: Arguments
    note: str = ""
    devices: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Raises:
    """Arguments that must be refused.

    Args:
      args: what the function is called with.
      mentions: texts that the message of the error must contain: the numbers that do not fit, a name.
      note: what is wrong with them: "10 examples in 4 microbatches".
      error: the name of the exception, or of one that it derives from.
    """

    args: Arguments
    mentions: tuple[str, ...] = ()
    note: str = ""
    error: str = "ValueError"


@dataclasses.dataclass(frozen=True)
class Mistake:
    """An answer that is wrong in a known way, so that it can be named.

    Args:
      name: in a few words: "the mean of the microbatches".
      answer: of the arguments, as the reference takes them; None where the mistake makes no difference.
      says: one or two sentences to the learner, or a function of the arguments that gives them.
    """

    name: str
    answer: Callable[..., Any]
    says: str | Callable[..., str]


@dataclasses.dataclass(frozen=True)
class Same:
    """Arguments that differ, and an answer that must not.

    Args:
      what: makes no difference: "the number of microbatches".
      change: of a random generator and the arguments of the first case, the others.
      then: what becomes of the first answer, if it does change: a permutation of its rows, say.
      says: what to look at, if the answers differ.
    """

    what: str
    change: Callable[[np.random.Generator, Arguments], Arguments]
    then: Callable[[Any, Arguments, Arguments], Any] | None = None
    says: str = ""


@dataclasses.dataclass(frozen=True)
class Differences:
    """A gradient that must be the slope of the value beside it, along random directions.

    Args:
      value: of an answer, the number that was differentiated.
      gradient: of an answer, the gradient, shaped as the argument.
      argument: the position of what it was differentiated by.
    """

    value: Callable[[Any], Any]
    gradient: Callable[[Any], Any]
    argument: int = 0


@dataclasses.dataclass(frozen=True)
class Slope:
    """Memory that must not grow with the batch: XLA's temporaries of the compiled function, at two sizes.

    Args:
      args: of a random generator and a whole number k, arguments with a batch k times as large, in microbatches of
        the same size. The answer of the larger is compared with the reference as well.
      says: what keeps the memory, and the way out.
      times: how much larger the larger batch is.
      limit: by how much the temporaries may grow.
      floor: bytes below which growth is of no interest (XLA's own few).
      slack: how many times the temporaries of the exercise's solution, at the same size, are allowed. Growth alone
        misses waste that does not depend on the batch size.
      room: extra bytes that are allowed, for correct programs that XLA compiles less tightly than the solution. As many
        as `floor` if it is left out.
    """

    args: Callable[[np.random.Generator, int], Arguments]
    says: str
    times: int = 4
    limit: float = 1.05
    floor: int = 4096
    slack: float = 2.5
    room: int | None = None


@dataclasses.dataclass(frozen=True)
class Collectives:
    """What the compiled function may execute of collectives, each counted as often as its loops run it.

    Args:
      exactly: kind -> times, such as {"all-reduce": 1}; every other kind is not allowed.
      says: why, and the way out; or a function of the counts that were found (kind -> times) that gives it.
      args: of a random generator, the arguments; those of the first case if it is left out.
      devices: how many there are.
      largest: the most bytes that all of them together may carry on a device; None for no limit.
      slack: how many times the multiplications of the exercise's solution, on each device, are allowed; None for no
        limit. One all-reduce at the end tells nothing of devices that all did the whole work before.
    """

    exactly: Mapping[str, int]
    says: str | Callable[[Mapping[str, int]], str]
    args: Callable[[np.random.Generator], Arguments] | None = None
    devices: int = 8
    largest: int | None = None
    slack: float | None = None


@dataclasses.dataclass(frozen=True)
class Check:
    """All that is checked of one exercise.

    Args:
      function: its name.
      parameters: the names of its parameters, in order.
      cases: of a random generator, the cases: at least one `Case`, the plainest first.
      reference: of the arguments of a case, with its floating-point arrays in float64, the right answer in numpy.
        It is called again with arguments moved by a rounding error, and must follow them: how far it moves is how
        far an answer may lie from it.
      dtypes: what the arrays of the answer must be: one name for all, or a tree like the answer.
      mistakes: wrong answers that are known.
      same: invariances.
      differences: whether the gradient is the slope of the value.
      program: rules on the program that JAX traced; each returns what is wrong, or None. See `anybatch.learn.rules`.
      memory: memory that must stay flat.
      collectives: what devices may exchange.
      devices: on how many simulated devices the function is run, each count in a process of its own.
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


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one check.

    Args:
      exercise: its name.
      passed: whether everything holds.
      stage: the one of `STAGES` that failed first; empty if none did.
      title: the finding, in one line.
      text: an explanation, of several lines.
      mistake: the name of a known mistake.
      line: where, in the learner's file.
      source_line: what stands there.
      prints: what the learner's code printed, its beginning.
      prints_dropped: how many bytes of that are not shown.
      seconds: how long it took.
      seed: of the cases, to have the same ones again.
      done: the stages that were passed, and what was seen there.
      started: False while the exercise is as it was given.
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

    def as_json(self) -> dict[str, Any]:
        """As plain data, for other programs."""
        return dataclasses.asdict(self) | {"done": [list(each) for each in self.done]}
