"""`train_step` with the states of other libraries: each as its own loop would have trained it."""

import re

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.meshes import mesh_of
from flax import nnx
from flax.training import train_state

import anybatch as ab

pytestmark = pytest.mark.every_jax


@pytest.fixture(autouse=True)
def defaults(model_defaults):
    """Models are written for JAX's own promotion, and compared in float64."""


def batches(count=4):
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(24, 6)), "y": rng.normal(size=24)} for _ in range(count)]


def mean_square(predictions, batch):
    return jnp.mean((predictions[:, 0] - batch["y"]) ** 2)


class KeyedState(train_state.TrainState):
    key: jax.Array
    updates: int = 0

    def apply_gradients(self, *, grads, **more):
        return super().apply_gradients(grads=grads, updates=self.updates + 1, **more)


@pytest.mark.parametrize("keyed", [False, True])
def test_a_state_of_flax(keyed):
    """Classes made from it, too: with a key of their own, and their own apply_gradients."""
    layers = [nn.Dense(16, param_dtype=jnp.float64), nn.relu, nn.Dense(1, param_dtype=jnp.float64)]
    model = nn.Sequential(layers)
    params = model.init(jax.random.key(0), batches()[0]["x"])["params"]
    more = {"key": jax.random.key(5)} if keyed else {}
    make = KeyedState if keyed else train_state.TrainState

    def loss(params, batch, *keys):
        x = batch["x"] * jax.random.bernoulli(keys[0], 0.9, batch["x"].shape) if keys else batch["x"]
        return mean_square(model.apply({"params": params}, x), batch)

    def fresh():
        return make.create(apply_fn=model.apply, params=jax.tree.map(jnp.copy, params), tx=optax.adam(0.05), **more)

    step, state, expected = ab.train_step(loss, microbatch_size=5, donate=False), fresh(), fresh()
    for number, batch in enumerate(batches()):
        state, metrics = step(state, batch)
        keys = (jax.random.fold_in(expected.key, number),) if keyed else ()
        value, grads = jax.value_and_grad(loss)(expected.params, batch, *keys)
        expected = expected.apply_gradients(grads=grads)
        chex.assert_trees_all_close(metrics.loss, value, rtol=1e-10)
    assert type(state) is make and int(state.step) == 4
    assert not keyed or int(state.updates) == 4
    chex.assert_trees_all_close((state.params, state.opt_state), (expected.params, expected.opt_state), rtol=1e-9)
    broken = batches()[0] | {"y": np.full(24, np.nan)}
    after, metrics = step(state, broken)
    assert bool(metrics.skipped)
    chex.assert_trees_all_equal(after.params, state.params)
    assert int(after.step) == 4  # nothing of it is changed


class Network(nnx.Module):
    def __init__(self, rngs, *, norm):
        self.a = nnx.Linear(6, 16, rngs=rngs, param_dtype=jnp.float64)
        self.between = nnx.BatchNorm(16, rngs=rngs, param_dtype=jnp.float64) if norm else nnx.Dropout(0.2, rngs=rngs)
        self.b = nnx.Linear(16, 1, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x):
        return self.b(nnx.relu(self.between(self.a(x))))


def numbers(state):
    leaves = jax.tree.leaves(nnx.state(state))
    return [np.array(leaf) for leaf in leaves if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)]


@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # the averages of BatchNorm are float32 always
@pytest.mark.parametrize("norm", [False, True], ids=["dropout", "BatchNorm"])
def test_a_model_of_nnx_with_its_optimizer(norm):
    """Its random streams and its running averages go on as well."""

    def fresh():
        model = Network(nnx.Rngs(0), norm=norm)
        return model, nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)

    def loss(model, batch):
        return mean_square(model(batch["x"]), batch)

    step, state = ab.train_step(loss, microbatch_size=5), fresh()
    model, optimizer = fresh()
    for batch in batches():
        same, metrics = step(state, batch)
        assert same is state
        value, grads = nnx.value_and_grad(loss)(model, batch)
        optimizer.update(model, grads)
        chex.assert_trees_all_close(metrics.loss, value, rtol=1e-10)
    chex.assert_trees_all_close(numbers(state), numbers((model, optimizer)), rtol=1e-6 if norm else 1e-9, atol=1e-12)
    before = numbers(state)
    _, metrics = step(state, batches()[0] | {"y": np.full(24, np.nan)})
    assert bool(metrics.skipped)
    chex.assert_trees_all_equal(numbers(state), before)


