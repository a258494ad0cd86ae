"""The same call, for a batch of any size. Every leaf of aux equals that of the full batch."""

import jax
import jax.numpy as jnp

import anybatch as ab


def logits_of(params, x):
    """The logits of every example and class, (N, C), of inputs (N, D)."""
    hidden = jnp.tanh(x @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss_and_aux(params, x, y):
    """The mean cross-entropy, and aux."""
    logits = logits_of(params, x)
    log_probabilities = jax.nn.log_softmax(logits)
    loss = -jnp.mean(log_probabilities[jnp.arange(len(y)), y])
    return loss, {"accuracy": jnp.mean(jnp.argmax(logits, axis=-1) == y), "logits": logits}


def value_aux_and_grad(params, x, y):
    """The mean cross-entropy with its aux, and its gradient with respect to the parameters."""
    return ab.value_and_grad(loss_and_aux, has_aux=True, batch_argnums=(1, 2))(params, x, y)
