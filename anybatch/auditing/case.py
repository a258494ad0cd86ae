"""What the tests of `causes.py` ask about a candidate: the gradient that it used, and gradients of some examples.

Of a training step, the gradient that it used is recovered from a number that is proportional to it: the change of the
parameters with plain SGD, the first moment with Adam.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.auditing.bench import Bench, LeafAudit, Numbers, as_float64, gap, largest
from anybatch.jaxprs import interpreter
from anybatch.jaxprs.primitives import CALLS, called_jaxpr
from anybatch.reading.read import read
from anybatch.reading.report import Reading


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A way to divide a batch into microbatches: the rows of each. A row of -1 is padding with zeros."""

    groups: tuple[np.ndarray, ...]
    words: str = ""  # how it differs from microbatches in order, with a smaller last one
    size: int = 0

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(group) for group in self.groups])


Gradient = list[np.ndarray]

TERMS = frozenset(("add", "sub", "neg", "convert_element_type"))  # that a loss ends with, and mul and div
EXACT = 1e-6  # weights agree to this
MANY = 24  # microbatch sizes that are tried, if none is known


class Case:
    """A candidate that differs from the full batch, and what the tests ask about it."""

    def __init__(self, bench: Bench, actual: Numbers, leaves: Sequence[LeafAudit], size: int | None) -> None:
        self.bench, self.observed, self.leaves, self.size = bench, actual, leaves, size
        self.examples = bench.trial.num_examples
        self.number_of_leaves = len(bench.candidate.form.names)
        self._gradients: dict[Any, Gradient] = {}

    # What the candidate gave, as a gradient.

    @property
    def step_leaves(self) -> Sequence[LeafAudit]:
        """The leaves of the gradient or of the step, without the value and aux."""
        return self.leaves[: self.number_of_leaves]

    @functools.cached_property
    def expected(self) -> Gradient:
        return self.bench.gradient

    @functools.cached_property
    def tolerances(self) -> list[float]:
        return self.bench.gradient_tolerances()

    @functools.cached_property
    def _zero(self) -> list[np.ndarray]:
        """What a step gives for a gradient of zero."""
        return self.bench.predict([0 * leaf for leaf in self.expected])

    @functools.cached_property
    def _sources(self) -> list[tuple[int, float]] | None:
        """For each leaf of the gradient, the compared leaf that is proportional to it, and the factor."""
        if not self.bench.candidate.form.is_step:
            return [(index, 1.0) for index in range(len(self.expected))]
        # An optimizer that clips is linear only for small gradients.
        return self._sources_at(1.0) or self._sources_at(1e-3)

    def _sources_at(self, scale: float) -> list[tuple[int, float]] | None:
        small = [scale * leaf for leaf in self.expected]
        one, two = (self.bench.predict([number * leaf for leaf in small]) for number in (1.0, 2.0))
        close = (1e-9 if self.bench.trial.in_float64 else 10 * math.sqrt(self.bench.trial.eps)) / scale
        found: list[tuple[int, float]] = []
        for leaf in small:
            square = float(np.vdot(leaf, leaf).real)
            choices = []
            for index, (a, b, c) in enumerate(zip(self._zero, one, two, strict=True)):
                if a.shape != leaf.shape or not square:
                    continue
                factor, size = float(np.vdot(leaf, b - a).real) / square, largest(b - a)
                is_linear = gap(c - a, 2 * (b - a)) <= close * size
                if size and is_linear and gap(b - a, factor * leaf) <= close * size:
                    choices.append((index, factor))
            if not choices:
                return None
            found.append(choices[-1])  # the optimizer's state has more digits than a change of the parameters
        return found

    @property
    def is_recovered(self) -> bool:
        """True if the gradient that the candidate used is known."""
        return self._sources is not None

    def gradient_of(self, leaves: Sequence[np.ndarray]) -> Gradient:
        """The gradient that a step used, from what it gave, after what its optimizer does to it, such as clipping."""
        if self._sources is None:
            raise LookupError("no number is proportional to the gradient")
        if not self.bench.candidate.form.is_step:
            return list(leaves)
        return [(leaves[index] - self._zero[index]) / factor for index, factor in self._sources]

    def seen(self, gradient: Gradient) -> Gradient:
        """What would be seen of a gradient: itself, or what the optimizer makes of it."""
        return self.gradient_of(self.bench.predict(gradient))

    @functools.cached_property
    def actual(self) -> Gradient:
        """The gradient that the candidate gave or used."""
        return self.gradient_of(self.observed.leaves)

    @functools.cached_property
    def right(self) -> Gradient:
        """The gradient that it should have given or used."""
        return self.seen(self.expected)

    @functools.cached_property
    def failed(self) -> list[int]:
        """The leaves of the gradient that differ; all of them if the gradient cannot be recovered."""
        if self._sources is None:
            return list(range(len(self.expected)))
        return [
            index
            for index, (a, b, tolerance) in enumerate(zip(self.actual, self.right, self.tolerances, strict=True))
            if not gap(a, b) <= 4 * tolerance
        ]

    @property
    def some(self) -> str:
        """Which leaves differ, if not all do."""
        if len(self.failed) == len(self.expected):
            return ""
        names = [self.bench.candidate.form.parameter_names[index] for index in self.failed]
        return f" This is so for {listed(names)}; the other leaves are right."

    def fits(self, gradient: Gradient) -> bool:
        """True if a gradient explains the leaves that differ, to rounding."""
        if self._sources is None:
            trio = zip(self.observed.leaves, self.bench.predict(gradient), self.bench.expected, strict=True)
            return all(gap(a, b) <= max(1e-3 * gap(a, c), 1e-9 * largest(a)) for a, b, c in trio)
        gradient = self.seen(gradient)
        for index in self.failed:
            actual, off = self.actual[index], gap(self.actual[index], self.right[index])
            size = max(largest(actual), self.bench.scales[index])
            rounding = 4 * self.tolerances[index] * max(1.0, size / self.bench.scales[index])
            close = max(rounding, min(EXACT * size, 1e-3 * off))
            if not gap(actual, gradient[index]) <= close:
                return False
        return True

    @functools.cached_property
    def is_one_update(self) -> bool:
        """True unless one update with the gradient that was recovered gives something else than the step gave."""
        if not self.bench.candidate.form.is_step or not self.bench.trial.in_float64:
            return True
        close = self.bench.tolerances(self.tolerances)  # a sign may change with the rounding of a gradient
        each = zip(self.observed.leaves, self.bench.predict(self.actual), self.bench.expected, close, strict=True)
        return all(gap(a, b) <= max(EXACT * gap(a, c), 1e-9 * largest(a), tol) for a, b, c, tol in each)

    def on(self, bench: Bench, actual: Numbers) -> "Case":
        """The candidate in other dtypes or with other parameters. Its gradient is recovered from the same leaves."""
        other = Case(bench, actual, (), self.size)
        other._sources = self._sources
        return other

    # Gradients of some examples.

    def gradient(self, rows: np.ndarray, keys: tuple[str, int, int, int] | None = None) -> Gradient:
        """The gradient of the loss for some examples; -1 is a row of zeros. `keys` says which PRNG keys it gets."""
        name = (rows.tobytes(), keys)
        if name not in self._gradients:
            bench = self.bench
            arrays = bench.rows(np.maximum(rows, 0))
            if (rows < 0).any():
                with bench.trial.precision():
                    arrays = arrays._replace(batch=[leaf.at[rows < 0].set(0) for leaf in arrays.batch])
            if keys is not None:
                arrays = bench.with_keys(arrays, functools.partial(_derived, how=keys))
            self._gradients[name] = bench.trial.full_batch(arrays)[: bench.num_gradients]
        return self._gradients[name]

    def parts(self, layout: Layout, scheme: str | None = None) -> list[Gradient]:
        """The gradients of the microbatches of a layout."""
        number = len(layout.groups)
        return [
            self.gradient(group, None if scheme is None else (scheme, place, number, layout.size))
            for place, group in enumerate(layout.groups)
        ]

    def combined(self, parts: Sequence[Gradient], weights: np.ndarray) -> Gradient:
        """The weighted sum of gradients."""
        return [sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)) for leaves in zip(*parts, strict=True)]

    def flat(self, gradient: Gradient) -> np.ndarray:
        """The leaves that differ in one vector, each relative to its size. Of large ones some entries are taken."""
        places = self.failed if self.leaves else range(len(gradient))
        pieces = []
        for index in places:
            leaf = gradient[index].reshape(-1)[:: math.ceil(gradient[index].size / 2**14) or 1]
            pieces.append(leaf / (self.bench.scales[index] or 1.0))
        return np.concatenate(pieces)

    def solved(self, parts: Sequence[Gradient], target: Gradient) -> np.ndarray | None:
        """The weights with which gradients add up to a target; None if there are none, or not enough equations."""
        matrix, wanted = np.stack([self.flat(part) for part in parts], 1), self.flat(target)
        if len(wanted) < len(parts) + 2 or not np.isfinite(matrix).all():
            return None
        weights, _, rank, values = np.linalg.lstsq(matrix, wanted, rcond=1e-10)
        if rank < len(parts) or values[-1] < 1e-7 * values[0]:
            return None
        off = gap(matrix @ weights, wanted)
        close = 1e-8 if self.bench.trial.in_float64 else 20 * math.sqrt(self.bench.trial.eps) / 10
        return weights.real if off <= max(close, 1e2 * self.bench.trial.eps) * max(1.0, np.abs(wanted).max()) else None

    def right_weights(self, parts: Sequence[Gradient], layout: Layout) -> np.ndarray | None:
        """The weights that microbatches have in the full batch; None if it is no weighted sum of them."""
        for weights in (layout.lengths / layout.lengths.sum(), np.ones(len(parts))):
            pairs = zip(self.combined(parts, weights), self.expected, self.tolerances, strict=True)
            if all(gap(a, b) <= 4 * tolerance for a, b, tolerance in pairs):
                return weights
        return self.solved(parts, self.expected)

    # The loss and the program.

    @functools.cached_property
    def reading(self) -> Reading | None:
        trial = self.bench.trial
        loss = getattr(trial.fun, "fun", trial.fun) if trial.in_float64 else trial.fun
        with contextlib.suppress(Exception), trial.precision():
            return read(loss, *trial.args, has_aux=trial.options["has_aux"], argnums=trial.options["argnums"])
        return None

    @functools.cached_property
    def penalty(self) -> Gradient:
        """The gradient of the terms that the loss adds and that use no example."""
        trial = self.bench.trial
        arrays, has_aux = trial.arrays, trial.options["has_aux"]

        def value(wrt: list[Any], batch: list[Any]) -> Any:
            result = trial.arguments.call(trial.fun, arrays._replace(wrt=wrt, batch=batch))
            return result[0] if has_aux else result

        def terms(wrt: list[Any]) -> Any:
            operands = [*((leaf, False) for leaf in wrt), *((leaf, True) for leaf in arrays.batch)]
            return interpreter.interpret(jaxpr, operands, _of_parameters, _independent)[0][0]

        with trial.precision():
            jaxpr = jax.make_jaxpr(value)(arrays.wrt, arrays.batch)
            return list(map(as_float64, jax.grad(terms)(arrays.wrt)))

    @property
    def is_random(self) -> bool:
        return self.bench.trial.is_random

    @functools.cached_property
    def devices(self) -> list[int]:
        """The numbers of devices that the candidate may run on; none if it has no mesh."""
        return [size for size in self.bench.program.devices if size > 1]

    @property
    def known_sizes(self) -> list[int]:
        """The microbatch sizes that are given, or that the program shows."""
        given = [] if self.size is None else [self.size]
        return [size for size in (*given, *self.bench.program.sizes) if 1 < size < self.examples]

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Microbatch sizes to try: the given one, or those that the program shows, then divisors, then others."""
        number = self.examples
        lengths = [*self.bench.program.lengths, *self.devices]
        shown = [*self.bench.program.sizes]
        shown += [math.ceil(number / length) for length in lengths if 1 < length <= number]
        shown += [number // length for length in lengths if 1 < length <= number and number % length]
        divisors = [number // count for count in range(2, number + 1) if number % count == 0]
        ragged = [size for size in range(number - 1, 1, -1) if number % size]
        if number > MANY:
            ragged = [size for size in ragged if size & (size - 1) == 0 or size % 5 == 0 or size == number // 2 + 1]
            divisors = divisors[:MANY]
        given = [] if self.size is None else [min(self.size, number)]
        return list(dict.fromkeys([*given, *shown, *divisors, *ragged[:MANY]]))

    def layouts(self) -> Iterator[Layout]:
        """Ways to divide the batch. Those in order come first, for all sizes."""
        number = self.examples
        for size in self.sizes:
            if size < number:
                yield in_order(number, size)
        for size in self.sizes:
            if size < number:
                yield from other_layouts(number, size)

    # Words.

    def replacement(self, size: int | None) -> str:
        """How to replace the loop by one line."""
        size_words = f"microbatch_size={size}" if size else "microbatch_size=..."
        aux = ", has_aux=True" if self.observed.aux is not None else ""
        return f"Or let anybatch accumulate: ab.value_and_grad(loss, {size_words}{aux})."


def _of_parameters(equation: Any, operands: list[Any]) -> list[Any]:
    """The results of an equation, and whether they use examples. Operands are such pairs.

    Where examples come in, no gradient goes back, but through the sums and factors that the loss ends with.
    """
    if equation.primitive.name in CALLS:
        return interpreter.interpret(called_jaxpr(equation), operands, _of_parameters, _independent)
    uses = [uses for _, uses in operands]
    results = interpreter.evaluate(equation, [value for value, _ in operands])
    factor = all(one or interpreter.is_literal(each) for one, each in zip(uses, equation.invars, strict=True))
    is_last = all(np.shape(result) == () for result in results) and (
        equation.primitive.name in TERMS or (equation.primitive.name in ("mul", "div") and factor and sum(uses) == 1)
    )
    if any(uses) and not is_last:
        results = list(map(jax.lax.stop_gradient, results))
    return [(result, any(uses)) for result in results]


def _independent(value: Any, _: Any) -> tuple[Any, bool]:
    """A constant, and that it uses no example."""
    return value, False


def _derived(key: Any, how: tuple[str, int, int, int]) -> Any:
    """The key of one microbatch, as loops make it from the key of the batch."""
    scheme, place, number, size = how
    if scheme == "split":
        return jax.random.split(key, number)[place]
    if scheme == "fold_in":
        return jax.random.fold_in(key, place)
    if scheme == "fold_in from 1":
        return jax.random.fold_in(key, place + 1)
    if scheme == "fold_in of the row":
        return jax.random.fold_in(key, place * size)
    if scheme == "split, one more":
        return jax.random.split(key, number + 1)[place + 1]
    if scheme.startswith("chain"):
        first = scheme.endswith("first")
        for _ in range(place):
            key = jax.random.split(key)[1 if first else 0]
        return jax.random.split(key)[0 if first else 1]
    if scheme.startswith("one of split"):
        return jax.random.split(key)[int(scheme[-1])]
    if scheme == "one fold_in":
        return jax.random.fold_in(key, 0)
    return key


SAME_KEYS = ("same", "one of split 0", "one of split 1", "one fold_in")
OTHER_KEYS = (
    "split",
    "fold_in",
    "fold_in from 1",
    "fold_in of the row",
    "split, one more",
    "chain",
    "chain, first",
)


def in_order(number: int, size: int) -> Layout:
    """Microbatches of the examples in their order. The last one may be smaller."""
    return Layout(tuple(np.arange(start, min(start + size, number)) for start in range(0, number, size)), "", size)


def other_layouts(number: int, size: int) -> Iterator[Layout]:
    """Other ways to make microbatches of a size: with strides, or with a remainder that is filled up."""
    count = math.ceil(number / size)
    if number % size == 0 and size > 1:
        strided = tuple(np.arange(place, number, count) for place in range(count))
        yield Layout(strided, "", size)
    if number % size:
        starts = [min(start, number - size) for start in range(0, number, size)]
        clamped = tuple(np.arange(start, start + size) for start in starts)
        yield Layout(clamped, "the last microbatch begins early, so that some examples count twice", size)
        rows = np.arange(count * size)
        zeros = np.where(rows < number, rows, -1).reshape(count, size)
        yield Layout(tuple(zeros), "the last microbatch is filled up with zeros, which count as examples", size)
        yield Layout(
            tuple((rows % number).reshape(count, size)), "the last microbatch repeats the first examples", size
        )
        repeated = np.minimum(rows, number - 1).reshape(count, size)
        yield Layout(tuple(repeated), "the last microbatch repeats the last example", size)
        nearly_equal = tuple(np.array_split(np.arange(number), count))
        yield Layout(nearly_equal, "the microbatches are of nearly equal sizes", len(nearly_equal[0]))


def listed(words: Any, most: int = 5) -> str:
    """The first few words, and how many more there are."""
    words = list(words)
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")
