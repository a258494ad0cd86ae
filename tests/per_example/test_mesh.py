"""Per-example gradients over a mesh: the same norms, the same clipping and the same random numbers on any devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import mesh_of, spread
from cases.per_example_losses import clipped_sum, dense, gradients, norms_of
from jax.sharding import PartitionSpec as P
from per_example.test_factors import assert_close
from per_example.test_grads import CASE, METHODS

import anybatch as ab
from anybatch.collectives import collectives_of


@functools.cache
def problem(number):
    with jax.enable_x64(True):
        params, batch = CASE.params(), CASE.batch(number)
        grads = jax.tree.map(np.asarray, gradients(dense, params, batch))
    return params, batch, grads, float(np.median(norms_of(grads)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("devices, number", [(1, 6), (2, 7), (8, 16), (8, 11), (8, 5)])
def test_the_same_on_1_2_and_8_devices(float64, method, devices, number):
    """Even and uneven batches, and one with fewer examples than devices."""
    params, batch, grads, clip_norm = problem(number)
    options = {"mesh": mesh_of(devices), "method": method, "microbatch_size": 1}
    fun = ab.clipped_value_and_grad(dense, clip_norm=clip_norm, return_norms=True, **options)
    (value, beside), total = fun(params, batch)
    np.testing.assert_allclose(beside.norms, norms_of(grads), rtol=1e-12)
    assert_close(total, clipped_sum(grads, clip_norm), rtol=1e-12)
    np.testing.assert_allclose(value, jax.vmap(dense, (None, 0))(params, batch).sum(), rtol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_keys_padding_and_bad_examples_on_many_devices(float64, method):
    params, batch, *_ = problem(11)
    key, padding = jax.random.key(0), jnp.arange(11) >= 9

    def loss(params, x, key):
        return dense(params, x + 0.1 * jax.random.normal(key, x.shape, x.dtype))

    batch = batch.at[4].set(jnp.nan).at[10].set(jnp.inf)
    options = {"clip_norm": 1.0, "rng_argnums": 2, "method": method, "return_norms": True}
    here, beside = ab.clipped_grad(loss, microbatch_size=3, **options)(params, batch, key, is_padding=padding)
    there, also = ab.clipped_grad(loss, microbatch_size=1, mesh=mesh_of(4), **options)(
        params, batch, key, is_padding=padding
    )
    assert_close(there, here, rtol=1e-12)
    np.testing.assert_allclose(also.norms, beside.norms, rtol=1e-12)
    assert np.isfinite(jax.tree.leaves(there)[0]).all()


@pytest.mark.parametrize("method", METHODS)
def test_one_collective_adds_up(method):
    params, batch = CASE.params(jnp.float32), CASE.batch(32, jnp.float32)
    fun = ab.clipped_value_and_grad(dense, clip_norm=1.0, mesh=mesh_of(8), microbatch_size=1, method=method)
    compiled = jax.jit(fun).lower(params, spread(batch, mesh_of(8), "data")).compile()
    (collective,) = collectives_of(compiled)
    assert collective.kind == "all-reduce" and collective.times == 1


def test_parameters_that_are_spread_stay_spread(float64):
    """Fully sharded, and with an axis of the model beside the examples."""
    params, batch, _, clip_norm = problem(16)
    for mesh, spec in ((mesh_of(8), P(None, "data")), (mesh_of(4, 2), P(None, "model"))):
        wide = {**params, "w": jnp.tile(params["w"], (1, 8))[:, :8], "b": jnp.tile(params["b"], 2)[:8]}
        wide["v"] = jnp.tile(params["v"], (2, 1))[:8]
        expected = clipped_sum(gradients(dense, wide, batch), clip_norm)
        placed = {**wide, "w": spread(wide["w"], mesh, *spec)}
        total = ab.clipped_grad(dense, clip_norm=clip_norm, mesh=mesh, microbatch_size=2)(placed, batch)
        assert_close(total, expected, rtol=1e-12)
        assert total["w"].sharding.spec == spec


def test_inside_shard_map_examples_are_clipped_by_themselves(float64):
    """JAX would add up the gradients of replicated parameters over the devices, before they are clipped."""
    params, batch, grads, clip_norm = problem(16)
    mesh = mesh_of(4)
    expected = clipped_sum(grads, clip_norm)

    def ours(params, batch):
        fun = ab.clipped_grad(dense, clip_norm=clip_norm, microbatch_size=2, return_norms=True)
        total, beside = fun(params, batch)
        return jax.lax.psum(total, "data"), beside.norms

    run = jax.shard_map(ours, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")))
    total, norms = jax.jit(run)(params, batch)
    assert_close(total, expected, rtol=1e-12)
    np.testing.assert_allclose(norms, norms_of(grads), rtol=1e-12)

    def by_hand(params, batch):  # the control
        each = jax.vmap(jax.grad(dense), (None, 0))(params, batch)
        squares = [jnp.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(each)]
        return jnp.sqrt(jnp.sum(jnp.stack(squares), axis=0))

    wrong = jax.jit(jax.shard_map(by_hand, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")))(params, batch)
    assert np.max(np.abs(wrong / norms_of(grads) - 1)) > 0.1


def test_a_batch_on_many_devices_under_plain_jit(float64):
    params, batch, grads, clip_norm = problem(16)
    fun = jax.jit(ab.clipped_grad(dense, clip_norm=clip_norm, microbatch_size=8, return_norms=True))
    total, beside = fun(params, spread(batch, mesh_of(8), "data"))
    assert_close(total, clipped_sum(grads, clip_norm), rtol=1e-12)
    np.testing.assert_allclose(beside.norms, norms_of(grads), rtol=1e-12)
