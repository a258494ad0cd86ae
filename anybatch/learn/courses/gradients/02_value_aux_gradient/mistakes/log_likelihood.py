"""The minus is missing.

caught by: value
says: The sign is wrong
"""

import jax
import jax.numpy as jnp


def logits_of(params, x):
    """The logits of every example and class, (N, C), of inputs (N, D)."""
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def value_aux_and_grad(params, x, y):
    """The mean log-probability, which an optimizer would decrease."""

    def loss_and_aux(params):
        logits = logits_of(params, x)
        loss = jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])
        return loss, {"accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == y), "logits": logits}

    return jax.value_and_grad(loss_and_aux, has_aux=True)(params)
