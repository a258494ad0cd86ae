"""The user's loss, traced for a given number of examples. What it returns is checked before any work is done."""

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.call.arguments import Arguments, Arrays
from anybatch.call.checks import describe, has_jax_type, is_array, named_leaves
from anybatch.errors import InputError
from anybatch.jaxprs import avals, sharding_constraints, tracing


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """The jaxpr of a loss for `num_examples` examples: a function of arrays, which no longer calls the user's Python.

    It returns a flat list: the loss (for a weighted loss, the total and the weight), then the aux leaves. It holds no
    arrays: those that the user's function closes over are its first argument.
    """

    traced: tracing.Traced
    const_types: list[Any]
    types: Arrays
    num_examples: int
    num_heads: int  # 1, or 2 with a weight
    aux_tree: Any
    aux_names: list[str]
    maps: bool = False  # no loss, but any function of the batch, whose result is aux. Its loss is 0.
    on_mesh: bool = False  # whether its examples are spread over the devices of a mesh

    def __call__(self, consts: Sequence[Any], arrays: Arrays) -> list[Any]:
        return self.traced(consts, *jax.tree.leaves(arrays))

    @property
    def out_avals(self) -> list[Any]:
        return self.traced.out_avals

    @property
    def aux_avals(self) -> list[tuple[str, Any]]:
        return list(zip(self.aux_names, self.out_avals[self.num_heads :], strict=True))

    @property
    def value_dtype(self) -> Any:
        """The dtype of the loss; for a weighted loss, that of `total / weight`."""
        if self.num_heads == 1:
            return self.out_avals[0].dtype
        total, weight = (jax.ShapeDtypeStruct((), aval.dtype, weak_type=aval.weak_type) for aval in self.out_avals[:2])
        with jax.numpy_dtype_promotion("standard"):
            return jax.eval_shape(operator.truediv, total, weight).dtype

    @property
    def weight_is_inexact(self) -> bool:
        """True if there is a weight with a floating-point dtype: an integer has no gradient."""
        return self.num_heads == 2 and jax.dtypes.issubdtype(self.out_avals[1].dtype, np.inexact)

    @property
    def weight_has_gradient(self) -> bool:
        """True if the weight of a weighted loss has a gradient with respect to the differentiated arguments."""
        if not self.weight_is_inexact:
            return False
        num_wrt = len(self.types.wrt)
        if not any(self.traced.inputs_used_by(1)[:num_wrt]):
            return False

        # The weight is computed from them. But a stop_gradient or a comparison may make its gradient zero.
        def push(tangents: list[Any], consts: list[Any], arrays: Arrays) -> Any:
            return jax.jvp(lambda wrt: self(consts, arrays._replace(wrt=wrt))[1], (arrays.wrt,), (tangents,))[1]

        leaves, tree = jax.tree.flatten((self.types.wrt, self.const_types, self.types))
        pushed, _ = tracing.trace(lambda *flat: [push(*jax.tree.unflatten(tree, flat))], *leaves)
        return any(pushed.inputs_used_by(0)[:num_wrt])


def trace_loss(
    fun: Callable[..., Any],
    arguments: Arguments,
    num_examples: int | None,
    *,
    weighted: bool,
    has_aux: bool,
    maps: bool = False,
    on_mesh: tuple[Any, tuple[str, ...]] | None = None,
    failed: Callable[[Exception], None] = lambda error: None,
) -> tuple[TracedLoss, tuple[Any, ...]]:
    """Traces `fun` and checks what it returns. Returns the traced loss, and the arrays that it closes over.

    Args:
      fun: the loss.
      arguments: its arguments.
      num_examples: the number of examples to trace it for; None for one example without the batch axis.
      weighted: whether it returns `(total, weight)`.
      has_aux: whether it also returns aux.
      maps: whether `fun` is no loss, but any function of the batch: all that it returns is then aux, and the loss is 0.
      on_mesh: a mesh, and its axes over which the batch is sharded. The traced program then has no shardings over these
        axes, because it runs inside `shard_map`, on the examples of one device.
      failed: called with an exception of the loss. It may raise an exception that explains more.
    """
    types = arguments.types(num_examples, bare=on_mesh is not None)
    leaves, tree = jax.tree.flatten(types)
    aux_tree: Any = None
    aux_names: list[str] = []

    def flat_loss(*flat: Any) -> list[Any]:
        nonlocal aux_tree, aux_names
        result = arguments.call(fun, jax.tree.unflatten(tree, flat))
        heads, aux = ([np.float32(0)], result) if maps else _split(result, weighted, has_aux)
        named = named_leaves("result" if maps else "aux", aux)
        _check_aux(named, maps)
        aux_tree, aux_names = jax.tree.structure(aux), [name for name, _ in named]
        return [*heads, *(leaf for _, leaf in named)]

    try:
        traced, consts = (tracing.trace if on_mesh is None else _trace_anywhere)(flat_loss, *leaves)
    except Exception as error:
        if num_examples is None:
            error.add_note("This happened in the loss for one example, which is passed without the batch axis.")
        elif num_examples != arguments.num_examples and not isinstance(error, InputError):
            error.add_note(
                f"This happened in the loss for {num_examples} of the {arguments.num_examples} examples. A microbatch "
                "has fewer examples than the batch: the loss must take their number from its arguments."
            )
        failed(error)
        raise
    type_of = jax.typeof if on_mesh is None else avals.bare
    const_types = [avals.abstract(type_of(const)) for const in consts]
    if on_mesh is not None:
        traced = sharding_constraints.without_mesh(traced, const_types, leaves, *on_mesh)
    number = 1 if num_examples is None else num_examples
    heads = 2 if weighted else 1
    is_spread = on_mesh is not None
    return TracedLoss(traced, const_types, types, number, heads, aux_tree, aux_names, maps, is_spread), consts


