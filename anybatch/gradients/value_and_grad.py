"""`value_and_grad` and `grad`: JAX's own, for a batch of any size on the memory you have."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call.arguments import Arguments
from anybatch.call.models import partition_models
from anybatch.call.options import Options
from anybatch.call.programs import PROGRAMS
from anybatch.gradients import head_budget
from anybatch.gradients.computation import Gradient
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
    reduction: str = "infer",
    aux_reduction: Any = None,
    rng_argnums: int | tuple[int, ...] = (),
    memory: str | int | None = None,
    objective: str = "speed",
    remat: str | None = None,
    accumulator_dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    axis_name: str | tuple[str, ...] = "data",
    reduce: str = "auto",
    param_specs: Any = None,
    reproducible: bool = False,
    on_coupled: str = "exact",
) -> Callable[..., Any]:
    """`jax.value_and_grad`, microbatch by microbatch: the gradient of the whole batch in the memory of a part.

    The first three arguments are those of `jax.value_and_grad`, and so is what the returned function returns:
    the same tree, shapes and dtypes. It works under `jit`, `grad` and `vmap`.

    **Exact.** For every `microbatch_size`, whether it divides the batch or not, the result is the gradient of
    the full batch up to the rounding of the sum: the loss is read, and what its program does with the examples decides
    what is accumulated. aux and random numbers are those of the full batch, too.

    **Memory.** Activations of one microbatch and one gradient in `accumulator_dtype`, however large the batch; for a
    loss that looks across examples also what it computes from all of them, which is never large without a warning.

    **Many devices.** With a `mesh`, each device takes its examples by itself, microbatch by microbatch, and one
    reduction joins gradients, sums and weights: one collective for a loss of one pass, however many microbatches. The
    batch is never moved between devices, and need not divide them. The gradient is spread as the parameters are.

    **Time.** That of a hand-written `lax.scan` over the microbatches. Outside `jit`, each call traces `fun`
    again (it may read a global that changed) and compiles only if the traced program is a new one.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean((batch["x"] * w - batch["y"]) ** 2)
    >>> batch = {"x": jnp.array([1.0, 2.0, 3.0]), "y": jnp.array([2.0, 4.0, 6.0])}
    >>> fun = ab.value_and_grad(loss, microbatch_size=2)  # leave the size out, and it is planned
    >>> value, grad = fun(1.0, batch)
    >>> print(f"{value:.3f} {grad:.3f}")  # mean of (1, 4, 9), and of -2 times that
    4.667 -9.333

    Args:
      fun: the loss, a scalar of real numbers. It is traced, as under `jit`.
      argnums: which positional arguments to differentiate with respect to, an int or a tuple of ints. They may be
        models of `flax.nnx`, whose gradient is an `nnx.State` and which are changed in place, as
        `nnx.value_and_grad` does; `nnx.DiffState(0, filter)` says which of their variables, if not `nnx.Param`. Or
        models of Equinox, whose gradient has None for every leaf that is not a floating-point array.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      batch_argnums: which arguments carry the batch, along axis 0 of every array in them: their positions in the
        signature of `fun`, where they may also be passed by keyword. They are named, never guessed by shape. All other
        arguments are seen whole by every microbatch. Python numbers and strings among them are constants: a new value
        compiles a new program.
      batch_argnames: names of further arguments that carry the batch, as `static_argnames` of `jax.jit` names them,
        e.g. `"y"` or `("x", "y")`. An array that is passed whole but has as many rows as the batch has examples is read
        as it is used by `"infer"`; with a declared reduction it is refused if it is passed by keyword, or is itself a
        positional argument: every microbatch would see all of its rows.
      microbatch_size: how many examples at a time. Any size will do; the last microbatch may be smaller. `None` is the
        full batch. `"auto"` plans: it takes what `anybatch.plan` has measured to be fastest, in this process or an
        earlier one; without such measurements the largest that fits, which is known from the program alone and, if
        that leaves a doubt, from two or three compilations. Under `jit` it plans when it is traced.
        Outside `jit`, memory that runs out all the same halves the microbatch, with a warning, and the result is the
        same, but for numbers that `rng_argnums` lets each microbatch draw: these depend on the size.
      reduction: how the loss uses its examples. `"infer"` reads it from the loss: in one pass over the microbatches
        where that suffices, else in two. The others declare it, and nothing is read.
        `"mean"`: it is a mean over the examples, which may have terms that depend on the parameters alone.
        `"sum"`: it is a sum over the examples, with no such terms.
        `"weighted"`: it returns `(total, weight)`, sums over the examples, and stands for `total / weight`: use
        it for a mean over tokens or a masked mean. A weight of 0 divides by 1. A weight that depends on the
        parameters is differentiated too, at the price of a second forward pass, which float16 needs as well.
      aux_reduction: with a declared reduction, how the aux leaves of the microbatches combine: `"mean"`, `"sum"`,
        `"last"`, `"stack"`, or a tree of these that is a prefix of aux. A mean is weighted as the loss is: by the
        examples, or by the weight that it returns. Leaves with a row for each example need none (in a tree: `None`):
        they are concatenated in order.
      rng_argnums: which positional arguments are PRNG keys, or trees of them. With a declared reduction a microbatch
        gets `jax.random.fold_in(key, i)`, where `i` is the index in the batch of its first example; with
        `microbatch_size=None` the keys stay as they are. With `"infer"` it is needed only for generators whose numbers
        cannot be drawn in part, as `"rbg"`: of these, each microbatch then draws its own.
      memory: what the gradient may take, with its arguments: bytes, a text as `"16GiB"`, or `"80%"` of what is left. By
        default what the device has left, less a little (5%; on the CPU 10%); under `jit` also less four times the
        gradient, for the optimizer. With a `microbatch_size` it bounds only what a loss that looks across examples
        computes from the whole batch at once.
      objective: what `"auto"` looks for, `"speed"` or `"memory"`: the fastest, or the one that takes the least memory.
      remat: `"auto"` lets a plan compute activations twice instead of keeping them, where nothing else fits. One of
        JAX's policies, `"dots_saveable"`, `"dots_with_no_batch_dims_saveable"` or `"nothing_saveable"`, does it at any
        `microbatch_size`: in blocks, of which no more than that is kept. `None` keeps activations as the loss has it.
      accumulator_dtype: the gradients of narrower dtypes (bfloat16, float16) are summed in this one, and cast
        back at the end. `None` sums each in its own.
      mesh: the devices over which to spread the batch, e.g. `jax.make_mesh((8,), ("data",))`. The loss stays that of
        the whole batch; `microbatch_size` is then the number of examples that a device takes at a time. Outside `jit`,
        arrays that lie elsewhere are put where they belong. Axes of the mesh beside `axis_name` are left to the model.
      axis_name: the axis of `mesh` over which the batch is spread, or a tuple of such.
      reduce: for parameters that are themselves spread over `axis_name`, when gradients are added up. `"once"`, after
        the last microbatch: the least traffic, and a whole gradient on every device. In `"each"` microbatch: only its
        shard of the gradient stays on a device. `"auto"` takes `"once"`, unless only `"each"` fits a plan.
      param_specs: how what is differentiated is spread over `mesh`: a `PartitionSpec`, or a tree of them. By default as
        the arrays are; under `jit` these do not tell, so that it should be passed for parameters that are not whole.
      reproducible: whether sums are taken in an order that does not depend on the devices: the same bits on 2, 4, ...
        64 devices, in one process or many, for one `microbatch_size`. It must divide the examples of each device.
        Takes up to log2(64 / devices) more gradients of memory, and cannot be differentiated once more. On a GPU,
        XLA must be deterministic as well (`XLA_FLAGS="--xla_gpu_deterministic_ops=true
        --xla_gpu_autotune_level=0"`). On 1 device the bits are the same too, unless XLA simplifies a division there
        that it leaves alone elsewhere; with `jax.jit(..., compiler_options={"xla_disable_hlo_passes": "algsimp"})`
        on all numbers of devices, it leaves all alone.
      on_coupled: what `"infer"` does with a loss that looks across examples: `"exact"` computes it in two passes,
        `"error"` refuses it.

    Returns:
      A function with the arguments of `fun` that returns `(value, gradient)`, or `((value, aux), gradient)`.

    Raises:
      InputError: for arguments that cannot be worked with, before any work is done.
      CoupledError: for a loss that looks across examples, with `on_coupled="error"`.
      HeadTooLargeError: if what must be computed from the whole batch at once does not fit the memory.
      NothingFitsError: if no microbatch fits the memory; with the table of the plan, and the ways out.
      NotAvailableError: for an option that this version does not have.
    """
    options = Options.of(
        fun,
        argnums=argnums,
        has_aux=has_aux,
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        microbatch_size=microbatch_size,
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
        call = partition_models(fun, options.roles, has_aux, args, kwargs)
        arguments = options.roles.sort(call.fun, call.args, call.kwargs)
        value, aux, gradient, _ = compute(call.fun, call.options(options), arguments)
        aux = call.close(aux, options)
        return ((value, aux) if has_aux else value), gradient

    return value_and_grad_fun


def grad(
    fun: Callable[..., Any], argnums: int | tuple[int, ...] = 0, has_aux: bool = False, **options: Any
) -> Callable[..., Any]:
    """`jax.grad`, microbatch by microbatch: `value_and_grad` without the value.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, x):
    ...     return jnp.sum((w * x) ** 2)
    >>> print(ab.grad(loss, microbatch_size=2)(3.0, jnp.array([1.0, 2.0, 3.0])))  # 2 * 3 * 14
    84.0

    Args:
      fun: the loss, as for `value_and_grad`.
      argnums: which positional arguments to differentiate with respect to.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      **options: those of `value_and_grad`.

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
    """The value, aux and gradient of one call; and what tells of the noise, if the options ask for it."""
    return computed(Gradient(fun, options, arguments))


def computed(gradient: Gradient) -> tuple[Any, Any, Any, list[Any]]:
    """What `compute` returns."""
    with gradient.context():
        return _compute_in(gradient)


def _compute_in(gradient: Gradient) -> tuple[Any, Any, Any, list[Any]]:
    options = gradient.options
    if options.microbatch_size == "auto":
        strategy, outputs = run_as_planned(gradient)
    else:
        assert not isinstance(options.microbatch_size, str)
        strategy = Strategy(options.microbatch_size, options.fixed_remat, options.fixed_reduce)
        computation = gradient.computation(strategy)
        outputs = PROGRAMS.run(computation.fun, *computation.leaves, has_effects=computation.has_effects)
    if options.reduction == "infer" and not gradient.is_full_batch(strategy):
        head_budget.warn_of_large_head(gradient.split, gradient.checked_reading)
    return gradient.results(strategy, outputs)
