"""The same with anybatch: the gradient of all examples, M at a time. The optimizer needs no change."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import anybatch as ab


class Linear(nn.Module):
    """One dense layer with a single output."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)


def grad_accumulation_step(seed, x_batches, y_batches, lr):
    """The loss of all examples after one step of SGD, float32 of shape (1,)."""

    def loss(params, x, y):
        return jnp.mean((model.apply(params, x).reshape(-1) - y) ** 2)

    model = Linear()
    params = model.init(jax.random.PRNGKey(int(seed)), x_batches[0])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(lr))
    x, y = x_batches.reshape(-1, x_batches.shape[-1]), y_batches.reshape(-1)
    grads = ab.grad(loss, batch_argnums=(1, 2), microbatch_size=y_batches.shape[1])(state.params, x, y)
    return loss(state.apply_gradients(grads=grads).params, x, y).reshape(1)
