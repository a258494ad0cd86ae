"""`read`: how a loss uses its examples, found in the program itself."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from anybatch.arguments import Roles
from anybatch.loss import trace_loss
from anybatch.modules import opened
from anybatch.reading.loss_reading import split_loss
from anybatch.reading.report import Reading, report


def read(
    fun: Callable[..., Any],
    *args: Any,
    argnums: int | tuple[int, ...] = 0,
    has_aux: bool = False,
    batch_argnums: int | tuple[int, ...] = 1,
    batch_argnames: str | tuple[str, ...] = (),
    rng_argnums: int | tuple[int, ...] = (),
    **kwargs: Any,
) -> Reading:
    """How a loss uses its examples: what `value_and_grad` finds out before it chooses its passes.

    The loss is traced, as under `jit`, and nothing is computed. Arguments may be arrays or
    `jax.ShapeDtypeStruct`.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean((batch["x"] * w - batch["y"]) ** 2)
    >>> reading = ab.read(loss, jnp.array(1.0), {"x": jnp.ones(64), "y": jnp.ones(64)})
    >>> reading.kind, reading.passes, reading.separable
    ('mean over 64 examples', 1, True)

    Args:
      fun: the loss, as for `value_and_grad`.
      *args: its arguments.
      argnums: which positional arguments are differentiated.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      batch_argnums: which arguments carry the batch, as for `value_and_grad`.
      batch_argnames: names of further ones.
      rng_argnums: which positional arguments are PRNG keys of which each microbatch may draw its own numbers, if
        it cannot draw those of the full batch.
      **kwargs: keyword arguments of `fun`.

    Raises:
      InputError: for arguments that cannot be worked with, or a loss that cannot be read.
    """
    roles = Roles.of(
        argnums=argnums, batch_argnums=batch_argnums, rng_argnums=rng_argnums, batch_argnames=batch_argnames
    )
    call = opened(fun, roles, has_aux, args, kwargs)
    fun, has_aux = call.fun, call.has_aux
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    abstract = [position for position, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    reading: Reading | None = None

    def read_with(*traced: Any) -> None:
        nonlocal reading
        given = dict(zip(abstract, traced, strict=True))
        filled = [given.get(position, leaf) for position, leaf in enumerate(leaves)]
        arguments = roles.sort(fun, *jax.tree.unflatten(tree, filled))
        loss, consts = trace_loss(fun, arguments, arguments.num_examples, weighted=False, has_aux=has_aux)
        split = split_loss(loss, consts, fresh_draws=bool(arguments.arrays.keys), may_select=True)
        seen_whole = tuple(leaf.name for leaf, _, _ in arguments.unnamed_rows())
        reading = dataclasses.replace(report(split), seen_whole=seen_whole)
        if reading.randomness == "in distribution":
            # Says now what a call would say: that these numbers cannot be drawn in part.
            types = [[value.type for value in values] for values in (split.graph.inputs, split.frontier)]
            for selection, positions in split.selections.items():
                wanted = [split.frontier[position] for position in positions]
                jax.eval_shape(
                    functools.partial(split.prefix, selection=selection), types[0], None, [], 0, 1, wanted=wanted
                )
            jax.eval_shape(lambda inputs, made: split.head(inputs, None, [], made), *types)

    jax.eval_shape(read_with, *(leaves[position] for position in abstract))
    assert reading is not None
    return reading
