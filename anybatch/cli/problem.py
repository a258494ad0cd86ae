"""`anybatch explain`, `verify` and `audit`, and the problem that they are given: a loss, its parameters and a batch.

A user names the problem as `package.module:function`. `explain` prints its plan, and writes a page and a plot.
`verify` prints how every strategy's gradient compares with that of the full batch. `audit` does so for a loop or a
training step of the user, which is part of the problem.
"""

import importlib
import importlib.util
import inspect
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
from anybatch.auditing.audit import audit
from anybatch.call.files import check_target, write_atomically
from anybatch.cli import AUDIT_EXAMPLE, EXAMPLE
from anybatch.errors import InputError
from anybatch.gradients.plan import explain
from anybatch.planning.plan import check_plot_path
from anybatch.verification.verify import verify

_REMEDY = (
    "Write a function that returns (loss, params, batch), or also further arguments of the loss, and name it as "
    "package.module:function:\n\n" + EXAMPLE
)

_AUDIT_REMEDY = (
    "Write a function that returns (candidate, loss, params, batch), or also further arguments of both, or a dict of "
    "the arguments of anybatch.audit:\n\n" + AUDIT_EXAMPLE
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
    return _checked(target, _result(target, _REMEDY))


def load_audit(target: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same for `audit`: returns its arguments by position, and by name.

    Raises:
      InputError: as for `load_problem`.
    """
    result = _result(target, _AUDIT_REMEDY)
    names = ("candidate", "loss", "params", "batch")
    must, given = f"{target} must return (candidate, loss, params, batch), or a dict of the arguments of audit", ""
    if isinstance(result, dict):
        missing = [name for name in names if name not in result]
        given = f"a dict without {', '.join(missing)}" if missing else ""
    elif not isinstance(result, (tuple, list)) or len(result) < 4:
        number = f" of {len(result)}" if isinstance(result, (tuple, list)) else ""
        given = f"a {type(result).__name__}{number}"
    if given:
        raise InputError(must, given=given, remedy=_AUDIT_REMEDY)
    if not isinstance(result, dict):
        return tuple(result), {}
    options = {name: value for name, value in result.items() if name not in (*names, "args")}
    known = set(inspect.signature(audit).parameters) - {*names, "args"}
    if unknown := sorted(set(options) - known):
        given = f"a dict with {', '.join(unknown)}"
        raise InputError(must, given=given, remedy=f"Its options are {', '.join(sorted(known))}.")
    return (*(result[name] for name in names), *result.get("args", ())), options


def _result(target: str, remedy: str) -> Any:
    """What the function returns that a target names."""
    place, colon, name = target.rpartition(":")
    if not (place and colon and name.isidentifier()):
        raise InputError("A problem must be named as package.module:function", given=repr(target), remedy=remedy)
    module = _module(place)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        found = f"It has {', '.join(sorted(functions)[:8]) or 'no functions'}."
        given = "no such name" if not hasattr(module, name) else f"{name} = {function!r}"
        raise InputError(f"{place} must have a function {name}", given=given, remedy=f"{found} {remedy}")
    try:
        return function()
    except Exception as error:
        raise InputError(
            f"{target} must return a problem when called without arguments",
            given=_last_line(error),
            remedy="Correct the function there.",
        ) from error


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
    plan = explain(loss, *args, progress=sys.stderr.isatty(), **options)
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
        _check_folder(path)
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


def _check_folder(path: pathlib.Path | None) -> None:
    if path is not None and not (folder := path.absolute().parent).is_dir():
        raise InputError("A file must be in a folder that exists", given=str(path), remedy=f"mkdir -p {folder}")


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


def audit_problem(target: str, *, microbatch_size: int | None, json: pathlib.Path | None) -> bool:
    """Prints the audit of a problem, and writes it as JSON. Returns True if the candidate is right.

    Raises:
      InputError: if the problem cannot be loaded, or the file must not be written. The file is checked first.
    """
    if json is not None:
        _check_folder(json)
        _check_json(json)
    args, options = load_audit(target)
    if microbatch_size is not None:
        options["microbatch_size"] = microbatch_size
    with Console(stderr=True).status("Comparing"):
        result = audit(*args, **options)
    print(result.text(shutil.get_terminal_size().columns))
    if json is not None:
        must = "The result needs a file that can be written"
        write_atomically(_check_json(json), result.to_json().encode() + b"\n", must=must, given=f"--json {json}")
    return result.same


def _check_json(path: pathlib.Path) -> pathlib.Path:
    """The file to write the result to, links followed. Raises if another kind of file is there."""
    must = "A result replaces no file but one of an audit"
    is_ours = operator.methodcaller("startswith", b'{\n  "same": ')
    return check_target(path, must=must, given=f"--json {path}", is_ours=is_ours)
