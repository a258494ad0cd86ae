"""Batches that are passed by keyword: named, bound by the signature, or refused where that would be a guess."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import mesh_of
from cases.per_example_losses import clipped_sum
from per_example.test_factors import assert_close

import anybatch as ab
from anybatch import privacy

pytestmark = pytest.mark.every_jax

W = jnp.array([1.0, -2.0, 0.5])
X = jnp.linspace(-1, 2, 24).reshape(8, 3)
Y = jnp.linspace(3, -1, 8)


def loss(w, x, y):
    """Of one example, and of a batch."""
    return jnp.mean((x @ w - y) ** 2)


def keyword_only(w, *, x, y):
    return loss(w, x, y)


def any_keywords(w, **batch):
    return loss(w, **batch)


EXPECTED = jax.value_and_grad(loss)(W, X, Y)
GRADS = np.asarray(jax.vmap(jax.grad(loss), (None, 0, 0))(W, X, Y))
CLIP = float(np.median(np.linalg.norm(GRADS, axis=1)))


def text_of(call):
    with pytest.raises(ab.InputError) as caught:
        call()
    return str(caught.value)


WAYS = {
    "named": ({"batch_argnames": "y"}, lambda fun: fun(W, X, y=Y)),
    "all_named": ({"batch_argnames": ("y", "x")}, lambda fun: fun(W, x=X, y=Y)),
    "named_by_position": ({"batch_argnames": ("x", "y")}, lambda fun: fun(W, X, Y)),
    "bound": ({"batch_argnums": (1, 2)}, lambda fun: fun(W, X, y=Y)),
    "all_bound": ({"batch_argnums": (1, 2)}, lambda fun: fun(W, y=Y, x=X)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["vmap", "factored"])
def test_every_example_gets_its_row(way, method):
    options, call = WAYS[way]
    options = {**options, "method": method, "microbatch_size": 3}
    np.testing.assert_allclose(call(ab.per_example_grads(loss, **options)), GRADS, rtol=1e-5)
    clipped = ab.clipped_grad(loss, clip_norm=CLIP, **options)
    for fun in (clipped, jax.jit(clipped)):
        assert_close(call(fun), clipped_sum(GRADS, CLIP), rtol=1e-5)
    spread = ab.clipped_grad(loss, clip_norm=CLIP, **{**options, "microbatch_size": 1}, mesh=mesh_of(4))
    assert_close(call(spread), clipped_sum(GRADS, CLIP), rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["infer", "mean"])
def test_every_microbatch_gets_its_rows(way, reduction):
    options, call = WAYS[way]
    options = {**options, "reduction": reduction}
    value, grad = call(ab.value_and_grad(loss, microbatch_size=1, mesh=mesh_of(2), **options))
    np.testing.assert_allclose(value, EXPECTED[0], rtol=1e-6)
    np.testing.assert_allclose(grad, EXPECTED[1], rtol=1e-5)
    np.testing.assert_allclose(call(ab.grad(loss, microbatch_size=3, **options)), EXPECTED[1], rtol=1e-5)


@pytest.mark.parametrize("fun", [keyword_only, any_keywords])
def test_a_batch_that_can_only_be_passed_by_keyword(fun):
    options = {"batch_argnums": (), "batch_argnames": ("x", "y"), "microbatch_size": 3}
    np.testing.assert_allclose(ab.per_example_grads(fun, **options)(W, x=X, y=Y), GRADS, rtol=1e-5)
    np.testing.assert_allclose(ab.value_and_grad(fun, **options)(W, x=X, y=Y)[1], EXPECTED[1], rtol=1e-5)
    text = text_of(lambda: ab.grad(fun, batch_argnames=("x", "y"))(W, x=X, y=Y))
    assert text.endswith("name it: batch_argnums=(), batch_argnames=...")


def test_trees_and_names_in_messages():
    def of_tree(w, batch, extra):
        return loss(w, batch["x"], extra["y"])

    fun = ab.per_example_grads(of_tree, batch_argnames="extra")
    np.testing.assert_allclose(fun(W, {"x": X}, extra={"y": Y}), GRADS, rtol=1e-5)
    assert "    batch['x']: 8\n    extra['y']: 7\n" in text_of(lambda: fun(W, {"x": X}, extra={"y": Y[:7]}))


def test_an_argument_that_is_left_out_for_its_default():
    def with_default(w, x, y=None):
        return loss(w, x, jnp.zeros(x.shape[:-1]) if y is None else y)

    fun = ab.per_example_grads(with_default, batch_argnames="y")
    np.testing.assert_allclose(fun(W, X, y=Y), GRADS, rtol=1e-5)
    np.testing.assert_allclose(fun(W, X), jax.vmap(jax.grad(loss), (None, 0, 0))(W, X, 0 * Y), rtol=1e-5)


def test_keys_that_are_passed_by_keyword():
    def noisy(w, x, key):
        return loss(w, x + jax.random.normal(key, x.shape), jnp.zeros(x.shape[:-1]))

    fun = ab.per_example_grads(noisy, rng_argnums=2)
    np.testing.assert_array_equal(fun(W, X, key=jax.random.key(0)), fun(W, X, jax.random.key(0)))
    assert "Pass the key by position" in text_of(lambda: ab.per_example_grads(noisy)(W, X, key=jax.random.key(0)))


@pytest.mark.parametrize("way", WAYS)
def test_the_other_functions(way):
    options, call = WAYS[way]
    bind = functools.partial(functools.partial, **options)
    assert call(bind(ab.read, loss)).kind == "mean over 8 examples"
    assert call(bind(ab.plan, loss, timed=False)).num_examples == 8
    assert call(bind(ab.explain, loss, timed=False)).num_examples == 8
    assert call(bind(ab.verify, loss, reduction="mean", microbatch_sizes=(1, 3))).ok
    for exact in (False, True):
        _, grad, noise = call(ab.noise_scale(loss, exact=exact, microbatch_size=1, **options))
        np.testing.assert_allclose(grad, EXPECTED[1], rtol=1e-5)
        np.testing.assert_allclose(noise.trace, np.var(GRADS, axis=0, ddof=1).sum(), rtol=1e-4)


@pytest.mark.parametrize("reduction", ["infer", "mean"])
@pytest.mark.parametrize("devices", [None, 4])
def test_a_step_of_training(reduction, devices):
    optax = pytest.importorskip("optax")
    options = {"reduction": reduction, "batch_argnames": "y", "microbatch_size": 1}
    mesh = None if devices is None else mesh_of(devices)
    step = ab.train_step(loss, optax.sgd(1.0), **options, mesh=mesh, donate=False)
    state, metrics = step(step.init(W), X, y=Y)
    np.testing.assert_allclose(metrics.loss, EXPECTED[0], rtol=1e-6)
    np.testing.assert_allclose(state.params, W - EXPECTED[1], rtol=1e-5)


# What is refused.

PER_EXAMPLE = [
    ab.per_example_grads,
    ab.per_example_norms,
    functools.partial(ab.clipped_grad, clip_norm=1.0),
    functools.partial(ab.clipped_value_and_grad, clip_norm=1.0),
]


@pytest.mark.parametrize("wrap", PER_EXAMPLE)
def test_a_keyword_with_a_row_for_each_example_is_not_guessed_about(wrap):
    text = (
        "An array with as many rows as the batch has examples must be part of the batch, or closed over, got "
        "y = float32[8] for 8 examples; every example would see all of its rows.\n"
        'Pass batch_argnames="y" to give each example its row. If every example should see all rows, close over it: '
        "functools.partial(loss, y=...)."
    )
    assert text_of(lambda: wrap(loss)(W, X, y=Y)) == text
    assert text_of(lambda: jax.jit(wrap(loss))(W, X, y=Y)) == text
    assert text_of(lambda: wrap(loss, mesh=mesh_of(2), microbatch_size=None)(W, X, y=Y)) == text
    assert "Pass batch_argnums=(1, 2) to give each example its row" in text_of(lambda: wrap(loss)(W, X, Y))
    assert text_of(lambda: wrap(lambda *args: loss(*args))(W, X, Y)).endswith("see all rows, close over it.")
    assert text_of(lambda: ab.plan(wrap(loss), W, X, y=Y)) == text
    wrap(functools.partial(loss, y=Y))(W, X)  # the other way out


def test_the_refusal_prevents_another_sum():
    """The control: what came out when every example saw all rows."""
    wrong = ab.clipped_grad(functools.partial(loss, y=Y), clip_norm=CLIP)(W, X)
    assert np.max(np.abs(wrong / clipped_sum(GRADS, CLIP) - 1)) > 0.1


def test_what_is_no_part_of_the_batch_is_left_alone():
    """Trees by position, arrays of other lengths, numbers, keys; and a single example has nothing to confuse."""

    def frozen(w, x, layers, key=None, scale=1.0, table=None):
        return jnp.mean(jnp.tanh(x @ w) * layers["b"]) * scale + 0 * jnp.sum(table)

    fun = ab.per_example_norms(frozen)
    layers, table = {"b": jnp.ones(8)}, jnp.ones(7)
    assert fun(W, X, layers, scale=2.0, table=table).shape == (8,)
    assert fun(W, X[:2], layers, jax.random.PRNGKey(0), table=table).shape == (2,)
    assert fun(W, X[:1], layers, table=jnp.ones(1)).shape == (1,)
    assert "table = float32[8]" in text_of(lambda: fun(W, X, layers, table=jnp.ones(8)))


def test_declared_reductions_do_not_broadcast_a_batch_by_keyword():
    declared = functools.partial(ab.value_and_grad, loss, reduction="mean")
    text = text_of(lambda: declared(microbatch_size=1)(W, X, y=Y))
    assert "y = float32[8] for 8 examples; every microbatch would see all of its rows" in text
    for size in (2, 8, "auto"):  # whether it is refused does not depend on the plan
        assert text_of(lambda size=size: declared(microbatch_size=size)(W, X, y=Y)) == text
    np.testing.assert_allclose(declared(microbatch_size=None)(W, X, y=Y)[1], EXPECTED[1], rtol=1e-6)
    np.testing.assert_allclose(ab.grad(loss, microbatch_size=1)(W, X, y=Y), EXPECTED[1], rtol=1e-5)  # is read
    # The control: what came out when every microbatch saw all rows.
    wrong = ab.grad(functools.partial(loss, y=Y), reduction="mean", microbatch_size=1)(W, X)
    assert np.max(np.abs(wrong / EXPECTED[1] - 1)) > 0.1


@pytest.mark.parametrize(
    "options, text",
    [
        ({"batch_argnames": 1}, "batch_argnames must be the name of an argument, or a tuple of names, got"),
        ({"batch_argnames": ("x", 2)}, "batch_argnames=('x', 2)"),
        ({"batch_argnames": "labels"}, "batch_argnames must be names of arguments of the loss, got"),
        ({"batch_argnames": "labels"}, "Choose from 'w', 'x', 'y'."),
        ({"batch_argnames": "w"}, "position 0 in argnums and in batch_argnames"),
        ({"batch_argnames": "y", "rng_argnums": 2}, "argument 'y' in rng_argnums and in batch_argnames"),
        ({"batch_argnums": ()}, "batch_argnums must be the position of an argument, or a tuple of positions"),
        ({"argnums": 2}, "argnums must be among the 2 positional arguments of the call"),
    ],
)
def test_names_that_are_none(options, text):
    assert text in text_of(lambda: ab.value_and_grad(loss, microbatch_size=2, **options)(W, X, y=Y))
    assert text in text_of(lambda: ab.per_example_norms(loss, **options)(W, X, y=Y))


def test_a_private_gradient_counts_the_rows_of_a_batch_by_keyword():
    options = {"clip_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 2, "num_examples": 100}
    names = {"batch_argnums": (), "batch_argnames": ("x", "y")}
    own = {"noise_key": jax.random.key(7), "is_padding": np.zeros(8, bool)}
    fun = privacy.private_grad(keyword_only, **options, **names, max_batch_size=7, allow_key_reuse=True)
    assert "8 rows and max_batch_size=7" in text_of(lambda: fun(W, x=X, y=Y, **own))
    assert fun(W, x=X[:7], y=Y[:7], **{**own, "is_padding": np.zeros(7, bool)}).shape == (3,)
    unnamed = privacy.private_grad(loss, **options, allow_key_reuse=True)
    text = text_of(lambda: unnamed(W, X, y=Y, **own))
    assert "An argument with one row for each example must be part of the batch" in text and "y = float32[8" in text
