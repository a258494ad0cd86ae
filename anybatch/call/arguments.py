"""The arguments of one call, sorted by role: differentiated, batch, PRNG keys, everything else.

`Roles` says which argument has which role. `Roles.sort` checks the arguments of a call and returns `Arguments`.
"""

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
    """The array leaves of a call, by role. It is a pytree, and so can be an argument of a compiled program."""

    wrt: list[Any]  # differentiated
    batch: list[Any]  # examples along axis 0
    keys: list[Any]  # PRNG keys, of which each microbatch gets new ones
    rest: list[Any]  # everything else: the same for every microbatch


class _Nameless:
    """A key in the path of a leaf that does not appear in the leaf's name."""

    def __str__(self) -> str:
        return ""


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False)
class PartlyTrained:
    """An argument of which only some leaves are differentiated, such as a model."""

    trained: Any  # the differentiated leaves. The gradient has this tree.
    rest: Any  # the other leaves

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        return ((_Nameless(), self.trained), (_Nameless(), self.rest)), None

    @classmethod
    def tree_unflatten(cls, _: None, parts: Sequence[Any]) -> "PartlyTrained":
        return cls(*parts)


NOTHING = object()  # for `argnums`, of a function that is computed and not differentiated

ROLES = ("argnums", "batch_argnums", "rng_argnums", "batch_argnames")  # the options that `Roles.of` takes


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which arguments are differentiated, which hold the batch, and which are PRNG keys."""

    argnums: int | tuple[int, ...]
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]
    batch_argnames: tuple[str, ...] = ()
    filters: tuple[Any, ...] = ()  # for each of argnums, an NNX filter, or None for nnx.Param

    @classmethod
    def of(cls, *, argnums: Any, batch_argnums: Any, rng_argnums: Any, batch_argnames: Any = ()) -> "Roles":
        """The roles that a user chose. Checks what needs no call."""
        nothing, argnums = argnums is NOTHING, () if argnums is NOTHING else argnums
        is_several = isinstance(argnums, (tuple, list))
        several = argnums if is_several else (argnums,)
        # An `nnx.DiffState` is a position and a filter of variables.
        filters = tuple(getattr(each, "filter", None) for each in several)
        plain = tuple(each.argnum if hasattr(each, "argnum") else each for each in several)
        wrt = _positions("argnums", plain if is_several else plain[0], may_be_empty=nothing)
        names = tuple(batch_argnames) if isinstance(batch_argnames, (tuple, list)) else (batch_argnames,)
        if not all(isinstance(name, str) for name in names):
            raise InputError(
                "batch_argnames must be the name of an argument, or a tuple of names",
                given=f"batch_argnames={batch_argnames!r}",
                remedy='Pass a str or a tuple of them, e.g. batch_argnames="y" or batch_argnames=("x", "y").',
            )
        roles = cls(
            argnums=wrt if is_several else wrt[0],
            batch_argnums=_positions("batch_argnums", batch_argnums, may_be_empty=bool(names)),
            rng_argnums=_positions("rng_argnums", rng_argnums, may_be_empty=True),
            batch_argnames=names,
            filters=filters if any(each is not None for each in filters) else (),
        )
        _must_not_overlap(_positions_by_option(roles))
        return roles

    def sort(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Arguments":
        """Checks the arguments of a call of `fun`, and sorts their leaves by role."""
        call = _Call(fun, args, kwargs)
        if not call.has_batch(self):
            raise InputError(
                "The batch must be an argument of the loss",
                given=f"{self._batch_options} and a call with ({', '.join(call.names)})",
                remedy=call.with_batch(),
            )
        slots: dict[str, tuple[Slot, ...]] = {
            option: tuple(call.slot(option, position) for position in positions)
            for option, positions in _positions_by_option(self).items()
        }
        _must_not_overlap(slots)
        named = tuple(slot for slot in call.named(self.batch_argnames) if slot not in slots["batch_argnums"])
        _must_not_overlap({**slots, "batch_argnames": named})
        slots["batch_argnums"] += named
        role_of = {slot: _ROLES[name] for name, chosen in slots.items() for slot in chosen}

        leaves: list[_Leaf] = []
        for slot in slots["argnums"]:  # in the user's order, which is that of the gradients
            leaves += call.leaves(slot, "wrt")
        for slot in (*range(len(args)), *sorted(kwargs)):
            if role_of.get(slot) != "wrt":
                leaves += call.leaves(slot, role_of.get(slot, "rest"))

        call.refuse_batch_elsewhere(slots["batch_argnums"], set(role_of), self._batch_options)
        rows = [(leaf.name, leaf.value) for leaf in leaves if leaf.role == "batch"]
        try:
            num_examples = batch.count_examples(rows, self._batch_options)
        except InputError as error:
            more = call.suggestions(slots["argnums"], slots["batch_argnums"], rows)
            raise InputError(error.must, given=error.given, remedy=" ".join([error.remedy, *more])) from None
        for leaf in leaves:
            _check(leaf)
        wrt_trees = [call.tree(slot) for slot in slots["argnums"]]
        return Arguments(args, kwargs, leaves, num_examples, wrt_trees, isinstance(self.argnums, tuple))

    @property
    def wrt(self) -> dict[int, Any]:
        """The positions of the differentiated arguments, each with an NNX filter or None."""
        positions = _positions_by_option(self)["argnums"]
        return dict(zip(positions, self.filters or (None,) * len(positions), strict=True))

    @property
    def _batch_options(self) -> str:
        """The options that point at the batch, as an error message shows them."""
        plain = {"batch_argnums": self.batch_argnums, "batch_argnames": self.batch_argnames}
        return " and ".join(f"{name}={_unpack_single(value)!r}" for name, value in plain.items() if value)


_ROLES = {"argnums": "wrt", "batch_argnums": "batch", "rng_argnums": "keys"}

# Which argument of a call: its position, or its name if it is passed by keyword.
Slot: TypeAlias = int | str


class _Leaf(NamedTuple):
    slot: Slot  # the argument that it belongs to
    name: str
    value: Any
    role: str


class _Call:
    """The arguments of one call, by slot."""

    def __init__(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fun, self.args, self.kwargs = fun, args, kwargs
        try:
            parameters = list(inspect.signature(fun).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        self._is_known = bool(parameters)
        self._takes_any_name = any(each.kind == each.VAR_KEYWORD for each in parameters)
        self._names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        keyword_only = {each.name for each in parameters if each.kind == each.KEYWORD_ONLY}
        self._positional = [name for name in self._names if name not in keyword_only]

    def has_batch(self, roles: Roles) -> bool:
        """True if the options name a batch, or an argument is left that is neither differentiated nor a key."""
        found = [self._find("batch_argnums", position) for position in roles.batch_argnums]
        if roles.batch_argnames or any(slot is not None for slot in found):
            return True
        taken = len(_positions_by_option(roles)["argnums"]) + len(roles.rng_argnums)
        return len(self.args) > taken or any(map(is_array, jax.tree.leaves(self.kwargs)))

    @property
    def names(self) -> list[str]:
        return [self._name(position) for position in range(len(self.args))]

    def with_batch(self, *, only_if_seen: bool = False) -> str:
        """Advice to make the batch an argument. With `only_if_seen`, empty unless the loss does close over arrays."""
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
            f"batch_argnums={_unpack_single(tuple(range(first, first + len(added))))}, called with ({signature})."
        )

    def suggestions(
        self, wrt: Sequence[Slot], batch_slots: Sequence[Slot], rows: Sequence[tuple[str, Any]]
    ) -> list[str]:
        """Advice for a call with an impossible batch: the loss may close over it, or the arguments may be swapped."""
        counts = {leaf.shape[0] for _, leaf in rows if is_array(leaf) and leaf.ndim}
        are_keys = bool(rows) and all(is_key(leaf) for _, leaf in rows)
        if (are_keys or not counts) and (advice := self.with_batch(only_if_seen=not are_keys)):
            return [advice]
        if len(counts) != 1 and len(wrt) == len(batch_slots) == 1 and self._has_rows(wrt[0]):
            swapped = f"argnums={batch_slots[0]}, batch_argnums={wrt[0]}"
            return [f"If parameters and batch are in the wrong order, swap them, or pass {swapped}."]
        return []

    def refuse_batch_elsewhere(self, batch_slots: Sequence[Slot], taken: set[Slot], options: str) -> None:
        """Raises if the options point at an argument that cannot be a batch, such as random streams, and another can.

        The others are those that have no role yet: they are not `taken`.
        """
        if not batch_slots or any(self._may_be_batch(slot) for slot in batch_slots):
            return
        others = [slot for slot in range(len(self.args)) if slot not in taken and self._has_rows(slot)]
        if others:
            named = named_leaves(self._name(batch_slots[0]), self[batch_slots[0]])
            seen = [f"{name} = {describe(leaf)}" for name, leaf in named]
            raise InputError(
                "The batch must be the argument whose arrays have a row for each example",
                given=f"{options}, which has {', '.join(seen[:3]) or 'no arrays'}" + (", ..." if len(seen) > 3 else ""),
                remedy=f"Pass batch_argnums={_unpack_single(tuple(others))}: {', '.join(map(self._name, others))}.",
            )

    def _may_be_batch(self, slot: Slot) -> bool:
        return not isinstance(self[slot], PartlyTrained) and any(np.ndim(leaf) for leaf in jax.tree.leaves(self[slot]))

    def _has_rows(self, slot: Slot) -> bool:
        leaves = jax.tree.leaves(self[slot])
        if isinstance(self[slot], PartlyTrained) or not leaves or not all(map(is_array, leaves)):
            return False
        return len({leaf.shape[:1] for leaf in leaves}) == 1 and leaves[0].ndim > 0

    def __getitem__(self, slot: Slot) -> Any:
        return self.kwargs[slot] if isinstance(slot, str) else self.args[slot]

    def leaves(self, slot: Slot, role: str) -> list[_Leaf]:
        """The leaves of an argument, with the names that error messages show."""
        name, argument = self._name(slot), self[slot]
        if role == "wrt" and isinstance(argument, PartlyTrained):
            parts = [(argument.trained, role), (argument.rest, "rest")]
        else:
            parts = [(argument, role)]
        return [_Leaf(slot, path, leaf, role) for tree, role in parts for path, leaf in named_leaves(name, tree)]

    def tree(self, slot: Slot) -> Any:
        """The tree of the gradient with respect to an argument."""
        argument = self[slot]
        return jax.tree.structure(argument.trained if isinstance(argument, PartlyTrained) else argument)

    def named(self, names: tuple[str, ...]) -> tuple[Slot, ...]:
        """The slots of the arguments with these names. An argument that was left at its default has none."""
        found: list[Slot] = []
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

    def _find(self, option: str, position: int) -> Slot | None:
        number = len(self.args)
        if -number <= position < number:
            return position % number
        name = self._positional[position] if 0 <= position < len(self._positional) else None
        return name if option != "argnums" and name in self.kwargs else None

    def slot(self, option: str, position: int) -> Slot:
        """The slot of the argument at this position of the signature.

        A differentiated one must not be passed by keyword. JAX does not allow that either.
        """
        found, number = self._find(option, position), len(self.args)
        if found is not None:
            return found
        choices = f", or choose {option} from 0 to {number - 1}" if number > 1 else ""
        by_name = " If all of the batch is passed by keyword, name it: batch_argnums=(), batch_argnames=..."
        by_name = by_name if option == "batch_argnums" and self.kwargs else ""
        remedy = f"Pass that argument by position, not by keyword{choices}.{by_name}"
        if number == 1 and not self.kwargs:
            remedy = f"Pass {option}=0, or call it with the argument at position {position}."
        raise InputError(
            f"{option} must be among the {number} positional argument{'' if number == 1 else 's'} of the call",
            given=f"{option}={position}",
            remedy=remedy,
        )

    def _name(self, slot: Slot) -> str:
        if isinstance(slot, str):
            return slot
        return self._positional[slot] if slot < len(self._positional) else f"args[{slot}]"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one call: their leaves by role, and how to call the user's function with other arrays."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[_Leaf]
    num_examples: int
    wrt_trees: list[Any]
    wrt_is_tuple: bool

    @property
    def arrays(self) -> Arrays:
        """The array leaves by role. Python numbers and strings are constants of the program, and not among them."""
        return Arrays(*([leaf.value for leaf in self.arrays_of(role)] for role in Arrays._fields))

    def types(self, num_examples: int | None, *, bare: bool = False) -> Arrays:
        """The types of the array leaves for this number of examples; None for one example without the batch axis.

        With `bare`, they have no shardings.
        """
        types = jax.tree.map(avals.bare if bare else avals.type_of, self.arrays)
        kept = Arrays(*([avals.abstract(aval) for aval in leaves] for leaves in types))
        if num_examples is None:
            return kept._replace(batch=[avals.one_of(aval) for aval in types.batch])
        return kept._replace(batch=[avals.abstract(aval, num_examples) for aval in types.batch])

    def call(self, fun: Callable[..., Any], arrays: Arrays) -> Any:
        """Calls the user's function with these arrays instead of those of the call."""
        supply = {role: iter(getattr(arrays, role)) for role in Arrays._fields}
        values: dict[Slot, list[Any]] = {}
        for leaf in self.leaves:
            value = next(supply[leaf.role]) if _is_dynamic(leaf) else leaf.value
            values.setdefault(leaf.slot, []).append(value)

        def filled(slot: Slot, argument: Any) -> Any:
            return jax.tree.unflatten(jax.tree.structure(argument), values.get(slot, []))

        args = [filled(position, argument) for position, argument in enumerate(self.args)]
        return fun(*args, **{name: filled(name, argument) for name, argument in self.kwargs.items()})

    def refuse_unnamed_rows(self, who: str) -> None:
        """Raises if an array that is not in the batch has as many rows as the batch has examples.

        It looks at keyword arguments, and at positional arguments that are a single array. It ignores positional
        arguments that are a tree: parameters that are not differentiated may have that many rows by chance. Each `who`,
        "example" or "microbatch", would see all rows of such an array.
        """
        for leaf, option, bound in self.unnamed_rows():
            raise InputError(
                "An array with as many rows as the batch has examples must be part of the batch, or closed over",
                given=f"{leaf.name} = {describe(leaf.value)} for {self.num_examples} examples; every {who} would see "
                "all of its rows",
                remedy=f"Pass {option} to give each example its row. If every {who} should see all rows, close over it"
                + (f": functools.partial(loss, {bound}=...)." if bound.isidentifier() else "."),
            )

    def unnamed_rows(self) -> Iterator[tuple[_Leaf, str, str]]:
        """The arrays with as many rows as the batch has examples that are not in the batch.

        Each with the option that would make it part of the batch, and the name of its argument.
        """
        for leaf in self.leaves if self.num_examples > 1 else ():
            if leaf.role != "rest" or not is_array(leaf.value) or leaf.value.shape[:1] != (self.num_examples,):
                continue
            if self.is_of_model(leaf):  # the rows of a weight are not examples
                continue
            if isinstance(leaf.slot, str):
                yield leaf, f'batch_argnames="{leaf.slot}"', leaf.slot
            elif leaf.value is self.args[leaf.slot] and not is_key(leaf.value):
                positions = {each.slot for each in self.leaves if each.role == "batch" and isinstance(each.slot, int)}
                yield leaf, f"batch_argnums={(*sorted(positions), leaf.slot)}", leaf.name

    def as_gradient(self, leaves: Sequence[Any]) -> Any:
        """The gradient as `jax.grad` returns it, from its leaves."""
        trees, start = [], 0
        for tree in self.wrt_trees:
            trees.append(jax.tree.unflatten(tree, leaves[start : start + tree.num_leaves]))
            start += tree.num_leaves
        return tuple(trees) if self.wrt_is_tuple else trees[0]

    def is_of_model(self, leaf: _Leaf) -> bool:
        """True if the leaf belongs to an argument of which only some leaves are differentiated: a model."""
        return isinstance(self.kwargs[leaf.slot] if isinstance(leaf.slot, str) else self.args[leaf.slot], PartlyTrained)

    def arrays_of(self, role: str) -> list[_Leaf]:
        """The array leaves of a role, in the order of `arrays`."""
        return [leaf for leaf in self.leaves if leaf.role == role and _is_dynamic(leaf)]


