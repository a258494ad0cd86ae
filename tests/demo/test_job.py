"""A run and its folder: what it prints, what it writes, and which files it never overwrites."""

import dataclasses
import json
import os
import re
import types

import jax
import pytest
from rich.console import Console

import anybatch as ab
from anybatch.call.display import visible
from anybatch.demo import job
from anybatch.demo.config import RunConfig
from anybatch.demo.job import RunFolder
from anybatch.demo.text import Vocabulary
from anybatch.report import Report
from anybatch.training import checkpoint_folder
from anybatch.training.checkpoints import Checkpoints


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("abcab cabca " * 20)
    settings = RunConfig(
        text="text.txt",
        layers=1,
        heads=1,
        width=8,
        context=8,
        batch=16,
        steps=4,
        learning_rate=1e-2,
        evaluate_every=2,
        checkpoint_every=2,
        sample=10,
        verify=False,
        validation=0.2,
    )
    with jax.numpy_dtype_promotion("standard"):  # the schedules of optax need it
        yield settings


def test_control_characters_are_printed_as_escapes(capsys):
    assert visible("a\r\nb\tc\x1b[2J\x07\x9b") == "a\nb\tc\\x1b[2J\\x07\\x9b"
    job._Printer(Console()).text("a\x1b[2Jb")
    assert capsys.readouterr().out == "a\\x1b[2Jb\n"


def test_a_run_from_start_to_report(config, tmp_path, capsys):
    assert job.run(config, command="anybatch train") == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    for part in (
        "mean over 16 examples",
        "The full batch of 16 takes",
        "Before training\nabcab ca",
        "After 4 steps\nabcab ca",
    ):
        assert part in said
    assert "The gradient noise scale" in said and "The report: anybatch-report.html" in said
    page = (tmp_path / "anybatch-report.html").read_text()
    assert "A GPT learns text.txt" in page and "After 4 steps" in page
    out = tmp_path / "anybatch-run"
    assert json.loads((out / "vocabulary.json").read_text()) == {"level": "characters", "characters": " abc"}
    assert len((out / "log.csv").read_text().splitlines()) == 5
    settings = (out / "settings.json").read_bytes()
    assert json.loads(settings)["text"] == "text.txt"

    # A run in the folder is not overwritten, and continues only with the same model and the same text.
    with pytest.raises(ab.InputError, match=r"with a run of 4 steps\.\nLeave out --no-resume"):
        job.Job(config, resume=False)
    for change, said in (
        ({"width": 16}, "got width = 16, and width = 8 in .*\nContinue with width = 8, or .* rm -r"),
        ({"dropout": 0.1}, "got dropout = 0.1, and dropout = 0.0 in"),
        ({"level": "bytes"}, 'got level = "bytes", and level = "characters" in'),
    ):
        with pytest.raises(ab.InputError, match=said):
            job.Job(dataclasses.replace(config, **change))
    for text in ("abcdab dcabca " * 20, "acbab cabca " * 20):
        (tmp_path / "other.txt").write_text(text)
        with pytest.raises(ab.InputError, match="must have the same text as before"):
            job.Job(dataclasses.replace(config, text="other.txt"))
    # The control: other options may change, and the changes are reported.
    (tmp_path / "text.txt").rename(tmp_path / "moved.txt")
    moved = dataclasses.replace(config, text="moved.txt", batch=32, seed=1, sample=5)
    notes = ["It continues with batch = 32, was 16.", "It continues with seed = 1, was 0."]
    going_on = job.Job(moved)
    assert going_on.folder.changes() == notes and going_on.folder.steps_saved() == 4
    assert (out / "settings.json").read_bytes() == settings


def run_folder(config, **options):
    return RunFolder(config, "abc", Vocabulary("abc"), name="it", **options)


@pytest.mark.parametrize("name", ["log.csv", "settings.json", "vocabulary.json", "checkpoints/model.pt"])
@pytest.mark.parametrize("resume", [True, False])
def test_other_files_are_never_overwritten(tmp_path, name, resume):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ab.InputError, match=rf"must be new, .*, got .* with {os.path.basename(name)}"):
        run_folder(RunConfig(out=str(tmp_path)), resume=resume)
    assert (tmp_path / name).read_text() == "{}" and len(list(tmp_path.iterdir())) == 1


def test_a_settings_file_of_another_program_is_never_overwritten(tmp_path):
    (tmp_path / "settings.json").write_text('{"run": "fast"}')
    with pytest.raises(ab.InputError, match=r"must be new, or have a run in it, got .* with settings.json"):
        run_folder(RunConfig(out=str(tmp_path)))


