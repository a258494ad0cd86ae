"""The exact gradient of any batch, on the memory you have."""

__version__ = "0.8.0"

from anybatch import collectives, distributed, privacy, recipes
from anybatch.errors import (
    AnybatchError,
    CoupledError,
    HeadTooLargeError,
    InputError,
    LargeHeadWarning,
    NotAvailableError,
    NothingFitsError,
    RuleFailedWarning,
    TightMemoryWarning,
)
from anybatch.gradient_noise.noise_scale import NoiseScale, noise_scale
from anybatch.gradients.plan import explain, plan
from anybatch.gradients.value_and_grad import grad, value_and_grad
from anybatch.per_example.clipping import clipped_grad, clipped_value_and_grad
from anybatch.per_example.grads import PerExample, per_example_grads, per_example_norms
from anybatch.planning.plan import Plan
from anybatch.reading.read import read
from anybatch.reading.report import Reading
from anybatch.reading.rules import register_rule
from anybatch.reading.states import NotRowwise
from anybatch.training.batches import Batches
from anybatch.training.checkpoints import CheckpointError
from anybatch.training.loop import Fitted, fit
from anybatch.training.state import Metrics, TrainState
from anybatch.training.step import train_step
from anybatch.verification.verify import DifferentGradientError, Verification, verify

__all__ = [
    "AnybatchError",
    "Batches",
    "CheckpointError",
    "CoupledError",
    "DifferentGradientError",
    "Fitted",
    "HeadTooLargeError",
    "InputError",
    "LargeHeadWarning",
    "Metrics",
    "NoiseScale",
    "NotAvailableError",
    "NotRowwise",
    "NothingFitsError",
    "PerExample",
    "Plan",
    "Reading",
    "RuleFailedWarning",
    "TightMemoryWarning",
    "TrainState",
    "Verification",
    "__version__",
    "clipped_grad",
    "clipped_value_and_grad",
    "collectives",
    "distributed",
    "explain",
    "fit",
    "grad",
    "noise_scale",
    "per_example_grads",
    "per_example_norms",
    "plan",
    "privacy",
    "read",
    "recipes",
    "register_rule",
    "train_step",
    "value_and_grad",
    "verify",
]
