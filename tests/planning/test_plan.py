"""`plan` and `explain`: what they promise about the strategy that they choose."""

import dataclasses
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from cases.planned import contrastive, elementwise, network, problem, scanned, total_bytes, totals

import anybatch as ab
from anybatch.call.options import SHARES, Options
from anybatch.gradients.computation import Gradient
from anybatch.planning.candidates import StrategySearch
from anybatch.planning.measure import Bytes, Measurements
from anybatch.planning.planner import Planner
from anybatch.planning.strategy import Strategy, Variant

KIB = 1024


def compiled_bytes(loss, params, batch, **options):
    """Those of the program that a user would run, compiled without the planner."""
    return total_bytes(jax.jit(ab.value_and_grad(loss, **options)).lower(params, batch).compile())


def between(share, loss, params, batch):
    """A budget between the bytes of microbatches of one example and those of the full batch."""
    least, most = (compiled_bytes(loss, params, batch, microbatch_size=size) for size in (1, None))
    return int(least + share * (most - least))


@pytest.mark.parametrize("share", [0.1, 0.6, 1.5])
@pytest.mark.parametrize(
    "loss, examples",
    [(network, 512), (network, 509), (scanned, 512), pytest.param(contrastive, 256, marks=pytest.mark.full)],
)
def test_the_chosen_plan_never_exceeds_its_budget(loss, examples, share):
    params, batch = problem(examples)
    budget = between(share, loss, params, batch)

    plan = ab.plan(loss, params, batch, memory=budget, timed=False, remat=None)

    taken = compiled_bytes(loss, params, batch, microbatch_size=plan.microbatch_size)
    assert plan.chosen.fits and plan.chosen.total == taken <= budget
    assert (plan.microbatch_size == examples) == (share > 1)  # the control: where all fit, all are taken
    assert plan.compilations <= (6 if loss is contrastive else 5)  # a head that sees all bends the line


@pytest.mark.full
@pytest.mark.parametrize("share", [0.1, 0.6, 1.5])
@pytest.mark.parametrize("loss, examples", [(network, 509), (scanned, 512), (contrastive, 256)])
def test_the_budget_is_kept_where_activations_may_be_computed_again(loss, examples, share):
    params, batch = problem(examples)
    budget = between(share, loss, params, batch)
    plan = ab.plan(loss, params, batch, memory=budget, timed=False)
    how = {"microbatch_size": plan.microbatch_size, "remat": plan.remat, "block_size": plan.block_size}
    assert plan.chosen.total == compiled_bytes(loss, params, batch, **how) <= budget
    assert share < 1 or how == {"microbatch_size": examples, "remat": None, "block_size": None}


@pytest.mark.full
@pytest.mark.parametrize("loss, examples, share", [(network, 512, 0.6), (network, 509, 0.2), (scanned, 512, 0.2)])
def test_predictions_are_close_to_what_is_compiled(loss, examples, share):
    """Within 12% before anything is compiled, and within 10% of the sizes that are never compiled."""
    params, batch = problem(examples)
    plan = ab.explain(loss, params, batch, memory=between(share, loss, params, batch), timed=False)

    predicted = [each for each in plan.candidates if each.predicted is not None]
    assert len(predicted) >= 2
    for each in [*predicted[:3], *(each for each in predicted if each.bytes is None)]:
        taken = compiled_bytes(loss, params, batch, microbatch_size=each.microbatch_size, remat=each.remat)
        is_on_line = each.bytes is None and each.remat is None
        assert each.predicted == pytest.approx(taken, rel=0.1 if is_on_line else 0.12)


def test_the_budget_is_used():
    """Half as much again would not fit."""
    params, batch = problem(512)
    plan = ab.plan(network, params, batch, memory=900 * KIB, timed=False)
    larger = int(1.5 * plan.microbatch_size)
    assert compiled_bytes(network, params, batch, microbatch_size=larger) > 900 * KIB


def test_a_ragged_size_is_taken_where_no_other_is_near():
    params, batch = problem(509)
    plan = ab.plan(network, params, batch, memory=900 * KIB, timed=False)
    assert 1 < plan.microbatch_size < 509  # which is a prime number
    _, grads = ab.value_and_grad(network, microbatch_size=plan.microbatch_size)(params, batch)
    expected = jax.grad(network)(params, batch)
    assert jnp.allclose(grads["layers"], expected["layers"], rtol=1e-4, atol=1e-7)


