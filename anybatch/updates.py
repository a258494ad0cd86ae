"""What steps of training share: a call's arrays apart from its constants, and parameters with updates added to them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anybatch.trees import is_array


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
