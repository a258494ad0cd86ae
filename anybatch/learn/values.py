"""Answers against the reference: structure, shape, dtype, finite numbers, value; and how far an answer may lie off.

How far is derived from the data. The reference is computed again, in float64, from arguments that are moved by a
rounding error of float32. What that does to the result, `ROUNDINGS` times over, is what the arithmetic of a right
answer may do: sums of a thousand terms in any order stay within it, and a sum in bfloat16 does not.

How a failed check is put into words.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.learn.runner.wire import BrokenWire

EPSILON = float(np.finfo(np.float32).eps)
ROUNDINGS = 32


@dataclasses.dataclass(frozen=True)
class Answer:
    """A tree of arrays, as the learner's function returned it or as it is expected."""

    structure: str
    paths: tuple[str, ...]
    leaves: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, tree: Any) -> "Answer":
        """That of a tree of arrays and numbers."""
        leaves, structure = jax.tree.flatten_with_path(tree)
        paths = tuple(jax.tree_util.keystr(path) for path, _ in leaves)
        return cls(str(structure), paths, tuple(np.asarray(leaf) for _, leaf in leaves))

    @classmethod
    def read(cls, reply: Mapping[str, Any]) -> "Answer":
        """That of a reply."""
        answer = cls(str(reply["structure"]), tuple(map(str, reply["paths"])), tuple(reply["leaves"]))
        if len(answer.paths) != len(answer.leaves) or not all(isinstance(leaf, np.ndarray) for leaf in answer.leaves):
            raise ValueError("no answer")
        return answer


@dataclasses.dataclass(frozen=True)
class Expected:
    """The right answer, and how far another may lie from it, for each array."""

    tree: Any
    answer: Answer
    tolerances: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Difference:
    """What is wrong with an answer: the stage that noticed, in one line, and at length."""

    stage: str
    title: str
    text: str = ""


def in_double(args: Any) -> Any:
    """Arguments with every array of floating-point numbers in float64."""
    return jax.tree.map(lambda leaf: leaf.astype(np.float64) if _is_floating(leaf) else leaf, args)


def expected(reference: Callable[..., Any], args: Any, rng: np.random.Generator, draws: int = 3) -> Expected:
    """The right answer, with tolerances that follow from the data."""
    args = in_double(args)
    tree = reference(*args)
    right = Answer.of(tree)
    spread = [0.0] * len(right.leaves)
    for _ in range(draws):
        moved = Answer.of(reference(*jax.tree.map(lambda leaf: _moved(leaf, rng), args)))
        for index, (leaf, other) in enumerate(zip(right.leaves, moved.leaves, strict=True)):
            spread[index] = max(spread[index], _largest(leaf, other))
    tolerances = tuple(
        ROUNDINGS * (spread[index] + EPSILON * float(np.max(np.abs(leaf), initial=0.0)))
        if np.issubdtype(leaf.dtype, np.inexact)
        else 0.0
        for index, leaf in enumerate(right.leaves)
    )
    return Expected(tree, right, tolerances)


def compare(answer: Answer, right: Expected, dtypes: Any) -> Difference | None:
    """The first thing that is wrong with an answer, in the order in which one would look; None if nothing is."""
    if answer.structure != right.answer.structure:
        return Difference("structure", *_structures(answer, right.answer))
    wanted = _dtypes(dtypes, right)
    for path, leaf, other, dtype in zip(answer.paths, answer.leaves, right.answer.leaves, wanted, strict=True):
        if leaf.shape != other.shape:
            return Difference("shape", f"The answer{path} has shape {leaf.shape}; it must have {other.shape}.")
        if leaf.dtype.name != dtype:
            return Difference("shape", f"The answer{path} is {leaf.dtype.name}; it must be {dtype}.")
    for path, leaf in zip(answer.paths, answer.leaves, strict=True):
        if _is_floating(leaf) and not np.all(np.isfinite(leaf)):
            bad = int(np.sum(~np.isfinite(leaf)))
            kind = "NaN" if np.any(np.isnan(leaf)) else "infinite"
            return Difference("value", f"The answer{path} is {kind} in {bad} of {leaf.size} places.")
    return _values(answer, right)


