"""Names and kinds of the leaves of a pytree."""

from typing import Any

import jax
import numpy as np


def named_leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    """The leaves of `tree` with the expression a user would type to reach each of them.

    >>> named_leaves("batch", {"x": 1, "pair": (2, 3)})
    [("batch['pair'][0]", 2), ("batch['pair'][1]", 3), ("batch['x']", 1)]
    """
    return [(name + jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]


def is_array(leaf: Any) -> bool:
    """Whether a leaf can be an input of a compiled program; Python numbers and strings are constants of it."""
    if isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return True
    return hasattr(leaf, "__jax_array__") and hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_key(leaf: Any) -> bool:
    """Whether a leaf is one PRNG key: `jax.random.key(0)`, or the older `jax.random.PRNGKey(0)`."""
    if not is_array(leaf):
        return False
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf.shape == ()
    return leaf.dtype == np.uint32 and leaf.ndim == 1 and leaf.shape[0] in (2, 4)


def describe(leaf: Any) -> str:
    """The dtype and shape of an array, or the value of anything else: what an error message shows.

    >>> describe(np.zeros((3, 2), np.float32)), describe("adam")
    ('float32[3,2]', "'adam'")
    """
    if is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
        return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return repr(leaf)
