"""How a failed check is put into words."""

from collections.abc import Callable, Mapping
from typing import Any

from anybatch.learn.runner.wire import BrokenWire

EXTRAS = ("flax", "optax")  # packages that an exercise may need, and that anybatch does without


class Failed(Exception):
    """The first thing that is wrong."""

    def __init__(self, stage: str, title: str, text: str = "", **more: Any) -> None:
        self.verdict = {"stage": stage, "title": title, "text": text, **more}


class Refused(Failed):
    """An exception of the learner's code, which may be what is asked for."""

    def __init__(self, error: Mapping[str, Any], *rest: Any, **more: Any) -> None:
        super().__init__(*rest, **more)
        self.error = error


# What to do about errors of JAX that nobody understands at first: a part of the name or the message, and plain words.
_TRACED = "Under jax.jit, which every check uses, an array has a shape and a dtype, and no values yet."
_WAYS_OUT = {
    "TracerBoolConversionError": f"{_TRACED} `if`, `while`, `and` and `assert` cannot look at it: use "
    "jnp.where(condition, a, b), or decide by shapes and Python numbers.",
    "TracerArrayConversionError": f"{_TRACED} numpy cannot compute with it: use jax.numpy, jnp for np.",
    "TracerIntegerConversionError": f"{_TRACED} It cannot be an index of a list, or a size.",
    "ConcretizationTypeError": f"{_TRACED} int(), float() and .item() cannot take one out: go on with the array, or "
    "take sizes from .shape and from Python numbers.",
    "Disable jit is not supported": "The file turns jax.jit off; a check has to trace your function. Take "
    "jax_disable_jit out of the file.",
}


def failure(stage: str, error: Mapping[str, Any], note: str = "") -> Any:
    """What became of an exception in the learner's file."""
    where = {"line": error["line"], "source_line": error["source_line"]}
    if error["type"] == "NotImplementedError":
        return Refused(error, stage, "Not written yet.", error["message"], started=False, **where)
    if error["type"] == "SystemExit":
        text = "A function ends with `return`; the process is not its own."
        return Refused(error, stage, f"The file calls sys.exit({error['message']}).", text, **where)
    title, text = title_of(f"{error['type']}: {error['message']}".strip())
    if error["type"] == "ModuleNotFoundError" and any(name in error["message"] for name in EXTRAS):
        text = 'This exercise needs a package that is not installed: pip install "anybatch[learn]"'
    if error["type"] == "SyntaxError" and error["source_line"] and error["column"]:
        text = f"{error['source_line']}\n{' ' * (error['column'] - 1)}^"
    if "MemoryError" in error["bases"] or "RESOURCE_EXHAUSTED" in error["message"]:
        limit = "A check has only so much memory; `anybatch learn doctor` says how much."
        text = "\n".join(filter(None, (limit, text)))
    if way_out := next((words for name, words in _WAYS_OUT.items() if name in title), None):
        text = f"{way_out}\n{text}".strip()
    return Refused(error, stage, title, "\n".join(filter(None, (f"for {note}" if note else "", text))), **where)


def read(reader: Callable[..., Any], *record: Any) -> Any:
    """What another process reported, if it is what it should be."""
    try:
        return reader(*record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise BrokenWire(f"{type(error).__name__}: {error}") from None


def title_of(text: str) -> tuple[str, str]:
    """A title of one line, and the rest."""
    first, _, rest = text.strip().partition("\n")
    return first, rest.strip("\n")


def counted(number: int, one: str, many: str) -> str:
    """A number of things: "1 case", "2 cases"."""
    return f"{number} {one if number == 1 else many}"
