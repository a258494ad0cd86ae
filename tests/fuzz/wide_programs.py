"""Random losses with big values in the middle, such as logits and matrices of pairs, which blocks must compute exactly.

A program makes a few big values from small ones, changes them, reduces them to rows and sums, and feeds some of these
back. `python tests/fuzz/wide_programs.py SEED` prints the program of a seed and compares it.
"""

import collections
import functools
import sys
import traceback
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from fuzz.interpreter import results_of
from fuzz.program_indexing import INDEXING
from fuzz.program_operations import ARRAYS, Draw, Operations, clipped_gradient, steeper_sine, wrong_on_purpose
from fuzz.program_structures import STRUCTURES
from fuzz.programs import HEADS, TERMS, Outcome, Step, difference, weighted
from jax import lax

import anybatch as ab
from anybatch.jaxprs import tracing
from anybatch.reading.blocks import BlockedProgram, Roles

LARGEST_VALUE, MOST_AXES = 3000, 4
INPUTS = ["scalar", "vector", "weights", "embedding", "square", "examples", "sequences", "labels", "key"]
NUM_PARAMS = 5

WIDE = Operations()
MAKERS = Operations()
maker, operation = MAKERS.operation, WIDE.operation

WRAPPERS = [lambda fun: fun, lambda fun: fun, lambda fun: fun, jax.jit, jax.checkpoint]


# Big values of small ones.


def matrix_of(shape):
    return len(shape) == 2 and min(shape) > 1


def differences(a, b):
    return a[:, None] - b[None]


PAIRS = [
    lambda a, b: a @ b.T,
    lambda a, b: (b @ a.T).T,
    lambda a, b: jnp.einsum("id,jd->ij", a, b),
    lambda a, b: jnp.einsum("id,jd->ji", a, b),
    lambda a, b: jnp.sum(differences(a, b) ** 2, axis=-1),
    lambda a, b: jnp.sqrt(jnp.sum(differences(a, b) ** 2, axis=-1) + 0.1),
    lambda a, b: jnp.sum(jnp.abs(differences(a, b) + 0.01), axis=2),
    lambda a, b: differences(a, b),
    lambda a, b: jnp.exp(-jnp.sum(differences(a, b) ** 2, axis=-1) / 3),
    jax.vmap(jax.vmap(lambda a, b: jnp.tanh(a @ b), (None, 0)), (0, None)),
    jax.vmap(jax.vmap(lambda a, b: jnp.tanh(a @ b), (0, None)), (None, 0)),
    lambda a, b: (a**2).sum(1)[:, None] + (b**2).sum(1)[None] - 2 * a @ b.T,
    lambda a, b: lax.map(lambda row: jnp.tanh(b @ row), a),
]


@maker(operands=2, weight=6)
def pairs(draw, shape, other):
    if not matrix_of(shape) or not matrix_of(other) or shape[1] != other[1]:
        return None
    fun, wrap = draw.choice(PAIRS), draw.choice(WRAPPERS)
    return wrap(lambda a, b: fun(a, b))


@maker(weight=4)
def pairs_with_itself(draw, shape):
    if not matrix_of(shape):
        return None
    fun, wrap = draw.choice(PAIRS), draw.choice(WRAPPERS)
    return wrap(lambda a: fun(a, a))


PROJECTIONS = [
    lambda x, w: x @ w,
    lambda x, w: jnp.tanh(x @ w),
    lambda x, w: jnp.einsum("...d,dv->...v", x, w),
    lambda x, w: jnp.einsum("...d,dv->v...", x, w),
    lambda x, w: (x.astype(jnp.float32) @ w.astype(jnp.float32)).astype(x.dtype),
    lambda x, w: jnp.moveaxis(w.T @ jnp.moveaxis(x, -1, 0).reshape(w.shape[0], -1), 0, -1),
]


@maker(weight=6, needs=("weights",))
def projection(draw, shape):
    if len(shape) < 2 or shape[-1] != draw.width:
        return None
    fun, wrap = draw.choice(PROJECTIONS), draw.choice(WRAPPERS)
    return wrap(lambda x, w: fun(x, w))


@maker(weight=3, needs=("embedding",))
def tied_projection(draw, shape):
    if len(shape) < 2 or shape[-1] != draw.width:
        return None
    fun = draw.choice([lambda x, e: x @ e.T, lambda x, e: jnp.einsum("...d,vd->...v", x, e)])
    return fun


