"""The gradient noise scale: against statistics in numpy of gradients by JAX, and of numbers whose noise is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import meshes
from jax.sharding import PartitionSpec as P

import anybatch as ab

EXAMPLES = 22


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def statistics(sums, units):
    """The textbook, in float64: from the summed gradient of each microbatch and the units that it has."""
    kept = units > 0
    sums, units = sums[kept], units[kept]
    number, total = units.sum(), np.sum(sums, axis=0)
    squares = np.sum(np.sum(sums**2, axis=1) / units)
    trace = (squares - total @ total / number) / (len(units) - 1)
    square = total @ total / number**2 - trace / number
    return trace, square, trace / square


def cut(batch, size):
    number = len(jax.tree.leaves(batch)[0])
    starts = range(0, number, size)
    return [{name: rows[start : start + size] for name, rows in batch.items()} for start in starts]


def squared_errors(params, batch):
    return jnp.sum((meshes.outputs_of(params, batch) - batch["y"]) ** 2, axis=-1)


def masked_sum(params, batch):
    return jnp.sum(squared_errors(params, batch) * batch["mask"])


def masked_pair(params, batch):
    return masked_sum(params, batch), jnp.sum(batch["mask"])


def batch_of(number=EXAMPLES):
    """Very unequal weights, and a microbatch without any."""
    batch = meshes.examples(number)
    batch["mask"] = np.where(np.arange(number) < 5, 0, np.arange(number) % 7).astype(np.float64)
    return batch


def oracle_of_mean(loss, params, batch, size):
    parts = cut(batch, size)
    units = np.asarray([len(part["x"]) for part in parts], np.float64)
    means = np.stack([flat(jax.grad(loss)(params, part)) for part in parts])
    return statistics(means * units[:, None], units)


def oracle_of_weights(params, batch, size):
    parts = cut(batch, size)
    units = np.asarray([part["mask"].sum() for part in parts])
    return statistics(np.stack([flat(jax.grad(masked_sum)(params, part)) for part in parts]), units)


def told(noise):
    return np.asarray([noise.trace, noise.gradient_square, noise.value], np.float64)


def noise_of(loss, params, batch, **options):
    return ab.noise_scale(loss, **options)(params, batch)[2]


def decayed(params, batch):
    return meshes.mean(params, batch) + 0.3 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


# Sizes that no number of devices divides: microbatches are then of consecutive examples, in every reading.
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 3, 11])
@pytest.mark.parametrize("options", [{}, {"reduction": "mean"}], ids=["read", "declared"])
@pytest.mark.parametrize("loss", [meshes.mean, decayed], ids=lambda loss: loss.__name__)
def test_statistics_of_a_mean(float64, loss, options, size):
    """Even and ragged; a term of the parameters is in the gradient and has no noise."""
    params, batch = meshes.parameters(), batch_of()
    noise = noise_of(loss, params, batch, microbatch_size=size, **options)
    np.testing.assert_allclose(told(noise), oracle_of_mean(loss, params, batch, size), rtol=1e-9)
    assert (noise.units, noise.microbatches, noise.steps) == (EXAMPLES, -(-EXAMPLES // size), 1)


def two_ways(params, batch):
    """A mean whose weight is at least 1, as whole numbers and in another dtype."""
    kept = jnp.asarray(batch["mask"]).astype(jnp.int32)
    total = jnp.sum(squared_errors(params, batch) * kept.astype(jnp.float64))
    return total * (1 / jnp.maximum(jnp.sum(kept), 1).astype(jnp.float64))


def normed(params, batch):
    """A mean over entries, with a term of the parameters, and a denominator that is never 0."""
    weight = jnp.sum(batch["mask"]) + 1e-9
    return 0.5 * masked_sum(params, batch) / weight + 0 * jnp.sum(params["w"])


WEIGHTED = [
    (masked_pair, {"reduction": "weighted"}),
    (meshes.masked, {}),
    (two_ways, {}),
    (normed, {}),
]


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("loss, options", WEIGHTED, ids=lambda each: getattr(each, "__name__", ""))
def test_statistics_of_a_weighted_mean(float64, loss, options, size):
    """Microbatches count by their weights, and those without any do not count."""
    params, batch = meshes.parameters(), batch_of()
    noise = noise_of(loss, params, batch, microbatch_size=size, **options)
    scale = 0.25 if loss is normed else 1
    expected = oracle_of_weights(params, batch, size) * np.asarray([scale, scale, 1])
    np.testing.assert_allclose(told(noise), expected, rtol=1e-8)
    assert noise.units == batch["mask"].sum()
    assert noise.microbatches < -(-EXAMPLES // size)


def test_units_are_what_the_denominator_counts(float64):
    """Entries, if it counts these: then there are more of them, and the noise of one is larger."""

    def of_entries(params, batch):
        kept = jnp.broadcast_to(jnp.asarray(batch["mask"])[:, None] > 3, (EXAMPLES, 4))
        return jnp.mean((meshes.outputs_of(params, batch) - batch["y"]) ** 2, where=kept)

    params, batch = meshes.parameters(), batch_of()
    entries = noise_of(of_entries, params, batch, microbatch_size=3)
    batch["mask"] = (batch["mask"] > 3).astype(np.float64)
    examples = noise_of(meshes.masked, params, batch, microbatch_size=3)
    assert entries.units == 4 * examples.units
    np.testing.assert_allclose(entries.value, 4 * examples.value, rtol=1e-9)


@jax.custom_vjp
def clipped_backward(rows):
    return rows


clipped_backward.defvjp(lambda rows: (rows, None), lambda _, cotangent: (jnp.clip(cotangent, -0.05, 0.05),))


def test_a_weighted_mean_whose_backward_pass_is_not_linear(float64):
    """It must see its own factor, so that the weight is added up beforehand: and is known for microbatches still."""

    def total(params, batch):
        rows = clipped_backward(meshes.outputs_of(params, batch))
        return jnp.sum(jnp.sum((rows - batch["y"]) ** 2, axis=-1) * batch["mask"])

    params, batch = meshes.parameters(), batch_of()
    number = batch["mask"].sum()
    noise = noise_of(lambda p, b: total(p, b) / jnp.sum(b["mask"]), params, batch, microbatch_size=3)
    parts = cut(batch, 3)
    sums = [number * flat(jax.grad(lambda p, part=part: total(p, part) / number)(params)) for part in parts]
    units = np.asarray([part["mask"].sum() for part in parts])
    np.testing.assert_allclose(told(noise), statistics(np.stack(sums), units), rtol=1e-8)
    plain = noise_of(meshes.masked, params, batch, microbatch_size=3)
    assert abs(plain.value / noise.value - 1) > 0.01  # the control: it is not linear


def test_unweighted_statistics_would_differ(float64):
    """The control: by examples, the noise of a weighted mean is another."""
    params, batch = meshes.parameters(), batch_of()
    weighted = noise_of(masked_pair, params, batch, microbatch_size=3, reduction="weighted")
    parts = cut(batch, 3)
    sums = np.stack([flat(jax.grad(masked_sum)(params, part)) for part in parts])
    by_examples = statistics(sums, np.asarray([len(part["x"]) for part in parts], np.float64))
    assert abs(by_examples[2] / told(weighted)[2] - 1) > 0.2


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}], ids=["read", "declared"])
def test_a_sum_has_the_noise_scale_of_the_mean(float64, options):
    params, batch = meshes.parameters(), batch_of()
    value = noise_of(meshes.total, params, batch, microbatch_size=3, **options).value
    mean = noise_of(meshes.mean, params, batch, microbatch_size=3).value
    np.testing.assert_allclose(value, mean, rtol=1e-9)


def test_a_function_of_a_mean_has_its_noise_scale(float64):
    params, batch = meshes.parameters(), batch_of()
    _, grad, noise = ab.noise_scale(meshes.rmse, microbatch_size=3)(params, batch)
    np.testing.assert_allclose(noise.value, noise_of(meshes.mean, params, batch, microbatch_size=3).value, rtol=1e-9)
    np.testing.assert_allclose(noise.gradient_square + noise.trace / EXAMPLES, flat(grad) @ flat(grad), rtol=1e-9)


LOSSES = [meshes.mean, meshes.masked, meshes.rmse, meshes.dropped, meshes.looked_up, decayed, masked_pair]


@pytest.mark.parametrize("loss", [*LOSSES[:2], *(pytest.param(loss, marks=pytest.mark.full) for loss in LOSSES[2:])])
def test_value_and_gradient_are_those_of_value_and_grad(float64, loss):
    params, batch = meshes.parameters(), batch_of()
    options = {"microbatch_size": 4, "reduction": "weighted" if loss is masked_pair else "infer"}
    expected = ab.value_and_grad(loss, **options)(params, batch)
    value, grad, noise = ab.noise_scale(loss, **options)(params, batch)
    assert meshes.worst((value, grad), expected) < 1e-13
    assert isinstance(noise, ab.NoiseScale) and noise.steps == 1


@pytest.mark.slow
def test_aux_and_narrow_parameters():
    """aux is that of the batch; gradients in bfloat16 are measured before they are rounded."""
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(EXAMPLES, np.float32)
    options = {"has_aux": True, "microbatch_size": 5}
    (value, aux), grad, _ = ab.noise_scale(meshes.with_aux, **options)(params, batch)
    assert meshes.worst(((value, aux), grad), ab.value_and_grad(meshes.with_aux, **options)(params, batch)) < 1e-5

    narrow, few = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), (params, batch))
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (narrow, few))
    for options in ({}, {"reduction": "mean"}):  # the declared one is divided at the end
        noise = noise_of(meshes.mean, narrow, few, microbatch_size=5, **options)
        expected = noise_of(meshes.mean, *wide, microbatch_size=5)
        np.testing.assert_allclose(told(noise), told(expected), rtol=0.05)


@pytest.mark.slow
def test_a_weight_with_a_gradient(float64):
    """The gradient of a ratio counts, not that of its total."""

    def pair(params, batch):
        weights = jnp.exp(jnp.tanh(batch["x"] @ params["w"])[:, 0])
        return jnp.sum(squared_errors(params, batch) * weights), jnp.sum(weights)

    params, batch = meshes.parameters(), batch_of()
    value, _, noise = ab.noise_scale(pair, reduction="weighted", microbatch_size=3)(params, batch)
    sums, units = [], []
    for part in cut(batch, 3):
        of_total, of_weight = (flat(jax.grad(lambda p, i=i, part=part: pair(p, part)[i])(params)) for i in (0, 1))
        sums.append(of_total - float(value) * of_weight)
        units.append(float(pair(params, part)[1]))
    expected = statistics(np.stack(sums), np.asarray(units))
    np.testing.assert_allclose(told(noise), expected, rtol=1e-9)
    exact = noise_of(pair, params, batch, reduction="weighted", exact=True)
    single = noise_of(pair, params, batch, reduction="weighted", microbatch_size=1)
    np.testing.assert_allclose(told(exact), told(single), rtol=1e-9)


# Known noise: the gradient of an example is G plus normal numbers, and the loss is linear in the parameters.


def linear(w, batch):
    return jnp.mean(batch @ w)


def average_of_draws(units, draws=4000, dim=3, deviation=2.0, seed=0):
    """The averages over many draws of both estimates, from sums of `units[k]` gradients, and what they should be."""
    random = np.random.default_rng(seed)
    G, units = np.asarray([1.0, -0.5, 0.25]), np.asarray(units, np.float64)
    sums = units[:, None] * G + np.sqrt(units)[:, None] * random.normal(size=(draws, len(units), dim)) * deviation
    norms, means = np.linalg.norm(sums, axis=-1), np.linalg.norm(sums.sum(axis=1), axis=-1) / units.sum()
    of_draws = jax.vmap(lambda norms, mean: ab.NoiseScale.of_microbatches(norms, units, mean))(norms, means)
    total = jax.tree.map(jnp.sum, of_draws)
    return total, of_draws, dim * deviation**2, G @ G


@pytest.mark.parametrize("units", [[4, 4, 4], [1, 2, 9], [1, 30]], ids=str)
def test_unbiased_on_draws_of_known_noise(float64, units):
    total, of_draws, trace, square = average_of_draws(units)
    for average, each, true in (
        (total.trace, of_draws.trace, trace),
        (total.gradient_square, of_draws.gradient_square, square),
    ):
        error = np.std(each) / np.sqrt(len(each))
        assert abs(average - true) < 4 * error
    np.testing.assert_allclose(total.value, trace / square, rtol=0.25)


def test_other_formulas_are_biased(float64):
    """The controls: ragged microbatches that all count alike, and an average of ratios."""
    units = np.asarray([1.0, 2.0, 9.0])
    random = np.random.default_rng(1)
    G = np.asarray([1.0, -0.5, 0.25])
    sums = units[:, None] * G + np.sqrt(units)[:, None] * random.normal(size=(4000, 3, 3)) * 2
    alike = np.asarray([statistics(each, np.full(3, 4.0))[0] for each in sums])
    assert abs(alike.mean() - 12) > 10 * alike.std() / np.sqrt(len(alike))

    _, of_draws, trace, square = average_of_draws([4, 4, 4])
    ratios = of_draws.trace / of_draws.gradient_square
    assert abs(np.mean(ratios) / (trace / square) - 1) > 0.25
    assert np.any(of_draws.gradient_square < 0)  # which is why


def test_unbiased_through_the_loss(float64):
    """The same, for the gradients of a loss on ragged microbatches, averaged over steps as in training."""
    G, step = jnp.asarray([1.0, -0.5]), ab.noise_scale(linear, microbatch_size=3)

    def one(average, key):
        batch = G[None] + 2 * jax.random.normal(key, (8, 2))
        return average + step(jnp.zeros(2), batch)[2], None

    keys = jax.random.split(jax.random.key(0), 3000)
    average, _ = jax.jit(lambda keys: jax.lax.scan(one, ab.NoiseScale.empty(jnp.float64), keys))(keys)
    assert average.steps == 3000
    np.testing.assert_allclose(average.trace, 8.0, rtol=0.08)
    np.testing.assert_allclose(average.gradient_square, 1.25, rtol=0.12)


# Averages, and what is undefined.


def test_averages_are_ratios_of_averages():
    one = ab.NoiseScale.of_examples([3.0, 5.0], 3.5)
    two = ab.NoiseScale.of_examples([1.0, 2.0, 4.0], 2.0)
    both = one + two
    np.testing.assert_allclose(both.trace, (one.trace + two.trace) / 2, rtol=1e-6)
    np.testing.assert_allclose(both.value, (one.trace + two.trace) / (one.gradient_square + two.gradient_square))
    assert abs(both.value - (one.value + two.value) / 2) > 0.05  # the control
    np.testing.assert_allclose(told(sum([one, two])), told(both))
    faded = 0.5 * one + two
    np.testing.assert_allclose(faded.trace, (0.5 * one.trace + two.trace) / 1.5, rtol=1e-6)
    np.testing.assert_allclose(told(ab.NoiseScale.empty() + one), told(one))


def test_a_step_without_an_estimate_has_no_share_in_an_average():
    one = ab.NoiseScale.of_examples([3.0, 5.0], 3.5)
    single = ab.NoiseScale.of_examples([3.0], 3.0)
    np.testing.assert_allclose(told(one + single), told(one))
    with pytest.raises(TypeError):
        one + 1.0


@pytest.mark.parametrize(
    "noise, value, why",
    [
        (ab.NoiseScale.of_examples([3.0], 3.0), np.nan, "there was only one"),
        (ab.NoiseScale.of_examples([], 0.0), np.nan, "no units"),
        (ab.NoiseScale.of_microbatches([0.0, 0.0], [0, 0], 0.0), np.nan, "no units"),
        (ab.NoiseScale.of_examples([1.0, 1.0], 0.1), np.inf, "the noise hides the gradient"),
        (ab.NoiseScale.of_examples([0.0, 0.0], 0.0), np.nan, "the gradient is 0"),
        (ab.NoiseScale.of_examples([np.inf, 1.0], np.inf), np.nan, "not finite"),
        (ab.NoiseScale.of_examples([2.0, 2.0], 2.0), 0.0, ""),
    ],
)
def test_undefined_says_why(noise, value, why):
    np.testing.assert_array_equal(noise.value, np.float32(value))
    assert bool(noise.is_defined) == (why == "") == (noise.why_undefined == "")
    assert why in noise.why_undefined and why in str(noise)


@pytest.mark.parametrize(
    "size, options", [(None, {}), ("auto", {}), (EXAMPLES, {"reduction": "mean"}), (100, {})], ids=str
)
def test_one_microbatch_is_undefined(size, options):
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(EXAMPLES, np.float32)
    fun = ab.noise_scale(meshes.mean, microbatch_size=size, **options)
    value, grad, noise = fun(params, batch)
    assert meshes.worst((value, grad), jax.value_and_grad(meshes.mean)(params, batch)) < 1e-6
    assert np.isnan(noise.value) and np.isnan(noise.trace) and noise.microbatches == 1
    assert "only one" in noise.why_undefined


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"exact": True}], ids=str)
def test_no_examples_are_undefined(options):
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(0, np.float32)
    value, _, noise = ab.noise_scale(meshes.total, microbatch_size=4, **options)(params, batch)
    assert value == 0 and np.isnan(noise.value) and "no units" in noise.why_undefined


def test_no_weight_is_undefined():
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(EXAMPLES, np.float32)
    batch["mask"] = np.zeros(EXAMPLES, np.float32)
    noise = noise_of(masked_pair, params, batch, microbatch_size=5, reduction="weighted")
    assert np.isnan(noise.value) and "no units" in noise.why_undefined


def test_a_gradient_without_examples_has_no_noise():
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(EXAMPLES, np.float32)
    noise = noise_of(meshes.parameters_alone, params, batch, microbatch_size=5)
    assert noise.value == 0 and noise.trace == 0


# Exact: from the norms of single examples.


def oracle_of_examples(loss, params, batch):
    return oracle_of_mean(loss, params, batch, 1)


@pytest.mark.parametrize("loss, size", [(meshes.mean, None), (decayed, 7)], ids=["mean", "decayed"])
def test_exact_is_the_statistics_of_examples(float64, loss, size):
    params, batch = meshes.parameters(), batch_of()
    fun = ab.noise_scale(loss, microbatch_size=size, exact=True)
    value, grad, noise = fun(params, batch)
    np.testing.assert_allclose(told(noise), oracle_of_examples(loss, params, batch), rtol=1e-9)
    assert meshes.worst((value, grad), ab.value_and_grad(loss, microbatch_size=size)(params, batch)) == 0


@pytest.mark.full
def test_exact_of_sums_and_weights(float64):
    params, batch = meshes.parameters(), batch_of()
    for loss, reduction in ((meshes.total, "infer"), (masked_pair, "weighted")):
        exact = noise_of(loss, params, batch, reduction=reduction, microbatch_size=5, exact=True)
        single = noise_of(loss, params, batch, reduction=reduction, microbatch_size=1)
        np.testing.assert_allclose(told(exact), told(single), rtol=1e-9)
    np.testing.assert_allclose(told(exact), oracle_of_weights(params, batch, 1), rtol=1e-9)


@pytest.mark.full
def test_exact_does_not_depend_on_the_microbatches(float64):
    """And what is not exact does: the control."""
    params, batch = meshes.parameters(), batch_of()
    exact = [told(noise_of(meshes.mean, params, batch, microbatch_size=size, exact=True)) for size in (3, 5)]
    others = [told(noise_of(meshes.mean, params, batch, microbatch_size=size)) for size in (3, 5)]
    np.testing.assert_allclose(exact[0], exact[1], rtol=1e-12)
    assert abs(others[0][2] / others[1][2] - 1) > 0.01


@pytest.mark.full
def test_exact_with_aux_and_keys():
    def dropped(params, batch, key):
        rows = meshes.outputs_of(params, batch) * jax.random.bernoulli(key, 0.5, (len(batch["x"]), 4)).astype("float32")
        return jnp.mean((rows - batch["y"]) ** 2), rows

    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(64, np.float32)
    options = {"has_aux": True, "rng_argnums": 2, "microbatch_size": 8}
    (_, rows), _, noise = ab.noise_scale(dropped, **options, exact=True)(params, batch, jax.random.key(1))
    assert rows.shape == (64, 4) and noise.is_defined
    drawn = ab.noise_scale(dropped, **options)(params, batch, jax.random.key(1))[2]
    np.testing.assert_allclose(noise.trace, drawn.trace, rtol=0.5)


@pytest.mark.full
def test_exact_on_a_mesh():
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(24, np.float32)
    here = noise_of(meshes.mean, params, batch, microbatch_size=3, exact=True)
    there = noise_of(meshes.mean, params, batch, microbatch_size=3, exact=True, mesh=meshes.mesh_of(4))
    np.testing.assert_allclose(told(there), told(here), rtol=1e-4)


# On a mesh.


@pytest.mark.parametrize(
    "loss, options", [(meshes.mean, {}), pytest.param(*WEIGHTED[0], marks=pytest.mark.full), WEIGHTED[1]]
)
def test_the_same_on_1_2_and_8_devices(float64, loss, options):
    params, batch = meshes.parameters(), batch_of(48)
    expected = oracle_of_weights(params, batch, 3) if loss is not meshes.mean else None
    expected = oracle_of_mean(loss, params, batch, 3) if expected is None else expected
    for devices in (1, 2, 8):
        mesh = meshes.mesh_of(devices)
        noise = noise_of(loss, params, batch, microbatch_size=3, mesh=mesh, **options)
        np.testing.assert_allclose(told(noise), expected, rtol=1e-8)


def test_the_squares_join_the_one_reduction():
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(48, np.float32)
    mesh = meshes.mesh_of(8)
    for loss in (meshes.mean, meshes.masked):
        fun = ab.noise_scale(loss, microbatch_size=3, mesh=mesh)
        args = meshes.spread(params, mesh), meshes.spread(batch, mesh, "data")
        assert meshes.traffic(fun, mesh, *args).executed == 1


@pytest.mark.full
@pytest.mark.parametrize(
    "axes, number", [pytest.param((8,), 45, marks=pytest.mark.full), ((2, 2), 25), ((4,), 3)], ids=str
)
def test_uneven_examples_and_axes_of_the_model(float64, axes, number):
    params, batch = meshes.parameters(), batch_of(number)
    mesh = meshes.mesh_of(*axes)
    value, grad, noise = ab.noise_scale(meshes.mean, microbatch_size=1, mesh=mesh)(params, batch)
    np.testing.assert_allclose(told(noise), oracle_of_mean(meshes.mean, params, batch, 1), rtol=1e-8)
    assert meshes.worst((value, grad), jax.value_and_grad(meshes.mean)(params, batch)) < 1e-12


@pytest.mark.full
def test_sharded_parameters_and_reproducible_sums(float64):
    params, batch = meshes.parameters(), batch_of(48)
    expected = oracle_of_mean(meshes.mean, params, batch, 3)
    specs = {"w": P(None, "data"), "v": P("data"), "b": None}
    options = {"microbatch_size": 3, "mesh": meshes.mesh_of(4)}
    for more in ({"param_specs": specs}, {"reproducible": True}, {"remat": "nothing_saveable"}):
        np.testing.assert_allclose(told(noise_of(meshes.mean, params, batch, **options, **more)), expected, rtol=1e-8)


# What is refused.


def two_denominators(params, batch):
    errors = squared_errors(params, batch)
    return masked_sum(params, batch) / jnp.sum(batch["mask"]) + jnp.sum(errors) / jnp.sum(batch["x"] ** 2)


def by_root(params, batch):
    return masked_sum(params, batch) / jnp.sqrt(jnp.sum(batch["mask"]))


def learned_factor(params, batch):
    return params["b"][0] * meshes.masked(params, batch)


@pytest.mark.parametrize(
    "loss", [two_denominators, by_root, learned_factor, meshes.standardized, meshes.against_the_data]
)
@pytest.mark.parametrize("size", [3, None])
def test_a_loss_that_does_not_say_what_microbatches_count_is_refused(loss, size):
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(EXAMPLES, np.float32)
    with pytest.raises(ab.InputError, match=r'what each microbatch counts(.|\n)*reduction="weighted"'):
        noise_of(loss, params, batch, microbatch_size=size)


@pytest.mark.full
def test_a_learned_factor_can_be_declared(float64):
    """As the message says: the same loss, declared."""

    def pair(params, batch):
        return params["b"][0] * masked_sum(params, batch), jnp.sum(batch["mask"])

    params, batch = meshes.parameters(), batch_of()
    _, grad, noise = ab.noise_scale(pair, microbatch_size=3, reduction="weighted")(params, batch)
    assert meshes.worst(grad, jax.grad(learned_factor)(params, batch)) < 1e-12 and noise.is_defined


@pytest.mark.parametrize("loss", [meshes.contrastive, meshes.two_views])
def test_a_loss_that_looks_across_examples_is_refused(loss):
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(EXAMPLES, np.float32)
    with pytest.raises(ab.CoupledError, match=r"looks across examples at .*meshes.py:\d+"):
        noise_of(loss, params, batch, microbatch_size=3)


def hard_coded(params, batch):
    return jnp.sum(squared_errors(params, batch)) / EXAMPLES


@pytest.mark.parametrize(
    "loss, message",
    [
        (meshes.masked, 'mean or a sum of terms of single examples(.|\n)*reduction="weighted"'),
        (meshes.dropped, "random numbers that are drawn for each example"),
        (meshes.looked_up, "for batches of one example add up to that of the batch(.|\n)*microbatch_size=1"),
        (hard_coded, "for batches of one example add up to that of the batch"),
    ],
)
def test_exact_refuses_what_batches_of_one_do_not_tell(loss, message):
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(EXAMPLES, np.float32)
    with pytest.raises(ab.InputError, match=message):
        noise_of(loss, params, batch, exact=True)


def test_under_jit_terms_that_do_not_make_up_the_loss_give_nan():
    params, batch = meshes.parameters(dtype=np.float32), meshes.examples(EXAMPLES, np.float32)
    _, _, noise = jax.jit(ab.noise_scale(meshes.looked_up, exact=True))(params, batch)
    assert np.isnan(noise.value) and "exact=True" in noise.why_undefined


@pytest.mark.parametrize(
    "options, message",
    [
        ({"reduce": "each", "mesh": None}, "reduce needs a mesh"),
        ({"reduce": "each"}, 'The noise scale needs reduce="once"'),
        ({"exact": 1}, "exact must be True or False, got exact=1"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ab.InputError, match=message):
        ab.noise_scale(meshes.mean, **{"mesh": meshes.mesh_of(2), **options})


def test_unknown_options_and_wrong_shapes():
    with pytest.raises(TypeError, match="microbatches"):
        ab.noise_scale(meshes.mean, microbatches=3)
    with pytest.raises(ab.InputError, match="one number for each microbatch"):
        ab.NoiseScale.of_microbatches([1.0, 2.0], [1.0], 1.0)


def test_inside_shard_map_is_refused():
    mesh, w = meshes.mesh_of(2), jnp.zeros(3)
    fun = jax.shard_map(
        ab.noise_scale(linear, microbatch_size=1), mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P(), P())
    )
    with pytest.raises(ab.InputError, match="outside shard_map"):
        fun(w, jnp.ones((4, 3)))


def test_a_plan_for_a_gradient_alone_is_not_one_for_its_noise():
    """The noise takes one more gradient, and a plan says so before anything runs out of memory."""

    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2)

    w, x = jnp.ones((256, 256)), jnp.ones((64, 256))
    needed = jax.jit(ab.value_and_grad(loss, microbatch_size=1)).lower(w, x).compile().memory_analysis()
    needed = needed.argument_size_in_bytes + needed.output_size_in_bytes + needed.temp_size_in_bytes
    ab.value_and_grad(loss, memory=needed + w.nbytes // 16)(w, x)
    with pytest.raises(ab.NothingFitsError):
        ab.noise_scale(loss, memory=needed + w.nbytes // 16)(w, x)


@pytest.mark.full
def test_vmap_over_models():
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), meshes.parameters(dtype=np.float32))
    batch = meshes.examples(EXAMPLES, np.float32)
    fun = ab.noise_scale(meshes.mean, microbatch_size=3)
    together = jax.vmap(lambda params: fun(params, batch)[2])(params)
    one = noise_of(meshes.mean, jax.tree.map(lambda leaf: leaf[1], params), batch, microbatch_size=3)
    np.testing.assert_allclose(together.value[1], one.value, rtol=1e-4)
