"""Reads a loss: `ab.read` for users, and `split_loss` for the code that computes gradients.

Both trace the loss at the full batch, give every value of its jaxpr a state (`reader.py`), and split it into a prefix
and a head (`split.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.call.arguments import Roles
from anybatch.call.host_batch import with_rows
from anybatch.call.loss import TracedLoss, trace_loss
from anybatch.call.models import partition_models
from anybatch.errors import InputError
from anybatch.jaxprs import source
from anybatch.jaxprs.graph import Graph, uses
from anybatch.reading.blocks import prefix_of_one, wide_values
from anybatch.reading.positions import Draw
from anybatch.reading.reader import Fact, NeedsInlining, Reader, ReadOptions
from anybatch.reading.report import Randomness, Reading, report
from anybatch.reading.rules import RULEBOOK
from anybatch.reading.split import Seeds, Split
from anybatch.reading.states import INVARIANT, Batched

_MAX_HINT = 1 << 20  # elements of a closed-over array whose numbers are looked at while the loss is read

# The bytes from which on a value is reported that is larger than all around it.
LEAST_WIDE = 2**20

# Prints; and the names of mesh axes, which JAX counts as effects too.
_HARMLESS_EFFECTS = ("DebugEffect", "OrderedDebugEffect", "NamedAxisEffect")


def split_loss_in_one_pass(loss: TracedLoss, consts: Sequence[Any], **options: Any) -> Split:
    """Like `split_loss`, but leaves sums of data to the microbatches if one pass over them is still enough.

    On many devices each sum is a collective. The sum of a mask can be part of the one that sums the gradients, unless
    examples are divided by it.
    """
    split = split_loss(loss, consts, **options, sums_data_later=True)
    if split.seeds != Seeds.BETWEEN and not split.head_couples:
        return split
    return split_loss(loss, consts, **options)


def split_loss(
    loss: TracedLoss,
    consts: Sequence[Any],
    *,
    fresh_draws: bool = False,
    sums_data_later: bool = False,
    may_select: bool = False,
    failed: Mapping[str, str] | None = None,
) -> Split:
    """Reads a loss that was traced at the full batch, and splits it into a prefix and a head.

    Args:
      loss: the loss.
      consts: the arrays that it closes over. Those with known numbers tell the reading more.
      fresh_draws: whether a microbatch may draw its own random numbers, where it cannot draw those of the full batch.
      sums_data_later: whether sums of data alone are left to the microbatches.
      may_select: whether rows that the loss selects from its data may have a loop of their own.
      failed: primitives whose rules must not be used, and why.
    """
    wrt, batch, keys, rest = loss.types
    moving = [Fact(INVARIANT, True, jax.dtypes.issubdtype(leaf.dtype, np.inexact)) for leaf in wrt]
    # A value of data alone may be computed before the first microbatch. What a function that is not differentiated
    # computes with other arguments, such as the parameters of a model, counts as if it were differentiated.
    other = Fact(INVARIANT, moves=loss.maps)
    facts = [
        *[other] * len(loss.const_types),
        *moving,
        *[Fact(Batched(0))] * len(batch),
        *[Fact(INVARIANT)] * len(keys),
        *[other] * len(rest),
    ]
    opened: dict[int, Any] = {}
    options = ReadOptions(
        may_reorder=uses(loss.traced.jaxpr, "ragged_dot_general"),  # only then may microbatches sort their own rows
        sums_data_later=sums_data_later,
        may_select=may_select,
        failed=failed or {},
    )
    while True:
        graph = Graph(loss.traced.jaxpr, opened)
        for value, const in zip(graph.inputs, consts, strict=False):
            if isinstance(const, (np.ndarray, jax.Array)) and not isinstance(const, jax.core.Tracer):
                if not value.is_key and value.size <= _MAX_HINT:
                    value.hint = const
        _refuse_mutation(graph)
        try:
            reader = Reader(graph, loss.num_examples, facts, RULEBOOK, options, top=True)
        except NeedsInlining as request:
            opened[id(request.equation)] = request.equation, request.function
            continue
        split = Split(loss, reader, Draw(fresh_draws))
        if any(isinstance(state, Batched) and not state.in_batch_order for state in split.states):
            # Sorted rows reach the head, which needs them in the order of the full batch.
            options = dataclasses.replace(options, may_reorder=False)
            continue
        return split


def _refuse_mutation(graph: Graph) -> None:
    for node in graph.nodes:
        harmful = [effect for effect in node.equation.effects if type(effect).__name__ not in _HARMLESS_EFFECTS]
        if harmful:
            place = source.locate(node)
            raise InputError(
                "A loss that is read must be a function of its arguments, without effects",
                given=f"{node.name} at {place.file}:{place.line} in {place.function}",
                remedy='Take it out of the loss, or declare how the loss uses its examples: reduction="mean" or "sum".',
            )


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
    """How a loss uses its examples, as `value_and_grad` reads it before it computes anything.

    The loss is traced, as under `jit`, and not computed. Arguments may be arrays or `jax.ShapeDtypeStruct`.

    >>> import jax.numpy as jnp, anybatch as ab
    >>> def loss(w, batch):
    ...     return jnp.mean((batch["x"] * w - batch["y"]) ** 2)
    >>> reading = ab.read(loss, jnp.array(1.0), {"x": jnp.ones(64), "y": jnp.ones(64)})
    >>> reading.kind, reading.passes, reading.separable
    ('mean over 64 examples', 1, True)

    Args:
      fun: the loss, as for `value_and_grad`. Or the result of `map_batch`, `hvp` and the like, with its own options.
      *args: the positional arguments of `fun`.
      argnums: which positional arguments are differentiated.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      batch_argnums: which positional arguments carry the batch, as for `value_and_grad`.
      batch_argnames: the names of keyword arguments that carry the batch.
      rng_argnums: which positional arguments are PRNG keys. With such a key, a microbatch may draw its own numbers
        where it cannot draw those of the full batch.
      **kwargs: keyword arguments of `fun`.

    Raises:
      InputError: for invalid arguments, or a loss that cannot be read.
    """
    maps = False
    if hasattr(fun, "to_read"):  # such as the result of `map_batch`
        fun, own = fun.to_read()
        roles, has_aux, maps = own.roles, own.has_aux, own.maps
    else:
        roles = Roles.of(
            argnums=argnums, batch_argnums=batch_argnums, rng_argnums=rng_argnums, batch_argnames=batch_argnames
        )
    call = partition_models(fun, roles, has_aux, *with_rows(args, kwargs, only_types=True))
    fun, has_aux = call.fun, call.has_aux
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    abstract = [position for position, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    reading: Reading | None = None

    def read_with(*traced: Any) -> None:
        nonlocal reading
        given = dict(zip(abstract, traced, strict=True))
        filled = [given.get(position, leaf) for position, leaf in enumerate(leaves)]
        arguments = roles.sort(fun, *jax.tree.unflatten(tree, filled))
        loss, consts = trace_loss(fun, arguments, arguments.num_examples, weighted=False, has_aux=has_aux, maps=maps)
        fresh = bool(arguments.arrays.keys)
        split = split_loss(loss, consts, fresh_draws=fresh, may_select=True, sums_data_later=maps)
        seen_whole = tuple(leaf.name for leaf, _, _ in arguments.unnamed_rows())
        wide = () if loss.traced.has_effects or maps else tuple(wide_values(split, LEAST_WIDE))
        reading = dataclasses.replace(report(split), seen_whole=seen_whole, wide=wide)
        if reading.randomness is Randomness.IN_DISTRIBUTION:
            # Raises now what a call would raise, if these numbers cannot be drawn per microbatch.
            types = [[value.type for value in values] for values in (split.graph.inputs, split.frontier)]
            for selection, positions in split.selections.items():
                wanted = [split.frontier[position] for position in positions]
                jax.eval_shape(functools.partial(prefix_of_one, split, selection, wanted), types[0])
            jax.eval_shape(lambda inputs, made: split.head(inputs, None, [], made), *types)

    jax.eval_shape(read_with, *(leaves[position] for position in abstract))
    assert reading is not None
    return reading
