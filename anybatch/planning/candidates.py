"""Searches for a strategy: candidate microbatch sizes, and which of them to compile and time.

`Sizes` lists the microbatch sizes of a batch. `StrategySearch` finds the largest size that fits into memory, the
leanest strategy or the fastest one, with as few compilations as possible: it predicts the memory of a size from those
that were compiled before.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from anybatch.call.memory import readable
from anybatch.planning.measure import MIN_TURN_SECONDS, Bytes, Measurements
from anybatch.planning.prediction import Predictions
from anybatch.planning.progress import PlanningStep
from anybatch.planning.strategy import Strategy, Variant

V = TypeVar("V")

# How many sizes above and below a given one are considered.
NEIGHBOURS = 1000

# Compilations in search of a larger size that fits. After these, it must be twice as large, then four times.
SIZE_TRIALS = 2

# Strategies within this share of the fastest count as equally fast; the leanest of them is chosen.
AS_FAST = 0.02
# Strategies within this share of the least memory count as equally lean; the largest microbatch of them is chosen.
AS_LEAN = 0.02

# A predicted time may be wrong by this share for each doubling or halving of the nearest size that was timed. On a CPU
# it says little: caches matter more, and compiling is cheap.
DOUBT, DOUBT_ON_CPU = 0.05, 0.5

# If nothing is timed, a variant other than the first must be predicted to take less time by this share.
NOT_TIMED = 0.05

# What is predicted to take so many times the memory that there is, is compiled only if nothing else fits.
HOPELESS = 1.5

# Sizes whose logarithms differ by less than this take about the same time.
DIFFERENT = math.log(1.25)

# Programs that are compiled in search of the fastest.
MOST_COMPILATIONS = 4

# Times that were measured one by one are known to about a tenth. So strategies within CLOSE of the best are timed
# again, in one last race of 3 to LAST_ROUNDS rounds, which should take FINAL_SECONDS for each strategy.
CLOSE = 1.2
FIRST_ROUNDS, LAST_ROUNDS = 3, 15
FINAL_SECONDS = 2.0
MOST_CHANGE = 1.2


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

        Once no trials are left, it must save half of the microbatches, then three quarters, and so on.

        >>> Sizes(60).is_worthwhile(11, 10), Sizes(60).is_worthwhile(12, 11), Sizes(60).is_worthwhile(15, 10)
        (False, True, True)
        >>> [Sizes(60).is_worthwhile(size, 10, trials_left=-1) for size in (20, 30, 60)]
        [False, False, True]
        """
        if size <= instead_of:
            return False
        number, current = math.ceil(self.examples / size), math.ceil(self.examples / instead_of)
        if trials_left <= 0:
            return number <= 0.5 ** (1 - trials_left) * current
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


def _scaled(seconds: float, change: float) -> float:
    """Seconds, scaled by how the time of another strategy has changed.

    A device that becomes warm changes it by a few percent. More is a disturbance, such as other processes.
    """
    return seconds * min(max(change, 1 / MOST_CHANGE), MOST_CHANGE)


