"""What became of one check."""

import dataclasses
from typing import Any

STAGES = (
    *("file", "signature", "run", "structure", "shape", "value", "errors", "invariance", "differences"),
    *("program", "memory", "collectives", "limits"),
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of one check.

    Args:
      exercise: its name.
      passed: whether everything holds.
      stage: the one of `STAGES` that failed first; empty if none did.
      title: the finding, in one line.
      text: an explanation, of several lines.
      mistake: the name of a known mistake.
      line: where, in the learner's file.
      source_line: what stands there.
      prints: what the learner's code printed, its beginning.
      prints_dropped: how many bytes of that are not shown.
      seconds: how long it took.
      seed: of the cases, to have the same ones again.
      done: the stages that were passed, and what was seen there.
      started: False while the exercise is as it was given.
    """

    exercise: str
    passed: bool
    stage: str = ""
    title: str = ""
    text: str = ""
    mistake: str | None = None
    line: int | None = None
    source_line: str | None = None
    prints: str = ""
    prints_dropped: int = 0
    seconds: float = 0.0
    seed: int = 0
    done: tuple[tuple[str, str], ...] = ()
    started: bool = True

    def as_json(self) -> dict[str, Any]:
        """As plain data, for other programs."""
        return dataclasses.asdict(self) | {"done": [list(each) for each in self.done]}
