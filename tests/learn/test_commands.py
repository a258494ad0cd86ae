"""The commands of `anybatch learn` for learners and authors, most of them with a stand-in for the grader."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
from cases import learn_course
from cases.learn_terminal import Terminal
from typer.testing import CliRunner

from anybatch.cli import main as cli
from anybatch.errors import InputError
from anybatch.learn.catalogue import COURSES, Course
from anybatch.learn.check import Verdict
from anybatch.learn.learner_progress import RECORD, Progress
from anybatch.learn.terminal import author_commands, learner_commands


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return learn_course.write_course(tmp_path_factory.mktemp("courses") / "course")


@pytest.fixture
def progress(tmp_path, course):
    return Progress(tmp_path / "desk", course)


@pytest.fixture
def run(progress, monkeypatch):
    """Runs a command without another process. Returns its status, and what it printed."""
    learn_course.Runner.checked = 0
    for module in (learner_commands, author_commands):
        monkeypatch.setattr(module, "Runner", learn_course.Runner)
        monkeypatch.setattr(module, "grade", learn_course.grade)

    def run(*arguments, places=("course", "folder"), **options):
        folders = {"course": str(progress.course.folder), "folder": str(progress.folder)}
        named = [word for place in places for word in (f"--{place}", folders[place])]
        result = CliRunner().invoke(cli.app, ["learn", *arguments, *named], **options)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.output

    return run


def write(progress, number, text):
    progress.prepare()
    progress.path(progress.course.exercises[number - 1]).write_text(text)


def test_without_a_terminal_it_shows_the_page_and_checks_once(run, progress, course):
    status, text = run()
    assert status == 1 and course.exercises[0].page.strip() in text and "Not written yet." in text
    assert "\x1b" not in text and "checking" not in text
    assert f"Then check it: {progress.command('run', '1')}\n" in text
    assert f"Stuck? {progress.command('hint', '1')}\n" in text
    assert f"The next exercise: {progress.command('--at', '2')}\n" in text
    write(progress, 1, "right")
    assert run()[0] == 0 and learn_course.Runner.checked == 2
    status, text = run()  # solved, and not run again
    assert status == 0 and "not run again" in text and learn_course.Runner.checked == 2
    status, text = run("--at", "third")
    assert status == 1 and "Exercise 3 of 3" in text and progress.current.name == "third"


def test_a_closed_input_or_output_is_no_terminal(run, progress, monkeypatch):
    write(progress, 1, "right")
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdin", None)
        assert not learner_commands._is_interactive()
        patch.setattr("sys.stdout", None)
        assert not learner_commands._is_interactive()
        learner_commands.Screen().say("to nobody")
    assert run()[0] == 0


def test_a_start_writes_over_nothing(run, progress):
    write(progress, 1, "right, and mine")
    assert run()[0] == 0 and progress.read(progress.course.exercises[0]) == "right, and mine"


def test_a_folder_that_cannot_be_written_is_refused_first(run, progress):
    progress.folder.write_text("")
    status, text = run()
    assert status == 2 and "must be writable" in text and "Why it matters" not in text


def test_places_may_stand_before_the_command(run, progress, course):
    write(progress, 1, "right")
    status, text = run("--course", str(course.folder), "--folder", str(progress.folder), "run", "1", places=())
    assert status == 0 and "Passed." in text


def test_in_its_own_folder_no_other_is_made(run, progress, monkeypatch):
    write(progress, 2, "right")
    progress.go_to(progress.course.exercises[1])
    monkeypatch.chdir(progress.folder)
    assert run("run", places=("course",))[0] == 0 and not pathlib.Path("anybatch-learn").exists()


def test_list(run, progress):
    assert run("list")[0] == 0 and not progress.folder.exists()  # listing writes nothing
    write(progress, 1, "right")
    write(progress, 2, "begun")
    run("check")
    write(progress, 1, "changed")
    lines = run("list")[1].splitlines()
    assert lines[1] == "1 of 3 solved"
    assert lines[3:] == [
        "▸ ✓ 01 mean_gradient The gradient of a mean solved; changed since",
        "  • 02 second        Second                 started",
        "  · 03 third         Third",
    ]


def test_run(run, progress):
    status, text = run("run", "2")
    assert status == 1 and "Edit" in text and progress.path(progress.course.exercises[1]).exists()
    write(progress, 2, "wrong")
    status, text = run("run", "2")
    assert status == 1 and "✗ Wrong: wrong" in text and "✗ value" in text and "Now with anybatch" not in text
    write(progress, 2, "right")
    status, text = run("run", "second")
    assert status == 0 and "Passed." in text and "ab.grad(" in text and set(progress.solved) == {"second"}
    assert run("run", "2")[0] == 0 and learn_course.Runner.checked == 4  # `run` always runs
    status, text = run("run", "secnd")
    assert status == 2 and "Did you mean second?" in text and "Traceback" not in text


def test_hints_come_one_after_another(run):
    for level in (1, 2, 3):
        text = run("hint", "2")[1]
        assert f"Hint {level} of 3" in text and text.count("Hint") == 1
    assert run("hint", "2")[1].count(" of 3\n") == 3
    assert "Hint 1 of 3" in run("hint")[1]  # of the current exercise, the first
    assert "Hint 3 of 3" in run("hint", "3", "--level", "3")[1]
    assert run("hint", "--level", "4")[0] == 2


def test_a_solution_is_for_those_who_have_one(run, progress, course):
    status, text = run("solution", "2")
    assert status == 1 and "return jax.grad(loss)(w, x)" not in text and "--anyway" in text and "hint 2" in text
    assert "return jax.grad(loss)(w, x)" in run("solution", "2", "--anyway")[1]
    progress.prepare()
    progress.solve(course.exercises[1], "right", 0.1)
    status, text = run("solution", "2")
    assert status == 0 and "return jax.grad(loss)(w, x)" in text and "import anybatch as ab" in text


def test_reset_asks_or_is_told(run, progress):
    write(progress, 2, "mine")
    status, text = run("reset", "2")
    assert status == 2 and progress.command("reset", "second", "--yes") in text
    assert progress.read(progress.course.exercises[1]) == "mine"
    status, text = run("reset", "2", "--yes")
    assert (
        status == 0
        and "02_second.py.bak1" in text
        and "NotImplementedError" in progress.read(progress.course.exercises[1])
    )
    assert run("reset")[0] == 2


def test_check_runs_what_has_changed(run, progress):
    status, text = run("check")
    assert status == 2 and "none in" in text
    write(progress, 1, "right")
    write(progress, 2, "wrong")
    status, text = run("check")
    assert status == 1 and "1 of 2 passed" in text and "Wrong: wrong" in text
    assert run("check", "1")[0] == 0 and learn_course.Runner.checked == 2  # solved before
    assert run("check", "1", "--again")[0] == 0 and learn_course.Runner.checked == 3
    write(progress, 1, "changed")
    assert run("check", "1")[0] == 1 and "mean_gradient" in progress.solved


def test_check_as_json(run, progress):
    write(progress, 1, "right")
    write(progress, 2, "wrong")
    run("check", "1")
    progress.path(progress.course.exercises[2]).write_bytes(b"\xff")
    status, text = run("check", "--all", "--json")
    found = json.loads(text)
    assert status == 1 and set(found) == {"version", "course", "folder", "passed", "seconds", "exercises"}
    assert (found["version"], found["course"], found["passed"]) == (1, "course", False)
    first, second, third = found["exercises"]
    assert {*first} == {"number", "name", "file", "state", "ran", "solved", "message", "verdict"}
    assert [each["state"] for each in (first, second, third)] == ["passed", "failed", "unreadable"]
    assert [each["ran"] for each in (first, second, third)] == [False, True, False]
    assert first["verdict"] is None and second["verdict"]["title"] == "Wrong: wrong"
    assert set(second["verdict"]) == {field for field in Verdict.__dataclass_fields__}
    assert "byte 0" in third["message"]
    progress.path(progress.course.exercises[2]).unlink()
    assert json.loads(run("check", "--all", "--json")[1])["exercises"][2]["state"] == "missing"
    assert len(json.loads(run("check", "--json")[1])["exercises"]) == 2


def test_json_is_alone_though_there_is_something_to_say(progress, monkeypatch, course):
    write(progress, 1, "right")
    (progress.folder / RECORD).write_text("{")
    monkeypatch.setattr(learner_commands, "Runner", learn_course.Runner)
    monkeypatch.setattr(learner_commands, "grade", learn_course.grade)
    places = ["--course", str(course.folder), "--folder", str(progress.folder)]
    result = CliRunner().invoke(cli.app, ["learn", "check", "--json", *places])
    assert json.loads(result.stdout)["passed"] and "is kept as" in result.stderr


def test_the_help_has_the_schema_and_the_doctor_pays_for_nothing():
    names = "sorted(name for name in sys.modules if 'learn' in name or 'rich' in name)"
    program = f"import sys, anybatch.cli.main; print(*{names})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "anybatch.cli.learn" in loaded
    assert not {"anybatch.learn.terminal.learner_commands", "anybatch.learn.grading", "rich.markdown"} & set(loaded)

    said = CliRunner().invoke(cli.app, ["learn", "check", "--help"]).output
    assert "version    1\n" in said and "\b" not in said


@pytest.mark.parametrize("arguments", [["learn", "--help"], ["learn", "run", "--help"], ["learn", "dev", "--help"]])
def test_help_does_not_import_jax(arguments):
    program = (
        "import sys, typer.testing, anybatch.cli.main\n"
        f"result = typer.testing.CliRunner().invoke(anybatch.cli.main.app, {arguments!r})\n"
        "assert result.exit_code == 0 and 'Usage' in result.output\n"
        "print('jax' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


# For authors.


@pytest.fixture
def proved(run, monkeypatch):
    """Runs `dev check` with these verdicts; returns its status and its JSON."""

    def prove(verdict, *arguments):
        monkeypatch.setattr(author_commands, "grade", verdict)
        status, text = run("dev", "check", "--json", *arguments, places=("course",))
        return status, json.loads(text)

    return prove


def honest(exercise, source, runner, *, seed, anybatch):
    """The verdicts of a correct check for the files of the template."""
    if "NotImplementedError" in source:
        return Verdict(exercise.name, False, "run", "Not written yet.", started=False)
    if "caught by" in source:
        is_sum = "jnp.sum" in source
        title = "You have it: this is the gradient of a sum" if is_sum else "The answer is wrong."
        return Verdict(exercise.name, False, "value", title, mistake="a sum" if is_sum else None)
    assert anybatch == ("import anybatch" in source)
    return Verdict(exercise.name, True)


def test_a_course_as_it_is_written_is_sound(proved):
    status, found = proved(honest)
    assert status == 0 and found["passed"] and found["version"] == 1
    assert [each["checks"] for each in found["exercises"]] == [1 + 3 * 4] * 3
    status, found = proved(honest, "--exercise", "2", "--seeds", "1")
    assert [(each["name"], each["checks"]) for each in found["exercises"]] == [("second", 5)]


@pytest.mark.parametrize(
    "which, change, defect",
    [
        ("NotImplementedError", {"started": True}, "the starter must raise NotImplementedError; it fails in run"),
        ("which is `w` here", {"passed": False, "title": "Off."}, "the solution must pass; it fails in value: Off."),
        ("import anybatch", {"passed": False, "title": "Off."}, "with_anybatch.py must pass; it fails in value: Off."),
        (
            "jnp.sum",
            {"passed": True},
            "mistakes/sum.py must fail in value with 'this is the gradient of a sum'; it pas",
        ),
        ("jnp.sum", {"stage": "shape"}, "mistakes/sum.py must fail in value"),
        ("jnp.sum", {"title": "Wrong."}, "mistakes/sum.py must fail in value"),
        ("jnp.sum", {"mistake": None}, "no file in mistakes/ makes the mistake 'a sum' that check.py names"),
    ],
)
def test_what_is_not_as_it_should_be_is_found(proved, which, change, defect):
    def dishonest(exercise, source, runner, *, seed, anybatch):
        verdict = honest(exercise, source, runner, seed=seed, anybatch=anybatch)
        is_meant = which in source and exercise.name == "second"
        return dataclasses.replace(verdict, **({"stage": verdict.stage or "value"} | change)) if is_meant else verdict

    status, found = proved(dishonest)
    assert status == 1 and [bool(each["defects"]) for each in found["exercises"]] == [False, True, False]
    assert found["exercises"][1]["defects"][0].startswith(defect)


def test_the_answers_are_hidden_from_mistakes_too(proved, monkeypatch, course):
    class Recording(learn_course.Runner):
        def __init__(self, **options):
            super().__init__()
            asked.append(options)

    asked = []
    monkeypatch.setattr(author_commands, "Runner", Recording)
    assert proved(honest)[0] == 0 and asked and all(each == {"hidden": [course.folder]} for each in asked)


def on_paper(exercise):
    """The defects that are found without running anything."""
    found = []
    for part in (author_commands._in_words, author_commands._in_code):
        try:
            found.extend(part(exercise))
        except InputError as error:
            found.append(str(error))
    return found


def test_parameters_may_be_a_list(course):
    exercise = dataclasses.replace(course.exercises[0])
    exercise.__dict__["check"] = dataclasses.replace(exercise.check, parameters=list(exercise.check.parameters))
    assert on_paper(exercise) == []


def test_no_line_of_the_help_is_cut_off(run):
    assert "..." not in run("--help", places=())[1].partition("Commands:")[2]
    assert "..." not in run("dev", "--help", places=())[1].partition("Commands:")[2]


def test_an_author_hears_of_every_defect_at_once(tmp_path):
    folder = tmp_path / "course"
    author_commands.new(folder, None)
    home = folder / "01_mean_gradient"
    for name, old, new in (
        ("page.md", "## Pitfalls", "## Traps"),
        ("page.md", "# The gradient", "# A gradient"),
        ("hints.md", "## 3", "## 4"),
        ("solution.py", "def mean_gradient(w, x)", "def mean_gradient(w, y)"),
        ("solution.py", '"""The gradient', '"""Short."""\n"""The gradient'),
        ("exercise.py", "def mean_gradient", "def gradient"),
        ("with_anybatch.py", "ab.grad(loss, microbatch_size=2)", "None"),
    ):
        text = (home / name).read_text()
        assert old in text
        (home / name).write_text(text.replace(old, new, 1))
    (home / "solution.py").write_text(
        (home / "solution.py").read_text().replace('"""The gr', '"""Short."""\n"""The gr')
    )
    defects = on_paper(Course.read(folder).exercises[0])
    expected = ("sections", "begin with # The", "three hints", "no function", "(w, y)", "two sentences", "never uses")
    assert [any(words in defect for defect in defects) for words in expected] == [True] * len(expected)
    assert len(defects) == len(expected)


def test_an_exercise_that_breaks_does_not_break_the_others(proved):
    def broken(exercise, source, runner, *, seed, anybatch):
        if exercise.name == "second":
            raise ZeroDivisionError("in the reference")
        return honest(exercise, source, runner, seed=seed, anybatch=anybatch)

    status, found = proved(broken)
    assert status == 1 and "ZeroDivisionError: in the reference" in found["exercises"][1]["defects"][0]
    assert [bool(each["defects"]) for each in found["exercises"]] == [False, True, False]


def test_a_rule_that_nothing_breaks_is_a_note(course, monkeypatch):
    monkeypatch.setattr(author_commands, "grade", honest)
    exercise = dataclasses.replace(course.exercises[0])
    exercise.__dict__["check"] = dataclasses.replace(exercise.check, program=(lambda program, args: None,))
    found = author_commands.examine(exercise, learn_course.Runner(), 1)
    assert found.defects == [] and [note.partition(":")[0] for note in found.notes] == [
        "no file in mistakes/ is caught by program"
    ]


def test_a_slow_check_is_a_note(proved):
    def slow(exercise, source, runner, *, seed, anybatch):
        import dataclasses

        return dataclasses.replace(honest(exercise, source, runner, seed=seed, anybatch=anybatch), seconds=0.7)

    status, found = proved(slow)
    assert status == 0 and "a check takes 0.70 s" in found["exercises"][0]["notes"][0]


@pytest.mark.parametrize(
    "before, exercise, words",
    [
        ("course", None, "needs a name for the new exercise"),
        ("course", "mean_gradient", "that it does not have yet"),
        ("course", "Mine", "lower case"),
        ("course", "lambda", "lower case"),
        ("files", None, "empty, or not exist yet"),
    ],
)
def test_a_new_course_writes_over_nothing(tmp_path, before, exercise, words):
    folder = tmp_path / "my-course"
    if before == "course":
        author_commands.new(folder, None)
        assert Course.read(folder).name == "my_course"
    else:
        folder.mkdir()
        (folder / "file").write_text("mine")
    seen = sorted(folder.rglob("*"))
    named = ["--exercise", exercise] if exercise else []
    result = CliRunner().invoke(cli.app, ["learn", "dev", "new", str(folder), *named])
    assert result.exit_code == 2 and words in result.output and sorted(folder.rglob("*")) == seen


def test_a_new_exercise_writes_over_no_folder(tmp_path):
    folder = tmp_path / "course"
    author_commands.new(folder, None)
    (folder / "02_mine").mkdir()
    (folder / "02_mine" / "check.py").write_text("hours of work")
    catalogue = (folder / "catalogue.toml").read_bytes()
    result = CliRunner().invoke(cli.app, ["learn", "dev", "new", str(folder), "--exercise", "mine"])
    assert result.exit_code == 2
    assert result.output.startswith(f"The folder of a new exercise must not exist yet, got {folder}/02_mine.\n")
    assert (folder / "02_mine" / "check.py").read_text() == "hours of work"
    assert (folder / "catalogue.toml").read_bytes() == catalogue
    assert author_commands.new(folder, "other")  # the control


def test_the_catalogue_is_written_whole_or_stays(tmp_path, monkeypatch):
    folder = tmp_path / "course"
    author_commands.new(folder, None)
    catalogue = (folder / "catalogue.toml").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"folder must be writable, got .*catalogue.toml \(No space left on device\)"):
        author_commands.new(folder, "another")
    assert (folder / "catalogue.toml").read_bytes() == catalogue


# With the real grader.


def test_an_exercise_of_ones_own_is_proved(tmp_path):
    author_commands.new(tmp_path / "course", "my_gradient")
    places = ["--course", str(tmp_path / "course"), "--seeds", "1"]
    command = [sys.executable, "-W", "error", "-m", "anybatch", "learn", "dev", "check", *places]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "✓ 01 my_gradient" in result.stdout and "1 of 1 exercises are sound: 5 checks" in result.stdout


def test_a_learner_solves_an_exercise_and_leaves_no_process(tmp_path):
    course = Course.read(COURSES / "template")
    exercise, path = course.exercises[0], tmp_path / course.exercises[0].file_name
    places = ("--course", str(course.folder), "--folder", str(tmp_path))
    with Terminal("-m", "anybatch", "learn", *places) as terminal:
        terminal.wait("The gradient of a mean", "help")
        path.write_text(exercise.mistakes[1].source)
        terminal.wait("checking", "You have 6 times the answer", "value a sum", "help")
        path.write_text(exercise.solution)
        terminal.wait("Passed.", "ab.grad(loss, microbatch_size=2)", "Solved.", "help")
        path.write_text("while True: pass\n")
        terminal.wait("checking")
        started = terminal.descendants()
        terminal.press("q", "kept")  # during a check
        assert started and terminal.end() == 0
        assert not [pid for pid in started if pathlib.Path(f"/proc/{pid}").exists()]
    assert set(Progress(tmp_path, course).solved) == {"mean_gradient"}
