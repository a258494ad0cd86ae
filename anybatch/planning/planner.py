"""From a gradient to the way it is computed: what is known of it, what must be found out, and what is remembered."""

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
from anybatch.call.caches import Cache
from anybatch.call.memory import default_device, readable
from anybatch.call.options import POLICIES
from anybatch.call.placement import describe_placed
from anybatch.call.programs import PROGRAMS, CompiledProgram
from anybatch.errors import AnybatchError, NothingFitsError, TightMemoryWarning, user_stacklevel
from anybatch.jaxprs import versions
from anybatch.jaxprs.bytes_written import uses
from anybatch.planning import store
from anybatch.planning.budget import Budget, agreed, budget_of
from anybatch.planning.candidates import Search
from anybatch.planning.explanation import as_plan
from anybatch.planning.measure import Workbench, generous_bytes
from anybatch.planning.plan import Plan
from anybatch.planning.store import fingerprint, fingerprint_of_function
from anybatch.planning.strategy import Planned, Strategy, Variant
from anybatch.reading.rules import USER_RULES


@dataclasses.dataclass(frozen=True)
class Decision:
    """The way to go, and its program if that has been compiled on the way."""

    strategy: Strategy
    program: CompiledProgram | None = None
    total: int | None = None  # its bytes, if they are known
    is_guess: bool = False


# What was decided in this process, by what it was decided for. A plan is made once: what is left of the memory changes
# from call to call, and a microbatch size that changed with it would compile again and again.
_DECIDED: Cache[tuple[Strategy, int | None]] = Cache(4096)  # with its bytes, if they are known


