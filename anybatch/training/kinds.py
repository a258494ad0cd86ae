"""The kinds of state that a step goes on from: ours, flax's, and a model of NNX with its optimizer.

Each kind says how it is taken apart outside of the compiled program, what is trained of it, how the loss is called, and
how it looks after an update. flax is not imported here: a state of flax brings it along.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.errors import InputError
from anybatch.modules import frozen, has_nnx, joined, trainable
from anybatch.training.state import TrainState
from anybatch.trees import describe, is_array, named_leaves
from anybatch.updates import add_updates, apart, together


class Model(NamedTuple):
    """What a loss is called with, of a state."""

    model: Any  # the first argument
    key: Any = None  # None without
    wrt: Any = None  # which variables of a model of NNX are trained: a filter of NNX


class OwnState:
    """An `anybatch.TrainState`."""

    name = "anybatch.TrainState"
    changes_model = False  # whether calling a model may change what is not trained of it

    def apart(self, state: Any) -> tuple[list[Any], Any]:
        """The arrays of a state, and what the program is compiled for."""
        return apart(self.tree(state))

    def whole(self, given: Any, arrays: list[Any], constants: Any) -> Any:
        """The state that a step returns."""
        return together(arrays, constants)

    def tree(self, state: Any) -> Any:
        """The state as the tree that `apart` takes apart: its arrays are what a step changes and a checkpoint keeps.

        Numbers that will change, such as flax's count of steps, are arrays; those in the parameters are constants.
        """
        rest = state.replace(params=None)
        if any(map(_is_number, jax.tree.leaves(rest))):
            state = _numbers_as_arrays(rest).replace(params=state.params)
        return state

    def merged(self, arrays: list[Any], constants: Any) -> Any:
        """The state with other arrays, to compute with."""
        return together(arrays, constants)

    def model_of(self, state: Any) -> Model:
        """What its loss is called with."""
        return Model(state.params, self._key(state))

    def objects_of(self, state: Any) -> list[Any]:
        """The objects of NNX that the loss is passed by keyword."""
        return []

    def model_state_of(self, state: Any) -> tuple[str, Any]:
        """Where a state keeps the state of its model, and that.

        Raises:
          InputError: if it has none.
        """
        if state.model_state is None:
            raise InputError(
                "With has_state=True a state must have the state of its model",
                given="state.model_state=None",
                remedy='Pass it: step.init(params, model_state=variables["batch_stats"]).',
            )
        return "model_state", state.model_state

    def updated(
        self, state: Any, arrays: list[Any], optimizer: Any, grads: Any, changes: dict[str, Any], good: Any, extra: Any
    ) -> list[Any]:
        """The arrays of a state after an update; if the gradient is not `good`, one that was only counted.

        Args:
          state: as `merged` returned it.
          arrays: its own.
          optimizer: of `train_step`.
          grads: the gradient.
          changes: what else is new, by the names of its fields.
          good: whether the update is to be made.
          extra: what an optimizer may want to know.
        """
        trained = trainable(state.params)
        updates, opt_state = _update(optimizer, grads, state.opt_state, trained, extra)
        params = joined(add_updates(trained, updates), frozen(state.params))
        new = state.replace(params=params, opt_state=opt_state, **changes)
        counted = together(_chosen(good, apart(new)[0], arrays), apart(state)[1])
        one = jnp.ones((), jnp.int32)
        skipped = state.skipped + jnp.where(good, one - 1, one).astype(state.skipped.dtype)
        return apart(counted.replace(step=state.step + one.astype(state.step.dtype), skipped=skipped))[0]

    def _key(self, state: Any) -> Any:
        key = getattr(state, "key", None)
        return None if key is None else jax.random.fold_in(key, state.step)


class FlaxState(OwnState):
    """A `flax.training.train_state.TrainState`, or a class of one's own that is made from it.

    Its own `apply_gradients` updates it. A gradient that is not finite leaves all of it as it was, its step too.
    """

    name = "flax.training.train_state.TrainState"

    def model_of(self, state: Any) -> Model:
        """As above."""
        others = [f"{name} = {describe(leaf)}" for name, leaf in named_leaves("state.params", frozen(state.params))]
        if others:
            raise InputError(
                "All parameters of a flax TrainState must be floating-point arrays: it updates every one of them",
                given="\n".join(others[:10]),
                remedy="Keep the others elsewhere, or use an anybatch.TrainState: step.init(params).",
            )
        return super().model_of(state)

    def model_state_of(self, state: Any) -> tuple[str, Any]:
        """As above."""
        for name in ("batch_stats", "model_state"):
            if getattr(state, name, None) is not None:
                return name, getattr(state, name)
        raise InputError(
            "With has_state=True a flax TrainState must have a field batch_stats or model_state",
            given=f"a {type(state).__name__} with {', '.join(field.name for field in dataclasses.fields(state))}",
            remedy="Add one: class State(train_state.TrainState): batch_stats: Any. Then State.create(..., "
            'batch_stats=variables["batch_stats"]).',
        )

    def updated(
        self, state: Any, arrays: list[Any], optimizer: Any, grads: Any, changes: dict[str, Any], good: Any, extra: Any
    ) -> list[Any]:
        """As above."""
        new = state.apply_gradients(grads=grads).replace(**changes)
        return _chosen(good, apart(new)[0], arrays)


class NnxState:
    """A pair `(model, optimizer)` of `flax.nnx`. Both are changed in place, as `optimizer.update` does."""

    name = "(flax.nnx model, flax.nnx.Optimizer)"
    changes_model = True

    def apart(self, state: Any) -> tuple[list[Any], Any]:
        """As above."""
        definition, values = _nnx().split(state)
        arrays, constants = apart(_numbers_as_arrays(values))
        return arrays, (definition, constants)

    def whole(self, given: Any, arrays: list[Any], constants: Any) -> Any:
        """As above."""
        _nnx().update(given, together(arrays, constants[1]))
        return given

    def tree(self, state: Any) -> Any:
        """As above. Any number in a variable may change, so all of them are arrays, as under `nnx.jit`."""
        return _numbers_as_arrays(_nnx().split(state)[1])

    def merged(self, arrays: list[Any], constants: Any) -> Any:
        """As above."""
        definition, of_values = constants
        return _nnx().merge(definition, together(arrays, of_values))

    def model_of(self, state: Any) -> Model:
        """As above."""
        model, optimizer = state
        return Model(model, None, optimizer.wrt)

    def objects_of(self, state: Any) -> list[Any]:
        """As above."""
        return []

    def model_state_of(self, state: Any) -> tuple[str, Any]:
        """As above."""
        raise InputError(
            "has_state=True is for states that keep the state of a model beside its parameters",
            given=f"a state of type {self.name}, whose model has it inside",
            remedy="Leave has_state out: the running averages of the model are updated as it is.",
        )

    def updated(
        self, state: Any, arrays: list[Any], optimizer: Any, grads: Any, changes: dict[str, Any], good: Any, extra: Any
    ) -> list[Any]:
        """As above. The model has been changed already, as its loss changes it."""
        model, own, *_ = state
        own.update(model, grads)
        return self.chosen(state, arrays, good)

    def chosen(self, state: Any, arrays: list[Any], good: Any) -> list[Any]:
        """The arrays of a state, if the gradient is `good`; else those before."""
        new = apart(_nnx().split(state)[1])[0]
        if len(new) != len(arrays):
            raise InputError(
                "The loss must not add or remove variables of a model in a step",
                given=f"{len(arrays)} arrays before, and {len(new)} after",
                remedy="Remove new ones in the loss with nnx.pop(model, nnx.Intermediate), and return them as aux "
                "(has_aux=True).",
            )
        return _chosen(good, new, arrays)


@dataclasses.dataclass(frozen=True)
class WithObjects:
    """A pair of a state of another kind, and objects of NNX that a step is passed by keyword, such as `nnx.Rngs`.

    What the loss changes of them is written back after a step, as `nnx.jit` does it.

    Args:
      kind: of the state.
    """

    kind: Any
    changes_model = True

    @property
    def name(self) -> str:
        """As above."""
        return str(self.kind.name)

    def apart(self, state: Any) -> tuple[list[Any], Any]:
        """As above. References that a model shares with the objects are kept."""
        before, objects = state
        if self._is_nnx:
            return KINDS["nnx"].apart((*before, objects))
        arrays, constants = self.kind.apart(before)
        more, definition = KINDS["nnx"].apart(objects)
        return [*arrays, *more], (len(arrays), constants, definition)

    def whole(self, given: Any, arrays: list[Any], constants: Any) -> Any:
        """As above, without the objects: these are changed in place."""
        before, objects = given
        if self._is_nnx:
            KINDS["nnx"].whole((*before, objects), arrays, constants)
            return before
        count, about, definition = constants
        KINDS["nnx"].whole(objects, arrays[count:], definition)
        return self.kind.whole(before, arrays[:count], about)

    def merged(self, arrays: list[Any], constants: Any) -> Any:
        """As above."""
        if self._is_nnx:
            *before, objects = KINDS["nnx"].merged(arrays, constants)
            return tuple(before), objects
        count, about, definition = constants
        return self.kind.merged(arrays[:count], about), KINDS["nnx"].merged(arrays[count:], definition)

    def model_of(self, state: Any) -> Model:
        """As above."""
        model: Model = self.kind.model_of(state[0])
        return model

    def objects_of(self, state: Any) -> list[Any]:
        """As above."""
        return list(state[1])

    def model_state_of(self, state: Any) -> tuple[str, Any]:
        """As above."""
        name, value = self.kind.model_state_of(state[0])
        return name, value

    def updated(
        self, state: Any, arrays: list[Any], optimizer: Any, grads: Any, changes: dict[str, Any], good: Any, extra: Any
    ) -> list[Any]:
        """As above. The objects have been changed already, as the model of NNX."""
        before, objects = state
        if self._is_nnx:
            return KINDS["nnx"].updated((*before, objects), arrays, optimizer, grads, changes, good, extra)
        count = len(arrays) - len(jax.tree.leaves(_nnx().state(objects)))
        new = self.kind.updated(before, arrays[:count], optimizer, grads, changes, good, extra)
        return new + KINDS["nnx"].chosen(objects, arrays[count:], good)

    @property
    def _is_nnx(self) -> bool:
        return self.kind is KINDS["nnx"]


class AnyState:
    """Any tree, of a step of one's own: to be saved, and to go on from."""

    def tree(self, state: Any) -> Any:
        """As above, with numbers among the arrays."""
        return jax.tree.map(lambda leaf: np.asarray(leaf) if _is_number(leaf) else leaf, state)

    def apart(self, state: Any) -> tuple[list[Any], Any]:
        """As above."""
        return apart(self.tree(state))

    def whole(self, given: Any, arrays: list[Any], constants: Any) -> Any:
        """As above. What was a number is one again."""
        state = together(arrays, constants)
        return jax.tree.map(lambda old, new: type(old)(new.item()) if _is_number(old) else new, given, state)


