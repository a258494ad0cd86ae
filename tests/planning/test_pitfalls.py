"""Where a plan could be made for another program, other arrays or another place than the one that runs."""

import itertools
import json
import time

import jax
import jax.numpy as jnp
import pytest
from cases.planned import contrastive, elementwise, network, problem, total_bytes
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import anybatch as ab
from anybatch.planning import planner
from anybatch.planning.candidates import Sizes
from anybatch.planning.store import fingerprint


@pytest.fixture(autouse=True)
def forgetful_planner():
    planner._DECIDED.cache_clear()


def mesh(number, kind="Auto"):
    axis_types = (getattr(jax.sharding.AxisType, kind),)
    return jax.make_mesh((number,), ("data",), axis_types=axis_types, devices=jax.devices()[:number])


def compiled(loss, *arguments, **options):
    return total_bytes(jax.jit(ab.value_and_grad(loss, **options)).lower(*arguments).compile())


# Where arrays lie.


def test_some_arrays_placed_and_others_traced():
    params, batch = problem(16, width=8)
    params = jax.device_put(params, NamedSharding(mesh(2), P()))
    batch = jax.device_put(batch, NamedSharding(mesh(2), P("data")))
    expected = network(params, batch)
    value, _ = jax.jit(lambda params: ab.value_and_grad(network)(params, batch))(params)
    assert jnp.allclose(value, expected)
    jax.grad(lambda params: ab.value_and_grad(network)(params, batch)[0])(params)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    assert ab.plan(network, params, shapes, memory="1GiB").microbatch_size == 16


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 4])
def test_under_jit_arrays_on_a_mesh_keep_the_budget(number):
    """Their types speak of a mesh without devices."""
    params, batch = problem(512)
    placed = jax.device_put((params, batch), (NamedSharding(mesh(number), P()), NamedSharding(mesh(number), P("data"))))
    assert compiled(network, *placed, memory=900 * 1024) <= 900 * 1024
    assert compiled(network, params, batch, memory=900 * 1024) <= 900 * 1024


def test_under_jit_explicit_axes_count_for_one_device():
    with jax.set_mesh(mesh(4, "Explicit")):
        params, batch = problem(512)
        placed = jax.device_put((params, batch), (P(), P("data")))
        eager = ab.plan(network, *placed, memory="560KiB", timed=False)
        planner._DECIDED.cache_clear()
        traced = []
        jax.jit(lambda *arguments: traced.append(ab.plan(network, *arguments, memory="560KiB")))(*placed)
    assert traced[0].device == eager.device and traced[0].device.startswith("4 x ")
    assert traced[0].chosen.bytes.batch == eager.chosen.bytes.batch == batch["x"].nbytes * 2 // 4
    assert traced[0].chosen.total <= 560 * 1024


@pytest.mark.full
def test_vmap_counts_for_all_its_copies():
    params, batch = problem(256, width=32)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf] * 16), params)

    def total(**options):
        fun = jax.vmap(ab.value_and_grad(network, **options), in_axes=(0, None))
        return total_bytes(jax.jit(fun).lower(many, batch).compile())

    assert total(memory=2_000_000) <= 2_000_000 < total(microbatch_size=None)


@pytest.mark.full
def test_vmaps_in_each_other_count_for_all_pairs():
    """Eight models and eight batches are 64 gradients."""
    params, batch = problem(64, width=32, depth=1)
    models, batches = (jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), each) for each in (params, batch))

    def total(**options):
        fun = jax.vmap(jax.vmap(ab.value_and_grad(network, **options), in_axes=(None, 0)), in_axes=(0, None))
        return total_bytes(jax.jit(fun).lower(models, batches).compile())

    budget = (total(microbatch_size=1) + total(microbatch_size=None)) // 2
    assert total(memory=budget) <= budget


