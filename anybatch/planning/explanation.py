"""A search told as a plan: what was found, why one way was chosen, what limits it, what would help."""

import dataclasses

from anybatch.call.memory import default_device, readable
from anybatch.planning.budget import Budget
from anybatch.planning.candidates import AS_FAST, Search
from anybatch.planning.measure import Bytes
from anybatch.planning.plan import Candidate, Devices, Plan
from anybatch.planning.strategy import Planned, Strategy


def as_plan(search: Search, budget: Budget, strategy: Strategy | None, seconds: float, *, by_time: bool) -> Plan:
    """The plan that a search comes to.

    Args:
      search: what was found.
      budget: what may be taken.
      strategy: the one that was chosen; None if none fits.
      seconds: how long it took.
      by_time: whether it was chosen by measured times. Times may be known, from an earlier search, even if not.
    """
    gradient = search.bench.gradient
    listed = sorted(_listed(search, strategy), key=_order)
    candidates = {each: _candidate(search, budget, each) for each in listed}
    smallest = _least(search)
    is_limited = strategy is None or search.is_limiting(strategy)
    return Plan(
        chosen=None if strategy is None else candidates[strategy],
        candidates=tuple(candidates.values()),
        num_examples=gradient.examples,
        objective=gradient.options.objective,
        budget=budget.allowed,
        budget_source=budget.source,
        reason=_reason(search, budget, strategy, smallest, by_time=by_time),
        limits=" ".join(
            filter(None, [_limits(budget, smallest) if is_limited else "", _whole_batch(search), _not_compiled(search)])
        ),
        advice=_advice(search, budget, strategy, smallest) if is_limited else "",
        devices=_devices(search),
        compilations=search.bench.compilations,
        planning_seconds=seconds,
        noun=gradient.noun,
        note=gradient.note,
    )


def _listed(search: Search, strategy: Strategy | None) -> set[Strategy]:
    """What the table has: all that was compiled, and between these what can be predicted."""
    listed = set(search.known) | ({strategy} if strategy is not None else set())
    previous: int | None = None
    largest = max(
        (each.microbatch_size or 0 for each in listed if not search.bench.gradient.is_at_once(each)), default=0
    )
    for size in search.sizes.steps_down(search.examples):
        predicted = search.on_line(Strategy(size, *search.variants[0]))
        # Once the total hardly changes, one more row says it all.
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


def _candidate(search: Search, budget: Budget, strategy: Strategy) -> Candidate:
    bench = search.bench
    found = bench.bytes.get(strategy)
    predicted = search.predicted.get(strategy) if strategy in bench.bytes else search.on_line(strategy)
    total = predicted if found is None else found.total
    fits: bool | None = None
    if strategy in bench.bytes and found is None:
        fits = False
    elif total is not None and budget.allowed is not None:
        fits = total <= budget.allowed
    return Candidate(
        route=bench.route(strategy),
        microbatch_size=strategy.microbatch_size or bench.gradient.share,
        remat=strategy.remat,
        reduce=strategy.reduce,
        method=strategy.method,
        bytes=found,
        predicted=predicted,
        seconds=bench.seconds.get(strategy),
        fits=fits,
        is_full_batch=bench.gradient.is_at_once(strategy),
    )


def _least(search: Search) -> tuple[Strategy, Bytes] | None:
    """The leanest way that was compiled."""
    known = {strategy: found for strategy, found in search.known.items() if found is not None}
    return min(known.items(), key=lambda item: item[1].total) if known else None


def _reason(
    search: Search, budget: Budget, strategy: Strategy | None, least: tuple[Strategy, Bytes] | None, *, by_time: bool
) -> str:
    gradient = search.bench.gradient
    timed = {each: search.seconds[each] for each in search.in_time()}
    if strategy is None:
        needs = ""
        if least is not None:
            is_smallest = least[0].microbatch_size == search.sizes.smallest
            leanest = f"even {_examples(least[0])} at a time" if is_smallest else f"the leanest, {least[0]},"
            needs = f": {leanest} needs {readable(least[1].total)}"
        left = "" if budget.allowed is None else f" and there are {readable(budget.allowed)}"
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
        return f"Chosen: {strategy}, the fastest of those timed when it was chosen. A candidate timed later is faster."
    if gradient.is_at_once(strategy):
        those = "all examples" if gradient.shardings is None else "all examples of a device"
        return f"Chosen: {those} at once, since they fit."
    not_timed = "It was not timed." if strategy not in timed else "Its time was not compared with that of others."
    return f"Chosen: {strategy}, the largest that fits. {not_timed}"


