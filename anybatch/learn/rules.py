"""Rules for the traced program, for `Check.program`.

Each function here returns a rule: a function of a `Program` and a case's arguments that returns what is wrong, or None.
`says` is the text that the learner then reads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from anybatch.learn.check import MOVES, Arguments, Program, Rule


def needs(name: str, says: str, *, inside: str | None = None, at_least: int = 1, at_most: int | None = None) -> Rule:
    """The operation must occur in the program, at least `at_least` and at most `at_most` times."""

    def rule(program: Program, args: Arguments) -> str | None:
        found = program.count(name, inside=inside)
        return says if found < at_least or (at_most is not None and found > at_most) else None

    return rule


def forbids(*names: str, says: str, inside: str | None = None, outside: str | None = None) -> Rule:
    """None of the operations may occur in the program."""

    def rule(program: Program, args: Arguments) -> str | None:
        return says if program.count(*names, inside=inside, outside=outside) else None

    return rule


def scans(length: Callable[..., int], says: str) -> Rule:
    """At least one scan must have the length that `length` returns for the arguments."""

    def rule(program: Program, args: Arguments) -> str | None:
        turns = length(*args)
        return None if any(scan.params["length"] == turns for scan in program.find("scan")) else says

    return rule


def computes_in(name: str, size: Callable[..., int], says: str) -> Rule:
    """Outside of the operation (a scan, a shard_map), nothing may compute with arrays of `size` or more elements.

    Reshapes, slices, casts and copies do not count as computing.
    """

    def rule(program: Program, args: Arguments) -> str | None:
        large = size(*args)
        for operation in program.find(outside=name):
            # A loop or a call computes nothing itself; the operations inside of it do.
            if operation.name not in MOVES and not operation.bodies and operation.size >= large:
                return says
        return None

    return rule


def stacks_less_than(size: Callable[..., int], says: str, *, turns: Callable[..., int] | None = None) -> Rule:
    """No scan may stack `size` or more numbers in its outputs, without counting its carry.

    If `turns` is given, a scan nested in another one with another length is exempt: it runs within one microbatch.
    """

    def rule(program: Program, args: Arguments) -> str | None:
        large, loops = size(*args), program.find("scan")
        if turns is not None:
            loops = [scan for scan in loops if "scan" not in scan.inside or scan.params["length"] == turns(*args)]
        stacked = (sum(array.size for array in scan.stacked) for scan in loops)
        return says if any(total >= large for total in stacked) else None

    return rule


def one_microbatch(
    size: Callable[..., int],
    says: str,
    *,
    names: Sequence[str] = (),
    of: Sequence[str] = ("float", "bfloat", "complex"),
    but: Callable[..., Sequence[int]] | None = None,
) -> Rule:
    """No operation, in a loop or outside of one, may compute with larger arrays than one microbatch needs.

    Args:
      size: a function of the arguments that returns the number of elements of the largest array that one microbatch
        needs.
      says: the text for the learner.
      names: the operations to look at; by default all that compute. Reshapes, slices, casts and copies do not.
      of: beginnings of the names of the dtypes to look at.
      but: a function of the arguments that returns a shape that may be larger, with its axes in any order.
    """

    def rule(program: Program, args: Arguments) -> str | None:
        most = size(*args)
        larger = sorted(but(*args)) if but else None
        for operation in program.find(*names):
            if operation.name in MOVES or operation.bodies:
                continue
            arrays = [
                each
                for each in (*operation.inputs, *operation.outputs)
                if sorted(axis for axis in each.shape if axis > 1) != larger
            ]
            found = max((each.size for each in arrays if each.dtype.startswith(tuple(of))), default=0)
            if found > most:
                return f"{says}\nOne {operation.name} has {found} numbers; one microbatch has {most} at most."
        return None

    return rule


# A smaller share of an answer's change than this is rounding.
ROUNDING = 1e-3


def carries(
    name: str,
    varied: Sequence[int] | Callable[[Arguments], Arguments],
    says: str,
    *,
    names: Sequence[str] = (),
    turns: Callable[..., Sequence[int]] | None = None,
    may_hand_on: bool = False,
) -> Rule:
    """Some arguments may affect the answer only through an operation, such as a scan.

    The program is run again with other numbers in those arguments, while the operation keeps returning what it
    returned before. If the answer changes nevertheless, part of it was computed without the operation. If `turns` is
    given, the scan must also do the work itself: its inputs may be those arguments, moved or changed element by
    element, but not something reduced from them.

    Args:
      name: the operation, as the learner reads it and as JAX names it: "scan", "shard_map".
      varied: the positions of the arguments to change; or a function of a case's arguments that returns changed ones.
      says: the text for the learner, below the finding.
      names: JAX's names of the operation, if they differ from `name` or there are several.
      turns: a function of the arguments that returns the lengths that the scan may have; any length by default.
      may_hand_on: whether the scan's inputs may be reduced from those arguments, as in the second of two passes.
    """

    def rule(program: Program, args: Arguments) -> str | None:
        others = varied(args) if callable(varied) else other_numbers(args, *varied)
        select: dict[str, Any] = {"names": list(names) or [name]}
        if turns is not None:
            select["turns"] = [int(each) for each in turns(*args)]
        response = program.response([select], args, others)
        if response is not None and (finding := _goes_around(name, response.shares(), says)):
            return finding
        if turns is None or may_hand_on:
            return None
        response = program.response([{**select, "given": True}], args, others)
        if response is None or max(response.shares(), default=0.0) <= ROUNDING:
            return None
        return f"The inputs of the {name} were computed from the batch: compute that inside of the {name}.\n{says}"

    return rule


def matters(
    name: str,
    says: str,
    *,
    selects: Sequence[Mapping[str, Any]] = (),
    least: float = 0.01,
    but: Sequence[int] = (),
) -> Rule:
    """The results of an operation must affect every array of the answer.

    The program is run again with these results made 5% to 45% larger.

    Args:
      name: the operation, as the learner reads it and as JAX names it.
      says: the text for the learner, below the finding.
      selects: which operations are meant, if the name is not enough; see `Program.response`.
      least: the smallest relative change of every array of the answer.
      but: the positions of the answer's arrays that need not change.
    """

    def rule(program: Program, args: Arguments) -> str | None:
        response = program.distorted(selects or [{"names": [name]}], args)
        changes = [0.0] if response is None else _changes(response.before, response.held)
        if all(change >= least for place, change in enumerate(changes) if place not in but):
            return None
        return f"{_without_influence(name)}\n{says}"

    return rule


def other_numbers(args: Arguments, *positions: int, rows: slice = slice(None)) -> Arguments:
    """The arguments with other numbers in some rows of the floating-point arrays at some positions."""
    import jax  # here, so that what only reads a course starts quickly

    rng = np.random.default_rng(0)

    def changed(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray) or not (leaf.dtype.kind == "f" or leaf.dtype.name == "bfloat16"):
            return leaf
        other = leaf.copy()
        factors = rng.choice((0.5, 2.0), other[rows].shape)
        other[rows] = (other[rows] * factors).astype(leaf.dtype)
        return other

    return tuple(jax.tree.map(changed, arg) if place in positions else arg for place, arg in enumerate(args))


def _goes_around(name: str, shares: Sequence[float], says: str) -> str | None:
    if max(shares, default=0.0) <= ROUNDING:
        return None
    if min(shares) > 1 - ROUNDING:
        return f"{_without_influence(name)}\nWhatever it returns, the answer is the same up to rounding. {says}"
    part = f"up to {max(shares):.0%} of it is computed without it"
    return f"Part of the answer does not come from the {name}: {part}.\n{says}"


def _without_influence(name: str) -> str:
    return f"The {name} has no influence on the answer: it is in the program, but its result does not matter."


def _changes(before: Sequence[np.ndarray], held: Sequence[np.ndarray]) -> list[float]:
    found = []
    for one, other in zip(before, held, strict=True):
        moved = np.max(np.abs(other.astype(np.float64) - one), initial=0.0)
        size = np.max(np.abs(one.astype(np.float64)), initial=0.0)
        found.append(float("inf") if not np.isfinite(moved) else float(moved / size) if size else float(moved))
    return found


def computes_elsewhere(program: Program, args: Arguments) -> str | None:
    """A rule for every exercise: the program may not compute in Python callbacks, which cannot be inspected."""
    if any(each.outputs for each in program.find("pure_callback", "io_callback")):
        return (
            "The program calls back into Python, where a check cannot see what is computed.\n"
            "Use jax.numpy instead of numpy, without jax.pure_callback or io_callback. To look at a value, use "
            "jax.debug.print."
        )
    return None
