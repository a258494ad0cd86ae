"""`train_step(offload="optimizer")`: the optimizer's state on the host, and the parameters of a step without it."""

import functools
import operator

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import anybatch as ab
from anybatch.training import offload

WIDTH, LAYERS = 128, 3  # a matrix in float32 is as large as arrays on the host must be


@pytest.fixture(autouse=True)
def optax_defaults():
    """Optimizers are written for JAX's own promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def loss(params, batch):
    hidden = batch["x"]
    for layer in params:
        hidden = jnp.tanh(hidden @ layer["w"] + layer["b"])
    return jnp.mean((hidden.sum(axis=1) - batch["y"]) ** 2)


def weights(layers=LAYERS, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [
        {"w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 12, dtype), "b": jnp.zeros(WIDTH, dtype)}
        for _ in range(layers)
    ]


def data(seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(16, WIDTH)).astype(dtype), "y": rng.normal(size=16).astype(dtype)}


def kinds(tree):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def is_on_host(leaf):
    return leaf.sharding.memory_kind == "pinned_host"


def run(optimizer, offload, steps=3, fun=loss, dtype=np.float32, **options):
    step = ab.train_step(fun, optimizer, microbatch_size=None, offload=offload, **options)
    state = step.init(weights(dtype=dtype))
    for seed in range(steps):
        state, _ = step(state, data(seed, dtype))
    return state


def assert_same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for left, right in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right), strict=True)


def by_kind(params):
    return [{"w": "matrix", "b": "vector"} for _ in params]


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "clipped before": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "clipped after": lambda: optax.chain(optax.adam(1e-2), optax.clip_by_global_norm(0.1)),
    "a schedule": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "masked": lambda: optax.masked(optax.adam(1e-2), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "several": lambda: optax.multi_transform({"matrix": optax.lamb(1e-2), "vector": optax.sgd(1e-2)}, by_kind),
    "every second step": lambda: optax.MultiSteps(optax.adamw(1e-2), 2),
    "under jit": lambda: under_jit(optax.adamw(1e-2)),
    "none on the host": lambda: optax.adafactor(1e-2),
    "averages of the parameters": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "hyperparameters": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
}

# Those that XLA fuses otherwise: a `cond` over all of the state, which becomes a selection; a loop over all of it.
FUSED_OTHERWISE = {
    "finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
    "everything at once": lambda: optax.lbfgs(),
}


def sometimes(names, always):
    """All names, of which the fast run leaves out those that are not `always` run."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.full) for name in names]


def under_jit(optimizer):
    return optax.GradientTransformation(optimizer.init, jax.jit(optimizer.update))


@pytest.mark.every_jax
def test_the_state_of_the_optimizer_is_on_the_host_between_steps():
    """Its large arrays. What is small stays on the device, as do parameters."""
    step = ab.train_step(loss, optax.adamw(1e-2), microbatch_size=8, offload="optimizer")
    state = step.init(weights())
    for seed in range(3):
        moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim == 2]
        assert len(moments) == 2 * LAYERS and kinds(moments) == {"pinned_host"}
        assert kinds([leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim < 2]) == {"device"}
        assert kinds(state.replace(opt_state=None)) == {"device"}
        state, _ = step(state, data(seed))
    assert len(step._programs) == 1 and step._last.program[0]._cache_size() == 1
    assert kinds(run(optax.adamw(1e-2), None)) == {"device"}  # the control


