"""Rewrites the sharding constraints of a loss so that it can be traced inside a `shard_map` over some mesh axes.

A loss for many devices may constrain how its activations are sharded: over the examples and over axes of the model.
Inside a `shard_map` over the data axes, each device has its own examples, so constraints over these axes already hold,
and JAX refuses them. Constraints over the other axes are still wanted. So each constraint becomes a hint: a primitive
that is the identity, and that becomes a constraint over the other axes when it is compiled.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anybatch.errors import InputError
from anybatch.jaxprs import avals, interpreter, tracing
from anybatch.jaxprs.graph import uses
from anybatch.jaxprs.primitives import CALLS, called_jaxpr


@functools.cache
def _hint_p() -> Any:
    """The primitive of hints, made when it is first used: that imports `jax.extend`, which takes time."""
    primitive = interpreter.jax_core().Primitive("sharding_hint")
    primitive.def_impl(lambda array, **_: array)
    primitive.def_abstract_eval(lambda array, **_: array)
    ad.deflinear2(primitive, lambda cotangent, _, **params: [primitive.bind(cotangent, **params)])
    batching.primitive_batchers[primitive] = _batch
    mlir.register_lowering(primitive, _lower)
    return primitive


def _batch(arrays: Sequence[Any], axes: Sequence[Any], *, mesh: Mesh, spec: PartitionSpec) -> tuple[Any, Any]:
    if axes[0] is None:
        return _hint_p().bind(arrays[0], mesh=mesh, spec=spec), None
    entries = [*spec, *[None] * (arrays[0].ndim - 1 - len(spec))]
    entries.insert(axes[0], PartitionSpec.UNCONSTRAINED)
    return _hint_p().bind(arrays[0], mesh=mesh, spec=PartitionSpec(*entries)), axes[0]


def _lower(context: Any, operand: Any, *, mesh: Mesh, spec: PartitionSpec) -> Any:
    def constrain(array: Any) -> Any:
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

    return mlir.lower_fun(constrain, multiple_results=False)(context, operand)


def without_mesh(
    traced: tracing.Traced, const_types: Sequence[Any], types: Sequence[Any], mesh: Mesh, axes: tuple[str, ...]
) -> tracing.Traced:
    """The program with hints instead of sharding constraints, and without any other mention of a mesh.

    The hints are on `mesh`, and do not name `axes`, those of the `shard_map`. The types are those of the arrays that
    the program closes over, and of its arguments.
    """
    if not _mentions_mesh(traced.jaxpr):
        return traced
    rewriter = _Rewriter(mesh, axes)

    def run(*flat: Any) -> list[Any]:
        return rewriter.run(traced.jaxpr, [*traced.inner, *flat])

    with _no_mesh():
        return tracing.retrace(run, const_types, types)


def _no_mesh() -> Any:
    """A context without a mesh."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


class _Rewriter:
    """Evaluates a jaxpr with hints in the place of its sharding constraints."""

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        self.mesh, self.axes = mesh, axes

    def run(self, jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
        """Calls a jaxpr, open or closed, equation by equation."""
        return interpreter.interpret(jaxpr, arguments, self._equation)

    def _equation(self, equation: Any, operands: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "sharding_constraint":
            return [self._hint(operands[0], params["sharding"])]
        nested = interpreter.jaxprs_in(equation)
        if name in CALLS and any(map(_mentions_mesh, nested)):
            # Without the shardings that it may have for its arguments.
            return self.run(called_jaxpr(equation), operands)
        if not nested:
            return interpreter.evaluate(
                equation, operands, {key: _without_sharding(key, each) for key, each in params.items()}
            )
        if name == "custom_jvp_call":  # its derivative may mention a mesh even if it does not itself
            return self._custom_jvp(equation, operands)
        if name.startswith("custom_") and any(uses(each, "sharding_constraint") for each in nested):
            raise InputError(
                "With mesh=, a function with a custom derivative must not constrain the sharding of its values",
                given=f"a sharding constraint inside a {name.removesuffix('_call')}",
                remedy="Move the constraint out of the function: to its arguments or its results.",
            )
        if name.startswith("custom_") or name == "shard_map" or not any(map(_mentions_mesh, nested)):
            return interpreter.evaluate(equation, operands)
        # Results of all branches must have the same sharding. In a derivative they may not, if only one has a hint.
        inside = self if name != "cond" else _Rewriter(self.mesh, self.mesh.axis_names)
        return interpreter.evaluate(equation, operands, {key: inside._nested(each) for key, each in params.items()})

    def _custom_jvp(self, equation: Any, operands: list[Any]) -> list[Any]:
        """Rewrites a `custom_jvp`: the function and its derivative."""

        @jax.custom_jvp
        def function(*operands: Any) -> tuple[Any, ...]:
            return tuple(self.run(equation.params["call_jaxpr"], operands))

        @function.defjvp
        def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
            def push(primals: Any, tangents: Any) -> tuple[Any, Any]:
                return jax.jvp(lambda *values: tuple(interpreter.evaluate(equation, values)), primals, tangents)

            given = (tuple(primals), tuple(tangents))
            leaves, tree = jax.tree.flatten(given)
            types = [avals.abstract(avals.bare(leaf)) for leaf in leaves]
            with _no_mesh():
                traced, shape = jax.make_jaxpr(push, return_shape=True)(*jax.tree.unflatten(tree, types))
            return jax.tree.unflatten(jax.tree.structure(shape), self.run(traced, leaves))

        return list(function(*operands))

    def _hint(self, array: Any, sharding: Any) -> Any:
        """An array with a hint for the axes of a constraint that are left; unchanged if none is."""
        spec = getattr(sharding, "spec", None)
        if spec is None:
            return array

        def remaining(entry: Any) -> Any:
            if entry is None or entry is PartitionSpec.UNCONSTRAINED:
                return entry
            names = tuple(name for name in ((entry,) if isinstance(entry, str) else entry) if name not in self.axes)
            return names or None

        entries = [remaining(entry) for entry in spec]
        if not any(isinstance(entry, tuple) for entry in entries):
            return array
        return _hint_p().bind(array, mesh=self.mesh, spec=PartitionSpec(*entries))

    def _nested(self, param: Any) -> Any:
        """A parameter of an equation, rewritten if it is a jaxpr or a tuple of jaxprs."""
        if isinstance(param, tuple) and any(map(interpreter.is_jaxpr, param)):
            return tuple(self._nested(each) for each in param)
        if not interpreter.is_jaxpr(param):
            return param
        types = [avals.abstract(avals.bare_type(variable.aval)) for variable in interpreter.opened(param).invars]
        closed = tracing.close(lambda *flat: self.run(param, flat), types)
        is_closed = hasattr(param, "jaxpr")  # in JAX 0.10 a jaxpr with its constants is of another class
        return closed if is_closed else interpreter.opened(closed)


def _without_sharding(key: str, param: Any) -> Any:
    """A parameter of an equation, or None for a sharding on a mesh."""
    return None if key in ("sharding", "out_sharding") and isinstance(param, NamedSharding) else param


def _mentions_mesh(jaxpr: Any) -> bool:
    """Whether a jaxpr was traced under a mesh or has shardings in it, at any depth but inside a `shard_map`."""
    for equation in interpreter.equations_of(jaxpr):
        if equation.primitive.name == "sharding_constraint" or not equation.ctx.cur_abstract_mesh.empty:
            return True
        if any(_without_sharding(key, param) is not param for key, param in equation.params.items()):
            return True
        if equation.primitive.name != "shard_map" and any(map(_mentions_mesh, interpreter.jaxprs_in(equation))):
            return True
    return False
