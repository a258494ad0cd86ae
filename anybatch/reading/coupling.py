"""Why an equation cannot be computed per microbatch, and the source line to blame for it.

A rule that refuses an equation raises `NotRowwise`, with a reason in words and, where other code treats it differently,
a member of `Coupling`. The reading keeps it as a `Blame`: the user's line, the primitive and the reason.
"""

import dataclasses
import enum
from typing import Any

from anybatch.errors import AnybatchError
from anybatch.jaxprs import source
from anybatch.jaxprs.graph import Node


class Coupling(enum.StrEnum):
    """The reasons that other code tells apart. The value is the text for reasons that need no details."""

    FED_BACK = "it combines each example with a sum or mean over the batch"
    NOT_LINEAR = "it is not linear in a sum over the batch"
    NO_RULE = "there is no rule for its primitive"
    RULE_FAILED = "the rule for its primitive failed"
    OTHER = "it combines examples"


@dataclasses.dataclass(frozen=True)
class Blame:
    """A source line that combines examples, so that it cannot be computed per microbatch."""

    file: str
    line: int
    function: str
    primitive: str
    why: str
    inside: str = ""  # the library function that the line calls, if the equation is not of the line itself
    reason: Coupling = Coupling.OTHER

    @property
    def place(self) -> str:
        """File and line, in the form that editors and terminals turn into a link."""
        return f"{self.file}:{self.line}" if self.file else "an unknown line"

    def __str__(self) -> str:
        inside = f", inside {self.inside}" if self.inside else ""
        function = f" in {self.function}" if self.function else ""
        return f"{self.place}{function} ({self.primitive}{inside}): {self.why}"


def blame(node: Node, why: str, reason: Coupling = Coupling.OTHER) -> Blame:
    """Blames the user's line that a node comes from."""
    place = source.locate(node)
    return Blame(place.file, place.line, place.function, node.name, why, place.inside, reason)


class NotRowwise(Exception):
    """Raised by a rule: the equation cannot be computed microbatch by microbatch.

    Args:
      why: the reason, in words for the user; or a `Coupling`, whose text is used.
      reason: the reason as a `Coupling`, where `why` is a text.
      blame: the line to blame, if it is known better than the line of the equation at hand.
      unroll: whether unrolling the loop or inlining the function at hand may help.
    """

    def __init__(
        self, why: str, *, reason: Coupling = Coupling.OTHER, blame: Blame | None = None, unroll: bool = True
    ) -> None:
        super().__init__(str(why))
        self.why = str(why)
        self.reason = why if isinstance(why, Coupling) else reason
        self.blame, self.unroll = blame, unroll


class RuleFailed(AnybatchError):
    """Raised while a microbatch is computed: the rule accepted an equation that then could not be computed.

    Args:
      blame: the line, and what happened.
    """

    def __init__(self, blame: Any) -> None:
        super().__init__(str(blame))
        self.blame = blame


def failure_of(primitive: str, error: Exception) -> str:
    """The reason to give for an equation whose rule raised an unexpected error."""
    return f"the rule for the primitive {primitive!r} failed ({type(error).__name__}: {error})"