KINDS: dict[str, Any] = {"own": OwnState(), "flax": FlaxState(), "nnx": NnxState()}


def kind_of(state: Any, optimizer: Any) -> Any:
    """Which kind a state is of.

    Raises:
      InputError: if it is none that a step can go on from, or it does not go with `train_step`'s optimizer.
    """
    if isinstance(state, TrainState):
        if optimizer is None:
            raise InputError(
                "An anybatch.TrainState is updated by the optimizer of train_step",
                given="optimizer=None",
                remedy="Pass one, e.g. ab.train_step(loss, optax.adamw(3e-4)).",
            )
        return KINDS["own"]
    kind: Any = None
    own: Any = None
    if _is_flax(state):
        kind, own = KINDS["flax"], getattr(state, "tx", None)
    elif isinstance(state, tuple) and len(state) == 2 and _is_nnx(state):
        kind, own = KINDS["nnx"], getattr(state[1], "tx", None)
    if kind is None:
        raise InputError(
            "A step goes on from a state: an anybatch.TrainState, one of flax, or (model, optimizer) of nnx",
            given=f"state of type {type(state).__name__}",
            remedy="The model comes first: step((model, optimizer), batch)."
            if isinstance(state, tuple) and len(state) == 2 and _is_nnx(state[::-1])
            else "state = (model, nnx.Optimizer(model, optax.adamw(3e-4), wrt=nnx.Param)), then "
            "state, metrics = step(state, batch)."
            if has_nnx(state)
            else "state = step.init(params), then state, metrics = step(state, batch).",
        )
    if optimizer is not None and own is not optimizer:
        raise InputError(
            f"A {kind.name} has its own optimizer, and train_step must not have another",
            given=f"optimizer={optimizer!r}",
            remedy="Leave it out: ab.train_step(loss).",
        )
    return kind


