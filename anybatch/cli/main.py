"""The command line: the arguments of every command. What a command does stands in a module of its own beside this."""

import enum
import pathlib
import shlex
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

import anybatch
from anybatch.cli import learn as learning
from anybatch.cli.launch import EXAMPLE as SCRIPT
from anybatch.cli.problem import EXAMPLE

# Plain help: an example in it must come out as it was written, to be pasted.
app = typer.Typer(
    help="The exact gradient of any batch, on the memory you have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_EXAMPLE = "\n\n\b\n" + EXAMPLE + "\n\n"

# module -> the extra that brings it
_EXTRAS = {"optax": "train", "flax": "train", "orbax": "train", "dp_accounting": "privacy"}
_EXTRAS |= dict.fromkeys(("typer", "rich", "matplotlib", "jinja2"), "cli")

Target = Annotated[str, typer.Argument(help="package.module:function, or path/to/file.py:function.")]


class Objective(enum.StrEnum):
    """What a plan is for."""

    speed = "speed"
    memory = "memory"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anybatch {anybatch.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The exact gradient of any batch, on the memory you have."""


def _run(command: Callable[[], bool | int]) -> None:
    """Runs a command; what is wrong with its input, or missing, is a message and not a traceback."""
    try:
        result = command()
    except (ImportError, anybatch.AnybatchError) as error:
        text = f"{type(error).__name__}: {error}{_way_out(error)}" if isinstance(error, ImportError) else str(error)
        typer.echo(text, err=True)
        raise typer.Exit(1 if isinstance(error, ImportError) else 2) from None
    raise typer.Exit(int(not result) if isinstance(result, bool) else result)


def _way_out(error: ImportError) -> str:
    """How to get the package that is missing, if one of our extras brings it."""
    module = (error.name or "").partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or module not in _EXTRAS:
        return ""
    return f'\nThis command needs the package {module}: pip install "anybatch[{_EXTRAS[module]}]"'


@app.command()
def demo(
    gpu_size: Annotated[bool, typer.Option("--gpu-size", help="A GPT of 85 million parameters.")] = False,
    memory: Annotated[str | None, typer.Option(help='What a step may take, e.g. "64MiB".')] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="How many to take.")] = None,
    out: Annotated[str | None, typer.Option(help="The folder for checkpoints and the log.")] = None,
    report: Annotated[str | None, typer.Option(help="Where the report goes.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with one that was stopped, or begin anew.")] = True,
) -> None:
    """Train a small GPT with a batch far beyond a memory budget: a minute on two cores."""

    def command() -> int:
        from anybatch.demo import job as demonstration

        return demonstration.run_demo(
            gpu_size=gpu_size, memory=memory, steps=steps, out=out, report=report, resume=resume
        )

    _run(command)


@app.command(
    help="Train a GPT on a text of your own, as the demo does."
    "\n\n\b\n    anybatch train --example > run.toml\n    anybatch train --config run.toml"
)
def train(
    config: Annotated[pathlib.Path | None, typer.Option(help="The settings, in a file of TOML.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in its folder, or insist on a new one.")] = True,
    example: Annotated[bool, typer.Option("--example", help="Print settings to begin with, and end.")] = False,
) -> None:
    """Train a GPT on a text of your own."""

    def command() -> int:
        from anybatch.demo.config import RunConfig
        from anybatch.demo.config import example as example_settings

        if example:
            typer.echo(example_settings(), nl=False)
            return 0
        if config is None:
            raise anybatch.InputError(
                "A run needs its settings",
                given="no --config",
                remedy="anybatch train --example > run.toml, then: anybatch train --config run.toml",
            )
        settings = RunConfig.read(config)
        from anybatch.demo import job

        return job.run(settings, command=f"anybatch train --config {shlex.quote(str(config))}", resume=resume)

    _run(command)


@app.command(
    help="Show which way the gradient of a problem will be computed, among which, and why."
    f"\n\nThe function returns (loss, params, batch); this works as pasted:{_EXAMPLE}"
    "\b\n    anybatch explain train:problem --memory 12MiB"
)
def explain(
    problem: Target,
    memory: Annotated[
        str | None, typer.Option(help='What the gradient may take: "16GiB", "80%" of what is left.')
    ] = None,
    objective: Annotated[Objective, typer.Option(help="The fastest, or the leanest.")] = Objective.speed,
    remat: Annotated[
        str | None, typer.Option(help='"auto" also tries jax.checkpoint; or the name of one of its policies.')
    ] = None,
    time: Annotated[bool, typer.Option(help="Time candidates on the device, or only compile them.")] = True,
    html: Annotated[pathlib.Path | None, typer.Option(help="Write the table and the plot to this file, too.")] = None,
    plot: Annotated[pathlib.Path | None, typer.Option(help="Write the plot to this file: .png, .svg, .pdf.")] = None,
) -> None:
    """Show the plan of a problem."""

    def command() -> bool:
        from anybatch.cli import commands

        options = {"memory": memory, "objective": objective.value, "remat": remat, "timed": time}
        return commands.explain(problem, html=html, plot=plot, **options)

    _run(command)


@app.command(
    help="Compare every route with the gradient of the full batch, on your own loss."
    f"\n\nThe function returns (loss, params, batch); this works as pasted:{_EXAMPLE}"
    "\b\n    anybatch verify train:problem"
)
def verify(
    problem: Target,
    size: Annotated[list[int] | None, typer.Option(min=1, help="A microbatch size to try; may be repeated.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="How many of the examples to use.")] = None,
) -> None:
    """Compare every route with the gradient of the full batch."""

    def command() -> bool:
        from anybatch.cli import commands

        return commands.verify(problem, microbatch_sizes=size or None, sample=sample)

    _run(command)


@app.command()
def doctor() -> None:
    """Show versions, devices and memory, and what is missing."""

    def command() -> bool:
        from anybatch.cli import commands

        return commands.doctor()

    _run(command)


@app.command(
    help="Try a script for many processes on this machine: start them, show their output, end all when one fails."
    "\n\nOptions come before the script, and its own arguments after it; this works as pasted:"
    f"\n\n\b\n{SCRIPT}\n\n"
    "\b\n    anybatch launch --processes 2 --devices-per-process 4 hello.py",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def launch(
    script: Annotated[str, typer.Argument(help="path/to/script.py, which calls anybatch.distributed.initialize().")],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the script finds in sys.argv.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="How many processes to start.")] = 2,
    devices_per_process: Annotated[
        int | None, typer.Option(min=1, help="GPUs for each process, or simulated devices where there are none.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds after which all of it is ended.")] = None,
    max_processes: Annotated[
        int | None, typer.Option(min=1, help="How many are allowed: by default 4 for each CPU, 16 at least.")
    ] = None,
) -> None:
    """Start several processes of a script."""

    def command() -> int:
        from anybatch.cli import launch as launcher

        return launcher.launch(
            script,
            arguments or [],
            processes=processes,
            devices_per_process=devices_per_process,
            timeout=timeout,
            max_processes=max_processes,
        )

    _run(command)


class _Learning(typer.core.TyperGroup):
    """Commands that return their result, for `_run` to make an exit status of it."""

    def invoke(self, context: Any) -> None:
        _run(lambda: typer.core.TyperGroup.invoke(self, context))


app.add_typer(learning.app, name="learn", cls=_Learning)
