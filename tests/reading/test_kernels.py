"""Primitives that are not JAX's everyday ones: kernels, and those that a user teaches."""

import functools

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.interpreters import ad, mlir

import anybatch as ab
from anybatch.reading.rules import RULES

pytestmark = pytest.mark.every_jax

X = np.linspace(-1.0, 1.0, 6 * 4 * 3).reshape(6, 4, 3)


def assert_exact(loss, params, x, *rest, sizes=(2, 4)):
    expected = jax.value_and_grad(loss)(params, x, *rest)
    for size in sizes:
        actual = ab.value_and_grad(loss, microbatch_size=size)(params, x, *rest)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), actual, expected)


def blocks(shape, index):
    return pl.BlockSpec((None, 2, shape[2]) if len(shape) == 3 else (2, shape[1]), index)


EACH, SHARED = (lambda i, j: (i, j, 0)), (lambda i, j: (j, 0))


def forward_kernel(x_ref, w_ref, out_ref):
    out_ref[...] = jnp.tanh(x_ref[...] * w_ref[...])


def backward_kernel(x_ref, w_ref, g_ref, dx_ref, dw_ref):
    out = jnp.tanh(x_ref[...] * w_ref[...])
    slope = (1 - out * out) * g_ref[...]
    dx_ref[...] = slope * w_ref[...]
    dw_ref[...] = slope * x_ref[...]


def call_kernel(kernel, num_outputs, x, w, *more, index=EACH):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        kernel,
        out_shape=[shape] * num_outputs,
        grid=(x.shape[0], x.shape[1] // 2),
        in_specs=[blocks(x.shape, index), blocks(w.shape, SHARED), *(blocks(x.shape, EACH) for _ in more)],
        out_specs=[blocks(x.shape, EACH)] * num_outputs,
        interpret=True,
    )(x, w, *more)


@jax.custom_vjp
def scaled_tanh(x, w):
    return call_kernel(forward_kernel, 1, x, w)[0]


def scaled_tanh_forward(x, w):
    return scaled_tanh(x, w), (x, w)


def scaled_tanh_backward(saved, cotangent):
    x, w = saved
    dx, dw = call_kernel(backward_kernel, 2, x, w, cotangent)
    return dx, dw.sum(0)


scaled_tanh.defvjp(scaled_tanh_forward, scaled_tanh_backward)


def test_a_pallas_kernel_with_a_backward_pass_of_its_own():
    def loss(params, x):
        return jnp.mean(scaled_tanh(x * params["scale"], params["w"]) ** 2)

    params = {"scale": jnp.asarray(1.3), "w": jnp.linspace(0.1, 1.0, 12).reshape(4, 3)}
    x = jnp.asarray(X, jnp.float32)
    reading = ab.read(loss, params, x)
    assert (reading.passes, reading.blame) == (1, ())
    assert_exact(loss, params, x)


def test_a_pallas_kernel_under_vmap():
    def one(row, w):
        shape = jax.ShapeDtypeStruct(row.shape, row.dtype)
        return pl.pallas_call(forward_kernel, out_shape=shape, interpret=True)(row, w)

    def loss(scale, x):
        hidden = jax.vmap(one, in_axes=(0, None))(x, jnp.ones((4, 3)))
        return jnp.mean((hidden * scale) ** 2)

    x = jnp.asarray(X, jnp.float32)
    assert ab.read(loss, 1.5, x).passes == 1
    assert_exact(loss, 1.5, x)


def reads_another(i, j):
    return (5 - i, j, 0)


def test_a_pallas_kernel_that_reads_other_examples_is_not_taken_apart():
    def loss(scale, x):
        hidden = call_kernel(forward_kernel, 1, x, jnp.ones((4, 3)), index=reads_another)[0]
        return jnp.mean(hidden * x * scale)

    x = jnp.asarray(X, jnp.float32)
    assert_exact(loss, 1.5, x)
    moving = ab.read(lambda scale, x: loss(scale, jax.lax.stop_gradient(x * scale)), 1.5, x)
    assert "kernel" in moving.blame[0].why


def position_kernel(x_ref, w_ref, out_ref):
    out_ref[...] = x_ref[...] * w_ref[...] * (pl.program_id(0) + 1).astype(jnp.float32)


def test_a_pallas_kernel_that_asks_for_the_position_is_not_taken_apart():
    def loss(scale, x):
        hidden = call_kernel(position_kernel, 1, x, jnp.ones((4, 3)))[0]
        return jnp.mean(hidden * scale)

    assert_exact(loss, 1.5, jnp.asarray(X, jnp.float32))


