"""A learner's files and progress are kept, whatever happens to the record."""

import io
import json
import os
import subprocess
import sys
import threading

import pytest
from cases.learn_course import write_course

from anybatch import InputError
from anybatch.learn.learner_progress import RECORD, Progress, hash_of


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return write_course(tmp_path_factory.mktemp("courses") / "course")


@pytest.fixture
def said():
    return []


@pytest.fixture
def progress(tmp_path, course, said):
    progress = Progress(tmp_path / "desk", course, said.append)
    progress.prepare()
    return progress


def test_it_begins_at_the_first_and_goes_on_where_it_was_left(progress, course):
    first, second, third = course.exercises
    assert progress.current is first
    progress.go_to(third)
    progress.see_hint(second, 2)
    progress.see_hint(second, 1)
    progress.solve(first, "right", 0.25)
    again = Progress(progress.folder, course)
    assert again.current is third and again.hints_seen(second) == 2 and again.hints_seen(first) == 0
    assert again.solved["mean_gradient"].hash == hash_of("right") and again.solved["mean_gradient"].seconds == 0.25


def test_a_current_exercise_that_is_gone_is_the_first(progress, course):
    record = {"version": 1, "courses": {"course": {"current": "renamed"}}}
    (progress.folder / RECORD).write_text(json.dumps(record))
    assert progress.current is course.exercises[0]


def test_states(progress, course):
    exercise = course.exercises[0]
    assert progress.state(exercise) == "open"
    assert progress.place(exercise) and progress.state(exercise) == "open"
    progress.path(exercise).write_text("mine")
    assert progress.state(exercise) == "begun"
    progress.solve(exercise, "mine", 0.1)
    assert progress.state(exercise) == "solved"
    progress.path(exercise).write_text("more of mine")
    assert progress.state(exercise) == "changed"


def test_a_file_that_is_there_is_not_written_over(progress, course):
    exercise = course.exercises[0]
    progress.path(exercise).write_text("mine")
    assert not progress.place(exercise)
    assert progress.read(exercise) == "mine"


def test_a_disk_that_is_full_leaves_no_empty_file(progress, course, monkeypatch):
    class Full(io.FileIO):
        def write(self, _):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        "anybatch.learn.learner_progress.open", lambda path, mode, **_: Full(path, mode[0]), raising=False
    )
    with pytest.raises(InputError, match="No space left on device"):
        progress.place(course.exercises[0])
    monkeypatch.undo()
    assert progress.place(course.exercises[0])  # it can be tried again


def test_reset_keeps_what_is_no_file(progress, course, monkeypatch):
    exercise = course.exercises[0]
    path = progress.path(exercise)
    path.mkdir()
    (path / "notes").write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(InputError, match="No space"):
            progress.reset(exercise)
    assert (path / "notes").exists()  # unchanged
    assert (progress.reset(exercise) / "notes").read_text() == "mine" and progress.read(exercise) == exercise.starter


def test_reset_keeps_every_file_that_it_replaces(progress, course):
    exercise = course.exercises[0]
    for number, text in enumerate(("one", "two"), 1):
        progress.path(exercise).write_text(text)
        progress.solve(exercise, text, 0.1)
        progress.see_hint(exercise, 3)
        kept = progress.reset(exercise)
        assert kept == progress.folder / f"01_mean_gradient.py.bak{number}" and kept.read_text() == text
        assert progress.read(exercise) == exercise.starter
        assert progress.state(exercise) == "open" and progress.hints_seen(exercise) == 0
    assert progress.reset(exercise) is None  # the starter is not kept
    progress.path(exercise).unlink()
    assert progress.reset(exercise) is None and progress.read(exercise) == exercise.starter


def test_a_reset_that_fails_changes_nothing(progress, course, monkeypatch):
    exercise = course.exercises[0]
    progress.path(exercise).write_text("mine")
    progress.solve(exercise, "mine", 0.1)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="No space left on device"):
        progress.reset(exercise)
    assert progress.read(exercise) == "mine" and progress.state(exercise) == "solved"


