"""How fast a run goes, known from when its figures are read.

The figures of each step, read when they are there: a row of the log.

The log of a run: one row for each step, in CSV or in JSON lines, whole whenever the process is killed.
"""

import abc
import collections
import csv
import io
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from anybatch.call.checks import is_array, must_be_path, named_leaves
from anybatch.call.files import read_regular
from anybatch.errors import AnybatchError, InputError, user_stacklevel
from anybatch.gradient_noise.noise_scale import NoiseScale
from anybatch.training.checkpoint_folder import WriterLock
from anybatch.training.metrics import Metrics

# Rates are those of so many seconds.
WINDOW = 2.0


class Amount(NamedTuple):
    """What was done."""

    examples: int
    tokens: int


class Throughput:
    """Examples and tokens per second.

    Nobody sees when a step ends on the device: its figures are read some steps later, at an even pace. So the pace is
    that of the readings. Where all that is under way is waited for, to evaluate or to save, the readings come all at
    once and say nothing; but then it is known that everything since the last such time is done.
    """

    def __init__(self) -> None:
        self._total = Amount(0, 0)
        self._read: collections.deque[tuple[float, Amount]] = collections.deque()
        self._since: tuple[float, Amount] | None = None  # when work went on after everything had been done
        self._last = (math.nan, math.nan)

    def go_on(self, *, examples: int = 0, tokens: int = 0) -> None:
        """Everything before is done, and work goes on from here.

        Args:
          examples: what is under way, and not to count: the first step, which was compiled.
          tokens: likewise.
        """
        under_way = Amount(self._total.examples + examples, self._total.tokens + tokens)
        self._since = (time.perf_counter(), under_way)
        self._read.clear()

    def add(self, examples: int, tokens: int) -> None:
        """One more step is done."""
        self._total = Amount(self._total.examples + examples, self._total.tokens + tokens)

    def at_a_reading(self) -> tuple[float, float]:
        """The rates after a step whose figures were read in their turn."""
        now = time.perf_counter()
        while len(self._read) > 1 and now - self._read[1][0] > WINDOW:
            self._read.popleft()
        if self._read:
            self._last = self._between(self._read[0], (now, self._total))
        self._read.append((now, self._total))
        return self._last

    def when_all_is_done(self) -> tuple[float, float]:
        """The rates since work went on last."""
        if self._since is not None and self._total.examples > self._since[1].examples:
            self._last = self._between(self._since, (time.perf_counter(), self._total))
        return self._last

    def _between(self, then: tuple[float, Amount], now: tuple[float, Amount]) -> tuple[float, float]:
        seconds = max(now[0] - then[0], 1e-9)
        return (now[1].examples - then[1].examples) / seconds, (now[1].tokens - then[1].tokens) / seconds


# How many steps may be on their way to the device before the first of them is waited for.
LATE = 2

# How the noise of a step fades out of the average, step by step.
DECAY = 0.98

# So many steps without an update, one after the other, are worth a word.
WORRYING = 20


