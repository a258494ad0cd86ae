"""The second gradient is taken after a step.

caught by: value
says: The gradient of the second microbatch is taken after a step
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState


class Linear(nn.Module):
    """One dense layer with a single output."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)


def grad_accumulation_step(seed, x_batches, y_batches, lr):
    """The loss after the step."""

    def loss(params, x, y):
        return jnp.mean((model.apply(params, x).reshape(-1) - y) ** 2)

    model = Linear()
    params = model.init(jax.random.PRNGKey(int(seed)), x_batches[0])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(lr))
    first = jax.grad(loss)(state.params, x_batches[0], y_batches[0])
    moved = state.apply_gradients(grads=first)
    second = jax.grad(loss)(moved.params, x_batches[1], y_batches[1])
    state = state.apply_gradients(grads=jax.tree.map(lambda one, other: (one + other) / 2, first, second))
    x_all, y_all = x_batches.reshape(-1, x_batches.shape[-1]), y_batches.reshape(-1)
    return loss(state.params, x_all, y_all).reshape(1)
