"""Runs a candidate and the full batch in one precision, and measures how far they differ and how far they may.

A `Bench` is one precision. In float64 a candidate that casts to narrower dtypes is traced, and its operations are
computed in float64: then only its structure is compared. In the given dtypes its rounding is compared as well.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.auditing.candidates import Candidate, Inputs, Observation
from anybatch.call.arguments import Arrays
from anybatch.call.checks import is_array, is_key
from anybatch.jaxprs import interpreter
from anybatch.verification.comparison import NEGLIGIBLE, Trial, WideLoss, difference

SLACK = 4  # a candidate may round in more places than one path through the loss does
FLOAT32 = 2 * float(np.finfo(np.float32).eps)  # a candidate may have a factor such as 1 / n in float32
NARROW = ("bfloat16", "float16")


class Numbers(NamedTuple):
    """An observation as NumPy arrays in double precision."""

    leaves: list[np.ndarray]
    value: np.ndarray | None
    aux: list[np.ndarray] | None


def numbers(observation: Observation) -> Numbers:
    """The numbers of an observation."""
    value, aux = observation.value, observation.aux
    return Numbers(
        list(map(as_float64, observation.leaves)),
        None if value is None else as_float64(value),
        None if aux is None else list(map(as_float64, aux)),
    )


def as_float64(leaf: Any) -> np.ndarray:
    """An array in double precision. PRNG keys become their bits."""
    if jax.dtypes.issubdtype(getattr(leaf, "dtype", np.float64), jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.issubdtype(array.dtype, np.complexfloating) else np.float64)


def largest(array: np.ndarray) -> float:
    """The largest finite entry."""
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def gap(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference between two arrays; infinite if anything is not finite."""
    with np.errstate(all="ignore"):
        apart = np.abs(one - other)
    return float(apart.max(initial=0.0)) if np.isfinite(apart).all() else float("inf")


@dataclasses.dataclass(frozen=True)
class LeafAudit:
    """One leaf of the candidate's result, compared with that of the full batch."""

    name: str  # as in code: "params['w']", "opt_state[0].mu['w']", "value" or "aux['accuracy']"
    difference: float  # the largest difference, relative to the largest entry of the right result
    allowed: float  # the rounding expected
    ratio: float | None  # the candidate's leaf divided by the right one, by least squares; None if the right one is 0

    @property
    def ok(self) -> bool:
        """True if the difference is within the rounding expected."""
        return self.difference <= self.allowed


@dataclasses.dataclass(frozen=True)
class Program:
    """What tracing a candidate shows of it."""

    lengths: tuple[int, ...] = ()  # of its loops
    sizes: tuple[int, ...] = ()  # numbers of examples that it takes from the batch
    devices: tuple[int, ...] = ()  # the sizes of its mesh axes, and their products
    narrow_sums: tuple[str, ...] = ()  # the narrow dtypes in which it adds arrays of the shape of a parameter
    constants: frozenset[tuple[str, float]] = frozenset()  # its numbers in narrow dtypes that may have been rounded
    is_traced: bool = False  # False if nothing is known


