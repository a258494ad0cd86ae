"""What an author declares of an exercise: cases, a reference, known mistakes, and what must hold beyond the value.

The file `check.py` of an exercise has one name, `check`, which is a `Check`. It is read by the grader alone, in a
process in which the learner's code never runs. Whatever is declared is checked in one order, and the first failure
is what the learner reads:

file and signature, structure, shape and dtype, value, invariances, finite differences, program, memory, collectives.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anybatch.learn.program import Program

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