class Drawing(nnx.Module):
    """Dropout without random streams of its own; a loss passes them."""

    def __init__(self, rngs):
        self.a = nnx.Linear(6, 16, rngs=rngs, param_dtype=jnp.float64)
        self.dropout = nnx.Dropout(0.5)
        self.b = nnx.Linear(16, 1, rngs=rngs, param_dtype=jnp.float64)

    def __call__(self, x, rngs):
        return self.b(self.dropout(nnx.relu(self.a(x)), rngs=rngs))


def drawing_pair():
    model = Drawing(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)


def all_numbers(*objects):
    """With keys as numbers."""
    leaves = jax.tree.leaves(nnx.state(objects))
    is_key = [jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [np.asarray(jax.random.key_data(leaf) if key else leaf) for leaf, key in zip(leaves, is_key, strict=True)]


def drawing_loss(model, batch, *, rngs, metrics=None, other=None):
    predictions = model(batch["x"], rngs)
    if other is not None:
        predictions = predictions + other(batch["x"])
    value = mean_square(predictions, batch)
    if metrics is not None:
        squares = jnp.square(predictions[:, 0] - batch["y"])
        metrics.update(loss=squares.astype(jnp.float32), size=jnp.abs(predictions).astype(jnp.float32))
    return value


def drawing_objects(name, model):
    """By keyword: random streams, metrics, another model, a part of the model."""
    objects = {"rngs": nnx.Rngs(5)}
    if name == "metrics":
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), size=nnx.metrics.Average("size"))
        objects["metrics"] = metrics
    if name == "other model":
        objects["other"] = Network(nnx.Rngs(3), norm=False)
    if name == "shared":
        model.streams = objects["rngs"]
    if name == "shared parameters":
        objects["other"] = nnx.Sequential(model.a, lambda hidden: hidden[:, :1])
    return objects


DRAWING = ["metrics", "other model", "shared", "shared parameters"]
SIZES_AND_DEVICES = [(1, None), (5, None), (None, None), (5, 8)]
WITH_OBJECTS = [("streams", *each) for each in SIZES_AND_DEVICES]
WITH_OBJECTS += [(name, 5, devices) for name in DRAWING for devices in (None, 2)]


@pytest.mark.full
@pytest.mark.parametrize(("name", "microbatch_size", "devices"), WITH_OBJECTS)
def test_objects_of_nnx_by_keyword_go_on(name, microbatch_size, devices):
    """As `nnx.jit` has it: what the loss changes of them is there after the step."""
    more = {} if devices is None else {"mesh": mesh_of(devices)}
    step = ab.train_step(drawing_loss, microbatch_size=microbatch_size, **more)
    state, (model, optimizer) = drawing_pair(), drawing_pair()
    objects, expected = drawing_objects(name, state[0]), drawing_objects(name, model)

    def is_trained(path, variable):
        return path[0] == 0 and isinstance(variable, nnx.Param)

    @nnx.jit
    def hand_written(model, optimizer, batch, objects):
        definition, params, rest = nnx.split((model, objects), is_trained, ...)  # nnx.grad refuses what is shared

        def loss(params):
            model, objects = nnx.merge(definition, params, rest, copy=True)
            value = drawing_loss(model, batch, **objects)
            return value, nnx.state((model, objects), nnx.Not(is_trained))

        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        nnx.update((model, objects), rest)
        optimizer.update(model, grads[0])
        return value

    for batch in batches():
        same, metrics = step(state, batch, **objects)
        assert same is state
        value = hand_written(model, optimizer, batch, expected)
        chex.assert_trees_all_close(metrics.loss, value, rtol=1e-6)
    assert int(objects["rngs"].default.count[...]) == 4
    chex.assert_trees_all_close(
        all_numbers(*state, objects), all_numbers(model, optimizer, expected), rtol=1e-5, atol=1e-7
    )
    before = all_numbers(*state, objects)
    _, metrics = step(state, batches()[0] | {"y": np.full(24, np.nan)}, **objects)
    assert bool(metrics.skipped)
    chex.assert_trees_all_equal(all_numbers(*state, objects), before)


