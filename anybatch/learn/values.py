"""Compares an answer with the reference (structure, shape, dtype, finite numbers, value), and words the failures.

The tolerance follows from the data. The reference is computed again, in float64, from arguments that are changed by a
rounding error of float32. The tolerance is `ROUNDINGS` times the change of its result: a float32 sum of a thousand
terms in any order stays within it, and a sum in bfloat16 does not.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.errors import install
from anybatch.learn.check import MOST_NUMBERS, ShownArray

EPSILON = float(np.finfo(np.float32).eps)
ROUNDINGS = 32


@dataclasses.dataclass(frozen=True)
class Answer:
    """A tree of arrays: what the learner's function returned, or the right answer."""

    structure: str
    paths: tuple[str, ...]
    leaves: tuple[np.ndarray, ...]

    @classmethod
    def of(cls, tree: Any) -> "Answer":
        """The answer for a tree of arrays and numbers."""
        leaves, structure = jax.tree.flatten_with_path(tree)
        paths = tuple(jax.tree_util.keystr(path) for path, _ in leaves)
        return cls(str(structure), paths, tuple(np.asarray(leaf) for _, leaf in leaves))

    @classmethod
    def read(cls, reply: Mapping[str, Any]) -> "Answer":
        """The answer in a reply of a learner's process."""
        return cls(reply["structure"], tuple(reply["paths"]), tuple(reply["leaves"]))


@dataclasses.dataclass(frozen=True)
class Expected:
    """The right answer, and the tolerance for each of its arrays."""

    tree: Any
    answer: Answer
    tolerances: tuple[float, ...]


class Failed(Exception):
    """A stage failed: its name, a title of one line, the details, and further fields of the verdict.

    `error` describes the exception that the learner's code raised, if it did: a `Raises` may require it.
    """

    def __init__(
        self, stage: str, title: str, text: str = "", error: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        self.stage, self.title, self.text, self.error = stage, title, text, error
        self.verdict = {"stage": stage, "title": title, "text": text, **more}


def in_double(args: Any) -> Any:
    """The arguments with every floating-point array in float64."""
    return jax.tree.map(lambda leaf: leaf.astype(np.float64) if _is_floating(leaf) else leaf, args)


def expected(reference: Callable[..., Any], args: Any, rng: np.random.Generator, draws: int = 3) -> Expected:
    """The right answer, with tolerances that follow from the data; see the module's docstring."""
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


def compare(answer: Answer, right: Expected, dtypes: Any) -> Failed | None:
    """The first difference from the right answer: structure, shape, dtype, finite numbers, value; None if none."""
    if answer.structure != right.answer.structure:
        return Failed("structure", *_structures(answer, right.answer))
    wanted = _dtypes(dtypes, right)
    for path, leaf, other, dtype in zip(answer.paths, answer.leaves, right.answer.leaves, wanted, strict=True):
        if leaf.shape != other.shape:
            return Failed("shape", f"The answer{path} has shape {leaf.shape}; it must have {other.shape}.")
        if leaf.dtype.name != dtype:
            return Failed("shape", f"The answer{path} is {leaf.dtype.name}; it must be {dtype}.")
    for path, leaf in zip(answer.paths, answer.leaves, strict=True):
        if _is_floating(leaf) and not np.all(np.isfinite(leaf)):
            bad = int(np.sum(~np.isfinite(leaf)))
            kind = "NaN" if np.any(np.isnan(leaf)) else "infinite"
            return Failed("value", f"The answer{path} is {kind} in {bad} of {leaf.size} places.")
    return _values(answer, right)


def shown(answer: Answer, right: Expected) -> tuple[ShownArray, ...]:
    """The numbers of an answer beside the expected ones. Both must have the same structure and shapes."""

    def first(leaf: np.ndarray) -> tuple[float, ...]:
        return tuple(leaf.ravel()[:MOST_NUMBERS].astype(np.float64).tolist())

    each = zip(answer.paths, answer.leaves, right.answer.leaves, right.tolerances, strict=True)
    return tuple(
        ShownArray(path, tuple(leaf.shape), first(leaf), first(other), tolerance, max(0, leaf.size - MOST_NUMBERS))
        for path, leaf, other, tolerance in each
    )


def matches(answer: Answer, tree: Any, tolerances: Sequence[float]) -> bool:
    """Whether an answer equals a tree, within the right answer's tolerances plus the tree's own rounding."""
    other = Answer.of(tree)
    if answer.structure != other.structure:
        return False
    if len(tolerances) != len(other.leaves):
        tolerances = [0.0] * len(other.leaves)
    for mine, known, tolerance in zip(answer.leaves, other.leaves, tolerances, strict=True):
        leaf, theirs = mine.astype(np.float64), known.astype(np.float64)
        allowed = tolerance + 2 * ROUNDINGS * EPSILON * float(np.max(np.abs(theirs[np.isfinite(theirs)]), initial=0.0))
        if leaf.shape != theirs.shape or not np.array_equal(np.isnan(leaf), np.isnan(theirs)):
            return False
        if _largest(leaf, theirs) > allowed:
            return False
    return True


def _values(answer: Answer, right: Expected) -> Failed | None:
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
    return Failed("value", "The answer is wrong." if wrong == total else f"{wrong} of {total} numbers are off.", text)


def _ratio(answer: Answer, right: Expected) -> list[str]:
    """A sentence that says so if every number is wrong by the same factor, or 0."""
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
    return "The answer has the wrong structure.", f"yours:    {mine}\nexpected: {theirs}\n(* is an array)"


def _dtypes(dtypes: Any, right: Expected) -> list[str]:
    if isinstance(dtypes, str):
        return [dtypes] * len(right.answer.leaves)
    return [str(each) for each in jax.tree.leaves(dtypes)]


def _moved(leaf: Any, rng: np.random.Generator) -> Any:
    if _is_floating(leaf):
        return leaf * (1 + EPSILON * rng.uniform(-1, 1, leaf.shape))
    # An integer is a count, even if it is a float.
    if type(leaf) is float and not leaf.is_integer():
        return leaf * (1 + EPSILON * float(rng.uniform(-1, 1)))
    return leaf


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic)) and (leaf.dtype.kind == "f" or leaf.dtype.name == "bfloat16")