@pytest.mark.every_jax
@pytest.mark.parametrize("name", sometimes(OPTIMIZERS, ("adamw", "clipped after", "several", "every second step")))
def test_steps_have_the_bits_of_those_without_offload(name):
    """On a CPU. Where XLA fuses the update otherwise, in `test_steps_are_equal_up_to_rounding`."""
    optimizer = OPTIMIZERS[name]()
    state = run(optimizer, "optimizer")
    assert_same_bits(state, run(optimizer, None))
    assert any(map(is_on_host, jax.tree.leaves(state.opt_state))) == (name != "none on the host")


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("name", sometimes(FUSED_OTHERWISE, ("finite",)))
def test_steps_are_equal_up_to_rounding(float64, name):
    """And the same step twice has the same bits."""
    optimizer = FUSED_OTHERWISE[name]()
    state = run(optimizer, "optimizer", steps=2, dtype=np.float64)
    other = run(optimizer, None, steps=2, dtype=np.float64)
    assert any(map(is_on_host, jax.tree.leaves(state.opt_state)))
    for one, two in zip(jax.tree.leaves(state.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-12, atol=1e-14)
    assert_same_bits(state, run(optimizer, "optimizer", steps=2, dtype=np.float64))


def test_another_learning_rate_would_be_noticed(float64):
    """The control of both."""
    state, other = run(optax.adam(1e-2), "optimizer"), run(optax.adam(1.0001e-2), None)
    with pytest.raises(AssertionError):
        assert_same_bits(state, other)
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(state.params[0]["w"], other.params[0]["w"], rtol=1e-12, atol=1e-14)


def waits(optimizer):
    """For each array that a step copies to the device, in this order: how many it has stored on the host before.

    "Before" is by dependence: XLA may reorder all else.
    """
    step = ab.train_step(loss, optimizer, microbatch_size=8, offload="optimizer")
    jaxpr = jax.make_jaxpr(step)(step.init(weights()), data())
    stored, found = {}, []
    for equation in jaxpr.eqns:
        before = functools.reduce(operator.or_, (stored.get(x, frozenset()) for x in set_of(equation)), frozenset())
        if equation.primitive.name == "device_put":
            (output,) = equation.outvars
            if output.aval.memory_space == jax.memory.Space.Host:
                before |= {output}
            else:
                found.append(len(before))
        stored |= dict.fromkeys(equation.outvars, before)
    return found


def set_of(equation):
    return {operand for operand in equation.invars if not isinstance(operand, jax.extend.core.Literal)}


@pytest.mark.every_jax
@pytest.mark.parametrize("name", ["adamw", "clipped after", "every second step", "under jit"])
def test_no_more_than_a_window_is_on_the_device_at_once(name):
    found = waits(OPTIMIZERS[name]())
    of_parameter = 3 if name == "every second step" else 2
    assert len(found) == of_parameter * LAYERS
    # Three arrays that are computed together are stored only when the third one is there.
    most = offload.WINDOW + 2 * (of_parameter - 2)
    assert all(number - before <= most for number, before in enumerate(found, 1))


def test_without_a_window_all_would_be_on_the_device_at_once(monkeypatch):
    """The control."""
    monkeypatch.setattr(offload, "WINDOW", 100)
    assert waits(optax.adamw(1e-2)) == [0] * (2 * LAYERS)


@pytest.mark.parametrize("has_masters", [False, True])
def test_arrays_that_are_used_together_are_loaded_together(monkeypatch, has_masters):
    """Else the first moments of all parameters would be on the device before the first parameter is updated."""
    orders = []
    order = offload._order
    monkeypatch.setattr(offload, "_order", lambda *arguments: orders.append(order(*arguments)) or orders[-1])
    if has_masters:
        run(Masters(optax.adamw(1e-2)), "optimizer", steps=1)
        assert [sorted(orders[0][first : first + 3]) for first in (0, 3, 6)] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    else:
        run(optax.adamw(1e-2), "optimizer", steps=1)
        assert orders == [[0, 3, 1, 4, 2, 5]]


@pytest.mark.every_jax
def test_the_state_is_never_on_the_device_as_a_whole(monkeypatch):
    """Not even at the start. The control: the optimizer's own `init`."""
    most = []

    def bytes_on_device(before=frozenset()):
        return sum(a.nbytes for a in jax.live_arrays() if a.sharding.memory_kind == "device" and id(a) not in before)

    params = weights()
    place, there = offload.place, {id(array) for array in jax.live_arrays()}

    def observed(array, **options):
        most.append(bytes_on_device(there))
        return place(array, **options)

    monkeypatch.setattr(offload, "place", observed)
    state = offload.init_on_host(optax.adamw(1e-2).init, params)
    matrix = 4 * WIDTH * WIDTH
    assert max(most) < 2 * matrix  # the vectors stay
    assert_same_bits(state, optax.adamw(1e-2).init(params))
    control = optax.adamw(1e-2).init(params)
    assert bytes_on_device(there) > 2 * LAYERS * matrix
    del control


@pytest.mark.parametrize("sizes", [(8, 6), pytest.param((6, 8), marks=pytest.mark.full)])
def test_batches_of_another_size_are_planned_in_the_same_memory(sizes):
    """The optimizer's state is still on the host when the second batch comes."""
    generator, width, layers = np.random.default_rng(0), 256, 12
    params = [jnp.asarray(generator.normal(size=(width, width)) / 16, jnp.float32) for _ in range(layers)]

    def network(params, batch):
        for weights in params:
            batch = jnp.tanh(batch @ weights)
        return jnp.mean(batch**2)

    # On the device, both moments would leave no more than the parameters and their gradient take.
    step = ab.train_step(network, optax.adam(1e-3), offload="optimizer", memory=4 * layers * width * width * 4)
    state = step.init(params)
    for size in sizes:
        state, metrics = step(state, generator.normal(size=(size, width)).astype(np.float32))
        assert jnp.isfinite(metrics.loss) and any(map(is_on_host, jax.tree.leaves(state.opt_state)))


@pytest.mark.every_jax
def test_a_gradient_that_is_not_finite_changes_nothing():
    step = ab.train_step(loss, optax.adamw(1e-2), microbatch_size=8, offload="optimizer")
    state, _ = step(step.init(weights()), data())
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, data() | {"y": np.full(16, np.nan, np.float32)})
    assert metrics.skipped and int(state.skipped) == 1
    assert_same_bits((state.params, state.opt_state), (before.params, before.opt_state))
    assert any(map(is_on_host, jax.tree.leaves(state.opt_state)))
    state, metrics = step(state, data())  # the control
    assert not metrics.skipped and not np.array_equal(state.opt_state[0].mu[0]["w"], before.opt_state[0].mu[0]["w"])


