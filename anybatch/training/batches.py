"""Batches of arrays in memory, and what all batches of one source have in common.

Where batches come from, and how a run that was stopped goes on at the very next one.

A source is `Batches` of arrays in memory, a data loader, or anything else that can be iterated over. `open_source`
gives its batches one by one, each with the position after it: fit for JSON, and with it the source is opened again.
"""

import base64
import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from anybatch.call.checks import describe, is_array, named_leaves, whole_number
from anybatch.errors import InputError


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
        epoch, start = whole_number("epoch", epoch, 0), whole_number("start", start, 0)
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


__all__ = ["Batches", "beginning_of", "check_passes", "check_same_kind", "open_source"]

Position = dict[str, Any]
Notify = Callable[[int, int], None]

# A position holds one of these; what they are to a user, in words.
_KINDS = {
    "batches": "anybatch.Batches",
    "get_state": "a loader with get_state and set_state",
    "state_dict": "a loader with state_dict and load_state_dict",
    "iterable": "an iterable without a state of its own",
}
_BYTES, _ARRAY, _TUPLE, _ITEMS = "__bytes__", "__array__", "__tuple__", "__items__"
_END = object()
_THREADS = 16  # grain's own number
_BEGIN_ANEW = "Or begin anew: resume=False, with another folder for its checkpoints."


def open_source(
    batches: Any, *, epochs: int | None = None, position: Position | None = None, notify: Notify | None = None
) -> Iterator[tuple[Any, Position]]:
    """The batches of a source, each with the position after it, which is fit for JSON.

    **Resumes exactly.** Opened with such a position, a source goes on with the batch after it, as if it had never
    stopped, provided that it gives the same batches each time it is made. `Batches` go on at once; so do loaders that
    can save where they stand, such as those of grain (`get_state`) and torchdata (`state_dict`). Of anything else the
    batches before are drawn once more and dropped.

    >>> source = [10, 20, 30]
    >>> opened = open_source(source)
    >>> (first, _), (second, position) = next(opened), next(opened)
    >>> [batch for batch, _ in open_source(source, epochs=2, position=position)]
    [30, 10, 20, 30]

    Args:
      batches: the source. An iterator or a generator is gone through once; all else is begun anew after each pass. A
        loader of grain has the same order in each pass, unless it repeats itself: `.shuffle(seed=0).repeat()`.
      epochs: how many passes; None for as many as are drawn.
      position: where to go on.
      notify: called as `notify(done, total)` after each batch that is drawn and dropped.

    Raises:
      InputError: for what is no source, a position that is not one of this source, and a pass without a batch.
    """
    source = _check_source(batches)
    epochs = None if epochs is None else whole_number("epochs", epochs, 1)
    once = isinstance(source, Iterator)
    if once and epochs is not None and epochs > 1:
        raise InputError(
            "epochs must be 1 for an iterator or a generator, which can be gone through once",
            given=f"epochs={epochs} and {_name(source)}",
            remedy="Pass what it is made from: a list, a data loader, anybatch.Batches(arrays, batch_size); or an "
            "object whose __iter__ makes a new iterator.",
        )
    if getattr(source, "single_pass", False):
        check_passes(source, None, epochs)
        epochs = 1
    place = _Place() if position is None else _Place.read(position)
    if isinstance(source, Batches):
        _check_position(position, "batches", source)
        return _walk_batches(source, place, epochs)
    return _Passes(source, once, epochs, place, position, notify).walk()


def check_passes(batches: Any, steps: int | None, epochs: int | None) -> None:
    """Refuses a second pass over batches of which each is for one step: those of `privacy.poisson_batches`.

    Raises:
      InputError: for more epochs than one, or more steps than there are batches.
    """
    if not getattr(batches, "single_pass", False):
        return
    if (epochs or 1) > 1 or (steps or 0) > len(batches):
        asked = f"epochs={epochs}" if (epochs or 1) > 1 else f"steps={steps}"
        raise InputError(
            "Each batch of a private run is for one step: a second pass would repeat the draws of the first",
            given=f"{asked} for {len(batches)} batches",
            remedy="Draw a batch for each step: privacy.poisson_batches(..., steps=...).",
        )


def beginning_of(batches: Any) -> Position | None:
    """The position before the first batch, for sources that are drawn by a seed of their own; None for others."""
    if not getattr(batches, "single_pass", False):
        return None
    return _Place().position("get_state", state=_encode(batches.get_state()))


