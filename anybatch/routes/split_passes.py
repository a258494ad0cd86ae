"""A loss that was read: its prefix microbatch by microbatch, in one pass or two, and its head once."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anybatch import compat
from anybatch.arguments import Arrays
from anybatch.batch import Cut
from anybatch.reading.split import Seeds, Split
from anybatch.routes import in_place
from anybatch.routes.passes import Given, Prefix, gather_rows


def value_and_grad(
    split: Split,
    cut: Cut,
    accumulator_dtype: Any,
    consts: Sequence[Any],
    arrays: Arrays,
    *,
    remat: str | None = None,
) -> tuple[Any, list[Any], list[Any]]:
    """The value, the aux leaves and the gradient leaves of the batch.

    One pass: where the gradient of the head is known before or is a single factor. Else two: the first, without
    gradients, makes the frontier; the second sees the same examples and random numbers again.

    Memory: one gradient in the accumulator's dtype, the temporaries of one microbatch, and the head: the rows of
    the frontier, if there are any, and what is computed from them.
    """
    leaves = [jnp.asarray(leaf) for leaf in split.inputs(consts, arrays)]

    def compute(*inputs: Any, mutate: bool) -> list[Any]:
        return _compute(split, cut, accumulator_dtype, list(inputs), mutate, remat)

    if split.loss.traced.has_effects:  # a primitive of our own would hide them
        results = compute(*leaves, mutate=False)
    else:
        results = in_place.call(
            lambda *flat: compute(*flat, mutate=True), lambda *flat: compute(*flat, mutate=False), *leaves
        )
    num_grads = len(arrays.wrt)
    value, *aux = results[num_grads:]
    return value, aux, results[:num_grads]


def _compute(
    split: Split, cut: Cut, accumulator_dtype: Any, inputs: list[Any], mutate: bool, remat: str | None
) -> list[Any]:
    """The gradient leaves, the value, the aux leaves."""
    first, num_wrt = split.num_consts, len(split.loss.types.wrt)
    wrt = inputs[first : first + num_wrt]
    known = split.compute_first(inputs, gather_rows(split, cut, inputs))

    def with_wrt(wrt: Sequence[Any]) -> list[Any]:
        return [*inputs[:first], *wrt, *inputs[first + num_wrt :]]

    hoisted, pull_hoisted = jax.vjp(lambda wrt: split.compute_hoisted(with_wrt(wrt), known), wrt)
    given = Given([*wrt, *hoisted], inputs, known)
    types = Given(*([compat.abstract(jax.typeof(leaf)) for leaf in part] for part in (given.variables, inputs, known)))
    prefix = Prefix(split, cut, accumulator_dtype, types, remat)

    def differentiated_head(
        frontier: Sequence[Any], num_outputs: int | None = None
    ) -> tuple[Any, list[Any], list[Any], list[Any]]:
        """The loss, the aux leaves, and the gradients with respect to the variables and to the frontier."""

        def head(variables: Sequence[Any], moving: Sequence[Any]) -> tuple[Any, list[Any]]:
            now = dict(zip(split.differentiated, moving, strict=True))
            whole = [now.get(position, value) for position, value in enumerate(frontier)]
            parameters = with_wrt(variables[:num_wrt])
            value, *aux = split.head(parameters, known, variables[num_wrt:], whole, num_outputs)
            return value, aux

        with jax.named_scope("anybatch_head"):
            moving = [frontier[position] for position in split.differentiated]
            value, pullback, aux = jax.vjp(head, given.variables, moving, has_aux=True)
            grads, seeds = pullback(jnp.ones_like(value))
        return value, aux, grads, seeds

    if split.seeds == Seeds.NONE:
        frontier = prefix.forward(given) if split.frontier else []
        value, aux, grads, _ = differentiated_head(frontier)
    elif split.seeds == Seeds.BEFORE:
        # The gradient of the head does not depend on the frontier: any will do to find it.
        seeds = differentiated_head([_placeholder(value) for value in split.frontier], num_outputs=1)[3]
        summed, frontier = prefix.backward(given, seeds, mutate=mutate, keeps_frontier=True)
        value, aux, grads, _ = differentiated_head(frontier)
        grads = [_plus(total, grad) for total, grad in zip(summed, grads, strict=True)]
    elif split.seeds == Seeds.AFTER:
        ones = [jnp.ones_like(_placeholder(split.frontier[position])) for position in split.differentiated]
        summed, frontier = prefix.backward(given, ones, mutate=mutate, keeps_frontier=True)
        value, aux, grads, (factor,) = differentiated_head(frontier)
        factor = factor.reshape(())
        grads = [_plus(total * factor.astype(total.dtype), grad) for total, grad in zip(summed, grads, strict=True)]
    else:
        value, aux, grads, seeds = differentiated_head(prefix.forward(given))
        summed, _ = prefix.backward(given, seeds, mutate=mutate, keeps_frontier=False)
        grads = [_plus(total, grad) for total, grad in zip(summed, grads, strict=True)]

    with jax.named_scope("anybatch_reduce"):
        own, of_hoisted = grads[:num_wrt], grads[num_wrt:]
        if hoisted:
            (pulled,) = pull_hoisted([grad.astype(leaf.dtype) for grad, leaf in zip(of_hoisted, hoisted, strict=True)])
            own = [_plus(grad, more) for grad, more in zip(own, pulled, strict=True)]
        return [*(grad.astype(leaf.dtype) for grad, leaf in zip(own, wrt, strict=True)), value, *aux]


def _plus(total: jax.Array, grad: jax.Array) -> jax.Array:
    return total + grad.astype(total.dtype)


def _placeholder(value: Any) -> Any:
    if value.is_key:
        data = jax.eval_shape(jax.random.key_data, value.type)
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=compat.key_impl(value.dtype))
    return compat.zeros_of(value.aval, value.dtype)