@pytest.mark.full
def test_the_objective_memory_takes_the_least():
    params, batch = problem(512)
    lean = ab.plan(network, params, batch, memory="1GiB", objective="memory")
    fits = ab.plan(network, params, batch, memory="1GiB", timed=False)
    assert fits.microbatch_size == 512
    assert lean.chosen.total < fits.chosen.total
    least = min(compiled_bytes(network, params, batch, microbatch_size=size) for size in (1, 2, 8, 32, 128))
    assert lean.chosen.total <= 1.02 * least
    assert lean.reason == f"Chosen: microbatch_size={lean.microbatch_size}, which needs the least memory."


def test_a_declared_reduction_is_planned_too():
    params, batch = problem(512)
    plan = ab.plan(totals, params, batch, memory=550 * KIB, timed=False, reduction="weighted")
    options = {"microbatch_size": plan.microbatch_size, "reduction": "weighted"}
    assert plan.microbatch_size < 512
    assert compiled_bytes(totals, params, batch, **options) == plan.chosen.total <= 550 * KIB


def test_nothing_need_be_there_yet():
    shapes = jax.eval_shape(lambda: problem(512))
    plan = ab.plan(network, *shapes, memory=900 * KIB)
    there = ab.plan(network, *problem(512), memory=900 * KIB, timed=False)
    assert plan.chosen == there.chosen and plan.chosen.seconds is None


def test_nothing_fits_is_one_error_with_the_table_and_the_ways_out():
    params, batch = problem(512)
    with pytest.raises(ab.NothingFitsError) as caught:
        ab.plan(network, params, batch, memory=100 * KIB)
    text = str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert re.search(r"one pass +1 +\d+\.\d KiB .* no\n", text)
    text = " ".join(text.split())  # without the line breaks of its sentences
    assert re.search(r"Nothing fits: even 1 example at a time needs \d+\.\d KiB, and the budget is 100\.0 KiB\.", text)
    assert (
        "KiB of that is the same for every microbatch size: 64.0 KiB parameters, 256.0 KiB batch, 64.0 KiB gradients"
        in text
    )
    assert "What would help: " in text and "shard the parameters over a mesh" in text
    enough = re.search(r'pass memory="(\d+\.\d KiB)" or more', text)[1]
    assert ab.plan(network, params, batch, memory=enough, timed=False).chosen.fits
    with pytest.raises(ab.NothingFitsError):
        ab.value_and_grad(network, memory=100 * KIB)(params, batch)

    shown = ab.explain(network, params, batch, memory=100 * KIB)
    assert shown.chosen is None and shown.microbatch_size is None


def test_what_is_chosen_and_why_stands_below_the_table():
    params, batch = problem(512)
    text = str(ab.explain(network, params, batch, memory=900 * KIB, timed=False))
    title, *_ = text.splitlines()
    assert title == "The gradient of 512 examples on cpu, within 900.0 KiB (memory=921600)"
    chosen = [line for line in text.splitlines() if line.endswith("<- chosen")]
    assert len(chosen) == 1 and " yes " in chosen[0]
    assert re.search(r"Chosen: microbatch_size=\d+, the largest that fits. It was not timed.", text)
    assert re.search(r"full batch +512 .* no\n", text)
    html = ab.explain(network, params, batch, memory=900 * KIB, timed=False)._repr_html_()
    assert "<table>" in html and "<svg" in html and html.count('<tr class="chosen">') == 1


def test_a_plan_fits_80_columns_and_says_what_it_leaves_out():
    plan = ab.explain(network, *problem(512), memory=900 * KIB, timed=False, remat=None)
    lines = str(plan).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["route", "microbatch", "total", "gradients", "activations", "fits"]
    assert lines[-2] == "Columns left out: predicted, arguments, results. plan.text(width=None) shows"
    complete = plan.text(width=None)
    assert complete.splitlines()[2].split() == [
        *("route", "microbatch", "total", "predicted", "arguments", "gradients", "results", "activations", "fits")
    ]
    assert "left out" not in complete and max(map(len, complete.splitlines())) > 80
    assert "left out" not in plan.text(width=120)
    for width in range(48, 120, 4):
        assert max(map(len, plan.text(width).splitlines())) <= width


