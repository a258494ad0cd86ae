"""A batch that stays in the memory of the host, or on disk, and is copied to the device piece by piece."""

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.call.checks import describe, has_jax_type, named_leaves, whole_number
from anybatch.errors import InputError


class HostBatch:
    """A batch in pieces that are made or loaded on the host, for a batch that does not fit the device.

    Pass it to a function of `value_and_grad` or `map_batch` in place of the batch. Its pieces are copied to the device
    while the device computes with the ones before, and at most a few are there at any time. The result is that of all
    pieces, concatenated.

    NumPy arrays and memory-mapped files need no `HostBatch`: pass them as they are. They are streamed in the same way
    if they are too large for the memory.

    >>> import numpy as np, jax.numpy as jnp, anybatch as ab
    >>> def pieces():
    ...     for number in range(4):
    ...         yield {"x": np.full((25, 2), number, np.float32)}
    >>> batch = ab.HostBatch(pieces, num_examples=100)
    >>> def loss(w, batch):
    ...     return jnp.mean(batch["x"] @ w)
    >>> value, grad = ab.value_and_grad(loss, microbatch_size=10)(jnp.ones(2), batch)
    >>> print(f"{value:.3f}", *(f"{entry:.3f}" for entry in grad))
    3.000 1.500 1.500

    Args:
      pieces: a function that returns an iterator of pieces, or a list of them. A piece is a tree of NumPy arrays with
        examples along axis 0; pieces may have different numbers of examples. An iterator or a generator will do where
        one pass over the batch is enough: it cannot be read a second time. A function is called for each pass of a
        computation, and must give the same pieces in the same order each time.
      num_examples: the number of examples of all pieces. The loss may divide by it, so that it must be known first.
    """

    def __init__(self, pieces: Callable[[], Iterable[Any]] | Iterable[Any], num_examples: int) -> None:
        self.num_examples = whole_number("num_examples", num_examples, 1)
        self.is_once = isinstance(pieces, Iterator)  # it cannot be read a second time
        self._make = pieces if callable(pieces) else lambda: pieces
        is_piece = isinstance(pieces, (str, Mapping)) or hasattr(pieces, "shape")
        if is_piece or not (callable(pieces) or isinstance(pieces, Iterable)):
            raise InputError(
                "The pieces of a HostBatch must be a function that returns an iterator, or a list",
                given=f"pieces={describe(pieces)}",
                remedy="For example ab.HostBatch(lambda: iter(loader), num_examples=1024). Arrays need no HostBatch: "
                "pass them as they are.",
            )
        self._opened: Iterator[Any] | None = None  # an iterator whose first piece was looked at, put back
        self._num_opened = 0

    @functools.cached_property
    def _first(self) -> Any:
        """The first piece, which tells the types of all."""
        pieces = iter(self._make())
        first = next(pieces, None)
        if first is None:
            raise InputError(
                "A HostBatch needs at least one piece",
                given="an iterator that ends at once",
                remedy="Pass a function that returns a new iterator: ab.HostBatch(lambda: iter(loader), ...).",
            )
        self._opened = itertools.chain([first], pieces)
        for name, leaf in named_leaves("piece", first) or [("piece", first)]:
            if not _is_plain(leaf) or leaf.ndim == 0 or not has_jax_type(leaf):
                raise InputError(
                    "Every leaf of a piece must be a NumPy array of numbers with examples along axis 0",
                    given=f"{name} = {describe(leaf)}",
                    remedy=FILL if isinstance(leaf, np.ma.MaskedArray) else "Convert it, e.g. x.astype(np.float32).",
                )
        return first

    @property
    def types(self) -> Any:
        """The types of the batch, as `jax.ShapeDtypeStruct`."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((self.num_examples, *leaf.shape[1:]), leaf.dtype), self._first
        )

    def rows(self) -> Any:
        """The batch as a tree of `HostRows`."""
        leaves, tree = jax.tree.flatten(self.types)
        rows = [HostRows(self, index, leaf.shape, leaf.dtype) for index, leaf in enumerate(leaves)]
        return jax.tree.unflatten(tree, rows)

    def open(self, checksums: list[int]) -> Iterator[list[np.ndarray]]:
        """The leaves of each piece, checked.

        All passes of a computation must read the same pieces, since rows of one are combined with those of another.
        `checksums` has those of the pieces that were read before, and gets those of new ones.
        """
        like = self._first
        self._num_opened += 1
        if self.is_once and self._num_opened > 1:
            raise InputError(
                "This computation reads the batch more than once, and an iterator can be read only once",
                given=f"ab.HostBatch({type(self._make()).__name__}, ...)",
                remedy="Pass a function that returns a new iterator over the same pieces in the same order: "
                "ab.HostBatch(lambda: iter(loader), ...).",
            )
        pieces, self._opened = self._opened or iter(self._make()), None
        number = 0
        for index, piece in enumerate(pieces):
            leaves = _checked(index, piece, like)
            checksum = _checksum(leaves)
            if index == len(checksums):
                checksums.append(checksum)
            elif checksum != checksums[index]:
                raise InputError(
                    "All passes over a HostBatch must read the same pieces in the same order. This computation reads "
                    "the batch more than once",
                    given=f"other numbers in piece {index} than the first time",
                    remedy="Fix the order and the random numbers of the pieces, e.g. by one seed for each HostBatch: "
                    "ab.HostBatch(lambda: shuffled(data, seed=epoch), ...). Or read the pieces into arrays first.",
                )
            number += leaves[0].shape[0]
            if number > self.num_examples:
                break
            yield leaves
        if number != self.num_examples:
            found = f"more than {self.num_examples}" if number > self.num_examples else str(number)
            raise InputError(
                "The pieces of a HostBatch must have as many examples as it says",
                given=f"num_examples={self.num_examples} and pieces of {found} examples in all",
                remedy="Correct num_examples, or the iterator.",
            )


def _is_plain(leaf: Any) -> bool:
    """Whether a leaf is an array of NumPy all of whose elements count."""
    return isinstance(leaf, np.ndarray) and not isinstance(leaf, np.ma.MaskedArray)


# So many elements of an array, spread evenly, tell whether a later pass reads the same ones.
CHECKED_ELEMENTS = 2**16


def _checksum(leaves: Sequence[np.ndarray]) -> int:
    """A checksum of some arrays: of all elements of a small one, and of some of a large one."""
    checksum = 0
    for leaf in leaves:
        step = max(1, leaf.size // CHECKED_ELEMENTS)
        # From every column of the rows, not from some: these may be the same in all rows.
        while math.gcd(step, math.prod(leaf.shape[1:])) > 1:
            step += 1
        checksum = zlib.crc32(leaf.flat[::step].tobytes(), checksum)
    return checksum


FILL = "Pass x.filled(0), and its mask as an array of its own, which the loss multiplies with."


def _checked(index: int, piece: Any, like: Any) -> list[np.ndarray]:
    named, first = named_leaves("piece", piece), named_leaves("piece", like)
    if [name for name, _ in named] != [name for name, _ in first]:
        raise InputError(
            "Every piece of a HostBatch must have the leaves of the first one",
            given=f"piece {index} with {', '.join(name for name, _ in named) or 'no arrays'}",
            remedy=f"Give each {', '.join(name for name, _ in first)}.",
        )
    number = np.shape(named[0][1])[:1]
    for (name, leaf), (_, expected) in zip(named, first, strict=True):
        right = _is_plain(leaf) and leaf.dtype == expected.dtype and leaf.ndim == expected.ndim
        if not right or leaf.shape != (*number, *expected.shape[1:]):
            wanted = f"{expected.dtype}[{','.join(map(str, (*number, *expected.shape[1:])))}]"
            raise InputError(
                "All arrays of a piece must have one number of examples, and the types of the first piece",
                given=f"{name} = {describe(leaf)} in piece {index}, where {wanted} is expected",
                remedy=FILL
                if isinstance(leaf, np.ma.MaskedArray)
                else "Make all pieces alike, e.g. x.astype(np.float32).",
            )
    return [leaf for _, leaf in named]


@dataclasses.dataclass(frozen=True, eq=False)
class HostRows:
    """One array of a batch on the host: a leaf of a `HostBatch`, or a NumPy array. JAX refuses it as an argument."""

    source: Any
    index: int
    shape: tuple[int, ...]
    dtype: Any

    @classmethod
    def of_array(cls, array: Any) -> "HostRows":
        """The rows of a NumPy array; `HostRows` as they are."""
        return array if isinstance(array, HostRows) else cls(array, 0, array.shape, array.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @functools.cached_property
    def type_on_host(self) -> Any:
        """The type that the array has on a device."""
        return jax.core.ShapedArray(self.shape, jax.dtypes.canonicalize_dtype(self.dtype))

    def __jax_array__(self) -> Any:
        raise no_tracers(self)


def no_tracers(rows: HostRows) -> InputError:
    """The error for a batch on the host that reaches JAX, or a call that is traced."""
    return InputError(
        "A HostBatch is for functions of value_and_grad, grad, map_batch, hvp and ggn_product, outside jit",
        given=f"a HostBatch with {rows.dtype}[{','.join(map(str, rows.shape))}]",
        remedy="Call the function outside of jit and grad, or pass arrays.",
    )


def refuse_rows(name: str, leaf: Any) -> None:
    """Raises an error if a leaf of an argument that is not the batch is on the host."""
    if isinstance(leaf, HostRows):
        raise InputError(
            "A HostBatch must be named as the batch, or as a part of it",
            given=f"{name}, which is a HostBatch, and is not among batch_argnums and batch_argnames",
            remedy="Name it, e.g. batch_argnums=(1, 2), or pass arrays.",
        )


def with_rows(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, only_types: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with a tree of `HostRows`, or of types, for each `HostBatch`."""

    def opened(argument: Any) -> Any:
        if not isinstance(argument, HostBatch):
            return argument
        return argument.types if only_types else argument.rows()

    if not any(isinstance(argument, HostBatch) for argument in (*args, *kwargs.values())):
        return args, kwargs
    return tuple(map(opened, args)), {name: opened(argument) for name, argument in kwargs.items()}