@dataclasses.dataclass
class _Place:
    """How many passes a source has ended, how many batches of the next it has given, and how many in all."""

    number: int = 0
    batch: int = 0
    total: int = 0

    @classmethod
    def read(cls, position: Any) -> "_Place":
        try:
            place = cls(*(whole_number(name, position[name], 0) for name in ("pass", "batch", "total")))
            if position["kind"] in _KINDS:
                return place
        except (KeyError, TypeError):  # an InputError is a TypeError
            pass
        raise InputError(
            "position must be one that open_source gave with a batch",
            given=f"{position!r}",
            remedy="Pass position=None to begin at the first batch.",
        )

    def advance(self) -> None:
        self.batch, self.total = self.batch + 1, self.total + 1

    def next_pass(self) -> None:
        self.number, self.batch = self.number + 1, 0

    def position(self, kind: str, **more: Any) -> Position:
        return {"kind": kind, "pass": self.number, "batch": self.batch, "total": self.total, **more}


def _walk_batches(batches: Batches, place: _Place, epochs: int | None) -> Iterator[tuple[Any, Position]]:
    while epochs is None or place.number < epochs:
        for batch in batches.epoch(place.number, place.batch):
            place.advance()
            yield batch, place.position("batches", settings=batches.settings())
        place.next_pass()


class _Passes:
    """A source that is not `Batches`: its passes, and the state it has."""

    def __init__(
        self,
        source: Any,
        once: bool,
        epochs: int | None,
        place: _Place,
        position: Position | None,
        notify: Notify | None,
    ) -> None:
        self.source, self.once, self.notify = source, once, notify
        self.epochs = 1 if once else epochs
        self.place, self.wanted = _Place(), place
        self.iterator = iter(source)
        self.holder = self.iterator
        # A loader of torchdata loads a state itself, and then makes the iterator that has it. Beware of a dataset that
        # has these methods and iterators without a state: what is in its buffers would be lost.
        if hasattr(source, "load_state_dict") and hasattr(self.iterator, "state_dict"):
            self.holder = source
        self.kind, self.get, self.set = _state_functions(self.holder)
        _check_position(position, self.kind, source)
        if position is not None and "state" in position:
            self._load(position)

    def walk(self) -> Iterator[tuple[Any, Position]]:
        try:
            if not self.once and self.epochs is not None and self.wanted.number >= self.epochs:
                return
            if self.place.total < self.wanted.total:
                self._skip()
            while self._more():
                batch = next(self.iterator, _END)
                if batch is _END:
                    self._end_pass()
                    continue
                self.place.advance()
                yield batch, self._position()
                del batch  # not to be kept while the next one is made
        finally:
            self._close()

    def _more(self) -> bool:
        return self.epochs is None or self.place.number < self.epochs

    def _skip(self) -> None:
        """Draws and drops what was drawn before, all passes of it: a loader may shuffle each of them anew."""
        wanted = self.wanted
        while self.place.total < wanted.total and self.place.number <= wanted.number:
            if next(self.iterator, _END) is _END:
                if self.once:
                    break
                self._end_pass()
                continue
            self.place.advance()
            if self.notify is not None:
                self.notify(self.place.total, wanted.total)
        if self.place != wanted:
            raise InputError(
                "A source must give the batches that it gave before, to go on after them",
                given=f"{_name(self.source)}, whose passes end elsewhere: batch {wanted.batch} of pass "
                f"{wanted.number + 1} was the last one drawn, number {wanted.total} of all",
                remedy=f"Pass the same source, made anew. {_BEGIN_ANEW}",
            )

    def _end_pass(self) -> None:
        if self.place.batch == 0:
            number = self.place.number + 1
            raise InputError(
                "Every pass over the batches must have at least one",
                given=f"none from {_name(self.source)}: pass {number} is empty",
                remedy="Pass a source with a batch in it; a loader may drop its only batch for being too small."
                if number == 1
                else "Pass an object whose __iter__ makes a new iterator each time, or epochs=1.",
            )
        self.place.next_pass()
        if not self._more():
            return
        self._close()
        self.iterator = iter(self.source)
        if self.holder is not self.source:
            self.holder = self.iterator
            _, self.get, self.set = _state_functions(self.holder)

    def _position(self) -> Position:
        if self.get is not None:
            # A state that JSON cannot hold is done without: the batches before can always be drawn once more.
            with contextlib.suppress(_NotForJson):
                return self.place.position(self.kind, state=_encode(self.get()))
        return self.place.position(self.kind)

    def _load(self, position: Any) -> None:
        try:
            self.set(_decode(position["state"]))
        except InputError:  # which says more
            raise
        except Exception as error:
            raise InputError(
                "A loader must take back the state that it gave",
                given=f"{type(error).__name__} from {_name(self.source)}: {error}",
                remedy="Pass a loader made as before. grain's DataLoader compares repr(data_source): a data source of "
                f"your own needs a __repr__ without an address in memory. {_BEGIN_ANEW}",
            ) from error
        if self.holder is not self.iterator:
            self.iterator = iter(self.source)
        self.place = dataclasses.replace(self.wanted)

    def _close(self) -> None:
        # An iterator that we made has nobody else to close it, e.g. to end the processes of a loader.
        close = None if self.once else getattr(self.iterator, "close", None)
        if callable(close):
            close()


