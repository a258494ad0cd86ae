"""The loss is a mean over microbatches of one size, so the gradient of a step is the mean of its two gradients, and
that is what MultiSteps hands to Adam on every second call. In between it returns updates of zero, so both ways see the
same parameters all along; state that is carried from call to call keeps Adam's moments, and MultiSteps' count.
"""

import jax
import jax.numpy as jnp
import optax


def loss(params, x, y):
    """Mean squared error of a linear model over one microbatch. Given: leave it as it is."""
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def make_optimizer(lr):
    """Adam, with an eps that can be felt and a short memory. Given: leave it as it is."""
    return optax.adam(lr, b2=0.9, eps=0.1)


def three_steps(params, x, y, lr):
    """The parameters after three steps, as a pair: (averaged by hand, by optax.MultiSteps)."""
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
