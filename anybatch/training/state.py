"""What steps of training share: a call's arrays apart from its constants, and parameters with updates added to them.

Where a training run stands, and what a step tells beside that.

The kinds of state that a step goes on from: ours, flax's, and a model of NNX with its optimizer.

Each kind says how it is taken apart outside of the compiled program, what is trained of it, how the loss is called, and
how it looks after an update. flax is not imported here: a state of flax brings it along.
"""

import dataclasses
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.checks import describe, is_array, is_key, named_leaves
from anybatch.call.models import combined, frozen, has_nnx, trainable
from anybatch.errors import InputError
from anybatch.gradient_noise.noise_scale import NoiseScale


class Constants(NamedTuple):
    """What is left of a tree without its arrays. It can be hashed, so that a program can be compiled for it."""

    tree: Any
    fixed: tuple[Any, ...]  # leaves that are no arrays, in their places; None where an array was
    told_apart: tuple[Any, ...]  # what tells constants that are equal from each other: True and 1, 0.0 and -0.0


def apart(tree: Any) -> tuple[list[Any], Constants]:
    """The arrays of a tree, and the rest: Python numbers, strings and functions are constants of a program.

    >>> arrays, constants = apart({"x": jnp.ones(2), "name": "adam"})
    >>> together([array + 1 for array in arrays], constants)
    {'name': 'adam', 'x': Array([2., 2.], dtype=float32)}
    """
    leaves, structure = jax.tree.flatten(tree)
    if all(map(is_array, leaves)):
        return leaves, Constants(structure, (None,) * len(leaves), ())
    fixed = tuple(None if is_array(leaf) else leaf for leaf in leaves)
    told_apart = tuple((type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else None) for leaf in fixed)
    return [leaf for leaf in leaves if is_array(leaf)], Constants(structure, fixed, told_apart)


def together(arrays: Sequence[Any], constants: Constants) -> Any:
    """The tree with other arrays in the places of its own."""
    remaining = iter(arrays)
    leaves = [next(remaining) if leaf is None else leaf for leaf in constants.fixed]
    return jax.tree.unflatten(constants.tree, leaves)


def add_updates(params: Any, updates: Any) -> Any:
    """As `optax.apply_updates`: added in the wider of both dtypes, and returned in that of the parameter."""

    def plus(param: Any, update: Any) -> Any:
        if param is None or update is None:  # what is not trained
            return param
        dtypes = [jnp.result_type(param), jnp.result_type(update)]
        wide = max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)
        return (jnp.asarray(param, wide) + jnp.asarray(update, wide)).astype(dtypes[0])

    return jax.tree.map(plus, params, updates, is_leaf=lambda leaf: leaf is None)


