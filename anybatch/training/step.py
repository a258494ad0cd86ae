"""A compiled step that fits the memory: checked before it runs, and made smaller if memory runs out all the same.

`train_step`: the gradient of a whole batch, and one update of an optimizer, as one compiled program.
"""

import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from anybatch.call.arguments import takes_batch
from anybatch.call.caches import Cache
from anybatch.call.memory import memory_budget, memory_left, readable
from anybatch.call.models import has_nnx, without_objects
from anybatch.call.options import Options
from anybatch.errors import InputError, NothingFitsError, TightMemoryWarning, user_stacklevel
from anybatch.gradients.computation import Gradient
from anybatch.jaxprs import versions
from anybatch.planning.measure import FAILURES
from anybatch.planning.plan import Plan
from anybatch.planning.planner import Planner
from anybatch.planning.running import halved, not_compiled
from anybatch.planning.strategy import Strategy
from anybatch.training.arrays import put_batch, ready_to_donate, refuse_deleted, unshared
from anybatch.training.feed import to_device
from anybatch.training.state import Constants, Meter, Metrics, TrainState, WithObjects, apart, kind_of, together
from anybatch.training.update import StepArguments, Update, sorted_arguments


class FittingProgram:
    """A step as a compiled program, with microbatches that let it fit.

    The gradient was planned by itself. Here the whole step counts: what XLA says it takes, with the state, the batch
    and the update. Nothing runs to find out.

    Args:
      make: makes the program for a way.
      strategy: to begin with.
      gradient: of the step.
      memory: what the whole step may take, if somebody named it.
      note: is told the way that is gone in the end.
    """

    def __init__(
        self,
        make: Callable[[Strategy], Any],
        strategy: Strategy,
        gradient: Gradient,
        memory: Any,
        note: Callable[[Strategy], None] = lambda strategy: None,
    ) -> None:
        self.strategy = strategy
        self._memory, self._note = memory, note
        self._make: Any = make
        self._gradient: Any = gradient
        self._program: Any = None
        self._has_run = False

    def __call__(self, arrays: list[Any], rows: list[Any]) -> Any:
        if not self._has_run:
            return self._first(arrays, rows)
        return self._program(arrays, rows)

    def compile(self, arrays: list[Any], rows: list[Any], *, is_adopted: bool = False) -> None:
        """Compiles it, with smaller microbatches until it fits.

        Args:
          arrays: of the state.
          rows: of the batch.
          is_adopted: whether the way was chosen by another process, whose bits would be others.

        Raises:
          NothingFitsError: if not even the smallest fits the memory that somebody named.
        """
        failures = 0
        while True:
            self._program = self._make(self.strategy)
            smaller = halved(self._gradient, self.strategy)
            try:
                stats = self._program.lower(arrays, rows).compile().memory_analysis()
            except jax.errors.JaxRuntimeError as error:
                failures += not versions.is_out_of_memory(error)
                if smaller is None or failures > FAILURES:
                    raise
                excess: str | None = not_compiled(self.strategy, error)
            else:
                excess = None if stats is None else self._excess(stats)
            if excess is None:
                break
            if smaller is None:
                if self._is_named:
                    raise NothingFitsError(f"{excess}\n{self._ways_out(arrays, rows, stats)}")
                warnings.warn(excess, TightMemoryWarning, stacklevel=user_stacklevel())
                break
            if is_adopted:
                warnings.warn(
                    f"{excess}\nThe run that goes on here had more. Going on with {smaller}: the gradient is the same, "
                    "but for the last bits.",
                    TightMemoryWarning,
                    stacklevel=user_stacklevel(),
                )
            self.strategy = smaller
        self._note(self.strategy)

    def _ways_out(self, arrays: list[Any], rows: list[Any], stats: Any) -> str:
        """What lets the step fit, as far as it was tried."""
        strategies = [f"Pass memory={self._needed(stats)} (bytes) or more", "spread the state over a mesh (mesh=)"]
        if self.strategy.remat is None and self._gradient.options.remat is None:
            twice = self._make(dataclasses.replace(self.strategy, remat="nothing_saveable"))
            if self._excess(twice.lower(arrays, rows).compile().memory_analysis()) is None:
                strategies.append(
                    'pass remat="auto", which computes activations twice instead of keeping them, and fits'
                )
        return f"{', or '.join(strategies)}."

    @property
    def _is_named(self) -> bool:
        return self._memory is not None and not (isinstance(self._memory, str) and "%" in self._memory)

    def _excess(self, stats: Any) -> str | None:
        """By how much the step is too large, in words."""
        needed = self._needed(stats)
        if self._is_named:
            allowed, where = memory_budget(self._memory), f"memory={self._memory!r}"
        else:
            if jax.process_count() > 1:  # all of them must decide alike, and each has something else left
                return None
            allowed, where = memory_left(self._gradient.devices), "what is left"
        if allowed is None or needed <= allowed:
            return None
        parts = f"{readable(stats.argument_size_in_bytes)} of it for the state and the batch"
        return (
            f"A step with {self.strategy} needs {readable(needed)}, {parts}: more than {readable(allowed)} ({where})."
        )

    def _needed(self, stats: Any) -> int:
        """The bytes that count: of memory that somebody named, the state and the batch too; else what is new."""
        new = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        return int(new + stats.argument_size_in_bytes if self._is_named else new)

    def _first(self, arrays: list[Any], rows: list[Any]) -> Any:
        """Whether memory suffices shows for certain only when the program has run."""
        begun_with = self.strategy
        while True:
            try:
                results = self._program(arrays, rows)
                jax.block_until_ready(results)
                break
            except jax.errors.JaxRuntimeError as error:
                smaller = halved(self._gradient, self.strategy)
                if (
                    smaller is None
                    or not versions.is_out_of_memory(error)
                    or jax.process_count() > 1
                    or _any_gone(arrays)
                ):
                    raise
            self.strategy = smaller
            self._program = self._make(smaller)
        self._has_run = True
        self._note(self.strategy)
        self._make = self._gradient = None  # they know the arrays of the first call, which may go now
        if self.strategy != begun_with:
            warnings.warn(
                f"Memory ran out at {begun_with}, though it should have fit: another process may use the device, or no "
                f"gap between the arrays on it is large enough. Going on with {self.strategy}; "
                "the gradient is the same.\n"
                f"To begin there, pass {self.strategy}, or a smaller memory=.",
                TightMemoryWarning,
                stacklevel=user_stacklevel(),
            )
        return results


