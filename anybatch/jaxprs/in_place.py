"""A primitive for programs that accumulate gradients in place, correct under every transformation.

A backward pass that writes into `jax.new_ref` buffers keeps one gradient in memory instead of two. But JAX cannot
transform such a program: under `vmap` and `checkpoint` it raises, and the gradient of a scan around it is silently
wrong (in 0.10, 0.11 and 0.12). So the program is wrapped in a primitive that has two forms of the same function. It
compiles to the form that writes in place; `grad`, `jvp` and `vmap` use the pure form.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir

from anybatch.jaxprs import interpreter

Function = Callable[..., list[Any]]


def call(in_place: Function, pure: Function, *arrays: Any) -> list[Any]:
    """Computes `in_place(*arrays)`. `pure` must be the same function, written without references."""
    jaxpr = jax.make_jaxpr(in_place)(*arrays)
    # Whether it has equations that JAX rewrites before lowering (from 0.11 on, those of `custom_root`).
    if getattr(interpreter.opened(jaxpr), "is_high", False):
        return pure(*arrays)
    # The parameter has the name that `jit` uses, so that code that walks a jaxpr finds the scan inside.
    return _primitive().bind(*arrays, jaxpr=jaxpr, pure=pure)


def _lower(context: Any, *operands: Any, jaxpr: Any, pure: Function) -> Sequence[Any]:
    # lower_fun turns the references into ordinary values. Lowering the jaxpr itself would not.
    return mlir.lower_fun(interpreter.as_function(jaxpr), multiple_results=True)(context, *operands)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Any, pure: Function) -> tuple[Any, Any]:
    moving = [position for position, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_moving(*values: Any) -> list[Any]:
        replaced = dict(zip(moving, values, strict=True))
        return pure(*(replaced.get(position, primal) for position, primal in enumerate(primals)))

    return jax.jvp(of_moving, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))


def _batch(axis: Any, arrays: Sequence[Any], axes: Sequence[Any], *, jaxpr: Any, pure: Function) -> Any:
    names = {"axis_name": axis.name, "axis_size": axis.size, "spmd_axis_name": axis.spmd_name}
    outputs = jax.vmap(pure, in_axes=tuple(axes), **names)(*arrays)
    return outputs, [0] * len(outputs)


@functools.cache
def _primitive() -> Any:
    """The primitive, made when it is first used: that imports `jax.extend`, which takes time."""
    primitive = interpreter.jax_core().Primitive("accumulate_in_place")
    primitive.multiple_results = True
    # Without effects: the references do not leave the program.
    primitive.def_abstract_eval(lambda *_, jaxpr, pure: list(jaxpr.out_avals))
    primitive.def_impl(lambda *arrays, jaxpr, pure: pure(*arrays))  # reached under jax.disable_jit()
    mlir.register_lowering(primitive, _lower)
    ad.primitive_jvps[primitive] = _jvp
    batching.fancy_primitive_batchers[primitive] = _batch
    return primitive
