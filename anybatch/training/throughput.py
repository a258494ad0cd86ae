"""How fast a run goes, known from when its figures are read."""

import collections
import math
import time
from typing import NamedTuple

# Rates are those of so many seconds.
WINDOW = 2.0


class Amount(NamedTuple):
    """What was done."""

    examples: int
    tokens: int


class Throughput:
    """Examples and tokens per second.

    Nobody sees when a step ends on the device: its figures are read some steps later, at an even pace. So the pace is
    that of the readings. Where all that is under way is waited for, to evaluate or to save, the readings come all at
    once and say nothing; but then it is known that everything since the last such time is done.
    """

    def __init__(self) -> None:
        self._total = Amount(0, 0)
        self._read: collections.deque[tuple[float, Amount]] = collections.deque()
        self._since: tuple[float, Amount] | None = None  # when work went on after everything had been done
        self._last = (math.nan, math.nan)

    def go_on(self, *, examples: int = 0, tokens: int = 0) -> None:
        """Everything before is done, and work goes on from here.

        Args:
          examples: what is under way, and not to count: the first step, which was compiled.
          tokens: likewise.
        """
        under_way = Amount(self._total.examples + examples, self._total.tokens + tokens)
        self._since = (time.perf_counter(), under_way)
        self._read.clear()

    def add(self, examples: int, tokens: int) -> None:
        """One more step is done."""
        self._total = Amount(self._total.examples + examples, self._total.tokens + tokens)

    def at_a_reading(self) -> tuple[float, float]:
        """The rates after a step whose figures were read in their turn."""
        now = time.perf_counter()
        while len(self._read) > 1 and now - self._read[1][0] > WINDOW:
            self._read.popleft()
        if self._read:
            self._last = self._between(self._read[0], (now, self._total))
        self._read.append((now, self._total))
        return self._last

    def when_all_is_done(self) -> tuple[float, float]:
        """The rates since work went on last."""
        if self._since is not None and self._total.examples > self._since[1].examples:
            self._last = self._between(self._since, (time.perf_counter(), self._total))
        return self._last

    def _between(self, then: tuple[float, Amount], now: tuple[float, Amount]) -> tuple[float, float]:
        seconds = max(now[0] - then[0], 1e-9)
        return (now[1].examples - then[1].examples) / seconds, (now[1].tokens - then[1].tokens) / seconds
