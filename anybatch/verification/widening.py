"""Computes a loss in double precision, even if the loss itself casts to other dtypes.

Casting the arguments to float64 is not always enough: a loss may cast them back, multiply in bfloat16 on purpose, or
refuse float64. Then the loss is traced, and its equations are computed with every floating-point number as float64.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.call.checks import is_array
from anybatch.jaxprs import avals, interpreter
from anybatch.jaxprs.primitives import CALLS, REMAT, called_jaxpr

# Primitives that mean something else in another dtype, since they look at bits or digits. Kernels are such, too; they
# are recognised by the functions in their parameters.
IN_OWN_DTYPE = frozenset(["bitcast_convert_type", "ffi_call", "nextafter", "reduce_precision"])

SCATTERS: dict[str, Callable[..., Any]] = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


class WideLoss:
    """A loss in double precision. Call it with float64 arrays, where x64 is enabled.

    Attributes:
      recomputed: True if the loss uses narrower dtypes, so that its equations are computed here in float64.
      narrow: the names of primitives that could only be computed in their own dtypes, once the loss was called.
    """

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Traces `fun` to see whether it uses narrower dtypes.

        Args:
          fun: the loss.
          args: its arguments, in the given dtypes.
          kwargs: its keyword arguments, in the given dtypes.
        """
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
                computed = [variable.aval for equation in all_equations(jaxpr) for variable in equation.outvars]
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
        variables, consts, equations = interpreter.open_jaxpr(jaxpr)
        known = dict(zip(variables, map(widened, [*consts, *operands]), strict=True))

        def read(variable: Any) -> Any:
            if interpreter.is_literal(variable):
                return widened(np.asarray(variable.val, variable.aval.dtype))
            return known[variable]

        for equation in equations:
            results = self._compute_equation(equation, [read(variable) for variable in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in interpreter.outputs_of(jaxpr)]

    def _compute_equation(self, equation: Any, operands: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name in CALLS | REMAT:
            return self._compute(called_jaxpr(equation), operands)
        if name in NESTED:
            return list(NESTED[name](self, equation, operands))
        if name in SCATTERS:
            options = {key: params[key] for key in ("indices_are_sorted", "unique_indices", "mode")}
            return [SCATTERS[name](*operands, params["dimension_numbers"], **options)]
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

        options = {"length": params["length"], "reverse": params["reverse"]}
        carry, stacked = lax.scan(step, operands[num_consts:first], operands[first:], **options)
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
        branches = [functools.partial(self._branch, jaxpr) for jaxpr in equation.params["branches"]]
        return lax.switch(lax.convert_element_type(index, np.int32), branches, *rest)

    def _branch(self, jaxpr: Any, *operands: Any) -> list[Any]:
        return self._compute(jaxpr, operands)

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


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, including those of nested jaxprs."""
    for equation in interpreter.open_jaxpr(jaxpr)[2]:
        yield equation
        for inner in interpreter.jaxprs_in(equation):
            yield from all_equations(inner)


def _is_dynamic(leaf: Any) -> bool:
    return is_array(leaf) or isinstance(leaf, jax.core.Tracer)


def _types(tree: Any) -> list[Any]:
    return [avals.abstract(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree) if _is_dynamic(leaf)]


def _is_narrow(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", np.dtype(bool))
    return jax.dtypes.issubdtype(dtype, np.inexact) and wide(dtype) != dtype


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
