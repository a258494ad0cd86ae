"""`noise_scale`: a gradient, and how large a batch it is worth."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.arguments import Arguments
from anybatch.computation import Gradient
from anybatch.errors import InputError
from anybatch.gradient import compute, settings_of, value_and_grad
from anybatch.gradient_noise import NoiseScale
from anybatch.modules import opened
from anybatch.per_example import per_example_norms
from anybatch.reading.kinds import kind_of
from anybatch.routes import squares
from anybatch.settings import Settings

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
    settings = settings_of(fun, argnums, has_aux, options, noise=True)

    @functools.wraps(fun)
    def noise_scale_fun(*args: Any, **kwargs: Any) -> Any:
        _check_context()
        call = opened(fun, settings.roles, has_aux, args, kwargs)
        arguments = settings.roles.sort(call.fun, call.args, call.kwargs)
        value, aux, gradient, sums = compute(call.fun, call.settings(settings), arguments)
        aux = call.close(aux, settings)
        return ((value, aux) if has_aux else value), gradient, NoiseScale.of_step(*sums)

    return noise_scale_fun


def _of_examples(fun: Callable[..., Any], argnums: Any, has_aux: bool, options: dict[str, Any]) -> Callable[..., Any]:
    """The noise from the norms of the gradients of single examples."""
    settings = settings_of(fun, argnums, has_aux, options, noise=False)
    examples_options = {name: options[name] for name in OF_EXAMPLES if name in options}
    examples_options["keep_batch_dim"] = True

    @functools.wraps(fun)
    def noise_scale_fun(*args: Any, **kwargs: Any) -> Any:
        _check_context()
        call = opened(fun, settings.roles, has_aux, args, kwargs, keeps_state=False)
        arguments = settings.roles.sort(call.fun, call.args, call.kwargs)
        reduction = settings.reduction
        if reduction == "infer":
            reduction = _read_reduction(call.fun, settings, arguments)
        result, gradient = value_and_grad(call.fun, argnums, has_aux, **options)(*call.args, **call.kwargs)
        if not arguments.num_examples:
            return result, gradient, NoiseScale.empty()
        value = result[0] if has_aux else result
        norms_fun = per_example_norms(_of_one(call.fun, settings, value), argnums, True, **examples_options)
        norms, (terms, weights) = norms_fun(*call.args, **call.kwargs)
        if reduction == "sum":  # a mean of terms that are so much larger
            norms, terms = norms * arguments.num_examples, terms * arguments.num_examples
        mean_norm = jnp.sqrt(squares.square(jax.tree.leaves(gradient)))
        noise = NoiseScale.of_examples(norms, mean_norm.astype(norms.dtype), weights)
        if not arguments.arrays.keys:  # each example draws its own numbers, and the terms are others
            noise = _checked(noise, value, terms, weights)
        return result, gradient, noise

    return noise_scale_fun


def _read_reduction(fun: Callable[..., Any], settings: Settings, arguments: Arguments) -> str:
    """Whether the loss is a mean or a sum of terms of single examples."""
    gradient = Gradient(fun, dataclasses.replace(settings, noise=True), arguments)
    with gradient.context():
        assert gradient.units is not None  # raises for a loss that looks across examples
        kind, reading = kind_of(gradient.split), gradient.checked_reading
    if reading.stochastic and not arguments.arrays.keys:
        raise InputError(
            "exact=True needs random numbers that are drawn for each example",
            given="a loss that draws those of the whole batch",
            remedy="Pass the key as an argument and name it, e.g. rng_argnums=2. Or leave exact out.",
        )
    examples = f"over {arguments.num_examples} example{'' if arguments.num_examples == 1 else 's'}"
    if kind in (f"mean {examples}", f"mean {examples}, plus a term of the parameters"):
        return "mean"
    if kind == f"sum {examples}":
        return "sum"
    raise InputError(
        "exact=True needs a loss that is a mean or a sum of terms of single examples",
        given=f"a loss that is a {kind}",
        remedy='Declare a weighted mean: reduction="weighted", for a loss that returns (total, weight). Or leave exact '
        "out.",
    )


def _of_one(fun: Callable[..., Any], settings: Settings, value: Any) -> Callable[..., Any]:
    """What to differentiate for a batch of one; and its term, and its weight."""

    @functools.wraps(fun)
    def of_one(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        loss = fun(*args, **kwargs)
        loss = loss[0] if settings.has_aux else loss
        if not settings.weighted:
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
