"""Takes a step after each microbatch, by hand.

caught by: value
says: you took six steps
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
    adam = make_optimizer(lr)
    multi = optax.MultiSteps(adam, every_k_schedule=2)

    def turns(optimizer):
        def turn(carry, microbatch):
            params, state = carry
            updates, state = optimizer.update(jax.grad(loss)(params, *microbatch), state)
            return (optax.apply_updates(params, updates), state), None

        flat = (x.reshape(6, *x.shape[2:]), y.reshape(6, -1))
        return jax.lax.scan(turn, (params, optimizer.init(params)), flat)[0][0]

    return turns(adam), turns(multi)
