"""Reads courses. A course is a folder with a `catalogue.toml` and one folder for each exercise.

The course that comes with anybatch is read in the same way as one that you write. Errors name the file, the key and a
fix. `anybatch learn dev new` writes a small, complete course, and `anybatch learn dev check` tests one.
"""

import ast
import dataclasses
import difflib
import functools
import pathlib
import re
import textwrap
import tomllib
import traceback
import types
from typing import Any

from anybatch.errors import InputError
from anybatch.learn.check import STAGES, Check

COURSES = pathlib.Path(__file__).parent / "courses"
BUILTIN = COURSES / "gradients"
FILES = ("page.md", "exercise.py", "hints.md", "solution.py", "check.py", "with_anybatch.py")

_COURSE_KEYS: dict[str, type] = {"name": str, "title": str, "description": str, "exercise": list}
_EXERCISE_KEYS: dict[str, type] = {"folder": str, "title": str}


@dataclasses.dataclass(frozen=True)
class KnownWrong:
    """A wrong submission from `mistakes/`, and how it must fail.

    Args:
      name: the name of its file, without the suffix.
      source: the text of the file.
      caught_by: the stage in which it must fail.
      says: words that the title or the text of the verdict must contain.
    """

    name: str
    source: str
    caught_by: str
    says: str


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One exercise. Its files are read when they are needed.

    Args:
      number: the number in the name of its folder.
      name: the name of its folder, without the number.
      title: the title that learners see.
      folder: the folder with its files.
    """

    number: int
    name: str
    title: str
    folder: pathlib.Path

    @property
    def full_name(self) -> str:
        """The name with the number: "05_accumulate_in_a_scan"."""
        return self.folder.name

    @property
    def file_name(self) -> str:
        """The name of the learner's file: "05_accumulate_in_a_scan.py"."""
        return f"{self.full_name}.py"

    @functools.cached_property
    def page(self) -> str:
        """The page in Markdown: why it matters, a worked example, pitfalls, the problem."""
        return self._read("page.md")

    @functools.cached_property
    def starter(self) -> str:
        """The file that the learner starts with."""
        return self._read("exercise.py")

    @functools.cached_property
    def solution(self) -> str:
        """A file that solves the exercise."""
        return self._read("solution.py")

    @functools.cached_property
    def with_anybatch(self) -> str:
        """A file that solves the exercise with anybatch."""
        return self._read("with_anybatch.py")

    @functools.cached_property
    def hints(self) -> tuple[str, str, str]:
        """The three hints: a direction, the primitive to use, almost the code."""
        _, *parts = re.split(r"^##\s+(\w+)\s*$", self._read("hints.md"), flags=re.MULTILINE)
        texts = {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}
        if list(texts) != ["1", "2", "3"] or not all(texts.values()):
            raise InputError(
                "An exercise needs three hints, under the headings ## 1, ## 2 and ## 3",
                given=f"{self.folder / 'hints.md'} with {', '.join(f'## {name}' for name in texts) or 'no heading'}"
                + "".join(f"; nothing under ## {name}" for name, text in texts.items() if not text),
                remedy="Write a direction, then the primitive to use, then almost the code.",
            )
        return texts["1"], texts["2"], texts["3"]

    @functools.cached_property
    def why(self) -> str:
        """The docstring of the solution, which says why it is right."""
        return " ".join((ast.get_docstring(self.parsed("solution.py")) or "").split())

    @functools.cached_property
    def one_line(self) -> str:
        """The statements of `with_anybatch.py` that use `ab`, shown when the exercise is solved; "" if there are none.

        They are those of the checked function, or, if it has none, those of the module.
        """
        tree = self.parsed("with_anybatch.py")
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        bodies = [node.body for node in functions if node.name == self.check.function]
        lines = self.with_anybatch.splitlines()
        for body in (*bodies, tree.body):
            found = [node for node in _statements(body) if _uses_anybatch(node)]
            if found:
                parts = ("\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in found)
                return "\n".join(map(textwrap.dedent, parts))
        return ""

    @functools.cached_property
    def check(self) -> Check:
        """The `Check` that check.py defines. This runs the author's code in this process."""
        path = self.folder / "check.py"
        module = types.ModuleType(f"{self.full_name}.check")
        module.__file__ = str(path)
        try:
            exec(compile(self._read("check.py"), path, "exec"), module.__dict__)
        except Exception as error:
            line = error.lineno if isinstance(error, SyntaxError) else line_of(error, path)
            raise InputError(
                "check.py must run, and define check",
                given=f"{type(error).__name__}: {error} ({path}" + (f", line {line})" if line else ")"),
                remedy=f"For the full traceback: python {path}",
            ) from error
        found = getattr(module, "check", None)
        if not isinstance(found, Check):
            raise InputError(
                "check.py must define check, a Check",
                given=f"check = {found!r} in {path}",
                remedy="from anybatch.learn.check import Check, and then: check = Check(function=..., ...)",
            )
        return found

    @functools.cached_property
    def mistakes(self) -> tuple[KnownWrong, ...]:
        """The wrong submissions in `mistakes/`, sorted by name."""
        return tuple(_known_wrong(path) for path in sorted((self.folder / "mistakes").glob("*.py")))

    def parsed(self, name: str) -> ast.Module:
        """The syntax tree of one of its files."""
        return _parse(self.folder / name)

    def _read(self, name: str) -> str:
        return _read(self.folder / name)


@dataclasses.dataclass(frozen=True)
class Course:
    """A course: its exercises, in order.

    >>> course = Course.builtin()
    >>> course.name
    'gradients'
    """

    name: str
    title: str
    description: str
    folder: pathlib.Path
    exercises: tuple[Exercise, ...]

    @classmethod
    def builtin(cls) -> "Course":
        """The course that comes with anybatch."""
        return cls.read(BUILTIN)

    @classmethod
    def read(cls, folder: str | pathlib.Path) -> "Course":
        """Reads the course in a folder.

        Raises:
          InputError: if its catalogue is invalid, or files are missing.
        """
        folder = pathlib.Path(folder).expanduser()
        path = folder / "catalogue.toml"
        if not path.is_file():
            raise InputError(
                "A course is a folder with a catalogue.toml",
                given=f"{folder} (which has none)" if folder.is_dir() else f"{folder} (no such folder)",
                remedy=f"Write a small one to begin with: anybatch learn dev new {folder}",
            )
        try:
            given = tomllib.loads(_read(path))
        except tomllib.TOMLDecodeError as error:
            raise InputError(
                "A catalogue must be TOML: one `name = value` on each line, strings in quotes",
                given=f"{path}: {error}",
                remedy="For an example: anybatch learn dev new FOLDER",
            ) from None
        _check_keys(given, _COURSE_KEYS, path, "")
        if not given["name"].isidentifier():
            raise InputError(
                "The name of a course must be an identifier",
                given=f"name = {given['name']!r} in {path}",
                remedy=f'For example: name = "{_identifier(given["name"])}"',
            )
        exercises = tuple(_exercise(entry, index, folder, path) for index, entry in enumerate(given["exercise"], 1))
        _check_order(exercises, path)
        return cls(given["name"], given["title"], given["description"], folder, exercises)

    def find(self, wanted: str) -> Exercise:
        """Finds an exercise by its number, its name, or its file: "5", "05", "accumulate_in_a_scan".

        Raises:
          InputError: if there is none; it suggests similar names.
        """
        name = pathlib.PurePath(wanted.strip()).name.removesuffix(".py")
        for exercise in self.exercises:
            if name in (exercise.name, exercise.full_name) or (name.isdecimal() and int(name) == exercise.number):
                return exercise
        names = [exercise.name for exercise in self.exercises]
        near = difflib.get_close_matches(re.sub(r"^\d+_", "", name), names, n=3, cutoff=0.5)
        near = near or [known for known in names if name and name in known][:3]
        first, last = self.exercises[0].number, self.exercises[-1].number
        raise InputError(
            f"An exercise is selected by its number, {first} to {last}, or by its name",
            given=repr(wanted),
            remedy=(f"Did you mean {' or '.join(near)}? " if near else "") + "See them all: anybatch learn list",
        )

    def after(self, exercise: Exercise) -> Exercise | None:
        """The next exercise, or None after the last."""
        return next((each for each in self.exercises if each.number > exercise.number), None)

    def before(self, exercise: Exercise) -> Exercise | None:
        """The previous exercise, or None before the first."""
        return next((each for each in reversed(self.exercises) if each.number < exercise.number), None)


def line_of(error: Exception, path: pathlib.Path) -> int | None:
    """The line of a file that raised an exception; None if the file did not."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return lines[-1] if lines else None


def _exercise(entry: Any, index: int, folder: pathlib.Path, path: pathlib.Path) -> Exercise:
    """Makes an exercise from one entry of a catalogue, and checks that its files exist."""
    where = f"[[exercise]] {index}: "
    if not isinstance(entry, dict):
        raise InputError(
            "Each exercise must be a table in the catalogue",
            given=f"{where}{entry!r} in {path}",
            remedy='Write: [[exercise]], and below it folder = "01_name" and title = "..."',
        )
    _check_keys(entry, _EXERCISE_KEYS, path, where)
    form = re.fullmatch(r"(\d\d)_([a-z][a-z0-9_]*)", entry["folder"])
    if form is None:
        raise InputError(
            "The folder of an exercise must be two digits and a name in lower case",
            given=f"{where}folder = {entry['folder']!r} in {path}",
            remedy=f'For example: folder = "{index:02}_{_identifier(entry["folder"])}"',
        )
    home = folder / entry["folder"]
    missing = [name for name in FILES if not (home / name).is_file()]
    if missing:
        raise InputError(
            f"An exercise must have the files {', '.join(FILES)}",
            given=f"{where}{home} without {', '.join(missing)}" if home.is_dir() else f"{where}{home} (no such folder)",
            remedy=f"Write a complete one to edit: anybatch learn dev new {folder} --exercise {form[2]}",
        )
    return Exercise(int(form[1]), form[2], entry["title"], home)


def _check_keys(given: dict[str, Any], known: dict[str, type], path: pathlib.Path, where: str) -> None:
    """Refuses unknown keys, missing keys, and values of the wrong type."""
    kinds: dict[type, str] = {str: "a string that is not empty", list: "one [[exercise]] or more"}
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise InputError(
                f"Every key in a catalogue must be one of {', '.join(known)}",
                given=f"{where}{key!r} in {path}",
                remedy=f"Did you mean {near[0]}?" if near else "Leave it out; a newer anybatch may know it.",
            )
    for key, kind in known.items():
        if not isinstance(given.get(key), kind) or not (given[key].strip() if kind is str else given[key]):
            written = f"{key} = {given[key]!r}" if key in given else f"no {key}"
            example = f'{key} = "..."' if kind is str else '[[exercise]]\nfolder = "01_name"\ntitle = "..."'
            raise InputError(
                f"{key} must be {kinds[kind]}", given=f"{where}{written} in {path}", remedy=f"Write: {example}"
            )


def _check_order(exercises: tuple[Exercise, ...], path: pathlib.Path) -> None:
    for index, exercise in enumerate(exercises):
        earlier = exercises[:index]
        if exercise.name in (each.name for each in earlier):
            raise InputError(
                "Every exercise needs a different name",
                given=f"{exercise.name!r} twice in {path}",
                remedy="Rename one of the folders, and its entry.",
            )
        if earlier and exercise.number <= earlier[-1].number:
            raise InputError(
                "Exercises must be in the order of their numbers",
                given=f"{exercise.full_name!r} after number {earlier[-1].number:02} in {path}",
                remedy="Reorder the entries, or rename the folder.",
            )


def _known_wrong(path: pathlib.Path) -> KnownWrong:
    docstring = ast.get_docstring(_parse(path)) or ""
    caught_by = re.search(r"^caught by:\s*(\S+)\s*$", docstring, re.MULTILINE)
    says = re.search(r"^says:\s*(\S.*?)\s*$", docstring, re.MULTILINE)
    if caught_by is None or says is None or caught_by[1] not in STAGES:
        raise InputError(
            "The docstring of a mistake must have the lines `caught by: <stage>` and `says: <words>`",
            given=f"{path} with " + (f"caught by: {caught_by[1]}" if caught_by and says else "one of them missing"),
            remedy=f"The stages are: {', '.join(STAGES)}.",
        )
    return KnownWrong(path.stem, _read(path), caught_by[1], says[1])


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """The innermost statements of a body: compound statements are replaced by what they contain."""
    found: list[ast.stmt] = []
    for node in body:
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        found += _statements(inner) if inner else [node]
    return found


def _uses_anybatch(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return False
    return any(isinstance(child, ast.Name) and child.id == "ab" for child in ast.walk(node))


def _parse(path: pathlib.Path) -> ast.Module:
    try:
        return ast.parse(_read(path))
    except SyntaxError as error:
        raise InputError(
            "This file of a course must be valid Python",
            given=f"{path}, line {error.lineno}: {error.msg}",
            remedy="Correct that line.",
        ) from None


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise InputError(
            "This file of a course must exist, and be text in UTF-8",
            given=f"{path} ({reason})",
            remedy="Write it, or save it as UTF-8.",
        ) from None


def _identifier(text: str) -> str:
    """An identifier made from a text, for a suggestion."""
    return re.sub(r"\W+", "_", text.lower()).strip("_0123456789") or "mine"
