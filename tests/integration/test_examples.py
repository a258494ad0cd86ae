"""The examples, as a user runs them, at small sizes."""

import ast
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "examples"
NAMES = ("gpt_huge_batch", "clip_two_passes", "dp_sgd_digits", "many_processes")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
ENVIRONMENT["PYTHONPATH"] = str(FOLDER.parent)


def python(*arguments):
    return [sys.executable, *map(str, arguments)]


def launched(processes, devices, *arguments):
    options = ("--processes", processes, "--devices-per-process", devices, "--timeout", 90)
    return python("-m", "anybatch", "launch", *options, FOLDER / "many_processes.py", *arguments)


def ended_well(command, folder):
    ended = subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def test_each_opens_with_its_command_its_cost_and_its_result():
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted(NAMES)
    for name in NAMES:
        text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
        command, cost, expected = text.index(f"    {_begin(name)}"), text.index("Cost: "), text.index("Expected: ")
        assert command < cost < expected
        assert f"{name}.py" in (FOLDER / "README.md").read_text()


def _begin(name):
    launch = "anybatch launch --processes 2 --devices-per-process 4 "
    return f"{launch if name == 'many_processes' else 'python '}examples/{name}.py"


@pytest.mark.full
def test_gpt_plans_and_learns(tmp_path):
    small = ("--batch", 64, "--memory", "16MiB", "--width", 32, "--layers", 1, "--steps", 4)
    text = ended_well(python(FOLDER / "gpt_huge_batch.py", *small), tmp_path)
    assert "<- chosen" in text and "64 sequences, 2,048 tokens in a step" in text
    first, last = number(r"loss ([\d.]+) at first", text), number(r"([\d.]+) after 4 steps", text)
    assert last < first - 0.5


@pytest.mark.full
def test_clip_finds_two_passes_and_the_gradient_of_the_full_batch(tmp_path):
    small = ("--batch", 128, "--microbatch", 16, "--width", 16, "--steps", 30)
    text = ended_well(python(FOLDER / "clip_two_passes.py", *small), tmp_path)
    assert "couples examples: two passes over the microbatches" in text
    assert number(r"gradient in two passes: (\S+) away", text) < 1e-5
    assert number(r"gradients of microbatches: (\S+) away", text) > 0.1  # the control
    assert number(r"([\d.]+)% after", text) > 5 * number(r"([\d.]+)% before", text)


@pytest.mark.slow
def test_digits_are_learned_within_the_privacy_budget(tmp_path):
    pytest.importorskip("sklearn")
    command = python(FOLDER / "dp_sgd_digits.py", "--batch", 128, "--epsilon", 8, "--steps")
    text = ended_well([*command, "40"], tmp_path)
    assert "epsilon 8.00 at delta 0.0001, after 40 steps" in text
    assert number(r"([\d.]+)% after", text) > 50 > 20 > number(r"([\d.]+)% before", text)
    other = subprocess.run([*command, "60"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    # The noise for 60 steps differs from that for 40, so the privacy accounting of the first 40 would be wrong.
    assert other.returncode == 1 and "A private run must be resumed with the same step" in other.stderr
    assert "start a new run with another folder" in other.stderr


@pytest.mark.slow
def test_many_processes_stop_together_and_continue_in_one_with_the_same_bits(tmp_path):
    small = ("--steps", 30, "--batch", 256, "--width", 32, "--folder")
    expected = bits(ended_well(launched(2, 2, *small, tmp_path / "complete"), tmp_path))
    assert len(expected) == 2 and len(set(expected)) == 1
    command = launched(2, 2, *small, tmp_path / "stopped", "--pause", 0.2)
    stopped = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    said = []
    while stopped.poll() is None and not (said and "step 1/" in said[-1]):
        said.append(stopped.stderr.readline())
    time.sleep(0.5)
    os.kill(process_1_of(stopped.pid), signal.SIGTERM)
    said.append(stopped.communicate(timeout=60)[1])
    assert stopped.returncode == 128 + signal.SIGTERM, said
    assert re.search(r"Stopped by SIGTERM after step \d\D", "".join(said)), said
    text = ended_well(launched(1, 4, *small, tmp_path / "stopped"), tmp_path)
    assert "Resuming after step" in text and bits(text) == expected[:1]
    assert len((tmp_path / "stopped" / "log.csv").read_text().splitlines()) == 31
    assert bits(ended_well(launched(1, 4, *small, tmp_path / "other", "--steps", 29), tmp_path)) != expected[:1]


def bits(text):
    return re.findall(r"bits (\w{16})", text)


def process_1_of(launcher):
    for folder in pathlib.Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            parent = folder.name.isdigit() and (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if parent == str(launcher) and b"ANYBATCH_PROCESS_ID=1\0" in (folder / "environ").read_bytes():
                return int(folder.name)
    raise AssertionError("process 1 does not run")
