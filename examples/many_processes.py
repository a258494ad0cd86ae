"""Many processes, one batch: a network learns spirals on 8 devices, is stopped, and resumes with the same bits.

    anybatch launch --processes 2 --devices-per-process 4 examples/many_processes.py

On a cluster the script stays as it is. Its scheduler starts the processes, and all machines see the folder:

    srun --kill-on-bad-exit=1 python examples/many_processes.py --folder /shared/spirals

Cost: about 20 s on two CPU cores, and 0.5 GB for each process.
Expected: the loss falls from 4.526 to 0.046 in 300 steps, 99.9% of other points are classified correctly, and all
processes print the same bits.

Stop it with a SIGTERM to any of the processes, and start it again: it ends with the same bits. So it does with the same
number of devices in one process (--processes 1 --devices-per-process 8) or in four, even if it began in two.
"""

import argparse
import hashlib
import itertools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import anybatch as ab

ARMS, SHARDS = 5, 64  # spiral arms, which are the classes; parts of the data, like files of a dataset

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=1024, help="examples of a step, those of all processes together")
parser.add_argument("--microbatch", type=int, default=32, help="examples that a device takes at a time")
parser.add_argument("--width", type=int, default=128, help="of the network")
parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/spirals"), help="of checkpoints and log")
parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait after a step, to have time to stop it")


# 1. The data. Every process makes its own rows and no others. A row depends on the number of the batch and on its
# shard, not on who makes it: so the batch is the same in one process and in many.


def spirals(rng, count):
    """Points on spiral arms, and the arm that each belongs to."""
    arm, radius = rng.integers(0, ARMS, count), np.sqrt(rng.uniform(0.02, 1.0, count))
    angle = 2 * np.pi * (arm / ARMS + 0.75 * radius) + 0.15 * rng.normal(size=count)
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return {"points": points.astype(np.float32), "arm": arm.astype(np.int32)}


class OwnRows:
    """The rows of this process, batch after batch. A resumed run starts at the first and skips those it has seen."""

    def __init__(self, batch_size):
        index, count = jax.process_index(), jax.process_count()
        self.shards = range(SHARDS * index // count, SHARDS * (index + 1) // count)
        self.rows = batch_size // SHARDS

    def __iter__(self):
        for number in itertools.count():
            parts = [spirals(np.random.default_rng([number, shard]), self.rows) for shard in self.shards]
            yield jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)


# 2. The network, and the loss of the full batch: it does not depend on devices, processes or microbatches.


def init(key, width):
    """Three layers."""
    sizes = [2, width, width, ARMS]
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(key, (rows, columns)) * (2 / rows) ** 0.5, "b": jnp.zeros(columns)}
        for key, rows, columns in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def logits(params, points):
    """The logits of the arms for each point."""
    x = 4 * points
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params, batch):
    """The mean over all examples of all processes."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, batch["points"]), batch["arm"]).mean()


# 3. Training.


def main():
    """Trains, or resumes."""
    args = parser.parse_args()
    here = ab.distributed.initialize()  # before any other JAX call; without a cluster, it does nothing
    print(f"{here}, {jax.local_device_count()} of {jax.device_count()} devices")

    def say(text):
        if here.index == 0:
            print(text, flush=True)

    # All devices of all processes; the examples are sharded over them.
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    # reproducible: sums have one order, however many devices add them up.
    step = ab.train_step(loss, optax.adam(3e-3), mesh=mesh, microbatch_size=args.microbatch, reproducible=True)
    state = step.init(init(jax.random.key(0), args.width))

    # The parameters are replicated, so every process evaluates by itself, with the same result.
    test = spirals(np.random.default_rng(2**32), 2000)
    is_right = jax.jit(lambda params, batch: jnp.argmax(logits(params, batch["points"]), -1) == batch["arm"])

    def accuracy(state):
        own = jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), state.params)
        return {"accuracy": np.mean(is_right(own, test))}

    def slowed(state, batch):
        time.sleep(args.pause)
        return step(state, batch)

    slowed.put = step.put
    run = ab.fit(
        slowed if args.pause else step,
        state,
        OwnRows(args.batch),
        steps=args.steps,
        evaluate=accuracy,
        evaluate_every=100,
        checkpoints=args.folder / "checkpoints",
        checkpoint_every=50,
        log=args.folder / "log.csv",  # written by the first process
    )

    if run.stopped_by is None:
        first, last = run.history[0], run.history[-1]
        say(f"loss {first['loss']:.3f} at first, {last['loss']:.3f} after {run.steps} steps")
        say(f"accuracy {accuracy(run.state)['accuracy']:.1%} on 2,000 other points")
        own = [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in jax.tree.leaves(run.state.params)]
        print(f"process {here.index}: bits {hashlib.sha256(b''.join(own)).hexdigest()[:16]}", flush=True)
    sys.exit(run.exit_code)


if __name__ == "__main__":
    main()