@maker(operands=2, weight=4)
def outer(draw, shape, other):
    if len(shape) != 1 or len(other) != 1:
        return None
    fun = draw.choice([jnp.multiply, jnp.subtract, jnp.add, lambda a, b: jnp.tanh(a - 2 * b), jnp.hypot, jnp.logaddexp])
    return draw.choice(
        [
            lambda a, b: fun(a[:, None], b[None]),
            lambda a, b: fun(a[None], b[:, None]),
            jnp.outer,
            lambda a, b: fun(jnp.broadcast_to(a[:, None], (a.size, b.size)), jnp.broadcast_to(b, (a.size, b.size))),
        ]
    )


@maker(weight=2, needs=("labels",))
def one_hot(draw, shape):
    if not shape or len(shape) != 1 or shape[0] != draw.num_examples:
        return None
    return lambda x, labels: jax.nn.one_hot(labels, draw.vocabulary, dtype=x.dtype) * x[:, None]


@maker(weight=2)
def stretched(draw, shape):
    """A vector against numbers that are fixed."""
    if len(shape) != 1:
        return None
    grid = draw.choice([lambda n: jnp.linspace(-1, 1, n), lambda n: jnp.arange(n) / n, np.linspace(0, 1, 100).take])
    size = draw.vocabulary
    numbers = (lambda: grid(size)) if not isinstance(grid, type(np.zeros(1).take)) else (lambda: grid(np.arange(size)))
    fun = draw.choice([lambda a, b: jnp.exp(-((a - b) ** 2)), lambda a, b: jnp.sin(a * b), jnp.subtract])
    return draw.choice([lambda x: fun(x[:, None], numbers()[None]), lambda x: fun(x[None], numbers()[:, None])])


# One big value.

UNARY = [
    *(jnp.tanh, jnp.sin, jax.nn.softplus, jax.nn.sigmoid, jax.nn.gelu, jnp.square, lax.stop_gradient),
    *(clipped_gradient, wrong_on_purpose, steeper_sine, jax.nn.silu),
    *(lambda x: jnp.exp(-(x**2)), lambda x: jnp.sqrt(x**2 + 0.2), lambda x: x * lax.stop_gradient(jnp.cos(x))),
    *(lambda x: jnp.where(x > 0.05, x, 0.1 * x), lambda x: (x.astype(jnp.float32) * 2).astype(x.dtype)),
    *(lambda x: x * (x > 0.02).astype(jnp.int32), lambda x: -x / 3 + 1.0, lambda x: x * jnp.sign(x + 0.01)),
]


@operation(weight=4)
def unary(draw, shape):
    fun, wrap = draw.choice(UNARY), draw.choice(WRAPPERS)
    return wrap(lambda x: fun(x))


NORMALISATIONS = [
    lambda x, axis: jax.nn.softmax(x, axis),
    lambda x, axis: jax.nn.log_softmax(x, axis),
    lambda x, axis: x - jnp.mean(x, axis, keepdims=True),
    lambda x, axis: x - lax.stop_gradient(jnp.max(x, axis, keepdims=True)),
    lambda x, axis: x - jnp.max(x, axis, keepdims=True),
    lambda x, axis: x - 0.5 * jnp.min(x, axis, keepdims=True),
    lambda x, axis: x - jax.nn.logsumexp(x, axis, keepdims=True),
    lambda x, axis: (x - jnp.mean(x, axis, keepdims=True)) / jnp.sqrt(jnp.var(x, axis, keepdims=True) + 0.1),
    lambda x, axis: x / jnp.sqrt(jnp.sum(x**2, axis, keepdims=True) + 0.1),
    lambda x, axis: jnp.exp(x - jnp.max(x, axis, keepdims=True)) / jnp.sum(jnp.exp(x), axis, keepdims=True),
    lambda x, axis: jax.nn.standardize(x, axis, epsilon=0.1),
    lambda x, axis: jax.nn.softmax(jax.nn.log_softmax(x, axis), axis - 1),
]


@operation(weight=7)
def normalised(draw, shape):
    if not shape:
        return None
    fun, wrap = draw.choice(NORMALISATIONS), draw.choice(WRAPPERS)
    axis = (
        draw.randrange(len(shape)) if draw.chance(0.85) or len(shape) < 2 else tuple(draw.sample(range(len(shape)), 2))
    )
    return wrap(lambda x: fun(x, axis if not isinstance(axis, tuple) or fun is not NORMALISATIONS[-1] else axis[0]))


