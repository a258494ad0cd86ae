"""The gradient noise scale as a record: how large a batch is worth its cost.

`noise_scale`: a gradient, and how large a batch it is worth.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.arguments import Arguments
from anybatch.call.models import partition_models
from anybatch.call.options import Options
from anybatch.errors import InputError
from anybatch.gradients import squared_norms
from anybatch.gradients.computation import Gradient
from anybatch.gradients.value_and_grad import compute, value_and_grad
from anybatch.per_example.grads import per_example_norms
from anybatch.reading.report import LossKind, form_of


@dataclasses.dataclass(frozen=True, eq=False)
class NoiseScale:
    """The noise in a gradient, and the batch size at which it equals the gradient itself.

    A gradient is a mean over units: examples, or whatever the weights of a weighted loss count, such as tokens. With
    `G` the mean over infinitely many and `Sigma` the covariance of the gradient of one, `value` estimates
    `tr(Sigma) / |G|**2` (McCandlish et al., 2018): the critical batch size. In far smaller batches, twice the units
    are worth almost twice the steps; in far larger ones, almost nothing.

    Records add up over steps, and `decay * record` fades them out. **The ratio is that of the averages:** the average
    of ratios is not an estimate of anything, since `gradient_square` comes close to 0 and below it by chance.

    >>> import anybatch as ab
    >>> step = ab.NoiseScale.of_examples(norms=[3.0, 5.0], mean_norm=3.5)  # gradients of 2 examples, and their mean
    >>> print(step)
    noise scale 1.27 (trace 9.5 / squared gradient 7.5; 2 units in 2 microbatches)
    >>> print(step + step)
    noise scale 1.27 (trace 9.5 / squared gradient 7.5; 4 units in 4 microbatches over 2 steps)
    >>> print(ab.NoiseScale.of_examples(norms=[3.0], mean_norm=3.0))
    noise scale undefined: noise shows in the difference of microbatches, and there was only one

    Args:
      trace_sum: the sum over steps of unbiased estimates of `tr(Sigma)`.
      gradient_square_sum: the sum over steps of unbiased estimates of `|G|**2`.
      steps: how many. A step of one microbatch has no estimates, and none of its share is in the sums.
      units: the sum over these steps of the units in their batches.
      microbatches: the sum over all steps of the microbatches that had any units.
    """

    trace_sum: Any
    gradient_square_sum: Any
    steps: Any
    units: Any
    microbatches: Any

    @classmethod
    def empty(cls, dtype: Any = jnp.float32) -> "NoiseScale":
        """The sum of no steps, to begin with."""
        return cls(*(jnp.zeros((), dtype) for _ in dataclasses.fields(cls)))

    @classmethod
    def of_microbatches(cls, norms: Any, units: Any, mean_norm: Any) -> "NoiseScale":
        """From gradients that were computed elsewhere.

        Args:
          norms: for each microbatch, the norm of the sum of the gradients of its units.
          units: for each microbatch, how many it has. Those without any do not count.
          mean_norm: the norm of the mean over the units of all microbatches.
        """
        norms, units = jnp.asarray(norms), jnp.asarray(units)
        if norms.ndim != 1 or norms.shape != units.shape:
            raise InputError(
                "norms and units must have one number for each microbatch",
                given=f"shapes {norms.shape} and {units.shape}",
                remedy="For example NoiseScale.of_microbatches(norms=[8.0, 6.5], units=[4, 3], mean_norm=2.0).",
            )
        dtype = jnp.float64 if norms.dtype == jnp.float64 else jnp.float32
        norms, units, mean_norm = norms.astype(dtype), units.astype(dtype), jnp.asarray(mean_norm).astype(dtype)
        has_units = units > 0
        number, square = jnp.sum(units), mean_norm**2
        divisors = jnp.where(has_units, units, jnp.ones_like(units))
        squares = jnp.sum(jnp.where(has_units, norms**2 / divisors, jnp.zeros_like(norms)))
        scatter = squares / jnp.maximum(number, jnp.finfo(dtype).tiny) - square
        return cls.of_step(scatter, square, number, jnp.sum(has_units.astype(dtype)))

    @classmethod
    def of_examples(cls, norms: Any, mean_norm: Any, weights: Any = None) -> "NoiseScale":
        """From the norms of the gradients of single examples: the least uncertain estimate that a batch allows.

        Args:
          norms: for each example, the norm of its gradient; of a weighted loss, of the gradient of its total.
          mean_norm: the norm of the mean, which is the sum divided by the number of examples, or by all weights.
          weights: for each example, its weight. By default 1.
        """
        norms = jnp.asarray(norms)
        return cls.of_microbatches(norms, jnp.ones_like(norms) if weights is None else weights, mean_norm)

    @classmethod
    def of_step(cls, scatter: Any, square: Any, units: Any, microbatches: Any) -> "NoiseScale":
        """From sums over `K` microbatches of one step.

        Microbatch `k` has `n_k` of the `N` units and adds `c_k` to the gradient `g`, the sum of all `c_k`.

        Args:
          scatter: the sum of `|c_k|**2 * N / n_k`, less `|g|**2`; what has no noise may be left out of both.
          square: `|g|**2`.
          units: `N`.
          microbatches: `K`, of those that have any units.
        """
        tells = (microbatches > 1) & (units > 0)
        # Never negative but for rounding. NaN stays NaN.
        variance = jnp.maximum(scatter, jnp.zeros_like(scatter)) / jnp.where(
            tells, microbatches - 1, jnp.ones_like(microbatches)
        )
        zero = jnp.zeros_like(variance)
        return cls(
            trace_sum=jnp.where(tells, variance * units, zero),
            gradient_square_sum=jnp.where(tells, square - variance, zero),
            steps=jnp.where(tells, jnp.ones_like(zero), zero),
            units=jnp.where(tells, units, zero),
            microbatches=microbatches,
        )

    @property
    def trace(self) -> Any:
        """`tr(Sigma)`, the variance of the gradient of one unit, summed over its entries. NaN if nothing tells."""
        return self._average(self.trace_sum)

    @property
    def gradient_square(self) -> Any:
        """`|G|**2`, of the gradient without noise. An unbiased estimate, so that it may come out negative."""
        return self._average(self.gradient_square_sum)

    @property
    def value(self) -> Any:
        """The critical batch size, in units.

        NaN if nothing tells: one microbatch, no units, a gradient that is not finite or is 0. Infinite if the noise
        leaves nothing of the gradient to be seen: average over more steps.
        """
        trace, square = self.trace, self.gradient_square
        drowned = jnp.where(trace > 0, jnp.full_like(trace, jnp.inf), jnp.full_like(trace, jnp.nan))
        seen = square > 0
        ratio = trace / jnp.where(seen, square, jnp.ones_like(square))
        return jnp.where(seen, ratio, jnp.where(jnp.isnan(square), jnp.full_like(trace, jnp.nan), drowned))

    @property
    def is_defined(self) -> Any:
        """Whether `value` is a finite number."""
        return jnp.isfinite(self.value)

    @property
    def why_undefined(self) -> str:
        """Why `value` is not a finite number; empty if it is. Not under `jit`."""
        if self.is_defined:
            return ""
        if self.steps == 0:
            if self.microbatches == 0:
                return "there were no units"
            return "noise shows in the difference of microbatches, and there was only one"
        if np.isnan(self.trace) or np.isnan(self.gradient_square):
            return "a gradient is not finite, or terms of single examples do not make up the loss (exact=True)"
        if self.trace > 0:
            return "the noise hides the gradient, whose estimated square is not positive; average over more steps"
        return "the gradient is 0, and so is its noise"

    def __add__(self, other: Any) -> "NoiseScale":
        if not isinstance(other, NoiseScale):
            return NotImplemented
        return NoiseScale(*(one + more for one, more in zip(self._leaves, other._leaves, strict=True)))

    def __radd__(self, other: Any) -> "NoiseScale":
        return self if isinstance(other, int) and other == 0 else NotImplemented  # where sum() begins

    def __mul__(self, factor: Any) -> "NoiseScale":
        return NoiseScale(*(leaf * factor for leaf in self._leaves))

    __rmul__ = __mul__

    @property
    def _leaves(self) -> tuple[Any, ...]:
        return tuple(getattr(self, shardings.name) for shardings in dataclasses.fields(self))

    def _average(self, total: Any) -> Any:
        steps = jnp.asarray(self.steps)
        none = steps == 0
        average = jnp.asarray(total) / jnp.where(none, jnp.ones_like(steps), steps)
        return jnp.where(none, jnp.full_like(average, jnp.nan), average)

    def __str__(self) -> str:
        if any(isinstance(leaf, jax.core.Tracer) or np.ndim(leaf) for leaf in self._leaves):
            return repr(self)
        counts = f"{self.units:.6g} units in {self.microbatches:.6g} microbatches"
        if self.steps != 1:
            counts += f" over {self.steps:.6g} steps"
        parts = f"trace {self.trace:.3g} / squared gradient {self.gradient_square:.3g}; {counts}"
        why = self.why_undefined
        if not why:
            return f"noise scale {self.value:.3g} ({parts})"
        return f"noise scale undefined: {why}" + (f" ({parts})" if self.steps > 0 else "")


jax.tree_util.register_dataclass(
    NoiseScale, data_fields=[shardings.name for shardings in dataclasses.fields(NoiseScale)], meta_fields=[]
)


# Sums of terms differ by a smaller part of these, even where products are rounded to 8 bits.
TELLING = 0.02

# The options of `value_and_grad` that `per_example_norms` has, too.
OF_EXAMPLES = (
    *("batch_argnums", "batch_argnames", "rng_argnums", "microbatch_size", "memory", "accumulator_dtype"),
    *("mesh", "axis_name", "param_specs"),
)


def noise_scale(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    exact: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`value_and_grad`, and the gradient noise scale: the batch size beyond which examples are worth little.

    The microbatches of one batch differ by chance. From how much, and from the gradient itself, follows
    `tr(Sigma) / |G|**2`, the critical batch size of McCandlish et al. (2018). It costs no second pass over the data.
    One step says little: average over many, as `anybatch.NoiseScale` does it.

    **Unbiased**, the trace and the square by themselves, for microbatches of any sizes and weights: each counts by its
    units. Of a mean or a sum these are the examples; of a weighted mean, declared or read, what its weight counts,
    such as tokens. The examples should be in random order, and their units as good as independent.

    **Honest.** A single microbatch says nothing: the value is NaN and `why_undefined` says so. That is what
    `microbatch_size="auto"` leads to where the full batch fits, so pass a size, such as an eighth of the batch.

    **Time and memory.** Value and gradient are those of `value_and_grad`, up to rounding. Memory is that of
    `value_and_grad` and the gradient of one microbatch; time, that of reading this gradient once more. On a mesh the
    squares join the one reduction.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean((batch["x"] * w - batch["y"]) ** 2)
    >>> batch = {"x": jnp.ones(4), "y": jnp.array([1.0, 3.0, 2.0, 4.0])}
    >>> fun = ab.noise_scale(loss, microbatch_size=1)
    >>> value, grad, noise = fun(0.0, batch)  # the gradients are -2, -6, -4 and -8: of mean -5
    >>> print(noise)
    noise scale 0.286 (trace 6.67 / squared gradient 23.3; 4 units in 4 microbatches)

    Args:
      fun: the loss, as for `value_and_grad`. Terms that depend on the parameters alone, such as weight decay, are part
        of the gradient `G` and have no noise. Of a function of a mean, as the square root of a mean square, the noise
        is that of the gradient of the mean, its factor taken as it is.
      argnums: which positional arguments to differentiate with respect to.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      exact: whether to take the norms of the gradients of all examples instead of those of microbatches. That is the
        same estimate with the least uncertainty, whatever the microbatches, at the cost of a second computation: of
        the gradient of each example. The loss must be a mean, a sum or a declared weighted mean of terms of single
        examples: `fun` is called with batches of one.
      **options: those of `value_and_grad`.

    Returns:
      A function with the arguments of `fun` that returns `(value, gradient, noise)`, or
      `((value, aux), gradient, noise)`, where `noise` is a `NoiseScale`.

    Raises:
      InputError: for arguments that cannot be worked with; for a loss that does not say what a microbatch counts, such
        as one with two different denominators.
      CoupledError: for a loss that looks across examples.
      What `value_and_grad` raises.
    """
    if not isinstance(exact, bool):
        raise InputError(
            "exact must be True or False",
            given=f"exact={exact!r}",
            remedy="Pass exact=True for the norms of single examples, or leave it out.",
        )
    if exact:
        return _of_examples(fun, argnums, has_aux, options)
    checked = Options.of(fun, argnums=argnums, has_aux=has_aux, noise=True, **options)

    @functools.wraps(fun)
    def noise_scale_fun(*args: Any, **kwargs: Any) -> Any:
        _check_context()
        call = partition_models(fun, checked.roles, has_aux, args, kwargs)
        arguments = checked.roles.sort(call.fun, call.args, call.kwargs)
        value, aux, gradient, sums = compute(call.fun, call.options(checked), arguments)
        aux = call.close(aux, checked)
        return ((value, aux) if has_aux else value), gradient, NoiseScale.of_step(*sums)

    return noise_scale_fun


