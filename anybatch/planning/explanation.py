"""A search told as a plan: what was found, why one way was chosen, what limits it, what would help."""

import dataclasses

from anybatch.call.memory import default_device, readable
from anybatch.planning.budget import Budget
from anybatch.planning.candidates import AS_FAST, Search
from anybatch.planning.measure import Bytes
from anybatch.planning.plan import Candidate, Plan
from anybatch.planning.strategy import Planned, Strategy


def as_plan(search: Search, budget: Budget, way: Strategy | None, seconds: float, *, by_time: bool) -> Plan:
    """The plan that a search comes to.

    Args:
      search: what was found.
      budget: what may be taken.
      way: the one that was chosen; None if none fits.
      seconds: how long it took.
      by_time: whether it was chosen by measured times. Times may be known, from an earlier search, even if not.
    """
    gradient = search.bench.gradient
    listed = sorted(_listed(search, way), key=_order)
    candidates = {each: _candidate(search, budget, each) for each in listed}
    smallest = _least(search)
    is_limited = way is None or search.is_limiting(way)
    return Plan(
        chosen=None if way is None else candidates[way],
        candidates=tuple(candidates.values()),
        num_examples=gradient.examples,
        objective=gradient.settings.objective,
        budget=budget.allowed,
        budget_source=budget.source,
        reason=_reason(search, budget, way, smallest, by_time=by_time),
        limits=" ".join(
            filter(None, [_limits(budget, smallest) if is_limited else "", _whole_batch(search), _not_compiled(search)])
        ),
        advice=_advice(search, budget, way, smallest) if is_limited else "",
        device=_device(search),
        compilations=search.bench.compilations,
        planning_seconds=seconds,
        noun=gradient.noun,
        note=gradient.note,
    )


def _listed(search: Search, way: Strategy | None) -> set[Strategy]:
    """What the table has: all that was compiled, and between these what can be predicted."""
    listed = set(search.known) | ({way} if way is not None else set())
    previous: int | None = None
    largest = max(
        (each.microbatch_size or 0 for each in listed if not search.bench.gradient.is_at_once(each)), default=0
    )
    for size in search.sizes.steps_down(search.examples):
        predicted = search.on_line(Strategy(size, *search.styles[0]))
        # Once the total hardly changes, one more row says it all.
        if (
            predicted is not None
            and size <= 1.25 * largest
            and (previous is None or predicted < 0.9 * previous or size == search.sizes.smallest)
        ):
            listed.add(Strategy(size, *search.styles[0]))
            previous = predicted
    return listed


def _order(way: Strategy) -> tuple[str, str, bool, int]:
    return way.method or "", way.remat or "", way.reduce != "once", -(way.microbatch_size or 0)


def _candidate(search: Search, budget: Budget, way: Strategy) -> Candidate:
    bench = search.bench
    found = bench.bytes.get(way)
    predicted = search.predicted.get(way) if way in bench.bytes else search.on_line(way)
    total = predicted if found is None else found.total
    fits: bool | None = None
    if way in bench.bytes and found is None:
        fits = False
    elif total is not None and budget.allowed is not None:
        fits = total <= budget.allowed
    return Candidate(
        route=bench.route(way),
        microbatch_size=way.microbatch_size or bench.gradient.share,
        remat=way.remat,
        reduce=way.reduce,
        method=way.method,
        bytes=found,
        predicted=predicted,
        seconds=bench.seconds.get(way),
        fits=fits,
    )


def _least(search: Search) -> tuple[Strategy, Bytes] | None:
    """The leanest way that was compiled."""
    known = {way: found for way, found in search.known.items() if found is not None}
    return min(known.items(), key=lambda item: item[1].total) if known else None


