"""The log of a run: whole rows, whatever happens, and no trace of an interruption."""

import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from anybatch.errors import InputError
from anybatch.training import checkpoint_folder, loop
from anybatch.training.log import Log, LogError, read_log

ROWS = [
    {"step": 1, "loss": 0.1, "skipped": 0},
    {"step": 2, "loss": 1 / 3, "skipped": 0},
    {"step": 3, "loss": 1e-300, "skipped": 1, "eval": 12.0},
    {"step": 4, "loss": -2.5, "skipped": 1},
    {"step": 5, "loss": 3.0, "skipped": 1, "eval": 11.0, 'aux.a, "b" ü\u2028': 7},
]


def written(path, rows, **options):
    with Log(path, **options) as log:
        for row in rows:
            log.write(row)
    return path


def test_rows_come_back_exactly(tmp_path):
    path = written(tmp_path / "new" / "run.csv", ROWS)
    assert read_log(path) == ROWS
    assert [[type(value) for value in row.values()] for row in read_log(path)] == [
        [type(value) for value in row.values()] for row in ROWS
    ]
    assert os.listdir(path.parent) == [path.name]


def test_what_the_file_looks_like(tmp_path):
    path = written(str(tmp_path / "run.csv"), ROWS[:3])
    assert Path(path).read_text() == (f"step,loss,skipped,eval\n1,0.1,0,\n2,{1 / 3!r},0,\n3,1e-300,1,12.0\n")


def test_numbers_of_any_library(tmp_path):
    row = {"step": np.int64(1), "a": jnp.float32(0.5), "b": jnp.bfloat16(2), "c": True, "d": jnp.asarray(3), "e": None}
    path = written(tmp_path / "run.csv", [row])
    assert read_log(path) == [{"step": 1, "a": 0.5, "b": 2.0, "c": 1, "d": 3}]


def test_numbers_that_are_not_finite(tmp_path):
    path = written(tmp_path / "run.csv", [{"step": 1, "a": math.nan, "b": jnp.inf, "c": -math.inf}])
    (row,) = read_log(path)
    assert math.isnan(row["a"])
    assert [row["b"], row["c"]] == [math.inf, -math.inf]
    assert path.read_text().splitlines()[-1] == "1,nan,inf,-inf"


def test_a_run_that_goes_on_looks_as_if_it_had_never_stopped(tmp_path):
    """Cut at any byte, as by a kill in the middle of a row, and gone on from any checkpoint before: the same bytes."""
    whole = written(tmp_path / "whole.csv", ROWS).read_bytes()
    path, halves = tmp_path / "run.csv", 0
    for length in range(0, len(whole) + 1, 5):
        path.write_bytes(whole[:length])
        rows = read_log(path)
        halves += not whole[:length].endswith(b"\n")
        assert rows == ROWS[: len(rows)]  # never a number that was cut short
        for after in {0, max(0, len(rows) - 1), len(rows)}:
            path.write_bytes(whole[:length])
            written(path, ROWS[after:], after=after)
            assert path.read_bytes() == whole
    assert halves > 20
    path.unlink()
    assert written(path, ROWS, after=0).read_bytes() == whole  # and if it is gone


KILLED = """\
import sys
from anybatch.training.log import Log
with Log(sys.argv[1]) as log:
    print("begun", flush=True)
    for step in range(1, 10**9):
        row = {"step": step, "double": 2 * step, "third": step / 3}
        if step % 10 == 0:
            row[f"eval.{min(step, 400)}"] = step
        log.write(row)
"""


def test_a_writer_may_be_killed_at_any_moment(tmp_path):
    path = tmp_path / "run.csv"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        seen, end = 0, time.monotonic() + 20
        while seen < 500 and time.monotonic() < end:  # read while it writes
            seen = len(check(path))
        child.send_signal(signal.SIGKILL)
    assert len(check(path)) > 400
    with Log(path, after=50) as log:
        log.write({"step": 51})
    assert [row["step"] for row in read_log(path)] == list(range(1, 52))
    assert os.listdir(tmp_path) == ["run.csv"]


def check(path):
    rows = read_log(path)
    for step, row in enumerate(rows, 1):
        assert (row["step"], row["double"], row["third"]) == (step, 2 * step, step / 3)
        assert step % 10 or row[f"eval.{min(step, 400)}"] == step
    return rows


