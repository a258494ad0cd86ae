"""What the commands `explain`, `verify` and `doctor` print."""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from anybatch import doctor as examination
from anybatch.errors import InputError
from anybatch.plan import explain as explain_loss
from anybatch.problem import load_problem
from anybatch.verify import verify as verify_loss


def explain(target: str, *, html: pathlib.Path | None, plot: pathlib.Path | None, **options: Any) -> bool:
    """Prints the plan of a problem. Returns whether anything fits."""
    for path in (html, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(
                "A file is written into a folder that is there",
                given=str(path),
                remedy=f"mkdir -p {path.absolute().parent}",
            )
    loss, params, batch = load_problem(target)
    with _progress("Planning") as notify:
        plan = explain_loss(loss, params, batch, progress=notify, **options)
    print(plan)
    if plot is not None:
        plan.plot(str(plot))
    if html is not None:
        html.write_text(f'<!doctype html><meta charset="utf-8"><title>{target}</title>{_STYLE}{plan._repr_html_()}')
    return plan.chosen is not None


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


_STYLE = """<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
</style>"""
