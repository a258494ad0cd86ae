"""What do `train_step` and `fit` cost, compared with a bare loop of the same compiled program?

    python benchmarks/step.py                              # CPU, two minutes; look at the microseconds
    python benchmarks/step.py gpt2:64:16 gpt-tiny:64:16    # model:examples:microbatch size; one 80 GiB GPU

Three contestants run the same executable, in turns: a bare `for` loop that keeps nothing; `step(state, batch)`; and
`fit`, which draws and transfers batches, reads the metrics of every step, writes a log and prints lines. With
`--checkpoints`, a fourth saves a checkpoint every 20 steps. Expected: step and fit within 1.01 of the bare loop.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from typing import Any

import jax
import numpy as np
import optax
from models import MODELS

import anybatch as ab


class Race:
    """One model, one step, and its contestants."""

    def __init__(self, name: str, examples: int, size: int, steps: int) -> None:
        self.model, self.steps = MODELS[name][0], steps
        self.batch = jax.device_get(self.model.batch(jax.random.key(1), examples))
        self.step = ab.train_step(
            self.model.loss, optax.adamw(1e-4), microbatch_size=size, tokens=lambda batch: batch["inputs"].size
        )
        self.state = self.step.init(lambda: self.model.init(jax.random.key(0)))
        self.on_device = self.step.put(self.batch)
        # Compiled here, so that the timed calls find the program in the cache.
        self.compiled = self.step.lower(self.state, self.on_device).compile()
        self.state, metrics = self.step(self.state, self.on_device)
        jax.block_until_ready(metrics.loss)

    def bare(self) -> float:
        arrays, structure = jax.tree.flatten(self.state)
        rows = jax.tree.leaves(self.on_device)
        begun = time.perf_counter()
        for _ in range(self.steps):
            arrays, results = self.compiled(arrays, rows)
        jax.block_until_ready(results["loss"])
        seconds = time.perf_counter() - begun
        self.state = jax.tree.unflatten(structure, arrays)
        return seconds / self.steps

    def by_step(self) -> float:
        begun = time.perf_counter()
        for _ in range(self.steps):
            self.state, metrics = self.step(self.state, self.on_device)
        jax.block_until_ready(metrics.loss)
        return (time.perf_counter() - begun) / self.steps

    def by_fit(self) -> float:
        return self._fit()

    def by_fit_and_checkpoints(self) -> float:
        return self._fit(checkpoint_every=20)

    def _fit(self, **options: Any) -> float:
        times: list[float] = []

        def timed(state: Any, batch: Any) -> Any:
            times.append(time.perf_counter())
            return self.step(state, batch)

        timed.put = self.step.put  # type: ignore[attr-defined]
        with tempfile.TemporaryDirectory() as folder:
            if options:
                options["checkpoints"] = f"{folder}/checkpoints"
            batches = itertools.repeat(self.batch)
            # The first steps include setup and do not count. From the third on, a step starts when the last ends.
            run = ab.fit(
                timed, self.state, batches, steps=self.steps + 3, log=f"{folder}/run.csv", progress="lines", **options
            )
        self.state = run.state
        return (times[-1] - times[2]) / (len(times) - 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=["gpt-tiny:16:8"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--checkpoints", action="store_true", help="Also time fit with checkpoints.")
    given = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}")
    for case in given.cases:
        name, examples, size = case.split(":")
        race = Race(name, int(examples), int(size), given.steps)
        contestants = {"bare loop": race.bare, "step": race.by_step, "fit": race.by_fit}
        if given.checkpoints:
            contestants["fit, checkpoints"] = race.by_fit_and_checkpoints
        seconds: dict[str, list[float]] = {each: [] for each in contestants}
        for turn in range(given.rounds + 1):
            order = list(contestants) if turn % 2 else list(reversed(contestants))
            for each in order:
                taken = contestants[each]()
                if turn:  # the first round is for warming up
                    seconds[each].append(taken)
        print(f"\n{case}: {given.rounds} rounds of {given.steps} steps, by AdamW")
        bare = np.asarray(seconds["bare loop"])
        for each, taken in seconds.items():
            ratio = statistics.median(np.asarray(taken) / bare)
            more = statistics.median(np.asarray(taken) - bare)
            print(f"  {each:18} {statistics.median(taken) * 1e3:9.3f} ms  ratio {ratio:.4f}  {more * 1e6:+9.0f} us")


if __name__ == "__main__":
    main()