def named_arrays(state: Any) -> dict[str, Any]:
    """The arrays of any state, by names that are the same in every process: what a checkpoint keeps.

    Numbers in the parameters of a model are constants of it, as functions are, and are not among them.

    >>> list(named_arrays({"w": jnp.ones(2), "count": 3}))
    ["['count']", "['w']"]
    """
    leaves = named_leaves("", _kind_to_save(state).tree(state))
    return {name.lstrip(".") or "state": leaf for name, leaf in leaves if is_array(leaf)}


def with_arrays(state: Any, arrays: Mapping[str, Any]) -> Any:
    """A state with other arrays, as `named_arrays` names them. The models of `nnx` are changed in place."""
    kind = _kind_to_save(state)
    return kind.whole(state, [arrays[name] for name in named_arrays(state)], kind.apart(state)[1])


def _kind_to_save(state: Any) -> Any:
    if isinstance(state, tuple) and len(state) == 2 and _is_nnx(state):
        return KINDS["nnx"]
    return KINDS["own"] if isinstance(state, TrainState) or _is_flax(state) else AnyState()


def _is_flax(state: Any) -> bool:
    return all(hasattr(state, name) for name in ("apply_gradients", "params", "opt_state", "replace"))


def _is_nnx(state: tuple[Any, ...]) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(state[1], nnx.Optimizer)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, complex))


def _numbers_as_arrays(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if _is_number(leaf) else leaf, tree)


def _chosen(good: Any, new: list[Any], old: list[Any]) -> list[Any]:
    """The new arrays, or the old ones, all together; with the types of the old, so that a step follows a step."""

    def choose(one: Any, other: Any) -> Any:
        if one is other:
            return other
        if not jax.dtypes.issubdtype(other.dtype, jax.dtypes.extended):
            one = jnp.asarray(one).astype(other.dtype)
        return jnp.where(good, one, other)

    return [choose(one, other) for one, other in zip(new, old, strict=True)]


def _update(optimizer: Any, grads: Any, opt_state: Any, params: Any, extra: dict[str, Any]) -> Any:
    """An update of the optimizer, with what it may want to know beside the gradient (`optax.lbfgs` and its like do)."""
    optax = sys.modules.get("optax")
    if optax is not None and isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return optimizer.update(grads, opt_state, params, **extra)
    return optimizer.update(grads, opt_state, params)
