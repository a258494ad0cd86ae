"""Models of Flax NNX and Equinox as arguments of a loss: what is differentiated of them, and the rest.

`opened` takes such models apart before a call is sorted, traced and planned, so that everything below sees plain trees
of arrays; the loss is called with models again. Neither library is imported here: a model brings its library along.
"""

import dataclasses
import functools
import operator
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anybatch.call.arguments import Parts, Roles
from anybatch.call.aux_outputs import NewState
from anybatch.call.checks import is_array
from anybatch.call.loss import pair
from anybatch.call.options import Options
from anybatch.errors import InputError, user_stacklevel


def trainable(params: Any) -> Any:
    """The tree of the floating-point arrays among some parameters, with None in the place of everything else.

    >>> trainable({"w": jnp.ones(2), "size": 3, "act": jax.nn.relu})
    {'act': None, 'size': None, 'w': Array([1., 1.], dtype=float32)}
    """
    return jax.tree.map(lambda leaf: leaf if _is_trainable(leaf) else None, params)


def frozen(params: Any) -> Any:
    """The rest: everything that is not trained."""
    return jax.tree.map(lambda leaf: None if _is_trainable(leaf) else leaf, params)


def joined(trained: Any, rest: Any) -> Any:
    """The parameters, from `trainable` and `frozen`."""
    return jax.tree.map(
        lambda one, other: other if one is None else one, trained, rest, is_leaf=lambda leaf: leaf is None
    )


