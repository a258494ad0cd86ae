"""A program that JAX traced, as plain data: which operations it has, how large, and inside of what.

It is what the process that ran the learner's code reports of it. Operations whose results nobody uses are not in it.
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