def cudnn_attention(q, k, v):
    """The primitive that cuDNN's attention is made of, which can be traced anywhere."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    more = {"score_mod": None} if "score_mod" in cudnn._dot_product_attention_fwd_abstract.__code__.co_varnames else {}
    absent = jnp.zeros(0, q.dtype)
    return cudnn._dot_product_attention_fwd_p_wrapper.bind(
        *(q, k, v, *[absent] * 7),
        **{"scale": 1.0, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False)},
        **{"mask_type": cudnn.MaskType.CAUSAL, "layout": cudnn.AttentionLayout.BTNH.value},
        **{"sliding_window_length": None, "is_training": False, **more},
    )[0]


def test_cudnn_attention_keeps_examples_apart():
    def loss(w, x):
        q = (x * w).astype(jnp.bfloat16).reshape(6, 8, 2, 64)
        out = cudnn_attention(jax.lax.stop_gradient(q), q, q)
        return jnp.mean(jax.lax.stop_gradient(out).astype(jnp.float32) * x.reshape(6, 8, 2, 64) * w)

    reading = ab.read(loss, jnp.ones(()), jax.ShapeDtypeStruct((6, 1024), jnp.float32))
    assert (reading.kind, reading.passes, reading.blame) == ("mean over 6 examples", 1, ())


@pytest.fixture
def cube_p():
    """A primitive that nobody has heard of."""
    primitive = jex_core.Primitive("cube_of_mine")
    primitive.def_abstract_eval(lambda x: x)
    primitive.def_impl(lambda x: x**3)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x**3, multiple_results=False))
    ad.defjvp(primitive, lambda tangent, x: tangent * 3 * x**2)
    yield primitive
    RULES.pop("cube_of_mine", None)


def test_an_unknown_primitive_is_named_and_still_right(cube_p):
    def loss(w, x):
        return jnp.mean(cube_p.bind(x * w))

    blame = ab.read(loss, 1.5, jnp.asarray(X, jnp.float32)).blame[0]
    assert blame.primitive == "cube_of_mine" and "no rule" in blame.why
    assert 'anybatch.register_rule("cube_of_mine", rule)' in str(ab.read(loss, 1.5, jnp.asarray(X, jnp.float32)))
    assert_exact(loss, 1.5, jnp.asarray(X, jnp.float32))


def test_an_unknown_primitive_in_a_custom_backward_pass_is_the_one_to_teach(cube_p):
    @jax.custom_vjp
    def function(x):
        return 2 * x

    function.defvjp(lambda x: (2 * x, x), lambda x, seed: (seed * cube_p.bind(x),))

    reading = ab.read(lambda w, x: jnp.mean(function(x * w)), 1.5, jnp.asarray(X, jnp.float32))
    assert "its custom backward pass combines examples" in reading.blame[0].why
    assert 'anybatch.register_rule("cube_of_mine", rule)' in str(reading)


def test_a_primitive_can_be_taught(cube_p):
    def loss(w, x):
        return jnp.mean(cube_p.bind(x * w))

    ab.register_rule(cube_p, lambda axes, params: axes)
    reading = ab.read(loss, 1.5, jnp.asarray(X, jnp.float32))
    assert (reading.kind, reading.passes, reading.blame) == ("mean over 6 examples", 1, ())
    assert_exact(loss, 1.5, jnp.asarray(X, jnp.float32))


def test_a_rule_that_cannot_be_is_not_believed(cube_p):
    ab.register_rule(cube_p, lambda axes, params: [1])
    reading = ab.read(lambda w, x: jnp.mean(cube_p.bind(x * w)), 1.5, jnp.asarray(X, jnp.float32))
    assert "its rule says that a result of shape (6, 4, 3) has rows along axis 1" in reading.blame[0].why


def test_a_rule_may_refuse(cube_p):
    def rule(axes, params):
        raise ab.NotRowwise("it is only cubes on Sundays")

    ab.register_rule("cube_of_mine", rule)
    reading = ab.read(lambda w, x: jnp.mean(cube_p.bind(x * w)), 1.5, jnp.asarray(X, jnp.float32))
    assert reading.blame[0].why == "it is only cubes on Sundays"


def test_register_rule_needs_a_primitive_and_a_function():
    with pytest.raises(ab.InputError, match="register_rule needs a primitive"):
        ab.register_rule(3, lambda axes, params: axes)
    with pytest.raises(ab.InputError, match="register_rule needs a primitive"):
        ab.register_rule("mine", "rows")


# A mixture of experts without a limit to their tokens: sorted, multiplied in groups, and put back.

EXPERTS, CHOSEN, WIDTH = 3, 2, 4


def routed(params, x):
    hidden = x.reshape(-1, WIDTH)
    weights, experts = jax.lax.top_k(jax.nn.softmax(hidden @ params["router"]), CHOSEN)
    return hidden, weights, experts.reshape(-1)


def experts_by_inverse(params, x, count=lambda flat: jnp.bincount(flat, length=EXPERTS)):
    hidden, weights, flat = routed(params, x)
    order = jnp.argsort(flat)
    sizes = count(flat).astype(jnp.int32)
    inner = jax.nn.silu(jax.lax.ragged_dot(hidden[order // CHOSEN], params["up"], sizes))
    out = jax.lax.ragged_dot(inner, params["down"], sizes)[jnp.argsort(order)]
    return jnp.sum(out.reshape(-1, CHOSEN, WIDTH) * weights[..., None], axis=1).reshape(x.shape)


def experts_by_addition(params, x):
    hidden, weights, flat = routed(params, x)
    order = jnp.argsort(flat)
    tokens = order // CHOSEN
    sizes = jax.nn.one_hot(flat, EXPERTS, dtype=jnp.int32).sum(0)
    inner = jax.nn.gelu(jax.lax.ragged_dot(jnp.take(hidden, tokens, axis=0), params["up"], sizes))
    out = jax.lax.ragged_dot(inner, params["down"], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(hidden).at[tokens].add(out).reshape(x.shape)


def experts_that_overflow(params, x):
    """Groups that are cut off at a number of tokens: who is cut off depends on the whole batch."""
    return experts_by_inverse(params, x, lambda flat: jnp.minimum(jnp.bincount(flat, length=EXPERTS), 3))


def experts_with_noise_by_place(params, x):
    """What is added depends on where a token comes to lie among those of the whole batch."""
    hidden, _, flat = routed(params, x)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=EXPERTS).astype(jnp.int32)
    noisy = hidden[order // CHOSEN] + jnp.linspace(0.0, 1.0, flat.size)[:, None]
    out = jax.lax.ragged_dot(jax.lax.ragged_dot(noisy, params["up"], sizes), params["down"], sizes)
    return out[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH).sum(1).reshape(x.shape)


def experts_some_of_whom_are_nobody(params, x):
    """Tokens for an expert of number -1, whom nobody counts, push the groups of the others about."""
    hidden, _, flat = routed(params, x)
    flat = flat - 1
    order = jnp.argsort(flat)
    sizes = jax.nn.one_hot(flat, EXPERTS, dtype=jnp.int32).sum(0)
    out = jax.lax.ragged_dot(jax.lax.ragged_dot(hidden[order // CHOSEN], params["up"], sizes), params["down"], sizes)
    return out[jnp.argsort(order)].reshape(-1, CHOSEN, WIDTH).sum(1).reshape(x.shape)


def experts_by_the_largest_value(params, x):
    """Sorted by what `top_k` found to be largest, not by where: values may be negative, or too large."""
    hidden = x.reshape(-1, WIDTH)
    values, _ = jax.lax.top_k(jnp.round(2 * (hidden @ params["router"])).astype(jnp.int32), 1)
    flat = values.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jax.nn.one_hot(flat, EXPERTS, dtype=jnp.int32).sum(0)
    out = jax.lax.ragged_dot(jax.lax.ragged_dot(hidden[order], params["up"], sizes), params["down"], sizes)
    return out[jnp.argsort(order)].reshape(x.shape)


def experts_problem(layer):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, 5), "down": (EXPERTS, 5, WIDTH)}
    params = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    x = jax.random.normal(keys[3], (6, 7, WIDTH))
    return (lambda params, x: jnp.mean(jnp.sum((x + layer(params, x)) ** 2, axis=(1, 2)))), params, x


@pytest.mark.full
@pytest.mark.parametrize("layer", [experts_by_inverse, experts_by_addition])
def test_tokens_sorted_by_expert_take_one_pass(layer, float64):
    loss, params, x = experts_problem(layer)
    reading = ab.read(loss, params, x)
    assert (reading.kind, reading.passes, reading.blame) == ("mean over 6 examples", 1, ())
    assert_exact(loss, params, x, sizes=(1, 4))


@pytest.mark.full
@pytest.mark.parametrize(
    "layer",
    [
        experts_by_the_largest_value,
        experts_that_overflow,
        experts_with_noise_by_place,
        experts_some_of_whom_are_nobody,
    ],
)
def test_tokens_whose_place_matters_are_not_taken_apart(layer, float64):
    loss, params, x = experts_problem(layer)
    reading = ab.read(loss, params, x)
    assert reading.kind == "couples examples" and reading.blame[0].why == "it sorts the examples"
    assert_exact(loss, params, x, sizes=(4,))
