"""`anybatch explain`: prints the plan for a user's loss, and writes its page and its plot."""

import operator
import os
import pathlib
from html import escape
from typing import Any

from anybatch import __version__
from anybatch.call.files import check_target, write_atomically
from anybatch.cli.problem import load_problem
from anybatch.cli.spinner import spinner
from anybatch.errors import InputError
from anybatch.gradients.plan import explain
from anybatch.planning.plan import check_plot_path

# A page of a plan begins with this text. A file that does not is never overwritten.
_PAGE_START = '<!doctype html><meta charset="utf-8"><meta name="generator" content="anybatch explain '

_STYLE = """<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
</style>"""


def explain_problem(target: str, *, html: pathlib.Path | None, plot: pathlib.Path | None, **options: Any) -> bool:
    """Prints the plan for a problem. Returns True if a candidate fits the memory.

    Args:
      target: the problem, as `load_problem` takes it.
      html: the file for a page with the table and the plot, or None.
      plot: the file for the plot alone, or None.
      **options: of `anybatch.explain`.

    Raises:
      InputError: if the problem cannot be loaded, or a file must not be written. The files are checked first.
    """
    _check_files(html, plot)
    loss, params, batch = load_problem(target)
    with spinner("Planning") as update:
        plan = explain(loss, params, batch, progress=update, **options)
    print(plan)
    if plot is not None:
        plan.plot(str(plot))
    if html is not None:
        title = f'{_PAGE_START}{__version__}"><title>{escape(target)}</title>'
        content = f"{title}{_STYLE}{plan._repr_html_()}".encode("utf-8", errors="replace")
        must = "The page needs a file that can be written"
        write_atomically(_check_page(html), content, must=must, given=f"--html {html}")
    return plan.chosen is not None


def _check_files(html: pathlib.Path | None, plot: pathlib.Path | None) -> None:
    for path in (html, plot):
        if path is not None and not path.absolute().parent.is_dir():
            raise InputError(
                "A file must be in a folder that exists",
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


def _check_page(path: pathlib.Path) -> pathlib.Path:
    """The file to write the page to, links followed. Raises if another kind of file is there."""
    must = "A page replaces no file but one of a plan of anybatch"
    is_ours = operator.methodcaller("startswith", _PAGE_START.encode())
    return check_target(path, must=must, given=f"--html {path}", is_ours=is_ours)
