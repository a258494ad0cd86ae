"""Resumable iteration over any source of batches: `anybatch.Batches`, a data loader, or any iterable.

`open_source` yields each batch with the position after it. A position can be stored as JSON, and opening the same
source with it continues with the next batch. `Batches` cuts arrays in memory into shuffled batches, whose order depends
on a seed and the epoch alone.
"""

import base64
import dataclasses
import importlib
import json
from collections.abc import Callable, Iterable, Iterator
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
    bad = [f"{name}: {describe(leaf)}" for name, leaf in named if not (is_array(leaf) and leaf.ndim)]
    if bad or not named:
        raise InputError(must, given="\n".join(bad[:10]) or "a tree without leaves", remedy=remedy)
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


SourcePosition = dict[str, Any]  # JSON: the kind of source, the counts of a _BatchCount, and the loader's state, if any
Notify = Callable[[int, int], None]

# The "kind" of a position, and its meaning for error messages.
_SOURCE_KINDS = {
    "batches": "anybatch.Batches",
    "get_state": "a loader with get_state and set_state",
    "state_dict": "a loader with state_dict and load_state_dict",
    "iterable": "an iterable without a state of its own",
}
_END = object()
_GRAIN_THREADS = 16  # grain's default
_START_AGAIN = "Or start from the beginning: resume=False, with another folder for checkpoints."


def open_source(
    batches: Any, *, epochs: int | None = None, position: SourcePosition | None = None, notify: Notify | None = None
) -> Iterator[tuple[Any, SourcePosition]]:
    """The batches of a source, each with the position after it.

    **Resumes exactly.** Opened with a position, a source continues with the batch after it, as if it had never
    stopped, provided that it gives the same batches each time it is made. `Batches` continue at once, and so do loaders
    that can save their state, such as grain's (`get_state`) and torchdata's (`state_dict`). From any other source, the
    batches before the position are drawn again and dropped.

    >>> source = [10, 20, 30]
    >>> opened = open_source(source)
    >>> (first, _), (second, position) = next(opened), next(opened)
    >>> [batch for batch, _ in open_source(source, epochs=2, position=position)]
    [30, 10, 20, 30]

    Args:
      batches: the source. An iterator or a generator is used once; anything else is iterated over again after each
        pass. A grain loader has the same order in each pass, unless it repeats itself: `.shuffle(seed=0).repeat()`.
      epochs: the number of passes; None for no limit.
      position: where to continue, or None for the first batch.
      notify: called as `notify(done, total)` after each batch that is drawn again and dropped.
    """
    source = _check_source(batches)
    epochs = None if epochs is None else whole_number("epochs", epochs, 1)
    if isinstance(source, Iterator) and epochs is not None and epochs > 1:
        raise InputError(
            "epochs must be 1 for an iterator or a generator, which can be iterated over once",
            given=f"epochs={epochs} and {_name(source)}",
            remedy="Pass what it is made from: a list, a data loader, anybatch.Batches(arrays, batch_size); or an "
            "object whose __iter__ makes a new iterator.",
        )
    if getattr(source, "single_pass", False):
        check_passes(source, None, epochs)
        epochs = 1
    if isinstance(source, Batches):
        _check_position(position, "batches", source)
        return _iterate_batches(source, _BatchCount.of(position), epochs)
    return _LoaderIteration(source, epochs, position, notify).iterate()


def check_passes(batches: Any, steps: int | None, epochs: int | None) -> None:
    """Refuses a second pass over `privacy.poisson_batches`, each of which must be used for one step only."""
    if not getattr(batches, "single_pass", False):
        return
    if (epochs or 1) > 1 or (steps or 0) > len(batches):
        asked = f"epochs={epochs}" if (epochs or 1) > 1 else f"steps={steps}"
        raise InputError(
            "Each batch of a private run is for one step: a second pass would repeat the draws of the first",
            given=f"{asked} for {len(batches)} batches",
            remedy="Draw a batch for each step: privacy.poisson_batches(..., steps=...).",
        )


def start_position(batches: Any) -> SourcePosition | None:
    """The position before the first batch of `privacy.poisson_batches`, which has a seed to save; None for others."""
    if not getattr(batches, "single_pass", False):
        return None
    return _BatchCount().position("get_state", state=batches.get_state())


