"""`anybatch demo`: a GPT learns a few fables, in a small part of the memory that its batch would take."""

import dataclasses
import shlex
from typing import Any

from anybatch.language import job
from anybatch.language.config import RunConfig

SMALL = RunConfig(
    out="anybatch-demo",
    layers=2,
    width=96,
    context=32,
    batch=256,
    memory="14MiB",
    steps=200,
    learning_rate=1e-2,
    warmup=10,
    evaluate_every=20,
    checkpoint_every=60,
    prompt="The ",
    temperature=0.5,
)

# As large as the smallest GPT-2, but for its vocabulary: 85 million parameters.
GPU_SIZE = RunConfig(
    out="anybatch-demo-gpu",
    layers=12,
    heads=12,
    width=768,
    context=512,
    dropout=0.1,
    dtype="bfloat16",
    batch=512,
    memory="12GiB",
    steps=200,
    learning_rate=1e-3,
    warmup=20,
    evaluate_every=20,
    checkpoint_every=100,
    prompt="The ",
    sample=800,
)


def run(*, gpu_size: bool = False, resume: bool = True, **changes: Any) -> int:
    """Runs the demonstration.

    Args:
      gpu_size: whether to take the model for an accelerator.
      resume: whether to go on with one that was stopped. One that came to its end is begun anew.
      **changes: settings that are other than usual; None for those that are not.

    Returns:
      The exit code.

    Raises:
      InputError: if the folder has something else in it than a demonstration, which alone is replaced.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    config = dataclasses.replace(GPU_SIZE if gpu_size else SMALL, **given)
    words = ["anybatch demo", *(["--gpu-size"] if gpu_size else [])]
    words += [f"--{name} {shlex.quote(str(value))}" for name, value in given.items()]
    return job.run(config, command=" ".join(words), resume=resume, is_demo=True)
