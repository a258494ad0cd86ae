"""`microbatch_size="auto"`: nothing to choose, and the gradient of the full batch."""

import chex
import jax
import jax.numpy as jnp
import pytest
from cases.losses import LOSSES
from cases.planned import contrastive, elementwise, network, problem, scanned, total_bytes, totals

import anybatch as ab
from anybatch.planning import planner

KIB = 1024
SPREAD = jax.sharding.PartitionSpec("data")
INVARIANT = jax.sharding.PartitionSpec()


@pytest.fixture(autouse=True)
def forgetful_planner():
    planner._DECIDED.cache_clear()


@pytest.fixture
def compiled():
    """How many programs are compiled, by the events that JAX itself records."""
    events = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield events
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("transform", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", LOSSES, ids=lambda case: case.name)
def test_auto_is_the_default_and_gives_the_gradient_of_the_full_batch(case, transform):
    params, batch = case.problem()
    expected = jax.value_and_grad(case.oracle)(params, batch)
    actual = transform(ab.value_and_grad(case.loss, reduction=case.reduction))(params, batch)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_close(actual, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "loss, examples, reduction, transform",
    [
        (network, 509, "infer", jax.jit),
        (scanned, 512, "infer", lambda fun: fun),
        pytest.param(contrastive, 256, "infer", jax.jit, marks=pytest.mark.slow),
        (totals, 512, "weighted", lambda fun: fun),
    ],
)
def test_a_tight_budget_is_kept_and_changes_nothing_but_memory(loss, examples, reduction, transform):
    params, batch = problem(examples)

    def oracle(params, batch):
        out = loss(params, batch)
        return out[0] / out[1] if reduction == "weighted" else out

    def fun(microbatch_size):
        return ab.value_and_grad(loss, reduction=reduction, memory=budget, microbatch_size=microbatch_size)

    budget = "1GiB"
    least, most = (total_bytes(jax.jit(fun(size)).lower(params, batch).compile()) for size in (1, None))
    budget = (least + most) // 2
    program = jax.jit(fun("auto")).lower(params, batch).compile()
    assert total_bytes(program) <= budget < most
    actual, expected = transform(fun("auto"))(params, batch), jax.value_and_grad(oracle)(params, batch)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-6)


def test_planning_costs_nothing_where_all_examples_fit(compiled):
    params, batch = problem(64)
    fun = ab.value_and_grad(network)
    del compiled[:]
    fun(params, batch)
    assert len(compiled) == 1
    fun(params, batch)
    assert len(compiled) == 1
    jax.jit(fun).lower(params, batch)
    assert len(compiled) == 1  # and nothing at all at trace time


def test_planning_costs_one_compilation_more_when_the_guess_is_right(compiled):
    """Also, what was compiled to plan is what runs."""
    params, batch = problem(512)
    fun = ab.value_and_grad(network, memory="900KiB")
    del compiled[:]
    fun(params, batch)
    assert len(compiled) <= 3
    counted = len(compiled)
    fun(params, batch)
    assert len(compiled) == counted

    # The budget of the very program that the first guess leads to: here the guess is right.
    planner._DECIDED.cache_clear()
    plan = ab.plan(scanned, params, batch, memory="900KiB", timed=False)
    del compiled[:]
    planner._DECIDED.cache_clear()
    ab.value_and_grad(scanned, memory=int(1.02 * plan.chosen.total))(params, batch)
    assert len(compiled) <= 2


def test_what_was_decided_stays_decided(monkeypatch):
    """What is left of the memory changes from call to call; the program does not."""
    params, batch = problem(64)
    asked = []
    monkeypatch.setattr(
        planner, "budget_of", lambda *_, budget_of=planner.budget_of, **k: asked.append(1) or budget_of(*_, **k)
    )
    fun = ab.value_and_grad(network)
    fun(params, batch)
    first = len(asked)
    fun(params, batch)
    assert len(asked) == first > 0


def test_a_loss_that_looks_across_examples_is_refused_whether_it_fits_or_not():
    params, batch = problem(64)
    with pytest.raises(ab.CoupledError):
        ab.value_and_grad(contrastive, on_coupled="error")(params, batch)
    with pytest.raises(ab.CoupledError):
        ab.value_and_grad(contrastive, on_coupled="error", memory="300KiB")(params, batch)


def test_inside_shard_map_each_device_has_the_budget():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, batch = problem(1024)
    seen = []

    def step(params, batch):
        def on_device(params, batch):
            plan_of = ab.value_and_grad(network, memory="350KiB")
            seen.append(jax.make_jaxpr(plan_of)(params, batch))
            value, grads = plan_of(params, batch)
            return jax.lax.pmean(value, "data"), jax.tree.map(lambda grad: jax.lax.pmean(grad, "data"), grads)

        return jax.shard_map(on_device, mesh=mesh, in_specs=(INVARIANT, SPREAD), out_specs=INVARIANT)(params, batch)

    value, _ = jax.jit(step)(params, batch)
    assert jnp.allclose(value, network(params, batch), rtol=1e-5)
    assert "scan" in str(seen[0])  # 128 examples at once do not fit 350 KiB, and no device has more than these


