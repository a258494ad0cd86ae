"""`reproducible=True`: sums in an order that does not depend on the devices, and better ones than plain sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import (
    bits,
    contrastive,
    examples,
    masked,
    mean,
    mesh_of,
    outputs_of,
    parameters,
    spread,
    with_aux,
    worst,
)
from jax.sharding import PartitionSpec as P

import anybatch as ab

NUMBER, SIZE = 128, 4


def softmaxed(params, batch):
    """With divisions that XLA likes to rewrite."""
    return jnp.mean((jax.nn.softmax(outputs_of(params, batch)) - batch["y"]) ** 2)


def weighted_and_not(params, batch):
    """A weight that is a sum of data must be known before the first microbatch."""
    losses = jnp.sum((outputs_of(params, batch) - batch["y"]) ** 2, axis=-1)
    weights = batch["y"][:, 0] ** 2
    return jnp.sum(losses * weights) / jnp.sum(weights) + jnp.mean(losses)


def arguments():
    return parameters(width=64, dtype=np.float32), examples(NUMBER, dtype=np.float32)


def over(devices, loss, has_aux=False, compiler_options=None, **options):
    mesh = None if devices is None else mesh_of(devices)
    fun = ab.value_and_grad(loss, has_aux=has_aux, microbatch_size=SIZE, mesh=mesh, **{"reproducible": True, **options})
    return jax.jit(fun, compiler_options=compiler_options)(*arguments())


@pytest.mark.parametrize(
    "loss", [masked, softmaxed, contrastive, weighted_and_not, with_aux], ids=lambda loss: loss.__name__
)
def test_the_same_bits_on_2_4_and_8_devices(loss):
    has_aux = loss is with_aux
    assert len({bits(over(devices, loss, has_aux)) for devices in (2, 4, 8)}) == 1


def test_plain_sums_have_other_bits():
    """The control."""
    assert len({bits(over(devices, masked, reproducible=False)) for devices in (2, 4, 8)}) > 1


def test_the_same_bits_on_one_device_too():
    assert len({bits(over(devices, mean)) for devices in (None, 1, 2, 8)}) == 1
    # Where XLA rewrites divisions on one device alone, it can be told not to.
    as_written = {"xla_disable_hlo_passes": "algsimp"}
    assert len({bits(over(devices, softmaxed, compiler_options=as_written)) for devices in (None, 1, 2, 8)}) == 1


@pytest.mark.full
def test_the_same_bits_for_parameters_that_are_spread():
    def grads(devices, spec):
        mesh = mesh_of(devices)
        params, batch = arguments()
        params = {**params, "w": spread(params["w"], mesh, *spec)}
        fun = ab.grad(masked, microbatch_size=SIZE, mesh=mesh, reproducible=True)
        return fun(params, batch)

    assert len({bits(grads(devices, spec)) for devices in (2, 8) for spec in (P(), P(None, "data"))}) == 1


@pytest.mark.parametrize("reduction", ["mean", "weighted"])
def test_the_same_bits_for_declared_reductions(reduction):
    def loss(params, batch):
        losses = jnp.sum((outputs_of(params, batch) - batch["y"]) ** 2, axis=-1)
        return jnp.mean(losses) if reduction == "mean" else (jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]))

    assert len({bits(over(devices, loss, reduction=reduction)) for devices in (2, 4, 8)}) == 1


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", [masked, contrastive], ids=lambda loss: loss.__name__)
def test_it_is_the_gradient_of_the_full_batch(loss):
    params, batch = parameters(), examples(64)
    expected = jax.value_and_grad(loss)(params, batch)
    for mesh in (None, mesh_of(8)):
        fun = ab.value_and_grad(loss, microbatch_size=2, mesh=mesh, reproducible=True)
        assert worst(fun(params, batch), expected) < 1e-12


def test_it_is_more_accurate_than_plain_summation():
    """Against a sum in float64 of the same numbers: a tree rounds a number log2(n) times, a plain sum n times."""
    random = np.random.default_rng(0)
    x = random.normal(size=(4096, 64)).astype(np.float32) ** 2
    exact = x.astype(np.float64).sum(0)

    def error(reproducible):
        fun = ab.grad(lambda w, x: jnp.sum(x @ w), microbatch_size=1, reproducible=reproducible, mesh=mesh_of(8))
        return np.linalg.norm(np.asarray(fun(jnp.zeros(64), x), np.float64) - exact) / np.linalg.norm(exact)

    assert error(reproducible=True) < 0.7 * error(reproducible=False)


@pytest.mark.parametrize(
    ("devices", "number", "size", "match"),
    [
        (8, 128, 3, "multiple of 24"),
        (3, 96, 4, "1, 2, 4"),
        (8, 128, 32, "microbatch_size=16"),
    ],
)
def test_microbatches_that_devices_would_have_to_share_are_refused(devices, number, size, match):
    fun = ab.value_and_grad(mean, microbatch_size=size, mesh=mesh_of(devices), reproducible=True)
    with pytest.raises(ab.InputError, match=match):
        fun(parameters(dtype=np.float32), examples(number, np.float32))


@pytest.mark.parametrize(
    "options",
    [{"microbatch_size": "auto"}, {"microbatch_size": None}, {"reproducible": 8}, {"reduce": "each"}],
    ids=str,
)
def test_options_that_do_not_go_together(options):
    chosen = {"microbatch_size": 2, "reproducible": True, "mesh": mesh_of(2), **options}
    with pytest.raises(ab.InputError, match="reproducible"):
        ab.value_and_grad(mean, **chosen)


def test_memory_of_the_groups():
    """Up to log2(64 / devices) gradients more than plain sums, as the docstring says."""
    params = {"w": jnp.ones((64, 4096)), "v": jnp.ones((4096, 4)), "b": jnp.zeros(4)}
    batch = {**examples(512, np.float32), "x": np.ones((512, 64), np.float32)}
    gradient = sum(leaf.nbytes for leaf in params.values())

    @functools.cache
    def temporaries(devices, reproducible):
        fun = ab.value_and_grad(mean, microbatch_size=1, mesh=mesh_of(devices), reproducible=reproducible)
        return jax.jit(fun).lower(params, batch).compile().memory_analysis().temp_size_in_bytes

    for devices, more in ((2, 5), (8, 3)):
        assert temporaries(devices, True) - temporaries(devices, False) <= (more + 0.1) * gradient
