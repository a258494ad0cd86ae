"""The states that a step can update: anybatch's `TrainState`, Flax's, and an NNX model with its optimizer.

A `StateAdapter` for each of them says how to separate its arrays from its constants, what the loss is called with, and
how to apply a gradient. Flax is not imported here: a Flax state exists only if the user has imported it.
"""

import abc
import dataclasses
import inspect
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.checks import describe, is_array, is_key, named_leaves
from anybatch.call.loss import shown
from anybatch.call.models import combined, frozen, has_nnx, trainable
from anybatch.errors import InputError
from anybatch.training.arrays import merge_arrays, split_arrays


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a training run: a pytree that can go through `jit` and into checkpoints.

    >>> import jax.numpy as jnp, optax, anybatch as ab
    >>> state = ab.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
    >>> int(state.step), int(state.skipped), state.key
    (0, 0, None)

    Args:
      params: the parameters: any pytree. Leaves that are not floating-point arrays (integers, functions of an Equinox
        model) are not trained.
      opt_state: the state of the optimizer.
      step: the number of batches seen.
      skipped: how many of these steps were skipped because their gradient was not finite.
      key: the PRNG key of the run, or None. Step `i` gets `jax.random.fold_in(key, i)`.
      model_state: state of the model other than its parameters, such as running averages, for
        `train_step(has_state=True)`: any pytree of arrays. Otherwise None.
    """

    params: Any
    opt_state: Any
    step: Any
    skipped: Any
    key: Any = None
    model_state: Any = None

    @classmethod
    def create(cls, params: Any, optimizer: Any, key: Any = None, model_state: Any = None) -> "TrainState":
        """The state before the first step.

        It holds the arrays that are passed in, not copies: a step that donates its state deletes them. `step.init`
        copies them first.

        Args:
          params: the initial parameters.
          optimizer: an optax optimizer, or any object with its `init`.
          key: `jax.random.key(0)`, for a loss that draws random numbers: `loss(params, batch, key)`.
          model_state: the initial state of the model, for a loss with `has_state=True`:
            `loss(params, model_state, batch)`.

        Raises:
          InputError: if there is nothing to train, `key` is not a PRNG key, or `params` is an NNX model.
        """
        if has_nnx(params):
            raise InputError(
                "The state of an NNX model is a pair of the model and its optimizer",
                given=f"params of type {type(params).__name__}",
                remedy="Write step = ab.train_step(loss), and state = (model, nnx.Optimizer(model, optax.adamw(3e-4), "
                "wrt=nnx.Param)).",
            )
        if key is not None and not is_key(key):
            raise InputError(
                "key must be a PRNG key, or None for a loss that draws no random numbers",
                given=f"key={describe(key)}",
                remedy="Pass key=jax.random.key(0).",
            )
        trained = trainable(params)
        if not jax.tree.leaves(trained):
            raise InputError(
                "params must have at least one floating-point array to train",
                given=f"params={params!r}" if not jax.tree.leaves(params) else "params without any",
                remedy="Pass the parameters, e.g. step.init({'w': jnp.zeros(3)}).",
            )
        zero = jnp.zeros((), jnp.int32)
        return cls(params, optimizer.init(trained), zero, zero.copy(), key, model_state)

    def replace(self, **changes: Any) -> "TrainState":
        """A copy of this state with some fields replaced."""
        return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(
    TrainState, data_fields=[field.name for field in dataclasses.fields(TrainState)], meta_fields=[]
)


def add_updates(params: Any, updates: Any) -> Any:
    """`params + updates`, like `optax.apply_updates`: added in the wider dtype, returned in the parameter's."""

    def plus(param: Any, update: Any) -> Any:
        if param is None or update is None:  # not trained
            return param
        dtypes = [jnp.result_type(param), jnp.result_type(update)]
        wide = max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)
        return (jnp.asarray(param, wide) + jnp.asarray(update, wide)).astype(dtypes[0])

    return jax.tree.map(plus, params, updates, is_leaf=lambda leaf: leaf is None)


class NewGradient(NamedTuple):
    """What a state is updated with."""

    grads: Any
    is_finite: Any  # whether the update is applied
    changes: dict[str, Any]  # new values of other fields of the state, by name
    optimizer: Any  # that of `train_step`
    extra: dict[str, Any]  # keyword arguments for optimizers that take more than the gradient, such as `optax.lbfgs`


