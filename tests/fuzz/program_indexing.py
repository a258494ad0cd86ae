"""More operations of random programs: looking up, writing somewhere, grouping and sorting."""

import jax
import jax.numpy as jnp
import numpy as np
from fuzz.program_operations import Operations
from jax import lax

INDEXING = Operations()
operation = INDEXING.operation

# Indexing. The labels are integers of the batch, from 0 to 2.


@operation()
def taken_by_constants(draw, shape):
    if not shape:
        return None
    axis = draw.axis(shape)
    indices = draw.indices(draw.choice([2, 3, draw.num_examples]), shape[axis])
    return lambda x: jnp.take(x, indices, axis)


@operation()
def one_of_every_row(draw, shape):
    if len(shape) < 2:
        return None
    rows, columns, shift = shape[0], shape[1], draw.choice([0, 0, 0, 1])
    return lambda x: x[(jnp.arange(rows) + shift) % rows, (2 * jnp.arange(rows)) % columns]


@operation(needs=("labels",))
def taken_by_labels(draw, shape):
    """An embedding, where the operand is a parameter."""
    if not shape:
        return None
    axis = draw.axis(shape)
    return (lambda x, labels: jnp.take(x, labels, axis)) if shape[axis] >= 3 else None


@operation(needs=("labels",), weight=2)
def label_of_every_row(draw, shape):
    if len(shape) < 2 or shape[0] != draw.num_examples or shape[1] < 3:
        return None
    if draw.chance(0.5):
        return lambda x, labels: jnp.take_along_axis(x, jnp.reshape(labels, (-1, *[1] * (x.ndim - 1))), axis=1)
    return lambda x, labels: x[jnp.arange(labels.shape[0]), labels]


@operation()
def reordered_by_its_own_values(draw, shape):
    if not shape:
        return None
    axis = draw.axis(shape)
    return lambda x: jnp.take_along_axis(x, jnp.argsort(x, axis), axis)


@operation(operands=2)
def where_another_is_largest(draw, shape, other):
    if not shape or not other:
        return None
    axis = draw.axis(shape)
    return lambda x, y: jnp.mean(y) * jax.nn.one_hot(jnp.argmax(x, axis), 3)


@operation(operands=2)
def slice_at_a_computed_place(draw, shape, other):
    if not shape or not other:
        return None
    axis = draw.axis(shape)
    size = draw.randint(1, shape[axis])
    return lambda x, y: lax.dynamic_slice_in_dim(x, jnp.argmax(y.reshape(-1)) % 2, size, axis)


@operation(operands=2)
def written_at_a_computed_place(draw, shape, other):
    if not shape or not other:
        return None
    axis = draw.axis(shape)

    def write(x, y):
        return lax.dynamic_update_slice_in_dim(
            x, jnp.sin(lax.slice_in_dim(x, 0, 1, axis=axis)), jnp.argmax(y) % 2, axis
        )

    return write


@operation(weight=2)
def scattered_by_constants(draw, shape):
    if len(shape) < 2:
        return None
    rows = draw.choice([np.arange(shape[0]), np.zeros(2, int), draw.indices(2, shape[0])])
    column = draw.choice([0, -1])
    return draw.choice(
        [
            lambda x: x.at[rows, column].set(0.5),
            lambda x: x.at[rows, column].add(1.0),
            lambda x: x.at[rows, column].multiply(0.5),
            lambda x: x.at[:, column].max(0.1),
            lambda x: x.at[rows].add(jnp.tanh(x[rows])),
        ]
    )


@operation(needs=("labels",), weight=2)
def groups_by_label(draw, shape):
    if not shape or shape[0] != draw.num_examples:
        return None
    return draw.choice(
        [
            lambda x, labels: jax.ops.segment_sum(x, labels, 3),
            lambda x, labels: jnp.maximum(jax.ops.segment_max(x, labels, 3), -2.0),  # -inf for no examples
            lambda x, labels: jnp.zeros((4, *shape[1:])).at[labels].add(x),
            lambda x, labels: jax.ops.segment_sum(x, labels, 3)[labels],
            lambda x, labels: jnp.tensordot(jax.nn.one_hot(labels, 3), x, axes=((0,), (0,))),
        ]
    )


@operation()
def groups_by_constants(draw, shape):
    if not shape:
        return None
    groups = draw.indices(shape[0], 3)
    return lambda x: jax.ops.segment_sum(x, groups, 3)


@operation(needs=("labels",), weight=2)
def weighted_by_label(draw, shape):
    if not shape or shape[0] != draw.num_examples:
        return None
    return lambda x, labels: x * jnp.reshape(1.0 + 0.5 * labels, (-1, *[1] * (len(shape) - 1)))


# Order.


@operation(weight=2)
def order(draw, shape):
    if not shape:
        return None
    axis = draw.axis(shape)
    choices = [
        lambda x: jnp.sort(x, axis),
        lambda x: lax.sort((x, jnp.cos(x)), dimension=axis, num_keys=1)[1],
        lambda x: 0.1 * jnp.argsort(x, axis) + x,
    ]
    if shape[-1] >= 2:
        choices += [lambda x: lax.top_k(x, 2)[0], lambda x: x * (x >= lax.top_k(x, 2)[0][..., -1:])]
    return draw.choice(choices)
