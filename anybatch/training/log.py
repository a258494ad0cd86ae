"""The log of a run: one row per step, in a CSV file that stays readable if the process is killed.

`LogRows` turns the metrics of each step into a row, some steps later, with throughput. `Log` writes rows to a file: it
appends complete lines or replaces the complete file. `read_log` reads them.
"""

import collections
import contextlib
import csv
import io
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from anybatch.call.checks import is_array, must_be_path, named_leaves
from anybatch.call.files import read_regular
from anybatch.errors import AnybatchError, InputError, warn
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
        self.noise = NoiseScale(*saved["noise"]) if saved.get("noise") else None  # averaged over recent steps
        self._start = time.perf_counter()
        self.throughput, self._has_started = Throughput(), False
        self._skipped_in_a_row, self._has_tokens = 0, False

    @property
    def saved(self) -> dict[str, Any]:
        """The part of this object that goes into a checkpoint, as JSON values."""
        noise = None if self.noise is None else [float(leaf) for leaf in jax.tree.leaves(self.noise)]
        return {"skipped": self._skipped, "seconds": self.seconds, "noise": noise}

    @property
    def seconds(self) -> float:
        """The duration of the run so far, including earlier processes."""
        return self._seconds_before + time.perf_counter() - self._start

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
            tokens = metrics.tokens if isinstance(metrics, Metrics) else None
            self.throughput.restart(examples=examples, tokens=tokens if isinstance(tokens, int) else 0)

    def ready(self) -> Iterator[dict[str, Any]]:
        """The rows of all steps but the last two. Waits for these steps."""
        while len(self._in_flight) > IN_FLIGHT:
            yield self._row(*self._in_flight.popleft()) | self._rates(*self.throughput.since_last_reads())

    def flush(self) -> list[dict[str, Any]]:
        """The rows of all steps. Waits for the last of them."""
        rows = [self._row(*each) for each in self._in_flight]
        self._in_flight.clear()
        rates = self._rates(*self.throughput.since_restart())
        return [row | rates for row in rows]

    def _row(self, step: int, scalars: dict[str, Any], examples: int) -> dict[str, Any]:
        """The row of a step without its rates."""
        fetched = jax.device_get(scalars)
        values = {name: fetched[name] for name in scalars}  # device_get sorts the names
        tokens, noise, skipped = values.pop("tokens", None), values.pop("noise", None), values.pop("skipped", None)
        row: dict[str, Any] = {"step": step} | {name: _python_number(value) for name, value in values.items()}
        if skipped is not None:
            self._count_skipped(bool(skipped))
            row["skipped"] = self._skipped
        if noise is not None:
            row["noise_scale"] = self._add_noise(noise)
        self.throughput.add(examples, int(tokens or 0))
        self._has_tokens = tokens is not None
        return row

    def _rates(self, examples: float, tokens: float) -> dict[str, float]:
        named = {"examples_per_second": examples} | ({"tokens_per_second": tokens} if self._has_tokens else {})
        return named | {"seconds": round(self.seconds, 3)}

    def _add_noise(self, noise: NoiseScale) -> float:
        """The averaged noise scale. Computed on the host: on the device it would take a dozen tiny operations."""
        noise = NoiseScale(*(float(leaf) for leaf in jax.tree.leaves(noise)))
        if all(map(math.isfinite, jax.tree.leaves(noise))):
            self.noise = noise if self.noise is None else DECAY * self.noise + noise
        if self.noise is None or not self.noise.steps:
            return math.nan
        if self.noise.gradient_square_sum <= 0:
            return math.inf if self.noise.trace_sum > 0 else math.nan
        return self.noise.trace_sum / self.noise.gradient_square_sum

    def _count_skipped(self, skipped: bool) -> None:
        self._skipped += skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == MANY_SKIPPED:
            warn(
                f"The gradients of {MANY_SKIPPED} steps in a row were not finite: nothing is being learned. Try a "
                "smaller learning rate or a smaller loss scale, and check the batches for NaN."
            )


