"""The arguments and help texts of every command.

The work is done by the modules beside this one and by `anybatch.demo`. Each is imported when its command runs, since
nearly all of them import JAX, which takes over a second: `anybatch --help` must be quick.
"""

import pathlib
import shlex
from collections.abc import Callable
from typing import Annotated, Any

import typer
import typer.core

import anybatch
from anybatch.cli import AUDIT_EXAMPLE, EXAMPLE, EXTRAS
from anybatch.cli import learn as learning
from anybatch.errors import install


class _Commands(typer.core.TyperGroup):
    """The commands. They return their result, and `_run` turns it into an exit status."""

    def invoke(self, context: Any) -> None:
        _run(lambda: typer.core.TyperGroup.invoke(self, context))


# Plain help, so that an example in it can be pasted as it is shown.
app = typer.Typer(
    cls=_Commands,
    help="The exact gradient of any batch, on the memory you have.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_PROBLEM = (
    "\n\nThe function returns (loss, params, batch), and further arguments of the loss, such as a key, if it has any. "
    f"You can paste this example:\n\n\b\n{EXAMPLE}\n\n"
)

_SCRIPT = """\
# hello.py
import jax
import anybatch as ab
print(ab.distributed.initialize())
print(jax.local_device_count(), "of", jax.device_count(), "devices")"""

Target = Annotated[str, typer.Argument(help="package.module:function, or path/to/file.py:function.")]


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
    """Runs a command and exits with its status. Input errors and missing packages print a message, not a traceback."""
    try:
        result = command()
    except (ImportError, anybatch.AnybatchError) as error:
        text = f"{type(error).__name__}: {error}{_way_out(error)}" if isinstance(error, ImportError) else str(error)
        typer.echo(text, err=True)
        raise typer.Exit(1 if isinstance(error, ImportError) else 2) from None
    raise typer.Exit(int(not result) if isinstance(result, bool) else result)


def _way_out(error: ImportError) -> str:
    """The command that installs the missing package, if one of the extras has it."""
    module = (error.name or "").partition(".")[0]
    for package, (extra, _) in EXTRAS.items():
        if isinstance(error, ModuleNotFoundError) and module == package.removesuffix("-checkpoint").replace("-", "_"):
            return f"\nThis command needs the package {module}: {install(extra)}"
    return ""


@app.command(short_help="Train a small GPT whose batch would not fit the memory.")
def demo(
    gpu_size: Annotated[bool, typer.Option("--gpu-size", help="Train a GPT of 85 million parameters.")] = False,
    memory: Annotated[str | None, typer.Option(help='The memory of a step, e.g. "64MiB".')] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="The number of steps.")] = None,
    out: Annotated[str | None, typer.Option(help="The folder for checkpoints and the log.")] = None,
    report: Annotated[str | None, typer.Option(help="The file for the report.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the demo in its folder, or require a new one.")] = True,
) -> int:
    """Train a small GPT with a batch many times larger than fits the memory budget. Takes a minute on two cores."""
    from anybatch.demo.job import run_demo

    return run_demo(gpu_size=gpu_size, memory=memory, steps=steps, out=out, report=report, resume=resume)


@app.command(
    short_help="Train a GPT on your own text.",
    help="Train a GPT on your own text, like the demo."
    "\n\n\b\n    anybatch train --example > run.toml\n    anybatch train --config run.toml",
)
def train(
    config: Annotated[pathlib.Path | None, typer.Option(help="A TOML file with the options of the run.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run in its folder, or require a new one.")] = True,
    example: Annotated[bool, typer.Option("--example", help="Print a TOML file to start from, and exit.")] = False,
) -> int:
    """Train a GPT on your own text."""
    from anybatch.demo.config import RunConfig, example_config

    if example:
        typer.echo(example_config(), nl=False)
        return 0
    if config is None:
        raise anybatch.InputError(
            "A run needs a file with its options",
            given="no --config",
            remedy="anybatch train --example > run.toml, then: anybatch train --config run.toml",
        )
    run_config = RunConfig.read(config)
    from anybatch.demo import job

    return job.run(run_config, command=f"anybatch train --config {shlex.quote(str(config))}", resume=resume)


def _remat(text: str) -> str | float | None:
    """The option of `value_and_grad` that a text on the command line stands for."""
    try:
        return float(text)
    except ValueError:
        return None if text == "none" else text


