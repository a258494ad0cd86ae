"""Which microbatch sizes are worth a thought.

Looks for the way that a user wants, with as few compilations as it takes.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from anybatch.planning.measure import TELLING, Bytes, Workbench, estimate
from anybatch.planning.strategy import Strategy, Variant

FAR = 1000  # sizes on either side of one that are looked at


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of microbatches for a batch, in multiples of a unit: the devices that its examples are spread over.

    >>> Sizes(10).all(), Sizes(48, unit=8).all()
    ([1, 2, 3, 4, 5, 10], [8, 16, 24, 48])
    """

    examples: int
    unit: int = 1

    def all(self) -> list[int]:
        """For each number of microbatches the smallest size that gives it, in ascending order.

        A larger size with as many microbatches takes more memory and no less time. Sizes that do not divide the
        batch are among them: their last microbatch is smaller.
        """
        found, size = [], self._units
        while size >= 1:
            found.append(size * self.unit)
            # The smallest number of microbatches that are smaller than these, and the smallest size with that number.
            size = 0 if size == 1 else math.ceil(self._units / ((self._units - 1) // (size - 1) + 1))
        return found[::-1]

    @property
    def _units(self) -> int:
        return self.examples // self.unit

    @property
    def smallest(self) -> int:
        return self.unit

    def preferred(self, size: int) -> int:
        """The size itself, or a little less if that divides the batch: one program then serves all microbatches.

        >>> Sizes(60).preferred(11), Sizes(60).preferred(14), Sizes(61).preferred(14)
        (10, 12, 14)
        """
        for smaller in range(size, max(math.ceil(0.8 * size), size - FAR * self.unit) - 1, -self.unit):
            if self.examples % smaller == 0:
                return smaller
        return size

    def is_worthwhile(self, size: int, instead_of: int, patience: int = 1) -> bool:
        """Whether a larger size is worth a compilation: it makes fewer microbatches, by a fifth, or no ragged one.

        Once patience is at its end, they must be fewer by half.

        >>> Sizes(60).is_worthwhile(11, 10), Sizes(60).is_worthwhile(12, 11), Sizes(60).is_worthwhile(15, 10)
        (False, True, True)
        """
        if size <= instead_of:
            return False
        number, current = math.ceil(self.examples / size), math.ceil(self.examples / instead_of)
        if patience <= 0:
            return number <= 0.5 * current
        return number <= 0.8 * current or (self.examples % size == 0 and self.examples % instead_of != 0)

    def steps_down(self, size: int) -> list[int]:
        """Sizes below one, each about half of the one before, dividing the batch where such a size is near.

        >>> Sizes(64).steps_down(64), Sizes(60).steps_down(20), Sizes(7).steps_down(7)
        ([32, 16, 8, 4, 2, 1], [10, 5, 3, 2, 1], [4, 2, 1])
        """
        steps = []
        while size > self.unit:
            size = self._nearest(size / 2, 0, size)
            steps.append(size)
        return steps

    def between(self, low: int, high: int) -> int | None:
        """A size in the middle between two others, if there is one.

        >>> Sizes(64).between(8, 16), Sizes(60).between(10, 20), Sizes(64).between(1, 2)
        (11, 15, None)
        """
        if high - low <= self.unit:
            return None
        return self._nearest(math.sqrt(low * high), low, high)

    def _nearest(self, wish: float, low: int, high: int) -> int:
        """The size strictly between two that is nearest to a wish, in ratio; one that divides the batch is nearer."""

        def distance(size: int) -> float:
            away = abs(math.log(size / wish))
            return away if self.examples % size == 0 else away + 0.25

        first, last = low // self.unit + 1, (high - 1) // self.unit
        middle = min(max(round(wish / self.unit), first), last)
        near = range(max(first, middle - FAR), min(last, middle + FAR) + 1)
        return min((size * self.unit for size in near), key=distance)


# Ways within this of the fastest count as fast: among them the one with the least memory is taken.
AS_FAST = 0.02
# Bytes within this of the least count as the least: among them the largest microbatch is taken.
AS_LEAN = 0.02

SLOWER = 1.05  # twice in a row: smaller sizes will be no faster
MUCH_SLOWER = 1.25
PATIENT = 3  # compilations in search of a larger size; after these, one must be larger by far to be worth another

CLOSE = 1.2  # those that run in the last race: what was measured one by one is known to a tenth or so
FIRST_ROUNDS, LAST_ROUNDS = 3, 15
PATIENCE = 2.0  # seconds for each way in the last race; three rounds there are always


class Search:
    """Sizes and policies of one gradient, under one budget."""

    def __init__(
        self,
        bench: Workbench,
        allowed: int | None,
        variants: Sequence[Variant] = (Variant(),),
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """A search.

        Args:
          bench: where ways are compiled and timed.
          allowed: the bytes that a way may take; None if nobody knows.
          variants: what may be decided beside the size, the one that costs least time first.
          notify: called with a text before each step that takes long.
        """
        self.bench, self.allowed, self.variants, self.notify = bench, allowed, tuple(variants), notify
        self.examples = bench.gradient.share  # the most in a microbatch
        self.sizes = Sizes(self.examples, bench.gradient.unit)
        self.predicted: dict[Strategy, int] = {}  # before it was compiled, from two others

    # What fits.

    @property
    def known(self) -> dict[Strategy, Bytes | None]:
        """The ways that may be taken and were compiled, here or by an earlier search that may have had more of them."""
        return {strategy: found for strategy, found in self.bench.bytes.items() if strategy.variant in self.variants}

    @property
    def seconds(self) -> dict[Strategy, float]:
        """Those of them that were timed."""
        return {strategy: each for strategy, each in self.bench.seconds.items() if strategy.variant in self.variants}

    def fits(self, strategy: Strategy, allowed: int | None = None) -> bool:
        """Whether a way fits the budget, or what else is allowed; it is compiled to find out."""
        limit = self.allowed if allowed is None else allowed
        if strategy not in self.bench.bytes:
            guess = self.on_line(strategy)
            if guess is not None:
                self.predicted[strategy] = guess
            self.notify(f"Compiling {strategy}")
        found = self.bench.bytes_of(strategy)
        return found is not None and (limit is None or found.total <= limit)

    def predict(self, strategy: Strategy) -> int:
        """The bytes of a way, about: those of others on a line, or else from the program of the loss."""
        on_line = self.on_line(strategy)
        if on_line is not None:
            return on_line
        points = self._points(strategy.variant, with_full=True)
        size = self._size(strategy)
        if points:
            known, found = points[0]
            return int(found.total - found.activations + found.activations * size / known)
        start, slope = estimate(self.bench.gradient)
        return int(start + slope * size)

    def on_line(self, strategy: Strategy) -> int | None:
        """The bytes on the line through the nearest sizes that were compiled: two, or three if there are as many."""
        points = self._points(strategy.variant, with_full=False)
        size = self._size(strategy)
        if len(points) < 2 or self._is_short(size):
            return None
        nearest = sorted(points, key=lambda point: abs(math.log(point[0] / size)))[:3]
        middle = statistics.fmean(each for each, _ in nearest)
        height = statistics.fmean(found.total for _, found in nearest)
        rise = sum((each - middle) * (found.total - height) for each, found in nearest)
        slope = max(0.0, rise / sum((each - middle) ** 2 for each, _ in nearest))
        # A line that is too steep would end below what no microbatch size changes. Activations are a fixed part and so
        # much for each example: at a smaller size no less than in proportion, at a larger one no less than there.
        least = max(
            found.total - found.activations + int(found.activations * min(1.0, size / each)) for each, found in points
        )
        return max(least, int(height + slope * (size - middle)))

    def _points(self, variant: Variant, *, with_full: bool) -> list[tuple[int, Bytes]]:
        points = [
            (self._size(strategy), found)
            for strategy, found in self.bench.bytes.items()
            if found is not None and strategy.variant == variant and self._size(strategy) < self.examples
        ]
        points = [point for point in points if not self._is_short(point[0])]
        full = self.bench.bytes.get(Strategy(self.examples, *variant))
        return [(self.examples, full)] if with_full and not points and full is not None else points

    def _is_short(self, size: int) -> bool:
        """Whether a size makes one whole microbatch and a ragged one: without a loop, XLA may overlap the two."""
        return self.examples // size == 1

    def _size(self, strategy: Strategy) -> int:
        return self.examples if strategy.microbatch_size is None else strategy.microbatch_size

    def largest_fitting(self, variant: Variant, allowed: int | None = None) -> Strategy | None:
        """The way with the largest microbatch that fits, give or take what is not worth a compilation."""
        limit = self.allowed if allowed is None else allowed
        if limit is None:
            return Strategy(self.examples, *variant)
        low, high, tried = 0, self.examples + 1, 0

        for strategy in list(self.bench.bytes):
            if strategy.variant == variant and strategy.microbatch_size is not None:
                if self.fits(strategy, limit):
                    low = max(low, strategy.microbatch_size)
                else:
                    high = min(high, strategy.microbatch_size)
        while True:
            between = [size for size in self.sizes.all() if low < size < high]
            hopeful = [size for size in between if self.predict(Strategy(size, *variant)) <= limit]
            if hopeful:
                size = max(low + self.sizes.unit, self.sizes.preferred(hopeful[-1]))
                if low and not self.sizes.is_worthwhile(size, instead_of=low, patience=PATIENT - tried):
                    break
            elif low or not between:
                break
            else:
                size = between[0]  # what is predicted may be wrong
            tried += 1
            if self.fits(Strategy(size, *variant), limit):
                low = size
            else:
                high = size
        return Strategy(low, *variant) if low else None

    def likely_fitting(self) -> Strategy:
        """The largest that fits as far as one can tell without compiling anything."""
        strategies = [Strategy(size, *self.variants[0]) for size in self.sizes.all()]
        likely = [strategy for strategy in strategies if self.allowed is None or self.predict(strategy) <= self.allowed]
        return max(likely or strategies[:1], key=self._size)

    def any_fitting(self) -> Strategy | None:
        """The largest that fits, without computing anything twice if that can be."""
        return next((strategy for strategy in map(self.largest_fitting, self.variants) if strategy is not None), None)

    def is_limiting(self, strategy: Strategy) -> bool:
        """Whether the budget, rather than the clock, keeps a way from a larger microbatch."""
        larger = [other for other in self.known if self._size(other) > self._size(strategy)]
        return not self.bench.gradient.is_at_once(strategy) and not any(map(self.fits, larger))

    def look_around(self, chosen: Strategy | None, *, timed: bool) -> None:
        """Compiles what it takes to draw the line, all at once, and the policies: to be shown, not to decide."""
        ladder = [self.examples, *self.sizes.steps_down(self.examples)]
        variant = self.variants[0]
        self.fits(Strategy(self.examples, *variant))
        for size in (ladder[len(ladder) // 3], ladder[2 * len(ladder) // 3]):
            if len(self._points(variant, with_full=False)) < 2:
                self.fits(Strategy(size, *variant))
        if self.bench.gradient.is_coupled:  # what it computes from the whole batch at once does not lie on the line
            self.fits(Strategy(self.sizes.smallest, *variant))
        size = self.sizes.smallest if chosen is None else self._size(chosen)
        for strategy in (Strategy(size, *variant) for variant in self.variants):
            if self.fits(strategy) and timed:
                self._time(strategy)

    # What is lean.

    def leanest(self) -> Strategy | None:
        """The way with the least memory; of those about as lean, the one with the largest microbatch."""
        smallest = [
            strategy
            for strategy in (Strategy(self.sizes.smallest, *variant) for variant in self.variants)
            if self.fits(strategy)
        ]
        if not smallest:
            return None

        def total(strategy: Strategy) -> int:
            found = self.bench.bytes[strategy]
            assert found is not None
            return found.total

        lean = int(min(map(total, smallest)) * (1 + AS_LEAN))
        best = next(strategy for strategy in smallest if total(strategy) <= lean)  # the one that keeps most
        return self.largest_fitting(best.variant, allowed=lean) or best

    # What is fast.

    def fastest(self) -> Strategy | None:
        """The way that takes the least time on the device; of those about as fast, the one with the least memory."""
        top = self.largest_fitting(self.variants[0])
        if top is not None:
            self._descend(top)
        # What is computed twice takes longer: it pays only where memory keeps the microbatches small.
        more = self.variants[1:]
        if top is not None and self.bench.gradient.is_at_once(top):
            more = tuple(variant for variant in more if variant.method != top.method)
        for variant in more:
            lean = self.largest_fitting(variant)
            if lean is not None:
                self._descend(lean)
        if not self.in_time():
            return None
        seconds = self.bench.seconds
        for strategy in self._around(min(self.in_time(), key=seconds.__getitem__)):
            if self.fits(strategy):
                self._time(strategy)
        best = min(self.in_time(), key=seconds.__getitem__)
        close = [strategy for strategy in self.in_time() if seconds[strategy] <= CLOSE * seconds[best]]
        self._race(close, best)
        chosen = self._leanest_of_the_fast(close)
        smaller = [strategy for strategy in self._around(chosen) if self._size(strategy) < self._size(chosen)]
        finer = [strategy for strategy in smaller if strategy not in seconds and self.fits(strategy)]
        if finer:  # the knee may lie between two sizes
            fastest = min(close, key=seconds.__getitem__)
            self._race([*finer, *dict.fromkeys((chosen, fastest))], fastest)
            chosen = self._leanest_of_the_fast([*close, *finer])
        return chosen

    def _race(self, strategies: Sequence[Strategy], reference: Strategy) -> None:
        """Times some ways against each other, and tells all that was timed before as if it had been now."""
        seconds = self.bench.seconds
        if len(strategies) > 1:
            self.notify(f"Timing the {len(strategies)} fastest")
            rounds = min(LAST_ROUNDS, max(3, int(PATIENCE / max(seconds[reference], TELLING))))
            raced = self.bench.race(strategies, rounds)
            # Devices become slower as they become warm.
            change = raced[reference] / seconds[reference] if math.isfinite(raced[reference]) else 1.0
            seconds.update({strategy: each * change for strategy, each in seconds.items()} | raced)

    def _leanest_of_the_fast(self, strategies: Sequence[Strategy]) -> Strategy:
        seconds = self.bench.seconds
        fastest = min(seconds[strategy] for strategy in strategies)
        as_fast = [strategy for strategy in strategies if seconds[strategy] <= (1 + AS_FAST) * fastest]
        return min(as_fast, key=lambda strategy: (self._total(strategy), self._size(strategy)))

    def in_time(self) -> list[Strategy]:
        """The ways that were timed and fit."""
        return [strategy for strategy, each in self.seconds.items() if math.isfinite(each) and self.fits(strategy)]

    def _descend(self, top: Strategy) -> None:
        """Times the largest size, then ever smaller ones, until they only become slower."""
        slower = 0
        for size in (self._size(top), *self.sizes.steps_down(self._size(top))):
            strategy = Strategy(size, *top.variant)
            if not self.fits(strategy):
                continue
            ratio = self._time(strategy) / self._least_seconds()
            slower = slower + 1 if ratio > SLOWER else 0
            if slower == 2 or ratio > MUCH_SLOWER:
                return

    def _around(self, best: Strategy) -> list[Strategy]:
        """Sizes between the best and its neighbours."""
        timed = sorted(self._size(strategy) for strategy in self.bench.seconds if strategy.variant == best.variant)
        place = timed.index(self._size(best))
        neighbours = [timed[place - 1 : place + 1], timed[place : place + 2]]
        between = []
        for pair in neighbours:
            size = self.sizes.between(*pair) if len(pair) == 2 else None
            if size is not None:
                between.append(Strategy(size, *best.variant))
        return between

    def _time(self, strategy: Strategy) -> float:
        """The seconds of a way, measured beside the fastest so far, and told as if both were timed when that was."""
        seconds = self.bench.seconds
        if strategy in seconds:
            return seconds[strategy]
        self.notify(f"Timing {strategy}")
        known = {other: each for other, each in self.seconds.items() if math.isfinite(each)}
        best = min(known, key=known.__getitem__, default=None)
        taken = self.bench.race([strategy] if best is None else [best, strategy], FIRST_ROUNDS)
        if best is None or not math.isfinite(taken[best]):
            seconds.update(taken)
        else:
            seconds[strategy] = known[best] * taken[strategy] / taken[best]
        return seconds[strategy]

    def _least_seconds(self) -> float:
        return min(self.seconds.values())

    def _total(self, strategy: Strategy) -> int:
        found = self.bench.bytes[strategy]
        return 0 if found is None else found.total