def _limits(budget: Budget, least: tuple[Strategy, Bytes] | None) -> str:
    """What of the memory no microbatch size can change."""
    texts = []
    if least is not None and budget.allowed is not None:
        found = least[1]
        whole = max(budget.allowed, found.total)
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
            if number > 0.01 * whole
        ]
        if parts:
            whole_of = f"{readable(budget.allowed)} are" if fixed <= budget.allowed else "that is"
            texts.append(f"{readable(fixed)} of {whole_of} the same for every microbatch size: {', '.join(parts)}.")
    if budget.taken is not None and budget.limit is not None and budget.taken > 0.05 * budget.limit:
        texts.append(
            f"{readable(budget.taken)} of the {readable(budget.limit)} of the device are in use by others, "
            "such as the state of the optimizer."
        )
    return " ".join(texts)


def _not_compiled(search: Search) -> str:
    """Which ways XLA could not compile, for other reasons than memory."""
    failures = {
        strategy: error for strategy, error in search.bench.failures.items() if strategy.variant in search.variants
    }
    if not failures:
        return ""
    first = str(next(iter(failures.values()))).partition("\n")[0][:200]
    return f"XLA cannot compile {' or '.join(map(str, failures))}: {first}"


def _advice(search: Search, budget: Budget, strategy: Strategy | None, least: tuple[Strategy, Bytes] | None) -> str:
    gradient = search.bench.gradient
    if least is None or budget.allowed is None:
        return ""
    found = least[1]
    fixed = found.total - found.activations
    helps = []
    if strategy is None and fixed > 0.5 * budget.allowed:
        if found.batch > 0.25 * fixed and gradient.shardings is None:
            helps.append("spread the batch over more devices (mesh=)")
        if found.parameters + found.gradients > 0.25 * fixed:
            helps.append(_spread_further(gradient))
    if _coupled_line(search):
        pass  # which neither smaller microbatches nor activations computed twice make any smaller
    elif strategy is not None and strategy.remat is None:
        if gradient.options.remat is None and strategy.method is None:  # per-example functions have no such option
            helps.append('pass remat="auto", which may compute activations twice instead of keeping them')
        helps.append("wrap blocks of the model in jax.checkpoint")
    if strategy is None and not _coupled_line(search) and _helps_to_compute_twice(search, least[0], budget.allowed):
        helps.append('pass remat="auto", which computes activations twice instead of keeping them, and fits')
    if strategy is None:
        helps.append("allow more with memory=")
    text = "What would help: " + "; ".join(helps) + "." if helps else ""
    return " ".join(filter(None, [text, gradient.checked_reading.remedy if _coupled_line(search) else ""]))


def _coupled_line(search: Search) -> str:
    """The line from which on most activations are those of the whole batch, if there is one."""
    gradient = search.bench.gradient
    if not gradient.is_coupled or not gradient.checked_reading.blame:
        return ""
    sizes = [each for each, found in search.known.items() if found is not None and not gradient.is_at_once(each)]
    full = search.known.get(Strategy(search.examples, *search.variants[0]))
    smallest = min(sizes, key=lambda each: each.microbatch_size or 0, default=None)
    if smallest is None or full is None:
        return ""
    found = search.known[smallest]
    assert found is not None
    if 2 * found.activations < full.activations:
        return ""
    return gradient.checked_reading.blame[0].place


def _whole_batch(search: Search) -> str:
    """That smaller microbatches hardly help, and why."""
    line = _coupled_line(search)
    text = "Smaller microbatches save little: from {} on, the loss is computed from the whole batch at once."
    return text.format(line) if line else ""


def _helps_to_compute_twice(search: Search, least: Strategy, allowed: int) -> bool:
    """Whether the leanest way fits if activations are computed twice; it is compiled to find out."""
    gradient = search.bench.gradient
    if gradient.options.remat is not None or gradient.loss.traced.has_effects or least.method is not None:
        return False
    return search.fits(dataclasses.replace(least, remat="nothing_saveable"), allowed)


def _spread_further(gradient: Planned) -> str:
    """What would make parameters and gradients take less on each device."""
    shardings = gradient.shardings
    if shardings is None:
        return "spread the parameters over a mesh (mesh=), or keep them in bfloat16"
    if not shardings.is_sharded:
        axes = " and ".join(shardings.options.axes)
        return f"spread the parameters over {axes} as well (jax.device_put, or param_specs= under jit)"
    if "each" not in gradient.reduces:
        return 'pass reduce="each", with as many examples on every device'
    return "use more devices, or keep the parameters in bfloat16"


def _examples(strategy: Strategy) -> str:
    return "1 example" if strategy.microbatch_size == 1 else f"{strategy.microbatch_size} examples"


def _devices(search: Search) -> Devices:
    gradient = search.bench.gradient
    devices = gradient.devices or [default_device()]
    kind, number = devices[0].device_kind, len(devices)
    if gradient.shardings is not None:
        number = gradient.shardings.mesh.size  # those of other processes, too
    return Devices(str(kind), number)
