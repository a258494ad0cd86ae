"""The table of rules: for each primitive, how it treats the batch axis."""

from collections.abc import Callable, Sequence

from anybatch.reading.graph import Node
from anybatch.reading.reader import Outcome, Reader
from anybatch.reading.states import State

Rule = Callable[[Reader, Node, Sequence[State]], Outcome]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enters a function in the table, for the primitives of these names.

    It is called with the states of the operands, not all of which are whole and none of which is mixed. It
    returns the states of the outputs, or raises `NotRowwise`.
    """

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return enter
