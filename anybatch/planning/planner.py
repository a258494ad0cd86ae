"""Decides which strategy computes a gradient: from memory, from a record on disk, or by a search.

`Planner.decide` serves `value_and_grad` and runs no candidate. `Planner.plan` serves `ab.plan` and `ab.explain`, and
may time candidates. `as_plan` makes the `Plan` of a search: its table of candidates, and sentences that say why
a strategy was chosen, what limits it and what would help.
"""

import dataclasses
import functools
import itertools
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax

from anybatch import __version__
from anybatch.call.caches import PROGRAMS, Cache
from anybatch.call.memory import default_device, readable
from anybatch.call.options import POLICIES
from anybatch.call.placement import describe_placed
from anybatch.errors import AnybatchError, NothingFitsError, TightMemoryWarning, user_stacklevel
from anybatch.jaxprs import versions
from anybatch.jaxprs.graph import uses
from anybatch.planning import store
from anybatch.planning.budget import Budget, agreed, budget_of
from anybatch.planning.candidates import AS_FAST, StrategySearch
from anybatch.planning.measure import Bytes, Measurements, generous_bytes
from anybatch.planning.plan import Candidate, Devices, Plan
from anybatch.planning.store import fingerprint, fingerprint_of_function
from anybatch.planning.strategy import Computation, PlannableGradient, Strategy, Variant
from anybatch.reading.rules import USER_RULES


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
        gradient: PlannableGradient,
        *,
        arrays_exist: bool = True,
        parameter_copies: int = 0,
        source: str | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Makes a planner.

        Args:
          gradient: the gradient.
          arrays_exist: False if it is planned from shapes alone, so that its arrays take no memory yet.
          parameter_copies: how many copies of the differentiated arguments the training step around it needs, beside
            the memory of the gradient.
          source: where the budget comes from, in words, if not from the `memory=` of the user.
          notify: called with a text before each step that takes long.
        """
        self.gradient, self.notify, self.parameter_copies, self.source = gradient, notify, parameter_copies, source
        self.options = gradient.options
        # Processes that run one program together must make the same decision. So they decide by bytes alone, and not by
        # times or records, which may differ between them.
        self.is_multiprocess = gradient.shardings is not None and jax.process_count() > 1
        self.is_recorded = not gradient.loss.traced.has_effects and not self.is_multiprocess
        self.full = Strategy(gradient.max_microbatch_size, *self.variants[0])
        self.arrays_exist = arrays_exist
        self.key = store.key_of(_identity(gradient))

    @functools.cached_property
    def budget(self) -> Budget:
        """The memory that the gradient may take."""
        budget = budget_of(self.gradient, arrays_exist=self.arrays_exist)
        if self.source is not None:
            budget = dataclasses.replace(budget, source=self.source)
        if self.parameter_copies and budget.allowed is not None and self.options.memory is None:
            less = self.parameter_copies * self.gradient.local_bytes("wrt")
            budget = dataclasses.replace(
                budget,
                allowed=max(1, budget.allowed - less),
                source=f"{budget.source}, less {readable(less)} to update",
            )
        return agreed(budget) if self.is_multiprocess else budget

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants to choose from, the one that takes the least time first."""
        remats: tuple[str | None, ...] = (self.options.remat,)
        if self.options.remat == "auto":
            remats = (None,) if self.gradient.loss.traced.has_effects else (None, *POLICIES)
        reduce_modes, methods = self.gradient.reduce_modes, self.gradient.methods
        return tuple(Variant(*each) for each in itertools.product(remats, reduce_modes, methods))

    # The decision, for value_and_grad.

    def decide(self) -> Decision:
        """The strategy to compute the gradient with. No candidate is run to choose it.

        Raises:
          NothingFitsError: if no strategy fits, and that is certain.
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
        options = self.options
        return store.key_of(self.key, self._choice_key(timed=False), options.on_coupled)

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
        except (AnybatchError, jax.errors.JaxRuntimeError):
            raise
        except Exception:
            if Measurements(self.gradient).can_run:
                raise
            # Part of a program that cannot be compiled by itself. Every size gives the right gradient, so an estimate
            # of the memory will do.
            likely = StrategySearch(Measurements(self.gradient), budget.allowed, self.variants).likely_fitting()
            warnings.warn(
                f"This gradient cannot be compiled apart from the program around it, so its memory is estimated: "
                f"{likely} should fit {budget}. Pass a microbatch_size if you know better.",
                TightMemoryWarning,
                stacklevel=user_stacklevel(),
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

        Args:
          timed: whether to run candidates, to find the fastest.
          thorough: whether to compile more than the decision needs, for the table.
        """
        start = time.perf_counter()
        budget, record = self.budget, self._load()
        timed = timed and self.options.objective == "speed" and self.is_recorded
        # Earlier times count, whether or not candidates may be run now.
        measured = self._choice(record, timed=True) if self.options.objective == "speed" else None
        recorded = measured or (None if timed else self._choice(record, timed=False))
        if recorded is not None:
            measurements = Measurements(self.gradient, record)
            search = StrategySearch(measurements, budget.allowed, self.variants, self.notify)
            shown = {self.full, *(Strategy(recorded.microbatch_size, *variant) for variant in self.variants)}
            if not thorough or shown <= set(measurements.bytes):
                seconds = time.perf_counter() - start
                return as_plan(search, budget, recorded, seconds, by_time=measured is not None)
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
        """Searches for the strategy, and saves what was measured.

        Args:
          budget: the memory that the gradient may take.
          timed: whether to run candidates.
          thorough: whether to compile more than the decision needs, for the table.
          measured: the strategy that an earlier search found to be fastest. It is then only measured for the table.
        """
        start = time.perf_counter()
        measurements = Measurements(self.gradient, self._load())
        search = StrategySearch(measurements, budget.allowed, self.variants, self.notify)
        strategy = measured
        if measured is not None:
            pass
        elif self.options.objective == "memory":
            strategy = search.leanest()
        elif timed:
            strategy = search.fastest()
        else:
            if budget.reserve and budget.allowed is not None:
                roomy = StrategySearch(measurements, budget.allowed - budget.reserve, self.variants, self.notify)
                strategy = roomy.first_fitting()
                search.predicted.update(roomy.predicted)
            strategy = strategy or search.first_fitting()
        if thorough:
            search.measure_for_table(strategy, timed=timed)
        if strategy is None and measurements.failures and not any(search.compiled.values()):
            raise next(
                iter(measurements.failures.values())
            )  # nothing could be compiled, for another reason than memory
        by_time = timed or measured is not None
        self._save(measurements, strategy, budget, timed=by_time)
        seconds = time.perf_counter() - start
        return as_plan(search, budget, strategy, seconds, by_time=by_time), measurements

    # The record on disk.

    def _choice_key(self, *, timed: bool) -> str:
        options = self.options
        return store.key_of(options.objective, options.memory, self.variants, self.arrays_exist, timed)

    def _load(self) -> dict[str, Any]:
        return store.load(self.key) if self.is_recorded else {}

    def _choice(self, record: dict[str, Any], *, timed: bool) -> Strategy | None:
        """The strategy in a record, if it would be chosen again."""
        try:
            choice = record["choices"][self._choice_key(timed=timed)]
            strategy = Strategy(choice["size"], choice["remat"], choice["reduce"], choice.get("method"))
            found, then = Measurements(self.gradient, record).bytes[strategy], choice["budget"]
            allowed = self.budget.allowed
            if found is None or allowed is None or then is None:
                return strategy if found is not None and allowed is None else None
            # With much more memory than then, another strategy may be better.
            is_similar = allowed <= 1.25 * then or self.gradient.is_full_batch(strategy)
            return (
                strategy if found.total <= allowed and self._leaves_room_for_step(found.total) and is_similar else None
            )
        except (KeyError, TypeError):  # the record has none, or is damaged
            return None

    def _save(self, measurements: Measurements, strategy: Strategy | None, budget: Budget, *, timed: bool) -> None:
        if not self.is_recorded or (strategy is None and not measurements.compilations):
            return
        record = self._load()
        kept = record.get("choices")
        choices = kept if isinstance(kept, dict) else {}
        if strategy is not None:
            chosen = {"size": strategy.microbatch_size, **strategy.variant._asdict(), "budget": budget.allowed}
            choices[self._choice_key(timed=timed)] = chosen
        store.save(self.key, {"strategies": measurements.record(), "choices": choices})


