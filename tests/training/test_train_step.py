"""`train_step`: the step of the full batch, whatever the microbatches; nothing half done; one program."""

import dataclasses
import functools
import math
import re
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import anybatch as ab

pytestmark = pytest.mark.every_jax


@pytest.fixture(autouse=True)
def optax_defaults():
    """Optimizers are written for JAX's own promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def data(examples=24, features=6, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(examples, features)), "y": rng.normal(size=examples)}


def mlp(features=6, width=16):
    rng = np.random.default_rng(1)
    return {"a": jnp.asarray(rng.normal(size=(features, width))), "b": jnp.asarray(rng.normal(size=width))}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)


def by_hand(loss, optimizer, params, batches, key=None):
    """The oracle: JAX's own gradient of the full batch, and optax."""
    opt_state = optimizer.init(params)
    losses = []
    for number, batch in enumerate(batches):
        keys = () if key is None else (jax.random.fold_in(key, number),)
        value, grads = jax.value_and_grad(loss)(params, batch, *keys)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(value)
    return params, jnp.stack(losses)


def trained(step, state, batches):
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    return state, jnp.stack(losses)


@pytest.mark.parametrize("size", [1, 5, 8, None, "auto"])
def test_steps_are_those_of_the_full_batch(float64, size):
    batches = [data(seed=seed) for seed in range(5)]
    step = ab.train_step(loss, optax.adamw(0.05), microbatch_size=size)
    state, losses = trained(step, step.init(mlp()), batches)
    params, expected = by_hand(loss, optax.adamw(0.05), mlp(), batches)
    chex.assert_trees_all_close((state.params, losses), (params, expected), rtol=1e-10)
    assert int(state.step) == 5 and int(state.skipped) == 0


def test_a_mean_of_means_would_be_noticed(float64):
    """The control: the same check refuses the loop that people write, where microbatches differ in size."""
    batches = [data(seed=seed) for seed in range(5)]

    def wrong(params, batch):
        parts = [jax.tree.map(lambda leaf, start=start: leaf[start : start + 7], batch) for start in (0, 7, 14, 21)]
        return sum(loss(params, part) for part in parts) / 4

    _, losses = by_hand(wrong, optax.adamw(0.05), mlp(), batches)
    with pytest.raises(AssertionError):
        chex.assert_trees_all_close(losses, by_hand(loss, optax.adamw(0.05), mlp(), batches)[1], rtol=1e-10)


def test_random_numbers_are_those_of_the_full_batch_and_new_at_every_step(float64):
    def dropped(params, batch, key):
        hidden = jnp.tanh(batch["x"] @ params["a"])
        return jnp.mean((hidden * jax.random.bernoulli(key, 0.8, hidden.shape) @ params["b"] - batch["y"]) ** 2)

    batches, key = [data()] * 3, jax.random.key(7)
    step = ab.train_step(dropped, optax.sgd(0.0), microbatch_size=5)
    _, losses = trained(step, step.init(mlp(), key=key), batches)
    chex.assert_trees_all_close(losses, by_hand(dropped, optax.sgd(0.0), mlp(), batches, key)[1], rtol=1e-10)
    assert len(set(losses.tolist())) == 3


OPTIMIZERS = {
    "adafactor": lambda: optax.adafactor(0.05),
    "a schedule": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 4)),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.lion(1e-2)),
    "schedule free": lambda: optax.contrib.schedule_free_adamw(0.1),  # keeps the parameters twice
    "multi steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    "frozen": lambda: optax.multi_transform(
        {"yes": optax.adam(0.1), "no": optax.set_to_zero()}, {"a": "no", "b": "yes"}
    ),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),  # asks for the value
    "line search": lambda: optax.lbfgs(),  # asks for the function
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_of_optax(float64, name):
    batch = data()
    optimizer = OPTIMIZERS[name]()
    step = ab.train_step(loss, optimizer, microbatch_size=7)
    state, losses = trained(step, step.init(mlp()), [batch] * 3)

    params, opt_state, expected = mlp(), optimizer.init(mlp()), []
    fun = functools.partial(loss, batch=batch)
    for _ in range(3):
        value, grads = jax.value_and_grad(fun)(params)
        more = {"value": value, "grad": grads, "value_fn": fun}
        updates, opt_state = optax.with_extra_args_support(optimizer).update(grads, opt_state, params, **more)
        params = optax.apply_updates(params, updates)
        expected.append(value)
    chex.assert_trees_all_close((state.params, losses), (params, jnp.stack(expected)), rtol=1e-8)
    assert losses[2] < losses[0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad):
    batch = jax.tree.map(lambda leaf: leaf.astype(np.float32), data())
    broken = batch | {"x": batch["x"].copy()}
    broken["x"][3, 2] = bad
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), mlp())
    step = ab.train_step(loss, optax.adam(0.1), microbatch_size=4, donate=False)
    before, _ = step(step.init(params), batch)
    after, metrics = step(before, broken)
    assert bool(metrics.skipped) and not np.isfinite(metrics.gradient_norm)
    chex.assert_trees_all_equal((after.params, after.opt_state), (before.params, before.opt_state))
    assert (int(after.step), int(after.skipped)) == (2, 1)
    again, metrics = step(after, batch)  # and it goes on
    assert not bool(metrics.skipped) and int(again.skipped) == 1 and int(again.step) == 3
    # The control: without it, everything is lost.
    careless = ab.train_step(loss, optax.adam(0.1), microbatch_size=4, donate=False, skip_nonfinite=False)
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(careless(before, broken)[0]))