@pytest.mark.full
def test_objects_of_nnx_beside_a_state_of_ours():
    """With a step that saw none before, and under `nnx.jit`."""

    def loss(params, batch, rngs=None):
        scale = 1.0 if rngs is None else jax.random.bernoulli(rngs(), 0.5, batch["y"].shape)
        return jnp.mean((batch["x"] @ params * scale - batch["y"]) ** 2)

    optimizer = optax.adam(0.05)
    step = ab.train_step(loss, optimizer, microbatch_size=5)
    compiled = nnx.jit(lambda state, batch, rngs: step(state, batch, rngs=rngs))
    params = jnp.ones(6, jnp.float64)
    state, opt_state = step.init(params), optimizer.init(params)
    rngs, expected = nnx.Rngs(5), nnx.Rngs(5)
    for number, batch in enumerate(batches(5)):
        if number in (0, 3):
            state, metrics = step(state, batch)
        elif number == 4:
            state, metrics = compiled(state, batch, rngs)
        else:
            state, metrics = step(state, batch, rngs=rngs)
        key = None if number in (0, 3) else expected()
        value, grads = jax.value_and_grad(loss)(params, batch, None if key is None else lambda key=key: key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close((metrics.loss, state.params), (value, params), rtol=1e-9)
    assert int(rngs.default.count[...]) == int(expected.default.count[...]) == 3
    assert int(state.step) == 5
    assert step.plan(state, batches()[0], rngs=rngs).chosen is not None
    step.lower(state, batches()[0], rngs=rngs)
    assert int(rngs.default.count[...]) == 3


@pytest.mark.full
@pytest.mark.parametrize("devices", [None, 2])
def test_clones_of_a_model_of_nnx_stay(devices):
    """A step uses up what the model has, but not what a target network or a snapshot shares with it."""

    def loss(model, batch, *, target):
        return jnp.mean((model(batch["x"]) - jax.lax.stop_gradient(target(batch["x"])) - 1) ** 2)

    model = Network(nnx.Rngs(0), norm=False)
    state = (model, nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param))
    more = {} if devices is None else {"mesh": mesh_of(devices)}
    step, batch = ab.train_step(loss, microbatch_size=5, **more), batches()[0]
    target = nnx.clone(model)
    for _ in range(3):
        step(state, batch, target=target)
        held, before = model.a.kernel[...], np.array(model.a.kernel[...])
        nnx.update(target, nnx.state(model))  # as every so many steps of DQN
        step(state, batch, target=target)
        copied = nnx.clone(model)
        step(state, batch, target=nnx.clone(target))
        chex.assert_trees_all_equal(np.asarray(held), before)
        chex.assert_trees_all_equal(np.asarray(target.a.kernel[...]), before)
        assert np.isfinite(np.asarray(copied(batch["x"]))).all() and np.isfinite(np.asarray(target(batch["x"]))).all()
        del held, copied


@pytest.mark.full
def test_what_is_not_shared_of_a_model_of_nnx_is_donated():
    model = Network(nnx.Rngs(0), norm=False)
    state = (model, nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param))
    step = ab.train_step(lambda model, batch: mean_square(model(batch["x"]), batch), microbatch_size=5)
    is_same_memory = []
    for batch in batches():
        pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(state, nnx.Param))]
        step(state, batch)
        after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(nnx.state(state, nnx.Param))]
        is_same_memory.append(sorted(pointers) == sorted(after))
    assert all(is_same_memory[1:])  # the first step may place arrays, and copy what the optimizer shares


KEYED = "state = step.init(params, key=jax.random.key(0))."


