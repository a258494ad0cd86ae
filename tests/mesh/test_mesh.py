"""A gradient over a mesh is that of the full batch, whatever the devices, the examples and the microbatches."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import (
    ONE_PASS,
    TWO_PASSES,
    bits,
    contrastive,
    examples,
    masked,
    mean,
    mesh_of,
    outputs_of,
    parameters,
    spread,
    total,
    traffic,
    with_aux,
    worst,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import anybatch as ab

EXACT = 1e-12

pytestmark = [pytest.mark.usefixtures("float64"), pytest.mark.every_jax]


@functools.cache
def full_batch(loss, number, has_aux=False):
    return jax.value_and_grad(loss, has_aux=has_aux)(parameters(), examples(number))


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("loss", [*ONE_PASS, *TWO_PASSES], ids=lambda loss: loss.__name__)
def test_it_is_the_gradient_of_the_full_batch(loss, devices):
    fun = ab.value_and_grad(loss, microbatch_size=3, mesh=mesh_of(devices))
    assert worst(jax.jit(fun)(parameters(), examples(32)), full_batch(loss, 32)) < EXACT


def _with_regulariser(params, batch):
    return mean(params, batch) + 0.1 * jnp.sum(params["b"] ** 2)


def _root_mean_square(params, batch):
    return jnp.sqrt(mean(params, batch))


def _root_of_sum(params, batch):
    return jnp.sqrt(total(params, batch))


@pytest.mark.parametrize("sizes", [(8,), (4, 2)], ids=["data", "data and model"])
@pytest.mark.parametrize(
    "loss",
    [mean, total, masked, contrastive, _with_regulariser, _root_mean_square, _root_of_sum],
    ids=lambda loss: loss.__name__,
)
def test_no_examples_have_the_value_and_gradient_that_jax_gives_them(loss, sizes):
    expected = full_batch(loss, 0)  # NaN for means, with gradient 0
    for size in (None, 2):
        fun = ab.value_and_grad(loss, microbatch_size=size, mesh=mesh_of(*sizes))
        for call in (fun, jax.jit(fun)):
            chex.assert_trees_all_equal(call(parameters(), examples(0)), expected)


@pytest.mark.parametrize("number", [29, 5])  # more than the devices have alike, and fewer than there are devices
@pytest.mark.parametrize("loss", [masked, contrastive], ids=lambda loss: loss.__name__)
def test_examples_need_not_divide_the_devices(loss, number):
    fun = ab.value_and_grad(loss, microbatch_size=2, mesh=mesh_of(8))
    for call in (fun, jax.jit(fun)):
        assert worst(call(parameters(), examples(number)), full_batch(loss, number)) < EXACT


@pytest.mark.full
@pytest.mark.parametrize("loss", [*ONE_PASS, *TWO_PASSES], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize(
    ("number", "size"), [(29, 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((29, None), (5, 1)))]
)
def test_ragged_examples_of_every_loss(loss, number, size):
    fun = ab.value_and_grad(loss, microbatch_size=size, mesh=mesh_of(8))
    assert worst(fun(parameters(), examples(number)), full_batch(loss, number)) < EXACT


@pytest.mark.parametrize("number", [32, 29])
def test_rows_of_aux_come_in_the_order_of_the_batch(number):
    fun = ab.value_and_grad(with_aux, has_aux=True, microbatch_size=2, mesh=mesh_of(8))
    for call in (fun, jax.jit(fun)):
        assert worst(call(parameters(), examples(number)), full_batch(with_aux, number, has_aux=True)) < EXACT


def sums_and_weights(params, batch):
    losses = jnp.sum((outputs_of(params, batch) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])


@pytest.mark.parametrize("number", [32, 29])
@pytest.mark.parametrize(
    ("declared", "loss", "meant"),
    [("mean", mean, mean), ("sum", total, total), ("weighted", sums_and_weights, masked)],
    ids=["mean", "sum", "weighted"],
)
def test_declared_reductions(declared, loss, meant, number):
    fun = ab.value_and_grad(loss, reduction=declared, microbatch_size=3, mesh=mesh_of(8))
    assert worst(jax.jit(fun)(parameters(), examples(number)), full_batch(meant, number)) < EXACT


@pytest.mark.parametrize("number", [32, 29])
def test_declared_aux_is_that_of_one_device(number):
    def loss(params, batch):
        rows = outputs_of(params, batch)
        aux = {"rows": rows, "mean": jnp.mean(rows), "sum": jnp.sum(batch["label"]), "last": rows[-1], "all": rows[0]}
        return mean(params, batch), aux

    how = {"rows": None, "mean": "mean", "sum": "sum", "last": "last", "all": "stack"}
    options = {"has_aux": True, "reduction": "mean", "aux_reduction": how}
    on_mesh = ab.value_and_grad(loss, microbatch_size=2, mesh=mesh_of(4), **options)
    if number == 32:
        here = ab.value_and_grad(loss, microbatch_size=2, **options)
        assert worst(on_mesh(parameters(), examples(number)), here(parameters(), examples(number))) < EXACT
    else:  # the microbatches of 8, 7, 7 and 7 examples end elsewhere
        (value, aux), grads = on_mesh(parameters(), examples(number))
        rows = outputs_of(parameters(), examples(number))
        assert worst((value, grads), full_batch(mean, number)) < EXACT
        firsts = [0, 2, 4, 6, 8, 10, 12, 14, 15, 17, 19, 21, 22, 24, 26, 28]
        expected = {"rows": rows, "mean": jnp.mean(rows), "last": rows[-1], "all": rows[np.array(firsts)]}
        expected["sum"] = np.sum(examples(number)["label"])
        assert worst(aux, expected) < EXACT


def test_every_microbatch_of_every_device_draws_its_own_numbers():
    def loss(params, batch, key):
        rows = outputs_of(params, batch)
        drawn = jax.random.uniform(key, rows.shape)
        return jnp.sum(rows * drawn), drawn

    options = {"reduction": "sum", "has_aux": True, "rng_argnums": 2}
    for devices, size in ((8, 2), (8, None)):
        fun = ab.value_and_grad(loss, microbatch_size=size, mesh=mesh_of(devices), **options)
        (_, drawn), _ = fun(parameters(), examples(32), jax.random.key(0))
        each = 32 // devices if size is None else size
        numbers = np.asarray(drawn).reshape(-1, each * 4)
        assert len({mine.tobytes() for mine in numbers}) == len(numbers)
    # And they are those of one device at the same size.
    here = ab.value_and_grad(loss, microbatch_size=2, **options)
    there = ab.value_and_grad(loss, microbatch_size=2, mesh=mesh_of(8), **options)
    arguments = (parameters(), examples(32), jax.random.key(0))
    assert worst(there(*arguments), here(*arguments)) < EXACT


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.int64])
def test_whole_numbers_are_added_up_exactly_and_wrap_as_they_do(dtype):
    def loss(params, batch):
        small = jnp.sum(-jnp.ones(batch["label"].shape, dtype) * (batch["label"] >= 0).astype(dtype), dtype=dtype)
        large = jnp.sum(jnp.full(batch["label"].shape, np.iinfo(dtype).max // 3, dtype), dtype=dtype)
        return mean(params, batch) * small.astype(jnp.float64), {"small": small, "large": large}

    fun = ab.value_and_grad(loss, has_aux=True, microbatch_size=2, mesh=mesh_of(8))
    expected = jax.value_and_grad(loss, has_aux=True)(parameters(), examples(32))
    assert worst(fun(parameters(), examples(32)), expected) < EXACT


@pytest.mark.full
@pytest.mark.parametrize("number", [16, 13])
def test_keys_in_aux(number):
    def loss(params, batch):
        keys = jax.random.split(jax.random.key(0), batch["x"].shape[0])
        noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)
        return jnp.mean((outputs_of(params, batch) * noise - batch["y"]) ** 2), keys

    fun = ab.value_and_grad(loss, has_aux=True, microbatch_size=2, mesh=mesh_of(8))
    (value, keys), grads = fun(parameters(), examples(number))
    (expected, expected_keys), expected_grads = jax.value_and_grad(loss, has_aux=True)(parameters(), examples(number))
    assert worst((value, grads), (expected, expected_grads)) < EXACT
    assert np.array_equal(jax.random.key_data(keys), jax.random.key_data(expected_keys))


# One collective.


@pytest.mark.parametrize("loss", ONE_PASS, ids=lambda loss: loss.__name__)
def test_one_collective_for_one_pass(loss):
    mesh = mesh_of(8)
    batch = spread(examples(64), mesh, "data")
    found = traffic(ab.value_and_grad(loss, microbatch_size=2, mesh=mesh), mesh, parameters(), batch)
    assert found.by_kind == {"all-reduce": 1}
    assert found.in_loops.executed == 0


def test_one_collective_with_aux_and_counts():
    mesh = mesh_of(8)

    def loss(params, batch):
        rows = outputs_of(params, batch)
        return masked(params, batch), {"rows": rows, "count": jnp.sum(batch["label"] == 2), "mean": rows.mean(0)}

    fun = ab.value_and_grad(loss, has_aux=True, microbatch_size=2, mesh=mesh)
    assert traffic(fun, mesh, parameters(), spread(examples(64), mesh, "data")).by_kind == {"all-reduce": 1}


def test_a_loop_by_hand_has_one_in_every_microbatch():
    """The control: the same count finds what is to be avoided."""
    mesh = mesh_of(8)

    def by_hand(params, batch):
        def step(sums, microbatch):
            return jax.tree.map(jnp.add, sums, jax.grad(total)(params, microbatch)), None

        in_parts = jax.tree.map(lambda leaf: leaf.reshape(4, 2, *leaf.shape[1:]), batch)
        zeros = jax.tree.map(lambda leaf: lax.pcast(jnp.zeros_like(leaf), (), to="varying"), params)
        return lax.scan(step, zeros, in_parts)[0]

    spread_out = jax.shard_map(by_hand, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    batch = spread(examples(64), mesh, "data")
    assert traffic(spread_out, mesh, parameters(), batch).in_loops.executed >= 4


def test_two_passes_move_what_the_loss_compares_and_not_the_batch():
    mesh = mesh_of(8)
    wide = {**examples(64), "x": np.ones((64, 512))}
    params = {**parameters(), "w": jnp.ones((512, 8)) / 512}
    fun = ab.value_and_grad(contrastive, microbatch_size=2, mesh=mesh)
    found = traffic(fun, mesh, params, spread(wide, mesh, "data"))
    assert found.in_loops.executed == 0
    gathered = sum(each.bytes for each in found.collectives if each.kind == "all-gather")
    assert 0 < gathered <= 2 * 64 * 4 * 8 < wide["x"].nbytes / 8


def test_work_is_not_repeated_on_the_devices():
    """Floating-point operations of a device: an eighth of those of one device."""
    params, batch = parameters(width=256), examples(256)

    def operations(**options):
        fun = ab.value_and_grad(mean, microbatch_size=32, reduction="sum", **options)
        return jax.jit(fun).lower(params, batch).compile().cost_analysis()["flops"]

    # XLA counts the body of a loop once: at the same microbatch size, a device does what one alone does in a turn.
    assert operations(mesh=mesh_of(8)) < 1.2 * operations()


# Where arrays lie.


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("around", [False, True], ids=["", "set_mesh"])
def test_arrays_may_come_from_anywhere(explicit, around):
    mesh = mesh_of(8, explicit=explicit)
    on_mesh = spread(parameters(), mesh), spread(examples(32), mesh, "data")
    whole_batch = spread(parameters(), mesh), spread(examples(32), mesh)
    one_device = jax.device_put((parameters(), examples(32)), jax.devices()[3])
    fun = ab.value_and_grad(masked, microbatch_size=2, mesh=mesh)
    for arguments in (on_mesh, whole_batch, one_device, (parameters(), examples(32))):
        if around:
            with jax.set_mesh(mesh):
                result = fun(*arguments)
        else:
            result = fun(*arguments)
        assert worst(result, full_batch(masked, 32)) < EXACT
        assert result[1]["w"].sharding.device_set == set(mesh.devices.flat)
    for arguments in (on_mesh, whole_batch):
        if around:
            with jax.set_mesh(mesh):
                result = jax.jit(fun)(*arguments)
        else:
            result = jax.jit(fun)(*arguments)
        assert worst(result, full_batch(masked, 32)) < EXACT


def test_the_batch_is_not_copied_to_every_device():
    mesh = mesh_of(8)
    batch = {**examples(800), "x": np.ones((800, 4096))}
    params = {**parameters(), "w": jnp.ones((4096, 8)) / 4096}
    compiled = jax.jit(ab.value_and_grad(mean, microbatch_size=2, mesh=mesh)).lower(params, batch).compile()
    assert compiled.memory_analysis().argument_size_in_bytes < batch["x"].nbytes / 4
    assert compiled.memory_analysis().temp_size_in_bytes < batch["x"].nbytes / 8


@pytest.mark.full
def test_second_derivatives_and_vmap():
    mesh, params, batch = mesh_of(4), parameters(), examples(16)

    def norm(fun, params):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(fun(params, batch)))

    fun = ab.grad(masked, microbatch_size=2, mesh=mesh)
    expected = jax.grad(functools.partial(norm, jax.grad(masked)))(params)
    assert worst(jax.jit(jax.grad(functools.partial(norm, fun)))(params), expected) < EXACT
    several = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    expected = jax.vmap(jax.grad(masked), in_axes=(0, None))(several, batch)
    assert worst(jax.jit(jax.vmap(fun, in_axes=(0, None)))(several, batch), expected) < EXACT


def test_it_compiles_once():
    traces = []

    def loss(params, batch):
        traces.append(1)
        return mean(params, batch)

    step = jax.jit(ab.value_and_grad(loss, microbatch_size=2, mesh=mesh_of(8)))
    batch = spread(examples(32), mesh_of(8), "data")
    params = spread(parameters(), mesh_of(8))
    for _ in range(3):
        params = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, params, step(params, batch)[1])
    assert step._cache_size() == 1
    assert len(traces) == 1


def test_memory_is_flat_in_the_batch():
    def temporaries(number):
        params = parameters(width=64)
        fun = jax.jit(ab.value_and_grad(mean, microbatch_size=4, mesh=mesh_of(8)))
        return fun.lower(params, examples(number)).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8192) <= 1.05 * temporaries(512)


# Verified and planned.


@pytest.mark.full
def test_verify_compares_meshes():
    found = ab.verify(masked, parameters(), examples(20), meshes=[mesh_of(2), mesh_of(8)], microbatch_sizes=(1, 3))
    assert found.ok
    assert [route.name for route in found.routes] == [
        *("microbatch_size=1", "microbatch_size=3", "microbatch_size=1, mesh(data=2)"),
        *("microbatch_size=3, mesh(data=2)", "microbatch_size=1, mesh(data=8)", "microbatch_size=3, mesh(data=8)"),
    ]


def test_results_do_not_depend_on_the_number_of_devices_beyond_rounding():
    results = [
        jax.jit(ab.value_and_grad(masked, microbatch_size=2, mesh=mesh_of(devices)))(parameters(), examples(32))
        for devices in (1, 2, 8)
    ]
    assert max(worst(result, results[0]) for result in results) < 1e-14
    assert len({bits(result) for result in results}) > 1  # the control of those that are to have the same bits


@pytest.mark.every_jax
@pytest.mark.parametrize("microbatch_size", [3, 4, None])
def test_a_bfloat16_mean_of_shares_of_different_size(microbatch_size):
    """One device has four examples in a microbatch, the other three: the gradient of each counts by its share."""

    def loss(w, x):
        return jnp.mean(w * x).astype(jnp.bfloat16)

    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    x = jnp.arange(1, 8, dtype=jnp.float32) ** 2
    gradient = ab.grad(loss, microbatch_size=microbatch_size, reduction="mean", mesh=mesh)(jnp.float32(0.5), x)
    np.testing.assert_allclose(gradient, jnp.mean(x), rtol=1e-6)


@pytest.mark.every_jax
def test_narrow_and_wide_sums_in_one_collective():
    """They are added up in one dtype, also where JAX is configured to promote none."""

    def loss(params, x):
        return jnp.mean((params["narrow"].astype(jnp.float32) * params["wide"] * x) ** 2)

    params = {"narrow": jnp.bfloat16(0.5), "wide": jnp.float32(3.0)}
    x = jnp.arange(1, 8, dtype=jnp.float32)
    expected = jax.grad(loss)(params, x)
    with jax.numpy_dtype_promotion("strict"):
        gradient = ab.grad(loss, microbatch_size=3, mesh=mesh_of(2), accumulator_dtype=None)(params, x)
    assert (gradient["narrow"].dtype, gradient["wide"].dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(gradient["wide"], expected["wide"], rtol=1e-6)
    np.testing.assert_allclose(np.float32(gradient["narrow"]), np.float32(expected["narrow"]), rtol=2**-6)


def windows(params, batch):
    """Operations that pad one array of all examples, each with another number."""
    rows = outputs_of(params, batch)
    return {
        "sum": jnp.cumsum(rows, axis=0),
        "product": jnp.cumprod(rows, axis=0),
        "largest": lax.cummax(rows, axis=0),
        "padded": jnp.pad(rows, ((1, 1), (0, 0)), constant_values=5.0),
        "window": lax.reduce_window(rows, jnp.inf, lax.min, (3, 1), (1, 1), "SAME"),
    }


@pytest.mark.parametrize("devices", [2, 8])
def test_operations_that_pad_one_array_with_several_numbers(devices):
    """XLA of JAX 0.10 and 0.11 divides such an array among devices, and pads it with the first of the numbers."""
    mapped = ab.map_batch(windows, microbatch_size=3, mesh=mesh_of(devices))
    assert worst(mapped(parameters(), examples(32)), windows(parameters(), examples(32))) < EXACT


def sums_and_products(rows):
    return jnp.cumsum(rows, axis=0), jnp.cumprod(rows, axis=0)


@jax.custom_jvp
def with_jvp(rows):
    return sums_and_products(rows)


@with_jvp.defjvp
def _(primals, tangents):
    return sums_and_products(*primals), (jnp.cumsum(*tangents, axis=0),) * 2


@jax.custom_vjp
def with_vjp(rows):
    return sums_and_products(rows)


with_vjp.defvjp(lambda rows: (sums_and_products(rows), None), lambda _, cotangents: (jnp.add(*cotangents),))

NESTED = {
    "jit": jax.jit(sums_and_products),
    "checkpoint": jax.checkpoint(sums_and_products),
    "scan": lambda rows: lax.scan(lambda carry, _: (carry, sums_and_products(rows)), None, jnp.arange(2))[1],
    "cond": lambda rows: lax.cond(rows[0, 0] < 9, sums_and_products, lambda rows: (rows, rows), rows),
    "while": lambda rows: lax.fori_loop(0, 2, lambda _, both: sums_and_products(jnp.sin(both[1])), (rows, rows)),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
}


@pytest.mark.full
@pytest.mark.parametrize("nested", NESTED.values(), ids=NESTED)
def test_operations_that_pad_in_nested_functions(nested):
    def fun(params, batch):
        return nested(jnp.tanh(outputs_of(params, batch)))

    def loss(params, batch):
        return sum(jnp.sum(jnp.sin(leaf / 100)) for leaf in fun(params, batch))

    given, mesh = (parameters(), examples(32)), mesh_of(2)
    assert worst(ab.map_batch(fun, microbatch_size=8, mesh=mesh)(*given), fun(*given)) < EXACT
    expected = jax.value_and_grad(loss)(*given)
    assert worst(ab.value_and_grad(loss, microbatch_size=8, mesh=mesh)(*given), expected) < EXACT
    assert worst(jax.grad(ab.map_batch(loss, microbatch_size=8, mesh=mesh))(*given), expected[1]) < EXACT


def test_the_padding_goes_wrong_without_a_barrier():
    """The control, until XLA is right."""
    if jax.__version_info__ >= (0, 12):
        pytest.skip("XLA is right")
    batch = spread(examples(32), mesh_of(2), "data")
    assert worst(jax.jit(windows)(parameters(), batch), windows(parameters(), examples(32))) > 0.5


def extremes(params, batch):
    rows = outputs_of(params, batch)
    return {
        "largest": jnp.max(rows),
        "smallest": jnp.min(rows, axis=0),
        "scaled": rows / rows.max(axis=0, keepdims=True),
        "by_label": jax.ops.segment_max(rows, batch["label"], 4),
        "gradient": jax.grad(lambda v: jnp.max(jnp.tanh(batch["x"] @ params["w"]) @ v))(params["v"]),
    }


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("row", [None, 0, 31])
def test_nan_in_one_row_reaches_the_largest_value_of_all_devices(devices, row):
    batch = examples(32)
    if row is not None:
        batch["x"][row, 1] = np.nan
    actual = ab.map_batch(extremes, microbatch_size=3, mesh=mesh_of(devices))(parameters(), batch)
    expected = jax.jit(extremes)(parameters(), batch)
    chex.assert_trees_all_close(actual, expected, rtol=EXACT)
    assert bool(jnp.isnan(actual["largest"])) == (row is not None)
