"""Keeps apart the operations that pad an array with several numbers, where XLA divides the array among devices.

XLA pads an array that it divides, for example for `cumsum` with 0 and for `cumprod` with 1. In JAX 0.10 and 0.11 it
keeps the padded array for all operations on this array, so that the second one gets the numbers of the first. Behind a
barrier, each operation has an array of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from anybatch.jaxprs import avals, interpreter, tracing
from anybatch.jaxprs.primitives import CUSTOM_JVP, CUSTOM_VJP, PADDED, called_jaxpr
from anybatch.jaxprs.versions import PADS_WITH_ONE_NUMBER


def may_mix_up(jaxpr: Any) -> bool:
    """Whether XLA may pad arrays of a jaxpr with the wrong numbers, if it divides them among devices."""
    return PADS_WITH_ONE_NUMBER and _pads(jaxpr)


def _pads(jaxpr: Any) -> bool:
    return any(equation.primitive.name in PADDED for equation in interpreter.walk(jaxpr))


def kept_apart(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, with a barrier before each operation that pads, at any depth of nested functions."""

    def run(*arguments: Any) -> Any:
        leaves, tree = jax.tree.flatten(arguments)
        if any(map(avals.is_ref, leaves)):
            return fun(*arguments)
        out_tree: Any = None

        def flat_fun(*flat: Any) -> list[Any]:
            nonlocal out_tree
            results, out_tree = jax.tree.flatten(fun(*jax.tree.unflatten(tree, flat)))
            return results

        closed = jax.make_jaxpr(flat_fun)(*leaves)
        return jax.tree.unflatten(out_tree, _run(closed, leaves))

    return run


def _run(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    return interpreter.interpret(jaxpr, arguments, _equation)


def _equation(equation: Any, operands: list[Any]) -> list[Any]:
    name = equation.primitive.name
    if name in PADDED:
        return interpreter.evaluate(
            equation, [lax.optimization_barrier(each) if np.ndim(each) else each for each in operands]
        )
    if name == "shard_map" or not any(map(_pads, interpreter.jaxprs_in(equation))):
        return interpreter.evaluate(equation, operands)
    if name in CUSTOM_JVP:
        return _custom_jvp(equation, operands)
    if name in CUSTOM_VJP:
        return _custom_vjp(equation, operands)
    return interpreter.evaluate(equation, operands, {key: _nested(each) for key, each in equation.params.items()})


def _custom_jvp(equation: Any, operands: list[Any]) -> list[Any]:
    @jax.custom_jvp
    def function(*operands: Any) -> list[Any]:
        return _run(called_jaxpr(equation), operands)

    @function.defjvp
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        return jax.jvp(lambda *values: interpreter.evaluate(equation, values), primals, tangents)

    return list(function(*operands))


def _custom_vjp(equation: Any, operands: list[Any]) -> list[Any]:
    @jax.custom_vjp
    def function(*operands: Any) -> list[Any]:
        return _run(called_jaxpr(equation), operands)

    def forward(*operands: Any) -> Any:
        return jax.vjp(lambda *values: interpreter.evaluate(equation, values), *operands)

    function.defvjp(forward, lambda pullback, cotangents: pullback(cotangents))
    return list(function(*operands))


def _nested(param: Any) -> Any:
    """A parameter of an equation, rewritten if it is a jaxpr or a tuple of jaxprs."""
    if isinstance(param, tuple) and any(map(interpreter.is_jaxpr, param)):
        return tuple(map(_nested, param))
    if not interpreter.is_jaxpr(param) or not _pads(param):
        return param
    types = [avals.abstract(variable.aval) for variable in interpreter.opened(param).invars]
    closed = tracing.close(lambda *flat: _run(param, flat), types)
    is_closed = hasattr(param, "jaxpr")  # in JAX 0.10 a jaxpr with its constants is of another class
    return closed if is_closed else interpreter.opened(closed)
