"""Loads the problem (a loss, its parameters and a batch) that a user names as `package.module:function`."""

import importlib
import importlib.util
import os
import pathlib
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from anybatch.errors import InputError

EXAMPLE = """\
# train.py
import jax.numpy as jnp
def problem():
    loss = lambda w, batch: jnp.mean(jnp.tanh(batch @ w) ** 2)
    return loss, jnp.ones((256, 1024)), jnp.ones((4096, 256))"""

_REMEDY = "Write a function that returns (loss, params, batch), and name it as package.module:function:\n\n" + EXAMPLE

# Files in this folder are anybatch's own, not the user's.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def load_problem(target: str) -> tuple[Callable[..., Any], Any, Any]:
    """Imports a function, calls it, and returns its result: (loss, params, batch).

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
        found = f"It has {', '.join(sorted(functions)[:8])}." if functions else "It has no functions."
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


def _checked(target: str, result: Any) -> tuple[Callable[..., Any], Any, Any]:
    must = f"{target} must return (loss, params, batch)"
    if not isinstance(result, (tuple, list)):
        raise InputError(must, given=f"a {type(result).__name__}", remedy=_REMEDY)
    if len(result) != 3:
        kinds = ", ".join(type(each).__name__ for each in result)
        raise InputError(must, given=f"{len(result)} values ({kinds})", remedy=_REMEDY)
    loss, params, batch = result
    if not callable(loss):
        raise InputError(
            f"{must}, and the loss must be a function", given=f"a {type(loss).__name__} as the loss", remedy=_REMEDY
        )
    return loss, params, batch


def _module(place: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        if place.endswith(".py"):
            return _from_file(pathlib.Path(place))
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise InputError(
                "The module of a problem must be in this folder, or installed",
                given=place if place == error.name else f"{place}, but there is no {error.name}",
                remedy=f"Run the command in the folder of {error.name.split('.')[0]}, or pass the path: "
                "path/to/file.py:function.",
            ) from None
        raise InputError(
            f"{place} must import", given=_last_line(error), remedy="Install the missing module."
        ) from error
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{place} must import", given=_last_line(error), remedy="Correct the module there.") from error


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