def test_a_disk_that_is_full(tmp_path):
    """Every row before is there, and the log goes on when there is space again."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        step, path, filler = 0, folder / "run.csv", folder / "filler"
        with Log(path) as log:
            filler.write_bytes(bytes(40_000))
            with pytest.raises(LogError, match=r"run\.\w+ could not be written: No space left on device"):
                for step in range(1, 10_000):
                    log.write({"step": step, "third": step / 3})
            assert [row["step"] for row in read_log(path)] == list(range(1, step))
            with pytest.raises(LogError):  # nor is there space for a column
                for _ in range(1000):
                    log.write({"step": step, "new" * 100: 1})
            assert len(read_log(path)) >= step - 1 and path.read_bytes().endswith(b"\n")
            filler.unlink()
            rows = read_log(path)
            log.write({"step": step, "third": 0.5})
            assert read_log(path) == [*rows, {"step": step, "third": 0.5}]
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_row_that_is_written_in_part(tmp_path, monkeypatch):
    """The same where nobody may mount a disk."""
    with Log(tmp_path / "run.csv") as log:
        log.write({"step": 1})

        def half(file, content):
            file.write(content[:5])
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched, pytest.raises(LogError):
            patched.setattr("anybatch.training.log._write_all", half)
            log.write({"step": 2})
        log.write({"step": 3})
    assert (tmp_path / "run.csv").read_text() == "step\n1\n3\n"


def test_a_file_that_is_there_is_not_replaced_unasked(tmp_path):
    path = written(tmp_path / "run.csv", ROWS)
    with pytest.raises(InputError, match=r"must not replace an existing file, got .*run\.csv\.\n"):
        Log(path)
    assert read_log(path) == ROWS
    (tmp_path / "empty.csv").touch()
    assert read_log(written(tmp_path / "empty.csv", ROWS)) == ROWS


RUN = """\
import sys
import anybatch as ab

def batches():
    print("waits", flush=True)
    sys.stdin.readline()
    yield from [0.0] * 5

