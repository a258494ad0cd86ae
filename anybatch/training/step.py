"""`train_step`: the gradient of a full batch and one optimizer update, as one compiled program.

From the top: `train_step` checks its arguments and makes a `TrainStep`. That plans a strategy for each new type of
batch, compiles the computation of `update.py` for it, and calls the program. A `FittingProgram` is such a program whose
microbatches are made smaller until the complete step fits in memory. Each call returns the new state and `Metrics`.
"""

import dataclasses
import functools
import inspect
import math
import threading
import time
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.call.arguments import takes_batch
from anybatch.call.caches import Cache
from anybatch.call.memory import default_device, readable
from anybatch.call.models import has_nnx, without_objects
from anybatch.call.options import Options
from anybatch.errors import InputError, NothingFitsError, TightMemoryWarning, warn
from anybatch.gradient_noise.noise_scale import NoiseScale
from anybatch.gradients.computation import Gradient
from anybatch.jaxprs import versions
from anybatch.planning.budget import allowed_memory, is_explicit
from anybatch.planning.measure import FAILURES
from anybatch.planning.plan import Plan
from anybatch.planning.planner import Planner
from anybatch.planning.progress import shown
from anybatch.planning.running import halved, not_compiled, run_until_it_fits
from anybatch.planning.strategy import Strategy
from anybatch.training.arrays import (
    Constants,
    is_large,
    is_on_host,
    merge_arrays,
    moved_arrays,
    put_batch,
    ready_to_donate,
    refuse_deleted,
    split_arrays,
    unshared,
)
from anybatch.training.offload import check_devices, host_bytes, init_on_host, saved_bytes
from anybatch.training.prefetch import to_device
from anybatch.training.state import StateAdapter, TrainState, WithObjects, adapter_for
from anybatch.training.update import StepInputs, Update, sorted_arguments


@dataclasses.dataclass(frozen=True, eq=False)
class Metrics:
    """The metrics of one step, as a pytree. Its arrays may still be computing when the step returns.

    Args:
      loss: the loss of the full batch, before the update.
      aux: the auxiliary output of the loss, or None.
      gradient_norm: the norm of the full batch's gradient, before the optimizer.
      skipped: True if the update was skipped because the gradient was not finite.
      noise: the gradient noise of this step, with `noise_scale=True`. One step says little: add several up.
      examples: the number of examples in the batch.
      tokens: the number of tokens in the batch, if `train_step` was given `tokens=`.
    """

    loss: Any
    aux: Any
    gradient_norm: Any
    skipped: Any
    noise: NoiseScale | None
    examples: Any
    tokens: Any
    _rates: Any = dataclasses.field(default=None, repr=False)  # a RateSnapshot; not part of the pytree

    @property
    def examples_per_second(self) -> float:
        """Examples per second since a rate was last read. Waits for this step. NaN if unknown, e.g. under `jit`."""
        return math.nan if self._rates is None else self._rates.read(self.loss)[0]

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second since a rate was last read. NaN if tokens are not counted."""
        return math.nan if self._rates is None else self._rates.read(self.loss)[1]


jax.tree_util.register_dataclass(
    Metrics,
    data_fields=[field.name for field in dataclasses.fields(Metrics) if field.name != "_rates"],
    meta_fields=[],
    drop_fields=["_rates"],
)


class RateMeter:
    """Counts the examples and tokens of all steps, and computes rates when they are read.

    A step returns before its results are computed, so the duration of the call says nothing. A rate is therefore
    averaged over all steps between two moments at which a step was known to be done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._examples = self._tokens = 0
        self._since: tuple[float, int, int] | None = None

    def start(self) -> None:
        """Starts the clock, unless it runs already. Called after compilation, which must not count."""
        if self._since is None:
            self._since = (time.perf_counter(), self._examples, self._tokens)

    def count(self, examples: int, tokens: int | None) -> "RateSnapshot":
        """Adds one step. Returns the counts after it."""
        self._examples += examples
        self._tokens += tokens or 0
        return RateSnapshot(self, self._examples, self._tokens, tokens is not None)

    def rates(self, examples: int, tokens: int) -> tuple[float, float]:
        """Examples and tokens per second up to these counts, which have just been reached."""
        now = time.perf_counter()
        with self._lock:
            if self._since is None or examples <= self._since[1]:
                return math.nan, math.nan
            then, examples_then, tokens_then = self._since
            self._since = (now, examples, tokens)
        seconds = max(now - then, 1e-9)
        return (examples - examples_then) / seconds, (tokens - tokens_then) / seconds


