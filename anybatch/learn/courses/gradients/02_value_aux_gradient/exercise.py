"""Return loss, aux and gradient from a single pass through a network."""

import jax
import jax.numpy as jnp


def logits_of(params, x):
    """The logits of every example and class, (N, C), of inputs (N, D)."""
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def value_aux_and_grad(params, x, y):
    """The mean cross-entropy with its aux, and its gradient with respect to the parameters.

    Args:
      params: {"hidden": {"w": (D, H), "b": (H,)}, "out": {"w": (H, C), "b": (C,)}}, float32.
      x: the inputs, float32 of shape (N, D).
      y: the correct classes, int32 of shape (N,).

    Returns:
      ((loss, {"accuracy": ..., "logits": ...}), grads).
    """
    raise NotImplementedError("Return ((loss, aux), grads).")
