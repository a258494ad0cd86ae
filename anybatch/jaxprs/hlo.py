"""Parses the text of a compiled program: its computations, their instructions, and the groups of devices.

XLA promises nothing about the form of this text. A form that is not known raises an error, since a count that leaves
something out would be wrong.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from anybatch.errors import AnybatchError


class UnreadableProgramError(AnybatchError, ValueError):
    """The text of a compiled program has an unknown form, so that its collectives cannot be counted.

    The message shows the line.
    """

    def __init__(self, why: str, line: str = "") -> None:
        shown = f"\n    {line.strip()[:300]}" if line else ""
        remedy = "Please report the line. Gradients do not depend on this count."
        super().__init__(f"Collectives are counted in the text of a compiled program, but {why}.{shown}\n{remedy}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    number: int  # of the line
    shape: str
    op: str
    attributes: str  # and operands, without quoted text: names that users choose could look like anything
    line: str

    @property
    def trip_count(self) -> int | None:
        """The number of iterations of a loop; None if the compiler does not know."""
        match = _TRIP_COUNT.search(self.line)
        return int(match[1]) if match else None

    @property
    def source(self) -> str:
        """The JAX operation that it comes from; empty if XLA made it."""
        match = _SOURCE.search(self.line)
        return match[1] if match else ""

    @property
    def array_bytes(self) -> list[int]:
        """The bytes of each array of its result."""
        shape = self.shape
        # An all-reduce-start has the shape of its result. The other starts have operands, results and scratch.
        if self.op.endswith("-start") and self.op != "all-reduce-start":
            parts = _parts(shape)
            if len(parts) < 2:
                raise UnreadableProgramError("the start of a collective has no result", self.line)
            shape = parts[1]
        sizes = []
        for letters, bits, dimensions in _ARRAY.findall(shape):
            if not bits and letters not in ("pred", "token"):
                raise UnreadableProgramError(f"the type {letters} has no known size", self.line)
            each = int(bits) if bits else 8 * (letters == "pred")
            sizes.append(-(-each * math.prod(int(d.lstrip("<=")) for d in dimensions.split(",") if d) // 8))
        if not sizes:
            raise UnreadableProgramError("a collective has no shape", self.line)
        return sizes

    def names(self, attribute: str) -> list[str]:
        """The computations that an attribute names, one or several in braces."""
        match = re.search(rf"\b{attribute}=(?:\{{([^}}]*)\}}|%?([\w.\-]+))", self.attributes)
        return [] if not match else re.findall(r"[\w.\-]+", match[1] or match[2] or "")


_TRIP_COUNT = re.compile(r'backend_config=.*\\?"known_trip_count\\?":\s*\{\s*\\?"n\\?":\s*\\?"(\d+)')
_SOURCE = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([^\]]*)\]")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{$")
_NAME = re.compile(r"\s+(?:ROOT\s+)?%?[\w.\-]+\s*=\s*")
# Matches more than the collectives that are known, so that a new one is noticed.
_SUSPECT = re.compile(
    r"(?<![%\w.\-])(?!\S*-(?:done|update)\()"
    r"(?:(?:ragged-)?all-[a-z\-]+|reduce-scatter[a-z\-]*|collective-[a-z\-]+|send|recv)\("
)


class Program:
    """A compiled program, as computations by name, from the text that `jax.stages.Compiled.as_text` returns."""

    def __init__(self, text: str) -> None:
        lines = text.strip().splitlines()
        self.replicas, self.partitions = (
            int(match[1]) if (match := re.search(rf"\b{name}=(\d+)", lines[0])) else 1
            for name in ("replica_count", "num_partitions")
        )
        self.suspects: dict[int, str] = {}  # all lines that look like a collective, by their numbers
        self._computations: dict[str, list[Instruction]] = {}
        current: list[Instruction] | None = None
        entries = []
        for number, line in enumerate(lines):
            bare = _QUOTED.sub('""', line)
            if _SUSPECT.search(bare) and "is_host_transfer=true" not in bare:
                self.suspects[number] = line
            if line.startswith("}"):
                current = None
            elif current is not None:
                current += _instructions(number, bare, line)
            elif match := _HEADER.match(bare.rstrip()):
                current = self._computations[match[2]] = []
                entries += [match[2]] if match[1] else []
        if len(entries) != 1:
            raise UnreadableProgramError(f"this one has {len(entries)} entries instead of 1", lines[0])
        self.entry = entries[0]  # the computation that runs first

    @property
    def devices(self) -> int:
        """The number of devices that run it."""
        return self.replicas * self.partitions

    def __getitem__(self, name: str) -> list[Instruction]:
        if name not in self._computations:
            raise UnreadableProgramError(f"the computation {name} is missing")
        return self._computations[name]

    def groups(self, each: Instruction, kind: str) -> list[list[int]]:
        """The groups of devices that exchange data in a collective, by their positions among all devices."""
        replicas, partitions = list(range(self.replicas)), list(range(self.partitions))
        channel = "channel_id=" in each.attributes
        if "use_global_device_ids=true" in each.attributes:
            groups = _replica_groups(each, [])
        # Otherwise the numbers in the text are those of replicas or of partitions.
        elif channel and kind in ("all-reduce", "all-gather", "reduce-scatter"):
            groups = [[self._device(r, p) for r in g for p in partitions] for g in _replica_groups(each, replicas)]
        else:
            ids = partitions if channel else replicas
            numbered = _connected(_pairs(each)) if kind == "collective-permute" else _replica_groups(each, ids)
            if channel:
                groups = [[self._device(r, p) for p in g] for r in replicas for g in numbered]
            else:
                groups = [[self._device(r, p) for r in g] for p in partitions for g in numbered]
        if any(device >= self.devices for group in groups for device in group):
            raise UnreadableProgramError("a group has more devices than the program is for", each.line)
        return groups

    def _device(self, replica: int, partition: int) -> int:
        return replica * self.partitions + partition


def _instructions(number: int, bare: str, line: str) -> list[Instruction]:
    match = _NAME.match(bare)
    if not match:
        return []
    rest = bare[match.end() :]
    shape = rest[: _closing(rest)] if rest.startswith("(") else rest.split(" ", 1)[0]
    op, _, attributes = rest[len(shape) :].strip().partition("(")
    return [Instruction(number, shape, op, attributes, line)]


def _closing(text: str) -> int:
    """The position after the parenthesis that closes the first character of a text."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return position + 1
    return len(text)


