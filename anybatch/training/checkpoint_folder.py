"""The folder that holds checkpoints: which of them are complete, what is left over, and who may write.

    .anybatch-checkpoints       marks the folder as ours
    20/, 30/                    complete checkpoints of steps 20 and 30: arrays/ and record/, as Orbax writes them
    40.orbax-checkpoint-tmp/    being written; deleted by the next writer
    30.replaced/                complete; kept until the new checkpoint of the same step is complete
    10.removed/                 being deleted
    50.kept/                    was named 50 and is not a checkpoint of ours: never deleted

All other files are left alone.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import tempfile
import threading
import time
import zlib
from pathlib import Path
from typing import Any, ClassVar

import jax

from anybatch.distributed import gather_json
from anybatch.errors import InputError

_MARKER, _LOCK = ".anybatch-checkpoints", ".lock"
_SEAL = "record/files.json"  # in each checkpoint: file name -> [bytes, CRC-32]
_LEFTOVER = re.compile(r"\d+\.(removed|orbax-checkpoint-tmp.*)")
_REPLACED = re.compile(r"\d+\.replaced")

_TWICE = "this process has open already"

# Seconds that a writer waits for another one to finish, such as the previous job that was told to end.
_PATIENCE = 5.0


class WriterLock:
    """A file lock for one writer at a time. It belongs to this process, not to its children.

    The system releases it when the process ends, however it ends. On a file system without locks, everybody gets it.
    The file is created if necessary, and deleted on release if `is_removed`. Its content is not changed.
    """

    _held: ClassVar[set[tuple[int, int] | None]] = set()  # by this process, which the system would let in twice
    _changing = threading.Lock()

    def __init__(self, path: Path, *, is_removed: bool = False) -> None:
        self._path, self._is_removed = path, is_removed
        self._file: Any = None
        self._key: tuple[int, int] | None = None

    def acquire(self, what: str, path: Path, *, remedy: str) -> None:
        """Acquires the lock of `what`, which is at `path`, and waits a few seconds for it if necessary.

        It is an OSError if the file cannot be created, and an InputError if somebody holds the lock.
        """
        end = time.monotonic() + _PATIENCE
        while why := self._why_refused():
            if why == _TWICE or time.monotonic() > end:
                raise InputError(f"{what} must have one writer only", given=f"{path}, which {why}", remedy=remedy)
            time.sleep(0.05)

    def _why_refused(self) -> str | None:
        """Tries to acquire the lock. Returns None, or why that failed, in words."""
        with self._changing:
            # Checked before opening: closing a second handle would release the lock of the whole process.
            if _identity(self._path) in self._held:
                return _TWICE
            file = open(self._path, "ab")
            try:
                import fcntl

                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.close()
                return "another process has open"
            except (ImportError, OSError):  # Windows; a file system without locks
                pass
            key = _identity(self._path)
            if key is None or key != _identity(file.fileno()):  # the previous holder has deleted the file
                file.close()
                return "another process has open"
            self._file, self._key = file, key
            self._held.add(key)
            return None

    def release(self) -> None:
        """Releases the lock."""
        if self._file is not None:
            with self._changing:
                self._held.discard(self._key)
                # Deleted while it is held: a process that waits for it notices, and creates a new one.
                if self._is_removed and not os.fstat(self._file.fileno()).st_size:
                    with contextlib.suppress(OSError):
                        self._path.unlink()
                self._file.close()
                self._file = None


class CheckpointFolder:
    """A folder of checkpoints by step.

    **A name that is a number means complete**: a checkpoint gets its name last, and loses it before it is deleted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = WriterLock(path / _LOCK)

    def open(self) -> None:
        """Creates the folder if necessary, and locks it for this process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as file:
                file.write(b"can be written to")
                file.flush()
            self.check_ours()
            (self.path / _MARKER).touch()
            remedy = "Wait for it to end, end it, or use another folder."
            self._lock.acquire("A folder of checkpoints", self.path, remedy=remedy)
        except OSError as error:
            raise InputError(
                "The folder for checkpoints must be one that can be written to",
                given=f"{self.path} ({error.strerror})",
                remedy="Name another folder, or check its permissions and the space on its disk.",
            ) from error

    def check_ours(self) -> None:
        """Raises an InputError if this is a folder of other files. Logs may be in it."""
        names = sorted(path.name for path in self._entries())
        others = [name for name in names if not name.startswith(".") and name != "lost+found" and name[-4:] != ".csv"]
        others = [] if _MARKER in names else others
        if others:
            raise InputError(
                "The folder for checkpoints must be new, empty, or one of checkpoints that anybatch wrote",
                given=f"{self.path} with {', '.join(others[:3])}" + (", ..." if len(others) > 3 else ""),
                remedy=f"Name a new folder, e.g. {str(self.path / 'checkpoints')!r}.",
            )

    def check_shared(self) -> None:
        """Raises in all processes if one of them sees another folder. Orbax would wait for it forever."""
        if jax.process_count() == 1:
            return
        mark = str(gather_json(time.time_ns())[0])
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # then no process sees the mark, and all raise
                (self.path / _MARKER).write_text(mark)
        end, sees = time.monotonic() + _PATIENCE, False
        while not sees and time.monotonic() < end:  # a network file system may show the mark late
            with contextlib.suppress(OSError):
                sees = (self.path / _MARKER).read_text() == mark
            time.sleep(0 if sees else 0.05)
        others = [str(process) for process, each in enumerate(gather_json(sees)) if not each]
        if others:
            raise InputError(
                "All processes must see the same folder for checkpoints",
                given=f"{self.path}, which process {', '.join(others)} does not share",
                remedy="Name a folder on a file system that all machines share, by its full path.",
            )

    def close(self) -> None:
        self._lock.release()

    def of(self, step: int) -> Path:
        """The path of the checkpoint of a step, whether it exists or not."""
        return self.path / str(step)

    def is_complete(self, step: int) -> bool:
        """Whether there is a complete checkpoint of that step."""
        return (self.of(step) / "record" / "metadata").is_file()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        names = [path.name for path in self._entries()]
        numbers = sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)
        return [step for step in numbers if self.is_complete(step)]

    def set_aside(self, step: int) -> None:
        """Frees the name of a step for a new checkpoint. If that is not completed, `tidy` restores the old one.

        A file or folder of that name that is not a complete checkpoint may be the user's, and is renamed.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / _MARKER).touch()
        if self.is_complete(step):
            _rename(self.of(step), "replaced")
        elif os.path.lexists(self.of(step)):
            names = (f"{step}.kept{number or ''}" for number in itertools.count())
            self.of(step).rename(next(self.path / name for name in names if not os.path.lexists(self.path / name)))

    def tidy(self, keep: int | None = None) -> None:
        """Deletes leftovers, and all checkpoints but the newest `keep`. Only called while nothing is being written."""
        for path in [path for path in self._entries() if _REPLACED.fullmatch(path.name)]:
            if self.is_complete(int(path.stem)):
                _rename(path, "removed")
            else:
                path.rename(path.with_suffix(""))
        for step in [] if keep is None else self.steps()[:-keep]:
            _rename(self.of(step), "removed")
        for path in self._entries():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def free_bytes(self) -> int:
        """The free space on the disk."""
        return shutil.disk_usage(next(path for path in (self.path, *self.path.parents) if path.exists())).free

    def seal(self) -> None:
        """Records the sizes and checksums of a finished checkpoint, and flushes it to disk, before it gets its name.

        Without the flush, a power failure could leave the name and lose the content of the files. With several
        processes there are no checksums, since one process would have to read what all have written.
        """
        for unfinished in self.path.glob("*.orbax-checkpoint-tmp*"):
            with_sum = jax.process_count() == 1
            # Orbax's own metadata beside these two parts is not included.
            found = [path for part in ("arrays", "record") for path in (unfinished / part).rglob("*") if path.is_file()]
            content = {str(path.relative_to(unfinished)): _measured(path, with_sum) for path in sorted(found)}
            (unfinished / _SEAL).write_text(json.dumps(content))
            for folder, _, files in os.walk(unfinished):
                for name in [*files, "."]:
                    flush(os.path.join(folder, name))

    def damage(self, step: int, part: str) -> str | None:
        """The first difference from the sealed files in a part, "record" or "arrays", in words; or None."""
        folder = self.of(step)
        try:
            content = json.loads((folder / _SEAL).read_text())
            for name, (size, total) in content.items():
                if not name.startswith(part):
                    continue
                found = _measured(folder / name, total is not None and jax.process_count() == 1)
                if found[0] != size:
                    return f"{name} has {found[0]} bytes, and had {size}"
                if None not in (found[1], total) and found[1] != total:
                    return f"{name} has changed"
        except FileNotFoundError as error:
            return f"{os.path.relpath(str(error.filename), folder)} is missing"
        except (OSError, ValueError, AttributeError, TypeError) as error:
            return f"{_SEAL} cannot be read, {error}"
        return None

    def _entries(self) -> list[Path]:
        return list(self.path.iterdir()) if self.path.is_dir() else []  # somebody may have deleted it


def _identity(file: Path | int) -> tuple[int, int] | None:
    """Device and inode of a file, which all its names share; None if it does not exist."""
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _rename(path: Path, suffix: str) -> None:
    target = path.with_suffix(f".{suffix}")
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


def _measured(path: Path, with_sum: bool) -> list[int | None]:
    if not with_sum:
        return [path.stat().st_size, None]
    size = total = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            size, total = size + len(block), zlib.crc32(block, total)
    return [size, total]


def flush(path: str | Path) -> None:
    """Flushes a file to disk, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