def _of_examples(fun: Callable[..., Any], argnums: Any, has_aux: bool, options: dict[str, Any]) -> Callable[..., Any]:
    """The noise from the norms of the gradients of single examples."""
    checked = Options.of(fun, argnums=argnums, has_aux=has_aux, **options)
    examples_options = {name: options[name] for name in OF_EXAMPLES if name in options}
    examples_options["keep_batch_dim"] = True

    @functools.wraps(fun)
    def noise_scale_fun(*args: Any, **kwargs: Any) -> Any:
        _check_context()
        call = partition_models(fun, checked.roles, has_aux, args, kwargs, keeps_state=False)
        arguments = checked.roles.sort(call.fun, call.args, call.kwargs)
        reduction = checked.reduction
        if reduction == "infer":
            reduction = _read_reduction(call.fun, checked, arguments)
        result, gradient = value_and_grad(call.fun, argnums, has_aux, **options)(*call.args, **call.kwargs)
        if not arguments.num_examples:
            return result, gradient, NoiseScale.empty()
        value = result[0] if has_aux else result
        norms_fun = per_example_norms(_of_one(call.fun, checked, value), argnums, True, **examples_options)
        norms, (terms, weights) = norms_fun(*call.args, **call.kwargs)
        if reduction == "sum":  # a mean of terms that are so much larger
            norms, terms = norms * arguments.num_examples, terms * arguments.num_examples
        mean_norm = jnp.sqrt(squared_norms.square(jax.tree.leaves(gradient)))
        noise = NoiseScale.of_examples(norms, mean_norm.astype(norms.dtype), weights)
        if not arguments.arrays.keys:  # each example draws its own numbers, and the terms are others
            noise = _checked(noise, value, terms, weights)
        return result, gradient, noise

    return noise_scale_fun