ab.fit(lambda state, batch: (state + 1, {"loss": 0.5}), 0, batches(), log=sys.argv[1], progress=False, prefetch=0)
"""


@pytest.mark.parametrize("ends", ["by itself", "killed"])
def test_two_runs_at_once_do_not_share_a_log(tmp_path, monkeypatch, ends):
    """Two processes, of which the first has the log open and no row in it."""
    monkeypatch.setattr(checkpoint_folder, "_PATIENCE", 0.1)
    path = tmp_path / "run.csv"
    command = [sys.executable, "-c", RUN, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "waits\n"
        for options in ({}, {"after": 3}):
            with pytest.raises(InputError) as caught:
                Log(path, **options)
            assert str(caught.value) == (
                f"A log must have one writer only, got {path}, which another process has open.\n"
                f"Wait for it to end, or name another log, e.g. log='{tmp_path}/run-2.csv'."
            )
        if ends == "killed":
            first.kill()
        first.communicate("\n")
    assert len(read_log(path)) == (5 if ends == "by itself" else 0)
    if ends == "by itself":
        with pytest.raises(InputError, match="must not replace an existing file"):
            Log(path)
        assert len(read_log(path)) == 5
    with Log(path, after=5) as log:  # the control: now it is free
        log.write({"step": 6})
    assert os.listdir(tmp_path) == ["run.csv"]


def test_one_process_has_a_log_open_once(tmp_path):
    (tmp_path / "link.csv").symlink_to("run.csv")
    with Log(tmp_path / "run.csv") as log:
        for name in ("run.csv", "link.csv"):
            with pytest.raises(
                InputError, match=r"one writer only, got .*run\.csv, which this process has open already"
            ):
                Log(tmp_path / name)
        log.write({"step": 1})
    assert read_log(tmp_path / "run.csv") == [{"step": 1}]


def test_a_log_that_is_edited_or_moved_while_it_is_written(tmp_path):
    """An editor writes another file and renames it; whoever rotates logs moves one away."""
    path = tmp_path / "run.csv"
    with Log(path) as log:
        log.write({"step": 1, "loss": 0.5})
        (tmp_path / "edited").write_bytes(path.read_bytes())
        os.replace(tmp_path / "edited", path)
        log.write({"step": 2, "loss": 0.25})
        os.rename(path, tmp_path / "moved.csv")
        log.write({"step": 3, "loss": 0.125})
        log.amend({"step": 3, "loss": 0.125, "eval": 1.0})
        path.unlink()
        log.amend({"step": 3, "loss": 0.125, "eval": 1.0})
        log.write({"step": 4})
    assert read_log(tmp_path / "moved.csv") == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}]
    assert read_log(path) == [{"step": 3, "loss": 0.125, "eval": 1.0}, {"step": 4}]


def test_a_log_that_becomes_something_else_is_left_alone(tmp_path):
    path = tmp_path / "run.csv"
    with Log(path) as log:
        log.write({"step": 1})
        path.unlink()
        path.write_text("a letter\n, and more\n")
        for write in (log.write, log.amend):
            with pytest.raises(LogError, match=r"run\..* could not be written: .*is something else"):
                write({"step": 2, "loss": 0.5})
    assert path.read_text() == "a letter\n, and more\n"


def test_a_file_with_the_name_of_the_lock_is_kept(tmp_path):
    (tmp_path / ".run.csv.lock").write_text("mine")
    written(tmp_path / "run.csv", ROWS)
    assert (tmp_path / ".run.csv.lock").read_text() == "mine"


def test_what_is_no_plain_file_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "run.csv")
    for options in ({}, {"after": 1}):
        with pytest.raises(InputError, match=r"must not replace an existing file, got .*run\.csv"):
            Log(tmp_path / "run.csv", **options)
    assert (tmp_path / "run.csv").is_fifo()


@pytest.mark.parametrize(
    "path, message",
    [
        ("run.txt", r"must end in \.csv, got 'run.txt'\.\nName it 'run.csv'\."),
        ("file/run.csv", r"can be written to, got .*file/run.csv \(Not a directory\)"),
        ("folder.csv", r"must not replace an existing file"),
        (["run.csv"], r"log must be a path"),
        ("/proc/run.csv", r"can be written to, got /proc/run.csv \("),
    ],
)
def test_paths_that_cannot_be(tmp_path, monkeypatch, path, message):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder.csv").mkdir()
    with pytest.raises(InputError, match=message):
        Log(path)


@pytest.mark.parametrize(
    "row, message",
    [
        ({"loss": 1.0}, 'A row must have a "step", a whole number, got step=None'),
        ({"step": 1.5}, "got step=1.5"),
        ({"step": 1, "name": "text"}, "names and numbers, got 'name': 'text'"),
        ({"step": 1, "norms": np.zeros(2)}, "names and numbers, got 'norms': array"),
        ({"step": 1, "a\nb": 2}, "names and numbers"),
        ({"step": 1, "z": 1j}, "names and numbers"),
    ],
)
def test_rows_that_cannot_be(tmp_path, row, message):
    with Log(tmp_path / "run.csv") as log, pytest.raises(InputError, match=message):
        log.write(row)
    assert read_log(tmp_path / "run.csv") == []


@pytest.mark.parametrize(
    "text, line",
    [("step,loss\n1,0.5\n2\n", 3), ("step,loss\n1,text\n", 2), ("name\nJoe\n", 2)],
)
def test_a_file_that_is_no_log(tmp_path, text, line):
    path = tmp_path / "run.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=rf"one that anybatch wrote.*, whose line {line} is something else"):
        read_log(path)
    with pytest.raises(InputError):
        Log(path, after=1)
    assert path.read_text() == text


def test_a_log_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"that can be read, got .*run\.csv \(No such file or directory\)"):
        read_log(tmp_path / "run.csv")


def test_the_time_left_does_not_count_the_compilation(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    lines = loop.LineDisplay()
    lines.begin(10, 20)
    for step in range(11, 21):
        now[0] += 60.0 if step == 11 else 2.0  # the first step compiles
        lines.show({"step": step, "loss": 1.0}, is_notable=True)
    told = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[-1] for line in told[2:5]] == ["0:00:14 left", "0:00:12 left", "0:00:10 left"]
    assert not any("left" in line for line in (*told[:2], told[-1]))
