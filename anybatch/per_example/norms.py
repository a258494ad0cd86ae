"""Squared norms of the gradients of some examples with respect to one parameter, from what is kept of them."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.per_example.choice import Leaf
from anybatch.per_example.terms import Convolution, Lookups, Multiplied, Product, Value, common, wide

# Of what is added up, the share that may get lost: many roundings, but of either sign.
_LOST = {4: 2.0**-21, 8: 2.0**-49}
_FEW = 2048  # indices

# A norm may be off by this much before it is computed in another way: by next to nothing, or by what the rounding of
# narrow factors makes of it anyway.
_OFF = {2: 2.0**-10, 4: 2.0**-15, 8: 2.0**-40}


_NOTHING = 2.0**-60  # a square that is as good as 0: of a norm of 1e-9


class Squares(NamedTuple):
    """Squared norms, one for each example, and by how much they may be wrong."""

    square: Any
    doubt: Any  # by how much sums that cancel may have changed it
    slack: Any  # by how much a weighted sum of narrow factors may exceed it, relative to its weight


def squares_of(leaf: Leaf, arrays: Sequence[Any], *, strict: bool = False) -> Squares:
    """The squared norms of a leaf.

    Args:
      leaf: what is kept.
      arrays: for its sources, with the examples along axis 0.
      strict: whether the roundings of narrow factors may all point the same way. Otherwise they are taken for what they
        are in all but contrived examples: numbers of either sign.
    """
    parts = _per_term(leaf, arrays)
    if leaf.products:
        return _from_factors(leaf, parts, strict)
    looked_up = [each for each in parts if isinstance(each[0], Lookups)]
    if not leaf.values:
        return _exactly(_square_of_rows(*_joined(looked_up)))
    (value,) = (each for each in parts if isinstance(each[0], Value))
    if looked_up:
        return _exactly(_with_rows(value, looked_up))
    return _exactly(square_of(value[1][0]) * value[0].path.scale ** 2)


def added(squares: Sequence[Any]) -> Any:
    """The sum of squares, which may be of different dtypes."""
    dtype = wide(*(each.dtype for each in squares))
    return functools.reduce(jnp.add, [each.astype(dtype) for each in squares])


def is_doubtful(leaves: Sequence[Leaf], squares: Sequence[Squares], per_leaf: bool = False) -> Any:
    """For each example whether sums have cancelled so much that its norm is not to be trusted.

    Args:
      leaves: what is kept.
      squares: of each of them.
      per_leaf: whether the norm of every parameter is asked for, not only that of all.
    """
    if per_leaf and len(leaves) > 1:
        alone = [is_doubtful([leaf], [each]) for leaf, each in zip(leaves, squares, strict=True)]
        return functools.reduce(jnp.logical_or, alone)
    total = added([each.square for each in squares])
    doubt = added([each.doubt for each in squares])
    narrow = min((_narrowest(leaf) for leaf in leaves if leaf.products), default=4)
    return jnp.isfinite(total) & (doubt > _OFF[narrow] * jnp.maximum(total, _NOTHING))


def _narrowest(leaf: Leaf) -> int:
    return min(jnp.dtype(dtype).itemsize for term in leaf.products for dtype in term.dtypes)


def _per_term(leaf: Leaf, arrays: Sequence[Any]) -> list[tuple[Any, list[Any]]]:
    supply = iter(arrays)
    return [(term, [next(supply) for _ in term.sources]) for term in leaf.terms]


def square_of(array: Any) -> Any:
    """Of each example, along axis 0."""
    array = array.astype(wide(array.dtype))
    return jnp.sum(jnp.real(array * jnp.conj(array)), axis=tuple(range(1, array.ndim)))


def _exactly(square: Any) -> Squares:
    return Squares(square, jnp.zeros_like(square), jnp.zeros_like(square))


def sides_of(term: Multiplied, left: Any, right: Any) -> tuple[Any, Any]:
    """Both sides as (examples, copies, summands, entries)."""
    if isinstance(term, Convolution):
        return windows_of(term, left), _outputs_last(term, right)

    def side(array: Any, position: int) -> Any:
        batch, contract, free = term.batch[position], term.contract[position], term.free(position)
        order = [0, *(axis + 1 for axis in (*batch, *contract, *free))]
        return jnp.transpose(array, order).reshape(array.shape[0], term.copies, term.summands, -1)

    return side(left, 0), side(right, 1)


def windows_of(term: Convolution, left: Any) -> Any:
    """The windows of the left side of a convolution: (examples, 1, summands, entries)."""
    numbers, params = term.params["dimension_numbers"], term.params
    spatial = [term.shapes[1][axis] for axis in numbers.rhs_spec[2:]]

    def of_example(left: Any) -> Any:
        # (inputs and places in the window, all places)
        windows = lax.conv_general_dilated_patches(
            jnp.transpose(left, numbers.lhs_spec),
            spatial,
            params["window_strides"],
            params["padding"],
            lhs_dilation=params["lhs_dilation"],
            rhs_dilation=params["rhs_dilation"],
            precision=lax.Precision.HIGHEST,
        )
        return jnp.moveaxis(windows, 1, 0).reshape(1, term.summands, -1)

    return jax.vmap(of_example)(left)


def _outputs_last(term: Convolution, right: Any) -> Any:
    outputs, *rest = term.params["dimension_numbers"].rhs_spec
    moved = jnp.transpose(right, [0, *(axis + 1 for axis in (*rest, outputs))])
    return moved.reshape(right.shape[0], 1, term.summands, term.outputs)


def _times(left: Any, right: Any) -> Any:
    """Products of all vectors of one with all of the other, (..., vectors, entries) each."""
    batch = tuple(range(left.ndim - 2))
    dtype = wide(left.dtype, right.dtype)
    # Narrow numbers are multiplied as they are, which is exact; others without rounding them first.
    return lax.dot_general(
        left,
        right.astype(left.dtype),
        (((left.ndim - 1,), (right.ndim - 1,)), (batch, batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def _from_factors(leaf: Leaf, parts: list[tuple[Any, list[Any]]], strict: bool) -> Squares:
    """From products of the vectors: the square of a sum of outer products is a sum over pairs of them."""
    if len(parts) > 1:
        pairs = _pairs(parts)
        pairs, lost = pairs
        rounded = None
        if _is_narrow(leaf):
            alone = _lengths(pairs)
            rounded = jnp.square(jnp.sum(alone, axis=1)) if strict else jnp.sum(jnp.square(alone), axis=1) / 4
        return _added_over_pairs(pairs, rounded, lost)
    ((term, (left, right)),) = parts
    first, second = sides_of(term, left, right)
    if left.size > right.size:
        first, second = second, first  # so that the first is the one that a weighted sum scales
    scale = term.path.scale**2
    if first.shape[2] == 1:
        one, other = (jnp.sum(jnp.square(side.astype(wide(side.dtype))), axis=(2, 3)) for side in (first, second))
        dtype = wide(one.dtype, other.dtype)
        one, other = one.astype(dtype), other.astype(dtype)
        square, doubt = jnp.sum(one * other, axis=1), jnp.sum(_underflow(first, second, one, other), axis=1)
        return Squares(square * scale, doubt * scale, _slack(square, square if _is_narrow(leaf) else None) * scale)
    one, other = _times(first, first), _times(second, second)
    dtype = wide(one.dtype, other.dtype)
    one, other = one.astype(dtype), other.astype(dtype)
    rounded = None
    if _is_narrow(leaf):
        lengths, others = _lengths(one), _lengths(other)
        if strict:
            rounded = jnp.sum(jnp.abs(other) * lengths[..., :, None] * lengths[..., None, :], axis=(1, 2, 3))
        else:
            rounded = jnp.sum(jnp.square(lengths * others), axis=(1, 2)) / 4
    lost = _underflow(first, second, jnp.sum(_lengths(one) ** 2, -1), jnp.sum(_lengths(other) ** 2, -1))
    lost = first.shape[2] * jnp.sum(lost, axis=1)
    return Squares(*(each * scale for each in _added_over_pairs(one * other, rounded, lost)))


def _underflow(first: Any, second: Any, one: Any, other: Any) -> Any:
    """What is lost of products of squares, at most, where squares of small numbers are 0."""
    smallest = jnp.finfo(one.dtype).tiny * max(first.shape[-1], second.shape[-1])
    return smallest * (one + other)


def _added_over_pairs(pairs: Any, rounded: Any | None, lost: Any) -> Squares:
    axes = tuple(range(1, pairs.ndim))
    square, most = jnp.sum(pairs, axis=axes), jnp.sum(jnp.abs(pairs), axis=axes)
    doubt = _LOST[jnp.dtype(pairs.dtype).itemsize] * most + lost
    square = jnp.maximum(square, doubt)  # never less than what may have been lost
    return Squares(square, doubt, _slack(square, rounded))


def _lengths(products: Any) -> Any:
    """The lengths of vectors, from the products of all pairs of them."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, products.shape, products.ndim - last) for last in (2, 1))
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.where(rows == columns, products, 0), axis=-1), 0))


