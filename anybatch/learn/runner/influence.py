"""Finds out whether an answer depends on given operations, such as a scan.

A program can have a scan and not use it: `0 * scan(...)`, `jnp.where(jnp.isnan(w), scan(...), rest)`, or a scan over
something else. So the program is evaluated for two sets of arguments side by side. Every selected operation returns the
first evaluation's result in both. If the two answers still differ, part of the answer bypasses the operation.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.jaxprs import avals, interpreter
from anybatch.learn.check import MOVES


class Pair(NamedTuple):
    """A value in both evaluations. If it cannot differ between them, both fields are the same object.

    `made` is True if the value was computed from the changed arguments by more than moving or element-wise operations.
    """

    one: Any
    other: Any
    made: bool = False

    @property
    def is_same(self) -> bool:
        return self.other is self.one


def responses(
    jaxpr: Any, selects: Sequence[Mapping[str, Any]], ones: Sequence[Any], others: Sequence[Any], *, distorts: bool
) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
    """Runs a program for some arguments, and for others while selected operations keep their results.

    Args:
      jaxpr: the program, closed over its constants.
      selects: which operations to hold: those that match one of these dicts. See `Program.response` in
        `anybatch.learn.check` for the keys.
      ones: the arguments.
      others: other arguments, with the same shapes and dtypes.
      distorts: whether to distort the results of the selected operations instead of holding them.

    Returns:
      The arrays of both answers, or None if the answer cannot depend on what differs.
    """
    same = [
        np.array_equal(one, other, equal_nan=one.dtype.kind == "f") for one, other in zip(ones, others, strict=True)
    ]
    least = min((one.size for one, is_same in zip(ones, same, strict=True) if not is_same), default=0)
    how = _How(selects, distorts, least)
    reached: list[bool] = []

    def both(ones: Sequence[Any], others: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = [Pair(a, a if is_same else b) for a, b, is_same in zip(ones, others, same, strict=True)]
        found = how.run(jaxpr, pairs, "")
        reached.extend(not pair.is_same for pair in found)
        return [pair.one for pair in found], [pair.other for pair in found]

    traced = jax.jit(both).trace(list(ones), list(others))
    if not any(reached):
        return None
    before, held = traced.lower().compile()(list(ones), list(others))
    return [np.asarray(each) for each in before], [np.asarray(each) for each in held]


class _How:
    def __init__(self, selects: Sequence[Mapping[str, Any]], distorts: bool, least: int) -> None:
        self._selects, self._distorts = selects, distorts
        self._is_given = any(select.get("given") for select in selects)
        self._least = least  # the size of the smallest array that differs

    def run(self, jaxpr: Any, pairs: Sequence[Pair], stack: str) -> list[Pair]:
        """Evaluates a program on pairs."""

        def compute(equation: Any, operands: list[Any]) -> Sequence[Any]:
            return self._compute(
                equation, [_pair(*each) for each in zip(operands, equation.invars, strict=True)], stack
            )

        outputs = interpreter.interpret(jaxpr, list(pairs), compute)
        return [_pair(*each) for each in zip(outputs, interpreter.opened(jaxpr).outvars, strict=True)]

    def _compute(self, equation: Any, pairs: list[Pair], stack: str) -> list[Pair]:
        if not equation.outvars and not any(avals.is_ref(pair.one) for pair in pairs):
            return []  # a print, which was shown when the program itself ran
        stack = _inner(stack, equation)
        is_same = all(pair.is_same for pair in pairs)
        is_selected = self._is_selected(equation, stack)
        if not is_selected and self._holds_selected(equation, stack) and (self._distorts or not is_same):
            if (nested := _nested(equation)) is not None:
                return nested(self, equation, pairs, stack)
        if not is_selected and self._is_given and not is_same and _nested(equation) is _How.call:
            return self.call(equation, pairs, stack)
        ones = interpreter.evaluate(equation, [pair.one for pair in pairs])
        # Each evaluation needs its own mutable arrays.
        is_same = is_same and not any(avals.is_ref(one) for one in ones)
        written = [pair for pair in pairs if avals.is_ref(pair.one)] if is_selected else []
        if is_selected and not self._distorts:
            if self._is_given and any(pair.made for pair in pairs):
                others = interpreter.evaluate(equation, [pair.other if pair.made else pair.one for pair in pairs])
                return [Pair(one, other, True) for one, other in zip(ones, others, strict=True)]
            for pair in written:
                pair.other[...] = pair.one[...]
            return [Pair(one, one) for one in ones]
        others = ones if is_same else interpreter.evaluate(equation, [pair.other for pair in pairs])
        if is_selected:
            others = [_distorted(other) for other in others]
            for pair in written:
                pair.other[...] = _distorted(pair.other[...])
        made = self._is_given and not is_same and self._makes(equation, pairs)
        return [Pair(one, other, made) for one, other in zip(ones, others, strict=True)]

    def _makes(self, equation: Any, pairs: Sequence[Pair]) -> bool:
        """Whether an operation does more with the changed arguments than move them or change each row by itself."""
        if any(pair.made for pair in pairs):
            return True
        if equation.primitive.name in MOVES:
            return False
        given = [pair.one for pair in pairs if not pair.is_same]
        results = [each.aval for each in equation.outvars]
        if interpreter.jaxprs_in(equation) or min((each.size for each in results), default=0) < self._least:
            return True
        params = equation.params
        if equation.primitive.name.startswith("reduce_") and params.get("axes"):
            return 0 in params["axes"]
        return any(name in params for name in _MIX) or any(a.size != b.size for a in given for b in results)

    def _carried(self, pair: Pair) -> bool:
        """Whether a loop's carry may be `made`, in a later iteration if not in the first."""
        return pair.made or getattr(pair.one, "size", 1) < self._least

    def _is_selected(self, equation: Any, stack: str) -> bool:
        return any(_fits(select, equation, stack) for select in self._selects)

    def _holds_selected(self, equation: Any, stack: str) -> bool:
        return any(self._is_selected(each, within) for each, within in _nested_in(equation, stack))

    def call(self, equation: Any, pairs: list[Pair], stack: str) -> list[Pair]:
        inner = next(equation.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in equation.params)
        return self.run(inner, pairs, stack)

    def scan(self, equation: Any, pairs: list[Pair], stack: str) -> list[Pair]:
        params = equation.params
        consts, carry = interpreter.scan_counts(params)

        def turn(carried: Any, slices: Any) -> Any:
            found = self.run(params["jaxpr"], [*pairs[:consts], *_pairs((*carried, *slices), flags)], stack)
            made[:] = [pair.made for pair in found]
            return [pair[:2] for pair in found[:carry]], [pair[:2] for pair in found[carry:]]

        begin, over = pairs[consts:][:carry], pairs[consts + carry :]
        flags = [*map(self._carried, begin), *(pair.made for pair in over)]
        made: list[bool] = []
        first, each = ([pair[:2] for pair in part] for part in (begin, over))
        last, stacked = jax.lax.scan(turn, first, each, length=params["length"], reverse=params["reverse"])
        return _pairs((*last, *stacked), made)

    def loop(self, equation: Any, pairs: list[Pair], stack: str) -> list[Pair]:
        """A while loop. Both evaluations take as many iterations as the first one."""
        params = equation.params
        ends = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        asked, given, begin = pairs[: ends[0]], pairs[ends[0] : ends[1]], pairs[ends[1] :]

        def goes_on(carried: Any) -> Any:
            return interpreter.interpret(
                params["cond_jaxpr"], [*(p.one for p in asked), *(one for one, _ in carried)], interpreter.evaluate
            )[0]

        def turn(carried: Any) -> Any:
            found = self.run(params["body_jaxpr"], [*given, *_pairs(carried, flags)], stack)
            return [pair[:2] for pair in found]

        flags = [self._carried(pair) for pair in begin]
        last = jax.lax.while_loop(goes_on, turn, [pair[:2] for pair in begin])
        return _pairs(last, flags)

    def branches(self, equation: Any, pairs: list[Pair], stack: str) -> list[Pair]:
        """A cond. Both evaluations take the first one's branch."""

        def taken(branch: Any) -> Callable[..., Any]:
            def run(given: Any) -> Any:
                found = self.run(branch, _pairs(given, [pair.made for pair in pairs[1:]]), stack)
                made.append([pair.made for pair in found])
                return [pair[:2] for pair in found]

            return run

        made: list[list[bool]] = []
        given = [pair[:2] for pair in pairs[1:]]
        found = jax.lax.switch(pairs[0].one, [taken(branch) for branch in equation.params["branches"]], given)
        return _pairs(found, [any(flags) for flags in zip(*made, strict=True)])

    def devices(self, equation: Any, pairs: list[Pair], stack: str) -> list[Pair]:
        """A shard_map."""
        inside: list[tuple[bool, bool]] = []
        specs, results = equation.params["in_specs"], equation.params["out_specs"]
        places = [index for index, pair in enumerate(pairs) if not pair.is_same]

        def on_each(ones: Sequence[Any], others: Sequence[Any]) -> Any:
            given = [Pair(one, one) for one in ones]
            for index, other in zip(places, others, strict=True):
                given[index] = Pair(ones[index], other, pairs[index].made)
            outside, self._least = self._least, self._least // equation.params["mesh"].size
            found = self.run(equation.params["jaxpr"], given, stack)
            self._least = outside
            inside[:] = [(pair.is_same, pair.made) for pair in found]
            return [pair.one for pair in found], [pair.other for pair in found]

        mapped = interpreter.shard_mapped(
            equation, on_each, (list(specs), [specs[index] for index in places]), (list(results), list(results))
        )
        ones, others = mapped([pair.one for pair in pairs], [pairs[index].other for index in places])
        return [Pair(a, a if same else b, made) for a, b, (same, made) in zip(ones, others, inside, strict=True)]


