"""Models of Flax NNX and Equinox as arguments of a loss.

`partition_models` replaces each model by plain pytrees of arrays (`PartlyTrained`) before a call is sorted, traced and
planned, and wraps the loss so that it gets models again. Neither library is imported here: whoever passes a model has
imported its library.
"""

import dataclasses
import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anybatch.call.arguments import PartlyTrained, Roles
from anybatch.call.aux_outputs import NewState
from anybatch.call.checks import is_array, warn
from anybatch.call.loss import pair
from anybatch.call.options import Options
from anybatch.errors import InputError


def trainable(params: Any) -> Any:
    """The floating-point arrays of a pytree, with None in place of all other leaves.

    >>> trainable({"w": jnp.ones(2), "size": 3, "act": jax.nn.relu})
    {'act': None, 'size': None, 'w': Array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(lambda leaf: leaf if _is_trainable(leaf) else None, params)


def frozen(params: Any) -> Any:
    """The other leaves of a pytree, with None in place of the floating-point arrays."""
    return jax.tree.map(lambda leaf: None if _is_trainable(leaf) else leaf, params)


def combined(trained: Any, rest: Any) -> Any:
    """The inverse of `trainable` and `frozen`."""
    return jax.tree.map(
        lambda one, other: other if one is None else one, trained, rest, is_leaf=lambda leaf: leaf is None
    )


def _is_trainable(leaf: Any) -> bool:
    is_known = is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    return is_known and jax.dtypes.issubdtype(leaf.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class PartitionedCall:
    """A call of a loss in which `PartlyTrained` trees of arrays replace the models."""

    fun: Callable[..., Any]  # for such arguments. If it may change NNX models, it returns `(loss, (aux, NewState))`.
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_aux: bool  # whether `fun` returns a pair
    objects: "_Objects | None" = None  # the NNX models that it may change

    def options(self, options: Options) -> Options:
        """The options for `fun`, from those for the user's loss."""
        declared = self.aux_reduction(options.reduction, options.aux_reduction)
        return dataclasses.replace(options, has_aux=self.has_aux, aux_reduction=declared)

    def aux_reduction(self, reduction: str, declared: Any) -> Any:
        return declared if self.objects is None or reduction == "infer" else (declared, "last")

    def changes_attributes(self, aux: Any) -> bool:
        """True if the loss has changed attributes of an NNX model that are not variables."""
        return self.objects is not None and aux[1].about.definition is not None

    def close(self, aux: Any, options: Options) -> Any:
        """The aux of the user's loss. Also updates the caller's NNX models in place, as NNX does."""
        if self.objects is None:
            return aux
        aux, state = aux
        if state.about.streams and options.reduction != "infer" and options.microbatch_size is not None:
            warn(
                f"The loss draws from a random stream of NNX ({', '.join(state.about.streams)}), and "
                f'reduction="{options.reduction}" is declared: all microbatches get the same key and draw the same '
                'numbers, such as one dropout mask. Leave reduction out: reduction="infer", the default, draws the '
                "numbers of the full batch.",
                RuntimeWarning,
            )
        self.objects.update(state)
        return aux