def _is_narrow(leaf: Leaf) -> bool:
    """Whether factors are rounded when they are scaled: those of float16 are scaled in float32."""
    return any(jnp.dtype(dtype) == jnp.bfloat16 for term in leaf.products for dtype in term.dtypes)


def _slack(square: Any, rounded: Any | None) -> Any:
    """What the rounding of scaled factors may add to the square of a clipped gradient.

    Each entry is rounded by up to half a unit of its last bit: `rounded` is the square of what that comes to, had each
    been rounded by all of itself.
    """
    if rounded is None:
        return jnp.zeros_like(square)
    more = 2.0**-7.95 * jnp.sqrt(rounded)
    return 2 * jnp.sqrt(square) * more + jnp.square(more)


def _pairs(parts: list[tuple[Any, list[Any]]]) -> tuple[Any, Any]:
    """The products of all pairs of vectors in several terms, (examples, vectors, vectors), and what they may lack."""
    rows, columns, looked_up = [], [], []
    for term, mine in parts:
        if isinstance(term, Product):
            left, right = (side[:, 0] for side in sides_of(term, *mine))
            assert term.path.axes is not None
            first_on_left = term.path.axes[0] < len(term.free(0))
            row, column = (left, right) if first_on_left else (right, left)
            rows.append(row)
            columns.append(column * jnp.asarray(term.path.scale, column.dtype))
        else:
            looked_up.append((term, mine))
    side = common(*(row.dtype for row in rows))
    dense = _joined_sides(rows, side)
    within = _times(dense, dense)
    if looked_up:
        index, updates = _joined(looked_up)
        columns.append(updates)
        between = jnp.take_along_axis(dense, index[:, None, :], axis=2, mode="fill", fill_value=0).astype(within.dtype)
        same = index[:, :, None] == index[:, None, :]
        top = jnp.concatenate([within, between], axis=2)
        bottom = jnp.concatenate([jnp.swapaxes(between, 1, 2), same.astype(within.dtype)], axis=2)
        within = jnp.concatenate([top, bottom], axis=1)
    dtype = common(*(column.dtype for column in columns))
    every = _joined_sides(columns, dtype)
    products = _times(every, every)
    within = within.astype(wide(within.dtype, products.dtype))
    traces = (jnp.sum(_lengths(each) ** 2, axis=-1) for each in (within, products.astype(within.dtype)))
    lost = every.shape[1] * _underflow(dense, every, *traces)
    return within * products.astype(within.dtype), lost


