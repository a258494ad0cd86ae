"""The whole batch at once: what `jax.value_and_grad` does."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.arguments import Arrays
from anybatch.loss import TracedLoss
from anybatch.routes.outputs import ratio, wide_dtype


def value_and_grad(loss: TracedLoss, consts: Sequence[Any], arrays: Arrays) -> tuple[Any, list[Any], list[Any]]:
    """The value, the aux leaves and the gradient leaves, for all examples in one piece."""

    def of_wrt(wrt: list[Any]) -> tuple[Any, list[Any]]:
        outputs = loss(consts, arrays._replace(wrt=wrt))
        if loss.num_heads == 1:
            return outputs[0], outputs[1:]
        total, weight, *aux = outputs
        dtype = loss.value_dtype
        return ratio(total.astype(wide_dtype(dtype, jnp.float32)), weight).astype(dtype), aux

    (value, aux), grads = jax.value_and_grad(of_wrt, has_aux=True)(arrays.wrt)
    return value, aux, grads
