"""Makes the `Plan` of a search: its table of candidates, and the sentences below it.

The sentences say why a strategy was chosen, what limits it and what would help.
"""

import dataclasses

from anybatch.call.memory import default_device, readable
from anybatch.planning.budget import Budget
from anybatch.planning.candidates import AS_FAST, StrategySearch
from anybatch.planning.measure import Bytes
from anybatch.planning.plan import Candidate, Devices, Plan
from anybatch.planning.strategy import PlannableGradient, Strategy


def as_plan(
    search: StrategySearch, budget: Budget, strategy: Strategy | None, seconds: float, *, by_time: bool
) -> Plan:
    """The plan of a search.

    Args:
      search: the search, with everything it measured.
      budget: the memory that the gradient may take.
      strategy: the chosen strategy; None if none fits.
      seconds: how long planning took.
      by_time: whether it was chosen by measured times. If not, times of an earlier search may still be known.
    """
    gradient = search.measurements.gradient
    listed = sorted(_listed(search, strategy), key=_order)
    candidates = {each: _candidate(search, budget, each) for each in listed}
    leanest = _leanest(search)
    is_limited = strategy is None or search.is_limited_by_memory(strategy)
    return Plan(
        chosen=None if strategy is None else candidates[strategy],
        candidates=tuple(candidates.values()),
        num_examples=gradient.examples,
        objective=gradient.options.objective,
        budget=budget.allowed,
        budget_source=budget.source,
        reason=_reason(search, budget, strategy, leanest, by_time=by_time),
        limits=" ".join(
            filter(None, [_limits(budget, leanest) if is_limited else "", _full_batch_head(search), _failures(search)])
        ),
        advice=_advice(search, budget, strategy, leanest) if is_limited else "",
        devices=_devices(search),
        compilations=search.measurements.compilations,
        planning_seconds=seconds,
        noun=gradient.noun,
        note=gradient.note,
    )


def _listed(search: StrategySearch, strategy: Strategy | None) -> set[Strategy]:
    """The strategies of the table: all that were compiled, and sizes between them that can be predicted."""
    listed = set(search.compiled) | ({strategy} if strategy is not None else set())
    previous: int | None = None
    largest = max(
        (each.microbatch_size or 0 for each in listed if not search.measurements.gradient.is_full_batch(each)),
        default=0,
    )
    for size in search.sizes.steps_down(search.examples):
        predicted = search.interpolate(Strategy(size, *search.variants[0]))
        # Where the total hardly changes any more, only the smallest size is added.
        if (
            predicted is not None
            and size <= 1.25 * largest
            and (previous is None or predicted < 0.9 * previous or size == search.sizes.smallest)
        ):
            listed.add(Strategy(size, *search.variants[0]))
            previous = predicted
    return listed


def _order(strategy: Strategy) -> tuple[str, str, bool, int]:
    return strategy.method or "", strategy.remat or "", strategy.reduce != "once", -(strategy.microbatch_size or 0)


def _candidate(search: StrategySearch, budget: Budget, strategy: Strategy) -> Candidate:
    measurements = search.measurements
    found = measurements.bytes.get(strategy)
    predicted = search.predicted.get(strategy) if strategy in measurements.bytes else search.interpolate(strategy)
    total = predicted if found is None else found.total
    fits: bool | None = None
    if strategy in measurements.bytes and found is None:
        fits = False
    elif total is not None and budget.allowed is not None:
        fits = total <= budget.allowed
    return Candidate(
        route=measurements.route(strategy),
        microbatch_size=strategy.microbatch_size or measurements.gradient.max_microbatch_size,
        remat=strategy.remat,
        reduce=strategy.reduce,
        method=strategy.method,
        bytes=found,
        predicted=predicted,
        seconds=measurements.seconds.get(strategy),
        fits=fits,
        is_full_batch=measurements.gradient.is_full_batch(strategy),
    )


def _leanest(search: StrategySearch) -> tuple[Strategy, Bytes] | None:
    """The compiled strategy with the least memory, and its bytes."""
    known = {strategy: found for strategy, found in search.compiled.items() if found is not None}
    return min(known.items(), key=lambda item: item[1].total) if known else None


def _reason(
    search: StrategySearch,
    budget: Budget,
    strategy: Strategy | None,
    leanest: tuple[Strategy, Bytes] | None,
    *,
    by_time: bool,
) -> str:
    gradient = search.measurements.gradient
    timed = {each: search.seconds[each] for each in search.timed_and_fitting()}
    if strategy is None:
        needs = ""
        if leanest is not None:
            is_smallest = leanest[0].microbatch_size == search.sizes.smallest
            which = f"even {_examples(leanest[0])} at a time" if is_smallest else f"the leanest, {leanest[0]},"
            needs = f": {which} needs {readable(leanest[1].total)}"
        left = "" if budget.allowed is None else f", and the budget is {readable(budget.allowed)}"
        return f"Nothing fits{needs}{left}."
    if gradient.options.objective == "memory":
        return f"Chosen: {strategy}, which needs the least memory."
    if by_time and strategy in timed and len(timed) > 1:
        fastest = min(timed.values())
        if timed[strategy] == fastest:
            return f"Chosen: {strategy}, the fastest."
        if timed[strategy] <= (1 + AS_FAST) * fastest:
            return (
                f"Chosen: {strategy}, which needs the least memory of those within {AS_FAST:.0%} of the fastest "
                f"({1e3 * fastest:.1f} ms)."
            )
        return f"Chosen: {strategy}, the fastest when it was chosen. A candidate that was timed later is faster."
    if gradient.is_full_batch(strategy):
        which = "the full batch" if gradient.shardings is None else "one microbatch per device"
        return f"Chosen: {which}, since it fits."
    not_timed = "It was not timed." if strategy not in timed else "Its time was not compared with others."
    return f"Chosen: {strategy}, the largest that fits. {not_timed}"