@pytest.mark.full
def test_a_state_is_donated_and_moved():
    """The one that a step is given is deleted, also what the step moves. A step without offload moves it back."""
    optimizer = optax.adamw(1e-2)
    step = ab.train_step(loss, optimizer, microbatch_size=8, offload="optimizer")
    given = ab.TrainState.create(weights(), optimizer)
    assert kinds(given) == {"device"}
    state, _ = step(given, data())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    again, _ = step(state, data())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    back, _ = ab.train_step(loss, optimizer, microbatch_size=8)(again, data())
    assert kinds(back) == {"device"} and all(leaf.is_deleted() for leaf in jax.tree.leaves(again))
    keeping = ab.train_step(loss, optimizer, microbatch_size=8, offload="optimizer", donate=False)
    state, _ = keeping(back, data())
    kept, _ = keeping(state, data())
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((back, state, kept)))
    assert any(map(is_on_host, jax.tree.leaves(kept.opt_state)))


@pytest.mark.full
def test_an_array_that_is_also_a_parameter_is_not_deleted():
    """Some optimizers start with the parameters themselves in their state."""
    params = weights()
    optimizer = optax.contrib.schedule_free_adamw(1e-2)
    states = []
    for way in (None, "optimizer"):
        step = ab.train_step(loss, optimizer, microbatch_size=8, offload=way)
        states.append(step(ab.TrainState.create(jax.tree.map(jnp.copy, params), optimizer), data())[0])
    assert_same_bits(*states)


