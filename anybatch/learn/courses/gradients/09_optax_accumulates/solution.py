"""The loss is a mean and both microbatches have the same size, so the gradient of a step is the mean of its two
gradients. MultiSteps passes this mean to Adam on every second call, and returns updates of zero in between. So both
ways have the same parameters at every step. The state carries Adam's moments and MultiSteps' count from call to call.
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
    """The parameters after three steps, as a pair: (averaged by hand, with optax.MultiSteps)."""
    adam = make_optimizer(lr)
    every_second = optax.MultiSteps(adam, every_k_schedule=2)

    def step(carry, microbatches):
        params, state = carry
        grads = jax.vmap(jax.grad(loss), in_axes=(None, 0, 0))(params, *microbatches)
        grads = jax.tree.map(lambda both: both.mean(axis=0), grads)
        updates, state = adam.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def mini_step(carry, microbatch):
        params, state = carry
        updates, state = every_second.update(jax.grad(loss)(params, *microbatch), state, params)
        return (optax.apply_updates(params, updates), state), None

    (by_hand, _), _ = jax.lax.scan(step, (params, adam.init(params)), (x, y))
    all_six = (x.reshape(6, *x.shape[2:]), y.reshape(6, -1))
    (by_multi_steps, _), _ = jax.lax.scan(mini_step, (params, every_second.init(params)), all_six)
    return by_hand, by_multi_steps
