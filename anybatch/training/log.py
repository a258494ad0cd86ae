"""The log of a run: one row per step, as CSV or JSON lines, in files that stay readable if the process is killed.

`LogRows` turns the metrics of each step into a row, some steps later, with throughput. `Log` writes rows to one or
several files, and `read_log` reads them. The two formats, `_Csv` and `_JsonLines`, share `_File`, which appends
complete lines or replaces the complete file.
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
from anybatch.training.step import Metrics

# The steps that may be in flight on the device before the metrics of the first of them are read.
IN_FLIGHT = 2

# The factor by which older steps count less in the average of the noise, per step.
DECAY = 0.98

# A warning is given after so many skipped steps in a row.
MANY_SKIPPED = 20

# Throughput is averaged over so many seconds.
WINDOW = 2.0


class LogRows:
    """Collects the metrics of steps and returns them as rows two steps later.

    Reading the metrics of a step waits for it. Two more steps are enqueued by then, so the device does not idle.

    Args:
      saved: the property `saved` of an earlier process, to continue its counts.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        saved = saved or {}
        self._in_flight: collections.deque[tuple[int, Any, int]] = collections.deque()
        self._skipped, self._seconds_before = int(saved.get("skipped", 0)), float(saved.get("seconds", 0.0))
        self._noise = NoiseScale(*saved["noise"]) if saved.get("noise") else None
        self._start = time.perf_counter()
        self._throughput, self._has_started = Throughput(), False
        self._skipped_in_a_row = 0

    @property
    def saved(self) -> dict[str, Any]:
        """The part of this object that goes into a checkpoint, as JSON values."""
        noise = None if self._noise is None else [float(leaf) for leaf in jax.tree.leaves(self._noise)]
        return {"skipped": self._skipped, "seconds": self.seconds, "noise": noise}

    @property
    def seconds(self) -> float:
        """The duration of the run so far, including earlier processes."""
        return self._seconds_before + time.perf_counter() - self._start

    @property
    def noise(self) -> NoiseScale | None:
        """The gradient noise, averaged over recent steps."""
        return self._noise

    def add(self, step: int, metrics: Any, batch: Any) -> None:
        """Adds a step whose metrics may still be computing."""
        scalars = _named_scalars(metrics)
        for leaf in jax.tree.leaves(scalars):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        examples = _num_examples(metrics, batch)
        self._in_flight.append((step, scalars, examples))
        if not self._has_started:  # the first step includes compilation, which must not count
            self._has_started = True
            self._throughput.restart(examples=examples, tokens=_num_tokens(metrics))

    def restart_clock(self) -> None:
        """Called when steps continue after a pause for an evaluation or a checkpoint, which must not count."""
        self._throughput.restart()

    def ready(self) -> Iterator[dict[str, Any]]:
        """The rows of all steps but the last two. Waits for these steps."""
        while len(self._in_flight) > IN_FLIGHT:
            row, has_tokens = self._row(*self._in_flight.popleft())
            yield row | self._rates(self._throughput.since_last_reads(), has_tokens)

    def flush(self) -> list[dict[str, Any]]:
        """The rows of all steps. Waits for the last of them."""
        rows = [self._row(*each) for each in self._in_flight]
        self._in_flight.clear()
        rates = self._throughput.since_restart()
        return [row | self._rates(rates, has_tokens) for row, has_tokens in rows]

    def _row(self, step: int, scalars: dict[str, Any], examples: int) -> tuple[dict[str, Any], bool]:
        """The row of a step without its rates, and whether its metrics count tokens."""
        fetched = jax.device_get(scalars)
        values = {name: fetched[name] for name in scalars}  # device_get sorts the names
        tokens, noise, skipped = values.pop("tokens", None), values.pop("noise", None), values.pop("skipped", None)
        row: dict[str, Any] = {"step": step} | {name: _as_python_number(value) for name, value in values.items()}
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
        """The averaged noise scale. Computed on the host: on the device it would take a dozen tiny operations."""
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
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == MANY_SKIPPED:
            warnings.warn(
                f"The gradients of {MANY_SKIPPED} steps in a row were not finite: nothing is being learned. Try a "
                "smaller learning rate or a smaller loss scale, and check the batches for NaN.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )


class Amount(NamedTuple):
    """Numbers of examples and tokens."""

    examples: int
    tokens: int


class Throughput:
    """Examples and tokens per second, from the times at which the metrics of steps are read.

    The end of a step on the device cannot be observed, but its metrics are read a fixed number of steps later, so the
    times of reading have the same pace. Before an evaluation or a checkpoint, the metrics of all steps are read at
    once, and these times say nothing; instead, the rate is that of all steps since the last restart.
    """

    def __init__(self) -> None:
        self._total = Amount(0, 0)
        self._reads: collections.deque[tuple[float, Amount]] = collections.deque()  # those within the window
        self._restarted: tuple[float, Amount] | None = None
        self._last = (math.nan, math.nan)

    def restart(self, *, examples: int = 0, tokens: int = 0) -> None:
        """Starts the clock, when all steps so far are done.

        Args:
          examples: examples in flight that must not count: those of the first step, which includes compilation.
          tokens: tokens in flight that must not count.
        """
        in_flight = Amount(self._total.examples + examples, self._total.tokens + tokens)
        self._restarted = (time.perf_counter(), in_flight)
        self._reads.clear()

    def add(self, examples: int, tokens: int) -> None:
        """Adds a step that is done."""
        self._total = Amount(self._total.examples + examples, self._total.tokens + tokens)

    def since_last_reads(self) -> tuple[float, float]:
        """The rates over the window, after the metrics of one step were read."""
        now = time.perf_counter()
        while len(self._reads) > 1 and now - self._reads[1][0] > WINDOW:
            self._reads.popleft()
        if self._reads:
            self._last = self._between(self._reads[0], (now, self._total))
        self._reads.append((now, self._total))
        return self._last

    def since_restart(self) -> tuple[float, float]:
        """The rates since the last restart, when all steps are done."""
        if self._restarted is not None and self._total.examples > self._restarted[1].examples:
            self._last = self._between(self._restarted, (time.perf_counter(), self._total))
        return self._last

    def _between(self, then: tuple[float, Amount], now: tuple[float, Amount]) -> tuple[float, float]:
        seconds = max(now[0] - then[0], 1e-9)
        return (now[1].examples - then[1].examples) / seconds, (now[1].tokens - then[1].tokens) / seconds


def evaluation_columns(result: Any) -> dict[str, float]:
    """The result of `evaluate` as columns of the log.

    >>> evaluation_columns({"accuracy": 0.5}), evaluation_columns(2)
    ({'eval.accuracy': 0.5}, {'eval': 2.0})

    Raises:
      InputError: if it is neither a number nor a mapping of numbers.
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


def _named_scalars(metrics: Any) -> dict[str, Any]:
    """The numbers in the metrics of a step, by name: an `anybatch.Metrics`, or what the user's own step returns."""
    if isinstance(metrics, Metrics):
        ours = {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "aux": metrics.aux}
        scalars = {key: value for name, part in ours.items() for key, value in _scalars(name, part).items()}
        scalars |= _scalars("skipped", metrics.skipped) | _scalars("tokens", metrics.tokens)
        is_one_step = metrics.noise is not None and np.ndim(metrics.noise.steps) == 0
        return scalars | ({"noise": metrics.noise} if is_one_step else {})
    if isinstance(metrics, Mapping):
        # Steps of anybatch.privacy return unprotected numbers under this name. They must not reach a log.
        parts = {str(key): part for key, part in metrics.items() if key != "not_private"}
        return {name: value for key, part in parts.items() for name, value in _scalars(key, part).items()}
    if hasattr(metrics, "_asdict"):
        return _named_scalars(metrics._asdict())
    return _scalars("loss", metrics)


def _scalars(name: str, tree: Any) -> dict[str, Any]:
    found = {}
    for path, leaf in named_leaves(name, tree):
        families = (np.bool_, np.integer, np.floating)
        is_number = (
            is_array(leaf) and leaf.ndim == 0 and any(jax.dtypes.issubdtype(leaf.dtype, each) for each in families)
        )
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


def _as_python_number(value: Any) -> Any:
    value = np.asarray(value)
    return int(value) if value.dtype.kind in "biu" else float(value)


Row = dict[str, int | float]
CheckRows = Callable[[Path, list[Row]], None]


class LogError(AnybatchError, OSError):
    """A row that could not be written, e.g. because the disk is full. Earlier rows are not affected."""

    def __init__(self, path: Path, error: OSError | InputError) -> None:
        self.path = path
        reason = error.given if isinstance(error, InputError) else error.strerror or error
        super().__init__(
            f"The log {path} could not be written: {reason}. Its rows so far are all there.\n"
            "Make space, or name a log on another disk, e.g. log='/tmp/run.csv'."
        )


class Log:
    """Writes rows to files, each row at once.

    - **Complete rows.** If the process is killed in the middle of a row, earlier rows are not affected, and the next
      process drops the incomplete one.
    - **One writer.** Another process that opens the same log is refused.
    - **No row is lost.** If an editor replaces the file, or it is moved away, new rows are added to what is there.
    - **As if never interrupted.** With `after`, the log of a resumed run equals, byte for byte, that of a run that was
      never interrupted, if it writes the same rows.

    `read_log` returns the same numbers. JSON has no infinities: JSON lines store infinities and NaN as null, which is
    read as NaN.

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
      paths: one file, or several that get the same rows; .csv or .jsonl. Missing folders are created.
      after: the step after which to continue existing files: later rows are dropped. None starts new files.
      overwrite: whether new files may replace existing ones.
      check: called with the path and all rows of each file to continue, before any row is dropped.

    Raises:
      InputError: for a path that cannot be written to, an existing file that is not a log or must not be replaced, or a
        file that another writer has open.
    """

    def __init__(
        self,
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        after: int | None = None,
        overwrite: bool = False,
        check: CheckRows | None = None,
    ) -> None:
        resolved = check_log(paths)
        formats = [_format(path) for path in resolved]
        self._files: list[_File] = []
        self._locks: list[WriterLock] = []
        try:
            self._locks += map(_locked, resolved)
            # All files are checked before the first is changed.
            kept = [_kept_rows(path, after, overwrite, check) for path in resolved]
            self._files += (
                file_type(path, rows) for file_type, path, rows in zip(formats, resolved, kept, strict=True)
            )
        except BaseException:
            self.close()
            raise
        self._first = kept[0][0] if kept[0] else None

    @property
    def first_rows(self) -> dict[str, Row | None]:
        """The finite numbers of the first row, by which a log is recognized, or None without rows; for each path."""
        return {str(file.path): self._first and finite_numbers(self._first) for file in self._files}

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row, and passes it to the operating system. Entries that are None are left out.

        Args:
          row: name -> number, with a "step".

        Raises:
          LogError: if it could not be written.
        """
        checked = self._for_each_file(row, lambda file, checked: file.append(checked))
        self._first = self._first or checked

    def amend(self, row: Mapping[str, Any]) -> None:
        """Replaces the last row, e.g. to add an evaluation of the same step.

        Args:
          row: as for `write`.

        Raises:
          LogError: if it could not be written.
        """
        checked = self._for_each_file(row, lambda file, checked: file.amend(checked))
        if self._first is None or self._first["step"] == checked["step"]:
            self._first = checked

    def _for_each_file(self, row: Mapping[str, Any], write: Callable[["_File", Row], None]) -> Row:
        checked = _checked(row)
        for file in self._files:
            try:
                write(file, checked)
            except (OSError, InputError) as error:
                raise LogError(file.path, error) from error
        return checked

    def close(self) -> None:
        """Closes the files, and releases their locks."""
        for file in self._files:
            file.close()
        for lock in self._locks:
            lock.release()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def check_log(paths: Any) -> list[Path]:
    """The files of `fit(log=...)`, with links resolved.

    Raises:
      InputError: if it is neither a path nor several different ones, or a name ends neither in .csv nor in .jsonl.
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
    """The rows of a log: whole numbers as int, others as float. Empty cells are left out.

    An incomplete last row is left out, too.

    Raises:
      InputError: if the file does not exist, or is not a log.
    """
    path = Path(path)
    file_format = _format(path)
    try:
        content = read_regular(path, None)
    except OSError as error:
        raise InputError(
            "A log must be a file that can be read", given=f"{path} ({error.strerror})", remedy="Name another one."
        ) from error
    # Text after the last newline is an incomplete row.
    text = content[: content.rfind(b"\n") + 1].decode(errors="replace")
    rows: list[Row] = []
    try:
        for row in file_format.parsed(text):
            rows.append(_checked(row))
    except (ValueError, AttributeError, TypeError, csv.Error) as error:
        line = len(rows) + file_format.first_line
        raise InputError(
            f"A log must be one that anybatch wrote: rows of numbers, in {file_format.name}",
            given=f"{path}, whose line {line} is something else: {str(error).splitlines()[0]}",
            remedy="Name another file, or correct that line.",
        ) from error
    return rows


def finite_numbers(row: Row) -> Row:
    """The numbers of a row that come back from a log of either format."""
    return {name: value for name, value in row.items() if math.isfinite(value)}


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
        remedy="Name another one, or check its permissions and the space on its disk.",
    )