# An operation with one of these parameters combines several elements of an array.
_MIX = ("axis", "axes", "axis_name", "dimension", "dimension_numbers", "fft_lengths")
_NESTED = {"scan": _How.scan, "while": _How.loop, "cond": _How.branches, "shard_map": _How.devices}


def _nested(equation: Any) -> Callable[[_How, Any, list[Pair], str], list[Pair]] | None:
    """The method that evaluates the jaxprs inside an equation; None if there is none."""
    inner = interpreter.jaxprs_in(equation)
    is_call = len(inner) == 1 and len(inner[0].invars) == len(equation.invars)  # a jit, a checkpoint, a custom_vjp
    return _NESTED.get(equation.primitive.name, _How.call if is_call else None)


def _fits(select: Mapping[str, Any], equation: Any, stack: str) -> bool:
    if select.get("names") and equation.primitive.name not in select["names"]:
        return False
    if select.get("turns") and equation.params.get("length") not in select["turns"]:
        return False
    made_by = re.sub(r"/\w+:", "/", stack)
    if select.get("stack") and not re.search(select["stack"], made_by):
        return False
    inner = [each for each, _ in _nested_in(equation, stack)] if "around" in select or "holding" in select else []
    if select.get("around") and (
        re.search(select["around"], made_by)
        or not any(re.search(select["around"], interpreter.name_stack(each)) for each in inner)
    ):
        return False
    if select.get("inside") and f"/{select['inside']}:" not in stack.rpartition("/")[0]:
        return False
    if select.get("holding") and select["holding"] not in [each.primitive.name for each in inner]:
        return False
    arrays = (*equation.invars, *equation.outvars)
    return max((getattr(each.aval, "size", 0) for each in arrays), default=0) >= select.get("size", 0)


