"""The gradient noise scale as a record: how large a batch is worth its cost."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseScale:
    """The noise in a gradient, and the batch size at which it equals the gradient itself.

    A gradient is a mean over units: examples, or whatever the weights of a weighted loss count, such as tokens. With
    `G` the mean over infinitely many and `Sigma` the covariance of the gradient of one, `value` estimates
    `tr(Sigma) / |G|**2` (McCandlish et al., 2018): the critical batch size. In far smaller batches, twice the units
    are worth almost twice the steps; in far larger ones, almost nothing.

    Records add up over steps, and `decay * record` fades them out. **The ratio is that of the averages:** the average
    of ratios is not an estimate of anything, since `gradient_square` comes close to 0 and below it by chance.

    >>> import anybatch as ab
    >>> step = ab.NoiseScale.of_examples(norms=[3.0, 5.0], mean_norm=3.5)  # gradients of 2 examples, and their mean
    >>> print(step)
    noise scale 1.27 (trace 9.5 / squared gradient 7.5; 2 units in 2 microbatches)
    >>> print(step + step)
    noise scale 1.27 (trace 9.5 / squared gradient 7.5; 4 units in 4 microbatches over 2 steps)
    >>> print(ab.NoiseScale.of_examples(norms=[3.0], mean_norm=3.0))
    noise scale undefined: noise shows in the difference of microbatches, and there was only one

    Args:
      trace_sum: the sum over steps of unbiased estimates of `tr(Sigma)`.
      gradient_square_sum: the sum over steps of unbiased estimates of `|G|**2`.
      steps: how many. A step of one microbatch has no estimates, and none of its share is in the sums.
      units: the sum over these steps of the units in their batches.
      microbatches: the sum over all steps of the microbatches that had any units.
    """

    trace_sum: Any
    gradient_square_sum: Any
    steps: Any
    units: Any
    microbatches: Any

    @classmethod
    def empty(cls, dtype: Any = jnp.float32) -> "NoiseScale":
        """The sum of no steps, to begin with."""
        return cls(*(jnp.zeros((), dtype) for _ in dataclasses.fields(cls)))

    @classmethod
    def of_microbatches(cls, norms: Any, units: Any, mean_norm: Any) -> "NoiseScale":
        """From gradients that were computed elsewhere.

        Args:
          norms: for each microbatch, the norm of the sum of the gradients of its units.
          units: for each microbatch, how many it has. Those without any do not count.
          mean_norm: the norm of the mean over the units of all microbatches.
        """
        norms, units = jnp.asarray(norms), jnp.asarray(units)
        if norms.ndim != 1 or norms.shape != units.shape:
            raise InputError(
                "norms and units must have one number for each microbatch",
                given=f"shapes {norms.shape} and {units.shape}",
                remedy="For example NoiseScale.of_microbatches(norms=[8.0, 6.5], units=[4, 3], mean_norm=2.0).",
            )
        dtype = jnp.float64 if norms.dtype == jnp.float64 else jnp.float32
        norms, units, mean_norm = norms.astype(dtype), units.astype(dtype), jnp.asarray(mean_norm).astype(dtype)
        has_units = units > 0
        number, square = jnp.sum(units), mean_norm**2
        divisors = jnp.where(has_units, units, jnp.ones_like(units))
        squares = jnp.sum(jnp.where(has_units, norms**2 / divisors, jnp.zeros_like(norms)))
        scatter = squares / jnp.maximum(number, jnp.finfo(dtype).tiny) - square
        return cls.of_step(scatter, square, number, jnp.sum(has_units.astype(dtype)))

    @classmethod
    def of_examples(cls, norms: Any, mean_norm: Any, weights: Any = None) -> "NoiseScale":
        """From the norms of the gradients of single examples: the least uncertain estimate that a batch allows.

        Args:
          norms: for each example, the norm of its gradient; of a weighted loss, of the gradient of its total.
          mean_norm: the norm of the mean, which is the sum divided by the number of examples, or by all weights.
          weights: for each example, its weight. By default 1.
        """
        norms = jnp.asarray(norms)
        return cls.of_microbatches(norms, jnp.ones_like(norms) if weights is None else weights, mean_norm)

    @classmethod
    def of_step(cls, scatter: Any, square: Any, units: Any, microbatches: Any) -> "NoiseScale":
        """From sums over `K` microbatches of one step.

        Microbatch `k` has `n_k` of the `N` units and adds `c_k` to the gradient `g`, the sum of all `c_k`.

        Args:
          scatter: the sum of `|c_k|**2 * N / n_k`, less `|g|**2`; what has no noise may be left out of both.
          square: `|g|**2`.
          units: `N`.
          microbatches: `K`, of those that have any units.
        """
        tells = (microbatches > 1) & (units > 0)
        # Never negative but for rounding. NaN stays NaN.
        variance = jnp.maximum(scatter, jnp.zeros_like(scatter)) / jnp.where(
            tells, microbatches - 1, jnp.ones_like(microbatches)
        )
        zero = jnp.zeros_like(variance)
        return cls(
            trace_sum=jnp.where(tells, variance * units, zero),
            gradient_square_sum=jnp.where(tells, square - variance, zero),
            steps=jnp.where(tells, jnp.ones_like(zero), zero),
            units=jnp.where(tells, units, zero),
            microbatches=microbatches,
        )

    @property
    def trace(self) -> Any:
        """`tr(Sigma)`, the variance of the gradient of one unit, summed over its entries. NaN if nothing tells."""
        return self._average(self.trace_sum)

    @property
    def gradient_square(self) -> Any:
        """`|G|**2`, of the gradient without noise. An unbiased estimate, so that it may come out negative."""
        return self._average(self.gradient_square_sum)

    @property
    def value(self) -> Any:
        """The critical batch size, in units.

        NaN if nothing tells: one microbatch, no units, a gradient that is not finite or is 0. Infinite if the noise
        leaves nothing of the gradient to be seen: average over more steps.
        """
        trace, square = self.trace, self.gradient_square
        drowned = jnp.where(trace > 0, jnp.full_like(trace, jnp.inf), jnp.full_like(trace, jnp.nan))
        seen = square > 0
        ratio = trace / jnp.where(seen, square, jnp.ones_like(square))
        return jnp.where(seen, ratio, jnp.where(jnp.isnan(square), jnp.full_like(trace, jnp.nan), drowned))

    @property
    def is_defined(self) -> Any:
        """Whether `value` is a finite number."""
        return jnp.isfinite(self.value)

    @property
    def why_undefined(self) -> str:
        """Why `value` is not a finite number; empty if it is. Not under `jit`."""
        if self.is_defined:
            return ""
        if self.steps == 0:
            if self.microbatches == 0:
                return "there were no units"
            return "noise shows in the difference of microbatches, and there was only one"
        if np.isnan(self.trace) or np.isnan(self.gradient_square):
            return "a gradient is not finite, or terms of single examples do not make up the loss (exact=True)"
        if self.trace > 0:
            return "the noise hides the gradient, whose estimated square is not positive; average over more steps"
        return "the gradient is 0, and so is its noise"

    def __add__(self, other: Any) -> "NoiseScale":
        if not isinstance(other, NoiseScale):
            return NotImplemented
        return NoiseScale(*(one + more for one, more in zip(self._leaves, other._leaves, strict=True)))

    def __radd__(self, other: Any) -> "NoiseScale":
        return self if isinstance(other, int) and other == 0 else NotImplemented  # where sum() begins

    def __mul__(self, factor: Any) -> "NoiseScale":
        return NoiseScale(*(leaf * factor for leaf in self._leaves))

    __rmul__ = __mul__

    @property
    def _leaves(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def _average(self, total: Any) -> Any:
        steps = jnp.asarray(self.steps)
        none = steps == 0
        average = jnp.asarray(total) / jnp.where(none, jnp.ones_like(steps), steps)
        return jnp.where(none, jnp.full_like(average, jnp.nan), average)

    def __str__(self) -> str:
        if any(isinstance(leaf, jax.core.Tracer) or np.ndim(leaf) for leaf in self._leaves):
            return repr(self)
        counts = f"{self.units:.6g} units in {self.microbatches:.6g} microbatches"
        if self.steps != 1:
            counts += f" over {self.steps:.6g} steps"
        parts = f"trace {self.trace:.3g} / squared gradient {self.gradient_square:.3g}; {counts}"
        why = self.why_undefined
        if not why:
            return f"noise scale {self.value:.3g} ({parts})"
        return f"noise scale undefined: {why}" + (f" ({parts})" if self.steps > 0 else "")


jax.tree_util.register_dataclass(
    NoiseScale, data_fields=[field.name for field in dataclasses.fields(NoiseScale)], meta_fields=[]
)