def _any_gone(arrays: Sequence[Any]) -> bool:
    """Whether a program that failed has taken the memory of its arguments with it."""
    return any(array.is_deleted() for array in arrays)


# Without several of them the noise of a gradient cannot be told, and few tell little.
MICROBATCHES_FOR_NOISE = 4

# What an update holds beside the gradient: the updates; without donation also a new state, two moments in it.
COPIES, COPIES_WITHOUT_DONATION = 1, 4

# So many programs of one step are worth a word.
MANY_PROGRAMS = 16  # a warning says so
MOST_PROGRAMS = 64


@dataclasses.dataclass(frozen=True)
class _Last:
    """The state that was returned last, if it is alive, and what is known of it: most steps go on from that."""

    state: Callable[[], Any]
    kind: Any
    about_state: Constants
    about_arrays: Any
    about_batch: Any  # that it was computed with
    program: tuple[Callable[..., Any], int]
    types: frozenset[type]  # of its arrays

    def arrays_of(self, state: Any) -> list[Any] | None:
        """The arrays of the state; None if it is another one, or was changed in place: a dict in it can be."""
        if self.state() is not state:
            return None
        leaves, structure = jax.tree.flatten(state)
        if structure != self.about_state.tree:
            return None
        if self.about_state.told_apart:  # there are constants
            pairs = list(zip(leaves, self.about_state.fixed, strict=True))
            if any(fixed is not None and leaf is not fixed for leaf, fixed in pairs):
                return None
            leaves = [leaf for leaf, fixed in pairs if fixed is None]
        return leaves if self.types.issuperset(map(type, leaves)) else None


