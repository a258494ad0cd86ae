"""Rules on the program of a function, to be named in `Check.program`; each takes the sentence that a learner reads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.learn.check import MOVES, Arguments, Program, Rule


def needs(name: str, says: str, *, inside: str | None = None, at_least: int = 1, at_most: int | None = None) -> Rule:
    """The operation must be in the program, and so many times."""

    def rule(program: Program, args: Arguments) -> str | None:
        found = program.count(name, inside=inside)
        return says if found < at_least or (at_most is not None and found > at_most) else None

    return rule


def forbids(*names: str, says: str, inside: str | None = None, outside: str | None = None) -> Rule:
    """None of the operations may be in the program."""

    def rule(program: Program, args: Arguments) -> str | None:
        return says if program.count(*names, inside=inside, outside=outside) else None

    return rule


def scans(length: Callable[..., int], says: str) -> Rule:
    """One scan, at least, must take as many turns as the function of the arguments says."""

    def rule(program: Program, args: Arguments) -> str | None:
        turns = length(*args)
        return None if any(scan.params["length"] == turns for scan in program.find("scan")) else says

    return rule


def computes_in(name: str, size: Callable[..., int], says: str) -> Rule:
    """Outside of the operation (a scan, a shard_map) nothing is computed from so many numbers, or more, at once.

    Reshapes, slices, casts and copies are not computations.
    """

    def rule(program: Program, args: Arguments) -> str | None:
        large = size(*args)
        for operation in program.find(outside=name):
            # What holds a program, a loop or a call, computes nothing beside what is in it.
            if operation.name not in MOVES and not operation.bodies and operation.size >= large:
                return says
        return None

    return rule


def stacks_less_than(size: Callable[..., int], says: str, *, turns: Callable[..., int] | None = None) -> Rule:
    """No scan may put out, for all of its turns together, so many numbers or more beside what it carries.

    If the turns are given, one that is inside of another and has other turns may: it goes over a part of one turn.
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
    """Nothing is computed from more numbers at once than those of one microbatch, inside of a loop or outside.

    Args:
      size: of the arguments, the numbers in the largest array that the work on one microbatch has.
      says: what a learner reads.
      names: the operations that are looked at; all that compute, if none is named. Reshapes, slices, casts and
        copies do not.
      of: how the names of the dtypes begin that are looked at.
      but: of the arguments, a shape that may be larger, with its axes in any order.
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
                return f"{says}\nIn one {operation.name} there are {found} numbers; one microbatch has {most} at most."
        return None

    return rule


# Less than this of an answer's change is rounding.
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
    """All that the answer takes from some arguments must come through an operation: none of it may go around.

    The program is run again with other numbers in those arguments, while the operation keeps returning what it
    returned before. If the answer changes nevertheless, it was not the operation that made it. Nor may a scan of
    so many turns hand on what was made elsewhere: it is to be given those arguments, or each number of them prepared.

    Args:
      name: of the operation, as a learner reads it, and JAX's name of it: "scan", "shard_map".
      varied: the positions of the arguments; or a function of the arguments of a case that returns others.
      says: what a learner reads below the finding.
      names: JAX's names, if they differ from `name`, or are several.
      turns: of the arguments, how many turns the scan may take that is meant; any number if it is left out.
      may_hand_on: whether the scan may be given what was computed from those arguments before, as the second of two
        passes is.
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
        return f"What goes into the {name} was computed from the batch before: compute it inside of the {name}.\n{says}"

    return rule


def matters(
    name: str,
    says: str,
    *,
    selects: Sequence[Mapping[str, Any]] = (),
    least: float = 0.01,
    but: Sequence[int] = (),
) -> Rule:
    """The results of an operation must have an influence on every array of the answer.

    The program is run again with these results made 5% to 45% larger.

    Args:
      name: of the operation, as a learner reads it, and JAX's name of it.
      says: what a learner reads below the finding.
      selects: which operations are meant, if their name does not say it; see `Program.response`.
      least: by how much every array of the answer must change, as a part of it.
      but: the positions of arrays of the answer that need not change.
    """

    def rule(program: Program, args: Arguments) -> str | None:
        response = program.distorted(selects or [{"names": [name]}], args)
        changes = [0.0] if response is None else _changes(response.before, response.held)
        if all(change >= least for place, change in enumerate(changes) if place not in but):
            return None
        return f"{_without_influence(name)}\n{says}"

    return rule


def other_numbers(args: Arguments, *positions: int, rows: slice = slice(None)) -> Arguments:
    """Arguments with other numbers in the floating-point arrays at some positions, in some of their rows."""
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
    part = f"up to {max(shares):.0%} of it is computed beside it"
    return f"Part of the answer does not come from the {name}: {part}.\n{says}"


def _without_influence(name: str) -> str:
    return f"The {name} has no influence on the answer: it is in the program, and its result does not matter."


def _changes(before: Sequence[np.ndarray], held: Sequence[np.ndarray]) -> list[float]:
    found = []
    for one, other in zip(before, held, strict=True):
        moved = np.max(np.abs(other.astype(np.float64) - one), initial=0.0)
        size = np.max(np.abs(one.astype(np.float64)), initial=0.0)
        found.append(float("inf") if not np.isfinite(moved) else float(moved / size) if size else float(moved))
    return found


def computes_elsewhere(program: Program, args: Arguments) -> str | None:
    """Whether numbers come from Python code that the program calls back: nothing could be said of what that does."""
    if any(each.outputs for each in program.find("pure_callback", "io_callback")):
        return (
            "The program calls back into Python, where nobody sees what is computed.\n"
            "Write it with jax.numpy instead of numpy, without jax.pure_callback or io_callback. To look at a value, "
            "jax.debug.print is fine."
        )
    return None