def takes_batch(fun: Callable[..., Any]) -> bool:
    """True if the signature of a loss allows two positional arguments: parameters and a batch."""
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
    """The arrays with at least one axis that a function closes over or reads from its module, by name."""
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
            "(pass integers and configuration as a separate argument).",
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


def _positions_by_option(roles: Roles) -> dict[str, tuple[int, ...]]:
    wrt = roles.argnums if isinstance(roles.argnums, tuple) else (roles.argnums,)
    return {"argnums": wrt, "batch_argnums": roles.batch_argnums, "rng_argnums": roles.rng_argnums}


def _positions(name: str, value: Any, *, may_be_empty: bool = False) -> tuple[int, ...]:
    several = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    try:
        positions = None if bool in map(type, several) else tuple(map(operator.index, several))
    except TypeError:
        positions = None
    if positions is None or not (positions or may_be_empty):
        raise InputError(
            f"{name} must be the position of an argument, or a tuple of positions",
            given=f"{name}={value!r}",
            remedy=f"Pass an int or a tuple of ints, e.g. {name}=1 or {name}=(1, 2).",
        )
    return positions


def _unpack_single(value: tuple[Any, ...]) -> Any:
    return value[0] if len(value) == 1 else value


def _must_not_overlap(slots: Mapping[str, Sequence[Slot]]) -> None:
    owner: dict[Slot, str] = {}
    for name, chosen in slots.items():
        for slot in chosen:
            if slot in owner:
                raise InputError(
                    "argnums, batch_argnums and rng_argnums must not overlap",
                    given=(f"position {slot}" if isinstance(slot, int) else f"argument {slot!r}")
                    + f" in {owner[slot]}"
                    + (" twice" if owner[slot] == name else f" and in {name}"),
                    remedy="An argument is differentiated, or is divided into microbatches, or is a PRNG key: "
                    "e.g. value_and_grad(loss, argnums=0, batch_argnums=1, rng_argnums=2).",
                )
            owner[slot] = name
