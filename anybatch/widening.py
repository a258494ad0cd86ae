"""Computes a program in double precision, whatever dtypes it asks for.

Casting the arguments of a loss to float64 is not enough: it may cast them back, or multiply in bfloat16 on purpose, or
refuse. So the program is traced as it is, in the dtypes given, and its equations are computed with every floating-point
number in float64. It is traced after differentiation, so that custom derivatives are equations like others; random
numbers are drawn in the dtypes given, so that they are the same ones.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch import compat

# Functions called where they stand, with what is inside them.
INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}

# These mean other bits, or other digits, in another dtype. So do kernels, which are known by what they contain.
IN_OWN_DTYPE = frozenset(["bitcast_convert_type", "reduce_precision", "ffi_call", "nextafter"])

SCATTERS = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter-sub": lax.scatter_sub,
    "scatter-mul": lax.scatter_mul,
    "scatter-min": lax.scatter_min,
    "scatter-max": lax.scatter_max,
}


class Widened:
    """A function of a tree of arrays, computed in double precision. Call it where x64 is enabled.

    Args:
      fun: the function. It sees the dtypes of `like`.
      like: arrays or types in the dtypes given; a call may have another number of examples.
      narrow: gets the names of the primitives that were computed in dtypes of their own all the same.
    """

    def __init__(self, fun: Callable[[Any], Any], like: Any, narrow: set[str]) -> None:
        config: Any = jax.config
        self.fun, self.narrow = fun, narrow
        self.types = jax.tree.map(jax.typeof, like)
        self.traces_in_x64 = bool(config.jax_enable_x64)  # as the user has it

    def __call__(self, arrays: Any) -> Any:
        types = jax.tree.map(
            lambda leaf, like: jax.ShapeDtypeStruct(np.shape(leaf), like.dtype, weak_type=like.weak_type),
            arrays,
            self.types,
        )
        jaxpr, result = self._trace(lambda given: self.fun(given), types)
        outputs = self._compute(jaxpr, jax.tree.leaves(arrays))
        return jax.tree.unflatten(jax.tree.structure(result), outputs)

    def _trace(self, fun: Callable[..., Any], *types: Any) -> Any:
        with jax.enable_x64(self.traces_in_x64):
            return jax.make_jaxpr(fun, return_shape=True)(*types)

    def _compute(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        variables, consts, equations = compat.open_jaxpr(jaxpr)
        known = dict(zip(variables, map(widened, [*consts, *operands]), strict=True))

        def read(variable: Any) -> Any:
            if compat.is_literal(variable):
                return widened(np.asarray(variable.val, variable.aval.dtype))
            return known[variable]

        for equation in equations:
            results = self._compute_equation(equation, [read(variable) for variable in equation.invars])
            known.update(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in getattr(jaxpr, "jaxpr", jaxpr).outvars]

    def _compute_equation(self, equation: Any, operands: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name in INLINED:
            return self._compute(params[INLINED[name]], operands)
        if name in CONTROL:
            return CONTROL[name](self, params, operands)
        if name == "accumulate_in_place":  # its other form, which has no references
            types = [compat.abstract(variable.aval) for variable in equation.invars]
            return self._compute(self._trace(lambda *arrays: params["pure"](*arrays), *types)[0], operands)
        if name in SCATTERS:
            options = {key: params[key] for key in ("indices_are_sorted", "unique_indices", "mode")}
            return [SCATTERS[name](*operands, params["dimension_numbers"], **options)]
        if name not in IN_OWN_DTYPE and not compat.jaxprs_in(equation):
            try:
                results = compat.evaluate(equation, operands, _wide_params(params))
            except Exception:  # one that knows certain dtypes only
                return self._compute_narrow(equation, operands)
            if [jax.typeof(result).dtype for result in results] == [wide(v.aval.dtype) for v in equation.outvars]:
                return results
        return self._compute_narrow(equation, operands)

    def _compute_narrow(self, equation: Any, operands: list[Any]) -> list[Any]:
        dtypes = [variable.aval.dtype for variable in equation.invars]
        if any(jax.dtypes.issubdtype(dtype, np.inexact) for dtype in dtypes):
            self.narrow.add(equation.primitive.name)
        cast = [
            value if jax.typeof(value).dtype == dtype else lax.convert_element_type(value, dtype)
            for value, dtype in zip(operands, dtypes, strict=True)
        ]
        return [widened(result) for result in compat.evaluate(equation, cast)]

    def _scan(self, params: dict[str, Any], operands: list[Any]) -> list[Any]:
        num_consts, num_carried = compat.scan_counts(params)
        consts, first = operands[:num_consts], num_consts + num_carried

        def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            results = self._compute(params["jaxpr"], [*consts, *carry, *slices])
            return results[:num_carried], results[num_carried:]

        options = {"length": params["length"], "reverse": params["reverse"]}
        carry, stacked = lax.scan(step, operands[num_consts:first], operands[first:], **options)
        return [*carry, *stacked]

    def _while(self, params: dict[str, Any], operands: list[Any]) -> list[Any]:
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        return lax.while_loop(
            lambda carry: self._compute(params["cond_jaxpr"], [*operands[:first], *carry])[0],
            lambda carry: self._compute(params["body_jaxpr"], [*operands[first:second], *carry]),
            operands[second:],
        )

    def _cond(self, params: dict[str, Any], operands: list[Any]) -> list[Any]:
        index, *rest = operands
        branches = [lambda *values, jaxpr=jaxpr: self._compute(jaxpr, values) for jaxpr in params["branches"]]
        return lax.switch(jnp.asarray(index, np.int32), branches, *rest)


CONTROL: dict[str, Callable[[Widened, dict[str, Any], list[Any]], list[Any]]] = {
    "scan": Widened._scan,
    "while": Widened._while,
    "cond": Widened._cond,
}


def wide(dtype: Any) -> Any:
    """The dtype in double precision, for floating-point and complex numbers."""
    if not jax.dtypes.issubdtype(dtype, np.inexact):
        return dtype
    return np.dtype(np.complex128 if jax.dtypes.issubdtype(dtype, np.complexfloating) else np.float64)


def widened(value: Any) -> Any:
    """A number, array or key; in double precision if it is a floating-point one. Needs x64."""
    if jax.dtypes.issubdtype(jax.dtypes.result_type(value), np.inexact):
        return jnp.asarray(value, wide(jax.dtypes.result_type(value)))
    return value


def _wide_params(params: dict[str, Any]) -> dict[str, Any]:
    params = {key: wide(value) if isinstance(value, np.dtype) else value for key, value in params.items()}
    if not isinstance(params.get("precision"), (lax.Precision, tuple, type(None))):
        params["precision"] = None  # an algorithm for narrow numbers
    return params
