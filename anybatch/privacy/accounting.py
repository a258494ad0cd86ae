"""The epsilon of a number of DP-SGD steps, and the noise for a given epsilon, by the accountants of dp-accounting.

The checks at the head are shared by the folder. The numbers that a guarantee rests on must be Python constants: they
cannot depend on the data.
"""

import bisect
import importlib
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from anybatch.call.checks import one_of, whole_number
from anybatch.errors import InputError, install


def constant(
    name: str,
    value: Any,
    *,
    example: str,
    must: str = "be a number",
    allowed: Callable[[float], bool] = lambda number: True,
    remedy: str = "",
) -> float:
    """A Python number as a float.

    Raises:
      InputError: if it is not a number, is a JAX array, which could depend on the data, or is not `allowed`.
    """
    if isinstance(value, jax.Array):
        raise InputError(
            f"{name} must be a Python number: the guarantee rests on it, so that it must not depend on the data",
            given=f"{name}=an array {value.dtype}{list(value.shape)}"
            + (" under jit" if isinstance(value, jax.core.Tracer) else ""),
            remedy=f"Pass a constant, e.g. {name}={example}.",
        )
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if math.isnan(number):
        raise InputError(
            f"{name} must be a number", given=f"{name}={value!r}", remedy=f"Pass a constant, e.g. {name}={example}."
        )
    if not allowed(number):
        raise InputError(
            f"{name} must {must}", given=f"{name}={value!r}", remedy=remedy or f"For example {name}={example}."
        )
    return number


def positive(name: str, value: Any, *, example: str) -> float:
    """A positive, finite Python number as a float."""
    must = "be positive and finite"
    return constant(name, value, example=example, must=must, allowed=lambda number: 0 < number < math.inf)


def not_negative(name: str, value: Any, *, example: str) -> float:
    """A finite Python number of at least 0, as a float."""
    must = "be finite and not negative"
    return constant(name, value, example=example, must=must, allowed=lambda number: 0 <= number < math.inf)


def probability(name: str, value: Any, *, example: str, or_one: bool = False) -> float:
    """A Python number between 0 and 1, as a float. 0 is not allowed, and 1 only with `or_one`."""
    must = f"be above 0 and {'at most' if or_one else 'below'} 1"
    return constant(
        name, value, example=example, must=must, allowed=lambda number: 0 < number < 1 or (or_one and number == 1)
    )


def largest_sample(num_examples: int, sampling_rate: float, *, failure: float) -> int:
    """The smallest batch size that a Poisson sample exceeds with a probability of at most `failure`.

    It uses Chernoff's bound, which holds for every number of examples: `P(X >= m) <= exp(-n KL(m/n | q))`.
    """

    def is_enough(size: int) -> bool:
        return log_excess_probability(num_examples, sampling_rate, size) <= math.log(failure)

    sizes = range(math.ceil(num_examples * sampling_rate), num_examples)
    return sizes.start + bisect.bisect_left(sizes, True, key=is_enough)


def log_excess_probability(num_examples: int, sampling_rate: float, size: int) -> float:
    """A bound on the logarithm of the probability that a Poisson sample has more than `size` examples."""
    fraction, rate = (size + 1) / num_examples, sampling_rate
    if fraction > 1:
        return -math.inf
    if fraction <= rate:
        return 0.0
    rest = 0.0 if fraction == 1 else (1 - fraction) * math.log((1 - fraction) / (1 - rate))
    return -num_examples * (fraction * math.log(fraction / rate) + rest)


# The relative precision of a computed noise multiplier. It errs on the side of more noise.
PRECISION = 1e-4

# The noise multipliers that are searched. With more noise no gradient is left: if a target needs more, it is the
# accountant's precision that keeps it out of reach.
MOST_NOISE = 1e5
LEAST_NOISE = 0.05

# The orders of Rényi divergences for a first guess.
INTEGER_ORDERS = (*range(2, 64), 128, 256, 512)

# Privacy losses are rounded up to a grid. Its default spacing is that of dp-accounting. The spacing is widened so that
# the losses of one step, and of all steps, have at most these numbers of points: more would take minutes and gigabytes.
SPACING, POINTS_OF_A_STEP, POINTS_IN_ALL = 1e-4, 160_000, 1_000_000

# With a wider grid, or less noise, sampling is not taken into account: epsilon is in the thousands anyway.
WIDEST_SPACING, LEAST_SAMPLED_NOISE = 1.0, 1e-3


