"""Take one optimizer step from the averaged gradients of two microbatches, with Flax and Optax."""

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
    """The loss of all examples after one step of SGD, float32 of shape (1,).

    Args:
      seed: the seed of the initial parameters: an integer, possibly as a float.
      x_batches: the inputs of the two microbatches, of shape (2, M, D).
      y_batches: their targets, of shape (2, M).
      lr: the learning rate.
    """
    raise NotImplementedError("Initialise, take two gradients, average them, step once, and return the loss.")
