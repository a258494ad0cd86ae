"""`block_size=` on a mesh: the part of a loss that looks across examples runs in blocks that are local to a device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import bits, mesh_of, traffic, worst
from cases.wide_losses import WIDE
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import anybatch as ab
from anybatch.jaxprs import versions
from anybatch.mesh.sharded import ShardedExecutor
from anybatch.reading import block_loop, blocks

EXACT = 1e-12

pytestmark = [pytest.mark.every_jax, pytest.mark.filterwarnings("ignore::anybatch.LargeHeadWarning")]


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def towers(params, batch):
    return unit(jnp.tanh(batch["a"] @ params["a"])), unit(jnp.tanh(batch["b"] @ params["b"]))


def clip(params, batch):
    one, other = towers(params, batch)
    logits = jnp.exp(params["scale"]) * one @ other.T
    right = jnp.diagonal(logits)
    return jnp.mean(jax.nn.logsumexp(logits, 1) + jax.nn.logsumexp(logits, 0) - 2 * right)


def siglip(params, batch):
    one, other = towers(params, batch)
    logits = jnp.exp(params["scale"]) * one @ other.T + params["bias"]
    sign = 2 * jnp.eye(logits.shape[0], dtype=logits.dtype) - 1
    return -jnp.sum(jax.nn.log_sigmoid(sign * logits)) / logits.shape[0]


def nt_xent(params, batch):
    """Two views in one array of 2N rows."""
    rows = jnp.concatenate(towers(params, batch))
    number = rows.shape[0]
    logits = jnp.where(jnp.eye(number, dtype=bool), -1e9, 2 * (rows @ rows.T))
    other_view = (jnp.arange(number) + number // 2) % number
    right = jnp.take_along_axis(logits, other_view[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, 1) - right)


def same_label(batch):
    return batch["label"][:, None] == batch["label"][None]


def supervised_contrastive(params, batch):
    rows, _ = towers(params, batch)
    logits, is_self = 3 * rows @ rows.T, jnp.eye(rows.shape[0], dtype=bool)
    same = same_label(batch) & ~is_self
    scores = logits - jax.nn.logsumexp(jnp.where(is_self, -1e9, logits), 1, keepdims=True)
    number = jnp.maximum(same.sum(1), 1).astype(logits.dtype)
    return -jnp.mean(jnp.where(same, scores, 0.0).sum(1) / number)


def hardest_triplets(params, batch):
    rows, _ = towers(params, batch)
    distances, same = 2 - 2 * rows @ rows.T, same_label(batch)
    farthest = jnp.max(jnp.where(same & ~jnp.eye(rows.shape[0], dtype=bool), distances, 0.0), 1)
    nearest = jnp.min(jnp.where(same, 9.0, distances), 1)
    return jnp.mean(jax.nn.softplus(farthest - nearest + 0.2))


def dropout_on_pairs(params, batch):
    """Every pair has its own random number, and every row its own weight."""
    one, other = towers(params, batch)
    logits = 3 * one @ other.T
    kept = jax.random.bernoulli(jax.random.key(3), 0.8, logits.shape) | jnp.eye(logits.shape[0], dtype=bool)
    losses = jax.nn.logsumexp(jnp.where(kept, logits / 0.8, -1e9), 1) - jnp.diagonal(logits)
    return jnp.mean(losses * (1 + jnp.arange(logits.shape[0])).astype(losses.dtype))


def hard_examples(params, batch):
    """The cotangents depend on the results, so that each block is computed twice."""
    one, other = towers(params, batch)
    logits = 3 * one @ other.T
    losses = jax.nn.logsumexp(logits, 1) - jnp.diagonal(logits)
    return jnp.sum(jax.nn.softmax(losses) * losses)


def barlow_twins(params, batch):
    """A matrix of features, whose rows are not examples."""
    one, other = batch["a"] @ params["wide_a"], batch["b"] @ params["wide_b"]
    one, other = ((each - each.mean(0, keepdims=True)) / (1e-3 + each.std(0, keepdims=True)) for each in (one, other))
    products = one.T @ other / one.shape[0]
    diagonal = jnp.eye(products.shape[0], dtype=bool)
    return jnp.sum(jnp.where(diagonal, (products - 1) ** 2, 0.005 * products**2))


def vicreg(params, batch):
    one, other = batch["a"] @ params["wide_a"], batch["b"] @ params["wide_b"]
    total = jnp.mean((one - other) ** 2)
    for rows in (one, other):
        rows = rows - rows.mean(0, keepdims=True)
        products = rows.T @ rows / (rows.shape[0] - 1)
        off = jnp.where(jnp.eye(products.shape[0], dtype=bool), 0.0, products)
        total += jnp.mean(jax.nn.relu(1 - jnp.sqrt(rows.var(0) + 1e-4))) + jnp.sum(off**2) / products.shape[0]
    return total


PAIRS = [
    clip,
    nt_xent,
    dropout_on_pairs,
    hard_examples,
    siglip,
    supervised_contrastive,
    hardest_triplets,
]
FEATURES = [barlow_twins, vicreg]


def arguments(examples, width=6, features=None, dtype=np.float64):
    random = np.random.default_rng(0)
    features = 12 * examples if features is None else features
    shapes = {"a": (5, width), "b": (5, width), "wide_a": (5, features), "wide_b": (5, features)}
    params = {name: jnp.asarray(random.normal(size=shape), dtype) for name, shape in shapes.items()}
    params |= {"scale": jnp.asarray(0.7, dtype), "bias": jnp.asarray(-0.3, dtype)}
    batch = {name: random.normal(size=(examples, 5)).astype(dtype) for name in "ab"}
    return params, {**batch, "label": np.arange(examples, dtype=np.int32) % 5}


@functools.cache
def full_batch(loss, examples):
    return jax.jit(jax.value_and_grad(loss))(*arguments(examples))


def over(mesh, loss, block_size, **options):
    return ab.value_and_grad(loss, mesh=mesh, microbatch_size=2, block_size=block_size, **options)


@pytest.fixture
def regions_on_devices(monkeypatch):
    """Counts the regions that devices divide among them."""
    found = []
    run = blocks._Run._region

    def counted(self, region):
        if self.program.over_rows is not block_loop.here:
            found.append(region)
        return run(self, region)

    monkeypatch.setattr(blocks._Run, "_region", counted)
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("examples", [32, 29])  # the devices divide them, or they do not
@pytest.mark.parametrize("loss", [*PAIRS, *FEATURES], ids=lambda loss: loss.__name__)
def test_it_is_the_gradient_of_the_full_batch(loss, examples, devices, regions_on_devices):
    fun = over(mesh_of(devices), loss, 3)  # the last block is smaller
    assert worst(fun(*arguments(examples)), full_batch(loss, examples)) < EXACT
    assert regions_on_devices


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("examples", [32, 29])
def test_the_comparison_can_fail(examples, monkeypatch):
    """The control: positions and random numbers are those of the first device on every device."""
    run = ShardedExecutor.over_rows.fget

    def without_offset(self):
        return lambda fun, *rest: run(self)(lambda _, *more: fun(0, *more), *rest)

    monkeypatch.setattr(ShardedExecutor, "over_rows", property(without_offset))
    found = over(mesh_of(8), dropout_on_pairs, 3)(*arguments(examples))
    # With an uneven batch, every device has all rows.
    assert (worst(found, full_batch(dropout_on_pairs, examples)) > 1e-3) is (examples == 32)


@pytest.mark.full
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("examples", [32, 29])
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (lambda: mesh_of(4, 2), {}),
        (lambda: mesh_of(4, 2), {"axis_name": ("data", "model")}),
        (lambda: mesh_of(8, explicit=True), {}),
        (lambda: mesh_of(4, 2, explicit=True), {}),
    ],
    ids=["data and model", "two axes of data", "explicit", "explicit data and model"],
)
def test_meshes_of_every_kind(mesh, options, examples):
    for loss in (nt_xent, dropout_on_pairs):
        fun = over(mesh(), loss, 3, **options)
        for call in (fun, jax.jit(fun)):
            assert worst(call(*arguments(examples)), full_batch(loss, examples)) < EXACT


@pytest.mark.full
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("axis", ["data", "model"])
def test_parameters_that_are_sharded(axis):
    mesh = mesh_of(4, 2)
    params, batch = arguments(32, width=8)
    expected = jax.value_and_grad(clip)(params, batch)
    spec = {2: P(None, axis), 0: P()}
    params = {name: jax.device_put(leaf, NamedSharding(mesh, spec[leaf.ndim])) for name, leaf in params.items()}
    for reduce in ("once", "each"):
        assert worst(over(mesh, clip, 3, reduce=reduce)(params, batch), expected) < EXACT


@pytest.mark.full
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", [clip, hard_examples], ids=lambda loss: loss.__name__)
def test_derivatives_of_the_gradient(loss):
    params, batch = arguments(16)

    def norm(fun):
        return lambda params: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(fun(params, batch)[1]))

    mine, full = over(mesh_of(8), loss, 1), jax.value_and_grad(loss)
    assert worst(jax.jit(jax.grad(norm(mine)))(params), jax.jit(jax.grad(norm(full)))(params)) < 1e-11
    tangents = jax.tree.map(jnp.ones_like, params)
    found, expected = (jax.jvp(lambda p, fun=fun: norm(fun)(p), (params,), (tangents,)) for fun in (mine, full))
    assert worst(found, expected) < 1e-11


def executed(loss, block_size, examples=96, features=None):
    mesh = mesh_of(8)
    found = traffic(over(mesh, loss, block_size), mesh, *arguments(examples, features=features))
    assert not found.in_loops.executed
    return found.executed


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", [loss for loss in PAIRS if loss is not nt_xent], ids=lambda loss: loss.__name__)
def test_no_more_collectives_than_without_blocks(loss):
    assert executed(loss, 5) <= executed(loss, None)


@pytest.mark.full
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", [*PAIRS, barlow_twins], ids=lambda loss: loss.__name__)
def test_no_more_collectives_for_an_uneven_batch(loss):
    assert executed(loss, 5, examples=93, features=128) <= executed(loss, None, examples=93, features=128)


@pytest.mark.full
@pytest.mark.usefixtures("float64")
def test_one_more_sum_where_xla_would_compute_all_pairs_on_every_device():
    assert executed(nt_xent, 5) == executed(nt_xent, None) + 1


@pytest.mark.full
@pytest.mark.usefixtures("float64")
def test_features_are_moved_to_the_devices_of_their_rows():
    """Two exchanges of features, there and back, and a gather. Without blocks, the matrix itself is summed."""
    assert executed(barlow_twins, 5, features=192) <= executed(barlow_twins, None, features=192) + 3


@pytest.mark.full
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", [*PAIRS, barlow_twins], ids=lambda loss: loss.__name__)
def test_more_blocks_need_no_more_collectives(loss):
    assert executed(loss, 1, features=192) <= executed(loss, 6, features=192)


@pytest.mark.full
@pytest.mark.parametrize("loss", [clip, hardest_triplets, nt_xent], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("examples", [1024, 1023])
def test_memory_of_a_device_falls_with_the_blocks(loss, examples):
    def taken(block_size):
        fun = over(mesh_of(8), loss, block_size)
        args = arguments(examples, width=16, features=1, dtype=np.float32)
        return versions.temporaries(jax.jit(fun).lower(*args).compile())

    in_full, large, small = taken(None), taken(64), taken(8)
    assert small < large < in_full
    assert small < 0.5 * in_full


@pytest.mark.full
@pytest.mark.parametrize("loss", [clip, dropout_on_pairs, hard_examples], ids=lambda loss: loss.__name__)
def test_reproducible_sums_have_the_same_bits_on_2_4_and_8_devices(loss):
    args = arguments(64, dtype=np.float32)
    found = {bits(over(mesh_of(devices), loss, 5, reproducible=True)(*args)) for devices in (2, 4, 8)}
    assert len(found) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("examples", [16, 23])
@pytest.mark.parametrize("case", [case for case in WIDE if case.kind == "pairs"], ids=lambda case: case.name)
def test_gradient_of_all_losses_of_pairs(case, examples):
    params, batch = case.make(jnp.float64)
    batch = jax.tree.map(lambda leaf: leaf[:examples], batch)
    oracle = jax.value_and_grad(case.loss, has_aux=case.has_aux)
    found = over(mesh_of(8), case.loss, 3, has_aux=case.has_aux)(params, batch)

    def differs(expected):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
        return any(np.max(np.abs(one - other)) > EXACT * (1e-3 + np.max(np.abs(other))) for one, other in pairs)

    # XLA compiles some of these wrong for the CPU; see tests/reading/test_blocks.py.
    assert not differs(jax.jit(oracle)(params, batch)) or not differs(oracle(params, batch))