def _joined_sides(sides: Sequence[Any], dtype: Any) -> Any:
    """The vectors of several terms, (examples, vectors, entries), written out.

    On a GPU, XLA would join them inside the kernel of their products, which then holds both sides twice. For GPT-2,
    that was more shared memory than an H200 has, and did not compile.
    """
    joined = jnp.concatenate([side.astype(dtype) for side in sides], axis=1)
    return lax.optimization_barrier(joined) if len(sides) > 1 else joined


def _joined(looked_up: list[tuple[Any, list[Any]]]) -> tuple[Any, Any]:
    """The indices and rows of several terms: (examples, number), (examples, number, entries)."""
    pairs = [rows_of(term, *mine) for term, mine in looked_up]
    dtype = common(*(rows.dtype for _, rows in pairs))
    return (
        jnp.concatenate([index for index, _ in pairs], axis=1),
        jnp.concatenate([rows.astype(dtype) for _, rows in pairs], axis=1),
    )


def rows_of(term: Lookups, index: Any, update: Any) -> tuple[Any, Any]:
    """The indices and rows of the examples, (examples, number) and (examples, number, entries)."""
    index = index.reshape(index.shape[0], -1)
    index = index.astype(common(index.dtype, jnp.int32))  # narrow ones do not hold the size of the table
    if term.clips:
        index = jnp.clip(index, 0, term.shape[0] - 1)
    # A negative index is none to the table, but would be one from its end to what takes rows here.
    index = jnp.where(index < 0, term.shape[0], index)
    rows = update.reshape(*index.shape, -1)
    rows = jnp.where((index < term.shape[0])[:, :, None], rows, jnp.zeros_like(rows))
    return index, rows * jnp.asarray(term.path.scale, rows.dtype)