def _kept_rows(path: Path, after: int | None, overwrite: bool, check: CheckRows | None) -> list[Row]:
    """The rows that a file starts with: those up to step `after`, or none."""
    if not path.exists():
        return []
    if after is not None and path.is_file():
        rows = read_log(path)
        if check is not None:
            check(path, rows)
        return [row for row in rows if row["step"] <= after]
    if not path.is_file() or (not overwrite and path.stat().st_size):
        raise InputError(
            "A new log must not replace an existing file",
            given=f"{path}",
            remedy="Name another one, resume its run from a checkpoint to continue it, or delete it first.",
        )
    return []


def _checked(row: Mapping[str, Any]) -> Row:
    """A row with Python numbers."""
    numbers = {name: _python_number(name, value) for name, value in row.items() if value is not None}
    if not isinstance(numbers.get("step"), int):
        raise InputError(
            'A row must have a "step", a whole number',
            given=f"step={row.get('step')!r}",
            remedy='Pass it, e.g. log.write({"step": 1, "loss": 0.5}).',
        )
    return numbers


def _python_number(name: Any, value: Any) -> int | float:
    is_name = isinstance(name, str) and name and "\n" not in name and "\r" not in name
    array = np.asarray(value)
    if not is_name or array.ndim or array.dtype.kind in "cOSUMmT" or array.dtype.names:
        raise InputError(
            "A row must consist of names and numbers",
            given=f"{name!r}: {value!r}",
            remedy="Leave it out, or pass one number, e.g. float(array.mean()).",
        )
    return int(array) if array.dtype.kind in "biu" else float(array)


