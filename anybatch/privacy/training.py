"""`dp_sgd`: a step of private training with any optimizer of optax."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from anybatch.errors import InputError
from anybatch.privacy.accounting import epsilon
from anybatch.privacy.keys import LEDGER
from anybatch.privacy.mechanism import PrivateGrad
from anybatch.privacy.noise import at_least_float32, check_floating, check_key
from anybatch.privacy.refusals import check_optimizer
from anybatch.training.arrays import Constants, merge_arrays, split_arrays
from anybatch.training.state import add_updates

# Sets the noise apart from whatever else may have been drawn with the key of a run.
_PURPOSE = 0x6E6F6973


class State(NamedTuple):
    """Where a run stands: a pytree, for checkpoints too.

    Args:
      params: the parameters. They are what may be released.
      opt_state: of the optimizer. It may be released, too.
      key: of the noise to come. It must stay secret.
      steps: how many were taken.
    """

    params: Any
    opt_state: Any
    key: jax.Array
    steps: jax.Array


class Metrics(NamedTuple):
    """What a step tells beside its state.

    Args:
      gradient_norm: of the noised gradient: as private as the parameters.
      not_private: what `ab.clipped_grad` returned beside the gradient, if it was asked for values, norms or aux. It has
        no noise: do not publish it, nor choose by it what is published.
    """

    gradient_norm: jax.Array
    not_private: Any


class DpSgd:
    """A step of private training; made by `privacy.dp_sgd`.

    Args:
      gradient: the clipped and noised gradient, with `sensitivity`, `noise_stddev`, `sampling_rate` and the rest.
      optimizer: as given.
    """

    def __init__(self, gradient: PrivateGrad, optimizer: Any, *, jit: bool = True) -> None:
        check_optimizer(optimizer)
        self.gradient, self.optimizer, self._is_compiled = gradient, optimizer, jit
        self._update = jax.jit(self._updated)
        self._step = jax.jit(self._stepped, static_argnums=2)

    def init(self, params: Any, key: Any) -> State:
        """The state before the first step.

        Args:
          params: to begin with, not learned from the private data.
          key: of all noise of the run: secret, and used for nothing else. `privacy.secret_key()` makes one.

        Raises:
          InputError: for a key that was used before in this process, or an optimizer that collects gradients.
        """
        check_key("key", key)
        check_floating("params", params)
        check_optimizer(self.optimizer, params)
        LEDGER.begin_run(key, allow_reuse=self.gradient.allow_key_reuse)
        params, key = _on_mesh((params, key), self.gradient.mesh)
        return State(params, self.optimizer.init(params), jax.random.fold_in(key, _PURPOSE), jnp.zeros((), jnp.int32))

    def __call__(self, state: State, *batch: Any, is_padding: Any = None, **kwargs: Any) -> tuple[State, Metrics]:
        if not isinstance(state, State):
            raise InputError(
                "A step goes on from a state",
                given=f"state of type {type(state).__name__}",
                remedy="state = step.init(params, key), then state, metrics = step(state, batch).",
            )
        (_, *own), kwargs, is_padding = self.gradient.padding_of(
            (state.params, *batch), kwargs, is_padding, call="step(state, {})"
        )
        batch = tuple(own)
        if not self.gradient.allow_key_reuse:
            LEDGER.check_step(state.key)
        self.gradient.check((state.params, *batch), kwargs, is_padding)  # while it can be seen what is padding
        used = state.key
        state, batch, kwargs, is_padding = _on_mesh((state, batch, kwargs, is_padding), self.gradient.mesh)
        if self._is_compiled:
            results = self._step(state, *split_arrays((batch, kwargs, is_padding)))
        else:
            results = self._taken(state, batch, kwargs, is_padding)
        LEDGER.record_step(used)
        return results

    @property
    def decisions(self) -> dict[str, Any]:
        """What the account of a run rests on, for the checkpoints of `ab.fit`."""
        names = ("noise_multiplier", "clip_norm", "expected_batch_size", "num_examples")
        return {name: getattr(self.gradient, name) for name in names}

    def adopt(self, decisions: dict[str, Any]) -> None:
        """Checks that a resumed run had these settings before.

        Raises:
          InputError: if not: `step.epsilon` assumes that all steps had the same noise and sampling.
        """
        # Another machine may calibrate the noise to other last bits.
        other = [
            f"{name}={now}, and {decisions[name]} before"
            for name, now in self.decisions.items()
            if name in decisions and not math.isclose(now, decisions[name])
        ]
        if other:
            raise InputError(
                "A private run must go on with the step that it had: all its steps are accounted for alike",
                given="\n".join(other),
                remedy="Pass dp_sgd the numbers of before, or begin anew with another folder for checkpoints. What "
                "both runs spend adds up.",
            )

    def epsilon(self, state: State, delta: float, accountant: str = "pld") -> float:
        """The epsilon that was spent so far, as `privacy.epsilon` has it; waits for the steps taken.

        Args:
          state: after these steps.
          delta: the probability that is left out, well below one by the number of examples.
          accountant: `"pld"` or `"rdp"`.
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
        return State(params, opt_state, key, state.steps + np.int32(1)), _norm(gradient)


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
    """A step of DP-SGD: clipped gradients, noise, and any optimizer of optax on top.

    **Private.** After any number of steps on batches of `privacy.poisson_batches`, everything in the states but the
    keys, all of it together, is (epsilon, delta)-DP for one example that is added or removed, with
    `epsilon = step.epsilon(state, delta)`. `anybatch.privacy` says under which assumptions, and what is not covered.

    **The same on any devices.** Noise is added once, after the sum over microbatches and over the devices of a
    `mesh=`; which noise depends on the key and the step alone.

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

    The loop may be that of `ab.fit`, which saves and resumes: `ab.fit(step, state, batches.of(data))`. It goes on only
    with a step that has the noise and the sampling of before, since all steps are accounted for alike.

    **Time.** The whole step is one compiled program. It may also be part of a larger one, as in `jax.jit` or
    `jax.lax.scan`; in there, nothing sees whether a state is stepped twice.

    Args:
      fun: the loss of one example, as for `ab.clipped_grad`; its first argument are the parameters.
      optimizer: of optax, or anything with its `init` and `update`.
      clip_norm: to which the gradient of each example is scaled down, if it is longer.
      noise_multiplier: how much noise, by the sensitivity; `privacy.noise_multiplier` finds it for a budget.
      expected_batch_size: the number of examples that a batch has on average, by which sums are divided.
      num_examples: of the dataset.
      max_batch_size: the most rows that a batch may have, with padding.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      allow_no_noise: accepts `noise_multiplier=0`, which is not private, and with it `clip_norm=inf`.
      allow_key_reuse: accepts a key, or a state, that was used before: private only if one of the results is released.
      jit: whether a step is compiled as a whole. Otherwise each call traces the loss, which may read what has changed.
      **options: of `ab.clipped_grad`: `microbatch_size`, `method`, `batch_argnums`, `mesh`, ...

    Returns:
      `step`: `state = step.init(params, key)`, `state, metrics = step(state, batch)`, and
      `step.epsilon(state, delta)`. The batch must say which of its rows are padding: it is a `privacy.PaddedBatch`, or
      `is_padding=` is passed beside it. It may be called with more arguments of the loss, after the batch; none of them
      may have a row for each example, unless it is in `batch_argnums`.

    Raises:
      InputError: for what would void the guarantee, before any work is done.
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
            "num_examples must be given: the sampling rate is the expected batch size by it",
            given="num_examples=None",
            remedy="Pass the number of examples of the dataset, e.g. num_examples=60_000.",
        )
    gradient = PrivateGrad(
        fun,
        0,
        has_aux,
        clip_norm=clip_norm,
        noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size,
        num_examples=num_examples,
        max_batch_size=max_batch_size,
        allow_no_noise=allow_no_noise,
        allow_key_reuse=allow_key_reuse,
        options=options,
    )
    return DpSgd(gradient, optimizer, jit=jit)


def _on_mesh(tree: Any, mesh: Mesh | None) -> Any:
    """Arrays that were put on other devices than those of the mesh, on all of these; the rest as it is."""

    def put(leaf: Any) -> Any:
        if mesh is None or isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
            return leaf
        is_there = not leaf.committed or leaf.sharding.device_set == set(mesh.devices.flat)
        return leaf if is_there else jax.device_put(leaf, NamedSharding(mesh, PartitionSpec()))

    return jax.tree.map(put, tree)


def _norm(tree: Any) -> jax.Array:
    total = jnp.zeros((), jnp.float32)
    for leaf in jax.tree.leaves(tree):
        total += jnp.sum(jnp.square(leaf.astype(at_least_float32(leaf.dtype)))).astype(jnp.float32)
    return jnp.sqrt(total)