@pytest.mark.parametrize(
    ("kind", "loss", "kwargs", "must", "given", "remedy"),
    [
        ("own", lambda w, batch, key: 0.0, {}, "loss(params, batch)", "missing a required argument: 'key'", KEYED),
        (
            "own",
            lambda w, batch: 0.0,
            {"z": 1},
            "loss(params, batch, z=...)",
            "keyword argument 'z'",
            "Leave out the arguments",
        ),
        (
            "keyed",
            lambda w, batch: 0.0,
            {},
            "loss(params, batch, key)",
            "too many positional",
            "def loss(params, batch, ",
        ),
        (
            *("own", lambda w, users, items: 0.0, {}, "loss(params, batch)", "'items'"),
            'step(state, {"users": users, "items": items}), with def loss(params, batch). Or pass the others by '
            'keyword: ab.train_step(loss, ..., batch_argnames=("items",)), then step(state, users, items=items).',
        ),
        (
            *("nnx", lambda model, batch, key: 0.0, {}, "loss(model, batch)", "'key'"),
            "key = nnx.Rngs(0), then step(state, batch, key=key).",
        ),
        (
            *("nnx", lambda model, rngs, batch: 0.0, {}, "loss(model, batch)", "'batch'"),
            "ab.train_step(lambda model, batch, rngs: loss(model, rngs, batch)), then step(state, batch, rngs=rngs).",
        ),
        (
            *("nnx", lambda model, rngs, batch: 0.0, {"rngs": 1}, "loss(model, batch, rngs=...)", "multiple values"),
            "ab.train_step(lambda model, batch, rngs: loss(model, rngs, batch)), then step(state, batch, rngs=rngs).",
        ),
    ],
)
def test_a_loss_that_does_not_take_what_a_step_passes(kind, loss, kwargs, must, given, remedy):
    step = ab.train_step(loss, None if kind == "nnx" else optax.sgd(0.1))
    if kind == "nnx":
        state = drawing_pair()
    else:
        state = step.init(jnp.ones(6), key=jax.random.key(0) if kind == "keyed" else None)
    with pytest.raises(ab.InputError) as caught:
        step(state, batches()[0], **kwargs)
    message = str(caught.value)
    assert f"The loss must accept the arguments of the step: {must}, got" in message
    assert given in message and remedy in message


def test_a_step_is_called_with_a_state_and_a_batch():
    def loss(model, batch):
        return mean_square(model(batch["x"]), batch)

    step, batch = ab.train_step(loss), batches()[0]
    model = Network(nnx.Rngs(0), norm=False)
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(
        ab.InputError, match=r"A step takes a state and a batch[^$]*step\(\(model, optimizer\), batch\)"
    ):
        step(model, optimizer, batch)
    with pytest.raises(ab.InputError, match=r"The model comes first: step\(\(model, optimizer\), batch\)"):
        step((optimizer, model), batch)
    with pytest.raises(ab.InputError, match=r"state = \(model, nnx.Optimizer\("):
        step(model, batch)
    own = ab.train_step(lambda w, x, y: jnp.mean((x @ w - y) ** 2), optax.sgd(0.1), batch_argnames=("y",))
    with pytest.raises(ab.InputError, match=r"step\(state, x, y=y\)"):
        own(own.init(jnp.ones(6)), batch["x"], batch["y"])
    own(own.init(jnp.ones(6, jnp.float64)), batch["x"], y=batch["y"])  # as it says


def test_an_array_of_the_state_may_be_passed_by_keyword():
    def loss(w, batch, old):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2) + jnp.sum((w - old + 1) ** 2)

    step, w = ab.train_step(loss, optax.sgd(0.1), microbatch_size=5), jnp.ones(6, jnp.float64)
    state = step.init(w)
    for batch in batches():
        state, metrics = step(state, batch, old=state.params)
        value, grad = jax.value_and_grad(loss)(w, batch, w)
        w = w - 0.1 * grad
        chex.assert_trees_all_close((metrics.loss, state.params), (value, w), rtol=1e-9)


def test_a_loss_that_ignores_its_batch_is_told():
    batch = batches()[0]
    for microbatch_size in (5, None, "auto"):
        step = ab.train_step(lambda w, _: jnp.mean(batch["x"] @ w), optax.sgd(0.1), microbatch_size=microbatch_size)
        with pytest.warns(RuntimeWarning, match="The loss does not depend on the batch"):
            step(step.init(jnp.ones(6, jnp.float64)), batch)


def test_a_model_of_equinox():
    model = eqx.nn.MLP(6, 1, 16, 2, key=jax.random.key(0))

    def loss(model, batch):
        return mean_square(jax.vmap(model)(batch["x"]), batch)

    optimizer = optax.adam(0.05)
    step = ab.train_step(loss, optimizer, microbatch_size=5)
    state, expected = step.init(model), model
    opt_state = optimizer.init(eqx.filter(expected, eqx.is_inexact_array))
    for batch in batches():
        state, metrics = step(state, batch)
        value, grads = eqx.filter_value_and_grad(loss)(expected, batch)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(expected, eqx.is_inexact_array))
        expected = eqx.apply_updates(expected, updates)
        chex.assert_trees_all_close(metrics.loss, value, rtol=1e-10)
    assert type(state.params) is eqx.nn.MLP and state.params.activation is model.activation
    trained, expected = (eqx.filter(each, eqx.is_array) for each in (state.params, expected))
    chex.assert_trees_all_close(trained, expected, rtol=1e-8)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["flax", "nnx", "equinox"])
