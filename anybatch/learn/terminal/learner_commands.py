"""What the commands of `anybatch learn` do; each returns whether all is well."""

import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from anybatch.errors import InputError
from anybatch.learn.catalogue import COURSES, Course, Exercise
from anybatch.learn.check import Verdict
from anybatch.learn.grading import grade, processes_of
from anybatch.learn.learner_progress import FOLDER, RECORD, Progress, hash_of
from anybatch.learn.runner import isolation
from anybatch.learn.runner.submissions import Runner
from anybatch.learn.terminal.pages import Screen

SCHEMA = 1  # of the JSON that `check` prints


def learn(course: pathlib.Path | None, folder: pathlib.Path | None, at: str | None) -> int | bool:
    """One sitting; where there is no terminal, the page and one check."""
    screen = Screen()
    progress = _progress(course, folder, screen)
    exercise = _named(progress, at)
    progress.prepare()
    if not _is_interactive():
        return _once(screen, progress, exercise)
    from anybatch.learn.terminal.watch import Checker, Watch

    with Runner(hidden=[progress.course.folder]) as runner:

        def check(exercise: Exercise, source: str) -> Verdict:
            return grade(exercise, source, runner, path=str(progress.path(exercise)))

        checker = Checker(check, lambda exercise: runner.keep_warm(devices_of(exercise)))
        return Watch(progress.course, progress, screen, checker, sys.stdin.fileno()).run(exercise)


def _once(screen: Screen, progress: Progress, exercise: Exercise) -> bool:
    progress.go_to(exercise)
    progress.place(exercise)
    screen.page(exercise, progress.course, progress)
    screen.file(progress.path(exercise), where=progress.command("run", str(exercise.number)))
    screen.say(f"Stuck? {progress.command('hint', str(exercise.number))}")
    following = progress.course.after(exercise)
    if following is not None:
        screen.say(f"Then go on: {progress.command('--at', str(following.number))}")
    screen.say()
    if progress.state(exercise) == "solved":
        screen.say("Solved, and not changed since: it is not run again.")
        return True
    return _check_one(screen, progress, exercise)


def listing(course: pathlib.Path | None, folder: pathlib.Path | None) -> bool:
    """Shows all exercises, and what is solved."""
    screen = Screen()
    progress = _progress(course, folder, screen)
    screen.listing(progress.course, progress, progress.current)
    return True


def run(course: pathlib.Path | None, folder: pathlib.Path | None, name: str | None) -> bool:
    """Checks one file."""
    screen = Screen()
    progress = _progress(course, folder, screen)
    exercise = _named(progress, name)
    progress.prepare()
    if progress.place(exercise):
        screen.file(progress.path(exercise), where=progress.command("run", str(exercise.number)))
    return _check_one(screen, progress, exercise)


def _check_one(screen: Screen, progress: Progress, exercise: Exercise) -> bool:
    source = progress.read(exercise)
    screen.checking()
    with Runner(hidden=[progress.course.folder]) as runner:
        verdict = grade(exercise, source, runner, path=str(progress.path(exercise)))
    screen.erase()
    screen.verdict(verdict)
    if verdict.passed:
        progress.solve(exercise, source, verdict.seconds)
        screen.solved(exercise)
        screen.say(f"\nCompare: {progress.command('solution', str(exercise.number))}")
    return verdict.passed


def hint(course: pathlib.Path | None, folder: pathlib.Path | None, name: str | None, level: int | None) -> bool:
    """Shows a hint: the next one, unless it is told which; all of them when all were seen."""
    screen = Screen()
    progress = _progress(course, folder, screen)
    exercise = _named(progress, name)
    progress.prepare()
    seen, total = progress.hints_seen(exercise), len(exercise.hints)
    levels = [level] if level is not None else [seen + 1] if seen < total else range(1, total + 1)
    for each in levels:
        screen.hint(exercise, each)
    progress.see_hint(exercise, max(levels))
    return True


def solution(course: pathlib.Path | None, folder: pathlib.Path | None, name: str | None, anyway: bool) -> bool:
    """Shows the solution of what was solved."""
    screen = Screen()
    progress = _progress(course, folder, screen)
    exercise = _named(progress, name)
    if exercise.name not in progress.solved and not anyway:
        number = str(exercise.number)
        screen.say(f"The solution of {number} is shown once you have solved it: {progress.command('--at', number)}")
        screen.say(f"A hint may be enough: {progress.command('hint', number)}")
        screen.say(f"If you must: {progress.command('solution', number, '--anyway')}")
        return False
    screen.solution(exercise)
    return True