def _state_functions(holder: Any) -> tuple[str, Any, Any]:
    for kind, get, load in (("get_state", "get_state", "set_state"), ("state_dict", "state_dict", "load_state_dict")):
        if hasattr(holder, get) and hasattr(holder, load):
            return kind, getattr(holder, get), getattr(holder, load)
    return "iterable", None, None


def _check_source(source: Any) -> Any:
    given = describe(source) if is_array(source) else f"{_name(source)}"
    if is_array(source) or isinstance(source, (dict, str, bytes)):
        raise InputError(
            "batches must give one batch after the other",
            given=f"{given}, which would give its rows, keys or letters",
            remedy="Pass anybatch.Batches(arrays, batch_size=32) to cut arrays into batches, or [batch] for one batch.",
        )
    if hasattr(source, "to_iter_dataset"):
        return _iter_dataset(source)
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        call = " Call the function, and pass what it returns." if callable(source) else ""
        raise InputError(
            "batches must be something to iterate over",
            given=given,
            remedy=f"Pass anybatch.Batches(arrays, batch_size=32), a data loader, a list or a generator.{call}",
        )
    return source


def _iter_dataset(dataset: Any) -> Any:
    """A MapDataset of grain as one that has a state, and that holds a few batches ahead in place of 500."""
    try:
        grain = importlib.import_module("grain")
    except ImportError:  # something else with such a method
        return dataset.to_iter_dataset()
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_THREADS))


def _check_position(position: Position | None, kind: str, source: Any) -> None:
    if position is None:
        return
    if position["kind"] != kind:
        raise InputError(
            "A position must be one of the same kind of source",
            given=f"a position of {_KINDS[position['kind']]}, for {_name(source)}",
            remedy=f"Pass the source that the run had before. {_BEGIN_ANEW}",
        )
    before = position.get("settings", {})
    now = source.settings() if kind == "batches" else before
    if before != now:
        lines = [f"{name}={now[name]}, and {before.get(name)} before" for name in now if now[name] != before.get(name)]
        raise InputError(
            "Batches that go on must be made as before, or their order is another",
            given="\n".join(lines),
            remedy=f"Pass Batches with the settings from before. {_BEGIN_ANEW}",
        )


def _name(source: Any) -> str:
    return f"a {type(source).__name__}"


class _NotForJson(Exception):
    pass


def _encode(state: Any) -> Any:
    """The state of a loader as JSON can hold it; bytes, arrays and tuples come back as what they were."""
    if state is None or type(state) in (bool, int, float, str):
        return state
    if isinstance(state, bytes):
        return {_BYTES: base64.b64encode(state).decode()}
    if isinstance(state, (np.ndarray, np.generic)) and state.dtype.kind in "biufc":
        data = base64.b64encode(state.tobytes()).decode()
        return {_ARRAY: data, "dtype": state.dtype.str, "shape": list(state.shape), "scalar": np.isscalar(state)}
    if type(state) in (list, tuple):
        values = [_encode(value) for value in state]
        return values if type(state) is list else {_TUPLE: values}
    if isinstance(state, dict):
        plain = all(type(key) is str for key in state) and not {_BYTES, _ARRAY, _TUPLE, _ITEMS} & state.keys()
        if plain:
            return {key: _encode(value) for key, value in state.items()}
        return {_ITEMS: [[_encode(key), _encode(value)] for key, value in state.items()]}
    raise _NotForJson


def _decode(state: Any) -> Any:
    if isinstance(state, list):
        return [_decode(value) for value in state]
    if not isinstance(state, dict):
        return state
    if _BYTES in state:
        return base64.b64decode(state[_BYTES])
    if _ARRAY in state:
        array = np.frombuffer(base64.b64decode(state[_ARRAY]), state["dtype"]).reshape(state["shape"]).copy()
        return array[()] if state["scalar"] else array
    if _TUPLE in state:
        return tuple(_decode(value) for value in state[_TUPLE])
    if _ITEMS in state:
        return {_decode(key): _decode(value) for key, value in state[_ITEMS]}
    return {key: _decode(value) for key, value in state.items()}
