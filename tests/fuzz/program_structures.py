"""More operations of random programs: random numbers, loops, branches, derivatives inside, functions of sums."""

import jax
import jax.numpy as jnp
import numpy as np
from fuzz.program_operations import WRAPPERS, Operations
from fuzz.program_parameters import Block
from jax import lax

STRUCTURES = Operations()
operation = STRUCTURES.operation

# Random numbers: of the shape of a value, of its first axis, or one for all.


@operation(needs=("key",), weight=3)
def random_numbers(draw, shape):
    first = shape[0] if shape else 1

    def a_key_for_every_row(x, key):
        keys = jax.random.split(key, first)
        return x + 0.3 * jax.vmap(lambda key: jax.random.normal(key, shape[1:]))(keys).reshape(x.shape)

    def the_index_folded_in(x, key):
        draws = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), shape[1:]))(jnp.arange(first))
        return x * draws.reshape(x.shape)

    return draw.choice(
        [
            lambda x, key: x * jax.random.bernoulli(key, 0.6, shape),
            lambda x, key: x + 0.3 * jax.random.normal(key, shape),
            lambda x, key: x * jax.random.uniform(key, shape[-1:]),
            lambda x, key: x * jax.random.randint(key, shape[:1] + (1,) * (len(shape) - 1), -2, 3),
            lambda x, key: x + jax.random.uniform(jax.random.split(key)[1]),
            a_key_for_every_row,
            the_index_folded_in,
        ]
    )


@operation(needs=("key",))
def random_order(draw, shape):
    if not shape:
        return None
    axis = draw.axis(shape)
    return draw.choice(
        [
            lambda x, key: jax.random.permutation(key, x, axis=axis),
            lambda x, key: jnp.take(x, jax.random.choice(key, shape[axis], (3,)), axis),
            lambda x, key: x + 0.1 * jax.random.categorical(key, x, axis=-1)[..., None],
        ]
    )


# Loops.


@operation(operands=2, weight=2)
def scan_along_an_axis(draw, shape, other):
    if not shape:
        return None
    axis, reverse, which = draw.axis(shape), draw.chance(0.3), draw.randrange(2)
    start = draw.choice(
        [
            lambda x, y: jnp.zeros_like(x[0]),
            lambda x, y: jnp.ones_like(x[0]),
            lambda x, y: jnp.zeros_like(x[0]) + jnp.mean(y),
            lambda x, y: jnp.cos(x[-1]),
        ]
    )
    step = draw.choice(
        [
            lambda carry, x: (jnp.tanh(carry + 0.5 * x), carry * x),
            lambda carry, x: (carry + jnp.sin(x), jnp.sin(x)),
            lambda carry, x: (carry * 0.5, carry + x),
        ]
    )

    def scanned(x, y):
        x = jnp.moveaxis(x, axis, 0)
        return lax.scan(step, start(x, y), x, reverse=reverse)[which]

    return scanned


@operation(operands=2)
def scan_over_layers(draw, shape, other):
    if not shape:
        return None
    axis, which = draw.axis(shape), draw.randrange(2)

    def layers(x, y):
        def layer(carry, shift):
            hidden, total = carry
            return (jnp.tanh(0.7 * hidden + shift * jnp.mean(y)), total + 0.1 * jnp.sum(hidden, axis)), None

        shifts = 0.1 * jnp.arange(3.0, dtype=x.dtype)
        return lax.scan(layer, (x, jnp.zeros_like(jnp.sum(x, axis))), shifts)[0][which]

    return layers


@operation(operands=2)
def loop_over_rows(draw, shape, other):
    if not shape:
        return None
    return draw.choice(
        [
            lambda x, y: lax.map(lambda row: jnp.tanh(row) * jnp.mean(y) + jnp.sum(row), x),
            lambda x, y: lax.fori_loop(0, 3, lambda i, z: z + 0.1 * jnp.sin(z) * jnp.mean(y), x),
            lambda x, y: lax.associative_scan(jnp.add, x, axis=len(shape) - 1),
        ]
    )


@operation()
def while_loop(draw, shape):
    """Without a gradient: a while loop has none backwards."""
    limit = draw.choice([0.5, 1.0])

    def shrink(x):
        return lax.while_loop(lambda x: jnp.sum(x**2) > limit, lambda x: 0.6 * x, lax.stop_gradient(x))

    return jax.vmap(shrink) if shape and draw.chance(0.6) else shrink


@operation(operands=2)
def branch(draw, shape, other):
    limit, pick = draw.choice([0.123, -0.2]), draw.choice([jnp.sum, jnp.max, jnp.mean])
    if shape and other and shape[0] == other[0] and draw.chance(0.4):
        return jax.vmap(lambda x, y: lax.cond(jnp.sum(y) > limit, jnp.sin, lambda x: 0.5 * x, x))
    if draw.chance(0.3):
        return lambda x, y: lax.switch(jnp.argmax(y.reshape(-1)) % 3, [jnp.sin, jnp.tanh, lambda x: 0.5 * x], x)
    return lambda x, y: lax.cond(pick(y) > limit, lambda x: 0.5 * x, lambda x: jnp.sin(x) + jnp.sum(y), x)


@operation(operands=2, weight=2)
def nested_function(draw, shape, other):
    """A few operations behind jit, remat and vmap."""
    wrap, again = draw.choice(WRAPPERS), draw.choice(WRAPPERS)

    def inner(x, y):
        return jnp.tanh(x) * jnp.mean(again(jnp.sin)(y)) + jnp.max(x)

    if shape and draw.chance(0.5):
        return wrap(jax.vmap(wrap(inner), in_axes=(draw.axis(shape), None)))
    return wrap(inner)


