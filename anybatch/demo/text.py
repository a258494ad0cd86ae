"""A text as training data: its vocabulary, its training and validation parts, and batches of windows."""

import dataclasses
import importlib.resources
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from anybatch.call.files import read_regular
from anybatch.errors import InputError

MOST_BYTES = 2**32  # of a text, which is held in memory several times

LEVELS = ("characters", "bytes")


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokens of a text: its distinct characters, or all 256 bytes.

    >>> vocabulary = Vocabulary.of("banana", "characters")
    >>> vocabulary.size, vocabulary.encode("nab").tolist(), vocabulary.decode([1, 0, 2, 0])
    (3, [2, 0, 1], 'bana')

    Args:
      characters: each character once, sorted; None for bytes.
    """

    characters: str | None

    @classmethod
    def of(cls, text: str, level: str) -> "Vocabulary":
        """The vocabulary of a text. `level` is one of `LEVELS`."""
        if level == "bytes":
            return cls(None)
        return cls("".join(map(chr, np.unique(_codes(text)).tolist())))

    @property
    def size(self) -> int:
        return 256 if self.characters is None else len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """The token ids of a text. Raises an InputError for characters that are not in the vocabulary."""
        if self.characters is None:
            return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8)
        known, codes = _codes(self.characters), _codes(text)
        ids = np.minimum(np.searchsorted(known, codes), len(known) - 1)
        unknown = sorted(set(codes[known[ids] != codes].tolist()))
        if unknown:
            raise InputError(
                "Every character must occur in the text that the model learns",
                given=", ".join(repr(chr(code)) for code in unknown[:10]),
                remedy='Leave these out, or learn bytes instead: level = "bytes".',
            )
        return ids.astype(np.uint8 if self.size <= 256 else np.int32)

    def decode(self, ids: Any) -> str:
        """The text of some token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        numbers = np.asarray(ids).tolist()
        if self.characters is None:
            return bytes(numbers).decode("utf-8", "replace")
        return "".join(self.characters[number] for number in numbers)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A text as token ids, split into a training part and a validation part."""

    vocabulary: Vocabulary
    training: np.ndarray
    validation: np.ndarray

    @classmethod
    def of(cls, text: str, *, level: str, context: int, validation: float, name: str = "text") -> "Corpus":
        """Splits a text. The validation part is its end: this share of it, or 0 for none.

        A window has `context` tokens, not counting the token to predict after the last one. It is an InputError if one
        of the parts is shorter.
        """
        vocabulary = Vocabulary.of(text, level)
        ids = vocabulary.encode(text)
        held_out = round(len(ids) * validation)
        least = len(ids) - held_out if not held_out else min(held_out, len(ids) - held_out)
        if least < context + 1:
            part = "" if not held_out else f" ({held_out:,} of them for validation)"
            shorter = f", a shorter context: context = {least - 1}" if least >= 2 else ""
            whole = ", or all of it for training: validation = 0.0" if held_out and len(ids) > context else ""
            raise InputError(
                f"Each part of a text must have more {level} than the context",
                given=f"{name} with {len(ids):,} {level}{part}, and context = {context}",
                remedy=f"Use a longer text{shorter}{whole}.",
            )
        return cls(vocabulary, ids[: len(ids) - held_out], ids[len(ids) - held_out :])

    def validation_windows(self, context: int, most: int) -> np.ndarray:
        """At most `most` windows of the validation part, without overlap and evenly apart."""
        starts = np.arange(0, len(self.validation) - context, context)
        if len(starts) > most:
            starts = starts[np.linspace(0, len(starts) - 1, most).round().astype(int)]
        return _windows(self.validation, starts, context)


class Windows:
    """An endless source of batches for `anybatch.fit`: windows at random positions of a text.

    **Reproducible.** Batch `k` depends only on the seed and on `k`. A run that was stopped continues with the batches
    that it would have had.

    >>> windows = Windows(np.arange(100), context=4, batch_size=2, seed=0)
    >>> batch = next(iter(windows))["tokens"]
    >>> batch.shape, bool((np.diff(batch) == 1).all())
    ((2, 5), True)
    """

    def __init__(
        self, ids: np.ndarray, *, context: int, batch_size: int, seed: int, opened: Callable[[], None] = lambda: None
    ) -> None:
        self._ids, self._context, self._batch_size, self._seed = ids, context, batch_size, seed
        self._opened = opened  # called when an iteration starts

    def batch(self, number: int) -> dict[str, np.ndarray]:
        """Batch `number`, counted from 0."""
        # NumPy guarantees that the raw output of a bit generator stays the same in all versions, but not `integers`.
        raw = np.random.Philox(key=self._seed, counter=[0, 0, 0, number]).random_raw(self._batch_size)
        starts = (raw % np.uint64(len(self._ids) - self._context)).astype(np.int64)
        return {"tokens": _windows(self._ids, starts, self._context)}

    def __iter__(self) -> "_WindowsIterator":
        self._opened()
        return _WindowsIterator(self)


class _WindowsIterator(Iterator[dict[str, np.ndarray]]):
    """An iterator over batches whose position can be saved and restored."""

    def __init__(self, windows: Windows) -> None:
        self._windows, self._number = windows, 0

    def __next__(self) -> dict[str, np.ndarray]:
        self._number += 1
        return self._windows.batch(self._number - 1)

    def get_state(self) -> dict[str, int]:
        return {"number": self._number}

    def set_state(self, state: dict[str, int]) -> None:
        self._number = state["number"]


def read_text(path: str, level: str = "characters") -> str:
    """The text in a file, or the fables that come with anybatch if `path` is empty.

    Raises:
      InputError: if the file cannot be read, is empty, or is not UTF-8 (which `level="bytes"` does not require).
    """
    if not path:
        return importlib.resources.files("anybatch.demo").joinpath("fables.txt").read_text("utf-8")
    try:
        data = read_regular(os.path.expanduser(path), MOST_BYTES)
    except OSError as error:
        raise InputError(
            "The text must be a file that can be read",
            given=f"text = {path!r} ({error.strerror})",
            remedy=f"Name a file relative to {pathlib.Path.cwd()}, or leave out `text` for the fables that come with "
            "anybatch.",
        ) from None
    if not data:
        raise InputError("A text must not be empty", given=f"{path}: 0 bytes", remedy="Name another file.")
    try:
        return data.decode("utf-8", "surrogateescape" if level == "bytes" else "strict").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(
            "A text of characters must be in UTF-8",
            given=f"{path}, whose byte {error.start:,} is 0x{data[error.start]:02x}",
            remedy=f'Convert it: iconv -f {_encoding(data)} -t utf-8 "{path}" > text.txt. '
            'Or learn its bytes: level = "bytes".',
        ) from None


def _encoding(data: bytes) -> str:
    """A guess at the encoding of a text that is not UTF-8, from its byte order mark."""
    if data.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff")):
        return "utf-32"
    return "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def _windows(ids: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return ids[starts[:, None] + np.arange(context + 1)].astype(np.int32)
