"""Batches of arrays in memory, and what all batches of one source have in common."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from anybatch.checks import whole
from anybatch.errors import InputError
from anybatch.trees import describe, is_array, named_leaves


class Batches:
    """Arrays in memory, as batches of shuffled examples; each iteration is one epoch.

    **Reproducible.** The order of an epoch depends on `seed` and on the number of the epoch, and on nothing else: each
    example gets the next 64 bits of the generator Philox, whose key these two numbers are, and examples are sorted by
    them. Neither the generator's algorithm nor sorting changes from one version of numpy to the next. Any batch is
    known without those before it, so that a run goes on at once wherever it was stopped.

    >>> batches = Batches({"x": np.arange(5), "y": np.arange(5) * 10}, batch_size=2, shuffle=False)
    >>> len(batches)
    2
    >>> [batch["y"].tolist() for batch in batches]
    [[0, 10], [20, 30]]

    Iterating begins at epoch 0 each time. `ab.fit` goes through epoch 0, 1, 2, ...; by hand, `batches.epoch(1)` does.

    Args:
      arrays: a tree of arrays, of numpy or JAX, with the examples along axis 0. They are not copied but for those of
        JAX, which are fetched to the host once; `np.memmap` stays on the disk until its rows are needed.
      batch_size: examples in a batch. The batches are copies, in arrays of their own.
      seed: of the order, from 0 to 2**64 - 1.
      shuffle: whether to shuffle at all; without, every epoch is in the order of the arrays.
      drop_last: whether to leave out the examples at the end of an epoch that do not fill a batch. Otherwise the last
        batch is smaller, for which a step is compiled once more.

    Raises:
      InputError: for arrays of different lengths, or none, or of a dtype that JAX does not have; for a `batch_size`
        above their length.
    """

    def __init__(
        self, arrays: Any, batch_size: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = True
    ) -> None:
        named = named_leaves("arrays", arrays)
        self._structure = jax.tree.structure(arrays)
        self.num_examples = _common_length(named)
        self.batch_size = whole("batch_size", batch_size, 1)
        self.seed = whole("seed", seed, 0)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        if self.seed >= 2**64:
            raise InputError("seed must be below 2**64", given=f"seed={seed}", remedy="For example seed=0.")
        if self.batch_size > self.num_examples:
            raise InputError(
                "batch_size must be at most the number of examples",
                given=f"batch_size={batch_size} for {self.num_examples} examples",
                remedy=f"Pass batch_size={self.num_examples} for one batch of all.",
            )
        # Of an array on the host, this is a view.
        self._arrays = [np.asarray(array) for _, array in named]

    def __len__(self) -> int:
        full, rest = divmod(self.num_examples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Any]:
        return self.epoch(0)

    def __repr__(self) -> str:
        return f"<Batches of {self.batch_size} out of {self.num_examples} examples, {len(self)} in an epoch>"

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of one epoch, from the batch `start` on.

        >>> batches = Batches(np.arange(6), batch_size=2, seed=1)
        >>> rest = list(batches.epoch(7))[1:]
        >>> all(np.array_equal(one, other) for one, other in zip(rest, batches.epoch(7, start=1), strict=True))
        True
        """
        epoch, start = whole("epoch", epoch, 0), whole("start", start, 0)
        if epoch >= 2**64 or start > len(self):
            raise InputError(
                f"An epoch has the batches 0 to {len(self) - 1}",
                given=f"epoch={epoch}, start={start}",
                remedy=f"Pass a start of at most {len(self)}.",
            )
        return self._epoch(epoch, start)

    def settings(self) -> dict[str, Any]:
        """What the order of the batches depends on."""
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
        # Generator.permutation would be shorter, but numpy reserves the right to change what it draws.
        generator = np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
        return np.argsort(generator.random_raw(self.num_examples), kind="stable")


