"""Traces functions of flat arrays to jaxprs, with the arrays they close over made arguments."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import partial_eval

from anybatch.jaxprs.interpreter import call, evaluate, interpret, jax_core, opened, walk


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of flat arguments as JAX traced it, with the arrays it closed over made arguments."""

    jaxpr: Any  # without those arrays: a program that keeps it keeps no array alive
    num_arguments: int
    out_avals: list[Any]
    bound: tuple[Any, ...] = ()  # arrays that it closes over and that never change
    inner: tuple[Any, ...] = ()  # arrays that its nested functions closed over, from before these were inlined

    def __call__(self, consts: Sequence[Any], *arguments: Any) -> list[Any]:
        # Version 0.11 merged ClosedJaxpr into Jaxpr; pairing equations and constants is spelled the same.
        closed: Any = jax_core().ClosedJaxpr(self.jaxpr, (*self.inner, *consts))
        if jax.sharding.get_abstract_mesh().manual_axes:
            outputs = interpret(closed, arguments, evaluate)
        else:
            outputs = call(closed, *arguments)
        return [jnp.asarray(output) for output in outputs]  # outputs that are constants come as Python numbers

    @property
    def arguments(self) -> list[Any]:
        """The variables of the arguments. From 0.11 on, those of closed-over arrays may stand before them."""
        return self.jaxpr.invars[len(self.jaxpr.invars) - self.num_arguments :]

    @property
    def has_effects(self) -> bool:
        """Whether running it does anything beyond its results: prints, calls back, mutates."""
        return bool(self.jaxpr.effects)

    def inputs_used_by(self, output: int) -> list[bool]:
        """Which arguments the given output is computed from, at any depth of nested functions."""
        used = self._alone(output)[1]
        return used[len(used) - self.num_arguments :]

    def text_of(self, output: int) -> str:
        """The program of one output alone."""
        return str(self._alone(output)[0])

    def _alone(self, output: int) -> tuple[Any, list[bool]]:
        wanted = [position == output for position in range(len(self.jaxpr.outvars))]
        return partial_eval.dce_jaxpr(self.jaxpr, wanted, instantiate=False)

    def without_unused(self) -> "Traced":
        """The same program without the equations whose results are not used, at any depth of nested functions."""
        used, _ = partial_eval.dce_jaxpr(self.jaxpr, [True] * len(self.jaxpr.outvars), instantiate=True)
        return dataclasses.replace(self, jaxpr=used)

    def uses_dtype(self, dtype: Any) -> bool:
        """Whether any value in it has that dtype, at any depth of nested functions."""
        values = [value for equation in walk(self.jaxpr) for value in (*equation.invars, *equation.outvars)]
        return any(getattr(value.aval, "dtype", None) == dtype for value in (*self.jaxpr.invars, *values))


def trace(fun: Callable[..., Sequence[Any]], *arguments: Any) -> tuple[Traced, tuple[Any, ...]]:
    """Traces `fun` at flat arguments: arrays, tracers or abstract values. Also returns the arrays that it closes over.

    The trace is never taken from JAX's caches, which go by the identity of a function. So a function that reads a
    global sees the global's present value.
    """
    closed = jax.make_jaxpr(lambda *flat: fun(*flat))(*arguments)
    consts = tuple(closed.consts)
    jaxpr = opened(closed)
    if getattr(jaxpr, "consts", ()):  # from 0.11 on
        jaxpr = jax_core().Jaxpr(
            jaxpr.constvars, jaxpr.invars, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, jaxpr.debug_info
        )
    return Traced(jaxpr, len(arguments), list(closed.out_avals)), consts


def retrace(fun: Callable[..., Sequence[Any]], const_types: Sequence[Any], types: Sequence[Any]) -> Traced:
    """Traces a function of flat arrays, the first of which become the arrays that the result closes over.

    Arrays that the function closes over itself are kept in the result.
    """
    number = len(const_types)
    closed = jax.make_jaxpr(lambda *flat: fun(*flat))(*const_types, *types)
    inner = opened(closed)
    info = inner.debug_info._replace(arg_names=None, result_paths=None)
    jaxpr = jax_core().Jaxpr(
        [*inner.constvars, *inner.invars[:number]],
        inner.invars[number:],
        inner.outvars,
        inner.eqns,
        inner.effects,
        info,
    )
    return Traced(jaxpr, len(types), list(closed.out_avals), inner=tuple(closed.consts))


def close(fun: Callable[..., Sequence[Any]], types: Sequence[Any]) -> Any:
    """The closed jaxpr of a function of flat arrays that closes over none, as the body of a loop is one."""
    return jax.make_jaxpr(lambda *flat: fun(*flat))(*types)


def used_part(closed: Any) -> Any:
    """A jaxpr without the equations whose results are not used."""
    return partial_eval.dce_jaxpr(opened(closed), [True] * len(opened(closed).outvars))[0]