@dataclasses.dataclass(frozen=True)
class Bench:
    """A candidate and the loss in one precision."""

    candidate: Candidate
    trial: Trial
    inputs: Inputs
    call: Callable[[Inputs], Observation]
    predicted: Callable[..., Observation]
    program: Program = Program()
    constants_eps: float = FLOAT32  # the rounding of the candidate's constants

    def observe(self, inputs: Inputs | None = None) -> Numbers:
        """What the candidate gives, by default for the given batch."""
        with self.trial.precision():
            return numbers(self.call((self.inputs if inputs is None else inputs).copied()))

    def predict(self, gradient: Sequence[np.ndarray], subject: list[Any] | None = None) -> list[np.ndarray]:
        """The leaves that a right candidate would give for this gradient of the full batch."""
        if not self.candidate.form.is_step:
            return list(gradient)
        with self.trial.precision():
            typed = [jnp.asarray(g, jnp.result_type(w)) for g, w in zip(gradient, self.trial.arrays.wrt, strict=True)]
            return numbers(self._program(self.inputs.subject if subject is None else subject, typed)).leaves

    @functools.cached_property
    def _program(self) -> Callable[..., Observation]:
        return jax.jit(lambda subject, gradient: self.predicted(subject, gradient))

    @property
    def num_gradients(self) -> int:
        return self.trial.num_gradients

    @functools.cached_property
    def gradient(self) -> list[np.ndarray]:
        """The gradient of the full batch."""
        return self.trial.expected[: self.num_gradients]

    @functools.cached_property
    def expected(self) -> list[np.ndarray]:
        """The leaves that a right candidate gives."""
        return self.predict(self.gradient)

    @property
    def value(self) -> np.ndarray:
        return self.trial.expected[self.num_gradients]

    @property
    def aux(self) -> list[np.ndarray]:
        return self.trial.expected[self.num_gradients + 1 :]

    @functools.cached_property
    def scales(self) -> list[float]:
        """The size of each leaf of the gradient, and at least a small share of the largest leaf's."""
        sizes = list(map(largest, self.gradient))
        return [max(size, NEGLIGIBLE * max(sizes, default=0.0)) for size in sizes]

    def gradient_tolerances(self, *, capped: bool = True) -> list[float]:
        """The rounding allowed in each leaf of the gradient, as a number to compare absolute differences with."""
        trial = self.trial
        return [SLACK * trial.tolerance(index, 1, capped=capped) * scale for index, scale in enumerate(self.scales)]

    def tolerances(self, of_gradient: Sequence[float]) -> list[float]:
        """The same for each leaf that is compared. For a step, it is measured what the rounding of a gradient does."""
        if not self.candidate.form.is_step:
            return list(of_gradient)
        random, eps = np.random.default_rng(0), self.trial.eps
        moved = [0.0] * len(self.expected)
        for _ in range(2):
            signs = [random.choice([-1.0, 1.0], leaf.shape) for leaf in self.gradient]
            nudged = [leaf + tol * sign for leaf, tol, sign in zip(self.gradient, of_gradient, signs, strict=True)]
            changes = [gap(a, b) for a, b in zip(self.predict(nudged), self.expected, strict=True)]
            moved = list(map(max, moved, changes))
        parameters = [largest(as_float64(leaf)) for leaf in self.trial.arrays.wrt]
        sizes = [largest(leaf) for leaf in self.expected]
        sizes = [max(pair) for pair in zip(sizes, [*parameters, *[0.0] * len(sizes)], strict=False)]
        return [SLACK * move + 8 * eps * size for move, size in zip(moved, sizes, strict=True)]

    # The loss on other examples and with other keys.

    def rows(self, rows: Any, arrays: Arrays | None = None) -> Arrays:
        """The arrays of the loss with these rows of the batch."""
        arrays = self.trial.arrays if arrays is None else arrays
        with self.trial.precision():
            return arrays._replace(batch=[jnp.asarray(leaf)[rows] for leaf in arrays.batch])

    def with_keys(self, arrays: Arrays, change: Callable[[Any], Any]) -> Arrays:
        """The arrays of the loss with other PRNG keys."""
        with self.trial.precision():
            return arrays._replace(rest=[change(leaf) if is_key(leaf) else leaf for leaf in arrays.rest])

    def with_rows(self, rows: Any) -> "Bench":
        """The same bench with these rows of the batch."""
        trial = self.trial
        with trial.precision():
            batch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[rows], trial.args[1])
            inputs = self.inputs.rows(rows)
        args = (trial.args[0], batch, *trial.args[2:])
        return dataclasses.replace(self, trial=dataclasses.replace(trial, args=args), inputs=inputs)

    def scaled(self, factor: float = 1.0625) -> "Bench":
        """The same bench with other parameters, by default slightly larger ones."""
        trial = self.trial
        with trial.precision():
            scaled = functools.partial(_scaled, factor=factor)
            params = jax.tree.map(scaled, trial.args[0])
            inputs = self.inputs._replace(subject=list(map(scaled, self.inputs.subject)))
        return dataclasses.replace(
            self, trial=dataclasses.replace(trial, args=(params, *trial.args[1:])), inputs=inputs
        )

    def off(self, rows: Any, tolerances: Sequence[float]) -> float:
        """How many times its tolerance the worst leaf differs for these rows of the batch; 0 if it is not finite."""
        with self.trial.precision():
            actual = self.observe(self.inputs.rows(rows)).leaves
        gradient = self.trial.full_batch(self.rows(rows))[: self.num_gradients]
        pairs = zip(actual, self.predict(gradient), tolerances, self.expected, strict=True)
        ratios = [gap(a, b) / (tol + self.constants_eps * max(largest(b), largest(c))) for a, b, tol, c in pairs]
        return max(ratios) if np.isfinite(ratios).all() else 0.0

    @property
    def is_traced(self) -> bool:
        """True if the operations of the candidate are known."""
        return isinstance(self.call, _Compiled) or self.program.is_traced

    @property
    def has_key(self) -> bool:
        return any(map(is_key, self.trial.arrays.rest))