def test_a_large_but_finite_gradient_is_not_skipped():
    """The squares of its entries overflow; the entries do not."""
    step = ab.train_step(lambda w, batch: jnp.mean(batch @ w), optax.sgd(1.0), microbatch_size=1)
    state, metrics = step(step.init(jnp.zeros(2)), jnp.full((2, 2), 1e25))
    assert not bool(metrics.skipped) and np.isfinite(state.params).all() and (state.params != 0).all()


def test_buffers_are_donated_and_the_users_own_arrays_are_not():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), mlp())
    batch = jax.tree.map(lambda leaf: leaf.astype(np.float32), data())
    step = ab.train_step(loss, optax.adam(0.1), microbatch_size=4)
    first = step.init(params)
    second, _ = step(first, batch)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, second)))
    stats = step.lower(second, batch).compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(second))
    assert stats.alias_size_in_bytes >= size
    keeping = ab.train_step(loss, optax.adam(0.1), microbatch_size=4, donate=False)
    keeping(second, batch)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(second))


def test_arrays_of_numpy_are_the_users_own():
    params = {"w": np.ones(3, np.float32)}
    step = ab.train_step(lambda p, x: jnp.mean(x @ p["w"]), optax.sgd(1.0), microbatch_size=2)
    state = ab.TrainState.create(params, optax.sgd(1.0))
    for _ in range(3):
        state, _ = step(state, np.ones((4, 3), np.float32))
    assert params["w"].tolist() == [1, 1, 1] and state.params["w"].tolist() == [-2, -2, -2]


def test_it_compiles_once(monkeypatch):
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss(params, batch)

    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), mlp())
    batch = jax.tree.map(lambda leaf: leaf.astype(np.float32), data())
    step = ab.train_step(counted, optax.adam(0.1), microbatch_size=4)
    state, _ = step(step.init(params), batch)
    seen = len(traces)
    with jax.log_compiles(False):
        for _ in range(3):
            state, _ = step(state, batch)
    assert len(traces) == seen
    step(state, jax.tree.map(lambda leaf: leaf[:8], batch))  # the control: another shape
    assert len(traces) > seen


def test_weak_types_and_python_numbers_do_not_compile_it_twice():
    step = ab.train_step(lambda p, x: jnp.mean((x * p["scale"] + p["shift"]) ** 2), optax.sgd(0.1), microbatch_size=2)
    state = step.init({"scale": jnp.asarray(2.0), "shift": np.float32(1)})
    state, _ = step(state, np.ones(4, np.float32))
    program = step._programs.get(next(iter(step._programs)))[0]
    state, _ = step(state, np.ones(4, np.float32))
    assert program._cache_size() == 1


@pytest.mark.full
def test_the_plan_bounds_the_whole_step(monkeypatch):
    rng = np.random.default_rng(0)
    wide = {"a": jnp.asarray(rng.normal(size=(64, 512)), jnp.float32), "b": jnp.ones(512)}
    batch = {"x": rng.normal(size=(2048, 64)).astype(np.float32), "y": np.ones(2048, np.float32)}
    step = ab.train_step(loss, optax.adam(0.01), memory="3MiB")
    state, metrics = step(step.init(wide), batch)
    stats = step.lower(state, batch).compile().memory_analysis()
    taken = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert taken - stats.alias_size_in_bytes <= 3 * 2**20
    full = ab.train_step(loss, optax.adam(0.01), microbatch_size=None)
    stats = full.lower(full.init(wide), batch).compile().memory_analysis()
    assert stats.temp_size_in_bytes > 3 * 2**20  # the control
    _, expected = full(full.init(wide), batch)
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-6)
    # A way that was chosen where there was more memory is checked, too.
    (name,) = step.decisions
    other = ab.train_step(loss, optax.adam(0.01), memory="3MiB")
    other.adopt({name: [2048, None, "once", None]})
    with pytest.warns(ab.TightMemoryWarning, match="had more memory"):
        state, metrics = other(other.init(wide), batch)
    stats = other.lower(state, batch).compile().memory_analysis()
    taken = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    assert taken - stats.alias_size_in_bytes <= 3 * 2**20
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-6)
    with pytest.raises(ab.NothingFitsError, match="Nothing fits"):
        tight = ab.train_step(loss, optax.adam(0.01), memory="1MiB")
        tight(tight.init(wide), batch)


