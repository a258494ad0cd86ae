"""The arguments of the command line; what the commands do stands elsewhere."""

from typing import Annotated

import typer

import anybatch

app = typer.Typer(
    help="The exact gradient of any batch, on the memory you have.", no_args_is_help=True, add_completion=False
)


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


@app.command()
def demo(
    examples: Annotated[int, typer.Option(min=2, help="The number of examples in the batch.")] = 8192,
    memory: Annotated[int, typer.Option(min=1, help="The memory to stay within, in MiB.")] = 32,
) -> None:
    """Run the four recipes, then one gradient at several microbatch sizes: memory, time, difference."""
    from anybatch import demo as demonstration

    try:
        demonstration.run(examples=examples, memory_mib=memory)
    except ImportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
