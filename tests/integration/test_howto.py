"""The how-to pages: their error messages are those that are raised, and the job script of SLURM does what it says."""

import os
import pathlib
import re
import stat
import subprocess
import sys

import equinox as eqx
import flax.linen as nn
import grain
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import anybatch as ab
from anybatch.cli import launch

pytestmark = pytest.mark.every_set

HOWTO = pathlib.Path(__file__).parents[2] / "docs" / "howto"
BATCH = {"x": np.ones((12, 4), np.float32), "y": np.zeros(12, np.int32)}


def blocks(page, language, after=""):
    text = (HOWTO / f"{page}.md").read_text().partition(after)[2] if after else (HOWTO / f"{page}.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def cross_entropy(logits, batch):
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def grad(loss, *args, **options):
    return ab.value_and_grad(loss, microbatch_size=5, **options)(*args)


def step_of(loss, *args, **options):
    return ab.train_step(loss, *args, microbatch_size=5, **options)


def plain(params, batch):
    return cross_entropy(batch["x"] @ params["w"], batch)


def keyed(params, batch, key):
    return plain(params, batch) + jax.random.uniform(key)


PARAMS = {"w": np.ones((4, 3), np.float32)}


def without_key():
    step = step_of(keyed, optax.sgd(0.1))
    step(step.init(PARAMS), BATCH)


def without_model_state():
    def loss(params, model_state, batch):
        return plain(params, batch), model_state

    step = step_of(loss, optax.sgd(0.1), has_state=True)
    step(step.init(PARAMS), BATCH)


def used_twice():
    step = step_of(plain, optax.sgd(0.1))
    state = step.init(jax.tree.map(jnp.asarray, PARAMS))
    step(state, BATCH)
    step(state, BATCH)


# Flax NNX.


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.out = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.norm(x))


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.dropout, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(x))


def nnx_loss(model, batch):
    return cross_entropy(model(batch["x"]), batch)


def nnx_closed_over():
    model = CNN(nnx.Rngs(0))
    grad(lambda params, batch: nnx_loss(model, batch), nnx.state(model, nnx.Param), BATCH)


def nnx_init():
    step_of(nnx_loss, optax.sgd(0.1)).init(CNN(nnx.Rngs(0)))


def nnx_two_optimizers():
    model = CNN(nnx.Rngs(0))
    step_of(nnx_loss, optax.sgd(0.1))((model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)), BATCH)


def nnx_declared():
    grad(nnx_loss, CNN(nnx.Rngs(0)), BATCH, reduction="mean")


def nnx_hardware_key():
    grad(nnx_loss, Dropped(nnx.Rngs(jax.random.key(0, impl="rbg"))), BATCH)


def nnx_per_example():
    ab.per_example_norms(nnx_loss, keep_batch_dim=True)(Dropped(nnx.Rngs(0)), BATCH)


# Flax Linen.


class Linen(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(x) if self.norm else x
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(x))


def linen(norm, train):
    model = Linen(norm)
    variables = model.init(jax.random.key(0), BATCH["x"], train=False)

    def loss(params, batch, *keys):
        rngs = {"dropout": keys[0]} if keys else None
        return cross_entropy(model.apply(variables | {"params": params}, batch["x"], train=train, rngs=rngs), batch)

    return loss, variables["params"]


def linen_without_rngs():
    grad(*linen(False, True), BATCH)


def linen_immutable():
    loss, params = linen(True, True)
    grad(loss, params, BATCH, jax.random.key(0))


def linen_hardware_key():
    loss, params = linen(False, True)
    grad(loss, params, BATCH, jax.random.key(0, impl="rbg"))


def linen_without_field():
    loss, params = linen(False, False)
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    step_of(lambda params, stats, batch: (loss(params, batch), stats), has_state=True)(state, BATCH)


# Equinox and Haiku.


def equinox_jit():
    def loss(model, batch):
        return cross_entropy(jax.vmap(model)(batch["x"]), batch)

    jax.jit(ab.value_and_grad(loss, microbatch_size=5))(eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)), BATCH)


def equinox_optimizer():
    optax.adam(1e-3).init(eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)))