@pytest.mark.full
def test_vmap_over_what_the_loss_closes_over():
    """Also after the same loss was planned for one."""
    params, batch = problem(256)
    scales = jnp.ones((32, 64))

    def step(scale):
        def loss(params, batch):
            return network(params, {"x": batch["x"] * scale[None], "y": batch["y"]})

        return ab.value_and_grad(loss, memory=3 * 2**20)(params, batch)

    jax.jit(step).lower(scales[0])
    assert total_bytes(jax.jit(jax.vmap(step)).lower(scales).compile()) <= 3 * 2**20


def test_a_shard_map_that_is_not_jitted():
    params, batch = problem(48, width=8)

    def on_device(params, batch):
        return ab.value_and_grad(network, microbatch_size=3)(params, batch)[1]

    fun = jax.shard_map(on_device, mesh=mesh(4), in_specs=(P(), P("data")), out_specs=P())
    assert jnp.allclose(fun(params, batch)["layers"], jax.jit(fun)(params, batch)["layers"], rtol=1e-5)


# Which program.


def test_a_plan_is_followed_though_jax_fills_its_own_memory_meanwhile():
    """The derivative of a function that was jitted once is kept with its equation, from the first gradient on."""

    @jax.jit
    def model(w, x):
        return jax.nn.relu(jnp.tanh(jax.nn.relu(x @ w)) @ w)

    def loss(w, x):
        return jnp.mean(model(w, x) ** 2)

    w, x = jnp.eye(64), jnp.ones((512, 64))
    before = fingerprint(jax.make_jaxpr(loss)(w, x))
    jax.value_and_grad(loss)(w, x)
    assert fingerprint(jax.make_jaxpr(loss)(w, x)) == before


class Config:
    def __init__(self, **settings):
        self.__dict__["settings"] = settings

    def __getattr__(self, name):
        return self.settings[name]  # a KeyError, not an AttributeError


class Silent:
    scale = 2.0

    def __repr__(self):
        raise RuntimeError("no words")


ENDLESS = {"scale": 2.0}
ENDLESS["itself"] = ENDLESS
ENDLESS_LIST = [ENDLESS]
ENDLESS_LIST.append(ENDLESS_LIST)


@pytest.mark.parametrize("thing", [Config(scale=2.0), Silent(), ENDLESS, ENDLESS_LIST, set(range(10**6))], ids=type)
def test_derivatives_may_close_over_anything(thing):
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (sine(x), x), lambda x, g: (g * jnp.cos(x) * (2.0 if thing else 1.0),))
    ab.value_and_grad(lambda w, x: jnp.mean(sine(x @ w)))(jnp.ones((3, 2)), jnp.ones((6, 3)))


def test_functions_that_refer_to_each_other_are_looked_into_once():
    registry = {}
    functions = tuple(lambda x, i=i: functions[i] if x is None else registry.get(i, x) for i in range(40))

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (sine(x), x), lambda x, g: (functions[0](g) * jnp.cos(x),))
    jaxpr = jax.make_jaxpr(lambda x: jnp.mean(sine(x)))(jnp.ones(3))
    start = time.perf_counter()
    fingerprint(jaxpr)
    assert time.perf_counter() - start < 5  # it would be days


def names_saved(*names):
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def layer(hidden, weights):
        wide = checkpoint_name(jnp.tanh(jnp.concatenate([hidden] * 4, 1)), "wide")
        return checkpoint_name(jnp.tanh(wide[:, :8] @ weights), "narrow"), None

    layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return lambda params, batch: jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)


def backward_of(number, literal=False):
    @jax.custom_vjp
    def square(x):
        return jnp.sum(x**2, axis=1)

    def backward(x, cotangent):
        return (2 * x * cotangent[:, None] * jnp.ones((number,)).mean(),)

    def other_backward(x, cotangent):
        return (2 * x * cotangent[:, None] * jnp.ones((7,)).mean(),)

    square.defvjp(lambda x: (square(x), x), other_backward if literal else backward)
    return lambda params, batch: jnp.mean(square(batch @ params[0]))