# Derivatives.


@operation()
def gradient_inside(draw, shape):
    if not shape:
        return None
    axis = draw.axis(shape)
    return draw.choice(
        [
            jax.grad(lambda x: jnp.sum(jnp.tanh(x) * jnp.sum(jnp.sin(x), axis, keepdims=True))),
            jax.vmap(jax.grad(lambda row: jnp.sum(jnp.sin(row)) ** 2)),
            lambda x: jax.jvp(lambda x: jnp.sort(jnp.sin(x), axis), (x,), (jnp.cos(x),))[1],
        ]
    )


def identity_with_backward(backward):
    """A function that does nothing forwards."""

    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))
    return identity


@operation(weight=2)
def custom_backward_along_an_axis(draw, shape):
    """Where the axis is the examples', the backward pass couples what the forward pass does not."""
    if not shape:
        return None
    axis = draw.axis(shape)
    backward = draw.choice(
        [
            lambda x, g: g - g.mean(axis, keepdims=True),
            lambda x, g: g / (0.1 + jnp.linalg.norm(g, axis=axis, keepdims=True)),
            lambda x, g: g * jnp.sum(jnp.sin(x), axis, keepdims=True),
            lambda x, g: jnp.cumsum(g, axis),
            lambda x, g: g * (jnp.arange(shape[axis]) + 1.0).reshape([-1 if i == axis else 1 for i in range(g.ndim)]),
            lambda x, g: jnp.flip(g, axis),
            lambda x, g: jnp.broadcast_to(g.mean(axis, keepdims=True), shape),
        ]
    )
    return identity_with_backward(backward)


# Kernels.


@operation(operands=2)
def convolution(draw, shape, other):
    """The examples may be on any of the three axes: the batch, the features or the positions."""
    if len(shape) != 3:
        return None
    layout = draw.choice(["NWC", "NCW", "WNC", "CWN"])
    features = shape[layout.index("C")]
    groups = features if draw.chance(0.3) else 1
    kernel = draw.matrix(2 * features // groups, 2 * groups).reshape(2, features // groups, 2 * groups)
    padding, stride = draw.choice(["SAME", "VALID", [(1, 0)]]), draw.choice([1, 2])

    def convolved(x, y):
        numbers = (layout, "WIO", layout)
        scaled = kernel * (1 + 0.1 * jnp.mean(y))
        return lax.conv_general_dilated(
            x, scaled, (stride,), padding, dimension_numbers=numbers, feature_group_count=groups
        )

    return convolved


@operation(weight=0.7)
def linear_algebra(draw, shape):
    if len(shape) < 2 or shape[-2] > 4:
        return None

    def gram(x):
        return jnp.einsum("...ij,...kj->...ik", x, x) + 2 * jnp.eye(shape[-2])

    return draw.choice(
        [
            lambda x: jnp.linalg.cholesky(gram(x)),
            lambda x: jnp.linalg.solve(gram(x), x),
            lambda x: jnp.linalg.slogdet(gram(x))[1],
            lambda x: jnp.abs(jnp.fft.rfft(x, axis=-1)) ** 2,
        ]
    )


# Models.


@operation(needs=("trees",), weight=4)
def block_of_a_model(draw, shape):
    """With parameters of its own: stacked layers, trees, tied weights."""
    if not shape or shape[-1] < 2 or len(draw.blocks) > 1:
        return None
    block, place = Block(draw, shape[-1], narrow=0.0), len(draw.blocks)
    draw.blocks.append(block)
    return lambda x, trees: block(trees[place], x) + block.penalty(trees[place])


# What a head does with sums.


@operation(operands=2, weight=3)
def sums_combined(draw, shape, other):
    """A sum with a sum, or with a value that is none."""
    return draw.choice(
        [
            lambda x, y: jnp.sum(x) * jnp.mean(y),
            lambda x, y: x / (1.0 + jnp.sum(y**2)),
            lambda x, y: x / jnp.sum(jnp.exp(-(y**2))),
            lambda x, y: jnp.where(jnp.sum(y) > 0, jnp.sum(x), jnp.mean(y)),
            lambda x, y: jnp.where(jnp.sum(x) > jnp.sum(y), jnp.sum(x), jnp.sum(jnp.sin(y))),
            lambda x, y: jnp.maximum(jnp.mean(x), 0.1),
            lambda x, y: jnp.sum(x) - jnp.sum(y) + 0.4,
        ]
    )


@operation(operands=2, weight=3)
def sums_side_by_side(draw, shape, other):
    """Padded, concatenated, stacked or selected after they were reduced."""
    constant = draw.choice([0.0, 0.7, 0.7])
    return draw.choice(
        [
            lambda x, y: jnp.stack([jnp.sum(x), jnp.sum(y)]),
            lambda x, y: jnp.stack([jnp.sum(x), jnp.asarray(constant)]),
            lambda x, y: jnp.concatenate([jnp.sum(x)[None], jnp.full((1,), constant)]),
            lambda x, y: lax.pad(jnp.sum(x)[None], np.asarray(constant, x.dtype), [(1, 0, 0)]),
            lambda x, y: jnp.where(jnp.arange(2) > 0, jnp.mean(x), constant),
        ]
    )
