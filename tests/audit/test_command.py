"""`anybatch audit`, as a user runs it."""

import json
import textwrap

import pytest
from typer.testing import CliRunner

from anybatch.cli import AUDIT_EXAMPLE
from anybatch.cli import main as cli

WRONG = AUDIT_EXAMPLE.replace(" / 4", "")
STEP = """
import jax, jax.numpy as jnp, optax

def problem():
    loss = lambda w, batch: jnp.mean(jnp.tanh(batch @ w) ** 2)
    optimizer = optax.sgd(0.1)

    def step(w, opt_state, batch):
        updates, opt_state = optimizer.update(jax.grad(loss)(w, batch), opt_state)
        return w + updates, opt_state

    batch = jnp.arange(24.0).reshape(6, 4) / 24
    return {"candidate": step, "loss": loss, "params": jnp.ones(4), "batch": batch, "optimizer": optimizer}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command in a folder with this text as train.py."""
    monkeypatch.chdir(tmp_path)

    def run(text, *options):
        (tmp_path / "train.py").write_text(textwrap.dedent(text))
        return CliRunner().invoke(cli.app, ["audit", "train.py:problem", *options])

    return run


def test_the_example_of_the_help_is_right(run):
    result = run(AUDIT_EXAMPLE)
    assert result.exit_code == 0, result.output
    assert "The candidate gives the gradient of the full batch." in result.output


def test_a_wrong_loop(run, tmp_path):
    """The table, the cause and the status; and the same as a file."""
    result = run(WRONG, "--json", "audit.json", "--size", "8")
    assert result.exit_code == 1
    assert "DIFFERENT" in result.output and "4 times too large, for 4 microbatches" in result.output
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["kind"] == "number_of_microbatches" and written["microbatch_size"] == 8
    assert run(WRONG, "--json", "audit.json").exit_code == 1  # it replaces its own file


@pytest.mark.full
def test_a_step_as_a_dict(run):
    assert run(STEP).exit_code == 0
    assert run(STEP.replace("w + updates", "w + 2 * updates")).exit_code == 1


@pytest.mark.parametrize(
    "text, words",
    [
        ("def problem():\n    return 1, 2", "must return (candidate, loss, params, batch)"),
        ("def problem():\n    return {'loss': 1}", "got a dict without candidate, params, batch"),
        (STEP.replace('"optimizer"', '"optimiser"'), "got a dict with optimiser"),
        ("def problem():\n    return 1, 2, 3, 4", "candidate must be a function"),
    ],
)
def test_problems_that_are_none(run, text, words):
    result = run(text)
    assert result.exit_code == 2 and words in result.output.replace("\n", " ")


def test_no_other_file_is_overwritten(run, tmp_path):
    result = run(WRONG, "--json", "train.py")
    assert result.exit_code == 2 and "A result replaces no file but one of an audit" in result.output
    assert run(WRONG, "--json", "missing/audit.json").exit_code == 2
