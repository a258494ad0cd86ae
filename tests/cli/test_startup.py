"""`anybatch --help` is quick: it imports neither JAX nor any other large package."""

import subprocess
import sys

import pytest

LARGE = {"jax", "jaxlib", "numpy", "rich", "matplotlib", "jinja2", "optax", "flax", "orbax"}

# Runs the command line in a fresh process, then prints the packages it has imported.
PROGRAM = """
import contextlib, io, sys
from anybatch.__main__ import main
with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
    main()
assert "Usage:" in shown.getvalue()
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def imported(program, *arguments):
    command = [sys.executable, "-c", program, *arguments]
    return set(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split())


@pytest.mark.parametrize("command", ["", "demo", "train", "explain", "verify", "doctor", "launch", "learn"])
def test_help_imports_nothing_large(command):
    found = imported(PROGRAM, *filter(None, [command]), "--help")
    assert "typer" in found
    assert not found & LARGE


def test_a_large_import_is_seen():
    """The control: the same program sees what a command imports when it runs."""
    assert {"jax", "numpy", "rich"} <= imported("import anybatch.cli.doctor\n" + PROGRAM, "--help")
