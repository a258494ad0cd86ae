"""Gradients are written in place only where JAX does it right, and are right everywhere."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax

import anybatch as ab
from anybatch.gradients import references
from anybatch.jaxprs import tracing

pytestmark = pytest.mark.every_jax

W = jax.random.uniform(jax.random.key(0), (3, 3), minval=0.5, maxval=1.5)
X = jax.random.uniform(jax.random.key(1), (8, 3), minval=0.5, maxval=1.5)


def layers(w, x, body):
    return jnp.mean(lax.scan(body, x, jnp.stack([w, 2 * w]))[0])


def scanned(w, x):
    """Scans over the parameter itself, as a stack of layers: here of rows."""
    return jnp.mean(lax.scan(lambda h, row: (jnp.tanh(h * row[None, :]), None), x, w)[0])


def scanned_remat(w, x):
    layer = jax.checkpoint(lambda h, row: jnp.tanh(h * jnp.tanh(row)[None, :]))
    return jnp.mean(lax.scan(lambda h, row: (layer(h, row), None), x, w)[0])


# For each primitive in PLAIN and IDENTICAL, a loss whose first use of the parameter is that primitive.
PLAIN = {
    "add": lambda w, x: jnp.mean(jnp.sin(w + 1.0) @ x.T),
    "add_any": None,  # made by autodiff only
    "broadcast_in_dim": lambda w, x: jnp.mean(jnp.broadcast_to(w[None], (2, 3, 3)) @ x.T),
    "conv_general_dilated": lambda w, x: jnp.mean(
        lax.conv_general_dilated(x[:, None, None, :], w[:, None, None, :], (1, 1), "SAME") ** 2
    ),
    "convert_element_type": lambda w, x: jnp.mean(jnp.abs(w.astype(jnp.complex64) + 1j) @ x.T),
    "div": lambda w, x: jnp.mean((w / 2.0) @ x.T) + jnp.mean(1.0 / w),
    "dot_general": lambda w, x: jnp.mean(jnp.tanh(x @ w) @ w),
    "exp": lambda w, x: jnp.mean(x @ jnp.exp(w)),
    "gather": lambda w, x: jnp.mean(w[jnp.asarray(x[:, 0], jnp.int32)] * x),
    "integer_pow": lambda w, x: jnp.mean(x @ w**3),
    "log": lambda w, x: jnp.mean(x @ jnp.log(w)),
    "mul": lambda w, x: jnp.mean(x @ (w * w)),
    "neg": lambda w, x: jnp.mean(jnp.sin(-w) @ x.T),
    "reduce_sum": lambda w, x: jnp.mean(w.sum(axis=0)[None, :] * x),
    "reshape": lambda w, x: jnp.mean(w.reshape(9)[None, :3] * x),
    "squeeze": lambda w, x: jnp.mean(w.reshape(1, 9).squeeze(0)[None, :3] * x),
    "sub": lambda w, x: jnp.mean(jnp.sin(1.0 - w) @ x.T) + jnp.mean(w - 1.0),
    "tanh": lambda w, x: jnp.mean(x @ jnp.tanh(w)),
    "transpose": lambda w, x: jnp.mean(jnp.sin(x @ w.T)),
}

IN_PLACE = {
    "scan over layers": scanned,
    "scan over layers, remat": scanned_remat,
    "scan over layers and a regulariser": lambda w, x: scanned(w, x) + 0.1 * jnp.mean(w**2),
    "jit": lambda w, x: jax.jit(scanned)(w, x),
    "jit of jit": lambda w, x: jax.jit(lambda w: jax.jit(scanned)(w, x) + jnp.mean(w * w))(w),
    "jit and a regulariser": lambda w, x: jnp.mean(w * 2.0) + jax.jit(lambda w: jnp.mean(jnp.sin(x @ w)))(w),
    "checkpoint": lambda w, x: jax.checkpoint(lambda w: jnp.mean(jnp.sin(x @ w) @ w))(w),
}

tied = jax.jit(lambda one, other, x: jnp.mean(jnp.sin(x @ one) @ other))

blend = jax.jit(lambda h, a, b: h + jnp.tanh(h * a) * b)

AS_VALUES = {
    "twice in a jit, as the sum with another array": lambda w, x: (lambda v: tied(v, v, x))(w + 1.0),
    "in a jit, and 1 more": lambda w, x: tied(w + 1.0, w, x),
    "in a jit, and 1 less": lambda w, x: tied(w, w - 1.0, x),
    "in a jit, and its first power": lambda w, x: tied(w, lax.integer_pow(w, 1), x),
    "in a jit, and the sum with data": lambda w, x: tied(x[:3] + w, w, x),
    "in a jit, and reshaped": lambda w, x: tied(w.reshape(9).reshape(3, 3), w, x),
    "in a jit, and broadcast": lambda w, x: tied(lax.broadcast_in_dim(w, (3, 3), (0, 1)), w, x),
    "in a jit, and cast": lambda w, x: tied(lax.convert_element_type(w, jnp.float32), w, x),
    "one more than a row, twice in a jit in a scan": lambda w, x: jnp.mean(
        lax.scan(lambda h, row: (blend(h, row[None] + 1.0, row[None] + 1.0), None), x, w)[0]
    ),
    "a constant of a scan, and scanned over, both one more": lambda w, x: (
        lambda v: jnp.mean(lax.scan(lambda h, row: (jnp.sin(h @ v * row[None]), None), x, v)[0])
    )(w + 1.0),
    "returned by a jit, then twice in another": lambda w, x: (lambda v: tied(v, v, x))(jax.jit(lambda w: w + 1.0)(w)),
    "kron, and 1 more": lambda w, x: jnp.mean(jnp.kron(w + 1.0, w)) * jnp.mean(x),
    "cond, and 1 more": lambda w, x: lax.cond(
        x.sum() > 0, lambda a, b: jnp.mean(x @ a @ b), lambda a, b: jnp.mean(b), w + 1.0, w + 2.0
    ),
    "a row of 1 more": lambda w, x: jnp.mean((w + 1.0)[0][None, :] * x) + jnp.mean((w + 1.0)[1:]),
    "a barrier of 1 more": lambda w, x: jnp.mean(x @ lax.optimization_barrier(w + 1.0)),
    "one array twice in a jit": lambda w, x: tied(w, w, x),
    "one array in two jits": lambda w, x: tied(w, jnp.eye(3), x) + tied(jnp.eye(3), w, x),
    "one array twice in a nested jit": lambda w, x: jax.jit(lambda w: tied(w, w, x))(w),
    "jit in a scan": lambda w, x: layers(w, x, lambda h, v: (jax.jit(lambda a, b: jnp.sin(h @ a @ b))(v, v), None)),
    "the same scanned over twice": lambda w, x: jnp.mean(
        lax.scan(lambda h, v: (jnp.sin(h * v[0][None, :] + v[1][None, :]), None), x, (w, w))[0]
    ),
    "constant of a scan, and scanned over": lambda w, x: jnp.mean(
        lax.scan(lambda h, row: (jnp.sin(h @ w * row[None, :]), None), x, w)[0]
    ),
    "constant of a scan": lambda w, x: jnp.mean(lax.scan(lambda h, _: (jnp.sin(h @ w), None), x, None, length=3)[0]),
    "carry of a scan": lambda w, x: jnp.mean(x @ lax.scan(lambda v, _: (jnp.sin(v), None), w, None, length=3)[0]),
    "map": lambda w, x: jnp.mean(lax.map(lambda row: w @ row, w)) * jnp.mean(x),
    "cond": lambda w, x: lax.cond(x.sum() > 0, lambda a, b: jnp.mean(x @ a @ b), lambda a, b: jnp.mean(b), w, w),
    "switch": lambda w, x: lax.switch(1, [lambda a: a.sum(), lambda a: jnp.mean(x @ a @ w)], w),
    "append": lambda w, x: jnp.mean(jnp.append(w, w)) * jnp.mean(x),
    "kron": lambda w, x: jnp.mean(jnp.kron(w, w)) * jnp.mean(x),
    "hypot": lambda w, x: jnp.mean(x @ jnp.hypot(w, w)),
    "where": lambda w, x: jnp.mean(jnp.where(x[:3] > 1, w, w)) * jnp.mean(x),
    "one row": lambda w, x: jnp.mean(w[0][None, :] * x),
    "some rows": lambda w, x: jnp.mean(w[1:] @ x.T) + jnp.mean(w[-1]),
    "dynamic slice": lambda w, x: jnp.mean(lax.dynamic_slice_in_dim(w, 1, 2) @ x.T),
    "optimization barrier": lambda w, x: jnp.mean(x @ lax.optimization_barrier(w)),
    "custom_vjp": None,  # set below
    "returned": lambda w, x: w[0, 0] * 1.0 + jnp.mean(x),
    "while": lambda w, x: jnp.mean(x @ lax.fori_loop(0, 3, lambda _, v: jnp.sin(v), w)),
    "solve": lambda w, x: jnp.mean(jnp.linalg.solve(w + 5 * jnp.eye(3), x.T)),
    "unused": lambda w, x: jnp.mean(x),
    "sort": lambda w, x: jnp.mean(jnp.sort(w, axis=0) * x[:3]),
    "split": lambda w, x: jnp.mean(x @ jnp.concatenate(jnp.split(w, 3, axis=1)[::-1], axis=1)),
    "einsum": lambda w, x: jnp.mean(jnp.einsum("ni,ij,jk->nk", x, w, w)),
}


@jax.custom_vjp
def twice_backwards(w):
    return jnp.sin(w)


twice_backwards.defvjp(lambda w: (jnp.sin(w), w), lambda w, g: (2 * g * jnp.cos(w),))
AS_VALUES["custom_vjp"] = lambda w, x: jnp.mean(x @ twice_backwards(w))

ALL = {**PLAIN, **IN_PLACE, **AS_VALUES}


@pytest.mark.parametrize("microbatch_size", [2, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", [name for name, loss in ALL.items() if loss is not None])
def test_gradient_equals_full_batch_gradient(name, microbatch_size):
    def loss(w, x):  # a mean over examples, whatever the function does with the parameter
        return jnp.mean(jax.vmap(lambda row: ALL[name](w, jnp.broadcast_to(row[None], (8, 3))))(x))

    for fun in (loss, lambda w, x: jnp.mean(x) * ALL[name](w, X)):
        expected = jax.value_and_grad(fun)(W, X)
        actual = jax.jit(ab.value_and_grad(fun, microbatch_size=microbatch_size, reduction="mean"))(W, X)
        chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=1e-6)


def is_written_in_place(loss):
    traced, _ = tracing.trace(lambda w, x: [loss(w, x)], W, X)
    return references.written_in_place(traced, [True])[0]


@pytest.mark.parametrize("name", IN_PLACE)
def test_layers_that_are_scanned_are_written_in_place(name):
    assert is_written_in_place(IN_PLACE[name])


def test_every_plain_primitive_has_a_case_and_uses_it():
    assert set(PLAIN) == references.PLAIN | references.IDENTICAL
    for name, loss in PLAIN.items():
        if loss is not None:
            assert name in str(jax.make_jaxpr(loss)(W, X)), name


@pytest.mark.parametrize("microbatch_size", [4, 5])
@pytest.mark.parametrize("order", [("gate", "scale"), ("scale", "gate")])
@pytest.mark.parametrize("equal", [True, False])
def test_stacked_weights_keep_their_own_gradients(order, equal, microbatch_size):
    """In JAX 0.10, one weight that is accumulated in place beside one that is not were given each other's gradient."""
    shapes = {"gate": (3, 4), "scale": (3, 4) if equal else (3, 1)}
    params = [jax.random.normal(jax.random.key(number), shapes[name]) for number, name in enumerate(order)]

    def loss(params, x):
        def layer(h, stacked):
            row = dict(zip(order, stacked, strict=True))
            return h + jax.nn.sigmoid(row["gate"])[None] * jnp.tanh(h) * row["scale"][None], None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    examples = jax.random.normal(jax.random.key(2), (12, 4))
    expected = jax.value_and_grad(loss)(params, examples)
    actual = ab.value_and_grad(loss, microbatch_size=microbatch_size)(params, examples)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("narrow", ["gate", "scale"])
