"""Does a run within a memory budget have the same loss curve as one with the full batch?

    python benchmarks/loss_curve.py                                  # CPU, about fifteen minutes
    python benchmarks/loss_curve.py --context 256 --layers 6 --width 256 --steps 100     # one GPU, some minutes

Trains a GPT on the text that comes with anybatch, twice, from the same parameters and with the same batches of 512:
once as a full batch, and once within 512 MiB for the complete step. Prints both losses for some steps, and the
largest relative difference. All arithmetic is float32 with products at full precision, so only the order of sums
differs.

Two controls. The full batch with its examples in reverse order also sums in another order: its curve should differ as
little. A batch of 256 is other training: its curve must differ by far more.
"""

import argparse
import importlib.resources
from typing import Any

import jax
import numpy as np
import optax

import anybatch as ab
from anybatch.call.memory import readable
from anybatch.demo.gpt import GPT
from anybatch.demo.text import Corpus, Windows


class Reversed(Windows):
    """The same batches, with the examples of each in reverse order."""

    def batch(self, number: int) -> dict[str, np.ndarray]:
        return {name: rows[::-1] for name, rows in super().batch(number).items()}


def curve(
    gpt: GPT, ids: np.ndarray, *, examples: int, steps: int, source: type[Windows] = Windows, **options: Any
) -> tuple[np.ndarray, str]:
    """The losses of a run, and the memory of its step in words."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 20, max(steps, 21))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))
    step = ab.train_step(lambda params, batch: gpt.loss(params, batch["tokens"]), optimizer, **options)
    state = step.init(lambda: gpt.init(jax.random.key(0)))
    batches = source(ids, context=gpt.context, batch_size=examples, seed=0)
    stats = step.lower(state, batches.batch(0)).compile().memory_analysis()
    taken = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    run = ab.fit(step, state, batches, steps=steps, progress=True)
    sizes = [decision[0] for decision in step.decisions.values()] or [options["microbatch_size"] or examples]
    words = f"microbatches of {sizes[0]}, {readable(taken - stats.alias_size_in_bytes)} for the step"
    return np.asarray([row["loss"] for row in run.history]), words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--memory", default="512MiB")
    given = parser.parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")
    text = importlib.resources.files("anybatch.demo").joinpath("fables.txt").read_text()
    corpus = Corpus.of(text, level="characters", context=given.context, validation=0.0)
    gpt = GPT(corpus.vocabulary.size, given.context, given.layers, given.heads, given.width)
    ids, steps = corpus.training, given.steps
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}; {gpt}; batches of 512, {steps} steps")
    within, taken = curve(gpt, ids, examples=512, steps=steps, memory=given.memory)
    print(f"within {given.memory}: {taken}")
    full, taken = curve(gpt, ids, examples=512, steps=steps, microbatch_size=None)
    print(f"the full batch: {taken}")
    in_reverse, _ = curve(gpt, ids, examples=512, steps=steps, microbatch_size=None, source=Reversed)
    other, _ = curve(gpt, ids, examples=256, steps=steps, memory=given.memory)
    difference = np.abs(within - full) / full
    print("step   full batch   in budget   difference")
    for number in sorted({1, 2, 5, 10, 20, 50, 100, steps}):
        if number <= steps:
            print(f"{number:4}  {full[number - 1]:.7f}  {within[number - 1]:.7f}  {difference[number - 1]:.1e}")
    worst = int(np.argmax(difference))
    print(f"largest difference: {difference[worst]:.1e}, at step {worst + 1}")
    print(f"the full batch with its examples in reverse order: {np.max(np.abs(in_reverse - full) / full):.1e}")
    print(f"a batch of 256: {np.max(np.abs(other - full) / full):.1e}")


if __name__ == "__main__":
    main()