@dataclasses.dataclass
class RateSnapshot:
    """The counts of a `RateMeter` after one step."""

    meter: RateMeter
    examples: int
    tokens: int
    has_tokens: bool
    _read: tuple[float, float] | None = None

    def read(self, result: Any) -> tuple[float, float]:
        """Waits for `result`. Returns examples and tokens per second; a second call returns the same numbers."""
        if self._read is None:
            jax.block_until_ready(result)
            examples, tokens = self.meter.rates(self.examples, self.tokens)
            self._read = examples, tokens if self.has_tokens else math.nan
        return self._read


# The noise scale is estimated from the differences between microbatches, so it needs several.
MICROBATCHES_FOR_NOISE = 4

# Copies of the parameters that an update holds beside the gradient: the updates. Without donation also the new
# parameters and two new moments.
COPIES, COPIES_WITHOUT_DONATION = 1, 4

OFFLOAD = 'offload="optimizer"'  # a way out, in errors

MANY_PROGRAMS = 16  # compiled for one step: a warning says so
MOST_PROGRAMS = 64  # that one step keeps


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
    offload: str | None = None,
    **options: Any,
) -> "TrainStep":
    """Makes a training step: the exact gradient of the full batch, in the memory you have, and one optimizer update.

    **Exact.** The gradient is that of `anybatch.value_and_grad`: the full batch's gradient, whatever the microbatch
    size. So the loss curve is that of training with the full batch.

    **One program.** Gradient and update are compiled together, once per type of batch. The state's buffers are
    donated, so the state is in memory once. `microbatch_size="auto"` plans before the first step, and the memory of the
    complete step is checked before it runs.

    **All or nothing.** If an entry of the gradient is not finite, parameters and optimizer state stay unchanged, and
    `state.skipped` counts the step.

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
      loss: the loss of the full batch: `loss(params, batch)`, or `loss(params, batch, key)` if the state has a key.
        `params` are those of the state: any pytree, an Equinox model, or an NNX model. `key` is
        `jax.random.fold_in(state.key, state.step)`. Keyword arguments of a step are passed on to the loss;
        `batch_argnames=` names those with one row per example. NNX objects among them, such as `nnx.Rngs`, are changed
        in place, as under `nnx.jit`.
      optimizer: an optax optimizer, or any object with its `init` and `update`. None for states that have their own: a
        Flax `TrainState`, or a pair `(model, nnx.Optimizer(...))`.
      has_aux: whether the loss returns a pair `(loss, aux)`. `metrics.aux` is that of the full batch.
      has_state: whether the model has state other than its parameters, such as the running averages of BatchNorm. The
        loss is then called as `loss(params, model_state, batch)` or `loss(params, model_state, batch, key)`, and
        returns `(loss, model_state)`; with `has_aux`, `(loss, (aux, model_state))`. An `anybatch.TrainState` keeps it
        in `state.model_state`; a Flax `TrainState` in its field `batch_stats` or `model_state`. It equals that of the
        full batch, too. NNX models hold their own state and do not need this option.
      noise_scale: whether `metrics.noise` holds the gradient noise, as `anybatch.noise_scale` computes it. It takes the
        memory of one more gradient, and a plan then has at least four microbatches.
      tokens: a function of the batch that returns its number of tokens, e.g. `lambda batch: batch["tokens"].size`, for
        `metrics.tokens_per_second`. It runs outside of the compiled program: use shapes, not values.
      skip_nonfinite: whether a gradient that is not finite leaves the state unchanged.
      donate: whether the new state reuses the memory of the old one. The state that you pass in is then deleted, as
        with `jax.jit(..., donate_argnums=0)`. Arrays of NNX objects that other objects also hold, such as a clone of a
        model, are copied instead.
      offload: "optimizer" keeps the state of the optimizer in the host's memory (pinned, `memory_kind="pinned_host"`).
        A step copies one array of it after another to the device, updates it, and copies it back, so that at most a few
        of them are on the device at a time. Parameters and losses are the same as without, up to the rounding of the
        last digit where XLA fuses the update differently. Arrays of less than 64 KiB stay on the device. Without
        `step.init`, a state is moved by its first step. Needs devices with memory of that kind: GPUs, TPUs, CPUs.
        JAX cannot differentiate such a step, and the loss must not print or call back with `ordered=True`.
      **options: the options of `anybatch.value_and_grad`: `microbatch_size`, `memory`, `mesh`, `reduction`, `remat`,
        ... Here, `memory` is the budget of the complete step, including the state.

    Returns:
      A `TrainStep`: `state = step.init(params, key)`, `state, metrics = step(state, batch)`,
      `step.explain(state, batch)`. The metrics are an `anybatch.Metrics`.

    Raises:
      InputError: for invalid arguments, or a batch without examples. Raised before any work is done.
      NothingFitsError: at the first step, if no microbatch size fits in memory.
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
    if offload not in (None, "optimizer"):
        raise InputError(
            'offload must be "optimizer", or None to keep the state on the device',
            given=f"offload={offload!r}",
            remedy='Pass offload="optimizer", which keeps the state of the optimizer in the memory of the host.',
        )
    if optimizer is not None and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputError(
            "optimizer must be an optax optimizer, with init and update",
            given=f"optimizer={optimizer!r}",
            remedy="For example optax.adamw(3e-4). A state of Flax or NNX has its own: leave it out.",
        )
    checked = Options.of(loss, has_aux=has_aux, noise=noise_scale, **options)
    if not takes_batch(loss):
        raise InputError(
            "The loss of a step must take the parameters and the batch",
            given=f"a loss that takes {inspect.signature(loss)}",
            remedy="If it closes over its batch, make the batch an argument: def loss(params, batch): ..., called by "
            'step(state, batch). Several arrays of a batch go into one tree, e.g. {"x": x, "y": y}.',
        )
    update = Update(loss, optimizer, has_state, skip_nonfinite, checked, offload)
    return TrainStep(update, tokens=tokens, donate=donate)


class TrainStep:
    """A training step, made by `anybatch.train_step`: `state, metrics = step(state, batch)`."""

    def __init__(self, update: Update, *, tokens: Callable[[Any], int] | None, donate: bool) -> None:
        self._update, self._tokens, self._donate = update, tokens, donate
        self._over, self._is_planned = update.options.mesh_options, update.options.microbatch_size == "auto"
        # (program, number of examples) by the types and constants that it was compiled for.
        self._programs: Cache[tuple[Callable[..., Any], int]] = Cache(MOST_PROGRAMS, of_programs=True)
        self._strategies: dict[str, Strategy] = {}  # planned or adopted, by `StepInputs.name`
        self._adopted: set[str] = set()
        self._meter = RateMeter()
        self._last: _LastState | None = None

    def init(self, params: Any, key: Any = None, model_state: Any = None) -> TrainState:
        """The state before the first step. It holds copies of your arrays, which stay valid.

        Args:
          params: the initial parameters: any pytree, or an Equinox model; or a function without arguments that returns
            them, to avoid the copy.
          key: a PRNG key, for a loss that draws random numbers: `loss(params, batch, key)`.
          model_state: the initial state of the model, for a loss with `has_state=True`:
            `loss(params, model_state, batch)`.

        Raises:
          InputError: if there is nothing to train, no optimizer, or `key` is not a PRNG key.
        """
        if self._update.optimizer is None and not has_nnx(params):  # `TrainState.create` refuses NNX models
            raise InputError(
                "step.init makes an anybatch.TrainState, which needs an optimizer",
                given="optimizer=None",
                remedy="Pass one, e.g. ab.train_step(loss, optax.adamw(3e-4)).",
            )
        refuse_deleted(jax.tree.leaves((params, key, model_state)), "step.init(params)")
        leaves = jax.tree.leaves(params)
        if callable(params) and len(leaves) == 1 and leaves[0] is params:  # not a model that is callable
            params = params()
        else:
            params = _copied(params)
        optimizer = self._update.optimizer
        if self._update.offload is not None:
            optimizer = types.SimpleNamespace(init=functools.partial(init_on_host, optimizer.init))
        state = TrainState.create(params, optimizer, _copied(key), _copied(model_state))
        # Arrays that the optimizer itself holds, such as the key of `optax.add_noise`, must not be donated.
        arrays, constants = split_arrays(state.opt_state)
        return state.replace(opt_state=merge_arrays(unshared(arrays), constants))

    def __call__(self, state: Any, batch: Any, *others: Any, **kwargs: Any) -> tuple[Any, Metrics]:
        if others:
            _refuse_others(state, others)
        last = self._last
        arrays = None if last is None or without_objects(kwargs)[1] else last.arrays_of(state)
        if last is not None and arrays is not None:  # the state that was returned last needs no inspection
            of_batch = split_arrays((batch, kwargs))
            inputs = StepInputs(last.adapter, arrays, last.constants, *of_batch, on_host=last.on_host)
            state_types, is_traced = last.types, any(map(_is_traced, inputs.batch_arrays))
        else:
            last, (inputs, state) = None, self._inputs(state, batch, kwargs)
            is_traced = any(map(_is_traced, (*inputs.state_arrays, *inputs.batch_arrays)))
        if is_traced:
            return self._traced(state, batch, inputs)
        refuse_deleted(inputs.state_arrays, "step(state, batch)")
        batch_arrays = inputs.batch_arrays
        if self._donate:  # a donated array cannot also be another argument
            donated = set(map(id, inputs.state_arrays))
            batch_arrays = [array.copy() if id(array) in donated else array for array in batch_arrays]
        batch_arrays = put_batch(batch_arrays, self._over)
        if self._donate and inputs.adapter.mutates:
            inputs = inputs.with_arrays(unshared(inputs.state_arrays), inputs.batch_arrays)
        if last is None:
            given, inputs = inputs.state_arrays, self._ready(inputs, batch_arrays, copy=self._donate)
            state_types = inputs.state_types()
        else:
            inputs = inputs.with_arrays(inputs.state_arrays, batch_arrays)
        batch_key = (inputs.batch_constants, inputs.batch_types())
        # Without programs, `clear_caches` was called since.
        if last is not None and last.batch_key == batch_key and self._programs:
            program, examples = last.program
        else:
            key = (inputs.adapter, inputs.state_constants, state_types, *batch_key)
            program, examples = self._program(inputs, key)
        if last is None and self._donate:
            _delete_moved(given, inputs, program)
        new_arrays, results = program(inputs.state_arrays, inputs.batch_arrays)
        self._meter.start()
        tokens = self._num_tokens(batch)
        metrics = Metrics(**results, examples=examples, tokens=tokens, _rates=self._meter.count(examples, tokens))
        state = inputs.adapter.replace_arrays(state, new_arrays, inputs.state_constants)
        self._last = None
        if not inputs.adapter.mutates:  # an object that is changed in place may be the same object and have new arrays
            self._last = _LastState(
                weakref.ref(state),
                inputs.adapter,
                inputs.state_constants,
                inputs.on_host,
                state_types,
                batch_key,
                (program, examples),
                frozenset(map(type, new_arrays)),
            )
        return state, metrics

    def plan(self, state: Any, batch: Any, *, timed: bool = False, **kwargs: Any) -> Plan:
        """The plan for the gradient of a step, as from `anybatch.plan`. Later steps follow it."""
        return self._planned(state, batch, kwargs, timed=timed)

    def explain(
        self,
        state: Any,
        batch: Any,
        *,
        timed: bool = True,
        progress: bool | Callable[[str], None] | None = None,
        **kwargs: Any,
    ) -> Plan:
        """The plan with all candidates, as from `anybatch.explain`. If `timed`, it chooses the fastest."""
        return self._planned(state, batch, kwargs, timed=timed, thorough=True, progress=progress)

    def put(self, batch: Any) -> Any:
        """A copy of a batch where the step uses it: on the device, or sharded over its mesh."""
        if self._over is None:
            return to_device(batch)
        arrays, constants = split_arrays(batch)
        return merge_arrays(put_batch(arrays, self._over, copy=True), constants)

    def lower(self, state: Any, batch: Any, **kwargs: Any) -> Any:
        """The complete step before compilation, as from `jax.jit(...).lower`: for its text, memory or cost."""
        inputs = self._placed(self._inputs(state, batch, kwargs)[0])
        gradient = self._update.gradient(inputs)
        program = self._jitted(inputs, gradient.options, self._strategy(inputs, gradient))
        return program.lower(inputs.state_arrays, inputs.batch_arrays)

    @property
    def donates(self) -> bool:
        """Whether a step deletes the state that it is given."""
        return self._donate

    @property
    def decisions(self) -> dict[str, list[Any]]:
        """The strategies that were planned, by type of batch, for `adopt`. The same strategy gives the same bits."""
        return {name: [strategy.microbatch_size, *strategy.variant] for name, strategy in self._strategies.items()}

    def adopt(self, decisions: Mapping[str, Any]) -> None:
        """Uses these strategies, from another step's `decisions`, instead of planning or of earlier plans."""
        strategies = {name: Strategy(size, *variant) for name, (size, *variant) in decisions.items()}
        if any(self._strategies.get(name) != strategy for name, strategy in strategies.items()):
            self._forget_programs()
        self._strategies |= strategies
        self._adopted |= set(strategies)

    def _inputs(self, state: Any, batch: Any, kwargs: dict[str, Any]) -> tuple[StepInputs, Any]:
        """The inputs of a step, and the state that its adapter works on: with the NNX objects of the keywords."""
        adapter = adapter_for(state, self._update.optimizer)
        kwargs, objects = without_objects(kwargs)
        if objects:
            adapter, state = WithObjects(adapter), (state, objects)
        inputs = StepInputs(adapter, *adapter.split(state), *split_arrays((batch, kwargs)))
        if self._update.offload is not None:
            inputs = dataclasses.replace(inputs, on_host=adapter.are_optimizers(state))
        return inputs, state

    def _ready(self, inputs: StepInputs, batch_arrays: list[Any], *, copy: bool) -> StepInputs:
        """The inputs with the state where the step has it."""
        on_host = inputs.on_host or [False] * len(inputs.state_arrays)
        if inputs.on_host:
            check_devices(inputs.state_arrays)
        arrays = ready_to_donate(inputs.state_arrays, self._over, copy=copy, on_host=on_host)
        return inputs.with_arrays(arrays, batch_arrays)

    def _placed(self, inputs: StepInputs) -> StepInputs:
        """The inputs on the devices of the step, without copies for donation: to plan or lower it."""
        refuse_deleted(inputs.state_arrays, "step.plan(state, batch)")
        return self._ready(inputs, put_batch(inputs.batch_arrays, self._over), copy=False)

    def _traced(self, state: Any, batch: Any, inputs: StepInputs) -> tuple[Any, Metrics]:
        """A step that is called while JAX traces a larger program."""
        _, call = self._update.call(inputs)
        options = self._update.options_of(call)
        if self._is_planned and is_explicit(options.memory) and self._over is None and not inputs.on_host:
            # With the state and the update, as outside of a larger program.
            program = self._fitting(inputs, self._update.gradient(inputs), is_traced=True)
            options = _with_strategy(options, program.strategy)
        arrays, results = self._update.results(inputs, options)
        examples = sorted_arguments(call, options).num_examples
        metrics = Metrics(**results, examples=examples, tokens=self._num_tokens(batch))
        return inputs.adapter.replace_arrays(state, arrays, inputs.state_constants), metrics

    def _num_tokens(self, batch: Any) -> int | None:
        return None if self._tokens is None else int(self._tokens(batch))

    # Compilation.

    def _program(self, inputs: StepInputs, key: Any) -> tuple[Callable[..., Any], int]:
        """The compiled program for these inputs, and the number of examples that it takes."""
        try:
            found = self._programs.get(key)
        except TypeError as error:
            raise InputError(
                "Leaves of a state, batch or keyword argument that are not arrays are constants and must be hashable",
                given=str(error),
                remedy="Pass arrays, numbers, strings or functions; a list or a dict of them is fine.",
            ) from error
        if found is not None:
            return found
        found = self._compiled(inputs)
        self._programs.put(key, found)
        if len(self._programs) == MANY_PROGRAMS:
            warn(
                f"This step was compiled {MANY_PROGRAMS} times, for as many shapes of batches or values of constants. "
                "Pass numbers that change as arrays, e.g. jnp.asarray(0.1), and pad batches to a few sizes."
            )
        return found

    def _forget_programs(self) -> None:
        self._programs.cache_clear()
        self._last = None

    def _compiled(self, inputs: StepInputs) -> tuple[Callable[..., Any], int]:
        gradient = self._update.gradient(inputs)
        if inputs.on_host and versions.has_ordered_effects(gradient.loss.traced.jaxpr):
            raise InputError(
                f"With {OFFLOAD}, the loss must not print or call back in order: JAX cannot compile that together with "
                "arrays on the host",
                given="a loss with ordered=True, e.g. in jax.debug.print",
                remedy="Leave ordered=True out of the loss, or leave offload out of the step.",
            )
        if not self._is_planned:
            return self._jitted(inputs, gradient.options, self._strategy(inputs, gradient)), gradient.examples
        return self._fitting(inputs, gradient), gradient.examples

    def _fitting(self, inputs: StepInputs, gradient: Gradient, *, is_traced: bool = False) -> "FittingProgram":
        """The program for these inputs that fits the memory, compiled."""
        strategy, name = self._strategy(inputs, gradient), inputs.name
        offloaded = None if is_traced else _offloaded(inputs)
        if is_traced:
            inputs = inputs.with_arrays(*map(_types_of, (inputs.state_arrays, inputs.batch_arrays)))
        make = functools.partial(self._jitted, inputs, gradient.options)

        def record(strategy: Strategy) -> None:
            self._strategies[name] = strategy

        saved = (0, 0) if offloaded is None else saved_bytes(offloaded.state_arrays, offloaded.on_host)
        program = FittingProgram(make, strategy, gradient, self._update.options.memory, record, saved)
        program.compile(inputs.state_arrays, inputs.batch_arrays, is_adopted=name in self._adopted)
        return program

    def _jitted(self, inputs: StepInputs, options: Options, strategy: Strategy) -> Any:
        options = _with_strategy(options, strategy)
        if options.mesh is not None:
            options = dataclasses.replace(options, reduce=strategy.reduce)
        no_arrays = inputs.with_arrays([], [])  # the program must not keep the arrays of the first call alive

        def train_step(state_arrays: list[Any], batch_arrays: list[Any]) -> Any:
            return self._update.results(no_arrays.with_arrays(state_arrays, batch_arrays), options)

        # The new state has the shardings of the old, so that the next step does not recompile. It also has their order:
        # JAX is not told the memory kinds of all results, so it pairs donated arrays with results of a type in order.
        shardings = [
            array.sharding if len(array.sharding.device_set) > 1 or is_on_host(array) else None
            for array in inputs.state_arrays
        ]
        out: dict[str, Any] = {"out_shardings": (shardings, None)} if any(shardings) else {}
        return jax.jit(train_step, donate_argnums=(0,) if self._donate else (), **out)

    # Planning.

    def _strategy(self, inputs: StepInputs, gradient: Gradient) -> Strategy:
        options = gradient.options
        if not isinstance(options.microbatch_size, str):
            return Strategy.of_options(options)
        strategy = self._strategies.get(inputs.name)
        if strategy is None:
            with gradient.context():
                try:
                    strategy = self._planner(inputs, gradient).decide().strategy
                except NothingFitsError as error:
                    raise self._with_offload(error, inputs) from None
        return self._with_noise(strategy, gradient)

    def _with_offload(self, error: NothingFitsError, inputs: StepInputs) -> NothingFitsError:
        """The error with offloading as a way out, if a gradient fits with it. The update is not planned here."""
        saved = _offloaded(inputs)
        if saved is None:
            return error
        gradient = self._update.gradient(saved)
        with gradient.context():
            if self._planner(saved, gradient).plan(timed=False).chosen is None:
                return error
        return NothingFitsError(f"{error}\nWith {OFFLOAD}, it may fit.")

    def _with_noise(self, strategy: Strategy, gradient: Gradient) -> Strategy:
        """A strategy with enough microbatches to estimate the noise, if that was asked for."""
        if not self._update.options.noise:
            return strategy
        unit, count = gradient.size_multiple, -(-MICROBATCHES_FOR_NOISE // gradient.num_batch_shards)
        size = (
            gradient.max_microbatch_size
            if gradient.is_full_batch(strategy) or strategy.microbatch_size is None
            else strategy.microbatch_size
        )
        return Strategy(min(size, max(unit, gradient.max_microbatch_size // count // unit * unit)), *strategy.variant)

    def _planner(
        self, inputs: StepInputs, gradient: Gradient, notify: Callable[[str], None] = lambda text: None
    ) -> Planner:
        copies = COPIES if self._donate else COPIES_WITHOUT_DONATION
        memory = self._update.options.memory
        if gradient.options.memory == memory:
            return Planner(gradient, parameter_copies=copies, notify=notify)
        kept = self._update.kept_bytes(inputs)

        def around(strategy: Strategy, total: int) -> int:
            # The plan may take another strategy, whose gradient takes less and whose step a little more.
            return max(kept, int(1.01 * self._bytes_of_step(inputs, gradient, strategy)) - total)

        source = f"memory={memory!r}, less {readable(kept)} that the optimizer keeps"
        return Planner(gradient, parameter_copies=copies, source=source, around=around, notify=notify)

    def _bytes_of_step(self, inputs: StepInputs, gradient: Gradient, strategy: Strategy) -> int:
        """The bytes of the complete step with a strategy, as XLA counts them; 0 if XLA cannot compile it."""
        if any(map(_is_traced, inputs.state_arrays + inputs.batch_arrays)):
            inputs = inputs.with_arrays(*map(_types_of, (inputs.state_arrays, inputs.batch_arrays)))
        make = functools.partial(self._jitted, inputs, gradient.options)
        program = FittingProgram(make, strategy, gradient, self._update.options.memory, lambda _: None, (0, 0))
        try:
            return program.bytes_of(strategy, inputs.state_arrays, inputs.batch_arrays)
        except jax.errors.JaxRuntimeError:
            return 0

    def _planned(
        self, state: Any, batch: Any, kwargs: Any, *, timed: bool, thorough: bool = False, progress: Any = False
    ) -> Plan:
        inputs = self._placed(self._inputs(state, batch, kwargs)[0])
        gradient = self._update.gradient(inputs)
        with gradient.context(), shown(progress) as notify:
            plan = self._planner(inputs, gradient, notify).plan(timed=timed, thorough=thorough)
        if plan.chosen is not None and self._is_planned:
            strategy, before = self._with_noise(plan.chosen.strategy, gradient), self._strategies.get(inputs.name)
            self._strategies[inputs.name] = strategy
            if before not in (None, strategy):
                self._forget_programs()  # the next step follows the new plan
        return plan


@dataclasses.dataclass(frozen=True)
class _LastState:
    """The state that a step returned last, and what is known about it. Most steps continue with that state."""

    state: Callable[[], Any]  # a weak reference
    adapter: StateAdapter
    constants: Constants
    on_host: Sequence[bool]  # `StepInputs.on_host`
    types: Any  # `StepInputs.state_types` of the state that it was computed from, which are also its own
    batch_key: Any  # constants and types of the batch that it was computed with
    program: tuple[Callable[..., Any], int]
    array_classes: frozenset[type]

    def arrays_of(self, state: Any) -> list[Any] | None:
        """The arrays of the state; None if it is another state, or this one was changed, e.g. a dict inside it."""
        if self.state() is not state:
            return None
        leaves, structure = jax.tree.flatten(state)
        if structure != self.constants.tree:
            return None
        if self.constants.types:  # not all leaves are arrays
            pairs = list(zip(leaves, self.constants.values, strict=True))
            if any(constant is not None and leaf is not constant for leaf, constant in pairs):
                return None
            leaves = [leaf for leaf, constant in pairs if constant is None]
        if not self.array_classes.issuperset(map(type, leaves)):
            return None
        is_moved = self.on_host and any(
            is_on_host(leaf) != (hosted and is_large(leaf)) for leaf, hosted in zip(leaves, self.on_host, strict=True)
        )
        return None if is_moved else leaves


def _delete_moved(given: Sequence[Any], inputs: StepInputs, program: Any) -> None:
    """Deletes the arrays of a given state that were moved to the host or back, as donation would.

    The program is compiled before: if that raises an error, the state is still there.
    """
    moved = moved_arrays(given, inputs.state_arrays)
    if moved and not isinstance(program, FittingProgram):
        program.lower(inputs.state_arrays, inputs.batch_arrays).compile()
    for array in moved:
        array.delete()


def _refuse_others(state: Any, others: tuple[Any, ...]) -> None:
    raise InputError(
        "A step takes a state and a batch; everything else is passed by keyword",
        given=f"{2 + len(others)} arguments by position, the first of type {type(state).__name__}",
        remedy="An NNX model and its optimizer are one state: step((model, optimizer), batch)."
        if has_nnx(state)
        else 'Make the batch one tree, step(state, {"x": x, "y": y}); or name the arguments with rows, '
        'ab.train_step(..., batch_argnames=("y",)), and pass step(state, x, y=y).',
    )


def _offloaded(inputs: StepInputs) -> StepInputs | None:
    """The inputs as a step with `offload="optimizer"` has them; None if they are already."""
    if inputs.on_host:
        return None
    state = inputs.adapter.merge(inputs.state_arrays, inputs.state_constants)
    return dataclasses.replace(inputs, on_host=inputs.adapter.are_optimizers(state))


def _with_strategy(options: Options, strategy: Strategy) -> Options:
    size, remat, block_size = strategy.microbatch_size, strategy.remat, strategy.block_size
    return dataclasses.replace(options, microbatch_size=size, remat=remat, block_size=block_size)


def _types_of(arrays: Sequence[Any]) -> list[Any]:
    """The types of arrays, on the default device."""
    place = jax.sharding.SingleDeviceSharding(default_device())
    return [jax.ShapeDtypeStruct(np.shape(each), jax.typeof(each).dtype, sharding=place) for each in arrays]


def _is_traced(array: Any) -> bool:
    return isinstance(array, jax.core.Tracer)


def _copied(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, tree)


class FittingProgram:
    """A compiled step whose microbatches are made smaller until the complete step fits in memory.

    The planner has planned the gradient by itself. Here XLA's memory analysis of the complete step decides, with the
    state, the batch and the update; that needs no run. If memory still runs out in the first call, the microbatches are
    halved again.

    Args:
      make: makes the program for a strategy.
      strategy: the strategy to start with.
      gradient: the gradient of the step.
      memory: the user's budget for the complete step, or None.
      record: called with the strategy that is used in the end.
      by_offload: the bytes that offloading would save throughout the step, and at most.
    """

    def __init__(
        self,
        make: Any,
        strategy: Strategy,
        gradient: Any,
        memory: Any,
        record: Callable[[Strategy], None],
        by_offload: tuple[int, int],
    ) -> None:
        self.strategy, self._by_offload, self._on_host = strategy, by_offload, 0
        self._memory, self._has_budget = memory, is_explicit(memory)
        self._make, self._gradient, self._record = make, gradient, record
        self._program: Any = None
        self._has_run = False

    def __call__(self, state_arrays: list[Any], batch_arrays: list[Any]) -> Any:
        if not self._has_run:
            return self._first_call(state_arrays, batch_arrays)
        return self._program(state_arrays, batch_arrays)

    def compile(self, state_arrays: list[Any], batch_arrays: list[Any], *, is_adopted: bool = False) -> None:
        """Compiles the step, with smaller and smaller microbatches until it fits, or raises a NothingFitsError.

        If `is_adopted`, the strategy comes from another process, and another one gives other bits.
        """
        failures, self._on_host = 0, host_bytes(state_arrays)
        while True:
            self._program = self._make(self.strategy)
            smaller = halved(self._gradient, self.strategy)
            try:
                stats = self._program.lower(state_arrays, batch_arrays).compile().memory_analysis()
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
                if self._has_budget:
                    raise NothingFitsError(f"{excess}\n{self._remedies(state_arrays, batch_arrays, stats)}")
                warn(excess, TightMemoryWarning)
                break
            if is_adopted:
                warn(
                    f"{excess}\nThe run that is resumed here had more memory. Continuing with {smaller}: the gradient "
                    "is the same up to rounding.",
                    TightMemoryWarning,
                )
            self.strategy = smaller
        self._record(self.strategy)

    def bytes_of(self, strategy: Strategy, state_arrays: list[Any], batch_arrays: list[Any]) -> int:
        """The bytes that the step takes with a strategy. Compiles it."""
        self._on_host = host_bytes(state_arrays)
        stats = self._make(strategy).lower(state_arrays, batch_arrays).compile().memory_analysis()
        return 0 if stats is None else self._needed(stats)

    def _remedies(self, state_arrays: list[Any], batch_arrays: list[Any], stats: Any) -> str:
        """What would make the step fit. Rematerialization is tried before it is recommended."""
        remedies = [f"Pass memory={self._needed(stats)} (bytes) or more", "shard the state over a mesh (mesh=)"]
        if self.strategy.remat is None:
            with_remat = self._make(dataclasses.replace(self.strategy, remat=1.0))
            if self._excess(with_remat.lower(state_arrays, batch_arrays).compile().memory_analysis()) is None:
                remedies.append("pass remat=1.0, which computes activations twice instead of keeping them, and fits")
        budget = allowed_memory(self._memory, self._gradient.devices).allowed
        surely, at_most = self._by_offload
        if budget is not None and surely and self._needed(stats) - surely <= budget:
            remedies.append(f"pass {OFFLOAD}, which saves about {readable(surely)} on the device, and fits")
        elif budget is not None and at_most and self._needed(stats) - at_most <= budget:
            remedies.append(f"pass {OFFLOAD}, which saves up to {readable(at_most)} on the device, and may fit")
        return f"{', or '.join(remedies)}."

    def _excess(self, stats: Any) -> str | None:
        """A sentence if the step needs more memory than it may take; else None."""
        if not self._has_budget and jax.process_count() > 1:
            return None  # all processes must decide alike, and each has another amount left
        needed, budget = self._needed(stats), allowed_memory(self._memory, self._gradient.devices)
        if budget.allowed is None or needed <= budget.allowed:
            return None
        of_arguments = f"{readable(self._arguments(stats))} of it for the state and the batch"
        return f"A step with {self.strategy} needs {readable(needed)}, {of_arguments}: more than {budget}."

    def _needed(self, stats: Any) -> int:
        """The bytes of the step: all of them against a budget; only new ones against the memory that is left."""
        new = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        return int(new + self._arguments(stats) if self._has_budget else new)

    def _arguments(self, stats: Any) -> int:
        """The bytes of the state and the batch on the device. On the CPU, XLA also counts what is on the host."""
        counted = 0 if stats.host_argument_size_in_bytes else self._on_host
        return int(stats.argument_size_in_bytes - counted)

    def _first_call(self, state_arrays: list[Any], batch_arrays: list[Any]) -> Any:
        """Runs the program for the first time, and again with smaller microbatches if memory runs out."""
        planned, program = self.strategy, self._program

        def ready(strategy: Strategy) -> Callable[[], Any]:
            self._program = program if strategy == planned else self._make(strategy)
            return lambda: jax.block_until_ready(self._program(state_arrays, batch_arrays))

        def may_change() -> bool:
            # A program that failed may already have deleted the arrays that were donated to it.
            return jax.process_count() == 1 and not any(array.is_deleted() for array in state_arrays)

        self.strategy, results = run_until_it_fits(self._gradient, planned, ready, may_change)
        self._has_run = True
        self._record(self.strategy)
        self._make = self._gradient = None  # they hold the arrays of the first call
        return results
