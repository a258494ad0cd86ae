"""Divides each gradient by 2 before MultiSteps, which averages itself.

caught by: value
says: MultiSteps averages itself
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

    def step(carry, microbatches):
        params, state = carry
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, *microbatches)
        updates, state = adam.update(jax.tree.map(lambda g: g.mean(axis=0), grads), state)
        return (optax.apply_updates(params, updates), state), None

    (by_hand, _), _ = jax.lax.scan(step, (params, adam.init(params)), (x, y))
    multi = optax.MultiSteps(adam, every_k_schedule=2)

    def turn(carry, microbatch):
        params, state = carry
        half = jax.tree.map(lambda g: g / 2, jax.grad(loss)(params, *microbatch))
        updates, state = multi.update(half, state)
        return (optax.apply_updates(params, updates), state), None

    flat = (x.reshape(6, *x.shape[2:]), y.reshape(6, -1))
    (by_multi_steps, _), _ = jax.lax.scan(turn, (params, multi.init(params)), flat)
    return by_hand, by_multi_steps