def test_stacked_weights_of_different_dtypes_keep_their_own_gradients(narrow):
    """The accumulator of a bfloat16 weight is float32, and so it is not given to the scan."""
    params = {
        name: jax.random.normal(jax.random.key(number), (3, 4), jnp.bfloat16 if name == narrow else jnp.float32)
        for number, name in enumerate(["gate", "scale"])
    }

    def loss(params, x):
        def layer(h, row):
            wide = {name: leaf.astype(jnp.float32)[None] for name, leaf in row.items()}
            return h + jnp.sin(wide["gate"]) * jnp.tanh(h * wide["scale"]), None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    examples = jax.random.normal(jax.random.key(2), (12, 4))
    expected = jax.value_and_grad(loss)(params, examples)
    actual = ab.value_and_grad(loss, microbatch_size=4)(params, examples)
    for name, leaf in actual[1].items():
        unit = 2**-8 if name == narrow else 1e-6
        chex.assert_trees_all_close(leaf, expected[1][name], rtol=4 * unit, atol=unit)


class Block(nn.Module):
    """Norms, two layers and a gate: their gradients are written in place, but for that of the gate."""

    @nn.compact
    def __call__(self, h, _):
        inner = nn.Dense(4)(nn.gelu(nn.Dense(6)(nn.LayerNorm()(h))))
        gate = self.param("A", nn.initializers.normal(), (4,))  # before all others in the tree
        return h + nn.sigmoid(gate) * inner, None


class Layers(nn.Module):
    remat: bool

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        h, _ = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()(
            nn.Dense(4)(x), None
        )
        return nn.LayerNorm()(h)


@pytest.mark.full
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_of_flax(model_defaults, remat):
    model, x = Layers(remat), jax.random.normal(jax.random.key(0), (6, 5))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), model.init(jax.random.key(1), x))

    def loss(params, x):
        return jnp.mean(jnp.sin(model.apply(params, x)))

    expected = jax.value_and_grad(loss)(params, x)
    actual = ab.value_and_grad(loss, microbatch_size=2)(params, x)
    chex.assert_trees_all_close(actual, expected, rtol=1e-10, atol=1e-14)


def test_tied_weights_in_a_nested_function_are_not():
    assert not is_written_in_place(AS_VALUES["one array twice in a jit"])
