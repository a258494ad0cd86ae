"""The loss of only the second microbatch.

caught by: value
says: This is the loss of only the second microbatch
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
    first, second = (jax.grad(loss)(state.params, x, y) for x, y in zip(x_batches, y_batches, strict=True))
    average = jax.tree.map(lambda one, other: (one + other) / 2, first, second)
    state = state.apply_gradients(grads=average)
    return loss(state.params, x_batches[1], y_batches[1]).reshape(1)