def test_sizes_are_multiples_of_the_devices_that_hold_the_batch():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params, batch = problem(4096)
    batch = jax.device_put(batch, jax.NamedSharding(mesh, SPREAD))
    params = jax.device_put(params, jax.NamedSharding(mesh, INVARIANT))
    plan = ab.plan(network, params, batch, memory="900KiB", timed=False)
    assert plan.device.startswith("8 x ") and plan.microbatch_size % 8 == 0 and plan.microbatch_size < 4096


def test_a_step_under_jit_leaves_room_for_the_optimizer(monkeypatch):
    """Under jit nobody knows what else a step holds: four times the gradient is left for it, if it can be."""
    from anybatch.planning import budget

    params, batch = problem(512, width=128)
    of_gradient = 4 * params["layers"].size
    asked = []
    original = planner.budget_of
    monkeypatch.setattr(planner, "budget_of", lambda *a, **k: asked.append(original(*a, **k)) or asked[-1])
    jax.jit(ab.value_and_grad(network)).lower(params, batch)
    assert asked[-1].reserve == budget.COPIES_IN_A_STEP * of_gradient
    del asked[:]
    planner._DECIDED.cache_clear()
    ab.value_and_grad(network)(params, batch)
    assert asked[-1].reserve == 0
    del asked[:]
    jax.jit(ab.value_and_grad(network, memory="1GiB")).lower(params, batch)
    assert asked[-1].reserve == 0


@pytest.mark.parametrize("kept", [False, True])
def test_what_fits_by_itself_may_be_too_much_for_a_step(monkeypatch, tmp_path, kept):
    """A plan made outside jit is followed inside only if it leaves room for the optimizer."""
    from anybatch.planning import budget

    if kept:
        monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path))
    params, batch = problem(512, width=64, depth=8)
    of_gradient = 4 * params["layers"].size
    plan = ab.plan(network, params, batch, memory="1GiB", timed=False)
    assert plan.microbatch_size == 512
    left = plan.chosen.total - plan.chosen.bytes.arguments + 3 * of_gradient
    monkeypatch.setattr(budget, "memory_left", lambda devices: int(left / 0.9))
    monkeypatch.setattr(planner, "generous_bytes", lambda gradient: None)
    assert ab.plan(network, params, batch, timed=False).microbatch_size == 512
    if kept:
        planner._DECIDED.cache_clear()
    program = jax.jit(ab.value_and_grad(network)).lower(params, batch).compile()
    assert total_bytes(program) <= left + plan.chosen.bytes.arguments - 4 * of_gradient


@pytest.mark.full
def test_nothing_that_fits_at_trace_time_is_a_warning_if_nobody_named_a_budget(monkeypatch):
    """Tracers do not show how arrays are spread over devices, so that more may fit than can be seen."""
    from anybatch.planning import budget

    monkeypatch.setattr(budget, "memory_left", lambda devices: 1000)
    params, batch = problem(64)
    monkeypatch.setattr(budget, "local_bytes", lambda leaf: 0)
    with pytest.warns(ab.TightMemoryWarning, match="Nothing fits"):
        jaxpr = jax.make_jaxpr(jax.jit(ab.value_and_grad(network)))(params, batch)
    assert "scan" in str(jaxpr)
    with pytest.raises(ab.NothingFitsError):
        jax.jit(ab.value_and_grad(network, memory=1000)).lower(params, batch)


@pytest.mark.parametrize("examples", [0, 1, 2])
def test_batches_that_cannot_be_cut(examples):
    params = {"layers": jnp.ones((2, 4, 4))}
    batch = {"x": jnp.ones((examples, 4)), "y": jnp.zeros((examples, 4))}
    actual = ab.value_and_grad(network)(params, batch)
    chex.assert_trees_all_close(actual, jax.value_and_grad(network)(params, batch))


def test_without_jit_nothing_is_planned():
    params, batch = problem(64)
    with jax.disable_jit():
        actual = ab.value_and_grad(network, memory="1KiB")(params, batch)
    chex.assert_trees_all_close(actual, jax.value_and_grad(network)(params, batch), rtol=1e-4, atol=1e-6)


def test_aux_of_the_microbatches_needs_a_size():
    with pytest.raises(ab.InputError, match='"last" needs a microbatch_size'):
        ab.value_and_grad(network, has_aux=True, reduction="mean", aux_reduction="stack")


@pytest.mark.full
def test_a_batch_of_one_is_planned_too():
    """It has one microbatch size, but activations may be computed again."""
    params, batch = problem(1, width=64, depth=24)
    batch = {name: jnp.tile(leaf[:, None], (1, 256, 1)) for name, leaf in batch.items()}
    options = {"block_size": None}

    def bytes_of(**more):
        return total_bytes(jax.jit(ab.value_and_grad(elementwise, **options, **more)).lower(params, batch).compile())

    least, most = bytes_of(remat=1.0), bytes_of(remat=None)
    assert least < most / 2
    assert bytes_of(memory=most // 2) <= most // 2
    with pytest.raises(ab.NothingFitsError):
        ab.value_and_grad(elementwise, memory=least // 2, **options)(params, batch)
