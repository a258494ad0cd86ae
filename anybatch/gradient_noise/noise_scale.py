"""The gradient noise scale: an estimate of the batch size beyond which more examples are worth little.

`noise_scale` computes a gradient and its noise. `NoiseScale` is the record of the noise, which adds up over steps.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.call.arguments import Arguments
from anybatch.call.models import PartitionedCall, partition_models
from anybatch.call.options import Options
from anybatch.errors import InputError
from anybatch.gradients import squared_norms
from anybatch.gradients.computation import Gradient
from anybatch.gradients.value_and_grad import compute, value_and_grad
from anybatch.per_example.grads import per_example_norms
from anybatch.reading.report import LossKind, form_of

# With exact=True, the sum of the terms of single examples may differ from the loss by this share of their absolute
# values. Rounding makes less, even where products are rounded to 8 bits.
TERMS_TOLERANCE = 0.02

# The options of `value_and_grad` that `per_example_norms` has, too.
PER_EXAMPLE_OPTIONS = (
    *("batch_argnums", "batch_argnames", "rng_argnums", "microbatch_size", "block_size", "memory"),
    *("accumulator_dtype", "mesh", "axis_name", "param_specs"),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class NoiseScale:
    """The noise in a gradient, and the batch size at which it equals the gradient itself.

    A gradient is a mean over units: examples, or whatever the weights of a weighted loss count, such as tokens. Let `G`
    be the mean over infinitely many units, and `Sigma` the covariance of the gradient of one unit. Then `value`
    estimates `tr(Sigma) / |G|**2`, the critical batch size (McCandlish et al., 2018). In far smaller batches, doubling
    the units is worth almost as much as doubling the steps; in far larger ones it is worth almost nothing.

    Add records to average over steps; `decay * record` lets old steps fade. **The value is the ratio of the averages.**
    An average of ratios would estimate nothing, since `gradient_square` may be close to 0, or negative, by chance.

    >>> import anybatch as ab
    >>> step = ab.NoiseScale.of_examples(norms=[3.0, 5.0], mean_norm=3.5)  # gradients of 2 examples, and their mean
    >>> print(step)
    noise scale 1.27 (trace 9.5 / squared gradient 7.5; 2 units in 2 microbatches)
    >>> print(step + step)
    noise scale 1.27 (trace 9.5 / squared gradient 7.5; 4 units in 4 microbatches over 2 steps)
    >>> print(ab.NoiseScale.of_examples(norms=[3.0], mean_norm=3.0))
    noise scale undefined: noise is the difference between microbatches, and there was only one

    Args:
      trace_sum: the sum over steps of unbiased estimates of `tr(Sigma)`.
      gradient_square_sum: the sum over steps of unbiased estimates of `|G|**2`.
      steps: the number of steps with estimates. A step of one microbatch has none, and does not count.
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
        """The record of no steps, to start a sum with."""
        return cls(*(jnp.zeros((), dtype) for _ in dataclasses.fields(cls)))

    @classmethod
    def of_microbatches(cls, norms: Any, units: Any, mean_norm: Any) -> "NoiseScale":
        """The record of one step, from the norms of gradients that were computed elsewhere.

        Args:
          norms: for each microbatch, the norm of the sum of the gradients of its units.
          units: for each microbatch, its number of units. Microbatches without units do not count.
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
        squares = jnp.sum(jnp.where(has_units, norms**2 / jnp.where(has_units, units, 1), 0))
        scatter = squares / jnp.maximum(number, jnp.finfo(dtype).tiny) - square
        return cls.of_step(scatter, square, number, jnp.sum(has_units.astype(dtype)))

    @classmethod
    def of_examples(cls, norms: Any, mean_norm: Any, weights: Any = None) -> "NoiseScale":
        """The record of one step, from per-example gradient norms: the least uncertain estimate of a batch.

        Args:
          norms: for each example, the norm of its gradient; for a weighted loss, of the gradient of its total.
          mean_norm: the norm of the mean gradient: the sum, divided by the number of examples or by the sum of weights.
          weights: for each example, its weight. By default 1.
        """
        norms = jnp.asarray(norms)
        return cls.of_microbatches(norms, jnp.ones_like(norms) if weights is None else weights, mean_norm)

    @classmethod
    def of_step(cls, scatter: Any, square: Any, units: Any, microbatches: Any) -> "NoiseScale":
        """The record of one step, from sums over its `K` microbatches.

        Microbatch `k` has `n_k` of the `N` units and adds `c_k` to the gradient `g`, the sum of all `c_k`.

        Args:
          scatter: the sum of `|c_k|**2 * N / n_k`, less `|g|**2`. Terms without noise may be left out of both.
          square: `|g|**2`.
          units: `N`.
          microbatches: `K`, without microbatches that have no units.
        """
        is_defined = (microbatches > 1) & (units > 0)
        # Negative only by rounding. NaN stays NaN.
        variance = jnp.maximum(scatter, 0) / jnp.where(is_defined, microbatches - 1, 1)
        return cls(
            trace_sum=jnp.where(is_defined, variance * units, 0),
            gradient_square_sum=jnp.where(is_defined, square - variance, 0),
            steps=jnp.where(is_defined, 1, 0).astype(variance.dtype),
            units=jnp.where(is_defined, units, 0),
            microbatches=microbatches,
        )

    @property
    def trace(self) -> Any:
        """An estimate of `tr(Sigma)`: the variance of the gradient of one unit, summed over its entries. May be NaN."""
        return self._average(self.trace_sum)

    @property
    def gradient_square(self) -> Any:
        """An estimate of `|G|**2`, for the gradient without noise. It is unbiased, so it may be negative."""
        return self._average(self.gradient_square_sum)

    @property
    def value(self) -> Any:
        """The critical batch size, in units.

        NaN if it is undefined: for one microbatch, no units, or a gradient that is 0 or not finite. Infinite if the
        noise hides the gradient, whose estimated square is then not positive: average over more steps.
        """
        trace, square = self.trace, self.gradient_square
        hidden = jnp.where((trace > 0) & ~jnp.isnan(square), jnp.inf, jnp.nan)
        return jnp.where(square > 0, trace / jnp.where(square > 0, square, 1), hidden)

    @property
    def is_defined(self) -> Any:
        """True if `value` is a finite number."""
        return jnp.isfinite(self.value)

    @property
    def why_undefined(self) -> str:
        """Why `value` is not a finite number; empty if it is. Not for use under `jit`."""
        if self.is_defined:
            return ""
        if self.steps == 0:
            if self.microbatches == 0:
                return "there were no units"
            return "noise is the difference between microbatches, and there was only one"
        if np.isnan(self.trace) or np.isnan(self.gradient_square):
            return "a gradient is not finite, or (exact=True) the terms of single examples do not add up to the loss"
        if self.trace > 0:
            return "the noise hides the gradient, whose estimated square is not positive; average over more steps"
        return "the gradient is 0, and so is its noise"

    def __add__(self, other: Any) -> "NoiseScale":
        if not isinstance(other, NoiseScale):
            return NotImplemented
        return jax.tree.map(operator.add, self, other)

    def __radd__(self, other: Any) -> "NoiseScale":
        return self if isinstance(other, int) and other == 0 else NotImplemented  # sum() starts with 0

    def __mul__(self, factor: Any) -> "NoiseScale":
        return jax.tree.map(lambda leaf: leaf * factor, self)

    __rmul__ = __mul__

    def _average(self, total: Any) -> Any:
        none = jnp.asarray(self.steps) == 0
        return jnp.where(none, jnp.nan, jnp.asarray(total) / jnp.where(none, 1, self.steps))

    def __str__(self) -> str:
        if any(isinstance(leaf, jax.core.Tracer) or np.ndim(leaf) for leaf in jax.tree.leaves(self)):
            return repr(self)
        counts = f"{self.units:.6g} units in {self.microbatches:.6g} microbatches"
        if self.steps != 1:
            counts += f" over {self.steps:.6g} steps"
        parts = f"trace {self.trace:.3g} / squared gradient {self.gradient_square:.3g}; {counts}"
        why = self.why_undefined
        if not why:
            return f"noise scale {self.value:.3g} ({parts})"
        return f"noise scale undefined: {why}" + (f" ({parts})" if self.steps > 0 else "")


def noise_scale(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    exact: bool = False,
    **options: Any,
) -> Callable[..., Any]:
    """`value_and_grad` with the gradient noise scale: the batch size beyond which more examples are worth little.

    The gradients of the microbatches of one batch differ by chance. These differences and the gradient itself give an
    estimate of `tr(Sigma) / |G|**2`, the critical batch size of McCandlish et al. (2018), without a second pass over
    the data. One step says little: average over many by adding the records, see `anybatch.NoiseScale`.

    **Unbiased.** The estimates of `tr(Sigma)` and of `|G|**2` are unbiased, for microbatches of any sizes and weights.
    Each microbatch counts by its units. For a mean or a sum these are the examples; for a weighted mean, declared or
    read, they are what the weight counts, such as tokens. The examples should be in random order, and the units nearly
    independent.

    **Undefined for one microbatch.** Then the value is NaN, and `why_undefined` says why. `microbatch_size="auto"`
    takes one microbatch if the full batch fits, so pass a size, such as an eighth of the batch.

    **Time and memory.** Value and gradient equal those of `value_and_grad`, up to rounding. It takes the memory of
    `value_and_grad` and of the gradient of one microbatch, and the time to read this gradient once more. On a mesh it
    adds no collective: the squares join the one reduction.

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
        of the gradient `G` and have no noise. For a function of a mean, such as the square root of a mean square, the
        derivative of that function is taken as a constant factor, and the noise is that of the mean.
      argnums: which positional arguments to differentiate with respect to.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      exact: whether to use the gradient norms of all examples instead of those of microbatches. This is the same
        estimate with the least uncertainty, whatever the microbatches, at the cost of a second computation: the
        gradient of each example. The loss must be a mean, a sum or a declared weighted mean of terms of single
        examples, and `fun` is called with batches of one example.
      **options: the options of `value_and_grad`.

    Returns:
      A function with the arguments of `fun` that returns `(value, gradient, noise)`, or
      `((value, aux), gradient, noise)`, where `noise` is a `NoiseScale`.

    Raises:
      InputError: for arguments that are not valid, and for a loss whose units are not clear, such as one with two
        different denominators.
      CoupledError: for a loss that looks across examples.
      What `value_and_grad` raises.
    """
    if not isinstance(exact, bool):
        raise InputError(
            "exact must be True or False",
            given=f"exact={exact!r}",
            remedy="Pass exact=True to use the gradient norms of single examples, or leave it out.",
        )
    checked = Options.of(fun, argnums=argnums, has_aux=has_aux, noise=not exact, **options)

    @functools.wraps(fun)
    def noise_scale_fun(*args: Any, **kwargs: Any) -> Any:
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if manual:
            raise InputError(
                "noise_scale must be called outside shard_map: inside, it does not see the microbatches of other "
                "devices",
                given=f"a call inside a shard_map over {', '.join(map(repr, manual))}",
                remedy="Call it outside, with mesh=. Or combine norms yourself: NoiseScale.of_microbatches(norms, "
                "units, mean_norm).",
            )
        call = partition_models(fun, checked.roles, has_aux, args, kwargs, keeps_state=not exact)
        arguments = checked.roles.sort(call.fun, call.args, call.kwargs)
        if exact:
            return _of_examples(call, checked, arguments, options)
        value, aux, gradient, sums = compute(call.fun, call.options(checked), arguments)
        aux = call.close(aux, checked)
        return ((value, aux) if has_aux else value), gradient, NoiseScale.of_step(*sums)

    return noise_scale_fun


def _of_examples(call: PartitionedCall, checked: Options, arguments: Arguments, options: dict[str, Any]) -> Any:
    """`noise_scale(exact=True)`: the noise from the gradient norms of single examples."""
    argnums, has_aux, reduction = checked.argnums, checked.has_aux, checked.reduction
    if reduction == "infer":
        reduction = _read_reduction(call.fun, checked, arguments)
    result, gradient = value_and_grad(call.fun, argnums, has_aux, **options)(*call.args, **call.kwargs)
    if not arguments.num_examples:
        return result, gradient, NoiseScale.empty()
    value = result[0] if has_aux else result
    of_examples = {name: options[name] for name in PER_EXAMPLE_OPTIONS if name in options}
    one = _of_one_example(call.fun, checked, value)
    norms_fun = per_example_norms(one, argnums, True, keep_batch_dim=True, **of_examples)
    norms, (terms, weights) = norms_fun(*call.args, **call.kwargs)
    if reduction == "sum":  # it is a mean of terms that are larger by this factor
        norms, terms = norms * arguments.num_examples, terms * arguments.num_examples
    mean_norm = jnp.sqrt(squared_norms.square(jax.tree.leaves(gradient)))
    noise = NoiseScale.of_examples(norms, mean_norm.astype(norms.dtype), weights)
    if not arguments.arrays.keys:  # with keys, batches of one draw other numbers than the batch
        noise = _checked(noise, value, terms, weights)
    return result, gradient, noise


def _read_reduction(fun: Callable[..., Any], options: Options, arguments: Arguments) -> str:
    """Reads whether the loss is a "mean" or a "sum" of terms of single examples."""
    gradient = Gradient(fun, dataclasses.replace(options, noise=True), arguments)
    with gradient.context():
        assert gradient.weights is not None  # raises for a loss that looks across examples
        form, reading = form_of(gradient.split), gradient.checked_reading
    if reading.stochastic and not arguments.arrays.keys:
        raise InputError(
            "exact=True needs random numbers that are drawn for each example",
            given="a loss that draws the numbers of the full batch",
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


def _of_one_example(fun: Callable[..., Any], options: Options, value: Any) -> Callable[..., Any]:
    """The function to differentiate for a batch of one example. As aux it returns the example's term and weight."""

    @functools.wraps(fun)
    def of_one_example(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        loss = fun(*args, **kwargs)
        loss = loss[0] if options.has_aux else loss
        if not options.weighted:
            return loss, (loss, jnp.ones((), jnp.float32))
        total, weight = loss[0], jnp.asarray(loss[1])
        if jnp.issubdtype(weight.dtype, jnp.inexact):  # the weight may have a gradient, which the ratio needs
            total = total - value.astype(total.dtype) * weight.astype(total.dtype)
        return total, (loss[0], weight)

    return of_one_example


def _checked(noise: NoiseScale, value: Any, terms: Any, weights: Any) -> NoiseScale:
    """Checks that the terms of single examples add up to the loss, and returns the noise; under `jit`, NaN if not.

    They do not add up if the loss uses the positions of its examples in the batch, or divides by a fixed number.

    Raises:
      InputError: outside `jit`, if they do not.
    """
    terms, weights = terms.astype(noise.units.dtype), weights.astype(noise.units.dtype)
    number = jnp.maximum(jnp.sum(weights), jnp.finfo(weights.dtype).tiny)
    difference = jnp.abs(jnp.sum(terms) / number - value.astype(terms.dtype))
    differs = difference > TERMS_TOLERANCE * jnp.sum(jnp.abs(terms)) / number
    if isinstance(differs, jax.core.Tracer):
        return noise * jnp.where(differs, jnp.full_like(number, jnp.nan), jnp.ones_like(number))
    if differs:
        raise InputError(
            "exact=True needs a loss whose values for batches of one example add up to that of the batch",
            given=f"{jnp.sum(terms) / number} from batches of one, and {value} from the batch",
            remedy="Leave exact out and pass microbatch_size=1: for a loss that is read, the estimate is the same.",
        )
    return noise
