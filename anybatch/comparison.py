"""One loss and one batch in one precision: what JAX computes for all of it, what the routes compute, and how far apart.

The rounding that two right ways of computing one gradient may differ by is measured, not assumed: the full batch
is computed once more with its inputs changed in their last digit. What moves the gradient by so much of its own
size is `condition`, a number of 1 or more, and the difference of two routes is held against

    condition * (ROUNDINGS * eps + number of microbatches * eps of the accumulator)

the roundings along one path through the loss, and those of the sum over the microbatches.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np

from anybatch import compat
from anybatch.arguments import Arguments, Arrays, Roles
from anybatch.gradient import value_and_grad
from anybatch.trees import is_array, named_leaves

ROUNDINGS = 8  # measured on the losses of the tests in three precisions: 2.2 is the most that they need
CHANGES = 2  # times that the inputs are changed in their last digit; the largest effect counts

# A leaf whose gradient is below this share of the largest one is measured against that share: where a gradient is
# zero but for rounding, as that of a bias before a softmax, every digit of it may differ.
NEGLIGIBLE = 1e-3

RANDOM_PRIMITIVES = ("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform")


class Outcome(NamedTuple):
    """What one way of computing gave, in flat NumPy arrays of double precision."""

    gradient: list[np.ndarray]
    value: np.ndarray
    aux: list[np.ndarray]

    @property
    def entries(self) -> list[np.ndarray]:
        """All that is compared, in the order of `Trial.names`."""
        return [*self.gradient, self.value, *self.aux]


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """How far one leaf of a route is from that of the full batch: relative to its largest entry."""

    name: str  # as one would type it, "params['w']"; or "value", or "aux['accuracy']"
    difference: float  # infinite where one of the two is not a number, or of another shape
    tolerance: float  # the rounding to be expected

    @property
    def ok(self) -> bool:
        """Whether the difference is one of rounding."""
        return self.difference <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Trial:
    """A loss and its arguments, in the dtypes given or all in float64; JAX computes it in full, we in microbatches."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]  # those of value_and_grad, but the size
    in_float64: bool = False

    # The loss.

    @property
    def weighted(self) -> bool:
        return self.options["reduction"] == "weighted"

    @functools.cached_property
    def loss(self) -> Callable[..., Any]:
        """The loss as `jax.value_and_grad` takes it: if it returns a total and a weight, their ratio."""
        return _ratio(self.fun, self.options["has_aux"]) if self.weighted else self.fun

    @functools.cached_property
    def arguments(self) -> Arguments:
        """The arguments, sorted; from here on they are in the precision of the trial."""
        roles = Roles.of(**{name: self.options[name] for name in ("argnums", "batch_argnums", "rng_argnums")})
        arguments = roles.sort(self.fun, self.args, self.kwargs)
        if not self.in_float64:
            return arguments
        with self.precision():
            wide = jax.tree.map(_widened, arguments.arrays)
            args, kwargs = arguments.call(lambda *args, **kwargs: (args, kwargs), wide)
            return roles.sort(self.fun, args, kwargs)

    @property
    def num_examples(self) -> int:
        return self.arguments.num_examples

    @property
    def num_gradients(self) -> int:
        return len(self.arguments.arrays.wrt)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Where everything of this trial runs."""
        return jax.enable_x64(True) if self.in_float64 else contextlib.nullcontext()

    @functools.cached_property
    def _program(self) -> Any:
        has_aux = self.options["has_aux"]

        def full_batch(arrays: Arrays) -> Any:
            def of_wrt(wrt: list[Any]) -> Any:
                result = self.arguments.call(self.loss, arrays._replace(wrt=wrt))
                return result if has_aux else (result, None)

            return jax.value_and_grad(of_wrt, has_aux=True)(arrays.wrt)

        return jax.jit(full_batch)

    @functools.cached_property
    def _equations(self) -> list[Any]:
        with self.precision():
            jaxpr = self._program.trace(self.arguments.arrays).jaxpr
        return list(_all_equations(getattr(jaxpr, "jaxpr", jaxpr)))

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The coarsest floating-point dtype that the gradient is computed or returned in."""
        computed = [
            variable.aval.dtype
            for equation in self._equations
            if not all(map(compat.is_literal, equation.invars))  # zeros and the like are exact
            for variable in equation.outvars
            if _is_inexact(getattr(variable.aval, "dtype", None))
        ]
        returned = [jax.dtypes.result_type(leaf) for leaf in self.arguments.arrays.wrt]
        return max((jnp.dtype(dtype) for dtype in (*computed, *returned)), key=lambda dtype: float(jnp.finfo(dtype).eps))

    @property
    def is_random(self) -> bool:
        """Whether the loss draws random numbers."""
        return any(equation.primitive.name in RANDOM_PRIMITIVES for equation in self._equations)

    # What it gives.

    @functools.cached_property
    def expected(self) -> Outcome:
        """All examples at once, by JAX alone."""
        return self.full_batch(self.arguments.arrays)

    def full_batch(self, arrays: Arrays) -> Outcome:
        """What `jax.value_and_grad` gives for other arrays: fewer examples, another key."""
        with self.precision():
            (value, aux), gradient = self._program(arrays)
        return _outcome(value, aux, gradient)

    def examples(self, start: int, stop: int) -> Arrays:
        """The arrays, with these examples alone."""
        arrays = self.arguments.arrays
        with self.precision():
            return arrays._replace(batch=[leaf[start:stop] for leaf in arrays.batch])

    def route(self, size: int, reduction: str | None = None) -> Outcome:
        """What `anybatch.value_and_grad` gives at a microbatch size, by default for the reduction declared."""
        options = {**self.options, "reduction": reduction or self.options["reduction"]}
        with self.precision():
            fun = value_and_grad(self.fun, **options, microbatch_size=size)
            value, gradient = fun(*self.arguments.args, **self.arguments.kwargs)
        value, aux = value if self.options["has_aux"] else (value, None)
        return _outcome(value, aux, gradient)

    # How far apart they are.

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of what is compared."""
        wrt = [leaf.name for leaf in self.arguments.leaves if leaf.role == "wrt"]
        return [*wrt, "value", *(name for name, _ in named_leaves("aux", self._aux_types))]

    @functools.cached_property
    def _aux_types(self) -> Any:
        with self.precision():
            (_, aux), _ = jax.eval_shape(self._program, self.arguments.arrays)
        return aux

    @property
    def aux_tree(self) -> Any:
        return jax.tree.structure(self._aux_types)

    @functools.cached_property
    def declared_aux(self) -> list[str]:
        """The aux_reduction of each leaf of aux, "" for none."""
        declared = self.options["aux_reduction"]
        if declared is None:
            return [""] * self.aux_tree.num_leaves
        names = jax.tree.map(lambda name: name or "", declared, is_leaf=lambda name: name is None)
        return jax.tree.leaves(jax.tree.broadcast(names, self._aux_types))

    @property
    def compared(self) -> list[bool]:
        """Of `names`, those that should be equal: a leaf of aux that is declared "stack" or "last" need not."""
        return [True] * (self.num_gradients + 1) + [how not in ("stack", "last") for how in self.declared_aux]

    def compare(self, size: int, reduction: str | None = None) -> tuple[LeafDifference, ...]:
        """The differences of a route from the full batch, leaf by leaf."""
        differences = self.differences(self.route(size, reduction), self.expected)
        return tuple(
            LeafDifference(name, difference, self.tolerance(index, size))
            for index, (name, difference) in enumerate(zip(self.names, differences, strict=True))
            if self.compared[index]
        )

    def differences(self, actual: Outcome, expected: Outcome) -> list[float]:
        """The largest difference in each of `names`, relative to the largest entry."""
        largest = [_largest(leaf) for leaf in expected.gradient]
        sizes = [_largest(_numbers(leaf)) for leaf in self.arguments.arrays.wrt]
        floors = [NEGLIGIBLE * max(largest, default=0.0)] * len(largest)
        # A value may be 0 by chance; what a change of the parameters by their own size does to it is its natural scale.
        floors.append(NEGLIGIBLE * sum(size * slope for size, slope in zip(sizes, largest, strict=True)))
        floors += [0.0] * len(expected.aux)
        return [difference(*three) for three in zip(actual.entries, expected.entries, floors, strict=True)]

    @property
    def eps(self) -> float:
        """The distance of 1 from the next number, in the precision of the trial."""
        return float(jnp.finfo(np.float64 if self.in_float64 else self.dtype).eps)

    @functools.cached_property
    def condition(self) -> list[float]:
        """By how much more each of `names` moves than the inputs, if these are changed in their last digit."""
        random = np.random.default_rng(0)
        changed = [self.full_batch(self._changed(random)) for _ in range(CHANGES)]
        moved = zip(*(self.differences(outcome, self.expected) for outcome in changed), strict=True)
        return [max(1.0, max(several) / self.eps) for several in moved]

    def _changed(self, random: np.random.Generator) -> Arrays:
        arrays = self.arguments.arrays
        with self.precision():
            # Masks and labels often come as floats, and mean something else one digit away.
            batch = [leaf if _is_whole(leaf) else _nudged(leaf, self.eps, random) for leaf in arrays.batch]
            return arrays._replace(wrt=[_nudged(leaf, self.eps, random) for leaf in arrays.wrt], batch=batch)

    def tolerance(self, index: int, size: int, *, capped: bool = True) -> float:
        """The rounding to be expected in one of `names`; but if half of the digits are gone, it is different."""
        sum_eps = min(self.eps, float(jnp.finfo(np.float32).eps))
        microbatches = math.ceil(self.num_examples / size)
        tolerance = self.condition[index] * (ROUNDINGS * self.eps + microbatches * sum_eps)
        return min(tolerance, math.sqrt(self.eps)) if capped else tolerance


def difference(actual: np.ndarray, expected: np.ndarray, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest entry expected, or to `floor` if that is larger.

    What is not a number in both, or the same infinity, is equal; what is so in one only is infinitely different.

    >>> difference(np.array([1.0, np.nan]), np.array([1.5, np.nan]))
    0.3333333333333333
    """
    if actual.shape != expected.shape:
        return math.inf
    equal = (actual == expected) | ((actual != actual) & (expected != expected))
    if equal.all():
        return 0.0
    with np.errstate(all="ignore"):
        relative = np.max(np.abs(actual[~equal] - expected[~equal])) / np.float64(max(_largest(expected), floor))
    return float(relative) if np.isfinite(relative) else math.inf


