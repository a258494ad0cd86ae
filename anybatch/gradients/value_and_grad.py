"""`value_and_grad` and `grad`: like JAX's functions, for a batch of any size."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call.arguments import Arguments
from anybatch.call.host_batch import with_rows
from anybatch.call.models import partition_models
from anybatch.call.options import Options
from anybatch.gradients import head_budget
from anybatch.gradients.computation import Gradient
from anybatch.gradients.streaming import compute_streamed
from anybatch.planning.running import run_as_planned
from anybatch.planning.strategy import Strategy


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_argnames: str | tuple[str, ...] = (),
    microbatch_size: int | str | None = "auto",
    block_size: int | str | None = "auto",
    reduction: str = "infer",
    aux_reduction: Any = None,
    rng_argnums: int | tuple[int, ...] = (),
    memory: str | int | None = None,
    objective: str = "speed",
    remat: str | float | None = "auto",
    accumulator_dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    reduce: str = "auto",
    param_specs: Any = None,
    reproducible: bool = False,
    on_coupled: str = "exact",
) -> Callable[..., Any]:
    """`jax.value_and_grad` for batches that do not fit in memory: the same gradient, computed in microbatches.

    Replace `jax.value_and_grad(loss)` by `anybatch.value_and_grad(loss)`. The first three arguments are those of
    `jax.value_and_grad`, and the returned function returns the same tree, shapes and dtypes. It works under `jit`,
    `grad` and `vmap`. The loss stays a function of the full batch: write it as if everything fitted.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean((batch["x"] * w - batch["y"]) ** 2)
    >>> batch = {"x": jnp.array([1.0, 2.0, 3.0]), "y": jnp.array([2.0, 4.0, 6.0])}
    >>> fun = ab.value_and_grad(loss, microbatch_size=2)  # without a size, anybatch chooses one
    >>> value, grad = fun(1.0, batch)
    >>> print(f"{value:.3f} {grad:.3f}")  # the mean of (1, 4, 9), and -2 times that
    4.667 -9.333

    **Exact.** The result equals the gradient of the full batch for every `microbatch_size`, whether or not it divides
    the batch, up to the rounding of a sum in another order. anybatch reads the jaxpr of the loss to find out what to
    accumulate: a sum, a mean, a masked mean, or a loss that looks across examples, such as a contrastive loss or
    BatchNorm. Auxiliary outputs and random draws equal the full batch's.

    **Memory.** The activations of one microbatch and one gradient in `accumulator_dtype`, whatever the size of the
    batch. A loss that looks across examples also needs the values that it computes from the full batch; if these are
    large, there is a warning. Outside `jit`, a batch of NumPy arrays that is too large for the memory stays on the
    host: it is copied in chunks, while the device computes. `HostBatch` does so for the pieces of an iterator.

    **Time.** That of a hand-written `lax.scan` over the microbatches. Outside `jit`, each call traces the loss again,
    because it may read a global variable that has changed, and compiles only if the traced program is new.

    **Many devices.** Pass a `mesh`. Each device computes its own examples in microbatches, and one collective at the
    end of a pass over the batch sums gradients, losses and weights, however many microbatches there are. The batch is
    never moved between devices, and its size need not be a multiple of their number. The gradient has the shardings of
    the parameters.

    Args:
      fun: the loss. It must return a real scalar. It is traced, as under `jit`.
      argnums: the positional arguments to differentiate, an int or a tuple of ints. They may be Flax NNX models: then
        the gradient is an `nnx.State`, and the model is updated in place, as by `nnx.value_and_grad`. An
        `nnx.DiffState(0, filter)` selects other variables than `nnx.Param`. They may be Equinox models: then the
        gradient has None for every leaf that is not a floating-point array.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      batch_argnums: the arguments that hold the batch, with examples along axis 0 of every array. They are positions in
        the signature of `fun`; such an argument may also be passed by keyword. The batch is never guessed from shapes.
        Every microbatch gets all other arguments unchanged. Python numbers and strings among them are constants: a new
        value compiles a new program.
      batch_argnames: the names of further arguments that hold the batch, like `static_argnames` of `jax.jit`, e.g.
        `"y"` or `("x", "y")`. An array outside of the batch may have as many rows as the batch has examples. With
        `"infer"`, what the loss does with it decides. With a declared reduction every microbatch would see all of its
        rows, so it is refused if it is passed by keyword or is itself a positional argument.
      microbatch_size: the number of examples at a time; the last microbatch may be smaller. `None` is the full batch.
        `"auto"` chooses: the size that `anybatch.plan` has measured to be the fastest, in this process or an earlier
        one; without such measurements, the largest size that fits the memory, as computed from the program and, if that
        is not certain, from two or three compilations. Under `jit`, it is chosen when the function is traced. If memory
        runs out nevertheless, a call outside `jit` halves the microbatch, with a warning. The result is the same,
        except for random numbers that `rng_argnums` lets each microbatch draw.
      block_size: how many rows of a big value to compute at a time. Rows are, for example, the tokens of logits over a
        large vocabulary, the examples in the matrix of all pairs of a contrastive loss, or the queries in a matrix of
        attention scores. anybatch finds big values in the jaxpr of the loss, and an axis along which their rows can be
        computed separately. The result is the same. `None` computes big values in full. `"auto"` lets a plan choose: it
        uses blocks if not even one example fits the memory without them, or if `anybatch.plan` timed them to be faster.
        With a fixed `microbatch_size`, `"auto"` is `None`. On a `mesh`, each device computes its own rows in blocks.
      reduction: how the loss combines its examples. `"infer"` reads it from the loss, and computes it in one pass over
        the microbatches if possible, otherwise in two. The others declare it, and nothing is read.
        `"mean"`: a mean over the examples. It may also have terms that depend on the parameters alone.
        `"sum"`: a sum over the examples, without such terms.
        `"weighted"`: `fun` returns `(total, weight)`, both sums over the examples, and the loss is `total / weight`.
        Use it for a mean over tokens or a masked mean. A weight of 0 divides by 1. If the weight depends on the
        parameters, it is differentiated too; that costs a second forward pass, and so does float16.
      aux_reduction: with a declared reduction, how to combine the aux leaves of the microbatches: `"mean"`, `"sum"`,
        `"last"`, `"stack"`, or a tree of these that is a prefix of aux. A mean has the weights of the loss: the numbers
        of examples, or the returned weights. Leaves with a row for each example are concatenated and need no reduction
        (in a tree: `None`).
      rng_argnums: the positional arguments that are PRNG keys, or trees of them. With a declared reduction, a
        microbatch gets `jax.random.fold_in(key, i)`, where `i` is the index in the batch of its first example; with
        `microbatch_size=None`, it gets the key itself. With `"infer"`, random numbers equal the full batch's without
        this option. Only a generator such as `"rbg"` needs it, whose numbers cannot be drawn for single examples: then
        each microbatch draws its own.
      memory: the bytes that the gradient and its arguments may take: an int, a string such as `"16GiB"`, or `"80%"` of
        the free memory. By default, the free memory of the device minus 5% (on the CPU 10%), and under `jit` also minus
        four times the gradient, for the optimizer. With a fixed `microbatch_size`, it limits only the values that a
        loss computes from the full batch.
      objective: what `"auto"` optimizes: `"speed"` for the fastest strategy that fits, `"memory"` for the one that
        takes the least memory.
      remat: how much of the activations to compute again in the backward pass instead of keeping it, by
        `jax.checkpoint` around blocks of the loss. A number above 0 and at most 1 is a share of their bytes: those
        that take the least time for each byte are computed again. Or one of JAX's policies `"dots_saveable"`,
        `"dots_with_no_batch_dims_saveable"` and `"nothing_saveable"`. `"offload"` computes all of them again, and
        keeps what the layers of a `lax.scan` pass on in the host's memory; such a gradient cannot be differentiated.
        `"auto"` leaves it to the plan, if `microbatch_size="auto"`. `None` leaves the loss as it is.
      accumulator_dtype: the dtype in which gradients of narrower dtypes (bfloat16, float16) are summed; they are cast
        back at the end. `None` sums each gradient in its own dtype.
      mesh: the devices to use, e.g. `jax.make_mesh((8,), ("data",))`. The loss stays that of the full batch;
        `microbatch_size` is then the number of examples at a time on one device. Outside `jit`, the arguments are put
        on the mesh. Axes of the mesh other than `axis_name` are left to the model.
      axis_name: the axis of `mesh` over which the batch is sharded, or a tuple of axes.
      reduce: when to sum the gradients of parameters that are sharded over `axis_name`. `"once"`: after the last
        microbatch, which sends the fewest bytes and needs the full gradient on every device. `"each"`: in every
        microbatch, so that a device keeps only its shard of the gradient. `"auto"`: once, unless only `"each"` fits the
        memory of a plan.
      param_specs: the shardings of the differentiated arguments on `mesh`: a `PartitionSpec`, or a tree of them. By
        default, those of the arrays. Under `jit`, arrays do not show them: pass them if the parameters are sharded.
      reproducible: whether sums are taken in an order that does not depend on the number of devices. For one
        `microbatch_size`, which must divide the examples of each device, the result then has the same bits on 2, 4, ...
        64 devices, in one process or several. It takes up to log2(64 / devices) more gradients of memory, and cannot be
        differentiated again. On a GPU, XLA must be deterministic too (`XLA_FLAGS="--xla_gpu_deterministic_ops=true
        --xla_gpu_autotune_level=0"`). On 1 device the bits are the same as well, unless XLA simplifies a division only
        there; `jax.jit(..., compiler_options={"xla_disable_hlo_passes": "algsimp"})` on all numbers of devices prevents
        that.
      on_coupled: what `"infer"` does with a loss that looks across examples: `"exact"` computes its exact gradient,
        `"error"` raises a `CoupledError` that names the line.

    Returns:
      A function with the arguments of `fun` that returns `(value, gradient)`, or `((value, aux), gradient)`.

    Raises:
      InputError: for arguments that are not allowed, before any work is done.
      CoupledError: for a loss that looks across examples, with `on_coupled="error"`.
      HeadTooLargeError: if the values that the loss computes from the full batch do not fit the memory.
      NothingFitsError: if no microbatch fits the memory. The message has the table of the plan, and what you can do.
      NotAvailableError: for an option that this version does not have.
    """
    options = Options.of(
        fun,
        argnums=argnums,
        has_aux=has_aux,
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        microbatch_size=microbatch_size,
        block_size=block_size,
        reduction=reduction,
        aux_reduction=aux_reduction,
        rng_argnums=rng_argnums,
        memory=memory,
        objective=objective,
        remat=remat,
        accumulator_dtype=accumulator_dtype,
        mesh=mesh,
        axis_name=axis_name,
        reduce=reduce,
        param_specs=param_specs,
        reproducible=reproducible,
        on_coupled=on_coupled,
    )

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_rows(args, kwargs)
        call = partition_models(fun, options.roles, has_aux, args, kwargs)
        arguments = options.roles.sort(call.fun, call.args, call.kwargs)
        value, aux, gradient, _ = compute(call.fun, call.options(options), arguments)
        aux = call.close(aux, options)
        return ((value, aux) if has_aux else value), gradient

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """`jax.grad` in microbatches: `value_and_grad` without the value.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, x):
    ...     return jnp.sum((w * x) ** 2)
    >>> print(ab.grad(loss, microbatch_size=2)(3.0, jnp.array([1.0, 2.0, 3.0])))  # 2 * 3 * 14
    84.0

    Args:
      fun: the loss, as for `value_and_grad`.
      argnums: the positional arguments to differentiate.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      **options: the other options of `value_and_grad`.

    Returns:
      A function with the arguments of `fun` that returns the gradient, or `(gradient, aux)`.
    """
    value_and_grad_fun = value_and_grad(fun, argnums, has_aux, **options)

    @functools.wraps(fun)
    def grad_fun(*args: Any, **kwargs: Any) -> Any:
        value, gradient = value_and_grad_fun(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return grad_fun


def compute(fun: Callable[..., Any], options: Options, arguments: Arguments) -> tuple[Any, Any, Any, list[Any]]:
    """The value, aux and gradient of one call and, with `options.noise`, the summary of the gradient noise."""
    return compute_gradient(Gradient(fun, options, arguments))


def compute_gradient(gradient: Gradient) -> tuple[Any, Any, Any, list[Any]]:
    """The results of `compute`, for a `Gradient` that exists already."""
    options = gradient.options
    with gradient.context():
        if gradient.is_streamed:
            strategy, outputs = compute_streamed(gradient)
        elif options.microbatch_size == "auto":
            strategy, outputs = run_as_planned(gradient)
        else:
            strategy = Strategy.of_options(options)
            outputs = gradient.computation(strategy).ready()()
        if options.reduction == "infer" and not gradient.is_full_batch(strategy):
            head_budget.warn_of_large_head(gradient.split, gradient.checked_reading, strategy.block_size)
        return gradient.results(strategy, outputs)
