"""The command line, as a user runs it."""

import subprocess
import sys
import tomllib

import pytest
import typer
from typer.testing import CliRunner

import anybatch
from anybatch.cli import main as cli


def run(*arguments):
    command = [sys.executable, "-W", "error", "-m", "anybatch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_version():
    assert run("--version").stdout == f"anybatch {anybatch.__version__}\n"


def test_help_names_the_commands():
    result = run()
    assert "demo" in result.stdout + result.stderr


COMMANDS = ["", "demo", "train", "explain", "verify", "doctor", "launch", "learn", "learn list", "learn run"]
COMMANDS += ["learn hint", "learn solution", "learn reset", "learn doctor", "learn check", "learn dev"]
COMMANDS += ["learn dev check", "learn dev new"]


def help_text(command, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))  # what a terminal of that width tells
    return CliRunner().invoke(cli.app, [*command.split(), "--help"], terminal_width=columns).output


def summaries(text):
    """The summary of each command in a help text, its lines joined."""
    found = {}
    for line in text.partition("Commands:\n")[2].splitlines():
        name, _, rest = line.strip().partition("  ") if line.startswith("  ") and line[2] != " " else ("", "", line)
        name = name or list(found)[-1]
        found[name] = f"{found.get(name, '')} {rest.strip()}".strip()
    return found


@pytest.mark.parametrize("columns", [80, 60, 40])
@pytest.mark.parametrize("command", ["", "learn", "learn dev"])
def test_the_summary_of_no_command_is_cut(monkeypatch, command, columns):
    wide, narrow = (summaries(help_text(command, width, monkeypatch)) for width in (200, columns))
    assert len(wide) >= 2 and wide == narrow
    assert all(text.endswith(".") and "..." not in text for text in narrow.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns(monkeypatch, command):
    text = help_text(command, 80, monkeypatch)
    assert "Usage:" in text and max(map(len, text.splitlines())) <= 80


def test_a_summary_without_a_short_text_would_be_cut(monkeypatch):
    """The control."""
    demo = next(command for command in cli.app.registered_commands if command.callback.__name__ == "demo")
    monkeypatch.setattr(demo, "short_help", None)
    assert summaries(help_text("", 80, monkeypatch))["demo"].endswith("...")


def test_demo_refuses_bad_options_before_it_starts(tmp_path):
    result = run("demo", "--steps", "0")
    assert result.returncode == 2
    assert "--steps" in result.stderr
    result = run("demo", "--memory", "much", "--out", str(tmp_path))
    assert result.returncode == 2
    assert "memory must be a number of bytes" in result.stderr and "Traceback" not in result.stderr


def test_train_says_what_it_needs(tmp_path):
    result = run("train")
    assert result.returncode == 2
    assert "anybatch train --example > run.toml" in result.stderr
    (tmp_path / "run.toml").write_text(f'text = "{tmp_path}/missing.txt"')
    result = run("train", "--config", str(tmp_path / "run.toml"))
    assert result.returncode == 2
    assert "The text must be a file that can be read" in result.stderr and "Traceback" not in result.stderr


def test_train_shows_an_example():
    assert tomllib.loads(run("train", "--example").stdout)["batch"] == 256


def test_missing_packages_are_named():
    program = "import sys; sys.modules['typer'] = None; from anybatch.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert 'pip install ".[cli]"' in result.stderr


@pytest.mark.parametrize(
    "module, extra", [("rich.console", "cli"), ("optax", "train"), ("orbax", "train"), ("dp_accounting", "privacy")]
)
def test_a_command_names_the_extra_that_it_lacks(capsys, module, extra):
    def command():
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    with pytest.raises(typer.Exit) as ended:
        cli._run(command)
    assert ended.value.exit_code == 1 and f'pip install ".[{extra}]"' in capsys.readouterr().err
    assert cli._way_out(ModuleNotFoundError("mine", name="mine")) == ""  # the control


def test_the_help_of_train_can_be_pasted():
    said = run("train", "--help").stdout
    assert "anybatch train --example > run.toml\n" in said and "\\b" not in said and "\b" not in said


@pytest.mark.parametrize("report", ["book.txt", "run.toml", "link.html", "anybatch-run/log.csv"])
def test_the_report_of_train_overwrites_no_other_file(tmp_path, monkeypatch, report):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("Call me Ishmael. " * 50)
    (tmp_path / "link.html").symlink_to("book.txt")
    (tmp_path / "run.toml").write_text(f'text = "book.txt"\nreport = "{report}"\n')
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    result = CliRunner().invoke(cli.app, ["train", "--config", "run.toml"])
    assert result.exit_code == 2 and f"got report = '{report}', which " in result.output
    assert {path: path.read_bytes() for path in files} == files
    assert not (tmp_path / "anybatch-run" / "log.csv").exists()
