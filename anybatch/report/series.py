"""Columns of a history as curves: what is missing is a gap, what is too long is thinned, what is noisy is smoothed."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MOST_POINTS = 1000
LARGEST = 1e100  # beyond it, and below its inverse, differences and ratios overflow; nobody could read them either


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """A curve: for each step a value, NaN where there is a gap."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def is_known(self) -> np.ndarray:
        """Where there is no gap."""
        return np.isfinite(self.values)

    @property
    def known(self) -> "Series":
        """The same without its gaps."""
        return Series(self.steps[self.is_known], self.values[self.is_known])

    def __len__(self) -> int:
        return len(self.steps)


def number(value: Any) -> float:
    """A cell of a history as a float; NaN if it is no number.

    >>> number("1.5"), number(None)
    (1.5, nan)
    """
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def column(history: Sequence[Mapping[str, Any]], name: str) -> Series:
    """The column of that name, in the order of the steps.

    A row without the column is left out: it was not asked for there. One whose value is None, NaN or infinite is a gap.

    >>> rows = [{"step": 2, "loss": None}, {"step": 1, "loss": 3.0}, {"step": 3}]
    >>> column(rows, "loss").steps.tolist(), column(rows, "loss").values.tolist()
    ([1.0, 2.0], [3.0, nan])
    """
    steps, values = [], []
    for place, row in enumerate(history, start=1):
        if name in row:
            step = number(row.get("step"))
            steps.append(step if math.isfinite(step) else float(place))
            values.append(number(row[name]))
    order = np.argsort(steps, kind="stable")
    array = np.array(values, float)[order]
    return Series(np.array(steps, float)[order], np.where(np.isfinite(array), array, np.nan))


def drawable(values: np.ndarray) -> np.ndarray:
    """The values that can be added and divided: what is too large is cut, what is too small is 0.

    >>> drawable(np.array([1e300, 2.0, 1e-300])).tolist()
    [1e+100, 2.0, 0.0]
    """
    return np.where(np.abs(values) < 1 / LARGEST, 0.0, np.clip(values, -LARGEST, LARGEST))


def is_rate(name: str) -> bool:
    """Whether a column is a speed. Nobody knows that of the first step, which is no failure."""
    return name.endswith("_per_second")


def thinned(series: Series, most: int = MOST_POINTS) -> Series:
    """At most about as many points: of each stretch the lowest and the highest, so that no spike is lost.

    The first stretch is divided further, each part twice as long as the one before: a loss falls most steeply there,
    and a straight line over all of it would lie above the values.

    >>> long = Series(np.arange(100_000.0), np.zeros(100_000))
    >>> long.values[777] = 5.0
    >>> len(thinned(long)) <= MOST_POINTS + 2, float(thinned(long).values.max())
    (True, 5.0)
    """
    if len(series) <= most:
        return series
    kept = {0, len(series) - 1}
    known = series.is_known
    parts = 2 ** np.arange(int(math.log2(2 * len(series) / most)))
    edges = np.union1d(np.linspace(0, len(series), most // 2 + 1 - len(parts)).astype(int), parts)
    for start, stop in itertools.pairwise(edges):
        places = start + np.flatnonzero(known[start:stop])
        if len(places):
            stretch = series.values[places]
            kept |= {int(places[np.argmin(stretch)]), int(places[np.argmax(stretch)])}
        else:
            kept.add(int(start))  # a gap that is seen
    places = np.array(sorted(kept))
    return Series(series.steps[places], series.values[places])


def smoothed(series: Series, share: float = 0.02) -> Series:
    """Moving averages of moving averages, almost a bell: without a lag, and gaps stay gaps.

    It begins at the first value. From there windows grow in proportion to the place, and are symmetric: a longer arm to
    the right would let the curve begin too low, and one that reaches back to the first values, where a loss falls most
    steeply, would hold it above all others for long.

    Args:
      series: the curve.
      share: of its length, on each side of a point.
    """
    length = len(series)
    places = np.arange(length)
    radius = np.minimum(places // 4, max(1, round(share * length)))
    first, last = places - radius, np.minimum(places + radius, length - 1)
    values, known = drawable(series.values), series.is_known
    for _ in range(3):
        totals = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
        counts = np.concatenate([[0], np.cumsum(known)])
        # Where nothing is known the count is 0; that place is a gap anyway.
        values = (totals[last + 1] - totals[first]) / np.maximum(counts[last + 1] - counts[first], 1)
    return Series(series.steps, np.where(known, values, np.nan))