def test_they_are_saved_and_go_on_with_the_same_bits(tmp_path, kind):
    def fresh():
        if kind == "equinox":
            step = ab.train_step(lambda m, b: mean_square(jax.vmap(m)(b["x"]), b), optax.adam(0.05), microbatch_size=5)
            return step, step.init(eqx.nn.MLP(6, 1, 8, 1, key=jax.random.key(0)))
        if kind == "nnx":
            model = Network(nnx.Rngs(0), norm=False)
            step = ab.train_step(lambda model, batch: mean_square(model(batch["x"]), batch), microbatch_size=5)
            return step, (model, nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param))
        model = nn.Dense(1)
        params = model.init(jax.random.key(0), batches()[0]["x"])["params"]
        state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.05))
        step = ab.train_step(lambda p, b: mean_square(model.apply({"params": p}, b["x"]), b), microbatch_size=5)
        return step, state

    def run(steps, folder):
        step, state = fresh()
        return ab.fit(step, state, batches(), steps=steps, checkpoints=folder, progress=False)

    whole = run(6, tmp_path / "whole")
    run(3, tmp_path / "parts")
    parts = run(6, tmp_path / "parts")
    assert parts.resumed_from == 3

    def leaves(state):
        return [leaf for leaf in jax.tree.leaves(nnx.state(state) if kind == "nnx" else state) if eqx.is_array(leaf)]

    chex.assert_trees_all_equal(leaves(parts.state), leaves(whole.state))


