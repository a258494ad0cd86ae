"""The learner's folder: the files that are edited, and beside them what was solved, in `.progress.json`.

**Nothing of the learner's is lost.** A file that is there is not written over; what is put back to its beginning is
kept under another name; a record that cannot be read is moved aside. Two programs may use one folder: each change is
made to what the other has written, under a lock.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import json
import os
import pathlib
import shlex
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

from anybatch.errors import InputError
from anybatch.learn.catalogue import BUILTIN, Course, Exercise

FOLDER = pathlib.Path("anybatch-learn")
VERSION = 1
RECORD = ".progress.json"
LOCK = ".progress.lock"
LARGEST = 2**20  # bytes of a file that can be an exercise


@dataclasses.dataclass(frozen=True)
class Solved:
    """That an exercise was solved.

    Args:
      hash: of the file that solved it.
      when: in ISO format, with the time zone.
      seconds: that the check took.
    """

    hash: str
    when: str
    seconds: float


def hash_of(source: str) -> str:
    """A name for the contents of a file."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()


class Progress:
    """What was solved of a course in a folder, and the files there.

    Args:
      folder: the learner's. It need not be there, as long as nothing is written.
      course: the course.
      say: what to do with a message for the learner.
    """

    def __init__(self, folder: str | os.PathLike, course: Course, say: Callable[[str], None] = print) -> None:
        self.folder, self.course, self._say = pathlib.Path(folder), course, say

    def command(self, *words: str) -> str:
        """What to type for this course in this folder.

        >>> Progress("anybatch-learn", Course.builtin()).command("hint", "5")
        'anybatch learn hint 5'
        """
        words = ("anybatch", "learn", *words)
        words += () if self.course.folder == BUILTIN else ("--course", str(self.course.folder))
        return shlex.join(
            words + (() if self.folder in (FOLDER, pathlib.Path(".")) else ("--folder", str(self.folder)))
        )

    def prepare(self) -> None:
        """Makes the folder, if need be.

        Raises:
          InputError: if nothing can be written there.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            "The folder for the exercises must be one that can be written",
            given=f"--folder {self.folder} ({error.strerror})",
            remedy="Choose another: anybatch learn --folder ~/anybatch-learn",
        )

    # What was solved.

    @property
    def current(self) -> Exercise:
        """Where the learner left off: the first exercise, to begin with."""
        name = self._mine().get("current")
        return next((exercise for exercise in self.course.exercises if exercise.name == name), self.course.exercises[0])

    @property
    def solved(self) -> dict[str, Solved]:
        """What was solved, by name."""
        fields = [field.name for field in dataclasses.fields(Solved)]
        mine = self._mine().get("solved", {})
        return {name: Solved(*(entry[field] for field in fields)) for name, entry in mine.items()}

    def hints_seen(self, exercise: Exercise) -> int:
        """How many hints the learner has asked for."""
        return self._mine().get("hints", {}).get(exercise.name, 0)

    def state(self, exercise: Exercise) -> str:
        """One of "solved", "changed" (solved, and edited since), "begun" and "open"."""
        source = self._source_or_none(exercise)
        solved = self.solved.get(exercise.name)
        if solved is not None:
            return "solved" if source is None or hash_of(source) == solved.hash else "changed"
        return "open" if source is None or source == exercise.starter else "begun"

    def go_to(self, exercise: Exercise) -> None:
        """Keeps where the learner is."""
        self._change(lambda mine: mine.update(current=exercise.name))

    def solve(self, exercise: Exercise, source: str, seconds: float) -> None:
        """Keeps that a file solved the exercise."""
        when = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        entry = dataclasses.asdict(Solved(hash_of(source), when, round(seconds, 3)))
        self._change(lambda mine: mine.setdefault("solved", {}).update({exercise.name: entry}))

    def see_hint(self, exercise: Exercise, level: int) -> None:
        """Keeps that the learner has seen the hints up to this one."""

        def change(mine: dict[str, Any]) -> None:
            hints = mine.setdefault("hints", {})
            hints[exercise.name] = max(level, hints.get(exercise.name, 0))

        self._change(change)

    # The files.

    def path(self, exercise: Exercise) -> pathlib.Path:
        """The file of an exercise."""
        return self.folder / exercise.file_name

    def place(self, exercise: Exercise) -> bool:
        """Copies the starter into the folder, if there is no file of that name. Returns whether there was none.

        Raises:
          InputError: if nothing can be written there.
        """
        try:
            _create(self.path(exercise), exercise.starter.encode())
        except FileExistsError:
            return False
        except OSError as error:
            raise self._unwritable(error) from None
        return True

    def read(self, exercise: Exercise) -> str:
        """The file of an exercise.

        Raises:
          InputError: if it is not there, or no text.
        """
        return read_source(self.path(exercise), self.command("reset", exercise.full_name))

    def reset(self, exercise: Exercise) -> pathlib.Path | None:
        """Puts the starter back, and forgets that the exercise was solved. Returns where the old file is kept.

        Raises:
          InputError: if nothing can be written there. The old file is as it was then.
        """
        path = self.path(exercise)
        kept, is_moved = None, False
        try:
            if path.is_file() and os.access(path, os.R_OK):
                old = path.read_bytes()
                if old != exercise.starter.encode():
                    kept = self._keep(path, lambda kept: _create(kept, old))
            elif path.exists():  # a folder, say: it is kept as it is
                kept, is_moved = self._keep(path, lambda kept: _move(path, kept)), True
            _replace(path, exercise.starter)
        except OSError as error:
            if kept is not None and is_moved:
                os.rename(kept, path)
            raise self._unwritable(error) from None

        def change(mine: dict[str, Any]) -> None:
            for key in ("solved", "hints"):
                mine.get(key, {}).pop(exercise.name, None)

        self._change(change)
        return kept

    def _keep(self, path: pathlib.Path, put: Callable[[pathlib.Path], None]) -> pathlib.Path:
        for number in range(1, 10**6):
            kept = path.with_name(f"{path.name}.bak{number}")
            with contextlib.suppress(FileExistsError):
                put(kept)
                return kept
        raise OSError(f"There are too many files {path.name}.bak*.")

    def _source_or_none(self, exercise: Exercise) -> str | None:
        try:
            return self.read(exercise)
        except InputError:
            return None

    # The record.

    def _mine(self) -> dict[str, Any]:
        return self._load()["courses"].get(self.course.name, {})

    def _change(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Makes a change to the record as it is now, whoever wrote it."""
        try:
            with self._locked():
                record = self._load()
                change(record["courses"].setdefault(self.course.name, {}))
                _replace(self.folder / RECORD, json.dumps(record, indent=1) + "\n")
        except OSError as error:
            # A disk that is full is no reason to lose the screen, but it is one to speak.
            self._say(f"Your progress could not be written to {self.folder / RECORD}: {error.strerror}.")

    def _load(self) -> dict[str, Any]:
        """The record; an empty one if there is none. One that cannot be used is moved aside."""
        path = self.folder / RECORD
        try:
            record = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return {"version": VERSION, "courses": {}}
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no JSON"
        else:
            reason = _defect(record)
            if not reason:
                return record
        self._move_aside(path, reason or "")
        return {"version": VERSION, "courses": {}}

    def _move_aside(self, path: pathlib.Path, reason: str) -> None:
        for number in range(1, 10**6):
            aside = path.with_name(f"{path.name}.aside{number}")
            if not aside.exists():
                break
        try:
            os.rename(path, aside)
        except OSError:
            self._say(f"{path} cannot be used ({reason}), nor moved: nothing of it counts for now.")
        else:
            self._say(f"{path} cannot be used ({reason}). It is kept as {aside.name}, and a new one was begun.")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / LOCK, "a") as file:
            # A file system without locks does without: each write is still whole.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def read_source(path: pathlib.Path, reset: str = "") -> str:
    """The text of a learner's file.

    Args:
      path: of the file.
      reset: the command that puts it back to its beginning.

    Raises:
      InputError: if it is not there, no file, too large, or not in UTF-8.
    """

    def refuse(reason: str, way_out: str = "") -> InputError:
        return InputError(
            "The file of an exercise must be there, be text in UTF-8, and have at most 1 MiB",
            given=f"{path} ({reason})",
            remedy=f"{way_out}Put it back to its beginning: {reset or f'anybatch learn reset {path.stem}'}",
        )

    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST:
            raise refuse(f"{about.st_size:,} bytes" if stat.S_ISREG(about.st_mode) else "no file")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise refuse(error.strerror or "unreadable") from None
    except UnicodeDecodeError as error:
        where = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise refuse(where, "Save it in UTF-8. ") from None


