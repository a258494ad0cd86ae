"""Finds out which mistake a candidate makes, by computing what known mistakes would give.

A candidate that accumulates gives a weighted sum of the gradients of its microbatches. So for each way to divide the
batch (a *layout*) the weights are computed by least squares, and if they explain the candidate to rounding, they are
compared with the weights that the full batch has. Most mistakes can be read from the two.
"""

import contextlib
import dataclasses
import enum
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.auditing.bench import Bench, LeafAudit, Numbers, as_float64, gap, largest, trace_program
from anybatch.auditing.candidates import StepForm
from anybatch.auditing.case import EXACT, OTHER_KEYS, SAME_KEYS, Case, Gradient, Layout, in_order, listed
from anybatch.reading.report import LossKind

# How many keys are drawn, to compare a candidate with the full batch on average, and for how long.
FEWEST_KEYS, MOST_KEYS, SECONDS = 32, 4096, 10.0


class Cause(enum.StrEnum):
    """The kinds of mistakes that `audit` can name."""

    NUMBER_OF_MICROBATCHES = enum.auto()  # off by that factor: a sum for a mean, or a mean for a sum
    MEAN_OF_MEANS = enum.auto()  # microbatches have other weights than in the full batch
    SAME_RANDOM_NUMBERS = enum.auto()  # every microbatch draws the same numbers, such as one dropout mask
    OTHER_RANDOM_NUMBERS = enum.auto()  # it differs only in the numbers that are drawn
    BATCH_STATISTICS = enum.auto()  # the loss looks across examples, and a microbatch sees only its own
    NARROW_ACCUMULATOR = enum.auto()  # sums in bfloat16 or float16
    PSUM_TWICE = enum.auto()  # off by the number of devices
    PSUM_MISSING = enum.auto()  # the gradient of one shard
    DROPPED_REMAINDER = enum.auto()  # the last examples do not count
    OPTIMIZER_PER_MICROBATCH = enum.auto()  # the optimizer is called for every microbatch
    LAST_MICROBATCH = enum.auto()  # only one microbatch counts
    SCALE = enum.auto()  # another constant factor
    CLIPPED = enum.auto()  # clipped for each microbatch, or at all
    NOT_TRAINED = enum.auto()  # the gradient of some leaves is zero
    OPTIMIZER_STATE = enum.auto()  # the parameters are right, and the optimizer's state is not
    VALUE_ONLY = enum.auto()  # the gradient is right, and the value or aux is not
    UNKNOWN = enum.auto()


@dataclasses.dataclass(frozen=True)
class Finding:
    """A mistake, in words, and the microbatch size if the evidence shows it."""

    kind: Cause
    text: str
    microbatch_size: int | None = None


def diagnose(bench: Bench, actual: Numbers, leaves: Sequence[LeafAudit], size: int | None) -> list[Finding]:
    """The mistakes of a candidate whose result differs. The first one names its kind."""
    case = Case(bench, actual, leaves, size)
    for test in TESTS:
        # A test may not apply to this loss or batch, and fail. Then the next one is asked.
        with contextlib.suppress(Exception):
            if found := test(case):
                return found if isinstance(found, list) else [found]
    return [_unknown(case)]


def changing(*, is_right_at_first: bool = False) -> Finding:
    """The finding for a candidate that gives another result each time."""
    if is_right_at_first:
        return Finding(
            Cause.UNKNOWN,
            "The first call is right. The second one, with the same arguments, gives something else, as in the table.\n"
            "Look for an accumulator that still holds the gradients of the call before. Set it to zero before the "
            "first microbatch of each step.",
        )
    return Finding(
        Cause.UNKNOWN,
        "It differs, and not in the same way each time, so no cause can be computed.\n"
        "Look for a random generator or a state outside its arguments, such as np.random, a counter, a cache, or an "
        "accumulator that is not set to zero. Pass it as an argument, and audit again.",
    )


def diagnose_rounding(
    given: Bench, double: Bench, actual: Numbers, leaves: Sequence[LeafAudit], notes: list[str]
) -> list[Finding]:
    """The same for a candidate that agrees in float64 and may differ in the given dtypes."""
    wrong = [leaf for leaf in leaves if not leaf.ok]
    narrow = double.program.narrow_sums or _narrow_in(given)
    if not wrong:
        found = _narrow_sums(given, double, actual, narrow) if narrow else []
        if found is None:
            notes.append(
                f"It adds arrays of the shape of a parameter in {' and '.join(narrow)}. How many digits that costs "
                "could not be measured. Accumulators should be float32."
            )
        return found or []
    worst = max(wrong, key=lambda leaf: leaf.difference / leaf.allowed)
    sums = f" It adds up gradients in {' and '.join(narrow)}." if narrow else ""
    return [
        Finding(
            Cause.NARROW_ACCUMULATOR,
            f"Too few digits: in float64 the candidate is right. In its own dtypes {worst.name} is off by "
            f"{worst.difference:.1e}, and {worst.allowed:.1e} is the rounding to expect.{sums}\n"
            "Make the accumulators float32: jnp.zeros(leaf.shape, jnp.float32).",
        )
    ]


def _narrow_in(bench: Bench) -> tuple[str, ...]:
    return trace_program(bench.candidate, bench.inputs).narrow_sums