def _nested_in(equation: Any, stack: str) -> Iterator[tuple[Any, str]]:
    """All equations inside of an equation, each with its path."""
    for jaxpr in interpreter.jaxprs_in(equation):
        for each in jaxpr.eqns:
            within = _inner(stack, each)
            yield each, within
            yield from _nested_in(each, within)


def _inner(stack: str, equation: Any) -> str:
    """The path of an equation: the enclosing operations and itself, each with the transformations that made it."""
    return f"{stack}/{equation.primitive.name}:{interpreter.name_stack(equation)}"


def _pairs(values: Sequence[Any], made: Sequence[bool]) -> list[Pair]:
    return [Pair(one, other, flag) for (one, other), flag in zip(values, made, strict=True)]


def _pair(value: Any, variable: Any) -> Pair:
    if isinstance(value, Pair):
        return value
    if not hasattr(value, "dtype"):  # a literal of the program
        value = jnp.asarray(value, variable.aval.dtype)
    return Pair(value, value)


def _distorted(value: Any) -> Any:
    """Multiplies each element by a factor from 1.05 to 1.45. Equal arrays stay equal, so that they still cancel."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    factors = 1.25 + 0.2 * jnp.cos(jnp.arange(value.size, dtype=jnp.float32)).reshape(value.shape)
    return (value * factors).astype(value.dtype)