class StrategySearch:
    """Searches the strategies of one gradient, within one memory budget."""

    # No further strategies are compiled in search of a faster one if planning would then take longer.
    ENOUGH_SECONDS = 30.0

    def __init__(
        self,
        measurements: Measurements,
        allowed: int | None,
        variants: Sequence[Variant] = (Variant(),),
        notify: Callable[[str], None] = lambda text: None,
        known: dict[str, Any] | None = None,
    ) -> None:
        """Searches among `variants`, of which the first takes the least time, within the `allowed` bytes, if known.

        `notify` is called with a `PlanningStep` before each step that takes long. `known` is a record that was loaded
        from disk.
        """
        self.measurements, self.allowed, self.variants, self.notify = measurements, allowed, tuple(variants), notify
        self.examples = measurements.gradient.max_microbatch_size
        self.sizes = Sizes(self.examples, measurements.gradient.size_multiple)
        self.predictions = Predictions(measurements.gradient, known)
        # What was predicted before a strategy was compiled: bytes, and seconds if others had been timed.
        self.predicted: dict[Strategy, int] = {}
        self.predicted_seconds: dict[Strategy, float] = {}
        self.skipped: Strategy | None = None  # was not compiled, since planning would have taken long
        self.most = 0  # programs that will be compiled, at most; more if predictions were wrong

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
            self.predicted[strategy] = self.predict(strategy)
            timed = {each: seconds for each, seconds in self.seconds.items() if math.isfinite(seconds)}
            if timed:
                self.predicted_seconds[strategy] = self.predictions.seconds(strategy, timed)
            self.most = max(self.most, self.measurements.compilations + 1)
            self._notify(f"Compiling {strategy}, predicted {readable(self.predicted[strategy])}")
        found = self.measurements.bytes_of(strategy)
        return found is not None and (limit is None or found.total <= limit)

    def _notify(self, text: str) -> None:
        self.notify(PlanningStep(text, done=self.measurements.compilations, most=self.most))

    def predict(self, strategy: Strategy) -> int:
        """The predicted bytes of a strategy: those of its jaxpr, corrected by what was compiled so far."""
        predicted = self.predictions.total(strategy, self.measurements.bytes)
        # Activations have a fixed part and a part for each example. So at a smaller size than a compiled one they take
        # at least their share, and at a larger size no less.
        size = self._size(strategy)
        least = [
            found.total - found.activations + int(found.activations * min(1.0, size / self._size(each)))
            for each, found in self.measurements.bytes.items()
            if found is not None
            and each.variant == strategy.variant
            and self.predictions.has_loop(each)
            and self.predictions.has_loop(strategy)
        ]
        return max([predicted, *least])

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
        """The largest microbatch of the first variant for which one fits, with `reserve` bytes to spare; or None.

        The variant with the least predicted time is tried first. The first one is tried even if it is not predicted to
        fit, unless it is predicted to take far more. Others that are not are tried last, and blocks only where nothing
        else fits.
        """
        allowed = None if self.allowed is None else self.allowed - reserve
        self.most = self.measurements.compilations + SIZE_TRIALS
        groups: dict[int | None, list[Variant]] = {}
        for variant in self.variants:
            groups.setdefault(variant.block_size, []).append(variant)
        # Predictions take time: those of a group are made when no group before fits.
        found, hopeless = None, []
        for variants in groups.values():
            if found is None and len(groups) > 1 and self._is_hopeless(variants, allowed):
                hopeless.append(variants)
            else:
                found = found or self._first_fitting_of(variants, allowed)
        for variants in hopeless:
            found = found or self._first_fitting_of(variants, allowed)
        if found is None or found.remat == self.variants[0].remat:
            return found
        # The prediction by which more would fit if activations are computed again may have been wrong. What a coupled
        # loss computes from the full batch is hard to predict.
        plain = Strategy(self._size(found), *found.variant._replace(remat=self.variants[0].remat))
        may_fit = allowed is None or self.measurements.gradient.is_coupled or self.predict(plain) <= allowed
        return plain if may_fit and self.fits(plain, allowed) else found

    def _is_hopeless(self, variants: Sequence[Variant], allowed: int | None) -> bool:
        """True if even the leanest strategy of some variants is predicted to take far more than there is."""
        smallest = (Strategy(self.sizes.smallest, *variant) for variant in self._extremes(variants))
        return allowed is not None and min(map(self.predict, smallest)) > HOPELESS * allowed

    def _first_fitting_of(self, variants: Sequence[Variant], allowed: int | None) -> Strategy | None:
        """The same for some variants, of which the first one keeps all activations."""
        first, *others = variants
        likely = self._likely_fitting(first, allowed)
        if likely and (not others or allowed is None or self._is_about_as_fast_as_any(likely[0])):
            found = self.largest_fitting(first, allowed)
            if found is not None:
                return found
        # The others, and the first one if it is not known yet to fit, by their predicted time. Extremes are tried last.
        seconds = {each: self._likely_seconds(each, allowed) for each in others}
        unlikely = math.inf if self._is_hopeless([first], allowed) else 0.0
        seconds[first] = self.predictions.seconds(likely[0]) if likely else unlikely
        extremes = self._extremes(variants)
        for variant in sorted(seconds, key=lambda each: (seconds[each], variants.index(each))):
            # What was compiled meanwhile has corrected the predictions.
            if variant == first or variant in extremes or self._likely_fitting(variant, allowed):
                found = self.largest_fitting(variant, allowed)
                if found is not None:
                    return found
        return None

    def _likely_seconds(self, variant: Variant, allowed: int | None) -> float:
        """The predicted seconds of the largest strategy of a variant that is predicted to fit; infinite if none is."""
        likely = self._likely_fitting(variant, allowed)
        return self.predictions.seconds(likely[0]) * (1 + NOT_TIMED) if likely else math.inf

    def _is_about_as_fast_as_any(self, strategy: Strategy) -> bool:
        """True if the full batch is not predicted to be faster. Then no larger microbatch is, with more to compute."""
        full = Strategy(self.examples, *strategy.variant)
        return self.predictions.seconds(strategy) <= self.predictions.seconds(full) * (1 + NOT_TIMED)

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
        variants = self._extremes(self.variants)
        self.most = self.measurements.compilations + len(variants) + SIZE_TRIALS
        smallest = [each for variant in variants if self.fits(each := Strategy(self.sizes.smallest, *variant))]
        if not smallest:
            return None
        lean = self._as_lean_as(smallest)
        best = next(strategy for strategy in smallest if self._total(strategy) <= lean)  # it recomputes the least
        self.largest_fitting(best.variant, allowed=lean)
        # The memory of a coupled loss does not always grow with the microbatch.
        alike = [each for each, found in self.compiled.items() if found and each.variant == best.variant]
        lean = self._as_lean_as(alike)
        return max((each for each in alike if self._total(each) <= lean), key=self._size)

    def _as_lean_as(self, strategies: Sequence[Strategy]) -> int:
        """The bytes that a strategy may take to count as about as lean as the leanest of some, within the budget."""
        lean = int(min(map(self._total, strategies)) * (1 + AS_LEAN))
        return lean if self.allowed is None else min(lean, self.allowed)

    # Time: which strategy is fastest.

    def fastest(self) -> Strategy | None:
        """The strategy that takes the least time; of those about as fast, the one with the least memory.

        The strategy with the least predicted time is compiled and timed first, and then others that may be faster.
        """
        before, start = self.measurements.compilations, time.perf_counter()
        self.most = before + MOST_COMPILATIONS
        tried: set[Strategy] = set()
        while (strategy := self._next_to_time(self.measurements.compilations - before, tried)) is not None:
            # It should take about as long to compile as the last one.
            expected = time.perf_counter() - start + self.measurements.compile_seconds
            if expected > self.ENOUGH_SECONDS and self.timed_and_fitting():
                self.skipped = strategy
                break
            tried.add(strategy)
            if self.fits(strategy):
                self._time(strategy)
        timed = self.timed_and_fitting()
        if not timed:
            return None
        seconds = self.measurements.seconds
        best = min(timed, key=seconds.__getitem__)
        close = [strategy for strategy in timed if seconds[strategy] <= CLOSE * seconds[best]]
        self._race(close, best)
        return self._leanest_of_the_fast(close)

    def timed_and_fitting(self) -> list[Strategy]:
        return [strategy for strategy, each in self.seconds.items() if math.isfinite(each) and self.fits(strategy)]

    def _next_to_time(self, compilations: int, tried: set[Strategy]) -> Strategy | None:
        """The strategy to compile and time next, after so many compilations; None if no other is likely to be faster.

        It is none that was `tried`: one that XLA cannot compile is not tried again.

        A predicted time is less certain, the more a strategy differs from all that were timed. So each strategy is
        judged by the least time that it may take.
        """
        timed = {each: self.seconds[each] for each in self.timed_and_fitting()}
        if not timed:
            likely = [each for variant in self.variants for each in self._likely_fitting(variant)]
            untried = [each for each in likely if each not in tried and self._may_fit(each)]
            return min(untried, key=self.predictions.seconds, default=None) or self._last_resort(tried)
        if compilations >= MOST_COMPILATIONS:
            return None
        best = self._leanest_of_the_fast(list(timed))
        variants = self.variants
        if self.measurements.gradient.is_full_batch(best):
            # Blocks, and activations that are computed again, pay only where microbatches are small.
            variants = tuple(
                each for each in variants if (each.remat, each.block_size) == (best.remat, best.block_size)
            )
        others = [each for variant in variants if (each := self._likely_best(variant)) is not None]
        doubt = DOUBT_ON_CPU if self.predictions.on_cpu else DOUBT

        def least_seconds(strategy: Strategy) -> float:
            differences, doublings = min(self.predictions.distance(strategy, each) for each in timed)
            # Another variant is tried only if it is predicted to be faster.
            share = 0.0 if differences else doubt * doublings / math.log(2)
            return self.predictions.seconds(strategy, timed) * (1 - share)

        new = [each for each in [*self._around(best), *others] if each not in tried and self._is_new(each)]
        following = min(new, key=least_seconds, default=None)
        return following if following is not None and least_seconds(following) < min(timed.values()) else None

    def _around(self, best: Strategy) -> list[Strategy]:
        """Sizes halfway between the best one and the next smaller and larger ones that were timed.

        If no smaller one was timed, a quarter of the best one.
        """
        size = self._size(best)
        timed = sorted(self._size(strategy) for strategy in self.seconds if strategy.variant == best.variant)
        pairs = [pair for pair in itertools.pairwise(timed) if size in pair]
        found = [self.sizes.between(*pair) for pair in pairs]
        if size == timed[0]:
            found += self.sizes.steps_down(size)[:2][-1:]
        return [Strategy(each, *best.variant) for each in found if each is not None]

    def _likely_fitting(self, variant: Variant, allowed: int | None = None) -> list[Strategy]:
        """The largest strategy of a variant that is predicted to fit the budget, or `allowed`, and smaller ones."""
        limit = self.allowed if allowed is None else allowed
        sizes = self.sizes.all()
        fitting = [size for size in sizes if limit is None or self.predict(Strategy(size, *variant)) <= limit]
        if not fitting:
            return []
        largest = self.sizes.preferred(fitting[-1])
        return [Strategy(size, *variant) for size in (largest, *self.sizes.steps_down(largest))]

    def _likely_best(self, variant: Variant) -> Strategy | None:
        """The strategy of a variant that is predicted to take the least time; None if none is predicted to fit."""
        return min(self._likely_fitting(variant), key=self.predictions.seconds, default=None)

    def _is_new(self, strategy: Strategy) -> bool:
        """True if it is predicted to fit, and its size differs enough from those of the variant that were compiled."""
        alike = [self._size(each) for each in self.measurements.bytes if each.variant == strategy.variant]
        differs = all(abs(math.log(self._size(strategy) / each)) > DIFFERENT for each in alike)
        return differs and (self.allowed is None or self.predict(strategy) <= self.allowed)

    def _last_resort(self, tried: set[Strategy]) -> Strategy | None:
        """The smallest size of a variant that was not `tried`, though it is not predicted to fit."""
        smallest = (Strategy(self.sizes.smallest, *variant) for variant in self._extremes(self.variants))
        return next((each for each in smallest if each not in tried and self._may_fit(each)), None)

    def _extremes(self, variants: Sequence[Variant]) -> list[Variant]:
        """The variants that compute none or all of the activations again: a part is between the two."""
        shares = [variant.remat for variant in self.variants]
        return [each for each in variants if each.remat in (shares[0], shares[-1])]

    def _may_fit(self, strategy: Strategy) -> bool:
        """False if it was compiled and does not fit, or ran out of memory."""
        return strategy not in self.measurements.bytes or (self.fits(strategy) and strategy not in self.seconds)

    def _time(self, strategy: Strategy) -> float:
        """The seconds of a strategy.

        It runs in turns with the fastest so far, and its time is scaled by how that one's time has changed since it was
        first measured: all times in the table are then comparable.
        """
        seconds = self.measurements.seconds
        if strategy in seconds:
            return seconds[strategy]
        self._notify(f"Timing {strategy}")
        known = {other: each for other, each in self.seconds.items() if math.isfinite(each)}
        best = min(known, key=known.__getitem__, default=None)
        raced = self.measurements.race([strategy] if best is None else [best, strategy], FIRST_ROUNDS)
        if best is None or not math.isfinite(raced[best]):
            seconds.update(raced)
        else:
            seconds[strategy] = _scaled(raced[strategy], known[best] / raced[best])
        return seconds[strategy]

    def _race(self, strategies: Sequence[Strategy], reference: Strategy) -> None:
        """Times strategies in turns, and scales all earlier times by how that of `reference` has changed."""
        seconds = self.measurements.seconds
        if len(strategies) > 1:
            self._notify(f"Timing the {len(strategies)} fastest")
            rounds = min(LAST_ROUNDS, max(3, int(FINAL_SECONDS / max(seconds[reference], MIN_TURN_SECONDS))))
            raced = self.measurements.race(strategies, rounds)
            # Devices become slower as they become warm.
            change = raced[reference] / seconds[reference] if math.isfinite(raced[reference]) else 1.0
            seconds.update({strategy: _scaled(each, change) for strategy, each in seconds.items()} | raced)

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

        These are the full batch, two sizes from which to predict others, and the chosen size in other variants.
        """
        ladder, variant = [self.examples, *self.sizes.steps_down(self.examples)], self.variants[0]
        known = [each for each, found in self.compiled.items() if found and self.predictions.has_loop(each)]
        of_line = (Strategy(ladder[len(ladder) * third // 3], *variant) for third in (1, 2))
        number = max(0, 2 - len([each for each in known if each.variant == variant]))
        rows = [Strategy(self.examples, *variant)]
        rows += [each for each in of_line if each not in self.compiled][:number]
        if self.measurements.gradient.is_coupled:  # its head takes memory that does not lie on the line
            rows.append(Strategy(self.sizes.smallest, *variant))
        shown = chosen or Strategy(self.sizes.smallest, *variant)
        # Each share of what is computed again would be a program to compile: others than the chosen are predicted.
        others = [each for each in self.shown_variants(shown) if each.remat == shown.remat]
        new = {each for each in (*rows, *others) if each not in self.measurements.bytes}
        self.most = self.measurements.compilations + len(new)
        for strategy in rows:
            self.fits(strategy)
        for strategy in others:
            if self.fits(strategy) and timed:
                self._time(strategy)
