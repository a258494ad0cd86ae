"""Nothing is divided.

caught by: value
says: You added up the gradients of 2 microbatches
"""

import jax
import jax.numpy as jnp


def predict(params, x):
    """A network of layers {"w": (inputs, outputs), "b": (outputs,)}: tanh after all but the last."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[:, 0]


def loss(params, x, y):
    """The mean squared error of some examples."""
    return jnp.mean((predict(params, x) - y) ** 2)


def accumulate(params, x, y, n_microbatches):
    """The gradient, by microbatches."""
    n = n_microbatches
    xs, ys = x.reshape(n, -1, x.shape[1]), y.reshape(n, -1)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def add_one(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *batch)), None

    total, _ = jax.lax.scan(add_one, zeros, (xs, ys))
    return total
