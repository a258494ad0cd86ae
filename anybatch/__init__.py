"""The exact gradient of any batch, in the memory that you have.

Names load when they are first used: `import anybatch` itself imports no JAX.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.8.0"

# The public names, by capability, and the module that defines each.
_HOMES = {
    # Gradients of a batch.
    "value_and_grad": "gradients.value_and_grad",
    "grad": "gradients.value_and_grad",
    # Any function of a batch.
    "map_batch": "functions.map_batch",
    "hvp": "functions.curvature",
    "ggn_product": "functions.curvature",
    "fisher_diagonal": "functions.curvature",
    "HostBatch": "call.host_batch",
    # How a loss uses its batch.
    "read": "reading.read",
    "Reading": "reading.report",
    "register_rule": "reading.rules",
    "NotRowwise": "reading.states",
    # Which strategy computes the gradient, and why.
    "plan": "gradients.plan",
    "explain": "gradients.plan",
    "Plan": "planning.plan",
    # Every strategy against the full batch.
    "verify": "verification.verify",
    "Verification": "verification.verify",
    "DifferentGradientError": "verification.verify",
    # A loop or step of the user against the full batch.
    "audit": "auditing.audit",
    "Audit": "auditing.audit",
    # Gradients of single examples.
    "per_example_grads": "per_example.grads",
    "per_example_norms": "per_example.grads",
    "PerExample": "per_example.grads",
    "clipped_grad": "per_example.clipping",
    "clipped_value_and_grad": "per_example.clipping",
    # Gradient noise.
    "noise_scale": "gradient_noise.noise_scale",
    "NoiseScale": "gradient_noise.noise_scale",
    # Training.
    "train_step": "training.step",
    "TrainState": "training.state",
    "Metrics": "training.step",
    "fit": "training.loop",
    "Fitted": "training.loop",
    "Batches": "training.sources",
    "CheckpointError": "training.checkpoints",
    # Caches in this process.
    "clear_caches": "call.caches",
    # Errors and warnings.
    "AnybatchError": "errors",
    "CoupledError": "errors",
    "HeadTooLargeError": "errors",
    "InputError": "errors",
    "LargeHeadWarning": "errors",
    "NotAvailableError": "errors",
    "NothingFitsError": "errors",
    "RuleFailedWarning": "errors",
    "TightMemoryWarning": "errors",
}
_MODULES = ("collectives", "distributed", "privacy", "recipes", "testing")

__all__ = ["__version__", *_MODULES, *_HOMES]

if TYPE_CHECKING:  # what type checkers and editors see
    from anybatch import collectives, distributed, privacy, recipes, testing
    from anybatch.auditing.audit import Audit, audit
    from anybatch.call.caches import clear_caches
    from anybatch.call.host_batch import HostBatch
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
    from anybatch.functions.curvature import fisher_diagonal, ggn_product, hvp
    from anybatch.functions.map_batch import map_batch
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
    from anybatch.training.checkpoints import CheckpointError
    from anybatch.training.loop import Fitted, fit
    from anybatch.training.sources import Batches
    from anybatch.training.state import TrainState
    from anybatch.training.step import Metrics, train_step
    from anybatch.verification.verify import DifferentGradientError, Verification, verify


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"anybatch.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'anybatch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"anybatch.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
