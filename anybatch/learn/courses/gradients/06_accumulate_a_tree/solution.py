"""Equal microbatches weigh the same, so the mean of their means is the mean over all examples, and so for gradients.

The carry is one tree of the size of the parameters, and a turn's activations are gone before the next turn begins.
"""

import jax
import jax.numpy as jnp


def predict(params, x):
    """A network of layers {"w": (inputs, outputs), "b": (outputs,)}: tanh after all but the last."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[:, 0]


def loss(params, x, y):
    """The mean over some examples of the squared error."""
    return jnp.mean((predict(params, x) - y) ** 2)


def accumulate(params, x, y, n_microbatches):
    """The gradient of the mean loss of all examples: a tree like `params`, in the memory of one microbatch."""

    def add_one(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *microbatch)), None

    microbatches = jax.tree.map(lambda rows: rows.reshape(n_microbatches, -1, *rows.shape[1:]), (x, y))
    total, _ = jax.lax.scan(add_one, jax.tree.map(jnp.zeros_like, params), microbatches)
    return jax.tree.map(lambda gradient: gradient / n_microbatches, total)