def partition_models(
    fun: Callable[..., Any],
    roles: Roles,
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    keeps_state: bool = True,
    filters: bool = False,
) -> PartitionedCall:
    """Replaces the NNX models of a call, and its differentiated Equinox models, by pytrees of arrays.

    Args:
      fun: the loss.
      roles: which arguments are differentiated.
      has_aux: whether the loss returns a pair `(loss, aux)`.
      args: its positional arguments.
      kwargs: its keyword arguments.
      keeps_state: whether to return the changes that the loss makes to NNX models. If not, such a loss is refused when
        it is traced.
      filters: whether to differentiate only the floating-point arrays of any tree, as of an Equinox model.
    """
    wrt_slots = {position % len(args): wrt for position, wrt in roles.wrt.items() if -len(args) <= position < len(args)}
    objects = _Objects(args, kwargs, wrt_slots)
    for slot, wrt in wrt_slots.items():
        if wrt is not None and slot not in objects.graphs and not isinstance(args[slot], PartlyTrained):
            raise InputError(
                "nnx.DiffState must point at an argument with an NNX model",
                given=f"nnx.DiffState({slot}, ...) for an argument of type {type(args[slot]).__name__}",
                remedy=f"Pass argnums={slot}.",
            )
    filtered = {slot for slot in set(wrt_slots) - set(objects.graphs) if filters or _has_equinox(args[slot])}
    if not filtered and not objects.graphs:
        return PartitionedCall(fun, args, kwargs, has_aux)

    def partitioned(slot: int | str, argument: Any) -> Any:
        if slot in filtered:
            return PartlyTrained(trainable(argument), frozen(argument))
        return objects.partitioned.get(slot, argument)

    @functools.wraps(fun)
    def plain_fun(*args: Any, **kwargs: Any) -> Any:
        models, merged = objects.merged(args, kwargs) if objects.graphs else ({}, [])
        watch = _Watch(merged) if models else None
        models |= {slot: combined(args[slot].trained, args[slot].rest) for slot in filtered}
        result = fun(
            *(models.get(slot, argument) for slot, argument in enumerate(args)),
            **{name: models.get(name, argument) for name, argument in kwargs.items()},
        )
        if watch is None:
            return result
        state = watch.new_state()
        if not keeps_state:
            _refuse(state)
            return result
        value, aux = pair(result) if has_aux else (result, None)
        return value, (aux, state)

    by_position = tuple(partitioned(slot, argument) for slot, argument in enumerate(args))
    by_name = {name: partitioned(name, argument) for name, argument in kwargs.items()}
    if not objects.graphs or not keeps_state:
        return PartitionedCall(plain_fun, by_position, by_name, has_aux)
    return PartitionedCall(plain_fun, by_position, by_name, True, objects)


def _has_equinox(argument: Any) -> bool:
    module = getattr(sys.modules.get("equinox"), "Module", None)
    if module is None or isinstance(argument, PartlyTrained):  # partitioned before
        return False
    nodes = jax.tree.leaves(argument, is_leaf=lambda node: isinstance(node, module))
    return any(isinstance(node, module) for node in nodes)


def has_nnx(tree: Any) -> bool:
    """True if a pytree contains an NNX object: a module, random streams, metrics."""
    return "flax.nnx" in sys.modules and any(map(_is_object, jax.tree.leaves(tree, is_leaf=_is_object)))


@dataclasses.dataclass(frozen=True)
class _ObjectIndex:
    """Replaces an NNX object in a pytree: its index among the objects of the tree."""

    index: int


def without_objects(tree: Any) -> tuple[Any, list[Any]]:
    """A pytree with its NNX objects replaced by placeholders, and the list of these objects."""
    objects: list[Any] = []
    if "flax.nnx" not in sys.modules:
        return tree, objects

    def replaced(leaf: Any) -> Any:
        if not _is_changeable(leaf):
            return leaf
        objects.append(leaf)
        return _ObjectIndex(len(objects) - 1)

    return jax.tree.map(replaced, tree, is_leaf=lambda node: _is_changeable(node) or _is_state(node)), objects


def with_objects(tree: Any, objects: Sequence[Any]) -> Any:
    """The inverse of `without_objects`."""
    return jax.tree.map(lambda leaf: objects[leaf.index] if isinstance(leaf, _ObjectIndex) else leaf, tree)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _is_object(node: Any) -> bool:
    """True for an NNX object, which NNX passes by reference, so that a loss can change it."""
    return isinstance(node, _nnx().Pytree)


def _is_changeable(node: Any) -> bool:
    return isinstance(node, (_nnx().Pytree, _nnx().Variable))


def _structure(tree: Any, is_object: Callable[[Any], bool]) -> Any:
    return jax.tree.structure(tree, is_leaf=lambda node: is_object(node) or _is_state(node))


def _is_state(node: Any) -> bool:
    """True for an `nnx.State`, whose variables are values, not objects."""
    return isinstance(node, _nnx().State)