class Planner:
    """Plans one gradient."""

    def __init__(
        self,
        gradient: Planned,
        *,
        are_given: bool = True,
        copies: int = 0,
        source: str | None = None,
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Plans a gradient.

        Args:
          gradient: the gradient.
          are_given: whether its arrays lie on a device, or will when it runs.
          copies: how many copies of what is differentiated the step around it needs beside the gradient's own memory.
          source: where its budget comes from, in words, if not from `memory=` as the user gave it.
          notify: is told what is being done.
        """
        self.gradient, self.notify, self.copies, self.source = gradient, notify, copies, source
        self.options = gradient.options
        # Processes that run one program together must decide alike: by bytes alone, and by nothing that one remembers.
        self.is_shared = gradient.shardings is not None and jax.process_count() > 1
        self.is_kept = not gradient.loss.traced.has_effects and not self.is_shared
        self.full = Strategy(gradient.share, *self.variants[0])
        self.are_given = are_given
        self.key = store.key_of(_identity(gradient))

    @functools.cached_property
    def budget(self) -> Budget:
        budget = budget_of(self.gradient, are_given=self.are_given)
        if self.source is not None:
            budget = dataclasses.replace(budget, source=self.source)
        if self.copies and budget.allowed is not None and self.options.memory is None:
            less = self.copies * self.gradient.local_bytes("wrt")
            budget = dataclasses.replace(
                budget,
                allowed=max(1, budget.allowed - less),
                source=f"{budget.source}, less {readable(less)} to update",
            )
        return agreed(budget) if self.is_shared else budget

    @property
    def variants(self) -> tuple[Variant, ...]:
        """What there is to choose from beside the size: what takes the least time first."""
        remats: tuple[str | None, ...] = (self.options.remat,)
        if self.options.remat == "auto":
            remats = (None,) if self.gradient.loss.traced.has_effects else (None, *POLICIES)
        reduces, methods = self.gradient.reduces, self.gradient.methods
        return tuple(Variant(*each) for each in itertools.product(remats, reduces, methods))

    # For value_and_grad.

    def decide(self) -> Decision:
        """The way to compute the gradient now. Nothing is run to find it.

        Raises:
          NothingFitsError: if no way fits, and that can be known.
        """
        if self.options.on_coupled == "error" and self.options.reduction == "infer":
            assert self.gradient.checked_reading  # whether it is refused must not depend on the memory
        decided = _DECIDED.get(self._decision_key)
        if decided is not None and self._leaves_room(decided[1]):
            return Decision(decided[0])
        decision = self._remembered() or self._generous() or self._searched()
        if not decision.is_guess:
            self.remember(decision.strategy, decision.total)
        return decision

    def remember(self, strategy: Strategy, total: int | None = None) -> None:
        """Lets a way be the way for this gradient from now on, in this process."""
        _DECIDED.put(self._decision_key, (strategy, total))

    def _leaves_room(self, total: int | None) -> bool:
        """Whether what was decided outside `jit`, for a device with nothing else on it, will do for a whole step."""
        if total is None or self.options.memory is not None or (self._can_time and not self.copies):
            return True
        budget = self.budget
        return budget.allowed is None or total <= budget.allowed - budget.reserve

    @property
    def _decision_key(self) -> str:
        options = self.options
        return store.key_of(self.key, self._choice_key(timed=False), options.on_coupled)

    def _remembered(self) -> Decision | None:
        """What was measured before, perhaps in another process, if it is still of use."""
        record = self._load()
        strategy = self._choice(record, timed=True) or self._choice(record, timed=False)
        if strategy is None:
            return None
        bench = Workbench(self.gradient, record)
        found = bench.bytes[strategy]
        total = None if found is None else found.total
        if not bench.can_run:
            return Decision(strategy, total=total)
        expected = bench.text_hashes.get(strategy)
        try:
            program = bench.program(strategy)
        except jax.errors.JaxRuntimeError:
            return None
        if program.text_hash != expected:  # another program that looks alike: its bytes and times say nothing
            store.forget(self.key)
            return None
        PROGRAMS.keep(program)
        return Decision(strategy, program, total)

    def _generous(self) -> Decision | None:
        """All at once, where that fits by so much that nothing needs to be compiled to know it."""
        if self.options.objective == "memory" or self.options.memory is not None:
            return None  # a budget that somebody named is kept to the byte
        budget, needed = self.budget, generous_bytes(self.gradient)
        if budget.allowed is None:
            return Decision(self.full)
        fits = needed is not None and needed <= budget.allowed - budget.reserve
        return Decision(self.full) if fits else None

    def _searched(self) -> Decision:
        budget = self.budget
        try:
            plan, bench, _ = self._search(budget, timed=False)
        except (AnybatchError, jax.errors.JaxRuntimeError):
            raise
        except Exception:
            if Workbench(self.gradient).can_run:
                raise
            # Part of a program that cannot be compiled by itself: any size is right, so go by what it writes.
            likely = Search(Workbench(self.gradient), budget.allowed, self.variants).likely_fitting()
            warnings.warn(
                f"This gradient is part of a program without which it cannot be compiled, so that its memory is "
                f"estimated: {likely} should fit {budget}. Pass a microbatch_size if you know better.",
                TightMemoryWarning,
                stacklevel=user_stacklevel(),
            )
            return Decision(likely, is_guess=True)
        strategy = _way(plan)
        if strategy is None:
            say_that_nothing_fits(plan, certain=bench.can_run or self.options.memory is not None)
            strategy = Strategy(self.gradient.unit, *self.variants[-1])
        program = bench.programs.get(strategy)
        if program is not None:
            PROGRAMS.keep(program)
        return Decision(strategy, program, None if plan.chosen is None else plan.chosen.total)

    # For plan and explain.

    def plan(self, *, timed: bool, thorough: bool = False) -> Plan:
        """The plan, from what is known or by finding it out.

        Args:
          timed: whether candidates may be run, to find the fastest.
          thorough: whether to compile more than what it takes to decide, to show it.
        """
        start = time.perf_counter()
        budget, record = self.budget, self._load()
        timed = timed and self.options.objective == "speed" and self.is_kept
        # What was measured before counts, whether or not candidates may be run now.
        measured = self._choice(record, timed=True) if self.options.objective == "speed" else None
        remembered = measured or (None if timed else self._choice(record, timed=False))
        if remembered is not None:
            bench = Workbench(self.gradient, record)
            search = Search(bench, budget.allowed, self.variants, self.notify)
            shown = {self.full, *(Strategy(remembered.microbatch_size, *variant) for variant in self.variants)}
            if not thorough or shown <= set(bench.bytes):
                seconds = time.perf_counter() - start
                return as_plan(search, budget, remembered, seconds, by_time=measured is not None)
        may_time = timed and self._can_time
        plan, bench, search = self._search(budget, timed=may_time, thorough=thorough, measured=measured)
        strategy = _way(plan)
        if strategy is not None and plan.chosen is not None:
            self.remember(strategy, plan.chosen.total)
            if strategy in bench.programs:
                PROGRAMS.keep(bench.programs[strategy])
        return dataclasses.replace(plan, planning_seconds=time.perf_counter() - start)

    @property
    def _can_time(self) -> bool:
        return Workbench(self.gradient).can_run and not self.is_shared

    def _search(
        self, budget: Budget, *, timed: bool, thorough: bool = False, measured: Strategy | None = None
    ) -> tuple[Plan, Workbench, Search]:
        """Looks for the way.

        Args:
          budget: what may be taken.
          timed: whether candidates may be run.
          thorough: whether to compile more than what it takes to decide.
          measured: the way that was found to be fastest before, if it was looked for: there is only more to show.
        """
        start = time.perf_counter()
        bench = Workbench(self.gradient, self._load())
        search = Search(bench, budget.allowed, self.variants, self.notify)
        strategy = measured
        if measured is not None:
            pass
        elif self.options.objective == "memory":
            strategy = search.leanest()
        elif timed:
            strategy = search.fastest()
        else:
            if budget.reserve and budget.allowed is not None:
                roomy = Search(bench, budget.allowed - budget.reserve, self.variants, self.notify)
                strategy = roomy.any_fitting()
                search.predicted.update(roomy.predicted)
            strategy = strategy or search.any_fitting()
        if thorough:
            search.look_around(strategy, timed=timed)
        if strategy is None and bench.failures and not any(search.known.values()):
            raise next(iter(bench.failures.values()))  # it is not for memory that nothing can be chosen
        by_time = timed or measured is not None
        self._save(bench, strategy, budget, timed=by_time)
        seconds = time.perf_counter() - start
        return as_plan(search, budget, strategy, seconds, by_time=by_time), bench, search

    # What is kept on disk.

    def _choice_key(self, *, timed: bool) -> str:
        options = self.options
        return store.key_of(options.objective, options.memory, self.variants, self.are_given, timed)

    def _load(self) -> dict[str, Any]:
        return store.load(self.key) if self.is_kept else {}

    def _choice(self, record: dict[str, Any], *, timed: bool) -> Strategy | None:
        """The way that was chosen before, if it would be chosen again."""
        try:
            choice = record["choices"][self._choice_key(timed=timed)]
            strategy = Strategy(choice["size"], choice["remat"], choice["reduce"], choice.get("method"))
            found, then = Workbench(self.gradient, record).bytes[strategy], choice["budget"]
            allowed = self.budget.allowed
            if found is None or allowed is None or then is None:
                return strategy if found is not None and allowed is None else None
            # With much more memory than then, another may be better.
            is_similar = allowed <= 1.25 * then or self.gradient.is_at_once(strategy)
            return strategy if found.total <= allowed and self._leaves_room(found.total) and is_similar else None
        except (KeyError, TypeError):  # there is none, or it is damaged
            return None

    def _save(self, bench: Workbench, strategy: Strategy | None, budget: Budget, *, timed: bool) -> None:
        if not self.is_kept or (strategy is None and not bench.compilations):
            return
        record = self._load()
        kept = record.get("choices")
        choices = kept if isinstance(kept, dict) else {}
        if strategy is not None:
            chosen = {"size": strategy.microbatch_size, **strategy.variant._asdict(), "budget": budget.allowed}
            choices[self._choice_key(timed=timed)] = chosen
        store.save(self.key, {"ways": bench.record(), "choices": choices})


def say_that_nothing_fits(plan: Plan, *, certain: bool) -> None:
    """An error if it is certain, else a warning: at trace time nobody sees how arrays will be spread over devices."""
    if certain:
        raise NothingFitsError(str(plan))
    warnings.warn(str(plan), TightMemoryWarning, stacklevel=user_stacklevel())


def _way(plan: Plan) -> Strategy | None:
    chosen = plan.chosen
    return None if chosen is None else Strategy(chosen.microbatch_size, chosen.remat, chosen.reduce, chosen.method)


def _identity(gradient: Planned) -> list[Any]:
    """All that decides about bytes and times."""
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
        *(["noise"] if options.noise else []),  # it takes one more gradient
        [kinds, len(devices), str(jax.sharding.get_abstract_mesh()), gradient.copies],
        None if gradient.shardings is None else gradient.shardings.description,
        [*versions.versions(), __version__],
        [os.environ.get("XLA_FLAGS", ""), str(config.jax_default_matmul_precision), str(config.jax_enable_x64)],
    ]


def _registered_rules(jaxpr: Any) -> list[str]:
    """The rules that a user registered for primitives of this program: another rule may make another plan."""
    rules = ((name, fingerprint_of_function(pair)) for name, pair in sorted(USER_RULES.items()) if uses(jaxpr, name))
    return [f"{name}: {text}" for name, text in rules]
