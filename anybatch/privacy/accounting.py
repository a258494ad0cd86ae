"""What training costs in privacy, and how much noise a budget asks for. The accountants are those of dp-accounting."""

import importlib
import math
from typing import Any

from anybatch.checks import whole
from anybatch.errors import InputError
from anybatch.privacy.numbers import constant, positive, probability

ACCOUNTANTS = ("pld", "rdp")

# The noise multiplier is found to within this part of itself, on the side of more noise.
PRECISION = 1e-4

# Beyond this much noise no gradient is left, and what keeps a target out of reach is the accountant's own precision.
MOST_NOISE = 1e5
LEAST_NOISE = 0.05

# Of Rényi divergences, for a first guess.
WHOLE_ORDERS = (*range(2, 64), 128, 256, 512)


def epsilon(
    *, noise_multiplier: float, sampling_rate: float, steps: int, delta: float, accountant: str = "pld"
) -> float:
    """The epsilon that a number of steps of DP-SGD has spent: with it and `delta`, they are (epsilon, delta)-DP.

    Neighbouring datasets differ by one example that is added or removed. Each step takes each example with the
    probability `sampling_rate`, independently of all others, and adds Gaussian noise to the sum of clipped gradients.

    **An upper bound.** Both accountants round up: the true epsilon is at most the one returned.

    >>> from anybatch import privacy
    >>> round(privacy.epsilon(noise_multiplier=1.3, sampling_rate=150 / 60_000, steps=6_000, delta=1e-5), 3)
    0.64

    Args:
      noise_multiplier: the standard deviation of the noise, divided by the sensitivity. 0 is no noise: infinity.
      sampling_rate: the probability that an example is in a batch: the expected batch size by the number of examples.
      steps: how many steps were taken.
      delta: the probability that is left out, well below one by the number of examples.
      accountant: `"pld"`, privacy loss distributions: the tighter one, but for epsilons of a few hundredths. `"rdp"`,
        Rényi divergences: fast, and somewhat more.

    Raises:
      InputError: for numbers that cannot be, or if dp-accounting is not installed.
    """
    noise = constant("noise_multiplier", noise_multiplier, example="1.1")
    if not 0 <= noise < math.inf:
        raise InputError(
            "noise_multiplier must be finite and not negative",
            given=f"noise_multiplier={noise_multiplier!r}",
            remedy="For example noise_multiplier=1.1.",
        )
    rate = probability("sampling_rate", sampling_rate, example="256 / 60_000", or_one=True)
    taken = whole("steps", steps, example="1000")
    delta = probability("delta", delta, example="1e-5")
    library = _library(accountant)
    if taken == 0:
        return 0.0
    return _spent(library, accountant, noise, rate, taken, delta)


def noise_multiplier(
    *, epsilon: float, delta: float, sampling_rate: float, steps: int, accountant: str = "pld"
) -> float:
    """The least noise with which a number of steps of DP-SGD stays within a budget.

    **Never too little.** The epsilon of the result, by the same accountant, is at most the one asked for. It is the
    least such noise up to a ten-thousandth; for budgets so large that less than 0.05 would do, about 0.05.

    >>> from anybatch import privacy
    >>> round(privacy.noise_multiplier(epsilon=1.0, delta=1e-5, sampling_rate=0.01, steps=10_000), 2)
    3.81

    Args:
      epsilon: the budget.
      delta: the probability that is left out, well below one by the number of examples.
      sampling_rate: the probability that an example is in a batch: the expected batch size by the number of examples.
      steps: how many steps will be taken in all.
      accountant: `"pld"` or `"rdp"`, as for `privacy.epsilon`.

    Raises:
      InputError: for numbers that cannot be, a budget that no noise meets, or if dp-accounting is not installed.
    """
    target = positive("epsilon", epsilon, example="3.0")
    delta = probability("delta", delta, example="1e-5")
    rate = probability("sampling_rate", sampling_rate, example="256 / 60_000", or_one=True)
    planned = whole("steps", steps, 1, example="1000")
    library = _library(accountant)
    start = 1.0
    if accountant == "pld":
        # Rényi divergences are known in milliseconds, and their noise is only a little more.
        start = _calibrated(library, "whole orders", start, target, rate, planned, delta) or start
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
    """The least noise for a target, looked for from a start; None if there is none."""

    def is_enough(noise: float) -> bool:
        return _spent(library, accountant, noise, rate, steps, delta) <= target

    less, more = start / 1.25, start
    while not is_enough(more):
        less, more = more, 2 * more
        if more > MOST_NOISE:
            return None
    while is_enough(less):
        more, less = less, less / 1.25
        if less < LEAST_NOISE:
            return more  # so little that each further step of the search would take minutes
    found: float = library.calibrate_dp_mechanism(
        lambda: _fresh(library, accountant),
        lambda noise: _event(library, noise, rate, steps),
        target_epsilon=target,
        target_delta=delta,
        bracket_interval=library.ExplicitBracketInterval(less, more),
        tol=PRECISION * less,
    )
    return found


def _spent(library: Any, accountant: str, noise: float, rate: float, steps: int, delta: float) -> float:
    spent = _fresh(library, accountant).compose(_event(library, noise, rate, steps))
    return float(spent.get_epsilon(delta))


def _event(library: Any, noise: float, rate: float, steps: int) -> Any:
    one = library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise))
    return library.SelfComposedDpEvent(one, steps)


def _fresh(library: Any, accountant: str) -> Any:
    if accountant == "whole orders":
        # Enough to begin a search with. Of the others, some do not converge, and the library would warn of each.
        return library.rdp.RdpAccountant(WHOLE_ORDERS)
    return library.pld.PLDAccountant() if accountant == "pld" else library.rdp.RdpAccountant()


def _library(accountant: Any) -> Any:
    if accountant not in ACCOUNTANTS:
        raise InputError(
            "accountant must be one of 'pld', 'rdp'",
            given=f"accountant={accountant!r}",
            remedy='Leave it out, or choose accountant="rdp" for speed.',
        )
    try:
        return importlib.import_module("dp_accounting")
    except ImportError as error:
        raise InputError(
            "Privacy is accounted for by the library dp-accounting, which must be installed",
            given=f"{type(error).__name__}: {error}",
            remedy='pip install "anybatch[privacy]"',
        ) from error
