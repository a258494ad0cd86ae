"""The operations of random programs: every function here draws one use of a few primitives, for operands of any shape.

An operation is called as `operation(draw, *shapes)` and returns a function of as many arrays, or None where those
shapes do not suit it. `draw` makes every random decision, so that a program is its seed.
"""

import dataclasses
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class Draw(random.Random):
    """Random decisions about a program for batches of `num_examples`."""

    num_examples: int
    sizes: tuple[int, ...]
    blocks: list  # those of a model, each with parameters of its own
    nested_left: int  # how many functions inside others a block of parameters may yet have
    forwards: bool = False  # whether what is drawn will be differentiated forwards
    alone: bool = False  # whether what blocks of parameters are given is one example
    boldness: float  # how often an operation may run along the first axis, which mostly is that of the examples

    def axis(self, shape):
        bold = len(shape) < 2 or self.chance(self.boldness)
        return self.randrange(len(shape)) if bold else self.randrange(1, len(shape))

    def some_axes(self, shape):
        return tuple(sorted(self.sample(range(len(shape)), self.randint(1, len(shape)))))

    def chance(self, probability):
        return self.random() < probability

    def matrix(self, rows, columns):
        return np.asarray([[self.gauss(0, 0.6) for _ in range(columns)] for _ in range(rows)])

    def indices(self, length, below):
        return np.asarray([self.randrange(below) for _ in range(length)])


@dataclasses.dataclass(frozen=True)
class Operation:
    """One row of the table: `needs` are inputs of the program that come after the operands."""

    name: str
    build: Callable
    operands: int
    weight: float
    needs: tuple[str, ...]


class Operations(list[Operation]):
    """A table of operations."""

    def operation(self, operands=1, weight=1.0, needs=()):
        """Adds the decorated function to the table."""

        def add(build):
            self.append(Operation(build.__name__, build, operands, weight, needs))
            return build

        return add


ARRAYS = Operations()
operation = ARRAYS.operation

# One array, element by element.


@jax.custom_vjp
def clipped_gradient(x):
    return x


clipped_gradient.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.05, 0.05),))


@jax.custom_vjp
def wrong_on_purpose(x):
    return jnp.sin(x)


wrong_on_purpose.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (1.3 * g * jnp.cos(x),))


@jax.custom_jvp
def rounded(x):
    return jnp.round(4 * x) / 4


rounded.defjvp(lambda primals, tangents: (rounded(*primals), tangents[0]))


@jax.custom_jvp
def steeper_sine(x):
    return jnp.sin(x)


steeper_sine.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), 1.1 * tangents[0] * jnp.cos(primals[0])))

ELEMENTWISE = [
    *(jnp.tanh, jnp.sin, jnp.abs, jnp.negative, jax.nn.relu, jax.nn.softplus, jax.nn.sigmoid, jax.nn.gelu),
    *(lax.stop_gradient, clipped_gradient, wrong_on_purpose, rounded, steeper_sine),
    *(lambda x: 0.3 * x**2, lambda x: 0.5 * x + 0.1, lambda x: x + 1.0, lambda x: x / 3.0, lambda x: 1.0 - x),
    *(lambda x: jnp.sqrt(x**2 + 0.2), lambda x: jnp.exp(-(x**2)), lambda x: jnp.log1p(x**2)),
    *(lambda x: jnp.clip(x, -0.5, 0.7), lambda x: jnp.where(x > 0, x, 0.1 * x), lambda x: x * (x > 0.1)),
]
WRAPPERS = [lambda fun: fun, lambda fun: fun, jax.jit, jax.checkpoint, lambda fun: jax.jit(jax.checkpoint(fun))]


@operation(weight=6)
def elementwise(draw, shape):
    fun, wrap = draw.choice(ELEMENTWISE), draw.choice(WRAPPERS)
    return wrap(lambda x: fun(x))


@operation()
def positions_added(draw, shape):
    if not shape:
        return None
    axis = draw.axis(shape)
    return lambda x: x + 0.1 * lax.broadcasted_iota(x.dtype, shape, axis)


@operation()
def constant_of_the_shape(draw, shape):
    constant = np.random.default_rng(draw.randrange(1000)).standard_normal(shape)
    return draw.choice([lambda x: x * constant, lambda x: x + constant, lambda x: jnp.where(constant > 0, x, 0.5)])


# Two arrays.

COMBINATIONS = [
    *(jnp.add, jnp.multiply, jnp.subtract, jnp.maximum, jnp.minimum),
    *(lambda a, b: a / (1.5 + jnp.abs(b)), lambda a, b: a / (2.0 + jnp.tanh(b))),
    *(lambda a, b: jnp.where(a > b, a, 0.5 * b), lambda a, b: jnp.where(b > 0, a, -a), jnp.hypot),
]


