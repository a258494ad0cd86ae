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

HARDEST = 3  # the largest difficulty

_COURSE_KEYS: dict[str, type] = {"name": str, "title": str, "description": str, "exercise": list}
_COURSE_MAY: dict[str, type] = {"placement": list, "placement_end": str}
_EXERCISE_KEYS: dict[str, type] = {"folder": str, "title": str}
_EXERCISE_MAY: dict[str, type] = {"topic": str, "difficulty": int, "needs": list}
_QUESTION_KEYS: dict[str, type] = {"text": str, "answers": list, "right": int, "start": str}
# key -> what its value must be, and an example of it; other keys are strings
_VALUES = {
    "exercise": ("one [[exercise]] or more", '[[exercise]]\nfolder = "01_name"\ntitle = "..."'),
    "placement": ("one [[placement]] or more", '[[placement]]\ntext = "..."\nanswers = ["...", "..."]\nright = 0'),
    "difficulty": (f"a whole number from 1 to {HARDEST}", "difficulty = 2"),
    "needs": ("a list of names of exercises", 'needs = ["name"]'),
    "answers": ("a list of answers", 'answers = ["...", "..."]'),
    "right": ("the index of the right answer, a whole number from 0", "right = 0"),
}
_DEFINITION = (ast.FunctionDef, ast.ClassDef)
# a section of other_ways.md: its title, its text and its code
_OTHER_WAY = re.compile(r"^## +(\S.*?) *\n((?:(?!## |```).*\n)*)```python\n((?:(?!```).*\n)*)```[ \t]*$", re.MULTILINE)


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
class Question:
    """A question of a placement, which finds the exercise to start at.

    Args:
      text: the question, in Markdown.
      answers: two answers or more, in Markdown.
      right: the index of the right answer, from 0.
      start: the name of the exercise to start at if this is the first question that is not answered correctly.
    """

    text: str
    answers: tuple[str, ...]
    right: int
    start: str