def _read_reduction(fun: Callable[..., Any], options: Options, arguments: Arguments) -> str:
    """Whether the loss is a mean or a sum of terms of single examples."""
    gradient = Gradient(fun, dataclasses.replace(options, noise=True), arguments)
    with gradient.context():
        assert gradient.weights is not None  # raises for a loss that looks across examples
        form, reading = form_of(gradient.split), gradient.checked_reading
    if reading.stochastic and not arguments.arrays.keys:
        raise InputError(
            "exact=True needs random numbers that are drawn for each example",
            given="a loss that draws those of the whole batch",
            remedy="Pass the key as an argument and name it, e.g. rng_argnums=2. Or leave exact out.",
        )
    is_of_all = form.selection is None  # and not of rows that are selected from the batch
    if form.kind is LossKind.MEAN and is_of_all:
        return "mean"
    # In a sum of batches of one, a term of the parameters would be added once for each example.
    if form.kind is LossKind.SUM and is_of_all and not form.adds_parameters:
        return "sum"
    raise InputError(
        "exact=True needs a loss that is a mean or a sum of terms of single examples",
        given=f"a loss that is a {form.words}",
        remedy='Declare a weighted mean: reduction="weighted", for a loss that returns (total, weight). Or leave exact '
        "out.",
    )


