"""Runs that are stopped or killed at any moment, and started again, end with the same bits."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = pathlib.Path(__file__).parents[1] / "cases" / "training_run.py"
STEPS = 60


def start(folder, pause):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM), str(folder), str(STEPS), str(pause)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def finish(folder):
    process = start(folder, 0.0)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return (folder / "bits").read_text()


def interrupted(folder, number, delay):
    """Starts it, and sends a signal some time after it has begun to train. Returns how it ended, and what it said."""
    process = start(folder, 0.02)
    said = [process.stderr.readline()]
    while process.poll() is None and ("step" not in said[-1] or said[-1].startswith("Resuming")):
        said.append(process.stderr.readline())
    time.sleep(delay)
    process.send_signal(number)
    said.append(process.communicate(timeout=60)[1])
    return process.returncode, "".join(said)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return finish(tmp_path_factory.mktemp("whole"))


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_twenty_signals_at_random_moments_leave_the_same_bits(tmp_path, uninterrupted, seed):
    """Ten of them here, ten with the other seed, which is among the long ones: SIGTERM, Ctrl-C and SIGKILL."""
    generator = random.Random(seed)
    ends = []
    for _ in range(10):
        number = generator.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
        code, said = interrupted(tmp_path, number, generator.uniform(0, 0.15))
        assert code in {signal.SIGKILL: (-9, 0), signal.SIGTERM: (143, 0), signal.SIGINT: (130, 0)}[number], said
        ends.append(code)
    assert any(ends)
    assert finish(tmp_path) == uninterrupted


def test_a_stop_saves_the_state_and_says_how_to_go_on(tmp_path, uninterrupted):
    code, said = interrupted(tmp_path, signal.SIGTERM, 0.1)
    assert code == 143, said
    assert "Stopped by SIGTERM after step" in said and "run it again to resume" in said
    stopped = int(said.split("Stopped by SIGTERM after step ")[1].split(",")[0])
    saved = [int(path.name) for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()]
    assert max(saved) == stopped
    assert finish(tmp_path) == uninterrupted


@pytest.mark.full
def test_another_run_has_other_bits(tmp_path, uninterrupted):
    """The control: what is compared would differ if a single step were taken twice, or left out."""
    (tmp_path / "more").mkdir()
    process = start(tmp_path / "more", 0.0)
    process.communicate(timeout=120)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(PROGRAM), str(tmp_path / "more"), str(STEPS + 1)]
    assert subprocess.run(command, env=environment, stderr=subprocess.PIPE).returncode == 0
    assert (tmp_path / "more" / "bits").read_text().split()[0] != uninterrupted.split()[0]