def epsilon(
    *, noise_multiplier: float, sampling_rate: float, steps: int, delta: float, accountant: str = "pld"
) -> float:
    """The epsilon of a number of DP-SGD steps: together they are (epsilon, delta)-differentially private.

    Neighbouring datasets differ by one added or removed example. In each step, each example is in the batch with the
    probability `sampling_rate`, independently of all others, and Gaussian noise is added to the sum of clipped
    gradients.

    **An upper bound.** Both accountants round up: the true epsilon is at most the one returned.

    **Seconds at most.** Privacy losses are rounded up to multiples of 1e-4. If that needs more than a million points
    (with little noise, and an epsilon above a few tens), the grid is coarser, which changes epsilon by less than a
    percent. If the noise multiplier is below 0.001, or even a grid of 1.0 needs too many points, the result is the
    epsilon of the same steps without sampling: an upper bound that is far from tight.

    >>> from anybatch import privacy
    >>> round(privacy.epsilon(noise_multiplier=1.3, sampling_rate=150 / 60_000, steps=6_000, delta=1e-5), 3)
    0.64

    Args:
      noise_multiplier: the standard deviation of the noise, divided by the sensitivity. With 0, epsilon is infinite.
      sampling_rate: the probability that an example is in a batch: the expected batch size divided by the number of
        examples.
      steps: the number of steps that were taken.
      delta: the probability with which the bound of epsilon may fail. Choose it well below 1 / (number of examples).
      accountant: `"pld"` for privacy loss distributions, which are tighter except for epsilons of a few hundredths.
        `"rdp"` for Rényi divergences, which are fast and give a somewhat larger epsilon.

    Raises:
      InputError: for numbers that are not allowed, or if dp-accounting is not installed.
    """
    noise = not_negative("noise_multiplier", noise_multiplier, example="1.1")
    rate = probability("sampling_rate", sampling_rate, example="256 / 60_000", or_one=True)
    taken = whole_number("steps", steps, example="1000")
    delta = probability("delta", delta, example="1e-5")
    library = _library(accountant)
    return _spent(library, accountant, noise, rate, taken, delta) if taken else 0.0


def noise_multiplier(
    *, epsilon: float, delta: float, sampling_rate: float, steps: int, accountant: str = "pld"
) -> float:
    """The smallest noise multiplier with which a number of DP-SGD steps stays within an epsilon.

    **Never too little.** With the returned noise, the epsilon by the same accountant is at most the given one. The
    noise is the smallest such to a relative precision of 1e-4. If less than 0.05 would be enough, it is about 0.05.

    >>> from anybatch import privacy
    >>> round(privacy.noise_multiplier(epsilon=1.0, delta=1e-5, sampling_rate=0.01, steps=10_000), 2)
    3.81

    Args:
      epsilon: the largest epsilon that all steps together may have.
      delta: the probability with which the bound of epsilon may fail. Choose it well below 1 / (number of examples).
      sampling_rate: the probability that an example is in a batch: the expected batch size divided by the number of
        examples.
      steps: the number of steps of the complete run.
      accountant: `"pld"` for privacy loss distributions, which are tighter except for epsilons of a few hundredths.
        `"rdp"` for Rényi divergences, which are fast and give somewhat more noise.

    Raises:
      InputError: for numbers that are not allowed, an epsilon that no noise reaches, or if dp-accounting is not
        installed.
    """
    target = positive("epsilon", epsilon, example="3.0")
    delta = probability("delta", delta, example="1e-5")
    rate = probability("sampling_rate", sampling_rate, example="256 / 60_000", or_one=True)
    planned = whole_number("steps", steps, 1, example="1000")
    library = _library(accountant)
    start = 1.0
    if accountant == "pld":
        # Rényi divergences take milliseconds, and need only a little more noise.
        start = _calibrated(library, "rdp of integer orders", start, target, rate, planned, delta) or start
    found = _calibrated(library, accountant, start, target, rate, planned, delta)
    if found is None:
        other = 'accountant="pld"' if accountant == "rdp" else "a larger epsilon or delta"
        raise InputError(
            "epsilon must be within reach of the accountant",
            given=f"epsilon={epsilon!r} at delta={delta!r} after {planned} steps, by accountant={accountant!r}",
            remedy=f"Try {other}, or fewer steps.",
        )
    return found


