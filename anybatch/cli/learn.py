"""The arguments of `anybatch learn`; what the commands do stands elsewhere, and is imported when it is done."""

import os
import pathlib
from typing import Annotated, Any

import jax
import typer

from anybatch.errors import NotAvailableError

# Plain help: an example in it must come out as it was written, to be pasted.
_PLAIN: dict[str, Any] = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}

app = typer.Typer(invoke_without_command=True, **_PLAIN)
development = typer.Typer(help="For authors: prove a course, or begin one.", no_args_is_help=True, **_PLAIN)
app.add_typer(development, name="dev")

CourseOption = Annotated[
    pathlib.Path | None, typer.Option("--course", help="A folder with a catalogue.toml; ours if left out.")
]
FolderOption = Annotated[
    pathlib.Path | None, typer.Option("--folder", help="Where your files are; ./anybatch-learn if left out.")
]
Name = Annotated[str | None, typer.Argument(help="A number or a name; the current exercise if left out.")]


@app.callback(
    help="Practise JAX's own primitives: sixteen exercises, checked on your machine whenever you save."
    "\n\nWithout a command, it starts where you left off. It protects you from accidents of your own code, such as a "
    "loop without end; it is no prison for somebody else's."
)
def learn(
    context: typer.Context,
    course: CourseOption = None,
    folder: FolderOption = None,
    at: Annotated[str | None, typer.Option(help="The exercise to go to: a number or a name.")] = None,
) -> Any:
    """Practise JAX's own primitives."""
    if os.name != "posix":
        raise NotAvailableError("anybatch learn on Windows", remedy="Run it in WSL.")
    # References may draw with JAX: on the CPU, where checks run, whatever else this machine has.
    jax.config.update("jax_platforms", "cpu")
    context.obj = {"course": course, "folder": folder}
    if context.invoked_subcommand is not None:
        return True
    from anybatch.learn.terminal import learner_commands

    return learner_commands.learn(course, folder, at)


def _places(context: typer.Context, course: pathlib.Path | None, folder: pathlib.Path | None = None) -> tuple[Any, Any]:
    """The course and the folder, which may stand before the command as well as after it."""
    before = context.obj or {}
    return course or before.get("course"), folder or before.get("folder")


@app.command("list")
def show_all(context: typer.Context, course: CourseOption = None, folder: FolderOption = None) -> Any:
    """Show all exercises, and what is solved."""
    from anybatch.learn.terminal import learner_commands

    return learner_commands.listing(*_places(context, course, folder))


@app.command()
def run(context: typer.Context, name: Name = None, course: CourseOption = None, folder: FolderOption = None) -> Any:
    """Check one file; the exit status is 0 if it passes."""
    from anybatch.learn.terminal import learner_commands

    return learner_commands.run(*_places(context, course, folder), name)


@app.command()
def hint(
    context: typer.Context,
    name: Name = None,
    level: Annotated[int | None, typer.Option(min=1, max=3, help="Which; the next one if left out.")] = None,
    course: CourseOption = None,
    folder: FolderOption = None,
) -> Any:
    """Show a hint: a direction, the primitive to use, nearly the code."""
    from anybatch.learn.terminal import learner_commands

    return learner_commands.hint(*_places(context, course, folder), name, level)


@app.command(short_help="Show a solution of what you have solved.")
def solution(
    context: typer.Context,
    name: Name = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Even if you have not solved it.")] = False,
    course: CourseOption = None,
    folder: FolderOption = None,
) -> Any:
    """Show a solution of what you have solved, and the same with anybatch."""
    from anybatch.learn.terminal import learner_commands

    return learner_commands.solution(*_places(context, course, folder), name, anyway)


@app.command(short_help="Put a file back to its beginning.")
def reset(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A number or a name.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    course: CourseOption = None,
    folder: FolderOption = None,
) -> Any:
    """Put a file back to its beginning; yours is kept under another name."""
    from anybatch.learn.terminal import learner_commands

    return learner_commands.reset(*_places(context, course, folder), name, yes)


@app.command(short_help="Show what keeps a check apart on this machine.")
def doctor() -> Any:
    """Show what keeps a check apart on this machine, that one works, and how long it takes."""
    from anybatch.learn.terminal import learner_commands

    return learner_commands.doctor()


@app.command(
    short_help="Check many files at once.",
    help="Check many files at once: those you name, or those that are there; the exit status is 0 if all pass."
    "\n\nWhat is solved and was not changed since is not run again. With --json, one object:"
    "\n\n\b\n"
    "    version    1\n"
    "    course, folder, passed, seconds\n"
    "    exercises  a list of objects:\n"
    "        number, name, file\n"
    '        state    "passed", "failed", "missing" or "unreadable"\n'
    "        ran      whether it was run just now\n"
    "        solved   whether it ever was\n"
    '        message  why it is unreadable, or ""\n'
    "        verdict  null if it was not run, else an object: exercise, passed, stage, title, text, mistake, line,\n"
    "                 source_line, prints, prints_dropped, seconds, seed, done, started",
)
def check(
    context: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(help="Numbers or names.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every exercise of the course; a missing file fails.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For other programs.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Also what is solved and was not changed.")] = False,
    course: CourseOption = None,
    folder: FolderOption = None,
) -> Any:
    """Check many files at once."""
    from anybatch.learn.terminal import learner_commands

    places = _places(context, course, folder)
    return learner_commands.check(*places, names or [], every=every, as_json=as_json, again=again)


@development.command("check", short_help="Prove a course.")
def prove(
    context: typer.Context,
    course: CourseOption = None,
    exercise: Annotated[str | None, typer.Option(help="Only this one: a number or a name.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many different sets of cases.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="For other programs.")] = False,
) -> Any:
    """Prove a course: starters fail, solutions pass, and every mistake is caught and named."""
    from anybatch.learn.terminal import author_commands

    return author_commands.check(_places(context, course)[0], exercise, seeds=seeds, as_json=as_json)


@development.command("new", short_help="Begin a course, or one more exercise.")
def begin(
    folder: Annotated[pathlib.Path, typer.Argument(help="Of the course.")],
    exercise: Annotated[
        str | None, typer.Option(help="The name of another exercise, in a course that is there.")
    ] = None,
) -> Any:
    """Write a course with one small exercise that is whole, or one more exercise; to be edited."""
    from anybatch.learn.terminal import author_commands

    return author_commands.new(folder, exercise)
