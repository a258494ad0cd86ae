"""The log of a run: one row per step, as CSV or JSON lines, in files that stay readable if the process is killed.

`Log` writes rows to one or several files, and `read_log` reads them. The two formats, `_Csv` and `_JsonLines`, share
`_File`, which appends complete lines or replaces the complete file.
"""

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

from anybatch.call.checks import must_be_path
from anybatch.call.files import read_regular
from anybatch.errors import AnybatchError, InputError
from anybatch.training.checkpoint_folder import WriterLock

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