@operation(operands=2, weight=5)
def combination(draw, shape, other):
    fun, expand = draw.choice(COMBINATIONS), draw.chance(0.2) and shape
    return lambda a, b: fun(a[None] if expand else a, b)


@jax.custom_vjp
def unfair_product(x, y):
    return x * y


unfair_product.defvjp(lambda x, y: (x * y, (x, y)), lambda xy, g: (1.5 * g * xy[1], jnp.clip(g, -1, 1) * xy[0]))


@operation(operands=2)
def product_with_a_custom_backward(draw, shape, other):
    return unfair_product if shape == other else None


@operation(operands=3)
def selection(draw, shape, other, third):
    limit = draw.choice([0.0, 0.3])
    return lambda a, b, c: jnp.where(a > limit, b, c)


@operation(operands=2, weight=3)
def contraction(draw, shape, other):
    """`dot_general` over any pair of axes of one size, with a pair of batch axes sometimes."""
    pairs = [(i, j) for i, m in enumerate(shape) for j, n in enumerate(other) if m == n]
    if not pairs:
        return None
    i, j = draw.choice(pairs)
    rest = [pair for pair in pairs if pair[0] != i and pair[1] != j]
    shared = [draw.choice(rest)] if rest and draw.chance(0.4) else []
    numbers = (((i,), (j,)), (tuple(a for a, _ in shared), tuple(b for _, b in shared)))
    return lambda a, b: 0.3 * lax.dot_general(a, b, numbers)


EQUATIONS = [
    "ab,bc->ac",
    "ab,ac->bc",
    "ab,cb->ac",
    "ab,ab->a",
    "ab,ab->b",
    "ab,bc->abc",
    "ab,cb->abc",
    "ab,ab->",
    "ab,cd->",
]


@operation(operands=2, weight=2)
def einsum(draw, shape, other):
    if len(shape) != 2 or len(other) != 2:
        return None
    equation = draw.choice(EQUATIONS)
    return lambda a, b: 0.3 * jnp.einsum(equation, a, b)


@operation()
def all_pairs(draw, shape):
    return (lambda x: 0.2 * jnp.einsum("i...,j...->ij", x, x)) if shape else None


@operation(operands=2)
def mapped_outer_product(draw, shape, other):
    if not shape or shape != other:
        return None
    return jax.vmap(lambda x, y: jnp.tanh(jnp.outer(x, y)).sum(axis=0) if x.ndim else x * y)


# Reductions.


@operation(weight=4)
def sum_or_mean(draw, shape):
    if not shape:
        return None
    fun, axes, keepdims = draw.choice([jnp.sum, jnp.mean]), draw.some_axes(shape), draw.chance(0.3)
    return lambda x: fun(x, axis=axes, keepdims=keepdims)


@operation(weight=2)
def other_reduction(draw, shape):
    if not shape:
        return None
    fun = draw.choice([jnp.max, jnp.min, jnp.prod, jnp.var, jax.nn.logsumexp, jnp.median])
    axis, keepdims = draw.axis(shape), draw.chance(0.3)
    return lambda x: fun(x, axis=axis, keepdims=keepdims)


@operation(operands=2)
def masked_mean(draw, shape, other):
    if not shape or shape != other:
        return None
    axis = draw.axis(shape)
    return lambda x, y: jnp.sum(x * (y > 0), axis=axis) / (0.5 + jnp.sum(y > 0, axis=axis))


@operation(weight=2)
def normalisation(draw, shape):
    """Over the features this is a LayerNorm, over the examples a BatchNorm."""
    if not shape:
        return None
    axis = draw.axis(shape)

    def standardised(x):
        return (x - x.mean(axis, keepdims=True)) / jnp.sqrt(x.var(axis, keepdims=True) + 0.1)

    return draw.choice([standardised, lambda x: x - x.mean(axis, keepdims=True), lambda x: jax.nn.softmax(x, axis)])


@operation(weight=2)
def cumulative(draw, shape):
    if not shape:
        return None
    fun = draw.choice([lax.cumsum, lax.cumprod, lax.cummax, lax.cumlogsumexp])
    axis, reverse = draw.axis(shape), draw.chance(0.3)
    return lambda x: 0.5 * fun(x, axis=axis, reverse=reverse)