def _trace_anywhere(fun: Callable[..., Any], *types: Any) -> tuple[tracing.Traced, tuple[Any, ...]]:
    """Traces a function without the surrounding mesh, or with it if its sharding constraints need it."""
    if not jax.sharding.get_abstract_mesh().empty:
        with contextlib.suppress(Exception), jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            return tracing.trace(fun, *types)
    return tracing.trace(fun, *types)


def _split(result: Any, weighted: bool, has_aux: bool) -> tuple[list[Any], Any]:
    loss, aux = result, None
    if has_aux:
        loss, aux = pair(result)
    if not weighted:
        return [_scalar("The loss must return a scalar of real floating-point numbers", loss)], aux
    if not is_pair(loss):
        raise InputError(
            'With reduction="weighted" the loss must return a pair (total, weight)',
            given=shown(loss),
            remedy="Return the sum over the examples and what to divide it by, e.g. "
            "(jnp.sum(losses * mask), jnp.sum(mask))" + (", with aux: ((total, weight), aux)." if has_aux else "."),
        )
    total = _scalar("The total of a weighted loss must be a scalar of real floating-point numbers", loss[0])
    if not _is_number(loss[1], (np.floating, np.integer)):
        raise InputError(
            "The weight of a weighted loss must be a scalar number",
            given=shown(loss[1]),
            remedy="Add up the weights of the examples, e.g. jnp.sum(mask).",
        )
    return [total, loss[1]], aux


def pair(result: Any) -> tuple[Any, Any]:
    """The loss and aux that a loss with `has_aux=True` returned. Raises an InputError if it returned no pair."""
    if not is_pair(result):
        raise InputError(
            "With has_aux=True the loss must return a pair (loss, aux)",
            given=shown(result),
            remedy="Return (loss, aux), or leave has_aux out.",
        )
    return tuple(result)


def _scalar(must: str, value: Any) -> Any:
    if _is_number(value, (np.floating,)):
        return value
    remedy = "Reduce it over the examples, e.g. jnp.mean(losses) or jnp.sum(losses)."
    if is_pair(value):
        remedy = 'For a pair (loss, aux) pass has_aux=True; for a pair (total, weight) pass reduction="weighted".'
    raise InputError(must, given=shown(value), remedy=remedy)


def _is_number(value: Any, kinds: tuple[Any, ...]) -> bool:
    if not (is_array(value) or (isinstance(value, (int, float)) and not isinstance(value, bool))):
        return False
    return np.shape(value) == () and any(jax.dtypes.issubdtype(jax.dtypes.result_type(value), kind) for kind in kinds)


def is_pair(value: Any) -> bool:
    """True for a tuple or list of two elements."""
    return isinstance(value, (tuple, list)) and len(value) == 2


def _check_aux(named: Sequence[tuple[str, Any]], maps: bool) -> None:
    whole, maker = ("the result", "the function") if maps else ("aux", "the loss")
    for name, leaf in named:
        if not (has_jax_type(leaf) if is_array(leaf) else isinstance(leaf, (int, float, complex))):
            raise InputError(
                f"Every leaf of {whole} must be an array or a number",
                given=f"{name} = {leaf!r}",
                remedy=f"Leave it out of what {maker} returns.",
            )


def shown(value: Any) -> str:
    """How an error message shows what a loss returned: with types instead of tracers."""
    return f"{type(value).__name__} {jax.tree.map(_Shown, value)}" if not hasattr(value, "shape") else describe(value)


@dataclasses.dataclass
class _Shown:
    """A leaf whose repr is its type."""

    leaf: Any

    def __repr__(self) -> str:
        return describe(self.leaf)