def _narrow_sums(given: Bench, double: Bench, actual: Numbers, narrow: Sequence[str]) -> list[Finding] | None:
    """Tests whether narrow sums cost more digits than the gradients of the microbatches have. None if it cannot.

    The errors of single entries do not show it, since the gradients themselves are narrow. Their mean square does. Of a
    step, the gradient that it used is compared, and all others as its optimizer would show them.
    """
    case = Case(double, Numbers(double.expected, None, None), (), given.candidate.size)
    if given.trial.is_random or not case.is_recovered:
        return None
    examples = given.trial.num_examples
    sizes = [math.ceil(examples / length) for length in double.program.lengths if 1 < length <= examples]
    sizes = [*([given.candidate.size] if given.candidate.size else []), *sizes, *case.known_sizes, 1]
    layout = in_order(examples, sizes[0])
    parts = [given.trial.full_batch(given.rows(group))[: given.num_gradients] for group in layout.groups]
    wide = [double.trial.full_batch(double.rows(group))[: given.num_gradients] for group in layout.groups]

    def is_right(weights: np.ndarray) -> bool:
        pairs = zip(case.combined(wide, weights), double.gradient, strict=True)
        return all(gap(one, other) <= EXACT * largest(other) for one, other in pairs)

    # With more microbatches than entries, least squares finds many weights.
    weights = next(filter(is_right, _usual_weights(layout)), None)
    weights = case.solved(wide, double.gradient) if weights is None else weights
    if weights is None:
        return None
    careful = case.combined(parts, weights)  # narrow gradients, summed in float64
    types = [leaf.dtype for leaf in given.trial.arrays.wrt]
    careful = [np.asarray(leaf, dtype).astype(float) for leaf, dtype in zip(careful, types, strict=True)]
    right, used = case.right, case.on(given, actual)

    def error(gradient: Gradient) -> float:
        return math.sqrt(sum(float(np.sum(np.abs(a - b) ** 2)) for a, b in zip(gradient, right, strict=True)))

    entries = sum(leaf.size for leaf in right)
    own, best = error(used.actual), max(error(used.seen(careful)), error(used.right))
    if entries < 8 or own < (2 if entries >= 64 else 4) * best:  # the fewer entries, the more it varies by chance
        return []
    return [
        Finding(
            Cause.NARROW_ACCUMULATOR,
            f"Too few digits: in float64 the candidate is right. It adds up gradients in {' and '.join(narrow)}, which "
            f"makes the error {own / best:.1f} times as large as with float32 sums of the same gradients.\n"
            "Make the accumulators float32: jnp.zeros(leaf.shape, jnp.float32).",
        )
    ]


# The tests, in the order in which they are asked.


def _value_only(case: Case) -> Finding | None:
    """Tests whether only the value or aux differs."""
    if not all(leaf.ok for leaf in case.step_leaves):
        return None
    wrong = next(leaf for leaf in case.leaves if not leaf.ok)
    ratio = f", {wrong.ratio:.6g} times the right one" if wrong.ratio is not None else ""
    return Finding(
        Cause.VALUE_ONLY,
        f"The gradient is right, and {wrong.name} is not: it is off by {wrong.difference:.1e}{ratio}.\n"
        "Add up the values of the microbatches as their gradients: with the same weights.",
    )


def _not_finite(case: Case) -> Finding | None:
    wrong = [
        name
        for name, leaf in zip(case.bench.candidate.form.names, case.observed.leaves, strict=True)
        if not np.isfinite(leaf).all()
    ]
    if not wrong:
        return None
    return Finding(
        Cause.UNKNOWN,
        f"The candidate gives NaN or infinity in {listed(wrong)}, where the gradient of the full batch is finite.\n"
        "Look for a microbatch without any valid entry, for which a mean is 0 / 0, or for an overflow in float16.",
    )


