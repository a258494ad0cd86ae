"""Which microbatch sizes are worth a thought."""

import dataclasses
import math

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
