"""The computation of one step, as a function to compile: the gradient of the batch, and the updated state."""

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Sequence
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
from anybatch.errors import InputError, warn
from anybatch.gradient_noise.noise_scale import NoiseScale
from anybatch.gradients import squared_norms
from anybatch.gradients.computation import Gradient
from anybatch.gradients.value_and_grad import compute, compute_gradient
from anybatch.training import offload
from anybatch.training.arrays import Constants, merge_arrays
from anybatch.training.state import NewGradient, StateAdapter


@dataclasses.dataclass(frozen=True)
class StepInputs:
    """The state and the batch of one step, with arrays separated from constants."""

    adapter: StateAdapter  # for the type of the state
    state_arrays: list[Any]
    state_constants: Any
    batch_arrays: list[Any]  # of the batch and of the keyword arguments
    batch_constants: Constants
    on_host: Sequence[bool] = ()  # which arrays of the state are to be in the host's memory

    def with_arrays(self, state_arrays: list[Any], batch_arrays: list[Any]) -> "StepInputs":
        """The same inputs with other arrays."""
        return dataclasses.replace(self, state_arrays=state_arrays, batch_arrays=batch_arrays)

    def state_types(self) -> Any:
        """The types of the state's arrays, as a compiled program depends on them."""
        return tuple((array.shape, array.dtype, array.sharding) for array in self.state_arrays)

    def batch_types(self) -> Any:
        """The types of the batch's arrays, as a compiled program depends on them."""
        return tuple((array.shape, array.dtype) for array in self.batch_arrays)

    @property
    def name(self) -> str:
        """The types of the batch in words, and a short hash of the rest; the same in every process.

        The rest are the types of the state, and numbers and texts among the arguments, on which the program depends.
        """
        state = "; ".join(map(describe, self.state_arrays))
        numbers = [each for each in self.batch_constants.values if isinstance(each, (bool, int, float, complex, str))]
        state += f"; {numbers}" if numbers else ""
        return f"{', '.join(map(describe, self.batch_arrays))} ({hashlib.sha256(state.encode()).hexdigest()[:8]})"