def _square_of_rows(index: Any, rows: Any) -> Any:
    """Rows with the same index are added up first, which takes no table and no matrix of pairs."""
    if not index.shape[1]:
        return jnp.zeros(index.shape[0], wide(rows.dtype))

    def of_example(index: Any, rows: Any) -> Any:
        return jnp.sum(jnp.square(_added_up(index, rows)[1]))

    return jax.vmap(of_example)(index, rows.astype(wide(rows.dtype)))


def _with_rows(value: tuple[Any, list[Any]], looked_up: list[tuple[Any, list[Any]]]) -> Any:
    """A gradient that is kept as it is, and rows to be added to it: those that are met by none, and the sums."""
    term, (array,) = value
    index, rows = _joined(looked_up)
    table = jax.vmap(term.path)(array) if term.path.steps_move else array * jnp.asarray(term.path.scale, array.dtype)
    table = table.reshape(*table.shape[:2], -1)
    dtype = wide(table.dtype, rows.dtype)

    def of_example(table: Any, index: Any, rows: Any) -> Any:
        index, added = _added_up(index, rows.astype(dtype))
        alone = jnp.sum(jnp.square(table.astype(dtype)), axis=1).at[index].set(0, mode="drop")
        met = jnp.take(table, index, axis=0, mode="fill", fill_value=0).astype(dtype)
        return jnp.sum(alone) + jnp.sum(jnp.square(met + added))

    return jax.vmap(of_example)(table, index, rows)


def _added_up(index: Any, rows: Any) -> tuple[Any, Any]:
    """Rows with the same index added up, each at the place of one of them; other places have an index beyond any."""
    number = index.shape[0]
    beyond = jnp.full_like(index, jnp.iinfo(index.dtype).max)
    if number <= _FEW:  # all pairs are compared sooner than they are sorted
        place = jnp.argmax(index[:, None] == index[None, :], axis=1)
        added = jnp.zeros_like(rows).at[place].add(rows)
        return jnp.where(place == jnp.arange(number), index, beyond), added
    order = jnp.argsort(index)
    index, rows = index[order], rows[order]
    segment = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), index[1:] != index[:-1]]))
    added = jax.ops.segment_sum(rows, segment, num_segments=number, indices_are_sorted=True)
    return beyond.at[segment].set(index), added