def _limits(budget: Budget, leanest: tuple[Strategy, Bytes] | None) -> str:
    """Sentences about the memory that is the same for every microbatch size, and about the memory of others."""
    texts = []
    if leanest is not None and budget.allowed is not None:
        found = leanest[1]
        largest = max(budget.allowed, found.total)
        fixed = found.arguments + found.gradients + found.results
        parts = [
            f"{readable(number)} {name}"
            for number, name in (
                (found.parameters, "parameters"),
                (found.batch, "batch"),
                (found.others, "other arguments"),
                (found.gradients, "gradients"),
                (found.results, "results"),
            )
            if number > 0.01 * largest
        ]
        if parts:
            total = f"{readable(budget.allowed)} are" if fixed <= budget.allowed else "that is"
            texts.append(f"{readable(fixed)} of {total} the same for every microbatch size: {', '.join(parts)}.")
    if budget.taken is not None and budget.limit is not None and budget.taken > 0.05 * budget.limit:
        texts.append(
            f"{readable(budget.taken)} of the device's {readable(budget.limit)} are used by other arrays or programs, "
            "such as the state of the optimizer."
        )
    return " ".join(texts)


def _failures(search: StrategySearch) -> str:
    """A sentence that names the strategies that XLA cannot compile, for other reasons than memory."""
    failures = {
        strategy: error
        for strategy, error in search.measurements.failures.items()
        if strategy.variant in search.variants
    }
    if not failures:
        return ""
    first = str(next(iter(failures.values()))).partition("\n")[0][:200]
    return f"XLA cannot compile {' or '.join(map(str, failures))}: {first}"


def _advice(
    search: StrategySearch, budget: Budget, strategy: Strategy | None, leanest: tuple[Strategy, Bytes] | None
) -> str:
    gradient = search.measurements.gradient
    if leanest is None or budget.allowed is None:
        return ""
    found = leanest[1]
    fixed = found.total - found.activations
    helps = []
    if strategy is None and fixed > 0.5 * budget.allowed:
        if found.batch > 0.25 * fixed and gradient.shardings is None:
            helps.append("shard the batch over several devices (mesh=)")
        if found.parameters + found.gradients > 0.25 * fixed:
            helps.append(_shard_further(gradient))
    if _line_of_large_head(search):
        pass  # neither recomputed activations nor smaller microbatches make the head smaller
    elif strategy is not None and strategy.remat is None:
        if gradient.options.remat is None and strategy.method is None:  # per-example functions have no remat option
            helps.append('pass remat="auto", which may recompute activations instead of keeping them')
        helps.append("wrap blocks of the model in jax.checkpoint")
    if strategy is None and not _line_of_large_head(search) and _fits_with_remat(search, leanest[0], budget.allowed):
        helps.append('pass remat="auto", which recomputes activations instead of keeping them, and fits')
    if strategy is None:
        helps.append("allow more memory with memory=")
    text = "What would help: " + "; ".join(helps) + "." if helps else ""
    return " ".join(filter(None, [text, gradient.checked_reading.remedy if _line_of_large_head(search) else ""]))


def _line_of_large_head(search: StrategySearch) -> str:
    """The source line where the head of a coupled loss begins, if the head takes most of the memory; else empty.

    The head is the part of a loss that is computed from the full batch.
    """
    gradient = search.measurements.gradient
    if not gradient.is_coupled or not gradient.checked_reading.blame:
        return ""
    sizes = [each for each, found in search.compiled.items() if found is not None and not gradient.is_full_batch(each)]
    full = search.compiled.get(Strategy(search.examples, *search.variants[0]))
    smallest = min(sizes, key=lambda each: each.microbatch_size or 0, default=None)
    if smallest is None or full is None:
        return ""
    found = search.compiled[smallest]
    assert found is not None
    if 2 * found.activations < full.activations:
        return ""
    return gradient.checked_reading.blame[0].place


def _full_batch_head(search: StrategySearch) -> str:
    """A sentence that smaller microbatches hardly help, if the head takes most of the memory."""
    line = _line_of_large_head(search)
    text = "Smaller microbatches save little: from {} on, the loss is computed from the full batch."
    return text.format(line) if line else ""


def _fits_with_remat(search: StrategySearch, leanest: Strategy, allowed: int) -> bool:
    """True if the leanest strategy fits once activations are recomputed. Compiles it."""
    gradient = search.measurements.gradient
    if gradient.options.remat is not None or gradient.loss.traced.has_effects or leanest.method is not None:
        return False
    return search.fits(dataclasses.replace(leanest, remat="nothing_saveable"), allowed)


def _shard_further(gradient: PlannableGradient) -> str:
    """Advice that makes parameters and gradients take less on each device."""
    shardings = gradient.shardings
    if shardings is None:
        return "shard the parameters over a mesh (mesh=), or keep them in bfloat16"
    if not shardings.is_sharded:
        axes = " and ".join(shardings.options.axes)
        return f"shard the parameters over {axes} as well (jax.device_put, or param_specs= under jit)"
    if "each" not in gradient.reduce_modes:
        return 'pass reduce="each", with the same number of examples on every device'
    return "use more devices, or keep the parameters in bfloat16"


def _examples(strategy: Strategy) -> str:
    return "1 example" if strategy.microbatch_size == 1 else f"{strategy.microbatch_size} examples"


def _devices(search: StrategySearch) -> Devices:
    gradient = search.measurements.gradient
    devices = gradient.devices or [default_device()]
    kind, number = devices[0].device_kind, len(devices)
    if gradient.shardings is not None:
        number = gradient.shardings.mesh.size  # including those of other processes
    return Devices(str(kind), number)