class Throughput:
    """Examples and tokens per second, from the times at which the metrics of steps are read.

    The end of a step on the device cannot be observed, but its metrics are read a fixed number of steps later, so the
    times of reading have the same pace. Before an evaluation or a checkpoint, the metrics of all steps are read at
    once, and these times say nothing; instead, the rate is that of all steps since the last restart.
    """

    def __init__(self) -> None:
        self._total = np.zeros(2, np.int64)  # examples and tokens
        self._reads: collections.deque[tuple[float, np.ndarray]] = collections.deque()  # those within the window
        self._restarted: tuple[float, np.ndarray] | None = None
        self._last = (math.nan, math.nan)

    @property
    def examples(self) -> int:
        """The examples of all steps that were added."""
        return int(self._total[0])

    def restart(self, *, examples: int = 0, tokens: int = 0) -> None:
        """Starts the clock, when all steps so far are done, except for these examples, which must not count."""
        self._restarted = (time.perf_counter(), self._total + np.asarray((examples, tokens)))
        self._reads.clear()

    def add(self, examples: int, tokens: int) -> None:
        """Adds a step that is done."""
        self._total = self._total + np.asarray((examples, tokens))

    def since_last_reads(self) -> tuple[float, float]:
        """The rates over the window, after the metrics of one step were read."""
        now = time.perf_counter()
        while len(self._reads) > 1 and now - self._reads[1][0] > WINDOW:
            self._reads.popleft()
        if self._reads:
            self._last = self._since(*self._reads[0], now)
        self._reads.append((now, self._total))
        return self._last

    def since_restart(self) -> tuple[float, float]:
        """The rates since the last restart, when all steps are done."""
        if self._restarted is not None and self._total[0] > self._restarted[1][0]:
            self._last = self._since(*self._restarted, time.perf_counter())
        return self._last

    def _since(self, then: float, total: np.ndarray, now: float) -> tuple[float, float]:
        examples, tokens = (self._total - total) / max(now - then, 1e-9)
        return float(examples), float(tokens)