@pytest.mark.full
def test_the_plan_bounds_the_whole_step_inside_a_larger_program():
    rng = np.random.default_rng(0)
    wide = {"a": jnp.asarray(rng.normal(size=(64, 512)), jnp.float32), "b": jnp.ones(512)}
    batch = {"x": rng.normal(size=(2048, 64)).astype(np.float32), "y": np.ones(2048, np.float32)}

    def taken(step):
        program = jax.jit(lambda state, batch: step(state, batch), donate_argnums=0)
        stats = program.lower(step.init(wide), batch).compile().memory_analysis()
        total = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        return total - stats.alias_size_in_bytes

    step = ab.train_step(loss, optax.adam(0.01), memory="3MiB")
    assert taken(step) <= 3 * 2**20
    assert taken(ab.train_step(loss, optax.adam(0.01), microbatch_size=None)) > 3 * 2**20  # the control
    _, metrics = jax.jit(lambda state, batch: step(state, batch))(step.init(wide), batch)
    np.testing.assert_allclose(metrics.loss, loss(wide, batch), rtol=1e-6)
    with pytest.raises(ab.NothingFitsError):
        taken(ab.train_step(loss, optax.adam(0.01), memory="1MiB"))


@pytest.mark.parametrize("opaque", [False, True])
def test_an_optimizer_that_takes_some_keyword_arguments_gets_only_these(opaque):
    """SAM computes gradients at other parameters in its opaque mode, and takes no value of the loss."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(1e-2))
    optimizer = optax.contrib.sam(optax.sgd(1e-2), adversary, sync_period=2, reset_state=True, opaque_mode=opaque)
    params = {"a": jnp.ones((4, 4)) / 4, "b": jnp.ones(4)}
    batch = {"x": np.arange(24, dtype=np.float32).reshape(6, 4) / 24, "y": np.ones(6, np.float32)}
    step = ab.train_step(loss, optimizer, microbatch_size=2)
    state, expected, opt_state = step.init(params), params, optimizer.init(params)
    more = {"grad_fn": lambda params, _: jax.grad(loss)(params, batch)} if opaque else {}
    for _ in range(4):
        updates, opt_state = optimizer.update(jax.grad(loss)(expected, batch), opt_state, expected, **more)
        expected = optax.apply_updates(expected, updates)
        state, _ = step(state, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, expected)


def test_an_optimizer_descends_at_other_complex_parameters():
    """JAX returns the conjugate of the ascent direction, and SAM in its opaque mode asks for gradients by itself."""
    adversary = optax.chain(optax.contrib.normalize(), optax.sgd(1e-3))
    optimizer = optax.contrib.sam(optax.sgd(0.1), adversary, sync_period=2, reset_state=True, opaque_mode=True)
    step = ab.train_step(lambda w, x: jnp.mean(jnp.abs(x @ w - 1j) ** 2), optimizer, microbatch_size=2)
    state, losses = step.init(jnp.asarray([1.0 + 1.0j, 0.5 - 1.0j], jnp.complex64)), []
    for _ in range(6):
        state, metrics = step(state, np.asarray([[1.0, 0.2], [0.3, 1.0], [0.5, 0.5], [1.0, 1.0]], np.complex64))
        losses.append(float(metrics.loss))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.7 * losses[0]


def test_a_line_search_that_stores_the_gradient_takes_the_steps_of_optax():
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=5, store_grad=True)
    optimizer = optax.chain(optax.sgd(0.1), search)
    params, batch = jnp.ones(3), np.arange(24, dtype=np.float32).reshape(8, 3) / 10

    def squares(params, batch):
        return jnp.mean((batch @ params - 1) ** 2)

    step = ab.train_step(squares, optimizer, microbatch_size=4)
    state, _ = step(step.init(params), batch)
    value, grad = jax.value_and_grad(squares)(params, batch)
    of_optax = {"value": value, "grad": grad, "value_fn": lambda params: squares(params, batch)}
    updates, _ = optimizer.update(grad, optimizer.init(params), params, **of_optax)
    np.testing.assert_allclose(state.params, optax.apply_updates(params, updates), rtol=1e-6)


def test_what_does_not_fit_names_the_memory_that_was_given():
    wide = {"a": jnp.ones((64, 512)), "b": jnp.ones(512)}
    batch = {"x": np.ones((256, 64), np.float32), "y": np.ones(256, np.float32)}
    tight = ab.train_step(loss, optax.adam(0.01), memory="300KiB")
    with pytest.raises(ab.NothingFitsError) as caught:
        tight(tight.init(wide), batch)
    text = " ".join(str(caught.value).split())  # without the line breaks of its sentences
    assert "(memory='300KiB', less 260.0 KiB that the optimizer keeps)" in text
    assert "remat=" not in text  # without any activations it would not fit either
    assert set(re.findall(r"memory='([^']*)'", text)) == {"300KiB"}


@pytest.mark.full
@pytest.mark.parametrize("memory", ["1KiB", "300KiB"])
def test_the_memory_that_an_error_names_is_enough_for_the_step(memory):
    """It counts the state of the optimizer, whether or not the budget is larger than that state."""
    wide = {"a": jnp.ones((64, 512)), "b": jnp.ones(512)}
    batch = {"x": np.ones((256, 64), np.float32), "y": np.ones(256, np.float32)}
    step = ab.train_step(loss, optax.adam(0.01), memory=memory)
    with pytest.raises(ab.NothingFitsError) as caught:
        step(step.init(wide), batch)
    text = " ".join(str(caught.value).split())
    assert f"(memory='{memory}', less 260.0 KiB that the optimizer keeps)" in text
    alone = re.search(r"needs (\d+\.\d KiB)", text)[1]
    enough = re.search(r'pass memory="(\d+\.\d KiB)" or more', text)[1]
    step = ab.train_step(loss, optax.adam(0.01), memory=enough)
    step(step.init(wide), batch)
    # The control: what the gradient needs by itself is not enough.
    step = ab.train_step(loss, optax.adam(0.01), memory=alone)
    with pytest.raises(ab.NothingFitsError):
        step(step.init(wide), batch)


@pytest.mark.full
def test_a_step_that_does_not_fit_says_how_much_does():
    """The gradient fits by itself; with the update, the step does not."""
    wide = {"a": jnp.ones((64, 512)), "b": jnp.ones(512)}
    batch = {"x": np.ones((64, 64), np.float32), "y": np.ones(64, np.float32)}

    def by_hand(memory):
        return ab.train_step(loss, optax.adam(0.01), memory=memory, donate=False)

    step = by_hand("1GiB")
    gradient = step.plan(step.init(wide), batch)
    memory = gradient.candidates[-1].total + 8 * 2**10 + sum(leaf.nbytes for leaf in wide.values()) * 2
    tight = by_hand(memory)
    with pytest.raises(ab.NothingFitsError) as caught:
        tight(tight.init(wide), batch)
    text = " ".join(str(caught.value).split())
    assert f"(memory={memory})" in text and "remat" not in text
    roomy = by_hand(int(re.search(r"Pass memory=(\d+) \(bytes\) or more", text)[1]))
    roomy(roomy.init(wide), batch)


def test_memory_that_runs_out_is_met_with_smaller_microbatches(monkeypatch):
    from anybatch.training import step as fitting

    tries = []

    def failing(self, arrays, rows):
        tries.append(self.strategy.microbatch_size)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate")

    batch = jax.tree.map(lambda leaf: leaf.astype(np.float32), data())
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), mlp())
    step = ab.train_step(loss, optax.sgd(0.1))
    made = fitting.FittingProgram.compile

    def compiled(self, arrays, rows, **options):
        made(self, arrays, rows, **options)
        if not tries:
            self._program = functools.partial(failing, self)

    monkeypatch.setattr(fitting.FittingProgram, "compile", compiled)
    with pytest.warns(ab.TightMemoryWarning, match="Continuing with microbatch_size=12"):
        _, metrics = step(step.init(params), batch)
    assert tries == [24] and next(iter(step.decisions.values()))[0] == 12
    np.testing.assert_allclose(metrics.loss, loss(params, batch), rtol=1e-6)


def test_several_processes_copy_a_batch_that_its_loader_may_overwrite(monkeypatch):
    from anybatch.training import arrays

    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    step, rows, seen = ab.train_step(loss, optax.sgd(0.1), mesh=mesh), np.ones((8, 4)), []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(arrays, "global_batch", lambda rows, mesh, axis: seen.extend(rows) or rows)
    step.put({"x": rows})
    arrays.put_batch([rows], step._over)  # the control
    assert [np.shares_memory(each, rows) for each in seen] == [False, True]


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_the_same_on_many_devices(float64, devices):
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    batches = [data(examples=examples) for examples in (24, 24, 21)]  # the last is not even
    step = ab.train_step(loss, optax.adamw(0.05), microbatch_size=2, mesh=mesh)
    state, losses = trained(step, step.init(mlp()), batches)
    params, expected = by_hand(loss, optax.adamw(0.05), mlp(), batches)
    chex.assert_trees_all_close((jax.device_get(state.params), losses), (params, expected), rtol=1e-10)
    assert len(state.params["a"].sharding.device_set) == devices


def test_parameters_that_are_spread_stay_spread(float64):
    mesh = jax.make_mesh((8,), ("data",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    params = mlp() | {"a": jax.device_put(mlp()["a"], spread)}
    step = ab.train_step(loss, optax.adam(0.05), microbatch_size=1, mesh=mesh)
    state, losses = trained(step, step.init(params), [data()] * 3)
    for leaf in (state.params["a"], state.opt_state[0].mu["a"]):
        assert leaf.sharding.is_equivalent_to(spread, 2)
    chex.assert_trees_all_close(losses, by_hand(loss, optax.adam(0.05), mlp(), [data()] * 3)[1], rtol=1e-10)
    assert step._programs.get(next(iter(step._programs)))[0]._cache_size() == 1


def test_inside_jit_and_scan(float64):
    batches = [data(seed=seed) for seed in range(3)]
    step = ab.train_step(loss, optax.adam(0.05), microbatch_size=5)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    state, metrics = jax.jit(lambda state: jax.lax.scan(step, state, stacked))(step.init(mlp()))
    params, expected = by_hand(loss, optax.adam(0.05), mlp(), batches)
    chex.assert_trees_all_close((state.params, metrics.loss), (params, expected), rtol=1e-10)
    assert np.isnan(metrics.examples_per_second)


def test_metrics(float64):
    def with_aux(params, batch):
        errors = (jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2
        return jnp.mean(errors), {"largest": jnp.max(errors), "errors": errors}

    step = ab.train_step(
        with_aux, optax.sgd(0.1), has_aux=True, microbatch_size=5, tokens=lambda batch: batch["x"].size
    )
    _, metrics = step(step.init(mlp()), data())
    (value, aux), grads = jax.value_and_grad(with_aux, has_aux=True)(mlp(), data())
    expected = (value, aux, optax.tree.norm(grads))
    chex.assert_trees_all_close((metrics.loss, metrics.aux, metrics.gradient_norm), expected, rtol=1e-10)
    assert (metrics.examples, metrics.tokens, metrics.noise) == (24, 144, None)
    rates = metrics.examples_per_second, metrics.tokens_per_second
    assert rates[0] > 0 and rates[1] == pytest.approx(6 * rates[0])
    assert rates == (metrics.examples_per_second, metrics.tokens_per_second)  # asked again


def test_the_noise_scale_is_that_of_noise_scale(float64):
    step = ab.train_step(loss, optax.sgd(0.1), noise_scale=True, microbatch_size=4)
    _, metrics = step(step.init(mlp()), data())
    noise = ab.noise_scale(loss, microbatch_size=4)(mlp(), data())[2]
    chex.assert_trees_all_close(metrics.noise, noise, rtol=1e-10)
    planned = ab.train_step(loss, optax.sgd(0.1), noise_scale=True)
    _, metrics = planned(planned.init(mlp()), data())  # the batch would fit as a whole
    assert metrics.noise.microbatches == 4


def test_a_step_goes_the_way_of_its_explanation():
    batch = jax.tree.map(lambda leaf: leaf.astype(np.float32), data(examples=512))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), mlp(width=256))
    step = ab.train_step(loss, optax.sgd(0.1), memory="256KiB")
    state = step.init(params)
    plan = step.explain(state, batch, timed=False)
    assert plan.microbatch_size < 512 and "float32" in next(iter(step.decisions))
    state, _ = step(state, batch)
    assert next(iter(step.decisions.values()))[0] == plan.microbatch_size
    other = ab.train_step(loss, optax.sgd(0.1))
    other.adopt(step.decisions)
    other(other.init(params), batch)
    assert other.decisions == step.decisions


def test_bad_input_is_refused_before_any_work():
    good = optax.sgd(0.1)
    for call, words in [
        (lambda: ab.train_step(loss, good, argnums=1), "first argument"),
        (lambda: ab.train_step(loss, good, batch_argnums=2), "second"),
        (lambda: ab.train_step(loss, "adam"), "optax"),
        (lambda: ab.train_step(loss, good, tokens=3), "tokens must be a function"),
        (lambda: ab.train_step(loss, good, microbatch_size=0), "microbatch_size"),
        (lambda: ab.train_step(3, good), "must be a function"),
        (lambda: ab.train_step(loss).init(mlp()), "needs an optimizer"),
        (lambda: ab.train_step(loss, good).init({}), "at least one floating-point array to train"),
        (lambda: ab.train_step(loss, good).init({"n": jnp.arange(3)}), "at least one floating-point array to train"),
        (lambda: ab.train_step(loss, good).init(mlp(), key=3), "PRNG key"),
        (lambda: ab.train_step(loss, good)(mlp(), data()), "A state must be an anybatch.TrainState"),
        (lambda: ab.train_step(loss)(ab.TrainState.create(mlp(), good), data()), "train_step needs an optimizer"),
    ]:
        with pytest.raises(ab.InputError, match=words):
            call()
    step = ab.train_step(loss, good, microbatch_size=4)
    state = step.init(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), mlp()))
    with pytest.raises(ab.InputError, match="same number"):
        step(state, {"x": np.ones((4, 6), np.float32), "y": np.ones(3, np.float32)})
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))  # nothing was lost


def test_numbers_and_flags_in_the_parameters_stay_as_they_are():
    params = {"w": jnp.ones(3), "scale": 2.0, "double": True, "layers": 2, "act": jnp.tanh}

    def scaled(params, batch):
        factor = params["scale"] if params["double"] else 1.0
        return jnp.mean(params["act"](batch @ params["w"]) * factor) ** params["layers"]

    step = ab.train_step(scaled, optax.adam(0.1), microbatch_size=2)
    state, _ = step(step.init(params), np.ones((4, 3), np.float32))
    assert {name: state.params[name] for name in params if name != "w"} == {
        name: value for name, value in params.items() if name != "w"
    }
    assert type(state.params["double"]) is bool and not np.allclose(state.params["w"], 1)


def test_constants_that_are_equal_and_not_the_same():
    def powered(params, batch, power):
        return jnp.mean(batch @ params) * (10.0 if power is True else power or math.copysign(5, power))

    step = ab.train_step(powered, optax.sgd(0.0), microbatch_size=2, donate=False)
    state, batch = step.init(jnp.ones(3)), np.ones((4, 3), np.float32)
    losses = [float(step(state, batch, power=power)[1].loss) for power in (True, 1, 2, 2.0, 0.0, -0.0)]
    assert losses == [30, 3, 6, 6, 15, -15]


def test_complex_parameters_go_downhill(float64):
    def distance(w, batch):
        return jnp.mean(jnp.abs(w - batch) ** 2)

    step = ab.train_step(distance, optax.sgd(0.2), microbatch_size=2)
    state, losses = trained(step, step.init(jnp.zeros(2, complex)), [np.full((4, 2), 1 + 2j)] * 30)
    np.testing.assert_allclose(state.params, 1 + 2j, rtol=1e-2)
    assert losses[-1] < 1e-3 * losses[0]


@pytest.mark.full
def test_one_step_for_two_models():
    """Each is planned for itself, though their trees are alike."""
    batch = jax.tree.map(lambda leaf: leaf.astype(np.float32), data(examples=512))
    small, large = (jax.tree.map(lambda leaf: leaf.astype(jnp.float32), mlp(width=width)) for width in (8, 2048))
    step = ab.train_step(loss, optax.sgd(0.1), memory="1MiB")
    step(step.init(small), batch)
    state, _ = step(step.init(large), batch)
    sizes = [decision[0] for decision in step.decisions.values()]
    assert len(sizes) == 2 and sizes[1] < sizes[0] == 512
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over = ab.train_step(loss, optax.sgd(0.1), microbatch_size=8, mesh=mesh)
    over(over.init(large), batch)
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    state, _ = over(over.init(large | {"a": jax.device_put(large["a"], spread)}), batch)
    assert state.params["a"].sharding.is_equivalent_to(spread, 2)


def test_a_state_that_was_changed_by_hand_goes_on():
    step = ab.train_step(lambda p, x: jnp.mean(x @ p["a"] + x @ p["b"]), optax.sgd(0.1), microbatch_size=2)
    batch = np.ones((4, 3), np.float32)
    state, _ = step(step.init({"a": jnp.ones(3), "b": jnp.zeros(3)}), batch)
    shared = jnp.ones(3)
    state, _ = step(state.replace(params={"a": shared, "b": shared}), batch)  # one array, twice
    state, _ = step(state.replace(params={"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}), batch)
    np.testing.assert_allclose(state.params["a"], 0.9)


def test_a_state_that_was_changed_in_place_is_not_taken_for_the_old_one():
    def scaled(params, batch):
        return jnp.mean(batch @ params["w"]) * params["scale"] + jnp.sum(params.get("a", jnp.zeros(3)))

    step = ab.train_step(scaled, optax.sgd(0.0), microbatch_size=2)
    batch = np.ones((4, 3), np.float32)
    state, metrics = step(step.init({"w": jnp.ones(3), "scale": 2.0}), batch)
    state, metrics = step(state, batch)
    assert metrics.loss == 6
    state.params["scale"] = 5.0
    state, metrics = step(state, batch)
    assert metrics.loss == 15 and state.params["scale"] == 5
    plain = ab.train_step(lambda p, x: jnp.mean(x @ p["w"]) + jnp.sum(p.get("a", 0.0)), optax.sgd(0.0))
    state, _ = plain(plain.init({"w": jnp.ones(3)}), batch)
    state, _ = plain(state, batch)
    state.params["a"] = jnp.full(3, 10.0)  # comes before w
    _, metrics = plain(state, batch)
    assert metrics.loss == 33


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_a_few_examples_in_low_precision_on_two_devices(examples):
    """What is left over at the end of a dataset, with a loss that couples its examples too."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.tree.map(lambda leaf: leaf.astype(np.float32), data(examples))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), mlp())

    def coupled(params, batch):
        hidden = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["a"]).astype(jnp.float32)
        return jnp.mean(hidden**2) + jnp.mean(jnp.abs(hidden @ hidden.T))

    full = ab.train_step(coupled, optax.sgd(0.1), microbatch_size=None)
    expected, told = full(full.init(params), batch)
    step = ab.train_step(coupled, optax.sgd(0.1), microbatch_size=1, mesh=mesh)
    state, metrics = step(step.init(params), batch)
    np.testing.assert_allclose(metrics.loss, told.loss, rtol=1e-2)
    chex.assert_trees_all_close(
        jax.device_get(jax.tree.map(lambda leaf: leaf.astype(np.float32), state.params)),
        jax.device_get(jax.tree.map(lambda leaf: leaf.astype(np.float32), expected.params)),
        atol=2e-2,
    )
    assert state.params["a"].dtype == jnp.bfloat16