def test_a_plan_holds_no_arrays_and_no_functions():
    params, batch = problem(64)
    plan = ab.plan(network, params, batch, memory="1GiB", timed=False)
    leaves = jax.tree.leaves(dataclasses.asdict(plan))
    assert all(isinstance(leaf, (int, float, str, bool)) for leaf in leaves)


def test_the_plot_is_a_picture(tmp_path):
    plan = ab.explain(network, *problem(512), memory=900 * KIB, timed=False)
    plan.plot(str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ab.InputError, match="must end in its format"):
        plan.plot(str(tmp_path / "plan.what"))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["png", "svg", "pdf", "jpg"])
def test_the_plot_replaces_no_picture_but_that_of_a_plan(tmp_path, kind):
    plan = ab.explain(network, *problem(64), memory=900 * KIB, timed=False)
    path = tmp_path / f"plan.{kind}"
    plan.plot(str(path))
    first = path.read_bytes()
    if kind == "jpg":  # it has no place for a mark
        with pytest.raises(ab.InputError, match="replaces no file but"):
            plan.plot(str(path))
    else:
        plan.plot(str(path))
    foreign = [b"a letter, that has anybatch plan in it", first.replace(b"anybatch plan", b"matplotlib 99")]
    for content in foreign:
        path.write_bytes(content)
        with pytest.raises(ab.InputError) as caught:
            plan.plot(str(path))
        assert str(caught.value) == (
            f"A plot replaces no file but one of a plan of anybatch, got path='{path}', which is something else.\n"
            f"Name another file, or first: mv {path} {path}.kept"
        )
        assert path.read_bytes() == content
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("activations", [{8: 100, 16: 900}, {4: 10, 8: 12, 16: 5000}, {16: 3000, 32: 100}])
def test_no_prediction_is_below_what_no_size_changes(activations):
    """A line through activations that rise steeply crosses 0, and would promise less than the arguments take."""
    params, batch = problem(64)
    options = Options.of(network)
    measurements = Measurements(Gradient(network, options, options.roles.sort(network, (params, batch), {})))
    fixed = Bytes(parameters=100, batch=200, others=0, gradients=100, results=4, activations=0)
    for size, number in activations.items():
        measurements.bytes[Strategy(size)] = dataclasses.replace(fixed, activations=number)
    search = StrategySearch(measurements, allowed=None)
    predicted = [search.predict(Strategy(size)) for size in (1, 2, 3, 5, 6, 9, 12)]
    assert min(predicted) > fixed.total
    smallest = min(activations)
    assert search.predict(Strategy(1)) >= fixed.total + activations[smallest] // smallest


@pytest.mark.full
def test_computing_twice_is_advised_only_where_it_lets_it_fit():
    params, batch = problem(16, width=8, depth=6)
    sequences = {name: jnp.tile(leaf[:, None], (1, 4096, 1)) for name, leaf in batch.items()}
    lean = ab.plan(elementwise, params, sequences, memory="1GiB", objective="memory", remat="auto").chosen.total
    for memory, helps in ((lean + KIB, True), (lean // 2, False)):
        advice = ab.explain(elementwise, params, sequences, memory=memory, timed=False, remat=None).advice
        assert ("leave remat out" in advice) == helps, advice
        assert "memory=" in advice and "jax.checkpoint" not in advice


@pytest.mark.full
def test_what_the_whole_batch_takes_is_told_and_predicted():
    """The logits of all pairs take most of it, whatever the microbatch: no row of the table promises less."""

    def two_towers(params, batch):
        u, v = (jnp.tanh(batch[name] @ params["layers"][0]) for name in "xy")
        logits = u @ v.T
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits))

    params, batch = problem(256, width=16, depth=1)
    plan = ab.explain(two_towers, params, batch, memory="8MiB", timed=False)
    compiled = {each.microbatch_size: each.total for each in plan.candidates if each.bytes is not None}
    assert min(compiled) == 1
    assert all(each.total >= compiled[1] for each in plan.candidates if each.microbatch_size < 256)
    told = r"Smaller microbatches save little: from .*test_plan.py:\d+.* on, the loss is computed from the full batch"
    assert re.search(told, plan.text(width=None))
    less = min(compiled.values()) - KIB
    assert ab.explain(two_towers, params, batch, memory=less, timed=False).block_size is not None
    advice = ab.explain(two_towers, params, batch, memory=less, timed=False, block_size=None).advice
    assert "remat" not in advice and "leave block_size out" in advice and "memory=" in advice
    with pytest.raises(ab.HeadTooLargeError, match=r"Allow more with memory=\."):
        ab.plan(two_towers, params, batch, memory=300 * KIB, block_size=None)