def _is_trainable(leaf: Any) -> bool:
    is_known = is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    return is_known and jax.dtypes.issubdtype(leaf.dtype, jnp.inexact)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A call of a loss whose models are taken apart.

    Args:
      fun: the loss, which takes `Parts` in the place of models. If it may change models of NNX, it returns
        `(loss, (aux, NewState))`.
      args: its positional arguments.
      kwargs: its keyword arguments.
      has_aux: whether `fun` returns a pair.
      objects: the models of NNX that it may change.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    has_aux: bool
    objects: "_Objects | None" = None

    def options(self, given: Options) -> Options:
        """The options for `fun`, from those for the loss."""
        declared = self.aux_reduction(given.reduction, given.aux_reduction)
        return dataclasses.replace(given, has_aux=self.has_aux, aux_reduction=declared)

    def aux_reduction(self, reduction: str, declared: Any) -> Any:
        """How the aux of `fun` combines, if that of the loss does as declared."""
        return declared if self.objects is None or reduction == "infer" else (declared, "last")

    def changes_attributes(self, aux: Any) -> bool:
        """Whether the loss has changed what a model of NNX has beside its variables."""
        return self.objects is not None and aux[1].about.definition is not None

    def close(self, aux: Any, options: Options) -> Any:
        """The aux of the loss. Models of NNX are changed in place, as the loss has changed those that it was given."""
        if self.objects is None:
            return aux
        aux, state = aux
        if state.about.streams and options.reduction != "infer" and options.microbatch_size is not None:
            warnings.warn(
                f"The loss draws from a random stream of NNX ({', '.join(state.about.streams)}), and "
                f'reduction="{options.reduction}" is declared: all microbatches see the same key and draw the same '
                'numbers, such as one dropout mask. Leave reduction out: reduction="infer", the default, draws what '
                "the whole batch would draw.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        self.objects.update(state)
        return aux


def opened(
    fun: Callable[..., Any],
    roles: Roles,
    has_aux: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    keeps_state: bool = True,
    filters: bool = False,
) -> Opened:
    """Takes apart the models of NNX, and those of Equinox that are differentiated.

    Args:
      fun: the loss.
      roles: what is differentiated.
      has_aux: whether the loss returns a pair `(loss, aux)`.
      args: its positional arguments.
      kwargs: its keyword arguments.
      keeps_state: whether what the loss changes of a model of NNX is returned. Otherwise such a loss is refused.
      filters: whether any tree may have leaves that are not differentiated, as a model of Equinox has.

    Raises:
      InputError: for an `nnx.DiffState` that points at something else. When `fun` is traced, for a loss that changes a
        model of NNX where that is not wanted.
    """
    places = {position % len(args): wrt for position, wrt in roles.wrt.items() if -len(args) <= position < len(args)}
    objects = _Objects(args, kwargs, places)
    for place, wrt in places.items():
        if wrt is not None and place not in objects.graphs and not isinstance(args[place], Parts):
            raise InputError(
                "nnx.DiffState says which variables of a model of NNX are differentiated",
                given=f"nnx.DiffState({place}, ...) for an argument of type {type(args[place]).__name__}",
                remedy=f"Pass argnums={place}.",
            )
    filtered = {place for place in set(places) - set(objects.graphs) if filters or _has_equinox(args[place])}
    if not filtered and not objects.graphs:
        return Opened(fun, args, kwargs, has_aux)

    def part(place: int | str, argument: Any) -> Any:
        if place in filtered:
            return Parts(trainable(argument), frozen(argument))
        return objects.parts.get(place, argument)

    @functools.wraps(fun)
    def opened_fun(*args: Any, **kwargs: Any) -> Any:
        whole, merged = objects.merged(args, kwargs) if objects.graphs else ({}, [])
        watch = _Watch(merged) if whole else None
        whole |= {place: joined(args[place].trained, args[place].rest) for place in filtered}
        result = fun(
            *(whole.get(place, argument) for place, argument in enumerate(args)),
            **{name: whole.get(name, argument) for name, argument in kwargs.items()},
        )
        if watch is None:
            return result
        state = watch.new_state()
        if not keeps_state:
            _refuse(state)
            return result
        value, aux = pair(result) if has_aux else (result, None)
        return value, (aux, state)

    apart = tuple(part(place, argument) for place, argument in enumerate(args))
    by_name = {name: part(name, argument) for name, argument in kwargs.items()}
    if not objects.graphs or not keeps_state:
        return Opened(opened_fun, apart, by_name, has_aux)
    return Opened(opened_fun, apart, by_name, True, objects)


def _has_equinox(argument: Any) -> bool:
    module = getattr(sys.modules.get("equinox"), "Module", None)
    if module is None or isinstance(argument, Parts):  # which was opened before
        return False
    nodes = jax.tree.leaves(argument, is_leaf=lambda node: isinstance(node, module))
    return any(isinstance(node, module) for node in nodes)


def has_nnx(tree: Any) -> bool:
    """Whether there is an object of NNX in a tree: a module, random streams, metrics."""
    return "flax.nnx" in sys.modules and bool(_objects_in(tree))


@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands for an object of NNX in a tree: its index among those of the tree."""

    index: int


def without_objects(tree: Any) -> tuple[Any, list[Any]]:
    """A tree without its objects of NNX, for `with_objects`; and these, in order."""
    objects: list[Any] = []
    if "flax.nnx" not in sys.modules:
        return tree, objects

    def taken(leaf: Any) -> Any:
        if not _is_changeable(leaf):
            return leaf
        objects.append(leaf)
        return _Place(len(objects) - 1)

    return jax.tree.map(taken, tree, is_leaf=lambda node: _is_changeable(node) or _is_state(node)), objects


def with_objects(tree: Any, objects: Sequence[Any]) -> Any:
    """The tree that `without_objects` was given, with these objects."""
    return jax.tree.map(lambda leaf: objects[leaf.index] if isinstance(leaf, _Place) else leaf, tree)


def _nnx() -> Any:
    return sys.modules["flax.nnx"]


def _is_object(node: Any) -> bool:
    """Whether NNX takes it by reference, so that a loss may change it."""
    return isinstance(node, _nnx().Pytree)


def _is_changeable(node: Any) -> bool:
    """Whether it is such an object, or a variable by itself."""
    return isinstance(node, (_nnx().Pytree, _nnx().Variable))


def _structure(tree: Any, is_object: Callable[[Any], bool]) -> Any:
    """Of a tree in which objects are leaves, and so is every `nnx.State`."""
    return jax.tree.structure(tree, is_leaf=lambda node: is_object(node) or _is_state(node))


def _is_state(node: Any) -> bool:
    """Whether it is an `nnx.State`, whose variables are values and no objects."""
    return isinstance(node, _nnx().State)


class _Graph(NamedTuple):
    """An argument with objects of NNX in it."""

    tree: Any  # of the argument, in which an object is a leaf
    definitions: tuple[Any, ...]  # None for leaves that are no objects


class _Objects:
    """The objects of NNX among the arguments of a call. References that they share are kept, as NNX keeps them."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], places: dict[int, Any]) -> None:
        self.graphs: dict[int | str, _Graph] = {}
        self.parts: dict[int | str, Parts] = {}
        self._objects: list[Any] = []
        if "flax.nnx" not in sys.modules:
            return
        nnx = _nnx()
        with nnx.split_context() as context:
            by_place: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
            # What is differentiated comes first: a variable that other arguments share with it is differentiated.
            for place, argument in sorted(by_place, key=lambda pair: pair[0] not in places):
                # Variables without a module, where they are differentiated, are a tree of arrays.
                has_modules = any(map(_is_object, _structure(argument, _is_object).flatten_up_to(argument)))
                is_object = _is_changeable if place not in places or has_modules else _is_object
                tree: Any = _structure(argument, is_object)
                leaves = tree.flatten_up_to(argument)
                if not any(map(is_object, leaves)):
                    continue
                wrt = places.get(place) if isinstance(place, int) else None
                filters = (nnx.Param if wrt is None else wrt, ...) if place in places else ()
                split = [context.split(leaf, *filters) if is_object(leaf) else (None, leaf) for leaf in leaves]
                states = [(*states, None)[:2] if place in places else (None, *states) for _, *states in split]
                trained, rest = zip(*states, strict=True)
                self.graphs[place] = _Graph(tree, tuple(definition for definition, *_ in split))
                self.parts[place] = Parts(tree.unflatten(trained) if place in places else None, list(rest))
                self._objects += filter(is_object, leaves)

    def merged(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[dict[int | str, Any], list[Any]]:
        """The arguments with objects in them, by their places, from their parts; and these objects."""
        found: dict[int | str, Any] = {}
        objects: list[Any] = []
        with _nnx().merge_context() as context:
            for place, (tree, definitions) in self.graphs.items():
                parts = kwargs[place] if isinstance(place, str) else args[place]
                trained = [None] * len(definitions) if parts.trained is None else tree.flatten_up_to(parts.trained)
                leaves = []
                for definition, *states in zip(definitions, trained, parts.rest, strict=True):
                    there = [state for state in states if state is not None]
                    leaves.append(there[0] if definition is None else context.merge(definition, *there))
                found[place] = tree.unflatten(leaves)
                objects += (
                    leaf for leaf, definition in zip(leaves, definitions, strict=True) if definition is not None
                )
        return found, objects

    def update(self, state: NewState) -> None:
        """Changes the objects that were given as a loss has changed the others."""
        nnx = _nnx()
        paths, definition, _, removed = state.about
        if not paths and definition is None:  # under `vmap`, a model from outside may be used, and not changed
            return
        nnx.update(self._objects, nnx.from_flat_state({path: state.values[name] for name, path in paths}))
        if definition is not None:
            left = {path: value for path, value in _variables(self._objects) if path not in removed}
            _follow(self._objects, nnx.merge(definition, nnx.from_flat_state(left)))


class _About(NamedTuple):
    """What is known of changes to objects when a loss was traced."""

    paths: tuple[tuple[str, tuple[Any, ...]], ...]  # of variables that have other values, or are new, with their names
    definition: Any  # of the objects, if it is another
    streams: tuple[str, ...]  # the names of the random streams that were drawn from
    removed: frozenset[Any] = frozenset()  # the paths of variables that are gone


class _Watch:
    """Sees what a loss changes of the objects that it is called with."""

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects
        self._definition = _nnx().graphdef(objects)
        self._leaves = {path: jax.tree.leaves(value) for path, value in _variables(objects)}
        self._nodes = {path for path, node in _nnx().iter_graph(objects) if _is_object(node)}

    def new_state(self) -> NewState:
        """The variables that have other values now, or are new; and the definition of the objects, if it is another."""
        new = {}
        for path, value in _variables(self._objects):
            leaves, before = jax.tree.leaves(value), self._leaves.get(path)
            if before is None and len(path) > 1 and path[:-1] not in self._nodes:
                raise InputError(
                    "The loss may change variables of a model, and add some, but no modules",
                    given=f"a loss that adds {_name(path)}",
                    remedy="Add the module before, where the model is made.",
                )
            if before is None or len(before) != len(leaves) or any(map(operator.is_not, before, leaves)):
                new[path] = value
        definition = _nnx().graphdef(self._objects)
        named: dict[str, Any] = {}
        for path, value in new.items():
            name = _name(path)
            named[repr(path) if name in named else name] = (path, value)  # names are for people, and may be alike
        paths = tuple((name, path) for name, (path, _) in named.items())
        drawn = [value for value in new.values() if isinstance(value, _nnx().RngCount)]
        streams = tuple(sorted({getattr(count, "tag", "default") for count in drawn}))
        removed = frozenset(self._leaves) - {path for path, _ in _variables(self._objects)}
        about = _About(paths, None if definition == self._definition else definition, streams, removed)
        return NewState({name: value for name, (_, value) in named.items()}, about)


def _name(path: tuple[Any, ...]) -> str:
    """Of a variable: that of a second object begins with its number."""
    return ".".join(map(str, path if path[0] else path[1:])) or "a variable"


def _objects_in(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_object) if _is_object(leaf)]


def _variables(objects: list[Any]) -> Any:
    """Pairs of a path, which begins with the position of the object, and a variable."""
    return _nnx().to_flat_state(_nnx().state(objects))


def _follow(old: list[Any], new: list[Any]) -> None:
    """Gives objects the attributes of others that are no variables, such as a flag that `model.train()` sets."""
    nnx = _nnx()
    targets = dict(nnx.iter_graph(old))
    for path, node in nnx.iter_graph(new):
        target = targets.get(path)
        if not _is_object(node) or not _is_object(target):
            continue
        for name, value in vars(node).items():
            has_arrays = isinstance(value, nnx.Variable) or any(map(is_array, jax.tree.leaves(value)))
            if name.startswith("_pytree__") or has_arrays or has_nnx(value):  # they are updated as variables are
                continue
            if name not in vars(target) or vars(target)[name] != value:
                setattr(target, name, value)
        for name in set(vars(target)) - set(vars(node)):
            delattr(target, name)


def _reseeded(streams: Sequence[str]) -> str:
    """The arguments of `nnx.reseed` that give each of these streams a key of its own, from one key."""
    if len(streams) == 1:
        return f"{streams[0]}=key"
    return ", ".join(f"{name}=jax.random.fold_in(key, {number})" for number, name in enumerate(streams))


def _refuse(state: NewState) -> None:
    paths, _, streams, _ = state.about
    if not paths:
        return
    draws = [f"    nnx.reseed(model, {_reseeded(streams)})"] if streams else []
    code = [
        "graphdef, params, rest = nnx.split(model, nnx.Param, ...)",
        f"def loss_of_one(params, example{', key' if streams else ''}):",
        "    model = nnx.merge(graphdef, params, rest, copy=True)",
        *draws,
        "    return loss(model, example)",
        "ab.per_example_grads(loss_of_one, rng_argnums=2)(params, batch, jax.random.key(0))"
        if streams
        else "ab.per_example_grads(loss_of_one)(params, batch)",
    ]
    if any(path[0] for _, path in paths):
        code.append("Random streams or metrics that are arguments: make them in the loss, e.g. rngs = nnx.Rngs(key).")
    raise InputError(
        "Per-example functions need a loss that does not change the model",
        given="a loss that changes " + ", ".join(name for name, _ in paths),
        remedy="Call model.eval() before, or make a model for each example"
        + (", which draws its own numbers:\n" if streams else ":\n")
        + "\n".join(code),
    )