class LogRows:
    """Turns the metrics of steps into rows, two steps later: to wait for one at once would leave the device idle.

    Args:
      kept: what another process has kept (`kept`), to go on with.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        kept = kept or {}
        self._waiting: collections.deque[tuple[int, Any, int]] = collections.deque()
        self._skipped, self._before = int(kept.get("skipped", 0)), float(kept.get("seconds", 0.0))
        self._noise = NoiseScale(*kept["noise"]) if kept.get("noise") else None
        self._begun = time.perf_counter()
        self._throughput, self._has_begun = Throughput(), False
        self._in_a_row = 0

    @property
    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, fit for JSON."""
        noise = None if self._noise is None else [float(leaf) for leaf in jax.tree.leaves(self._noise)]
        return {"skipped": self._skipped, "seconds": self.seconds, "noise": noise}

    @property
    def seconds(self) -> float:
        """That the run has taken so far, in all its processes."""
        return self._before + time.perf_counter() - self._begun

    @property
    def noise(self) -> NoiseScale | None:
        """Of the gradients, averaged over the last steps."""
        return self._noise

    def add(self, step: int, metrics: Any, batch: Any) -> None:
        """One more step."""
        figures = _figures(metrics)
        for leaf in jax.tree.leaves(figures):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        examples = _num_examples(metrics, batch)
        self._waiting.append((step, figures, examples))
        if not self._has_begun:  # the first step was compiled, which is not to count
            self._has_begun = True
            self._throughput.go_on(examples=examples, tokens=_num_tokens(metrics))

    def go_on(self) -> None:
        """Work goes on from here, after everything before was done."""
        self._throughput.go_on()

    def ready(self) -> Iterator[dict[str, Any]]:
        """The rows of all steps but the last two: waits until they are done."""
        while len(self._waiting) > LATE:
            row, has_tokens = self._row(*self._waiting.popleft())
            yield row | self._rates(self._throughput.at_a_reading(), has_tokens)

    def all_of_them(self) -> list[dict[str, Any]]:
        """The rows of all steps: waits until the last of them is done."""
        rows = [self._row(*each) for each in self._waiting]
        self._waiting.clear()
        rates = self._throughput.when_all_is_done()
        return [row | self._rates(rates, has_tokens) for row, has_tokens in rows]

    def _row(self, step: int, figures: dict[str, Any], examples: int) -> tuple[dict[str, Any], bool]:
        """What a step told, and whether it told of tokens."""
        fetched = jax.device_get(figures)
        read = {name: fetched[name] for name in figures}  # in their own order
        tokens, noise, skipped = read.pop("tokens", None), read.pop("noise", None), read.pop("skipped", None)
        row: dict[str, Any] = {"step": step} | {name: _plain_number(value) for name, value in read.items()}
        if skipped is not None:
            self._count_skipped(bool(skipped))
            row["skipped"] = self._skipped
        if noise is not None:
            row["noise_scale"] = self._add_noise(noise)
        self._throughput.add(examples, int(tokens or 0))
        return row, tokens is not None

    def _rates(self, rates: tuple[float, float], has_tokens: bool) -> dict[str, float]:
        named = {"examples_per_second": rates[0]} | ({"tokens_per_second": rates[1]} if has_tokens else {})
        return named | {"seconds": round(self.seconds, 3)}

    def _add_noise(self, noise: NoiseScale) -> float:
        """The noise scale, averaged: as a float, since a dozen operations on a device would be for one number."""
        noise = NoiseScale(*(float(leaf) for leaf in jax.tree.leaves(noise)))
        if all(map(math.isfinite, jax.tree.leaves(noise))):
            self._noise = noise if self._noise is None else DECAY * self._noise + noise
        if self._noise is None or not self._noise.steps:
            return math.nan
        if self._noise.gradient_square_sum <= 0:
            return math.inf if self._noise.trace_sum > 0 else math.nan
        return self._noise.trace_sum / self._noise.gradient_square_sum

    def _count_skipped(self, skipped: bool) -> None:
        self._skipped += skipped
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row == WORRYING:
            warnings.warn(
                f"The gradients of {WORRYING} steps in a row were not finite: nothing is being learned. A smaller "
                "learning rate or a smaller loss scale may help; so may a look at the batches.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )


def evaluation(result: Any) -> dict[str, float]:
    """What an evaluation found, by the names of its columns.

    >>> evaluation({"accuracy": 0.5}), evaluation(2)
    ({'eval.accuracy': 0.5}, {'eval': 2.0})

    Raises:
      InputError: if it is no number, and no mapping of them.
    """
    named = (
        {f"eval.{name}": value for name, value in result.items()} if isinstance(result, Mapping) else {"eval": result}
    )
    try:
        return {name: float(value) for name, value in named.items()}
    except (TypeError, ValueError):
        raise InputError(
            "evaluate must return a number, or a mapping of numbers",
            given=f"{result!r}",
            remedy='For example return {"accuracy": jnp.mean(predictions == labels)}.',
        ) from None


def _figures(metrics: Any) -> dict[str, Any]:
    """The numbers in what a step told, by name: ours, or whatever another step returns."""
    if isinstance(metrics, Metrics):
        own = {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "aux": metrics.aux}
        figures = {key: value for name, part in own.items() for key, value in _scalars(name, part).items()}
        figures |= _scalars("skipped", metrics.skipped) | _scalars("tokens", metrics.tokens)
        is_one_step = metrics.noise is not None and np.ndim(metrics.noise.steps) == 0
        return figures | ({"noise": metrics.noise} if is_one_step else {})
    if isinstance(metrics, Mapping):
        # What a step of anybatch.privacy calls not private is for whoever asked for it, and not for a log.
        parts = {str(key): part for key, part in metrics.items() if key != "not_private"}
        return {name: value for key, part in parts.items() for name, value in _scalars(key, part).items()}
    if hasattr(metrics, "_asdict"):
        return _figures(metrics._asdict())
    return _scalars("loss", metrics)


def _scalars(name: str, tree: Any) -> dict[str, Any]:
    found = {}
    for path, leaf in named_leaves(name, tree):
        kinds = (np.bool_, np.integer, np.floating)
        is_number = is_array(leaf) and leaf.ndim == 0 and any(jax.dtypes.issubdtype(leaf.dtype, each) for each in kinds)
        if is_number or isinstance(leaf, (int, float)):
            found[path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")] = leaf
    return found


def _num_examples(metrics: Any, batch: Any) -> int:
    if isinstance(metrics, Metrics) and isinstance(metrics.examples, int):
        return metrics.examples
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch) if is_array(leaf)]
    return next((shape[0] for shape in shapes if shape), 0)


