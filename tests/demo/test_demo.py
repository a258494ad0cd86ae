"""`anybatch demo` and `anybatch train`, as a user runs them."""

import os
import re
import signal
import subprocess
import sys

import pytest

SETTINGS = """
layers = 1
heads = 1
width = 16
context = 8
batch = 16
steps = 1000000
verify = false
sample = 20
evaluate_every = 10
"""


def start(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-W", "error", "-m", "anybatch", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.full
def test_the_demo_is_readable_when_piped(tmp_path):
    process = start(tmp_path, "demo", "--steps", "12")
    said, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "\x1b" not in said + errors  # no colours, no cursor movements
    times = re.search(r"The full batch of 256 would take [\d.]+ MiB: (\d+) times the budget", said)
    assert int(times[1]) >= 10
    assert "All routes give the gradient of the full batch." in said
    first, last = map(float, re.search(r"the loss fell from ([\d.]+) to ([\d.]+)\.", said).groups())
    assert first > 3.9 and last < 3.0
    assert re.search(r"The gradient noise scale at the end is [\d.]+ windows", said)
    assert "step 12/12" in errors
    assert "<h2>Verification</h2>" in (tmp_path / "anybatch-report.html").read_text()


def stopped(folder, number):
    """Starts a run and sends it a signal after its first step. Returns its stdout and stderr."""
    process = start(folder, "train", "--config", "run.toml")
    lines = [process.stderr.readline()]
    while not lines[-1].startswith("step "):
        assert process.poll() is None, lines
        lines.append(process.stderr.readline())
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    return said, "".join([*lines, errors])


@pytest.mark.slow
def test_a_stopped_run_continues(tmp_path):
    (tmp_path / "run.toml").write_text(SETTINGS)
    said, errors = stopped(tmp_path, signal.SIGTERM)
    assert said.endswith("To continue: anybatch train --config run.toml\n")
    steps = int(re.search(r"after step (\d+)", errors)[1])
    said, errors = stopped(tmp_path, signal.SIGINT)
    assert said.endswith("To continue: anybatch train --config run.toml\n")
    assert f"Resuming after step {steps}" in errors
    assert len((tmp_path / "anybatch-run" / "log.csv").read_text().splitlines()) > steps