def in_chunks(
    rows: Sequence[HostRows],
    size: int,
    checksums: dict[int, list[int]],
    is_stopped: Callable[[], bool] = lambda: False,
) -> Iterator[list[np.ndarray]]:
    """The arrays on the host, `size` examples at a time; the last time perhaps fewer.

    `checksums` are those of each `HostBatch`, by its id (see `HostBatch.open`). It ends early, after the current piece,
    once `is_stopped()` is true.
    """
    examples = rows[0].shape[0]
    batches = {id(each.source): each.source for each in rows if isinstance(each.source, HostBatch)}
    pieces = {
        key: _rechunked(batch.open(checksums.setdefault(key, [])), size, is_stopped) for key, batch in batches.items()
    }
    for start in range(0, examples, size):
        now = {key: piece for key, iterator in pieces.items() if (piece := next(iterator, None)) is not None}
        if len(now) < len(pieces):  # stopped: an iterator that ends too early is an error
            return
        yield [
            now[id(each.source)][each.index] if id(each.source) in now else each.source[start : start + size]
            for each in rows
        ]
    for iterator in pieces.values():
        next(iterator, None)  # lets the source check the number of its examples


def _rechunked(
    pieces: Iterator[list[np.ndarray]], size: int, is_stopped: Callable[[], bool]
) -> Iterator[list[np.ndarray]]:
    """Pieces of any sizes as pieces of `size` examples, the last one perhaps smaller."""
    kept: list[list[np.ndarray]] = []
    number = 0
    for piece in pieces:
        if is_stopped():
            return
        length = piece[0].shape[0]
        first = 0
        while length - first + number >= size:
            stop = first + size - number
            kept.append([leaf[first:stop] for leaf in piece])
            yield _joined(kept)
            kept, number, first = [], 0, stop
        if first < length:
            kept.append([np.array(leaf[first:]) for leaf in piece])  # the iterator may write over its arrays
            number += length - first
    if kept:
        yield _joined(kept)


def _joined(parts: list[list[np.ndarray]]) -> list[np.ndarray]:
    return parts[0] if len(parts) == 1 else [np.concatenate(leaves) for leaves in zip(*parts, strict=True)]
