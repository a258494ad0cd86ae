"""Per-example gradients, norms and clipped sums with big values in blocks: exact, lean, and planned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import mesh_of
from cases.per_example_losses import clipped_sum, gradients, norms_of
from cases.wide_losses import WIDE
from per_example.test_factors import assert_close

import anybatch as ab
from anybatch import privacy
from anybatch.jaxprs import versions
from anybatch.per_example import forms
from anybatch.reading import block_loop, blocks, regions
from anybatch.reading.states import Blame, RuleFailed

METHODS = ("factored", "vmap")


def language_model(tokens=24, words=211, width=8, examples=5, dtype=jnp.float32):
    """An embedding, a layer, and logits: by the embedding itself, or by a matrix of their own."""
    keys = jax.random.split(jax.random.key(0), 7)
    params = {
        "embedding": jax.random.normal(keys[0], (words, width), dtype) / 3,
        "mix": jax.random.normal(keys[1], (width, width), dtype) / 3,
        "out": jax.random.normal(keys[2], (width, words), dtype) / 3,
        "bias": jax.random.normal(keys[3], (words,), dtype) / 9,
    }
    batch = {
        "x": jax.random.randint(keys[4], (examples, tokens), 0, words),
        "y": jax.random.randint(keys[5], (examples, tokens), 0, words),
        "mask": jax.random.bernoulli(keys[6], 0.7, (examples, tokens)),
    }
    return params, batch


def token_losses(params, batch, *, is_tied):
    hidden = jnp.tanh(params["embedding"][batch["x"]] @ params["mix"])
    logits = hidden @ params["embedding"].T if is_tied else hidden @ params["out"] + params["bias"][None]
    logits = logits.astype(jnp.float32) if logits.dtype == jnp.bfloat16 else logits
    right = jnp.take_along_axis(logits, batch["y"][..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - right


def tied(params, batch):
    return jnp.mean(token_losses(params, batch, is_tied=True))


def untied(params, batch):
    return jnp.mean(token_losses(params, batch, is_tied=False))


def masked(params, batch):
    losses = token_losses(params, batch, is_tied=True)
    mask = batch["mask"].astype(losses.dtype)
    return jnp.sum(losses * mask) / jnp.sum(mask)


def product_of_means(params, batch):
    """The cotangents of the logits depend on all logits, so that each block is computed twice."""
    losses = token_losses(params, batch, is_tied=False)
    return jnp.mean(losses) * jnp.mean(jnp.square(losses))


LOSSES = [tied, untied, masked, product_of_means]


@functools.cache
def oracle(loss):
    """Parameters, a batch, the gradients of its examples by JAX, and a norm that half of them exceed."""
    params, batch = language_model(dtype=jnp.float64)
    grads = gradients(loss, params, batch)
    return params, batch, grads, float(np.median(norms_of(grads)))


def check(loss, **options):
    params, batch, grads, clip_norm = oracle(loss)
    norms, values = norms_of(grads), jax.vmap(loss, (None, 0))(params, batch)
    total, beside = ab.clipped_grad(loss, clip_norm=clip_norm, return_norms=True, return_values=True, **options)(
        params, batch
    )
    assert_close(total, clipped_sum(grads, clip_norm), rtol=1e-12)
    np.testing.assert_allclose(beside.norms, norms, rtol=1e-12)
    np.testing.assert_allclose(beside.values, values, rtol=1e-12)


@pytest.mark.every_jax
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_norms_and_clipped_sums_are_those_of_vmap_of_grad(float64, loss, method):
    """With a smaller last microbatch and a smaller last block."""
    check(loss, method=method, microbatch_size=2, block_size=7)


@pytest.mark.full
@pytest.mark.parametrize("microbatch_size", [1, None])
@pytest.mark.parametrize("block_size", [1, 24, 1000])
@pytest.mark.parametrize("method", METHODS)
def test_results_do_not_depend_on_the_blocks(float64, method, block_size, microbatch_size):
    check(tied, method=method, microbatch_size=microbatch_size, block_size=block_size)


@pytest.mark.every_jax
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_gradients_are_those_of_vmap_of_grad(float64, loss):
    params, batch, grads, _ = oracle(loss)
    assert_close(ab.per_example_grads(loss, microbatch_size=2, block_size=7)(params, batch), grads, rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("loss", [tied, untied], ids=lambda loss: loss.__name__)
def test_factors_of_all_blocks_are_exact(float64, loss, monkeypatch):
    """Factors are taken from inside the loops over blocks, and one part of a tied gradient from its lookups."""
    monkeypatch.setattr(forms, "_prefers_gram", lambda products, lookups, prefer: True)
    check(loss, method="factored", microbatch_size=2, block_size=7)


def kept(loss, params, batch, block_size):
    fun = ab.per_example_norms(loss, method="factored", microbatch_size=1, block_size=block_size)
    return dict(
        zip(sorted(params), (form.kind for form in fun.gradient((params, batch), {}).program.forms), strict=True)
    )


@pytest.mark.full
def test_other_parameters_stay_factored():
    """The gradient of a matrix that all blocks read is computed, unless its factors are smaller."""
    for tokens, out in ((16, "gram"), (256, "direct")):
        model = language_model(tokens=tokens, words=512, width=128, examples=2)
        mix = kept(untied, *model, None)["mix"]
        assert kept(untied, *model, 4) == {"bias": "direct", "embedding": "rows", "mix": mix, "out": out}
    assert kept(untied, *language_model(tokens=40, words=8192, width=128), 4)["mix"] == "gram"


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keep_batch_dim", [True, False])
def test_aux_and_batches_of_one(float64, method, keep_batch_dim):
    params, batch, grads, clip_norm = oracle(masked)

    def with_aux(params, batch):
        losses = token_losses(params, batch, is_tied=True)
        return masked(params, batch), {"worst": jnp.max(losses), "losses": losses}

    options = {"method": method, "keep_batch_dim": keep_batch_dim, "microbatch_size": 2, "block_size": 7}
    (value, aux), total = ab.clipped_value_and_grad(with_aux, has_aux=True, clip_norm=clip_norm, **options)(
        params, batch
    )
    losses = token_losses(params, batch, is_tied=True)
    assert_close(total, clipped_sum(grads, clip_norm), rtol=1e-12)
    np.testing.assert_allclose(value, jnp.sum(jax.vmap(masked, (None, 0))(params, batch)), rtol=1e-12)
    np.testing.assert_allclose(aux["worst"], losses.max(axis=1), rtol=1e-12)
    np.testing.assert_allclose(aux["losses"].reshape(losses.shape), losses, rtol=1e-12)


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("method", METHODS)
def test_every_example_draws_its_own_numbers(float64, method):
    """Dropout on the logits is drawn block by block, and equals that of the whole example."""
    params, batch = language_model(dtype=jnp.float64)

    def noisy(params, batch, key):
        hidden = jnp.tanh(params["embedding"][batch["x"]] @ params["mix"])
        logits = hidden @ params["embedding"].T
        logits = jnp.where(jax.random.bernoulli(key, 0.8, logits.shape), logits / 0.8, 0)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    key = jax.random.key(3)
    keys = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(5))
    grads = jax.vmap(jax.grad(noisy), (None, 0, 0))(params, batch, keys)
    options = {"rng_argnums": 2, "method": method, "microbatch_size": 2, "block_size": 7}
    np.testing.assert_allclose(ab.per_example_norms(noisy, **options)(params, batch, key), norms_of(grads), rtol=1e-12)


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("method", METHODS)
def test_narrow_parameters(method):
    """In bfloat16, norms and clipped sums are as near to float64 as they are without blocks."""
    params, batch = language_model(tokens=64, dtype=jnp.bfloat16)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        grads = jax.tree.map(np.asarray, gradients(tied, wide, batch))
    norms, clip_norm = norms_of(grads), float(np.median(norms_of(grads)))
    expected = clipped_sum(grads, clip_norm)

    def errors(block_size):
        fun = ab.clipped_grad(
            tied, clip_norm=clip_norm, return_norms=True, method=method, microbatch_size=2, block_size=block_size
        )
        total, beside = fun(params, batch)
        leaves = zip(jax.tree.leaves(total), jax.tree.leaves(expected), strict=True)
        off = sum(np.sum(np.square(np.asarray(got, np.float64) - want)) for got, want in leaves)
        assert np.sqrt(off) <= 0.02 * np.sqrt(sum(np.sum(np.square(want)) for want in jax.tree.leaves(expected)))
        return np.max(np.abs(beside.norms - norms) / norms)

    assert errors(7) <= 1.1 * errors(None) + 1e-3


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_examples_that_are_not_finite_and_padding_count_for_nothing(float64, method):
    params, batch, grads, clip_norm = oracle(tied)
    batch = {**batch, "scale": jnp.ones(5).at[1].set(np.nan)}
    counts = np.array([1, 0, 1, 1, 0])

    def scaled(params, batch):
        return tied(params | {"mix": params["mix"] * batch["scale"]}, batch)

    fun = ab.clipped_grad(scaled, clip_norm=clip_norm, method=method, microbatch_size=2, block_size=7)
    total = fun(params, batch, is_padding=jnp.arange(5) == 4)
    assert_close(total, clipped_sum(grads, clip_norm, counts), rtol=1e-12)
    norms = ab.per_example_norms(scaled, method=method, microbatch_size=2, block_size=7)(params, batch)
    assert list(np.isfinite(norms)) == [True, False, True, True, True]


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("method", METHODS)
def test_on_a_mesh_and_inside_shard_map(float64, method):
    params, batch = language_model(examples=8, dtype=jnp.float64)
    grads = gradients(tied, params, batch)
    norms, clip_norm = norms_of(grads), float(np.median(norms_of(grads)))
    mesh, options = mesh_of(4), {"method": method, "microbatch_size": 1, "block_size": 7}
    total = ab.clipped_grad(tied, clip_norm=clip_norm, mesh=mesh, **options)(params, batch)
    assert_close(total, clipped_sum(grads, clip_norm), rtol=1e-12)
    rows = jax.sharding.PartitionSpec("data")
    inside = jax.shard_map(
        ab.per_example_norms(tied, **options),
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), rows),
        out_specs=rows,
    )
    np.testing.assert_allclose(jax.jit(inside)(params, batch), norms, rtol=1e-12)


@pytest.mark.full
def test_derivatives_of_norms(float64):
    params, batch, _, _ = oracle(tied)

    def by_jax(params):
        grads = jax.vmap(jax.grad(tied), (None, 0))(params, batch)
        return jnp.sum(
            jnp.sqrt(sum(jnp.sum(jnp.square(leaf), axis=(1, *range(2, leaf.ndim))) for leaf in grads.values()))
        )

    fun = ab.per_example_norms(tied, method="vmap", microbatch_size=2, block_size=7)
    assert_close(jax.grad(lambda params: jnp.sum(fun(params, batch)))(params), jax.grad(by_jax)(params), rtol=1e-11)


def test_a_transform_of_each_gradient(float64):
    params, batch, grads, _ = oracle(untied)
    fun = ab.per_example_grads(untied, transform=lambda grad: grad["out"].sum(1), microbatch_size=2, block_size=7)
    np.testing.assert_allclose(fun(params, batch), grads["out"].sum(2), rtol=0, atol=1e-12)


SEPARATE = [case for case in WIDE if case.kind != "pairs"]


def check_batches_of_one(case):
    """Compares the norms of a loss of batches. False if it looks across examples, or fails for batches of one."""
    params, batch = case.make(jnp.float64)
    loss = (lambda *args: case.loss(*args)[0]) if case.has_aux else case.loss
    alone = jax.tree.map(lambda leaf: leaf[:, None], batch)
    try:
        expected = norms_of(jax.vmap(jax.grad(loss), (None, 0))(params, alone))
    except TypeError:
        return False
    try:
        norms = ab.per_example_norms(loss, keep_batch_dim=True, microbatch_size=2, block_size=3)(params, batch)
    except ab.CoupledError:
        return False
    np.testing.assert_allclose(norms, expected, rtol=1e-9, atol=1e-12 * (1e-3 + np.nanmax(expected, initial=0)))
    return True


@pytest.mark.slow
def test_some_losses_with_big_values(float64):
    assert sum(map(check_batches_of_one, SEPARATE[5::40])) >= 3


@pytest.mark.slow
def test_all_losses_with_big_values(float64):
    assert sum(map(check_batches_of_one, SEPARATE)) >= 120


def test_the_comparison_can_fail(float64, monkeypatch):
    """The control: every block computes the rows of the first one."""
    take_rows = block_loop.take_rows
    monkeypatch.setattr(block_loop, "take_rows", lambda array, rows, n, start, size: take_rows(array, rows, n, 0, size))
    for method in METHODS:
        with pytest.raises(AssertionError):
            check(tied, method=method, microbatch_size=2, block_size=7)


@pytest.mark.full
def test_the_cotangent_is_that_of_the_loss(float64, monkeypatch):
    """The control: gradients that are taken with another cotangent than 1 are not those of the loss."""
    zeros_of = blocks.avals.zeros_of
    check(tied, method="vmap", microbatch_size=2, block_size=7)
    monkeypatch.setattr("anybatch.per_example.kept_gradients.avals.zeros_of", lambda *like: zeros_of(*like) + 1)
    with pytest.raises(AssertionError):
        check(tied, method="vmap", microbatch_size=2, block_size=7)


# Memory.


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("microbatch_size", [1, 2])
def test_blocks_take_a_part_of_the_memory(method, microbatch_size):
    params, batch = language_model(tokens=256, words=8192, width=16, examples=4)

    def temporaries(block_size):
        fun = ab.clipped_grad(
            tied, clip_norm=1.0, method=method, microbatch_size=microbatch_size, block_size=block_size
        )
        return versions.temporaries(jax.jit(fun).lower(params, batch).compile())

    assert temporaries(16) < 0.15 * temporaries(None)


# Plans.


@pytest.mark.full
def test_blocks_are_tried_before_nothing_fits():
    params, batch = language_model(tokens=256, words=8192, width=16, examples=2)
    fun = ab.clipped_grad(tied, clip_norm=0.1, memory="8MiB")
    plan = ab.plan(fun, params, batch, timed=False)
    assert plan.chosen is not None and plan.block_size is not None and plan.chosen.total <= 8 * 2**20
    assert "blocks" in str(plan)
    np.testing.assert_allclose(
        fun(params, batch)["mix"],
        ab.clipped_grad(tied, clip_norm=0.1, microbatch_size=1)(params, batch)["mix"],
        rtol=1e-4,
        atol=1e-6,
    )
    in_full = ab.clipped_grad(tied, clip_norm=0.1, memory="8MiB", block_size=None)
    with pytest.raises(ab.NothingFitsError, match=r"leave\s+block_size\s+out"):
        in_full(params, batch)


@pytest.mark.full
def test_one_example_is_planned_too():
    params, batch = language_model(tokens=256, words=8192, width=16, examples=1)
    assert ab.plan(ab.per_example_norms(tied), params, batch, memory="8MiB", timed=False).block_size is not None


@pytest.mark.full
def test_no_blocks_where_the_full_batch_fits():
    params, batch = language_model()
    for timed in (False, True):
        plan = ab.plan(ab.clipped_grad(tied, clip_norm=1.0), params, batch, memory="64MiB", timed=timed)
        assert plan.block_size is None and all(each.block_size is None for each in plan.candidates)


@pytest.mark.full
def test_a_number_is_kept_by_plans_and_a_fixed_microbatch_has_no_blocks():
    params, batch = language_model(tokens=256, words=1024, examples=2)
    plan = ab.explain(ab.per_example_norms(tied, block_size=32), params, batch, memory="1GiB", timed=False)
    assert {each.block_size for each in plan.candidates} == {32}

    def computed(block_size):
        fun = ab.per_example_norms(tied, method="vmap", microbatch_size=1, block_size=block_size)
        return str(jax.make_jaxpr(fun)(params, batch))

    assert block_loop.REGION in computed(32) and block_loop.REGION not in computed("auto") + computed(None)


# Options.


@pytest.mark.parametrize("value", [0, -3, 1.5, "all", True])
def test_sizes_that_are_refused(value):
    functions = [ab.per_example_grads, ab.per_example_norms]
    functions += [functools.partial(each, clip_norm=1.0) for each in (ab.clipped_grad, ab.clipped_value_and_grad)]
    for function in functions:
        with pytest.raises(ab.InputError, match=r"block_size must be .* None or \"auto\""):
            function(tied, block_size=value)


@pytest.mark.full
def test_private_gradients_in_blocks():
    params, batch = language_model()
    options = {"clip_norm": 0.5, "noise_multiplier": 1.0, "expected_batch_size": 5, "microbatch_size": 2}
    key, is_padding = jax.random.key(0), np.zeros(5, bool)
    found = [
        privacy.private_grad(tied, **options, block_size=block_size, allow_key_reuse=True)(
            params, batch, noise_key=key, is_padding=is_padding
        )
        for block_size in (None, 7)
    ]
    assert_close(*(jax.tree.map(np.asarray, each) for each in found), rtol=1e-6)


@pytest.mark.full
def test_the_exact_noise_scale_in_blocks(float64):
    params, batch = language_model(dtype=jnp.float64)

    def mean_loss(params, batch):
        return jnp.mean(token_losses(params, batch, is_tied=True))

    found = [
        ab.noise_scale(mean_loss, exact=True, microbatch_size=2, block_size=block_size)(params, batch)[2].value
        for block_size in (None, 7)
    ]
    np.testing.assert_allclose(*found, rtol=1e-10)


@pytest.mark.full
def test_effects_are_left_as_they_are(capfd):
    def loss(params, batch):
        jax.debug.print("{}", batch["x"].shape[0])
        return tied(params, batch)

    params, batch = language_model(examples=2)
    norms = ab.per_example_norms(loss, microbatch_size=1, block_size=7)(params, batch)
    np.testing.assert_allclose(norms, ab.per_example_norms(tied, microbatch_size=1)(params, batch), rtol=1e-5)
    assert capfd.readouterr().out.split() == ["24", "24"]


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_if_blocks_fail_the_gradient_is_computed_in_full(method, float64, monkeypatch):
    def finds_nothing(*_):
        raise KeyError("a mistake")

    def computes_nothing(*_):
        raise RuleFailed(Blame("model.py", 1, "loss", "dot_general", "a mistake"))

    for owner, name, fails in [
        (regions.Regions, "_cover", finds_nothing),
        (block_loop.BlockLoop, "of_block", computes_nothing),
    ]:
        with monkeypatch.context() as patch, pytest.warns(ab.RuleFailedWarning, match="a mistake"):
            patch.setattr(owner, name, fails)
            check(tied, method=method, microbatch_size=2, block_size=7)
