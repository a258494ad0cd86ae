"""The learner's folder: the files to edit, and `.progress.json`, the record of what was solved.

**Nothing that a learner wrote is lost.** An existing file is never overwritten; a file that is reset is kept under
another name; a record that cannot be read is moved aside. Two programs may use one folder: each change is made to the
current record, under a lock.
"""

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import itertools
import json
import os
import pathlib
import shlex
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from anybatch.call.files import read_regular, write_atomically
from anybatch.errors import InputError
from anybatch.learn.catalogue import BUILTIN, Course, Exercise

FOLDER = pathlib.Path("anybatch-learn")
VERSION = 1
RECORD = ".progress.json"
LOCK = ".progress.lock"
LARGEST = 2**20  # bytes of the largest file that is accepted
_SETTLE = 0.01  # seconds to wait before looking again whether a file is still being written
_GONE = 1.0  # seconds for which a file may be missing or empty while an editor saves it


@dataclasses.dataclass(frozen=True)
class Solved:
    """The record of a solved exercise.

    Args:
      hash: the hash of the file that solved it.
      when: the time in ISO format, with the time zone.
      seconds: how long the check took.
    """

    hash: str
    when: str
    seconds: float


def hash_of(source: str) -> str:
    """The SHA-256 hash of a file's text."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest()


class Progress:
    """A learner's progress in one course: the record in a folder, and the files there.

    Args:
      folder: the learner's folder. It is created when something is written.
      course: the course.
      say: called with messages for the learner.
    """

    def __init__(self, folder: str | os.PathLike, course: Course, say: Callable[[str], None] = print) -> None:
        self.folder, self.course, self._say = pathlib.Path(folder), course, say

    def command(self, *words: str) -> str:
        """The command line for this course and this folder.

        >>> Progress("anybatch-learn", Course.builtin()).command("hint", "5")
        'anybatch learn hint 5'
        """
        words = ("anybatch", "learn", *words)
        words += () if self.course.folder == BUILTIN else ("--course", str(self.course.folder))
        return shlex.join(
            words + (() if self.folder in (FOLDER, pathlib.Path(".")) else ("--folder", str(self.folder)))
        )

    def prepare(self) -> None:
        """Creates the folder if it does not exist.

        Raises:
          InputError: if the folder is not writable.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            "The folder for the exercises must be writable",
            given=f"--folder {self.folder} ({error.strerror})",
            remedy="Choose another: anybatch learn --folder ~/anybatch-learn",
        )

    # The record: what was solved, and where the learner is.

    @property
    def current(self) -> Exercise:
        """The exercise where the learner left off; the first one at the start."""
        name = self._mine().get("current")
        return next((exercise for exercise in self.course.exercises if exercise.name == name), self.course.exercises[0])

    @property
    def solved(self) -> dict[str, Solved]:
        """The solved exercises, by name."""
        mine = self._mine().get("solved", {})
        return {name: Solved(entry["hash"], entry["when"], entry["seconds"]) for name, entry in mine.items()}

    def hints_seen(self, exercise: Exercise) -> int:
        """How many hints the learner has seen."""
        return self._mine().get("hints", {}).get(exercise.name, 0)

    def next_hints(self, exercise: Exercise) -> list[int]:
        """The numbers of the hints to show: the next one, or all of them if all were seen."""
        seen, total = self.hints_seen(exercise), len(exercise.hints)
        return [seen + 1] if seen < total else list(range(1, total + 1))

    def state(self, exercise: Exercise) -> str:
        """The state of an exercise: "solved", "changed" (solved, and edited since), "begun" or "open"."""
        source = self._source_or_none(exercise)
        solved = self.solved.get(exercise.name)
        if solved is not None:
            return "solved" if source is None or hash_of(source) == solved.hash else "changed"
        return "open" if source is None or source == exercise.starter else "begun"

    def go_to(self, exercise: Exercise) -> None:
        """Records the exercise that the learner is at."""
        self._change(lambda mine: mine.update(current=exercise.name))

    def solve(self, exercise: Exercise, source: str, seconds: float) -> None:
        """Records that a file solved the exercise."""
        when = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        entry = dataclasses.asdict(Solved(hash_of(source), when, round(seconds, 3)))
        self._change(lambda mine: mine.setdefault("solved", {}).update({exercise.name: entry}))

    def see_hint(self, exercise: Exercise, level: int) -> None:
        """Records that the learner has seen the hints up to this one."""

        def change(mine: dict[str, Any]) -> None:
            hints = mine.setdefault("hints", {})
            hints[exercise.name] = max(level, hints.get(exercise.name, 0))

        self._change(change)

    # The files.

    def path(self, exercise: Exercise) -> pathlib.Path:
        """The path of the learner's file for an exercise."""
        return self.folder / exercise.file_name

    def place(self, exercise: Exercise) -> bool:
        """Copies the starter into the folder, unless the file exists. Returns whether it was copied.

        Raises:
          InputError: if the folder is not writable.
        """
        try:
            _create(self.path(exercise), exercise.starter.encode())
        except FileExistsError:
            return False
        except OSError as error:
            raise self._unwritable(error) from None
        return True

    def read(self, exercise: Exercise) -> str:
        """The text of the learner's file for an exercise.

        Raises:
          InputError: if it does not exist, or is not text.
        """
        path = self.path(exercise)

        def refuse(reason: str, way_out: str = "") -> InputError:
            return InputError(
                "The file of an exercise must exist, be text in UTF-8, and have at most 1 MiB",
                given=f"{path} ({reason})",
                remedy=f"{way_out}To start over: {self.command('reset', exercise.full_name)}",
            )

        try:
            return read_regular(path, LARGEST).decode("utf-8-sig")
        except OSError as error:
            raise refuse(error.strerror or "unreadable") from None
        except UnicodeDecodeError as error:
            where = f"byte {error.start} is {error.object[error.start]:#04x}"
            raise refuse(where, "Save it as UTF-8. ") from None

    def write(self, exercise: Exercise, source: str) -> None:
        """Replaces the learner's file for an exercise, completely or not at all.

        Raises:
          InputError: if the text is too long, or the folder is not writable. The file is then unchanged.
        """
        data = source.encode("utf-8", "replace")
        if len(data) > LARGEST:
            raise InputError(
                "The file of an exercise must have at most 1 MiB",
                given=f"{len(data):,} bytes for {self.path(exercise)}",
                remedy="Make it shorter: undo what was pasted.",
            )
        _replace(self.path(exercise), data.decode())

    def keep_aside(self, exercise: Exercise, source: str) -> pathlib.Path:
        """Writes a text beside the learner's file for an exercise, under a new name. Returns its path.

        Raises:
          InputError: if the folder is not writable.
        """
        try:
            with self._locked():
                aside = _new_name(self.path(exercise), "bak")
                _create(aside, source.encode("utf-8", "replace"))
        except OSError as error:
            raise self._unwritable(error) from None
        return aside

    def reset(self, exercise: Exercise) -> pathlib.Path | None:
        """Puts the starter back, and forgets that the exercise was solved. Returns the path of the old file's copy.

        Raises:
          InputError: if the folder is not writable. The old file is then unchanged.
        """
        path, kept = self.path(exercise), None
        is_changed = os.path.lexists(path) and self._source_or_none(exercise) != exercise.starter
        try:
            with self._locked():
                kept = _set_aside(path, "bak") if is_changed else None
            _replace(path, exercise.starter)
        except OSError as error:
            raise self._unwritable(error) from None
        except InputError:
            if kept is not None:
                os.rename(kept, path)
            raise

        def change(mine: dict[str, Any]) -> None:
            for key in ("solved", "hints"):
                mine.get(key, {}).pop(exercise.name, None)

        self._change(change)
        return kept

    def _source_or_none(self, exercise: Exercise) -> str | None:
        try:
            return self.read(exercise)
        except InputError:
            return None

    # Reading and writing the record.

    def _mine(self) -> dict[str, Any]:
        return self._load()["courses"].get(self.course.name, {})

    def _change(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Applies a change to the current record in the file, which another program may have written."""
        try:
            with self._locked():
                record = self._load()
                change(record["courses"].setdefault(self.course.name, {}))
                _replace(self.folder / RECORD, json.dumps(record, indent=1) + "\n")
        except (OSError, InputError) as error:
            # A full disk should not end the session, but the learner should know.
            self._say(f"Your progress could not be written to {self.folder / RECORD}: {error}")

    def _load(self) -> dict[str, Any]:
        """The record; an empty one if there is none. A record that cannot be used is moved aside."""
        path = self.folder / RECORD
        try:
            record = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            return {"version": VERSION, "courses": {}}
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        else:
            reason = _defect(record)
            if not reason:
                return record
        try:
            aside = _set_aside(path, "aside")
            self._say(f"{path} cannot be used ({reason}). It is kept as {aside.name}, and a new one was started.")
        except OSError:
            self._say(f"{path} cannot be used ({reason}), and cannot be moved. It is ignored for now.")
        return {"version": VERSION, "courses": {}}

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / LOCK, "a") as file:
            # Some file systems have no locks. Each write is still atomic.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


class Saves:
    """Notices when the contents of a file have changed.

    An editor may write a file in several steps, or write another one and rename it. So a file that is missing for a
    moment, empty, or still growing is ignored. A save that changes nothing is ignored, too.

    Args:
      path: the path of the file.
      read: reads the file; raises InputError if it is not text.
    """

    def __init__(self, path: pathlib.Path, read: Callable[[], str]) -> None:
        self.path, self._read = path, read
        self._seen: tuple[int, ...] | None = None
        self._hash = ""
        self._gone_since: float | None = None

    @property
    def is_gone(self) -> bool:
        """Whether the file has been missing for longer than a save takes."""
        return self._is_overdue and self._about() is None

    @property
    def _is_overdue(self) -> bool:
        return self._gone_since is not None and time.monotonic() - self._gone_since > _GONE

    def look(self) -> str | None:
        """The contents, if they have changed since the last call; else None.

        Raises:
          InputError: if they have changed and are not text.
        """
        about = self._about()
        if not about or not about[0]:
            self._gone_since = self._gone_since or time.monotonic()
            if not about or not self._is_overdue:
                return None
        else:
            self._gone_since = None
        if about == self._seen:
            return None
        time.sleep(_SETTLE)
        if self._about() != about:
            return None
        self._seen = about
        source = self._read()
        if hash_of(source) == self._hash:
            return None
        self._hash = hash_of(source)
        return source

    def _about(self) -> tuple[int, ...] | None:
        try:
            about = os.stat(self.path)
        except OSError:
            return None
        return about.st_size, about.st_mtime_ns, about.st_ino, about.st_mode


def _create(path: pathlib.Path, data: bytes) -> None:
    """Writes a new file, completely or not at all. Raises FileExistsError if it exists."""
    with open(path, "xb") as file:
        try:
            file.write(data)
            file.flush()
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _set_aside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    """Renames a file or a folder, and returns its new path."""
    aside = _new_name(path, suffix)
    os.rename(path, aside)
    return aside


def _new_name(path: pathlib.Path, suffix: str) -> pathlib.Path:
    """A path beside another one that does not exist yet."""
    names = (path.with_name(f"{path.name}.{suffix}{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def _replace(path: pathlib.Path, text: str) -> None:
    must = "The folder for the exercises must be writable"
    write_atomically(path, text.encode(), must=must, given=str(path))


def _defect(record: Any) -> str | None:
    """Why a record cannot be used, or None."""
    if not isinstance(record, dict) or type(record.get("version")) is not int:
        return "it is not a record of progress"
    if record["version"] != VERSION:
        return f"it has version {record['version']}, and this anybatch reads version {VERSION}"
    if not isinstance(record.get("courses"), dict):
        return "it has no courses"
    kinds: dict[str, Any] = {"hash": str, "when": str, "seconds": (int, float)}
    for name, course in record["courses"].items():
        try:
            solved, hints = course.get("solved", {}), course.get("hints", {})
            is_well = all(isinstance(entry[key], kinds[key]) for entry in solved.values() for key in kinds)
            is_well = is_well and all(isinstance(seen, int) for seen in hints.values())
        except (AttributeError, KeyError, TypeError):
            is_well = False
        if not is_well:
            return f"its entry for {name} is damaged"
    return None