@pytest.mark.full
@pytest.mark.every_jax
def test_a_step_inside_jit_and_scan():
    step = ab.train_step(loss, optax.adamw(1e-2), microbatch_size=8, offload="optimizer")
    batches = jax.tree.map(lambda *rows: jnp.stack(rows), *map(data, range(3)))

    @jax.jit
    def steps(state, batches):
        return jax.lax.scan(lambda state, batch: (step(state, batch)[0], None), state, batches)[0]

    state = steps(step.init(weights()), batches)
    assert any(map(is_on_host, jax.tree.leaves(state.opt_state)))
    for one, two in zip(*map(jax.tree.leaves, (state.params, run(optax.adamw(1e-2), None).params)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


class Masters:
    """An optimizer with float32 copies of bfloat16 parameters: they are updated, and then rounded."""

    def __init__(self, inner):
        self.inner = inner

    def init(self, params):
        masters = jax.tree.map(lambda param: param.astype(jnp.float32), params)
        return masters, self.inner.init(masters)

    def update(self, grads, state, params):
        masters, inner = state
        grads = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
        updates, inner = self.inner.update(grads, inner, masters)
        masters = optax.apply_updates(masters, updates)
        # The difference in float32: added to the parameter in float32 and rounded, it gives the rounded master.
        changes = jax.tree.map(lambda new, old: new - old.astype(jnp.float32), masters, params)
        return changes, (masters, inner)


@pytest.mark.full
@pytest.mark.every_jax
def test_masters_in_float32_are_on_the_host_too():
    """bfloat16 parameters on the device, and what the optimizer keeps of them in float32 on the host."""
    states = []
    for way in ("optimizer", None):
        step = ab.train_step(loss, Masters(optax.adamw(1e-3)), microbatch_size=8, offload=way)
        state = step.init(weights(dtype=jnp.bfloat16))
        for seed in range(3):
            state, _ = step(state, data(seed))
        states.append(state)
    offloaded = states[0]
    masters = [layer["w"] for layer in offloaded.opt_state[0]]
    assert kinds(masters) == {"pinned_host"} and {master.dtype for master in masters} == {jnp.dtype(jnp.float32)}
    assert kinds(offloaded.params) == {"device"} and offloaded.params[0]["w"].dtype == jnp.bfloat16
    for master, layer in zip(masters, offloaded.params, strict=True):
        np.testing.assert_allclose(np.asarray(master), np.asarray(layer["w"], np.float32), rtol=2**-7, atol=1e-6)
    assert_same_bits(*states)


def linen(way):
    model = nn.Sequential([nn.Dense(WIDTH), nn.relu, nn.Dense(WIDTH), nn.relu, nn.Dense(1)])

    def fun(params, batch):
        return jnp.mean((model.apply({"params": params}, batch["x"])[:, 0] - batch["y"]) ** 2)

    params = model.init(jax.random.key(0), data()["x"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2))
    return ab.train_step(fun, microbatch_size=8, offload=way), state, lambda state: state.opt_state


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.a, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout, self.b = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x):
        return self.b(self.dropout(nnx.relu(self.norm(self.a(x)))))


def of_nnx(way):
    def fun(model, batch):
        return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)

    model = Normed(nnx.Rngs(0))
    state = (model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param))
    return ab.train_step(fun, microbatch_size=8, offload=way), state, lambda state: nnx.state(state[1])


def equinox(way):
    def fun(model, batch):
        return jnp.mean((jax.vmap(model)(batch["x"])[:, 0] - batch["y"]) ** 2)

    step = ab.train_step(fun, optax.adamw(1e-2), microbatch_size=8, offload=way)
    return step, step.init(eqx.nn.MLP(WIDTH, 1, WIDTH, 2, key=jax.random.key(0))), lambda state: state.opt_state


