"""`LogRows`: turns the metrics of each step into a row of the log, some steps later, with throughput."""

import collections
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from anybatch.call.checks import is_array, named_leaves
from anybatch.errors import InputError, user_stacklevel
from anybatch.gradient_noise.noise_scale import NoiseScale
from anybatch.training.metrics import Metrics

# The steps that may be in flight on the device before the metrics of the first of them are read.
IN_FLIGHT = 2

# The factor by which older steps count less in the average of the noise, per step.
DECAY = 0.98

# A warning is given after so many skipped steps in a row.
MANY_SKIPPED = 20

# Throughput is averaged over so many seconds.
WINDOW = 2.0


class LogRows:
    """Collects the metrics of steps and returns them as rows two steps later.

    Reading the metrics of a step waits for it. Two more steps are enqueued by then, so the device does not idle.

    Args:
      saved: the property `saved` of an earlier process, to continue its counts.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None) -> None:
        saved = saved or {}
        self._in_flight: collections.deque[tuple[int, Any, int]] = collections.deque()
        self._skipped, self._seconds_before = int(saved.get("skipped", 0)), float(saved.get("seconds", 0.0))
        self._noise = NoiseScale(*saved["noise"]) if saved.get("noise") else None
        self._start = time.perf_counter()
        self._throughput, self._has_started = Throughput(), False
        self._skipped_in_a_row = 0

    @property
    def saved(self) -> dict[str, Any]:
        """The part of this object that goes into a checkpoint, as JSON values."""
        noise = None if self._noise is None else [float(leaf) for leaf in jax.tree.leaves(self._noise)]
        return {"skipped": self._skipped, "seconds": self.seconds, "noise": noise}

    @property
    def seconds(self) -> float:
        """The duration of the run so far, including earlier processes."""
        return self._seconds_before + time.perf_counter() - self._start

    @property
    def noise(self) -> NoiseScale | None:
        """The gradient noise, averaged over recent steps."""
        return self._noise

    def add(self, step: int, metrics: Any, batch: Any) -> None:
        """Adds a step whose metrics may still be computing."""
        scalars = _named_scalars(metrics)
        for leaf in jax.tree.leaves(scalars):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        examples = _num_examples(metrics, batch)
        self._in_flight.append((step, scalars, examples))
        if not self._has_started:  # the first step includes compilation, which must not count
            self._has_started = True
            self._throughput.restart(examples=examples, tokens=_num_tokens(metrics))

    def restart_clock(self) -> None:
        """Called when steps continue after a pause for an evaluation or a checkpoint, which must not count."""
        self._throughput.restart()

    def ready(self) -> Iterator[dict[str, Any]]:
        """The rows of all steps but the last two. Waits for these steps."""
        while len(self._in_flight) > IN_FLIGHT:
            row, has_tokens = self._row(*self._in_flight.popleft())
            yield row | self._rates(self._throughput.since_last_reads(), has_tokens)

    def flush(self) -> list[dict[str, Any]]:
        """The rows of all steps. Waits for the last of them."""
        rows = [self._row(*each) for each in self._in_flight]
        self._in_flight.clear()
        rates = self._throughput.since_restart()
        return [row | self._rates(rates, has_tokens) for row, has_tokens in rows]

    def _row(self, step: int, scalars: dict[str, Any], examples: int) -> tuple[dict[str, Any], bool]:
        """The row of a step without its rates, and whether its metrics count tokens."""
        fetched = jax.device_get(scalars)
        values = {name: fetched[name] for name in scalars}  # device_get sorts the names
        tokens, noise, skipped = values.pop("tokens", None), values.pop("noise", None), values.pop("skipped", None)
        row: dict[str, Any] = {"step": step} | {name: _python_number(value) for name, value in values.items()}
        if skipped is not None:
            self._count_skipped(bool(skipped))
            row["skipped"] = self._skipped
        if noise is not None:
            row["noise_scale"] = self._add_noise(noise)
        self._throughput.add(examples, int(tokens or 0))
        return row, tokens is not None

    def _rates(self, rates: tuple[float, float], has_tokens: bool) -> dict[str, float]:
        named = {"examples_per_second": rates[0]} | ({"tokens_per_second": rates[1]} if has_tokens else {})
        return named | {"seconds": round(self.seconds, 3)}

    def _add_noise(self, noise: NoiseScale) -> float:
        """The averaged noise scale. Computed on the host: on the device it would take a dozen tiny operations."""
        noise = NoiseScale(*(float(leaf) for leaf in jax.tree.leaves(noise)))
        if all(map(math.isfinite, jax.tree.leaves(noise))):
            self._noise = noise if self._noise is None else DECAY * self._noise + noise
        if self._noise is None or not self._noise.steps:
            return math.nan
        if self._noise.gradient_square_sum <= 0:
            return math.inf if self._noise.trace_sum > 0 else math.nan
        return self._noise.trace_sum / self._noise.gradient_square_sum

    def _count_skipped(self, skipped: bool) -> None:
        self._skipped += skipped
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        if self._skipped_in_a_row == MANY_SKIPPED:
            warnings.warn(
                f"The gradients of {MANY_SKIPPED} steps in a row were not finite: nothing is being learned. Try a "
                "smaller learning rate or a smaller loss scale, and check the batches for NaN.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )


class Amount(NamedTuple):
    """Numbers of examples and tokens."""

    examples: int
    tokens: int


class Throughput:
    """Examples and tokens per second, from the times at which the metrics of steps are read.

    The end of a step on the device cannot be observed, but its metrics are read a fixed number of steps later, so the
    times of reading have the same pace. Before an evaluation or a checkpoint, the metrics of all steps are read at
    once, and these times say nothing; instead, the rate is that of all steps since the last restart.
    """

    def __init__(self) -> None:
        self._total = Amount(0, 0)
        self._reads: collections.deque[tuple[float, Amount]] = collections.deque()  # those within the window
        self._restarted: tuple[float, Amount] | None = None
        self._last = (math.nan, math.nan)

    def restart(self, *, examples: int = 0, tokens: int = 0) -> None:
        """Starts the clock, when all steps so far are done.

        Args:
          examples: examples in flight that must not count: those of the first step, which includes compilation.
          tokens: tokens in flight that must not count.
        """
        in_flight = Amount(self._total.examples + examples, self._total.tokens + tokens)
        self._restarted = (time.perf_counter(), in_flight)
        self._reads.clear()

    def add(self, examples: int, tokens: int) -> None:
        """Adds a step that is done."""
        self._total = Amount(self._total.examples + examples, self._total.tokens + tokens)

    def since_last_reads(self) -> tuple[float, float]:
        """The rates over the window, after the metrics of one step were read."""
        now = time.perf_counter()
        while len(self._reads) > 1 and now - self._reads[1][0] > WINDOW:
            self._reads.popleft()
        if self._reads:
            self._last = self._between(self._reads[0], (now, self._total))
        self._reads.append((now, self._total))
        return self._last

    def since_restart(self) -> tuple[float, float]:
        """The rates since the last restart, when all steps are done."""
        if self._restarted is not None and self._total.examples > self._restarted[1].examples:
            self._last = self._between(self._restarted, (time.perf_counter(), self._total))
        return self._last

    def _between(self, then: tuple[float, Amount], now: tuple[float, Amount]) -> tuple[float, float]:
        seconds = max(now[0] - then[0], 1e-9)
        return (now[1].examples - then[1].examples) / seconds, (now[1].tokens - then[1].tokens) / seconds


def evaluation_columns(result: Any) -> dict[str, float]:
    """The result of `evaluate` as columns of the log.

    >>> evaluation_columns({"accuracy": 0.5}), evaluation_columns(2)
    ({'eval.accuracy': 0.5}, {'eval': 2.0})

    Raises:
      InputError: if it is neither a number nor a mapping of numbers.
    """
    named = (
        {f"eval.{name}": value for name, value in result.items()} if isinstance(result, Mapping) else {"eval": result}
    )
    try:
        return {name: float(value) for name, value in named.items()}
    except (TypeError, ValueError):
        raise InputError(
            "evaluate must return a number, or a mapping of numbers",
            given=f"{result!r}",
            remedy='For example return {"accuracy": jnp.mean(predictions == labels)}.',
        ) from None


def _named_scalars(metrics: Any) -> dict[str, Any]:
    """The numbers in the metrics of a step, by name: an `anybatch.Metrics`, or what the user's own step returns."""
    if isinstance(metrics, Metrics):
        ours = {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "aux": metrics.aux}
        scalars = {key: value for name, part in ours.items() for key, value in _scalars(name, part).items()}
        scalars |= _scalars("skipped", metrics.skipped) | _scalars("tokens", metrics.tokens)
        is_one_step = metrics.noise is not None and np.ndim(metrics.noise.steps) == 0
        return scalars | ({"noise": metrics.noise} if is_one_step else {})
    if isinstance(metrics, Mapping):
        # Steps of anybatch.privacy return unprotected numbers under this name. They must not reach a log.
        parts = {str(key): part for key, part in metrics.items() if key != "not_private"}
        return {name: value for key, part in parts.items() for name, value in _scalars(key, part).items()}
    if hasattr(metrics, "_asdict"):
        return _named_scalars(metrics._asdict())
    return _scalars("loss", metrics)


def _scalars(name: str, tree: Any) -> dict[str, Any]:
    found = {}
    for path, leaf in named_leaves(name, tree):
        families = (np.bool_, np.integer, np.floating)
        is_number = (
            is_array(leaf) and leaf.ndim == 0 and any(jax.dtypes.issubdtype(leaf.dtype, each) for each in families)
        )
        if is_number or isinstance(leaf, (int, float)):
            found[path.replace("['", ".").replace("']", "").replace("[", ".").replace("]", "")] = leaf
    return found


def _num_examples(metrics: Any, batch: Any) -> int:
    if isinstance(metrics, Metrics) and isinstance(metrics.examples, int):
        return metrics.examples
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch) if is_array(leaf)]
    return next((shape[0] for shape in shapes if shape), 0)


def _num_tokens(metrics: Any) -> int:
    return metrics.tokens if isinstance(metrics, Metrics) and isinstance(metrics.tokens, int) else 0


def _python_number(value: Any) -> Any:
    value = np.asarray(value)
    return int(value) if value.dtype.kind in "biu" else float(value)
