"""The commands of `anybatch learn` for learners. Each returns True for exit status 0."""

import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import IO, Any

from anybatch.call.checks import Finding
from anybatch.errors import InputError
from anybatch.learn.catalogue import COURSES, Course, Exercise
from anybatch.learn.check import Verdict
from anybatch.learn.grading import devices_of, grade
from anybatch.learn.learner_progress import FOLDER, RECORD, Progress, hash_of
from anybatch.learn.runner.submissions import Runner, examine
from anybatch.learn.terminal.pages import Screen

SCHEMA = 1  # of the JSON that `check` prints


def learn(course: pathlib.Path | None, folder: pathlib.Path | None, at: str | None) -> int | bool:
    """Starts an interactive session. Without a terminal, shows the page and checks the file once."""
    screen, progress, exercise = _start(course, folder, at)
    progress.prepare()
    if not _is_interactive():
        return _once(screen, progress, exercise)
    from anybatch.learn.terminal.watch import Checker, Watch

    with Runner(hidden=[progress.course.folder]) as runner:

        def check(exercise: Exercise, source: str) -> Verdict:
            return grade(exercise, source, runner, path=str(progress.path(exercise)))

        checker = Checker(check, lambda exercise: runner.keep_warm(devices_of(exercise)))
        return Watch(progress, screen, checker, sys.stdin.fileno()).run(exercise)


def _once(screen: Screen, progress: Progress, exercise: Exercise) -> bool:
    progress.go_to(exercise)
    progress.place(exercise)
    screen.page(exercise, progress)
    screen.file(progress.path(exercise), where=progress.command("run", str(exercise.number)))
    screen.say(f"Stuck? {progress.command('hint', str(exercise.number))}")
    following = progress.course.after(exercise)
    if following is not None:
        screen.say(f"The next exercise: {progress.command('--at', str(following.number))}")
    screen.say()
    if progress.state(exercise) == "solved":
        screen.say("Solved, and unchanged since: it is not run again.")
        return True
    return _check_one(screen, progress, exercise)


def listing(course: pathlib.Path | None, folder: pathlib.Path | None) -> bool:
    """Lists all exercises, and which are solved."""
    screen, progress, current = _start(course, folder)
    screen.listing(progress, current)
    return True


def run(course: pathlib.Path | None, folder: pathlib.Path | None, name: str | None) -> bool:
    """Checks one file."""
    screen, progress, exercise = _start(course, folder, name)
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
    """Shows a hint: the one of this level, or the next one, or all of them if all were seen."""
    screen, progress, exercise = _start(course, folder, name)
    progress.prepare()
    levels = [level] if level is not None else progress.next_hints(exercise)
    for each in levels:
        screen.hint(exercise, each)
    progress.see_hint(exercise, max(levels))
    return True


def solution(course: pathlib.Path | None, folder: pathlib.Path | None, name: str | None, anyway: bool) -> bool:
    """Shows the solution of a solved exercise."""
    screen, progress, exercise = _start(course, folder, name)
    if exercise.name not in progress.solved and not anyway:
        number = str(exercise.number)
        screen.say(f"The solution of {number} is shown once you have solved it: {progress.command('--at', number)}")
        screen.say(f"A hint may be enough: {progress.command('hint', number)}")
        screen.say(f"To see it anyway: {progress.command('solution', number, '--anyway')}")
        return False
    screen.solution(exercise)
    return True


def reset(course: pathlib.Path | None, folder: pathlib.Path | None, name: str, is_sure: bool) -> bool:
    """Puts the original file of an exercise back; the old one is kept."""
    screen, progress, exercise = _start(course, folder, name)
    progress.prepare()
    if not is_sure:
        if not _is_interactive():
            raise InputError(
                "Without a terminal, a reset must be confirmed with --yes",
                given=f"no --yes for {progress.path(exercise)}",
                remedy=progress.command("reset", exercise.name, "--yes"),
            )
        screen.say(f"Reset {progress.path(exercise)} to the original? Your file is kept under another name. [y/N]")
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            screen.say("Nothing was changed.")
            return False
    kept = progress.reset(exercise)
    screen.say(f"{progress.path(exercise)} is the original again." + (f" Your file is now {kept}." if kept else ""))
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
    """Checks the named exercises, or every file in the folder, or every exercise of the course.

    A file that is solved and unchanged since is not run again, unless `again` is set. `anybatch learn check --help`
    describes the JSON.
    """
    screen, progress, _ = _start(course, folder, file=sys.stderr if as_json else None)
    exercises = [progress.course.find(name) for name in names] or [
        exercise for exercise in progress.course.exercises if every or progress.path(exercise).exists()
    ]
    if not exercises:
        raise InputError(
            "There must be files to check",
            given=f"none in {progress.folder}",
            remedy=f"Start with {progress.command()}, or check the whole course: {progress.command('check', '--all')}",
        )
    begin, rows = time.perf_counter(), []
    with Runner(hidden=[progress.course.folder]) as runner:
        for exercise in exercises:
            screen.checking()
            row = _row(runner, progress, exercise, again)
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


def _row(runner: Runner, progress: Progress, exercise: Exercise, again: bool) -> dict[str, Any]:
    """The result of `check` for one exercise."""
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
                runner.keep_warm(devices_of(exercise))
                verdict = grade(exercise, source, runner, path=str(path))
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
    """Shows how checks are isolated on this machine, whether they work, and how long one takes."""
    screen = Screen()
    exercise = Course.read(COURSES / "template").exercises[0]
    with Runner() as runner:
        runner.keep_warm(devices_of(exercise))
        findings = examine(runner)
        right = [grade(exercise, exercise.solution, runner) for _ in range(3)]
        wrong = grade(exercise, exercise.mistakes[0].source, runner)
    first, *later = (verdict.seconds for verdict in right)
    failed = next((verdict for verdict in right if not verdict.passed), None)
    if failed is not None:
        findings.append(Finding("a check", f"a right answer fails: {failed.title} {failed.text}".strip(), False))
    elif wrong.passed:
        findings.append(Finding("a check", "a wrong answer passes", False))
    else:
        findings.append(Finding("a check", f"works: {first:.1f} s for the first, {min(later):.2f} s later on"))
    screen.findings(findings)
    return all(finding.is_well for finding in findings)


def _start(
    course: pathlib.Path | None, folder: pathlib.Path | None, name: str | None = None, file: IO[str] | None = None
) -> tuple[Screen, Progress, Exercise]:
    """The output, the learner's progress, and the named exercise, by default the current one."""
    screen = Screen(file)
    if folder is None:
        # If the current folder is a learner's folder, use it instead of creating another one inside.
        folder = pathlib.Path(".") if pathlib.Path(RECORD).exists() else FOLDER
    chosen = Course.builtin() if course is None else Course.read(course)
    progress = Progress(folder.expanduser(), chosen, say=lambda text: screen.say(text, "yellow"))
    return screen, progress, progress.current if name is None else chosen.find(name)


def _is_interactive() -> bool:
    """Whether input and output are a terminal. A closed stream is None."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
