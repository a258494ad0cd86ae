"""One loss and one batch in one precision: what JAX computes for all of it, what the routes compute, and how far apart.

The rounding that two right ways of computing one gradient may differ by is measured, not assumed: the full batch
is computed once more with its inputs changed in their last digit. By how much more than that a leaf of the gradient
moves is its `condition`, a number of 1 or more, and the difference of two routes is held against

    condition * (ROUNDINGS * eps + number of microbatches * eps of the accumulator)

the roundings along one path through the loss, and those of the sum over the microbatches.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.arguments import ROLES, Arguments, Arrays, Roles
from anybatch.call.checks import is_array, named_leaves
from anybatch.gradients.value_and_grad import value_and_grad
from anybatch.jaxprs import interpreter
from anybatch.verification.widening import WideLoss, all_equations, widened

ROUNDINGS = 8  # measured on the losses of the tests in three precisions: 2.2 is the most that they need
CHANGES = 2  # times that the inputs are changed in their last digit; the largest effect counts
NEGLIGIBLE = 1e-3  # a gradient that is smaller than this share of the largest one is measured against that share

# Generators at any level, below that of keys too: a loss may draw without a key.
RANDOM_PRIMITIVES = frozenset(["random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"])


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
class Route:
    """One way of computing the gradient: at a microbatch size, on one device or over a mesh."""

    size: int
    mesh: Any = None
    axis_name: Any = "data"

    @property
    def options(self) -> dict[str, Any]:
        """As `value_and_grad` takes them."""
        over = {} if self.mesh is None else {"mesh": self.mesh, "axis_name": self.axis_name}
        return {"microbatch_size": self.size, **over}

    def __str__(self) -> str:
        if self.mesh is None:
            return f"microbatch_size={self.size}"
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh.shape.items())
        return f"microbatch_size={self.size}, mesh({axes})"


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
    """A loss and its arguments, in the dtypes given or all in float64."""

    fun: Any  # the loss; in float64, a WideLoss
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]  # those of value_and_grad, but the size
    in_float64: bool = False

    def to_float64(self) -> "Trial":
        """The same in double precision."""
        fun = WideLoss(self.fun, self.args, self.kwargs)
        with jax.enable_x64(True):
            args, kwargs = jax.tree.map(widened, (self.args, self.kwargs))
        return Trial(fun, args, kwargs, self.options, in_float64=True)

    # What is computed.

    @property
    def weighted(self) -> bool:
        return self.options["reduction"] == "weighted"

    @functools.cached_property
    def loss(self) -> Callable[..., Any]:
        """The loss as `jax.value_and_grad` takes it: if it returns a total and a weight, their ratio."""
        return _ratio(self.fun, self.options["has_aux"]) if self.weighted else self.fun

    @functools.cached_property
    def arguments(self) -> Arguments:
        """The arguments, sorted."""
        roles = Roles.of(**{name: self.options[name] for name in ROLES})
        return roles.sort(self.fun, self.args, self.kwargs)

    @functools.cached_property
    def arrays(self) -> Arrays:
        """The arrays among them."""
        return self.arguments.arrays

    def examples(self, start: int, stop: int) -> Arrays:
        """The arrays, with these examples alone."""
        with self.precision():
            return self.arrays._replace(batch=[leaf[start:stop] for leaf in self.arrays.batch])

    @property
    def num_examples(self) -> int:
        return self.arguments.num_examples

    @property
    def num_gradients(self) -> int:
        return len(self.arrays.wrt)

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """Where everything of this trial happens."""
        return jax.enable_x64(True) if self.in_float64 else contextlib.nullcontext()

    def compiled(self, fun: Callable[..., Any]) -> Callable[[Arrays], Any]:
        """`fun`, which has the arguments of the loss, as a function of the arrays among them."""
        return self._program(lambda arrays: self.arguments.call(fun, arrays))

    def _program(self, of_arrays: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
        program = jax.jit(of_arrays)

        def run(arrays: Arrays) -> Any:
            with self.precision():
                return program(arrays)

        return run

    def _gradient_by_jax(self, arrays: Arrays) -> Any:
        def loss(wrt: list[Any]) -> Any:
            return self.arguments.call(self.loss, arrays._replace(wrt=wrt))

        return jax.value_and_grad(loss, has_aux=self.options["has_aux"])(arrays.wrt)

    @functools.cached_property
    def _full_batch(self) -> Callable[[Arrays], Any]:
        return self._program(self._gradient_by_jax)

    @functools.cached_property
    def _equations(self) -> list[Any]:
        with self.precision():
            return list(all_equations(jax.make_jaxpr(self._gradient_by_jax)(self.arrays)))

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The coarsest floating-point dtype that the gradient is computed or returned in."""
        if self.in_float64:
            return np.dtype(np.float64)
        computed = [
            variable.aval.dtype
            for equation in self._equations
            if not all(map(interpreter.is_literal, equation.invars))  # zeros and the like are exact
            for variable in equation.outvars
            if jax.dtypes.issubdtype(getattr(variable.aval, "dtype", np.bool_), np.inexact)
        ]
        returned = [jax.dtypes.result_type(leaf) for leaf in self.arrays.wrt]
        return max(map(jnp.dtype, [*computed, *returned]), key=lambda dtype: float(jnp.finfo(dtype).eps))

    @property
    def eps(self) -> float:
        """The distance of 1 from the next number, in the precision of the trial."""
        return float(jnp.finfo(self.dtype).eps)

    @property
    def is_random(self) -> bool:
        """Whether the loss draws random numbers."""
        return any(equation.primitive.name in RANDOM_PRIMITIVES for equation in self._equations)

    # What it gives.

    @functools.cached_property
    def expected(self) -> Outcome:
        """All examples at once, by JAX alone."""
        return self.full_batch(self.arrays)

    def full_batch(self, arrays: Arrays) -> Outcome:
        """What `jax.value_and_grad` gives for other arrays: fewer examples, another key."""
        return self._outcome(self._full_batch(arrays))

    def route(self, route: Route | int, reduction: str | None = None) -> Outcome:
        """What `anybatch.value_and_grad` gives by a route, by default for the reduction declared."""
        route = Route(route) if isinstance(route, int) else route
        options = {**self.options, "reduction": reduction or self.options["reduction"], **route.options}
        return self._outcome(self.compiled(value_and_grad(self.fun, **options))(self.arrays))

    def _outcome(self, result: Any) -> Outcome:
        value, gradient = result
        value, aux = value if self.options["has_aux"] else (value, None)
        return Outcome(_all_numbers(jax.tree.leaves(gradient)), _numbers(value), _all_numbers(jax.tree.leaves(aux)))

    # How far apart that is.

    @functools.cached_property
    def _aux_types(self) -> Any:
        if not self.options["has_aux"]:
            return None
        with self.precision():
            return jax.eval_shape(functools.partial(self.arguments.call, self.loss), self.arrays)[1]

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

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of what is compared."""
        wrt = [leaf.name for leaf in self.arguments.leaves if leaf.role == "wrt"]
        return [*wrt, "value", *(name for name, _ in named_leaves("aux", self._aux_types))]

    def compare(
        self, route: Route | int, reduction: str | None = None, *, capped: bool = True
    ) -> tuple[LeafDifference, ...]:
        """The differences of a route from the full batch, leaf by leaf; but of aux declared "stack" or "last"."""
        route = Route(route) if isinstance(route, int) else route
        differences = self.differences(self.route(route, reduction), self.expected)
        kinds = [""] * (self.num_gradients + 1) + self.declared_aux
        return tuple(
            LeafDifference(name, difference, self.tolerance(index, route.size, capped=capped))
            for index, (name, difference) in enumerate(zip(self.names, differences, strict=True))
            if kinds[index] not in ("stack", "last")
        )

    def differences(self, actual: Outcome, expected: Outcome) -> list[float]:
        """The largest difference in each of `names`, relative to the largest entry."""
        largest = [_largest(leaf) for leaf in expected.gradient]
        # Where a gradient is zero but for rounding, as that of a bias before a softmax, every digit of it may differ.
        negligible = max(NEGLIGIBLE, math.sqrt(self.eps))
        floors = [negligible * max(largest, default=0.0)] * len(largest)
        # A value may be 0 by chance; what a change of the parameters by their own size does to it is its natural scale.
        floors.append(negligible * sum(map(math.prod, zip(self._largest_parameters, largest, strict=True))))
        floors += [0.0] * len(expected.aux)
        return [difference(*three) for three in zip(actual.entries, expected.entries, floors, strict=True)]

    @functools.cached_property
    def _largest_parameters(self) -> list[float]:
        return [_largest(_numbers(leaf)) for leaf in self.arrays.wrt]

    def tolerance(self, index: int, size: int, *, capped: bool = True) -> float:
        """The rounding to be expected in one of `names`; but if half of the digits are gone, it is different."""
        sum_eps = min(self.eps, float(jnp.finfo(np.float32).eps))
        microbatches = math.ceil(self.num_examples / size)
        tolerance = self.condition[index] * (ROUNDINGS * self.eps + microbatches * sum_eps)
        return min(tolerance, math.sqrt(self.eps)) if capped else tolerance

    @functools.cached_property
    def condition(self) -> list[float]:
        """By how much more each of `names` moves than the inputs, if these are changed in their last digit."""
        random = np.random.default_rng(0)
        changed = [self.full_batch(self._changed(random)) for _ in range(CHANGES)]
        moved = zip(*(self.differences(outcome, self.expected) for outcome in changed), strict=True)
        return [max(1.0, max(several) / self.eps) for several in moved]

    def _changed(self, random: np.random.Generator) -> Arrays:
        with self.precision():
            # Masks and labels often come as floats, and mean something else one digit away.
            batch = [leaf if _is_whole(leaf) else _nudged(leaf, self.eps, random) for leaf in self.arrays.batch]
            return self.arrays._replace(wrt=[_nudged(leaf, self.eps, random) for leaf in self.arrays.wrt], batch=batch)


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
    if not jax.dtypes.issubdtype(leaf.dtype, np.inexact):
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