def reset(course: pathlib.Path | None, folder: pathlib.Path | None, name: str, is_sure: bool) -> bool:
    """Puts a file back to its beginning; the old one is kept."""
    screen = Screen()
    progress = _progress(course, folder, screen)
    exercise = _named(progress, name)
    progress.prepare()
    if not is_sure:
        if not _is_interactive():
            raise InputError(
                "A file is put back to its beginning when somebody says yes",
                given=f"nobody to ask about {progress.path(exercise)}",
                remedy=progress.command("reset", exercise.name, "--yes"),
            )
        screen.say(f"Put {progress.path(exercise)} back to its beginning? Your file is kept under another name. [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            screen.say("Nothing was changed.")
            return False
    kept = progress.reset(exercise)
    screen.say(f"{progress.path(exercise)} is as it was." + (f" What you had is in {kept}." if kept else ""))
    return True


def check(
    course: pathlib.Path | None,
    folder: pathlib.Path | None,
    names: Sequence[str],
    *,
    every: bool,
    as_json: bool,
    again: bool,
) -> bool:
    """Checks files: those that are named, those that are there, or every one of the course.

    What is solved and was not changed since is not run again, unless that is asked for. As JSON it is one object:

    - version: 1, and another number if any of this changes its meaning
    - course, folder: texts
    - passed: whether all that was looked at is solved; seconds: how long it took
    - exercises: a list of objects with number, name and file; state: "passed", "failed", "missing" (there is no such
      file) or "unreadable"; ran: whether it was run just now; solved: whether it ever was; message: why it is
      unreadable, or empty; verdict: null if it was not run, else that of the check (exercise, passed, stage, title,
      text, mistake, line, source_line, prints, prints_dropped, seconds, seed, done, started)
    """
    screen = Screen(sys.stderr if as_json else None)
    progress = _progress(course, folder, screen)
    exercises = [progress.course.find(name) for name in names] or [
        exercise for exercise in progress.course.exercises if every or progress.path(exercise).exists()
    ]
    if not exercises:
        raise InputError(
            "There must be files to check",
            given=f"none in {progress.folder}",
            remedy=f"Begin: {progress.command()}, or check all there are: {progress.command('check', '--all')}",
        )
    begin, rows = time.perf_counter(), []
    with _Late(progress.course) as late:
        for exercise in exercises:
            screen.checking()
            row = _row(late, progress, exercise, again)
            screen.erase()
            rows.append(row)
            if not as_json:
                screen.row(exercise, row)
    passed = all(row["state"] == "passed" for row in rows)
    seconds = time.perf_counter() - begin
    if as_json:
        about = {"version": SCHEMA, "course": progress.course.name, "folder": str(progress.folder)}
        print(json.dumps({**about, "passed": passed, "seconds": round(seconds, 3), "exercises": rows}, indent=1))
    else:
        done = sum(row["state"] == "passed" for row in rows)
        screen.say(f"{done} of {len(rows)} passed, in {seconds:.1f} s.", "green" if passed else "red")
    return passed


class _Late:
    """A runner that is started when it is first needed."""

    def __init__(self, course: Course) -> None:
        self.course = course
        self.runner: Runner | None = None

    def __enter__(self) -> "_Late":
        return self

    def __exit__(self, *_: object) -> None:
        if self.runner is not None:
            self.runner.close()

    def grade(self, exercise: Exercise, source: str, path: str) -> Verdict:
        self.runner = self.runner or Runner(hidden=[self.course.folder])
        self.runner.keep_warm(devices_of(exercise))
        return grade(exercise, source, self.runner, path=path)


def _row(late: _Late, progress: Progress, exercise: Exercise, again: bool) -> dict[str, Any]:
    """What `check` finds out about one exercise."""
    path, verdict, message = progress.path(exercise), None, ""
    solved = progress.solved.get(exercise.name)
    if not path.exists():
        state = "missing"
    else:
        try:
            source = progress.read(exercise)
        except InputError as error:
            state, message = "unreadable", str(error)
        else:
            if solved is not None and hash_of(source) == solved.hash and not again:
                state = "passed"
            else:
                verdict = late.grade(exercise, source, str(path))
                state = "passed" if verdict.passed else "failed"
                if verdict.passed:
                    progress.solve(exercise, source, verdict.seconds)
    return {
        "number": exercise.number,
        "name": exercise.name,
        "file": exercise.file_name,
        "state": state,
        "ran": verdict is not None,
        "solved": solved is not None or state == "passed",
        "message": message,
        "verdict": verdict.as_json() if verdict is not None else None,
    }


def doctor() -> bool:
    """Shows what keeps a check apart on this machine, and whether one works, and how quickly."""
    screen = Screen()
    findings = [(each.subject, each.text, each.is_well, each.remedy) for each in isolation.examine()]
    exercise = Course.read(COURSES / "template").exercises[0]
    with Runner() as runner:
        runner.keep_warm(devices_of(exercise))
        right = [grade(exercise, exercise.solution, runner) for _ in range(3)]
        wrong = grade(exercise, exercise.mistakes[0].source, runner)
    first, *later = (verdict.seconds for verdict in right)
    failed = next((verdict for verdict in right if not verdict.passed), None)
    if failed is not None:
        findings.append(("a check", f"a right answer fails: {failed.title} {failed.text}".strip(), False, ""))
    elif wrong.passed:
        findings.append(("a check", "a wrong answer passes", False, ""))
    else:
        findings.append(("a check", f"works: {first:.1f} s for the first, {min(later):.2f} s later on", True, ""))
    screen.findings(findings)
    return all(is_well for _, _, is_well, _ in findings)


def devices_of(exercise: Exercise) -> tuple[int, ...]:
    """How many devices each process of a check has; one is among them, since the next exercise will want it."""
    counts = processes_of(exercise.check)
    return counts if 1 in counts else (1, *counts)


def _progress(course: pathlib.Path | None, folder: pathlib.Path | None, screen: Screen) -> Progress:
    if folder is None:
        # Who stands in the folder means this one, and not another inside of it.
        folder = pathlib.Path(".") if pathlib.Path(RECORD).exists() else FOLDER
    chosen = Course.builtin() if course is None else Course.read(course)
    return Progress(folder.expanduser(), chosen, say=lambda text: screen.say(text, "yellow"))


def _is_interactive() -> bool:
    """Whether somebody is there to press keys; a stream that was closed is None."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _named(progress: Progress, name: str | None) -> Exercise:
    return progress.current if name is None else progress.course.find(name)