def equinox_without_key():
    grad(lambda model, batch: cross_entropy(jax.vmap(model)(batch["x"]), batch), eqx.nn.Dropout(0.5), BATCH)


def equinox_without_state_key():
    def loss(model, batch, key):
        return cross_entropy(jax.vmap(model)(batch["x"]), batch)

    step = step_of(loss, optax.sgd(0.1))
    step(step.init(eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))), BATCH)


def haiku_without_key():
    model = hk.transform(lambda x: hk.Linear(3)(hk.dropout(hk.next_rng_key(), 0.5, x)))
    params = model.init(jax.random.key(0), BATCH["x"])
    grad(lambda params, batch: cross_entropy(model.apply(params, None, batch["x"]), batch), params, BATCH)


def haiku_with_state():
    hk.transform(lambda x: hk.BatchNorm(True, True, 0.9)(x, True)).init(jax.random.key(0), BATCH["x"])


# Optax, Orbax and Grain.


def optax_without_params():
    optimizer = optax.adamw(1e-3)
    optimizer.update(PARAMS, optimizer.init(PARAMS))


def optax_missing():
    step_of(plain)(ab.TrainState.create(PARAMS, optax.sgd(0.1)), BATCH)


def fitted(optimizer=None, data=BATCH, batch_size=4, **options):
    step = step_of(plain, optimizer or optax.adam(0.1))
    state = step.init(jax.tree.map(jnp.asarray, PARAMS))
    options = {"steps": 2, "checkpoints": "run", "progress": False} | options
    return ab.fit(step, state, ab.Batches(data, batch_size), **options)


def orbax_other_optimizer():
    fitted()
    fitted(optax.sgd(0.1))


def orbax_other_batches():
    fitted()
    fitted(batch_size=3, steps=3)


def orbax_other_folder():
    with ocp.CheckpointManager(pathlib.Path("run").absolute()) as manager:
        manager.save(1, args=ocp.args.StandardSave(PARAMS))
    fitted()


def orbax_not_new():
    fitted()
    fitted(resume=False)


def orbax_damaged():
    fitted()
    largest = max((path for path in pathlib.Path("run/2/arrays").rglob("*") if path.is_file()), key=os.path.getsize)
    largest.write_bytes(largest.read_bytes()[:-3] + b"???")
    fitted()


class Rows:
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": BATCH["x"][index], "y": np.float32(0)}


def fit_dataset(dataset, **options):
    step = step_of(lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2), optax.sgd(0.1))
    ab.fit(step, step.init(jnp.zeros(4)), dataset, **{"steps": 2, "progress": False} | options)


def grain_not_batched():
    fit_dataset(grain.MapDataset.source(Rows()))


def grain_text():
    fit_dataset(grain.MapDataset.source(Rows()).map(lambda row: row | {"name": "a word"}).batch(4))


def grain_loader():
    sampler = grain.samplers.IndexSampler(12, num_epochs=None, shard_options=grain.sharding.NoSharding())
    return grain.DataLoader(data_source=Rows(), sampler=sampler, operations=[grain.transforms.Batch(4)], worker_count=0)


def grain_without_repr():
    fit_dataset(grain_loader(), checkpoints="run")
    fit_dataset(grain_loader(), checkpoints="run", steps=3)


def grain_empty():
    fit_dataset(grain.MapDataset.source(Rows()).batch(100, drop_remainder=True))


# SLURM.


def slurm_never_joined():
    raise ab.distributed.MissingPeerError(ab.distributed.Processes(0, 32, "10.0.0.1:1234", "SLURM"), 300.0)


def slurm_too_late():
    jnp.zeros(3).block_until_ready()
    ab.distributed.initialize("127.0.0.1:1234", 2, 0)


def slurm_other_tasks():
    fitted()
    fitted(data={name: rows[::2] for name, rows in BATCH.items()}, batch_size=2, steps=3)


