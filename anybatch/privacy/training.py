"""`dp_sgd`: a step of private training with any optax optimizer."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anybatch.errors import InputError
from anybatch.gradients import squared_norms
from anybatch.privacy.accounting import epsilon
from anybatch.privacy.key_ledger import LEDGER
from anybatch.privacy.mechanism import PrivateGrad, private_grad
from anybatch.privacy.noise import check_floating, check_key
from anybatch.training.arrays import Constants, merge_arrays, split_arrays
from anybatch.training.state import add_updates

# Makes the noise independent of other draws with the key of a run.
_PURPOSE = 0x6E6F6973

# The optimizer states of optax that accumulate the gradients of several calls, and what makes them.
ACCUMULATING = {"MultiStepsState": "optax.MultiSteps", "ApplyEvery": "optax.apply_every"}


class State(NamedTuple):
    """The state of a run between two steps: a pytree that can be saved in checkpoints.

    Args:
      params: the parameters. They may be released.
      opt_state: the state of the optimizer. It may be released too.
      key: the key of the noise of the steps to come. It must stay secret.
      steps: the number of steps that were taken.
    """

    params: Any
    opt_state: Any
    key: jax.Array
    steps: jax.Array


class Metrics(NamedTuple):
    """What a step returns beside the new state.

    Args:
      gradient_norm: the norm of the noised gradient. It is as private as the parameters.
      not_private: the values, norms or aux of the examples, if they were asked for. They have no noise: do not publish
        them, and do not use them to choose what to publish.
    """

    gradient_norm: jax.Array
    not_private: Any


class DpSgd:
    """A step of private training; made by `privacy.dp_sgd`.

    Args:
      gradient: the clipped and noised gradient, with `sensitivity`, `noise_stddev`, `sampling_rate` and the rest.
      optimizer: the optimizer of optax.
    """

    def __init__(self, gradient: PrivateGrad, optimizer: Any, *, jit: bool = True) -> None:
        _check_optimizer(optimizer)
        self.gradient, self.optimizer, self._is_compiled = gradient, optimizer, jit
        self._update = jax.jit(self._updated)
        self._step = jax.jit(self._stepped, static_argnums=2)

    def init(self, params: Any, key: Any) -> State:
        """The state before the first step.

        Args:
          params: the initial parameters. They must not be learned from the private data.
          key: the key of all noise of the run. Keep it secret, and use it for nothing else. `privacy.secret_key()`
            makes one.

        Raises:
          InputError: for a key that was used before in this process, or an optimizer that accumulates gradients.
        """
        check_key("key", key)
        check_floating("params", params)
        _check_optimizer(self.optimizer, params)
        LEDGER.begin_run(key, allow_reuse=self.gradient.allow_key_reuse)
        params, key = _on_mesh((params, key), self.gradient.mesh)
        return State(params, self.optimizer.init(params), jax.random.fold_in(key, _PURPOSE), jnp.zeros((), jnp.int32))

    def __call__(self, state: State, *batch: Any, is_padding: Any = None, **kwargs: Any) -> tuple[State, Metrics]:
        if not isinstance(state, State):
            raise InputError(
                "The first argument of a step must be a privacy.State",
                given=f"state of type {type(state).__name__}",
                remedy="state = step.init(params, key), then state, metrics = step(state, batch).",
            )
        args, kwargs, is_padding = self.gradient.padding_of(
            (state.params, *batch), kwargs, is_padding, call="step(state, {})"
        )
        if not self.gradient.allow_key_reuse:
            LEDGER.check_step(state.key)
        self.gradient.check(args, kwargs, is_padding)  # here, where is_padding can still be read
        used = state.key
        state, batch, kwargs, is_padding = _on_mesh((state, args[1:], kwargs, is_padding), self.gradient.mesh)
        if self._is_compiled:
            results = self._step(state, *split_arrays((batch, kwargs, is_padding)))
        else:
            results = self._taken(state, batch, kwargs, is_padding)
        LEDGER.record_step(used)
        return results

    @property
    def decisions(self) -> dict[str, Any]:
        """The numbers that the epsilon of a run depends on, for the checkpoints of `ab.fit`."""
        names = ("noise_multiplier", "clip_norm", "expected_batch_size", "num_examples")
        return {name: getattr(self.gradient, name) for name in names}

    def adopt(self, decisions: dict[str, Any]) -> None:
        """Checks that a resumed run had the same numbers before.

        Raises:
          InputError: if it had others: `step.epsilon` assumes that all steps have the same noise and sampling.
        """
        # A noise multiplier that was computed on another machine may differ in its last bits.
        other = [
            f"{name}={now}, and {decisions[name]} before"
            for name, now in self.decisions.items()
            if name in decisions and not math.isclose(now, decisions[name])
        ]
        if other:
            raise InputError(
                "A private run must be resumed with the same step: its epsilon assumes that all steps are alike",
                given="\n".join(other),
                remedy="Pass dp_sgd the same numbers as before, or start a new run with another folder for "
                "checkpoints. The epsilons of both runs add up.",
            )

    def epsilon(self, state: State, delta: float, accountant: str = "pld") -> float:
        """The epsilon of all steps so far, by `privacy.epsilon`. It waits until these steps are computed.

        Args:
          state: the state after these steps.
          delta: the probability with which the bound of epsilon may fail. Choose it well below 1 / (number of
            examples).
          accountant: `"pld"` for privacy loss distributions, which are tighter except for epsilons of a few hundredths;
            `"rdp"` for Rényi divergences, which are fast and give a somewhat larger epsilon.
        """
        assert self.gradient.sampling_rate is not None
        return epsilon(
            noise_multiplier=self.gradient.noise_multiplier,
            sampling_rate=self.gradient.sampling_rate,
            steps=int(state.steps),
            delta=delta,
            accountant=accountant,
        )

    def _stepped(self, state: State, arrays: list[Any], constants: Constants) -> Any:
        return self._taken(state, *merge_arrays(arrays, constants))

    def _taken(self, state: State, batch: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any) -> Any:
        gradient, extra = self.gradient.clipped((state.params, *batch), kwargs, is_padding)
        new, norm = self._update(gradient, state)
        return new, Metrics(norm, extra)

    def _updated(self, gradient: Any, state: State) -> tuple[State, jax.Array]:
        key, noise_key = jax.random.split(state.key)
        gradient = self.gradient.noised(gradient, (state.params,), noise_key)
        updates, opt_state = self.optimizer.update(gradient, state.opt_state, state.params)
        params = add_updates(state.params, updates)
        norm = jnp.sqrt(squared_norms.square(jax.tree.leaves(gradient))).astype(jnp.float32)
        return State(params, opt_state, key, state.steps + np.int32(1)), norm


def dp_sgd(
    fun: Callable[..., Any],
    optimizer: Any,
    *,
    clip_norm: float,
    noise_multiplier: float,
    expected_batch_size: float,
    num_examples: int,
    max_batch_size: int | None = None,
    has_aux: bool = False,
    allow_no_noise: bool = False,
    allow_key_reuse: bool = False,
    jit: bool = True,
    **options: Any,
) -> DpSgd:
    """A step of DP-SGD: clipped gradients, noise, and any optax optimizer.

    **Private.** After any number of steps on batches of `privacy.poisson_batches`, everything in the states except the
    keys, all of it together, is (epsilon, delta)-differentially private for one added or removed example, with
    `epsilon = step.epsilon(state, delta)`. `help(anybatch.privacy)` lists the assumptions, and what is not covered.

    **The same on any devices.** Noise is added once, after the sum over microbatches and over the devices of a
    `mesh=`. It depends only on the key and the step.

    >>> import jax, jax.numpy as jnp, optax
    >>> from anybatch import privacy
    >>> def loss(w, example):
    ...     return (w @ example["x"] - example["y"]) ** 2
    >>> data = {"x": jnp.ones((100, 3)), "y": jnp.ones(100)}
    >>> step = privacy.dp_sgd(
    ...     loss, optax.sgd(0.1), clip_norm=1.0, noise_multiplier=2.0, expected_batch_size=10, num_examples=100
    ... )
    >>> batches = privacy.poisson_batches(100, expected_batch_size=10, steps=5, seed=privacy.secret_key())
    >>> state = step.init(jnp.zeros(3), privacy.secret_key())
    >>> for draw in batches:
    ...     state, metrics = step(state, draw.take(data))
    >>> print(f"epsilon {step.epsilon(state, delta=1e-3):.2f} after {state.steps} steps")
    epsilon 0.31 after 5 steps

    `ab.fit(step, state, batches.of(data))` runs the loop, saves checkpoints and resumes. It resumes only with the same
    noise and sampling, since the epsilon assumes that all steps are alike.

    **Time.** A step is one compiled program. It may also be part of your own `jax.jit` or `jax.lax.scan`. Inside these,
    a state that is stepped twice is not detected.

    Args:
      fun: the loss of one example. Its first argument are the parameters. It must return a real scalar, and is traced,
        as under `jit`.
      optimizer: an optimizer of optax, or an object with the same `init` and `update`.
      clip_norm: the norm to which the gradient of each example is scaled down, if it is longer.
      noise_multiplier: the standard deviation of the noise, divided by the sensitivity. `privacy.noise_multiplier`
        computes it for a given epsilon.
      expected_batch_size: the number of examples that a batch has on average. The sum of the gradients is divided by
        it.
      num_examples: the number of examples of the dataset.
      max_batch_size: the largest number of rows that a batch may have, with padding.
      has_aux: whether `fun` returns a pair `(loss, aux)`. aux is in `metrics.not_private`.
      allow_no_noise: allows `noise_multiplier=0`, which is not private, and with it `clip_norm=inf`.
      allow_key_reuse: allows a key or a state that was used before, which is private only if one of the results is
        released.
      jit: whether a step is compiled as one program. If False, each call traces the loss again, which may then read
        variables that have changed.
      **options: options of `ab.clipped_grad`:
        `batch_argnums` (default 1) and `batch_argnames`: the arguments that hold the batch, by position and by name.
        `keep_batch_dim`: whether `fun` is written for batches; it then gets batches of one example.
        `microbatch_size`: the number of examples at a time. `None` is the full batch. `"auto"`, the default, takes the
        size that `anybatch.plan` has measured to be the fastest, or else the largest that fits the memory.
        `block_size`: how many rows of a big value of one example to compute at a time, such as tokens of logits. `None`
        computes them in full. `"auto"`, the default, uses blocks only if a plan finds that they are needed or faster.
        `memory`: the bytes that the gradient and its arguments may take, for `"auto"`, e.g. `"16GiB"`.
        `method`: `"vmap"` computes every gradient, `"factored"` keeps its factors where that is cheaper, `"auto"`, the
        default, prefers `"factored"`.
        `transform`: a function of the gradient of one example. What it returns is clipped, summed and noised.
        `rng_argnums`: the positional arguments that are PRNG keys. Every example draws its own numbers.
        `return_values`, `return_norms`: whether to also return the losses and norms of the examples, which are **not**
        private.
        `accumulator_dtype`: the dtype in which narrower gradients are summed, float32 by default.
        `strict` (default True): whether the sensitivity holds even if all rounding errors have the same sign.
        `mesh`, `axis_name` and `param_specs`: the devices, the axis over which the batch is sharded, and the shardings
        of the parameters.
        `nan_safe` and `normalize_by`: they must be True and `expected_batch_size`, and need not be passed.

    Returns:
      A `DpSgd`, here called `step`, with `state = step.init(params, key)`, `state, metrics = step(state, batch)` and
      `step.epsilon(state, delta)`. The batch must say which of its rows are padding: pass a `privacy.PaddedBatch`, or
      `is_padding=` beside it. Further arguments of the loss follow the batch. None of them may have one row for each
      example, unless it is in `batch_argnums`.

    Raises:
      InputError: for arguments that would void the guarantee, before any work is done.
      CoupledError: with `keep_batch_dim=True`, for a loss that looks across examples.
    """
    if "argnums" in options:
        raise InputError(
            "The parameters must be the first argument of the loss",
            given=f"argnums={options['argnums']!r}",
            remedy="Wrap the loss, or use privacy.private_grad, which takes argnums.",
        )
    if num_examples is None:
        raise InputError(
            "num_examples must be given: the sampling rate is expected_batch_size / num_examples",
            given="num_examples=None",
            remedy="Pass the number of examples of the dataset, e.g. num_examples=60_000.",
        )
    gradient = private_grad(
        fun,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        num_examples=num_examples,
        max_batch_size=max_batch_size,
        has_aux=has_aux,
        allow_no_noise=allow_no_noise,
        allow_key_reuse=allow_key_reuse,
        **options,
    )
    return DpSgd(gradient, optimizer, jit=jit)


def _on_mesh(tree: Any, mesh: Mesh | None) -> Any:
    """A tree whose arrays that were put on other devices are copied to all devices of the mesh."""

    def put(leaf: Any) -> Any:
        if mesh is None or isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
            return leaf
        is_there = not leaf.committed or leaf.sharding.device_set == set(mesh.devices.flat)
        return leaf if is_there else jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(put, tree)


def _check_optimizer(optimizer: Any, params: Any = None) -> None:
    """Refuses an object that is not an optimizer, and an optimizer that accumulates the gradients of several calls.

    Without the parameters, only its type is checked, and not its state.
    """
    if type(optimizer).__name__ == "MultiSteps":
        raise _accumulates("optax.MultiSteps")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise InputError(
            "optimizer must have init and update, like those of optax",
            given=f"optimizer={optimizer!r}",
            remedy="For example optax.sgd(0.1); the optimizer, not its state.",
        )
    if params is not None:
        state = jax.eval_shape(optimizer.init, params)
        for part in jax.tree.leaves(state, is_leaf=lambda part: type(part).__name__ in ACCUMULATING):
            if type(part).__name__ in ACCUMULATING:
                raise _accumulates(ACCUMULATING[type(part).__name__])


def _accumulates(name: str) -> InputError:
    return InputError(
        "optimizer must take one step for each call: noise is added and accounted for once in each",
        given=f"an optimizer with {name}, which accumulates several noised gradients for one step",
        remedy="Pass the optimizer inside it and the full batch. With microbatch_size=..., its gradient is computed "
        "per microbatch, and noise is added once, after the last.",
    )
