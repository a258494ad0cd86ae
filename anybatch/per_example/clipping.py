"""`clipped_grad`: the sum of the gradients of the examples, of which none counts for more than a bound."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.errors import InputError
from anybatch.per_example.grads import ExampleFunction
from anybatch.per_example.options import PerExampleOptions, Wants


class ClippedFunction(ExampleFunction):
    """A loss, wrapped, whose gradients are clipped and summed: what one example can change is bounded."""

    def __init__(self, fun: Callable[..., Any], options: PerExampleOptions, *, with_value: bool) -> None:
        super().__init__(fun, options)
        self._with_value = with_value

    @property
    def clip_norm(self) -> float:
        """The largest norm that an example has after clipping."""
        return self.options.clip_norm

    @property
    def normalize_by(self) -> float:
        """What the sum is divided by."""
        return self.options.normalize_by

    def sensitivity(self, neighbours: str = "add_or_remove") -> float:
        """The most by which the gradients of two neighbouring batches differ, in the Euclidean norm.

        **What privacy may rely on.** It holds for any loss and any example, whatever its gradient, NaN and infinities
        included, up to the rounding of the sum. Where that is done in bfloat16, pass `strict=True`: otherwise contrived
        examples may exceed it by some percent. For parameters of narrow dtypes it is coarse, since the sum is cast to
        these: `anybatch.privacy` is strict, differentiates them as float32, and adds noise before it rounds. It is
        infinite where nothing bounds it: without `nan_safe`, or for an infinite `clip_norm`. Losses, norms and aux are
        not bounded by it.

        Args:
          neighbours: `"add_or_remove"` for batches of which one has one example more than the other (or the same one
            as padding); `"replace"` for batches of which one example is another one.

        Raises:
          InputError: for any other relation.
        """
        factors = {"add_or_remove": 1.0, "replace": 2.0}
        if neighbours not in factors:
            raise InputError(
                "neighbours must be one of 'add_or_remove', 'replace'",
                given=f"neighbours={neighbours!r}",
                remedy='Leave it out for the usual "add_or_remove".',
            )
        return factors[neighbours] * self.options.sensitivity

    def __call__(self, *args: Any, is_padding: Any = None, **kwargs: Any) -> Any:
        if not self._with_value:
            return super().__call__(*args, is_padding=is_padding, **kwargs)
        found = self._compute(args, kwargs, is_padding)
        has_more = self.options.has_aux or self.options.returns_examples
        return ((found.value, self._beside(found)) if has_more else found.value), found.result


def clipped_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    clip_norm: float,
    normalize_by: float = 1.0,
    strict: bool = False,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_argnames: str | tuple[str, ...] = (),
    keep_batch_dim: bool = False,
    microbatch_size: int | str | None = "auto",
    method: str = "auto",
    transform: Callable[[Any], Any] | None = None,
    rng_argnums: int | tuple[int, ...] = (),
    nan_safe: bool = True,
    return_values: bool = False,
    return_norms: bool = False,
    accumulator_dtype: Any = jnp.float32,
    memory: str | int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    param_specs: Any = None,
) -> ClippedFunction:
    """The sum of the gradients of all examples, each scaled down to the norm `clip_norm` if it is larger.

    **Exact.** For any loss the sum is that of `jax.vmap(jax.grad(fun))`, clipped and summed, up to rounding: whatever
    the method, the microbatch size and the number of devices.

    **Bounded.** No example adds more than `clip_norm` to the sum: `.sensitivity()` is what privacy may rely on. One
    whose gradient is not finite, or whose norm is not in float32, counts for nothing.

    **Memory.** That of `per_example_norms`, and one sum in `accumulator_dtype`: flat in the batch.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, example):
    ...     return (example["x"] * w - example["y"]) ** 2
    >>> batch = {"x": jnp.array([1.0, 2.0, 3.0]), "y": jnp.array([2.0, 4.0, 6.0])}
    >>> clipped = ab.clipped_grad(loss, clip_norm=5.0)
    >>> print(f"{clipped(1.0, batch):.3f}")  # of -2, -8 and -18
    -12.000
    >>> clipped.sensitivity()
    5.0

    Args:
      fun: the loss of one example, as for `per_example_grads`.
      argnums: see there, like all that are not explained here.
      has_aux: see there.
      clip_norm: the largest norm of an example's gradient over all parameters together. `inf` clips nothing.
      normalize_by: what the sum is divided by: a constant, such as the expected batch size. Dividing by the number of
        examples that happen to be there would tell that number.
      strict: whether the bound holds for contrived examples too, whose bfloat16 factors are such that all roundings add
        up. Gradients from such factors are then clipped a little early, by a few percent. Otherwise roundings are taken
        for numbers of either sign. Float32 makes no difference. `anybatch.privacy` is strict.
      batch_argnums: see there.
      batch_argnames: see there.
      keep_batch_dim: see there.
      microbatch_size: see there. It changes nothing but memory and time: clipping is by example.
      method: see there.
      transform: a function of the gradient of one example. What it returns is clipped and summed.
      rng_argnums: see there.
      nan_safe: whether an example whose gradient is not finite counts for nothing. Otherwise one NaN spoils the sum.
      return_values: see there.
      return_norms: see there: the norms before clipping.
      accumulator_dtype: see there.
      memory: see there.
      mesh: see there. One collective adds up all sums after the last microbatch.
      axis_name: see there.
      param_specs: see there.

    Returns:
      A function with the arguments of `fun`, and `is_padding=`, that returns the sum, in the tree and dtypes of what is
      differentiated; with `has_aux` `(sum, aux)`, with `return_values` or `return_norms`
      `(sum, PerExample(values, norms, aux))`. Its `.sensitivity()` is the most that one example changes the sum by.

    Raises:
      InputError: for arguments that cannot be worked with, before any work is done.
      CoupledError: with `keep_batch_dim=True`, for a loss that looks across examples, such as one with BatchNorm.
      NothingFitsError: if no microbatch fits the memory.
    """
    options = PerExampleOptions.of(
        fun,
        wants=Wants.SUM,
        argnums=argnums,
        has_aux=has_aux,
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        keep_batch_dim=keep_batch_dim,
        microbatch_size=microbatch_size,
        method=method,
        transform=transform,
        rng_argnums=rng_argnums,
        nan_safe=nan_safe,
        return_values=return_values,
        return_norms=return_norms,
        accumulator_dtype=accumulator_dtype,
        memory=memory,
        mesh=mesh,
        axis_name=axis_name,
        param_specs=param_specs,
        clip_norm=clip_norm,
        normalize_by=normalize_by,
        strict=strict,
    )
    return ClippedFunction(fun, options, with_value=False)


def clipped_value_and_grad(
    fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options: Any
) -> ClippedFunction:
    """`clipped_grad` with the sum of the losses, divided by `normalize_by` as the gradients are.

    The losses are not clipped: their sum is not covered by `.sensitivity()`.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, x):
    ...     return (w * x) ** 2
    >>> value, grad = ab.clipped_value_and_grad(loss, clip_norm=3.0)(1.0, jnp.array([1.0, 2.0]))
    >>> print(f"{value:.3f} {grad:.3f}")  # gradients of 2 and 8
    5.000 5.000

    Args:
      fun: the loss of one example, as for `clipped_grad`.
      argnums: which positional arguments to differentiate with respect to.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      **options: those of `clipped_grad`.

    Returns:
      A function that returns `(value, sum)`; with `has_aux` `((value, aux), sum)`, with `return_values` or
      `return_norms` `((value, PerExample(values, norms, aux)), sum)`.
    """
    clipped = clipped_grad(fun, argnums, has_aux, **options)
    return ClippedFunction(fun, clipped.options, with_value=True)
