"""`anybatch explain` and `anybatch verify`, and the problem that both are given: a loss, its parameters and a batch.

A user names the problem as `package.module:function`. `explain` prints its plan, and writes a page and a plot.
`verify` prints how every strategy's gradient compares with that of the full batch.
"""

import importlib
import importlib.util
import operator
import os
import pathlib
import shutil
import sys
import traceback
from collections.abc import Callable
from html import escape
from types import ModuleType
from typing import Any

from rich.console import Console

from anybatch import __version__
from anybatch.call.files import check_target, write_atomically
from anybatch.cli import EXAMPLE
from anybatch.errors import InputError
from anybatch.gradients.plan import explain
from anybatch.planning.plan import check_plot_path
from anybatch.verification.verify import verify

_REMEDY = (
    "Write a function that returns (loss, params, batch), or also further arguments of the loss, and name it as "
    "package.module:function:\n\n" + EXAMPLE
)

# Files in this folder are anybatch's own, not the user's.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def load_problem(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Imports a function, calls it, and returns the loss and its arguments: params, batch, and others such as a key.

    Args:
      target: "package.module:function", or "path/to/file.py:function". Modules in the current folder are found too.

    Raises:
      InputError: if the name is malformed, the import or the call fails, or the result has another form.
    """
    place, colon, name = target.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise InputError("A problem must be named as package.module:function", given=repr(target), remedy=_REMEDY)
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        found = f"It has {', '.join(sorted(functions)[:8]) or 'no functions'}."
        given = "no such name" if not hasattr(module, name) else f"{name} = {function!r}"
        raise InputError(f"{place} must have a function {name}", given=given, remedy=f"{found} {_REMEDY}")
    try:
        result = function()
    except Exception as error:
        raise InputError(
            f"{target} must return a problem when called without arguments",
            given=_last_line(error),
            remedy="Correct the function there.",
        ) from error
    return _checked(target, result)


def _checked(target: str, result: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    must, given = f"{target} must return (loss, params, batch)", ""
    if not isinstance(result, (tuple, list)):
        given = f"a {type(result).__name__}"
    elif len(result) < 3:
        given = f"{len(result)} values ({', '.join(type(each).__name__ for each in result)})"
    elif not callable(result[0]):
        must, given = f"{must}, and the loss must be a function", f"a {type(result[0]).__name__} as the loss"
    if given:
        raise InputError(must, given=given, remedy=_REMEDY)
    return result[0], tuple(result[1:])


def _module(place: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        return _from_file(pathlib.Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except InputError:
        raise
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{place}.".startswith(f"{missing}."):
            raise InputError(
                "The module of a problem must be in this folder, or installed",
                given=place if place == missing else f"{place}, but there is no {missing}",
                remedy=f"Run the command in the folder of {missing.split('.')[0]}, or pass the path: "
                "path/to/file.py:function.",
            ) from None
        remedy = "Correct the module there." if missing is None else "Install the missing module."
        raise InputError(f"{place} must import", given=_last_line(error), remedy=remedy) from error


def _from_file(path: pathlib.Path) -> ModuleType:
    if not path.is_file():
        raise InputError(
            "The file of a problem must exist",
            given=str(path),
            remedy="Pass its path, relative to this folder: path/to/file.py:function.",
        )
    sys.path.insert(0, str(path.parent.resolve()))  # as `python path/to/file.py` does
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _last_line(error: BaseException) -> str:
    """An error in the user's code as one line, with the file and line where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    of_user = [frame for frame in frames if not frame.filename.startswith(("<frozen", _PACKAGE))]
    place = f" at {of_user[-1].filename}:{of_user[-1].lineno}" if of_user else ""
    if isinstance(error, SyntaxError):
        place = f" at {error.filename}:{error.lineno}"
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}{place}"


# A page of a plan begins with this text. A file that does not is never overwritten.
_PAGE_START = '<!doctype html><meta charset="utf-8"><meta name="generator" content="anybatch explain '

# The plan brings its own style; the page follows the light or dark scheme of the reader.
_STYLE = """<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --color-background-primary: Canvas; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
</style>
"""


def explain_problem(target: str, *, html: pathlib.Path | None, plot: pathlib.Path | None, **options: Any) -> bool:
    """Prints the plan for a problem, and writes a page and a plot of it. Returns True if a candidate fits the memory.

    Raises:
      InputError: if the problem cannot be loaded, or a file must not be written. The files are checked first.
    """
    _check_files(html, plot)
    loss, args = load_problem(target)
    with Console(stderr=True).status("Planning") as status:
        plan = explain(loss, *args, progress=status.update, **options)
    print(plan.text(shutil.get_terminal_size().columns))
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
        if path is not None and not (folder := path.absolute().parent).is_dir():
            raise InputError("A file must be in a folder that exists", given=str(path), remedy=f"mkdir -p {folder}")
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


def verify_problem(target: str, **options: Any) -> bool:
    """Prints the comparison for a problem. Returns True if all gradients agree."""
    loss, args = load_problem(target)
    with Console(stderr=True).status("Comparing"):
        verification = verify(loss, *args, **options)
    print(verification.text(shutil.get_terminal_size().columns))
    return verification.ok
