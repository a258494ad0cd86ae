"""The commands for authors: `dev check` tests a course, `dev new` writes one to start with."""

import ast
import concurrent.futures
import contextlib
import dataclasses
import json
import keyword
import pathlib
import queue
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from anybatch.call.files import write_atomically
from anybatch.errors import InputError
from anybatch.learn.catalogue import COURSES, Course, Exercise, line_of
from anybatch.learn.check import Verdict
from anybatch.learn.grading import devices_of, examine_check, grade
from anybatch.learn.runner.submissions import Runner

SCHEMA = 1  # of the JSON that `dev check` prints
SECTIONS = ("Why it matters", "A worked example", "Pitfalls", "The problem")
QUICK = 0.5  # seconds; a slower check gets a note
LONGEST = 320  # characters of `Exercise.one_line`
WORKERS = 2

_TEMPLATE = COURSES / "template"
_NAME, _TITLE = "mean_gradient", "The gradient of a mean"  # of the template's exercise


@dataclasses.dataclass
class Examined:
    """The result of examining one exercise.

    Args:
      exercise: the exercise.
      defects: what the author must fix.
      notes: what the author may want to know.
      checks: how many submissions were checked.
      seconds: how long that took.
    """

    exercise: Exercise
    defects: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    checks: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """The result as plain data, for other programs."""
        about = {"number": self.exercise.number, "name": self.exercise.name, "passed": not self.defects}
        rest = {"checks": self.checks, "seconds": round(self.seconds, 3)}
        return {**about, "defects": self.defects, "notes": self.notes, **rest}


def examine(exercise: Exercise, runner: Runner, seeds: int, tick: Callable[[], Any] = lambda: None) -> Examined:
    """Tests an exercise.

    **Checked for every seed**: the solution passes, with and without anybatch, and so does each way in `other_ways.md`.
    Every file in `mistakes/` fails in its stage with its words. The starter raises NotImplementedError, and every
    mistake that the check names is made by a file in `mistakes/`.

    Args:
      exercise: the exercise.
      runner: runs submissions.
      seeds: how many sets of cases to try.
      tick: called after every check.
    """
    begin, found = time.perf_counter(), Examined(exercise)

    def add(defect: str) -> None:
        if defect not in found.defects:
            found.defects.append(defect)

    for part in (_in_words(exercise), _in_code(exercise), _in_practice(exercise, runner, seeds, found, tick)):
        try:
            for defect in part:
                add(defect)
        except InputError as error:
            add(str(error))
        except Exception as error:
            line = line_of(error, exercise.folder / "check.py")
            place = f" (line {line})" if line else ""
            add(f"check.py fails with {type(error).__name__}: {error}{place}")
    found.seconds = time.perf_counter() - begin
    return found


def _in_words(exercise: Exercise) -> Iterator[str]:
    headings = re.findall(r"^## +(.*?) *$", exercise.page, re.MULTILINE)
    if [heading for heading in headings if heading in SECTIONS] != list(SECTIONS):
        yield f"page.md needs the sections ## {', ## '.join(SECTIONS)}, in this order"
    if not exercise.page.startswith(f"# {exercise.title}\n"):
        yield f"page.md must begin with # {exercise.title}, the title in the catalogue"
    assert exercise.hints  # raises InputError if there are not three
    titles = [title for title, _ in exercise.other_ways]
    if len(set(titles)) < len(titles):
        yield "every way in other_ways.md needs a different title"


def _in_code(exercise: Exercise) -> Iterator[str]:
    check = exercise.check
    for name in ("exercise.py", "solution.py", "with_anybatch.py"):
        found = _parameters(exercise.parsed(name), check.function)
        wanted = f"{check.function}({', '.join(check.parameters)})"
        if found is None:
            yield f"{name} has no function {check.function}, which check.py names"
        elif found != tuple(check.parameters):
            yield f"{name} has {check.function}({', '.join(found)}), and check.py says {wanted}"
    if len(re.findall(r"[.!?:](?=\s|$)", exercise.why)) < 2:
        yield "the docstring of solution.py must say why it is right, in two sentences or more"
    if not exercise.one_line:
        yield "with_anybatch.py never uses ab."
    elif len(exercise.one_line) > LONGEST:
        yield f"the statements that use ab. in with_anybatch.py have more than {LONGEST} characters"


