"""Which microbatch sizes are worth a thought."""

import math


def balanced_sizes(examples: int) -> list[int]:
    """For each number of microbatches the smallest size that gives it, in ascending order.

    A larger size with as many microbatches takes more memory and no less time. Sizes that do not divide the batch
    are among them: their last microbatch is smaller.

    >>> balanced_sizes(10)
    [1, 2, 3, 4, 5, 10]
    """
    sizes, size = [], examples
    while size >= 1:
        sizes.append(size)
        if size == 1:
            break
        # One microbatch more than the current number, and as small as that number allows.
        size = math.ceil(examples / (math.ceil(examples / size) + 1))
        size = min(size, sizes[-1] - 1)
    return sorted(sizes)


def preferred(examples: int, size: int) -> int:
    """The size itself, or a little less if that divides the batch: one program then serves all microbatches.

    >>> preferred(60, 11), preferred(60, 14), preferred(61, 14)
    (10, 12, 14)
    """
    for smaller in range(size, max(1, math.ceil(0.8 * size)) - 1, -1):
        if examples % smaller == 0:
            return smaller
    return size


def is_worthwhile(examples: int, size: int, instead_of: int) -> bool:
    """Whether a larger size is worth a compilation: it makes fewer microbatches, by a fifth, or no ragged one.

    >>> is_worthwhile(60, 11, 10), is_worthwhile(60, 12, 11), is_worthwhile(60, 15, 10)
    (False, True, True)
    """
    if size <= instead_of:
        return False
    fewer = math.ceil(examples / size) <= 0.8 * math.ceil(examples / instead_of)
    return fewer or (examples % size == 0 and examples % instead_of != 0)


def steps_down(examples: int, size: int) -> list[int]:
    """Sizes below one, each about half of the one before, dividing the batch where such a size is near.

    >>> steps_down(64, 64), steps_down(60, 20), steps_down(7, 7)
    ([32, 16, 8, 4, 2, 1], [10, 5, 3, 2, 1], [4, 2, 1])
    """
    steps = []
    while size > 1:
        size = nearby(examples, size / 2, below=size)
        steps.append(size)
    return steps


def nearby(examples: int, wish: float, below: int, above: int = 0) -> int:
    """The size strictly between two others that is nearest to a wish, in ratio; one that divides the batch is nearer."""

    def distance(size: int) -> float:
        away = abs(math.log(size / wish))
        return away if examples % size == 0 else away + 0.25

    return min(range(above + 1, below), key=distance)
