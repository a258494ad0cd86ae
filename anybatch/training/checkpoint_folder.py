"""The folder that checkpoints lie in: which are complete, what is left over, and who may write.

    .anybatch-checkpoints       it is ours
    20/, 30/                    complete, of steps 20 and 30: arrays/ and record/, as Orbax writes them
    40.orbax-checkpoint-tmp/    being written; the next writer clears it away
    30.replaced/                complete, and of use until the new one of the same step is
    10.removed/                 being deleted
    50.kept/                    was named 50 and is no checkpoint of ours: nobody deletes it

Whatever else lies there is left alone.
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from anybatch.errors import InputError

_MARKER, _LOCK = ".anybatch-checkpoints", ".lock"
_SEAL = "record/files.json"  # in each checkpoint: name -> bytes, and CRC-32
_LEFTOVER = re.compile(r"\d+\.(removed|orbax-checkpoint-tmp.*)")
_REPLACED = re.compile(r"\d+\.replaced")

# Seconds that a writer waits for another one to leave, such as the job before this one that was told to end.
_PATIENCE = 5.0


class WriterLock:
    """A file that one writer at a time may hold. It belongs to this process, not to its children.

    It goes when the process ends, however that may be. On a file system without locks, everybody gets it.

    Args:
      path: of the file, which is made if it is not there. What is in it stays as it is.
      is_removed: whether to delete the file when it is let go.
    """

    _held: ClassVar[set[tuple[int, int] | None]] = set()  # by this process, which the system would let in twice
    _changing = threading.Lock()

    def __init__(self, path: Path, *, is_removed: bool = False) -> None:
        self._path, self._is_removed = path, is_removed
        self._file: Any = None
        self._key: tuple[int, int] | None = None

    def acquire(self, what: str, path: Path, *, remedy: str) -> None:
        """Waits some seconds for it.

        Args:
          what: is written, in words.
          path: of what is written.
          remedy: for who cannot have it.

        Raises:
          OSError: if the file cannot be made.
          InputError: if another process holds it, or this one already does.
        """

        def refusal(why: str) -> InputError:
            return InputError(f"{what} must have one writer only", given=f"{path}, {why}", remedy=remedy)

        end = time.monotonic() + _PATIENCE
        while not self._is_acquired(refusal):
            if time.monotonic() > end:
                raise refusal("which another process has open")
            time.sleep(0.05)

    def _is_acquired(self, refusal: Callable[[str], Exception]) -> bool:
        with self._changing:
            # Before it is opened: to close it again would let go of the lock, which is that of the process.
            if _identity(self._path) in self._held:
                raise refusal("which this process has open already")
            file = open(self._path, "ab")
            try:
                import fcntl

                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.close()
                return False
            except (ImportError, OSError):  # Windows; a file system without locks
                pass
            key = _identity(self._path)
            if key is None or key != _identity(file.fileno()):  # who held it has deleted it
                file.close()
                return False
            self._file, self._key = file, key
            self._held.add(key)
            return True

    def release(self) -> None:
        """Lets another writer in."""
        if self._file is not None:
            with self._changing:
                self._held.discard(self._key)
                # While it is held: who waits for it finds that it is gone, and makes another.
                if self._is_removed and not os.fstat(self._file.fileno()).st_size:
                    with contextlib.suppress(OSError):
                        self._path.unlink()
                self._file.close()
                self._file = None


class CheckpointFolder:
    """A folder of checkpoints by their steps.

    **Nothing is ever half there under its number**: what is written gets its name last, and what goes loses it first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = WriterLock(path / _LOCK)

    def open(self) -> None:
        """Makes the folder if there is none, and locks it for this process.

        Raises:
          InputError: if it cannot be written to, holds something else, or is locked.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path) as file:
                file.write(b"can be written to")
                file.flush()
            if not (self.path / _MARKER).exists():
                self._check_empty()
                (self.path / _MARKER).touch()
            remedy = "Wait for it to end, end it, or use another folder."
            self._lock.acquire("A folder of checkpoints", self.path, remedy=remedy)
        except OSError as error:
            raise InputError(
                "The folder for checkpoints must be one that can be written to",
                given=f"{self.path} ({error.strerror})",
                remedy="Name another folder, or see to its permissions and the space on its disk.",
            ) from error

    def check_shared(self) -> None:
        """Makes sure that all processes see one and the same folder; where they do not, all of them raise.

        Raises:
          InputError: if a process sees another folder. Orbax would wait for it, without an end.
        """
        if jax.process_count() == 1:
            return
        mark = int(multihost_utils.broadcast_one_to_all(np.asarray(time.time_ns() % 2**31, np.int32)))
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # then nobody sees it, and all raise
                (self.path / _MARKER).write_text(str(mark))
        end, sees = time.monotonic() + _PATIENCE, False
        while not sees and time.monotonic() < end:  # file systems of a network take their time
            with contextlib.suppress(OSError):
                sees = (self.path / _MARKER).read_text() == str(mark)
            time.sleep(0 if sees else 0.05)
        everyone = np.asarray(multihost_utils.process_allgather(np.asarray(sees, np.int32))).reshape(-1)
        if not everyone.all():
            raise InputError(
                "All processes must see one and the same folder for checkpoints",
                given=f"{self.path}, which process {', '.join(map(str, np.flatnonzero(everyone == 0)))} does not share",
                remedy="Name a folder on a file system that all machines have, by its full path.",
            )

    def close(self) -> None:
        """Lets another writer in."""
        self._lock.release()

    def of(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.path / str(step)

    def is_complete(self, step: int) -> bool:
        """Whether there is a checkpoint of that step. It got this name when all of it was written."""
        return (self.of(step) / "record" / "metadata").is_file()

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, in order."""
        names = [path.name for path in self._entries()]
        numbers = sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)
        return [step for step in numbers if self.is_complete(step)]

    def set_aside(self, step: int) -> None:
        """Makes room for a checkpoint of that step; `tidy` puts the old one back if the new one does not come.

        What has that name and is no complete checkpoint may be the user's, and gets another name.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / _MARKER).touch()
        if self.is_complete(step):
            _rename(self.of(step), "replaced")
        elif os.path.lexists(self.of(step)):
            names = (f"{step}.kept{number or ''}" for number in itertools.count())
            self.of(step).rename(next(self.path / name for name in names if not os.path.lexists(self.path / name)))

    def remove(self, steps: Iterable[int]) -> None:
        """Deletes checkpoints."""
        for step in list(steps):
            _rename(self.of(step), "removed")
        for path in self._entries():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def tidy(self, keep: int | None = None) -> None:
        """Deletes what is not needed while nothing is being written: leftovers, and all but the newest `keep`."""
        for path in [path for path in self._entries() if _REPLACED.fullmatch(path.name)]:
            if self.is_complete(int(path.stem)):
                _rename(path, "removed")
            else:
                path.rename(path.with_suffix(""))
        self.remove([] if keep is None else self.steps()[:-keep])

    def free_bytes(self) -> int:
        """How much fits on the disk."""
        return shutil.disk_usage(next(path for path in (self.path, *self.path.parents) if path.exists())).free

    def seal(self) -> None:
        """Before a checkpoint gets its name: what it is made of is written down, and all of it flushed to the disk.

        Without the flush, a power cut might leave the name and lose what is in the files. The sums are left out with
        several processes, where one would have to read what all have written.
        """
        for unfinished in self.path.glob("*.orbax-checkpoint-tmp*"):
            sums = jax.process_count() == 1
            content = {name: _measured(unfinished / name, sums) for name in sorted(_files_in(unfinished))}
            (unfinished / _SEAL).write_text(json.dumps(content))
            for path, _, files in os.walk(unfinished):
                for name in [*files, "."]:
                    _flush(os.path.join(path, name))

    def damage(self, step: int, part: str) -> str | None:
        """What the disk has lost of the record or the arrays of a checkpoint since it was sealed, if anything."""
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

    def flush_names(self) -> None:
        """After it got its name, and before older ones go."""
        _flush(self.path)

    def _entries(self) -> list[Path]:
        return list(self.path.iterdir()) if self.path.is_dir() else []  # someone may have deleted it

    def _check_empty(self) -> None:
        others = [path.name for path in sorted(self.path.iterdir()) if path.suffix not in (".csv", ".jsonl")]
        others = [name for name in others if not name.startswith(".") and name != "lost+found"]
        if others:
            raise InputError(
                "The folder for checkpoints must be new, empty, or one of checkpoints that anybatch wrote",
                given=f"{self.path} with {', '.join(others[:3])}" + (", ..." if len(others) > 3 else ""),
                remedy=f"Name a folder of its own, e.g. {str(self.path / 'checkpoints')!r}.",
            )


def _identity(file: Path | int) -> tuple[int, int] | None:
    """Tells a file from all others, whatever its names; None if there is none."""
    try:
        status = os.stat(file)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def _rename(path: Path, suffix: str) -> None:
    target = path.with_suffix(f".{suffix}")
    shutil.rmtree(target, ignore_errors=True)
    path.rename(target)


def _files_in(folder: Path) -> list[str]:
    """Those of the arrays and of the record; Orbax has notes of its own beside them."""
    files = [path for part in ("arrays", "record") for path in (folder / part).rglob("*") if path.is_file()]
    return [str(path.relative_to(folder)) for path in files]


def _measured(path: Path, with_sum: bool) -> list[int | None]:
    if not with_sum:
        return [path.stat().st_size, None]
    size = total = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            size, total = size + len(block), zlib.crc32(block, total)
    return [size, total]


def _flush(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
