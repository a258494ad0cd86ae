"""The same with anybatch: it sees that the loss is a mean. The size is given only because the exercise asks for it."""

import jax.numpy as jnp

import anybatch as ab


def predict(params, x):
    """A network of layers {"w": (inputs, outputs), "b": (outputs,)}: tanh after all but the last."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x @ params[-1]["w"] + params[-1]["b"])[:, 0]


def loss(params, x, y):
    """The mean squared error of some examples."""
    return jnp.mean((predict(params, x) - y) ** 2)


def accumulate(params, x, y, n_microbatches):
    """The gradient of the mean loss of all examples, in the memory of one microbatch."""
    return ab.grad(loss, batch_argnums=(1, 2), microbatch_size=len(x) // n_microbatches)(params, x, y)