def test_no_batch_is_kept():
    step = ab.train_step(lambda w, x: jnp.mean(x @ w), optax.sgd(0.1))
    batch = jnp.ones((64, 1237))
    step(step.init(jnp.ones(1237)), batch)
    del batch
    assert not [array for array in jax.live_arrays() if array.shape == (64, 1237)]


def test_a_plan_made_later_is_followed_and_one_that_is_adopted_wins():
    batch = jax.tree.map(lambda leaf: leaf.astype(np.float32), data(examples=512))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), mlp(width=256))
    step = ab.train_step(loss, optax.sgd(0.1), donate=False)
    state = step.init(params)
    step(state, batch)
    (name,) = step.decisions
    step.adopt({name: [64, None, "once", None]})
    step(state, batch)
    assert step.decisions[name][0] == 64
    plan = step.explain(state, batch, timed=False)
    step(state, batch)
    assert step.decisions[name][0] == plan.microbatch_size == 512


def test_many_programs_are_worth_a_word():
    step = ab.train_step(lambda w, x, rate: jnp.mean(x * w) * rate, optax.sgd(0.1), microbatch_size=2, donate=False)
    state = step.init(1.0 * jnp.ones(()))
    with pytest.warns(RuntimeWarning, match="as arrays"):
        for number in range(16):
            step(state, np.ones(2, np.float32), rate=0.1 * number)
    with pytest.raises(ab.InputError, match="hashable"):
        step(state, np.ones(2, np.float32), rate={1, 2})