def arrays_of(state):
    state = nnx.state(state) if isinstance(state, tuple) else state
    leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    return [jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf for leaf in leaves]


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("make", [linen, of_nnx, equinox])
def test_models_of_other_libraries(make):
    ends = []
    for way in ("optimizer", None):
        step, state, opt_state = make(way)
        for seed in range(3):
            state, _ = step(state, data(seed))
        large = [leaf for leaf in jax.tree.leaves(opt_state(state)) if leaf.ndim == 2 and leaf.shape[1] == WIDTH]
        large = [leaf for leaf in large if leaf.nbytes >= 2**16]
        assert large and kinds(large) == {"device" if way is None else "pinned_host"}
        assert len([leaf for leaf in arrays_of(state) if is_on_host(leaf)]) == (0 if way is None else len(large))
        ends.append(arrays_of(state))
    assert_same_bits(*ends)


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("spec", [P("data"), P(None, "model"), P()], ids=str)
def test_a_sharded_state_keeps_its_shardings(spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)
    ends = []
    for way in ("optimizer", None):
        step = ab.train_step(loss, optax.adamw(1e-2), microbatch_size=8, offload=way, mesh=mesh)
        specs = [{"w": NamedSharding(mesh, spec), "b": NamedSharding(mesh, P())}] * LAYERS
        state = step.init(jax.device_put(weights(), specs))
        for seed in range(2):
            state, _ = step(state, data(seed))
        ends.append(state)
    assert len(step._programs) == 1
    for offloaded, usual in zip(*(jax.tree.leaves(state.opt_state) for state in ends), strict=True):
        assert offloaded.sharding.memory_kind == ("pinned_host" if offloaded.ndim == 2 else "device")
        assert offloaded.sharding.with_memory_kind("device").is_equivalent_to(usual.sharding, usual.ndim)
    assert ends[0].opt_state[0].mu[0]["w"].sharding.spec == spec
    for one, two in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7)


@pytest.mark.every_jax
@pytest.mark.parametrize("ways", [("optimizer", "optimizer"), ("optimizer", None), (None, "optimizer")], ids=str)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, ways):
    """Also where only one of its two parts had its optimizer's state on the host."""
    batches = ab.Batches(data(), 8, seed=0)

    def fit(way, steps, **options):
        step = ab.train_step(loss, optax.adamw(1e-2), microbatch_size=4, offload=way)
        run = ab.fit(step, step.init(weights()), batches, steps=steps, progress=False, **options)
        assert any(map(is_on_host, jax.tree.leaves(run.state))) == (way == "optimizer")
        return run.state

    for way, steps in zip(ways, (3, 6), strict=True):
        resumed = fit(way, steps, checkpoints=tmp_path / "run", checkpoint_every=2)
    assert_same_bits(resumed, fit(ways[0], 6))


def test_a_checkpoint_is_a_copy(tmp_path):
    """The next step overwrites the arrays on the host while they are written."""
    from anybatch.training.checkpoints import Checkpoints

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    array = jax.device_put(np.arange(2.0**20, dtype=np.float32), sharding)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=sharding)
    def change(array):
        return jax.device_put(0 * jax.device_put(array, jax.memory.Space.Device), jax.memory.Space.Host)

    with Checkpoints(tmp_path / "copy") as checkpoints:
        checkpoints.save(0, {"w": array}, {})
        jax.block_until_ready(change(array))
        assert array.is_deleted()
        _, restored, _ = checkpoints.restore({"w": jax.device_put(np.zeros(2**20, np.float32), sharding)})
    assert restored["w"].sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(restored["w"]), np.arange(2.0**20, dtype=np.float32))


def bytes_of(way, layers=6, rows=4):
    """What a step of one example at a time takes on the device, as XLA says for a CPU, with all of its state."""
    step = ab.train_step(loss, optax.adamw(1e-2), microbatch_size=1, offload=way)
    found = step.lower(step.init(weights(layers)), few(rows)).compile().memory_analysis()
    new = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + new


def few(rows=4):
    return jax.tree.map(lambda leaf: leaf[:rows], data())


@pytest.mark.full
@pytest.mark.every_jax
def test_a_budget_is_that_of_the_device():
    """The state on the host does not count. Without offload the same step does not fit, and says what would."""
    matrix = 4 * WIDTH * WIDTH
    budget = bytes_of(None) - 3 * matrix  # 12 moments, less 6 on their way
    step = ab.train_step(loss, optax.adamw(1e-2), memory=budget, offload="optimizer")
    step(step.init(weights(6)), few())
    usual = ab.train_step(loss, optax.adamw(1e-2), memory=budget)
    with pytest.raises(ab.NothingFitsError, match=r'pass offload="optimizer", which saves about 384\.0 KiB'):
        usual(usual.init(weights(6)), few())