@dataclasses.dataclass(frozen=True)
class Exercise:
    """One exercise. Its files are read when they are needed.

    Args:
      number: the number in the name of its folder.
      name: the name of its folder, without the number.
      title: the title that learners see.
      folder: the folder with its files.
      topic: the heading under which a list shows it; "" for none.
      difficulty: 1 (easy) to 3 (hard).
      needs: the names of earlier exercises that this one builds on.
    """

    number: int
    name: str
    title: str
    folder: pathlib.Path
    topic: str = ""
    difficulty: int = 1
    needs: tuple[str, ...] = ()

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
    def other_ways_page(self) -> str:
        """Other right ways to write it, in Markdown; "" if the exercise has no `other_ways.md`."""
        return self._read("other_ways.md") if (self.folder / "other_ways.md").exists() else ""

    @functools.cached_property
    def other_ways(self) -> tuple[tuple[str, str], ...]:
        """The title and the code of each other right way in `other_ways.md`.

        The code is a function, with the imports and helpers that the starter does not have: see `file_with`.
        """
        found = _OTHER_WAY.findall(self.other_ways_page)
        rest = _OTHER_WAY.sub("", self.other_ways_page)
        left = re.search(r"^(## .*|```.*)$", rest, re.MULTILINE)
        if left or (rest.strip() and not found):
            raise InputError(
                "Each other way must be a heading, a text and one block of code that begins with ```python",
                given=f"{self.folder / 'other_ways.md'}: {left[0] if left else 'no heading'}",
                remedy="Write: ## With einsum\n\nShorter.\n\n```python\ndef ...\n```",
            )
        return tuple((title, code) for title, _, code in found)

    def file_with(self, code: str) -> str:
        """The starter with functions replaced: those that `code` defines. The rest of `code` is added.

        A submission for one of the `other_ways`, which are short because the starter has the rest.
        """
        names = {
            node.name for node in _parse(self.folder / "other_ways.md", code).body if isinstance(node, _DEFINITION)
        }
        lines = self.starter.splitlines()
        place = len(lines)
        for node in reversed(self.parsed("exercise.py").body):
            if isinstance(node, _DEFINITION) and node.name in names:
                place = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
                lines[place : node.end_lineno] = []
        return "\n".join([*lines[:place], code.strip(), *lines[place:]]) + "\n"

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

    Args:
      name: an identifier, under which progress is kept.
      title: the title that learners see.
      description: what it is about, in a sentence or two.
      folder: the folder with its catalogue.
      exercises: the exercises, in order.
      placement: questions for learners who know some of it already, from easy to hard; () for none.
      placement_end: the name of the exercise to start at if all answers are right; "" if there is no placement.
    """

    name: str
    title: str
    description: str
    folder: pathlib.Path
    exercises: tuple[Exercise, ...]
    placement: tuple[Question, ...] = ()
    placement_end: str = ""

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
        _check_keys(given, _COURSE_KEYS, path, "", _COURSE_MAY)
        if not given["name"].isidentifier():
            raise InputError(
                "The name of a course must be an identifier",
                given=f"name = {given['name']!r} in {path}",
                remedy=f'For example: name = "{_identifier(given["name"])}"',
            )
        exercises = tuple(_exercise(entry, index, folder, path) for index, entry in enumerate(given["exercise"], 1))
        _check_order(exercises, path)
        _check_needs(exercises, path)
        placement, end = _placement(given, exercises, path)
        return cls(given["name"], given["title"], given["description"], folder, exercises, placement, end)

    @property
    def topics(self) -> tuple[tuple[str, tuple[Exercise, ...]], ...]:
        """Each topic with its exercises, in the order of the first exercise of each.

        >>> [(topic, len(exercises)) for topic, exercises in Course.builtin().topics][:2]
        [('Gradients and trees', 3), ('Split the batch', 4)]
        """
        found: dict[str, list[Exercise]] = {}
        for exercise in self.exercises:
            found.setdefault(exercise.topic, []).append(exercise)
        return tuple((topic, tuple(exercises)) for topic, exercises in found.items())

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
    _check_keys(entry, _EXERCISE_KEYS, path, where, _EXERCISE_MAY)
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
    difficulty, needs = entry.get("difficulty", 1), entry.get("needs", [])
    if not 1 <= difficulty <= HARDEST:
        raise _wrong("difficulty", entry, path, where)
    if not all(isinstance(name, str) for name in needs):
        raise _wrong("needs", entry, path, where)
    return Exercise(int(form[1]), form[2], entry["title"], home, entry.get("topic", ""), difficulty, tuple(needs))


def _placement(
    given: dict[str, Any], exercises: tuple[Exercise, ...], path: pathlib.Path
) -> tuple[tuple[Question, ...], str]:
    """The questions of a catalogue, and the exercise to start at if all answers are right."""
    if ("placement" in given) != ("placement_end" in given):
        missing = "placement_end" if "placement" in given else "placement"
        raise InputError(
            "A placement needs a [[placement]] for each question, and placement_end: where to start if all are right",
            given=f"no {missing} in {path}",
            remedy=f'Write, above the first [[...]]: placement_end = "{exercises[-1].name}"'
            if missing == "placement_end"
            else f'Write: {_VALUES["placement"][1]}\nstart = "{exercises[0].name}"',
        )
    if "placement" not in given:
        return (), ""
    questions = tuple(_question(entry, index, path) for index, entry in enumerate(given["placement"], 1))
    for index, question in enumerate(questions, 1):
        _check_name(question.start, exercises, path, f"[[placement]] {index}: start")
    _check_name(given["placement_end"], exercises, path, "placement_end")
    return questions, given["placement_end"]


def _question(entry: Any, index: int, path: pathlib.Path) -> Question:
    where = f"[[placement]] {index}: "
    if not isinstance(entry, dict):
        raise InputError(
            "Each question must be a table in the catalogue",
            given=f"{where}{entry!r} in {path}",
            remedy=f"Write: {_VALUES['placement'][1]}",
        )
    _check_keys(entry, _QUESTION_KEYS, path, where)
    answers, right = entry["answers"], entry["right"]
    if len(answers) < 2 or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise InputError(
            "A question needs two answers or more, all strings that are not empty",
            given=f"{where}answers = {answers!r} in {path}",
            remedy='Write: answers = ["...", "..."]. The page adds "I don\'t know" by itself.',
        )
    if not 0 <= right < len(answers):
        raise InputError(
            f"right must be the index of an answer, 0 to {len(answers) - 1}",
            given=f"{where}right = {right} in {path}",
            remedy=f"Write: right = 0, if it is {answers[0]!r}.",
        )
    return Question(entry["text"], tuple(answers), right, entry["start"])


def _check_needs(exercises: tuple[Exercise, ...], path: pathlib.Path) -> None:
    for index, exercise in enumerate(exercises):
        for name in exercise.needs:
            where = f"[[exercise]] {index + 1}: needs"
            _check_name(name, exercises, path, where)
            if name not in (each.name for each in exercises[:index]):
                what = "itself" if name == exercise.name else "a later exercise"
                raise InputError(
                    "An exercise can need only earlier ones",
                    given=f"{where} {name!r}, {what}, in {path}",
                    remedy="Leave it out, or reorder the exercises and their numbers.",
                )


def _check_name(name: str, exercises: tuple[Exercise, ...], path: pathlib.Path, where: str) -> None:
    """Refuses a name that no exercise has."""
    names = [exercise.name for exercise in exercises]
    if name not in names:
        near = difflib.get_close_matches(re.sub(r"^\d+_", "", name), names, n=1, cutoff=0.5)
        raise InputError(
            "An exercise is named in a catalogue as its folder, without the number",
            given=f"{where} {name!r} in {path}",
            remedy=f"Did you mean {near[0]}?" if near else f"For example: {names[0]!r}",
        )


def _wrong(key: str, given: dict[str, Any], path: pathlib.Path, where: str) -> InputError:
    """The error for a value of the wrong kind."""
    written = f"{key} = {given[key]!r}" if key in given else f"no {key}"
    must, example = _VALUES.get(key, ("a string that is not empty", f'{key} = "..."'))
    return InputError(f"{key} must be {must}", given=f"{where}{written} in {path}", remedy=f"Write: {example}")


def _check_keys(
    given: dict[str, Any], required: dict[str, type], path: pathlib.Path, where: str, may: dict[str, type] | None = None
) -> None:
    """Refuses unknown keys, missing keys, and values of the wrong type. The keys of `may` are optional."""
    known = {**required, **(may or {})}
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            raise InputError(
                f"Every key in a catalogue must be one of {', '.join(known)}",
                given=f"{where}{key!r} in {path}",
                remedy=f"Did you mean {near[0]}?" if near else "Leave it out; a newer anybatch may know it.",
            )
    for key, kind in known.items():
        if key not in given and key not in required:
            continue
        value = given.get(key)
        is_empty = key != "needs" and ((isinstance(value, str) and not value.strip()) or value == [])
        if not isinstance(value, kind) or isinstance(value, bool) or is_empty:
            raise _wrong(key, given, path, where)


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


def _parse(path: pathlib.Path, source: str | None = None) -> ast.Module:
    """The syntax tree of a file, or of a part of it."""
    try:
        return ast.parse(_read(path) if source is None else source)
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
