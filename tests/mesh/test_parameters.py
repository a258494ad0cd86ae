"""Parameters that are spread over the devices of the examples, over others, or over both."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.meshes import contrastive, examples, masked, mesh_of, outputs_of, parameters, spread, traffic, worst
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import anybatch as ab
from anybatch.collectives import Traffic

EXACT = 1e-12
SPECS = {
    "data": {"w": P(None, "data"), "v": P("data", None), "b": P()},
    "data and model": {"w": P(None, "data"), "v": P("data", "model"), "b": P("model")},
    "both in one": {"w": P(None, ("data", "model")), "v": P(("model", "data"), None), "b": P("model")},
    "model": {"w": P(None, "model"), "v": P("model"), "b": P()},
}
SHAPES = {"data": (8,), "data and model": (4, 2), "both in one": (4, 2), "model": (4, 2)}

pytestmark = pytest.mark.usefixtures("float64")


@functools.cache
def full_batch(loss):
    return jax.value_and_grad(loss)(parameters(), examples(32))


def placed(over):
    mesh = mesh_of(*SHAPES[over])
    params = parameters()
    return mesh, {name: spread(leaf, mesh, *SPECS[over][name]) for name, leaf in params.items()}


@pytest.mark.parametrize("reduce", ["once", "each"])
@pytest.mark.parametrize("over", SPECS)
@pytest.mark.parametrize(
    "loss", [masked, pytest.param(contrastive, marks=pytest.mark.slow)], ids=lambda loss: getattr(loss, "__name__", "")
)
def test_gradients_are_exact_and_lie_as_the_parameters_do(loss, over, reduce):
    mesh, params = placed(over)
    eager = ab.value_and_grad(loss, microbatch_size=2, mesh=mesh, reduce=reduce)
    jitted = jax.jit(ab.value_and_grad(loss, microbatch_size=2, mesh=mesh, reduce=reduce, param_specs=SPECS[over]))
    for fun in (eager, jitted):
        value, grads = fun(params, examples(32))
        assert worst((value, grads), full_batch(loss)) < EXACT
        for name, grad in grads.items():
            assert grad.sharding.is_equivalent_to(params[name].sharding, grad.ndim)


@pytest.mark.full
@pytest.mark.parametrize("reduce", ["once", "each"])
@pytest.mark.parametrize("declared", ["mean", "weighted"])
def test_declared_reductions(declared, reduce):
    def loss(params, batch):
        losses = jnp.sum((outputs_of(params, batch) - batch["y"]) ** 2, axis=-1)
        if declared == "mean":
            return jnp.mean(losses)
        return jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"])

    mesh, params = placed("data")
    fun = ab.value_and_grad(loss, reduction=declared, microbatch_size=2, mesh=mesh, reduce=reduce)
    here = ab.value_and_grad(loss, reduction=declared, microbatch_size=2)
    assert worst(fun(params, examples(32)), here(parameters(), examples(32))) < EXACT


def test_once_gathers_once_and_scatters_once():
    mesh, params = placed("data")
    fun = ab.value_and_grad(masked, microbatch_size=1, mesh=mesh, reduce="once", param_specs=SPECS["data"])
    found = traffic(fun, mesh, params, spread(examples(32), mesh, "data"))
    assert found.in_loops.executed == 0
    assert found.by_kind["reduce-scatter"] <= 2  # of w and v
    assert found.by_kind["all-reduce"] == 1  # of b, the value and the weight
    assert set(found.by_kind) == {"all-gather", "reduce-scatter", "all-reduce"}


def test_each_scatters_in_every_microbatch_and_keeps_shards_alone():
    mesh, params, batch = deep_problem()

    def compiled(reduce):
        fun = ab.value_and_grad(deep, microbatch_size=2, mesh=mesh, reduce=reduce, param_specs=P("data", None))
        return jax.jit(fun).lower(params, batch).compile()

    found = Traffic.of(compiled("each"), mesh)
    assert found.in_loops.by_kind == {"reduce-scatter": 128 * 16}
    whole = sum(leaf.nbytes for leaf in params)
    once, each = (compiled(reduce).memory_analysis().temp_size_in_bytes for reduce in ("once", "each"))
    assert once > 1.9 * whole  # the parameters, and a gradient
    assert each < 1.5 * whole


def test_axes_of_the_model_are_not_gathered():
    mesh, params = placed("data and model")
    for reduce in ("once", "each"):
        fun = ab.value_and_grad(
            masked, microbatch_size=2, mesh=mesh, reduce=reduce, param_specs=SPECS["data and model"]
        )
        found = traffic(fun, mesh, params, spread(examples(32), mesh, "data"))
        gathered = [each for each in found.collectives if each.kind == "all-gather"]
        assert gathered
        assert all(each.axes == ("data",) for each in gathered)


def test_without_specs_under_jit_it_is_right_all_the_same():
    mesh, params = placed("data")
    fun = jax.jit(ab.value_and_grad(masked, microbatch_size=2, mesh=mesh))
    assert worst(fun(params, examples(32)), full_batch(masked)) < EXACT


def test_without_specs_under_jit_axes_of_the_model_are_left_alone():
    """A type says nothing of automatic axes: that must not be read as whole on every device."""
    mesh, params = placed("model")
    fun = jax.jit(ab.value_and_grad(masked, microbatch_size=2, mesh=mesh))
    _, grads = fun(params, examples(32))
    assert grads["w"].sharding.shard_shape((5, 8)) == (5, 4)
    found = traffic(fun, mesh, params, spread(examples(32), mesh, "data"))
    assert "all-gather" not in found.by_kind


@pytest.mark.slow
def test_several_axes_for_the_examples():
    mesh = mesh_of(2, 4, names=("replica", "shard"))
    for axes in (("replica", "shard"), ("shard", "replica")):
        specs = {"w": P(None, "shard"), "v": P(axes, None), "b": P()}
        params = {name: spread(leaf, mesh, *specs[name]) for name, leaf in parameters().items()}
        for reduce in ("once", "each"):
            fun = ab.value_and_grad(masked, microbatch_size=2, mesh=mesh, axis_name=axes, reduce=reduce)
            assert worst(fun(params, spread(examples(32), mesh, axes)), full_batch(masked)) < EXACT


def fused(params, batch):
    """A product that is split along the axis it is spread over, so that devices of the model exchange parts of it."""
    one, other = jnp.split(batch["x"] @ params["w"], 2, axis=-1)
    rows = jax.nn.silu(one) * other @ params["v"][:4]
    losses = jnp.sum((rows + params["b"][None] - batch["y"]) ** 2, axis=-1)
    return jnp.sum(losses * batch["mask"]) / jnp.sum(batch["mask"]), {"rows": rows, "count": jnp.sum(batch["label"])}


@pytest.mark.parametrize(
    "size, number", [pytest.param(2, 29, marks=pytest.mark.slow), (2, 32), (2, 3), (None, 29), (None, 32), (None, 3)]
)
def test_uneven_examples_where_the_model_exchanges_too(number, size):
    """All devices must come to every collective, those too that have an example less."""
    mesh, params = placed("model")
    expected = jax.value_and_grad(fused, has_aux=True)(parameters(), examples(number))
    fun = ab.value_and_grad(fused, has_aux=True, microbatch_size=size, mesh=mesh)
    for call in (fun, jax.jit(fun)):
        assert worst(call(params, examples(number)), expected) < EXACT


def test_uneven_examples_of_declared_losses_where_the_model_exchanges_too():
    mesh, params = placed("model")

    def loss(params, batch):
        value, aux = fused(params, {**batch, "mask": jnp.ones_like(batch["mask"])})
        return value, {**aux, "last": aux["rows"][-1]}

    how = {"rows": None, "count": "sum", "last": "last"}
    options = {"has_aux": True, "reduction": "mean", "aux_reduction": how, "mesh": mesh, "microbatch_size": 3}
    expected = jax.value_and_grad(loss, has_aux=True)(parameters(), examples(29))
    assert worst(ab.value_and_grad(loss, **options)(params, examples(29)), expected) < EXACT


# Constraints of the model.


def constrained(place):
    mesh = mesh_of(4, 2)
    by_both = functools.partial(lax.with_sharding_constraint, shardings=NamedSharding(mesh, P("data", "model")))
    by_examples = functools.partial(lax.with_sharding_constraint, shardings=NamedSharding(mesh, P("data", None)))

    def hidden(x, w):
        if place == "in a scan":
            return lax.scan(lambda rows, _: (by_both(jnp.tanh(rows)), None), x @ w, length=2)[0]
        if place == "in remat":
            return jax.checkpoint(lambda x: by_both(jnp.tanh(x @ w)))(x)
        if place == "in jit":
            return jax.jit(lambda x: by_both(jnp.tanh(x @ w)))(x)
        if place == "in a branch":
            return lax.cond(jnp.sum(w) > 0, lambda x: by_both(jnp.tanh(x @ w)), lambda x: by_both(x @ w), x)
        return by_both(jnp.tanh(by_examples(x) @ w))

    return lambda params, batch: jnp.mean((hidden(batch["x"], params["w"]) @ params["v"]) ** 2)


@pytest.mark.parametrize("place", ["at the top", "in a scan", "in remat", "in jit", "in a branch"])
@pytest.mark.parametrize("reduction", ["infer", "mean"])
def test_sharding_constraints_of_the_loss_hold_for_the_other_axes(place, reduction):
    loss = constrained(place)
    mesh, params = placed("model")
    fun = ab.value_and_grad(loss, microbatch_size=2, mesh=mesh, reduction=reduction)
    assert worst(fun(params, examples(32)), jax.value_and_grad(loss)(parameters(), examples(32))) < EXACT


@pytest.mark.parametrize("reduction", ["infer", "mean"])
@pytest.mark.parametrize("around", [False, True], ids=["", "set_mesh"])
def test_functions_with_derivatives_of_their_own_after_a_constraint(reduction, around):
    mesh = mesh_of(4, 2)

    def loss(params, batch):
        rows = batch["x"] @ params["w"]
        rows = rows if around else lax.with_sharding_constraint(rows, NamedSharding(mesh, P("data", "model")))
        return jnp.mean((jax.nn.relu(rows) @ params["v"]) ** 2)

    fun = jax.jit(ab.value_and_grad(loss, microbatch_size=2, mesh=mesh, reduction=reduction))
    expected = jax.value_and_grad(loss)(parameters(), examples(32))
    with jax.set_mesh(mesh) if around else contextlib.nullcontext():
        assert worst(fun(parameters(), examples(32)), expected) < EXACT


def test_each_adds_up_narrow_gradients_in_the_wide_dtype():
    mesh = mesh_of(8)
    specs = {"w": P(None, "data"), "v": P("data", None), "b": P()}
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), parameters())
    batch = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), examples(32))
    for reduce in ("once", "each"):
        fun = ab.value_and_grad(masked, microbatch_size=2, mesh=mesh, reduce=reduce, param_specs=specs)
        text = jax.jit(fun).lower(params, batch).as_text()
        added = re.findall(r'"stablehlo.reduce_scatter".*?-> tensor<([^>]*)>', text, re.DOTALL)
        assert added and all(each.endswith("f32") for each in added)


# What is planned.


def deep(params, batch):
    """Layers enough that one of them is little: what is gathered or scattered for it comes and goes."""
    rows = batch["x"]
    for layer in params:
        rows = jnp.tanh(rows @ layer)
    return jnp.mean(rows**2)


def deep_problem():
    mesh = mesh_of(8)
    params = [spread(jnp.ones((128, 128)) / 128, mesh, "data", None) for _ in range(16)]
    return mesh, params, {"x": np.ones((2048, 128))}


@pytest.mark.full
def test_a_plan_takes_each_where_once_does_not_fit():
    mesh, params, batch = deep_problem()
    whole = sum(leaf.nbytes for leaf in params)
    roomy = ab.plan(deep, params, batch, mesh=mesh, memory=8 * whole, timed=False)
    tight = ab.plan(deep, params, batch, mesh=mesh, memory=int(1.9 * whole), timed=False)
    assert (roomy.reduce, tight.reduce) == ("once", "each")
    assert tight.chosen.total <= 1.9 * whole
    assert "8 x cpu" in str(tight) and "each" in str(tight)
    # Run on few rows: simulated devices that wait for each other hold threads that large products need.
    few = {"x": batch["x"][:32]}
    fun = ab.value_and_grad(deep, mesh=mesh, microbatch_size=2, reduce=tight.reduce)
    assert worst(fun(params, few), jax.value_and_grad(deep)(params, few)) < EXACT


def test_bytes_of_a_plan_are_those_of_one_device():
    mesh = mesh_of(8)
    params, batch = parameters(width=1024), examples(1024)
    here = ab.plan(masked, params, batch, memory="1GiB", timed=False)
    there = ab.plan(masked, params, batch, mesh=mesh, memory="1GiB", timed=False)
    assert there.microbatch_size == here.microbatch_size / 8 == 128
    assert there.chosen.bytes.activations < here.chosen.bytes.activations / 4
    traced = []

    @jax.jit
    def step(params, batch):
        traced.append(ab.plan(masked, params, batch, mesh=mesh, memory="1GiB", timed=False))
        return ab.grad(masked, mesh=mesh, memory="1GiB")(params, batch)

    assert worst(step(params, batch), jax.grad(masked)(params, batch)) < EXACT
    assert traced[0].chosen.bytes.batch == there.chosen.bytes.batch
