"""`per_example_grads` and `per_example_norms`: the gradient, or its norm, of every example of a batch.

Open `per_example_grads` at the end first. `ExampleFunction` is the wrapped loss that both return.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp

from anybatch.call.models import PartitionedCall, partition_models
from anybatch.errors import InputError
from anybatch.per_example.computation import ExampleGradient, PerExample
from anybatch.per_example.options import PerExampleOptions, Wants
from anybatch.planning.problem import Problem
from anybatch.planning.running import run_as_planned, run_first_that_compiles
from anybatch.planning.strategy import Strategy

__all__ = ["ExampleFunction", "PerExample", "per_example_grads", "per_example_norms"]


class ExampleFunction:
    """A wrapped loss. It takes the arguments of the loss, and `is_padding=`, booleans that mark examples to skip."""

    def __init__(self, fun: Callable[..., Any], options: PerExampleOptions, *, with_value: bool = False) -> None:
        functools.update_wrapper(self, fun)
        _check_names(fun)
        self.fun, self.options, self._with_value = fun, options, with_value
        self._failed: set[Strategy] = set()  # strategies that XLA could not compile, so that later calls skip them

    @classmethod
    def of(cls, fun: Callable[..., Any], wants: Wants, *, with_value: bool = False, **options: Any) -> Self:
        """A loss, wrapped with the options of a user. With `with_value`, the sum of the losses is returned too."""
        return cls(fun, PerExampleOptions.of(fun, wants=wants, **options), with_value=with_value)

    def gradient(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_padding: Any = None) -> ExampleGradient:
        """The computation of one call, to be planned or run."""
        call = self._partitioned(args, kwargs)
        arguments = self.options.roles.sort(call.fun, call.args, call.kwargs)
        return ExampleGradient(call.fun, self.options, arguments, is_padding)

    def _partitioned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PartitionedCall:
        """One call, with models split into arrays. Models whose state the loss changes are refused."""
        options = self.options
        return partition_models(self.fun, options.roles, options.has_aux, args, kwargs, keeps_state=False)

    def to_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, memory: Any, objective: Any
    ) -> tuple[Callable[..., Problem], tuple[Any, ...], dict[str, Any]]:
        """A function that makes the computation of a call, and its arguments, with models split into arrays."""
        call = self._partitioned(args, kwargs)
        planned = ExampleFunction(call.fun, self.options.to_plan(memory, objective))

        def gradient(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Problem:
            return planned.gradient(args, kwargs, kwargs.pop("is_padding", None))

        return gradient, call.args, call.kwargs

    def __call__(self, *args: Any, is_padding: Any = None, **kwargs: Any) -> Any:
        gradient = self.gradient(args, kwargs, is_padding)
        size = self.options.microbatch_size
        with gradient.context():
            if size == "auto":
                strategy, outputs = run_as_planned(gradient)
            else:
                block_size = self.options.fixed_block_size
                strategies = [Strategy(size, method=method, block_size=block_size) for method in gradient.methods]
                strategies = [strategy for strategy in strategies if strategy not in self._failed] or strategies
                strategy, outputs = run_first_that_compiles(gradient, strategies)
                self._failed.update(strategies[: strategies.index(strategy)])
            result, value, examples = gradient.outcome(strategy, outputs)
        first = value if self._with_value else result
        if self.options.returns_examples:
            first = first, examples
        elif self.options.has_aux:
            first = first, examples.aux
        return (first, result) if self._with_value else first


def _check_names(fun: Callable[..., Any]) -> None:
    try:
        names = inspect.signature(fun).parameters
    except (TypeError, ValueError):
        return
    if "is_padding" in names:
        raise InputError(
            "is_padding is an argument of the wrapped function, and is not passed on to the loss",
            given=f"a loss with an argument of that name, {getattr(fun, '__name__', fun)}{inspect.signature(fun)}",
            remedy="Rename the argument of the loss, e.g. to mask, and put it into the batch.",
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
    block_size: int | str | None = "auto",
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
    """The gradient of every example: `jax.vmap(jax.grad(fun))`, one microbatch at a time.

    **Exact.** Each gradient depends on its example alone, whatever the microbatch size and the number of devices. So do
    the random numbers that an example draws.

    **Memory.** The gradients of all examples, since they are the result. With a `transform`, only what it returns for
    all examples, and the gradients of one microbatch.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, example):
    ...     return (example["x"] * w - example["y"]) ** 2
    >>> batch = {"x": jnp.array([1.0, 2.0, 3.0]), "y": jnp.array([2.0, 4.0, 6.0])}
    >>> print(ab.per_example_grads(loss)(1.0, batch))
    [ -2.  -8. -18.]
    >>> print(ab.per_example_grads(loss, transform=jnp.sign)(1.0, batch))
    [-1. -1. -1.]

    Args:
      fun: the loss of one example. It must return a real scalar. It is traced, as under `jit`.
      argnums: the positional arguments to differentiate, an int or a tuple of ints.
      has_aux: whether `fun` returns a pair `(loss, aux)`. The aux of all examples is returned, with the examples along
        axis 0.
      batch_argnums: the arguments that hold the batch, with examples along axis 0 of every array. They are positions in
        the signature of `fun`; such an argument may also be passed by keyword. Every example gets all other arguments
        unchanged.
      batch_argnames: the names of further arguments that hold the batch, e.g. `"y"` or `("x", "y")`. An array outside
        of the batch that has as many rows as the batch has examples is refused if it is passed by keyword or is itself
        a positional argument, since every example would see all of its rows. If that is what you want, close over it.
      keep_batch_dim: whether `fun` is written for batches. If True, `fun` gets batches of one example, and the loss of
        an example is that of its batch of one. If False, `fun` gets one example, without the batch axis. With True,
        `fun` is also traced once with the full batch, and refused if it looks across examples.
      microbatch_size: the number of examples at a time; the last microbatch may be smaller. `None` is the full batch.
        `"auto"` takes the size that `anybatch.plan` has measured to be the fastest, or else the largest that fits the
        memory. It changes memory and time, and not the result.
      block_size: how many rows of a big value of one example to compute at a time, such as tokens of logits over a
        large vocabulary. `None` computes them in full. `"auto"` lets a plan choose: blocks are used if not even one
        example fits the memory in full, or if `anybatch.plan` timed them to be faster. With a fixed `microbatch_size`,
        it is `None`. The result is the same. The gradient of a parameter that all blocks read, such as the matrix that
        makes logits, takes its full size for each example in the microbatch.
      method: `"auto"` and `"vmap"` compute the gradient of every example. `"factored"` is for norms and clipped sums;
        where the gradients themselves are returned, it does the same as `"vmap"`.
      transform: a function of the gradient of one example, which returns any tree of floating-point arrays. What it
        returns is kept in place of the gradient.
      rng_argnums: the positional arguments that are PRNG keys, or trees of them. The example at index `i` of the batch
        gets `jax.random.fold_in(key, i)`, whatever the microbatch size.
      nan_safe: whether the gradient of an example counts as 0 if it is not finite.
      return_values: whether to also return the loss of every example.
      return_norms: whether to also return the norm of every example's gradient.
      accumulator_dtype: the dtype of sums over examples, as for `clipped_grad`. Per-example gradients have no such
        sums, so it has no effect here.
      memory: the bytes that the computation and its arguments may take, for `microbatch_size="auto"`: an int, a string
        such as `"16GiB"`, or `"80%"` of the free memory. By default, the free memory of the device minus a margin.
      mesh: the devices over which to shard the batch, e.g. `jax.make_mesh((8,), ("data",))`. `microbatch_size` is then
        the number of examples at a time on one device. Results do not depend on the number of devices.
      axis_name: the axis of `mesh` over which the batch is sharded, or a tuple of axes.
      param_specs: the shardings of the differentiated arguments on `mesh`: a `PartitionSpec`, or a tree of them. By
        default, those of the arrays. Under `jit`, arrays do not show them: pass them if the parameters are sharded.

    Returns:
      A function with the arguments of `fun`, and `is_padding=`: one boolean for each example. Examples that are padding
      count for nothing, and microbatches of padding alone are skipped. It returns the gradients, in the tree of the
      differentiated arguments, with the examples along axis 0. With `has_aux` it returns `(gradients, aux)`. With
      `return_values` or `return_norms` it returns `(gradients, PerExample(values, norms, aux))`.

    Raises:
      InputError: for arguments that are not allowed, before any work is done.
      CoupledError: with `keep_batch_dim=True`, for a loss that looks across examples, such as one with BatchNorm.
      NothingFitsError: if no microbatch fits the memory.
    """
    return ExampleFunction.of(
        wants=Wants.GRADIENTS,
        fun=fun,
        argnums=argnums,
        has_aux=has_aux,
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        keep_batch_dim=keep_batch_dim,
        microbatch_size=microbatch_size,
        block_size=block_size,
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
    block_size: int | str | None = "auto",
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
    """The norm of the gradient of every example, at about the cost of one plain gradient.

    **Exact.** For any loss, the norms are those of `jax.vmap(jax.grad(fun))`, up to rounding. A norm that would lose
    digits because sums cancel is detected, and recomputed from the gradient.

    **Memory.** The factors that the gradients of one microbatch are products of, or these gradients where they are
    smaller.

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
      fun: the loss of one example. It must return a real scalar. It is traced, as under `jit`.
      argnums: the positional arguments to differentiate, an int or a tuple of ints.
      has_aux: whether `fun` returns a pair `(loss, aux)`. The aux of all examples is returned, with the examples along
        axis 0.
      per_leaf: whether to return one norm for each parameter, in the tree of the differentiated arguments.
      batch_argnums: the arguments that hold the batch, with examples along axis 0 of every array. They are positions in
        the signature of `fun`; such an argument may also be passed by keyword. Every example gets all other arguments
        unchanged.
      batch_argnames: the names of further arguments that hold the batch, e.g. `"y"` or `("x", "y")`. An array outside
        of the batch that has as many rows as the batch has examples is refused if it is passed by keyword or is itself
        a positional argument, since every example would see all of its rows. If that is what you want, close over it.
      keep_batch_dim: whether `fun` is written for batches. If True, `fun` gets batches of one example, and the loss of
        an example is that of its batch of one. If False, `fun` gets one example, without the batch axis. With True,
        `fun` is also traced once with the full batch, and refused if it looks across examples.
      microbatch_size: the number of examples at a time; the last microbatch may be smaller. `None` is the full batch.
        `"auto"` takes the size that `anybatch.plan` has measured to be the fastest, or else the largest that fits the
        memory. It changes memory and time, and not the result.
      block_size: how many rows of a big value of one example to compute at a time, such as tokens of logits over a
        large vocabulary. `None` computes them in full. `"auto"` lets a plan choose: blocks are used if not even one
        example fits the memory in full, or if `anybatch.plan` timed them to be faster. With a fixed `microbatch_size`,
        it is `None`. The result is the same. The gradient of a parameter that all blocks read, such as the matrix that
        makes logits, takes its full size for each example in the microbatch, unless its factors are smaller.
      method: `"vmap"` computes the gradient of every example. `"factored"` keeps the factors that a gradient is the
        product of, wherever that is cheaper, and computes norms from them. `"auto"` prefers `"factored"`. Only results
        of `"vmap"` can be differentiated again by `jax.grad`.
      transform: a function of the gradient of one example, which returns any tree of floating-point arrays. The norm is
        that of what it returns. It needs the gradients themselves, so it rules out `method="factored"`.
      rng_argnums: the positional arguments that are PRNG keys, or trees of them. The example at index `i` of the batch
        gets `jax.random.fold_in(key, i)`, whatever the microbatch size.
      nan_safe: whether the norm of an example counts as 0 if its gradient is not finite.
      return_values: whether to also return the loss of every example.
      return_norms: whether the norms are also part of the `PerExample` that is returned beside the result.
      accumulator_dtype: the dtype of sums over examples, as for `clipped_grad`. Norms need no such sums, so it has no
        effect here.
      memory: the bytes that the computation and its arguments may take, for `microbatch_size="auto"`: an int, a string
        such as `"16GiB"`, or `"80%"` of the free memory. By default, the free memory of the device minus a margin.
      mesh: the devices over which to shard the batch, e.g. `jax.make_mesh((8,), ("data",))`. `microbatch_size` is then
        the number of examples at a time on one device. Results do not depend on the number of devices.
      axis_name: the axis of `mesh` over which the batch is sharded, or a tuple of axes.
      param_specs: the shardings of the differentiated arguments on `mesh`: a `PartitionSpec`, or a tree of them. By
        default, those of the arrays. Under `jit`, arrays do not show them: pass them if the parameters are sharded.

    Returns:
      A function with the arguments of `fun`, and `is_padding=`: one boolean for each example. Examples that are padding
      get a norm of 0, and microbatches of padding alone are skipped. It returns the norms, in float32, or in float64 if
      the gradients are; with `per_leaf` a tree of them. With `has_aux` it returns `(norms, aux)`. With `return_values`
      or `return_norms` it returns `(norms, PerExample(values, norms, aux))`.

    Raises:
      InputError: for arguments that are not allowed, before any work is done.
      CoupledError: with `keep_batch_dim=True`, for a loss that looks across examples, such as one with BatchNorm.
      NothingFitsError: if no microbatch fits the memory.
    """
    return ExampleFunction.of(
        wants=Wants.NORMS,
        fun=fun,
        argnums=argnums,
        has_aux=has_aux,
        per_leaf=per_leaf,
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        keep_batch_dim=keep_batch_dim,
        microbatch_size=microbatch_size,
        block_size=block_size,
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