@operation(weight=3)
def along_an_axis(draw, shape):
    if not shape:
        return None
    axis, shift = draw.randrange(len(shape)), draw.randint(1, 3)
    order = draw.sample(range(shape[axis]), shape[axis])
    some = [draw.randrange(shape[axis]) for _ in range(draw.randint(2, max(2, shape[axis])))]
    return draw.choice(
        [
            lambda x: jnp.sort(x, axis),
            lambda x: -jnp.sort(-x, axis),
            lambda x: jnp.cumsum(x, axis) / 3,
            lambda x: lax.cumsum(x, axis, reverse=True) / 3,
            lambda x: lax.cumlogsumexp(x, axis),
            lambda x: lax.cummax(x, axis),
            lambda x: jnp.flip(x, axis),
            lambda x: jnp.roll(x, shift, axis),
            lambda x: jnp.take(x, np.asarray(order), axis),
            lambda x: jnp.take(x, jnp.asarray(some), axis),
            lambda x: jnp.argsort(jnp.argsort(x, axis), axis) * 0.1 + x,
            lambda x: jnp.take_along_axis(x, jnp.argsort(lax.stop_gradient(-x), axis), axis),
            lambda x: jnp.moveaxis(lax.top_k(jnp.moveaxis(x, axis, -1), min(4, shape[axis]))[0], -1, axis),
            lambda x: x * jax.nn.one_hot(jnp.argmax(x, axis), shape[axis], axis=axis, dtype=x.dtype),
            lambda x: jnp.diff(x, axis=axis),
            lambda x: jnp.cumsum(jnp.cumsum(x, axis), axis - 1) / 9,
            lambda x: jnp.sort(jnp.sort(x, axis), axis - 1),
            lambda x: jnp.sort(x, None),
            lambda x: lax.associative_scan(jnp.add, x, axis=axis) / 3,
            lambda x: x.at[(slice(None),) * axis + (0,)].set(0.5),
            lambda x: x.at[(slice(None),) * axis + (np.asarray(some),)].add(0.5),
        ]
    )


@operation(weight=3)
def masked(draw, shape):
    if len(shape) < 2:
        return None
    a, b = draw.sample(range(len(shape)), 2)
    shift, other = draw.randint(-3, 3), draw.choice([0.0, -1.0, 0.3])
    compare = draw.choice(
        [
            lambda i, j: i >= j + shift,
            lambda i, j: i == j,
            lambda i, j: i != j,
            lambda i, j: jnp.abs(i - j) <= 2 + abs(shift),
            lambda i, j: (i + 2 * j) % 3 == 1,
            lambda i, j: (i > 1) & (j < shape[b] - 2),
        ]
    )

    def mask():
        return compare(lax.broadcasted_iota(jnp.int32, shape, a), lax.broadcasted_iota(jnp.int32, shape, b))

    def vectors():
        i, j = (
            jnp.expand_dims(jnp.arange(shape[axis]), [k for k in range(len(shape)) if k != axis]) for axis in (a, b)
        )
        return compare(i, j)

    fun = draw.choice(
        [
            lambda x, m: jnp.where(m, x, other),
            lambda x, m: x * m,
            lambda x, m: x + 0.3 * m.astype(x.dtype),
            lambda x, m: jnp.where(m, x, lax.stop_gradient(x)),
            lambda x, m: jnp.where(m, x, jnp.sin(x)),
        ]
    )
    make = draw.choice([mask, vectors])
    return lambda x: fun(x, make())


@operation(weight=2)
def positions(draw, shape):
    if not shape:
        return None
    axis = draw.randrange(len(shape))
    return draw.choice(
        [
            lambda x: x + 0.1 * lax.broadcasted_iota(x.dtype, shape, axis),
            lambda x: x * jnp.sin(lax.broadcasted_iota(jnp.int32, shape, axis).astype(x.dtype)),
        ]
    )


@operation(weight=2, needs=("key",))
def noisy(draw, shape):
    if not shape:
        return None
    rate = draw.choice([0.3, 0.5])
    return draw.choice(
        [
            lambda x, key: x + 0.3 * jax.random.normal(key, shape),
            lambda x, key: x * jax.random.bernoulli(key, 1 - rate, shape),
            lambda x, key: jnp.where(jax.random.uniform(key, shape) > rate, x, 0.0),
            lambda x, key: x + 0.1 * jax.random.gumbel(key, shape[-1:]),
            lambda x, key: x * jax.random.permutation(key, shape[0]).reshape(-1, *[1] * (len(shape) - 1)) * 0.1,
            lambda x, key: jax.vmap(lambda row, k: row + jax.random.uniform(k, row.shape))(
                x, jax.random.split(key, shape[0])
            ),
        ]
    )