@dataclasses.dataclass(frozen=True)
class Update:
    """The computation of a step, with arguments of `train_step`, and the options of the gradient."""

    loss: Callable[..., Any]
    optimizer: Any
    has_state: bool
    skip_nonfinite: bool
    options: Options
    offload: str | None = None

    def call(self, inputs: StepInputs) -> tuple[Any, PartitionedCall]:
        """The merged state, and the call of the loss: with the model, the batch, the key and the model's state."""
        adapter = inputs.adapter
        state = adapter.merge(inputs.state_arrays, inputs.state_constants)
        model, key, wrt = adapter.model_of(state)
        batch, kwargs = merge_arrays(inputs.batch_arrays, inputs.batch_constants)
        kwargs = with_objects(kwargs, adapter.objects_of(state))
        others = [] if key is None else [key]
        if self.has_state:
            others.append(adapter.model_state_of(state)[1])

        self._check_signature([] if key is None else ["key"], kwargs, is_nnx=adapter.is_nnx)

        def fun(params: Any, batch: Any, *others: Any, **kwargs: Any) -> Any:
            if not self.has_state:
                return self.loss(params, batch, *others, **kwargs)
            *keys, before = others
            return self._with_new_state(self.loss(params, before, batch, *keys, **kwargs), before)

        has_aux = self.options.has_aux or self.has_state
        roles = Roles.of(argnums=0, batch_argnums=1, rng_argnums=())
        roles = dataclasses.replace(roles, filters=() if wrt is None else (wrt,))
        return state, partition_models(fun, roles, has_aux, (model, batch, *others), kwargs, filters=True)

    def _check_signature(self, keys: list[str], kwargs: dict[str, Any], *, is_nnx: bool) -> None:
        """Checks that the loss accepts the arguments of a step, as far as its signature says."""
        try:
            signature = inspect.signature(self.loss)
        except (TypeError, ValueError):
            return
        first = "model" if is_nnx else "params"
        passed = [first, *(["model_state"] if self.has_state else []), "batch", *keys]
        try:
            signature.bind(*passed, **kwargs)
        except TypeError as error:
            call = ", ".join(passed + [f"{name}=..." for name in kwargs])
            raise InputError(
                f"The loss must accept the arguments of the step: loss({call})",
                given=f"loss{signature}: {error}",
                remedy=_how_to_call(signature, passed, kwargs, is_nnx),
            ) from None

    def _with_new_state(self, result: Any, before: Any) -> tuple[Any, Any]:
        """The result of the loss with the new state of the model checked, and marked as such."""
        must = "(loss, (aux, model_state))" if self.options.has_aux else "(loss, model_state)"
        if not is_pair(result) or (self.options.has_aux and not is_pair(result[1])):
            raise InputError(
                f"With has_state=True{' and has_aux=True' if self.options.has_aux else ''} the loss must return {must}",
                given=shown(result),
                remedy=f"Return {must}, or leave has_state out.",
            )
        value, after = result
        aux, after = after if self.options.has_aux else (None, after)
        _check_model_state(before, after)
        return value, (aux, NewState(after))

    def options_of(self, call: PartitionedCall, **changes: Any) -> Options:
        """The options of the gradient of a call."""
        options = dataclasses.replace(self.options, **changes)
        if self.has_state:
            declared = None if options.reduction == "infer" else (options.aux_reduction, "last")
            options = dataclasses.replace(options, has_aux=True, aux_reduction=declared)
        return call.options(options)

    def gradient(self, inputs: StepInputs) -> Gradient:
        """The gradient of a step by itself, for the planner. Its budget excludes the optimizer's memory."""
        _, call = self.call(inputs)
        changes: dict[str, Any] = {}
        memory = self.options.memory
        if memory is not None and not (isinstance(memory, str) and "%" in memory):
            changes["memory"] = max(1, (memory_budget(memory) or 0) - self.kept_bytes(inputs))
        if self.options.mesh is not None and self.options.param_specs is None:
            changes["param_specs"] = jax.tree.map(_spec, call.args[0].trained)
        options = self.options_of(call, **changes)
        return Gradient(call.fun, options, sorted_arguments(call, options), may_stream=False)

    def kept_bytes(self, inputs: StepInputs) -> int:
        """The bytes on one device of arrays that the loss is not called with: the optimizer state."""
        _, call = self.call(inputs)
        seen = {id(leaf) for leaf in jax.tree.leaves((call.args[0], call.args[2:], call.kwargs))}
        kept = sum(local_bytes(array) for array in inputs.state_arrays if id(array) not in seen)
        return kept - offload.saved_bytes(inputs.state_arrays, inputs.on_host)[0] if inputs.on_host else kept

    def results(self, inputs: StepInputs, options: Options) -> tuple[list[Any], dict[str, Any]]:
        """The arrays of the state after the step, and the fields of its `Metrics`. This is what is compiled."""
        state, call = self.call(inputs)
        gradient = Gradient(call.fun, options, sorted_arguments(call, options), may_stream=False)
        value, aux, grads, sums = compute_gradient(gradient)
        if gradient.ignores_batch:
            warn(
                "The loss does not depend on the batch: every step computes the same. If the loss closes over its "
                "data, make the data an argument: def loss(params, batch): ..., called by step(state, batch)."
            )
        if call.changes_attributes(aux):
            warn(
                "The loss changes attributes of an NNX model that are not variables, and a step does not keep these "
                "changes. Set them before the step, e.g. model.train(), or keep them in an nnx.Variable."
            )
        aux = call.close(aux, options)
        changes = {}
        if self.has_state:
            aux, new = aux
            changes[inputs.adapter.model_state_of(state)[0]] = new.values
        noise = NoiseScale.of_step(*sums) if self.options.noise else None
        leaves = jax.tree.leaves(grads)
        norm = jnp.sqrt(squared_norms.square(leaves))
        grads = _ascent(grads)
        is_finite = jnp.ones((), bool)
        if self.skip_nonfinite:
            for leaf in leaves:
                is_finite &= jnp.all(jnp.isfinite(leaf))
        value_fn = _value_fn(call, options)
        extra: dict[str, Any] = {"value": value, "grad": grads, "value_fn": value_fn}
        extra["grad_fn"] = lambda at, *_: _ascent(jax.grad(value_fn)(at))
        with jax.named_scope("anybatch.update"):
            new = NewGradient(grads, is_finite, changes, self.optimizer, extra)
            new_arrays, norm = offload.updated(inputs.adapter, state, inputs.state_arrays, new, norm)
        return new_arrays, {"loss": value, "aux": aux, "gradient_norm": norm, "skipped": ~is_finite, "noise": noise}


def sorted_arguments(call: PartitionedCall, options: Options) -> Arguments:
    """The arguments of the loss, sorted by role. Raises an InputError for a batch without examples."""
    arguments = options.roles.sort(call.fun, call.args, call.kwargs)
    if not arguments.num_examples:
        named = named_leaves("batch", call.args[1])
        raise InputError(
            "A step needs at least one example: its optimizer would move the parameters even without a gradient",
            given="\n".join([f"{name}: {describe(leaf)}" for name, leaf in named[:10]] + [""]),
            remedy=f"Skip such a batch: if len({named[0][0]}): state, metrics = step(state, batch)",
        )
    return arguments