def test_programs_that_look_alike_are_told_apart():
    """By the policies of checkpoints, and by the code of custom derivatives."""
    arguments = jnp.ones((4, 8, 8)), jnp.ones((16, 8))
    losses = [
        names_saved("narrow"),
        names_saved("narrow", "wide"),
        backward_of(3),
        backward_of(5),
        backward_of(5, True),
    ]
    found = [fingerprint(jax.make_jaxpr(loss)(*arguments)) for loss in losses]
    assert len(set(found)) == len(losses)
    again = [names_saved("narrow"), names_saved("narrow", "wide"), backward_of(3), backward_of(5), backward_of(5, True)]
    assert found == [fingerprint(jax.make_jaxpr(loss)(*arguments)) for loss in again]


def test_a_budget_that_was_named_is_kept_where_derivatives_hide_memory():
    """Nothing in the loss itself shows what its backward pass will take."""

    @jax.custom_vjp
    def hidden(x):
        return jnp.sum(jnp.tanh(x), 1)

    def forward(x):
        return hidden(x), (x, jnp.sin(x[:, :, None, None] * x[:, None, :, None] * x[:, None, None, :]))

    def backward(kept, cotangent):
        return (cotangent[:, None] * jnp.sort(kept[1], axis=1).sum((2, 3)),)

    hidden.defvjp(forward, backward)

    def loss(w, x):
        return jnp.mean(hidden(x @ w))

    w, x = jnp.eye(16), jnp.ones((256, 16))
    assert compiled(loss, w, x, microbatch_size=None) > 2 * 2**20 >= compiled(loss, w, x, memory=2**21)


# Which activations are kept.


def test_a_policy_that_was_named_is_taken_at_every_size():
    params, batch = problem(64, width=32, depth=16)
    at_once = compiled(elementwise, params, batch, microbatch_size=None, remat="nothing_saveable")
    assert compiled(elementwise, params, batch, remat="nothing_saveable") == at_once
    assert at_once < compiled(elementwise, params, batch)
    plan = ab.plan(elementwise, params, batch, remat="nothing_saveable", timed=False)
    assert plan.remat == "nothing_saveable" and plan.chosen.total == at_once


def test_policies_that_an_earlier_plan_was_allowed_are_not_taken_over(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path))
    params, batch = problem(8, width=32, depth=16)
    allowed = ab.plan(elementwise, params, batch, objective="memory", remat="auto")
    memory = allowed.chosen.total + 1024
    assert ab.plan(elementwise, params, batch, memory=memory, remat="auto").remat is not None
    with pytest.raises(ab.NothingFitsError):
        ab.plan(elementwise, params, batch, memory=memory, remat=None)


def test_blocks_of_a_jitted_loss_that_closes_over_arrays():
    table = jnp.arange(64.0).reshape(8, 8) / 64

    @jax.jit
    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w + x @ table)
        return jnp.mean(x**2)

    w, x = jnp.eye(8), jnp.ones((16, 8))
    expected = jax.value_and_grad(loss)(w, x)
    for options in ({"microbatch_size": None}, {"microbatch_size": 4, "reduction": "mean"}, {"microbatch_size": 4}):
        value, grads = ab.value_and_grad(loss, remat="nothing_saveable", **options)(w, x)
        assert jnp.allclose(value, expected[0]) and jnp.allclose(grads, expected[1], atol=1e-6)


def test_blocks_of_a_loss_with_a_derivative_inside():
    @jax.checkpoint
    def model(params, x):
        return jax.lax.scan(lambda hidden, w: (jnp.tanh(hidden @ w), None), x, params)[0]

    def loss(params, x):
        return jnp.mean(jax.vjp(model, params, x)[0] ** 2)

    arguments = jnp.ones((6, 8, 8)) / 8, jnp.ones((4, 8))
    expected = jax.grad(loss)(*arguments)
    actual = ab.grad(loss, microbatch_size=None, remat="nothing_saveable")(*arguments)
    assert jnp.allclose(actual, expected, atol=1e-6)


