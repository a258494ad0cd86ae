"""Four small programs in plain JAX that show the idea of anybatch. They are meant to be read, not used.

The gradient of a batch can be computed at once, example by example, in microbatches, or sharded over devices. Because
gradients are linear, the result is the same. Each recipe computes one thing in two of these ways, or in the one that
saves memory. For real work, use `anybatch.value_and_grad`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from anybatch.errors import InputError, install


def equivalent_two_ways(w: Any, x_batch: Any) -> jax.Array:
    """The gradient of a sum is the sum of the gradients.

    For `f(w, x) = (w x)²`, both are `2 w Σx²`. One computes a gradient for each example and sums them, as clipping
    does. The other computes one gradient of the summed loss, as training does.

    >>> equivalent_two_ways(3.0, [1.0, 2.0])  # 2 * 3 * (1 + 4)
    Array([30., 30.], dtype=float32)

    Args:
      w: a number.
      x_batch: the examples, a one-dimensional array.

    Returns:
      Both gradients, in an array of shape (2,).
    """
    w, x_batch = _array("w", w, 0), _array("x_batch", x_batch, 1)

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        return (w * x) ** 2

    def total(w: jax.Array) -> jax.Array:
        return jax.vmap(f, in_axes=(None, 0))(w, x_batch).sum()

    sum_of_gradients = jax.vmap(jax.grad(f), in_axes=(None, 0))(w, x_batch).sum()
    gradient_of_sum = jax.grad(total)(w)
    return jnp.stack([sum_of_gradients, gradient_of_sum])


def microbatched_grads(w: Any, b: Any, x_full: Any, y_full: Any, n_microbatches: Any) -> jax.Array:
    """The gradient of a batch, accumulated over microbatches in a `lax.scan`: it takes the memory of one of them.

    The loss is `Σ(w x - y)²`, so the gradients of the microbatches add up. For a mean, each gradient would have to be
    multiplied by the microbatch's fraction of the examples.

    >>> x, y = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([2.0, 4.0, 6.0, 8.0])
    >>> microbatched_grads(1.0, 0.0, x, y, 2)  # Σ 2 x (x - 2x) = -2 Σx²
    Array(-60., dtype=float32)

    Args:
      w: the parameter, a number.
      b: not used.
      x_full: the inputs, a one-dimensional array.
      y_full: the targets, an array of the same length.
      n_microbatches: the number of microbatches. It must divide the number of examples.

    Returns:
      The gradient with respect to `w`, a number.
    """
    del b
    w, x_full, y_full = _array("w", w, 0), _array("x_full", x_full, 1), _array("y_full", y_full, 1)
    if len(x_full) != len(y_full):
        raise InputError(
            "x_full and y_full need the same number of examples",
            given=f"{len(x_full)} and {len(y_full)}",
            remedy="Pass one target for each input.",
        )
    n = float(n_microbatches)
    if not (n >= 1 and n.is_integer() and len(x_full) % int(n) == 0):
        raise InputError(
            "n_microbatches must be a whole number of at least 1 that divides the number of examples",
            given=f"n_microbatches={n_microbatches} for {len(x_full)} examples",
            remedy=f"Choose a divisor of {len(x_full)}; anybatch.value_and_grad takes microbatches of any size.",
        )

    def loss(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum((w * x - y) ** 2)

    def add_one_microbatch(gradient: jax.Array, microbatch: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return gradient + jax.grad(loss)(w, *microbatch), None

    microbatches = (x_full.reshape(int(n), -1), y_full.reshape(int(n), -1))
    gradient, _ = jax.lax.scan(add_one_microbatch, jnp.zeros_like(w), microbatches)
    return gradient


def shard_map_vs_vmap(x: Any) -> jax.Array:
    """Applies a function to each row of an array: with the rows sharded over devices, and with `vmap` on one device.

    `shard_map` gives each device its rows of `x`. The function of a row is the same. No device needs data of another,
    so nothing is communicated.

    >>> shard_map_vs_vmap([[1.0, 2.0], [3.0, 4.0]])
    Array([[ 5., 25.],
           [ 5., 25.]], dtype=float32)

    Args:
      x: an array of shape (B, d). All devices are used if their number divides B, and one otherwise.

    Returns:
      The sum of squares of each row, computed both ways, in an array of shape (2, B).
    """
    x = _array("x", x, 2)

    def sum_of_squares(row: jax.Array) -> jax.Array:
        return jnp.sum(row**2)

    each_row = jax.vmap(sum_of_squares)
    devices = jax.devices()
    devices = devices if len(x) % len(devices) == 0 else devices[:1]
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    sharded = jax.shard_map(each_row, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return jnp.stack([sharded(x), each_row(x)])


def grad_accumulation_step(seed: Any, x_batches: Any, y_batches: Any, lr: Any) -> jax.Array:
    """One optimizer step with the average of the gradients of two microbatches, in Flax and Optax.

    Both gradients are taken at the initial parameters: with a step in between it would be another algorithm. The
    microbatches have the same size and the loss is a mean, so the average of the gradients is that of the batch.

    >>> x, y = jnp.ones((2, 4, 3)), jnp.zeros((2, 4))
    >>> grad_accumulation_step(0, x, y, 0.1).shape
    (1,)

    Args:
      seed: the seed of the initial parameters, an integer.
      x_batches: the inputs of both microbatches, of shape (2, M, D).
      y_batches: their targets, of shape (2, M).
      lr: the learning rate.

    Returns:
      The loss of all 2M examples after the step, in an array of shape (1,).
    """
    try:
        import flax.linen as nn
        import optax
        from flax.training.train_state import TrainState
    except ImportError as error:
        raise ImportError(f"grad_accumulation_step needs Flax and Optax: {install('train')}") from error

    x_batches, y_batches = jnp.asarray(x_batches, jnp.float32), jnp.asarray(y_batches, jnp.float32)
    if x_batches.ndim != 3 or x_batches.shape[0] != 2 or y_batches.shape != x_batches.shape[:2]:
        raise InputError(
            "x_batches must have shape (2, M, D) and y_batches (2, M)",
            given=f"{x_batches.shape} and {y_batches.shape}",
            remedy="Divide the batch in two, e.g. x.reshape(2, -1, x.shape[-1]) and y.reshape(2, -1).",
        )

    class Linear(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(1)(x)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        predictions: Any = model.apply(params, x)
        return jnp.mean((predictions.reshape(-1) - y) ** 2)

    model = Linear()
    params = model.init(jax.random.PRNGKey(int(seed)), x_batches[0])
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(_array("lr", lr, 0)))
    first, second = (jax.grad(loss)(state.params, x, y) for x, y in zip(x_batches, y_batches, strict=True))
    average = jax.tree.map(lambda one, other: (one + other) / 2, first, second)
    state = state.apply_gradients(grads=average)
    return loss(state.params, x_batches.reshape(-1, x_batches.shape[-1]), y_batches.reshape(-1)).reshape(1)


_FORMS = {  # for each number of axes: what an argument must be, and what to pass instead
    0: ("must be a number", "Pass one, e.g. {}=0.5."),
    1: ("must have one axis, the examples", "Pass {}.reshape(-1)."),
    2: ("must have two axes, (B, d)", "Pass {}.reshape(B, d)."),
}


def _array(name: str, value: Any, axes: int) -> jax.Array:
    array, (must, remedy) = jnp.asarray(value, jnp.float32), _FORMS[axes]
    if array.ndim != axes:
        raise InputError(f"{name} {must}", given=f"shape {array.shape}", remedy=remedy.format(name))
    return array