class _Graph(NamedTuple):
    """The static description of an argument with NNX objects in it."""

    tree: Any  # the structure of the argument, with objects as leaves
    definitions: tuple[Any, ...]  # a GraphDef for each object, None for other leaves


class _Objects:
    """The NNX objects among the arguments of a call. Variables that they share stay shared, as in NNX."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], wrt_slots: dict[int, Any]) -> None:
        self.graphs: dict[int | str, _Graph] = {}
        self.partitioned: dict[int | str, PartlyTrained] = {}
        self._objects: list[Any] = []
        if "flax.nnx" not in sys.modules:
            return
        nnx = _nnx()
        with nnx.split_context() as context:
            by_slot: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            # Differentiated arguments come first: a variable that other arguments share with them is differentiated.
            for slot, argument in sorted(by_slot, key=lambda pair: pair[0] not in wrt_slots):
                # Differentiated variables without a module are just a tree of arrays.
                has_modules = any(map(_is_object, _structure(argument, _is_object).flatten_up_to(argument)))
                is_object = _is_changeable if slot not in wrt_slots or has_modules else _is_object
                tree: Any = _structure(argument, is_object)
                leaves = tree.flatten_up_to(argument)
                if not any(map(is_object, leaves)):
                    continue
                wrt = wrt_slots.get(slot) if isinstance(slot, int) else None
                filters = (nnx.Param if wrt is None else wrt, ...) if slot in wrt_slots else ()
                split = [context.split(leaf, *filters) if is_object(leaf) else (None, leaf) for leaf in leaves]
                states = [(*states, None)[:2] if slot in wrt_slots else (None, *states) for _, *states in split]
                trained, rest = zip(*states, strict=True)
                self.graphs[slot] = _Graph(tree, tuple(definition for definition, *_ in split))
                self.partitioned[slot] = PartlyTrained(
                    tree.unflatten(trained) if slot in wrt_slots else None, list(rest)
                )
                self._objects += filter(is_object, leaves)

    def merged(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[int | str, Any], list[Any]]:
        """The arguments with NNX objects in them, rebuilt from arrays, by slot; and the list of these objects."""
        found: dict[int | str, Any] = {}
        objects: list[Any] = []
        with _nnx().merge_context() as context:
            for slot, (tree, definitions) in self.graphs.items():
                argument = kwargs[slot] if isinstance(slot, str) else args[slot]
                none = [None] * len(definitions)
                trained = none if argument.trained is None else tree.flatten_up_to(argument.trained)
                leaves = []
                for definition, *states in zip(definitions, trained, argument.rest, strict=True):
                    present = [state for state in states if state is not None]
                    leaf = present[0] if definition is None else context.merge(definition, *present)
                    leaves.append(leaf)
                    objects += [] if definition is None else [leaf]
                found[slot] = tree.unflatten(leaves)
        return found, objects

    def update(self, state: NewState) -> None:
        """Updates the caller's objects with the new state that the loss left."""
        nnx = _nnx()
        paths, definition, _, removed = state.about
        if not paths and definition is None:
            return  # e.g. under `vmap`, where NNX allows reading a model from outside, not changing it
        nnx.update(self._objects, nnx.from_flat_state({path: state.values[name] for name, path in paths}))
        if definition is not None:
            left = {path: value for path, value in _variables(self._objects) if path not in removed}
            _follow(self._objects, nnx.merge(definition, nnx.from_flat_state(left)))


class _About(NamedTuple):
    """The changes that a loss makes to NNX objects, as far as tracing it shows them."""

    paths: tuple[tuple[str, tuple[Any, ...]], ...]  # the names and paths of variables that are new or have new values
    definition: Any  # the GraphDef of the objects if it has changed, otherwise None
    streams: tuple[str, ...]  # the names of the random streams that were drawn from
    removed: frozenset[Any] = frozenset()  # the paths of variables that were removed