def report_nothing_fits(plan: Plan, *, certain: bool) -> None:
    """Raises an error, or warns if that is not certain: a tracer does not show how its array will be sharded."""
    if certain:
        raise NothingFitsError(str(plan))
    warnings.warn(str(plan), TightMemoryWarning, stacklevel=user_stacklevel())


def _identity(gradient: PlannableGradient) -> list[Any]:
    """Everything that the memory and time of a gradient depend on."""
    options = gradient.options
    config: Any = jax.config
    devices = gradient.devices or [default_device()]
    kinds = sorted({device.device_kind for device in devices})
    roles = [[describe_placed(leaf) for leaf in part] for part in gradient.arguments.arrays]
    return [
        fingerprint(gradient.loss.traced.jaxpr),
        gradient.identity,
        *_registered_rules(gradient.loss.traced.jaxpr),
        [options.reduction, str(options.accumulator_dtype), str(options.aux_reduction), options.has_aux],
        roles,
        *(["noise"] if options.noise else []),  # this takes the memory of one more gradient
        [kinds, len(devices), str(jax.sharding.get_abstract_mesh()), gradient.vmap_copies],
        None if gradient.shardings is None else gradient.shardings.description,
        [*versions.versions(), __version__],
        [os.environ.get("XLA_FLAGS", ""), str(config.jax_default_matmul_precision), str(config.jax_enable_x64)],
    ]


def _registered_rules(jaxpr: Any) -> list[str]:
    """The user-registered rules for primitives of this jaxpr: with another rule, the plan may be another."""
    rules = ((name, fingerprint_of_function(pair)) for name, pair in sorted(USER_RULES.items()) if uses(jaxpr, name))
    return [f"{name}: {text}" for name, text in rules]