class TrainStep:
    """A step of training; made by `anybatch.train_step`."""

    def __init__(self, update: Update, *, tokens: Callable[[Any], int] | None, donate: bool) -> None:
        self._update, self._tokens, self._donate = update, tokens, donate
        self._over, self._is_planned = update.options.mesh_options, update.options.microbatch_size == "auto"
        # By what they were compiled for: programs, and the number of their examples.
        self._programs: Cache[tuple[Callable[..., Any], int]] = Cache(MOST_PROGRAMS, of_programs=True)
        self._ways: dict[str, Strategy] = {}  # that were decided, by the type of the batch
        self._adopted: set[str] = set()
        self._meter = Meter()
        self._last: _Last | None = None

    def init(self, params: Any, key: Any = None, model_state: Any = None) -> TrainState:
        """The state before the first step, with copies of the parameters: your own arrays stay as they are.

        Args:
          params: to begin with: any pytree, an Equinox model too; or a function without arguments that makes it, so
            that there is no second copy.
          key: for a loss that draws random numbers, `loss(params, batch, key)`.
          model_state: for a loss with `has_state=True`, `loss(params, model_state, batch)`.

        Raises:
          InputError: if there is nothing to train, no optimizer, or the key is none.
        """
        if self._update.optimizer is None:
            raise InputError(
                "A state of ours needs an optimizer",
                given="optimizer=None",
                remedy="Pass one, e.g. ab.train_step(loss, optax.adamw(3e-4)).",
            )
        refuse_deleted(jax.tree.leaves((params, key, model_state)), "step.init(params)")
        if callable(params) and jax.tree.leaves(params) == [params]:  # not a model that can be called
            params = params()
        else:
            params = _copied(params)
        return TrainState.create(params, self._update.optimizer, _copied(key), _copied(model_state))

    def __call__(self, state: Any, batch: Any, *others: Any, **kwargs: Any) -> tuple[Any, Metrics]:
        if others:
            _refuse_others(state, others)
        last = self._last
        known = None if last is None or without_objects(kwargs)[1] else last.arrays_of(state)
        if last is not None and known is not None:  # as it was returned: it need not be looked at again
            given = StepArguments(last.kind, known, last.about_state, *apart((batch, kwargs)))
            about_arrays, is_traced = last.about_arrays, any(map(_is_traced, given.rows))
        else:
            last, (given, state) = None, self._given(state, batch, kwargs)
            is_traced = any(map(_is_traced, (*given.arrays, *given.rows)))
        if is_traced:
            return self._traced(state, batch, given)
        refuse_deleted(given.arrays, "step(state, batch)")
        rows = put_batch(given.rows, self._over)
        if self._donate and kwargs:  # an array that is used up cannot be an argument by itself, too
            used_up = set(map(id, given.arrays))
            rows = [row.copy() if id(row) in used_up else row for row in rows]
        if self._donate and given.kind.changes_model:
            given = given.with_arrays(unshared(given.arrays), given.rows)
        if last is None:
            given = given.with_arrays(ready_to_donate(given.arrays, self._over, copy=self._donate), rows)
            about_arrays = given.about_arrays()
        else:
            given = given.with_arrays(given.arrays, rows)
        about_batch = (given.about_call, given.about_rows())
        if last is not None and last.about_batch == about_batch:
            program, examples = last.program
        else:
            program, examples = self._program(given, (given.kind, given.about_state, about_arrays, *about_batch))
        arrays, results = program(given.arrays, given.rows)
        self._meter.begin()
        tokens = self._num_tokens(batch)
        metrics = Metrics(**results, examples=examples, tokens=tokens, _reading=self._meter.count(examples, tokens))
        state = given.kind.rebuild(state, arrays, given.about_state)
        self._last = None
        if not given.kind.changes_model:  # one that is changed in place tells nothing by being the same
            self._last = _Last(
                weakref.ref(state),
                given.kind,
                given.about_state,
                about_arrays,
                about_batch,
                (program, examples),
                frozenset(map(type, arrays)),
            )
        return state, metrics

    def plan(self, state: Any, batch: Any, *, timed: bool = False, **kwargs: Any) -> Plan:
        """Which way the gradient of a step will be computed, as `anybatch.plan` has it. The step will go that way."""
        return self._planned(state, batch, kwargs, timed=timed)

    def explain(
        self,
        state: Any,
        batch: Any,
        *,
        timed: bool = True,
        progress: Callable[[str], None] | None = None,
        **kwargs: Any,
    ) -> Plan:
        """The same, with what was not chosen, as `anybatch.explain` has it. If `timed`, the fastest is taken."""
        return self._planned(state, batch, kwargs, timed=timed, thorough=True, progress=progress)

    def put(self, batch: Any) -> Any:
        """A copy of a batch where the step wants it: on the device, or over those of its mesh."""
        if self._over is None:
            return to_device(batch)
        rows, constants = apart(batch)
        return together(put_batch(rows, self._over, copy=True), constants)

    def lower(self, state: Any, batch: Any, **kwargs: Any) -> Any:
        """The whole step before it is compiled, as `jax.jit(...).lower` has it: for its text, memory or cost."""
        given = self._placed(self._given(state, batch, kwargs)[0])
        gradient = self._update.gradient(given)
        return self._jitted(given, gradient.options, self._decided(given, gradient)).lower(given.arrays, given.rows)

    @property
    def donates(self) -> bool:
        """Whether it uses up the states that it is given."""
        return self._donate

    @property
    def decisions(self) -> dict[str, list[Any]]:
        """The ways that plans have chosen for batches of each type, for `adopt`: the same ways give the same bits."""
        return {name: [strategy.microbatch_size, *strategy.variant] for name, strategy in self._ways.items()}

    def adopt(self, decisions: Mapping[str, Any]) -> None:
        """Goes the ways that were chosen elsewhere, instead of planning anew, and whatever was planned before."""
        strategies = {name: Strategy(size, *style) for name, (size, *style) in decisions.items()}
        if any(self._ways.get(name) != strategy for name, strategy in strategies.items()):
            self._forget_programs()
        self._ways |= strategies
        self._adopted |= set(strategies)

    def _given(self, state: Any, batch: Any, kwargs: dict[str, Any]) -> tuple[StepArguments, Any]:
        """What a step is given, and the state as its kind has it: with objects of NNX among the keyword arguments."""
        kind = kind_of(state, self._update.optimizer)
        kwargs, objects = without_objects(kwargs)
        if objects:
            kind, state = WithObjects(kind), (state, objects)
        arrays, about_state = kind.apart(state)
        rows, about_call = apart((batch, kwargs))
        return StepArguments(kind, arrays, about_state, rows, about_call), state

    def _placed(self, given: StepArguments) -> StepArguments:
        """What is to be planned, where it belongs."""
        refuse_deleted(given.arrays, "step.plan(state, batch)")
        arrays = ready_to_donate(given.arrays, self._over, copy=False)
        return given.with_arrays(arrays, put_batch(given.rows, self._over))

    def _program(self, given: StepArguments, signature: Any) -> tuple[Callable[..., Any], int]:
        """The program for what is given, and the number of examples that it takes."""
        try:
            found = self._programs.get(signature)
        except TypeError as error:
            raise InputError(
                "What is no array in a state, a batch or a keyword argument is a constant, which must be hashable",
                given=str(error),
                remedy="Pass arrays, numbers, strings or functions; a list or a dict of them is fine.",
            ) from error
        if found is not None:
            return found
        found = self._compiled(given)
        self._programs.put(signature, found)
        if len(self._programs) == MANY_PROGRAMS:
            warnings.warn(
                f"This step was compiled {MANY_PROGRAMS} times, for as many shapes of batches or values of constants. "
                "Pass numbers that change as arrays, e.g. jnp.asarray(0.1), and pad batches to a few sizes.",
                RuntimeWarning,
                stacklevel=user_stacklevel(),
            )
        return found

    def _forget_programs(self) -> None:
        self._programs.cache_clear()
        self._last = None

    def _traced(self, state: Any, batch: Any, given: StepArguments) -> tuple[Any, Metrics]:
        """A step that is part of a larger program."""
        _, call = self._update.call(given)
        options = self._update.options_of(call)
        arrays, results = self._update.results(given, options)
        examples = sorted_arguments(call, options).num_examples
        metrics = Metrics(**results, examples=examples, tokens=self._num_tokens(batch))
        return given.kind.rebuild(state, arrays, given.about_state), metrics

    def _num_tokens(self, batch: Any) -> int | None:
        return None if self._tokens is None else int(self._tokens(batch))

    # How it is planned and compiled.

    def _compiled(self, given: StepArguments) -> tuple[Callable[..., Any], int]:
        gradient = self._update.gradient(given)
        strategy = self._decided(given, gradient)
        if not self._is_planned:
            return self._jitted(given, gradient.options, strategy), gradient.examples
        memory = self._update.options.memory

        def make(strategy: Strategy) -> Any:
            return self._jitted(given, gradient.options, strategy)

        def note(strategy: Strategy) -> None:
            self._ways[name] = strategy

        name = given.name
        program = FittingProgram(make, strategy, gradient, memory, note)
        program.compile(given.arrays, given.rows, is_adopted=name in self._adopted)
        return program, gradient.examples

    def _jitted(self, given: StepArguments, options: Options, strategy: Strategy) -> Any:
        options = dataclasses.replace(options, microbatch_size=strategy.microbatch_size, remat=strategy.remat)
        if options.mesh is not None:
            options = dataclasses.replace(options, reduce=strategy.reduce)
        frame = given.with_arrays([], [])  # a program must not keep the arrays that it was compiled for

        def train_step(arrays: list[Any], rows: list[Any]) -> Any:
            return self._update.results(frame.with_arrays(arrays, rows), options)

        # A state stays where it is, so that the next step finds it there.
        places = [array.sharding if len(array.sharding.device_set) > 1 else None for array in given.arrays]
        out: dict[str, Any] = {"out_shardings": (places, None)} if any(places) else {}
        return jax.jit(train_step, donate_argnums=(0,) if self._donate else (), **out)

    def _decided(self, given: StepArguments, gradient: Gradient) -> Strategy:
        options = gradient.options
        if not isinstance(options.microbatch_size, str):
            return Strategy(options.microbatch_size, options.fixed_remat, options.fixed_reduce)
        strategy = self._ways.get(given.name)
        if strategy is None:
            with gradient.context():
                strategy = self._planner(gradient).decide().strategy
        return self._with_noise(strategy, gradient)

    def _with_noise(self, strategy: Strategy, gradient: Gradient) -> Strategy:
        """If the noise is wanted, in no fewer microbatches than let it be told."""
        if not self._update.noise_scale:
            return strategy
        unit, parts = gradient.size_multiple, -(-MICROBATCHES_FOR_NOISE // gradient.num_batch_shards)
        size = (
            gradient.max_microbatch_size
            if gradient.is_full_batch(strategy) or strategy.microbatch_size is None
            else strategy.microbatch_size
        )
        return Strategy(min(size, max(unit, gradient.max_microbatch_size // parts // unit * unit)), *strategy.variant)

    def _planner(self, gradient: Gradient, progress: Callable[[str], None] | None = None) -> Planner:
        copies = COPIES if self._donate else COPIES_WITHOUT_DONATION
        memory, source = self._update.options.memory, None
        if gradient.options.memory != memory:
            kept = (memory_budget(memory) or 0) - (memory_budget(gradient.options.memory) or 0)
            source = f"memory={memory!r}, less {readable(kept)} that the optimizer keeps"
        return Planner(gradient, parameter_copies=copies, source=source, notify=progress or (lambda text: None))

    def _planned(
        self, state: Any, batch: Any, kwargs: Any, *, timed: bool, thorough: bool = False, progress: Any = None
    ) -> Plan:
        given = self._placed(self._given(state, batch, kwargs)[0])
        gradient = self._update.gradient(given)
        with gradient.context():
            plan = self._planner(gradient, progress).plan(timed=timed, thorough=thorough)
        if plan.chosen is not None and self._is_planned:
            strategy = Strategy(plan.chosen.microbatch_size, plan.chosen.remat, plan.chosen.reduce, plan.chosen.method)
            strategy, before = self._with_noise(strategy, gradient), self._ways.get(given.name)
            self._ways[given.name] = strategy
            if before not in (None, strategy):
                self._forget_programs()  # the next step goes this way
        return plan


def _refuse_others(state: Any, others: tuple[Any, ...]) -> None:
    raise InputError(
        "A step takes a state and a batch; everything else is passed by keyword",
        given=f"{2 + len(others)} arguments by position, the first of type {type(state).__name__}",
        remedy="A model of NNX and its optimizer are one state: step((model, optimizer), batch)."
        if has_nnx(state)
        else 'Make the batch one tree, step(state, {"x": x, "y": y}); or name what has rows, '
        'ab.train_step(..., batch_argnames=("y",)), and pass step(state, x, y=y).',
    )


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)


def _copied(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


def train_step(
    loss: Callable[..., Any],
    optimizer: Any = None,
    *,
    has_aux: bool = False,
    has_state: bool = False,
    noise_scale: bool = False,
    tokens: Callable[[Any], int] | None = None,
    skip_nonfinite: bool = True,
    donate: bool = True,
    **options: Any,
) -> TrainStep:
    """A step of training: the exact gradient of the whole batch, in the memory you have, and one update.

    **Exact.** The gradient is that of `anybatch.value_and_grad`: of the full batch, whatever the microbatches. So is
    the loss curve.

    **One program.** Gradient and update are compiled together, once for batches of one kind; the state's buffers are
    donated, so that it takes its memory once. `microbatch_size="auto"` plans before the first step, and the whole step
    is checked against the memory before it runs.

    **Nothing half done.** If the gradient has an entry that is not finite, parameters and optimizer state stay as
    they were, all of them, and `state.skipped` counts it.

    >>> import jax.numpy as jnp, optax, anybatch as ab
    >>> def loss(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> step = ab.train_step(loss, optax.sgd(0.1), microbatch_size=2)
    >>> state = step.init({"w": jnp.zeros(3)})
    >>> batch = {"x": jnp.ones((8, 3)), "y": jnp.ones(8)}
    >>> for _ in range(30):
    ...     state, metrics = step(state, batch)
    >>> print(f"loss {metrics.loss:.3f} after {state.step} steps, {state.skipped} skipped")
    loss 0.000 after 30 steps, 0 skipped

    Args:
      loss: of the whole batch: `loss(params, batch)`, or `loss(params, batch, key)` if the state has a key; a step gets
        `jax.random.fold_in(state.key, state.step)`. `params` is what the state has: any pytree, an Equinox model, or a
        model of `flax.nnx`. Keyword arguments of a step are passed on to it; `batch_argnames=` names those with rows.
        Objects of `flax.nnx` among them, such as `nnx.Rngs`, are changed in place, as under `nnx.jit`.
      optimizer: of optax, or anything with its `init` and `update`. None for states that have their own: a `TrainState`
        of flax, or a pair `(model, nnx.Optimizer(...))`.
      has_aux: whether the loss returns a pair `(loss, aux)`. aux is that of the full batch.
      has_state: whether the model keeps more than its parameters, such as the running averages of BatchNorm. The loss
        is then `loss(params, model_state, batch)` or `loss(params, model_state, batch, key)`, and returns
        `(loss, model_state)`; with `has_aux`, `(loss, (aux, model_state))`. The state keeps it in `state.model_state`;
        a `TrainState` of flax in its field `batch_stats` or `model_state`. It is that of the full batch, too. Models of
        `flax.nnx` keep their own, and need no option.
      noise_scale: whether the metrics tell of the noise in the gradient, as `anybatch.noise_scale` does. It takes the
        memory of one more gradient; a plan then has at least four microbatches.
      tokens: how many tokens a batch has, a function of the batch, e.g. `lambda batch: batch["tokens"].size`, for
        `metrics.tokens_per_second`. It is called outside of the program: look at shapes, not at values.
      skip_nonfinite: whether a gradient that is not finite is to change nothing.
      donate: whether the memory of the state that is given is used for the one that is returned. The state given is
        then gone, as with `jax.jit(..., donate_argnums=0)`. Of objects of `flax.nnx`, arrays that something else holds
        too, such as a clone of a model, are copied instead.
      **options: those of `anybatch.value_and_grad`: `microbatch_size`, `memory`, `mesh`, `reduction`, `remat`, ...
        Here, `memory` is what the whole step may take, the state too.

    Returns:
      `step`: `state = step.init(params, key)`, `state, metrics = step(state, batch)`, `step.explain(state, batch)`.
      The metrics are an `anybatch.Metrics`.

    Raises:
      InputError: for arguments that cannot be worked with, and for a batch without examples. Before any work is done.
      NothingFitsError: at the first step, if no microbatch lets it fit the memory.
      What `value_and_grad` raises.
    """
    fixed = [name for name in ("argnums", "batch_argnums") if name in options]
    if fixed:
        raise InputError(
            "The parameters are the first argument of the loss, and the batch is the second",
            given=", ".join(f"{name}={options[name]!r}" for name in fixed),
            remedy="Wrap the loss: lambda params, batch: loss(...). Several arrays of a batch go into one tree.",
        )
    for name, flag in (("has_aux", has_aux), ("has_state", has_state)):
        if not isinstance(flag, bool):
            raise InputError(
                f"{name} must be True or False", given=f"{name}={flag!r}", remedy=f"Pass {name}=True, or leave it out."
            )
    if tokens is not None and not callable(tokens):
        raise InputError(
            "tokens must be a function of the batch",
            given=f"tokens={tokens!r}",
            remedy='For example tokens=lambda batch: batch["tokens"].size.',
        )
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(
            "The optimizer must be one of optax, with init and update",
            given=f"optimizer={optimizer!r}",
            remedy="For example optax.adamw(3e-4). A state of flax, or of nnx, has its own: leave it out.",
        )
    checked = Options.of(loss, has_aux=has_aux, noise=noise_scale, **options)
    if not takes_batch(loss):
        raise InputError(
            "The loss of a step must take the parameters and the batch",
            given=f"a loss that takes {inspect.signature(loss)}",
            remedy="If it closes over its batch, make the batch an argument: def loss(params, batch): ..., called by "
            'step(state, batch). Several arrays of a batch go into one tree, e.g. {"x": x, "y": y}.',
        )
    return TrainStep(Update(loss, optimizer, has_state, skip_nonfinite, checked), tokens=tokens, donate=donate)
