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