@app.command(
    short_help="Show how a gradient will be computed, and why.",
    help="Show how the gradient of a problem will be computed, with the other candidates and the reason for the choice."
    " The wider the terminal, the more columns the table has."
    f"{_PROBLEM}"
    "\b\n    anybatch explain train:problem --memory 12MiB",
)
def explain(
    problem: Target,
    memory: Annotated[str | None, typer.Option(help='The memory: "16GiB", or "80%" of the free memory.')] = None,
    objective: Annotated[str, typer.Option(help='"speed" takes the least time, "memory" the least memory.')] = "speed",
    remat: Annotated[
        str, typer.Option(help='"auto", "none", the share of activations to compute again, or a policy of JAX.')
    ] = "auto",
    time: Annotated[bool, typer.Option(help="Time the candidates on the device, or only compile them.")] = True,
    html: Annotated[pathlib.Path | None, typer.Option(help="Write the table and the plot to this HTML file.")] = None,
    plot: Annotated[pathlib.Path | None, typer.Option(help="Write the plot to this file: .png, .svg, .pdf.")] = None,
) -> bool:
    """Show the plan for a problem."""
    from anybatch.cli.problem import explain_problem

    options = {"memory": memory, "objective": objective, "remat": _remat(remat), "timed": time}
    return explain_problem(problem, html=html, plot=plot, **options)


@app.command(
    short_help="Compare microbatches with the full batch, on your loss.",
    help="Compare the gradient in microbatches of several sizes with that of the full batch, on your own loss."
    f"{_PROBLEM}"
    "\b\n    anybatch verify train:problem",
)
def verify(
    problem: Target,
    size: Annotated[list[int] | None, typer.Option(min=1, help="A microbatch size to try. Can be repeated.")] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Use only this many of the examples.")] = None,
) -> bool:
    """Compare the gradient in microbatches with that of the full batch."""
    from anybatch.cli.problem import verify_problem

    return verify_problem(problem, microbatch_sizes=size or None, sample=sample)


@app.command(
    short_help="Compare your own loop or training step with the full batch.",
    help="Compare your own accumulation loop or training step with the gradient of the full batch, and name its "
    "mistake. Exits with status 1 if it differs."
    "\n\nThe function returns (candidate, loss, params, batch), and further arguments such as a key; or a dict of the "
    "arguments of anybatch.audit, for a training step. You can paste this example:"
    f"\n\n\b\n{AUDIT_EXAMPLE}\n\n"
    "\b\n    anybatch audit train:problem",
)
def audit(
    problem: Target,
    size: Annotated[int | None, typer.Option(min=1, help="The examples that it takes at a time, if known.")] = None,
    json: Annotated[pathlib.Path | None, typer.Option(help="Write the result to this JSON file.")] = None,
) -> bool:
    """Compare a loop or training step with the full batch."""
    from anybatch.cli.problem import audit_problem

    return audit_problem(problem, microbatch_size=size, json=json)


@app.command(short_help="Show versions, devices and missing packages.")
def doctor() -> bool:
    """Show versions, devices and memory, and which packages are missing."""
    from anybatch.cli.doctor import print_findings

    return print_findings()


@app.command(
    short_help="Run a script in several processes.",
    help="Run a script in several processes on this machine. Shows their output, and ends all of them when one fails."
    "\n\nPut options before the script, and the script's arguments after it. You can paste this example:"
    f"\n\n\b\n{_SCRIPT}\n\n"
    "\b\n    anybatch launch --processes 2 --devices-per-process 4 hello.py",
    context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
)
def launch(
    script: Annotated[str, typer.Argument(help="path/to/script.py, which calls anybatch.distributed.initialize().")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's arguments, its sys.argv[1:].")] = None,
    processes: Annotated[int, typer.Option(min=1, help="The number of processes.")] = 2,
    devices_per_process: Annotated[
        int | None, typer.Option(min=1, help="GPUs for each process. On a machine without GPUs: simulated CPU devices.")
    ] = None,
) -> int:
    """Run a script in several processes."""
    from anybatch.cli.launch import launch as launch_script

    return launch_script(script, arguments or [], processes=processes, devices_per_process=devices_per_process)


app.add_typer(learning.app, name="learn", short_help="Practise JAX's primitives: sixteen exercises.")