class _Watch:
    """Records how a loss changes the NNX objects that it is called with."""

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects
        self._definition = _nnx().graphdef(objects)
        self._leaves = {path: jax.tree.leaves(value) for path, value in _variables(objects)}
        self._nodes = {path for path, node in _nnx().iter_graph(objects) if _is_object(node)}

    def new_state(self) -> NewState:
        """The variables that are new or have new values, and the GraphDef of the objects if it has changed."""
        new, variables = {}, list(_variables(self._objects))
        for path, value in variables:
            leaves, before = jax.tree.leaves(value), self._leaves.get(path)
            if before is None and len(path) > 1 and path[:-1] not in self._nodes:
                raise InputError(
                    "The loss may change and add variables of a model, but must not add modules",
                    given=f"a loss that adds {_name(path)}",
                    remedy="Add the module before, where the model is made.",
                )
            if before is None or len(before) != len(leaves) or any(map(operator.is_not, before, leaves)):
                new[path] = value
        definition = _nnx().graphdef(self._objects)
        paths: dict[str, Any] = {}
        for path in new:
            name = _name(path)
            paths[repr(path) if name in paths else name] = path  # two paths may have the same name
        drawn = [value for value in new.values() if isinstance(value, _nnx().RngCount)]
        streams = tuple(sorted({getattr(count, "tag", "default") for count in drawn}))
        removed = frozenset(self._leaves) - {path for path, _ in variables}
        changed = None if definition == self._definition else definition
        about = _About(tuple(paths.items()), changed, streams, removed)
        return NewState({name: new[path] for name, path in paths.items()}, about)


def _name(path: tuple[Any, ...]) -> str:
    """The name of a variable. In the second and later objects it begins with the object's number."""
    return ".".join(map(str, path if path[0] else path[1:])) or "a variable"


def _variables(objects: list[Any]) -> Any:
    """Pairs of a path, which begins with the index of the object, and a variable."""
    return _nnx().to_flat_state(_nnx().state(objects))


def _follow(old: list[Any], new: list[Any]) -> None:
    """Copies attributes that are not variables, such as the flag that `model.train()` sets, from `new` to `old`."""
    nnx = _nnx()
    targets = dict(nnx.iter_graph(old))
    for path, node in nnx.iter_graph(new):
        target = targets.get(path)
        if not _is_object(node) or not _is_object(target):
            continue
        for name, value in vars(node).items():
            has_arrays = isinstance(value, nnx.Variable) or any(map(is_array, jax.tree.leaves(value)))
            if name.startswith("_pytree__") or has_arrays or has_nnx(value):  # updated like variables, not here
                continue
            if name not in vars(target) or vars(target)[name] != value:
                setattr(target, name, value)
        for name in set(vars(target)) - set(vars(node)):
            delattr(target, name)


def _refuse(state: NewState) -> None:
    paths, _, streams, _ = state.about
    if not paths:
        return
    # Each stream gets a different key.
    keys = [f"{name}=jax.random.fold_in(key, {number})" for number, name in enumerate(streams)]
    keys = [f"{streams[0]}=key"] if len(streams) == 1 else keys
    code = [
        "graphdef, params, rest = nnx.split(model, nnx.Param, ...)",
        f"def loss_of_one(params, example{', key' if streams else ''}):",
        "    model = nnx.merge(graphdef, params, rest, copy=True)",
        *([f"    nnx.reseed(model, {', '.join(keys)})"] if streams else []),
        "    return loss(model, example)",
        "ab.per_example_grads(loss_of_one, rng_argnums=2)(params, batch, jax.random.key(0))"
        if streams
        else "ab.per_example_grads(loss_of_one)(params, batch)",
    ]
    if any(path[0] for _, path in paths):
        code.append("Create random streams or metrics that are arguments in the loss, e.g. rngs = nnx.Rngs(key).")
    raise InputError(
        "Per-example functions need a loss that does not change the model",
        given="a loss that changes " + ", ".join(name for name, _ in paths),
        remedy="Call model.eval() before, or create a model for each example"
        + (", which draws its own numbers:\n" if streams else ":\n")
        + "\n".join(code),
    )