def evaluation_columns(result: Any) -> dict[str, float]:
    """The result of `evaluate` as columns of the log.

    >>> evaluation_columns({"accuracy": 0.5}), evaluation_columns(2)
    ({'eval.accuracy': 0.5}, {'eval': 2.0})
    """
    named = {"eval": result}
    if isinstance(result, Mapping):
        named = {f"eval.{name}": value for name, value in result.items()}
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
        is_scalar = is_array(leaf) and leaf.ndim == 0
        families = (np.bool_, np.integer, np.floating)
        if isinstance(leaf, (int, float)) or (
            is_scalar and any(jax.dtypes.issubdtype(leaf.dtype, each) for each in families)
        ):
            found[path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")] = leaf
    return found


def _num_examples(metrics: Any, batch: Any) -> int:
    if isinstance(metrics, Metrics) and isinstance(metrics.examples, int):
        return metrics.examples
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch) if is_array(leaf)]
    return next((shape[0] for shape in shapes if shape), 0)


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
    """Writes rows to a CSV file, each row at once.

    The file has a line of column names, and one line per row. A row with a new name rewrites it with one more column.

    - **Complete rows.** If the process is killed in the middle of a row, earlier rows are not affected, and the next
      process drops the incomplete one.
    - **One writer.** Another process that opens the same log is refused.
    - **No row is lost.** If an editor replaces the file, or it is moved away, new rows are added to what is there.
    - **As if never interrupted.** With `after`, the log of a resumed run equals, byte for byte, that of a run that was
      never interrupted, if it writes the same rows.

    `read_log` returns the same numbers.

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
      path: of the file, which ends in .csv. Missing folders are created.
      after: the step after which to continue an existing file: later rows are dropped. None starts a new file.
      check: called with the path and all rows of a file to continue, before any row is dropped.

    Raises:
      InputError: for a path that cannot be written to, an existing file that is not a log or must not be replaced, or a
        file that another writer has open.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, after: int | None = None, check: CheckRows | None = None
    ) -> None:
        self.path = check_log(path)
        self.first_row: Row | None = None
        self._file: Any = None
        self._columns: list[str] = []
        self._lock = WriterLock(self.path.with_name(f".{self.path.name}.lock"), is_removed=True)
        another = str(self.path.with_stem(self.path.stem + "-2"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(
                "A log", self.path, remedy=f"Wait for it to end, or name another log, e.g. log={another!r}."
            )
            self._replace(_kept_rows(self.path, after, check))
        except BaseException as error:
            self._lock.release()
            if not isinstance(error, OSError):
                raise
            # Of a parent that is a file, `mkdir` says that it exists.
            why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
            raise InputError(
                "A log must be a file that can be written to",
                given=f"{self.path} ({why})",
                remedy="Name another one, or check its permissions and the space on its disk.",
            ) from error

    def write(self, row: Mapping[str, Any]) -> None:
        """Appends a row, and passes it to the operating system. Raises a LogError if it could not be written.

        Args:
          row: name -> number, with a "step". Entries that are None are left out.
        """
        checked = _checked(row)
        with self._as_log_error():
            if self._is_ours() and all(name in self._columns for name in checked):
                self._append(checked)
            else:
                self._replace([*self._rows(), checked])

    def amend(self, row: Mapping[str, Any]) -> None:
        """Replaces the last row, e.g. to add an evaluation of the same step. Otherwise like `write`."""
        checked = _checked(row)
        with self._as_log_error():
            self._replace([*self._rows()[:-1], checked])

    def close(self) -> None:
        """Closes the file, and releases its lock."""
        if self._file is not None:
            self._file.close()
        self._lock.release()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    @contextlib.contextmanager
    def _as_log_error(self) -> Iterator[None]:
        try:
            yield
        except (OSError, InputError) as error:
            raise LogError(self.path, error) from error

    def _rows(self) -> list[Row]:
        """The rows in the file now; none if somebody has moved it away."""
        return read_log(self.path) if self.path.exists() else []

    def _is_ours(self) -> bool:
        """Whether the path still leads to the file that was opened. An editor may have replaced it."""
        return self.path.exists() and os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))

    def _append(self, row: Row) -> None:
        size = os.fstat(self._file.fileno()).st_size
        try:
            _write_all(self._file, _as_csv(self._columns, [row]))
        except OSError:
            os.ftruncate(self._file.fileno(), size)  # an incomplete row would spoil the next
            raise
        self.first_row = self.first_row or row

    def _replace(self, rows: list[Row]) -> None:
        """Replaces the content of the file atomically."""
        # In order of first use, which is also their order in a run that was never interrupted.
        columns = list(dict.fromkeys(name for row in rows for name in row))
        partial = self.path.with_name(f".{self.path.name}.partial")
        try:
            with open(partial, "wb", buffering=0) as file:
                _write_all(file, _as_csv(columns, rows, has_header=bool(rows)))
                os.fsync(file.fileno())
            os.replace(partial, self.path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        if self._file is not None:
            self._file.close()
        self._file = open(self.path, "ab", buffering=0)
        # Set last: if the disk is full, the old columns stay.
        self._columns, self.first_row = columns, rows[0] if rows else None


def check_log(path: Any) -> Path:
    """The file of `fit(log=...)`, with links resolved."""
    must_be_path("log", path, "run.csv")
    resolved = Path(os.path.realpath(path))
    if resolved.suffix != ".csv":
        raise InputError(
            "The name of a log must end in .csv",
            given=f"{resolved.name!r}",
            remedy=f"Name it {resolved.stem + '.csv'!r}.",
        )
    return resolved


def read_log(path: str | os.PathLike[str]) -> list[Row]:
    """The rows of a log: whole numbers as int, others as float. Empty cells are left out.

    An incomplete last row is left out, too.

    Raises:
      InputError: if the file does not exist, or is not a log.
    """
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
        lines = csv.reader(io.StringIO(text), strict=True)
        columns = next(lines, [])
        for cells in lines:
            if len(cells) != len(columns):
                raise ValueError(f"{len(cells)} cells, and {len(columns)} columns")
            rows.append(
                _checked({name: _parsed_number(cell) for name, cell in zip(columns, cells, strict=True) if cell})
            )
    except (ValueError, TypeError, csv.Error) as error:  # an InputError is a TypeError
        raise InputError(
            "A log must be one that anybatch wrote: rows of numbers, in CSV",
            given=f"{path}, whose line {len(rows) + 2} is something else: {str(error).splitlines()[0]}",
            remedy="Name another file, or correct that line.",
        ) from error
    return rows


def finite_numbers(row: Row) -> Row:
    """The numbers of a row that equal themselves after they were stored."""
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _kept_rows(path: Path, after: int | None, check: CheckRows | None) -> list[Row]:
    """The rows that a file starts with: those up to step `after`, or none."""
    if not path.exists():
        return []
    if after is not None and path.is_file():
        rows = read_log(path)
        if check is not None:
            check(path, rows)
        return [row for row in rows if row["step"] <= after]
    if not path.is_file() or path.stat().st_size:
        raise InputError(
            "A new log must not replace an existing file",
            given=f"{path}",
            remedy="Name another one, resume its run from a checkpoint to continue it, or delete it first.",
        )
    return []


def _checked(row: Mapping[str, Any]) -> Row:
    """A row with Python numbers."""
    arrays = {name: np.asarray(value) for name, value in row.items() if value is not None}
    for name, array in arrays.items():
        is_name = isinstance(name, str) and name and "\n" not in name and "\r" not in name
        if not is_name or array.ndim or array.dtype.kind in "cOSUMmT" or array.dtype.names:
            raise InputError(
                "A row must consist of names and numbers",
                given=f"{name!r}: {row[name]!r}",
                remedy="Leave it out, or pass one number, e.g. float(array.mean()).",
            )
    numbers = {name: _python_number(array) for name, array in arrays.items()}
    if not isinstance(numbers.get("step"), int):
        raise InputError(
            'A row must have a "step", a whole number',
            given=f"step={row.get('step')!r}",
            remedy='Pass it, e.g. log.write({"step": 1, "loss": 0.5}).',
        )
    return numbers


def _python_number(value: Any) -> int | float:
    return int(value) if np.asarray(value).dtype.kind in "biu" else float(value)


def _write_all(file: Any, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def _as_csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]], *, has_header: bool = False) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    if has_header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _parsed_number(cell: str) -> int | float:
    try:
        return int(cell)
    except ValueError:
        return float(cell)