def _reason(
    search: Search, budget: Budget, way: Strategy | None, least: tuple[Strategy, Bytes] | None, *, by_time: bool
) -> str:
    gradient = search.bench.gradient
    timed = {each: search.seconds[each] for each in search.in_time()}
    if way is None:
        needs = ""
        if least is not None:
            is_smallest = least[0].microbatch_size == search.sizes.smallest
            leanest = f"even {_examples(least[0])} at a time" if is_smallest else f"the leanest, {least[0]},"
            needs = f": {leanest} needs {readable(least[1].total)}"
        left = "" if budget.allowed is None else f" and there are {readable(budget.allowed)}"
        return f"Nothing fits{needs}{left}."
    if gradient.settings.objective == "memory":
        return f"Chosen: {way}, which needs the least memory."
    if by_time and way in timed and len(timed) > 1:
        fastest = min(timed.values())
        if timed[way] == fastest:
            return f"Chosen: {way}, the fastest."
        if timed[way] <= (1 + AS_FAST) * fastest:
            return (
                f"Chosen: {way}, which needs the least memory of those within {AS_FAST:.0%} of the fastest "
                f"({1e3 * fastest:.1f} ms)."
            )
        return f"Chosen: {way}, the fastest of those timed when it was chosen. A candidate timed later is faster."
    if gradient.is_at_once(way):
        those = "all examples" if gradient.field is None else "all examples of a device"
        return f"Chosen: {those} at once, since they fit."
    not_timed = "It was not timed." if way not in timed else "Its time was not compared with that of others."
    return f"Chosen: {way}, the largest that fits. {not_timed}"


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
    failures = {way: error for way, error in search.bench.failures.items() if way.style in search.styles}
    if not failures:
        return ""
    first = str(next(iter(failures.values()))).partition("\n")[0][:200]
    return f"XLA cannot compile {' or '.join(map(str, failures))}: {first}"


def _advice(search: Search, budget: Budget, way: Strategy | None, least: tuple[Strategy, Bytes] | None) -> str:
    gradient = search.bench.gradient
    if least is None or budget.allowed is None:
        return ""
    found = least[1]
    fixed = found.total - found.activations
    helps = []
    if way is None and fixed > 0.5 * budget.allowed:
        if found.batch > 0.25 * fixed and gradient.field is None:
            helps.append("spread the batch over more devices (mesh=)")
        if found.parameters + found.gradients > 0.25 * fixed:
            helps.append(_spread_further(gradient))
    if _coupled_line(search):
        pass  # which neither smaller microbatches nor activations computed twice make any smaller
    elif way is not None and way.remat is None:
        if gradient.settings.remat is None and way.method is None:  # per-example functions have no such option
            helps.append('pass remat="auto", which may compute activations twice instead of keeping them')
        helps.append("wrap blocks of the model in jax.checkpoint")
    if way is None and not _coupled_line(search) and _helps_to_compute_twice(search, least[0], budget.allowed):
        helps.append('pass remat="auto", which computes activations twice instead of keeping them, and fits')
    if way is None:
        helps.append("allow more with memory=")
    text = "What would help: " + "; ".join(helps) + "." if helps else ""
    return " ".join(filter(None, [text, gradient.checked_reading.remedy if _coupled_line(search) else ""]))


def _coupled_line(search: Search) -> str:
    """The line from which on most activations are those of the whole batch, if there is one."""
    gradient = search.bench.gradient
    if not gradient.is_coupled or not gradient.checked_reading.blame:
        return ""
    sizes = [each for each, found in search.known.items() if found is not None and not gradient.is_at_once(each)]
    full = search.known.get(Strategy(search.examples, *search.styles[0]))
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
    if gradient.settings.remat is not None or gradient.loss.traced.has_effects or least.method is not None:
        return False
    return search.fits(dataclasses.replace(least, remat="nothing_saveable"), allowed)


def _spread_further(gradient: Planned) -> str:
    """What would make parameters and gradients take less on each device."""
    field = gradient.field
    if field is None:
        return "spread the parameters over a mesh (mesh=), or keep them in bfloat16"
    if not field.is_sharded:
        axes = " and ".join(field.over.axes)
        return f"spread the parameters over {axes} as well (jax.device_put, or param_specs= under jit)"
    if "each" not in gradient.reduces:
        return 'pass reduce="each", with as many examples on every device'
    return "use more devices, or keep the parameters in bfloat16"


def _examples(way: Strategy) -> str:
    return "1 example" if way.microbatch_size == 1 else f"{way.microbatch_size} examples"


def _device(search: Search) -> str:
    gradient = search.bench.gradient
    devices = gradient.devices or [default_device()]
    kind, number = devices[0].device_kind, len(devices)
    if gradient.field is not None:
        number = gradient.field.mesh.size  # those of other processes, too
    return f"{number} x {kind}" if number > 1 else str(kind)
