"""The only code that knows JAX versions: 0.10 to 0.12."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
from jax.interpreters import partial_eval


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of flat arguments as JAX traced it, with the arrays it closed over made arguments."""

    jaxpr: Any
    consts: tuple[Any, ...]

    @property
    def out_avals(self) -> list[Any]:
        return [variable.aval for variable in self.jaxpr.outvars]

    def __call__(self, consts: Sequence[Any], *arguments: Any) -> list[Any]:
        # Version 0.11 merged ClosedJaxpr into Jaxpr; pairing equations and constants is spelled the same.
        closed: Any = jex_core.ClosedJaxpr(self.jaxpr, tuple(consts))
        outputs = jex_core.jaxpr_as_fun(closed)(*arguments)
        return [jnp.asarray(output) for output in outputs]  # those that were constants come as Python numbers

    def inputs_used_by(self, output: int) -> list[bool]:
        """Which arguments the given output is computed from, at any depth of nested functions."""
        wanted = [position == output for position in range(len(self.jaxpr.outvars))]
        return partial_eval.dce_jaxpr(self.jaxpr, wanted, instantiate=False)[1]


def trace(fun: Callable[..., Sequence[Any]], *arguments: Any) -> Traced:
    """Traces `fun` at flat arguments: arrays, tracers or abstract values.

    The trace is never taken from JAX's caches, which go by the identity of a function: one that reads a
    global sees today's value of it.
    """
    closed = jax.make_jaxpr(lambda *flat: fun(*flat))(*arguments)
    return Traced(getattr(closed, "jaxpr", closed), tuple(closed.consts))


def abstract(array: Any, num_rows: int | None = None) -> jax.ShapeDtypeStruct:
    """The type of `array`; with `num_rows`, of that many of its rows."""
    aval = jax.typeof(array)
    shape = aval.shape if num_rows is None else (num_rows, *aval.shape[1:])
    placement = {}
    if not aval.sharding.mesh.empty:  # inside shard_map, or on a mesh with explicit axes
        placement = {"sharding": aval.sharding, "manual_axis_type": aval.manual_axis_type}
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type, **placement)


def zeros_of(aval: Any, dtype: Any) -> jax.Array:
    """Zeros of the shape of `aval` that vary over the same mesh axes, as the carry of a scan must."""
    zeros = jnp.zeros(aval.shape, dtype)
    varying = aval.manual_axis_type.varying
    return jax.lax.pcast(zeros, tuple(varying), to="varying") if varying else zeros


def temporaries(compiled: Any) -> int:
    """The bytes that a compiled program needs beside its arguments and results, as XLA reports them.

    Its `peak_memory_in_bytes` is of no use on the CPU, where it is the same for every program.
    """
    return compiled.memory_analysis().temp_size_in_bytes


def jit_is_disabled() -> bool:
    """Whether the user runs under `jax.disable_jit()`."""
    config: Any = jax.config
    return config.jax_disable_jit


def default_device() -> Any:
    """Where arrays go that say nothing themselves: that of `jax.default_device(...)`, or None."""
    config: Any = jax.config
    return config.jax_default_device