def _parts(shape: str) -> list[str]:
    """The elements of a tuple."""
    parts, depth = [""], 0
    for character in shape[1:-1] if shape.startswith("(") else shape:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _replica_groups(each: Instruction, everyone: list[int]) -> list[list[int]]:
    """The groups, in any of the three notations; one group of `everyone` if the text has none."""
    text = each.attributes
    if "replica_groups={}" in text and everyone:
        return [everyone]
    if match := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", text):
        return [_numbers(group) for group in re.findall(r"\{([^}]*)\}", match[1])]
    if match := re.search(r"replica_groups=\[(\d+),[\d,]+\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _permuted(match[2]).reshape(int(match[1]), -1).tolist()
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, *device_ids=\(([^{]*)\))? *\{([^}]*)\}", text):
        return _mesh_groups(match[1], match[2], match[3], each.line)
    raise UnreadableProgramError("the groups of devices are in an unknown notation", each.line)


def _mesh_groups(axes: str, devices: str | None, along: str, line: str) -> list[list[int]]:
    """Groups along axes of a mesh, or along a factor of an axis: a:(4)2 is a factor 2 after an outer 4 of a."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    wanted = re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?(?:,|$)", along.strip())
    if any(name not in sizes for name, _, _ in wanted):
        raise UnreadableProgramError("its groups name an axis that its mesh does not have", line)
    dimensions: list[int] = []
    taken: list[int] = []
    for name, size in sizes.items():
        outer = 1
        parts = [(int(before or 1), int(part or size)) for other, before, part in wanted if other == name]
        for before, part in sorted(parts):
            taken.append(len(dimensions) + 1)
            dimensions += [before // outer, part]
            outer = before * part
        dimensions.append(size // outer)
    ids = np.arange(math.prod(sizes.values())) if devices is None else _permuted(devices)
    if math.prod(dimensions) != ids.size:
        raise UnreadableProgramError("its groups do not divide its mesh", line)
    grouped = np.moveaxis(ids.reshape(dimensions), taken, range(-len(taken), 0))
    return grouped.reshape(-1, math.prod(dimensions[position] for position in taken)).tolist()


def _permuted(text: str) -> np.ndarray:
    """A list of numbers, or a permutation of range(8) such as [4,2]T(1,0)."""
    match = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$", text.strip())
    if not match:
        return np.array(_numbers(text.rpartition("]")[2]))
    shape = _numbers(match[1])
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(_numbers(match[2])) if match[2] else ids).reshape(-1)


def _pairs(each: Instruction) -> list[list[int]]:
    match = re.search(r"source_target_pairs=\{((?:\{\d+, *\d+\},? *)*)\}", each.attributes)
    if not match:
        raise UnreadableProgramError("its pairs of devices are in an unknown notation", each.line)
    return [_numbers(pair) for pair in re.findall(r"\{([^}]*)\}", match[1])]


def _connected(pairs: Sequence[Sequence[int]]) -> list[list[int]]:
    """The connected components of the graph that has these pairs as edges."""
    group = {device: {device} for pair in pairs for device in pair}
    for source, target in pairs:
        merged = group[source] | group[target]
        group.update(dict.fromkeys(merged, merged))
    return [sorted(members) for members in {id(members): members for members in group.values()}.values()]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number.strip()]