@operation(weight=3)
def shaped(draw, shape):
    if len(shape) < 2:
        return None
    size = int(np.prod(shape))
    axis = draw.randrange(len(shape) - 1)
    merged = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    order = draw.sample(range(len(shape)), len(shape))
    weights = np.random.default_rng(draw.randrange(1000)).uniform(0.5, 1.5, merged)
    return draw.choice(
        [
            lambda x: x.transpose(order),
            lambda x: x.transpose(order),
            lambda x: x.reshape(size),
            lambda x: x.reshape(merged),
            lambda x: jnp.sin(x.reshape(merged) * weights).reshape(shape),
            lambda x: x.transpose(order).reshape(-1, shape[order[-1]]),
            lambda x: x.reshape(shape[::-1]),
            lambda x: jnp.swapaxes(x.transpose(order).reshape(shape[order[0]], -1), 0, 1),
            lambda x: jnp.expand_dims(x, axis) if x.ndim < 3 else x.squeeze(axis) if shape[axis] == 1 else x[None],
        ]
    )


@operation(weight=3)
def sliced(draw, shape):
    if not shape:
        return None
    axis = draw.randrange(len(shape))
    if shape[axis] < 5:
        return None
    start, stop = draw.choice([(0, -1), (1, None), (1, -1), (2, None), (0, 3), (0, -2)])
    at = (slice(None),) * axis
    return draw.choice(
        [
            lambda x: x[(*at, slice(start, stop))],
            lambda x: x[(*at, slice(start, stop))],
            lambda x: x[(*at, slice(1, None))] - x[(*at, slice(None, -1))],
            lambda x: x[(*at, slice(None, None, 2))],
            lambda x: x[(*at, slice(None, None, -1))],
            lambda x: lax.dynamic_slice_in_dim(x, 1, shape[axis] - 2, axis),
            lambda x: x[(*at, 0)],
            lambda x: x[(*at, -1)],
        ]
    )


@operation()
def padded(draw, shape):
    if not shape:
        return None
    axis = draw.randrange(len(shape))
    widths = [(1, 2) if i == axis else (0, 0) for i in range(len(shape))]
    return draw.choice(
        [
            lambda x: jnp.pad(x, widths, constant_values=0.2),
            lambda x: jnp.pad(x, widths, mode="edge"),
            lambda x: jnp.concatenate([jnp.zeros_like(x[(slice(None),) * axis + (slice(0, 1),)]), x], axis),
        ]
    )


@operation(weight=2)
def scanned(draw, shape):
    """A loop along one axis, with the others wide."""
    if len(shape) < 2:
        return None
    axis, reverse = draw.randrange(len(shape)), draw.chance(0.3)

    def fun(x):
        rows = jnp.moveaxis(x, axis, 0)

        def body(carry, row):
            carry = 0.5 * carry + jnp.tanh(row)
            return carry, carry * row

        last, every = lax.scan(body, jnp.zeros_like(rows[0]), rows, reverse=reverse)
        return draw_last(last, jnp.moveaxis(every, 0, axis))

    draw_last = draw.choice([lambda last, every: last, lambda last, every: every])
    return fun


@operation()
def mapped(draw, shape):
    if len(shape) < 2:
        return None
    a = draw.randrange(len(shape))
    inner = draw.choice(
        [
            jax.nn.softmax,
            lambda row: row - jnp.mean(row),
            lambda row: jnp.sort(row.ravel()).reshape(row.shape),
            lambda row: row * jnp.max(row),
            lambda row: jax.grad(lambda r: jnp.sum(jnp.sin(r) * r[::-1]))(row),
        ]
    )
    return jax.vmap(inner, a, draw.choice([0, a]))


# Big values to small ones.

REDUCTIONS = [
    *(jnp.sum, jnp.mean, jnp.max, jnp.min, jax.nn.logsumexp, jnp.sum, jax.nn.logsumexp, jnp.max),
    lambda x, axis, **options: jnp.sqrt(jnp.var(x, axis, **options) + 0.1),
    lambda x, axis, **options: jnp.log(jnp.sum(x**2, axis, **options) + 0.3),
    lambda x, axis, **options: jnp.sum(x * jax.nn.softmax(x, axis), axis, **options),
    lambda x, axis, **options: jnp.sum(x > 0.1, axis, **options) * 0.1,
    lambda x, axis, **options: jnp.max(lax.stop_gradient(x), axis, **options),
]


