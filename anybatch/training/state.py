"""Where a training run stands, and what a step tells beside that."""

import dataclasses
import math
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.errors import InputError
from anybatch.gradient_noise import NoiseScale
from anybatch.modules import has_nnx, trainable
from anybatch.trees import describe, is_key


@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a training run needs to go on: a small pytree, for `jit` and for checkpoints.

    >>> import jax.numpy as jnp, optax, anybatch as ab
    >>> state = ab.TrainState.create({"w": jnp.zeros(3)}, optax.sgd(0.1))
    >>> int(state.step), int(state.skipped), state.key
    (0, 0, None)

    Args:
      params: what is trained: any pytree. Leaves that are not floating-point arrays (integers, functions of an Equinox
        model) stay as they are.
      opt_state: of the optimizer.
      step: how many batches were seen.
      skipped: how many of them changed nothing, because their gradient was not finite.
      key: of all random numbers of the run, or None. Step `i` gets `jax.random.fold_in(key, i)`.
      model_state: what the model keeps beside its parameters, for `train_step(has_state=True)`: running averages. None
        without. Any pytree of arrays.
    """

    params: Any
    opt_state: Any
    step: Any
    skipped: Any
    key: Any = None
    model_state: Any = None

    @classmethod
    def create(cls, params: Any, optimizer: Any, key: Any = None, model_state: Any = None) -> "TrainState":
        """The state before the first step.

        The arrays are those that were given, not copies: a step that donates its buffers uses them up. `step.init`
        copies them first.

        Args:
          params: to begin with.
          optimizer: of optax, or anything with its `init`.
          key: `jax.random.key(0)`, for a loss that draws random numbers: `loss(params, batch, key)`.
          model_state: to begin with, for a loss with `has_state=True`: `loss(params, model_state, batch)`.

        Raises:
          InputError: if there is nothing to train, the key is none, or `params` is a model of NNX.
        """
        if has_nnx(params):
            raise InputError(
                "The state of a model of NNX is a pair of the model and its optimizer",
                given=f"params of type {type(params).__name__}",
                remedy="Write step = ab.train_step(loss), and state = (model, nnx.Optimizer(model, optax.adamw(3e-4), "
                "wrt=nnx.Param)).",
            )
        if key is not None and not is_key(key):
            raise InputError(
                "key must be a PRNG key, or None for a loss that draws nothing",
                given=f"key={describe(key)}",
                remedy="Pass key=jax.random.key(0).",
            )
        trained = trainable(params)
        if not jax.tree.leaves(trained):
            raise InputError(
                "There must be something to train: a floating-point array",
                given=f"params={params!r}" if not jax.tree.leaves(params) else "params without any",
                remedy="Pass the parameters, e.g. step.init({'w': jnp.zeros(3)}).",
            )
        zero = jnp.zeros((), jnp.int32)
        return cls(params, optimizer.init(trained), zero, zero.copy(), key, model_state)

    def replace(self, **changes: Any) -> "TrainState":
        """A state with some of its parts replaced."""
        return dataclasses.replace(self, **changes)


jax.tree_util.register_dataclass(
    TrainState, data_fields=[field.name for field in dataclasses.fields(TrainState)], meta_fields=[]
)


@dataclasses.dataclass(frozen=True, eq=False)
class Metrics:
    """What a step tells: a pytree, of arrays that may still be computed when it is returned.

    Args:
      loss: of the whole batch, before the update.
      aux: what the loss returned beside it, if anything.
      gradient_norm: of the whole batch's gradient, before the optimizer.
      skipped: whether the update was left out, because the gradient was not finite.
      noise: of the gradient, with `noise_scale=True`. One step says little: add them up.
      examples: how many were in the batch.
      tokens: how many were in the batch, if `train_step` was told how to count them.
    """

    loss: Any
    aux: Any
    gradient_norm: Any
    skipped: Any
    noise: NoiseScale | None
    examples: Any
    tokens: Any
    _reading: Any = dataclasses.field(default=None, repr=False)  # of the meter; not part of the tree

    @property
    def examples_per_second(self) -> float:
        """Over the steps since somebody last asked; waits for this one. NaN if nobody can know, as under `jit`."""
        return self._rates()[0]

    @property
    def tokens_per_second(self) -> float:
        """Likewise; NaN if nobody counts tokens."""
        return self._rates()[1]

    def _rates(self) -> tuple[float, float]:
        return (math.nan, math.nan) if self._reading is None else self._reading.rates(self.loss)


jax.tree_util.register_dataclass(
    Metrics,
    data_fields=[field.name for field in dataclasses.fields(Metrics) if field.name != "_reading"],
    meta_fields=[],
    drop_fields=["_reading"],
)


class Meter:
    """Counts what steps get done, and reads the clock when somebody asks.

    A step returns before it is computed, so that the time of the call says nothing. What can be known is when a step
    was done; the rate is that of all the steps between two such moments.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._examples = self._tokens = 0
        self._since: tuple[float, int, int] | None = None

    def begin(self) -> None:
        """From here on the clock runs, if it does not yet: compilation is not to count."""
        if self._since is None:
            self._since = (time.perf_counter(), self._examples, self._tokens)

    def count(self, examples: int, tokens: int | None) -> "MeterReading":
        """One more step."""
        self._examples += examples
        self._tokens += tokens or 0
        return MeterReading(self, self._examples, self._tokens, tokens is not None)

    def rates(self, examples: int, tokens: int, done: Any) -> tuple[float, float]:
        """Per second, up to the step that `done` is a result of."""
        jax.block_until_ready(done)
        now = time.perf_counter()
        with self._lock:
            if self._since is None or examples <= self._since[1]:
                return math.nan, math.nan
            then, examples_then, tokens_then = self._since
            self._since = (now, examples, tokens)
        seconds = max(now - then, 1e-9)
        return (examples - examples_then) / seconds, (tokens - tokens_then) / seconds


class MeterReading:
    """What the meter showed after one step."""

    def __init__(self, meter: Meter, examples: int, tokens: int, has_tokens: bool) -> None:
        self._meter, self._counts, self._has_tokens = meter, (examples, tokens), has_tokens
        self._rates: tuple[float, float] | None = None

    def rates(self, done: Any) -> tuple[float, float]:
        """Asked twice, it answers the same."""
        if self._rates is None:
            examples, tokens = self._meter.rates(*self._counts, done)
            self._rates = examples, tokens if self._has_tokens else math.nan
        return self._rates
