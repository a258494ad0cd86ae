"""Decides which strategy computes a gradient: from memory, from a record on disk, or by a search.

`Planner.decide` serves `value_and_grad` and runs no candidate. `Planner.plan` serves `ab.plan` and `ab.explain`, and
may time candidates. `as_plan` makes the `Plan` of a search: its table of candidates, and sentences that say why
a strategy was chosen, what limits it and what would help.
"""

import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import jax

from anybatch import __version__
from anybatch.call.caches import PROGRAMS, Cache
from anybatch.call.checks import warn
from anybatch.call.memory import default_device, readable
from anybatch.call.options import OFFLOAD, SHARES
from anybatch.call.placement import HOST, describe_placed
from anybatch.errors import AnybatchError, NothingFitsError, TightMemoryWarning
from anybatch.jaxprs import versions
from anybatch.jaxprs.graph import uses
from anybatch.jaxprs.primitives import REMAT
from anybatch.planning import store
from anybatch.planning.budget import Budget, agreed, budget_of, is_explicit
from anybatch.planning.candidates import AS_FAST, StrategySearch
from anybatch.planning.measure import Bytes, Measurements, generous_bytes
from anybatch.planning.plan import Candidate, Devices, Plan
from anybatch.planning.problem import Problem
from anybatch.planning.store import fingerprint, fingerprint_of_function
from anybatch.planning.strategy import Computation, Strategy, Variant
from anybatch.reading.rules import USER_RULES

Leanest = tuple[Strategy, Bytes] | None  # the compiled strategy with the least memory, and its bytes


def as_plan(search: StrategySearch, budget: Budget, strategy: Strategy | None, *, by_time: bool) -> Plan:
    """The plan of a search that chose this strategy, or none that fits.

    `by_time` says whether measured times decided. If not, times of an earlier search may still be known.
    """
    gradient = search.measurements.gradient
    listed = sorted(_listed(search, strategy), key=_order)
    candidates = {each: _candidate(search, budget, each) for each in listed}
    known = {each: found for each, found in search.compiled.items() if found is not None}
    leanest = min(known.items(), key=lambda item: item[1].total) if known else None
    is_limited = strategy is None or search.is_limited_by_memory(strategy)
    line = _line_of_large_head(search)
    remarks = [
        _limits(budget, leanest) if is_limited else "",
        f"Smaller microbatches save little: from {line} on, the loss is computed from the full batch." if line else "",
        _failures(search),
        _tuning(search, budget),
        _not_tried(search) if by_time else "",
    ]
    devices = gradient.devices or [default_device()]
    # Including the devices of other processes.
    number = len(devices) if gradient.shardings is None else gradient.shardings.mesh.size
    return Plan(
        chosen=None if strategy is None else candidates[strategy],
        candidates=tuple(candidates.values()),
        num_examples=gradient.examples,
        objective=gradient.options.objective,
        budget=budget.allowed,
        budget_source=budget.source,
        reason=_nothing_fits(search, budget, leanest)
        if strategy is None
        else _reason(search, strategy, by_time=by_time),
        limits=" ".join(filter(None, remarks)),
        advice=_advice(search, budget, strategy, leanest, has_large_head=bool(line)) if is_limited else "",
        devices=Devices(str(devices[0].device_kind), number),
        compilations=search.measurements.compilations,
        planning_seconds=0.0,
        tuning_bytes=max(search.measurements.tuning.values(), default=None),
        noun=gradient.noun,
        note=gradient.note(gradient.options.fixed_block_size if strategy is None else strategy.block_size),
    )


