"""The dtypes in which numbers of narrower or different ones are added up, whatever promotion JAX is told to allow."""

from typing import Any

import jax
import jax.numpy as jnp


def common(*dtypes: Any) -> Any:
    """The dtype that holds numbers of all of these."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def wide(*dtypes: Any) -> Any:
    """The same, and float32 at least."""
    return common(jnp.float32, *dtypes)
