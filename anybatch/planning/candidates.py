"""Searches for a strategy: candidate microbatch sizes, and which of them to compile and time.

`Sizes` lists the microbatch sizes of a batch. `StrategySearch` finds the largest size that fits into memory, the
leanest strategy or the fastest one, with as few compilations as possible: it predicts the memory of a size from those
that were compiled before.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from anybatch.planning.measure import MIN_TURN_SECONDS, Bytes, Measurements, estimate
from anybatch.planning.strategy import Strategy, Variant

V = TypeVar("V")

# How many sizes above and below a given one are considered.
NEIGHBOURS = 1000

# Compilations in search of a larger size that fits. After these, a size must be twice as large to be worth another.
SIZE_TRIALS = 3

# Strategies within this share of the fastest count as equally fast; the leanest of them is chosen.
AS_FAST = 0.02
# Strategies within this share of the least memory count as equally lean; the largest microbatch of them is chosen.
AS_LEAN = 0.02

# Smaller sizes are tried until two in a row are slower than the best by SLOWER, or one by MUCH_SLOWER.
SLOWER = 1.05
MUCH_SLOWER = 1.25

# Times that were measured one by one are known to about a tenth. So strategies within CLOSE of the best are timed
# again, in one last race of 3 to LAST_ROUNDS rounds, which should take FINAL_SECONDS for each strategy.
CLOSE = 1.2
FIRST_ROUNDS, LAST_ROUNDS = 3, 15
FINAL_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The candidate microbatch sizes of a batch: multiples of the number of devices that it is sharded over.

    >>> Sizes(10).all(), Sizes(48, size_multiple=8).all()
    ([1, 2, 3, 4, 5, 10], [8, 16, 24, 48])
    """

    examples: int
    size_multiple: int = 1

    def all(self) -> list[int]:
        """For each number of microbatches the smallest size that gives it, in ascending order.

        A larger size with the same number of microbatches takes more memory and no less time. Some of these sizes do
        not divide the batch: then the last microbatch is smaller.
        """
        multiples = self.examples // self.size_multiple
        found, size = [], multiples
        while size >= 1:
            found.append(size * self.size_multiple)
            # The next larger number of microbatches that a smaller size gives, and the smallest size with that number.
            size = 0 if size == 1 else math.ceil(multiples / ((multiples - 1) // (size - 1) + 1))
        return found[::-1]

    @property
    def smallest(self) -> int:
        return self.size_multiple

    def preferred(self, size: int) -> int:
        """The largest divisor of the batch between 80% of `size` and `size`, or else `size` itself.

        With a divisor all microbatches have the same shape, and one program serves them all.

        >>> Sizes(60).preferred(11), Sizes(60).preferred(14), Sizes(61).preferred(14)
        (10, 12, 14)
        """
        least = max(math.ceil(0.8 * size), size - NEIGHBOURS * self.size_multiple)
        for smaller in range(size, least - 1, -self.size_multiple):
            if self.examples % smaller == 0:
                return smaller
        return size

    def is_worthwhile(self, size: int, instead_of: int, trials_left: int = 1) -> bool:
        """True if a larger size is worth a compilation: it saves a fifth of the microbatches, or a ragged one.

        Once no trials are left, it must save half of the microbatches.

        >>> Sizes(60).is_worthwhile(11, 10), Sizes(60).is_worthwhile(12, 11), Sizes(60).is_worthwhile(15, 10)
        (False, True, True)
        """
        if size <= instead_of:
            return False
        number, current = math.ceil(self.examples / size), math.ceil(self.examples / instead_of)
        if trials_left <= 0:
            return number <= 0.5 * current
        return number <= 0.8 * current or (self.examples % size == 0 and self.examples % instead_of != 0)

    def steps_down(self, size: int) -> list[int]:
        """Sizes below `size`, each about half of the one before, and divisors of the batch where one is near.

        >>> Sizes(64).steps_down(64), Sizes(60).steps_down(20), Sizes(7).steps_down(7)
        ([32, 16, 8, 4, 2, 1], [10, 5, 3, 2, 1], [4, 2, 1])
        """
        steps = []
        while size > self.size_multiple:
            size = self._nearest(size / 2, 0, size)
            steps.append(size)
        return steps

    def between(self, low: int, high: int) -> int | None:
        """A size halfway between two others; None if there is none.

        >>> Sizes(64).between(8, 16), Sizes(60).between(10, 20), Sizes(64).between(1, 2)
        (11, 15, None)
        """
        if high - low <= self.size_multiple:
            return None
        return self._nearest(math.sqrt(low * high), low, high)

    def _nearest(self, target: float, low: int, high: int) -> int:
        """The size between `low` and `high`, both excluded, nearest to `target` by ratio. Divisors count as nearer."""

        def distance(size: int) -> float:
            ratio = abs(math.log(size / target))
            return ratio if self.examples % size == 0 else ratio + 0.25

        first, last = low // self.size_multiple + 1, (high - 1) // self.size_multiple
        middle = min(max(round(target / self.size_multiple), first), last)
        near = range(max(first, middle - NEIGHBOURS), min(last, middle + NEIGHBOURS) + 1)
        return min((size * self.size_multiple for size in near), key=distance)


class StrategySearch:
    """Searches the strategies of one gradient, within one memory budget."""

    def __init__(
        self,
        measurements: Measurements,
        allowed: int | None,
        variants: Sequence[Variant] = (Variant(),),
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Searches among `variants`, of which the first takes the least time, within the `allowed` bytes, if known.

        `notify` is called with a text before each step that takes long.
        """
        self.measurements, self.allowed, self.variants, self.notify = measurements, allowed, tuple(variants), notify
        self.examples = measurements.gradient.max_microbatch_size
        self.sizes = Sizes(self.examples, measurements.gradient.size_multiple)
        self.predicted: dict[Strategy, int] = {}  # bytes, as predicted before the strategy was compiled

    @property
    def compiled(self) -> dict[Strategy, Bytes | None]:
        """The bytes of the strategies compiled so far, here or by an earlier search; None where compiling failed."""
        return self._of_variants(self.measurements.bytes)

    @property
    def seconds(self) -> dict[Strategy, float]:
        """The seconds of the strategies timed so far; infinite where one ran out of memory."""
        return self._of_variants(self.measurements.seconds)

    def _of_variants(self, measured: dict[Strategy, V]) -> dict[Strategy, V]:
        """What was measured, without the variants of an earlier search that are not among those of this one."""
        return {strategy: each for strategy, each in measured.items() if strategy.variant in self.variants}

    # Memory: which strategies fit.

    def fits(self, strategy: Strategy, allowed: int | None = None) -> bool:
        """True if a strategy fits the budget, or `allowed`. Compiles it if necessary."""
        limit = self.allowed if allowed is None else allowed
        if strategy not in self.measurements.bytes:
            guess = self.interpolate(strategy)
            if guess is not None:
                self.predicted[strategy] = guess
            self.notify(f"Compiling {strategy}")
        found = self.measurements.bytes_of(strategy)
        return found is not None and (limit is None or found.total <= limit)

    def predict(self, strategy: Strategy) -> int:
        """The approximate bytes of a strategy: from compiled sizes if there are any, or else from the jaxpr."""
        interpolated = self.interpolate(strategy)
        if interpolated is not None:
            return interpolated
        points = self._points(strategy.variant, with_full=True)
        size = self._size(strategy)
        if points:
            compiled_size, found = points[0]
            return int(found.total - found.activations + found.activations * size / compiled_size)
        start, slope = estimate(self.measurements.gradient)
        return int(start + slope * size)

    def interpolate(self, strategy: Strategy) -> int | None:
        """The bytes on a line fitted to the nearest 2 or 3 compiled sizes; None if fewer than 2 are known."""
        points = self._points(strategy.variant, with_full=False)
        size = self._size(strategy)
        if len(points) < 2 or self._has_one_complete_microbatch(size):
            return None
        nearest = sorted(points, key=lambda point: abs(math.log(point[0] / size)))[:3]
        sizes, totals = [each for each, _ in nearest], [found.total for _, found in nearest]
        slope = max(0.0, statistics.linear_regression(sizes, totals).slope)
        # A steep line would fall below the bytes that no microbatch size changes. Activations have a fixed part and a
        # part for each example. So at a smaller size they take at least their share, and at a larger size no less.
        least = max(
            found.total - found.activations + int(found.activations * min(1.0, size / each)) for each, found in points
        )
        return max(least, int(statistics.fmean(totals) + slope * (size - statistics.fmean(sizes))))

    def _points(self, variant: Variant, *, with_full: bool) -> list[tuple[int, Bytes]]:
        """The compiled sizes of a variant, with their bytes. The full batch only if asked for, and nothing else is."""
        points = [
            (self._size(strategy), found)
            for strategy, found in self.measurements.bytes.items()
            if found is not None and strategy.variant == variant and self._size(strategy) < self.examples
        ]
        points = [point for point in points if not self._has_one_complete_microbatch(point[0])]
        full = self.measurements.bytes.get(Strategy(self.examples, *variant))
        return [(self.examples, full)] if with_full and not points and full is not None else points

    def _has_one_complete_microbatch(self, size: int) -> bool:
        """True if a size gives one complete microbatch and a ragged one. Without a loop, XLA may overlap the two."""
        return self.examples // size == 1

    def _size(self, strategy: Strategy) -> int:
        return self.examples if strategy.microbatch_size is None else strategy.microbatch_size

    def _total(self, strategy: Strategy) -> int:
        found = self.measurements.bytes[strategy]
        return 0 if found is None else found.total

    def largest_fitting(self, variant: Variant, allowed: int | None = None) -> Strategy | None:
        """The strategy with about the largest microbatch that fits; None if none does.

        A slightly larger size may fit as well, if it was not worth a compilation.
        """
        limit = self.allowed if allowed is None else allowed
        if limit is None:
            return Strategy(self.examples, *variant)
        low, high, trials = 0, self.examples + 1, 0  # low fits, high does not
        for strategy in list(self.measurements.bytes):
            if strategy.variant == variant and strategy.microbatch_size is not None:
                if self.fits(strategy, limit):
                    low = max(low, strategy.microbatch_size)
                else:
                    high = min(high, strategy.microbatch_size)
        while True:
            between = [size for size in self.sizes.all() if low < size < high]
            hopeful = [size for size in between if self.predict(Strategy(size, *variant)) <= limit]
            if hopeful:
                size = max(low + self.sizes.size_multiple, self.sizes.preferred(hopeful[-1]))
                if low and not self.sizes.is_worthwhile(size, instead_of=low, trials_left=SIZE_TRIALS - trials):
                    break
            elif low or not between:
                break
            else:
                size = between[0]  # the prediction may be wrong
            trials += 1
            if self.fits(Strategy(size, *variant), limit):
                low = size
            else:
                high = size
        return Strategy(low, *variant) if low else None

    def first_fitting(self, reserve: int = 0) -> Strategy | None:
        """The largest microbatch of the first variant for which one fits, with `reserve` bytes to spare; or None."""
        allowed = None if self.allowed is None else self.allowed - reserve
        fitting = (self.largest_fitting(variant, allowed) for variant in self.variants)
        return next((strategy for strategy in fitting if strategy is not None), None)

    def likely_fitting(self) -> Strategy:
        """The largest strategy that is predicted to fit. Compiles nothing."""
        strategies = [Strategy(size, *self.variants[0]) for size in self.sizes.all()]
        likely = [strategy for strategy in strategies if self.allowed is None or self.predict(strategy) <= self.allowed]
        return max(likely or strategies[:1], key=self._size)

    def is_limited_by_memory(self, strategy: Strategy) -> bool:
        """True if no larger compiled microbatch fits: the budget decided, not the time."""
        larger = [other for other in self.compiled if self._size(other) > self._size(strategy)]
        return not self.measurements.gradient.is_full_batch(strategy) and not any(map(self.fits, larger))

    def leanest(self) -> Strategy | None:
        """The strategy with the least memory; of those about as lean, the one with the largest microbatch."""
        smallest = [each for variant in self.variants if self.fits(each := Strategy(self.sizes.smallest, *variant))]
        if not smallest:
            return None
        lean = int(min(map(self._total, smallest)) * (1 + AS_LEAN))
        best = next(strategy for strategy in smallest if self._total(strategy) <= lean)  # it recomputes the least
        return self.largest_fitting(best.variant, allowed=lean) or best

    # Time: which strategy is fastest.

    def fastest(self) -> Strategy | None:
        """The strategy that takes the least time; of those about as fast, the one with the least memory."""
        top: Strategy | None = None
        for number, variant in enumerate(self.variants):
            # Recomputing activations takes longer, and so may blocks: they pay only where microbatches are small.
            if top is not None and self.measurements.gradient.is_full_batch(top):
                if variant.method == top.method or variant.block_size != top.block_size:
                    continue
            largest = self.largest_fitting(variant)
            if largest is not None:
                self._time_downwards(largest)
            top = largest if number == 0 else top
        if not self.timed_and_fitting():
            return None
        seconds = self.measurements.seconds
        for strategy in self._around(min(self.timed_and_fitting(), key=seconds.__getitem__)):
            if self.fits(strategy):
                self._time(strategy)
        timed = self.timed_and_fitting()
        best = min(timed, key=seconds.__getitem__)
        close = [strategy for strategy in timed if seconds[strategy] <= CLOSE * seconds[best]]
        self._race(close, best)
        chosen = self._leanest_of_the_fast(close)
        smaller = [strategy for strategy in self._around(chosen) if self._size(strategy) < self._size(chosen)]
        finer = [strategy for strategy in smaller if strategy not in seconds and self.fits(strategy)]
        if finer:  # a size between two that were timed may be as fast and leaner
            fastest = min(close, key=seconds.__getitem__)
            self._race([*finer, *dict.fromkeys((chosen, fastest))], fastest)
            chosen = self._leanest_of_the_fast([*close, *finer])
        return chosen

    def timed_and_fitting(self) -> list[Strategy]:
        return [strategy for strategy, each in self.seconds.items() if math.isfinite(each) and self.fits(strategy)]

    def _time_downwards(self, top: Strategy) -> None:
        """Times a strategy, then ever smaller microbatches, until they only become slower."""
        slower = 0
        for size in (self._size(top), *self.sizes.steps_down(self._size(top))):
            strategy = Strategy(size, *top.variant)
            if not self.fits(strategy):
                continue
            ratio = self._time(strategy) / min(self.seconds.values())
            slower = slower + 1 if ratio > SLOWER else 0
            if slower == 2 or ratio > MUCH_SLOWER:
                return

    def _time(self, strategy: Strategy) -> float:
        """The seconds of a strategy.

        It runs in turns with the fastest so far, and its time is scaled by how that one's time has changed since it was
        first measured: all times in the table are then comparable.
        """
        seconds = self.measurements.seconds
        if strategy in seconds:
            return seconds[strategy]
        self.notify(f"Timing {strategy}")
        known = {other: each for other, each in self.seconds.items() if math.isfinite(each)}
        best = min(known, key=known.__getitem__, default=None)
        raced = self.measurements.race([strategy] if best is None else [best, strategy], FIRST_ROUNDS)
        if best is None or not math.isfinite(raced[best]):
            seconds.update(raced)
        else:
            seconds[strategy] = known[best] * raced[strategy] / raced[best]
        return seconds[strategy]

    def _around(self, best: Strategy) -> list[Strategy]:
        """Strategies halfway between the best size and the next smaller and larger ones that were timed."""
        seconds = self.measurements.seconds
        timed = sorted(self._size(strategy) for strategy in seconds if strategy.variant == best.variant)
        pairs = [pair for pair in itertools.pairwise(timed) if self._size(best) in pair]
        between = [self.sizes.between(*pair) for pair in pairs]
        return [Strategy(size, *best.variant) for size in between if size is not None]

    def _race(self, strategies: Sequence[Strategy], reference: Strategy) -> None:
        """Times strategies in turns, and scales all earlier times by how that of `reference` has changed."""
        seconds = self.measurements.seconds
        if len(strategies) > 1:
            self.notify(f"Timing the {len(strategies)} fastest")
            rounds = min(LAST_ROUNDS, max(3, int(FINAL_SECONDS / max(seconds[reference], MIN_TURN_SECONDS))))
            raced = self.measurements.race(strategies, rounds)
            # Devices become slower as they become warm.
            change = raced[reference] / seconds[reference] if math.isfinite(raced[reference]) else 1.0
            seconds.update({strategy: each * change for strategy, each in seconds.items()} | raced)

    def _leanest_of_the_fast(self, strategies: Sequence[Strategy]) -> Strategy:
        seconds = self.measurements.seconds
        fastest = min(seconds[strategy] for strategy in strategies)
        as_fast = [strategy for strategy in strategies if seconds[strategy] <= (1 + AS_FAST) * fastest]
        return min(as_fast, key=lambda strategy: (self._total(strategy), self._size(strategy)))

    # More rows for the table.

    def shown_variants(self, chosen: Strategy) -> list[Strategy]:
        """The chosen strategy in the variants that a table shows. Blocks are shown only if they were tried."""
        strategies = (Strategy(self._size(chosen), *variant) for variant in self.variants)
        return [each for each in strategies if each.block_size in (None, chosen.block_size)]

    def measure_for_table(self, chosen: Strategy | None, *, timed: bool) -> None:
        """Compiles what the table of a plan should show beside what was needed to decide.

        These are the full batch, two sizes from which to predict others, and the chosen size in every variant.
        """
        ladder = [self.examples, *self.sizes.steps_down(self.examples)]
        variant = self.variants[0]
        self.fits(Strategy(self.examples, *variant))
        for size in (ladder[len(ladder) // 3], ladder[2 * len(ladder) // 3]):
            if len(self._points(variant, with_full=False)) < 2:
                self.fits(Strategy(size, *variant))
        if self.measurements.gradient.is_coupled:  # its head takes memory that does not lie on the line
            self.fits(Strategy(self.sizes.smallest, *variant))
        size = self.sizes.smallest if chosen is None else self._size(chosen)
        for strategy in self.shown_variants(chosen or Strategy(size, *self.variants[0])):
            if self.fits(strategy) and timed:
                self._time(strategy)
