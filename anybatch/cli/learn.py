"""The command line of `anybatch learn`: arguments and help texts.

The commands themselves are in `anybatch.learn.terminal`. Importing that imports JAX, so it is imported only when a
command runs, and `--help` stays quick.
"""

import importlib
import os
import pathlib
from typing import Annotated, Any

import typer

from anybatch.errors import NotAvailableError

# Plain help, so that an example in it can be pasted as it is shown.
_PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}

app = typer.Typer(invoke_without_command=True, **_PLAIN)
development = typer.Typer(help="For authors: start a course, and test it.", no_args_is_help=True, **_PLAIN)
app.add_typer(development, name="dev", short_help="For authors: start a course, and test it.")

CourseOption = Annotated[
    pathlib.Path | None,
    typer.Option("--course", help="A folder with a catalogue.toml. Default: the course that comes with anybatch."),
]
FolderOption = Annotated[
    pathlib.Path | None, typer.Option("--folder", help="The folder with your files. Default: ./anybatch-learn.")
]
Name = Annotated[str | None, typer.Argument(help="A number or a name. Default: the current exercise.")]


@app.callback(
    help="Practise JAX's primitives: sixteen exercises, checked on your machine whenever you save."
    "\n\nWithout a command, it continues where you left off, in the terminal or, with --web, in a browser. It protects "
    "you from accidents in your own code, such as an endless loop. It does not protect you from other people's code."
)
def learn(
    context: typer.Context,
    course: CourseOption = None,
    folder: FolderOption = None,
    at: Annotated[str | None, typer.Option(help="The exercise to go to: a number or a name.")] = None,
    web: Annotated[bool, typer.Option("--web", help="As pages in a browser, with a playground for losses.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --web: the port; 0 for any free one.")] = 0,
    host: Annotated[str, typer.Option(help="With --web: the address to listen on.")] = "127.0.0.1",
    no_open: Annotated[bool, typer.Option("--no-open", help="With --web: open no browser.")] = False,
    let_others_run_code: Annotated[
        bool,
        typer.Option(
            "--let-others-run-code",
            help="With --web: allow a --host that other machines can reach. Who has the token can run code as you.",
        ),
    ] = False,
) -> Any:
    """Practise JAX's primitives."""
    if os.name != "posix":
        raise NotAvailableError("anybatch learn on Windows", remedy="Run it in WSL.")
    context.obj = {"course": course, "folder": folder}
    if context.invoked_subcommand is not None:
        return True
    if web:
        # It imports JAX later, so that the first page is there soon.
        from anybatch.learn.web.server import serve

        return serve(course, folder, at, host=host, port=port, opens=not no_open, allows_others=let_others_run_code)
    return _commands("learner").learn(course, folder, at)


def _commands(whose: str) -> Any:
    import jax

    # A course's references may use JAX in this process, and checks run on the CPU.
    jax.config.update("jax_platforms", "cpu")
    return importlib.import_module(f"anybatch.learn.terminal.{whose}_commands")


def _places(context: typer.Context, course: pathlib.Path | None, folder: pathlib.Path | None = None) -> tuple[Any, Any]:
    """The course and the folder; both options may come before the command or after it."""
    before = context.obj or {}
    return course or before.get("course"), folder or before.get("folder")


@app.command("list", short_help="List all exercises, and which are solved.")
def show_all(context: typer.Context, course: CourseOption = None, folder: FolderOption = None) -> Any:
    """List all exercises, and which are solved."""
    return _commands("learner").listing(*_places(context, course, folder))


@app.command(short_help="Check one file.")
def run(context: typer.Context, name: Name = None, course: CourseOption = None, folder: FolderOption = None) -> Any:
    """Check one file; the exit status is 0 if it passes."""
    return _commands("learner").run(*_places(context, course, folder), name)


@app.command(short_help="Show a hint.")
def hint(
    context: typer.Context,
    name: Name = None,
    level: Annotated[int | None, typer.Option(min=1, max=3, help="Which hint. Default: the next one.")] = None,
    course: CourseOption = None,
    folder: FolderOption = None,
) -> Any:
    """Show a hint: a direction, the primitive to use, almost the code."""
    return _commands("learner").hint(*_places(context, course, folder), name, level)


@app.command(short_help="Show a solution of an exercise you have solved.")
def solution(
    context: typer.Context,
    name: Name = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Even if you have not solved it.")] = False,
    course: CourseOption = None,
    folder: FolderOption = None,
) -> Any:
    """Show a solution of an exercise you have solved, and the same with anybatch."""
    return _commands("learner").solution(*_places(context, course, folder), name, anyway)


@app.command(short_help="Put back the original file of an exercise.")
def reset(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A number or a name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    course: CourseOption = None,
    folder: FolderOption = None,
) -> Any:
    """Put back the original file of an exercise; yours is kept under another name."""
    return _commands("learner").reset(*_places(context, course, folder), name, yes)


@app.command(short_help="Show how checks are isolated on this machine.")
def doctor() -> Any:
    """Show how checks are isolated on this machine, whether they work, and how long one takes."""
    return _commands("learner").doctor()


@app.command(
    short_help="Check several files.",
    help="Check several files: the exercises you name, or every file in your folder. The exit status is 0 if all pass."
    "\n\nA file that is solved and has not changed since is not run again. --json prints one object:"
    "\n\n\b\n"
    "    version    1\n"
    "    course, folder, passed, seconds\n"
    "    exercises  a list of objects:\n"
    "        number, name, file\n"
    '        state    "passed", "failed", "missing" or "unreadable"\n'
    "        ran      whether it was run just now\n"
    "        solved   whether it was ever solved\n"
    '        message  why it is unreadable, or ""\n'
    "        verdict  null if it was not run, else an object: exercise,\n"
    "                 passed, stage, title, text, mistake, line,\n"
    "                 source_line, prints, prints_dropped, seconds,\n"
    "                 seed, done, started,\n"
    "                 evidence: arrays, memory, collectives",
)
def check(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Numbers or names.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every exercise of the course; a missing file fails.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also run files that are solved and unchanged.")] = False,
    course: CourseOption = None,
    folder: FolderOption = None,
) -> Any:
    """Check several files."""
    places = _places(context, course, folder)
    return _commands("learner").check(*places, names or [], every=every, as_json=as_json, again=again)


@development.command("check", short_help="Test a course.")
def prove(
    context: typer.Context,
    course: CourseOption = None,
    exercise: Annotated[str | None, typer.Option(help="Only this exercise: a number or a name.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many different sets of cases.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for other programs.")] = False,
) -> Any:
    """Test a course: starters fail, solutions pass, and every mistake is caught and named."""
    return _commands("author").check(_places(context, course)[0], exercise, seeds=seeds, as_json=as_json)


@development.command("new", short_help="Start a course, or add an exercise.")
def begin(
    folder: Annotated[pathlib.Path, typer.Argument(help="The folder of the course.")],
    exercise: Annotated[
        str | None, typer.Option(help="The name of an exercise to add to a course that exists.")
    ] = None,
) -> Any:
    """Write a course with one small, complete exercise to edit, or add such an exercise to a course."""
    return _commands("author").new(folder, exercise)