@operation(weight=7)
def reduction(draw, shape):
    if not shape:
        return None
    fun, keepdims = draw.choice(REDUCTIONS), draw.chance(0.2)
    number = draw.choices([1, len(shape), draw.randint(1, len(shape))], [6, 3, 1])[0]
    axes = tuple(sorted(draw.sample(range(len(shape)), number)))
    return lambda x: fun(x, axis=axes if len(axes) > 1 else axes[0], keepdims=keepdims)


@operation(weight=2)
def of_indices(draw, shape):
    """Integers of a big value, which choose from another."""
    if len(shape) != 2:
        return None
    axis = draw.randrange(2)
    return draw.choice(
        [
            lambda x: jnp.take_along_axis(x, jnp.argmin(x, axis, keepdims=True), axis),
            lambda x: jnp.take_along_axis(x, jnp.expand_dims(jnp.arange(shape[1 - axis]) % shape[axis], axis), axis),
            lambda x: jnp.diagonal(x),
            lambda x: jnp.argmax(x, axis) * 0.1 + jnp.sum(x, axis),
            lambda x: lax.top_k(jnp.swapaxes(x, axis, 1), 3)[0].sum(1),
            lambda x: x[jnp.arange(min(shape)), jnp.arange(min(shape))],
            lambda x: jnp.trace(x) * jnp.ones(3),
            lambda x: jax.ops.segment_sum(x, jnp.arange(shape[0]) % 3, num_segments=3),
        ]
    )


@operation(weight=2, needs=("labels",))
def picked(draw, shape):
    if len(shape) != 2 or draw.num_examples not in shape:
        return None
    axis = draw.choice([i for i in range(2) if shape[i] == draw.num_examples])
    other = shape[1 - axis]
    return draw.choice(
        [
            lambda x, labels: jnp.take_along_axis(x, jnp.expand_dims(labels % other, 1 - axis), 1 - axis),
            lambda x, labels: x[
                (jnp.arange(shape[0]), labels % other) if axis == 0 else (labels % other, jnp.arange(shape[1]))
            ],
            lambda x, labels: jnp.take(x, labels % shape[1], 1),
            lambda x, labels: x[labels % shape[0]],
            lambda x, labels: x * jnp.expand_dims(labels > 2, 1 - axis),
            lambda x, labels: jnp.sum(
                x * (jnp.expand_dims(labels, 1 - axis) == jnp.expand_dims(jnp.arange(other), axis)), 1 - axis
            ),
        ]
    )


# Several values.


def broadcastable(shape, other):
    return 0 < len(other) < len(shape) and shape != other


@operation(operands=2, weight=6)
def with_vector(draw, shape, other):
    """A big value and a vector along one of its axes."""
    if len(shape) < 2 or len(other) != 1 or other[0] not in shape:
        return None
    axis = draw.choice([i for i, size in enumerate(shape) if size == other[0]])
    fun = draw.choice(
        [
            *(
                jnp.add,
                jnp.subtract,
                jnp.multiply,
                lambda a, b: a / (1.5 + jnp.tanh(b)),
                lambda a, b: jnp.exp(-a * a) - b,
            ),
            *(lambda a, b: jnp.where(b > 0, a, -0.5 * a), lambda a, b: jnp.sum(a * b, axis), jnp.maximum),
            lambda a, b: lax.stop_gradient(a) * b,
        ]
    )
    return lambda a, b: fun(a, b.reshape([-1 if i == axis else 1 for i in range(len(shape))]))


@operation(operands=2, weight=5)
def combined(draw, shape, other):
    if len(shape) < 2:
        return None
    order = None
    if shape != other:
        if len(shape) != len(other) or sorted(shape) != sorted(other) or len(shape) != 2:
            return None
        order = (1, 0)
    elif len(shape) == 2 and shape[0] == shape[1] and draw.chance(0.4):
        order = (1, 0)
    fun = draw.choice(
        [
            *(jnp.add, jnp.multiply, jnp.subtract, lambda a, b: jax.nn.softmax(a, -1) * b, jnp.logaddexp),
            *(lambda a, b: jnp.where(a > b, a, 0.3 * b), lambda a, b: jnp.concatenate([a, b], 0)),
            *(lambda a, b: jnp.concatenate([a, b], 1), lambda a, b: jnp.stack([a, b]), jnp.maximum),
            lambda a, b: jax.nn.softmax(a, 0) * jax.nn.log_softmax(b, 1),
        ]
    )
    return lambda a, b: fun(a, b if order is None else b.transpose(order))


