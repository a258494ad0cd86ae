"""Per-example gradients, norms and clipped sums, with all their options."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.per_example_losses import CASES, clipped_sum, dense, gradients, norms_of
from per_example.test_factors import assert_close, cancelling, cancelling_batch

import anybatch as ab
from anybatch.per_example import forms

pytestmark = pytest.mark.every_jax

CASE = next(case for case in CASES if case.name == "dense_over_tokens")
METHODS = (pytest.param("vmap", marks=pytest.mark.slow), "factored")


@functools.cache
def problem(dtype="float64", number=7):
    """Parameters, a batch, the oracle's gradients, their norms, and a bound that half of them exceed."""
    with jax.enable_x64(dtype == "float64"):
        params, batch = CASE.params(dtype), CASE.batch(number, dtype)
        grads = jax.tree.map(np.asarray, gradients(dense, params, batch))
    norms = norms_of(grads)
    return params, batch, grads, norms, float(np.median(norms))


@pytest.mark.parametrize("method", ["vmap", "factored"])
@pytest.mark.parametrize("size", [3, *(pytest.param(size, marks=pytest.mark.full) for size in (1, None, 9, "auto"))])
def test_results_do_not_depend_on_the_microbatches(float64, method, size):
    params, batch, grads, norms, clip_norm = problem()
    options = {"method": method, "microbatch_size": size}

    each = ab.per_example_grads(dense, **options)(params, batch)
    chex.assert_trees_all_close(each, grads, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(ab.per_example_norms(dense, **options)(params, batch), norms, rtol=1e-12)
    total = jax.jit(ab.clipped_grad(dense, clip_norm=clip_norm, **options))(params, batch)
    assert_close(total, clipped_sum(grads, clip_norm), rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_all_that_is_asked_for_is_returned(float64, method):
    params, batch, grads, norms, clip_norm = problem()
    losses = jax.vmap(dense, (None, 0))(params, batch)

    def with_aux(params, x):
        return dense(params, x), {"mean": jnp.mean(x), "x": x}

    options = {"clip_norm": clip_norm, "method": method, "microbatch_size": 3, "normalize_by": 10.0}
    total = jax.tree.map(lambda leaf: leaf / 10, clipped_sum(grads, clip_norm))
    plain, aux = ab.clipped_grad(with_aux, has_aux=True, **options)(params, batch)
    assert_close(plain, total, rtol=1e-12)
    np.testing.assert_array_equal(aux["x"], batch)
    np.testing.assert_allclose(aux["mean"], batch.mean((1, 2)), rtol=1e-12)

    _, beside = ab.clipped_grad(with_aux, has_aux=True, return_values=True, return_norms=True, **options)(params, batch)
    assert isinstance(beside, ab.PerExample)
    np.testing.assert_allclose(beside.values, losses, rtol=1e-12)
    np.testing.assert_allclose(beside.norms, norms, rtol=1e-12)
    np.testing.assert_array_equal(beside.aux["x"], batch)

    value, plain = ab.clipped_value_and_grad(dense, **options)(params, batch)
    np.testing.assert_allclose(value, losses.sum() / 10, rtol=1e-12)
    assert_close(plain, total, rtol=1e-12)
    (value, aux), _ = ab.clipped_value_and_grad(with_aux, has_aux=True, **options)(params, batch)
    assert set(aux) == {"mean", "x"}
    (_, beside), _ = ab.clipped_value_and_grad(dense, return_norms=True, **options)(params, batch)
    assert beside.values is None and beside.aux is None


@pytest.mark.parametrize("method", METHODS)
def test_norms_of_single_parameters(float64, method):
    params, batch, grads, _, _ = problem()
    found = ab.per_example_norms(dense, per_leaf=True, method=method, microbatch_size=4)(params, batch)
    chex.assert_trees_all_close(found, jax.tree.map(norms_of, grads), rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_losses_that_are_written_for_batches(float64, method):
    params, batch, grads, _, clip_norm = problem()

    def mean(params, batch):
        assert batch.ndim == 3 and batch.shape[0] == 1
        return jnp.mean(jax.vmap(dense, (None, 0))(params, batch))

    fun = ab.clipped_grad(mean, clip_norm=clip_norm, keep_batch_dim=True, method=method, microbatch_size=3)
    assert_close(fun(params, batch), clipped_sum(grads, clip_norm), rtol=1e-12)


def test_several_arguments(float64):
    """argnums in another order, the batch elsewhere, keyword arguments, a closed-over array."""
    params, batch, *_ = problem()
    shift = jnp.asarray(0.5)

    def loss(x, w, b, *, power):
        return jnp.sum(jnp.abs(jnp.tanh(x @ w + jnp.broadcast_to(b, (4, 7))) + shift) ** power)

    w, b = params["w"], params["b"]
    expected = jax.vmap(jax.grad(functools.partial(loss, power=3), (2, 1)), (0, None, None))(batch, w, b)
    norms = norms_of(expected)
    fun = ab.clipped_grad(loss, (2, 1), batch_argnums=0, clip_norm=1.0, microbatch_size=2, return_norms=True)
    total, beside = fun(batch, w, b, power=3)
    assert isinstance(total, tuple)
    assert_close(total, clipped_sum(expected, 1.0), rtol=1e-12)
    np.testing.assert_allclose(beside.norms, norms, rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_every_example_draws_numbers_of_its_own(float64, method):
    params, batch, *_ = problem()

    def loss(params, x, key):
        return dense(params, jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0))

    key = jax.random.key(3)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(7))
    expected = norms_of(jax.vmap(jax.grad(loss), (None, 0, 0))(params, batch, keys))
    for size in (2, 7):
        fun = ab.per_example_norms(loss, rng_argnums=2, microbatch_size=size, method=method)
        np.testing.assert_allclose(fun(params, batch, key), expected, rtol=1e-12)
    with pytest.raises(ab.InputError, match="rng_argnums=2"):
        ab.per_example_norms(loss)(params, batch, key)
    with pytest.raises(ab.InputError, match="threefry2x32"):  # rbg draws for all examples together
        ab.per_example_norms(loss, rng_argnums=2)(params, batch, jax.random.key(3, impl="rbg"))


def calls_of(loss):
    """A loss that counts for how many examples it was computed."""
    seen = []

    def count(x):
        seen.append(1)
        return x

    def counted(params, x):
        shape = jax.ShapeDtypeStruct((), x.dtype)
        return loss(params, x) + 0 * jax.pure_callback(
            count, shape, jax.lax.stop_gradient(x[0, 0]), vmap_method="sequential"
        )

    return counted, seen


@pytest.mark.parametrize("method", METHODS)
def test_padding_counts_for_nothing_and_is_skipped(float64, method):
    params, batch, grads, norms, clip_norm = problem()
    is_padding = jnp.asarray([False, True, False, True, True, True, True])
    batch = batch.at[4].set(jnp.nan)
    counted, seen = calls_of(dense)
    options = {"method": method, "microbatch_size": 2}

    fun = ab.clipped_value_and_grad(counted, clip_norm=clip_norm, return_norms=True, **options)
    (value, beside), total = fun(params, batch, is_padding=is_padding)
    jax.block_until_ready(total)

    assert_close(total, clipped_sum(grads, clip_norm, ~np.asarray(is_padding)), rtol=1e-12)
    np.testing.assert_allclose(beside.norms, np.where(is_padding, 0, norms), rtol=1e-12)
    losses = jax.vmap(dense, (None, 0))(params, batch)
    np.testing.assert_allclose(value, losses[0] + losses[2], rtol=1e-12)
    assert 0 < len(seen) <= 4  # two microbatches of four, of which one is ragged
    none = fun(params, batch.at[:2].set(jnp.nan).at[2:].set(jnp.inf), is_padding=is_padding)[1]
    assert not any(leaf.any() for leaf in jax.tree.leaves(none))

    each = ab.per_example_grads(dense, **options)(params, batch, is_padding=is_padding)
    expected = jax.tree.map(lambda leaf: leaf * ~np.asarray(is_padding).reshape(-1, *[1] * (leaf.ndim - 1)), grads)
    chex.assert_trees_all_close(each, expected, rtol=1e-12)


@pytest.mark.parametrize("method", ["vmap", "factored"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_an_example_that_is_not_finite_counts_for_nothing(float64, method, bad):
    """Also an example whose gradient is finite and whose squared norm overflows."""
    params, batch, _, _, clip_norm = problem()

    def loss(params, x):
        return dense(params, x) * jnp.max(jnp.abs(x)) if bad == 1e200 else dense(params, x)

    spoilt = batch.at[2].set(bad).at[5].set(bad)
    clean = gradients(loss, params, batch)
    counts = np.ones(7)
    counts[[2, 5]] = 0
    fun = ab.clipped_grad(loss, clip_norm=clip_norm, method=method, microbatch_size=3)
    assert_close(fun(params, spoilt), clipped_sum(clean, clip_norm, counts), rtol=1e-12)

    careless = ab.clipped_grad(loss, clip_norm=clip_norm, method=method, microbatch_size=3, nan_safe=False)
    assert np.isnan(careless(params, spoilt)["w"]).any()  # the control

    for leaf in jax.tree.leaves(fun(params, jnp.full_like(batch, bad))):
        np.testing.assert_array_equal(leaf, 0)


@pytest.mark.full
@pytest.mark.parametrize("method", ["vmap", "factored"])
def test_convolutions_keep_what_is_not_finite_to_its_example(float64, method):
    """XLA multiplies examples by zero, to compute their convolutions as one."""
    generator = np.random.default_rng(0)
    params = {"w": generator.standard_normal((6, 7)), "kernel": generator.standard_normal((3, 1, 2))}
    batch = generator.standard_normal((8, 6))

    def loss(params, x):
        hidden = jnp.tanh(x @ params["w"])[None, :, None]
        layout = ("NWC", "WIO", "NWC")
        found = jax.lax.conv_general_dilated(hidden, params["kernel"], (1,), "SAME", dimension_numbers=layout)
        return jnp.sum(jnp.sin(found))

    others = np.arange(8) != 3
    spoilt = np.where(others[:, None], batch, np.nan)
    plain = jax.vmap(jax.grad(loss), (None, 0))(params, spoilt)["kernel"]
    assert not np.isfinite(plain).any()  # the control: all examples are spoilt
    grads = gradients(loss, params, batch)
    norms = norms_of(grads)
    each = ab.per_example_grads(loss, method=method, microbatch_size=3, nan_safe=False)(params, spoilt)
    chex.assert_trees_all_close(*(jax.tree.map(lambda leaf: leaf[others], tree) for tree in (each, grads)), rtol=1e-12)
    found = ab.per_example_norms(loss, method=method, microbatch_size=3, nan_safe=False)(params, spoilt)
    np.testing.assert_allclose(found[others], norms[others], rtol=1e-12)
    assert np.isnan(found[3])
    fun = ab.clipped_grad(loss, clip_norm=float(np.median(norms)), method=method, microbatch_size=3)
    expected = clipped_sum(grads, float(np.median(norms)), others)
    assert_close(fun(params, spoilt), expected, rtol=1e-12)
    assert_close(fun(params, spoilt, is_padding=~others), expected, rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_nothing_at_all(method):
    """No examples; and examples whose gradients are 0."""
    params, batch, *_ = problem("float32")
    fun = ab.clipped_value_and_grad(dense, clip_norm=1.0, method=method, microbatch_size=2, return_norms=True)
    for examples, padding in ((batch[:0], None), (jnp.zeros_like(batch), None), (batch, jnp.ones(7, bool))):
        no_bias = {**params, "b": jnp.zeros(7)}
        (value, beside), total = fun(no_bias, examples, is_padding=padding)
        chex.assert_trees_all_equal(total, jax.tree.map(jnp.zeros_like, params))
        assert value == 0 and not beside.norms.any() and beside.norms.shape == (len(examples),)
    assert ab.per_example_grads(dense, method=method)(params, batch[:0])["w"].shape == (0, 5, 7)


@pytest.mark.parametrize("method", METHODS)
def test_norms_of_float16_do_not_underflow(method):
    """Squares of these factors are 0 in float16, and an example with a norm of 0 would not be clipped."""
    w, x = jnp.ones((16, 16), jnp.float16), jnp.full((3, 16), 1e-4, jnp.float16)

    def loss(w, x):
        return jnp.sum(x @ w)

    (exact,) = {16e-4 * 1.0}
    assert jnp.sum(jnp.square(x[0])) == 0  # the control
    np.testing.assert_allclose(ab.per_example_norms(loss, method=method)(w, x), exact, rtol=2e-3)
    total = ab.clipped_grad(loss, clip_norm=exact / 4, method=method)(w, x)
    assert total.dtype == jnp.float16
    np.testing.assert_allclose(np.linalg.norm(np.asarray(total, np.float64)), 3 * exact / 4, rtol=5e-3)


def test_transforms_are_clipped_and_summed_or_kept(float64):
    params, batch, grads, _, _ = problem()

    def halves(grad):
        return {"half": grad["w"] / 2, "signs": jnp.sign(grad["b"])}

    expected = {"half": grads["w"] / 2, "signs": np.sign(grads["b"])}
    options = {"transform": halves, "microbatch_size": 3}
    chex.assert_trees_all_close(ab.per_example_grads(dense, **options)(params, batch), expected, rtol=1e-12)
    np.testing.assert_allclose(ab.per_example_norms(dense, **options)(params, batch), norms_of(expected), rtol=1e-12)
    by_leaf = ab.per_example_norms(dense, per_leaf=True, **options)(params, batch)
    chex.assert_trees_all_close(by_leaf, jax.tree.map(norms_of, expected), rtol=1e-12)
    total = ab.clipped_grad(dense, clip_norm=2.0, **options)(params, batch)
    assert_close(total, clipped_sum(expected, 2.0), rtol=1e-12)


def test_an_infinite_bound_clips_nothing(float64):
    params, batch, grads, *_ = problem()
    total = ab.clipped_grad(dense, clip_norm=np.inf, microbatch_size=2)(params, batch)
    assert_close(total, jax.tree.map(lambda leaf: leaf.sum(0), grads), rtol=1e-12)


def test_sensitivity_says_what_privacy_may_rely_on():
    fun = ab.clipped_grad(dense, clip_norm=3.0, normalize_by=6.0)
    assert (fun.sensitivity(), fun.sensitivity("replace")) == (0.5, 1.0)
    assert (fun.clip_norm, fun.normalize_by) == (3.0, 6.0)
    assert ab.clipped_grad(dense, clip_norm=np.inf).sensitivity() == np.inf
    assert ab.clipped_grad(dense, clip_norm=3.0, nan_safe=False).sensitivity() == np.inf
    with pytest.raises(ab.InputError, match="add_or_remove"):
        fun.sensitivity("swap")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_example_adds_more_than_the_bound(method, dtype):
    """Clipped sums of single examples, whose norms are measured in float64, so that all rounding is included."""
    params, batch = CASE.params(dtype), CASE.batch(64, dtype)
    batch = jnp.asarray(np.random.default_rng(5).permutation(batch.ravel()).reshape(batch.shape), dtype)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)

    def loss(wide, x):
        return dense(jax.tree.map(lambda leaf: leaf.astype(dtype), wide), x)

    for strict in (False, True):
        fun = ab.clipped_grad(loss, clip_norm=0.1, method=method, strict=strict)
        norms = norms_of(jax.vmap(lambda x, fun=fun: fun(wide, x[None]))(batch))
        assert norms.max() <= 0.1 * (1 + 1e-6)
        assert norms.min() > 0.097


def conspiring(rest=6, tokens=64, inputs=256, outputs=1024):
    """Pairs of tokens that nearly cancel, so that the rest is small compared with the rounding of each."""
    x, s = np.ones((1, tokens, inputs)), np.ones((1, tokens, outputs))
    x[:, : tokens // 2] += rest * 2**-7
    s[:, tokens // 2 :] = -1
    return {"x": jnp.asarray(x, jnp.bfloat16), "s": jnp.asarray(s, jnp.bfloat16)}


@pytest.mark.slow
def test_roundings_that_conspire_do_not_exceed_a_strict_bound():
    def loss(w, example):
        made = (example["x"] @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.sum(made * example["s"].astype(jnp.float32))

    w, batch = jnp.zeros((256, 1024)), conspiring()
    (norm,) = norms_of(gradients(loss, w, batch))

    def excess(strict, share):
        fun = ab.clipped_grad(
            loss, clip_norm=float(1.0005 * share * norm), method="factored", microbatch_size=1, strict=strict
        )
        assert [form.kind for form in fun.gradient((w, batch), {}).program.forms] == ["gram"]
        return np.linalg.norm(np.asarray(fun(w, batch), np.float64)) / fun.clip_norm

    shares = np.linspace(0.5, 1, 12)
    assert max(excess(True, share) for share in shares) <= 1
    assert max(excess(False, share) for share in shares) > 1.01  # the control


@pytest.mark.parametrize("a, b", [(1e-19, 1e18), (1e-20, 1e20), (1e12, 1e-13)])
def test_squares_of_factors_may_be_too_small_or_too_large(a, b):
    """The square of one factor underflows or overflows in float32, and that of the gradient does not."""

    def loss(w, example):
        return jnp.sum((example["a"] @ w) * example["b"])

    w, batch = jnp.zeros((64, 8)), {"a": jnp.full((2, 64), a, jnp.float32), "b": jnp.full((2, 8), b, jnp.float32)}
    norms = norms_of(gradients(loss, w, batch))
    fun = ab.clipped_grad(loss, clip_norm=float(norms[0]) / 10, method="factored", return_norms=True)
    total, beside = fun(w, batch)
    np.testing.assert_allclose(beside.norms, norms, rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(total), 2 * fun.clip_norm, rtol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_an_example_that_its_key_makes_bad(method):
    """A mask of zeros gives 0/0. The example that replaces this one must not draw with the same key."""

    def loss(w, x, key):
        mask = jax.random.bernoulli(key, 0.3, (4,)).astype(x.dtype)
        return jnp.sum(jnp.tanh((x * mask / jnp.sum(mask)) @ w))

    w, x, key = (
        jnp.full((4, 3), 0.1),
        jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32),
        jax.random.key(0),
    )
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(8))
    grads = np.asarray(jax.vmap(jax.grad(loss), (None, 0, 0))(w, x, keys))
    good = np.isfinite(grads).all((1, 2))
    assert 0 < good.sum() < 8
    total = ab.clipped_grad(loss, clip_norm=0.1, rng_argnums=2, method=method, microbatch_size=4)(w, x, key)
    np.testing.assert_allclose(total, clipped_sum(grads[good], 0.1), rtol=1e-5)


def test_norms_of_parameters_that_cancel_beside_large_ones(monkeypatch):
    monkeypatch.setattr(forms, "_prefers_gram", lambda products, lookups, prefer: True)

    def loss(params, example):
        return cancelling(params["small"], example) + 1e3 * jnp.sum(example["x"] @ params["large"])

    params, batch = {"small": jnp.ones((6, 5)), "large": jnp.ones((6, 5))}, cancelling_batch(1e-3)
    grads = gradients(loss, params, batch)
    found = ab.per_example_norms(loss, per_leaf=True, method="factored")(params, batch)
    np.testing.assert_allclose(found["small"], norms_of(grads["small"]), rtol=2e-5)
    np.testing.assert_allclose(found["large"], norms_of(grads["large"]), rtol=2e-5)


def test_a_weight_that_is_used_hundreds_of_times():
    def loss(w, x):
        for _ in range(300):
            x = x + 0.01 * jnp.sin(x @ w)
        return jnp.sum(x**2)

    w, x = jnp.eye(3), jnp.ones((2, 3))
    fun = ab.per_example_norms(loss, method="factored").gradient((w, x), {})
    assert [form.kind for form in fun.program.forms] == ["direct"]


def test_compiles_once():
    params, batch, *_ = problem("float32")
    traced = []

    def loss(params, x):
        traced.append(1)
        return dense(params, x)

    fun = jax.jit(ab.clipped_grad(loss, clip_norm=1.0, microbatch_size=2))
    fun(params, batch)
    times = len(traced)
    fun(params, batch + 1)
    assert len(traced) == times


MISTAKES = {
    "clip_norm": ({"clip_norm": 0.0}, "above 0"),
    "text": ({"clip_norm": "1"}, "above 0"),
    "normalize_by": ({"normalize_by": -1.0}, "above 0"),
    "method": ({"method": "ghost"}, "'factored'"),
    "transform": ({"transform": 3}, "a function"),
    "both": ({"transform": lambda grad: grad, "method": "factored"}, "transform needs the gradient of each example"),
    "flag": ({"keep_batch_dim": 1}, "True or False"),
    "size": ({"microbatch_size": 0}, "at least 1"),
}


@pytest.mark.parametrize("options, message", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named_before_any_work(options, message):
    with pytest.raises(ab.InputError, match=message):
        ab.clipped_grad(dense, **{"clip_norm": 1.0, **options})


def test_the_name_of_the_padding_is_taken():
    with pytest.raises(ab.InputError, match="Rename the argument of the loss"):
        ab.per_example_norms(lambda params, x, is_padding: dense(params, x))


def test_padding_must_say_of_every_example(float64):
    params, batch, *_ = problem()
    fun = ab.clipped_grad(dense, clip_norm=1.0)
    for wrong in (jnp.zeros(6, bool), jnp.zeros(7), np.zeros((7, 1), bool)):
        with pytest.raises(ab.InputError, match=r"shape \(7,\)"):
            fun(params, batch, is_padding=wrong)
    with pytest.raises(ab.InputError, match="floating-point"):
        ab.per_example_grads(dense, transform=lambda grad: jnp.argmax(grad["b"]))(params, batch)


@pytest.mark.full
def test_plans_cover_both_methods():
    params, batch = [jnp.ones((64, 64))] * 2, jnp.ones((64, 2, 64))

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    fun = ab.clipped_grad(loss, clip_norm=1.0)
    plan = ab.explain(fun, params, batch, memory="800KiB", timed=False)
    assert {candidate.route for candidate in plan.candidates} == {"factored", "vmap(grad)"}
    assert plan.method == "factored" and plan.chosen.fits
    text = plan.text(width=None)
    assert "The clipped gradient of 64 examples" in text and "the factors of 2 parameters" in text

    lean = min(candidate.total for candidate in plan.candidates if candidate.bytes is not None)
    tight = ab.explain(fun, params, batch, memory=lean, timed=False)
    assert tight.microbatch_size < 64 and "jax.checkpoint" in tight.advice
    assert "remat=" not in tight.advice  # an option that these functions do not have

    shapes = jax.eval_shape(lambda: batch)
    assert ab.plan(ab.per_example_norms(loss, method="vmap"), params, shapes, memory="1MiB").method == "vmap"
    with pytest.raises(ab.NothingFitsError):
        ab.plan(fun, params, batch, memory="60KiB", timed=False)
    with pytest.raises(ab.InputError, match="where the loss is wrapped"):
        ab.plan(fun, params, batch, has_aux=True)
    with pytest.raises(ab.InputError, match="objective must be one of"):
        ab.plan(fun, params, batch, objective="fast")