def test_courses_do_not_mix(progress, course, tmp_path):
    other = Progress(progress.folder, write_course(tmp_path / "other"))
    other.go_to(other.course.exercises[1])
    progress.go_to(course.exercises[2])
    assert (other.current.number, progress.current.number) == (2, 3)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("{", "it is not JSON"),
        ("[]", "not a record"),
        ('{"version": 2, "courses": {}}', "it has version 2, and this anybatch reads version 1"),
        ('{"version": 1}', "no courses"),
        ('{"version": 1, "courses": {"course": {"solved": []}}}', "damaged"),
        ('{"version": 1, "courses": {"course": {"solved": {"second": {"hash": 5}}}}}', "damaged"),
        ('{"version": 1, "courses": {"course": {"hints": {"second": "two"}}}}', "damaged"),
    ],
)
def test_a_record_that_cannot_be_used_is_moved_aside(progress, course, said, text, reason):
    path = progress.folder / RECORD
    for number in (1, 2):
        path.write_text(text)
        progress.solve(course.exercises[0], "right", 0.1)
        aside = progress.folder / f"{RECORD}.aside{number}"
        assert aside.read_text() == text and set(progress.solved) == {"mean_gradient"}
        assert len(said) == number and reason in said[-1] and aside.name in said[-1]


def test_what_another_version_adds_is_kept(progress, course):
    record = {"version": 1, "note": "x", "courses": {"course": {"stars": 5}}}
    (progress.folder / RECORD).write_text(json.dumps(record))
    progress.go_to(course.exercises[1])
    found = json.loads((progress.folder / RECORD).read_text())
    assert found["note"] == "x" and found["courses"]["course"] == {"stars": 5, "current": "second"}


def test_many_at_once_lose_nothing(progress, course):
    """Several sessions in one folder: each change is made to the current record."""
    changed = []

    def solve(number):
        mine = Progress(progress.folder, course, changed.append)
        for exercise in course.exercises:
            mine.solve(exercise, f"{number}", 0.1)
            mine.see_hint(exercise, number % 3 + 1)
            mine._change(lambda record: record.update({str(number): record.get(str(number), 0) + 1}))

    threads = [threading.Thread(target=solve, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(progress.solved) == 3 and not changed
    assert all(progress.hints_seen(exercise) == 3 for exercise in course.exercises)
    assert all(progress._mine()[str(number)] == 3 for number in range(8))


def test_a_write_that_is_cut_off_leaves_the_old_record(progress, course, monkeypatch, said):
    progress.solve(course.exercises[0], "right", 0.1)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    progress.solve(course.exercises[1], "right", 0.1)
    assert set(progress.solved) == {"mean_gradient"} and "No space left on device" in said[0]
    assert not list(progress.folder.glob("*.new")) and not list(progress.folder.glob(".*.new"))


def test_a_folder_that_cannot_be_written(tmp_path, course):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"--folder .*file.*\nChoose another: anybatch learn --folder"):
        Progress(tmp_path / "file", course).prepare()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path, course):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission denied"):
        Progress(tmp_path / "desk", course).prepare()


@pytest.mark.parametrize(
    "contents, reason",
    [
        (b"\xff", "byte 0 is 0xff"),
        (b"x" * (2**20 + 1), "1,048,577 bytes"),
        (None, "No such file"),
        ("folder", "a folder"),
    ],
)
def test_what_is_no_text_is_refused(progress, course, contents, reason):
    path = progress.path(course.exercises[0])
    if contents == "folder":
        path.mkdir()
    elif contents is not None:
        path.write_bytes(contents)
    with pytest.raises(InputError) as caught:
        progress.read(course.exercises[0])
    assert reason in caught.value.given and progress.command("reset", "01_mean_gradient") in caught.value.remedy
    assert progress.state(course.exercises[0]) == "open"


def test_a_pipe_is_not_waited_for(progress, course):
    os.mkfifo(progress.path(course.exercises[0]))
    with pytest.raises(InputError, match="not a regular file"):
        progress.read(course.exercises[0])


def test_a_mark_at_the_beginning_is_not_code(progress, course):
    progress.path(course.exercises[0]).write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    assert progress.read(course.exercises[0]) == "x = 1\r\n"


def test_commands_name_what_is_not_the_default(tmp_path, course):
    assert Progress("anybatch-learn", course).command("run", "2") == f"anybatch learn run 2 --course {course.folder}"
    assert Progress(tmp_path / "a b", course).command().endswith(f"--folder '{tmp_path}/a b'")


def test_a_record_is_whole_though_its_writer_is_killed(progress, course):
    """A process that is killed at any moment leaves a readable record."""
    program = (
        "from anybatch.learn.learner_progress import Progress\nfrom anybatch.learn.catalogue import Course\n"
        f"progress = Progress({str(progress.folder)!r}, Course.read({str(course.folder)!r}))\n"
        "print('ready', flush=True)\n"
        "while True: progress.solve(progress.course.exercises[0], 'right', 0.1)"
    )
    writer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert writer.stdout.readline() == "ready\n"
    for _ in range(200):
        progress.solve(course.exercises[1], "right", 0.1)
    writer.kill()
    writer.wait()
    writer.stdout.close()
    assert set(progress.solved) == {"mean_gradient", "second"}