def _in_practice(
    exercise: Exercise, runner: Runner, seeds: int, found: Examined, tick: Callable[[], Any]
) -> Iterator[str]:
    made: set[str | None] = set()
    times = []

    def check(source: str, seed: int, *, anybatch: bool = False) -> Verdict:
        verdict = grade(exercise, source, runner, seed=seed, anybatch=anybatch)
        found.checks += 1
        tick()
        return verdict

    runner.keep_warm(devices_of(exercise))
    first = check(exercise.starter, 0)
    if first.passed or first.started:
        yield f"the starter must raise NotImplementedError; it {_said(first)}"
    right = {"the solution": exercise.solution, "with_anybatch.py": exercise.with_anybatch}
    right |= {f"{title!r} in other_ways.md": exercise.file_with(code) for title, code in exercise.other_ways}
    for seed in range(seeds):
        yield from examine_check(exercise, seed)
        for what, source in right.items():
            verdict = check(source, seed, anybatch=what == "with_anybatch.py")
            if what == "the solution":
                times.append(verdict.seconds)
            if not verdict.passed:
                yield f"{what} must pass; it {_said(verdict)}"
        for wrong in exercise.mistakes:
            verdict = check(wrong.source, seed)
            made.add(verdict.mistake)
            words = " ".join(f"{verdict.title} {verdict.text}".split())
            is_named = verdict.stage == wrong.caught_by and " ".join(wrong.says.split()) in words
            if verdict.passed or not is_named:
                must = f"mistakes/{wrong.name}.py must fail in {wrong.caught_by} with {wrong.says!r}"
                yield f"{must}; it {_said(verdict)}"
    if min(times) > QUICK:
        found.notes.append(
            f"a check takes {min(times):.2f} s while another exercise runs; learners notice more than {QUICK} s"
        )
    yield from _uncaught(exercise, made, found)


def _uncaught(exercise: Exercise, made: set[str | None], found: Examined) -> Iterator[str]:
    """What no file in mistakes/ shows; `made` has the mistakes that they make."""
    if not exercise.mistakes:
        yield "there is no file in mistakes/: nothing shows that a wrong answer is caught"
    for mistake in exercise.check.mistakes:
        if mistake.name not in made:
            yield f"no file in mistakes/ makes the mistake {mistake.name!r} that check.py names"
    for stage in ("program", "memory", "collectives"):
        if getattr(exercise.check, stage) and stage not in {wrong.caught_by for wrong in exercise.mistakes}:
            found.notes.append(f"no file in mistakes/ is caught by {stage}: nothing shows that it catches anything")


def examine_all(exercises: Sequence[Exercise], seeds: int, tick: Callable[[], Any]) -> Iterator[Examined]:
    """Examines exercises two at a time; yields the results in order."""
    pool = concurrent.futures.ThreadPoolExecutor(WORKERS)
    free: queue.SimpleQueue[Runner] = queue.SimpleQueue()

    def work(exercise: Exercise) -> Examined:
        runner = free.get()
        try:
            return examine(exercise, runner, seeds, tick)
        finally:
            free.put(runner)

    with contextlib.ExitStack() as stack:
        for _ in range(WORKERS):
            free.put(stack.enter_context(Runner(hidden=[exercises[0].folder.parent])))  # hidden, as for a learner
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        for running in [pool.submit(work, exercise) for exercise in exercises]:
            yield running.result()