class WithOtherLeaves(eqx.Module):
    """A model whose leaves are arrays, numbers, booleans, a key, a function, and None."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout  # has p, a float, and inference, a bool
    key: jax.Array
    power: int
    activation: object
    nothing: None = None

    def __init__(self):
        self.linear, self.dropout = eqx.nn.Linear(6, 8, key=jax.random.key(0)), eqx.nn.Dropout(0.5)
        self.key, self.power, self.activation = jax.random.key(7), 2, jax.nn.relu

    def __call__(self, x, key):
        key = jax.random.fold_in(key, jax.random.bits(self.key, dtype=jnp.uint32))
        return self.dropout(self.activation(self.linear(x)), key=key) ** self.power


def dropout_loss(model, batch, key):
    keys = jax.random.split(key, batch["x"].shape[0])
    return mean_square(jax.vmap(model)(batch["x"], keys), batch)


def equinox_with_other_leaves():
    step = ab.train_step(dropout_loss, optax.adam(0.05), microbatch_size=5)
    return step, step.init(WithOtherLeaves(), key=jax.random.key(1))


def equinox_in_a_step_of_ones_own():
    optimizer = optax.sgd(0.05)

    @eqx.filter_jit
    def update(model, opt_state, batch, key):
        loss, grads = eqx.filter_value_and_grad(dropout_loss)(model, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    def step(state, batch):
        model, opt_state, count, key, rate = state
        model, opt_state, loss = update(model, opt_state, batch, jax.random.fold_in(key, count))
        return (model, opt_state, count + 1, key, rate), {"loss": loss}

    model = WithOtherLeaves()
    return step, (model, optimizer.init(eqx.filter(model, eqx.is_inexact_array)), 0, jax.random.key(1), 0.5)


class Count(nnx.Variable):
    """A number that changes with each call."""


def nnx_with_other_leaves():
    model = Network(nnx.Rngs(0), norm=False)
    model.scale, model.is_scaled, model.calls, model.nothing = nnx.Variable(2.0), nnx.Variable(True), Count(0), None

    def loss(model, batch):
        model.calls.set_value(model.calls.get_value() + 1)
        scale = jnp.where(model.is_scaled.get_value(), model.scale.get_value(), 1.0) / model.calls.get_value()
        return mean_square(scale * model(batch["x"]), batch)

    return ab.train_step(loss, microbatch_size=5), (model, nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param))


def linen_with_other_leaves():
    class State(train_state.TrainState):
        key: jax.Array
        rate: float
        is_warm: bool
        nothing: None = None

    model = nn.Dense(1)
    params = model.init(jax.random.key(0), batches()[0]["x"])["params"]
    state = State.create(
        apply_fn=model.apply, params=params, tx=optax.adam(0.05), key=jax.random.key(1), rate=0.5, is_warm=True
    )
    return ab.train_step(
        lambda p, b, key: mean_square(model.apply({"params": p}, b["x"]), b) + jax.random.uniform(key) * p["bias"][0],
        microbatch_size=5,
    ), state


@pytest.mark.full
@pytest.mark.parametrize(
    "fresh",
    [equinox_with_other_leaves, equinox_in_a_step_of_ones_own, nnx_with_other_leaves, linen_with_other_leaves],
    ids=lambda fresh: fresh.__name__,
)
def test_leaves_that_are_no_arrays_do_not_keep_a_state_from_being_saved(tmp_path, fresh):
    def run(steps, folder):
        step, state = fresh()
        return ab.fit(step, state, batches(), steps=steps, checkpoints=folder, progress=False)

    whole = run(6, tmp_path / "whole")
    run(3, tmp_path / "parts")
    parts = run(6, tmp_path / "parts")
    assert parts.resumed_from == 3

    def leaves(state):
        found = jax.tree.leaves(nnx.state(state) if fresh is nnx_with_other_leaves else state)
        return [jax.random.key_data(leaf) if is_typed_key(leaf) else leaf for leaf in found]

    def is_typed_key(leaf):
        return eqx.is_array(leaf) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)

    before = leaves(fresh()[1])
    chex.assert_trees_all_equal(leaves(parts.state), leaves(whole.state))
    assert list(map(type, leaves(parts.state))) == list(map(type, leaves(whole.state)))
    assert any(map(np.any, jax.tree.map(np.not_equal, before, leaves(whole.state))))  # it has learned


def test_an_optimizer_too_many_is_refused():
    model = Network(nnx.Rngs(0), norm=False)
    state = (model, nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param))
    step = ab.train_step(lambda model, batch: mean_square(model(batch["x"]), batch), optax.sgd(0.1))
    with pytest.raises(ab.InputError, match="has its own optimizer"):
        step(state, batches()[0])


# What a model keeps beside its parameters: the running averages of BatchNorm.


class Normed(nn.Module):
    """As flax documents it: `train` says whether the batch is normalised by its own averages."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(8, use_bias=False, param_dtype=jnp.float64)(x)  # a bias has the gradient 0 here, but for rounding
        x = nn.BatchNorm(use_running_average=not train, momentum=0.8, param_dtype=jnp.float64)(x)
        return nn.Dense(1, param_dtype=jnp.float64)(nn.relu(x))


class NormedState(train_state.TrainState):
    batch_stats: dict


NORMED = Normed()


def normed_loss(params, batch_stats, batch):
    predictions, updates = NORMED.apply(
        {"params": params, "batch_stats": batch_stats}, batch["x"], train=True, mutable=["batch_stats"]
    )
    return mean_square(predictions, batch), updates["batch_stats"]


def normed_variables():
    variables = NORMED.init(jax.random.key(0), batches()[0]["x"], train=False)
    stats = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), variables["batch_stats"])
    return variables["params"], stats


def flax_state():
    params, stats = normed_variables()
    return NormedState.create(apply_fn=NORMED.apply, params=params, tx=optax.adam(0.05), batch_stats=stats)


