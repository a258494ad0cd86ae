"""The arguments of one call, sorted by what they are to the gradient."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from anybatch.call import microbatches as batch
from anybatch.call.checks import describe, is_array, is_key, named_leaves
from anybatch.errors import InputError
from anybatch.jaxprs import avals


class Arrays(NamedTuple):
    """The array leaves of a call, by role. A pytree, so that a compiled program can take it whole."""

    wrt: list[Any]  # what the gradient is taken with respect to
    batch: list[Any]  # examples along axis 0
    keys: list[Any]  # PRNG keys, made fresh for each microbatch
    rest: list[Any]  # arrays that every microbatch sees alike


class _Nameless:
    """A step on the way to a leaf that the name of the leaf does not show."""

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """An argument that is differentiated in part.

    Args:
      trained: what is differentiated: the gradient has this tree.
      rest: what the loss needs beside it.
    """

    trained: Any
    rest: Any

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """For JAX."""
        return ((_Nameless(), self.trained), (_Nameless(), self.rest)), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Sequence[Any]) -> "Parts":
        """For JAX."""
        return cls(*parts)


ROLES = ("argnums", "batch_argnums", "rng_argnums", "batch_argnames")  # the options that `Roles.of` takes


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which arguments are differentiated, which carry the batch, which are PRNG keys."""

    argnums: int | tuple[int, ...]
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    batch_argnames: tuple[str, ...] = ()
    filters: tuple[Any, ...] = ()  # for each of argnums, which variables of a model of NNX; None for its parameters

    @classmethod
    def of(cls, *, argnums: Any, batch_argnums: Any, rng_argnums: Any, batch_argnames: Any = ()) -> "Roles":
        """Checks what can be checked before a call."""
        several = argnums if isinstance(argnums, (tuple, list)) else (argnums,)
        filters = tuple(each.filter if _is_diff_state(each) else None for each in several)
        plain = type(several)(each.argnum if _is_diff_state(each) else each for each in several)
        wrt = _positions("argnums", plain if isinstance(argnums, (tuple, list)) else plain[0])
        names = _names("batch_argnames", batch_argnames)
        roles = cls(
            argnums=wrt if isinstance(argnums, (tuple, list)) else wrt[0],
            batch_argnums=_positions("batch_argnums", batch_argnums, may_be_empty=bool(names)),
            rng_argnums=_positions("rng_argnums", rng_argnums, may_be_empty=True),
            batch_argnames=names,
            filters=filters if any(each is not None for each in filters) else (),
        )
        _must_not_overlap(_as_given(roles))
        return roles

    def sort(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Arguments":
        """Sorts the arguments of one call of `fun`, and checks them."""
        call = _Call(fun, args, kwargs)
        if not call.has_batch(self):
            raise InputError(
                "The batch must be an argument of the loss",
                given=f"{self._batch_options} and a call with ({', '.join(call.names)})",
                remedy=call.with_batch(),
            )
        places = {name: call.places(name, given) for name, given in _as_given(self).items()}
        _must_not_overlap(places)
        named = tuple(place for place in call.named(self.batch_argnames) if place not in places["batch_argnums"])
        _must_not_overlap({**places, "batch_argnames": named})
        places["batch_argnums"] += named
        role_of = {place: _ROLES[name] for name, given in places.items() for place in given}

        leaves: list[_Leaf] = []
        for place in places["argnums"]:  # in the order given, which is the order of the gradients
            leaves += call.leaves(place, "wrt")
        for place in (*range(len(args)), *sorted(kwargs)):
            if role_of.get(place) != "wrt":
                leaves += call.leaves(place, role_of.get(place, "rest"))

        call.refuse_batch_elsewhere(places["batch_argnums"], set(role_of), self._batch_options)
        rows = [(leaf.name, leaf.value) for leaf in leaves if leaf.role == "batch"]
        try:
            num_examples = batch.count_examples(rows, self._batch_options)
        except InputError as error:
            more = call.other_ways(places["argnums"], places["batch_argnums"], rows)
            raise InputError(error.must, given=error.given, remedy=" ".join([error.remedy, *more])) from None
        for leaf in leaves:
            _check(leaf)
        wrt_trees = [call.tree(place) for place in places["argnums"]]
        return Arguments(args, kwargs, leaves, num_examples, wrt_trees, isinstance(self.argnums, tuple))

    @property
    def wrt(self) -> dict[int, Any]:
        """What is differentiated: positions, each with a filter of NNX or None."""
        positions = _as_given(self)["argnums"]
        return dict(zip(positions, self.filters or (None,) * len(positions), strict=True))

    @property
    def _batch_options(self) -> str:
        """What the batch is named by, as it was given."""
        plain = {"batch_argnums": self.batch_argnums, "batch_argnames": self.batch_argnames}
        return " and ".join(f"{name}={_plain(given)!r}" for name, given in plain.items() if given)


_ROLES = {"argnums": "wrt", "batch_argnums": "batch", "rng_argnums": "keys"}

Position: TypeAlias = int | str  # of an argument: its position, or its name if it is passed by keyword


class _Leaf(NamedTuple):
    place: Position  # of its argument
    name: str
    value: Any
    role: str


class _Call:
    """The arguments of one call, by their places."""

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fun, self.args, self.kwargs = fun, args, kwargs
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        self._is_known = bool(parameters)
        self._takes_any_name = any(each.kind == each.VAR_KEYWORD for each in parameters)
        self._names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        self._positional = [
            each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        ]

    def has_batch(self, roles: Roles) -> bool:
        """Whether there may be a batch: named as such, or another argument than those differentiated and the keys."""
        if roles.batch_argnames or any(self._find("batch_argnums", position) for position in roles.batch_argnums):
            return True
        taken = len(_as_given(roles)["argnums"]) + len(roles.rng_argnums)
        return len(self.args) > taken or any(map(is_array, jax.tree.leaves(self.kwargs)))

    @property
    def names(self) -> list[str]:
        """Those of the positional arguments."""
        return [self._name(position) for position in range(len(self.args))]

    def with_batch(self, *, only_if_seen: bool = False) -> str:
        """How to write a loss that closes over its batch; if `only_if_seen`, nothing unless it closes over arrays."""
        arrays = _closed_over(self.fun)
        if only_if_seen and not arrays:
            return ""
        names = [name if name.isidentifier() else "params" for name in self.names] or ["params"]
        added = list(arrays) or ["batch"]
        signature, first = ", ".join([*names, *added]), len(names)
        seen = ", ".join(f"{name} = {describe(array)}" for name, array in arrays.items())
        if_so = f"The loss closes over {seen}. If that is its batch" if seen else "If the loss closes over its batch"
        return (
            f"{if_so}, make it an argument: def loss({signature}): ..., with "
            f"batch_argnums={_plain(tuple(range(first, first + len(added))))}, called with ({signature})."
        )

    def other_ways(
        self, wrt: Sequence[Position], batch_places: Sequence[Position], rows: Sequence[tuple[str, Any]]
    ) -> list[str]:
        """What may have been meant by a call whose batch cannot be one: it is closed over, or comes first."""
        ways = []
        if rows and all(is_key(leaf) for _, leaf in rows):
            ways.append(self.with_batch())
        elif not any(is_array(leaf) and leaf.ndim for _, leaf in rows):
            ways.append(self.with_batch(only_if_seen=True))
        ways = [way for way in ways if way]
        counts = {leaf.shape[0] for _, leaf in rows if is_array(leaf) and leaf.ndim}
        if not ways and len(counts) != 1 and len(wrt) == len(batch_places) == 1 and self._has_rows(wrt[0]):
            ways.append(
                "If parameters and batch are in the wrong order, swap them, or pass "
                f"argnums={batch_places[0]}, batch_argnums={wrt[0]}."
            )
        return ways

    def refuse_batch_elsewhere(self, batch_places: Sequence[Position], taken: set[Position], options: str) -> None:
        """Refuses a batch that cannot be one, as random streams cannot, where another argument by position can.

        Args:
          batch_places: of the arguments that were named.
          taken: the places of all arguments that were named.
          options: which named the batch, for a message.
        """
        if not batch_places or any(self._may_be_batch(place) for place in batch_places):
            return
        others = [place for place in range(len(self.args)) if place not in taken and self._has_rows(place)]
        if others:
            seen = [f"{name} = {describe(leaf)}" for name, leaf in self._named(batch_places[0])]
            raise InputError(
                "The batch must be the argument whose arrays have a row for each example",
                given=f"{options}, which has {', '.join(seen[:3]) or 'no arrays'}" + (", ..." if len(seen) > 3 else ""),
                remedy=f"Pass batch_argnums={_plain(tuple(others))}: {', '.join(map(self._name, others))}.",
            )

    def _named(self, place: Position) -> list[tuple[str, Any]]:
        return named_leaves(place if isinstance(place, str) else self._name(place), self[place])

    def _may_be_batch(self, place: Position) -> bool:
        return not isinstance(self[place], Parts) and any(np.ndim(leaf) for leaf in jax.tree.leaves(self[place]))

    def _has_rows(self, place: Position) -> bool:
        leaves = jax.tree.leaves(self[place])
        if isinstance(self[place], Parts) or not leaves or not all(map(is_array, leaves)):
            return False
        return len({leaf.shape[:1] for leaf in leaves}) == 1 and leaves[0].ndim > 0

    def __getitem__(self, place: Position) -> Any:
        return self.kwargs[place] if isinstance(place, str) else self.args[place]

    def leaves(self, place: Position, role: str) -> list[_Leaf]:
        """The leaves of an argument, with the names that a message shows."""
        name = place if isinstance(place, str) else self._name(place)
        argument = self[place]
        if role == "wrt" and isinstance(argument, Parts):
            trained = [_Leaf(place, path, leaf, role) for path, leaf in named_leaves(name, argument.trained)]
            return trained + [_Leaf(place, path, leaf, "rest") for path, leaf in named_leaves(name, argument.rest)]
        return [_Leaf(place, path, leaf, role) for path, leaf in named_leaves(name, argument)]

    def tree(self, place: Position) -> Any:
        """The tree of the gradient with respect to an argument."""
        argument = self[place]
        return jax.tree.structure(argument.trained if isinstance(argument, Parts) else argument)

    def places(self, option: str, positions: tuple[int, ...]) -> tuple[Position, ...]:
        """Where the arguments at these positions of the signature are.

        Raises:
          InputError: for an argument that was not passed; as in JAX, what is differentiated is passed by position.
        """
        return tuple(self._place(option, position) for position in positions)

    def named(self, names: tuple[str, ...]) -> tuple[Position, ...]:
        """Where the arguments of these names are. One that was left out, for its default, is nowhere."""
        found: list[Position] = []
        for name in names:
            if name in self.kwargs:
                found.append(name)
            elif name in self._positional[: len(self.args)]:
                found.append(self._positional.index(name))
            elif self._is_known and name not in self._names and not self._takes_any_name:
                raise InputError(
                    "batch_argnames must be names of arguments of the loss",
                    given=f"batch_argnames={name!r}",
                    remedy=f"Choose from {', '.join(map(repr, self._names))}.",
                )
        return tuple(found)

    def _find(self, option: str, position: int) -> tuple[Position, ...]:
        number = len(self.args)
        if -number <= position < number:
            return (position % number,)
        if option != "argnums" and 0 <= position < len(self._positional) and self._positional[position] in self.kwargs:
            return (self._positional[position],)
        return ()

    def _place(self, option: str, position: int) -> Position:
        for place in self._find(option, position):
            return place
        number = len(self.args)
        choices = f", or choose {option} from 0 to {number - 1}" if number > 1 else ""
        raise InputError(
            f"{option} must be among the {number} positional argument{'' if number == 1 else 's'} of the call",
            given=f"{option}={position}",
            remedy=f"Pass that argument by position, not by keyword{choices}."
            + (
                " Where the whole batch is passed by keyword, name it: batch_argnums=(), batch_argnames=..."
                if option == "batch_argnums" and self.kwargs
                else ""
            ),
        )

    def _name(self, position: int) -> str:
        return self._positional[position] if position < len(self._positional) else f"args[{position}]"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """One call: its arrays by role, and the way back to what the user's function expects."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[_Leaf]
    num_examples: int
    wrt_trees: list[Any]
    wrt_is_tuple: bool

    @property
    def arrays(self) -> Arrays:
        """The array leaves. Python numbers, strings and the like are not among them: they stay constants."""
        return Arrays(*([leaf.value for leaf in self.arrays_of(role)] for role in Arrays._fields))

    def types(self, num_examples: int | None, *, bare: bool = False) -> Arrays:
        """The types of the array leaves, with that many examples in the batch; `bare`, wherever they lie.

        None stands for one example by itself, without the axis of the batch.
        """
        types = jax.tree.map(avals.bare if bare else jax.typeof, self.arrays)
        kept = Arrays(*([avals.abstract(aval) for aval in leaves] for leaves in types))
        if num_examples is None:
            return kept._replace(batch=[avals.one_of(aval) for aval in types.batch])
        return kept._replace(batch=[avals.abstract(aval, num_examples) for aval in types.batch])

    def call(self, fun: Callable[..., Any], arrays: Arrays) -> Any:
        """Calls the user's function with other arrays in the places of those given."""
        supply = {role: iter(getattr(arrays, role)) for role in Arrays._fields}
        values: dict[Position, list[Any]] = {}
        for leaf in self.leaves:
            value = next(supply[leaf.role]) if _is_dynamic(leaf) else leaf.value
            values.setdefault(leaf.place, []).append(value)

        def filled(place: Position, argument: Any) -> Any:
            return jax.tree.unflatten(jax.tree.structure(argument), values.get(place, []))

        args = [filled(position, argument) for position, argument in enumerate(self.args)]
        return fun(*args, **{name: filled(name, argument) for name, argument in self.kwargs.items()})

    def refuse_unnamed_rows(self, who: str) -> None:
        """Refuses an array that is not named as part of the batch, but has as many rows as the batch has examples.

        Keyword arguments are looked at, and positional arguments that are themselves an array. A tree by position is
        not: parameters that are not differentiated may have as many rows by chance.

        Args:
          who: what would see all of its rows, "example" or "microbatch".
        """
        for leaf, option, bound in self.unnamed_rows():
            raise InputError(
                "An array with as many rows as the batch has examples must be part of the batch, or of the loss",
                given=f"{leaf.name} = {describe(leaf.value)} for {self.num_examples} examples, of which every {who} "
                "would see all rows",
                remedy=f"Pass {option} for one row to each example. If every {who} is to see all rows, close over it"
                + (f": functools.partial(loss, {bound}=...)." if bound.isidentifier() else "."),
            )

    def unnamed_rows(self) -> Iterator[tuple[_Leaf, str, str]]:
        """The arrays that have as many rows as the batch has examples, and are not named as part of it.

        Yields:
          The leaf, the option that would name it, and the name of the argument.
        """
        for leaf in self.leaves if self.num_examples > 1 else ():
            if leaf.role != "rest" or not is_array(leaf.value) or leaf.value.shape[:1] != (self.num_examples,):
                continue
            if self.is_in_parts(leaf):  # rows of a model are no examples
                continue
            if isinstance(leaf.place, str):
                yield leaf, f'batch_argnames="{leaf.place}"', leaf.place
            elif leaf.value is self.args[leaf.place] and not is_key(leaf.value):
                positions = {each.place for each in self.leaves if each.role == "batch" and isinstance(each.place, int)}
                yield leaf, f"batch_argnums={(*sorted(positions), leaf.place)}", leaf.name

    def as_gradient(self, leaves: Sequence[Any]) -> Any:
        """The leaves of the gradient in the tree that `jax.grad` returns them in."""
        trees, start = [], 0
        for tree in self.wrt_trees:
            trees.append(jax.tree.unflatten(tree, leaves[start : start + tree.num_leaves]))
            start += tree.num_leaves
        return tuple(trees) if self.wrt_is_tuple else trees[0]

    def is_in_parts(self, leaf: _Leaf) -> bool:
        """Whether a leaf is of an argument that is differentiated in part: of a model."""
        return isinstance(self.kwargs[leaf.place] if isinstance(leaf.place, str) else self.args[leaf.place], Parts)

    def arrays_of(self, role: str) -> list[_Leaf]:
        """The leaves of a role that are arrays, in the order of `arrays`."""
        return [leaf for leaf in self.leaves if leaf.role == role and _is_dynamic(leaf)]


def takes_batch(fun: Callable[..., Any]) -> bool:
    """Whether a loss can be called with parameters and a batch, as far as its signature says."""
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind_partial(None, None)
    except TypeError:
        return False
    return True


def _closed_over(fun: Callable[..., Any]) -> dict[str, Any]:
    """The arrays with at least one axis that a function refers to without being given them, by their names."""
    named: dict[str, Any] = {}
    while isinstance(fun, functools.partial):
        named, fun = {**fun.keywords, **named}, fun.func
    try:
        found = inspect.getclosurevars(inspect.unwrap(fun))
    except (TypeError, ValueError):
        return {}
    named = {**found.globals, **found.nonlocals, **named}
    return {name: value for name, value in named.items() if is_array(value) and value.ndim and not is_key(value)}


def _is_dynamic(leaf: _Leaf) -> bool:
    return leaf.role != "rest" or is_array(leaf.value)


def _check(leaf: _Leaf) -> None:
    if leaf.role == "wrt" and not _is_inexact(leaf.value):
        raise InputError(
            "Gradients are taken with respect to arrays of floating-point or complex numbers",
            given=f"{leaf.name} = {describe(leaf.value)}",
            remedy="Cast it, e.g. x.astype(jnp.float32), or take its argument out of argnums "
            "(split integers and settings off the parameters and pass them as another argument).",
        )
    if leaf.role == "keys" and not is_key(leaf.value):
        raise InputError(
            "rng_argnums must point at arguments whose leaves are single PRNG keys",
            given=f"{leaf.name} = {describe(leaf.value)}",
            remedy="Pass jax.random.key(0), or take this argument out of rng_argnums.",
        )


def _is_inexact(value: Any) -> bool:
    if is_array(value):
        return jax.dtypes.issubdtype(value.dtype, np.inexact)
    return isinstance(value, (float, complex))


def _as_given(roles: Roles) -> dict[str, tuple[int, ...]]:
    wrt = roles.argnums if isinstance(roles.argnums, tuple) else (roles.argnums,)
    return {"argnums": wrt, "batch_argnums": roles.batch_argnums, "rng_argnums": roles.rng_argnums}


def _is_diff_state(argnum: Any) -> bool:
    """Whether it is an `nnx.DiffState`: a position, and a filter of variables."""
    return hasattr(argnum, "argnum") and hasattr(argnum, "filter")


def _positions(name: str, given: Any, *, may_be_empty: bool = False) -> tuple[int, ...]:
    several = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    try:
        positions = tuple(operator.index(position) for position in several)
    except TypeError:
        positions = ()
    if any(isinstance(position, bool) for position in several) or (
        not positions and not (may_be_empty and several == ())
    ):
        raise InputError(
            f"{name} must be the position of an argument, or a tuple of positions",
            given=f"{name}={given!r}",
            remedy=f"Pass an int or a tuple of ints, e.g. {name}=1 or {name}=(1, 2).",
        )
    return positions


def _names(option: str, given: Any) -> tuple[str, ...]:
    several = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    if not all(isinstance(name, str) for name in several):
        raise InputError(
            f"{option} must be the name of an argument, or a tuple of names",
            given=f"{option}={given!r}",
            remedy=f'Pass a str or a tuple of them, e.g. {option}="y" or {option}=("x", "y").',
        )
    return several


def _plain(given: tuple[Any, ...]) -> Any:
    return given[0] if len(given) == 1 else given


def _must_not_overlap(places: Mapping[str, Sequence[Position]]) -> None:
    owner: dict[Position, str] = {}
    for name, given in places.items():
        for place in given:
            if place in owner:
                raise InputError(
                    "argnums, batch_argnums and rng_argnums must not overlap",
                    given=(f"position {place}" if isinstance(place, int) else f"argument {place!r}")
                    + f" in {owner[place]}"
                    + (" twice" if owner[place] == name else f" and in {name}"),
                    remedy="An argument is differentiated, or cut into microbatches, or a PRNG key: "
                    "e.g. value_and_grad(loss, argnums=0, batch_argnums=1, rng_argnums=2).",
                )
            owner[place] = name