def check(course: pathlib.Path | None, name: str | None, *, seeds: int, as_json: bool) -> bool:
    """Tests a course, or one exercise of it, and shows what is wrong.

    The JSON is one object: version (1), course, passed, seconds, and exercises: a list of objects with number, name,
    passed, defects and notes (lists of strings), checks (how many submissions were checked) and seconds.
    """
    import sys

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from anybatch.learn.terminal.pages import Screen

    chosen = Course.builtin() if course is None else Course.read(course)
    exercises = chosen.exercises if name is None else (chosen.find(name),)
    screen = Screen(sys.stderr if as_json else None)
    columns = (TextColumn("Checking"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    begin, found = time.perf_counter(), []
    with Progress(*columns, console=screen.console, transient=True, disable=screen.is_plain) as progress:
        mistakes = sum(len(list(exercise.folder.glob("mistakes/*.py"))) for exercise in exercises)
        others = sum(len(re.findall("^```python", exercise.other_ways_page, re.MULTILINE)) for exercise in exercises)
        task = progress.add_task("", total=len(exercises) * (1 + 2 * seeds) + (mistakes + others) * seeds)
        for examined in examine_all(exercises, seeds, lambda: progress.advance(task)):
            found.append(examined)
            if not as_json:
                screen.examined(examined)
    passed = not any(examined.defects for examined in found)
    seconds = time.perf_counter() - begin
    if as_json:
        about = {"version": SCHEMA, "course": chosen.name, "passed": passed, "seconds": round(seconds, 3)}
        print(json.dumps({**about, "exercises": [examined.as_json() for examined in found]}, indent=1))
    else:
        sound, checks = sum(not each.defects for each in found), sum(each.checks for each in found)
        summary = f"{sound} of {len(found)} exercises are sound: {checks} checks in {seconds:.1f} s."
        screen.say(summary, "bold green" if passed else "bold red")
    return passed


def new(folder: pathlib.Path, name: str | None) -> bool:
    """Writes a course with one small, complete exercise, or adds such an exercise to a course."""
    path, name_given = folder / "catalogue.toml", name
    name = name or _NAME
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise InputError(
            "The name of an exercise must be an identifier in lower case, since it names a folder and a function",
            given=f"--exercise {name}",
            remedy=f"For example: anybatch learn dev new {folder} --exercise my_gradient",
        )
    number, catalogue = 1, ""
    if path.exists():
        course = Course.read(folder)
        if name_given is None or name in (exercise.name for exercise in course.exercises):
            raise InputError(
                "A course that exists needs a name for the new exercise, one that it does not have yet",
                given=f"{folder}" + (f" and --exercise {name}" if name_given else ""),
                remedy=f"anybatch learn dev new {folder} --exercise another_name",
            )
        number, catalogue = course.exercises[-1].number + 1, path.read_text("utf-8").rstrip() + "\n\n"
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            "The folder of a new course must be empty, or not exist yet",
            given=str(folder),
            remedy=f"anybatch learn dev new {folder}-course",
        )
    else:
        begin = (_TEMPLATE / "catalogue.toml").read_text("utf-8").partition("[[exercise]]")[0]
        mine = re.sub(r"\W+", "_", folder.absolute().name.lower()).strip("_")
        catalogue = begin.replace('"mine"', f'"{mine}"') if mine.isidentifier() else begin
    title = _TITLE if name == _NAME else name.replace("_", " ").capitalize()
    home = folder / f"{number:02}_{name}"
    if home.exists():
        raise InputError(
            "The folder of a new exercise must not exist yet",
            given=str(home),
            remedy=f"Move it, or choose another name: anybatch learn dev new {folder} --exercise another_name",
        )
    _write_exercise(home, name, title)
    content = f'{catalogue}[[exercise]]\nfolder = "{home.name}"\ntitle = "{title}"\n'.encode()
    write_atomically(path, content, must="A course's folder must be writable", given=str(path))
    print(f"{home} is a complete exercise. Edit its files, and test it:")
    print(f"  anybatch learn dev check --course {folder} --exercise {number}")
    print(f"Try it as a learner:\n  anybatch learn --course {folder} --at {number}")
    return True


def _write_exercise(home: pathlib.Path, name: str, title: str) -> None:
    source = _TEMPLATE / f"01_{_NAME}"
    for path in sorted(source.rglob("*")):
        if path.suffix in (".py", ".md"):
            target = home / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text("utf-8")
            target.write_text(text.replace(_NAME, name).replace(f"# {_TITLE}\n", f"# {title}\n"), "utf-8")


def _parameters(tree: ast.Module, function: str) -> tuple[str, ...] | None:
    """The names of a function's parameters; None if there is no such function."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return tuple(each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))
    return None


def _said(verdict: Verdict) -> str:
    """The verdict in words for the author, with the seed that reproduces it."""
    if verdict.passed:
        return f"passes (seed {verdict.seed})"
    text = " ".join(verdict.text.split())
    words = f"{verdict.title} {text[:200] + '...' if len(text) > 200 else text}".strip()
    line = f", line {verdict.line}" if verdict.line is not None else ""
    return f"fails in {verdict.stage}{line}: {words} (seed {verdict.seed})"