def test_a_report_may_be_in_the_home_folder_or_in_the_folder_of_the_run(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert job.Job(dataclasses.replace(config, report="~/r.html")).report == tmp_path / "r.html"
    job.Job(dataclasses.replace(config, out="new/run", report="new/run/r.html"))
    with pytest.raises(ab.InputError, match=r"report = 'new/other/r\.html'"):
        job.Job(dataclasses.replace(config, out="new/run", report="new/other/r.html"))


@pytest.mark.parametrize(
    "losses, said",
    [
        ([4.0, 3.0], "the loss fell from 4.00 to 3.00."),
        ([3.0, 4.0], "the loss rose from 3.00 to 4.00."),
        ([3.0, 9.0, 3.001], "the loss did not change, and is 3.00."),
        ([3.0, float("nan"), 2.0, float("nan"), float("inf")], "the loss is not finite since step 4."),
    ],
)
def test_the_note_says_how_the_loss_changed(losses, said):
    history = [{"step": step, "loss": loss, "eval.loss": loss} for step, loss in enumerate(losses, 1)]
    notes = job._loss_notes(types.SimpleNamespace(history=history, steps=len(losses), seconds=1.0))
    assert notes[0].endswith(f": {said}")
    assert ("not finite" in notes[1]) == ("not finite" in said)


@pytest.mark.full
def test_after_a_signal_at_the_last_step_the_report_is_still_written(config, tmp_path, monkeypatch, capsys):
    def stopped(*arguments, steps, **options):
        fitted = ab.fit(*arguments, steps=min(steps, 3), **options)
        return dataclasses.replace(fitted, stopped_by="SIGTERM")

    monkeypatch.setattr(job, "fit", stopped)
    assert job.run(config, command="again") == 143
    assert "To continue: again" in capsys.readouterr().out and not (tmp_path / "anybatch-report.html").exists()
    assert job.run(dataclasses.replace(config, steps=3, batch=15), command="again") == 143
    said = capsys.readouterr().out
    assert "To continue" not in said and "It continues with batch = 15, was 16." in said
    assert (tmp_path / "anybatch-report.html").exists()


def test_a_report_overwrites_no_other_file(config, tmp_path, monkeypatch):
    """Neither the text, nor the file of options, nor a file of the run."""
    (tmp_path / "run.toml").write_text('report = "run.toml"')
    (tmp_path / "link.html").symlink_to("text.txt")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for report, words in [("text.txt", "which is the text"), ("link.html", "the text"), ("run.toml", "something else")]:
        with pytest.raises(ab.InputError, match=rf"got report = '{report}', .*{words}\."):
            job.run(dataclasses.replace(config, report=report), command="again")
    for report in ("log.csv", "settings.json", "vocabulary.json", "LOG.csv", "checkpoints/r.html", "checkpoints"):
        with pytest.raises(ab.InputError) as caught:
            job.run(dataclasses.replace(config, report=f"anybatch-run/{report}"), command="again")
        assert str(caught.value) == (
            "The report must not overwrite the text or a file of the run, got "
            f"report = 'anybatch-run/{report}', which the run itself writes.\n"
            'For example: report = "anybatch-report.html"'
        )
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    Report("A run", []).write(tmp_path / "page.html")  # the text may itself be a report
    page = (tmp_path / "page.html").read_bytes()
    with pytest.raises(ab.InputError, match=r"of the run, got report = 'page.html', which is the text\."):
        job.run(dataclasses.replace(config, text="page.html", report="page.html"), command="again")
    assert (tmp_path / "page.html").read_bytes() == page
    job.Job(dataclasses.replace(config, report="page.html"))  # the control


@pytest.mark.full
def test_a_file_created_during_the_run_is_not_overwritten_by_the_report(config, tmp_path, monkeypatch):
    def slow(*arguments, **options):
        (tmp_path / "anybatch-report.html").write_text("mine")
        return ab.fit(*arguments, **options)

    monkeypatch.setattr(job, "fit", slow)
    with pytest.raises(ab.InputError, match="replaces no file but a report of anybatch"):
        job.run(config, command="again")
    assert (tmp_path / "anybatch-report.html").read_text() == "mine"
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert job.run(dataclasses.replace(config, report="r.html"), command="again") == 0  # nothing was lost
    assert (tmp_path / "r.html").exists()


@pytest.mark.full
def test_a_second_run_does_not_overwrite_the_options_of_the_first(config, tmp_path, monkeypatch):
    """Both runs started in a new folder, and the first one has the checkpoints open."""
    monkeypatch.setattr(checkpoint_folder, "_PATIENCE", 0.1)
    second = job.Job(dataclasses.replace(config, width=16))
    job.Job(config).folder.write_settings()
    told = (tmp_path / "anybatch-run" / "settings.json").read_bytes()
    with Checkpoints(tmp_path / "anybatch-run" / "checkpoints"):
        with pytest.raises(ab.InputError, match="must have one writer only"):
            second.run("again", Console())
    assert (tmp_path / "anybatch-run" / "settings.json").read_bytes() == told


@pytest.mark.full
def test_a_complete_run_is_shown_again(config, tmp_path, capsys):
    assert job.run(config, command="again") == 0
    log = (tmp_path / "anybatch-run" / "log.csv").read_bytes()
    assert job.run(config, command="again") == 0
    printed = capsys.readouterr()
    assert "There is nothing left to do" in printed.err
    first, second = re.findall(r"After 4 steps\n(.*)", printed.out)
    assert first == second and (tmp_path / "anybatch-run" / "log.csv").read_bytes() == log


def test_paths_that_cannot_be_written_are_refused_at_once(config, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ab.InputError, match="folder of a run must be writable, got out = 'file'"):
        job.Job(dataclasses.replace(config, out="file"))
    with pytest.raises(ab.InputError, match=r"report = 'missing/r.html'.\nFor example .* mkdir -p"):
        job.Job(dataclasses.replace(config, report="missing/r.html"))
    with pytest.raises(ab.InputError, match="got 'Z'"):
        job.Job(dataclasses.replace(config, prompt="Z"))


def test_a_folder_of_a_run_with_a_pipe_in_it(config, tmp_path):
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "settings.json")
    with pytest.raises(ab.InputError):
        job.Job(dataclasses.replace(config, out=str(tmp_path / "run")))