def _largest(one: np.ndarray, other: np.ndarray) -> float:
    with np.errstate(invalid="ignore"):  # inf - inf
        difference = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return float(np.max(difference[~np.isnan(difference)], initial=0.0))


EXTRAS = ("flax", "optax")  # packages that an exercise may need and anybatch does not


# Part of the title of an error of JAX -> what it means and how to fix it.
_TRACED = "Under jax.jit, which every check uses, an array has a shape and a dtype, but no values yet."
_WAYS_OUT = {
    "TracerBoolConversionError": f"{_TRACED} `if`, `while`, `and` and `assert` need a value: use "
    "jnp.where(condition, a, b), or decide by shapes and Python numbers.",
    "TracerArrayConversionError": f"{_TRACED} numpy cannot compute with it: use jax.numpy (jnp) instead of np.",
    "TracerIntegerConversionError": f"{_TRACED} It cannot be an index of a list, or a size.",
    "ConcretizationTypeError": f"{_TRACED} int(), float() and .item() need a value: keep computing with the array, or "
    "take sizes from .shape and from Python numbers.",
    "Disable jit is not supported": "The file turns jax.jit off, but a check has to trace your function. Remove "
    "jax_disable_jit from the file.",
}


def failure(stage: str, error: Mapping[str, Any], note: str = "") -> Failed:
    """The failure for an exception in the learner's file; `error` describes it in plain data."""
    where = {"line": error["line"], "source_line": error["source_line"]}
    if error["type"] == "NotImplementedError":
        return Failed(stage, "Not written yet.", error["message"], error, started=False, **where)
    if error["type"] == "SystemExit":
        text = "End a function with `return` instead; sys.exit ends the process."
        return Failed(stage, f"The file calls sys.exit({error['message']}).", text, error, **where)
    title, text = title_of(f"{error['type']}: {error['message']}".strip())
    if error["type"] == "ModuleNotFoundError" and any(name in error["message"] for name in EXTRAS):
        text = f"This exercise needs a package that is not installed: {install('learn')}"
    if error["type"] == "SyntaxError" and error["source_line"] and error["column"]:
        text = f"{error['source_line']}\n{' ' * (error['column'] - 1)}^"
    if "MemoryError" in error["bases"] or "RESOURCE_EXHAUSTED" in error["message"]:
        limit = "A check has limited memory; `anybatch learn doctor` shows how much."
        text = lines(limit, text)
    if way_out := next((words for name, words in _WAYS_OUT.items() if name in title), None):
        text = f"{way_out}\n{text}".strip()
    return Failed(stage, title, lines(f"for {note}" if note else "", text), error, **where)


def title_of(text: str) -> tuple[str, str]:
    """Splits a text into its first line, the title, and the rest."""
    first, _, rest = text.strip().partition("\n")
    return first, rest.strip("\n")


def lines(*texts: str) -> str:
    """The texts that are not empty, each on its own lines."""
    return "\n".join(filter(None, texts))


def counted(number: int, one: str, many: str) -> str:
    """A number with its noun: "1 case", "2 cases"."""
    return f"{number} {one if number == 1 else many}"