def _listed(search: StrategySearch, strategy: Strategy | None) -> set[Strategy]:
    """The strategies of the table: all that were compiled, and sizes between them that can be predicted."""
    listed = set(search.compiled) | ({strategy} if strategy is not None else set())
    if strategy is not None and search.is_limited_by_memory(strategy):
        # What is computed again where that saves memory.
        least = 0.95 * search.predict(strategy)
        listed |= {each for each in search.shown_variants(strategy) if search.predict(each) < least}
    in_microbatches = [each for each in listed if not search.measurements.gradient.is_full_batch(each)]
    largest = max((each.microbatch_size or 0 for each in in_microbatches), default=0)
    previous: float = math.inf
    for size in search.sizes.steps_down(search.examples):
        between = Strategy(size, *search.variants[0])
        predicted = search.predict(between) if size <= 1.25 * largest else None
        # Where the total hardly changes any more, only the smallest size is added.
        if predicted is not None and (predicted < 0.9 * previous or size == search.sizes.smallest):
            listed.add(between)
            previous = predicted
    return listed


def _order(strategy: Strategy) -> tuple[Any, ...]:
    blocks, reduce = strategy.block_size or 0, strategy.reduce != "once"
    return (
        strategy.method or "",
        str(strategy.remat or ""),
        -blocks if blocks else -(1 << 62),
        reduce,
        -(strategy.microbatch_size or 0),
    )


def _candidate(search: StrategySearch, budget: Budget, strategy: Strategy) -> Candidate:
    measurements = search.measurements
    found = measurements.bytes.get(strategy)
    predicted = search.predicted.get(strategy) if strategy in measurements.bytes else search.predict(strategy)
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
        block_size=strategy.block_size,
        bytes=found,
        predicted=predicted,
        predicted_seconds=_predicted_seconds(search, strategy),
        seconds=measurements.seconds.get(strategy),
        fits=fits,
        is_full_batch=measurements.gradient.is_full_batch(strategy),
    )


def _predicted_seconds(search: StrategySearch, strategy: Strategy) -> float | None:
    """The predicted seconds, if others were timed: without them, a prediction is good for comparisons only."""
    if strategy in search.predicted_seconds:
        return search.predicted_seconds[strategy]
    timed = {each: search.seconds[each] for each in search.timed_and_fitting()}
    return search.predictions.seconds(strategy, timed) if timed and strategy not in timed else None


def _nothing_fits(search: StrategySearch, budget: Budget, leanest: Leanest) -> str:
    needs = ""
    if leanest is not None:
        size = leanest[0].microbatch_size
        which = f"even {size} example{'' if size == 1 else 's'} at a time"
        which = which if size == search.sizes.smallest else f"the leanest, {leanest[0]},"
        needs = f": {which} needs {readable(leanest[1].total, at_least=True)}"
    left = "" if budget.allowed is None else f", and the budget is {readable(budget.allowed)}"
    return f"Nothing fits{needs}{left}."


def _reason(search: StrategySearch, strategy: Strategy, *, by_time: bool) -> str:
    gradient = search.measurements.gradient
    timed = {each: search.seconds[each] for each in search.timed_and_fitting()}
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
        which += "" if strategy.block_size is None else f", big values in blocks of {strategy.block_size} rows"
        which += "" if strategy.remat is None else f", with {strategy.remat_text}"
        return f"Chosen: {which}, since it fits."
    not_timed = "It was not timed." if strategy not in timed else "Its time was not compared with others."
    # Larger ones may fit that compute more activations again.
    has_shares = len({variant.remat for variant in search.variants}) > 1
    why = "of those that fit, the one with the least predicted time" if has_shares else "the largest that fits"
    return f"Chosen: {strategy}, {why}. {not_timed}"


def _limits(budget: Budget, leanest: Leanest) -> str:
    """Sentences about the memory that is the same for every microbatch size, and about the memory of others."""
    texts = []
    if leanest is not None and budget.allowed is not None:
        found = leanest[1]
        fixed = found.total - found.activations
        names = {"others": "other arguments", "activations": None}
        kinds = [(number, names.get(kind, kind)) for kind, number in dataclasses.asdict(found).items()]
        least = 0.001 * max(budget.allowed, found.total)
        parts = [f"{readable(number)} {name}" for number, name in kinds if name and number > least]
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
    found = search.measurements.failures.items()
    failures = {strategy: error for strategy, error in found if strategy.variant in search.variants}
    if not failures:
        return ""
    first = str(next(iter(failures.values()))).partition("\n")[0][:200]
    return f"XLA cannot compile {' or '.join(map(str, failures))}: {first}"


