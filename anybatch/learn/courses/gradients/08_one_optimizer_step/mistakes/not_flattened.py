"""Predictions (M, 1) minus targets (M,) are (M, M).

caught by: value
says: compared with every target
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
        return jnp.mean((model.apply(params, x) - y) ** 2)

    model = Linear()
    params = model.init(jax.random.PRNGKey(int(seed)), x_batches[0])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(lr))
    first, second = (jax.grad(loss)(state.params, x, y) for x, y in zip(x_batches, y_batches, strict=True))
    average = jax.tree.map(lambda one, other: (one + other) / 2, first, second)
    state = state.apply_gradients(grads=average)
    x_all, y_all = x_batches.reshape(-1, x_batches.shape[-1]), y_batches.reshape(-1)
    return loss(state.params, x_all, y_all).reshape(1)
