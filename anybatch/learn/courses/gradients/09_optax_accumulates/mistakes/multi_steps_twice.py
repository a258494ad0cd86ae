"""Returns the second answer twice: the numbers are right, but nothing is averaged by hand.

caught by: program
says: both answers come from optax.MultiSteps
"""

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
    multi = optax.MultiSteps(make_optimizer(lr), every_k_schedule=2)

    def turn(carry, microbatch):
        params, state = carry
        updates, state = multi.update(jax.grad(loss)(params, *microbatch), state)
        return (optax.apply_updates(params, updates), state), None

    flat = (x.reshape(6, *x.shape[2:]), y.reshape(6, -1))
    (by_multi_steps, _), _ = jax.lax.scan(turn, (params, multi.init(params)), flat)
    return by_multi_steps, by_multi_steps