def _num_tokens(metrics: Any) -> int:
    return metrics.tokens if isinstance(metrics, Metrics) and isinstance(metrics.tokens, int) else 0


def _plain_number(value: Any) -> Any:
    value = np.asarray(value)
    return int(value) if value.dtype.kind in "biu" else float(value)


Row = dict[str, int | float]


Check = Callable[[Path, list[Row]], None]


class LogError(AnybatchError, OSError):
    """A row that could not be written: the disk is full, for one. The rows before are as they were."""

    def __init__(self, path: Path, error: OSError | InputError) -> None:
        self.path = path
        reason = error.given if isinstance(error, InputError) else error.strerror or error
        super().__init__(
            f"The log {path} could not be written: {reason}. Its rows so far are all there.\n"
            "Make space, or name a log on another disk, e.g. log='/tmp/run.csv'."
        )


class Log:
    """Writes rows, each as soon as it is there.

    - **Whole rows.** A process that is killed in the middle of a row leaves the rows before it as they were, and the
      next one drops the half.
    - **One writer.** Another process that opens the same log is refused.
    - **No row is lost.** If an editor replaces the file, or it is moved away, rows go on after what is there.
    - **As if it had never stopped.** With `after`, the log of a run that goes on is, byte for byte, that of one that
      was never interrupted, if it writes the same rows.

    Numbers come back from `read_log` exactly as they were. JSON has no infinities: they become null in JSON lines, as
    does NaN, and are read as NaN.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Log(f"{folder}/run.csv") as log:
    ...         log.write({"step": 1, "loss": 0.5})
    ...         log.write({"step": 2, "loss": 0.25, "eval": 0.75})  # a new column, empty before
    ...     with Log(f"{folder}/run.csv", after=1) as log:
    ...         log.write({"step": 2, "loss": 0.125})
    ...     read_log(f"{folder}/run.csv")
    [{'step': 1, 'loss': 0.5}, {'step': 2, 'loss': 0.125}]

    Args:
      paths: of one file or of several, which get the same rows; .csv or .jsonl. Folders are made.
      after: goes on with the rows of a file up to this step, and drops later ones. None begins a new file.
      overwrite: whether a new file may replace one that is there.
      check: called with the path and all rows of each file that is gone on with, before any of them is dropped.

    Raises:
      InputError: for a path that cannot be written to, or a file that is there and is no log, or should not go, or
        that another writer has open.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        after: int | None = None,
        overwrite: bool = False,
        check: Check | None = None,
    ) -> None:
        resolved = check_log(paths)
        formats = [_format(path) for path in resolved]
        self._files: list[_File] = []
        self._locks: list[WriterLock] = []
        try:
            self._locks += map(_locked, resolved)
            # All are checked before the first is changed.
            kept = [_kept(path, after, overwrite, check) for path in resolved]
            self._files += (kind(path, rows) for kind, path, rows in zip(formats, resolved, kept, strict=True))
        except BaseException:
            self.close()
            raise
        self._first = kept[0][0] if kept[0] else None

    @property
    def first_rows(self) -> dict[str, Row | None]:
        """The `finite` numbers of its first row, by which a log is known again; None before it. One for each path."""
        return {str(file.path): self._first and finite(self._first) for file in self._files}

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row, and hands it to the system. What is None is left out.

        Args:
          row: name -> number. It has a "step".

        Raises:
          LogError: if it could not be written.
        """
        checked = self._with_each(row, lambda file, checked: file.append(checked))
        self._first = self._first or checked

    def amend(self, row: Mapping[str, Any]) -> None:
        """Replaces the last row, as when something else became known of the same step.

        Args:
          row: as for `write`.

        Raises:
          LogError: if it could not be written.
        """
        checked = self._with_each(row, lambda file, checked: file.amend(checked))
        if self._first is None or self._first["step"] == checked["step"]:
            self._first = checked

    def _with_each(self, row: Mapping[str, Any], write: Callable[["_File", Row], None]) -> Row:
        checked = _checked(row)
        for file in self._files:
            try:
                write(file, checked)
            except (OSError, InputError) as error:
                raise LogError(file.path, error) from error
        return checked

    def close(self) -> None:
        """Closes the files, and lets another writer in."""
        for file in self._files:
            file.close()
        for lock in self._locks:
            lock.release()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def check_log(paths: Any) -> list[Path]:
    """The files of a log, links followed, from what `fit` is given as `log`.

    Raises:
      InputError: if it is no path, no several different ones, or a name says neither CSV nor JSON lines.
    """
    several = list(paths) if isinstance(paths, (list, tuple, set, frozenset)) else [paths]
    for each in several:
        must_be_path("log", each, "run.csv")
    resolved = [Path(os.path.realpath(each)) for each in several]
    if not resolved or len(set(resolved)) < len(resolved):
        raise InputError(
            "A log must be one file, or several different ones",
            given=f"{[os.fspath(each) for each in several]}",
            remedy='Name them, e.g. log="run.csv" or log=["run.csv", "run.jsonl"].',
        )
    for each in resolved:
        _format(each)
    return resolved


