"""Adds up the two gradients instead of averaging them; Adam's usual eps would have hidden it.

caught by: value
says: you added up the two gradients
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
    by_hand, state = params, adam.init(params)
    for step in range(3):
        first, second = (jax.grad(loss)(by_hand, x[step, i], y[step, i]) for i in range(2))
        updates, state = adam.update(jax.tree.map(jnp.add, first, second), state)
        by_hand = optax.apply_updates(by_hand, updates)

    multi = optax.MultiSteps(adam, every_k_schedule=2)

    def turn(carry, microbatch):
        params, state = carry
        updates, state = multi.update(jax.grad(loss)(params, *microbatch), state)
        return (optax.apply_updates(params, updates), state), None

    flat = (x.reshape(6, *x.shape[2:]), y.reshape(6, -1))
    (by_multi_steps, _), _ = jax.lax.scan(turn, (params, multi.init(params)), flat)
    return by_hand, by_multi_steps
