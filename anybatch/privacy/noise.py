"""Gaussian noise, and secret keys to draw it with."""

import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.checks import describe, is_array, is_key, named_leaves
from anybatch.call.models import has_nnx
from anybatch.errors import InputError
from anybatch.jaxprs import avals
from anybatch.privacy.accounting import not_negative

# In float32, `jax.random.normal` never exceeds 5.42, and has few different values near that end. A result that only one
# of two datasets can produce tells them apart. The sum of four draws ends at 10.8, which is never reached in practice.
NORMALS = 4


def add_noise(tree: Any, key: jax.Array, stddev: float) -> Any:
    """Adds Gaussian noise to every entry of a tree of arrays.

    **Independent.** Every entry of every leaf gets independent noise, with mean 0 and standard deviation `stddev`. The
    noise is drawn and added in float32, or in float64 for leaves of that dtype; the tree keeps its dtypes. The noise
    depends only on the key and on the shapes and order of the leaves, and not on their values or devices.

    **Tails.** The noise of an entry is the sum of four draws, divided by two. One draw of `jax.random.normal` in
    float32 never exceeds 5.42; true Gaussian noise does, about once in ten million entries.

    >>> import jax, jax.numpy as jnp
    >>> from anybatch import privacy
    >>> noised = privacy.add_noise({"w": jnp.zeros(10_000)}, jax.random.key(0), stddev=2.0)
    >>> print(f"{jnp.std(noised['w']):.2f}")
    2.00

    Args:
      tree: a tree of arrays of real floating-point numbers.
      key: a PRNG key that is used for nothing else.
      stddev: the standard deviation, a Python number. 0 adds no noise.

    Raises:
      InputError: for arguments that are not allowed.
    """
    stddev = not_negative("stddev", stddev, example="0.01")
    check_key("key", key)
    check_floating("tree", tree)
    return _added(tree, key, jnp.asarray(stddev)) if stddev else tree


@jax.jit
def _added(tree: Any, key: jax.Array, stddev: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, max(1, len(leaves)))
    return jax.tree.unflatten(structure, [_plus(leaf, key, stddev) for leaf, key in zip(leaves, keys, strict=False)])


def _plus(leaf: Any, key: jax.Array, stddev: Any) -> jax.Array:
    leaf = jnp.asarray(leaf)
    wide = at_least_float32(leaf.dtype)
    scale = jnp.asarray(stddev, wide) / jnp.asarray(NORMALS**0.5, wide)

    def one_more(total: jax.Array, key: jax.Array) -> tuple[jax.Array, None]:
        return total + scale * jax.random.normal(key, leaf.shape, wide), None

    # One draw after the other, so that only one is in memory.
    noised, _ = jax.lax.scan(one_more, leaf.astype(wide), jax.random.split(key, NORMALS))
    return noised.astype(leaf.dtype)


def at_least_float32(dtype: Any) -> Any:
    """The dtype in which arrays of a floating-point dtype are summed and noised."""
    return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else jnp.dtype(dtype)


def secret_key() -> jax.Array:
    """A new PRNG key from the operating system's source of randomness.

    The guarantee holds against those who cannot compute the noise. Everyone knows `jax.random.key(0)`, and a seed has
    at most 32 bits unless 64-bit types are enabled. This key has all 64 bits.

    >>> from anybatch import privacy
    >>> privacy.secret_key().shape
    ()
    """
    words = jnp.asarray(np.frombuffer(secrets.token_bytes(8), np.uint32))
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def check_key(name: str, key: Any) -> None:
    """Refuses anything but one PRNG key of a generator that splits keys into independent ones."""
    if not is_key(key):
        raise InputError(
            f"{name} must be one PRNG key",
            given=f"{name}={describe(key)}",
            remedy=f"For example {name}=privacy.secret_key(), or jax.random.key(seed) with a seed that stays secret.",
        )
    if avals.has_keys(key) and avals.key_impl(key.dtype) == "unsafe_rbg":
        raise InputError(
            f"{name} must belong to a generator that splits keys into independent ones",
            given=f'{name} of the generator "unsafe_rbg"',
            remedy=f'Pass {name}=privacy.secret_key(), or jax.random.key(seed, impl="threefry2x32").',
        )


def check_floating(name: str, tree: Any) -> None:
    """Refuses leaves that are not arrays of real floating-point numbers, and models of flax.nnx."""
    given = [f"{path}: {describe(leaf)}" for path, leaf in named_leaves(name, tree) if not _is_floating(leaf)]
    if has_nnx(tree):
        given = [f"{name}: a model of flax.nnx"]
    if given:
        raise InputError(
            "Noise can be added only to real floating-point numbers",
            given=given[0],
            remedy="Do not differentiate it, or store complex numbers as two real ones. Of a model, "
            "differentiate only the parameters: params, rest = eqx.partition(model, eqx.is_inexact_array), or "
            "graphdef, params, rest = nnx.split(model, nnx.Param, ...).",
        )


def _is_floating(leaf: Any) -> bool:
    return (is_array(leaf) or isinstance(leaf, float)) and jax.dtypes.issubdtype(jnp.result_type(leaf), jnp.floating)