@operation(operands=2, weight=5)
def contracted(draw, shape, other):
    found = [(i, j) for i, m in enumerate(shape) for j, n in enumerate(other) if m == n]
    if len(shape) < 2 or not other or not found:
        return None
    i, j = draw.choice(found)
    rest = [pair for pair in found if pair[0] != i and pair[1] != j]
    shared = [draw.choice(rest)] if rest and draw.chance(0.3) else []
    numbers = (((i,), (j,)), (tuple(a for a, _ in shared), tuple(b for _, b in shared)))
    both = draw.chance(0.5)
    return lambda a, b: (
        0.3 * (lax.dot_general(a, b, numbers) if both else lax.dot_general(b, a, (numbers[0][::-1], numbers[1][::-1])))
    )


@operation(operands=2, weight=2)
def with_number(draw, shape, other):
    if other or not shape:
        return None
    fun = draw.choice([jnp.multiply, jnp.add, jnp.subtract, lambda a, b: a / (1.5 + jnp.tanh(b)), jnp.maximum])
    return lambda a, b: fun(a, b)


OPERATIONS = [
    *((each, each.weight) for each in WIDE),
    *((each, 2 * each.weight) for each in MAKERS),
    *((each, 0.12 * each.weight) for each in (*ARRAYS, *INDEXING, *STRUCTURES) if not {"trees"} & set(each.needs)),
]