def _tuning(search: StrategySearch, budget: Budget) -> str:
    """A sentence about the memory that XLA took to tune kernels, if that is more than the budget; or empty."""
    tuning = search.measurements.tuning
    strategy = max(tuning, key=tuning.__getitem__, default=None)
    if strategy is None or budget.allowed is None:
        return ""
    taken = tuning[strategy] + search.measurements.gradient.argument_bytes
    if taken <= budget.allowed:
        return ""
    return (
        f"While XLA compiled {strategy}, it took {readable(taken)} with the arguments, to try out kernels: more than "
        "the budget, which XLA does not know."
    )


def _not_tried(search: StrategySearch) -> str:
    """A sentence that names the strategy that was not compiled, since planning would have taken long; or empty."""
    if search.skipped is None:
        return ""
    return f"Not tried, since planning would have taken more than {search.ENOUGH_SECONDS:.0f} s: {search.skipped}."


def _advice(
    search: StrategySearch, budget: Budget, strategy: Strategy | None, leanest: Leanest, *, has_large_head: bool
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
    # Neither recomputed activations nor smaller microbatches make a large head smaller. A function that is not
    # differentiated keeps no activations.
    # Per-example functions have no remat option.
    is_kept = strategy is not None and (strategy.method is not None or gradient.options.remat is None)
    if strategy is not None and is_kept and not has_large_head and not gradient.options.maps:
        if strategy.method is None:
            helps.append("leave remat out, so that activations may be computed again instead of being kept")
        helps.append("wrap blocks of the model in jax.checkpoint")
    if strategy is None:
        if not has_large_head and _fits_with_remat(search, leanest[0], budget.allowed):
            helps.append("leave remat out, so that activations are computed again instead of being kept: that fits")
        if gradient.options.block_size is None:
            helps.append("leave block_size out, so that big values may be computed in blocks")
        helps.append(_more_memory(gradient, budget, *leanest))
    purpose = "What would help" if strategy is None else "For larger microbatches"
    text = f"{purpose}: {'; '.join(helps)}." if helps else ""
    return " ".join(filter(None, [text, gradient.checked_reading.remedy if has_large_head else ""]))


def _line_of_large_head(search: StrategySearch) -> str:
    """The source line where the head of a coupled loss begins, if the head takes most of the memory; else empty.

    The head is the part of a loss that is computed from the full batch.
    """
    gradient = search.measurements.gradient
    if not gradient.is_coupled or not gradient.checked_reading.blame:
        return ""
    full = search.compiled.get(Strategy(search.examples, *search.variants[0]))
    others = [(each, found) for each, found in search.compiled.items() if found and not gradient.is_full_batch(each)]
    if full is None or not others:
        return ""
    _, smallest = min(others, key=lambda pair: pair[0].microbatch_size or 0)
    return gradient.checked_reading.blame[0].place if 2 * smallest.activations >= full.activations else ""


def _fits_with_remat(search: StrategySearch, leanest: Strategy, allowed: int) -> bool:
    """True if the leanest strategy fits once activations are recomputed. Compiles it."""
    gradient = search.measurements.gradient
    if gradient.options.remat is not None or gradient.loss.traced.has_effects or leanest.method is not None:
        return False
    if gradient.options.maps:
        return False
    return search.fits(dataclasses.replace(leanest, remat=SHARES[-1]), allowed)


def _more_memory(gradient: Problem, budget: Budget, leanest: Strategy, found: Bytes) -> str:
    if not is_explicit(gradient.options.memory):
        return "allow more memory with memory="
    enough = found.total + budget.around(leanest, found.total)
    return f'pass memory="{readable(enough, at_least=True)}" or more'


def _shard_further(gradient: Problem) -> str:
    shardings = gradient.shardings
    if shardings is None:
        return "shard the parameters over a mesh (mesh=), or keep them in bfloat16"
    if not shardings.is_sharded:
        axes = " and ".join(shardings.options.axes)
        return f"shard the parameters over {axes} as well (jax.device_put, or param_specs= under jit)"
    if "each" not in gradient.reduce_modes:
        return 'pass reduce="each", with the same number of examples on every device'
    return "use more devices, or keep the parameters in bfloat16"


@dataclasses.dataclass(frozen=True)
class Decision:
    """The chosen strategy, with its computation if that was compiled to choose it."""

    strategy: Strategy
    computation: Computation | None = None
    total: int | None = None  # the bytes of the strategy, if they are known
    is_guess: bool = False  # its bytes could only be estimated


# The decisions of this process: for a key of the gradient and its options, the strategy and its bytes, if known. They
# are kept, since the free memory changes from call to call, and a new microbatch size would be compiled each time.
_DECIDED: Cache[tuple[Strategy, int | None]] = Cache(4096)


class Planner:
    """Chooses the strategy of one gradient."""

    def __init__(
        self,
        gradient: Problem,
        *,
        arrays_exist: bool = True,
        parameter_copies: int = 0,
        source: str | None = None,
        around: Callable[[Strategy, int], int] = lambda strategy, total: 0,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Makes the planner of a gradient.

        Args:
          gradient: the gradient.
          arrays_exist: False if it is planned from shapes alone, so that its arrays take no memory yet.
          parameter_copies: how many copies of the differentiated arguments the training step around it needs besides.
          source: where the budget comes from, in words, if not from the `memory=` of the user.
          around: of a budget from `source`, the bytes that the training step needs around the program of a strategy,
            which takes so many bytes in total.
          notify: called with a text before each step that takes long.
        """
        self.gradient, self.notify, self.parameter_copies = gradient, notify, parameter_copies
        self.source, self.around = source, around
        self.options = gradient.options
        # Processes that run one program together must make the same decision. So they decide by bytes alone, and not by
        # times or records, which may differ between them.
        self.is_multiprocess = gradient.shardings is not None and jax.process_count() > 1
        self.is_recorded = not gradient.loss.traced.has_effects and not self.is_multiprocess
        self.full = Strategy(gradient.max_microbatch_size, *self._variants(self.options.fixed_block_size)[0])
        self.arrays_exist = arrays_exist
        self.key = store.key_of(identity_of(gradient))

    @functools.cached_property
    def budget(self) -> Budget:
        budget = budget_of(self.gradient, arrays_exist=self.arrays_exist)
        if self.source is not None:
            budget = dataclasses.replace(budget, source=self.source, around=self.around)
        if self.parameter_copies and budget.allowed is not None and self.options.memory is None:
            less = self.parameter_copies * self.gradient.local_bytes("wrt")
            source = f"{budget.source}, less {readable(less)} to update"
            budget = dataclasses.replace(budget, allowed=max(1, budget.allowed - less), source=source)
        return agreed(budget) if self.is_multiprocess else budget

    @functools.cached_property
    def variants(self) -> tuple[Variant, ...]:
        """The variants to choose from, the one that takes the least time first."""
        if self.options.block_size != "auto":
            return self._variants(self.options.block_size)
        return self._variants(*self.gradient.block_sizes(self.budget.allowed))

    def _variants(self, *block_sizes: int | None) -> tuple[Variant, ...]:
        remats = self._remats if self.options.remat == "auto" else (self.options.remat,)
        reduce_modes, methods = self.gradient.reduce_modes, self.gradient.methods
        found = itertools.product(remats, block_sizes, reduce_modes, methods)
        return tuple(Variant(remat, reduce, method, block_size) for remat, block_size, reduce, method in found)

    @functools.cached_property
    def _remats(self) -> tuple[float | None, ...]:
        """The shares of the activations to compute again that a plan chooses from."""
        gradient = self.gradient
        jaxpr = gradient.loss.traced.jaxpr
        # A model that computes activations again by itself would do so twice. Outside of loops, XLA's compiler for CPUs
        # merges the second computation with the first.
        is_left_as_it_is = gradient.options.maps or jaxpr.effects or any(uses(jaxpr, name) for name in REMAT)
        is_undone = (gradient.devices or [default_device()])[0].platform == "cpu" and not uses(jaxpr, "scan")
        return (None,) if is_left_as_it_is or is_undone or gradient.methods != (None,) else (None, *SHARES)

    @functools.cached_property
    def last_resort(self) -> tuple[Variant, ...]:
        """The variants for when no other fits: they keep on the host what the layers of a loop pass on."""
        gradient = self.gradient
        devices = gradient.devices or [default_device()]
        has_host = len(devices) == 1 and HOST in {memory.kind for memory in devices[0].addressable_memories()}
        is_useful = devices[0].platform != "cpu" and uses(gradient.loss.traced.jaxpr, "scan")
        if not has_host or not is_useful or len(self._remats) == 1 or self.options.remat != "auto":
            return ()
        return tuple(dict.fromkeys(variant._replace(remat=OFFLOAD) for variant in self.variants))

    def _new_search(self, measurements: Measurements, record: dict[str, Any], strategy: Any = None) -> StrategySearch:
        """A search among the variants, and that of a strategy of the last resort if it is known already."""
        variants = self.variants
        if strategy is not None and strategy.remat == OFFLOAD:
            variants = tuple(dict.fromkeys([*variants, strategy.variant]))
        return StrategySearch(measurements, self.budget.allowed, variants, self.notify, record)

    # The decision, for value_and_grad.

    def decide(self) -> Decision:
        """The strategy to compute the gradient with. No candidate is run to choose it.

        If certainly no strategy fits, a NothingFitsError is raised.
        """
        if self.options.on_coupled == "error" and self.options.reduction == "infer":
            _ = self.gradient.checked_reading  # so that a refusal does not depend on the memory
        decided = _DECIDED.get(self._decision_key)
        if decided is not None and self._leaves_room_for_step(decided[1]):
            return Decision(decided[0])
        decision = self._recorded() or self._full_batch_by_far() or self._by_search()
        if not decision.is_guess:
            self.remember(decision.strategy, decision.total)
        return decision

    def remember(self, strategy: Strategy, total: int | None = None) -> None:
        """Makes a strategy the decision for this gradient from now on, in this process."""
        _DECIDED.put(self._decision_key, (strategy, total))

    def _leaves_room_for_step(self, total: int | None) -> bool:
        """True if a strategy of so many bytes, chosen outside `jit`, leaves room for the training step around it."""
        if total is None or self.options.memory is not None or (self._can_run_candidates and not self.parameter_copies):
            return True
        budget = self.budget
        return budget.allowed is None or total <= budget.allowed - budget.reserve

    @property
    def _decision_key(self) -> str:
        return store.key_of(self.key, self._choice_key(timed=False), self.options.on_coupled)

    def _recorded(self) -> Decision | None:
        """The strategy of a record on disk, perhaps by another process, if it still applies."""
        record = self._load()
        strategy = self._choice(record, timed=True) or self._choice(record, timed=False)
        if strategy is None:
            return None
        measurements = Measurements(self.gradient, record)
        found = measurements.bytes[strategy]
        total = None if found is None else found.total
        if not measurements.can_run:
            return Decision(strategy, total=total)
        expected = measurements.text_hashes.get(strategy)
        try:
            computation = measurements.computation(strategy)
        except jax.errors.JaxRuntimeError:
            return None
        if measurements.text_hashes[strategy] != expected:  # the record is of another program
            store.forget(self.key)
            return None
        return Decision(strategy, computation, total)

    def _full_batch_by_far(self) -> Decision | None:
        """The full batch, if it fits by such a margin that nothing has to be compiled to know."""
        if self.options.objective == "memory" or self.options.memory is not None:
            return None  # a budget that the user named is kept to the byte
        budget, needed = self.budget, generous_bytes(self.gradient)
        if budget.allowed is None:
            return Decision(self.full)
        fits = needed is not None and needed <= budget.allowed - budget.reserve
        return Decision(self.full) if fits else None

    def _by_search(self) -> Decision:
        budget = self.budget
        try:
            plan, measurements = self._search(budget, timed=False)
        except Exception as error:
            if isinstance(error, AnybatchError | jax.errors.JaxRuntimeError) or Measurements(self.gradient).can_run:
                raise
            # Part of a program that cannot be compiled by itself. Every size gives the right gradient, so an estimate
            # of the memory will do.
            likely = StrategySearch(Measurements(self.gradient), budget.allowed, self.variants).likely_fitting()
            warn(
                f"This gradient cannot be compiled apart from the program around it, so its memory is estimated: "
                f"{likely} should fit {budget}. Pass a microbatch_size if you know better.",
                TightMemoryWarning,
            )
            return Decision(likely, is_guess=True)
        if plan.chosen is None:
            report_nothing_fits(plan, certain=measurements.can_run or self.options.memory is not None)
            strategy, total = Strategy(self.gradient.size_multiple, *self.variants[-1]), None
        else:
            strategy, total = plan.chosen.strategy, plan.chosen.total
        return Decision(strategy, measurements.computations.get(strategy), total)

    # The plan, for plan and explain.

    def plan(self, *, timed: bool, thorough: bool = False) -> Plan:
        """The plan, from a record on disk or by a search.

        If `timed`, candidates are run, to find the fastest. If `thorough`, more is compiled, for the table.
        """
        start = time.perf_counter()
        budget, record = self.budget, self._load()
        timed = timed and self.options.objective == "speed" and self.is_recorded
        # Earlier times count, whether or not candidates may be run now.
        measured = self._choice(record, timed=True) if self.options.objective == "speed" else None
        recorded = measured or (None if timed else self._choice(record, timed=False))
        if recorded is not None:
            measurements = Measurements(self.gradient, record)
            search = self._new_search(measurements, record, recorded)
            shown = {self.full, *(each for each in search.shown_variants(recorded) if each.remat == recorded.remat)}
            if not thorough or shown <= set(measurements.bytes):
                plan = as_plan(search, budget, recorded, by_time=measured is not None)
                return dataclasses.replace(plan, planning_seconds=time.perf_counter() - start)
        may_time = timed and self._can_run_candidates
        plan, measurements = self._search(budget, timed=may_time, thorough=thorough, measured=measured)
        if plan.chosen is not None:
            self.remember(plan.chosen.strategy, plan.chosen.total)
            if plan.chosen.strategy in measurements.computations:
                PROGRAMS.keep(measurements.computations[plan.chosen.strategy].compile())
        return dataclasses.replace(plan, planning_seconds=time.perf_counter() - start)

    @property
    def _can_run_candidates(self) -> bool:
        return Measurements(self.gradient).can_run and not self.is_multiprocess

    def _search(
        self, budget: Budget, *, timed: bool, thorough: bool = False, measured: Strategy | None = None
    ) -> tuple[Plan, Measurements]:
        """Searches for the strategy, and saves what was measured. The flags are those of `plan`.

        A strategy that an earlier search has `measured` to be the fastest is taken; others are only for the table.
        """
        record = self._load()
        measurements = Measurements(self.gradient, record)
        search = self._new_search(measurements, record, measured)
        strategy = measured
        try:
            if strategy is None:
                strategy = self._searched(search, timed=timed)
            if strategy is None and self.last_resort:
                search.variants += self.last_resort
                strategy = search.first_fitting()
            if thorough:
                search.measure_for_table(strategy, timed=timed)
        except KeyboardInterrupt:
            self._save(search, None, budget, timed=timed)  # the next plan goes on from here
            raise
        if strategy is None and measurements.failures and not any(search.compiled.values()):
            raise next(iter(measurements.failures.values()))  # nothing compiles, for another reason than memory
        by_time = timed or measured is not None
        plan = as_plan(search, budget, strategy, by_time=by_time)
        self._save(search, strategy, budget, timed=by_time)
        return plan, measurements

    def _searched(self, search: StrategySearch, *, timed: bool) -> Strategy | None:
        if self.options.objective == "memory":
            return search.leanest()
        if timed:
            return search.fastest()
        reserve = self.budget.reserve
        strategy = search.first_fitting(reserve)
        return search.first_fitting() if strategy is None and reserve else strategy

    # The record on disk.

    def _choice_key(self, *, timed: bool) -> str:
        options = self.options
        # Without the block sizes that a plan would choose from: these take time to find.
        variants = self._variants(options.fixed_block_size), options.block_size
        return store.key_of(options.objective, options.memory, variants, self.arrays_exist, timed)

    def _load(self) -> dict[str, Any]:
        return store.load(self.key) if self.is_recorded else {}

    def _choice(self, record: dict[str, Any], *, timed: bool) -> Strategy | None:
        """The strategy in a record, if it would be chosen again."""
        try:
            choice = record["choices"][self._choice_key(timed=timed)]
            how = (choice["remat"], choice["reduce"], choice.get("method"), choice.get("block_size"))
            strategy = Strategy(choice["size"], *how)
            found, then = Measurements(self.gradient, record).bytes[strategy], choice["budget"]
            if found is None:
                return None
            if (allowed := self.budget.allowed) is None:
                return strategy
            # With much more memory than then, another strategy may be better.
            is_similar = then is not None and (allowed <= 1.25 * then or self.gradient.is_full_batch(strategy))
            fits = found.total <= allowed and self._leaves_room_for_step(found.total)
            return strategy if fits and is_similar else None
        except (KeyError, TypeError):  # the record has none, or is damaged
            return None

    def _save(self, search: StrategySearch, strategy: Strategy | None, budget: Budget, *, timed: bool) -> None:
        measurements = search.measurements
        if not self.is_recorded or (strategy is None and not measurements.compilations):
            return
        record = self._load()
        kept = record.get("choices")
        choices = kept if isinstance(kept, dict) else {}
        if strategy is not None:
            chosen = {"size": strategy.microbatch_size, **strategy.variant._asdict(), "budget": budget.allowed}
            choices[self._choice_key(timed=timed)] = chosen
        known = {"strategies": measurements.record(), "predictions": search.predictions.record()}
        store.save(self.key, known | {"choices": choices})


def report_nothing_fits(plan: Plan, *, certain: bool) -> None:
    """Raises an error, or warns if that is not certain: a tracer does not show how its array will be sharded."""
    if certain:
        raise NothingFitsError(str(plan))
    warn(str(plan), TightMemoryWarning)


def identity_of(gradient: Problem) -> list[Any]:
    """What the bytes and times of a gradient depend on: its program, arguments, options, devices and versions."""
    options, jaxpr, shardings = gradient.options, gradient.loss.traced.jaxpr, gradient.shardings
    config: Any = jax.config
    devices = gradient.devices or [default_device()]
    kinds = sorted({device.device_kind for device in devices})
    roles = [[describe_placed(leaf) for leaf in part] for part in gradient.arguments.arrays]
    return [
        fingerprint(jaxpr),
        gradient.identity,
        # With another rule of the user's for a primitive, the plan may be another.
        *(f"{name}: {fingerprint_of_function(USER_RULES[name])}" for name in sorted(USER_RULES) if uses(jaxpr, name)),
        [options.reduction, str(options.accumulator_dtype), str(options.aux_reduction), options.has_aux],
        roles,
        *(["noise"] if options.noise else []),  # this takes the memory of one more gradient
        [kinds, len(devices), str(jax.sharding.get_abstract_mesh()), gradient.vmap_copies],
        None if shardings is None else [str(shardings.options), str(shardings.specs)],
        [*versions.versions(), __version__],
        [os.environ.get("XLA_FLAGS", ""), str(config.jax_default_matmul_precision), str(config.jax_enable_x64)],
    ]
