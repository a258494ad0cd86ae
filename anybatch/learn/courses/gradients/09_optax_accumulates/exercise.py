"""Take three Adam steps of two microbatches each, in two ways: averaged by hand, and with optax.MultiSteps."""

import jax
import jax.numpy as jnp
import optax


def loss(params, x, y):
    """The mean squared error of a linear model over one microbatch. Do not change it."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def make_optimizer(lr):
    """Adam with a large eps, so that the size of a gradient matters. Do not change it."""
    return optax.adam(lr, b2=0.9, eps=0.1)


def three_steps(params, x, y, lr):
    """The parameters after three steps, as a pair: (averaged by hand, with optax.MultiSteps).

    Args:
      params: {"w": (D,), "b": ()}, float32.
      x: the inputs, of shape (3 steps, 2 microbatches, M, D).
      y: the targets, of shape (3 steps, 2 microbatches, M).
      lr: the learning rate, a Python number.
    """
    raise NotImplementedError("Return the parameters twice: averaged by hand, and with optax.MultiSteps.")
