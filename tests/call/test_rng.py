"""`rng_argnums`: a key of its own for each microbatch, by the index of its first example."""

import chex
import jax
import jax.numpy as jnp
import pytest

import anybatch as ab

pytestmark = pytest.mark.every_jax


def dropout_loss(w, x, key):
    keep = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.sum(jnp.where(keep, x * w, jnp.zeros_like(x)) ** 2)


def by_hand(w, x, key, size):
    results = [
        jax.value_and_grad(dropout_loss)(w, x[start : start + size], jax.random.fold_in(key, start))
        for start in range(0, len(x), size)
    ]
    return tuple(sum(parts) for parts in zip(*results, strict=True))


X = jnp.arange(1.0, 13.0)


@pytest.mark.parametrize("microbatch_size", [1, 4, 5, 12, 20])
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_each_microbatch_gets_the_key_folded_with_its_first_index(make_key, microbatch_size):
    fun = ab.value_and_grad(dropout_loss, microbatch_size=microbatch_size, reduction="sum", rng_argnums=2)
    for transform in (lambda f: f, jax.jit):
        actual = transform(fun)(2.0, X, make_key(0))
        chex.assert_trees_all_close(actual, by_hand(2.0, X, make_key(0), microbatch_size), rtol=1e-6)


def test_the_full_batch_keeps_its_key():
    actual = ab.value_and_grad(dropout_loss, microbatch_size=None, reduction="sum", rng_argnums=2)(
        2.0, X, jax.random.key(0)
    )
    chex.assert_trees_all_close(actual, jax.value_and_grad(dropout_loss)(2.0, X, jax.random.key(0)), rtol=1e-6)


def test_without_rng_argnums_all_microbatches_share_one_mask():
    """The control: this is the bug that fresh keys avoid."""
    ones = jnp.ones(8)
    draw = lambda w, x, key: (jnp.sum(w * x), jax.random.uniform(key, x.shape))  # noqa: E731
    options = {"has_aux": True, "microbatch_size": 4, "reduction": "sum"}
    _, shared = ab.grad(draw, **options)(1.0, ones, jax.random.key(0))
    _, fresh = ab.grad(draw, rng_argnums=2, **options)(1.0, ones, jax.random.key(0))
    assert (shared[:4] == shared[4:]).all()
    assert not (fresh[:4] == fresh[4:]).any()


def test_keys_may_come_in_a_tree():
    def loss(w, x, rngs):
        return dropout_loss(w, x, rngs["dropout"]) + jnp.sum(w * jax.random.normal(rngs["noise"], x.shape))

    rngs = {"dropout": jax.random.key(1), "noise": jax.random.key(2)}
    parts = [
        jax.value_and_grad(loss)(2.0, X[s : s + 5], {name: jax.random.fold_in(k, s) for name, k in rngs.items()})
        for s in (0, 5, 10)
    ]
    expected = tuple(sum(column) for column in zip(*parts, strict=True))
    actual = ab.value_and_grad(loss, microbatch_size=5, reduction="sum", rng_argnums=2)(2.0, X, rngs)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5)


def test_per_example_keys_in_the_batch_need_no_rng_argnums():
    def loss(w, batch):
        noise = jax.vmap(jax.random.normal)(batch["key"])
        return jnp.mean((batch["x"] * w + noise) ** 2)

    batch = {"x": X, "key": jax.random.split(jax.random.key(0), 12)}
    actual = ab.value_and_grad(loss, microbatch_size=5, reduction="mean")(2.0, batch)
    chex.assert_trees_all_close(actual, jax.value_and_grad(loss)(2.0, batch), rtol=1e-6)