# What cannot be planned.


def test_without_jit_there_is_nothing_to_plan():
    with jax.disable_jit(), pytest.raises(ab.InputError, match=r"A plan needs compiled programs, got a call"):
        ab.plan(network, *problem(8))


def test_without_examples_there_is_nothing_to_plan():
    with pytest.raises(ab.InputError, match="A plan needs a batch with examples, got 0 examples"):
        ab.plan(network, *problem(0))


def test_more_than_all_is_no_budget():
    with pytest.raises(ab.InputError, match="memory='200%'"):
        ab.value_and_grad(network, memory="200%")


def test_a_size_that_a_declared_loss_does_not_take_is_named():
    def pairs(w, x):
        return jnp.mean(jnp.tanh(x.reshape(-1, 125, 64) @ w) ** 2)

    with pytest.raises(TypeError) as caught:
        ab.value_and_grad(pairs, reduction="mean", memory=150_000)(jnp.eye(64), jnp.ones((250, 64)))
    assert any(
        'microbatch_size="auto" has tried microbatch_size=' in note and "Pass a size that the loss takes." in note
        for note in caught.value.__notes__
    )


def test_what_cannot_be_compiled_by_itself_is_estimated_aloud(monkeypatch):
    """Any size is right; whether it fits is a guess, and the next call guesses anew."""

    def cannot(*_):
        raise NotImplementedError("a part of something else")

    monkeypatch.setattr("anybatch.planning.measure.compile_for_types", cannot)
    params, batch = problem(64)
    with pytest.warns(ab.TightMemoryWarning, match=r"is estimated: microbatch_size=\d+ should fit 300\.0 KiB"):
        value, _ = jax.jit(ab.value_and_grad(network, memory="300KiB"))(params, batch)
    assert jnp.allclose(value, network(params, batch), rtol=1e-5)
    assert not planner._DECIDED


@pytest.mark.full
def test_coupled_losses_keep_the_budget_under_jit():
    params, batch = problem(256)
    least = compiled(contrastive, params, batch, microbatch_size=1)
    assert compiled(contrastive, params, batch, memory=int(1.1 * least)) <= 1.1 * least


# Large batches.


@pytest.mark.parametrize("examples", [2, 3, 7, 60, 509, 1_000_003, 10_000_019])
def test_sizes_are_few_and_balanced(examples):
    sizes = Sizes(examples).all()
    assert sizes[0] == 1 and sizes[-1] == examples and sizes == sorted(set(sizes))
    assert len(sizes) <= 2 * examples**0.5 + 1
    for size in sizes[:: max(1, len(sizes) // 20)]:
        number = -(-examples // size)
        assert size == 1 or -(-examples // (size - 1)) > number  # a smaller one would make more microbatches
    steps = Sizes(examples).steps_down(examples)
    assert steps[-1] == 1 and all(0.3 < smaller / size < 0.8 for size, smaller in itertools.pairwise(steps) if size > 4)


@pytest.mark.parametrize(
    "damage", [{"remat": "bogus"}, {"seconds": 0}, {"seconds": float("nan")}, {"bytes": {"batch": 1e400}}]
)
def test_records_that_make_no_sense_are_not_used(tmp_path, monkeypatch, damage):
    monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path))
    params, batch = problem(64)
    first = ab.plan(network, params, batch, memory="1GiB", timed=False)
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    for entry in record["strategies"]:
        entry.update(damage)
    path.write_text(json.dumps(record))
    again = ab.plan(network, params, batch, memory="1GiB", timed=False)
    assert again.microbatch_size == first.microbatch_size and again.chosen.bytes == first.chosen.bytes


def test_a_home_that_nobody_has_is_no_reason_to_stop(monkeypatch):
    monkeypatch.setenv("ANYBATCH_CACHE", "~nobody_here/cache")
    assert ab.plan(network, *problem(8), memory="1GiB", timed=False).microbatch_size == 8
