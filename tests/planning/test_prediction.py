"""What a plan predicts of memory and time, before anything is compiled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.planned import elementwise, network, problem
from cases.zoo import ZOO

import anybatch as ab
from anybatch.call.models import partition_models
from anybatch.call.options import POLICIES, SHARES, Options
from anybatch.gradients.computation import Gradient
from anybatch.planning import prediction
from anybatch.planning.measure import Measurements
from anybatch.planning.prediction import Predictions
from anybatch.planning.strategy import Strategy

MODELS = ("resnet_with_group_norm", "vision_transformer", "gpt_scanned", "bert", "mixture_of_experts", "equinox_model")


def measured(loss, *arguments, **options):
    checked = Options.of(loss, **options)
    call = partition_models(loss, checked.roles, checked.has_aux, arguments, {})
    gradient = Gradient(call.fun, call.options(checked), checked.roles.sort(call.fun, call.args, call.kwargs))
    return Measurements(gradient), Predictions(gradient)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in ZOO if case.name in MODELS], ids=lambda case: case.name)
def test_bytes_are_predicted_within_10_percent_once_one_program_is_compiled(model_defaults, case):
    loss, arguments = case.problem(num_examples=64)
    measurements, predictions = measured(loss, *arguments, has_aux=case.has_aux)
    first = Strategy(32)
    known = {first: measurements.bytes_of(first)}
    for size in (16, 4):
        taken = measurements.bytes_of(Strategy(size)).total
        assert predictions.total(Strategy(size), known) == pytest.approx(taken, rel=0.1)
    # The control: what XLA takes is not in proportion to the size.
    assert known[first].total / 8 != pytest.approx(measurements.bytes_of(Strategy(4)).total, rel=0.1)


def test_two_programs_give_the_line_on_which_others_are():
    measurements, predictions = measured(network, *problem(512))
    known = {Strategy(size): measurements.bytes_of(Strategy(size)) for size in (171, 64)}
    for size in (128, 16, 1):
        taken = measurements.bytes_of(Strategy(size)).total
        assert predictions.total(Strategy(size), known) == pytest.approx(taken, rel=0.02)


def test_narrow_floats_take_the_memory_of_float32_on_a_cpu():
    """XLA's compiler for CPUs computes them so."""

    def narrow(params, batch):
        return network(*jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), (params, batch))).astype(jnp.float32)

    measurements, predictions = measured(narrow, *problem(4096))
    strategy = Strategy(2048)
    taken = measurements.bytes_of(strategy).total
    assert predictions.total(strategy, {}) == pytest.approx(taken, rel=0.25)
    predictions = Predictions(measurements.gradient)
    predictions.on_cpu = False
    assert predictions.total(strategy, {}) < 0.9 * taken  # the control


def test_what_is_computed_again_takes_less_memory_and_products_more_time():
    params, batch = problem(64, width=32, depth=16)
    sequences = {name: jnp.tile(leaf[:, None], (1, 64, 1)) for name, leaf in batch.items()}
    _, predictions = measured(elementwise, params, sequences)
    plain, without_products, everything = (Strategy(32, remat) for remat in (None, 0.5, 1.0))
    order = [everything, without_products, plain]
    assert sorted(order, key=lambda each: predictions.total(each, {})) == order
    assert predictions.seconds(without_products) < predictions.seconds(everything)


@pytest.mark.full
@pytest.mark.parametrize("scanned", [False, True])
def test_a_share_takes_no_more_time_than_a_policy_of_jax_in_the_same_memory(scanned):
    """As predicted for an accelerator."""
    generator = np.random.default_rng(0)
    shapes = {"in": (8, 256, 1024), "out": (8, 1024, 256), "words": (1000, 256)}
    params = {name: jnp.asarray(generator.normal(size=shape), jnp.bfloat16) for name, shape in shapes.items()}
    batch = {"x": jnp.ones((64, 128, 256), jnp.bfloat16), "y": jnp.zeros((64, 128), jnp.int32)}

    def layer(x, weights):
        inside = jax.nn.gelu(jax.nn.standardize(x, epsilon=1e-3) @ weights["in"])
        return x + inside @ weights["out"], None

    def loss(params, batch):
        layers, x = {name: params[name] for name in ("in", "out")}, batch["x"]
        if scanned:
            x, _ = jax.lax.scan(layer, x, layers)
        else:
            for index in range(8):
                x, _ = layer(x, jax.tree.map(lambda leaf, index=index: leaf[index], layers))
        words = jax.nn.log_softmax((jax.nn.standardize(x) @ params["words"].T).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(words, batch["y"][..., None], axis=-1))

    _, predictions = measured(loss, params, batch)
    predictions.on_cpu, predictions.speed = False, prediction.ACCELERATOR
    saved = []
    for policy in POLICIES:
        of_jax = Strategy(16, policy)
        shares = [Strategy(16, share) for share in SHARES]
        as_lean = [each for each in shares if predictions.total(each, {}) <= 1.01 * predictions.total(of_jax, {})]
        seconds = min(map(predictions.seconds, as_lean))
        assert seconds <= predictions.seconds(of_jax)
        saved.append(1 - seconds / predictions.seconds(of_jax))
    assert max(saved) > 0.05


