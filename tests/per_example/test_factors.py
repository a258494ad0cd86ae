"""Norms and clipped sums from factors equal those of `vmap(grad)`, for losses with every kind of term."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.per_example_losses import CASES, clipped_sum, gradients, norms_of

import anybatch as ab
from anybatch.jaxprs import versions
from anybatch.per_example import forms

pytestmark = pytest.mark.every_jax


@pytest.fixture(params=["gram", pytest.param("direct", marks=pytest.mark.slow)])
def preferred(request, monkeypatch):
    """Keeps factors wherever that is possible, or nowhere."""
    monkeypatch.setattr(forms, "_prefers_gram", lambda products, lookups, prefer: request.param == "gram")
    return request.param


def kept(loss, params, batch, **options):
    """The form in which the gradients of each parameter are kept."""
    fun = ab.clipped_grad(loss, clip_norm=1.0, method="factored", **options)
    gradient = fun.gradient((params, batch), {})
    return gradient.arguments.as_gradient([form.kind for form in gradient.program.forms])


def assert_close(actual, expected, rtol):
    """Compares all leaves together, relative to their norm, and each leaf."""
    leaves = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    length = np.sqrt(sum(np.sum(np.square(want)) for _, want in leaves))
    for got, want in leaves:
        assert got.shape == want.shape
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=rtol * length)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_norms_and_clipped_sums_are_those_of_vmap_of_grad(float64, preferred, case):
    """In float64, which shows a term that is missing or counted twice, and with a smaller last microbatch."""
    params, batch = case.params(), case.batch(5)
    grads = gradients(case.loss, params, batch)
    norms = norms_of(grads)
    clip_norm = float(np.median(norms))
    assert np.ptp(norms) > 0.01 * clip_norm

    fun = ab.clipped_grad(case.loss, clip_norm=clip_norm, method="factored", microbatch_size=3, return_norms=True)
    total, beside = fun(params, batch)

    np.testing.assert_allclose(beside.norms, norms, rtol=1e-12)
    assert_close(total, clipped_sum(grads, clip_norm), rtol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_factors_are_recognised(float64, monkeypatch, case):
    monkeypatch.setattr(forms, "_prefers_gram", lambda products, lookups, prefer: True)
    assert kept(case.loss, case.params(), case.batch(2)) == case.kept


def test_without_clipping_the_sum_is_another():
    """The control."""
    case = CASES[0]
    params, batch = case.params(jnp.float32), case.batch(5, jnp.float32)
    grads = gradients(case.loss, params, batch)
    clip_norm = float(np.median(norms_of(grads)))
    with pytest.raises(AssertionError):
        assert_close(clipped_sum(grads, np.inf), clipped_sum(grads, clip_norm), rtol=0.1)


def test_gram_or_direct_is_chosen_by_cost():
    """Few tokens and a wide layer: from factors. Many tokens and a narrow one: from the gradient itself."""

    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def choose(tokens, width, dtype):
        params = jax.ShapeDtypeStruct((width, width), dtype)
        batch = jax.ShapeDtypeStruct((2, tokens, width), dtype)
        found = []
        jax.eval_shape(lambda w, x: found.append(kept(loss, w, x)), params, batch)
        return found[0]

    assert choose(1, 64, jnp.float32) == "gram"
    assert choose(8, 768, jnp.float32) == "gram"
    assert choose(256, 3072, jnp.bfloat16) == "gram"
    assert choose(1024, 768, jnp.bfloat16) == "direct"
    assert choose(4096, 64, jnp.float32) == "direct"


def cancelling(w, example):
    """A batch whose outer products nearly cancel in pairs, except for a small rest."""
    return jnp.sum((example["x"] @ w) * example["s"])


def cancelling_batch(rest, dtype=np.float32):
    random = np.random.default_rng(0)
    one = random.normal(size=(4, 8, 6))
    x = np.concatenate([one, one * (1 + rest * random.normal(size=one.shape))], axis=1)
    s = np.concatenate([np.ones((4, 8, 5)), -np.ones((4, 8, 5))], axis=1)
    return {"x": jnp.asarray(x, dtype), "s": jnp.asarray(s, dtype)}


@pytest.mark.parametrize("rest", [1.0, 1e-2, 1e-3])
def test_contributions_that_cancel_are_noticed(monkeypatch, rest):
    """At a thousandfold cancellation, squares from factors have no correct digit in float32."""
    monkeypatch.setattr(forms, "_prefers_gram", lambda products, lookups, prefer: True)
    w, batch = jnp.ones((6, 5)), cancelling_batch(rest)
    assert kept(cancelling, w, batch) == "gram"
    grads = np.asarray(gradients(cancelling, w, batch), np.float64)
    norms = norms_of(grads)
    clip_norm = float(np.median(norms))

    fun = ab.clipped_grad(cancelling, clip_norm=clip_norm, method="factored", return_norms=True, microbatch_size=3)
    total, beside = fun(w, batch)

    np.testing.assert_allclose(beside.norms, norms, rtol=2e-5)
    assert_close(total, clipped_sum(grads, clip_norm), rtol=2e-4)
    np.testing.assert_allclose(ab.per_example_norms(cancelling)(w, batch), norms, rtol=2e-5)


def test_without_noticing_cancellation_norms_are_wrong(monkeypatch):
    """The control."""
    monkeypatch.setattr(forms, "_prefers_gram", lambda products, lookups, prefer: True)
    monkeypatch.setattr(
        "anybatch.per_example.kept_gradients.is_doubtful", lambda forms, squares, per_leaf: squares[0].square < 0
    )
    w, batch = jnp.ones((6, 5)), cancelling_batch(1e-3)
    norms = norms_of(gradients(cancelling, w, batch))
    found = ab.per_example_norms(cancelling)(w, batch)
    assert np.max(np.abs(found / norms - 1)) > 1e-3


@pytest.mark.parametrize("dtype, rtol", [(jnp.bfloat16, 1e-2), (jnp.float16, 1e-3)], ids=["bfloat16", "float16"])
def test_narrow_factors_cost_no_more_than_their_rounding(preferred, dtype, rtol):
    """Against float64 gradients of the same narrow numbers, multiplied and summed."""
    case = next(case for case in CASES if case.name == "dense_over_tokens")
    params, batch = case.params(dtype), case.batch(6, dtype)
    norms = norms_of(gradients(case.loss, params, batch))
    clip_norm = float(np.median(norms))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), (params, batch))
        grads = gradients(case.loss, *wide)
        exact = norms_of(grads)

    fun = ab.clipped_grad(case.loss, clip_norm=clip_norm, method="factored", return_norms=True)
    total, beside = fun(params, batch)

    np.testing.assert_allclose(beside.norms, exact, rtol=rtol)
    assert_close(total, clipped_sum(grads, clip_norm), rtol=rtol)
    assert {leaf.dtype for leaf in jax.tree.leaves(total)} == {jnp.dtype(dtype)}


def temporaries(fun, *args):
    return versions.temporaries(jax.jit(fun).lower(*args).compile())


def wide_loss(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def test_memory_is_flat_in_the_batch():
    """At a fixed microbatch size, by either method: twice the examples take no more than their rows."""
    params = [jnp.ones((128, 128))] * 3
    small, large = jnp.ones((32, 4, 128)), jnp.ones((256, 4, 128))
    for method in ("vmap", "factored"):
        fun = ab.clipped_grad(wide_loss, clip_norm=1.0, microbatch_size=8, method=method)
        assert temporaries(fun, params, large) < 1.05 * temporaries(fun, params, small)
    at_once = ab.clipped_grad(wide_loss, clip_norm=1.0, microbatch_size=None)
    assert temporaries(at_once, params, large) > 3 * temporaries(at_once, params, small)  # the control


def test_gradients_of_examples_are_never_there():
    """Factors of 32 examples take less memory than the gradients of four."""
    params, batch = [jnp.ones((256, 256))] * 3, jnp.ones((32, 2, 256))
    one_gradient = 4 * 3 * 256 * 256
    factored = ab.clipped_grad(wide_loss, clip_norm=1.0, microbatch_size=None, method="factored")
    by_vmap = ab.clipped_grad(wide_loss, clip_norm=1.0, microbatch_size=None, method="vmap")
    assert temporaries(factored, params, batch) < 4 * one_gradient
    assert temporaries(by_vmap, params, batch) > 30 * one_gradient  # the control


def _tied(params, tokens):
    hidden = jnp.tanh(params["table"][tokens])
    logits = jax.nn.log_softmax(hidden @ params["table"].T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, None], axis=1))


def _used_twice(params, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ params["table"]) @ params["table"]))


@pytest.mark.parametrize("loss", [_tied, _used_twice], ids=lambda loss: loss.__name__)
def test_no_kernel_joins_the_sides_that_it_multiplies(monkeypatch, loss):
    """On a GPU, XLA would join the sides inside the kernel, with too much shared memory. They are joined before it."""
    monkeypatch.setattr(forms, "_prefers_gram", lambda products, lookups, prefer: True)
    params = {"table": jnp.ones((16, 16)) / 16}
    batch = jnp.ones((3, 8), jnp.int32) if loss is _tied else jnp.ones((3, 8, 16))
    fun = ab.clipped_grad(loss, clip_norm=1.0, method="factored", microbatch_size=None)
    makers, joined, multiplied = {}, [], []

    def look(jaxpr):
        for equation in jaxpr.eqns:
            makers.update((str(id(jaxpr)) + str(output), equation.primitive.name) for output in equation.outvars)
            if equation.primitive.name == "dot_general":
                sources = [makers.get(str(id(jaxpr)) + str(operand)) for operand in equation.invars]
                multiplied.append(sources)
                joined.extend(source for source in sources if source == "concatenate")
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                look(getattr(inner, "jaxpr", inner))

    look(jax.make_jaxpr(fun)(params, batch).jaxpr)
    assert not joined
    assert ["optimization_barrier"] * 2 in multiplied