@pytest.mark.parametrize("options", [{"microbatch_size": 4}, {"memory": "1GiB"}], ids=str)
@pytest.mark.parametrize("way", ["eager", "jit", "explain", "lower"])
def test_a_batch_without_examples_is_refused_and_moves_nothing(options, way):
    """Weight decay and momentum would move the parameters, though nothing was learned."""
    step = ab.train_step(loss, optax.adamw(0.1, weight_decay=0.1), donate=False, **options)
    state, _ = step(step.init(mlp()), data())
    call = {"eager": step, "jit": jax.jit(step), "explain": step.explain, "lower": step.lower}[way]
    with pytest.raises(ab.InputError) as caught:
        call(state, data(examples=0))
    dtype = state.params["a"].dtype if way == "jit" else "float64"
    assert str(caught.value) == (
        "A step needs at least one example: its optimizer would move the parameters even without a gradient, got\n"
        f"    batch['x']: {dtype}[0,6]\n    batch['y']: {dtype}[0]\n"
        "Skip such a batch: if len(batch['x']): state, metrics = step(state, batch)"
    )
    assert int(step(state, data(examples=1))[0].step) == 2  # the state is as good as before


def test_a_mask_of_zeros_is_the_users_own():
    def masked(params, batch):
        error = (jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2
        return jnp.sum(error * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)

    step = ab.train_step(masked, optax.sgd(0.1), microbatch_size=4)
    state, metrics = step(step.init(mlp()), data() | {"mask": np.zeros(24)})
    assert float(metrics.loss) == 0.0 and int(state.step) == 1
    chex.assert_trees_all_equal(state.params, mlp())


# What a loss returns, and states that are gone.


@pytest.mark.parametrize("noise_scale", [False, True])
@pytest.mark.parametrize("microbatch_size", [2, "auto"])
def test_a_loss_without_the_aux_that_was_promised(microbatch_size, noise_scale):
    ran = []

    def loss(params, batch):
        jax.debug.callback(lambda _: ran.append(1), params["w"][0])
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    options = {"microbatch_size": microbatch_size, "noise_scale": noise_scale}
    step = ab.train_step(loss, optax.sgd(0.1), has_aux=True, **options)
    state = step.init({"w": jnp.ones(3)})
    with pytest.raises(ab.InputError, match=r"With has_aux=True .* return a pair \(loss, aux\), got float32") as e:
        step(state, {"x": jnp.ones((4, 3))})
    assert "leave has_aux out" in str(e.value) and not ran
    step = ab.train_step(lambda p, b: (loss(p, b), {"x": b["x"]}), optax.sgd(0.1), **options)
    with pytest.raises(ab.InputError, match=r"must return a scalar .*, got tuple \(float32\[\], \{'x': float32") as e:
        step(state, {"x": jnp.ones((4, 3))})
    assert "For a pair (loss, aux) pass has_aux=True" in str(e.value) and not ran
    jax.block_until_ready(state)  # it was not used up


def test_a_state_that_was_donated():
    step = ab.train_step(lambda params, batch: jnp.mean((batch @ params) ** 2), optax.adam(0.1), microbatch_size=2)
    state, batch = step.init(jnp.ones(3)), jnp.ones((4, 3))
    after, _ = step(state, batch)
    for use in (
        lambda: step(state, batch),
        lambda: step.plan(state, batch),
        lambda: ab.fit(step, state, [batch], progress=False),
        lambda: step.init(state.params),
    ):
        with pytest.raises(
            ab.InputError, match="A state can be used once: its memory is donated to the state that the step returns"
        ) as caught:
            use()
        for way_out in ("state, metrics = step(state, batch)", "jax.tree.map(jnp.copy, state)", "donate=False"):
            assert way_out in str(caught.value)
    step(after, batch)
    with pytest.raises(ab.InputError, match="donated"):  # the one that was returned last, and used since
        step(after, batch)
    keeping = ab.train_step(lambda params, batch: jnp.mean((batch @ params) ** 2), optax.adam(0.1), donate=False)
    state = keeping.init(jnp.ones(3))
    keeping(state, batch)
    keeping(state, batch)


def test_arrays_that_an_optimizer_holds_are_not_donated():
    """Such as the key of `optax.add_noise`: the same step can start again."""
    step = ab.train_step(
        lambda params, batch: jnp.mean((batch @ params) ** 2),
        optax.add_noise(0.01, 0.5, jax.random.key(0)),
        microbatch_size=2,
    )
    ends = [step(step.init(jnp.ones(3)), jnp.ones((4, 3)))[0].params for _ in range(2)]
    assert jnp.array_equal(*ends)


def test_an_nnx_optimizer_that_holds_its_model(model_defaults):
    def trained(kind):
        model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
        optimizer = kind(model, optax.adamw(1e-2), wrt=nnx.Param)
        step = ab.train_step(lambda model, batch: jnp.mean(model(batch) ** 2), microbatch_size=2)
        step((model, optimizer), jnp.ones((6, 4)))
        return model.kernel[...]

    assert jnp.array_equal(trained(nnx.ModelAndOptimizer), trained(nnx.Optimizer))


_COUNTED = """
import jax, jax.monitoring, jax.numpy as jnp, numpy as np, optax
import anybatch as ab

compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: compilations.append(event) if "backend_compile" in event else None
)
batch = np.ones((8, 3), np.float32)
jax.jit(jnp.sin)(batch)
step = ab.train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.adam(1e-2), microbatch_size=4)
state, counts = step.init(jnp.ones((3, 2))), []
for _ in range(3):
    before = len(compilations)
    state, _ = step(state, batch)
    jax.block_until_ready(state)
    counts.append(len(compilations) - before)
print(counts)
"""


@pytest.mark.full
@pytest.mark.every_jax
def test_the_first_step_of_a_process_is_compiled_once(tmp_path):
    """With JAX 0.12, what anybatch imports while it traces would change the settings that JAX's caches depend on."""
    (tmp_path / "script.py").write_text(_COUNTED)
    ran = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[1, 0, 0]"


def _scaling(init, update):
    """An optimizer with a state of its own, which scales the gradient."""
    return optax.GradientTransformation(lambda params: init, lambda grads, state, params=None: update(grads, state))


def test_numbers_of_a_state_keep_their_kind():
    """JAX would compile a second program for a float where an integer was. Here it would be rounded."""
    params, batch = mlp(), data()

    def halved(grads, state):
        return jax.tree.map(lambda leaf: -0.1 * state["scale"] * leaf, grads), {"scale": state["scale"] * 0.5}

    step = ab.train_step(loss, _scaling({"scale": 1}, halved), microbatch_size=8)
    with pytest.raises(ab.InputError, match="must keep its kinds of numbers") as caught:
        step(step.init(params), batch)
    assert "int32[] before an update and float32[] after it" in caught.value.given
    step = ab.train_step(loss, _scaling({"scale": 1.0}, halved), microbatch_size=8)
    state, _ = step(step.init(params), batch)
    assert state.opt_state["scale"] == 0.5


def test_a_state_of_an_optimizer_keeps_its_tree():
    params, batch = mlp(), data()

    def moved(grads, state):
        return grads, (state[0], None, state[1])

    step = ab.train_step(loss, _scaling((jnp.zeros(()), jnp.ones(()), None), moved), microbatch_size=8)
    with pytest.raises(ab.InputError, match="must return a state with the tree of the one that it is given"):
        step(step.init(params), batch)

    def constant(grads, state):
        return grads, {"rate": 0.05, "number": state["number"] + 1}

    step = ab.train_step(loss, _scaling({"rate": 0.1, "number": 0}, constant), microbatch_size=8)
    state, _ = step(step.init(params), batch)
    assert state.opt_state["rate"] == jnp.float32(0.05) and state.opt_state["number"] == 1


def test_cleared_caches_are_noticed_by_the_next_step():
    scale = 1.0

    def scaled(params, batch):
        return scale * loss(params, batch)

    step = ab.train_step(scaled, optax.sgd(0.0), microbatch_size=8)
    state, _ = step(step.init(mlp()), data())
    state, before = step(state, data())
    scale = 100.0
    ab.clear_caches()
    _, after = step(state, data())
    assert float(after.loss) == pytest.approx(100 * float(before.loss), rel=1e-5)


@pytest.mark.parametrize("devices", [1, 2])
def test_arrays_of_the_state_may_be_other_arguments_too(devices):
    """The first step on a mesh ended the process: an array was donated and read at once."""
    options = {} if devices == 1 else {"mesh": jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])}
    batch = jnp.arange(18.0).reshape(6, 3) / 18

    def distilled(params, batch, teacher):
        return jnp.mean((batch["x"] @ params["w"] - batch["x"] @ teacher["w"] + jnp.sum(batch["t"])) ** 2)

    step = ab.train_step(distilled, optax.sgd(0.1), microbatch_size=2, **options)
    state = step.init({"w": jnp.ones(3), "t": jnp.ones(6)})
    for _ in range(2):
        given = {"x": batch, "t": state.params["t"]}
        expected = distilled(state.params, given, state.params)
        state, metrics = step(state, given, teacher=state.params)
        assert float(metrics.loss) == pytest.approx(float(expected), rel=1e-5)


def test_numbers_among_the_arguments_have_plans_of_their_own():
    def recurrent(params, batch, steps=1):
        hidden, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ params), None), batch, None, length=steps)
        return jnp.mean(hidden**2)

    step = ab.train_step(recurrent, optax.sgd(0.1), memory="8MiB")
    state = step.init(jnp.eye(128))
    batch = jnp.ones((64, 128))
    state, _ = step(state, batch, steps=2)
    state, _ = step(state, batch, steps=400)
    assert len(step.decisions) == 2
    sizes = [size for size, *_ in step.decisions.values()]
    alone = ab.train_step(recurrent, optax.sgd(0.1), memory="8MiB")
    alone(alone.init(jnp.eye(128)), batch, steps=400)
    assert next(iter(alone.decisions.values())) == list(step.decisions.values())[1] and sizes[0] == 64


def test_a_callable_tree_with_one_array_of_numpy():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Linear:
        w: np.ndarray

        def __call__(self, x):
            return x @ self.w

    step = ab.train_step(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1), microbatch_size=2)
    state = step.init(Linear(np.ones(3, np.float32)))
    assert state.params.w.shape == (3,)