class PytreeAdapter:
    """How the arrays of a state are taken out and put back: as here for any pytree, e.g. of a user's own step."""

    def array_tree(self, state: Any) -> Any:
        """The state as a pytree, with Python numbers that change from step to step as arrays: here, all of them."""
        return jax.tree.map(lambda leaf: np.asarray(leaf) if _is_number(leaf) else leaf, state)

    def split(self, state: Any) -> tuple[list[Any], Any]:
        """The arrays of a state, and hashable constants that a program is compiled for."""
        return split_arrays(self.array_tree(state))

    def merge(self, arrays: list[Any], constants: Any) -> Any:
        """The state that was split, with these arrays. Called inside the compiled program."""
        return merge_arrays(arrays, constants)

    def replace_arrays(self, state: Any, arrays: list[Any], constants: Any) -> Any:
        """The state with new arrays: a new one, whose numbers are Python numbers again, or one changed in place."""
        new = merge_arrays(arrays, constants)
        return jax.tree.map(lambda old, new: type(old)(new.item()) if _is_number(old) else new, state, new)


class StateAdapter(PytreeAdapter, abc.ABC):
    """How a step uses states of one type.

    Attributes:
      name: of the type of state, for error messages.
      is_nnx: whether the state is an NNX model with its optimizer.
      mutates: whether a step changes objects of the state in place, rather than returning new ones.
      optimizer_path: the path of the optimizer's state, with which the names of its arrays begin.
    """

    name = ""
    optimizer_path = ".opt_state"
    is_nnx = False
    mutates = False

    def are_optimizers(self, state: Any) -> list[bool]:
        """Which of the arrays, as `split` returns them, belong to the state of the optimizer."""
        leaves = named_leaves("", self.array_tree(state))
        path = self.optimizer_path
        inside = (f"{path}.", f"{path}[")  # another field may have a longer name that begins like this one
        return [name == path or name.startswith(inside) for name, leaf in leaves if is_array(leaf)]

    @abc.abstractmethod
    def model_of(self, state: Any) -> tuple[Any, Any, Any]:
        """The model that the loss is called with; the key of this step, or None; an NNX filter of what is trained."""

    def objects_of(self, state: Any) -> list[Any]:
        """The NNX objects that the loss is passed by keyword."""
        return []

    @abc.abstractmethod
    def model_state_of(self, state: Any) -> tuple[str, Any]:
        """The field that holds the state of the model, and its value, for `has_state=True`; an InputError without."""

    @abc.abstractmethod
    def updated(self, state: Any, arrays: list[Any], new: NewGradient) -> list[Any]:
        """The arrays of the state after the update, or those before it if the gradient is not finite.

        An `anybatch.TrainState` counts the step in either case. `state` is what `merge` made of `arrays`.
        """


class AnybatchAdapter(StateAdapter):
    """For `anybatch.TrainState`."""

    def array_tree(self, state: Any) -> Any:
        """The state. Numbers outside of `params` change, e.g. Flax's step; in `params` they are constants."""
        rest = state.replace(params=None)
        if any(map(_is_number, jax.tree.leaves(rest))):
            state = _numbers_as_arrays(rest).replace(params=state.params)
        return state

    def replace_arrays(self, state: Any, arrays: list[Any], constants: Any) -> Any:
        return merge_arrays(arrays, constants)

    def model_of(self, state: Any) -> tuple[Any, Any, Any]:
        key = getattr(state, "key", None)
        return state.params, None if key is None else jax.random.fold_in(key, state.step), None

    def model_state_of(self, state: Any) -> tuple[str, Any]:
        if state.model_state is None:
            raise InputError(
                "With has_state=True, the state must hold the state of the model",
                given="state.model_state=None",
                remedy='Pass it: step.init(params, model_state=...), e.g. variables["batch_stats"] of Flax Linen, or '
                "an eqx.nn.State.",
            )
        return "model_state", state.model_state

    def updated(self, state: Any, arrays: list[Any], new: NewGradient) -> list[Any]:
        trained = trainable(state.params)
        extra = _taken(new.optimizer, new.extra)
        updates, opt_state = new.optimizer.update(new.grads, state.opt_state, trained, **extra)
        params = combined(add_updates(trained, updates), frozen(state.params))
        one = jnp.ones((), jnp.int32)
        skipped = state.skipped + jnp.where(new.is_finite, one - 1, one).astype(state.skipped.dtype)
        counted = state.replace(step=state.step + one.astype(state.step.dtype), skipped=skipped)
        changed = counted.replace(params=params, opt_state=opt_state, **new.changes)
        return _select(new.is_finite, self._arrays_like(changed, counted), split_arrays(counted)[0])

    def _arrays_like(self, changed: Any, before: Any) -> list[Any]:
        """The arrays of a changed state, which must be the same tree as before."""
        arrays, constants = self.split(changed)
        old_arrays, old_constants = self.split(before)
        if constants.tree != old_constants.tree or len(arrays) != len(old_arrays):
            raise InputError(
                "An optimizer must return a state with the tree of the one that it is given",
                given=f"opt_state={shown(changed.opt_state)} for {shown(before.opt_state)}",
                remedy="Return the same tree from its update as from its init, with an array for each array.",
            )
        return arrays