@operation()
def pooling(draw, shape):
    if not shape:
        return None
    axis = draw.axis(shape)
    window = [2 if i == axis else 1 for i in range(len(shape))]
    padding = draw.choice(["SAME", "VALID"])
    if draw.chance(0.5):
        return lambda x: lax.reduce_window(x, -np.inf, lax.max, window, [1] * len(shape), padding)
    return lambda x: lax.reduce_window(x, 0.0, lax.add, window, [1] * len(shape), padding)


# Shapes: merged, transposed, cut, glued, repeated.


@operation(weight=3)
def reshape(draw, shape):
    size = int(np.prod(shape))
    parts = {2, 3, 4, draw.num_examples, 2 * draw.num_examples, 3 * draw.num_examples}
    pairs = [(part, size // part) for part in parts if size % part == 0]
    triples = [(a, b, size // a // b) for a in parts for b in parts if size % (a * b) == 0]
    target = draw.choice(sorted([(size,), *pairs, *(pair[::-1] for pair in pairs), *triples]))
    return lambda x: x.reshape(target)


@operation(weight=2)
def merged_axes(draw, shape):
    """Two axes made one, as (N, T) becomes N * T; changed element by element; and sometimes taken apart again."""
    if len(shape) < 2:
        return None
    axis, constant = draw.randrange(len(shape) - 1), draw.choice([1.0, 0.5])
    merged = (*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :])
    weights = np.random.default_rng(draw.randrange(1000)).standard_normal(merged)
    final = shape if draw.chance(0.4) else merged
    return lambda x: (x.reshape(merged) * (weights + constant)).reshape(final)


@operation(weight=2)
def transpose(draw, shape):
    order = draw.sample(range(len(shape)), len(shape))
    return lambda x: x.transpose(order)


@operation()
def new_axis(draw, shape):
    axis, size = draw.randrange(len(shape) + 1), draw.choice([1, 2, draw.num_examples])
    return lambda x: jnp.broadcast_to(jnp.expand_dims(x, axis), (*shape[:axis], size, *shape[axis:]))


@operation(operands=2, weight=2)
def concatenation(draw, shape, other):
    if not shape or len(shape) != len(other):
        return None
    axis, constant = draw.axis(shape), draw.choice([0.0, 0.4])
    if draw.chance(0.3):
        return lambda a, b: jnp.concatenate([a, jnp.full_like(a, constant), b], axis)
    return lambda a, b: jnp.concatenate([a, b], axis)


@operation(operands=2)
def stacking(draw, shape, other):
    if shape != other:
        return None
    axis = draw.randrange(len(shape) + 1)
    return lambda a, b: jnp.stack([a, b], axis)


@operation()
def slicing(draw, shape):
    if not shape:
        return None
    axis = draw.axis(shape)
    start = draw.randrange(shape[axis])
    stop, stride = draw.randint(start + 1, shape[axis]), draw.choice([1, 1, 2])
    return lambda x: lax.slice_in_dim(x, start, stop, stride, axis)


@operation()
def halves(draw, shape):
    if not shape:
        return None
    axis, which = draw.axis(shape), draw.randrange(2)
    return (lambda x: jnp.split(x, 2, axis)[which]) if shape[axis] % 2 == 0 else None


@operation()
def padding(draw, shape):
    if not shape:
        return None
    value, config = draw.choice([0.0, 0.5]), [(0, 0, 0)] * len(shape)
    config[draw.axis(shape)] = draw.choice([(0, 1, 0), (1, 0, 0), (1, 2, 0), (-1, 1, 0), (0, 0, 1)])
    return lambda x: lax.pad(x, np.asarray(value, x.dtype), config)


@operation()
def turned(draw, shape):
    if not shape:
        return None
    axis = draw.axis(shape)
    return draw.choice([lambda x: jnp.flip(x, axis), lambda x: jnp.roll(x, 1, axis)])


@operation()
def repeated(draw, shape):
    if not shape:
        return None
    axis = draw.axis(shape)
    times = [2 if i == axis else 1 for i in range(len(shape))]
    return draw.choice([lambda x: jnp.tile(x, times), lambda x: jnp.repeat(x, 2, axis)])


@operation()
def triangle(draw, shape):
    return draw.choice([jnp.tril, jnp.triu]) if len(shape) >= 2 else None


@operation()
def diagonal(draw, shape):
    if len(shape) < 2:
        return None
    if shape[0] == shape[1] and draw.chance(0.5):
        return lambda x: x * (jnp.eye(shape[0]).reshape(*shape[:2], *[1] * (len(shape) - 2)) > 0)
    return lambda x: jnp.diagonal(x)


@operation()
def identity_matrix(draw, shape):
    if not shape:
        return None
    return lambda x: x[..., None] * jnp.eye(shape[-1]) * 0.5