@pytest.mark.full
def test_rematerialisation_is_a_candidate_where_it_is_allowed():
    """Where no microbatch fits, computing twice may."""
    params, batch = problem(16, width=8, depth=6)
    sequences = {name: jnp.tile(leaf[:, None], (1, 4096, 1)) for name, leaf in batch.items()}
    plain = ab.plan(elementwise, params, sequences, memory="1GiB", objective="memory", remat=None).chosen.total
    allowed = ab.plan(elementwise, params, sequences, memory="1GiB", objective="memory", remat="auto")
    assert allowed.remat is not None and allowed.chosen.total < 0.9 * plain
    budget = (allowed.chosen.total + plain) // 2
    with pytest.raises(ab.NothingFitsError, match=r"leave\s+remat\s+out"):
        ab.plan(elementwise, params, sequences, memory=budget, remat=None)
    plan = ab.plan(elementwise, params, sequences, memory=budget, remat="auto", timed=False)
    options = {"microbatch_size": plan.microbatch_size, "remat": plan.remat}
    assert compiled_bytes(elementwise, params, sequences, **options) == plan.chosen.total <= budget


@pytest.mark.full
def test_shares_of_activations_are_predicted_for_the_table():
    """What the others would take is shown, without a compilation for each."""
    params, batch = problem(64, width=32, depth=16)
    sequences = {name: jnp.tile(leaf[:, None], (1, 64, 1)) for name, leaf in batch.items()}
    plan = ab.explain(elementwise, params, sequences, memory="6MiB", timed=False)
    shown = {each.remat: each for each in plan.candidates if each.microbatch_size == plan.microbatch_size}
    assert {None, 1.0} < set(shown) <= {None, *SHARES}
    assert shown[1.0].total < shown[0.25].total < shown[None].total
    assert sum(each.bytes is not None for each in shown.values()) <= 2 and " 0.75 " in str(plan)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"objective": "time"}, "objective must be one of 'memory', 'speed', got objective='time'."),
        (
            {"remat": "everything"},
            'remat must be one of None, "auto", a share above 0 and at most 1, "offload", "dots_saveable"',
        ),
        (
            {"remat": 1.5},
            'remat must be one of None, "auto", a share above 0 and at most 1, "offload", "dots_saveable"',
        ),
        ({"remat": 0}, 'remat must be one of None, "auto", a share above 0 and at most 1, "offload", "dots_saveable"'),
        (
            {"remat": True},
            'remat must be one of None, "auto", a share above 0 and at most 1, "offload", "dots_saveable"',
        ),
        ({"memory": "16 apples"}, "memory must be a number of bytes"),
        ({"memory": 0}, "memory must be a number of bytes"),
    ],
)
def test_options_that_no_plan_can_have(options, message):
    with pytest.raises(ab.InputError) as caught:
        ab.plan(network, *problem(8), **options)
    assert str(caught.value).startswith(message)


