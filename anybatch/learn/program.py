"""A program that JAX traced, as plain data: which operations it has, how large, and inside of what.

It is what the process that ran the learner's code reports of it. Operations whose results nobody uses are not in it.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

# Calls that only hold a program: what is in them is as if it were written where they are.
TRANSPARENT = frozenset(
    (
        *("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"),
        *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
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
class Program:
    """The operations of a function, in order, with those inside of others.

    Args:
      operations: the outermost.
      devices: how many there were when it was traced.

    >>> inner = Operation("add", (), (), {}, (), ("scan",))
    >>> program = Program((Operation("scan", (), (), {"num_carry": 0}, (Program((inner,)),), ()),))
    >>> program.count("add"), program.count("add", inside="scan"), program.count("add", outside="scan")
    (1, 1, 0)
    """

    operations: tuple[Operation, ...]
    devices: int = 1

    @classmethod
    def read(cls, record: Any, devices: int = 1, inside: tuple[str, ...] = ()) -> "Program":
        """The program that was reported in plain data."""
        return cls(tuple(_operation(each, devices, inside) for each in record), devices)

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