def test_a_size_that_cannot_be_traced_leaves_predictions_above_zero(monkeypatch):
    params, batch = problem(64)
    _, predictions = measured(network, params, batch)
    largest = max(predictions._anchors)
    computation = predictions.gradient.computation

    def only_of_others(strategy):
        if strategy.microbatch_size == largest:
            raise TypeError("This part cannot be traced by itself")
        return computation(strategy)

    monkeypatch.setattr(predictions.gradient, "computation", only_of_others)
    sizes = [1, 2, 4, 8, 16, 32]
    for remat in (None, 1.0):
        seconds = [predictions.seconds(Strategy(size, remat)) for size in sizes]
        totals = [predictions.total(Strategy(size, remat), {}) for size in sizes]
        assert min(seconds) > 0 and totals == sorted(totals) and seconds == sorted(seconds, reverse=True)
    record = predictions.record()
    assert record and all(entry["microbatch_size"] != largest for entry in record)


def test_what_is_on_the_host_takes_no_memory_of_an_accelerator():
    generator = np.random.default_rng(0)
    params = jnp.asarray(generator.standard_normal((8, 64, 64)), jnp.float32)
    batch = jnp.ones((16, 512, 64))

    def loss(params, batch):
        hidden, _ = jax.lax.scan(lambda hidden, weights: (jnp.tanh(hidden @ weights), None), batch, params)
        return jnp.mean(hidden**2)

    def predicted(remat):
        fun = ab.value_and_grad(loss, microbatch_size=4, remat=remat)
        return prediction.predict(jax.make_jaxpr(fun)(params, batch), on_cpu=False)

    passed_on = 8 * 4 * 512 * 64 * 4  # by eight layers, for four examples
    again, on_host = predicted(1.0), predicted("offload")
    assert again.peak - on_host.peak == pytest.approx(passed_on, rel=0.02)
    copied = sum(kernel.times * kernel.num_bytes for kernel in on_host.kernels if kernel.is_copy)
    assert copied == 4 * 2 * passed_on  # there and back, for each of four microbatches
    assert not any(kernel.is_copy for kernel in again.kernels)
    slow = dataclasses.replace(prediction.ACCELERATOR, copied_bytes=1e6)
    assert on_host.seconds(slow) == pytest.approx(copied / 1e6, rel=0.01)


def test_predictions_are_kept_with_the_record_of_a_plan(tmp_path, monkeypatch):
    """Later plans of the same gradient trace nothing to predict."""
    monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path))
    params, batch = problem(512)
    first = ab.plan(network, params, batch, memory="900KiB", timed=False)
    monkeypatch.setattr(prediction, "predict", None)  # an error if it is called
    again = ab.explain(network, params, batch, memory="900KiB", timed=False)
    assert again.microbatch_size == first.microbatch_size


def test_a_plan_that_is_interrupted_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path))
    params, batch = problem(512)

    first = []

    def press_control_c(step):
        first.append(step.brief)
        if step.done == 1 and step.brief.startswith("Compiling"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ab.plan(network, params, batch, memory="900KiB", progress=press_control_c)
    said = []
    plan = ab.plan(network, params, batch, memory="900KiB", progress=said.append)
    assert plan.chosen.fits and plan.compilations <= 4
    assert first[0].startswith("Compiling") and first[0] not in [step.brief for step in said]


def test_a_plan_says_how_many_programs_it_compiles_at_most(capsys):
    params, batch = problem(512)
    said = []
    plan = ab.plan(network, params, batch, memory="900KiB", progress=said.append)
    numbers = [(step.done, step.most) for step in said if step.brief.startswith("Compiling")]
    assert numbers == [(done, 4) for done in range(plan.compilations)]
    assert said[0] == f"[0 of at most 4 programs compiled] {said[0].brief}"
    ab.plan(network, params, batch, memory="900KiB", progress=True)  # no terminal: lines
    assert capsys.readouterr().err.splitlines()[0] == said[0]
    with pytest.raises(ab.InputError, match="progress must be True, False or a function"):
        ab.plan(network, params, batch, memory="900KiB", progress="bar")


def test_planning_does_not_go_on_for_long(monkeypatch):
    """After 30 s, what was not tried is named."""
    monkeypatch.setattr("anybatch.planning.candidates.StrategySearch.ENOUGH_SECONDS", 0.0)
    plan = ab.plan(network, *problem(512), memory="900KiB")
    assert plan.compilations == 1 and plan.chosen.seconds > 0
    assert "Not tried, since planning would have taken more than 0 s: microbatch_size=" in plan.limits


def test_no_program_is_compiled_that_would_take_planning_beyond_30_seconds(monkeypatch):
    """Another program should take as long to compile as the last one."""
    compile_quickly = Measurements._compile

    def compile_slowly(measurements, strategy):
        compile_quickly(measurements, strategy)
        measurements.compile_seconds = seconds

    monkeypatch.setattr(Measurements, "_compile", compile_slowly)
    params, batch = problem(512)
    seconds = 29.9
    assert ab.plan(network, params, batch, memory="900KiB").compilations == 1
    seconds = 0.1
    assert ab.plan(network, params, batch, memory="900KiB").compilations > 1  # the control
