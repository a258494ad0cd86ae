"""`fit`: the loop, its data, log and checkpoints, and what happens when something is wrong."""

import datetime
import itertools
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
import types

import chex
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import anybatch as ab
from anybatch.jaxprs import versions
from anybatch.training.checkpoints import CheckpointError, Checkpoints
from anybatch.training.log import MANY_SKIPPED, read_log


@pytest.fixture(autouse=True)
def optax_defaults():
    """Optimizers are written for JAX's own promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def data(examples=32, seed=0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(examples, 4)).astype(np.float32), "y": rng.normal(size=examples).astype(np.float32)}


def loss(params, batch):
    return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)


def fresh(**options):
    step = ab.train_step(loss, optax.adam(0.1), microbatch_size=4, **options)
    return step, step.init({"w": jnp.zeros(4)})


def fitted(batches=None, *, step=None, **options):
    made, state = fresh()
    batches = ab.Batches(data(), 8, seed=1) if batches is None else batches
    return ab.fit(step or made, state, batches, progress=options.pop("progress", False), **options)


def by_hand(batches, steps):
    step, state = fresh()
    for batch in itertools.islice(batches, steps):
        state, _ = step(state, batch)
    return state


def test_it_takes_the_steps_one_would_take_by_hand():
    run = fitted(steps=10)
    epochs = itertools.chain.from_iterable(ab.Batches(data(), 8, seed=1).epoch(epoch) for epoch in itertools.count())
    chex.assert_trees_all_equal(run.state, by_hand(epochs, 10))
    assert (run.steps, run.stopped_by, run.resumed_from, run.exit_code) == (10, None, None, 0)
    assert [row["step"] for row in run.history] == list(range(1, 11))


@pytest.mark.full
@pytest.mark.parametrize("ahead", [0, 3])
def test_any_iterable_will_do(ahead):
    batches = [data(8, seed) for seed in range(4)]
    expected = by_hand(batches, 4)
    sources = [batches, iter(batches), (batch for batch in batches)]
    sources.append(grain.MapDataset.source(batches))
    for source in sources:
        chex.assert_trees_all_equal(fitted(source, prefetch=ahead).state, expected)
    chex.assert_trees_all_equal(fitted(batches, epochs=3).state, by_hand(batches * 3, 12))
    chex.assert_trees_all_equal(fitted(batches, steps=7).state, by_hand(batches * 2, 7))


@pytest.mark.parametrize("kind", ["Batches", "list", "grain"])
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, kind):
    def source():
        if kind == "Batches":
            return ab.Batches(data(), 8, seed=1)
        if kind == "list":
            return [data(8, seed) for seed in range(5)]
        rows = grain.MapDataset.source([{"x": x, "y": y} for x, y in zip(*data().values(), strict=True)])
        return rows.shuffle(seed=3).repeat().batch(8)

    whole = fitted(source(), steps=11, log=tmp_path / "whole.csv")
    folder, log = tmp_path / "checkpoints", tmp_path / "parts.csv"
    for steps in (3, 4, 11):
        run = fitted(source(), steps=steps, checkpoints=folder, log=log, checkpoint_every=2)
        assert run.steps == steps
    chex.assert_trees_all_equal(run.state, whole.state)
    assert run.resumed_from == 4
    kept = [[(row["step"], row["loss"]) for row in read_log(path)] for path in (log, tmp_path / "whole.csv")]
    assert kept[0] == kept[1] == [(row["step"], row["loss"]) for row in run.history]
    again = fitted(source(), steps=11, checkpoints=folder, log=log)  # there is nothing left to do
    chex.assert_trees_all_equal(again.state, whole.state)
    assert len(again.history) == 11


def test_data_in_another_order_would_be_noticed(tmp_path):
    """The control: one that began its data anew, or skipped a batch, would end elsewhere."""
    expected = fitted(steps=6).state
    others = [fitted(ab.Batches(data(), 8, seed=2), steps=6).state, fitted(steps=5).state]
    for other in others:
        with pytest.raises(AssertionError):
            chex.assert_trees_all_equal(other.params, expected.params)


@pytest.mark.full
def test_the_way_of_the_gradient_is_resumed_too(tmp_path):
    """Another microbatch size, as more or less memory would lead to, gives other bits."""

    def wide(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["a"]) @ params["b"] - batch["y"]) ** 2)

    def run(memory, steps, folder):
        step = ab.train_step(wide, optax.adam(0.1), memory=memory)
        state = step.init({"a": jnp.ones((4, 256)) / 8, "b": jnp.ones(256) / 8})
        run = ab.fit(step, state, ab.Batches(data(64), 32), steps=steps, checkpoints=folder, progress=False)
        return run.state, next(iter(step.decisions.values()))[0]

    whole, size = run("40KiB", 8, tmp_path / "whole")
    assert size < 32
    run("40KiB", 4, tmp_path / "parts")
    resumed, resumed_size = run("1MiB", 8, tmp_path / "parts")
    assert resumed_size == size
    chex.assert_trees_all_equal(resumed, whole)


def test_the_log_has_what_one_would_plot(tmp_path):
    def with_aux(params, batch):
        errors = (batch["x"] @ params["w"] - batch["y"]) ** 2
        return jnp.mean(errors), {"largest": jnp.max(errors), "each": errors}

    options = {"has_aux": True, "noise_scale": True, "tokens": lambda batch: batch["x"].size}
    step = ab.train_step(with_aux, optax.adam(0.1), microbatch_size=2, **options)
    file = tmp_path / "run.csv"
    run = ab.fit(
        step,
        step.init({"w": jnp.zeros(4)}),
        ab.Batches(data(), 8),
        steps=6,
        log=file,
        evaluate=lambda state: {"norm": jnp.linalg.norm(state.params["w"])},
        evaluate_every=4,
        progress=False,
    )
    names = ["step", "loss", "gradient_norm", "aux.largest", "skipped", "noise_scale"]
    names += ["examples_per_second", "tokens_per_second", "seconds", "eval.norm"]
    assert file.read_text().splitlines()[0] == ",".join(names)
    assert [row["step"] for row in run.history if "eval.norm" in row] == [4, 6]  # and after the last
    assert run.history[-1]["eval.norm"] == float(jnp.linalg.norm(run.state.params["w"]))
    assert [row["loss"] for row in read_log(file)] == [row["loss"] for row in run.history]
    last = run.history[-1]
    assert last["tokens_per_second"] == pytest.approx(4 * last["examples_per_second"])
    assert run.noise.steps > 1
    fewer = fitted(steps=6, log_every=3)
    assert [row["step"] for row in fewer.history] == [1, 3, 6]


def test_a_step_of_ones_own_will_do():
    @jax.jit
    def step(state, batch):
        value, grads = jax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, state, grads), {"loss": value, "nested": {"a": 1.0}}

    run = ab.fit(step, {"w": jnp.zeros(4)}, [data(8)] * 3, progress=False)
    assert run.history[-1]["loss"] > 0 and run.history[-1]["nested.a"] == 1
    number = ab.fit(lambda count, batch: (count + 1, count * 1.0), 0, [data(8)] * 3, progress=False)
    assert number.state == 3 and [row["loss"] for row in number.history] == [0, 1, 2]


def test_what_it_shows(capsys, monkeypatch):
    fitted(steps=5, progress=True)  # no terminal: lines
    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("step 1/5  loss") and not any("\x1b" in line for line in shown)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fitted(steps=5, progress=True)
    shown = capsys.readouterr().err
    assert "Training" in shown and "5/5" in shown and "loss" in shown and "examples/s" in shown
    fitted(steps=5, progress=False)
    assert capsys.readouterr().err == ""


def stop_after(number, name="SIGTERM"):
    """A step that sends a signal to the process while it runs."""
    step, _ = fresh()
    calls = itertools.count(1)

    def signalled(state, batch):
        if next(calls) == number:
            os.kill(os.getpid(), signal.Signals[name])
        return step(state, batch)

    return signalled


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_signal_ends_it_cleanly(tmp_path, name, code, capsys):
    before = signal.getsignal(signal.Signals[name])
    run = fitted(step=stop_after(3, name), steps=9, checkpoints=tmp_path / "c", progress="lines")
    assert (run.steps, run.stopped_by, run.exit_code) == (3, name, code)
    assert f"Stopped by {name} after step 3, saved in" in capsys.readouterr().err
    assert signal.getsignal(signal.Signals[name]) is before
    chex.assert_trees_all_equal(fitted(steps=9, checkpoints=tmp_path / "c").state, fitted(steps=9).state)


def test_a_signal_ends_it_while_it_waits_for_data(tmp_path):
    begun = []

    def source():
        yield data(8)
        # From here on: on a busy machine, it may take a second until signals are listened to.
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        begun.append(time.monotonic())
        time.sleep(60)

    run = fitted(source(), steps=9, checkpoints=tmp_path / "c")
    assert (run.steps, run.stopped_by) == (1, "SIGTERM") and time.monotonic() - begun[0] < 20


def test_a_second_sigterm_loses_nothing(tmp_path):
    """A scheduler signals every process, and a launcher passes its own signal on: they get it twice."""
    step, _ = fresh()
    calls = itertools.count(1)

    def signalled_twice(state, batch):
        if next(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
        return step(state, batch)

    run = fitted(step=signalled_twice, steps=9, checkpoints=tmp_path / "c")
    assert (run.steps, run.stopped_by) == (3, "SIGTERM")
    chex.assert_trees_all_equal(fitted(steps=9, checkpoints=tmp_path / "c").state, fitted(steps=9).state)


def test_a_second_ctrl_c_ends_it_at_once():
    step, _ = fresh()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in parallel it may be ignored

    def impatient(state, batch):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # two at once may be noticed as one
        return step(state, batch)

    try:
        with pytest.raises(KeyboardInterrupt):
            fitted(step=impatient, steps=9)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_empty_iterator():
    for empty in ([], iter([]), (batch for batch in [])):
        with pytest.raises(ab.InputError, match=r"(?s)empty|no batch"):
            fitted(empty, steps=3)


@pytest.mark.parametrize("change", ["tree", "dtype", "rank"])
def test_batches_that_change_midway_lose_nothing(tmp_path, change):
    changed = {
        "tree": data(8) | {"mask": np.ones(8, np.float32)},
        "dtype": data(8) | {"y": np.ones(8, np.int32)},
        "rank": data(8) | {"y": np.ones((8, 1), np.float32)},
    }[change]
    good = [data(8, seed) for seed in range(3)]
    with pytest.raises(ab.InputError, match="mask" if change == "tree" else "y") as caught:
        fitted([*good, changed, *good], checkpoints=tmp_path / "c", log=tmp_path / "run.csv")
    chex.assert_trees_all_equal(caught.value.state, by_hand(good, 3))
    assert any("after step 3" in note and "saved in" in note for note in caught.value.__notes__)
    assert len(read_log(tmp_path / "run.csv")) == 3
    run = fitted([*good, *good], checkpoints=tmp_path / "c", log=tmp_path / "run.csv")  # mended, it goes on
    assert run.resumed_from == 3
    chex.assert_trees_all_equal(run.state, by_hand(good * 2, 6))


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_batch_without_examples_is_an_error_that_loses_nothing(tmp_path, ahead):
    """The last batch of a source that cuts its examples one time too often."""
    good = [data(8, seed) for seed in range(3)]
    options = {"checkpoints": tmp_path / "c", "log": tmp_path / "run.csv", "prefetch": ahead}
    with pytest.raises(ab.InputError, match=r"at least one example.*\n    batch\['x'\]: float32\[0,4\]") as caught:
        fitted([*good, data(0)], **options)
    chex.assert_trees_all_equal(caught.value.state, by_hand(good, 3))
    assert any("after step 3" in note and "saved in" in note for note in caught.value.__notes__)
    assert len(read_log(tmp_path / "run.csv")) == 3
    assert fitted(good, **options).resumed_from == 3  # mended, it has nothing left to do


def test_a_step_of_ones_own_may_take_a_batch_without_examples():
    """As one of DP-SGD must: whether a batch drawn at random is empty is not to be seen."""
    run = ab.fit(lambda state, batch: (state + 1, {"loss": 0.0}), 0, [data(0), data(8)], progress=False)
    assert run.state == 2


def test_an_error_of_the_data_or_of_the_evaluation_loses_nothing(tmp_path):
    def source():
        yield from [data(8, 0), data(8, 1)]
        raise OSError("the network went away")

    with pytest.raises(OSError, match="went away") as caught:
        fitted(source(), checkpoints=tmp_path / "a")
    chex.assert_trees_all_equal(caught.value.state, by_hand([data(8, 0), data(8, 1)], 2))

    with pytest.raises(ZeroDivisionError) as caught:
        options = {"checkpoints": tmp_path / "b", "log": tmp_path / "b.csv"}
        fitted(steps=6, evaluate=lambda state: 1 / 0, evaluate_every=4, **options)
    assert int(caught.value.state.step) == 4 and len(read_log(tmp_path / "b.csv")) == 4
    assert fitted(steps=6, checkpoints=tmp_path / "b").resumed_from == 4


def test_a_checkpoint_of_another_model(tmp_path):
    fitted(steps=2, checkpoints=tmp_path / "c")
    step = ab.train_step(lambda params, batch: jnp.mean(batch["x"] @ params["v"]), optax.sgd(0.1), microbatch_size=4)
    state = step.init({"v": jnp.zeros((4, 2))})
    with pytest.raises(ab.InputError, match=r"params\['v'\]"):
        ab.fit(step, state, ab.Batches(data(), 8), steps=4, checkpoints=tmp_path / "c", progress=False)
    assert not state.params["v"].is_deleted()
    with pytest.raises(ab.InputError, match="resume=False"):
        fitted(steps=4, checkpoints=tmp_path / "c", resume=False)
    assert fitted(steps=4, checkpoints=tmp_path / "c").resumed_from == 2  # untouched


def test_a_checkpoint_under_the_name_of_another_step_is_not_gone_on_from(tmp_path):
    fitted(steps=2, checkpoints=tmp_path / "c", log=tmp_path / "run.csv")
    shutil.copytree(tmp_path / "c" / "2", tmp_path / "c" / "9")
    before = (tmp_path / "run.csv").read_bytes()
    step, state = fresh()
    with pytest.raises(
        CheckpointError, match=r"must be of step 9, and is of step 2: .*\nDelete the copy: rm -r .*/c/9"
    ):
        ab.fit(step, state, [data(8)], checkpoints=tmp_path / "c", log=tmp_path / "run.csv", progress=False)
    assert not state.params["w"].is_deleted() and (tmp_path / "run.csv").read_bytes() == before
    shutil.rmtree(tmp_path / "c" / "9")
    assert fitted(steps=4, checkpoints=tmp_path / "c", log=tmp_path / "run.csv").resumed_from == 2


def test_other_versions_than_a_run_began_with_are_worth_a_word(tmp_path, monkeypatch, capsys):
    """Then it may go on with other bits."""
    fitted(steps=2, checkpoints=tmp_path / "c")
    fitted(steps=3, checkpoints=tmp_path / "c", progress="lines")
    assert "saved with" not in capsys.readouterr().err
    monkeypatch.setattr(versions, "versions", lambda: ["99.1", "99.1"])
    fitted(steps=4, checkpoints=tmp_path / "c", progress="lines")
    assert re.search(
        r"It was saved with jax 0[.\d]+, and this is jax 99.1: .*bits of later steps may differ",
        capsys.readouterr().err,
    )


@pytest.mark.full
def test_a_run_that_goes_on_leaves_the_log_of_another_run_alone(tmp_path):
    """Its rows after that step would be dropped, and those before taken for rows of this run."""
    ours, other = tmp_path / "ours.csv", tmp_path / "other.csv"
    fitted(steps=2, checkpoints=tmp_path / "c", log=ours)
    fitted(steps=5, log=other)
    before = other.read_bytes()
    step, state = fresh()
    with pytest.raises(ab.InputError) as caught:
        ab.fit(step, state, [data(8)] * 4, checkpoints=tmp_path / "c", log=other, progress=False)
    assert str(caught.value) == (
        "The log of a resumed run must be its own, got "
        f"log='{other}', of another run, while the checkpoint of step 2 is in {tmp_path / 'c'}.\n"
        f"Name the log that the run had, '{ours}', or a new one, e.g. log='{tmp_path}/other-2.csv'."
    )
    assert other.read_bytes() == before and not state.params["w"].is_deleted()
    assert len(fitted(steps=3, checkpoints=tmp_path / "c").history) == 1  # a part without a log
    assert [row["step"] for row in fitted(steps=4, checkpoints=tmp_path / "c", log=ours).history] == [1, 2, 4]
    fitted(steps=5, checkpoints=tmp_path / "c", log=tmp_path / "new.csv")
    assert len(fitted(steps=6, checkpoints=tmp_path / "c", log=ours).history) == 4  # it knows all that it had
    other.unlink()
    shutil.copy(ours, other)  # moved or copied, it is still its own
    assert len(fitted(steps=7, checkpoints=tmp_path / "c", log=other).history) == 5


def test_rows_of_a_run_without_a_log_are_not_added_to_that_of_another(tmp_path):
    fitted(steps=2, checkpoints=tmp_path / "c")
    fitted(steps=5, log=tmp_path / "other.csv")
    with pytest.raises(ab.InputError, match=r"must be its own, .*\nName a new one, e.g. log='.*other-2.csv'"):
        fitted(steps=4, checkpoints=tmp_path / "c", log=tmp_path / "other.csv")
    assert len(read_log(tmp_path / "other.csv")) == 5


def test_a_run_that_ended_before_its_first_checkpoint_goes_on_with_its_log(tmp_path):
    def interrupted():
        yield from [data(8, seed) for seed in range(5)]
        raise KeyboardInterrupt

    options = {"checkpoints": tmp_path / "c", "log": tmp_path / "run.csv"}
    with pytest.raises(KeyboardInterrupt):
        fitted(interrupted(), prefetch=0, **options)
    assert read_log(tmp_path / "run.csv")  # and a checkpoint of step 0
    run = fitted([data(8, seed) for seed in range(6)], **options)
    assert run.resumed_from == 0 and [row["step"] for row in read_log(tmp_path / "run.csv")] == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_that_fails_midway_is_tried_again_and_at_the_end_it_is_an_error(tmp_path, monkeypatch):
    from anybatch.training import checkpoints as module

    real, full = module.Checkpoints.save, [False]

    def save(self, step, arrays, record):
        if full[0]:
            raise ab.CheckpointError("no space left", folder=self.folder, step=step, last_good=self.latest())
        real(self, step, arrays, record)

    step, _ = fresh()
    calls = itertools.count(1)

    def watched(state, batch):
        full[0] = next(calls) in when
        return step(state, batch)

    monkeypatch.setattr(module.Checkpoints, "save", save)
    when = {2, 3}
    with pytest.warns(RuntimeWarning, match="(?s)no space left.*tries again"):
        run = fitted(step=watched, steps=6, checkpoints=tmp_path / "a", checkpoint_every=2)
    chex.assert_trees_all_equal(run.state, fitted(steps=6).state)
    calls, when = itertools.count(1), {6}
    with pytest.raises(ab.CheckpointError, match="no space left") as caught:
        fitted(step=watched, steps=6, checkpoints=tmp_path / "b")
    chex.assert_trees_all_equal(caught.value.state, run.state)


def test_folders_and_files_that_cannot_be_written(tmp_path):
    step, state = fresh()
    (tmp_path / "file").write_text("")
    for options, words in [
        ({"checkpoints": tmp_path / "file"}, "folder"),
        ({"checkpoints": tmp_path / "file" / "below"}, "folder"),
        ({"log": tmp_path / "file" / "run.csv"}, "run.csv"),
        ({"log": tmp_path / "run.txt"}, "csv"),
    ]:
        with pytest.raises(ab.InputError, match=words):
            ab.fit(step, state, [data(8)], progress=False, **options)
    assert not state.params["w"].is_deleted()
    (tmp_path / "other.csv").write_text("step,loss\n1,0.5\n")
    for _ in range(2):  # the second time, too: another run's log is not ours to cut
        with pytest.raises(ab.InputError, match=r"other\.csv"):
            ab.fit(step, state, [data(8)], progress=False, log=tmp_path / "other.csv", checkpoints=tmp_path / "new")
    assert (tmp_path / "other.csv").read_text() == "step,loss\n1,0.5\n"


def test_bad_arguments():
    step, state = fresh()
    for options, words in [
        ({"steps": 2, "epochs": 2}, "number of steps or"),
        ({"steps": -1}, "steps must be"),
        ({"steps": 2.5}, "steps must be"),
        ({"epochs": 0}, "epochs"),
        ({"log_every": 0}, "log_every must be"),
        ({"evaluate_every": 3}, "goes with evaluate"),
        ({"evaluate": 3}, "function of the state"),
        ({"evaluate": lambda state: "good"}, "must return a number"),
        ({"checkpoint_every": 3}, "goes with checkpoints"),
        ({"progress": "loud"}, "progress must be"),
        ({"prefetch": -1}, "prefetch"),
    ]:
        with pytest.raises(ab.InputError, match=words):
            ab.fit(step, step.init({"w": jnp.zeros(4)}), [data(8)], **({"progress": False} | options))
    with pytest.raises(ab.InputError, match="function of a state"):
        ab.fit("step", state, [data(8)])
    with pytest.warns(RuntimeWarning, match="ended after 1 of 5"):
        fitted(iter([data(8)]), steps=5)


def test_steps_that_learn_nothing_are_worth_a_word():
    bad = data(8) | {"x": np.full((8, 4), np.nan, np.float32)}
    with pytest.warns(RuntimeWarning, match="nothing is being learned"):
        run = fitted([bad], steps=MANY_SKIPPED)
    assert run.history[-1]["skipped"] == int(run.state.skipped) == MANY_SKIPPED


def test_throughput_is_that_of_the_steps(tmp_path, monkeypatch):
    """Evaluations and checkpoints between the steps do not count, nor do metrics that are read all at once."""
    now = [100.0]
    monkeypatch.setattr("anybatch.training.log.time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    def passes(seconds, result=None):
        now[0] += seconds
        return result

    def save(self, *given):
        passes(3.0)
        return saved(self, *given)

    saved = Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", save)
    run = ab.fit(
        lambda state, batch: passes(0.05, (state, {"loss": 1.0})),
        0,
        [data(8)],
        steps=24,
        evaluate=lambda state: passes(0.3, 1.0),
        evaluate_every=5,
        checkpoints=tmp_path,
        checkpoint_every=7,
        progress=False,
    )
    assert now[0] > 100.0 + 24 * 0.05 + 4 * 0.3 + 3 * 3.0  # the control: there were pauses
    rates = np.array([row["examples_per_second"] for row in run.history])
    assert np.isfinite(rates).sum() >= 20
    np.testing.assert_allclose(rates[np.isfinite(rates)], 8 / 0.05, rtol=1e-9)


def test_checkpoints_by_the_clock(tmp_path):
    fitted(steps=3, checkpoints=tmp_path / "c", checkpoint_every=datetime.timedelta(0))
    assert {"1", "2", "3"} <= {path.name for path in (tmp_path / "c").iterdir()}


def test_a_long_history_is_thinned(monkeypatch):
    from anybatch.training import loop as module

    monkeypatch.setattr(module, "MOST_ROWS", 8)
    run = fitted(steps=40)
    assert len(run.history) <= 8 and run.history[-1]["step"] == 40


def test_a_resumed_run_holds_its_state_once(tmp_path):
    def run(steps):
        step = ab.train_step(lambda p, b: jnp.mean((b["x"] @ p["v"]) ** 2), optax.sgd(0.1), microbatch_size=4)
        state = step.init({"v": jnp.zeros((4, 3571))})
        seen = []

        def evaluate(state):
            seen.append(sum(array.shape == (4, 3571) for array in jax.live_arrays()))
            return 0.0

        ab.fit(step, state, [data(8)] * 2, steps=steps, checkpoints=tmp_path, evaluate=evaluate, progress=False)
        return seen

    assert run(2) == run(4) == [1]


def test_numbers_in_the_state_of_a_step_of_ones_own_are_saved_as_they_are(tmp_path):
    def step(state, batch):
        return {"seen": state["seen"] + 2**31, "best": state["best"] / 3, "w": state["w"] + 1}, 0.0

    def run(steps, folder):
        first = {"seen": 0, "best": 0.1, "w": jnp.zeros(2)}
        return ab.fit(step, first, [data(8)] * 4, steps=steps, checkpoints=folder, progress=False).state

    run(2, tmp_path / "parts")
    whole, parts = run(4, tmp_path / "whole"), run(4, tmp_path / "parts")
    assert type(parts["seen"]) is int and type(parts["best"]) is float
    chex.assert_trees_all_equal(whole, parts)


def test_a_signal_during_the_last_evaluation_counts(tmp_path):
    def evaluate(state):
        os.kill(os.getpid(), signal.SIGTERM)
        return 1.0

    run = fitted(steps=3, evaluate=evaluate)
    assert (run.steps, run.stopped_by) == (3, "SIGTERM") and run.history[-1]["eval"] == 1


def test_a_signal_to_a_run_within_a_run_stops_both():
    inner = []

    def evaluate(state):
        inner.append(fitted(step=stop_after(2), steps=9))
        return 1.0

    run = fitted(steps=9, evaluate=evaluate, evaluate_every=3)
    assert (inner[0].steps, inner[0].stopped_by, run.steps, run.stopped_by) == (2, "SIGTERM", 3, "SIGTERM")


@pytest.mark.parametrize("source", ["list", "generator"])
def test_the_last_row_has_the_loss_and_the_evaluation(tmp_path, source):
    def batches():
        made = [data(8, seed) for seed in range(4)]
        return made if source == "list" else (batch for batch in made)

    options = {"checkpoints": tmp_path / "c", "checkpoint_every": 2, "log": tmp_path / "run.csv"}
    run = fitted(batches(), evaluate=lambda state: 7.0, **options)
    assert [row["step"] for row in run.history] == [1, 2, 3, 4]
    assert run.history[-1]["loss"] > 0 and run.history[-1]["eval"] == 7
    rows = read_log(tmp_path / "run.csv")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1]["eval"] == 7 and rows[-1]["loss"] > 0
    if source == "list":
        again = fitted(batches(), evaluate=lambda state: 7.0, **options)
        assert len(read_log(tmp_path / "run.csv")) == len(rows) and again.steps == 4


def test_a_step_under_jit_and_names_with_brackets(monkeypatch, capsys):
    step, state = fresh(donate=False)
    monkeypatch.setenv("TERM", "xterm")
    run = ab.fit(jax.jit(step), state, [data(8)] * 3, evaluate=lambda state: {"recall[/5]": 0.5}, progress="bar")
    assert run.history[-1]["eval.recall[/5]"] == 0.5 and run.history[-1]["loss"] > 0
    assert "recall[/5]" in capsys.readouterr().err


def test_one_folder_has_one_run(tmp_path):
    def evaluate(state):
        fitted(steps=2, checkpoints=tmp_path)

    with pytest.raises(ab.InputError, match="one writer only"):
        fitted(steps=4, checkpoints=tmp_path, evaluate=evaluate, evaluate_every=2)


@pytest.mark.parametrize("name", ["checkpoints", "log"])
@pytest.mark.parametrize("given", [3, True, 1.5, b"run.csv", "", "a\0.csv"], ids=repr)
def test_what_is_no_path_is_refused_before_any_work(tmp_path, name, given):
    other = {"log": "checkpoints", "checkpoints": "log"}[name]
    seen = []

    def batches():
        seen.append(1)
        yield data(8)

    with pytest.raises(
        ab.InputError, match=f"{name} must be a path: a string, or a pathlib.Path, got {name}="
    ) as caught:
        fitted(batches(), **{name: given, other: tmp_path / "other.csv"})
    assert f"For example {name}=" in str(caught.value)
    assert not seen and not list(tmp_path.iterdir())


@pytest.mark.parametrize("given", [["run.csv", 3], [], {"run.csv": 1}, [None]], ids=repr)
def test_logs_of_wrong_types(given):
    with pytest.raises(ab.InputError, match=r"log must be a path|A log must be one file") as caught:
        fitted([data(8)], log=given)
    assert "run.csv" in str(caught.value)


def test_a_log_that_is_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "run.csv")
    with pytest.raises(ab.InputError, match="must not replace an existing file"):
        fitted([data(8)], log=tmp_path / "run.csv")
    with pytest.raises(ab.InputError, match="a device, pipe or socket"):
        read_log(tmp_path / "run.csv")


# The summary.


def test_a_run_prints_as_a_summary_without_its_parameters(tmp_path):
    run = fitted(steps=6, checkpoints=tmp_path / "saved", log=tmp_path / "log.csv")
    first, last = run.history[0]["loss"], run.history[-1]["loss"]
    lines = dict(line.strip().split("  ", 1) for line in str(run).splitlines()[1:])
    assert re.fullmatch(r"6 steps in \d+\.\d s", str(run).splitlines()[0]) and repr(run) == str(run)
    assert {name: text.strip() for name, text in lines.items()} == {
        "loss": f"{first:.4g} at step 1, {last:.4g} at step 6",
        "examples": "48",
        "ended": "at the end of its steps or batches",
        "checkpoints": str(tmp_path / "saved"),
        "log": str(tmp_path / "log.csv"),
        "state": "TrainState, in .state; the rows of the log are in .history",
    }
    assert "Array" not in str(run) and "Array" in repr(run.state)  # the control
    assert (run.checkpoints, run.log, run.examples) == (tmp_path / "saved", tmp_path / "log.csv", 48)
    shown = run._repr_html_()
    assert '<p class="lead">6 steps in ' in shown and f'<td class="left">{tmp_path / "saved"}</td>' in shown

    resumed = fitted(steps=8, checkpoints=tmp_path / "saved", log=tmp_path / "log.csv")
    assert str(resumed).startswith("8 steps in ")
    assert "examples     16, since it was resumed after step 6\n" in str(resumed)
    assert f"{first:.4g} at step 1, " in str(resumed)


def test_the_summary_says_what_stopped_a_run_and_leaves_out_what_there_is_not():
    run = ab.Fitted(np.zeros(3), 1200, [], "SIGTERM", None, None, 3725.0)
    assert str(run) == (
        "1,200 steps in 1:02:05\n"
        "  ended  stopped by SIGTERM\n"
        "  state  ndarray, in .state; the rows of the log are in .history"
    )
    saved = ab.Fitted(None, 1, [{"step": 1, "loss": math.nan}], "SIGINT", None, None, 1.0, checkpoints="folder")
    assert "stopped by SIGINT: run it again to resume" in str(saved) and "loss         nan at step 1" in str(saved)
    assert str(saved).startswith("1 step in 1.0 s")
