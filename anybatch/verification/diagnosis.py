"""Finds out why a route differs from the full batch, and what to type instead.

Each known cause has a test: a computation whose result only that cause explains. `diagnose` runs the tests in the order
of `TESTS` and returns the first explanation.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.arguments import ROLES, Arrays
from anybatch.call.checks import is_array, is_key
from anybatch.reading.read import read
from anybatch.reading.report import LossKind, Reading
from anybatch.verification.comparison import LeafDifference, Outcome, RouteOptions, Trial, difference

Differences = Mapping[int, Sequence[LeafDifference]]  # for each microbatch size that failed, leaf by leaf

ACROSS = "Leave reduction out: then such a loss is computed exactly, too, with a second pass where one is needed."
FULL_BATCH = "pass microbatch_size=None, which computes the full batch without microbatches"


def diagnose(trial: Trial, failed: Differences, given: Trial) -> str:
    """Why the routes differ from the full batch, and what to type instead.

    `trial` is in the precision in which the routes were compared, `given` in the given dtypes.
    """
    case = _Case(trial, failed, given)
    for test, reductions in TESTS.items():
        # A test may not apply to this loss or batch, and fail. Then the next one is asked.
        with contextlib.suppress(Exception):
            if case.declared in reductions and (found := test(case)) is not None:
                return found
    return (
        "No known cause explains the difference. If the loss gives the same result twice, this is a bug in anybatch: "
        "please report it with the loss."
    )


def diagnose_rounding(trial: Trial, failed: Mapping[RouteOptions, Sequence[LeafDifference]]) -> str:
    """The same for routes that agree in float64 and differ in the given dtypes."""
    route, worst = max(
        ((route, leaf) for route, leaves in failed.items() for leaf in leaves), key=lambda pair: pair[1].difference
    )
    text = (
        f"Rounding: in float64 the gradients agree. In {trial.dtype.name}, {worst.name} is off by "
        f"{worst.difference:.1e}, and {worst.tolerance:.1e} is expected."
    )
    in_float32 = trial.with_options(accumulator_dtype=jnp.float32)
    if trial.options["accumulator_dtype"] != jnp.float32 and all(leaf.ok for leaf in in_float32.compare(route)):
        return f"{text}\nThe cause is the sum over the microbatches: with accumulator_dtype=jnp.float32 it agrees."
    return f"{text}\nCompute the loss in a wider dtype, or take larger microbatches."


@dataclasses.dataclass(frozen=True)
class _Case:
    """A failed comparison, and what the tests ask about it."""

    trial: Trial
    failed: Differences
    given: Trial

    @property
    def declared(self) -> str:
        return self.trial.options["reduction"]

    @functools.cached_property
    def failed_names(self) -> list[str]:
        return list(dict.fromkeys(leaf.name for leaves in self.failed.values() for leaf in leaves if not leaf.ok))

    @property
    def only_aux_failed(self) -> bool:
        """True if the value and the gradient agree, and aux does not."""
        first_aux = self.trial.num_gradients + 1  # after the gradients and the value
        return set(self.failed_names).isdisjoint(self.trial.names[:first_aux])

    @property
    def third(self) -> int:
        """A microbatch size that gives three microbatches, or two for few examples."""
        return math.ceil(self.trial.num_examples / 3)

    def agrees(self, reduction: str) -> bool:
        """True if the failed sizes agree once this reduction is declared. Only such a reduction is advised."""
        aux_reduction = None if reduction == "infer" else self.trial.options["aux_reduction"]
        trial = self.trial.with_options(reduction=reduction, aux_reduction=aux_reduction)
        try:
            return all(leaf.ok for size in self.failed for leaf in trial.compare(size))
        except Exception:  # the loss cannot be computed with this reduction
            return False

    @functools.cached_property
    def reading_agrees(self) -> bool:
        return self.declared != "infer" and self.agrees("infer")

    @property
    def or_read(self) -> str:
        """The advice to leave the reduction out, if that was tried and agrees; else empty."""
        return ", or leave reduction out: then anybatch reads the loss itself" if self.reading_agrees else ""

    @property
    def across(self) -> str:
        """The advice for a loss that looks across examples."""
        differs = "Without reduction it differs, too, which is a bug in anybatch: please report it."
        return ACROSS if self.reading_agrees else f"{differs} Until then {FULL_BATCH}."

    def differs_with(self, arrays: Arrays) -> str | None:
        """The name of a failed leaf that changes in the full batch itself with these arrays; None if none does."""
        trial = self.trial
        moved = trial.differences(trial.full_batch(arrays), trial.expected)
        for index, name in enumerate(trial.names):
            if name in self.failed_names and moved[index] > trial.tolerance(index, max(self.failed)):
                return name
        return None

    def flat(self, outcome: Outcome) -> np.ndarray:
        """The gradient and the value in one vector. Of very large leaves only some entries are taken."""
        leaves = outcome[: self.trial.num_gradients + 1]
        return np.concatenate([leaf.reshape(-1)[:: math.ceil(leaf.size / 2**16) or 1] for leaf in leaves])

    @functools.cached_property
    def reading(self) -> Reading:
        given = self.given
        options = {name: given.options[name] for name in (*ROLES, "has_aux")}
        return read(given.loss, *given.args, **options, **given.kwargs)


def _ill_conditioned(case: _Case) -> str | None:
    """Tests whether a change of the inputs in their last digit changes the full batch as much."""
    trial = case.trial
    indices = {name: index for index, name in enumerate(trial.names)}
    pairs = [(size, leaf) for size, leaves in case.failed.items() for leaf in leaves]
    if any(leaf.difference > trial.tolerance(indices[leaf.name], size, capped=False) for size, leaf in pairs):
        return None
    name = max(case.failed_names, key=lambda name: trial.condition[indices[name]])
    moves = trial.condition[indices[name]] * trial.eps
    return (
        f"Rounding: this gradient is not determined in {trial.dtype.name}. If the inputs change in their last digit, "
        f"{name} of the full batch changes by {moves:.1e} of its size, without any microbatches.\n"
        "Look for a difference of large numbers in the loss, or verify at other parameters."
    )


def _only_aux(case: _Case) -> str | None:
    """Tests whether only aux differs, and agrees with another aux_reduction."""
    trial, name = case.trial, case.failed_names[0]
    if not case.only_aux_failed:
        return None
    declared = list(trial.declared_aux)
    position = trial.names.index(name) - trial.num_gradients - 1
    for candidate in ("mean", "sum"):
        names = [*declared[:position], candidate, *declared[position + 1 :]]
        aux_reduction = jax.tree.unflatten(jax.tree.structure(trial.aux_types), [other or None for other in names])
        other = trial.with_options(aux_reduction=aux_reduction)
        with contextlib.suppress(Exception):  # integers have no mean
            if next(leaf for leaf in other.compare(max(case.failed)) if leaf.name == name).ok:
                return (
                    f"The gradient is right, and {name} is not: it is a {candidate} over the examples, and "
                    f'aux_reduction="{declared[position]}" was declared. With aux_reduction="{candidate}" it agrees.\n'
                    f"Pass that for this leaf{case.or_read}."
                )
    return None


def _total_or_weight_is_no_sum(case: _Case) -> str | None:
    """Tests whether the totals and weights of the microbatches add up to those of the batch."""
    trial = case.trial
    run = trial.compiled(trial.fun)

    def outputs(start: int, stop: int) -> np.ndarray:
        result = run(trial.examples(start, stop))
        return np.asarray([float(output) for output in (result[0] if trial.options["has_aux"] else result)])

    full = outputs(0, trial.num_examples)
    added = np.sum([outputs(start, start + case.third) for start in range(0, trial.num_examples, case.third)], 0)
    for name, one, other in zip(("total", "weight"), full, added, strict=True):
        if difference(np.asarray(other), np.asarray(one)) > math.sqrt(trial.eps):
            return (
                f'With reduction="weighted" the loss must return two sums over the examples. Its {name} is not one: '
                f"it is {one:.6g} for the batch, and {other:.6g} added up over microbatches of {case.third}.\n"
                "Return e.g. (jnp.sum(losses * mask), jnp.sum(mask)): no mean, and no term that does not depend on the "
                f"examples, such as a regulariser{case.or_read}."
            )
    return None


def _another_reduction(case: _Case) -> str | None:
    """Tests whether it agrees as a sum instead of a mean, or as a mean instead of a sum."""
    other = {"mean": "sum", "sum": "mean"}[case.declared]
    if not case.agrees(other):
        return None
    factor, large = "", "large" if other == "mean" else "small"
    for size in case.failed:
        number = math.ceil(case.trial.num_examples / size)  # of microbatches
        if _is_multiple(case, size, number if other == "mean" else 1 / number):
            factor = (
                f"With microbatch_size={size} the gradient is {number} times too {large}, for {number} microbatches. "
            )
            break
    return (
        f'The loss is a {other} over its examples, and reduction="{case.declared}" was declared. {factor}'
        f'With reduction="{other}" it agrees.\nPass reduction="{other}"{case.or_read}.'
    )


def _randomness(case: _Case) -> str | None:
    """Tests whether the full batch itself changes with the key."""
    arrays = case.trial.arrays
    if not case.trial.is_random:
        return None
    other_keys = [jax.random.fold_in(key, 1) for key in arrays.keys]
    if other_keys and (name := case.differs_with(arrays._replace(keys=other_keys))):
        return (
            f"Randomness: {name} of the full batch depends on the key, and with rng_argnums each microbatch draws its "
            "own numbers. So the results agree in distribution only, which one draw cannot show.\n"
            "To draw the numbers of the full batch, leave reduction and rng_argnums out, and verify that. To verify "
            "the rest, switch dropout off."
        )
    shared = [jax.random.fold_in(leaf, 1) if is_key(leaf) else leaf for leaf in arrays.rest]
    if case.declared != "infer" and (name := case.differs_with(arrays._replace(rest=shared))):
        return (
            f"Randomness: {name} of the full batch depends on a key, and every microbatch gets that key, so that all "
            "draw the same numbers.\n"
            "Leave reduction out: then each microbatch draws its rows of the numbers of the full batch. Or name the "
            "key in rng_argnums, so that each microbatch draws its own numbers: the results then agree in distribution "
            "only."
        )
    return None


def _counted_for_each_microbatch(case: _Case) -> str | None:
    """Tests whether each additional microbatch adds the same to a declared sum."""
    trial, examples = case.trial, case.trial.num_examples
    if examples < 3:
        return None
    one, two, three = map(case.flat, (trial.expected, trial.route(math.ceil(examples / 2)), trial.route(case.third)))
    if not np.any(two != one) or difference(three - two, two - one) > math.sqrt(trial.eps):
        return None
    return (
        "A term that does not depend on the examples, such as a regulariser, is counted once for each microbatch: with "
        "three microbatches the result is off by twice as much as with two.\n"
        f'Add its gradient outside, or make the loss a mean and pass reduction="mean"{case.or_read}.'
    )


def _unequal_weights(case: _Case) -> str | None:
    """Tests whether the full batch is a mean of its microbatches with weights other than their numbers of examples."""
    trial, size = case.trial, case.third
    weights = _weights_of_microbatches(case)
    if weights is None:
        return None
    starts = np.arange(0, trial.num_examples, size)
    shares = np.minimum(size, trial.num_examples - starts) / trial.num_examples
    close = 100 * math.sqrt(trial.eps)
    if abs(weights.sum() - 1) > close or weights.min() < -close or np.abs(weights - shares).max() < close:
        return None
    return _mean_of_means(
        case,
        f"in the full batch, {len(starts)} microbatches have the weights {_list(weights)}, and they have "
        f"{_list(shares)} of the examples",
    )


def _hidden_key(case: _Case) -> str | None:
    """Tests whether a declared loss draws random numbers, and no argument is a key."""
    arrays = case.trial.arrays
    leaves = [*arrays.keys, *arrays.rest, *arrays.batch]
    has_key = any(is_key(leaf) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves)
    if has_key or not case.trial.is_random:
        return None
    return (
        "Randomness: the loss draws random numbers from a key that is not among its arguments, so that every "
        "microbatch draws the same numbers.\n"
        "Pass the key as an argument, and leave reduction out or name the key in rng_argnums."
    )


def _as_read(case: _Case) -> str | None:
    """Compares the declaration with how anybatch reads the loss."""
    reading = case.reading
    if case.declared == "infer":
        # Wrong advice would be worse than none, so each declaration is tried before it is advised.
        agrees = [other for other in ("mean", "sum") if reading.separable and case.agrees(other)]
        until = f'declare reduction="{agrees[0]}", with which it agrees' if agrees else FULL_BATCH
        return (
            f"anybatch reads this loss as: {reading.kind}. Its gradient should agree with the full batch, so this is a "
            f"bug in anybatch: please report it. Until then {until}."
        )
    if reading.blame:
        lines = [f"    {blame.place} ({blame.primitive}): {blame.why}" for blame in reading.blame]
        title = f"The loss looks across examples, so it is not a {case.declared} over them:"
        return "\n".join([title, *dict.fromkeys(lines), case.across])
    if not case.reading_agrees:
        return None
    if reading.form.contains(LossKind.RATIO):
        return _mean_of_means(case, f"the loss is a {reading.kind}")
    return (
        f'The loss is: {reading.kind}. That is not what reduction="{case.declared}" declares.\n'
        "Leave reduction out: then it agrees."
    )


def _constant_factor(case: _Case) -> str | None:
    """Tests whether the gradient is a multiple of that of the full batch."""
    factors, expected = [], case.flat(case.trial.expected)
    for size in case.failed:
        factor = float(np.vdot(expected, case.flat(case.trial.route(size))).real / np.vdot(expected, expected).real)
        if abs(factor - 1) < math.sqrt(case.trial.eps) or not _is_multiple(case, size, factor):
            return None
        factors.append(f"{factor:.6g} with microbatch_size={size}")
    advice = "Leave reduction out: then anybatch reads the loss" if case.reading_agrees else FULL_BATCH.capitalize()
    return (
        f"The gradient is that of the full batch times {', '.join(factors)}. The loss divides or multiplies by a "
        f"number of examples, other than reduction={case.declared!r} declares.\n{advice}."
    )


def _no_combination(case: _Case) -> str | None:
    """Tests whether the gradient of the full batch is no linear combination of those of its microbatches."""
    if _weights_of_microbatches(case) is not None:
        return None
    return (
        "The loss looks across examples: no weights combine the gradients of its microbatches to that of the full "
        f"batch.\n{case.across}"
    )


def _aux_of_another_kind(case: _Case) -> str | None:
    """Tests whether only aux differs, after no aux_reduction made it agree."""
    if not case.only_aux_failed:
        return None
    return (
        f"The gradient is right, and {case.failed_names[0]} is not: over the examples it is neither a mean nor a sum.\n"
        f"Return the sums that it is computed from, and compute it outside{case.or_read}."
    )


PLAIN = ("mean", "sum")
DECLARED = (*PLAIN, "weighted")
ANY = (*DECLARED, "infer")

# For each test, the reductions that it applies to. The order matters: a later test may take an earlier cause for its
# own.
TESTS = {
    _ill_conditioned: ANY,
    _only_aux: DECLARED,
    _total_or_weight_is_no_sum: ("weighted",),
    _another_reduction: PLAIN,
    _randomness: ANY,
    _aux_of_another_kind: DECLARED,
    _counted_for_each_microbatch: ("sum",),
    _unequal_weights: PLAIN,
    _hidden_key: DECLARED,
    _as_read: ANY,
    _constant_factor: ANY,
    _no_combination: PLAIN,
}


def _mean_of_means(case: _Case, evidence: str) -> str:
    return (
        f"A mean of means over unequal counts: {evidence}. The loss divides by something other than the number of "
        "examples, such as the number of tokens or of unmasked entries.\n"
        f'Return (total, weight) and pass reduction="weighted"{case.or_read}.'
    )


def _weights_of_microbatches(case: _Case) -> np.ndarray | None:
    """The weights with which the gradients of the microbatches add up to that of the batch; None if there are none."""
    trial, examples = case.trial, case.trial.num_examples
    random = np.random.default_rng(0)
    pieces = [trial.examples(start, min(start + case.third, examples)) for start in range(0, examples, case.third)]
    equations = max(1, case.flat(trial.expected).size)
    # The weights do not depend on the parameters. So with few parameters, several points give enough equations.
    points = [trial.arrays.wrt]
    while len(points) * equations < 4 * len(pieces):
        points.append([_scaled(leaf, random) for leaf in points[0]])

    def gradients(arrays: Arrays) -> np.ndarray:
        return np.concatenate([case.flat(trial.full_batch(arrays._replace(wrt=wrt))) for wrt in points])

    matrix, full = np.stack([gradients(piece) for piece in pieces], 1), gradients(trial.arrays)
    weights, _, rank, _ = np.linalg.lstsq(matrix, full, rcond=None)
    fits = rank == len(pieces) and difference(matrix @ weights, full) < math.sqrt(trial.eps)
    return weights.real if fits else None


def _is_multiple(case: _Case, size: int, factor: float) -> bool:
    close = max(case.trial.tolerance(index, size) for index in range(case.trial.num_gradients + 1))
    return difference(case.flat(case.trial.route(size)), factor * case.flat(case.trial.expected)) <= close


def _scaled(leaf: Any, random: np.random.Generator) -> Any:
    factor = random.uniform(0.5, 1.5, np.shape(leaf))
    return np.asarray(np.asarray(leaf) * factor, leaf.dtype) if is_array(leaf) else leaf * float(factor)


def _list(numbers: np.ndarray) -> str:
    return ", ".join(f"{number:.3f}" for number in numbers)