def check_same_kind(first: Any, batch: Any, number: int) -> None:
    """Checks that a batch has the leaves of the first one, of the same dtypes and ranks; sizes may differ.

    >>> check_same_kind({"x": np.zeros((4, 2))}, {"x": np.zeros((3, 2))}, 2)

    Args:
      first: the first batch, or its `Outline`.
      batch: the other.
      number: of the other, for the message.

    Raises:
      InputError: with the leaves that differ.
    """
    expected, actual = first if isinstance(first, Outline) else Outline.of(first), Outline.of(batch)
    if actual == expected:
        return
    names = [*expected.leaves, *(name for name in actual.leaves if name not in expected.leaves)]
    pairs = [(name, expected.leaves.get(name, "absent"), actual.leaves.get(name, "absent")) for name in names]
    lines = [f"{name}: {there} in the first batch, {here} in this one" for name, there, here in pairs if there != here]
    lines = lines or [f"batch: {expected.structure} in the first batch, {actual.structure} in this one"]
    more = [f"and {len(lines) - 10} more"] if len(lines) > 10 else []
    raise InputError(
        "Every batch must have the leaves of the first one, with the same dtypes and ranks",
        given=f"batch {number}, with\n" + "\n".join([*lines[:10], *more]),
        remedy="Make the source give the same kind of batch each time, e.g. batch['x'].astype(np.float32).",
    )


@dataclasses.dataclass(frozen=True)
class Outline:
    """What all batches of a source have in common, without any of their data."""

    structure: Any
    leaves: dict[str, str]

    @classmethod
    def of(cls, batch: Any) -> "Outline":
        """The outline of a batch."""
        return cls(jax.tree.structure(batch), {name: _kind(leaf) for name, leaf in named_leaves("batch", batch)})


def check_dtypes(named: Iterable[tuple[str, Any]]) -> None:
    """Checks that JAX has the dtypes of some arrays, given with their names."""
    bad = [(name, array) for name, array in named if not _jax_has(array.dtype)]
    if bad:
        raise InputError(
            "Every array of a batch must have a dtype that JAX has: numbers or booleans, in the machine's byte order",
            given="\n".join(f"{name}: {describe(array)}" for name, array in bad[:10]),
            remedy="Make numbers of text and objects, and one array of each field: array.astype(np.float32), "
            "array['field']; or take them out of the batch.",
        )


def _jax_has(dtype: Any) -> bool:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        return True
    numbers = any(jax.dtypes.issubdtype(dtype, family) for family in (np.bool_, np.number))
    # Of the families of numpy that JAX knows, the members that it does not.
    largest = 16 if dtype.kind == "c" else 8
    return numbers and dtype.isnative and dtype.kind != "m" and dtype.itemsize <= largest


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype} of rank {leaf.ndim}" if is_array(leaf) else type(leaf).__name__


def _common_length(named: list[tuple[str, Any]]) -> int:
    remedy = "Pass arrays of numpy or JAX, e.g. Batches({'x': np.asarray(x), 'y': np.asarray(y)}, batch_size=32)."
    must = "Batches needs a tree of arrays with the examples along axis 0"
    if not named:
        raise InputError(must, given="a tree without leaves", remedy=remedy)
    bad = [f"{name}: {describe(leaf)}" for name, leaf in named if not (is_array(leaf) and leaf.ndim)]
    if bad:
        raise InputError(must, given="\n".join(bad[:10]), remedy=remedy)
    far = [f"{name}: {describe(leaf)}" for name, leaf in named if not _can_be_fetched(leaf)]
    if far:
        raise InputError(
            "Batches needs arrays that this process can fetch to the host",
            given="\n".join(far[:10]) + "\nof PRNG keys, or on devices of other processes",
            remedy="Pass jax.random.key_data(keys), or the rows of this process alone.",
        )
    check_dtypes(named)
    lengths = {leaf.shape[0] for _, leaf in named}
    if len(lengths) > 1 or lengths == {0}:
        raise InputError(
            "All arrays must have the same number of examples along axis 0, at least one",
            given="\n".join(f"{name}: {describe(leaf)}" for name, leaf in named[:10]),
            remedy="Cut them to the same examples, or take out what is not one row for each example.",
        )
    return lengths.pop()


def _can_be_fetched(leaf: Any) -> bool:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