def _of_one(fun: Callable[..., Any], options: Options, value: Any) -> Callable[..., Any]:
    """What to differentiate for a batch of one; and its term, and its weight."""

    @functools.wraps(fun)
    def of_one(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        loss = fun(*args, **kwargs)
        loss = loss[0] if options.has_aux else loss
        if not options.weighted:
            return loss, (loss, jnp.ones((), jnp.float32))
        total, weight = loss[0], jnp.asarray(loss[1])
        if jnp.issubdtype(weight.dtype, jnp.inexact):  # it may have a gradient: that of the ratio counts
            total = total - value.astype(total.dtype) * weight.astype(total.dtype)
        return total, (loss[0], weight)

    return of_one


def _checked(noise: NoiseScale, value: Any, terms: Any, weights: Any) -> NoiseScale:
    """The noise, if the terms of single examples make up the loss, as far as can be seen; NaN under `jit` if not.

    They do not if the loss uses the positions of its examples in the batch, or divides by a number that is fixed.
    """
    terms, weights = terms.astype(noise.units.dtype), weights.astype(noise.units.dtype)
    number = jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)
    difference = jnp.abs(jnp.sum(terms) / number - value.astype(terms.dtype))
    differs = difference > TELLING * jnp.sum(jnp.abs(terms)) / number
    if isinstance(differs, jax.core.Tracer):
        return noise * jnp.where(differs, jnp.full_like(number, jnp.nan), jnp.ones_like(number))
    if differs:
        raise InputError(
            "exact=True needs a loss whose terms of single examples, by themselves, make up that of the batch",
            given=f"{jnp.sum(terms) / number} from batches of one, and {value} from the batch",
            remedy="Leave exact out and pass microbatch_size=1: that is the same, for every loss that is read.",
        )
    return noise


def _check_context() -> None:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual:
        raise InputError(
            "noise_scale is for gradients outside of shard_map: inside, the microbatches of other devices are not seen",
            given=f"a call inside a shard_map over {', '.join(map(repr, manual))}",
            remedy="Call it outside, with mesh=; or combine norms yourself: NoiseScale.of_microbatches(norms, units, "
            "mean_norm).",
        )
