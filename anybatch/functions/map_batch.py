"""`map_batch`: any function of a batch, computed in microbatches, with the outputs of the full batch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anybatch.call.host_batch import with_rows
from anybatch.call.models import PartitionedCall, partition_models
from anybatch.call.options import Options
from anybatch.gradients.computation import Gradient
from anybatch.gradients.value_and_grad import compute_gradient
from anybatch.planning.plan import RESULT
from anybatch.planning.problem import Problem


class BatchFunction(Gradient):
    """A function of a batch as a `Problem`: a gradient with respect to nothing, whose aux is the result."""

    @property
    def noun(self) -> str:
        return RESULT

    def block_sizes(self, allowed: int | None) -> tuple[int | None, ...]:
        return (None,)

    @property
    def ignores_batch(self) -> bool:
        for loss, _ in self._traced.values():
            first, count = len(loss.types.wrt), len(loss.types.batch)
            outputs = range(len(loss.out_avals))
            if any(any(loss.traced.inputs_used_by(output)[first : first + count]) for output in outputs):
                return False
        return bool(self._traced)


class MappedFunction:
    """A function that computes `fun` in microbatches. `read`, `plan`, `explain` and `verify` take it as well."""

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, fun)
        self.fun, self.options = fun, options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._partitioned(*with_rows(args, kwargs))
        _, outputs, _, _ = compute_gradient(self._problem(call, call.args, call.kwargs))
        if call.objects is None:
            return outputs
        outputs, aux_and_state = outputs
        call.close(aux_and_state, self.options)
        return outputs

    def _partitioned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PartitionedCall:
        return partition_models(self.fun, self.options.roles, False, args, kwargs)

    def _problem(self, call: PartitionedCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchFunction:
        return BatchFunction(call.fun, self.options, self.options.roles.sort(call.fun, args, kwargs))

    def to_read(self) -> tuple[Callable[..., Any], Options]:
        """The function that is read and verified, and its options."""
        return self.fun, self.options

    def to_plan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, memory: Any, objective: Any
    ) -> tuple[Callable[..., Problem], tuple[Any, ...], dict[str, Any]]:
        """A function that makes the computation of a call, and its arguments, with models split into arrays."""
        call = self._partitioned(args, kwargs)
        planned = MappedFunction(self.fun, self.options.to_plan(memory, objective))
        return functools.partial(planned._problem, call), call.args, call.kwargs


def map_batch(
    fun: Callable[..., Any],
    *,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_argnames: str | tuple[str, ...] = (),
    microbatch_size: int | str | None = "auto",
    rng_argnums: int | tuple[int, ...] = (),
    memory: str | int | None = None,
    objective: str = "speed",
    accumulator_dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
    axis_name: str | Sequence[str] = "data",
    on_coupled: str = "exact",
) -> MappedFunction:
    """Computes any function of a batch in microbatches: the same outputs, in the memory that you have.

    Use it for what is not a gradient: evaluation and metrics, embeddings, Hessian-vector products, Jacobians. Write
    `fun` for the full batch, as if everything fitted.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def evaluate(w, batch):
    ...     scores = batch["x"] @ w
    ...     right = (scores > 0) == (batch["y"] > 0)
    ...     return {"scores": scores, "accuracy": jnp.mean(right), "median": jnp.median(scores)}
    >>> batch = {"x": jnp.arange(12.0).reshape(6, 2) - 5, "y": jnp.array([0, 0, 0, 1, 0, 1])}
    >>> result = ab.map_batch(evaluate, microbatch_size=4)(jnp.ones(2), batch)
    >>> print(result["scores"], f"{result['accuracy']:.2f}", result["median"])
    [-9. -5. -1.  3.  7. 11.] 0.83 1.0

    **Exact.** The result equals `fun(params, batch)` for every `microbatch_size`, whether or not it divides the batch,
    up to the rounding of a sum in another order. anybatch reads the jaxpr of `fun`: rows of the examples are
    concatenated, sums over them are added up, and what the function computes from these, such as an F1 score or a
    sorted array, is computed once. Random draws equal the full batch's.

    **Memory.** The temporaries of one microbatch, the outputs, and the rows and sums that `fun` computes something from
    across examples. These are small for most functions: `anybatch.read(mapped, params, batch)` lists them. A batch that
    is too large for the memory stays on the host, as for `value_and_grad`.

    The returned function works under `jit`, `vmap` and `grad`. Differentiated, it keeps activations of all
    microbatches; for the gradient of a loss use `value_and_grad`, which does not.

    Args:
      fun: the function. Its outputs are any tree of arrays and numbers. It is traced, as under `jit`.
      batch_argnums: the arguments that hold the batch, with examples along axis 0 of every array, as for
        `value_and_grad`. Every microbatch gets all other arguments unchanged.
      batch_argnames: the names of further arguments that hold the batch.
      microbatch_size: the number of examples at a time, or None for the full batch. `"auto"` chooses the fastest size
        that `anybatch.plan(mapped, ...)` has measured, or else the largest that fits the memory.
      rng_argnums: the positional arguments that are PRNG keys of a generator such as `"rbg"`, whose numbers cannot be
        drawn for single examples: each microbatch then draws its own. Other keys need no option.
      memory: the bytes that the computation and its arguments may take, as for `value_and_grad`.
      objective: what `"auto"` optimizes: `"speed"`, or `"memory"`.
      accumulator_dtype: the dtype in which sums of narrower dtypes (bfloat16, float16) are added up; they are cast back
        at the end. `None` adds in their own dtype.
      mesh: the devices to use, as for `value_and_grad`. Each device computes its own examples in microbatches.
      axis_name: the axis of `mesh` over which the batch is sharded, or a tuple of axes.
      on_coupled: what to do if outputs look across examples: `"exact"` computes them exactly, `"error"` raises a
        `CoupledError` that names the line.

    Returns:
      A function with the arguments and the outputs of `fun`. NNX models among its arguments are updated in place, if
      `fun` does so.

    Raises:
      InputError: for arguments that are not allowed, before any work is done.
      CoupledError: for outputs that look across examples, with `on_coupled="error"`.
      HeadTooLargeError: if what is computed from the full batch does not fit the memory.
      NothingFitsError: if no microbatch fits the memory.
    """
    options = Options.of(
        fun,
        maps=True,
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        microbatch_size=microbatch_size,
        rng_argnums=rng_argnums,
        memory=memory,
        objective=objective,
        accumulator_dtype=accumulator_dtype,
        mesh=mesh,
        axis_name=axis_name,
        on_coupled=on_coupled,
    )
    return MappedFunction(fun, options)