class FlaxAdapter(AnybatchAdapter):
    """For `flax.training.train_state.TrainState` and its subclasses.

    The state's own `apply_gradients` updates it. If the gradient is not finite, nothing changes, not even its step.
    """

    name = "flax.training.train_state.TrainState"

    def model_of(self, state: Any) -> tuple[Any, Any, Any]:
        others = [f"{name} = {describe(leaf)}" for name, leaf in named_leaves("state.params", frozen(state.params))]
        if others:
            raise InputError(
                "All parameters of a Flax TrainState must be floating-point arrays: it updates every one of them",
                given="\n".join(others[:10]),
                remedy="Move the others out of params, or use an anybatch.TrainState: step.init(params).",
            )
        return super().model_of(state)

    def model_state_of(self, state: Any) -> tuple[str, Any]:
        for name in ("batch_stats", "model_state"):
            if getattr(state, name, None) is not None:
                return name, getattr(state, name)
        raise InputError(
            "With has_state=True, a Flax TrainState must have a field batch_stats or model_state",
            given=f"a {type(state).__name__} with {', '.join(field.name for field in dataclasses.fields(state))}",
            remedy="Add one: class State(train_state.TrainState): batch_stats: Any. Then State.create(..., "
            'batch_stats=variables["batch_stats"]).',
        )

    def updated(self, state: Any, arrays: list[Any], new: NewGradient) -> list[Any]:
        changed = state.apply_gradients(grads=new.grads).replace(**new.changes)
        return _select(new.is_finite, self._arrays_like(changed, state), arrays)


class NnxAdapter(StateAdapter):
    """For a pair `(model, optimizer)` of `flax.nnx`. Both are changed in place, as `optimizer.update` does."""

    name = "(flax.nnx model, flax.nnx.Optimizer)"
    is_nnx = True
    mutates = True
    optimizer_path = "[1]['opt_state']"

    def split(self, state: Any) -> tuple[list[Any], Any]:
        definition, values = _nnx().split(state)
        arrays, constants = split_arrays(_numbers_as_arrays(values))
        return arrays, (definition, constants)

    def merge(self, arrays: list[Any], constants: Any) -> Any:
        definition, value_constants = constants
        return _nnx().merge(definition, merge_arrays(arrays, value_constants))

    def replace_arrays(self, state: Any, arrays: list[Any], constants: Any) -> Any:
        _nnx().update(state, merge_arrays(arrays, constants[1]))
        return state

    def array_tree(self, state: Any) -> Any:
        """The variables. Any number in a variable may change, so all of them are arrays, as under `nnx.jit`."""
        return _numbers_as_arrays(_nnx().split(state)[1])

    def model_of(self, state: Any) -> tuple[Any, Any, Any]:
        model, optimizer = state
        if not jax.tree.leaves(_nnx().state(model, optimizer.wrt)):
            raise InputError(
                "The optimizer must train at least one variable of the model",
                given=f"wrt={getattr(optimizer.wrt, '__name__', optimizer.wrt)}, and a model without such variables",
                remedy="Pass nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param).",
            )
        return model, None, optimizer.wrt

    def model_state_of(self, state: Any) -> tuple[str, Any]:
        raise InputError(
            "has_state=True is for states that keep the state of a model outside of the model",
            given=f"a state of type {self.name}, whose model holds its own",
            remedy="Leave has_state out: the running averages inside the model are updated without it.",
        )

    def updated(self, state: Any, arrays: list[Any], new: NewGradient) -> list[Any]:
        model, nnx_optimizer, *_ = state
        of_model = () if isinstance(nnx_optimizer, _nnx().ModelAndOptimizer) else (model,)  # it holds its model
        nnx_optimizer.update(*of_model, new.grads)
        return self.select(new.is_finite, state, arrays)

    def select(self, is_finite: Any, state: Any, arrays: list[Any]) -> list[Any]:
        """The arrays of a state that the loss has changed; those before if the gradient is not finite."""
        new = split_arrays(_nnx().split(state)[1])[0]
        if len(new) != len(arrays):
            raise InputError(
                "The loss of a step must not add or remove variables of a model",
                given=f"{len(arrays)} arrays before, and {len(new)} after",
                remedy="Remove new ones in the loss with nnx.pop(model, nnx.Intermediate), and return them as aux "
                "(has_aux=True).",
            )
        return _select(is_finite, new, arrays)