def matches(answer: Answer, tree: Any, tolerances: Sequence[float]) -> bool:
    """Whether an answer is that tree, within the tolerances of the right one and the roundings of its own."""
    other = Answer.of(tree)
    if answer.structure != other.structure or any(
        leaf.shape != known.shape for leaf, known in zip(answer.leaves, other.leaves, strict=True)
    ):
        return False
    allowed = list(tolerances) if len(tolerances) == len(other.leaves) else [0.0] * len(other.leaves)
    return all(
        np.array_equal(np.isnan(leaf), np.isnan(known))
        and _largest(leaf, known) <= tolerance + 2 * ROUNDINGS * EPSILON * _size(known)
        for leaf, known, tolerance in zip(
            *(tuple(np.asarray(leaf, np.float64) for leaf in each.leaves) for each in (answer, other)),
            allowed,
            strict=True,
        )
    )


def _values(answer: Answer, right: Expected) -> Difference | None:
    rows, wrong, total = [], 0, 0
    for path, leaf, other, tolerance in zip(
        answer.paths, answer.leaves, right.answer.leaves, right.tolerances, strict=True
    ):
        off = np.abs(leaf.astype(np.float64) - other.astype(np.float64)) > tolerance
        wrong, total = wrong + int(np.sum(off)), total + off.size
        for index in list(zip(*np.nonzero(np.atleast_1d(off)), strict=True))[:6]:
            where = path + (f"[{', '.join(str(each) for each in index)}]" if leaf.ndim else "")
            values = [float(np.atleast_1d(each)[index]) for each in (leaf, other)]
            rows.append((where or "(the number)", *values, tolerance))
    if not rows:
        return None
    text = "\n".join(
        (
            f"{'':16} {'yours':>13} {'expected':>13} {'allowed off':>11}",
            *(f"{where:16} {mine:13.7g} {theirs:13.7g} {allowed:11.1g}" for where, mine, theirs, allowed in rows[:6]),
            *([f"... {wrong} of {total} numbers are off"] if wrong > 6 else []),
            *_ratio(answer, right),
        )
    )
    return Difference(
        "value", "The answer is wrong." if wrong == total else f"{wrong} of {total} numbers are off.", text
    )


def _ratio(answer: Answer, right: Expected) -> list[str]:
    """A sentence, if every number is off by the same factor."""
    mine, theirs = (
        np.concatenate([leaf.astype(np.float64).ravel() for leaf in each.leaves]) for each in (answer, right.answer)
    )
    counts = np.abs(theirs) > 1e-3 * np.max(np.abs(theirs), initial=0.0)
    if not np.any(counts):
        return []
    ratio = float(np.median(mine[counts] / theirs[counts]))
    allowed = 1e-4 * np.max(np.abs(theirs)) * max(abs(ratio), 1e-3)
    if not np.all(np.abs(mine - ratio * theirs) <= allowed) or ratio == 0:
        return ["Every number of the answer is 0."] if not np.any(mine) else []
    factor = f"{1 / ratio:.6g} times too small" if 0 < ratio < 1 else f"{ratio:.6g} times the expected one"
    return [f"Every number is {factor}."]


def _structures(answer: Answer, right: Answer) -> tuple[str, str]:
    mine, theirs = (each.structure.removeprefix("PyTreeDef(").removesuffix(")") for each in (answer, right))
    if mine == "None":
        wanted = "an array" if theirs == "*" else f"{theirs}, where * is an array"
        return "The function returns None: is a `return` missing?", f"It must return {wanted}."
    return "The answer has another structure than asked for.", f"yours:    {mine}\nexpected: {theirs}\n(* is an array)"


def _dtypes(dtypes: Any, right: Expected) -> list[str]:
    if isinstance(dtypes, str):
        return [dtypes] * len(right.answer.leaves)
    return [str(each) for each in jax.tree.leaves(dtypes)]


def _moved(leaf: Any, rng: np.random.Generator) -> Any:
    if _is_floating(leaf):
        return leaf * (1 + EPSILON * rng.uniform(-1, 1, leaf.shape))
    # A whole number is a count, even as a float.
    if type(leaf) is float and not leaf.is_integer():
        return leaf * (1 + EPSILON * float(rng.uniform(-1, 1)))
    return leaf


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic)) and (leaf.dtype.kind == "f" or leaf.dtype.name == "bfloat16")


def _largest(one: np.ndarray, other: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # two infinities that are the same
        difference = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return float(np.max(difference[~np.isnan(difference)], initial=0.0))


def _size(leaf: np.ndarray) -> float:
    return float(np.max(np.abs(leaf[np.isfinite(leaf)]), initial=0.0))


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