@pytest.mark.full
def test_a_plan_that_does_not_fit_names_offload_only_if_it_helps():
    params = weights(6)
    kept = 2 * sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    step = ab.train_step(loss, optax.adamw(1e-2))
    least = min(candidate.total for candidate in step.plan(step.init(params), few()).candidates if candidate.total)
    for budget, helps in ((kept + least - 4 * WIDTH * WIDTH, True), (2**19, False)):
        step = ab.train_step(loss, optax.adamw(1e-2), memory=budget)
        with pytest.raises(ab.NothingFitsError) as caught:
            step(step.init(weights(6)), few())
        assert ('With offload="optimizer", it may fit.' in str(caught.value)) == helps


def test_what_offload_may_be():
    with pytest.raises(ab.InputError) as caught:
        ab.train_step(loss, optax.adamw(1e-2), offload="params")
    assert str(caught.value).splitlines()[0].startswith('offload must be "optimizer", or None')
    assert "offload='params'" in str(caught.value) and 'Pass offload="optimizer"' in str(caught.value)


def test_a_device_without_such_memory_is_refused(monkeypatch):
    monkeypatch.setattr(offload, "HOST", "memory_of_another_planet")
    step = ab.train_step(loss, optax.adamw(1e-2), offload="optimizer")
    with pytest.raises(ab.InputError) as caught:
        step.init(weights())
    text = str(caught.value)
    assert "needs devices that have memory of the kind memory_of_another_planet" in text
    assert "cpu, which has" in text and "pinned_host" in text and "mesh=mesh" in text


class Normalized:
    """Momentum, divided by its norm, which is added up in a reference: the order of reads and writes matters."""

    def init(self, params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(self, grads, state, params):
        state = jax.tree.map(lambda moment, grad: 0.9 * moment + grad, state, grads)
        total = jax.new_ref(jnp.zeros(()))
        for leaf in jax.tree.leaves(state):
            total[...] += jnp.sum(leaf**2)
        return jax.tree.map(lambda moment: -0.01 * moment / jnp.sqrt(total[...]), state), state


class LooksAtValues:
    def init(self, params):
        return {"moments": jax.tree.map(jnp.zeros_like, params), "norm": float(optax.tree.norm(params))}

    def update(self, grads, state, params):
        moments = jax.tree.map(lambda moment, grad: 0.9 * moment + grad, state["moments"], grads)
        updates = jax.tree.map(lambda moment: -moment / (1 + state["norm"]), moments)
        return updates, {"moments": moments, "norm": state["norm"]}


@pytest.mark.full
@pytest.mark.every_jax
@pytest.mark.parametrize("optimizer", [Normalized(), LooksAtValues()], ids=lambda each: type(each).__name__)
def test_optimizers_with_references_and_with_values_take_the_same_steps(optimizer):
    params, of_loss = weights(), (few(), few())
    ends = []
    for way in (None, "optimizer"):
        step = ab.train_step(loss, optimizer, microbatch_size=2, offload=way)
        state = step.init(params)
        for batch in of_loss:
            state, _ = step(state, batch)
        ends.append(state.params)
    moved = [float(jnp.abs(end[0]["w"] - params[0]["w"]).max()) for end in ends]
    assert moved[0] > 1e-4
    for one, other in zip(*map(jax.tree.leaves, ends), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-8)


@pytest.mark.full
def test_parameters_may_be_on_any_device():
    device = jax.devices()[3]
    step = ab.train_step(loss, optax.adamw(1e-2), microbatch_size=2, offload="optimizer")
    state, _ = step(step.init(jax.device_put(weights(), device)), few())
    assert {each for leaf in jax.tree.leaves(state) for each in leaf.devices()} == {device}

    class Uncommitted(Normalized):  # zeros on JAX's default device
        def init(self, params):
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)

    made = step.init(jax.device_put(weights(), device))
    step = ab.train_step(loss, Uncommitted(), microbatch_size=2, offload="optimizer")
    state, _ = step(made.replace(opt_state=Uncommitted().init(weights())), few())
    assert {each for leaf in jax.tree.leaves(state.opt_state) for each in leaf.devices()} == {device}


