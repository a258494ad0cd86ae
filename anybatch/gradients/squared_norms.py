"""The squares of the gradients of microbatches, from which the noise in their sum is known.

A microbatch adds `c` to the gradient and counts `n` units. What is carried through the loop, and added up over parts,
are three numbers: the sum of `|c|**2 / n`, the sum of `n`, and how many microbatches had any units.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

CARRIED = 3
SUMMARY = 4  # numbers of `summary`


def zeros(dtypes: Sequence[Any]) -> list[jax.Array]:
    """The sums over no microbatches, for gradients of these dtypes."""
    return [jnp.zeros((), _real(dtypes)) for _ in range(CARRIED)]


def add(sums: Sequence[jax.Array], grads: Sequence[Any], units: Any) -> list[jax.Array]:
    """The sums with one more microbatch.

    Args:
      sums: those of the others.
      grads: what it adds to the gradient.
      units: how many it counts. If none, it has no gradient either.
    """
    squares, total, number = sums
    units = jnp.asarray(units).astype(squares.dtype)
    has_units = units > 0
    own = square(grads) / jnp.where(has_units, units, jnp.ones_like(units))
    return [
        squares + jnp.where(has_units, own, jnp.zeros_like(own)).astype(squares.dtype),
        total + jnp.where(has_units, units, jnp.zeros_like(units)),
        number + has_units.astype(number.dtype),
    ]


def square(grads: Sequence[Any]) -> jax.Array:
    """The squared norm of all leaves together, in float32 or wider."""
    dtype = _real([grad.dtype for grad in grads])
    total = jnp.zeros((), dtype)
    for grad in grads:
        parts = (grad.real, grad.imag) if jnp.iscomplexobj(grad) else (grad,)
        total = total + sum(jnp.sum(jnp.square(part.astype(dtype))) for part in parts)
    return total


def scaled(sums: Sequence[jax.Array], factor: jax.Array) -> list[jax.Array]:
    """The sums, with squares that are so much larger."""
    squares, *counts = sums
    return [squares * factor, *counts]


def summary(sums: Sequence[jax.Array], of_data: jax.Array, of_all: jax.Array) -> list[jax.Array]:
    """What `NoiseScale.of_step` takes.

    Args:
      sums: of all microbatches, in the scale of the gradient.
      of_data: the square of the gradient that they add up to.
      of_all: the square of the whole gradient, with terms that depend on the parameters alone and have no noise.
    """
    squares, units, number = sums
    return [squares * units - of_data, of_all, units, number]


def untold(microbatches: int) -> list[jax.Array]:
    """The summary of one microbatch or none, which tell nothing."""
    return [*(jnp.zeros((), jnp.float32) for _ in range(3)), jnp.asarray(microbatches, jnp.float32)]


def _real(dtypes: Sequence[Any]) -> Any:
    """A real dtype that holds sums of squares: float32 or wider."""
    return max((jnp.finfo(dtype).dtype for dtype in (jnp.float32, *dtypes)), key=lambda dtype: dtype.itemsize)