class _File(abc.ABC):
    """A log file: complete lines are appended, or the complete file is replaced."""

    name = ""  # of the format
    first_line = 1  # the line of the first row
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
        """The rows in complete lines, not checked."""

    @abc.abstractmethod
    def append(self, row: Row) -> None:
        """Adds a complete row, or raises an OSError and adds nothing."""

    def amend(self, row: Row) -> None:
        """Replaces the last row."""
        self._replace([*self._rows()[:-1], row])

    def close(self) -> None:
        self._file.close()

    @abc.abstractmethod
    def _text(self, rows: list[Row]) -> str:
        """The content of a file with these rows."""

    def _rows(self) -> list[Row]:
        """The rows in the file now; none if somebody has moved it away."""
        return read_log(self.path) if self.path.exists() else []

    def _is_ours(self) -> bool:
        """Whether the path still leads to the file that was opened. An editor may have replaced it."""
        return self.path.exists() and os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))

    def _write(self, text: str) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            _write_all(self._file, text.encode())
        except OSError:
            os.ftruncate(self._file.fileno(), size)  # an incomplete row would spoil the next
            raise

    def _replace(self, rows: list[Row]) -> None:
        """Replaces the content of the file atomically."""
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


def _write_all(file: Any, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


class _JsonLines(_File):
    """One JSON object per line."""

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
    """A line of column names, and one line per row. A row with a new name rewrites the file with one more column."""

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
        self._columns = _columns(rows)  # set last: if the disk is full, the old columns stay

    @staticmethod
    def parsed(text: str) -> Iterator[dict[str, Any]]:
        lines = csv.reader(io.StringIO(text), strict=True)
        columns = next(lines, [])
        for cells in lines:
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells, and {len(columns)} columns")
            yield {name: _parsed_number(cell) for name, cell in zip(columns, cells, strict=True) if cell}


def _columns(rows: list[Row]) -> list[str]:
    """The column names in order of first use, which is also their order in a run that was never interrupted."""
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(row: Row, name: str) -> str:
    return repr(row[name]) if name in row else ""


def _csv_line(cells: Sequence[str]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue()


def _parsed_number(cell: str) -> int | float:
    try:
        return int(cell)
    except ValueError:
        return float(cell)


_FORMATS: dict[str, type[_File]] = {".csv": _Csv, ".jsonl": _JsonLines}


def _format(path: Path) -> type[_File]:
    if path.suffix not in _FORMATS:
        raise InputError(
            "The name of a log must end in .csv, or in .jsonl for JSON lines",
            given=f"{path.name!r}",
            remedy=f"Name it {path.stem + '.csv'!r} or {path.stem + '.jsonl'!r}.",
        )
    return _FORMATS[path.suffix]
