"""`Metrics`, which a step returns beside the new state, and the meter behind its examples per second."""

import dataclasses
import math
import threading
import time
from typing import Any

import jax

from anybatch.gradient_noise.noise_scale import NoiseScale


@dataclasses.dataclass(frozen=True, eq=False)
class Metrics:
    """The metrics of one step, as a pytree. Its arrays may still be computing when the step returns.

    Args:
      loss: the loss of the full batch, before the update.
      aux: the auxiliary output of the loss, or None.
      gradient_norm: the norm of the full batch's gradient, before the optimizer.
      skipped: True if the update was skipped because the gradient was not finite.
      noise: the gradient noise of this step, with `noise_scale=True`. One step says little: add several up.
      examples: the number of examples in the batch.
      tokens: the number of tokens in the batch, if `train_step` was given `tokens=`.
    """

    loss: Any
    aux: Any
    gradient_norm: Any
    skipped: Any
    noise: NoiseScale | None
    examples: Any
    tokens: Any
    _rates: Any = dataclasses.field(default=None, repr=False)  # a RateSnapshot; not part of the pytree

    @property
    def examples_per_second(self) -> float:
        """Examples per second since a rate was last read. Waits for this step. NaN if unknown, e.g. under `jit`."""
        return math.nan if self._rates is None else self._rates.read(self.loss)[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second since a rate was last read. NaN if tokens are not counted."""
        return math.nan if self._rates is None else self._rates.read(self.loss)[1]


jax.tree_util.register_dataclass(
    Metrics,
    data_fields=[field.name for field in dataclasses.fields(Metrics) if field.name != "_rates"],
    meta_fields=[],
    drop_fields=["_rates"],
)


class RateMeter:
    """Counts the examples and tokens of all steps, and computes rates when they are read.

    A step returns before its results are computed, so the duration of the call says nothing. A rate is therefore
    averaged over all steps between two moments at which a step was known to be done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._examples = self._tokens = 0
        self._since: tuple[float, int, int] | None = None

    def start(self) -> None:
        """Starts the clock, unless it runs already. Called after compilation, which must not count."""
        if self._since is None:
            self._since = (time.perf_counter(), self._examples, self._tokens)

    def count(self, examples: int, tokens: int | None) -> "RateSnapshot":
        """Adds one step. Returns the counts after it."""
        self._examples += examples
        self._tokens += tokens or 0
        return RateSnapshot(self, self._examples, self._tokens, tokens is not None)

    def rates(self, examples: int, tokens: int, result: Any) -> tuple[float, float]:
        """Waits for `result`, then returns examples and tokens per second up to these counts."""
        jax.block_until_ready(result)
        now = time.perf_counter()
        with self._lock:
            if self._since is None or examples <= self._since[1]:
                return math.nan, math.nan
            then, examples_then, tokens_then = self._since
            self._since = (now, examples, tokens)
        seconds = max(now - then, 1e-9)
        return (examples - examples_then) / seconds, (tokens - tokens_then) / seconds


class RateSnapshot:
    """The counts of a `RateMeter` after one step."""

    def __init__(self, meter: RateMeter, examples: int, tokens: int, has_tokens: bool) -> None:
        self._meter, self._counts, self._has_tokens = meter, (examples, tokens), has_tokens
        self._read: tuple[float, float] | None = None

    def read(self, result: Any) -> tuple[float, float]:
        """Examples and tokens per second. A second call returns the same numbers."""
        if self._read is None:
            examples, tokens = self._meter.rates(*self._counts, result)
            self._read = examples, tokens if self._has_tokens else math.nan
        return self._read
