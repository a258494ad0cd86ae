"""The network runs once for the gradient, and once more for aux.

caught by: program
says: the network runs more than once
"""

import jax
import jax.numpy as jnp


def logits_of(params, x):
    """The logits of every example and class, (N, C), of inputs (N, D)."""
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def value_aux_and_grad(params, x, y):
    """Right, but with two forward passes."""

    def loss_of(params):
        return -jnp.mean(jax.nn.log_softmax(logits_of(params, x))[jnp.arange(len(y)), y])

    loss, grads = jax.value_and_grad(loss_of)(params)
    logits = logits_of(params, x)
    return (loss, {"accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == y), "logits": logits}), grads
