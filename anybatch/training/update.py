"""What a step computes: the gradient of the batch, and the state after it."""

import dataclasses
import hashlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from anybatch.call.arguments import Arguments, Roles
from anybatch.call.aux_outputs import NewState
from anybatch.call.checks import describe, named_leaves
from anybatch.call.loss import is_pair, shown
from anybatch.call.memory import memory_budget
from anybatch.call.models import PartitionedCall, partition_models, with_objects
from anybatch.call.options import Options
from anybatch.call.placement import local_bytes
from anybatch.errors import InputError, user_stacklevel
from anybatch.gradient_noise.noise_scale import NoiseScale
from anybatch.gradients import squared_norms
from anybatch.gradients.computation import Gradient
from anybatch.gradients.value_and_grad import compute, compute_gradient
from anybatch.training.state import KINDS, WithObjects, together

# Of a batch, in an error.
MOST_LINES = 10


@dataclasses.dataclass(frozen=True)
class StepArguments:
    """What one call of a step was given: a state and a batch, their arrays apart from what is constant."""

    kind: Any  # of the state
    arrays: list[Any]  # of the state
    about_state: Any
    rows: list[Any]  # of the batch and the keyword arguments
    about_call: Any

    def with_arrays(self, arrays: list[Any], rows: list[Any]) -> "StepArguments":
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
      has_state: whether the loss takes, and returns, the state of a model.
      skip_nonfinite: whether a gradient that is not finite is to change nothing.
      options: the options of the gradient.
    """

    loss: Callable[..., Any]
    optimizer: Any
    has_state: bool
    skip_nonfinite: bool
    options: Options

    @property
    def has_aux(self) -> bool:
        """Whether the loss returns aux."""
        return self.options.has_aux

    @property
    def noise_scale(self) -> bool:
        """Whether the noise in the gradient is wanted."""
        return self.options.noise

    def call(self, given: StepArguments) -> tuple[Any, PartitionedCall]:
        """The state, and the call of the loss: with the model, the batch, a key and the state of the model, if any."""
        state = given.kind.merged(given.arrays, given.about_state)
        model, key, wrt = given.kind.model_of(state)
        batch, kwargs = together(given.rows, given.about_call)
        kwargs = with_objects(kwargs, given.kind.objects_of(state))
        others = [] if key is None else [key]
        if self.has_state:
            others.append(given.kind.model_state_of(state)[1])

        self._check_signature(given.kind, [] if key is None else ["key"], kwargs)

        def fun(params: Any, batch: Any, *others: Any, **kwargs: Any) -> Any:
            if not self.has_state:
                return self.loss(params, batch, *others, **kwargs)
            *keys, before = others
            return self._with_new_state(self.loss(params, before, batch, *keys, **kwargs), before)

        has_aux = self.has_aux or self.has_state
        roles = Roles.of(argnums=0, batch_argnums=1, rng_argnums=())
        roles = dataclasses.replace(roles, filters=() if wrt is None else (wrt,))
        return state, partition_models(fun, roles, has_aux, (model, batch, *others), kwargs, filters=True)

    def _check_signature(self, kind: Any, keys: list[str], kwargs: dict[str, Any]) -> None:
        """Checks that the loss takes what a step passes, as far as its signature says."""
        try:
            signature = inspect.signature(self.loss)
        except (TypeError, ValueError):
            return
        is_nnx = kind in (KINDS["nnx"], WithObjects(KINDS["nnx"]))
        first = "model" if is_nnx else "params"
        passed = [first, *(["model_state"] if self.has_state else []), "batch", *keys]
        try:
            signature.bind(*passed, **kwargs)
        except TypeError as error:
            call = ", ".join(passed + [f"{name}=..." for name in kwargs])
            raise InputError(
                f"The loss must take what the step passes: loss({call})",
                given=f"loss{signature}: {error}",
                remedy=_ways_to_call(signature, passed, kwargs, is_nnx),
            ) from None

    def _with_new_state(self, result: Any, before: Any) -> tuple[Any, Any]:
        """What a loss returns, with the state of the model marked as such, and checked."""
        must = "(loss, (aux, model_state))" if self.has_aux else "(loss, model_state)"
        if not is_pair(result) or (self.has_aux and not is_pair(result[1])):
            raise InputError(
                f"With has_state=True{' and has_aux=True' if self.has_aux else ''} the loss must return {must}",
                given=shown(result),
                remedy=f"Return {must}, or leave has_state out.",
            )
        value, after = result
        aux, after = after if self.has_aux else (None, after)
        old, new = (
            {name: np.shape(leaf) for name, leaf in named_leaves("model_state", each)} for each in (before, after)
        )
        trees: list[Any] = [jax.tree.structure(before), jax.tree.structure(after)]
        if trees[0] != trees[1] or old != new:
            raise InputError(
                "The loss must return the state of the model in the tree and shapes that it was given",
                given=f"{shown(after)} for {shown(before)}",
                remedy='Return the part that was passed in, e.g. updates["batch_stats"] of '
                'model.apply(..., mutable=["batch_stats"]).',
            )
        for (name, one), (_, other) in zip(
            named_leaves("model_state", before), named_leaves("model_state", after), strict=True
        ):
            types = [jax.dtypes.result_type(each) for each in (one, other)]
            if jax.dtypes.issubdtype(types[1], jnp.inexact) and not jax.dtypes.issubdtype(types[0], jnp.inexact):
                raise InputError(
                    "The state of a model keeps its types from step to step",
                    given=f"{name} = {types[0]} before the loss and {types[1]} after it",
                    remedy="Begin with a floating-point array, e.g. jnp.zeros((), jnp.float32), or round in the loss.",
                )
        return value, (aux, NewState(after))

    def options_of(self, call: PartitionedCall, **changes: Any) -> Options:
        """The options of the gradient of a call."""
        options = dataclasses.replace(self.options, **changes)
        if self.has_state:
            declared = None if options.reduction == "infer" else (options.aux_reduction, "last")
            options = dataclasses.replace(options, has_aux=True, aux_reduction=declared)
        return call.options(options)

    def gradient(self, given: StepArguments) -> Gradient:
        """The gradient of a step, outside of it: to be planned."""
        _, call = self.call(given)
        changes: dict[str, Any] = {}
        memory = self.options.memory
        if memory is not None and not (isinstance(memory, str) and "%" in memory):
            changes["memory"] = max(1, (memory_budget(memory) or 0) - beside_gradient(given, call))
        if self.options.mesh is not None and self.options.param_specs is None:
            changes["param_specs"] = jax.tree.map(_spec, call.args[0].trained)
        options = self.options_of(call, **changes)
        return Gradient(call.fun, options, sorted_arguments(call, options))

    def results(self, given: StepArguments, options: Options) -> tuple[list[Any], dict[str, Any]]:
        """The arrays of the state after the step, and what the metrics tell of it."""
        state, call = self.call(given)
        gradient = Gradient(call.fun, options, sorted_arguments(call, options))
        value, aux, grads, sums = compute_gradient(gradient)
        if gradient.ignores_batch:
            warnings.warn(
                "The loss does not depend on the batch: every step computes the same. If it closes over its data, take "
                "them from its argument instead: def loss(params, batch): ..., called by step(state, batch).",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        if call.changes_attributes(aux):
            warnings.warn(
                "The loss changes attributes of a model of NNX that are no variables, and a step does not keep these. "
                "Set them before, e.g. model.train(), or keep what changes in an nnx.Variable.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        aux = call.close(aux, options)
        changes = {}
        if self.has_state:
            aux, new = aux
            changes[given.kind.model_state_of(state)[0]] = new.values
        noise = NoiseScale.of_step(*sums) if self.noise_scale else None
        leaves = jax.tree.leaves(grads)
        norm = jnp.sqrt(squared_norms.square(leaves))
        # Of a complex parameter, JAX returns the conjugate of the direction in which the loss rises.
        grads = jax.tree.map(lambda leaf: jnp.conj(leaf) if jnp.iscomplexobj(leaf) else leaf, grads)
        good = jnp.ones((), bool)
        if self.skip_nonfinite:
            for leaf in leaves:
                good &= jnp.all(jnp.isfinite(leaf))
        extra = {"value": value, "grad": grads, "value_fn": _value_fn(call, options)}
        with jax.named_scope("anybatch.update"):
            new_arrays = given.kind.updated(state, given.arrays, self.optimizer, grads, changes, good, extra)
        return new_arrays, {"loss": value, "aux": aux, "gradient_norm": norm, "skipped": ~good, "noise": noise}


def sorted_arguments(call: PartitionedCall, options: Options) -> Arguments:
    """The arguments of the loss, sorted. The batch is the second, and has at least one example.

    Raises:
      InputError: for a batch without examples.
    """
    arguments = options.roles.sort(call.fun, call.args, call.kwargs)
    if not arguments.num_examples:
        named = named_leaves("batch", call.args[1])
        raise InputError(
            "A step needs at least one example: its optimizer would move the parameters even without a gradient",
            given="\n".join([f"{name}: {describe(leaf)}" for name, leaf in named[:MOST_LINES]] + [""]),
            remedy=f"Leave such a batch out: if len({named[0][0]}): state, metrics = step(state, batch)",
        )
    return arguments


def _ways_to_call(signature: inspect.Signature, passed: list[str], kwargs: dict[str, Any], is_nnx: bool) -> str:
    """What to do about a loss that does not take what a step passes."""
    parameters = list(signature.parameters.values())
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    place = passed.index("batch")
    more = [name for name in names if name in required and name not in kwargs][len(passed) :]
    more += [name for name in required if name not in names and name not in kwargs]
    if "batch" in names[place + 1 :]:  # in another order
        ordered = [*names[:place], "batch", *(name for name in names[place:] if name != "batch")]
        others = [f"{name}={name}" for name in ordered[len(passed) :]]
        return (
            f"The batch is the argument at position {place}: ab.train_step(lambda {', '.join(ordered)}: "
            f"loss({', '.join(names)})), then step({', '.join(['state', 'batch', *others])})."
        )
    if not more:
        if "key" in passed and len(names) < len(passed):
            return "The state has a key: def loss(params, batch, key), or step.init(params) without a key."
        return "Leave out what the loss does not take, or add it to the signature of the loss."
    keys = [name for name in more if any(word in name.lower() for word in ("key", "rng", "seed"))]
    if keys and is_nnx:
        name = keys[0]
        return (
            f"Keep the random streams in the model (nnx.Dropout(0.1, rngs=rngs)), or pass them by keyword: {name} = "
            f"nnx.Rngs(0), then step(state, batch, {name}={name})."
        )
    if keys:
        return "Let the state have a key: state = step.init(params, key=jax.random.key(0))."
    rows = [names[place], *more] if len(names) > place else more
    tree = ", ".join(f'"{name}": {name}' for name in rows)
    by_name = ", ".join(f"{name}={name}" for name in more)
    listed = ", ".join(f'"{name}"' for name in more) + ("," if len(more) == 1 else "")
    return (
        f"Make the batch one tree: step(state, {{{tree}}}), with def loss({', '.join(passed)}). Or pass the others by "
        f"keyword: ab.train_step(loss, ..., batch_argnames=({listed})), then step(state, {rows[0]}, {by_name})."
    )


def _value_fn(call: PartitionedCall, options: Options) -> Callable[[Any], Any]:
    """The loss as a function of what is trained, for optimizers that search along a line: by microbatches, too."""
    options = dataclasses.replace(options, noise=False)

    def value_and_gradient(params: Any) -> tuple[Any, Any]:
        model, *others = call.args
        args = (dataclasses.replace(model, trained=params), *others)
        value, _, grads, _ = compute(call.fun, options, options.roles.sort(call.fun, args, call.kwargs))
        return value, grads

    @jax.custom_vjp
    def value_fn(params: Any) -> Any:
        return value_and_gradient(params)[0]

    def backward(grads: Any, cotangent: Any) -> Any:
        return (jax.tree.map(lambda grad: grad * cotangent.astype(grad.dtype), grads),)

    value_fn.defvjp(value_and_gradient, backward)
    return value_fn


def beside_gradient(given: StepArguments, call: PartitionedCall) -> int:
    """The bytes of a state on one device that its gradient does not see: what the optimizer keeps."""
    seen = {id(leaf) for leaf in jax.tree.leaves((call.args[0], call.args[2:], call.kwargs))}
    return sum(local_bytes(array) for array in given.arrays if id(array) not in seen)


def _spec(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