def _scaled(leaf: Any, factor: float) -> Any:
    """A floating-point array times a number that every dtype has."""
    is_float = is_array(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    return leaf * jnp.asarray(factor, jnp.result_type(leaf)) if is_float else leaf


def given_bench(candidate: Candidate, trial: Trial) -> Bench:
    """The candidate and the loss in the given dtypes."""
    return Bench(candidate, trial, candidate.inputs, lambda inputs: candidate(*inputs), candidate.predict)


def float64_bench(candidate: Candidate, trial: Trial) -> tuple[Bench | None, str]:
    """The candidate and the loss in double precision, or None and why there is none."""
    wide = WideLoss(candidate, tuple(candidate.inputs), {})
    reason = ""
    # A candidate that cannot be traced may still take float64.
    for make in (_traced_bench, _direct_bench) if wide.recomputed else (_direct_bench,):
        try:
            bench = make(candidate, trial, wide)
            bench.observe()
            narrow = sorted(set(getattr(bench.call, "narrow", ())) | bench.trial.fun.narrow)
            if bench.expected and not narrow:
                return dataclasses.replace(bench, program=trace_program(candidate, bench.inputs)), ""
            reason = reason or f"it uses {', '.join(narrow)}, which cannot be computed in float64"
            break
        except Exception as error:
            reason = f"it raised {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return None, reason


def _direct_bench(candidate: Candidate, trial: Trial, wide: WideLoss) -> Bench:
    """The candidate as it is, called with float64 arrays."""
    with jax.enable_x64(True):
        inputs = candidate.inputs.widened()
    return Bench(candidate, trial.to_float64(), inputs, lambda inputs: candidate(*inputs), candidate.predict)


def _traced_bench(candidate: Candidate, trial: Trial, wide: WideLoss) -> Bench:
    """The candidate traced, with its operations computed in float64."""
    double = trial.to_float64()
    predicted: Any = candidate.predict
    if candidate.form.is_step:
        predicted = WideLoss(candidate.predict, (candidate.inputs.subject, trial.arrays.wrt), {})
    if wide.traces_given:  # then constants are rounded to the given dtypes, so they must be everywhere
        for fun in (double.fun, predicted):
            if isinstance(fun, WideLoss):
                fun.traces_given = fun.recomputed = True
    with jax.enable_x64(True):
        inputs = candidate.inputs.widened()
    return Bench(candidate, double, inputs, _Compiled(wide), predicted)


class _Compiled:
    """A traced candidate as a function of `Inputs`, compiled."""

    def __init__(self, wide: WideLoss) -> None:
        self._wide = wide
        self._program = jax.jit(lambda inputs: wide(*inputs))

    def __call__(self, inputs: Inputs) -> Observation:
        return self._program(inputs)

    @property
    def narrow(self) -> set[str]:
        return self._wide.narrow


def trace_program(candidate: Candidate, inputs: Inputs) -> Program:
    """What tracing the candidate shows. Nothing if it cannot be traced."""
    try:
        with jax.enable_x64(True):
            equations = list(interpreter.walk(jax.make_jaxpr(lambda inputs: candidate(*inputs))(inputs)))
    except Exception:
        return Program()
    lengths = [equation.params["length"] for equation in equations if equation.primitive.name == "scan"]
    taken = [size for equation in equations for size in _taken(equation, len(inputs.batch[0]))]
    meshes = [equation.params["mesh"] for equation in equations if equation.primitive.name == "shard_map"]
    devices = [
        math.prod(sizes)
        for mesh in meshes
        for number in range(1, len(mesh.shape) + 1)
        for sizes in itertools.combinations(mesh.shape.values(), number)
    ]
    devices += [equation.params["axis_size"] for equation in equations if "pmap" in equation.primitive.name]
    shapes = set(candidate.form.shapes)
    sizes = [math.prod(shape) for shape in shapes]
    shapes |= {(size,) for size in (*sizes, sum(map(math.prod, candidate.form.shapes)))}  # in one vector
    sums = [
        str(variable.aval.dtype)
        for equation in equations
        if equation.primitive.name in ("add", "add_any")
        for variable in equation.outvars
        if str(variable.aval.dtype) in NARROW and variable.aval.shape in shapes
    ]
    return Program(
        tuple(dict.fromkeys(lengths)),
        tuple(dict.fromkeys(taken)),
        tuple(dict.fromkeys(devices)),
        tuple(dict.fromkeys(sums)),
        rounded_constants(equations),
        is_traced=True,
    )


def rounded_constants(equations: Sequence[Any]) -> frozenset[tuple[str, float]]:
    """The dtypes and values of numbers in narrow dtypes that may have been rounded.

    Integers and powers of two are exact.
    """
    found = {
        (str(operand.aval.dtype), float(operand.val))
        for equation in equations
        for operand in equation.invars
        if interpreter.is_literal(operand) and str(getattr(operand.aval, "dtype", "")) in NARROW
    }
    return frozenset(
        (dtype, number)
        for dtype, number in found
        if math.isfinite(number) and number != round(number) and abs(math.frexp(number)[0]) != 0.5
    )


def _taken(equation: Any, examples: int) -> list[int]:
    """The number of examples in each part, if an equation divides the batch."""
    name = equation.primitive.name
    shape = getattr(getattr(equation.invars[0], "aval", None), "shape", ()) if equation.invars else ()
    if shape[:1] != (examples,) or name not in ("slice", "dynamic_slice", "split", "gather", "reshape"):
        return []
    results = [variable.aval.shape for variable in equation.outvars]
    if name == "reshape":
        return [result[1] for result in results if result[2:] == shape[1:] and 1 < len(result)]
    return [result[0] for result in results if len(result) == len(shape) and 0 < result[0] < examples]


def compared(bench: Bench, actual: Numbers, tolerances: Sequence[float], names: Sequence[str]) -> list[LeafAudit]:
    """The leaves of a candidate compared with the right ones: those of the gradient or step, the value, then aux."""
    found = [_compared(*four) for four in zip(names, actual.leaves, bench.expected, tolerances, strict=True)]
    trial = bench.trial
    if actual.value is not None:
        floor = NEGLIGIBLE * sum(
            largest(as_float64(w)) * largest(g) for w, g in zip(trial.arrays.wrt, bench.gradient, strict=True)
        )
        scale = max(largest(bench.value), floor)
        tolerance = SLACK * trial.tolerance(bench.num_gradients, 1) * scale
        found.append(_compared("value", actual.value, bench.value, tolerance))
    if actual.aux is not None:
        aux_names = trial.names[bench.num_gradients + 1 :]
        given = bench.candidate.form.aux_names
        if set(given).isdisjoint(aux_names):  # the state of a model beside aux changes all names
            given = aux_names
        actual_aux = dict(zip(given, actual.aux, strict=False))
        for place, other in enumerate(bench.aux):
            one = actual_aux.get(aux_names[place])
            if one is not None and one.shape == other.shape:
                tolerance = SLACK * trial.tolerance(bench.num_gradients + 1 + place, 1) * largest(other)
                found.append(_compared(aux_names[place], one, other, tolerance))
    return found


def _compared(name: str, actual: np.ndarray, expected: np.ndarray, tolerance: float) -> LeafAudit:
    size = largest(expected)
    if actual.shape != expected.shape:
        return LeafAudit(name, float("inf"), tolerance / (size or 1.0), None)
    square = float(np.vdot(expected, expected).real)
    ratio = float(np.vdot(expected, actual).real) / square if square else None
    if size == 0:  # there is nothing to relate it to
        return LeafAudit(name, largest(actual) if np.isfinite(actual).all() else float("inf"), tolerance, ratio)
    return LeafAudit(name, difference(actual, expected), tolerance / size, ratio)
