"""`clipped_grad` and `clipped_value_and_grad`: the sum of per-example gradients, each clipped to a largest norm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.errors import InputError
from anybatch.per_example.grads import ExampleFunction
from anybatch.per_example.options import Wants


class ClippedFunction(ExampleFunction):
    """A wrapped loss that returns the clipped sum of per-example gradients, and bounds what one example can change."""

    @property
    def clip_norm(self) -> float:
        """The largest norm that the gradient of an example has after clipping."""
        return self.options.clip_norm

    @property
    def normalize_by(self) -> float:
        """The constant that the sum is divided by."""
        return self.options.normalize_by

    def sensitivity(self, neighbours: str = "add_or_remove") -> float:
        """The most by which the results of two neighbouring batches differ, in the Euclidean norm.

        **What privacy may rely on.** The bound holds for any loss and any example, whatever its gradient, including NaN
        and infinities, up to the rounding of the sum. If factors are multiplied in bfloat16, it needs `strict=True`:
        otherwise contrived examples may exceed it by a few percent. For parameters of narrow dtypes the bound is
        coarse, since the sum is cast to these dtypes. `anybatch.privacy` is strict, differentiates such parameters as
        float32, and adds noise before it rounds. The sensitivity is infinite if nothing bounds it: with
        `nan_safe=False`, or with an infinite `clip_norm`. It does not cover losses, norms and aux.

        Args:
          neighbours: `"add_or_remove"` if one batch has one more example than the other (or has padding in its place);
            `"replace"` if one example of the batch is replaced by another.

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
    block_size: int | str | None = "auto",
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
    """The sum of the gradients of all examples, each scaled down to the norm `clip_norm` if it is longer.

    **Exact.** For any loss the result is that of `jax.vmap(jax.grad(fun))`, clipped and summed, up to rounding, for
    every method, microbatch size and number of devices.

    **Bounded.** No example adds more than `clip_norm` to the sum. `.sensitivity()` returns the bound that privacy may
    rely on. An example counts for nothing if its gradient, or the norm of it in float32, is not finite.

    **Memory.** That of `per_example_norms`, and one sum in `accumulator_dtype`, whatever the size of the batch.

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
      fun: the loss of one example. It must return a real scalar. It is traced, as under `jit`.
      argnums: the positional arguments to differentiate, an int or a tuple of ints.
      has_aux: whether `fun` returns a pair `(loss, aux)`. The aux of all examples is returned, with the examples along
        axis 0.
      clip_norm: the largest norm that the gradient of one example may have, over all parameters together. A longer
        gradient is scaled down to it. `inf` clips nothing.
      normalize_by: a constant that the sum is divided by, such as the expected batch size. For privacy, do not divide
        by the number of examples in the batch: that number is private too.
      strict: whether the bound holds for contrived examples too, whose bfloat16 factors are chosen so that all rounding
        errors have the same sign. If True, gradients from such factors are clipped a few percent early. If False,
        rounding errors are taken to have either sign. It makes no difference in float32. `anybatch.privacy` uses True.
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
        product of, wherever that is cheaper, and computes norms and the clipped sum from them. `"auto"` prefers
        `"factored"`. Only results of `"vmap"` can be differentiated again by `jax.grad`.
      transform: a function of the gradient of one example, which returns any tree of floating-point arrays. What it
        returns is clipped and summed. It needs the gradients themselves, so it rules out `method="factored"`.
      rng_argnums: the positional arguments that are PRNG keys, or trees of them. The example at index `i` of the batch
        gets `jax.random.fold_in(key, i)`, whatever the microbatch size.
      nan_safe: whether an example counts for nothing if its gradient is not finite. If False, one NaN spoils the sum,
        and nothing bounds the effect of one example.
      return_values: whether to also return the loss of every example.
      return_norms: whether to also return the norm of every example's gradient before clipping.
      accumulator_dtype: the dtype in which gradients of narrower dtypes (bfloat16, float16) are summed; the sum is cast
        back at the end. `None` sums each gradient in its own dtype.
      memory: the bytes that the computation and its arguments may take, for `microbatch_size="auto"`: an int, a string
        such as `"16GiB"`, or `"80%"` of the free memory. By default, the free memory of the device minus a margin.
      mesh: the devices over which to shard the batch, e.g. `jax.make_mesh((8,), ("data",))`. `microbatch_size` is then
        the number of examples at a time on one device. Results do not depend on the number of devices. One collective
        after the last microbatch adds up the sums of all devices.
      axis_name: the axis of `mesh` over which the batch is sharded, or a tuple of axes.
      param_specs: the shardings of the differentiated arguments on `mesh`: a `PartitionSpec`, or a tree of them. By
        default, those of the arrays. Under `jit`, arrays do not show them: pass them if the parameters are sharded.

    Returns:
      A function with the arguments of `fun`, and `is_padding=`: one boolean for each example. Examples that are padding
      count for nothing, and microbatches of padding alone are skipped. It returns the sum, in the tree and dtypes of
      the differentiated arguments, or of what `transform` returns. With `has_aux` it returns `(sum, aux)`. With
      `return_values` or `return_norms` it returns `(sum, PerExample(values, norms, aux))`. Its method `.sensitivity()`
      returns the most that one example can change the sum.

    Raises:
      InputError: for arguments that are not allowed, before any work is done.
      CoupledError: with `keep_batch_dim=True`, for a loss that looks across examples, such as one with BatchNorm.
      NothingFitsError: if no microbatch fits the memory.
    """
    return ClippedFunction.of(
        wants=Wants.SUM,
        fun=fun,
        argnums=argnums,
        has_aux=has_aux,
        clip_norm=clip_norm,
        normalize_by=normalize_by,
        strict=strict,
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


def clipped_value_and_grad(
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
    block_size: int | str | None = "auto",
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
    """The sum of the losses, and the clipped sum of the gradients of `clipped_grad`, both divided by `normalize_by`.

    The losses are not clipped: `.sensitivity()` does not cover their sum.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, x):
    ...     return (w * x) ** 2
    >>> value, grad = ab.clipped_value_and_grad(loss, clip_norm=3.0)(1.0, jnp.array([1.0, 2.0]))
    >>> print(f"{value:.3f} {grad:.3f}")  # gradients of 2 and 8
    5.000 5.000

    Args:
      fun: the loss of one example. It must return a real scalar. It is traced, as under `jit`.
      argnums: the positional arguments to differentiate, an int or a tuple of ints.
      has_aux: whether `fun` returns a pair `(loss, aux)`. The aux of all examples is returned, with the examples along
        axis 0.
      clip_norm: the largest norm that the gradient of one example may have, over all parameters together. A longer
        gradient is scaled down to it. `inf` clips nothing.
      normalize_by: a constant that the sum is divided by, such as the expected batch size. For privacy, do not divide
        by the number of examples in the batch: that number is private too.
      strict: whether the bound holds for contrived examples too, whose bfloat16 factors are chosen so that all rounding
        errors have the same sign. If True, gradients from such factors are clipped a few percent early. If False,
        rounding errors are taken to have either sign. It makes no difference in float32. `anybatch.privacy` uses True.
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
        product of, wherever that is cheaper, and computes norms and the clipped sum from them. `"auto"` prefers
        `"factored"`. Only results of `"vmap"` can be differentiated again by `jax.grad`.
      transform: a function of the gradient of one example, which returns any tree of floating-point arrays. What it
        returns is clipped and summed. It needs the gradients themselves, so it rules out `method="factored"`.
      rng_argnums: the positional arguments that are PRNG keys, or trees of them. The example at index `i` of the batch
        gets `jax.random.fold_in(key, i)`, whatever the microbatch size.
      nan_safe: whether an example counts for nothing if its gradient is not finite. If False, one NaN spoils the sum,
        and nothing bounds the effect of one example.
      return_values: whether to also return the loss of every example.
      return_norms: whether to also return the norm of every example's gradient before clipping.
      accumulator_dtype: the dtype in which gradients of narrower dtypes (bfloat16, float16) are summed; the sum is cast
        back at the end. `None` sums each gradient in its own dtype.
      memory: the bytes that the computation and its arguments may take, for `microbatch_size="auto"`: an int, a string
        such as `"16GiB"`, or `"80%"` of the free memory. By default, the free memory of the device minus a margin.
      mesh: the devices over which to shard the batch, e.g. `jax.make_mesh((8,), ("data",))`. `microbatch_size` is then
        the number of examples at a time on one device. Results do not depend on the number of devices. One collective
        after the last microbatch adds up the sums of all devices.
      axis_name: the axis of `mesh` over which the batch is sharded, or a tuple of axes.
      param_specs: the shardings of the differentiated arguments on `mesh`: a `PartitionSpec`, or a tree of them. By
        default, those of the arrays. Under `jit`, arrays do not show them: pass them if the parameters are sharded.

    Returns:
      A function with the arguments of `fun`, and `is_padding=`, one boolean for each example. It returns
      `(value, sum)`. With `has_aux` it returns `((value, aux), sum)`. With `return_values` or `return_norms` it returns
      `((value, PerExample(values, norms, aux)), sum)`. Its method `.sensitivity()` returns the most that one example
      can change the sum of the gradients.

    Raises:
      InputError: for arguments that are not allowed, before any work is done.
      CoupledError: with `keep_batch_dim=True`, for a loss that looks across examples, such as one with BatchNorm.
      NothingFitsError: if no microbatch fits the memory.
    """
    return ClippedFunction.of(
        wants=Wants.SUM,
        with_value=True,
        fun=fun,
        argnums=argnums,
        has_aux=has_aux,
        clip_norm=clip_norm,
        normalize_by=normalize_by,
        strict=strict,
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
