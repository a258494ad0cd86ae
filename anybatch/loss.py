"""The user's loss, traced at one number of examples and checked before any work is done."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from anybatch import compat
from anybatch.arguments import Arguments, Arrays
from anybatch.errors import InputError
from anybatch.trees import describe, is_array


@dataclasses.dataclass(frozen=True)
class TracedLoss:
    """A loss at `num_examples` examples: a function of arrays alone, with the user's Python left behind.

    Its outputs are flat: the loss (for a weighted loss: the total, then the weight), then the aux leaves.
    """

    traced: compat.Traced
    arrays_tree: Any
    num_examples: int
    num_heads: int  # 1, or 2 with a weight
    aux_tree: Any

    @property
    def consts(self) -> tuple[Any, ...]:
        """The arrays that the loss closes over."""
        return self.traced.consts

    @property
    def out_avals(self) -> list[Any]:
        return self.traced.out_avals

    @property
    def aux_avals(self) -> list[tuple[str, Any]]:
        """The types of the aux leaves, with their names."""
        paths = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(self.aux_tree, range(self.aux_tree.num_leaves)))
        names = ["aux" + jax.tree_util.keystr(path) for path, _ in paths]
        return list(zip(names, self.out_avals[self.num_heads :], strict=True))

    def __call__(self, consts: Sequence[Any], arrays: Arrays) -> list[Any]:
        return self.traced(consts, *jax.tree.leaves(arrays))

    @property
    def weight_has_gradient(self) -> bool:
        """Whether the weight of a weighted loss moves with what the gradient is taken with respect to."""
        if self.num_heads == 1 or not jax.dtypes.issubdtype(self.out_avals[1].dtype, np.inexact):
            return False
        avals = [variable.aval for variable in self.traced.jaxpr.invars]
        num_wrt = len(jax.tree.unflatten(self.arrays_tree, avals).wrt)
        if not any(self.traced.inputs_used_by(1)[:num_wrt]):
            return False

        # The weight is computed from them; a stop_gradient or a comparison may still cut every path.
        def push(*flat: Any) -> list[Any]:
            wrt, tangents, others = flat[:num_wrt], flat[num_wrt : 2 * num_wrt], flat[2 * num_wrt :]
            return [jax.jvp(lambda *xs: self.traced(self.consts, *xs, *others)[1], wrt, tangents)[1]]

        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        pushed = compat.trace(push, *types[:num_wrt], *types[:num_wrt], *types[num_wrt:])
        return any(pushed.inputs_used_by(0)[num_wrt : 2 * num_wrt])


def trace_loss(
    fun: Callable[..., Any], arguments: Arguments, num_examples: int, *, weighted: bool, has_aux: bool
) -> TracedLoss:
    """Traces `fun` at `num_examples` examples, and checks what it returns.

    Raises:
      InputError: where the loss is not a scalar of real numbers, or not of the form that was declared.
    """
    arrays, arrays_tree = jax.tree.flatten(arguments.abstract_arrays(num_examples))
    aux_tree: Any = None

    def flat_loss(*flat: Any) -> list[Any]:
        nonlocal aux_tree
        result = arguments.call(fun, jax.tree.unflatten(arrays_tree, flat))
        heads, aux = _split(result, weighted, has_aux)
        leaves, aux_tree = jax.tree.flatten(aux)
        _check_aux(aux)
        return [*heads, *leaves]

    traced = compat.trace(flat_loss, *arrays)
    return TracedLoss(traced, arrays_tree, num_examples, 2 if weighted else 1, aux_tree)


def _split(result: Any, weighted: bool, has_aux: bool) -> tuple[list[Any], Any]:
    loss, aux = result, None
    if has_aux:
        if not (isinstance(result, tuple) and len(result) == 2):
            raise InputError(
                "With has_aux=True the loss must return a pair (loss, aux)",
                given=_shown(result),
                remedy="Return (loss, aux), or leave has_aux out.",
            )
        loss, aux = result
    if not weighted:
        return [_scalar("The loss must return a scalar of real floating-point numbers", loss)], aux
    if not (isinstance(loss, tuple) and len(loss) == 2):
        raise InputError(
            'With reduction="weighted" the loss must return a pair (total, weight)',
            given=_shown(loss),
            remedy="Return the sum over the examples and what to divide it by, e.g. "
            "(jnp.sum(losses * mask), jnp.sum(mask))"
            + (", aux beside it: ((total, weight), aux)." if has_aux else "."),
        )
    total = _scalar("The total of a weighted loss must be a scalar of real floating-point numbers", loss[0])
    return [total, _scalar("The weight of a weighted loss must be a scalar number", loss[1], integer=True)], aux


def _scalar(must: str, value: Any, *, integer: bool = False) -> Any:
    kinds = (np.floating, np.integer) if integer else (np.floating,)
    is_number = is_array(value) or isinstance(value, (int, float) if integer else float)
    if (
        is_number
        and np.shape(value) == ()
        and any(jax.dtypes.issubdtype(jax.dtypes.result_type(value), kind) for kind in kinds)
    ):
        return value
    remedy = "Reduce it over the examples, e.g. jnp.mean(losses) or jnp.sum(losses)."
    if isinstance(value, tuple) and len(value) == 2:
        remedy = 'For a pair (loss, aux) pass has_aux=True; for a pair (total, weight) pass reduction="weighted".'
    raise InputError(must, given=_shown(value), remedy=remedy)


def _check_aux(aux: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if not is_array(leaf) and not isinstance(leaf, (int, float, complex)):
            raise InputError(
                "Every leaf of aux must be an array or a number",
                given=f"aux{jax.tree_util.keystr(path)} = {leaf!r}",
                remedy="Leave it out of what the loss returns.",
            )


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {jax.tree.map(_Shown, value)}" if not hasattr(value, "shape") else describe(value)


class _Shown:
    """Prints a leaf by its type, so that a message shows no tracers."""

    def __init__(self, leaf: Any) -> None:
        self.text = describe(leaf)

    def __repr__(self) -> str:
        return self.text
