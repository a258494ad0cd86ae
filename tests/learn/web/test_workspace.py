"""The learner's files as browser tabs see them: nothing that was written is lost."""

import asyncio
import os
import subprocess
import sys
import time

import pytest
from cases.learn_course import grade, write_course

from anybatch import InputError
from anybatch.learn.learner_progress import Progress
from anybatch.learn.web.workspace import Workspace


@pytest.fixture
def workspace(tmp_path):
    course = write_course(tmp_path / "course")
    workspace = Workspace(Progress(tmp_path / "mine", course))
    yield workspace
    workspace.close()


@pytest.fixture
def draft(workspace):
    return workspace.draft(workspace.course.exercises[0])


def on_disk(workspace, draft):
    return workspace.progress.path(draft.exercise).read_text()


def write_on_disk(workspace, draft, text):
    path = workspace.progress.path(draft.exercise)
    path.write_text(text)
    os.utime(path, (time.time(), time.time() + 1))  # another time even if the clock is coarse


def test_a_draft_is_the_learners_file(workspace, draft):
    assert draft.text == draft.exercise.starter == on_disk(workspace, draft)
    assert draft.save("x = 1", draft.version, "tab")
    assert on_disk(workspace, draft) == "x = 1"
    assert not draft.kept


def test_a_tab_that_does_not_know_the_newest_file_cannot_overwrite_it(workspace, draft):
    old = draft.version
    assert draft.save("from one", old, "one")
    assert not draft.save("from another", old, "another")
    assert on_disk(workspace, draft) == "from one"
    assert draft.save("from another", draft.version, "another")  # the control: once it knows it


def test_what_another_tab_wrote_just_now_is_kept(workspace, draft, monkeypatch):
    """The browser may have sent its text before it showed the other one."""
    draft.save("from one", draft.version, "one")
    draft.save("from another", draft.version, "another")
    assert (workspace.progress.folder / draft.kept).read_text() == "from one"
    kept = draft.kept
    monkeypatch.setattr("anybatch.learn.web.workspace.JUST_NOW", 0.0)  # the control: after a while, nothing is kept
    draft.save("from one again", draft.version, "one")
    assert draft.kept == kept


def test_a_tab_cannot_overwrite_what_another_program_wrote(workspace, draft):
    old = draft.version
    write_on_disk(workspace, draft, "from an editor")
    assert not draft.save("from a tab", old, "tab")
    assert draft.text == on_disk(workspace, draft) == "from an editor"


def test_the_same_text_is_no_conflict(workspace, draft):
    old = draft.version
    write_on_disk(workspace, draft, "both")
    assert draft.save("both", old, "tab")


def test_what_is_kept_aside_overwrites_nothing(workspace, draft):
    names = {draft.keep_aside(f"version {number}") for number in range(3)}
    assert len(names) == 3
    texts = {(workspace.progress.folder / name).read_text() for name in names}
    assert texts == {"version 0", "version 1", "version 2"}


def test_the_other_tabs_are_told(workspace, draft):
    told = []
    draft.changed.subscribe(told.append)
    draft.save("x = 1", draft.version, "tab 1")
    draft.save("x = 1", draft.version, "tab 2")  # no change
    assert told == ["tab 1"]


def test_a_file_that_is_gone_or_not_text_is_said_so(workspace, draft, monkeypatch):
    path = workspace.progress.path(draft.exercise)
    path.write_bytes(b"\xff\xfe\x00")
    os.utime(path, (time.time(), time.time() + 2))
    assert draft.look()
    assert "UTF-8" in draft.problem
    assert draft.save("x = 2", draft.version, "tab")
    assert not draft.problem


def test_a_text_that_is_too_long_is_refused_and_the_file_stays(workspace, draft):
    with pytest.raises(InputError, match="at most 1 MiB"):
        draft.save("#" * (2**20 + 1), draft.version, "tab")
    assert on_disk(workspace, draft) == draft.exercise.starter


async def _checked(draft):
    while draft.checked is None or draft.checked.is_running:
        await asyncio.sleep(0.01)
    return draft.checked


def test_a_check_does_not_block_and_the_newest_one_counts(workspace, draft, monkeypatch):
    def slow(exercise, source, passed):
        time.sleep(0.2)
        return grade(exercise, source, on_stage=passed)

    monkeypatch.setattr(workspace, "_grade", slow)
    monkeypatch.setattr(workspace, "_full_batch", lambda *_: ())

    async def session():
        draft.check()
        await asyncio.sleep(0.05)
        begin = time.perf_counter()
        draft.save(draft.exercise.solution, draft.version, "tab")
        draft.check()
        draft.check()
        assert time.perf_counter() - begin < 0.1
        return await _checked(draft)

    checked = asyncio.run(session())
    assert checked.source == draft.exercise.solution
    assert checked.verdict is not None


def test_a_check_that_fails_itself_is_told(workspace, draft, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of disk")

    monkeypatch.setattr(workspace, "_grade", broken)

    async def session():
        draft.check()
        return await _checked(draft)

    checked = asyncio.run(session())
    assert checked.verdict is None and "out of disk" in checked.failure


def test_the_server_starts_without_jax():
    """The first page should not wait for it. The control: with a check, it is imported."""
    program = """
import sys, anybatch.learn.web.server
print("jax" in sys.modules)
import anybatch.learn.grading
print("jax" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
