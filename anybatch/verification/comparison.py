"""Computes the gradient of one loss and batch, in one precision, with JAX and with anybatch, and compares them.

Two correct computations of a gradient differ by rounding. How much rounding is allowed is measured: the full-batch
gradient is computed again with its inputs changed in their last digit. The `condition` of a leaf is the relative change
of the leaf divided by that of the inputs, and at least 1. The tolerance of a leaf is

    condition * (ROUNDINGS * eps + number of microbatches * eps of the accumulator)

The first term is for the roundings along one path through the loss, the second for the sum over the microbatches.

For double precision, casting the arguments to float64 is not always enough: a loss may cast them back, multiply in
bfloat16 on purpose, or refuse float64. Then the loss is traced, and its equations are computed with every
floating-point number as float64.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.call.arguments import NOTHING, ROLES, Arguments, Arrays, Roles
from anybatch.call.checks import is_array, named_leaves
from anybatch.functions.map_batch import map_batch
from anybatch.gradients.value_and_grad import value_and_grad
from anybatch.jaxprs import avals, interpreter
from anybatch.jaxprs.primitives import CALLS, REMAT, called_jaxpr

# Primitives that mean something else in another dtype, since they look at bits or digits. Kernels are such, too; they
# are recognised by the functions in their parameters.
IN_OWN_DTYPE = frozenset(["bitcast_convert_type", "ffi_call", "nextafter", "reduce_precision"])

# Primitives with a jaxpr of a narrow dtype inside, which the function of that name in `lax` makes anew.
SCATTERS = frozenset(["scatter", "scatter_add", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max"])


class WideLoss:
    """A loss in double precision. Call it with float64 arrays, where x64 is enabled.

    Attributes:
      recomputed: True if the loss uses narrower dtypes, so that its equations are computed here in float64.
      narrow: the names of primitives that could only be computed in their own dtypes, once the loss was called.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Traces `fun` with its arguments, in the given dtypes, to see whether it uses narrower dtypes."""
        config: Any = jax.config
        functools.update_wrapper(self, fun)
        self.fun, self.narrow = fun, set[str]()
        self.given = _types((args, kwargs))
        self.x64_given = bool(config.jax_enable_x64)
        self.traces_given = False
        with jax.enable_x64(True):
            wide_args, wide_kwargs = jax.tree.map(widened, (args, kwargs))
            try:
                jaxpr, _, _ = self._traced(wide_args, wide_kwargs)
                computed = [variable.aval for equation in interpreter.walk(jaxpr) for variable in equation.outvars]
                self.recomputed = any(map(_is_narrow, [*computed, *jaxpr.out_avals]))
            except Exception:  # it does not take float64, so it is traced in the given dtypes
                self.traces_given = self.recomputed = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recomputed:
            return self.fun(*args, **kwargs)
        jaxpr, arrays, tree = self._traced(args, kwargs)
        return jax.tree.unflatten(tree, self._compute(jaxpr, arrays))

    def _traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any], Any]:
        """The jaxpr of the loss, the arrays to call it with, and the tree of its results."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if _is_dynamic(leaf)]
        types = _types(arrays)
        if self.traces_given:
            types = [
                jax.ShapeDtypeStruct(aval.shape, given.dtype, weak_type=given.weak_type)
                for aval, given in zip(types, self.given, strict=True)
            ]

        def call(*flat: Any) -> Any:
            supply = iter(flat)
            filled = [next(supply) if _is_dynamic(leaf) else leaf for leaf in leaves]
            filled_args, filled_kwargs = jax.tree.unflatten(tree, filled)
            return self.fun(*filled_args, **filled_kwargs)

        jaxpr, results = self._trace(call, *types)
        return jaxpr, arrays, jax.tree.structure(results)

    def _trace(self, fun: Callable[..., Any], *types: Any) -> Any:
        with jax.enable_x64(self.x64_given if self.traces_given else True):
            return jax.make_jaxpr(fun, return_shape=True)(*types)

    def _compute(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """The outputs of a jaxpr, computed in double precision."""

        def constant(value: Any, aval: Any) -> Any:
            return widened(value if _is_dynamic(value) else np.asarray(value, aval.dtype))

        return interpreter.interpret(jaxpr, list(map(widened, operands)), self._compute_equation, constant)

    def _compute_equation(self, equation: Any, operands: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name in CALLS | REMAT:
            return self._compute(called_jaxpr(equation), operands)
        if name in NESTED:
            return list(NESTED[name](self, equation, operands))
        if name.replace("-", "_") in SCATTERS:
            options = {key: params[key] for key in ("indices_are_sorted", "unique_indices", "mode")}
            return [getattr(lax, name.replace("-", "_"))(*operands, params["dimension_numbers"], **options)]
        if name not in IN_OWN_DTYPE and not interpreter.jaxprs_in(equation):
            try:
                results = interpreter.evaluate(equation, operands, _wide_params(params))
            except Exception:  # it supports certain dtypes only
                return self._compute_narrow(equation, operands)
            if [jax.typeof(result).dtype for result in results] == [wide(v.aval.dtype) for v in equation.outvars]:
                return results
        return self._compute_narrow(equation, operands)

    def _compute_narrow(self, equation: Any, operands: list[Any]) -> list[Any]:
        """The results of an equation computed in its own dtypes, cast to double precision afterwards."""
        dtypes = [variable.aval.dtype for variable in equation.invars]
        if any(_is_narrow(variable.aval) for variable in equation.invars):
            self.narrow.add(equation.primitive.name)
        cast = [
            value if jax.typeof(value).dtype == dtype else lax.convert_element_type(value, dtype)
            for value, dtype in zip(operands, dtypes, strict=True)
        ]
        return [widened(result) for result in interpreter.evaluate(equation, cast)]

    def _scan(self, equation: Any, operands: list[Any]) -> list[Any]:
        params = equation.params
        num_consts, num_carried = interpreter.scan_counts(params)
        consts, first = operands[:num_consts], num_consts + num_carried

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self._compute(params["jaxpr"], [*consts, *carry, *slices])
            return results[:num_carried], results[num_carried:]

        carry, stacked = lax.scan(
            step, operands[num_consts:first], operands[first:], params["length"], params["reverse"]
        )
        return [*carry, *stacked]

    def _while(self, equation: Any, operands: list[Any]) -> list[Any]:
        params = equation.params
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        return lax.while_loop(
            lambda carry: self._compute(params["cond_jaxpr"], [*operands[:first], *carry])[0],
            lambda carry: self._compute(params["body_jaxpr"], [*operands[first:second], *carry]),
            operands[second:],
        )

    def _cond(self, equation: Any, operands: list[Any]) -> list[Any]:
        index, *rest = operands
        branches = [functools.partial(self._compute, jaxpr) for jaxpr in equation.params["branches"]]
        return lax.switch(lax.convert_element_type(index, np.int32), branches, rest)

    def _custom_jvp(self, equation: Any, operands: list[Any]) -> list[Any]:
        """A `custom_jvp` whose function and rule are both computed in double precision."""
        inputs, outputs = _inexact(equation.invars), _inexact(equation.outvars)

        def jvp(values: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
            results, out = jax.jvp(
                lambda *values: interpreter.evaluate(equation, values),
                tuple(values),
                tuple(_filled(equation.invars, inputs, tangents)),
            )
            return results, [out[position] for position in outputs]

        wide_fun = jax.custom_jvp(lambda *values: self._compute(equation.params["call_jaxpr"], values))

        @wide_fun.defjvp
        def _(values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            types = [avals.abstract(variable.aval) for variable in equation.invars]
            jaxpr, _ = self._trace(jvp, types, [types[position] for position in inputs])
            results = self._compute(jaxpr, [*values, *(tangents[position] for position in inputs)])
            number = len(equation.outvars)
            return results[:number], _filled(equation.outvars, outputs, results[number:])

        return wide_fun(*operands)

    def _custom_vjp(self, equation: Any, operands: list[Any]) -> list[Any]:
        """A `custom_vjp` whose function, forward pass and backward pass are all computed in double precision."""
        inputs, outputs = _inexact(equation.invars), _inexact(equation.outvars)
        pullback_tree: Any = None

        def forward(values: list[Any]) -> tuple[list[Any], list[Any]]:
            nonlocal pullback_tree

            def of_inputs(*some: Any) -> list[Any]:
                replaced = dict(zip(inputs, some, strict=True))
                return interpreter.evaluate(equation, [replaced.get(i, value) for i, value in enumerate(values)])

            results, pullback = jax.vjp(of_inputs, *(values[position] for position in inputs))
            residuals, pullback_tree = jax.tree.flatten(pullback)
            return results, residuals

        def backward(residuals: list[Any], cotangents: list[Any]) -> Any:
            return jax.tree.unflatten(pullback_tree, residuals)(_filled(equation.outvars, outputs, cotangents))

        types = [avals.abstract(variable.aval) for variable in equation.invars]
        wide_fun = jax.custom_vjp(lambda *values: self._compute(equation.params["call_jaxpr"], values))

        def wide_forward(*values: Any) -> tuple[list[Any], list[Any]]:
            results = self._compute(self._trace(forward, types)[0], values)
            return results[: len(equation.outvars)], results[len(equation.outvars) :]

        def wide_backward(residuals: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
            _, (results, residual_types) = self._trace(forward, types)
            some = [results[position] for position in outputs]
            jaxpr, _ = self._trace(backward, residual_types, some)
            out = self._compute(jaxpr, [*residuals, *(cotangents[position] for position in outputs)])
            gradients = dict(zip(inputs, out, strict=True))
            return tuple(gradients.get(position) for position in range(len(types)))

        wide_fun.defvjp(wide_forward, wide_backward)
        return wide_fun(*operands)


NESTED: dict[str, Callable[[WideLoss, Any, list[Any]], Any]] = {
    "scan": WideLoss._scan,
    "while": WideLoss._while,
    "cond": WideLoss._cond,
    "custom_jvp_call": WideLoss._custom_jvp,
    "custom_vjp_call": WideLoss._custom_vjp,
}


def wide(dtype: Any) -> Any:
    """The double-precision version of a floating-point or complex dtype; other dtypes unchanged."""
    if not jax.dtypes.issubdtype(dtype, np.inexact):
        return dtype
    return np.dtype(np.complex128 if jax.dtypes.issubdtype(dtype, np.complexfloating) else np.float64)


def widened(value: Any) -> Any:
    """A floating-point array in double precision; anything else unchanged. Needs x64."""
    if not _is_dynamic(value) or not jax.dtypes.issubdtype(value.dtype, np.inexact):
        return value
    return jnp.asarray(value, wide(value.dtype))


def _is_dynamic(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.core.Tracer)


def _types(tree: Any) -> list[Any]:
    return [avals.abstract(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree) if _is_dynamic(leaf)]


def _is_narrow(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", np.dtype(bool))
    return wide(dtype) != dtype


def _inexact(variables: Sequence[Any]) -> list[int]:
    """The positions of the floating-point variables, which have derivatives."""
    return [i for i, variable in enumerate(variables) if jax.dtypes.issubdtype(variable.aval.dtype, np.inexact)]


def _filled(variables: Sequence[Any], positions: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """Tangents for all variables: float0 zeros at all positions but the given ones."""
    given = dict(zip(positions, values, strict=True))
    zeros = (np.zeros(variable.aval.shape, jax.dtypes.float0) for variable in variables)
    return [given.get(position, zero) for position, zero in enumerate(zeros)]


def _wide_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of an equation, with every dtype among them in double precision."""
    params = {key: wide(value) if isinstance(value, np.dtype) else value for key, value in params.items()}
    if not isinstance(params.get("precision"), (lax.Precision, tuple, type(None))):
        params["precision"] = None  # an algorithm that is defined for narrow dtypes only
    return params


ROUNDINGS = 8  # the losses of the tests, in three precisions, need at most 2.2
CHANGES = 2  # how often the inputs are changed in their last digit; the largest effect counts
NEGLIGIBLE = 1e-3  # leaves below this share of the largest leaf are compared relative to that share

# Random generators, including those below the level of keys: a loss may draw without a key.
RANDOM_PRIMITIVES = frozenset(["random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"])


# The result of one computation: arrays in double precision, in the order of `Trial.names`.
Outcome: TypeAlias = list[np.ndarray]


@dataclasses.dataclass(frozen=True)
class RouteOptions:
    """A route to compare: a microbatch size, on one device or over a mesh, perhaps with big values in blocks."""

    size: int
    mesh: Any = None
    axis_name: Any = "data"
    block_size: int | None = None

    def __str__(self) -> str:
        axes = [] if self.mesh is None else [f"{name}={size}" for name, size in self.mesh.shape.items()]
        blocks = "" if self.block_size is None else f", block_size={self.block_size}"
        return f"microbatch_size={self.size}{blocks}" + (f", mesh({', '.join(axes)})" if axes else "")


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """The largest difference of one leaf between a route and the full batch, relative to its largest entry."""

    name: str  # as in code: "params['w']", "value" or "aux['accuracy']"
    difference: float  # infinite if only one of the two is NaN, or if their shapes differ
    tolerance: float  # the rounding expected

    @property
    def ok(self) -> bool:
        """True if the difference is within the tolerance."""
        return self.difference <= self.tolerance


@dataclasses.dataclass(frozen=True)
class Trial:
    """A loss and its arguments, in the given dtypes or all in float64, and the gradients computed from them.

    Or a function of `map_batch` (`maps`): then its outputs take the place of the gradients, and there is no value.
    """

    fun: Any  # the loss; in float64, a WideLoss
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]  # of value_and_grad, without the microbatch size
    in_float64: bool = False
    maps: bool = False

    def to_float64(self) -> "Trial":
        """The same trial in double precision."""
        fun = WideLoss(self.fun, self.args, self.kwargs)
        with jax.enable_x64(True):
            args, kwargs = jax.tree.map(widened, (self.args, self.kwargs))
        return Trial(fun, args, kwargs, self.options, in_float64=True, maps=self.maps)

    def with_options(self, **changes: Any) -> "Trial":
        """The same trial with other options of `value_and_grad`."""
        return dataclasses.replace(self, options={**self.options, **changes})

    # The loss and its arguments.

    @property
    def weighted(self) -> bool:
        return self.options["reduction"] == "weighted"

    @functools.cached_property
    def loss(self) -> Callable[..., Any]:
        """The loss as `jax.value_and_grad` takes it: for a loss that returns a total and a weight, their ratio."""
        return _ratio(self.fun, self.options["has_aux"]) if self.weighted else self.fun

    @functools.cached_property
    def arguments(self) -> Arguments:
        chosen = {name: self.options[name] for name in ROLES}
        roles = Roles.of(**chosen | {"argnums": NOTHING} if self.maps else chosen)
        return roles.sort(self.fun, self.args, self.kwargs)

    @functools.cached_property
    def arrays(self) -> Arrays:
        return self.arguments.arrays

    def examples(self, start: int, stop: int) -> Arrays:
        """The arrays, with only these examples of the batch."""
        with self.precision():
            return self.arrays._replace(batch=[leaf[start:stop] for leaf in self.arrays.batch])

    @property
    def num_examples(self) -> int:
        return self.arguments.num_examples

    @property
    def num_gradients(self) -> int:
        return len(self.result_types) if self.maps else len(self.arrays.wrt)

    @functools.cached_property
    def result_types(self) -> list[tuple[str, Any]]:
        """The names and the types of the outputs of a function that is mapped."""
        with self.precision():
            return named_leaves("result", jax.eval_shape(functools.partial(self.arguments.call, self.fun), self.arrays))

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which everything of this trial is computed."""
        return jax.enable_x64(True) if self.in_float64 else contextlib.nullcontext()

    def compiled(self, fun: Callable[..., Any]) -> Callable[[Arrays], Any]:
        """Compiles `fun`, which takes the arguments of the loss, as a function of the arrays among them."""
        return self._program(lambda arrays: self.arguments.call(fun, arrays))

    def _program(self, of_arrays: Callable[[Arrays], Any]) -> Callable[[Arrays], Any]:
        program = jax.jit(of_arrays)

        def run(arrays: Arrays) -> Any:
            with self.precision():
                return program(arrays)

        return run

    def _gradient_by_jax(self, arrays: Arrays) -> Any:
        if self.maps:
            return (), self.arguments.call(self.fun, arrays)

        def loss(wrt: list[Any]) -> Any:
            return self.arguments.call(self.loss, arrays._replace(wrt=wrt))

        return jax.value_and_grad(loss, has_aux=self.options["has_aux"])(arrays.wrt)

    @functools.cached_property
    def _full_batch(self) -> Callable[[Arrays], Any]:
        return self._program(self._gradient_by_jax)

    @functools.cached_property
    def equations(self) -> list[Any]:
        """The equations of the gradient of the full batch."""
        with self.precision():
            return list(interpreter.walk(jax.make_jaxpr(self._gradient_by_jax)(self.arrays)))

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The floating-point dtype with the fewest digits in which the gradient is computed or returned."""
        if self.in_float64:
            return np.dtype(np.float64)
        computed = [
            variable.aval.dtype
            for equation in self.equations
            if not all(map(interpreter.is_literal, equation.invars))  # constants such as zeros are exact
            for variable in equation.outvars
            if jax.dtypes.issubdtype(getattr(variable.aval, "dtype", np.bool_), np.inexact)
        ]
        returned = [jax.dtypes.result_type(leaf) for leaf in self.arrays.wrt]
        if not computed and not returned:  # integers only
            return np.dtype(np.float64)
        return max(map(jnp.dtype, [*computed, *returned]), key=lambda dtype: float(jnp.finfo(dtype).eps))

    @property
    def eps(self) -> float:
        """The machine epsilon of `dtype`."""
        return float(jnp.finfo(self.dtype).eps)

    @property
    def is_random(self) -> bool:
        """True if the loss draws random numbers."""
        return any(equation.primitive.name in RANDOM_PRIMITIVES for equation in self.equations)

    # The gradients.

    @functools.cached_property
    def expected(self) -> Outcome:
        """The result of `jax.value_and_grad` for the full batch, to which routes are compared."""
        return self.full_batch(self.arrays)

    def full_batch(self, arrays: Arrays) -> Outcome:
        """The result of `jax.value_and_grad` for other arrays, such as fewer examples or another key."""
        return self._outcome(self._full_batch(arrays))

    def route(self, route: RouteOptions | int) -> Outcome:
        """The result of `anybatch.value_and_grad` by a route."""
        route = RouteOptions(route) if isinstance(route, int) else route
        over = {"microbatch_size": route.size, "mesh": route.mesh, "axis_name": route.axis_name}
        if self.maps:
            names = ("batch_argnums", "batch_argnames", "rng_argnums", "accumulator_dtype")
            mapped = map_batch(self.fun, **{name: self.options[name] for name in names}, **over)
            return self._outcome(((), self.compiled(mapped)(self.arrays)))
        over["block_size"] = route.block_size
        return self._outcome(self.compiled(value_and_grad(self.fun, **self.options, **over))(self.arrays))

    def _outcome(self, result: Any) -> Outcome:
        value, gradient = result
        return list(map(_numbers, jax.tree.leaves((gradient, value))))  # aux is beside the value

    # Their differences.

    @functools.cached_property
    def aux_types(self) -> Any:
        """The types of aux; None without aux."""
        if not self.options["has_aux"]:
            return None
        with self.precision():
            return jax.eval_shape(functools.partial(self.arguments.call, self.loss), self.arrays)[1]

    @functools.cached_property
    def declared_aux(self) -> list[str]:
        """The aux_reduction of each leaf of aux; empty where none is declared."""
        declared = self.options["aux_reduction"]
        if declared is None:
            return [""] * len(jax.tree.leaves(self.aux_types))
        names = jax.tree.map(lambda name: name or "", declared, is_leaf=lambda name: name is None)
        return jax.tree.leaves(jax.tree.broadcast(names, self.aux_types))

    @functools.cached_property
    def names(self) -> list[str]:
        """The names of all leaves compared: of the gradient, then the value, then of aux."""
        if self.maps:
            return [name for name, _ in self.result_types]
        wrt = [leaf.name for leaf in self.arguments.leaves if leaf.role == "wrt"]
        return [*wrt, "value", *(name for name, _ in named_leaves("aux", self.aux_types))]

    def compare(self, route: RouteOptions | int, *, capped: bool = True) -> tuple[LeafDifference, ...]:
        """The differences of a route from the full batch, leaf by leaf, without aux declared "stack" or "last"."""
        route = RouteOptions(route) if isinstance(route, int) else route
        differences = self.differences(self.route(route), self.expected)
        kinds = [""] * (self.num_gradients + 1) + self.declared_aux
        return tuple(
            LeafDifference(name, difference, self.tolerance(index, route.size, capped=capped))
            for index, (name, difference) in enumerate(zip(self.names, differences, strict=True))
            if kinds[index] not in ("stack", "last")
        )

    def differences(self, actual: Outcome, expected: Outcome) -> list[float]:
        """The largest difference in each of `names`, relative to the largest entry."""
        if self.maps:
            return list(map(difference, actual, expected))
        largest = [_largest(leaf) for leaf in expected[: self.num_gradients]]
        # A gradient that is zero up to rounding, such as that of a bias before a softmax, may differ in every digit.
        negligible = max(NEGLIGIBLE, math.sqrt(self.eps))
        floors = [negligible * max(largest, default=0.0)] * len(largest)
        # A value may be 0 by chance. Its natural scale is its change if the parameters change by their own size.
        parameters = [_largest(_numbers(leaf)) for leaf in self.arrays.wrt]
        floors.append(negligible * float(np.dot(parameters, largest)))
        floors += [0.0] * (len(expected) - len(floors))  # of aux
        return [difference(*three) for three in zip(actual, expected, floors, strict=True)]

    def tolerance(self, index: int, size: int, *, capped: bool = True) -> float:
        """The rounding allowed in the leaf `names[index]`. If `capped`, never as much as half of the digits."""
        sum_eps = min(self.eps, float(jnp.finfo(np.float32).eps))
        microbatches = math.ceil(self.num_examples / size)
        tolerance = self.condition[index] * (ROUNDINGS * self.eps + microbatches * sum_eps)
        return min(tolerance, math.sqrt(self.eps)) if capped else tolerance

    @functools.cached_property
    def condition(self) -> list[float]:
        """For each of `names`, its relative change if the inputs change in their last digit, divided by theirs."""
        random = np.random.default_rng(0)
        changed = [self.full_batch(self._changed(random)) for _ in range(CHANGES)]
        moved = zip(*(self.differences(outcome, self.expected) for outcome in changed), strict=True)
        return [max(1.0, max(several) / self.eps) for several in moved]

    def _changed(self, random: np.random.Generator) -> Arrays:
        with self.precision():
            # Integers in floats are often masks or labels, which mean something else if they change.
            batch = [leaf if _holds_integers(leaf) else _nudged(leaf, self.eps, random) for leaf in self.arrays.batch]
            changed = self.arrays._replace(
                wrt=[_nudged(leaf, self.eps, random) for leaf in self.arrays.wrt], batch=batch
            )
            if not self.maps:
                return changed
            # Parameters are among the other arguments of a function that is mapped.
            rest = [leaf if _is_exact(leaf) else _nudged(leaf, self.eps, random) for leaf in self.arrays.rest]
            return changed._replace(rest=rest)


def difference(actual: np.ndarray, expected: np.ndarray, floor: float = 0.0) -> float:
    """The largest difference, relative to the largest expected entry, or to `floor` if that is larger.

    Two NaNs are equal, and so are two infinities of the same sign. If only one of the two is NaN or infinite, the
    difference is infinite.

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


def _numbers(leaf: Any) -> np.ndarray:
    if is_array(leaf) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.issubdtype(array.dtype, np.complexfloating) else np.float64)


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array[np.isfinite(array)]).max(initial=0.0))


def _holds_integers(leaf: Any) -> bool:
    numbers = _numbers(leaf)
    return bool(np.all((numbers == np.round(numbers)) | ~np.isfinite(numbers)))


def _is_exact(leaf: Any) -> bool:
    return not jax.dtypes.issubdtype(jax.dtypes.result_type(leaf), np.inexact) or _holds_integers(leaf)


def _nudged(leaf: Any, eps: float, random: np.random.Generator) -> Any:
    """The array with each entry made larger or smaller by about one unit in its last place."""
    if not is_array(leaf):
        return leaf * (1 + eps)
    numbers = _numbers(leaf)
    nudged = (numbers * (1 + eps * random.choice([-1, 1], numbers.shape))).astype(leaf.dtype)
    if not isinstance(leaf, jax.Array):
        return nudged
    # As committed as the given array: otherwise the program of the full batch would be compiled a second time.
    return jax.device_put(nudged, leaf.sharding if leaf.committed else None)