@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a training run needs to go on: a small pytree, for `jit` and for checkpoints.

    >>> import jax.numpy as jnp, optax, anybatch as ab
    >>> state = ab.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
    >>> int(state.step), int(state.skipped), state.key
    (0, 0, None)

    Args:
      params: what is trained: any pytree. Leaves that are not floating-point arrays (integers, functions of an Equinox
        model) stay as they are.
      opt_state: of the optimizer.
      step: how many batches were seen.
      skipped: how many of them changed nothing, because their gradient was not finite.
      key: of all random numbers of the run, or None. Step `i` gets `jax.random.fold_in(key, i)`.
      model_state: what the model keeps beside its parameters, for `train_step(has_state=True)`: running averages. None
        without. Any pytree of arrays.
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

        The arrays are those that were given, not copies: a step that donates its buffers uses them up. `step.init`
        copies them first.

        Args:
          params: to begin with.
          optimizer: of optax, or anything with its `init`.
          key: `jax.random.key(0)`, for a loss that draws random numbers: `loss(params, batch, key)`.
          model_state: to begin with, for a loss with `has_state=True`: `loss(params, model_state, batch)`.

        Raises:
          InputError: if there is nothing to train, the key is none, or `params` is a model of NNX.
        """
        if has_nnx(params):
            raise InputError(
                "The state of a model of NNX is a pair of the model and its optimizer",
                given=f"params of type {type(params).__name__}",
                remedy="Write step = ab.train_step(loss), and state = (model, nnx.Optimizer(model, optax.adamw(3e-4), "
                "wrt=nnx.Param)).",
            )
        if key is not None and not is_key(key):
            raise InputError(
                "key must be a PRNG key, or None for a loss that draws nothing",
                given=f"key={describe(key)}",
                remedy="Pass key=jax.random.key(0).",
            )
        trained = trainable(params)
        if not jax.tree.leaves(trained):
            raise InputError(
                "There must be something to train: a floating-point array",
                given=f"params={params!r}" if not jax.tree.leaves(params) else "params without any",
                remedy="Pass the parameters, e.g. step.init({'w': jnp.zeros(3)}).",
            )
        zero = jnp.zeros((), jnp.int32)
        return cls(params, optimizer.init(trained), zero, zero.copy(), key, model_state)

    def replace(self, **changes: Any) -> "TrainState":
        """A state with some of its parts replaced."""
        return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(
    TrainState, data_fields=[field.name for field in dataclasses.fields(TrainState)], meta_fields=[]
)


@dataclasses.dataclass(frozen=True, eq=False)
class Metrics:
    """What a step tells: a pytree, of arrays that may still be computed when it is returned.

    Args:
      loss: of the whole batch, before the update.
      aux: what the loss returned beside it, if anything.
      gradient_norm: of the whole batch's gradient, before the optimizer.
      skipped: whether the update was left out, because the gradient was not finite.
      noise: of the gradient, with `noise_scale=True`. One step says little: add them up.
      examples: how many were in the batch.
      tokens: how many were in the batch, if `train_step` was told how to count them.
    """

    loss: Any
    aux: Any
    gradient_norm: Any
    skipped: Any
    noise: NoiseScale | None
    examples: Any
    tokens: Any
    _reading: Any = dataclasses.field(default=None, repr=False)  # of the meter; not part of the tree

    @property
    def examples_per_second(self) -> float:
        """Over the steps since somebody last asked; waits for this one. NaN if nobody can know, as under `jit`."""
        return self._rates()[0]

    @property
    def tokens_per_second(self) -> float:
        """Likewise; NaN if nobody counts tokens."""
        return self._rates()[1]

    def _rates(self) -> tuple[float, float]:
        return (math.nan, math.nan) if self._reading is None else self._reading.rates(self.loss)


jax.tree_util.register_dataclass(
    Metrics,
    data_fields=[field.name for field in dataclasses.fields(Metrics) if field.name != "_reading"],
    meta_fields=[],
    drop_fields=["_reading"],
)


class Meter:
    """Counts what steps get done, and reads the clock when somebody asks.

    A step returns before it is computed, so that the time of the call says nothing. What can be known is when a step
    was done; the rate is that of all the steps between two such moments.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._examples = self._tokens = 0
        self._since: tuple[float, int, int] | None = None

    def begin(self) -> None:
        """From here on the clock runs, if it does not yet: compilation is not to count."""
        if self._since is None:
            self._since = (time.perf_counter(), self._examples, self._tokens)

    def count(self, examples: int, tokens: int | None) -> "MeterReading":
        """One more step."""
        self._examples += examples
        self._tokens += tokens or 0
        return MeterReading(self, self._examples, self._tokens, tokens is not None)

    def rates(self, examples: int, tokens: int, done: Any) -> tuple[float, float]:
        """Per second, up to the step that `done` is a result of."""
        jax.block_until_ready(done)
        now = time.perf_counter()
        with self._lock:
            if self._since is None or examples <= self._since[1]:
                return math.nan, math.nan
            then, examples_then, tokens_then = self._since
            self._since = (now, examples, tokens)
        seconds = max(now - then, 1e-9)
        return (examples - examples_then) / seconds, (tokens - tokens_then) / seconds


class MeterReading:
    """What the meter showed after one step."""

    def __init__(self, meter: Meter, examples: int, tokens: int, has_tokens: bool) -> None:
        self._meter, self._counts, self._has_tokens = meter, (examples, tokens), has_tokens
        self._rates: tuple[float, float] | None = None

    def rates(self, done: Any) -> tuple[float, float]:
        """Asked twice, it answers the same."""
        if self._rates is None:
            examples, tokens = self._meter.rates(*self._counts, done)
            self._rates = examples, tokens if self._has_tokens else math.nan
        return self._rates


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

    def rebuild(self, given: Any, arrays: list[Any], constants: Any) -> Any:
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
        params = combined(add_updates(trained, updates), frozen(state.params))
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

    def rebuild(self, given: Any, arrays: list[Any], constants: Any) -> Any:
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

    def rebuild(self, given: Any, arrays: list[Any], constants: Any) -> Any:
        """As above, without the objects: these are changed in place."""
        before, objects = given
        if self._is_nnx:
            KINDS["nnx"].rebuild((*before, objects), arrays, constants)
            return before
        count, about, definition = constants
        KINDS["nnx"].rebuild(objects, arrays[count:], definition)
        return self.kind.rebuild(before, arrays[:count], about)

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

    def rebuild(self, given: Any, arrays: list[Any], constants: Any) -> Any:
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
    return kind.rebuild(state, [arrays[name] for name in named_arrays(state)], kind.apart(state)[1])


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
