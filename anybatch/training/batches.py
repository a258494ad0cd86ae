"""`Batches`: arrays in memory, cut into shuffled batches whose order depends on a seed and the epoch alone."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from anybatch.call.checks import describe, is_array, named_leaves, whole_number
from anybatch.errors import InputError


class Batches:
    """Arrays in memory as batches of shuffled examples. One iteration is one epoch.

    **Reproducible.** The order of an epoch depends on `seed` and on the number of the epoch, and on nothing else. Each
    example gets 64 bits of numpy's Philox generator, keyed by these two numbers, and examples are sorted by them.
    Neither that generator nor sorting changes between versions of numpy. Any batch can be made without those before
    it, so a run that is resumed continues at once.

    >>> batches = Batches({"x": np.arange(5), "y": np.arange(5) * 10}, batch_size=2, shuffle=False)
    >>> len(batches)
    2
    >>> [batch["y"].tolist() for batch in batches]
    [[0, 10], [20, 30]]

    Each `for` loop starts at epoch 0. `ab.fit` uses epoch 0, 1, 2, ...; in your own loop, use `batches.epoch(1)`.

    Args:
      arrays: a pytree of numpy or JAX arrays with the examples along axis 0. Numpy arrays are not copied; JAX arrays
        are copied to the host once; an `np.memmap` stays on disk until its rows are needed.
      batch_size: the number of examples in a batch. Batches are new arrays, not views.
      seed: of the order, from 0 to 2**64 - 1.
      shuffle: whether to shuffle. If not, every epoch is in the order of the arrays.
      drop_last: whether to drop the examples at the end of an epoch that do not fill a batch. If not, the last batch is
        smaller, and a step compiles once more for it.

    Raises:
      InputError: for arrays of different lengths, no arrays, or a dtype that JAX does not have; for a `batch_size`
        above the number of examples.
    """

    def __init__(
        self, arrays: Any, batch_size: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        named = named_leaves("arrays", arrays)
        self._structure = jax.tree.structure(arrays)
        self.num_examples = _common_length(named)
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.seed = whole_number("seed", seed, 0)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        if self.seed >= 2**64:
            raise InputError("seed must be below 2**64", given=f"seed={seed}", remedy="For example seed=0.")
        if self.batch_size > self.num_examples:
            raise InputError(
                "batch_size must be at most the number of examples",
                given=f"batch_size={batch_size} for {self.num_examples} examples",
                remedy=f"Pass batch_size={self.num_examples} for one batch of all.",
            )
        self._arrays = [np.asarray(array) for _, array in named]  # views of arrays on the host

    def __len__(self) -> int:
        full, rest = divmod(self.num_examples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        return self.epoch(0)

    def __repr__(self) -> str:
        return f"<Batches of {self.batch_size} out of {self.num_examples} examples, {len(self)} in an epoch>"

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of one epoch, starting with batch number `start`.

        >>> batches = Batches(np.arange(6), batch_size=2, seed=1)
        >>> rest = list(batches.epoch(7))[1:]
        >>> all(np.array_equal(one, other) for one, other in zip(rest, batches.epoch(7, start=1), strict=True))
        True
        """
        epoch, start = whole_number("epoch", epoch, 0), whole_number("start", start, 0)
        if epoch >= 2**64 or start > len(self):
            raise InputError(
                f"An epoch has the batches 0 to {len(self) - 1}",
                given=f"epoch={epoch}, start={start}",
                remedy=f"Pass a start of at most {len(self)}.",
            )
        return self._epoch(epoch, start)

    def settings(self) -> dict[str, Any]:
        """The options that determine the order of the batches."""
        names = ("num_examples", "batch_size", "seed", "shuffle", "drop_last")
        return {name: getattr(self, name) for name in names}

    def _epoch(self, epoch: int, start: int) -> Iterator[Any]:
        order = self._order(epoch) if self.shuffle else None
        for number in range(start, len(self)):
            rows = slice(number * self.batch_size, (number + 1) * self.batch_size)
            if order is None:
                leaves = [array[rows].copy() for array in self._arrays]
            else:
                leaves = [array.take(order[rows], axis=0) for array in self._arrays]
            yield jax.tree.unflatten(self._structure, leaves)

    def _order(self, epoch: int) -> np.ndarray:
        # Not Generator.permutation: numpy may change its results in a new version.
        generator = np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
        return np.argsort(generator.random_raw(self.num_examples), kind="stable")


def check_dtypes(named: Iterable[tuple[str, Any]]) -> None:
    """Checks that JAX has the dtypes of these arrays, given with their names."""
    bad = [(name, array) for name, array in named if not _jax_has(array.dtype)]
    if bad:
        raise InputError(
            "Every array of a batch must have a dtype that JAX has: numbers or booleans, in the machine's byte order",
            given="\n".join(f"{name}: {describe(array)}" for name, array in bad[:10]),
            remedy="Convert text and objects to numbers, and each field of a structured array to one array: "
            "array.astype(np.float32), array['field']; or take them out of the batch.",
        )


def _jax_has(dtype: Any) -> bool:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return True
    is_number = any(jax.dtypes.issubdtype(dtype, family) for family in (np.bool_, np.number))
    # numpy counts timedeltas, long doubles and foreign byte orders as numbers, too.
    largest = 16 if dtype.kind == "c" else 8
    return is_number and dtype.isnative and dtype.kind != "m" and dtype.itemsize <= largest


def _common_length(named: list[tuple[str, Any]]) -> int:
    remedy = "Pass numpy or JAX arrays, e.g. Batches({'x': np.asarray(x), 'y': np.asarray(y)}, batch_size=32)."
    must = "Batches needs a tree of arrays with the examples along axis 0"
    if not named:
        raise InputError(must, given="a tree without leaves", remedy=remedy)
    bad = [f"{name}: {describe(leaf)}" for name, leaf in named if not (is_array(leaf) and leaf.ndim)]
    if bad:
        raise InputError(must, given="\n".join(bad[:10]), remedy=remedy)
    not_addressable = [f"{name}: {describe(leaf)}" for name, leaf in named if not _can_be_fetched(leaf)]
    if not_addressable:
        raise InputError(
            "Batches needs arrays that this process can copy to the host",
            given="\n".join(not_addressable[:10]) + "\nwhich hold PRNG keys, or are on devices of other processes",
            remedy="Pass jax.random.key_data(keys), or only the rows of this process.",
        )
    check_dtypes(named)
    lengths = {leaf.shape[0] for _, leaf in named}
    if len(lengths) > 1 or lengths == {0}:
        raise InputError(
            "All arrays must have the same number of examples along axis 0, at least one",
            given="\n".join(f"{name}: {describe(leaf)}" for name, leaf in named[:10]),
            remedy="Cut them to the same examples, or take out arrays that do not have one row per example.",
        )
    return lengths.pop()


def _can_be_fetched(leaf: Any) -> bool:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
