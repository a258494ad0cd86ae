"""`per_example_grads` and `per_example_norms`: what each example says by itself, in the memory you have."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anybatch.call.checks import one_of
from anybatch.call.models import PartitionedCall, partition_models
from anybatch.errors import InputError
from anybatch.per_example.computation import ExampleGradient, Results
from anybatch.per_example.options import PerExampleOptions, Wants
from anybatch.planning.running import run_as_planned, run_first_that_compiles
from anybatch.planning.strategy import PlannableGradient, Strategy


class PerExample(NamedTuple):
    """What is known of every example, along axis 0: None where it was not asked for."""

    values: Any = None  # the losses
    norms: Any = None  # of the gradients, before they are clipped
    aux: Any = None


class ExampleFunction:
    """A loss, wrapped. Call it with the arguments of the loss; `is_padding=` says which examples do not count."""

    def __init__(self, fun: Callable[..., Any], options: PerExampleOptions) -> None:
        functools.update_wrapper(self, fun)
        _check_names(fun)
        self.fun, self.options = fun, options
        self._failed: set[Strategy] = set()  # that XLA could not compile, so that not every call tries again

    def gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any = None) -> ExampleGradient:
        """What one call asks for, to be planned or computed."""
        call = self.opened(args, kwargs)
        arguments = self.options.roles.sort(call.fun, call.args, call.kwargs)
        return ExampleGradient(call.fun, self.options, arguments, is_padding)

    def opened(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PartitionedCall:
        """One call, with models taken apart. What examples would change of them is refused."""
        options = self.options
        return partition_models(self.fun, options.roles, options.has_aux, args, kwargs, keeps_state=False)

    def planned(self, *, memory: Any, objective: Any) -> "ExampleFunction":
        """The same, with a microbatch size that is yet to be planned."""
        one_of("objective", objective, ("memory", "speed"))
        options = dataclasses.replace(
            self.options,
            microbatch_size="auto",
            memory=self.options.memory if memory is None else memory,
            objective=objective,
        )
        return ExampleFunction(self.fun, options)

    def to_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, memory: Any, objective: Any
    ) -> tuple[Callable[..., PlannableGradient], tuple[Any, ...], dict[str, Any]]:
        """A function that makes the gradient of a call, and the arguments to call it with, models taken apart."""
        planned = self.planned(memory=memory, objective=objective)
        call = planned.opened(args, kwargs)
        of_examples = ExampleFunction(call.fun, planned.options)

        def gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannableGradient:
            return of_examples.gradient(args, kwargs, kwargs.pop("is_padding", None))

        return gradient, call.args, call.kwargs

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any) -> Results:
        gradient = self.gradient(args, kwargs, is_padding)
        size = self.options.microbatch_size
        with gradient.context():
            if size == "auto":
                strategy, outputs = run_as_planned(gradient)
            else:
                assert not isinstance(size, str)
                strategies = [Strategy(size, method=method) for method in gradient.methods]
                strategies = [strategy for strategy in strategies if strategy not in self._failed] or strategies
                strategy, outputs = run_first_that_compiles(gradient, strategies)
                self._failed.update(strategies[: strategies.index(strategy)])
            return gradient.outcome(strategy, outputs)

    def _beside(self, found: Results) -> Any:
        """What is returned beside the result: None, aux, or all that was asked for."""
        has_aux = self.options.has_aux
        if self.options.returns_examples:
            return PerExample(found.values, found.norms, found.aux if has_aux else None)
        return found.aux if has_aux else None

    def __call__(self, *args: Any, is_padding: Any = None, **kwargs: Any) -> Any:
        found = self._compute(args, kwargs, is_padding)
        beside = self._beside(found)
        has_more = self.options.has_aux or self.options.returns_examples
        return (found.result, beside) if has_more else found.result


def _check_names(fun: Callable[..., Any]) -> None:
    try:
        names = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return
    if "is_padding" in names:
        raise InputError(
            "is_padding says which examples count, and is not passed on to the loss",
            given=f"a loss with an argument of that name, {getattr(fun, '__name__', fun)}{inspect.signature(fun)}",
            remedy="Call the argument of the loss something else, e.g. mask, and put it into the batch.",
        )


def per_example_grads(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_argnames: str | tuple[str, ...] = (),
    keep_batch_dim: bool = False,
    microbatch_size: int | str | None = "auto",
    method: str = "auto",
    transform: Callable[[Any], Any] | None = None,
    rng_argnums: int | tuple[int, ...] = (),
    nan_safe: bool = False,
    return_values: bool = False,
    return_norms: bool = False,
    accumulator_dtype: Any = jnp.float32,
    memory: str | int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    param_specs: Any = None,
) -> ExampleFunction:
    """The gradient of every example by itself: `jax.vmap(jax.grad(fun))`, a microbatch at a time.

    **Exact.** Each gradient is that of its example alone, whatever the microbatch size and the number of devices; so
    are the random numbers that it draws.

    **Memory.** The gradients of all examples, which are what is asked for; with a `transform` only what that returns of
    them, and the gradients of one microbatch.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, example):
    ...     return (example["x"] * w - example["y"]) ** 2
    >>> batch = {"x": jnp.array([1.0, 2.0, 3.0]), "y": jnp.array([2.0, 4.0, 6.0])}
    >>> print(ab.per_example_grads(loss)(1.0, batch))
    [ -2.  -8. -18.]
    >>> print(ab.per_example_grads(loss, transform=jnp.sign)(1.0, batch))
    [-1. -1. -1.]

    Args:
      fun: the loss of one example, a scalar of real numbers. It is traced, as under `jit`.
      argnums: which positional arguments to differentiate with respect to, an int or a tuple of ints.
      has_aux: whether `fun` returns a pair `(loss, aux)`. aux then is returned for every example, along axis 0.
      batch_argnums: which arguments carry the batch, along axis 0 of every array in them: their positions in the
        signature of `fun`, where they may also be passed by keyword.
      batch_argnames: names of further arguments that carry the batch, e.g. `"y"` or `("x", "y")`. All arguments that
        neither option names are seen whole by every example. Of these, an array with as many rows as there are examples
        is refused if it is passed by keyword, or is itself a positional argument: close over it instead.
      keep_batch_dim: whether `fun` is written for batches: it then sees a batch of one example, and the loss of an
        example is that of its batch of one. By default it sees one example, without the axis of the batch. `fun` is
        traced once more, with the whole batch, and refused if it looks across examples there.
      microbatch_size: how many examples at a time. Any size will do. `None` takes all at once; `"auto"` takes what
        `anybatch.plan` has measured to be fastest, or else the largest that fits.
      method: `"vmap"` computes every gradient by itself. `"factored"` keeps what gradients are multiplied from instead,
        where that is cheaper: it saves memory and time where gradients are not asked for as they are. `"auto"` takes
        `"factored"` where it can be of use. Only what `"vmap"` returns can itself be differentiated by `jax.grad`.
      transform: a function of the gradient of one example. What it returns is kept instead: of every example, or, if
        gradients are clipped and summed, clipped and summed. Any tree of arrays will do.
      rng_argnums: which positional arguments are PRNG keys, or trees of them. The example at index `i` of the batch
        gets `jax.random.fold_in(key, i)`.
      nan_safe: whether the gradient of an example that is not finite counts as 0.
      return_values: whether to return the losses of the examples.
      return_norms: whether to return the norms of their gradients.
      accumulator_dtype: sums of narrower dtypes (bfloat16, float16) are taken in this one, and cast back at the end.
      memory: what all of it may take, with its arguments, for `microbatch_size="auto"`: bytes, a text as `"16GiB"`, or
        `"80%"` of what is left. By default what the device has left, less a little.
      mesh: the devices over which to spread the batch, e.g. `jax.make_mesh((8,), ("data",))`. `microbatch_size` is then
        the number of examples that a device takes at a time. Results do not depend on the devices.
      axis_name: the axis of `mesh` over which the batch is spread, or a tuple of such.
      param_specs: how what is differentiated is spread over `mesh`: a `PartitionSpec`, or a tree of them.

    Returns:
      A function with the arguments of `fun`, and `is_padding=`: booleans, one for each example. Those that are padding
      count for nothing, and microbatches of nothing else are skipped. It returns the gradients, in the tree of what is
      differentiated, with the examples along axis 0. With `has_aux`: `(gradients, aux)`. With `return_values` or
      `return_norms`: `(gradients, PerExample(values, norms, aux))`.

    Raises:
      InputError: for arguments that cannot be worked with, before any work is done.
      CoupledError: with `keep_batch_dim=True`, for a loss that looks across examples, such as one with BatchNorm.
      NothingFitsError: if no microbatch fits the memory.
    """
    options = PerExampleOptions.of(
        fun,
        wants=Wants.GRADIENTS,
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
    )
    return ExampleFunction(fun, options)


def per_example_norms(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    per_leaf: bool = False,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_argnames: str | tuple[str, ...] = (),
    keep_batch_dim: bool = False,
    microbatch_size: int | str | None = "auto",
    method: str = "auto",
    transform: Callable[[Any], Any] | None = None,
    rng_argnums: int | tuple[int, ...] = (),
    nan_safe: bool = False,
    return_values: bool = False,
    return_norms: bool = False,
    accumulator_dtype: Any = jnp.float32,
    memory: str | int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    param_specs: Any = None,
) -> ExampleFunction:
    """The norm of the gradient of every example, at about the price of a plain gradient.

    **Exact.** For any loss, as computed by `jax.vmap(jax.grad(fun))`, up to rounding. Where a norm would come out of
    sums that cancel, that is noticed, and it is computed from the gradient itself.

    **Memory.** What the gradients of one microbatch are multiplied from, or these gradients where they are smaller.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(params, x):
    ...     return jnp.sum(jnp.tanh(x @ params["w"]) @ params["v"])
    >>> params = {"w": jnp.ones((2, 3)), "v": jnp.ones(3)}
    >>> x = jnp.array([[1.0, 2.0], [0.0, 0.0]])
    >>> [f"{norm:.3f}" for norm in ab.per_example_norms(loss)(params, x)]
    ['1.724', '0.000']
    >>> [f"{norm:.3f}" for norm in ab.per_example_norms(loss, per_leaf=True)(params, x)["w"]]
    ['0.038', '0.000']

    Args:
      fun: the loss of one example, as for `per_example_grads`.
      argnums: see there, like all that follow.
      has_aux: see there.
      per_leaf: whether to return a norm for each parameter, in the tree of what is differentiated.
      batch_argnums: see there.
      batch_argnames: see there.
      keep_batch_dim: see there.
      microbatch_size: see there.
      method: see there.
      transform: a function of the gradient of one example; the norm is that of what it returns.
      rng_argnums: see there.
      nan_safe: whether a norm that is not finite counts as 0.
      return_values: see there.
      return_norms: norms are returned anyway; with it, beside the result too.
      accumulator_dtype: see there.
      memory: see there.
      mesh: see there.
      axis_name: see there.
      param_specs: see there.

    Returns:
      A function with the arguments of `fun`, and `is_padding=`, that returns the norms: in float32, or float64 if the
      gradients are. With `has_aux`: `(norms, aux)`; with `return_values`: `(norms, PerExample(values, norms, aux))`.
    """
    options = PerExampleOptions.of(
        fun,
        wants=Wants.NORMS,
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
        per_leaf=per_leaf,
    )
    return ExampleFunction(fun, options)
