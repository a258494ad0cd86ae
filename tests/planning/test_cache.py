"""Measurements are kept on disk as advice: no record can make a gradient wrong or a plan fail."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest
from cases.planned import network, problem, scanned

import anybatch as ab
from anybatch.planning import planner, store

MEMORY = 900 * 1024


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path / "cache"))
    planner._DECIDED.cache_clear()
    return tmp_path / "cache"


def test_the_second_plan_compiles_nothing(folder):
    params, batch = problem(512)
    first = ab.plan(network, params, batch, memory=MEMORY)
    second = ab.plan(network, params, batch, memory=MEMORY)
    assert first.compilations > 0 and second.compilations == 0
    assert second.chosen.microbatch_size == first.chosen.microbatch_size
    assert second.chosen.seconds == first.chosen.seconds
    assert len(list(folder.glob("*.json"))) == 1


def test_another_process_plans_in_milliseconds(folder):
    program = textwrap.dedent("""
        import sys, time
        sys.path.insert(0, "tests")
        import anybatch as ab
        from cases.planned import network, problem
        params, batch = problem(512)
        plan = ab.plan(network, params, batch, memory=900 * 1024, timed=False)
        print(plan.compilations, plan.microbatch_size, plan.planning_seconds)
    """)
    rows = []
    for _ in range(2):
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        rows.append(result.stdout.split())
    (cold, size, _), (warm, same_size, seconds) = rows
    assert int(cold) >= 1 and int(warm) == 0 and size == same_size
    assert float(seconds) < 0.1


@pytest.mark.full
def test_auto_follows_what_was_measured(folder, monkeypatch):
    """As in a later process: here, after the decisions of this one are cleared."""
    from anybatch.planning.measure import Measurements

    params, batch = problem(64)
    fastest_at_16 = {16: 0.5}
    monkeypatch.setattr(
        Measurements,
        "race",
        lambda measurements, strategies, rounds: {
            strategy: fastest_at_16.get(strategy.microbatch_size, 0.9) for strategy in strategies
        },
    )
    assert ab.plan(network, params, batch).microbatch_size == 16
    planner._DECIDED.cache_clear()
    for transform in (lambda fun: fun, jax.jit):
        planner._DECIDED.cache_clear()
        jaxpr = str(jax.make_jaxpr(transform(ab.value_and_grad(network)))(params, batch))
        assert "scan" in jaxpr and "length=4" in jaxpr
    planner._DECIDED.cache_clear()
    value, _ = ab.value_and_grad(network)(params, batch)
    assert jnp.allclose(value, network(params, batch))


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: "",
        lambda record: "{",
        lambda record: "[]",
        lambda record: "null",
        lambda record: json.dumps(record | {"schema": 0}),
        lambda record: json.dumps(record | {"key": "another"}),
        lambda record: json.dumps(record | {"strategies": []}),
        lambda record: json.dumps(record | {"strategies": [{}]}),
        lambda record: json.dumps(record | {"strategies": 3}),
        lambda record: json.dumps(record | {"choices": "none"}),
        lambda record: json.dumps(record | {"choices": {key: {} for key in record["choices"]}}),
        lambda record: json.dumps(
            record | {"choices": {key: choice | {"size": "all"} for key, choice in record["choices"].items()}}
        ),
        lambda record: json.dumps(
            record | {"choices": {key: choice | {"size": -3} for key, choice in record["choices"].items()}}
        ),
    ],
)
def test_a_record_that_is_damaged_is_as_good_as_none(folder, damage):
    params, batch = problem(512)
    first = ab.plan(network, params, batch, memory=MEMORY, timed=False)
    (path,) = folder.glob("*.json")
    path.write_text(damage(json.loads(path.read_text())))
    planner._DECIDED.cache_clear()
    again = ab.plan(network, params, batch, memory=MEMORY, timed=False)
    assert again.microbatch_size == first.microbatch_size and again.chosen.total == first.chosen.total
    path.write_text(damage(json.loads(path.read_text())))
    planner._DECIDED.cache_clear()
    value, _ = ab.value_and_grad(network, memory=MEMORY)(params, batch)
    assert jnp.allclose(value, network(params, batch), rtol=1e-5)


def test_a_record_of_another_program_is_found_out(folder):
    """The text of the compiled program decides, not only what it was found by."""
    params, batch = problem(512)
    ab.plan(network, params, batch, memory=MEMORY, timed=False)
    (path,) = folder.glob("*.json")
    record = json.loads(path.read_text())
    for strategy in record["strategies"]:
        strategy["program"] = "0" * 64
        strategy["bytes"]["activations"] = 1
    path.write_text(json.dumps(record))
    planner._DECIDED.cache_clear()
    ab.value_and_grad(network, memory=MEMORY)(params, batch)
    record = json.loads(path.read_text())
    assert all(strategy["program"] != "0" * 64 for strategy in record["strategies"])


def test_programs_shapes_and_options_have_separate_records(folder):
    keys = set()
    for loss, size, options in [
        (network, 512, {}),
        (scanned, 512, {}),
        (network, 256, {}),
        (network, 512, {"reduction": "mean"}),
        (network, 512, {"accumulator_dtype": None}),
    ]:
        ab.plan(loss, *problem(size), memory="1GiB", timed=False, **options)
        keys.add(len(list(folder.glob("*.json"))))
    assert keys == {1, 2, 3, 4, 5}


def test_a_smaller_budget_does_not_take_an_older_choice(folder):
    params, batch = problem(512)
    roomy = ab.plan(network, params, batch, memory="1GiB", timed=False)
    tight = ab.plan(network, params, batch, memory=MEMORY, timed=False)
    assert roomy.microbatch_size == 512 and tight.chosen.total <= MEMORY


def test_less_memory_than_then_is_noticed(folder, monkeypatch):
    """With memory=None the budget is what is left now."""
    from anybatch.planning import budget

    params, batch = problem(512)
    assert ab.plan(network, params, batch, timed=False).microbatch_size == 512
    monkeypatch.setattr(budget, "memory_left", lambda devices: MEMORY // 2)
    planner._DECIDED.cache_clear()
    assert ab.plan(network, params, batch, timed=False).microbatch_size < 512


@pytest.mark.parametrize("off", ["off", "", "0", "OFF"])
def test_the_cache_can_be_switched_off(off, tmp_path, monkeypatch):
    monkeypatch.setenv("ANYBATCH_CACHE", off)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.folder() is None
    ab.plan(network, *problem(64), memory="1GiB", timed=False)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("ANYBATCH_CACHE", str(tmp_path / "file" / "cache"))
    assert ab.plan(network, *problem(64), memory="1GiB", timed=False).microbatch_size == 64


def test_by_default_it_lies_with_the_caches_of_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv("ANYBATCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store.folder() == tmp_path / "anybatch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert str(store.folder()).endswith(os.path.join(".cache", "anybatch"))


def test_a_loss_with_effects_is_not_kept_and_not_timed(folder):
    def prints(params, batch):
        jax.debug.print("once", ordered=False)
        return network(params, batch)

    plan = ab.plan(prints, *problem(64), memory="1GiB")
    assert plan.chosen.seconds is None and not folder.exists()
