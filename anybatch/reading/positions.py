"""Computes the rows of a microbatch, of values that have N rows but do not depend on the batch.

Such values are `arange(N)`, a constant of N rows, or random bits of shape (N, ...). Only the rows of the microbatch are
computed: positions count from its first example, and random bits are drawn at the counters that they have in the full
batch, so that they are the same bits.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from anybatch.errors import InputError
from anybatch.jaxprs import avals, source
from anybatch.jaxprs.graph import Node, Value
from anybatch.jaxprs.primitives import ELEMENTWISE
from anybatch.reading.states import Batched, replaced


@dataclasses.dataclass(frozen=True)
class Draw:
    """How to draw random numbers of a generator that cannot draw some rows only.

    If `fresh`, each microbatch draws its own numbers, which are equal in distribution to those of the full batch. The
    same node must then not be drawn for the full batch as well: the two draws would differ. If `in_full`, all rows are
    drawn, and then sliced.
    """

    fresh: bool = False
    in_full: bool = False
    per_microbatch: set[Node] = dataclasses.field(default_factory=set)
    for_full_batch: set[Node] = dataclasses.field(default_factory=set)

    def note(self, node: Node, drawn: set[Node]) -> None:
        """Adds a node to one of the two sets, and raises if it is in both."""
        drawn.add(node)
        if node in self.per_microbatch and node in self.for_full_batch:
            place = source.locate(node)
            raise InputError(
                "Random numbers that each microbatch draws for itself must not be used for the full batch as well",
                given=f"such numbers at {place.file}:{place.line}",
                remedy='Use a key of the default generator, jax.random.key(0, impl="threefry2x32"), with which a '
                "microbatch draws exactly the numbers of the full batch.",
            )


def compute_rows(microbatch: Any, node: Node, value: Value, rows: Batched) -> Any:
    """The rows of a microbatch, of a result of `node`; None if all rows must be computed first."""
    name, params, length = node.name, node.params, rows.length(microbatch.size)
    if name == "iota":
        return _iota(microbatch, node, rows)
    if name in ("random_bits", "random_split", "random_wrap", "random_unwrap"):
        return _random(microbatch, node, value, rows)
    if name == "reshape" and params.get("dimensions") is None and len(node.inputs) == 1:
        before = reshaped(value.shape, node.inputs[0].shape, rows, microbatch.num_examples)
        if before is None:
            return None
        smaller = {**params, "new_sizes": replaced(params["new_sizes"], rows.axis, length)}
        return node([microbatch.rows(node.inputs[0], before)], smaller)[0]
    axes = axes_of_operands(node, value, rows.axis)
    if axes is None:
        return None
    operands = [
        microbatch.full_batch[operand] if axis is None else microbatch.rows(operand, rows.at(axis))
        for operand, axis in zip(node.inputs, axes, strict=True)
    ]
    return node(operands, with_length(node, rows.axis, length))[node.outputs.index(value)]


def axes_of_operands(node: Node, value: Value, axis: int) -> list[int | None] | None:
    """The axis of each operand that becomes an axis of the result, or None for those that are needed in full.

    None for nodes of which not each row is computed from the same row of the operands.
    """
    name, params = node.name, node.params
    if name in ELEMENTWISE | {"threefry2x32"} and all(operand.ndim in (0, value.ndim) for operand in node.inputs):
        return [axis if each.ndim and each.shape[axis] == value.shape[axis] else None for each in node.inputs]
    if name == "broadcast_in_dim" and len(node.inputs) == 1:
        dimensions = list(params["broadcast_dimensions"])
        is_repeated = axis not in dimensions or node.inputs[0].shape[dimensions.index(axis)] != value.shape[axis]
        return [None if is_repeated else dimensions.index(axis)]
    if name == "bitcast_convert_type" and node.inputs[0].shape == value.shape:
        return [axis]
    if name == "transpose":
        return [params["permutation"][axis]]
    if name in ("squeeze", "reduce_sum", "reduce_max", "reduce_min", "argmax", "argmin"):
        ndim = node.inputs[0].ndim
        dropped = {dimension % ndim for dimension in params["dimensions" if name == "squeeze" else "axes"]}
        return [[dimension for dimension in range(ndim) if dimension not in dropped][axis]]
    return None


def with_length(node: Node, axis: int, length: int) -> dict[str, Any] | None:
    """The parameters of a node whose result has another length along an axis; None if they are the same."""
    if "shape" not in node.params:
        return None
    return {**node.params, "shape": replaced(node.params["shape"], axis, length)}


def reshaped(old: tuple[int, ...], new: tuple[int, ...], rows: Batched, num_examples: int) -> Batched | None:
    """The rows of an array after a reshape, or None if the reshape splits the axis of the examples."""
    before = math.prod(old[: rows.axis]) * rows.outer  # blocks of N examples, one after the other
    passed = 1
    for axis, size in enumerate(new):
        if before % passed == 0 and size > 0 and size % (before // passed * num_examples) == 0:
            outer = before // passed
            return dataclasses.replace(rows, axis=axis, outer=outer, inner=size // (outer * num_examples))
        passed *= size
        if passed == 0:
            return None
    return None


def _iota(microbatch: Any, node: Node, rows: Batched) -> Any:
    counted = node([], with_length(node, rows.axis, rows.length(microbatch.size)))[0]
    if node.params["dimension"] != rows.axis:
        return counted
    if rows.outer != 1:
        return None
    if microbatch.runs == 1:
        return counted + jnp.asarray(microbatch.start * rows.inner).astype(counted.dtype)
    wide = lax.broadcasted_iota(jnp.int32, counted.shape, rows.axis)  # a narrow dtype may not hold the lengths
    return microbatch.numbers(wide, rows.inner).astype(counted.dtype)


def _random(microbatch: Any, node: Node, value: Value, rows: Batched) -> Any:
    (keys,) = node.inputs
    if rows.axis < keys.ndim and (node.name != "random_wrap" or rows.axis < keys.ndim - 1):
        if node.name == "random_bits" and not avals.is_threefry(keys.dtype):
            return None  # under vmap, the hardware's generator draws for all keys from the first one
        return node([microbatch.rows(keys, rows)])[0]  # a key for each row
    if node.name in ("random_wrap", "random_unwrap"):
        return None
    if avals.draws_by_counter(keys.dtype):
        return _drawn_by_counter(microbatch, node, value, rows)
    if node.name == "random_split" or keys.ndim or avals.is_threefry(keys.dtype) or microbatch.draw.in_full:
        return None  # drawn for the full batch, and then sliced
    if microbatch.size == microbatch.num_examples:
        return None  # it is the full batch
    if not microbatch.draw.fresh:
        place = source.locate(node)
        raise InputError(
            "Random numbers of a microbatch must be those that the full batch would draw",
            given=f"a key of the generator {keys.dtype}, which cannot draw some rows only, at "
            f"{place.file}:{place.line}",
            remedy='Use a key of the default generator, jax.random.key(0, impl="threefry2x32"); or let each microbatch '
            "draw its own, which are equal in distribution: name the argument with the key, e.g. rng_argnums=2.",
        )
    microbatch.draw.note(node, microbatch.draw.per_microbatch)
    fresh = jax.random.fold_in(microbatch.full_batch[keys], microbatch.start)
    return node([fresh], with_length(node, rows.axis, rows.length(microbatch.size)))[0]


def _drawn_by_counter(microbatch: Any, node: Node, value: Value, rows: Batched) -> Any:
    """The random bits of the rows, from the counters that they have in the draw of the full batch.

    The threefry generator numbers the elements of a draw and mixes each number with the key. The numbers have 64 bits,
    as two halves.
    """
    axis = rows.axis
    local = replaced(value.shape, axis, rows.length(microbatch.size))
    # The index of each local row along its axis in the full batch.
    index = microbatch.numbers(lax.iota(jnp.uint32, local[axis]), rows.inner)
    low, high = jnp.zeros(local, jnp.uint32), jnp.zeros(local, jnp.uint32)
    keys = node.inputs[0]
    for dimension, size in list(enumerate(value.shape))[keys.ndim :]:  # each key has its own draw
        position = index if dimension == axis else lax.iota(jnp.uint32, size)
        stride = math.prod(value.shape[dimension + 1 :])
        step_low, step_high = _times(position, stride)
        step_low, step_high = (lax.broadcast_in_dim(half, local, [dimension]) for half in (step_low, step_high))
        total = low + step_low
        high = high + step_high + (total < low).astype(jnp.uint32)
        low = total
    key = microbatch.full_batch[keys]
    data = jax.random.key_data(key)
    key_0, key_1 = (lax.broadcast_in_dim(data[..., half], local, range(keys.ndim)) for half in (0, 1))
    bits_0, bits_1 = avals.threefry2x32(key_0, key_1, high, low)
    if node.name == "random_split":
        split = jnp.stack([bits_0, bits_1], axis=bits_0.ndim)
        return jax.random.wrap_key_data(split, impl=jax.random.key_impl(key))
    width = node.params["bit_width"]
    if width == 64:
        return (bits_0.astype(jnp.uint64) << np.uint64(32)) | bits_1.astype(jnp.uint64)
    return (bits_0 ^ bits_1).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width])


def _times(position: jax.Array, stride: int) -> tuple[jax.Array, jax.Array]:
    """`position * stride` in 64 bits, as (low, high) halves, by products of 16 bits.

    64-bit integers are not always enabled, and `lax.mulhi` does not compile for a batch that is sharded over devices.
    """
    half, mask = np.uint32(16), np.uint32(0xFFFF)
    stride_low, stride_high = np.uint32(stride & 0xFFFFFFFF), np.uint32(stride >> 32)
    ours, its = (position & mask, position >> half), (stride_low & mask, stride_low >> half)
    crossed = (ours[0] * its[1], ours[1] * its[0])
    carried = (ours[0] * its[0] >> half) + (crossed[0] & mask) + (crossed[1] & mask)
    high = ours[1] * its[1] + (crossed[0] >> half) + (crossed[1] >> half) + (carried >> half)
    return position * stride_low, high + position * stride_high
