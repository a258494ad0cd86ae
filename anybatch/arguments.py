"""The arguments of one call, sorted by what they are to the gradient."""

import dataclasses
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from anybatch import batch, compat
from anybatch.errors import InputError
from anybatch.trees import describe, is_array, is_key, named_leaves


class Arrays(NamedTuple):
    """The array leaves of a call, by role. A pytree, so that a compiled program can take it whole."""

    wrt: list[Any]  # what the gradient is taken with respect to
    batch: list[Any]  # examples along axis 0
    keys: list[Any]  # PRNG keys, made fresh for each microbatch
    rest: list[Any]  # arrays that every microbatch sees alike


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which positional arguments are differentiated, which carry the batch, which are PRNG keys."""

    argnums: int | tuple[int, ...]
    batch_argnums: tuple[int, ...]
    rng_argnums: tuple[int, ...]

    @classmethod
    def of(cls, *, argnums: Any, batch_argnums: Any, rng_argnums: Any) -> "Roles":
        """Checks what can be checked before a call."""
        wrt = _positions("argnums", argnums)
        roles = cls(
            argnums=wrt if isinstance(argnums, (tuple, list)) else wrt[0],
            batch_argnums=_positions("batch_argnums", batch_argnums),
            rng_argnums=_positions("rng_argnums", rng_argnums, may_be_empty=True),
        )
        _must_not_overlap(_as_given(roles))
        return roles

    def sort(self, fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Arguments":
        """Sorts the arguments of one call of `fun`, and checks them."""
        positions = {name: _in_range(name, given, len(args)) for name, given in _as_given(self).items()}
        _must_not_overlap(positions)
        names = _argument_names(fun, len(args))
        role_of = {position: name for name, given in positions.items() for position in given}

        leaves: list[_Leaf] = []
        for position in positions["argnums"]:  # in the order given, which is the order of the gradients
            leaves += [
                _Leaf(position, name, leaf, "wrt") for name, leaf in named_leaves(names[position], args[position])
            ]
        for position, argument in enumerate(args):
            role = {"batch_argnums": "batch", "rng_argnums": "keys"}.get(role_of.get(position, ""), "rest")
            if role_of.get(position) != "argnums":
                leaves += [_Leaf(position, name, leaf, role) for name, leaf in named_leaves(names[position], argument)]
        leaves += [_Leaf(None, name, leaf, "rest") for name, leaf in named_leaves("kwargs", kwargs)]

        num_examples = batch.count_examples(
            [(leaf.name, leaf.value) for leaf in leaves if leaf.role == "batch"], self.batch_argnums
        )
        for leaf in leaves:
            _check(leaf)
        wrt_trees = [jax.tree.structure(args[position]) for position in positions["argnums"]]
        return Arguments(args, kwargs, leaves, num_examples, wrt_trees, isinstance(self.argnums, tuple))


class _Leaf(NamedTuple):
    position: int | None  # of its argument; None for keyword arguments
    name: str
    value: Any
    role: str


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
        return Arrays(*([leaf.value for leaf in self._dynamic(role)] for role in Arrays._fields))

    def types(self, num_examples: int | None, *, bare: bool = False) -> Arrays:
        """The types of the array leaves, with that many examples in the batch; `bare`, wherever they lie.

        None stands for one example by itself, without the axis of the batch.
        """
        avals = jax.tree.map(compat.bare if bare else jax.typeof, self.arrays)
        kept = Arrays(*([compat.abstract(aval) for aval in leaves] for leaves in avals))
        if num_examples is None:
            return kept._replace(batch=[compat.one_of(aval) for aval in avals.batch])
        return kept._replace(batch=[compat.abstract(aval, num_examples) for aval in avals.batch])

    def call(self, fun: Callable[..., Any], arrays: Arrays) -> Any:
        """Calls the user's function with other arrays in the places of those given."""
        supply = {role: iter(getattr(arrays, role)) for role in Arrays._fields}
        values: dict[int | None, list[Any]] = {}
        for leaf in self.leaves:
            value = next(supply[leaf.role]) if _is_dynamic(leaf) else leaf.value
            values.setdefault(leaf.position, []).append(value)
        args = [jax.tree.unflatten(jax.tree.structure(arg), values.get(i, [])) for i, arg in enumerate(self.args)]
        kwargs = jax.tree.unflatten(jax.tree.structure(self.kwargs), values.get(None, []))
        return fun(*args, **kwargs)

    def as_gradient(self, leaves: Sequence[Any]) -> Any:
        """The leaves of the gradient in the tree that `jax.grad` returns them in."""
        trees, start = [], 0
        for tree in self.wrt_trees:
            trees.append(jax.tree.unflatten(tree, leaves[start : start + tree.num_leaves]))
            start += tree.num_leaves
        return tuple(trees) if self.wrt_is_tuple else trees[0]

    def _dynamic(self, role: str) -> list[_Leaf]:
        return [leaf for leaf in self.leaves if leaf.role == role and _is_dynamic(leaf)]


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


def _in_range(name: str, positions: tuple[int, ...], num_args: int) -> tuple[int, ...]:
    for position in positions:
        if not -num_args <= position < num_args:
            raise InputError(
                f"{name} must be among the {num_args} positional arguments of the call",
                given=f"{name}={position}",
                remedy=f"Pass that argument by position, not by keyword, or choose {name} "
                + (f"from 0 to {num_args - 1}." if num_args else "after giving the function arguments."),
            )
    return tuple(position % num_args for position in positions)


def _must_not_overlap(positions: dict[str, tuple[int, ...]]) -> None:
    owner: dict[int, str] = {}
    for name, given in positions.items():
        for position in given:
            if position in owner:
                raise InputError(
                    "argnums, batch_argnums and rng_argnums must not overlap",
                    given=f"position {position} in {owner[position]}"
                    + (" twice" if owner[position] == name else f" and in {name}"),
                    remedy="An argument is differentiated, or cut into microbatches, or a PRNG key: "
                    "e.g. value_and_grad(loss, argnums=0, batch_argnums=1, rng_argnums=2).",
                )
            owner[position] = name


def _argument_names(fun: Callable[..., Any], num_args: int) -> list[str]:
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        parameters = {}.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names[:num_args] + [f"args[{position}]" for position in range(len(names), num_args)]