@dataclasses.dataclass
class _BatchCount:
    """The number of complete passes over a source, of batches drawn in the current one, and of batches in all."""

    passes: int = 0
    batch: int = 0
    total: int = 0

    @classmethod
    def of(cls, position: SourcePosition | None) -> "_BatchCount":
        return cls() if position is None else cls(position["pass"], position["batch"], position["total"])

    def add_batch(self) -> None:
        self.batch, self.total = self.batch + 1, self.total + 1

    def add_pass(self) -> None:
        self.passes, self.batch = self.passes + 1, 0

    def position(self, kind: str, **more: Any) -> SourcePosition:
        return {"kind": kind, "pass": self.passes, "batch": self.batch, "total": self.total, **more}


def _iterate_batches(batches: Batches, count: _BatchCount, epochs: int | None) -> Iterator[tuple[Any, SourcePosition]]:
    while epochs is None or count.passes < epochs:
        for batch in batches.epoch(count.passes, count.batch):
            count.add_batch()
            yield batch, count.position("batches", settings=batches.settings())
        count.add_pass()


class _LoaderIteration:
    """The passes over a source other than `Batches`, with the loader's own state if it has one."""

    def __init__(self, source: Any, epochs: int | None, position: SourcePosition | None, notify: Notify | None) -> None:
        self.source, self.once, self.notify = source, isinstance(source, Iterator), notify
        self.epochs = 1 if self.once else epochs
        self.count, self.start = _BatchCount(), _BatchCount.of(position)
        self.iterator = iter(source)
        self.stateful = self.iterator  # the object with the state: the iterator, or the source
        # torchdata's loader loads a state itself, and then makes an iterator from it. Some datasets have these methods
        # but iterators without a state: the contents of their buffers would be lost.
        if hasattr(source, "load_state_dict") and hasattr(self.iterator, "state_dict"):
            self.stateful = source
        self.kind, self.get, self.set = _state_functions(self.stateful)
        _check_position(position, self.kind, source)
        if position is not None and "state" in position:
            self._load(position)

    def iterate(self) -> Iterator[tuple[Any, SourcePosition]]:
        try:
            if not self.once and self.epochs is not None and self.start.passes >= self.epochs:
                return
            if self.count.total < self.start.total:
                self._skip()
            while self._has_more_passes():
                batch = next(self.iterator, _END)
                if batch is _END:
                    self._end_pass()
                    continue
                self.count.add_batch()
                yield batch, self._position()
                del batch  # do not keep it in memory while the next one is made
        finally:
            self._close()

    def _has_more_passes(self) -> bool:
        return self.epochs is None or self.count.passes < self.epochs

    def _skip(self) -> None:
        """Draws the earlier batches of all passes again and drops them: a loader may shuffle each pass differently."""
        start = self.start
        while self.count.total < start.total and self.count.passes <= start.passes:
            if next(self.iterator, _END) is _END:
                if self.once:
                    break
                self._end_pass()
                continue
            self.count.add_batch()
            if self.notify is not None:
                self.notify(self.count.total, start.total)
        if self.count != start:
            raise InputError(
                "To resume, a source must give the same batches as before",
                given=f"{_name(self.source)}, whose passes end elsewhere: batch {start.batch} of pass "
                f"{start.passes + 1} was the last one drawn, number {start.total} of all",
                remedy=f"Pass the same source, made anew. {_START_AGAIN}",
            )

    def _end_pass(self) -> None:
        if self.count.batch == 0:
            number = self.count.passes + 1
            raise InputError(
                "Every pass over the batches must have at least one",
                given=f"none from {_name(self.source)}: pass {number} is empty",
                remedy="Pass a source with a batch in it; a loader may drop its only batch for being too small."
                if number == 1
                else "Pass an object whose __iter__ makes a new iterator each time, or epochs=1.",
            )
        self.count.add_pass()
        if not self._has_more_passes():
            return
        self._close()
        self.iterator = iter(self.source)
        if self.stateful is not self.source:
            self.stateful = self.iterator
            _, self.get, self.set = _state_functions(self.stateful)

    def _position(self) -> SourcePosition:
        if self.get is not None:
            state = _as_json(self.get())
            if state is not None:
                return self.count.position(self.kind, state=state)
        return self.count.position(self.kind)  # resuming draws the earlier batches again

    def _load(self, position: Any) -> None:
        try:
            state = position["state"]
            is_bytes = isinstance(state, dict) and list(state) == [_BYTES]
            self.set(base64.b64decode(state[_BYTES]) if is_bytes else state)
        except InputError:  # its message is more precise
            raise
        except Exception as error:
            raise InputError(
                "A loader must accept the state that it saved",
                given=f"{type(error).__name__} from {_name(self.source)}: {error}",
                remedy="Pass a loader made as before. grain's DataLoader compares repr(data_source): a data source of "
                f"your own needs a __repr__ without an address in memory. {_START_AGAIN}",
            ) from error
        if self.stateful is not self.iterator:
            self.iterator = iter(self.source)
        self.count = dataclasses.replace(self.start)

    def _close(self) -> None:
        # Only iterators that were made here are closed, e.g. to end the worker processes of a loader.
        close = None if self.once else getattr(self.iterator, "close", None)
        if callable(close):
            close()


