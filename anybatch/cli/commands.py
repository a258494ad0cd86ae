"""What the commands `explain`, `verify` and `doctor` print."""

import contextlib
import operator
import os
import pathlib
from collections.abc import Callable, Iterator
from html import escape as escape_html
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from anybatch import __version__
from anybatch.call.files import check_target, write_atomically
from anybatch.cli import doctor as examination
from anybatch.cli.problem import load_problem
from anybatch.errors import InputError
from anybatch.gradients.plan import explain as explain_loss
from anybatch.planning.plan import check_plot_path
from anybatch.verification.verify import verify as verify_loss


def explain(target: str, *, html: pathlib.Path | None, plot: pathlib.Path | None, **options: Any) -> bool:
    """Prints the plan of a problem. Returns whether anything fits."""
    for path in (html, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(
                "A file is written into a folder that is there",
                given=str(path),
                remedy=f"mkdir -p {path.absolute().parent}",
            )
    if html is not None and plot is not None and os.path.realpath(html) == os.path.realpath(plot):
        raise InputError(
            "The page and the plot must be two files",
            given=f"--html {html} and --plot {plot}",
            remedy="For example: --html plan.html --plot plan.png",
        )
    if html is not None:
        _check_page(html)
    if plot is not None:
        check_plot_path(plot, given=f"--plot {plot}")
    loss, params, batch = load_problem(target)
    with _progress("Planning") as notify:
        plan = explain_loss(loss, params, batch, progress=notify, **options)
    print(plan)
    if plot is not None:
        plan.plot(str(plot))
    if html is not None:
        title = f'{_PAGE}{__version__}"><title>{escape_html(target)}</title>'
        content = f"{title}{_STYLE}{plan._repr_html_()}".encode("utf-8", errors="replace")
        must = "The page needs a file that can be written"
        write_atomically(_check_page(html), content, must=must, given=f"--html {html}")
    return plan.chosen is not None


def _check_page(path: pathlib.Path) -> pathlib.Path:
    """The file that the page of a plan is written to; it replaces no other file than such a page."""
    must = "A page replaces no file but one of a plan of anybatch"
    is_ours = operator.methodcaller("startswith", _PAGE.encode())
    return check_target(path, must=must, given=f"--html {path}", is_ours=is_ours)


def verify(target: str, **options: Any) -> bool:
    """Prints the comparison of the routes of a problem. Returns whether they agree."""
    loss, params, batch = load_problem(target)
    with _progress("Comparing"):
        verification = verify_loss(loss, params, batch, **options)
    print(verification)
    return verification.ok


def doctor() -> bool:
    """Prints what this machine has. Returns whether nothing is missing."""
    findings = examination.examine()
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        mark = "[green]ok[/green]" if finding.is_well else "[red]--[/red]"
        remedy = f"\n[bold]{escape(finding.remedy)}[/bold]" if finding.remedy else ""
        table.add_row(mark, finding.subject, escape(finding.text) + remedy)
    Console(soft_wrap=True).print(table)
    return all(finding.is_well for finding in findings)


@contextlib.contextmanager
def _progress(task: str) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done, where the output is a terminal."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        number = progress.add_task(task, total=None)
        yield lambda text: progress.update(number, description=text)


# How the page of a plan begins, by which it is known again.
_PAGE = '<!doctype html><meta charset="utf-8"><meta name="generator" content="anybatch explain '

_STYLE = """<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
</style>"""