def _ratio(fun: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    @functools.wraps(fun)
    def ratio(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        (total, weight), aux = result if has_aux else (result, None)
        weight = jnp.where(jnp.asarray(weight) == 0, jnp.ones_like(weight), weight)
        with jax.numpy_dtype_promotion("standard"):
            value = total / weight
        return (value, aux) if has_aux else value

    return ratio


def _all_equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jex_core.jaxprs_in_params(equation.params):
            yield from _all_equations(getattr(inner, "jaxpr", inner))


def _is_inexact(dtype: Any) -> bool:
    return dtype is not None and jax.dtypes.issubdtype(dtype, np.inexact)


def _widened(leaf: Any) -> Any:
    """A floating-point array in double precision; Python numbers have that of the trial by themselves."""
    if not is_array(leaf) or not _is_inexact(leaf.dtype):
        return leaf
    return jnp.asarray(leaf).astype(
        jnp.complex128 if jax.dtypes.issubdtype(leaf.dtype, np.complexfloating) else jnp.float64
    )


def _outcome(value: Any, aux: Any, gradient: Any) -> Outcome:
    return Outcome(_all_numbers(jax.tree.leaves(gradient)), _numbers(value), _all_numbers(jax.tree.leaves(aux)))


def _all_numbers(leaves: Sequence[Any]) -> list[np.ndarray]:
    return [_numbers(leaf) for leaf in leaves]


def _numbers(leaf: Any) -> np.ndarray:
    if is_array(leaf) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.issubdtype(array.dtype, np.complexfloating) else np.float64)


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def _is_whole(leaf: Any) -> bool:
    if not _is_inexact(leaf.dtype):
        return True
    numbers = _numbers(leaf)
    return bool(np.all((numbers == np.round(numbers)) | ~np.isfinite(numbers)))


def _nudged(leaf: Any, eps: float, random: np.random.Generator) -> Any:
    """Each entry made larger or smaller by about one unit in its last place."""
    if not is_array(leaf):
        return leaf * (1 + eps)
    numbers = _numbers(leaf)
    nudged = (numbers * (1 + eps * random.choice([-1, 1], numbers.shape))).astype(leaf.dtype)
    return jax.device_put(nudged, leaf.sharding) if isinstance(leaf, jax.Array) else nudged
