"""A small training run as a program, to be started, stopped and killed by tests.

    python training_run.py FOLDER STEPS [PAUSE]

It trains with dropout and shuffled data, with a checkpoint after every third step, and writes the bits it ends with.
"""

import hashlib
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import anybatch as ab


def problem():
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(96, 8)).astype(np.float32), "y": rng.normal(size=96).astype(np.float32)}

    def loss(params, batch, key):
        hidden = jax.nn.relu(batch["x"] @ params["a"])
        hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape)
        return jnp.mean((hidden @ params["b"] - batch["y"]) ** 2)

    step = ab.train_step(loss, optax.adam(0.01), memory="24KiB", noise_scale=True)
    params = {"a": jnp.asarray(rng.normal(size=(8, 16)), jnp.float32), "b": jnp.ones(16)}
    return step, step.init(params, key=jax.random.key(3)), ab.Batches(data, 32, seed=5)


def bits(state):
    leaves = [leaf for leaf in jax.tree.leaves(state) if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)]
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def main(folder, steps, pause=0.0):
    step, state, batches = problem()

    class Slow:
        """The step, with time to be killed in."""

        put, decisions = step.put, property(lambda self: step.decisions)

        def adopt(self, decisions):
            step.adopt(decisions)

        def __call__(self, state, batch):
            time.sleep(pause)
            return step(state, batch)

    run = ab.fit(
        Slow(),
        state,
        batches,
        steps=steps,
        checkpoints=folder / "checkpoints",
        checkpoint_every=3,
        log=folder / "run.csv",
        progress="lines",
    )
    if run.stopped_by is None:
        rows = [(row["step"], row["loss"], row["noise_scale"]) for row in run.history]
        (folder / "bits").write_text(bits(run.state) + " " + hashlib.sha256(repr(rows).encode()).hexdigest())
    sys.exit(run.exit_code)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