@dataclasses.dataclass(frozen=True)
class WithObjects(StateAdapter):
    """For a pair of a state and a list of NNX objects that the step is passed by keyword, such as `nnx.Rngs`.

    The changes that the loss makes to the objects are kept after the step, as under `nnx.jit`.
    """

    adapter: StateAdapter  # for the state
    mutates = True

    @property
    def is_nnx(self) -> bool:  # type: ignore[override]
        return self.adapter.is_nnx

    def split(self, state: Any) -> tuple[list[Any], Any]:
        inner, objects = state
        if self.is_nnx:  # split together, so that variables shared by the model and the objects stay shared
            return NNX.split((*inner, objects))
        arrays, constants = self.adapter.split(inner)
        object_arrays, object_constants = NNX.split(objects)
        return [*arrays, *object_arrays], (len(arrays), constants, object_constants)

    def are_optimizers(self, state: Any) -> list[bool]:
        inner, objects = state
        if self.is_nnx:
            return NNX.are_optimizers((*inner, objects))
        known = self.adapter.are_optimizers(inner)
        return known + [False] * (len(self.split(state)[0]) - len(known))

    def merge(self, arrays: list[Any], constants: Any) -> Any:
        if self.is_nnx:
            *inner, objects = NNX.merge(arrays, constants)
            return tuple(inner), objects
        count, inner_constants, object_constants = constants
        return self.adapter.merge(arrays[:count], inner_constants), NNX.merge(arrays[count:], object_constants)

    def replace_arrays(self, state: Any, arrays: list[Any], constants: Any) -> Any:
        """The inner state alone; the objects are changed in place."""
        inner, objects = state
        if self.is_nnx:
            NNX.replace_arrays((*inner, objects), arrays, constants)
            return inner
        count, inner_constants, object_constants = constants
        NNX.replace_arrays(objects, arrays[count:], object_constants)
        return self.adapter.replace_arrays(inner, arrays[:count], inner_constants)

    def model_of(self, state: Any) -> tuple[Any, Any, Any]:
        return self.adapter.model_of(state[0])

    def objects_of(self, state: Any) -> list[Any]:
        return list(state[1])

    def model_state_of(self, state: Any) -> tuple[str, Any]:
        return self.adapter.model_state_of(state[0])

    def updated(self, state: Any, arrays: list[Any], new: NewGradient) -> list[Any]:
        inner, objects = state
        if self.is_nnx:
            return NNX.updated((*inner, objects), arrays, new)
        count = len(arrays) - len(jax.tree.leaves(_nnx().state(objects)))
        inner_arrays = self.adapter.updated(inner, arrays[:count], new)
        return inner_arrays + NNX.select(new.is_finite, objects, arrays[count:])


ANYBATCH, FLAX, NNX = AnybatchAdapter(), FlaxAdapter(), NnxAdapter()