def _optimizer_per_microbatch(case: Case) -> Finding | None:
    """Tests whether the optimizer was called for every microbatch."""
    form = case.bench.candidate.form
    if not isinstance(form, StepForm):
        return None
    advice = (
        "Add up the gradients of all microbatches first, and call optimizer.update once. Or wrap it: "
        "optax.MultiSteps(optimizer, every_k_schedule={n})."
    )
    start = len(form.shapes)
    counts = [
        int(actual)
        for actual, expected in zip(case.observed.leaves[start:], case.bench.expected[start:], strict=True)
        if expected.shape == () and expected == np.round(expected) and actual > expected
    ]
    numbers = list(dict.fromkeys(counts))
    sizes = [math.ceil(case.examples / number) for number in numbers] or case.sizes[:4]
    for size in sizes:
        if size >= case.examples:
            continue
        layout = in_order(case.examples, size)
        for whole in {len(layout.groups), case.examples // size}:
            if _stepwise(case, layout.groups[:whole]):
                text = (
                    f"The optimizer is called for every microbatch: {whole} updates, each with the gradient of {size} "
                    f"examples, give what the candidate gave.\n{advice.format(n=whole)}"
                )
                return Finding(Cause.OPTIMIZER_PER_MICROBATCH, text, size)
    if numbers:
        text = f"The optimizer is called {numbers[0]} times for one batch, as its own count says."
        return Finding(Cause.OPTIMIZER_PER_MICROBATCH, f"{text}\n{advice.format(n=numbers[0])}")
    return None


def _stepwise(case: Case, groups: Sequence[np.ndarray]) -> bool:
    """True if one update for each microbatch gives what the candidate gave."""
    bench = case.bench
    form = bench.candidate.form
    assert isinstance(form, StepForm)
    with bench.trial.precision(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        subject = bench.candidate.packed[0].rebuild(bench.inputs.copied().subject)
        before = form.trained(subject)
        for rows in groups:
            wrt = [jnp.asarray(leaf) for leaf in form.trained(subject)]
            gradient = bench.trial.full_batch(bench.rows(rows)._replace(wrt=wrt))[: bench.num_gradients]
            typed = [jnp.asarray(g, w.dtype) for g, w in zip(gradient, wrt, strict=True)]
            subject = form.apply(subject, typed)
        found = [as_float64(leaf) for leaf in form.observe(before, subject, None).leaves]
    pairs = zip(case.observed.leaves, found, bench.expected, strict=True)
    return all(gap(a, b) <= max(1e-3 * gap(a, c), 1e-9 * largest(a)) for a, b, c in pairs)


def _optimizer_state(case: Case) -> Finding | None:
    """Tests whether a step gives the right parameters with the optimizer's state of before."""
    bench, form = case.bench, case.bench.candidate.form
    start = len(form.shapes)
    if not isinstance(form, StepForm) or not all(leaf.ok for leaf in case.step_leaves[:start]):
        return None
    with bench.trial.precision():
        subject = bench.candidate.packed[0].rebuild(bench.inputs.copied().subject)
        before = [as_float64(leaf) for leaf in form.state_leaves(subject)]
    if any(gap(one, other) for one, other in zip(case.observed.leaves[start:], before, strict=True)):
        return None
    return Finding(
        Cause.OPTIMIZER_STATE,
        "The parameters are right, and the state of the optimizer is the one that the step was given.\n"
        "Return the new state: updates, opt_state = optimizer.update(...).",
    )


def _right_gradient(case: Case) -> Finding | None:
    """Tests whether a step used the right gradient, and did something else wrong."""
    if case.failed:
        return None
    if not case.bench.candidate.form.is_step:  # so small a difference that any cause would explain it
        return _unknown(case)
    worst = max(case.step_leaves, key=lambda leaf: -1.0 if leaf.ok else leaf.difference)
    ratio = f", {worst.ratio:.6g} times the right one" if worst.ratio is not None else ""
    return Finding(
        Cause.UNKNOWN,
        f"The gradient is right, and what the optimizer does with it is not: {worst.name} is off by "
        f"{worst.difference:.1e}{ratio}.\nCompare the optimizer of the step with the one that was passed: its "
        "learning rate, its weight decay, and how often it is called.",
    )


def _not_trained(case: Case) -> Finding | None:
    """Tests whether the leaves that differ are zero."""
    zero = [index for index in case.failed if largest(case.actual[index]) <= case.tolerances[index]]
    if not zero or len(zero) < len(case.failed):
        return None
    names = listed([case.bench.candidate.form.parameter_names[index] for index in zero])
    if len(zero) == len(case.expected):
        hint = "Look for an accumulator that is never returned, or for a MultiSteps that waits for more microbatches."
        return Finding(Cause.NOT_TRAINED, f"The whole gradient is zero.\n{hint}")
    return Finding(
        Cause.NOT_TRAINED,
        f"The gradient of {names} is zero, and the other leaves are right.\n"
        "Look for a stop_gradient, a mask of the optimizer, or an accumulator without this leaf.",
    )


def _constant_factor(case: Case) -> Finding | None:
    """Tests whether the gradient is a multiple of the right one."""
    counts = sorted(_numbers_of_microbatches(case) | set(case.devices))
    factors = [*(float(count) for count in counts), *(1 / count for count in counts)]
    if case.is_recovered:
        right, actual = case.flat(case.right), case.flat(case.actual)
        factors.insert(0, float(np.vdot(right, actual).real / np.vdot(right, right).real))
    factor = next((each for each in factors if case.fits([each * leaf for leaf in case.expected])), None)
    if factor is None and case.is_recovered and _is_multiple(case, factors[0]):
        factor = factors[0]
    if factor is None:
        return None
    named = _named_factor(case, factor)
    if named is not None and named.kind is not Cause.SCALE:
        return named
    if clipped := _clipped_at_all(case, factor):
        return clipped
    if not case.is_one_update or not _is_constant(case, factor):
        return None
    return named or _plain_factor(case, factor)


def _is_multiple(case: Case, factor: float) -> bool:
    """True if what an optimizer that clips made of the gradient is a multiple of what it should have made."""
    pairs = [(case.actual[index], factor * case.right[index]) for index in case.failed]
    return all(gap(actual, right) <= EXACT * largest(actual) for actual, right in pairs)


def _is_constant(case: Case, factor: float) -> bool:
    """True unless a gradient of one or two numbers, which is nearly a multiple of any other, has another factor."""
    if len(case.flat(case.expected)) > 2:
        return True
    random, bench = np.random.default_rng(2), case.bench
    for _ in range(2):
        rows = np.sort(random.integers(0, case.examples, case.examples))
        right = bench.trial.full_batch(bench.rows(rows))[: bench.num_gradients]
        found = case.gradient_of(bench.observe(bench.inputs.rows(rows)).leaves)
        if any(gap(a, factor * b) > EXACT * largest(a) for a, b in zip(found, right, strict=True)):
            return False
    return True


def _named_factor(case: Case, factor: float) -> Finding | None:
    """What a factor is: a number of devices, of microbatches, of examples, of tokens."""
    large = factor > 1
    number = factor if large else 1 / factor
    times = f"{_number(number)} times too {'large' if large else 'small'}"
    whole = round(number)
    is_whole = abs(number - whole) < EXACT * number and whole > 1
    if is_whole and (whole in case.devices or any(whole == size**2 for size in case.devices)):
        return Finding(
            Cause.PSUM_TWICE,
            f"The gradient is {times}, which is the number of devices.{case.some}\n"
            "It is summed over the devices once too often, or with psum where pmean is meant. Inside shard_map, "
            "jax.grad of replicated parameters sums over the devices by itself.",
        )
    counts = _numbers_of_microbatches(case)
    if is_whole and whole in counts:
        size = case.size or math.ceil(case.examples / whole)
        what = "a sum of means" if large else "a mean of sums"
        do = f"Divide the sum by {whole}" if large else f"Do not divide by {whole}"
        if case.size is None and not case.known_sizes and whole not in case.bench.program.lengths:
            return Finding(
                Cause.NUMBER_OF_MICROBATCHES,
                f"The gradient is {times}. If the loop has {whole} microbatches, that is {what}.{case.some}\n{do}. If "
                "it has another number of them, pass microbatch_size=, and look for a constant that it multiplies or "
                f"divides by. {case.replacement(None)}",
            )
        return Finding(
            Cause.NUMBER_OF_MICROBATCHES,
            f"The gradient is {times}, for {whole} microbatches: {what}.{case.some}\n{do}. {case.replacement(size)}",
            size,
        )
    for size in case.sizes:
        filled = math.ceil(case.examples / size) * size
        if filled > case.examples and abs(factor - case.examples / filled) < EXACT:
            return Finding(
                Cause.SCALE,
                f"The gradient is {times}: {case.examples} / {filled}. So the last microbatch of {size} is filled up, "
                f"and padding counts as examples.{case.some}\n"
                f"Divide by the number of examples. {case.replacement(size)}",
                size,
            )
    if is_whole and not large and whole in case.known_sizes:
        number_of_parts = math.ceil(case.examples / whole)
        return Finding(
            Cause.SCALE,
            f"The gradient is {times}, the size of a microbatch: the means of {number_of_parts} microbatches are added "
            f"up and divided by the number of examples.{case.some}\n"
            f"Divide by {number_of_parts}. {case.replacement(whole)}",
            whole,
        )
    for name, count in _counts(case).items():
        if abs(number - count) < EXACT * number:
            return Finding(
                Cause.SCALE,
                f"The gradient is {times}, and {name} is as large.{case.some}\n"
                f"Perhaps the loop {'does not divide by it, or multiplies' if large else 'divides'} by it.",
            )
    return None


def _numbers_of_microbatches(case: Case) -> set[int]:
    """The numbers of microbatches that the candidate may have."""
    if case.size is not None:
        return {math.ceil(case.examples / case.size), case.examples // case.size}
    program = case.bench.program
    numbers = {length for length in program.lengths if length <= case.examples}
    numbers |= {case.examples // size for size in case.known_sizes if case.examples % size == 0}
    if not case.known_sizes:
        numbers |= {number for number in range(2, case.examples) if case.examples % number == 0}
    return numbers or {case.examples}


def _counts(case: Case) -> dict[str, float]:
    """Numbers that a loop may have multiplied or divided by, with their names."""
    counts: dict[str, float] = {"the number of examples": case.examples}
    arguments = case.bench.trial.arguments
    names = [leaf.name for leaf in arguments.leaves if leaf.role == "batch"]
    for name, leaf in zip(names, case.bench.trial.arrays.batch, strict=True):
        array = as_float64(leaf)
        counts.setdefault(f"the sum of {name}", float(array.sum()))
        if np.array_equal(array, np.round(array)):  # a mask, or labels of which some are negative to be left out
            counts.setdefault(f"the number of nonzero entries of {name}", float((array != 0).sum()))
            counts.setdefault(f"the number of entries of {name} that are not negative", float((array >= 0).sum()))
        counts.setdefault(f"the number of entries of {name}", float(array.size))
        for axis, length in enumerate(array.shape[1:], 1):
            counts.setdefault(f"the length of axis {axis} of {name}", float(length))
    return {name: number for name, number in counts.items() if number > 1}


def _plain_factor(case: Case, factor: float) -> Finding:
    power = math.log2(abs(factor)) if factor else 0.5
    is_power = round(power) != 0 and abs(power - round(power)) < EXACT
    scale = " That is a power of two: is a loss scale not divided out?" if is_power else ""
    scale += " Its sign is wrong: is a loss or an update negated?" if factor < 0 else ""
    return Finding(
        Cause.SCALE,
        f"The gradient is the right one times {_factor(factor)}.{scale}{case.some}\n"
        "Look for a constant that the loop multiplies or divides by.",
    )


def _clipped_at_all(case: Case, factor: float) -> Finding | None:
    """Tests whether the norm stays the same for other examples, where that of the right gradient does not."""
    if not 0 < factor < 1:
        return None
    random, bench = np.random.default_rng(1), case.bench
    norm = _norm(case.actual)
    for _ in range(2):
        rows = np.sort(random.integers(0, case.examples, case.examples))
        right = bench.trial.full_batch(bench.rows(rows))[: bench.num_gradients]
        found = case.gradient_of(bench.observe(bench.inputs.rows(rows)).leaves)
        if abs(_norm(found) - norm) > EXACT * norm or abs(_norm(right) - _norm(case.expected)) < EXACT:
            return None
    return Finding(
        Cause.CLIPPED,
        f"The gradient is clipped: its norm is {_number(norm)} for other examples, too, where that of the right one "
        f"is {_number(_norm(case.expected))}.\nIf that is meant, pass a loss and an optimizer that clip as well: "
        f"optax.chain(optax.clip_by_global_norm({_number(norm)}), ...).",
    )


def _clipped_entries(case: Case) -> Finding | None:
    """Tests whether every entry, or the norm of every leaf, is limited."""
    limits = [largest(case.actual[index]) for index in case.failed]
    limit = max(limits)
    if case.fits([np.clip(leaf, -limit, limit) for leaf in case.expected]):
        entries = sum(int((np.abs(leaf) > limit).sum()) for leaf in case.expected)
        if entries > 1 or _is_round(limit):
            return Finding(
                Cause.CLIPPED,
                f"The gradient is clipped: {entries} of its entries are beyond {_number(limit)} and are set to it.\n"
                "Clip after all microbatches are added up, in the optimizer that the step uses: "
                f"optax.clip({_number(limit)}).",
            )
    norms = [_norm([case.actual[index]]) for index in case.failed]
    right = [_norm([case.expected[index]]) for index in case.failed]
    scaled = list(case.expected)
    for index, norm, other in zip(case.failed, norms, right, strict=True):
        scaled[index] = case.expected[index] * (norm / other)
    if case.fits(scaled) and (len(norms) > 1 or _is_round(norms[0])) and max(norms) - min(norms) < EXACT * max(norms):
        return Finding(
            Cause.CLIPPED,
            f"Each leaf of the gradient is clipped by itself: those that differ all have the norm {_number(norms[0])}."
            "\nClip by the norm of all leaves together, in the optimizer: optax.clip_by_global_norm(...).",
        )
    return None


def _clipped_entries_of_parts(case: Case) -> Finding | None:
    """Tests whether every entry is limited in each microbatch, before they are added up."""
    if case.is_random or not case.is_recovered:
        return None
    for size in [size for size in case.sizes if size < case.examples][:8]:
        layout = in_order(case.examples, size)
        parts = case.parts(layout)
        number = len(parts)
        stacked = np.stack([_entries(case, part) for part in parts])
        agreeing = np.flatnonzero((np.sign(stacked) == np.sign(stacked[0])).all(axis=0))
        if not len(agreeing):
            continue
        entry = agreeing[np.abs(stacked[:, agreeing]).sum(axis=0).argmax()]
        wanted = abs(float(_entries(case, case.actual)[entry].real))
        for share in (1 / number, 1.0):
            limit = _limit(np.abs(stacked[:, entry]), wanted / share)
            limited = [[np.clip(leaf, -limit, limit) for leaf in part] for part in parts]
            several = sum(int((np.abs(part[place]) > limit).sum()) for part in parts for place in case.failed)
            is_evidence = several > 1 and (len(case.flat(case.expected)) > 2 or _is_round(limit))
            if is_evidence and case.fits(case.combined(limited, np.full(number, share))):
                return Finding(
                    Cause.CLIPPED,
                    f"The entries of the gradient are limited to {_number(limit)} in each microbatch of {size}, before "
                    f"they are added up: {several} are.\nClip once, after all of them are added up: "
                    f"optax.clip({_number(limit)}) in the optimizer.",
                    size,
                )
    return None


def _entries(case: Case, gradient: Gradient) -> np.ndarray:
    """The entries of all leaves that differ, in one vector."""
    return np.concatenate([gradient[index].reshape(-1) for index in case.failed])


def _limit(sizes: np.ndarray, total: float) -> float:
    """The limit for which numbers that are at most so large add up to a total."""
    sizes = np.sort(sizes)
    below = 0.0
    for position, size in enumerate(sizes):
        left = len(sizes) - position
        if below + left * size >= total:
            return (total - below) / left
        below += size
    return float(sizes[-1])


def _term_of_parameters(case: Case) -> Finding | None:
    """Tests whether the difference is the same for other examples: then it comes from the parameters alone."""
    if case.is_random or case.examples < 2:
        return None
    random, bench = np.random.default_rng(2), case.bench
    first = [one - other for one, other in zip(case.actual, case.right, strict=True)]
    for _ in range(2):
        rows = np.sort(random.integers(0, case.examples, case.examples))
        right = case.seen(bench.trial.full_batch(bench.rows(rows))[: bench.num_gradients])
        found = case.gradient_of(bench.observe(bench.inputs.rows(rows)).leaves)
        for index in case.failed:
            close = max(8 * case.tolerances[index], EXACT * largest(first[index]))
            if not gap(found[index] - right[index], first[index]) <= close:
                return None
    if counted := _counted_penalty(case, first):
        return counted
    if _is_constant_sum(case, first):
        return Finding(
            Cause.UNKNOWN,
            f"Something is added that stays the same for other examples and for other parameters.{case.some}\n"
            "Look for an accumulator that still holds the gradients of an earlier step. Set it to zero before the "
            "first microbatch of each step.",
        )
    return Finding(
        Cause.NUMBER_OF_MICROBATCHES,
        "A term of the parameters, such as weight decay, is added: the difference is the same for other examples."
        f"{case.some}\nAdd such a term once, after the microbatches: grads = jax.tree.map(jnp.add, grads, "
        "jax.grad(penalty)(params)). Or let the optimizer decay the weights, in its one update.",
        case.size,
    )


def _counted_penalty(case: Case, off: Gradient) -> Finding | None:
    """Tests whether the gradient is off by a multiple of that of a penalty in the loss."""
    penalty = None if case.reading is None or not case.reading.form.adds_parameters else case.penalty
    if penalty is None or not largest(case.flat(penalty)):
        return None
    one = case.flat(penalty)
    count = 1 + float(np.vdot(one, case.flat(off)).real / np.vdot(one, one).real)
    if not case.fits([a + (count - 1) * b for a, b in zip(case.expected, penalty, strict=True)]):
        return None
    term = "The loss has a term of the parameters alone, such as a penalty, and the candidate"
    add = (
        "Add such a term once, after the microbatches: grads = jax.tree.map(jnp.add, grads, "
        f"jax.grad(penalty)(params)). {case.replacement(case.size)}"
    )
    if abs(count) < EXACT:
        return Finding(Cause.UNKNOWN, f"{term} leaves it out.{case.some}\n{add}")
    is_whole = any(abs(each - round(each)) < EXACT * each and round(each) > 1 for each in (count, 1 / count))
    return Finding(
        Cause.NUMBER_OF_MICROBATCHES if is_whole else Cause.SCALE,
        f"{term} counts it {_number(count)} times: the difference is the same for other examples.{case.some}\n{add}",
        case.size,
    )


def _is_constant_sum(case: Case, off: Gradient) -> bool:
    """Tests whether the difference is the same for the negative parameters, for which that of a penalty is not."""
    with contextlib.suppress(Exception):  # the loss may need positive parameters
        bench = case.bench.scaled(-1.0)
        other = case.on(bench, bench.observe())
        pairs = [(other.actual[index] - other.right[index], off[index]) for index in case.failed]
        return all(gap(here, there) <= EXACT * largest(there) for here, there in pairs)
    return False


def _weighted(case: Case) -> list[Finding] | None:
    """Tests whether the gradient is a weighted sum of those of microbatches."""
    if case.is_random:
        return None
    fallback = None
    for layout in case.layouts():
        parts = case.parts(layout)
        weights, is_usual = _weights(case, parts, layout)
        if weights is not None:
            right = case.right_weights(parts, layout)
            findings = _read_weights(case, layout, parts, weights, right)
            if findings[0].kind is Cause.MEAN_OF_MEANS and not is_usual and not _are_of_parts(layout, weights, right):
                continue
            # Small microbatches explain every weighting. Another layout may do so with usual weights.
            if is_usual or findings[0].kind is not Cause.MEAN_OF_MEANS:
                return findings
            fallback = fallback or findings
    return fallback


def _are_of_parts(layout: Layout, weights: np.ndarray, right: np.ndarray | None) -> bool:
    """True unless single examples have weights of their own.

    With predictions of one number, any other loss is such a weighted sum of the gradients of its examples.
    """
    if layout.size > 1:
        return True
    ratios = np.round(weights if right is None else weights / np.where(right == 0, 1, right), 6)
    _, counts = np.unique(ratios, return_counts=True)
    return bool((ratios >= 0).all() and (counts == 1).sum() <= 1)


def _weights(case: Case, parts: Sequence[Gradient], layout: Layout) -> tuple[np.ndarray | None, bool]:
    """The weights of the microbatches that explain the candidate, and whether they are usual ones."""
    for weights in _usual_weights(layout):
        if case.fits(case.combined(parts, weights)):
            return weights, True
    found = case.solved(parts, case.actual) if case.is_recovered else None
    if found is None or not case.fits(case.combined(parts, found)) or not case.is_one_update:
        return None, False
    return found, False


def _usual_weights(layout: Layout) -> list[np.ndarray]:
    number, lengths = len(layout.groups), layout.lengths
    whole = (lengths == layout.size).astype(float)
    last, first = np.eye(number)[-1], np.eye(number)[0]
    equal = np.full(number, 1 / number)
    shares = lengths / lengths.sum()
    choices = [equal, shares, whole / whole.sum(), np.ones(number), whole, last, first, last / number, first / number]
    return [*choices, whole / number, whole * layout.size / lengths.sum()]


def _read_weights(
    case: Case, layout: Layout, parts: Sequence[Gradient], weights: np.ndarray, right: np.ndarray | None
) -> list[Finding]:
    """The mistakes that the weights of the microbatches show."""
    number, size = len(layout.groups), layout.size
    present = np.abs(weights) > EXACT * np.abs(weights).max()
    if present.sum() < number:
        return [_left_out(case, layout, present), *_factor_of_some(case, layout, weights[present], right)]
    is_equal = np.abs(weights - weights[0]).max() < EXACT * abs(weights[0])
    clipped = None if is_equal else _clipped_parts(case, layout, parts, weights)
    if clipped := clipped or (None if is_equal else _clipped_sums(case, layout, parts, weights)):
        return [clipped]
    total = float(weights.sum())
    findings: list[Finding] = []
    expected_total = _total(case, layout, right)
    if is_equal and expected_total is not None and abs(total - expected_total) > EXACT * expected_total:
        findings += _factor_of_weights(case, layout, total / expected_total)
    if layout.words:
        findings.append(
            Finding(
                Cause.MEAN_OF_MEANS,
                f"With microbatches of {size}, {layout.words}.\nGive each example the weight that it has in the full "
                f"batch. {case.replacement(size)}",
                size,
            )
        )
        return findings
    if right is not None and np.abs(weights / total - right / right.sum()).max() < EXACT:
        return findings or [_plain_factor(case, total / float(right.sum()))]
    findings.append(_unequal(case, layout, weights, right))
    return findings


def _total(case: Case, layout: Layout, right: np.ndarray | None) -> float | None:
    """What the weights should add up to: 1 for a mean or a ratio, the number of microbatches for a sum."""
    if right is not None:
        return float(right.sum())
    reading = case.reading
    if reading is None:
        return None
    return float(len(layout.groups)) if reading.form.kind is LossKind.SUM else 1.0


def _factor_of_weights(case: Case, layout: Layout, factor: float) -> list[Finding]:
    number = len(layout.groups)
    for count, what in ((number, "a sum of means"), (1 / number, "a mean of sums")):
        if abs(factor - count) < EXACT * count:
            return [
                Finding(
                    Cause.NUMBER_OF_MICROBATCHES,
                    f"The gradient is off by a factor of {_number(factor)}, for {number} microbatches of {layout.size}:"
                    f" {what}. {'Divide' if factor > 1 else 'Do not divide'} by {number}.",
                    layout.size,
                )
            ]
    return []


def _factor_of_some(case: Case, layout: Layout, weights: np.ndarray, right: np.ndarray | None) -> list[Finding]:
    """The finding for several microbatches that are added up where their mean is meant."""
    total = _total(case, layout, right)
    is_equal = np.abs(weights - weights[0]).max() < EXACT * abs(weights[0])
    number = round(float(weights[0]))
    if len(weights) == 1 and number > 1 and total is not None and abs(total - 1) < EXACT:
        if abs(weights[0] - number) < EXACT * number:  # several microbatches, seen as one
            text = (
                f"Also {number} times too large: the means of {number} microbatches are added up. Divide by {number}."
            )
            return [Finding(Cause.NUMBER_OF_MICROBATCHES, text)]
    if len(weights) < 2 or total is None or abs(total - 1) > EXACT or not is_equal or abs(weights[0] - 1) > EXACT:
        return []
    text = f"Also a sum of means: the other {len(weights)} microbatches are added up. Divide by their number."
    return [Finding(Cause.NUMBER_OF_MICROBATCHES, text, layout.size)]


def _left_out(case: Case, layout: Layout, present: np.ndarray) -> Finding:
    """The finding for microbatches that have no weight."""
    number, size, places = len(layout.groups), layout.size, np.flatnonzero(present)
    rows = np.concatenate([layout.groups[place] for place in np.flatnonzero(~present)])
    is_end = rows.max() == case.examples - 1 and places[-1] < places[0] + len(places) and places[0] == 0
    if is_end and len(rows) < min(size, case.examples / 2) and case.examples % size:
        found = case.size or (size if len(places) > 1 else None)
        return Finding(
            Cause.DROPPED_REMAINDER,
            f"The last {len(rows)} of {case.examples} examples do not count.{case.some}\n"
            f"Compute the remainder as a smaller microbatch, with its own weight. {case.replacement(found)}",
            found,
        )
    if len(places) == 1 and number in case.devices:
        return Finding(
            Cause.PSUM_MISSING,
            f"It is the gradient of {size} examples only, those of device {places[0]}: {number} devices do not add up "
            f"their gradients.{case.some}\nUse jax.lax.pmean(grads, axis_name) inside shard_map.",
        )
    if len(places) == 1:
        which = {0: "first", number - 1: "last"}.get(int(places[0]), f"{places[0] + 1}th")
        return Finding(
            Cause.LAST_MICROBATCH,
            f"Only the {which} of {number} microbatches of {size} counts.{case.some}\n"
            "The accumulator is overwritten, or returned too early. Add to it: "
            f"sums = jax.tree.map(jnp.add, sums, grads). {case.replacement(size)}",
            size,
        )
    found = size if size > 1 else case.size
    return Finding(
        Cause.DROPPED_REMAINDER,
        f"{len(rows)} of {case.examples} examples do not count: those of rows {listed(map(str, rows))}.{case.some}\n"
        f"Let the loop run over all examples. {case.replacement(found)}",
        found,
    )


def _clipped_parts(case: Case, layout: Layout, parts: Sequence[Gradient], weights: np.ndarray) -> Finding | None:
    """Tests whether the weights are those of gradients clipped to one norm."""
    norms, number = np.array([_norm(part) for part in parts]), len(parts)
    if len(case.failed) < len(case.expected) or number < 2:
        return None
    sizes = weights * norms
    limit = sizes.max()
    for full in (1 / number, 1.0):
        wanted = np.minimum(full, limit / norms)
        clipped = wanted < full * (1 - EXACT)
        several = clipped.sum() > 1 or (clipped.any() and _is_round(limit / full))
        if several and np.abs(weights - wanted).max() < 1e-5 * wanted.max():
            each = "each example" if layout.size == 1 else f"each microbatch of {layout.size}"
            return Finding(
                Cause.CLIPPED,
                f"The gradient of {each} is clipped to the norm {_number(limit / full)} before they are added up: "
                f"{int(clipped.sum())} of {number} are.\nClip once, after all of them are added up: "
                f"optax.clip_by_global_norm({_number(limit / full)}) in the optimizer.",
                layout.size,
            )
    return None


def _clipped_sums(case: Case, layout: Layout, parts: Sequence[Gradient], weights: np.ndarray) -> Finding | None:
    """Tests whether the sum is clipped after each microbatch."""
    for full in (1 / len(parts), 1.0):
        shares, after = weights / full, 1.0
        for last in reversed(range(1, len(parts))):
            shrunk = shares[last] / after  # by what the sum was multiplied once this microbatch was added
            if shrunk < 1 - EXACT:
                sums = case.combined(parts[: last + 1], weights[: last + 1] / after)
                limit = _norm(sums)
                if case.fits(_with_clipped_sums(parts, full, limit)):
                    text = f"The sum is clipped to the norm {_number(limit)} after each microbatch of {layout.size}."
                    once = f"optax.clip_by_global_norm({_number(limit)}) in the optimizer"
                    return Finding(Cause.CLIPPED, f"{text}\nClip once, after the last one: {once}.", layout.size)
                break
            after = shares[last]
    return None


def _repeated(layout: Layout, ratios: np.ndarray) -> str:
    """Sentences that name the rows of microbatches that are added more often than the others; empty if none are."""
    times = ratios / np.nanmin(ratios) if np.nanmin(ratios) > 0 else ratios
    rounded = np.round(times)
    again = np.flatnonzero(rounded > 1)
    # Most microbatches are added once.
    if np.nanmax(np.abs(times - rounded)) > EXACT or not 0 < len(again) < len(times) / 2 or np.isnan(times).any():
        return ""
    rows = listed(str(row) for place in again for row in layout.groups[place])
    several = {int(rounded[place]) for place in again}
    often = "twice" if several == {2} else f"{several.pop()} times" if len(several) == 1 else "more than once"
    return (
        f"The examples of rows {rows} count {often}. Add each microbatch once: leave it out of the "
        "loop if the accumulator starts with its gradient."
    )


def _with_clipped_sums(parts: Sequence[Gradient], share: float, limit: float) -> Gradient:
    total = [0 * leaf for leaf in parts[0]]
    for part in parts:
        total = [a + share * b for a, b in zip(total, part, strict=True)]
        shrink = min(1.0, limit / (_norm(total) or 1.0))
        total = [shrink * leaf for leaf in total]
    return total


def _unequal(case: Case, layout: Layout, weights: np.ndarray, right: np.ndarray | None) -> Finding:
    """The finding for microbatches with other weights than in the full batch, or a loss that has none."""
    number, size = len(layout.groups), layout.size
    if right is not None:
        text = (
            f"Microbatches have other weights than in the full batch: {_weights_in_words(weights)} instead of "
            f"{_weights_in_words(right)}, for {number} microbatches of {size}."
        )
        is_mean = np.abs(weights - weights[0]).max() < EXACT * abs(weights[0])
        shares = layout.lengths / layout.lengths.sum()
        is_mean = is_mean or np.abs(weights / weights.sum() - shares).max() < EXACT
        if not is_mean:
            again = _repeated(layout, weights / np.where(right == 0, np.nan, right))
            advice = again or "Give each microbatch its weight."
            return Finding(Cause.MEAN_OF_MEANS, f"{text}{case.some}\n{advice}", size)
        is_ragged = np.abs(right - shares).max() < EXACT
        if not is_ragged and case.reading is not None and case.reading.form.contains(LossKind.COUPLED):
            return _looks_across(case, layout)
        divides = "The loss divides by something other than the number of examples, such as the number of tokens."
        if case.reading is None or not case.reading.form.contains(LossKind.RATIO):
            divides = f"Perhaps: {divides}"
        why = f"{divides}{case.some}\nAdd up the total and the weight of each microbatch, and divide once."
        if case.reading is not None and case.reading.form.contains(LossKind.FUNCTION):
            why = (
                "The loss is a function of a mean, such as its root, and the mean of that function over microbatches "
                f"is another loss.{case.some}\nApply the function once, to what is added up over all microbatches: its "
                "derivative there scales every gradient."
            )
        if is_ragged:
            why = f"They have different sizes.{case.some}\nWeight each by its number of examples."
        return Finding(Cause.MEAN_OF_MEANS, f"A mean of means. {text} {why} {case.replacement(size)}", size)
    if _is_counted_often(case, layout):
        return Finding(
            Cause.NUMBER_OF_MICROBATCHES,
            f"A term that does not depend on the examples, such as a regulariser, is counted {number} times, once for "
            f"each microbatch of {size}.\nAdd its gradient once, outside the loop. {case.replacement(size)}",
            size,
        )
    form = None if case.reading is None or case.reading.blame else case.reading.form
    if form is not None and not form.contains(LossKind.FUNCTION):
        return Finding(
            Cause.MEAN_OF_MEANS,
            f"A mean of means: {number} microbatches of {size} have equal weights, and the loss is a {form.words}."
            f"\nAdd up the total and the weight of each microbatch, and divide once. "
            f"{case.replacement(size)}",
            size,
        )
    return _looks_across(case, layout)


def _looks_across(case: Case, layout: Layout) -> Finding:
    """The finding for a loss that looks across examples."""
    number, size = len(layout.groups), layout.size
    form = None if case.reading is None or case.reading.blame else case.reading.form
    lines = [] if case.reading is None else [f"    {each.place} ({each.primitive})" for each in case.reading.blame[:3]]
    lines += [] if form is None else [f"    it is a {form.words}"]
    looks = "The loss looks across examples, and a microbatch sees only its own:"
    return Finding(
        Cause.BATCH_STATISTICS,
        "\n".join(
            [
                f"{looks} the mean of the gradients of {number} microbatches of {size} is what the candidate gave.",
                *dict.fromkeys(lines),
                "The usual causes are BatchNorm and negatives from the batch. Use LayerNorm or GroupNorm instead of "
                f"BatchNorm. {case.replacement(size)} It computes such a loss exactly.",
            ]
        ),
        size,
    )


def _is_counted_often(case: Case, layout: Layout) -> bool:
    """Tests whether each further microbatch adds the same to a sum."""
    number = len(layout.groups)
    rows = np.arange(case.examples)
    halves = [rows[: case.examples // 2], rows[case.examples // 2 :]]
    two = case.combined([case.gradient(half) for half in halves], np.ones(2))
    per_part = [(a - b) for a, b in zip(two, case.expected, strict=True)]
    guess = [a + (number - 1) * b for a, b in zip(case.expected, per_part, strict=True)]
    return case.fits(guess)


def _random(case: Case) -> list[Finding] | None:
    """Tests which random numbers the microbatches draw."""
    if not case.is_random:
        return None
    schemes = (*SAME_KEYS, *OTHER_KEYS) if case.bench.has_key else ("same",)
    sizes = [size for size in case.sizes if size < case.examples][:10]
    for size in sizes:
        for scheme in schemes:
            layout = in_order(case.examples, size)
            parts = case.parts(layout, scheme)
            weights, _ = _weights(case, parts, layout)
            if weights is not None:
                return _read_random(case, layout, weights, scheme)
    if not case.bench.has_key:
        return None
    agrees, uncertainty = _agreement_on_average(case)
    draws = "The candidate draws other random numbers than the full batch"
    if not agrees:
        return [
            Finding(
                Cause.UNKNOWN,
                f"{draws}, and averaged over many keys the two still differ.\nTo find the cause, switch dropout off in "
                "both, and audit again.",
            )
        ]
    return [
        Finding(
            Cause.OTHER_RANDOM_NUMBERS,
            f"{draws}. Averaged over many keys the two agree to {100 * uncertainty:.2g}%, and smaller mistakes would "
            f"not show.\n{_OTHER}",
        )
    ]


_OTHER = (
    "If its own numbers for each microbatch are meant, this is no mistake. To draw the numbers of the full batch, use "
    "ab.value_and_grad(loss). To test the rest, switch dropout off."
)


def _read_random(case: Case, layout: Layout, weights: np.ndarray, scheme: str) -> list[Finding]:
    number, size = len(layout.groups), layout.size
    present = np.abs(weights) > EXACT * np.abs(weights).max()
    findings = []
    if not present.all():
        findings = [_left_out(case, layout, present), *_factor_of_some(case, layout, weights[present], None)]
    expected_total = _total(case, layout, None) or 1.0
    is_equal = np.abs(weights[present] - weights[present][0]).max() < EXACT * abs(weights[present][0])
    if is_equal and present.all() and abs(weights.sum() - expected_total) > EXACT * expected_total:
        findings += _factor_of_weights(case, layout, float(weights.sum()) / expected_total)
    reading = case.reading
    if is_equal and present.all() and reading is not None and reading.form.contains(LossKind.RATIO):
        findings.append(
            Finding(
                Cause.MEAN_OF_MEANS,
                f"A mean of means: {number} microbatches of {size} have equal weights, and the loss is a "
                f"{reading.kind}. Add up the total and the weight of each microbatch, and divide once.",
                size,
            )
        )
    if scheme in SAME_KEYS:
        findings.append(
            Finding(
                Cause.SAME_RANDOM_NUMBERS,
                f"All {number} microbatches of {size} draw the same random numbers, such as one dropout mask.\n"
                "Give each microbatch its own key: jax.random.split(key, n)[i]. To draw the numbers of the full batch: "
                f"ab.value_and_grad(loss, microbatch_size={size}).",
                size,
            )
        )
    else:
        how = {"split": "jax.random.split(key, n)[i]", "chain": "key, subkey = jax.random.split(key)"}
        text = how.get(scheme, "jax.random.fold_in(key, i)" if "fold" in scheme else "subkey, key = split(key)")
        findings.append(
            Finding(
                Cause.OTHER_RANDOM_NUMBERS,
                f"Each of {number} microbatches of {size} draws its own random numbers, with {text}. Apart from that "
                f"the gradient is {'that of the full batch' if not findings else 'as said'}.\n{_OTHER}",
                size,
            )
        )
    return findings


def _several_updates(case: Case) -> Finding | None:
    """Tests whether no gradient explains both the parameters and the state of the optimizer."""
    if case.is_random or not case.is_recovered or case.is_one_update:
        return None
    return Finding(
        Cause.UNKNOWN,
        "No single gradient explains both the parameters and the state of the optimizer that the step gave.\n"
        "Look how often the step calls optimizer.update, and whether the parameters get all of its updates.",
    )


def _agreement_on_average(case: Case) -> tuple[bool, float]:
    """Whether candidate and full batch agree over many keys, in every one of some random projections.

    Also how far they may still be apart, as a share of the gradient. More keys are drawn until that is little, or
    until some seconds are over.
    """
    bench, random, began = case.bench, np.random.default_rng(0), time.perf_counter()
    projections = random.normal(size=(8, len(case.flat(case.expected))))
    projections[0] = case.flat(case.expected)
    differences: list[np.ndarray] = []
    gradients: list[np.ndarray] = []
    while True:
        for _ in range(FEWEST_KEYS):
            change = functools.partial(_fold, number=1000 + len(differences))
            with bench.trial.precision():
                inputs = bench.inputs.with_keys(change)
            right = bench.trial.full_batch(bench.with_keys(bench.trial.arrays, change))[: bench.num_gradients]
            actual = case.gradient_of(bench.observe(inputs).leaves)
            differences.append(projections @ (case.flat(actual) - case.flat(right)))
            gradients.append(projections @ case.flat(right))
        samples = np.stack(differences)
        error = 4.5 * samples.std(axis=0, ddof=1) / math.sqrt(len(samples))
        size = math.sqrt(float(np.mean(np.stack(gradients).mean(axis=0)[1:] ** 2)))
        uncertainty = float(error[1:].mean()) / size if size else math.inf
        if (np.abs(samples.mean(axis=0)) >= error).any():
            return False, uncertainty
        if uncertainty < 0.02 or len(samples) >= MOST_KEYS or time.perf_counter() - began > SECONDS:
            return True, uncertainty


def _fold(key: Any, number: int) -> Any:
    return jax.random.fold_in(key, number)


TESTS: tuple[Callable[[Case], Finding | list[Finding] | None], ...] = (
    _value_only,
    _not_finite,
    _optimizer_per_microbatch,
    _optimizer_state,
    _right_gradient,
    _not_trained,
    _constant_factor,
    _clipped_entries,
    _clipped_entries_of_parts,
    _term_of_parameters,
    _weighted,
    _random,
    _several_updates,
)


def _unknown(case: Case) -> Finding:
    """The finding if no test explains the difference."""
    worst = max(case.leaves, key=lambda leaf: -1.0 if leaf.ok else leaf.difference)
    hint = "" if case.size else " Pass microbatch_size=, if you know it."
    return Finding(
        Cause.UNKNOWN,
        f"No known mistake explains the difference: {worst.name} is off by {worst.difference:.1e}, and "
        f"{worst.allowed:.1e} is allowed.\nCompare the candidate with jax.value_and_grad(loss) on one example, then on "
        f"two.{hint}",
    )


def _norm(gradient: Gradient) -> float:
    return math.sqrt(sum(float(np.sum(np.abs(leaf) ** 2)) for leaf in gradient))


def _is_round(number: float) -> bool:
    """True for a number that a person would type: at most two digits."""
    return abs(float(f"{number:.1e}") - number) < EXACT * abs(number)


def _factor(factor: float) -> str:
    """A factor in words: one that is nearly 1 with its difference from 1."""
    off = factor - 1
    return f"1 {'-' if off < 0 else '+'} {abs(off):.1e}" if 0 < abs(off) < 1e-4 else _number(factor)


def _number(number: float) -> str:
    return f"{number:.6g}"


def _weights_in_words(weights: np.ndarray) -> str:
    return listed([f"{round(float(weight), 3) + 0.0:.3f}" for weight in weights])  # no "-0.000"