def read_log(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a log: whole numbers as int, others as float. What a row does not have is not in it.

    A last row that was only half written is left out.

    Raises:
      InputError: if it is not there, or not a log.
    """
    path = Path(path)
    kind = _format(path)
    try:
        content = read_regular(path, None)
    except OSError as error:
        raise InputError(
            "A log must be a file that can be read", given=f"{path} ({error.strerror})", remedy="Name another one."
        ) from error
    # What comes after the last end of a line was being written.
    text = content[: content.rfind(b"\n") + 1].decode(errors="replace")
    rows: list[Row] = []
    try:
        for row in kind.parsed(text):
            rows.append(_checked(row))
    except (ValueError, AttributeError, TypeError, csv.Error) as error:
        raise InputError(
            f"A log must be one that anybatch wrote: rows of numbers, in {kind.name}",
            given=f"{path}, whose line {len(rows) + kind.first_line} is something else: {str(error).splitlines()[0]}",
            remedy="Name another file, or correct that line.",
        ) from error
    return rows


class _File(abc.ABC):
    """A file that grows by whole lines, or is replaced as a whole."""

    name = ""
    first_line = 1  # of the rows
    _file: Any = None

    def __init__(self, path: Path, rows: list[Row]) -> None:
        self.path = path
        try:
            self._replace(rows)
        except OSError as error:
            raise _not_writable(path, error) from error

    @staticmethod
    @abc.abstractmethod
    def parsed(text: str) -> Iterator[dict[str, Any]]:
        """The rows of whole lines, not checked."""

    @abc.abstractmethod
    def append(self, row: Row) -> None:
        """Adds a row: all of it, or an OSError and nothing."""

    def amend(self, row: Row) -> None:
        """Replaces the last row."""
        self._replace([*self._rows()[:-1], row])

    def close(self) -> None:
        self._file.close()

    @abc.abstractmethod
    def _text(self, rows: list[Row]) -> str:
        """All lines of a file with these rows."""

    def _rows(self) -> list[Row]:
        """What is there now: nothing, if somebody has moved the file away."""
        return read_log(self.path) if self.path.exists() else []

    def _is_ours(self) -> bool:
        """Whether the file of that name is still the one that was opened: an editor may have written another."""
        return self.path.exists() and os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))

    def _write(self, text: str) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            _write_all(self._file, text.encode())
        except OSError:
            os.ftruncate(self._file.fileno(), size)  # a half row would spoil the next
            raise

    def _replace(self, rows: list[Row]) -> None:
        """The old content or the new, and nothing between."""
        partial = self.path.with_name(f".{self.path.name}.partial")
        try:
            with open(partial, "wb", buffering=0) as file:
                _write_all(file, self._text(rows).encode())
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file = open(self.path, "ab", buffering=0)


class _JsonLines(_File):
    name = "JSON lines"

    def append(self, row: Row) -> None:
        if self._is_ours():
            self._write(self._text([row]))
        else:
            self._replace([*self._rows(), row])

    def _text(self, rows: list[Row]) -> str:
        lines = [{name: value if math.isfinite(value) else None for name, value in row.items()} for row in rows]
        return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)

    @staticmethod
    def parsed(text: str) -> Iterator[dict[str, Any]]:
        for line in text.split("\n")[:-1]:
            yield {name: math.nan if value is None else value for name, value in json.loads(line).items()}


class _Csv(_File):
    name = "CSV"
    first_line = 2

    def append(self, row: Row) -> None:
        if self._is_ours() and all(name in self._columns for name in row):
            self._write(_csv_line([_cell(row, name) for name in self._columns]))
        else:
            self._replace([*self._rows(), row])

    def _text(self, rows: list[Row]) -> str:
        columns = _columns(rows)
        lines = [columns, *([_cell(row, name) for name in columns] for row in rows)]
        return "".join(map(_csv_line, lines)) if rows else ""

    def _replace(self, rows: list[Row]) -> None:
        super()._replace(rows)
        self._columns = _columns(rows)  # not before: with a full disk, the old ones stay

    @staticmethod
    def parsed(text: str) -> Iterator[dict[str, Any]]:
        lines = csv.reader(io.StringIO(text), strict=True)
        columns = next(lines, [])
        for cells in lines:
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells, and {len(columns)} columns")
            yield {name: _number(cell) for name, cell in zip(columns, cells, strict=True) if cell}


_FORMATS: dict[str, type[_File]] = {".csv": _Csv, ".jsonl": _JsonLines}


def _format(path: Path) -> type[_File]:
    if path.suffix not in _FORMATS:
        raise InputError(
            "A log must be a file of CSV or of JSON lines, by its name",
            given=f"{path.name!r}",
            remedy=f"Name it {path.stem + '.csv'!r} or {path.stem + '.jsonl'!r}.",
        )
    return _FORMATS[path.suffix]


def _locked(path: Path) -> WriterLock:
    lock, another = WriterLock(path.with_name(f".{path.name}.lock"), is_removed=True), path.with_stem(path.stem + "-2")
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire("A log", path, remedy=f"Wait for it to end, or name another log, e.g. log={str(another)!r}.")
    except OSError as error:
        raise _not_writable(path, error) from error
    return lock


def _not_writable(path: Path, error: OSError) -> InputError:
    return InputError(
        "A log must be a file that can be written to",
        given=f"{path} ({error.strerror})",
        remedy="Name another one, or see to its permissions and the space on its disk.",
    )


def _kept(path: Path, after: int | None, overwrite: bool, check: Check | None) -> list[Row]:
    if not path.exists():
        return []
    if after is not None and path.is_file():
        rows = read_log(path)
        if check is not None:
            check(path, rows)
        return [row for row in rows if row["step"] <= after]
    if not path.is_file() or (not overwrite and path.stat().st_size):
        raise InputError(
            "A new log must not replace a file that is there",
            given=f"{path}",
            remedy="Name another one, go on with it from a checkpoint of its run, or delete it first.",
        )
    return []


def _checked(row: Mapping[str, Any]) -> Row:
    """The numbers of a row as those of Python."""
    numbers = {name: _plain(name, value) for name, value in row.items() if value is not None}
    if not isinstance(numbers.get("step"), int):
        raise InputError(
            'A row must have a "step", a whole number',
            given=f"step={row.get('step')!r}",
            remedy='Pass it, e.g. log.write({"step": 1, "loss": 0.5}).',
        )
    return numbers


def finite(row: Row) -> Row:
    """What comes back from a log of any format."""
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _plain(name: Any, value: Any) -> int | float:
    named = isinstance(name, str) and name and "\n" not in name and "\r" not in name
    array = np.asarray(value)
    if not named or array.ndim or array.dtype.kind in "cOSUMmT" or array.dtype.names:
        raise InputError(
            "A row must be of names and numbers",
            given=f"{name!r}: {value!r}",
            remedy="Leave it out, or pass a number of it, e.g. float(array.mean()).",
        )
    return int(array) if array.dtype.kind in "biu" else float(array)


def _number(cell: str) -> int | float:
    try:
        return int(cell)
    except ValueError:
        return float(cell)


def _columns(rows: list[Row]) -> list[str]:
    """In the order in which they came, as in a run that was never interrupted."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(row: Row, name: str) -> str:
    return repr(row[name]) if name in row else ""


def _csv_line(cells: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _write_all(file: Any, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]