def documented_step(state, batch):
    """The step of the documentation of flax, with the full batch."""

    def loss_fn(params):
        predictions, updates = state.apply_fn(
            {"params": params, "batch_stats": state.batch_stats}, batch["x"], train=True, mutable=["batch_stats"]
        )
        return mean_square(predictions, batch), (predictions, updates)

    (loss, (_, updates)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    state = state.apply_gradients(grads=grads)
    return state.replace(batch_stats=updates["batch_stats"]), loss


@pytest.mark.full
@pytest.mark.parametrize("options", [{"microbatch_size": size} for size in (1, 5, 24, None, "auto")], ids=repr)
@pytest.mark.parametrize("kind", ["flax", "own"])
def test_running_averages_are_those_of_the_loop_that_flax_documents(kind, options):
    expected, own = flax_state(), kind == "own"
    step = ab.train_step(normed_loss, optax.adam(0.05) if own else None, has_state=True, **options)
    params, stats = normed_variables()
    state = step.init(params, model_state=stats) if own else flax_state()
    for batch in batches():
        state, metrics = step(state, batch)
        expected, loss = documented_step(expected, batch)
        chex.assert_trees_all_close(metrics.loss, loss, rtol=1e-9)
    actual = state.model_state if own else state.batch_stats
    chex.assert_trees_all_close((state.params, actual), (expected.params, expected.batch_stats), rtol=1e-8)
    assert float(jnp.min(jnp.abs(actual["BatchNorm_0"]["mean"]))) > 0  # they have moved
    before = jax.tree.map(np.array, (state.params, actual))
    state, metrics = step(state, batches()[0] | {"y": np.full(24, np.nan)})
    assert bool(metrics.skipped)
    chex.assert_trees_all_equal((state.params, state.model_state if own else state.batch_stats), before)


@pytest.mark.full
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_running_averages_on_a_mesh(devices):
    expected, state = flax_state(), flax_state()
    step = ab.train_step(normed_loss, has_state=True, microbatch_size=2, mesh=mesh_of(devices))
    for batch in batches(2):
        state, _ = step(state, batch)
        expected, _ = documented_step(expected, batch)
    actual = jax.tree.map(np.array, (state.params, state.batch_stats))
    chex.assert_trees_all_close(actual, (expected.params, expected.batch_stats), rtol=1e-8)


@pytest.mark.full
def test_a_step_with_running_averages_is_planned_and_lowered():
    step, state = ab.train_step(normed_loss, has_state=True), flax_state()
    assert step.plan(state, batches()[0]).chosen is not None
    assert "24 examples" in str(step.explain(state, batches()[0], timed=False))
    assert "stablehlo" in step.lower(state, batches()[0]).as_text()
    after, _ = jax.jit(step)(state, batches()[0])  # as part of a larger program
    expected, _ = documented_step(flax_state(), batches()[0])
    chex.assert_trees_all_close((after.params, after.batch_stats), (expected.params, expected.batch_stats), rtol=1e-8)


def test_running_averages_with_aux_and_a_key():
    """`(loss, (aux, model_state))`; the key is the last argument. The state is a pair of trees, as that of haiku is."""

    def apply(params, state, key, x):  # as `hk.transform_with_state` has it
        mean = jnp.mean(x, axis=0)
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        return ((x - mean) * kept) @ params["w"], {
            "mean": 0.9 * state["mean"] + 0.1 * mean,
            "calls": state["calls"] + 1,
        }

    def loss(params, state, batch, key):
        predictions, state = apply(params, state, key, batch["x"])
        return jnp.mean((predictions - batch["y"]) ** 2), ({"predictions": predictions}, state)

    optimizer, key = optax.sgd(0.1), jax.random.key(4)
    params, kept = {"w": jnp.ones(6)}, {"mean": jnp.zeros(6), "calls": jnp.zeros((), jnp.int32)}
    step = ab.train_step(loss, optimizer, has_state=True, has_aux=True, microbatch_size=5)
    state, opt_state = step.init(params, key, kept), optimizer.init(params)
    for number, batch in enumerate(batches(3)):
        state, metrics = step(state, batch)
        folded = jax.random.fold_in(key, number)
        (_, (aux, kept)), grads = jax.value_and_grad(loss, has_aux=True)(params, kept, batch, folded)
        updates, opt_state = optimizer.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        chex.assert_trees_all_close(metrics.aux, aux, rtol=1e-9)
    chex.assert_trees_all_close((state.params, state.model_state), (params, kept), rtol=1e-9)
    assert int(state.model_state["calls"]) == 3


def test_a_state_of_equinox_in_a_step():
    class Model(eqx.Module):
        a: eqx.nn.Linear
        norm: eqx.nn.BatchNorm

        def __init__(self, key):
            self.a = eqx.nn.Linear(6, 1, key=key)
            self.norm = eqx.nn.BatchNorm(1, axis_name="examples", mode="batch", dtype=jnp.float64)

        def __call__(self, x, state):
            return self.norm(self.a(x), state)

    def loss(model, state, batch):
        out, state = jax.vmap(model, axis_name="examples", in_axes=(0, None), out_axes=(0, None))(batch["x"], state)
        return mean_square(out, batch), state

    model, kept = eqx.nn.make_with_state(Model)(jax.random.key(0))
    optimizer = optax.sgd(0.1)
    step = ab.train_step(loss, optimizer, has_state=True, microbatch_size=5)
    state = step.init(model, model_state=kept)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    for batch in batches(3):
        state, _ = step(state, batch)
        (_, kept), grads = eqx.filter_value_and_grad(loss, has_aux=True)(model, kept, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        model = eqx.apply_updates(model, updates)
    arrays = [
        jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in ((state.params, state.model_state), (model, kept))
    ]
    chex.assert_trees_all_close(*arrays, rtol=1e-8)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["flax", "own"])
def test_running_averages_are_saved_and_go_on_with_the_same_bits(tmp_path, kind):
    def run(steps, folder):
        step = ab.train_step(
            normed_loss, optax.adam(0.05) if kind == "own" else None, has_state=True, microbatch_size=5
        )
        params, stats = normed_variables()
        state = step.init(params, model_state=stats) if kind == "own" else flax_state()
        return ab.fit(step, state, batches(), steps=steps, checkpoints=folder, progress=False)

    whole = run(6, tmp_path / "whole")
    run(3, tmp_path / "parts")
    parts = run(6, tmp_path / "parts")
    assert parts.resumed_from == 3
    chex.assert_trees_all_equal(jax.tree.leaves(parts.state), jax.tree.leaves(whole.state))


@pytest.mark.parametrize(
    "loss, has_aux, match, way_out",
    [
        (lambda p, s, b: normed_loss(p, s, b)[0], False, "return (loss, model_state), got", "leave has_state out"),
        (normed_loss, True, "return (loss, (aux, model_state)), got", "Return (loss, (aux, model_state))"),
        (
            lambda p, s, b: (normed_loss(p, s, b)[0], {"batch_stats": s}),
            False,
            "with the tree and shapes that it was given",
            'updates["batch_stats"]',
        ),
        (
            lambda p, s, b: (normed_loss(p, s, b)[0], jax.tree.map(lambda leaf: leaf[:1], s)),
            False,
            "with the tree and shapes that it was given",
            "float64[1]",
        ),
    ],
    ids=["no state", "no aux", "another tree", "other shapes"],
)
def test_what_a_loss_with_state_returns(loss, has_aux, match, way_out):
    step = ab.train_step(loss, has_state=True, has_aux=has_aux, microbatch_size=5)
    with pytest.raises(ab.InputError, match=re.escape(match)) as caught:
        step(flax_state(), batches()[0])
    assert way_out in str(caught.value)


def test_states_without_the_state_of_a_model():
    params, _ = normed_variables()
    plain = train_state.TrainState.create(apply_fn=NORMED.apply, params=params, tx=optax.adam(0.05))
    with pytest.raises(ab.InputError, match="must have a field batch_stats or model_state"):
        ab.train_step(normed_loss, has_state=True)(plain, batches()[0])
    step = ab.train_step(normed_loss, optax.adam(0.05), has_state=True)
    with pytest.raises(ab.InputError, match=re.escape("step.init(params, model_state=")):
        step(step.init(params), batches()[0])
    model = Network(nnx.Rngs(0), norm=True)
    with pytest.raises(ab.InputError, match="Leave has_state out"):
        ab.train_step(normed_loss, has_state=True)(
            (model, nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)), batches()[0]
        )


def test_running_averages_with_a_declared_reduction_are_refused():
    step = ab.train_step(normed_loss, has_state=True, reduction="mean", microbatch_size=6)
    with pytest.raises(ab.InputError, match="the state of a model must not depend on the batch"):
        step(flax_state(), batches()[0])


def test_an_nnx_optimizer_that_selects_no_variable_is_refused():
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    step = ab.train_step(lambda model, batch: jnp.mean(model(batch) ** 2), microbatch_size=2)
    nothing = (model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.LoRAParam))
    with pytest.raises(ab.InputError, match="must train at least one variable of the model, got wrt=LoRAParam"):
        step(nothing, jnp.ones((8, 4)))
    _, metrics = step((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)), jnp.ones((8, 4)))
    assert metrics.gradient_norm > 0
