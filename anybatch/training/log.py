"""The log of a run: one row for each step, in CSV or in JSON lines, whole whenever the process is killed."""

import abc
import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from anybatch.checks import must_be_path
from anybatch.errors import AnybatchError, InputError
from anybatch.files import read_regular
from anybatch.training.checkpoint_folder import WriterLock

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