class WideProgram:
    """`loss(params, batch)`: five parameters; examples, sequences and labels; and a key that is fixed."""

    def __init__(self, seed):
        self.seed = seed
        draw = self.draw = Draw(seed)
        draw.num_examples = draw.choice([5, 7, 7, 11, 13])
        draw.width = draw.choice([2, 3])
        draw.vocabulary = draw.num_examples if draw.chance(0.2) else draw.choice([11, 13, 17, 19, 23])
        draw.length = draw.choice([3, 5])
        draw.boldness, draw.sizes = 0.5, (2, draw.width, draw.num_examples)
        draw.blocks, draw.nested_left = [], 0
        n, d, v = draw.num_examples, draw.width, draw.vocabulary
        self.shapes = [(), (draw.choice([d, n, v]),), (d, v), (v, d), (d, d), (n, d), (n, draw.length, d)]
        self.named = {name: position for position, name in enumerate(INPUTS)}
        params, batch = self.arguments()
        self.values = [*map(jax.typeof, (*params, *batch)), jax.typeof(jax.random.key(0))]
        self.steps: list[Step] = []
        self.moving = set(range(NUM_PARAMS))
        self._build()
        made = range(len(INPUTS), len(self.values))
        unused = sorted(set(made).difference(*(step.operands for step in self.steps)))
        chosen = draw.sample(unused, min(3, len(unused))) or [0]
        self.terms = [
            (draw.choice(TERMS), draw.randrange(1000) if draw.chance(0.6) else None, index)
            for index in [*chosen, max(self.moving)]
        ]
        self.head = draw.choice(HEADS)
        self.has_aux = draw.chance(0.3)
        self.aux = [draw.choice(list(made)) for _ in range(2)] if self.has_aux else []
        self.sizes = [(draw.choice([1, 2, 3, n]), draw.choice([1, 2, 3, 4, 6])) for _ in range(2)]
        self.threshold = draw.choice([None, None, 200, 300])
        self.regions = 0

    def is_big(self, index):
        return self.values[index].ndim >= 2 and self.values[index].size >= 4 * max(self.draw.num_examples, 8)

    def _build(self):
        draw = self.draw
        for name in ("examples", "sequences"):
            if draw.chance(0.8):
                self._add("linear", lambda x, w: jnp.tanh(x @ w), (self.named[name], self.named["square"]))
        if draw.chance(0.6):
            self._add("vector of examples", lambda x, w: (x @ w)[:, 0], (self.named["examples"], self.named["square"]))
        self._try(MAKERS, [each.weight for each in MAKERS], draw.randint(1, 2), self._pick_small)
        length = draw.randint(2, 9)
        self._try([each for each, _ in OPERATIONS], [weight for _, weight in OPERATIONS], length, self._pick)

    def _try(self, operations, weights, number, pick):
        wanted = len(self.steps) + number
        for _ in range(300):
            if len(self.steps) >= wanted:
                return
            (operation,) = self.draw.choices(operations, weights)
            for _ in range(8):
                operands = tuple(pick(position) for position in range(operation.operands))
                fun = operation.build(self.draw, *(self.values[index].shape for index in operands))
                if fun is None:
                    continue
                fun = weighted(fun, self.draw.randrange(1000)) if self.draw.chance(0.1) else fun
                named = tuple(self.named[name] for name in operation.needs)
                if self._add(operation.name, fun, operands + named):
                    break

    def _pick_small(self, position):
        while True:
            index = self.draw.randrange(len(self.values))
            if index not in (self.named["labels"], self.named["key"]) and not self.is_big(index):
                return index

    def _pick(self, position):
        """Mostly a late value, and mostly a big one as the first operand."""
        draw, count = self.draw, len(self.values)
        big = [index for index in range(count) if self.is_big(index)]
        if position == 0 and big and draw.chance(0.6):
            return big[max(0, len(big) - 1 - int(draw.expovariate(0.8)))]
        while True:
            index = draw.randrange(count) if draw.chance(0.4) else count - 1 - int(draw.expovariate(0.35))
            if index >= 0 and index not in (self.named["labels"], self.named["key"]):
                return index

    def _add(self, name, fun, operands):
        try:
            value = jax.eval_shape(lambda *values: fun(*values), *(self.values[index] for index in operands))
        except (TypeError, ValueError, IndexError, ZeroDivisionError):
            return False
        if not hasattr(value, "shape") or value.dtype != np.float64:
            return False
        if value.size > LARGEST_VALUE or value.ndim > MOST_AXES or 0 in value.shape:
            return False
        if self.moving.intersection(operands):
            self.moving.add(len(self.values))
        self.steps.append(Step(name, operands, fun))
        self.values.append(value)
        return True

    def loss(self, params, batch):
        values = [*params, *batch, jax.random.key(self.seed % 7)]
        for step in self.steps:
            values.append(step.fun(*(values[index] for index in step.operands)))
        terms = []
        for term, seed, index in self.terms:
            fun = (lambda x: x) if seed is None else weighted(lambda x: x, seed)
            terms.append(term(fun(values[index])))
        value = self.head(terms)
        return (value, [values[index] for index in self.aux]) if self.has_aux else value

    def arguments(self):
        generator = np.random.default_rng([self.seed, 1])
        arrays = [0.7 * generator.standard_normal(shape) for shape in self.shapes]
        labels = generator.integers(0, 5, self.draw.num_examples)
        return arrays[:NUM_PARAMS], [*arrays[NUM_PARAMS:], labels]

    def __str__(self):
        lines = [f"program {self.seed}: (microbatch_size, block_size) {self.sizes}, threshold {self.threshold}"]
        for index, value in enumerate(self.values):
            step = self.steps[index - len(INPUTS)] if index >= len(INPUTS) else None
            origin = f"{step.name}({', '.join(f'v{i}' for i in step.operands)})" if step else INPUTS[index]
            lines.append(f"  v{index} = {origin}: {value.shape}")
        terms = ", ".join(f"v{index} by {TERMS.index(term)}" for term, _, index in self.terms)
        return "\n".join([*lines, f"  head {HEADS.index(self.head)} of {terms}; aux: {self.aux}"])


def program(seed):
    """The loss of a seed, its parameters and its batch."""
    made = WideProgram(seed)
    return made.loss, *made.arguments()


def whole_in_blocks(made, block_size):
    """The value and gradient of a loss that is one blocked program, and not divided into microbatches."""
    params, batch = made.arguments()
    leaves = [*params, *batch]

    def flat_loss(*flat):
        return jax.tree.leaves(made.loss(list(flat[:NUM_PARAMS]), list(flat[NUM_PARAMS:])))

    traced, consts = tracing.trace(flat_loss, *leaves)
    of_data = [*[False] * (len(consts) + NUM_PARAMS), *[True] * len(batch)]
    moves = [*[False] * len(consts), *[True] * NUM_PARAMS, *[False] * len(batch)]
    blocked = BlockedProgram(
        traced.jaxpr, Roles(tuple(of_data), tuple(moves)), block_size, [0], least_gain=0, threshold=made.threshold
    )
    made.regions = len(blocked.regions.regions) + len(blocked.nested)

    def value_and_grad(params, batch):
        def loss(params):
            one = jnp.ones((), traced.out_avals[0].dtype)
            value, *aux = blocked([*consts, *params, *batch], differentiable=True, cotangents=[one])
            return value, aux

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return ((value, aux) if made.has_aux else value), grads

    return value_and_grad