def _calibrated(
    library: Any, accountant: str, start: float, target: float, rate: float, steps: int, delta: float
) -> float | None:
    """The smallest noise for a target epsilon, searched from `start`; None if there is none."""

    def excess(noise: float) -> float:
        """Positive if the noise is too small. Finite, and nearly linear in the noise."""
        spent = _spent(library, accountant, noise, rate, steps, delta)
        size = abs(math.log(min(max(spent / target, 1e-9), 1e9)))
        return size if spent > target else -size

    less, more = start / 1.25, start
    while (below := excess(more)) > 0:
        less, more = more, 2 * more
        if more > MOST_NOISE:
            return None
    while (above := excess(less)) <= 0:
        more, below, less = less, above, less / 1.25
        if less < LEAST_NOISE:
            return more
    # Regula falsi, kept away from both ends of the interval. Otherwise it would approach from one side only.
    while more - less > PRECISION * less:
        part = min(max(above / (above - below), 0.05), 0.95)
        noise = less + part * (more - less)
        found = excess(noise)
        if found > 0:
            less, above = noise, found
        else:
            more, below = noise, found
    return more


def _spent(library: Any, accountant: str, noise: float, rate: float, steps: int, delta: float) -> float:
    if noise == 0:
        return math.inf
    most = _spent_without_sampling(noise, steps, delta)
    spacing = _spacing(noise, rate, steps) if accountant == "pld" else SPACING
    if spacing > WIDEST_SPACING:
        return most
    one = library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise))
    spent = _fresh(library, accountant, spacing).compose(library.SelfComposedDpEvent(one, steps))
    with np.errstate(over="ignore"):
        found = float(spent.get_epsilon(delta))
    if accountant == "rdp" and found == 0:
        # The divergence is so small that rounding may have made it negative, which the library takes for 0.
        return _spent(library, "pld", noise, rate, steps, delta)
    if accountant == "pld" and math.isinf(found):
        return _least_epsilon(spent, delta, most)
    return found


def _spent_without_sampling(noise: float, steps: int, delta: float) -> float:
    """An upper bound for any sampling rate: the privacy loss of all steps exceeds it with the probability `delta`."""
    mean = math.sqrt(steps) / noise
    return max(mean * (mean / 2 - statistics.NormalDist().inv_cdf(delta)), 0.0)


def _least_epsilon(spent: Any, delta: float, most: float) -> float:
    """The epsilon of a delta, at most `most`, by bisection: the library divides by exp(-epsilon), which overflows."""
    less, more = 0.0, most
    if spent.get_delta(more) > delta:
        return most
    while more - less > 1e-4 * more:
        between = (less + more) / 2
        less, more = (less, between) if spent.get_delta(between) <= delta else (between, more)
    return more


def _spacing(noise: float, rate: float, steps: int) -> float:
    """The spacing of the grid for privacy losses, from an estimate of the range that dp-accounting needs for them.

    For one step, the range ends where the tails of the noise are below exp(-50). For all steps, it is bounded by their
    moments, at the orders that the library uses. Any spacing gives an upper bound of epsilon.
    """
    if noise < LEAST_SAMPLED_NOISE:
        return math.inf
    precision = 1 / min(noise, 1e3) ** 2
    of_a_step = (1 + (rate == 1)) * (9.8 * math.sqrt(precision) + precision / 2)
    order = np.arange(1, 21) / of_a_step
    # The moment of a mixture is at most the mixture of the moments, and the second moment is known exactly.
    absent, second = (math.log1p(-rate), math.log1p(-(rate**2))) if rate < 1 else (-math.inf, -math.inf)
    moment = np.logaddexp(absent, math.log(rate) + order * (order + 1) * precision / 2)
    from_second = order * np.logaddexp(second, 2 * math.log(rate) + precision)
    moment = np.where(order <= 1, np.minimum(moment, from_second), moment)
    in_all = np.min((steps * moment + 36) / order) + 1.8 * of_a_step
    return max(SPACING, of_a_step / POINTS_OF_A_STEP, float(in_all) / POINTS_IN_ALL)


def _fresh(library: Any, accountant: str, spacing: float) -> Any:
    if accountant == "rdp of integer orders":
        # These are enough to start a search. Some of the other orders do not converge, and the library warns of each.
        return library.rdp.RdpAccountant(INTEGER_ORDERS)
    if accountant == "pld":
        return library.pld.PLDAccountant(value_discretization_interval=spacing)
    return library.rdp.RdpAccountant()


def _library(accountant: Any) -> Any:
    one_of("accountant", accountant, ("pld", "rdp"))
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise InputError(
            "The library dp-accounting must be installed to compute epsilon",
            given=f"{type(error).__name__}: {error}",
            remedy=install("privacy"),
        ) from error