@pytest.mark.full
def test_the_process_stays_within_the_budget():
    """Measured: how far the resident memory of a process rises, in its second run of a planned gradient."""
    program = """
import os, sys
os.environ["ANYBATCH_CACHE"] = "off"
sys.path.insert(0, "tests")
import jax, anybatch as ab
from cases.planned import network, problem

def resident(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

params, batch = problem(40_000, width=128, depth=8)
for budget in (60, 100, 150):
    plan = ab.plan(network, params, batch, memory=f"{budget}MiB", timed=False)
    fun = jax.jit(ab.value_and_grad(network, microbatch_size=plan.microbatch_size))
    jax.block_until_ready(fun(params, batch))  # what the runtime sets up once is not the program's
    before = resident("VmRSS:")
    open("/proc/self/clear_refs", "w").write("5")
    jax.block_until_ready(fun(params, batch))
    print(budget * 2**20, resident("VmHWM:") - before + plan.chosen.bytes.arguments, plan.microbatch_size)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = [list(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len({size for *_, size in rows}) == 3
    for budget, peak, _ in rows:
        assert peak <= budget


def test_a_plan_says_if_xla_takes_more_than_the_budget_to_tune_kernels(monkeypatch):
    """A device that reports a new peak while the second program is compiled."""
    params, batch = problem(512)
    arguments = sum(leaf.nbytes for leaf in jax.tree.leaves((params, batch)))
    readings = iter([(arguments, 2**20), (arguments, 2**20), (arguments, 2**20), (arguments, 3 * 2**20)])
    monkeypatch.setattr("anybatch.planning.measure.bytes_in_use", lambda devices: next(readings, None))
    plan = ab.explain(network, params, batch, memory="900KiB", timed=False)
    assert plan.compilations >= 2 and plan.tuning_bytes == 3 * 2**20 - arguments
    assert "it took 3.0 MiB with the arguments, to try out kernels: more than the budget" in plan.limits
    assert ab.plan(network, params, batch, memory="800KiB", timed=False).tuning_bytes is None  # nothing is reported


@pytest.mark.full
def test_activations_are_kept_on_the_host_only_if_nothing_else_fits(monkeypatch, tmp_path):
    """The last resort on a GPU. Here it is pretended that the device is one."""
    monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path))
    params, batch = problem(64)
    compiled = Measurements._compile

    def compile_as_on_a_gpu(measurements, strategy):
        compiled(measurements, strategy)
        if strategy.remat == "offload":
            found = measurements.bytes[strategy]
            measurements.bytes[strategy] = dataclasses.replace(found, activations=0)

    monkeypatch.setattr(Measurements, "_compile", compile_as_on_a_gpu)
    monkeypatch.setattr(Planner, "last_resort", (Variant("offload"),))
    least = min(compiled_bytes(scanned, params, batch, microbatch_size=1, remat=remat) for remat in (None, *SHARES))
    assert ab.plan(scanned, params, batch, memory=least, timed=False).remat != "offload"
    plan = ab.plan(scanned, params, batch, memory=least - 1, timed=False)
    assert plan.remat == "offload" and plan.chosen.fits
    assert plan.reason == 'Chosen: the full batch, with remat="offload", since it fits.'
    again = ab.plan(scanned, params, batch, memory=least - 1, timed=False)
    assert again.chosen.name == plan.chosen.name and again.compilations == 0
    value, grads = ab.value_and_grad(scanned, memory=least - 1)(params, batch)
    expected_value, expected = jax.value_and_grad(scanned)(params, batch)
    assert jnp.allclose(value, expected_value, rtol=1e-5)
    assert jnp.allclose(grads["layers"], expected["layers"], rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(Planner, "last_resort", ())  # the control
    with pytest.raises(ab.NothingFitsError):
        ab.plan(scanned, params, batch, memory=least - 2, timed=False)


def test_the_least_memory_is_within_the_budget():
    """A microbatch that is about as lean as the leanest may take more than there is."""

    def loss(params, x):
        return jnp.mean(jnp.tanh(x @ params["w"]) ** 2) + 1e-6 * jnp.sum(params["wide"] ** 2)

    params, x = {"w": jnp.ones((16, 64)), "wide": jnp.ones((200, 1000))}, jnp.ones((64, 16))
    smallest = ab.explain(loss, params, x, objective="memory", memory="1GiB", timed=False)
    least = min(each.total for each in smallest.candidates if each.bytes is not None)
    for memory in (least, least + 4096, smallest.chosen.total - 1):
        plan = ab.plan(loss, params, x, objective="memory", memory=memory, timed=False)
        assert plan.chosen.fits and plan.chosen.total <= memory
    assert smallest.chosen.total > least  # the control: with more memory, a larger one is taken