def ways(made):
    """The computations that must agree with `jax.value_and_grad`, by name."""
    found = {
        f"whole, blocks of {made.sizes[0][1]}": lambda *args: whole_in_blocks(made, made.sizes[0][1])(*args),
    }
    for microbatch_size, block_size in made.sizes:
        found[f"microbatches of {microbatch_size}, blocks of {block_size}"] = ab.value_and_grad(
            made.loss, has_aux=made.has_aux, microbatch_size=microbatch_size, block_size=block_size
        )
    return found


def compare(made, run=results_of, tolerance=1e-9):
    """The gradient, value and aux of a program in blocks and at once; `run(fun, *args)` computes each."""
    full = jax.value_and_grad(made.loss, has_aux=made.has_aux)
    arguments = made.arguments()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = run(full, *arguments)
        except Exception:
            return Outcome("invalid", traceback.format_exc(limit=-4))  # JAX itself has no gradient of it
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected)):
            return Outcome("not finite")
        for name, fun in ways(made).items():
            try:
                actual = run(fun, *arguments)
            except ab.AnybatchError as error:
                return Outcome("refused", f"{name}: {error}")
            except Exception:
                return Outcome("crashed", f"{name}: {traceback.format_exc(limit=-12)}")
            error = difference(actual, expected)
            if error > tolerance and error > 100 * sensitivity(arguments, functools.partial(run, full), expected):
                decided = rounding_decides(full, arguments, expected, tolerance)
                return Outcome("undetermined" if decided else "different", f"{name}: by {error:.1e}")
    return Outcome("same")


def rounding_decides(full, arguments, expected, tolerance):
    """Whether JAX's own result is another one eagerly, or compiled: the largest of two equal numbers, for example."""
    return any(difference(run(*arguments), expected) > tolerance for run in (full, jax.jit(full)))


def compare_compiled(made):
    """As `compare`, by XLA. A difference counts only if JAX's own result is the same without compilation."""
    # In programs with casts to float32, the order of sums shows earlier.
    rounds = "f32[" in str(jax.make_jaxpr(made.loss)(*made.arguments()))
    tolerance = 1e-4 if rounds else 1e-9
    outcome = compare(made, lambda fun, *arguments: jax.jit(fun)(*arguments), tolerance)
    if outcome.kind == "different":
        outcome = compare(made, _compiled_against_eager(made), tolerance)
    return outcome


def _compiled_against_eager(made):
    """XLA on the CPU is sometimes wrong where two computations of one number differ in the last digit."""
    full = jax.value_and_grad(made.loss, has_aux=made.has_aux)
    remaining = iter([full])  # the first call is that of the expected result

    def run(fun, *arguments):
        return (jax.jit(fun) if next(remaining, None) is None else fun)(*arguments)

    return run


def survey(seeds, compare=compare):
    """Compares the programs of the seeds. Returns how many became what, and the text of all that went wrong."""
    counts, wrong = collections.Counter(), []
    for number, seed in enumerate(seeds):
        made = WideProgram(seed)
        outcome = compare(made)
        counts[outcome.kind] += 1
        counts["regions"] += made.regions
        counts["with regions"] += made.regions > 0
        if outcome.kind in ("different", "crashed"):
            wrong.append(f"{outcome.kind} {outcome.text}\n{made}")
        if number % 50 == 49:
            jax.clear_caches()  # every program is traced once and never again
    return counts, wrong


def sensitivity(arguments, full, expected):
    """How far the full batch's own result moves with the thirteenth digit of its inputs."""
    generator = np.random.default_rng(0)
    params, (*arrays, labels) = arguments

    def moved(arrays):
        return [x * (1 + 1e-13 * generator.standard_normal(x.shape)) for x in arrays]

    return max(difference(full(moved(params), [*moved(arrays), labels]), expected) for _ in range(4))


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    for seed in map(int, sys.argv[1:]):
        the_program = WideProgram(seed)
        outcome = compare(the_program)
        print(the_program, f"{the_program.regions} regions", outcome.kind, outcome.text, sep="\n")