def test_a_state_may_be_made_under_jit_and_as_shapes():
    step = ab.train_step(loss, optax.adamw(1e-2), microbatch_size=2, offload="optimizer")
    shapes = jax.eval_shape(step.init, weights())
    state = jax.jit(step.init)(weights())
    assert jax.tree.structure(shapes) == jax.tree.structure(state) == jax.tree.structure(step.init(weights()))
    state, _ = step(state, few())
    assert is_on_host(state.opt_state[0].mu[0]["w"])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:The loss changes attributes of an NNX model")
def test_a_loss_that_adds_variables_to_a_model_is_refused():
    class Sows(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            self.hidden = nnx.Intermediate(self.layer(x))
            return self.hidden[...]

    model = Sows(nnx.Rngs(0))
    step = ab.train_step(lambda model, batch: jnp.mean(model(batch) ** 2), microbatch_size=None, offload="optimizer")
    with pytest.raises(ab.InputError, match="must not add or remove variables of a model"):
        step((model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)), jnp.ones((8, WIDTH)))


def test_other_fields_of_a_state_stay_on_the_device():
    class WithAverages(TrainState):
        opt_state_averages: dict

    averages = {"w": jnp.ones((WIDTH, WIDTH))}
    state = WithAverages.create(apply_fn=None, params=weights(), tx=optax.adamw(1e-2), opt_state_averages=averages)
    step = ab.train_step(loss, microbatch_size=2, offload="optimizer")
    state, _ = step(state, few())
    assert is_on_host(state.opt_state[0].mu[0]["w"]) and not is_on_host(state.opt_state_averages["w"])


@pytest.mark.every_jax
def test_an_error_in_the_first_step_leaves_the_state_as_it_is():
    """A state made elsewhere is moved by its first step, and only once that is compiled."""
    optimizer = optax.adam(1e-2)
    step = ab.train_step(loss, optimizer, microbatch_size=8, offload="optimizer")
    state = ab.TrainState.create(weights(), optimizer)
    with pytest.raises(TypeError):
        step(state, {"x": np.ones((16, 5), np.float32), "y": np.ones(16, np.float32)})
    state, _ = step(state, data())
    assert "pinned_host" in kinds(state.opt_state)


@pytest.mark.every_jax
def test_a_state_whose_arrays_were_replaced_in_place_is_moved_again():
    """JAX ends the process if a program gets an array in another memory than it was compiled for."""
    step = ab.train_step(lambda params, batch: loss(params["l"], batch), optax.adam(1e-2), offload="optimizer")
    state, _ = step(step.init({"l": weights()}), data())
    layer = state.opt_state[0].mu["l"][0]
    layer["w"] = jax.device_put(layer["w"], jax.memory.Space.Device)
    state, _ = step(state, data(1))
    assert is_on_host(state.opt_state[0].mu["l"][0]["w"])


def test_a_loss_that_calls_back_in_order_is_refused():
    """JAX cannot compile callbacks in a fixed order together with arrays on the host."""

    def telling(params, batch, ordered):
        value = loss(params, batch)
        jax.debug.callback(lambda value: None, value, ordered=ordered)
        return value

    def first_step(**options):
        step = ab.train_step(functools.partial(telling, **options), optax.adam(1e-2), offload="optimizer")
        return step(step.init(weights()), data())

    with pytest.raises(ab.InputError, match=r"must not print or call back in order.*\nLeave ordered=True out"):
        first_step(ordered=True)
    first_step(ordered=False)


class Indexed:
    """An optimizer whose `init` uses a value of the parameters as an index."""

    def init(self, params):
        return [[0.5, 2.0][int(jnp.argmax(params[0]["b"])) % 2] * params[0]["w"]]

    def update(self, grads, state, params):
        return jax.tree.map(lambda leaf: -0.01 * leaf, grads), state


def test_an_init_that_looks_at_values_in_any_way_is_run_as_it_is():
    assert_same_bits(run(Indexed(), "optimizer").opt_state, run(Indexed(), None).opt_state)