def _check_model_state(before: Any, after: Any) -> None:
    """Checks that the new state of a model has the structure, the shapes and the kinds of numbers of the old one."""
    old, new = named_leaves("model_state", before), named_leaves("model_state", after)
    shapes: list[Any] = [{name: np.shape(leaf) for name, leaf in named} for named in (old, new)]
    trees: list[Any] = [jax.tree.structure(before), jax.tree.structure(after)]
    if trees[0] != trees[1] or shapes[0] != shapes[1]:
        raise InputError(
            "The loss must return the state of the model with the tree and shapes that it was given",
            given=f"{shown(after)} for {shown(before)}",
            remedy='Return the part that was passed in, e.g. updates["batch_stats"] of '
            'model.apply(..., mutable=["batch_stats"]).',
        )
    for (name, old_leaf), (_, new_leaf) in zip(old, new, strict=True):
        types = [jax.dtypes.result_type(leaf) for leaf in (old_leaf, new_leaf)]
        if jax.dtypes.issubdtype(types[1], jnp.inexact) and not jax.dtypes.issubdtype(types[0], jnp.inexact):
            raise InputError(
                "The state of a model must keep its types from step to step",
                given=f"{name} = {types[0]} before the loss and {types[1]} after it",
                remedy="Start with a floating-point array, e.g. jnp.zeros((), jnp.float32), or round in the loss.",
            )


def _how_to_call(signature: inspect.Signature, passed: list[str], kwargs: dict[str, Any], is_nnx: bool) -> str:
    """The remedy for a loss that does not accept the arguments of a step."""
    parameters = list(signature.parameters.values())
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [
        each.name
        for each in parameters
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    place = passed.index("batch")
    more = [name for name in required if name not in kwargs and name not in names[: len(passed)]]
    if "batch" in names[place + 1 :]:  # the batch is at another position
        ordered = [*names[:place], "batch", *(name for name in names[place:] if name != "batch")]
        others = [f"{name}={name}" for name in ordered[len(passed) :]]
        return (
            f"The batch is the argument at position {place}: ab.train_step(lambda {', '.join(ordered)}: "
            f"loss({', '.join(names)})), then step({', '.join(['state', 'batch', *others])})."
        )
    if not more:
        if "key" in passed and len(names) < len(passed):
            return "The state has a key: def loss(params, batch, key), or step.init(params) without a key."
        return "Leave out the arguments that the loss does not take, or add them to its signature."
    keys = [name for name in more if any(word in name.lower() for word in ("key", "rng", "seed"))]
    if keys and is_nnx:
        name = keys[0]
        return (
            f"Keep the random streams in the model (nnx.Dropout(0.1, rngs=rngs)), or pass them by keyword: {name} = "
            f"nnx.Rngs(0), then step(state, batch, {name}={name})."
        )
    if keys:
        return (
            "Give the state a key: state = step.init(params, key=jax.random.key(0)). A TrainState of Flax needs a "
            "field for it: class State(TrainState): key: jax.Array, then State.create(..., key=jax.random.key(0))."
        )
    rows = [names[place], *more] if len(names) > place else more
    tree = ", ".join(f'"{name}": {name}' for name in rows)
    by_name = ", ".join(f"{name}={name}" for name in more)
    listed = ", ".join(f'"{name}"' for name in more) + ("," if len(more) == 1 else "")
    return (
        f"Make the batch one tree: step(state, {{{tree}}}), with def loss({', '.join(passed)}). Or pass the others by "
        f"keyword: ab.train_step(loss, ..., batch_argnames=({listed})), then step(state, {rows[0]}, {by_name})."
    )


def _value_fn(call: PartitionedCall, options: Options) -> Callable[[Any], Any]:
    """The loss as a function of the trained parameters, for line searches. It is computed per microbatch, too."""
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
        return (jax.tree.map(lambda grad: grad * jnp.asarray(cotangent, grad.dtype), grads),)

    value_fn.defvjp(value_and_gradient, backward)
    return value_fn


def _ascent(grads: Any) -> Any:
    """The direction of steepest ascent. For complex parameters, JAX returns its conjugate."""
    return jax.tree.map(lambda leaf: jnp.conj(leaf) if jnp.iscomplexobj(leaf) else leaf, grads)


def _spec(leaf: Any) -> Any:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()