def _state_functions(stateful: Any) -> tuple[str, Any, Any]:
    for kind, get, load in (("get_state", "get_state", "set_state"), ("state_dict", "state_dict", "load_state_dict")):
        if hasattr(stateful, get) and hasattr(stateful, load):
            return kind, getattr(stateful, get), getattr(stateful, load)
    return "iterable", None, None


def _check_source(source: Any) -> Any:
    given = describe(source) if is_array(source) else f"{_name(source)}"
    if is_array(source) or isinstance(source, (dict, str, bytes)):
        raise InputError(
            "batches must be an iterable of batches",
            given=f"{given}, which would give its rows, keys or letters",
            remedy="Pass anybatch.Batches(arrays, batch_size=32) to cut arrays into batches, or [batch] for one batch.",
        )
    if hasattr(source, "to_iter_dataset"):
        return _iter_dataset(source)
    if not hasattr(source, "__iter__") and not hasattr(source, "__getitem__"):
        call = " Call the function, and pass what it returns." if callable(source) else ""
        raise InputError(
            "batches must be an iterable of batches",
            given=given,
            remedy=f"Pass anybatch.Batches(arrays, batch_size=32), a data loader, a list or a generator.{call}",
        )
    return source


def _iter_dataset(dataset: Any) -> Any:
    """A grain MapDataset as an IterDataset, which has a state, with a buffer of 16 batches instead of grain's 500."""
    try:
        grain = importlib.import_module("grain")
    except ImportError:  # a class of another library with such a method
        return dataset.to_iter_dataset()
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=_GRAIN_THREADS, prefetch_buffer_size=_GRAIN_THREADS))


def _check_position(position: SourcePosition | None, kind: str, source: Any) -> None:
    if position is None:
        return
    if position["kind"] != kind:
        raise InputError(
            "A position must be from the same kind of source",
            given=f"a position of {_SOURCE_KINDS[position['kind']]}, for {_name(source)}",
            remedy=f"Pass the source that the run had before. {_START_AGAIN}",
        )
    before = position.get("settings", {})
    now = source.settings() if kind == "batches" else before
    if before != now:
        lines = [f"{name}={now[name]}, and {before.get(name)} before" for name in now if now[name] != before.get(name)]
        raise InputError(
            "Batches of a resumed run must have the same options as before, or their order changes",
            given="\n".join(lines),
            remedy=f"Pass Batches with the options from before. {_START_AGAIN}",
        )


def _name(source: Any) -> str:
    return f"a {type(source).__name__}"


_BYTES = "__bytes__"


def _as_json(state: Any) -> Any:
    """A copy of the state of a loader as JSON values, with bytes in base64; None if it would not come back the same."""
    if isinstance(state, bytes):  # grain's DataLoader
        return {_BYTES: base64.b64encode(state).decode()}
    try:
        copy = json.loads(json.dumps(state))
    except (TypeError, ValueError):
        return None
    return copy if copy == state else None
