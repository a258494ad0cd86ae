"""Sums of squared norms of the gradients of microbatches, from which the gradient noise is estimated.

A microbatch adds `c` to the gradient and counts `n` units (examples, or tokens). The loop carries three numbers, which
are also summed over shards: the sum of `|c|**2 / n`, the sum of `n`, and the number of microbatches with `n > 0`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

CARRIED = 3  # the length of the sums
SUMMARY = 4  # the length of `summary`


def zeros(dtypes: Sequence[Any]) -> list[jax.Array]:
    """The sums over no microbatches, for gradients of these dtypes."""
    return [jnp.zeros((), _real(dtypes)) for _ in range(CARRIED)]


def add(sums: Sequence[jax.Array], grads: Sequence[Any], units: Any) -> list[jax.Array]:
    """The sums with one more microbatch: its gradient and its units. One without units must have no gradient."""
    squares, total, number = sums
    units = jnp.asarray(units).astype(squares.dtype)
    has_units = units > 0
    ratio = square(grads) / jnp.where(has_units, units, 1)
    return [
        squares + jnp.where(has_units, ratio, 0).astype(squares.dtype),
        total + jnp.where(has_units, units, 0),
        number + has_units.astype(number.dtype),
    ]


def square(grads: Sequence[Any]) -> jax.Array:
    """The squared norm of all leaves together, in float32 or wider."""
    dtype = _real([grad.dtype for grad in grads])
    total = jnp.zeros((), dtype)
    for grad in grads:
        components = (grad.real, grad.imag) if jnp.iscomplexobj(grad) else (grad,)
        total = total + sum(jnp.sum(jnp.square(each.astype(dtype))) for each in components)
    return total


def summary(sums: Sequence[jax.Array], of_data: jax.Array, of_all: jax.Array) -> list[jax.Array]:
    """The arguments of `NoiseScale.of_step`, from the sums over all microbatches, in the scale of the gradient.

    `of_data` is the squared norm of the sum of the microbatches' gradients, and `of_all` that of the gradient, which
    may have noiseless terms that depend on the parameters alone.
    """
    squares, units, number = sums
    return [squares * units - of_data, of_all, units, number]


def unknown(microbatches: int) -> list[jax.Array]:
    """The summary of one microbatch or none, from which no noise can be estimated."""
    return [*(jnp.zeros((), jnp.float32) for _ in range(3)), jnp.asarray(microbatches, jnp.float32)]


def _real(dtypes: Sequence[Any]) -> Any:
    """A real dtype that holds sums of squares: float32 or wider."""
    return max((jnp.finfo(dtype).dtype for dtype in (jnp.float32, *dtypes)), key=lambda dtype: dtype.itemsize)
