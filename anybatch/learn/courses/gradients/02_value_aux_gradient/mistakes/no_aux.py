"""aux is not returned.

caught by: structure
says: aux is missing
"""

import jax
import jax.numpy as jnp


def logits_of(params, x):
    """The logits of every example and class, (N, C), of inputs (N, D)."""
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def value_aux_and_grad(params, x, y):
    """Unpacks three, and returns two."""

    def loss_and_aux(params):
        logits = logits_of(params, x)
        loss = -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(y)), y])
        return loss, {"accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == y), "logits": logits}

    (loss, _), grads = jax.value_and_grad(loss_and_aux, has_aux=True)(params)
    return loss, grads
