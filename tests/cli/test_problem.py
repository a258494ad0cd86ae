"""`anybatch explain`, `verify` and `doctor`, as a user runs them."""

import os
import re
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import anybatch as ab
from anybatch.cli import doctor, problem
from anybatch.cli import main as cli
from anybatch.cli.problem import load_problem
from anybatch.report import Report


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, with the example from the help."""
    shown = run("explain", "--help", cwd=tmp_path).stdout
    example = re.search(r"^ *# train\.py\n(?:.*\n)*?.*return loss.*\n", shown, re.MULTILINE)
    (tmp_path / "train.py").write_text(textwrap.dedent(example[0]))
    return tmp_path


def run(*arguments, cwd, **environment):
    command = [sys.executable, "-W", "error", "-m", "anybatch", *arguments]
    environment = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(ab.__file__))} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)


@pytest.mark.full
def test_the_example_of_the_help_works_as_pasted(folder):
    assert len((folder / "train.py").read_text().splitlines()) == 5
    result = run(
        "explain", "train:problem", "--memory", "12MiB", "--html", "plan.html", "--plot", "plan.png", cwd=folder
    )
    assert result.returncode == 0, result.stderr
    assert "The gradient of 4096 examples on cpu, within 12.0 MiB (memory='12MiB')" in result.stdout
    assert re.search(r"full batch +4096 +22\.0 MiB .* no\n", result.stdout)
    assert re.search(r"one pass +\d+ .* ms +yes +<- chosen\n", result.stdout)
    assert "\x1b" not in result.stdout
    assert "<svg" in (folder / "plan.html").read_text()
    assert (folder / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options, words",
    [
        (["--html", "train.py"], "A page replaces no file but one of a plan of anybatch, got --html train.py"),
        (["--plot", "train.py"], "A plot replaces no file but one of a plan of anybatch, got --plot train.py"),
        (["--html", "report.html"], "A page replaces no file but one of a plan of anybatch, got --html report.html"),
        (["--html", "plan.svg", "--plot", "./plan.svg"], "must be two files, got --html plan.svg and --plot plan.svg"),
        (["--html", "folder"], "A page replaces no file but"),
        (["--html", "missing/plan.html"], "mkdir -p"),
    ],
)
def test_explain_overwrites_no_other_file(tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").write_text("def problem(): ...")
    Report("A run", []).write("report.html")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr(problem, "load_problem", lambda target: pytest.fail("planning has started"))
    result = CliRunner().invoke(cli.app, ["explain", "train.py:problem", *options])
    assert result.exit_code == 2 and words in result.output
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_explain_overwrites_its_own_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(problem, "load_problem", lambda target: (lambda w, x: jnp.mean(x * w), (1.0, jnp.ones(8))))
    for _ in range(2):
        problem.explain_problem("<it>", html=tmp_path / "plan.html", plot=tmp_path / "plan.svg", timed=False)
    assert "<title>&lt;it&gt;</title>" in (tmp_path / "plan.html").read_text()


def test_the_wider_the_terminal_the_more_columns_a_table_has(tmp_path, monkeypatch, capsys):
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    monkeypatch.setattr(problem, "load_problem", lambda target: (loss, (jnp.ones((8, 8)), jnp.ones((64, 8)))))
    seen = {}
    for columns in (60, 80, 120):
        monkeypatch.setenv("COLUMNS", str(columns))
        problem.explain_problem("it", html=None, plot=None, memory="1GiB", timed=False)
        problem.verify_problem("it", microbatch_sizes=8)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= columns
        seen[columns] = " ".join(line for line in lines if line.startswith("route"))
    assert "results" in seen[120] and "value" in seen[120]  # all columns
    assert "results" not in seen[80] and "gradients" in seen[80]
    assert "gradients" not in seen[60]


def test_verify_compares_the_routes(folder):
    result = run("verify", "train:problem", "--size", "5", "--sample", "12", cwd=folder)
    assert result.returncode == 0, result.stderr
    assert "microbatch_size=5" in result.stdout and "All routes give the gradient of the full batch." in result.stdout


def test_a_path_names_a_module_too_and_the_status_is_1_if_nothing_fits(folder):
    result = run("explain", "train.py:problem", "--memory", "2MiB", "--no-time", cwd=folder)
    assert result.returncode == 1
    assert "Nothing fits: even 1 example at a time needs" in result.stdout


PROBLEMS = """
import jax.numpy as jnp
number = 3
def nothing(): pass
def pair(): return (lambda w, x: x), 1.0
def swapped(): return jnp.ones(3), (lambda w, x: jnp.mean(w * x)), jnp.ones(3)
def fails(): raise RuntimeError("no data here")
def needs(argument): return argument
"""


@pytest.mark.parametrize(
    "target, message",
    [
        ("mine", "A problem must be named as package.module:function, got 'mine'."),
        ("mine:", "A problem must be named as package.module:function, got 'mine:'."),
        ("absent:problem", "The module of a problem must be in this folder, or installed, got absent."),
        ("absent.py:problem", "The file of a problem must exist, got absent.py."),
        ("mine:absent", "mine must have a function absent, got no such name.\nIt has fails, needs, nothing, pair"),
        ("mine:number", "mine must have a function number, got number = 3."),
        ("mine:nothing", "mine:nothing must return (loss, params, batch), got a NoneType."),
        ("mine:pair", "mine:pair must return (loss, params, batch), got 2 values (function, float)."),
        ("mine:swapped", "mine:swapped must return (loss, params, batch), and the loss must be a function, got a "),
        (
            "mine:fails",
            "mine:fails must return a problem when called without arguments, got RuntimeError: no data here at ",
        ),
        (
            "mine:needs",
            "mine:needs must return a problem when called without arguments, got TypeError: needs() missing 1 required",
        ),
        ("broken:problem", "broken must import, got ZeroDivisionError: division by zero at "),
        ("typo:problem", "typo must import, got SyntaxError: "),
        ("unmet:problem", "unmet must import, got ModuleNotFoundError: No module named 'surely_not_there' at "),
    ],
)
def test_errors_say_what_is_wrong_with_a_problem(tmp_path, monkeypatch, target, message):
    (tmp_path / "mine.py").write_text(PROBLEMS)
    (tmp_path / "broken.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "typo.py").write_text("def problem(:\n")
    (tmp_path / "unmet.py").write_text("import surely_not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("mine", "broken", "typo", "unmet"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ab.InputError) as caught:
        load_problem(target)
    assert str(caught.value).startswith(message)
    if "RuntimeError" in message or "division" in message:
        assert re.search(r"(mine\.py:7|broken\.py:2)\.", str(caught.value))


def test_errors_have_no_traceback_and_exit_status_2(folder):
    result = run("explain", "train:absent", cwd=folder)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.startswith("train must have a function absent")
    result = run("explain", "train:problem", "--memory", "much", cwd=folder)
    assert result.returncode == 2 and result.stderr.startswith("memory must be a number of bytes")


def test_doctor_shows_what_is_installed(tmp_path):
    result = run("doctor", cwd=tmp_path, ANYBATCH_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stdout + result.stderr
    for text in (f"anybatch          {ab.__version__}", "Python", "JAX", "device", "cache", "0 plans", "optax"):
        assert text in result.stdout


def test_doctor_shows_what_is_missing(monkeypatch, tmp_path):
    def version(package):
        raise doctor.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(doctor.versions, "is_supported", lambda: False)
    unwell = {finding.subject: finding for finding in doctor.examine() if not finding.is_well}
    assert unwell["optax"].remedy.startswith('pip install ".[train]"')
    assert unwell["matplotlib"].text == "missing; needed for plots"
    assert "is not writable" in unwell["cache"].text
    assert unwell["JAX"].remedy == 'pip install "jax>=0.10,<0.13"'


@pytest.mark.full
def test_further_arguments_of_the_loss_are_passed_on(tmp_path, monkeypatch, capsys):
    """Such as the key of a loss with dropout."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keyed.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def loss(w, x, key):\n"
        "    return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x @ w, 0.0) ** 2)\n"
        "def problem():\n"
        "    return loss, jnp.ones((4, 4)), jnp.ones((32, 4)), jax.random.key(0)\n"
    )
    assert problem.explain_problem("keyed.py:problem", html=None, plot=None, memory="1MiB", timed=False)
    assert problem.verify_problem("keyed.py:problem", microbatch_sizes=[5], sample=None)
    assert "microbatch_size=5" in capsys.readouterr().out
