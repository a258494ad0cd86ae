"""A batch that is spread over devices, and no `mesh=`: right, and not moved."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import (
    ONE_PASS,
    TWO_PASSES,
    examples,
    masked,
    mean,
    mesh_of,
    parameters,
    spread,
    traffic,
    with_aux,
    worst,
)

import anybatch as ab

EXACT = 1e-12

pytestmark = pytest.mark.usefixtures("float64")


@functools.cache
def full_batch(loss, number, has_aux=False):
    return jax.value_and_grad(loss, has_aux=has_aux)(parameters(), examples(number))


@pytest.mark.parametrize("loss", [*ONE_PASS, *TWO_PASSES], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("size", [pytest.param(8, marks=pytest.mark.slow), 24])  # of 64: with a ragged one
def test_it_is_the_gradient_of_the_full_batch(loss, size):
    batch = spread(examples(64), mesh_of(8), "data")
    fun = jax.jit(ab.value_and_grad(loss, microbatch_size=size))
    assert worst(fun(parameters(), batch), full_batch(loss, 64)) < EXACT


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_any_size_will_do(size):
    batch = spread(examples(64), mesh_of(8), "data")
    fun = ab.value_and_grad(with_aux, has_aux=True, microbatch_size=size)
    for call in (fun, jax.jit(fun)):
        assert worst(call(parameters(), batch), full_batch(with_aux, 64, has_aux=True)) < EXACT


def test_rows_of_declared_aux_keep_their_order():
    def loss(params, batch):
        _, aux = with_aux(params, batch)
        return mean(params, batch), {"rows": aux["rows"], "columns": aux["columns"]}

    fun = ab.value_and_grad(loss, has_aux=True, reduction="mean", microbatch_size=24)
    result = jax.jit(fun)(parameters(), spread(examples(64), mesh_of(8), "data"))
    assert worst(result, jax.value_and_grad(loss, has_aux=True)(parameters(), examples(64))) < EXACT


@pytest.mark.parametrize(("loss", "reduction"), [(mean, "infer"), (masked, "infer"), (mean, "mean")])
def test_the_batch_is_not_moved(loss, reduction):
    """One all-reduce in a microbatch, which is XLA's, and nothing that brings examples elsewhere."""
    mesh = mesh_of(8)
    fun = ab.value_and_grad(loss, microbatch_size=16, reduction=reduction)
    found = traffic(fun, mesh, parameters(), spread(examples(64), mesh, "data"))
    assert set(found.by_kind) == {"all-reduce"}
    assert found.in_loops.by_kind == {"all-reduce": 4}


def test_consecutive_examples_would_be_gathered():
    """The control: cut as on one device, the whole batch goes to every device."""
    mesh = mesh_of(8)

    def by_hand(params, batch):
        def step(sums, start):
            part = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, 16), batch)
            return jax.tree.map(jnp.add, sums, jax.grad(mean)(params, part)), None

        return jax.lax.scan(step, jax.tree.map(jnp.zeros_like, params), 16 * jnp.arange(4))[0]

    assert "all-gather" in traffic(by_hand, mesh, parameters(), spread(examples(64), mesh, "data")).by_kind


def test_keys_of_microbatches_do_not_depend_on_jit():
    def loss(params, batch, key):
        rows = batch["x"] @ params["w"]
        return jnp.mean((rows * jax.random.normal(key, rows.shape)) ** 2)

    fun = ab.value_and_grad(loss, reduction="mean", rng_argnums=2, microbatch_size=8)
    arguments = (parameters(), spread(examples(64), mesh_of(8), "data"), jax.random.key(0))
    assert worst(jax.jit(fun)(*arguments), fun(*arguments)) < EXACT


def test_narrow_positions():
    """An arange of int8 counts beyond what a length in int8 would hold."""

    def loss(w, x):
        places = jnp.arange(x.shape[0] // 2, dtype=jnp.int8).repeat(2).astype(x.dtype)
        return jnp.mean(w * x * places)

    x = np.linspace(0, 1, 128)
    fun = jax.jit(ab.value_and_grad(loss, microbatch_size=16))
    assert worst(fun(1.0, x), jax.value_and_grad(loss)(1.0, x)) < EXACT
