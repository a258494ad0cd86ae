"""Rules on the program of a function, to be named in `Check.program`; each takes the sentence that a learner reads."""

from collections.abc import Callable

from anybatch.learn.check import Arguments, Rule
from anybatch.learn.program import Program

# These move numbers or make constants; everything else computes.
MOVES = frozenset(
    (
        *("reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice", "copy"),
        *("convert_element_type", "concatenate", "rev", "iota", "device_put", "sharding_constraint", "copy_p"),
        *("dynamic_update_slice", "split", "stop_gradient", "optimization_barrier", "select_n", "pvary", "pad"),
        *("gather", "scatter", "stack", "tile", "reshard", "pbroadcast", "pcast"),
    )
)


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


def stacks_less_than(size: Callable[..., int], says: str) -> Rule:
    """No scan may put out, for all of its turns together, so many numbers or more beside what it carries."""

    def rule(program: Program, args: Arguments) -> str | None:
        large = size(*args)
        stacked = (sum(array.size for array in scan.stacked) for scan in program.find("scan"))
        return says if any(total >= large for total in stacked) else None

    return rule


def computes_elsewhere(program: Program, args: Arguments) -> str | None:
    """Whether numbers come from Python code that the program calls back: nothing could be said of what that does."""
    if any(each.outputs for each in program.find("pure_callback", "io_callback")):
        return (
            "The program calls back into Python, where nobody sees what is computed.\n"
            "Write it with jax.numpy instead of numpy, without jax.pure_callback or io_callback. To look at a value, "
            "jax.debug.print is fine."
        )
    return None