def _create(path: pathlib.Path, data: bytes) -> None:
    """Writes a file that is not there; wholly, or not at all."""
    with open(path, "xb") as file:
        try:
            file.write(data)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _move(path: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a file or a folder a name that is free."""
    if os.path.lexists(target):
        raise FileExistsError
    os.rename(path, target)


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes a file beside, and moves it: who looks sees the old one or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.write(text)
        if path.exists():
            shutil.copymode(path, beside)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _defect(record: Any) -> str | None:
    """Why a record cannot be used, or None."""
    if not isinstance(record, dict) or type(record.get("version")) is not int:
        return "it is no record of progress"
    if record["version"] != VERSION:
        return f"it has version {record['version']}, and this anybatch knows version {VERSION}"

    def are(kind: Any, mapping: Any) -> bool:
        return isinstance(mapping, dict) and all(isinstance(value, kind) for value in mapping.values())

    if not are(dict, record.get("courses")):
        return "it has no courses"
    for name, course in record["courses"].items():
        solved = course.get("solved", {})
        is_well = (
            isinstance(course.get("current", ""), str)
            and are(int, course.get("hints", {}))
            and are(dict, solved)
            and all(
                isinstance(entry.get(key), kind)
                for entry in solved.values()
                for key, kind in (("hash", str), ("when", str), ("seconds", (int, float)))
            )
        )
        if not is_well:
            return f"what it has on {name} is damaged"
    return None
