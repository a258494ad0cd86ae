"""The figures of each step, read when they are there: a row of the log."""

import collections
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from anybatch.errors import InputError, user_stacklevel
from anybatch.gradient_noise import NoiseScale
from anybatch.training.state import Metrics
from anybatch.training.throughput import Throughput
from anybatch.trees import is_array, named_leaves

# How many steps may be on their way to the device before the first of them is waited for.
LATE = 2

# How the noise of a step fades out of the average, step by step.
DECAY = 0.98

# So many steps without an update, one after the other, are worth a word.
WORRYING = 20


class Rows:
    """Turns the metrics of steps into rows, two steps later: to wait for one at once would leave the device idle.

    Args:
      kept: what another process has kept (`kept`), to go on with.
    """

    def __init__(self, kept: Mapping[str, Any] | None = None) -> None:
        kept = kept or {}
        self._waiting: collections.deque[tuple[int, Any, int]] = collections.deque()
        self._skipped, self._before = int(kept.get("skipped", 0)), float(kept.get("seconds", 0.0))
        self._noise = NoiseScale(*kept["noise"]) if kept.get("noise") else None
        self._begun = time.perf_counter()
        self._throughput, self._has_begun = Throughput(), False
        self._in_a_row = 0

    @property
    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, fit for JSON."""
        noise = None if self._noise is None else [float(leaf) for leaf in jax.tree.leaves(self._noise)]
        return {"skipped": self._skipped, "seconds": self.seconds, "noise": noise}

    @property
    def seconds(self) -> float:
        """That the run has taken so far, in all its processes."""
        return self._before + time.perf_counter() - self._begun

    @property
    def noise(self) -> NoiseScale | None:
        """Of the gradients, averaged over the last steps."""
        return self._noise

    def add(self, step: int, metrics: Any, batch: Any) -> None:
        """One more step."""
        figures = _figures(metrics)
        for leaf in jax.tree.leaves(figures):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        examples = _num_examples(metrics, batch)
        self._waiting.append((step, figures, examples))
        if not self._has_begun:  # the first step was compiled, which is not to count
            self._has_begun = True
            self._throughput.go_on(examples=examples, tokens=_num_tokens(metrics))

    def go_on(self) -> None:
        """Work goes on from here, after everything before was done."""
        self._throughput.go_on()

    def ready(self) -> Iterator[dict[str, Any]]:
        """The rows of all steps but the last two: waits until they are done."""
        while len(self._waiting) > LATE:
            row, has_tokens = self._row(*self._waiting.popleft())
            yield row | self._rates(self._throughput.at_a_reading(), has_tokens)

    def all_of_them(self) -> list[dict[str, Any]]:
        """The rows of all steps: waits until the last of them is done."""
        rows = [self._row(*each) for each in self._waiting]
        self._waiting.clear()
        rates = self._throughput.when_all_is_done()
        return [row | self._rates(rates, has_tokens) for row, has_tokens in rows]

    def _row(self, step: int, figures: dict[str, Any], examples: int) -> tuple[dict[str, Any], bool]:
        """What a step told, and whether it told of tokens."""
        fetched = jax.device_get(figures)
        read = {name: fetched[name] for name in figures}  # in their own order
        tokens, noise, skipped = read.pop("tokens", None), read.pop("noise", None), read.pop("skipped", None)
        row: dict[str, Any] = {"step": step} | {name: _number(value) for name, value in read.items()}
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
        """The noise scale, averaged: as a float, since a dozen operations on a device would be for one number."""
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
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if self._in_a_row == WORRYING:
            warnings.warn(
                f"The gradients of {WORRYING} steps in a row were not finite: nothing is being learned. A smaller "
                "learning rate or a smaller loss scale may help; so may a look at the batches.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )


def evaluation(result: Any) -> dict[str, float]:
    """What an evaluation found, by the names of its columns.

    >>> evaluation({"accuracy": 0.5}), evaluation(2)
    ({'eval.accuracy': 0.5}, {'eval': 2.0})

    Raises:
      InputError: if it is no number, and no mapping of them.
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


def _figures(metrics: Any) -> dict[str, Any]:
    """The numbers in what a step told, by name: ours, or whatever another step returns."""
    if isinstance(metrics, Metrics):
        own = {"loss": metrics.loss, "gradient_norm": metrics.gradient_norm, "aux": metrics.aux}
        figures = {key: value for name, part in own.items() for key, value in _scalars(name, part).items()}
        figures |= _scalars("skipped", metrics.skipped) | _scalars("tokens", metrics.tokens)
        is_one_step = metrics.noise is not None and np.ndim(metrics.noise.steps) == 0
        return figures | ({"noise": metrics.noise} if is_one_step else {})
    if isinstance(metrics, Mapping):
        # What a step of anybatch.privacy calls not private is for whoever asked for it, and not for a log.
        parts = {str(key): part for key, part in metrics.items() if key != "not_private"}
        return {name: value for key, part in parts.items() for name, value in _scalars(key, part).items()}
    if hasattr(metrics, "_asdict"):
        return _figures(metrics._asdict())
    return _scalars("loss", metrics)


def _scalars(name: str, tree: Any) -> dict[str, Any]:
    found = {}
    for path, leaf in named_leaves(name, tree):
        kinds = (np.bool_, np.integer, np.floating)
        is_number = is_array(leaf) and leaf.ndim == 0 and any(jax.dtypes.issubdtype(leaf.dtype, each) for each in kinds)
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


def _number(value: Any) -> Any:
    value = np.asarray(value)
    return int(value) if value.dtype.kind in "biu" else float(value)
