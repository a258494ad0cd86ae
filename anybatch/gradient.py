"""`value_and_grad` and `grad`: JAX's own, for a batch of any size on the memory you have."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anybatch import auxiliary, compat, limits
from anybatch.arguments import Arguments, Roles
from anybatch.batch import Cut
from anybatch.loss import TracedLoss, trace_loss
from anybatch.programs import PROGRAMS
from anybatch.reading.loss_reading import split_loss
from anybatch.reading.split import Split
from anybatch.routes import full, scan, split_passes
from anybatch.settings import Settings


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    microbatch_size: int | str | None = "auto",
    reduction: str = "infer",
    aux_reduction: Any = None,
    rng_argnums: int | tuple[int, ...] = (),
    memory: str | int | None = None,
    accumulator_dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    axis_name: str = "data",
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

    **Time.** That of a hand-written `lax.scan` over the microbatches. Outside `jit`, each call traces `fun`
    again (it may read a global that changed) and compiles only if the traced program is a new one.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean((batch["x"] * w - batch["y"]) ** 2)
    >>> batch = {"x": jnp.array([1.0, 2.0, 3.0]), "y": jnp.array([2.0, 4.0, 6.0])}
    >>> fun = ab.value_and_grad(loss, microbatch_size=2)
    >>> value, grad = fun(1.0, batch)
    >>> print(f"{value:.3f} {grad:.3f}")  # mean of (1, 4, 9), and of -2 times that
    4.667 -9.333

    Args:
      fun: the loss, a scalar of real numbers. It is traced, as under `jit`.
      argnums: which positional arguments to differentiate with respect to, an int or a tuple of ints.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      batch_argnums: which positional arguments carry the batch, along axis 0 of every array in them. They are
        named, never guessed by shape. All other arguments, keyword arguments too, are seen whole by every
        microbatch. Python numbers and strings among them are constants: a new value compiles a new program.
      microbatch_size: how many examples at a time. Any size will do; the last microbatch may be smaller. Take
        the largest that fits; `None` is the full batch. `"auto"` is not available yet.
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
      memory: bounds what a loss that looks across examples may compute from the whole batch at once: bytes, a text as
        `"16GiB"` or `"80%"` of what is left; by default, what the device has left.
      accumulator_dtype: the gradients of narrower dtypes (bfloat16, float16) are summed in this one, and cast
        back at the end. `None` sums each in its own.
      mesh: not available yet.
      axis_name: the axis of `mesh` over which the batch is spread.
      on_coupled: what `"infer"` does with a loss that looks across examples: `"exact"` computes it in two passes,
        `"error"` refuses it.

    Returns:
      A function with the arguments of `fun` that returns `(value, gradient)`, or `((value, aux), gradient)`.

    Raises:
      InputError: for arguments that cannot be worked with, before any work is done.
      CoupledError: for a loss that looks across examples, with `on_coupled="error"`.
      HeadTooLargeError: if what must be computed from the whole batch at once does not fit the memory.
      NotAvailableError: for an option that this version does not have.
    """
    settings = Settings.of(
        fun,
        roles=Roles.of(argnums=argnums, batch_argnums=batch_argnums, rng_argnums=rng_argnums),
        has_aux=has_aux,
        microbatch_size=microbatch_size,
        reduction=reduction,
        aux_reduction=aux_reduction,
        accumulator_dtype=accumulator_dtype,
        memory=memory,
        mesh=mesh,
        on_coupled=on_coupled,
    )

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        arguments = settings.roles.sort(fun, args, kwargs)
        value, aux, gradient = _compute(fun, settings, arguments)
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


def _compute(fun: Callable[..., Any], settings: Settings, arguments: Arguments) -> tuple[Any, Any, Any]:
    """The value, aux and gradient of one call."""
    examples, size = arguments.num_examples, settings.microbatch_size
    trace = functools.partial(trace_loss, fun, arguments, weighted=settings.weighted, has_aux=settings.has_aux)
    inputs: Any
    compute: Callable[[Any], Any]
    if size is None or examples <= size:
        loss, consts = trace(examples)
        stacked = [False] * loss.aux_tree.num_leaves
        if settings.stacks_aux:
            # One microbatch is stacked too; whether a leaf has rows shows only at another size.
            combinations = auxiliary.combine_aux(loss, trace(examples + 1)[0], settings.aux_reduction)
            stacked = [how.kind == "stack" for how in combinations]
        inputs = (consts, arguments.arrays)
        fresh_keys = size is not None and settings.reduction != "infer"
        compute = functools.partial(_full_route, loss, fresh_keys=fresh_keys, stacked=stacked)
    elif settings.reduction == "infer":
        loss, consts = trace(examples)
        split = split_loss(loss, consts, fresh_draws=bool(arguments.arrays.keys))
        limits.check_head(split, on_coupled=settings.on_coupled, memory=settings.memory)
        inputs = (consts, arguments.arrays)
        compute = functools.partial(_split_route, split, Cut(examples, size), settings.accumulator_dtype)
    else:
        loss, consts = trace(size)
        cut = Cut(examples, size)
        last_loss, last_consts = trace(cut.remainder) if cut.remainder else (None, ())
        combinations = []
        if settings.has_aux:
            combinations = auxiliary.combine_aux(loss, trace(examples)[0], settings.aux_reduction)
            if last_loss is not None:
                auxiliary.check_remainder(loss, last_loss, combinations)
        dtype = settings.accumulator_dtype
        microbatches = scan.Microbatches(cut, loss, last_loss, settings.reduction, combinations, dtype)
        inputs = scan.Inputs(consts, last_consts, arguments.arrays)
        compute = functools.partial(scan.value_and_grad, microbatches)

    leaves, tree = jax.tree.flatten(inputs)
    num_aux = loss.aux_tree.num_leaves

    def flat_compute(*flat: Any) -> list[Any]:
        value, aux, grads = compute(jax.tree.unflatten(tree, flat))
        types = [*loss.out_avals[loss.num_heads :], *loss.types.wrt]
        if loss.num_heads == 1:
            value = compat.as_weak(value, loss.out_avals[0])
        return [value, *map(compat.as_weak, [*aux, *grads], types)]

    value, *rest = PROGRAMS.run(flat_compute, *leaves, has_effects=loss.traced.has_effects)
    return value, jax.tree.unflatten(loss.aux_tree, rest[:num_aux]), arguments.as_gradient(rest[num_aux:])


def _split_route(split: Split, cut: Cut, accumulator_dtype: Any, inputs: Any) -> tuple[Any, Any, Any]:
    return split_passes.value_and_grad(split, cut, accumulator_dtype, *inputs)


def _full_route(loss: TracedLoss, inputs: Any, *, fresh_keys: bool, stacked: list[bool]) -> tuple[Any, Any, Any]:
    consts, arrays = inputs
    if fresh_keys:
        arrays = arrays._replace(keys=[jax.random.fold_in(key, 0) for key in arrays.keys])
    value, aux, grads = full.value_and_grad(loss, consts, arrays)
    return value, [leaf[None] if stack else leaf for leaf, stack in zip(aux, stacked, strict=True)], grads
