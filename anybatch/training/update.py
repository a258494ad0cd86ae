"""What a step computes: the gradient of the batch, and the state after it."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from anybatch.arguments import Arguments
from anybatch.computation import Gradient
from anybatch.errors import InputError
from anybatch.gradient import compute, settings_of
from anybatch.gradient_noise import NoiseScale
from anybatch.memory import memory_budget
from anybatch.placement import local_bytes
from anybatch.routes import squares
from anybatch.settings import Settings
from anybatch.trees import describe, named_leaves
from anybatch.updates import together

# Of a batch, in an error.
MOST_LINES = 10


@dataclasses.dataclass(frozen=True)
class Given:
    """What one call of a step was given: a state and a batch, their arrays apart from what is constant."""

    kind: Any  # of the state
    arrays: list[Any]  # of the state
    about_state: Any
    rows: list[Any]  # of the batch and the keyword arguments
    about_call: Any

    def with_arrays(self, arrays: list[Any], rows: list[Any]) -> "Given":
        """The same with other arrays."""
        return dataclasses.replace(self, arrays=arrays, rows=rows)

    def about_arrays(self) -> Any:
        """What a program is compiled for, of the arrays of the state."""
        return tuple((array.shape, array.dtype, array.sharding) for array in self.arrays)

    def about_rows(self) -> Any:
        """What a program is compiled for, of the batch."""
        return tuple((row.shape, row.dtype) for row in self.rows)

    @property
    def name(self) -> str:
        """The types of the batch in words, and those of the state in short; the same in every process."""
        state = "; ".join(map(describe, self.arrays))
        return f"{', '.join(map(describe, self.rows))} ({hashlib.sha256(state.encode()).hexdigest()[:8]})"


@dataclasses.dataclass(frozen=True)
class Update:
    """The computation of a step.

    Args:
      loss: of the whole batch.
      optimizer: of optax; None for states that bring their own.
      has_aux: whether the loss returns aux.
      noise_scale: whether the noise in the gradient is wanted.
      skip_nonfinite: whether a gradient that is not finite is to change nothing.
      options: those of `value_and_grad`.
    """

    loss: Callable[..., Any]
    optimizer: Any
    has_aux: bool
    noise_scale: bool
    skip_nonfinite: bool
    options: dict[str, Any]

    def problem(self, given: Given) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function to differentiate, and its arguments: what is trained, the batch, a key if any, and the rest."""
        parts = given.kind.parts(given.arrays, given.about_state)
        batch, kwargs = together(given.rows, given.about_call)
        keys = () if parts.key is None else (parts.key,)

        def fun(params: Any, batch: Any, *others: Any, **kwargs: Any) -> Any:
            *keys, rest = others
            result, changed = given.kind.call(self.loss, params, rest, (batch, *keys), kwargs)
            if not self.has_aux:
                return result, (None, changed)
            loss, aux = result
            return loss, (aux, changed)

        return fun, (parts.trained, batch, *keys, parts.rest), kwargs

    def settings(self, fun: Callable[..., Any], given: Given, **changes: Any) -> Settings:
        """The options of the gradient of `fun`, which has aux of its own."""
        options = self.options | changes
        if given.kind.changes_model and options.get("reduction", "infer") != "infer":
            options["aux_reduction"] = (options.get("aux_reduction"), "last")
        elif options.get("aux_reduction") is not None:
            options["aux_reduction"] = (options["aux_reduction"], None)
        return settings_of(fun, 0, True, options, noise=self.noise_scale)

    def gradient(self, given: Given) -> Gradient:
        """The gradient of a step, outside of it: to be planned."""
        fun, args, kwargs = self.problem(given)
        changes: dict[str, Any] = {}
        memory = self.options.get("memory")
        if memory is not None and not (isinstance(memory, str) and "%" in memory):
            changes["memory"] = max(1, (memory_budget(memory) or 0) - beside_gradient(given, args))
        if self.options.get("mesh") is not None and self.options.get("param_specs") is None:
            changes["param_specs"] = jax.tree.map(_spec, args[0])
        settings = self.settings(fun, given, **changes)
        return Gradient(fun, settings, _sorted(fun, settings, args, kwargs))

    def results(self, given: Given, settings: Settings) -> tuple[list[Any], dict[str, Any]]:
        """The arrays of the state after the step, and what the metrics tell of it."""
        fun, args, kwargs = self.problem(given)
        arguments = _sorted(fun, settings, args, kwargs)
        value, (aux, changed), grads, sums = compute(fun, settings, arguments)
        noise = NoiseScale.of_step(*sums) if self.noise_scale else None
        leaves = jax.tree.leaves(grads)
        norm = jnp.sqrt(squares.square(leaves))
        # Of a complex parameter, JAX returns the conjugate of the direction in which the loss rises.
        grads = jax.tree.map(lambda leaf: jnp.conj(leaf) if jnp.iscomplexobj(leaf) else leaf, grads)
        good = jnp.ones((), bool)
        if self.skip_nonfinite:
            for leaf in leaves:
                good &= jnp.all(jnp.isfinite(leaf))
        extra = {"value": value, "grad": grads, "value_fn": _value_fn(fun, args, kwargs, settings)}
        with jax.named_scope("anybatch.update"):
            new = given.kind.updated(given.arrays, given.about_state, self.optimizer, grads, changed, good, extra)
        return new, {"loss": value, "aux": aux, "gradient_norm": norm, "skipped": ~good, "noise": noise}


def _sorted(fun: Callable[..., Any], settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """The arguments of the loss, sorted. The batch is the second, and has at least one example.

    Raises:
      InputError: for a batch without examples.
    """
    arguments = settings.roles.sort(fun, args, kwargs)
    if not arguments.num_examples:
        named = named_leaves("batch", args[1])
        raise InputError(
            "A step needs at least one example: its optimizer would move the parameters even without a gradient",
            given="\n".join([f"{name}: {describe(leaf)}" for name, leaf in named[:MOST_LINES]] + [""]),
            remedy=f"Leave such a batch out: if len({named[0][0]}): state, metrics = step(state, batch)",
        )
    return arguments


def _value_fn(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings
) -> Callable[[Any], Any]:
    """The loss as a function of what is trained, for optimizers that search along a line: by microbatches, too."""
    settings = dataclasses.replace(settings, noise=False)

    def computed(params: Any) -> tuple[Any, Any]:
        value, _, grads, _ = compute(fun, settings, settings.roles.sort(fun, (params, *args[1:]), kwargs))
        return value, grads

    @jax.custom_vjp
    def value_fn(params: Any) -> Any:
        return computed(params)[0]

    def backward(grads: Any, cotangent: Any) -> Any:
        return (jax.tree.map(lambda grad: grad * cotangent.astype(grad.dtype), grads),)

    value_fn.defvjp(computed, backward)
    return value_fn


def beside_gradient(given: Given, args: tuple[Any, ...]) -> int:
    """The bytes of a state on one device that its gradient does not see: what the optimizer keeps."""
    seen = {id(leaf) for leaf in jax.tree.leaves((args[0], args[2:]))}
    return sum(local_bytes(array) for array in given.arrays if id(array) not in seen)


def _spec(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
