"""The collectives that one run of a compiled program executes, and the bytes that each device sends.

They are read from the text of the optimized HLO. The text shows a collective once, however often a loop repeats it. So
the computations are followed from the entry, and trip counts of loops are multiplied. A text that cannot be understood
raises an error rather than give a number that is too small. Kernels and custom calls that communicate themselves are
not counted.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from anybatch.call.memory import readable
from anybatch.errors import InputError
from anybatch.jaxprs.hlo import Program, UnreadableProgramError

KINDS = tuple(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast".split()
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Args:
      kind: one of `KINDS`.
      times: how often one run executes it; None if it is in a loop of unknown trip count.
      bytes: the bytes of its result on one device.
      arrays: the number of arrays that it combines.
      group: the number of devices that communicate with each other.
      axes: the mesh axes along which these devices differ; None without a mesh.
      in_loop: whether it is in a loop.
      optional: whether it is in a branch, which a run may skip; `times` is then the largest possible number.
      source: the operation that it comes from, as JAX names it; empty if XLA inserted it.
    """

    kind: str
    times: int | None
    bytes: int
    arrays: int
    group: int
    axes: tuple[str, ...] | None
    in_loop: bool
    optional: bool
    source: str

    @property
    def payload(self) -> int:
        """The bytes of its input or its result on one device, whichever is larger."""
        return self.bytes * self.group if self.kind == "reduce-scatter" else self.bytes

    @property
    def wire(self) -> int:
        """The most bytes that a device sends in one execution, on a ring: 2(g-1)/g of the payload for an all-reduce."""
        if self.kind in _SENDS_ALL:
            return self.payload
        rounds = 2 if self.kind == "all-reduce" else 1
        return -(-rounds * (self.group - 1) * self.payload // self.group)

    @property
    def hops(self) -> int:
        """The number of consecutive messages in one execution, on a ring."""
        if self.kind == "collective-permute":
            return 1
        return (2 if self.kind == "all-reduce" else 1) * (self.group - 1)


# A device sends all of the payload. For a ragged all-to-all that is an upper bound: its sizes are not in the program.
_SENDS_ALL = ("collective-permute", "collective-broadcast", "ragged-all-to-all")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one run. Print it for a table.

    >>> reduction = Collective("all-reduce", 1, 2**20, 3, 8, ("data",), False, False, "psum")
    >>> traffic = Traffic((reduction,))
    >>> print(traffic)
    1 collective in a run, each device sends 1.8 MiB, nothing of it in loops
      times  kind        arrays   result  devices    sends  where  from
          1  all-reduce       3  1.0 MiB   8 data  1.8 MiB  once   psum
    >>> traffic.at(1024).seconds(bandwidth=50e9) < 50e-6
    True
    """

    collectives: tuple[Collective, ...]

    @classmethod
    def of(cls, compiled: Any, mesh: Any = None) -> "Traffic":
        """The traffic of a compiled program, `jax.jit(fun).lower(...).compile()`; see `collectives_of`."""
        return cls(tuple(collectives_of(compiled, mesh)))

    @property
    def executed(self) -> int | None:
        """The largest number of collectives that one run executes; None if it is not known."""
        return _total(each.times for each in self.collectives)

    @property
    def sent(self) -> int | None:
        """The most bytes that a device sends in one run; None if they are not known."""
        return _total(None if each.times is None else each.times * each.wire for each in self.collectives)

    @property
    def by_kind(self) -> dict[str, int | None]:
        """The number of collectives of each kind that one run executes."""
        found = dict.fromkeys(each.kind for each in self.collectives)
        return {kind: Traffic(tuple(c for c in self.collectives if c.kind == kind)).executed for kind in found}

    @property
    def in_loops(self) -> "Traffic":
        """The collectives inside of loops."""
        return Traffic(tuple(each for each in self.collectives if each.in_loop))

    @property
    def outside(self) -> "Traffic":
        """The collectives outside of all loops."""
        return Traffic(tuple(each for each in self.collectives if not each.in_loop))

    def over(self, axis: str) -> "Traffic":
        """The collectives along an axis of the mesh, alone or together with other axes."""
        if any(each.axes is None for each in self.collectives):
            raise InputError(
                "Traffic.over needs a mesh, for the names of its axes",
                given=f"axis={axis!r} and a Traffic without a mesh",
                remedy="Pass the mesh: Traffic.of(compiled, mesh).",
            )
        return Traffic(tuple(each for each in self.collectives if axis in (each.axes or ())))

    def at(self, devices: int) -> "Traffic":
        """The same collectives in groups of another size, with the same payload on each device.

        That is what happens to a data-parallel gradient if you add devices and keep the number of examples on each. If
        the mesh has other axes, select the axis that grows first: `over("data").at(1024)`.
        """
        if devices == 1:
            return Traffic(())
        moved = []
        for each in self.collectives:
            size = -(-each.payload // devices) if each.kind == "reduce-scatter" else each.bytes
            moved.append(dataclasses.replace(each, group=devices, bytes=size))
        return Traffic(tuple(moved))

    def seconds(self, bandwidth: float, latency: float = 0.0) -> float | None:
        """An estimate of the time of all collectives, one after the other on a ring, with nothing else running.

        Args:
          bandwidth: the bytes that a device sends in a second.
          latency: the seconds that an empty message takes to the next device.

        Returns:
          None if it is not known how often they are executed.
        """
        if self.executed is None:
            return None
        return sum((each.times or 0) * (each.wire / bandwidth + each.hops * latency) for each in self.collectives)

    def __str__(self) -> str:
        if not self.collectives:
            return "no collectives"
        most = "at most " if any(each.optional for each in self.collectives) else ""
        count, loops = self.executed, self.in_loops
        number = "an unknown number of" if count is None else f"{most}{count}"
        inside = "nothing" if not loops.collectives else _bytes(loops.sent)
        lines = [
            f"{number} collective{'' if count == 1 else 's'} in a run, each device sends {most}{_bytes(self.sent)}, "
            f"{inside} of it in loops"
        ]
        rows = [["times", "kind", "arrays", "result", "devices", "sends", "where", "from"]]
        for each in self.collectives:
            sends = _bytes(None if each.times is None else each.times * each.wire)
            where = "loop" if each.in_loop else "maybe" if each.optional else "once"
            group = " ".join([str(each.group), *(each.axes or ())])
            times = "?" if each.times is None else str(each.times)
            rows.append([times, each.kind, str(each.arrays), readable(each.bytes), group, sends, where, each.source])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = zip(row, widths, rows[0], strict=True)
            left = ("kind", "where", "from")
            line = "  ".join(cell.ljust(width) if name in left else cell.rjust(width) for cell, width, name in cells)
            lines.append(f"  {line}".rstrip())
        return "\n".join(lines)


def _total(numbers: Any) -> int | None:
    known = list(numbers)
    return None if None in known else sum(known)


def _bytes(number: int | None) -> str:
    return "unknown" if number is None else readable(number)


def collectives_of(compiled: Any, mesh: Any = None) -> list[Collective]:
    """The collectives that one run of a compiled program executes, in the order of the program.

    Two calls of one computation give two entries. `times` is the product of the trip counts of the surrounding loops. A
    collective over groups of one device is left out. Every line of the text that looks like a collective is counted;
    otherwise this raises.

    Args:
      compiled: the result of `jax.jit(fun).lower(...).compile()`, or its text.
      mesh: the mesh that the program was compiled for; it gives the names of the axes.

    Raises:
      UnreadableProgramError: if the text has an unknown form.
    """
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    if not isinstance(text, str) or not text.lstrip().startswith("HloModule"):
        raise InputError(
            "Collectives are read from a compiled program or its text, which begins with HloModule",
            given=f"{type(compiled).__name__} with {str(text).lstrip()[:40]!r}",
            remedy="Pass jax.jit(fun).lower(...).compile().",
        )
    program = Program(text)
    if mesh is not None and mesh.size != program.devices:
        raise InputError(
            "mesh must be the one that the program was compiled for",
            given=f"a mesh of {mesh.size} devices and a program for {program.devices}",
            remedy="Pass that mesh, or leave it out; then axes have no names.",
        )
    reached: set[int] = set()
    found = list(_walk(program, program.entry, mesh, reached))
    for number, line in program.suspects.items():
        if number not in reached:
            raise UnreadableProgramError("this line looks like a collective and was not reached", line)
    return [each for each in found if each.group > 1]


# The attributes that name the computations an instruction calls. Other instructions have a to_apply too: it names a
# reducer, which contains no collectives.
_RUNS = {
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async": ("calls",),
    "conditional": ("true_computation", "false_computation", "branch_computations"),
    "while": ("body", "condition"),
}


def _walk(
    program: Program,
    name: str,
    mesh: Any,
    reached: set[int],
    times: int | None = 1,
    in_loop: bool = False,
    optional: bool = False,
) -> Iterator[Collective]:
    """The collectives of a computation, and of those that it calls."""
    for each in program[name]:
        op = each.op.removesuffix("-start")
        if op in KINDS:
            reached.add(each.number)
            arrays, groups = each.array_bytes, program.groups(each, op)
            # Without dimensions, the elements of the tuple are pieces of one array, one for each device.
            pieces = op == "all-to-all" and "dimensions=" not in each.attributes
            number, group = 1 if pieces else len(arrays), max(map(len, groups), default=0)
            axes = None if mesh is None else _axes(groups, mesh)
            yield Collective(op, times, sum(arrays), number, group, axes, in_loop, optional, each.source)
        for attribute in _RUNS.get(op, ()):
            turns = each.trip_count if op == "while" else 1
            if attribute == "condition" and turns is not None:
                turns += 1  # the condition runs once more than the body
            inner_times = None if times is None or turns is None else times * turns
            around = (inner_times, in_loop or op == "while", optional or op == "conditional")
            for inner in each.names(attribute):
                yield from _walk(program, inner, mesh, reached, *around)


def _axes(groups: list[list[int]], mesh: Any) -> tuple[str, ...]:
    """The axes along which the devices of a group differ. A program numbers its devices in the order of the mesh."""
    sizes = mesh.shape
    spanned = np.zeros(len(sizes), bool)
    for group in groups:
        coordinates = np.array(np.unravel_index(group, tuple(sizes.values())))
        spanned |= (coordinates != coordinates[:, :1]).any(axis=1)
    return tuple(name for name, spans in zip(sizes, spanned, strict=True) if spans)