ELSEWHERE = None  # several processes raise it (tests/test_distributed.py), or grain does
MISTAKES = {
    "nnx": [nnx_closed_over, nnx_init, nnx_two_optimizers, nnx_declared, nnx_hardware_key, nnx_per_example],
    "linen": [linen_without_rngs, without_key, linen_immutable, linen_without_field, used_twice, linen_hardware_key],
    "equinox": [equinox_jit, equinox_optimizer, equinox_without_key, without_model_state, equinox_without_state_key],
    "haiku": [haiku_without_key, haiku_with_state, without_key, without_model_state],
    "optax": [optax_without_params, optax_missing, used_twice],
    "orbax": [orbax_other_optimizer, orbax_other_batches, orbax_other_folder, orbax_not_new, orbax_damaged],
    "grain": [grain_not_batched, grain_text, grain_without_repr, grain_empty, ELSEWHERE, ELSEWHERE],
    "slurm": [ELSEWHERE, slurm_never_joined, slurm_too_late, ELSEWHERE, slurm_other_tasks],
}


def describes(block, message):
    """Whether a block of a page is part of a message, up to its numbers and to what "..." stands for."""
    words = re.escape(" ".join(block.split()))
    pattern = re.sub(r"\d+", lambda _: r"\d+", words).replace(r"\.\.\.", ".*")
    return re.search(pattern, " ".join(message.split())) is not None


@pytest.mark.full
@pytest.mark.parametrize("page", MISTAKES)
def test_the_errors_on_a_page_are_those_that_are_raised(page, tmp_path, monkeypatch):
    shown = blocks(page, "text", after="## Common errors")
    for number, (block, mistake) in enumerate(zip(shown, MISTAKES[page], strict=True)):
        if mistake is ELSEWHERE:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            with pytest.raises(Exception) as caught:
                mistake()
        message = f"{type(caught.value).__name__}: {caught.value}"
        assert describes(block, message), f"{block}\nis not in\n{message}"


def test_an_error_with_other_words_is_noticed():
    (block, *_) = blocks("nnx", "text", after="## Common errors")
    assert describes(block, "TraceContextError: Cannot mutate BatchStat from a different trace level (https://...)")
    assert not describes(block, "TraceContextError: Cannot change BatchStat from a different trace level")


# `srun` as far as the job script needs it: it starts two tasks, sends them SIGTERM after the first step if STOP is set,
# and ends with the highest of their exit codes.
SRUN = """\
#!{python}
import os, signal, subprocess, sys
command = [sys.executable, *sys.argv[sys.argv.index("python") + 1 :]]
step = os.environ | {{"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "JAX_NUM_CPU_DEVICES": "2"}}
ids = [{{"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}} for index in range(2)]
tasks = [subprocess.Popen(command, env=step | each, stderr=subprocess.PIPE, text=True) for each in ids]
for line in tasks[0].stderr:
    print(line, end="", file=sys.stderr)
    if line.startswith("step 1/") and "STOP" in os.environ:
        tasks[1].send_signal(signal.SIGTERM)
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.full
def test_the_job_of_slurm_is_requeued_after_sigterm_only(tmp_path):
    """A task that gets SIGTERM stops all, and the job is requeued; one that succeeds or fails is not."""
    (job,) = [block for block in blocks("slurm", "bash") if block.startswith("#!/bin/bash")]
    (tmp_path / "job.sh").write_text(job)
    script = blocks("slurm", "python")[0]
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "srun").write_text(SRUN.format(python=sys.executable))
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" > scontrol.called\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(stat.S_IRWXU)

    def run_job(**more):
        """Its exit code, what scontrol was called with, and what the tasks printed."""
        called = tmp_path / "scontrol.called"
        called.unlink(missing_ok=True)
        variables = {"SLURM_JOB_ID": "4711", "JAX_COORDINATOR_PORT": str(launch.free_port())}
        variables["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | variables | more
        ended = subprocess.run(
            ["bash", "job.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        return ended.returncode, called.read_text().strip() if called.exists() else None, ended.stderr

    code, requeued, printed = run_job(STOP="1")
    assert (code, requeued) == (143, "requeue 4711"), printed
    assert "Stopped by SIGTERM after step" in printed

    code, requeued, printed = run_job()
    assert (code, requeued) == (0, None), printed
    assert "Resuming after step" in printed

    (tmp_path / "train.py").write_text("raise SystemExit(1)")
    assert run_job()[:2] == (1, None)
