"""`ab.train_step` averages for you: it takes the full batch, and the size of a microbatch."""

import jax
import jax.numpy as jnp
import optax

import anybatch as ab


def loss(params, x, y):
    """The mean squared error of a linear model over one microbatch. Do not change it."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def make_optimizer(lr):
    """Adam with a large eps, so that the size of a gradient matters. Do not change it."""
    return optax.adam(lr, b2=0.9, eps=0.1)


def three_steps(params, x, y, lr):
    """The parameters after three steps, as a pair: (averaged by anybatch, with optax.MultiSteps)."""
    size = x.shape[2]
    step = ab.train_step(lambda params, batch: loss(params, *batch), make_optimizer(lr), microbatch_size=size)
    batches = (x.reshape(3, 2 * size, -1), y.reshape(3, 2 * size))
    state, _ = jax.lax.scan(step, step.init(params), batches)

    every_second = optax.MultiSteps(make_optimizer(lr), every_k_schedule=2)

    def mini_step(carry, microbatch):
        params, state = carry
        updates, state = every_second.update(jax.grad(loss)(params, *microbatch), state, params)
        return (optax.apply_updates(params, updates), state), None

    all_six = (x.reshape(6, size, -1), y.reshape(6, size))
    (by_multi_steps, _), _ = jax.lax.scan(mini_step, (params, every_second.init(params)), all_six)
    return state.params, by_multi_steps