def adapter_for(state: Any, optimizer: Any) -> StateAdapter:
    """The adapter for a state. Raises an InputError if a step with this optimizer cannot update it."""
    if isinstance(state, TrainState):
        if optimizer is None:
            raise InputError(
                "train_step needs an optimizer to update an anybatch.TrainState",
                given="optimizer=None",
                remedy="Pass one, e.g. ab.train_step(loss, optax.adamw(3e-4)).",
            )
        return ANYBATCH
    if _is_flax(state):
        adapter: StateAdapter = FLAX
        state_optimizer = getattr(state, "tx", None)
    elif _is_nnx(state):
        adapter, state_optimizer = NNX, getattr(state[1], "tx", None)
    else:
        raise InputError(
            "A state must be an anybatch.TrainState, a Flax TrainState, or a pair (model, optimizer) of nnx",
            given=f"state of type {type(state).__name__}",
            remedy=_how_to_make_a_state(state),
        )
    if optimizer is not None and state_optimizer is not optimizer:
        raise InputError(
            f"A {adapter.name} has its own optimizer, and train_step must not have another",
            given=f"optimizer={optimizer!r}",
            remedy="Leave it out: ab.train_step(loss).",
        )
    return adapter


def _how_to_make_a_state(given: Any) -> str:
    if isinstance(given, tuple) and len(given) == 2 and _is_nnx(given[::-1]):
        return "The model comes first: step((model, optimizer), batch)."
    if has_nnx(given):
        return (
            "state = (model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)), then state, metrics = "
            "step(state, batch)."
        )
    return "state = step.init(params), then state, metrics = step(state, batch)."


def named_arrays(state: Any) -> dict[str, Any]:
    """The arrays of any state by name: what a checkpoint holds. The names are the same in every process.

    Numbers in the parameters of a model are constants of the model, like its functions, and are left out.

    >>> list(named_arrays({"w": jnp.ones(2), "count": 3}))
    ["['count']", "['w']"]
    """
    leaves = named_leaves("", _saving_adapter(state).array_tree(state))
    return {name.lstrip(".") or "state": leaf for name, leaf in leaves if is_array(leaf)}


def _taken(optimizer: Any, extra: dict[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that an optimizer's update takes."""
    optax = sys.modules.get("optax")
    if optax is None or not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return {}
    parameters = inspect.signature(optimizer.update).parameters
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    # The line searches of optax pass all keyword arguments on, and refuse this one.
    return {name: value for name, value in extra.items() if name in parameters or (takes_any and name != "grad_fn")}


def with_arrays(state: Any, arrays: Mapping[str, Any]) -> Any:
    """A state with these arrays, named as by `named_arrays`. NNX models are changed in place."""
    adapter = _saving_adapter(state)
    return adapter.replace_arrays(state, [arrays[name] for name in named_arrays(state)], adapter.split(state)[1])


def _saving_adapter(state: Any) -> PytreeAdapter:
    if _is_nnx(state):
        return NNX
    return ANYBATCH if isinstance(state, TrainState) or _is_flax(state) else PytreeAdapter()


def _is_flax(state: Any) -> bool:
    return all(hasattr(state, name) for name in ("apply_gradients", "params", "opt_state", "replace"))


def _is_nnx(state: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    is_pair = isinstance(state, tuple) and len(state) == 2
    return is_pair and nnx is not None and isinstance(state[1], nnx.Optimizer)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex))


def _numbers_as_arrays(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if _is_number(leaf) else leaf, tree)


def _kind(dtype: Any) -> int:
    """How general the numbers of a dtype are: booleans, integers, floating-point numbers, complex numbers."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next(position for position, kind in enumerate(kinds) if jax.dtypes.issubdtype(dtype, kind))


def _select(is_finite: Any, new: list[Any], old: list[Any]) -> list[Any]:
    """The new arrays if the gradient is finite, else the old ones; in the dtypes of the old, so that none changes."""

    def select(new: Any, old: Any) -> Any:
        if new is old:
            return old
        if not jax.dtypes.issubdtype(old.dtype, jax.dtypes.extended):
            new = jnp.asarray(new)
            if _kind(new.dtype) > _kind(old.dtype):
                raise InputError(
                    "The state of a step must keep its kinds of numbers, which its first value decides",
                    given=f"{describe(old)} before an update and {describe(new)} after it",
                    remedy="Start with an array of that kind, e.g. jnp.zeros((), jnp.float32) in the optimizer's init.",
                )
            new = new.astype(old.dtype)
        return jnp.where(is_finite, new, old)

    return [select(*pair) for pair in zip(new, old, strict=True)]
