"""Squared norms of per-example gradients with respect to one parameter, from the form in which they are kept.

The gradient of an example is often a sum of outer products, `sum_t left[t] right[t]^T`. Its squared norm is a sum over
pairs, `sum_st (left[s] . left[t]) (right[s] . right[t])`, which needs the factors and not the gradient. Such sums can
cancel, so each squared norm comes with a bound on what it may have lost.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.per_example.forms import GradientForm
from anybatch.per_example.terms import Convolution, DirectTerm, FactoredTerm, Lookups, Product, common_dtype, sum_dtype

# The relative error of a sum over pairs, by the bytes of its dtype. It has many roundings, but of either sign.
_ROUNDING = {4: 2.0**-21, 8: 2.0**-49}

# The relative error above which a squared norm is recomputed from the gradient, by the bytes of the narrowest factor:
# next to nothing, or about as much as the rounding of narrow factors changes it anyway.
_TOLERANCE = {2: 2.0**-10, 4: 2.0**-15, 8: 2.0**-40}

_NEGLIGIBLE = 2.0**-60  # a squared norm that counts as 0: that of a norm of 1e-9
_FEW_INDICES = 2048  # up to which comparing all pairs of indices is faster than sorting them

TermArrays = tuple[Any, list[Any]]  # a term, and the values of its sources, with the examples along axis 0


class Squares(NamedTuple):
    """Squared norms, one for each example, and bounds on their errors."""

    square: Any
    doubt: Any  # the most by which cancellation and underflow may have changed it
    slack: Any  # the most that rounding scaled factors adds to the square of a clipped gradient, relative to its weight


def squares_of(form: GradientForm, per_term: list[TermArrays], *, strict: bool = False) -> Squares:
    """The squared norms of the per-example gradients of one parameter.

    With `strict`, `slack` holds even where the roundings of all narrow factors have the same sign. Otherwise it assumes
    roundings of either sign, as in all but contrived examples.
    """
    if form.products:
        return _from_factors(form, per_term, strict)
    looked_up = [each for each in per_term if isinstance(each[0], Lookups)]
    direct = [each for each in per_term if isinstance(each[0], DirectTerm)]
    if not direct:
        square = _square_of_rows(*_joined_lookups(looked_up))
    elif looked_up:
        square = _square_with_rows(direct[0], looked_up)
    else:
        square = _square_of(direct[0][1][0]) * direct[0][0].path.scale ** 2
    return Squares(square, jnp.zeros_like(square), jnp.zeros_like(square))


def _square_of(array: Any, from_axis: int = 1) -> Any:
    """The squared norm of each example of an array, with the examples along axis 0, or along all axes before one."""
    array = array.astype(sum_dtype(array.dtype))
    return jnp.sum(jnp.real(array * jnp.conj(array)), axis=tuple(range(from_axis, array.ndim)))


def sum_of(squares: Sequence[Any]) -> Any:
    """The sum of arrays of squares, which may have different dtypes."""
    dtype = sum_dtype(*(each.dtype for each in squares))
    # A reduction. A chain of additions would be compiled again in every kernel that uses the sum, such as those of all
    # weighted sums. XLA makes a chain of a reduction along the axis along which arrays were joined, or if they have
    # one entry.
    (number,) = squares[0].shape
    length = 2 if number == 1 else number
    joined = jnp.concatenate([jnp.broadcast_to(each.astype(dtype), length) for each in squares])
    return jnp.sum(joined.reshape(len(squares), -1), axis=0)[:number]


def is_doubtful(forms: Sequence[GradientForm], squares: Sequence[Squares], per_leaf: bool = False) -> Any:
    """A boolean for each example: True if its norm may be off by more than the tolerance, because sums cancelled.

    With `per_leaf`, the norm of each parameter must be good, and otherwise only the norm over all of them.
    """
    if per_leaf and len(forms) > 1:
        alone = [is_doubtful([form], [each]) for form, each in zip(forms, squares, strict=True)]
        return functools.reduce(jnp.logical_or, alone)
    total = sum_of([each.square for each in squares])
    doubt = sum_of([each.doubt for each in squares])
    narrowest = min((_narrowest(form) for form in forms if form.products), default=4)
    return jnp.isfinite(total) & (doubt > _TOLERANCE[narrowest] * jnp.maximum(total, _NEGLIGIBLE))


def _narrowest(form: GradientForm) -> int:
    return min(jnp.dtype(dtype).itemsize for term in form.products for dtype in term.dtypes)


# From factors ---------------------------------------------------------------------------------------------------------


def _sides_of(term: FactoredTerm, left: Any, right: Any) -> tuple[Any, Any]:
    """Both sides of a product as (examples, copies, summands, entries)."""
    if isinstance(term, Convolution):
        features, *rest = term.params["dimension_numbers"].rhs_spec
        moved = jnp.transpose(right, [0, *(axis + 1 for axis in (*rest, features))])
        return _windows_of(term, left), moved.reshape(right.shape[0], 1, term.summands, term.output_features)

    def side(array: Any, position: int) -> Any:
        batch, contract, free = term.batch[position], term.contract[position], term.free(position)
        order = [0, *(axis + 1 for axis in (*batch, *contract, *free))]
        return jnp.transpose(array, order).reshape(array.shape[0], term.copies, term.summands, -1)

    return side(left, 0), side(right, 1)


def _windows_of(term: Convolution, left: Any) -> Any:
    """The windows of the left side of a convolution, as (examples, 1, summands, entries)."""
    numbers, params = term.params["dimension_numbers"], term.params
    spatial = [term.shapes[1][axis] for axis in numbers.rhs_spec[2:]]

    def of_example(left: Any) -> Any:
        # (input features and positions in the window, positions of the window)
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


def _inner_products(left: Any, right: Any) -> Any:
    """The inner products of all vectors of one array with all of the other; both are (..., vectors, entries)."""
    batch = tuple(range(left.ndim - 2))
    dtype = sum_dtype(left.dtype, right.dtype)
    # Products of 16-bit numbers are exact in float32. The highest precision keeps others from being rounded first.
    return lax.dot_general(
        left,
        right.astype(left.dtype),
        (((left.ndim - 1,), (right.ndim - 1,)), (batch, batch)),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def _from_factors(form: GradientForm, per_term: list[TermArrays], strict: bool) -> Squares:
    """The square of a sum of outer products, as a sum over pairs of them."""
    rounded = None
    if len(per_term) > 1:
        pairs, lost = _pairs(per_term)
        if _is_narrow(form):
            lengths = _lengths(pairs)
            rounded = jnp.square(jnp.sum(lengths, axis=1)) if strict else jnp.sum(jnp.square(lengths), axis=1) / 4
        return _sum_over_pairs(pairs, rounded, lost)
    ((term, (left, right)),) = per_term
    first, second = _sides_of(term, left, right)
    if left.size > right.size:
        first, second = second, first  # `first` is the side that a weighted sum scales
    scale = term.path.scale**2
    is_single = first.shape[2] == 1  # then there are no pairs, and nothing that cancels
    one, other = (
        _square_of(side, from_axis=2) if is_single else _inner_products(side, side) for side in (first, second)
    )
    dtype = sum_dtype(one.dtype, other.dtype)
    one, other = one.astype(dtype), other.astype(dtype)
    if is_single:
        square, doubt = jnp.sum(one * other, axis=1), jnp.sum(_underflow(first, second, one, other), axis=1)
        return Squares(square * scale, doubt * scale, _slack(square, square if _is_narrow(form) else None) * scale)
    if _is_narrow(form):
        lengths, others = _lengths(one), _lengths(other)
        if strict:
            rounded = jnp.sum(jnp.abs(other) * lengths[..., :, None] * lengths[..., None, :], axis=(1, 2, 3))
        else:
            rounded = jnp.sum(jnp.square(lengths * others), axis=(1, 2)) / 4
    lost = _underflow(first, second, jnp.sum(_lengths(one) ** 2, -1), jnp.sum(_lengths(other) ** 2, -1))
    lost = first.shape[2] * jnp.sum(lost, axis=1)
    return Squares(*(each * scale for each in _sum_over_pairs(one * other, rounded, lost)))


def _underflow(first: Any, second: Any, one: Any, other: Any) -> Any:
    """The most that a product of squares loses where squares of small numbers are rounded to 0."""
    smallest = jnp.finfo(one.dtype).tiny * max(first.shape[-1], second.shape[-1])
    return smallest * (one + other)


def _sum_over_pairs(pairs: Any, rounded: Any | None, lost: Any) -> Squares:
    axes = tuple(range(1, pairs.ndim))
    square, magnitude = jnp.sum(pairs, axis=axes), jnp.sum(jnp.abs(pairs), axis=axes)
    doubt = _ROUNDING[jnp.dtype(pairs.dtype).itemsize] * magnitude + lost
    square = jnp.maximum(square, doubt)  # at least what may have been lost, so that it errs towards clipping
    return Squares(square, doubt, _slack(square, rounded))


def _lengths(products: Any) -> Any:
    """The lengths of vectors, from the matrix of their inner products."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, products.shape, products.ndim - last) for last in (2, 1))
    return jnp.sqrt(jnp.maximum(jnp.sum(jnp.where(rows == columns, products, 0), axis=-1), 0))


def _is_narrow(form: GradientForm) -> bool:
    """True if factors are rounded when they are scaled: bfloat16 is, and float16 is scaled in float32."""
    return any(jnp.dtype(dtype) == jnp.bfloat16 for term in form.products for dtype in term.dtypes)


def _slack(square: Any, rounded: Any | None) -> Any:
    """The most that the rounding of scaled factors adds to the square of a clipped gradient.

    Each entry is rounded by at most half a unit of its last bit. `rounded` is the square of the norm that the rounding
    errors would have if each entry were rounded by all of itself.
    """
    if rounded is None:
        return jnp.zeros_like(square)
    error = 2.0**-7.95 * jnp.sqrt(rounded)
    return 2 * jnp.sqrt(square) * error + jnp.square(error)


def _pairs(per_term: list[TermArrays]) -> tuple[Any, Any]:
    """The products of all pairs of outer products in several terms, and the most that they lose by underflow.

    They have the shapes (examples, summands, summands) and (examples,).
    """
    rows, columns, looked_up = [], [], []
    for term, arrays in per_term:
        if isinstance(term, Product):
            left, right = (side[:, 0] for side in _sides_of(term, *arrays))
            assert term.path.axes is not None
            first_on_left = term.path.axes[0] < len(term.free(0))
            row, column = (left, right) if first_on_left else (right, left)
            rows.append(row)
            columns.append(column * jnp.asarray(term.path.scale, column.dtype))
        else:
            looked_up.append((term, arrays))
    dense = _joined_sides(rows)
    of_rows = _inner_products(dense, dense)
    if looked_up:
        index, updates = _joined_lookups(looked_up)
        columns.append(updates)
        between = jnp.take_along_axis(dense, index[:, None, :], axis=2, mode="fill", fill_value=0).astype(of_rows.dtype)
        same = index[:, :, None] == index[:, None, :]
        top = jnp.concatenate([of_rows, between], axis=2)
        bottom = jnp.concatenate([jnp.swapaxes(between, 1, 2), same.astype(of_rows.dtype)], axis=2)
        of_rows = jnp.concatenate([top, bottom], axis=1)
    all_columns = _joined_sides(columns)
    of_columns = _inner_products(all_columns, all_columns)
    of_rows = of_rows.astype(sum_dtype(of_rows.dtype, of_columns.dtype))
    traces = (jnp.sum(_lengths(each) ** 2, axis=-1) for each in (of_rows, of_columns.astype(of_rows.dtype)))
    lost = all_columns.shape[1] * _underflow(dense, all_columns, *traces)
    return of_rows * of_columns.astype(of_rows.dtype), lost


def _joined_sides(sides: Sequence[Any]) -> Any:
    """The vectors of several terms, (examples, vectors, entries), joined in memory.

    On a GPU, XLA would join them inside the kernel of their products, which then holds both sides twice. For GPT-2,
    that was more shared memory than an H200 has, and did not compile.
    """
    dtype = common_dtype(*(side.dtype for side in sides))
    joined = jnp.concatenate([side.astype(dtype) for side in sides], axis=1)
    return lax.optimization_barrier(joined) if len(sides) > 1 else joined


# From looked-up rows --------------------------------------------------------------------------------------------------


def rows_of(term: Lookups, index: Any, update: Any) -> tuple[Any, Any]:
    """The indices and rows of the examples, (examples, number) and (examples, number, entries)."""
    index = index.reshape(index.shape[0], -1)
    index = index.astype(common_dtype(index.dtype, jnp.int32))  # a narrow dtype may not hold the size of the table
    if term.clips:
        index = jnp.clip(index, 0, term.shape[0] - 1)
    # A scatter drops negative indices. JAX's indexing would count them from the end of the table.
    index = jnp.where(index < 0, term.shape[0], index)
    rows = update.reshape(*index.shape, -1)
    rows = jnp.where((index < term.shape[0])[:, :, None], rows, jnp.zeros_like(rows))
    return index, rows * jnp.asarray(term.path.scale, rows.dtype)


def _joined_lookups(looked_up: list[TermArrays]) -> tuple[Any, Any]:
    """The indices and rows of several terms: (examples, number), (examples, number, entries)."""
    pairs = [rows_of(term, *arrays) for term, arrays in looked_up]
    dtype = common_dtype(*(rows.dtype for _, rows in pairs))
    return (
        jnp.concatenate([index for index, _ in pairs], axis=1),
        jnp.concatenate([rows.astype(dtype) for _, rows in pairs], axis=1),
    )


def _square_of_rows(index: Any, rows: Any) -> Any:
    """The squared norm of tables that are 0 except for these rows. Needs neither a table nor a matrix of pairs."""
    if not index.shape[1]:
        return jnp.zeros(index.shape[0], sum_dtype(rows.dtype))

    def of_example(index: Any, rows: Any) -> Any:
        return jnp.sum(jnp.square(_sum_by_index(index, rows)[1]))

    return jax.vmap(of_example)(index, rows.astype(sum_dtype(rows.dtype)))


def _square_with_rows(direct: TermArrays, looked_up: list[TermArrays]) -> Any:
    """The squared norm of tables that are kept, plus looked-up rows.

    It is the sum of squares of the table's rows that no index names, and of the sums at those that an index does.
    """
    term, (array,) = direct
    index, rows = _joined_lookups(looked_up)
    table = jax.vmap(term.path)(array) if term.path.rearranges else array * jnp.asarray(term.path.scale, array.dtype)
    table = table.reshape(*table.shape[:2], -1)
    dtype = sum_dtype(table.dtype, rows.dtype)

    def of_example(table: Any, index: Any, rows: Any) -> Any:
        index, summed = _sum_by_index(index, rows.astype(dtype))
        alone = jnp.sum(jnp.square(table.astype(dtype)), axis=1).at[index].set(0, mode="drop")
        named = jnp.take(table, index, axis=0, mode="fill", fill_value=0).astype(dtype)
        return jnp.sum(alone) + jnp.sum(jnp.square(named + summed))

    return jax.vmap(of_example)(table, index, rows)


def _sum_by_index(index: Any, rows: Any) -> tuple[Any, Any]:
    """Sums of the rows with the same index, each at the position of one of them.

    All other positions get an index beyond any table, and a row of zeros.
    """
    number = index.shape[0]
    beyond = jnp.full_like(index, jnp.iinfo(index.dtype).max)
    if number <= _FEW_INDICES:
        first = jnp.argmax(index[:, None] == index[None, :], axis=1)
        summed = jnp.zeros_like(rows).at[first].add(rows)
        return jnp.where(first == jnp.arange(number), index, beyond), summed
    order = jnp.argsort(index)
    index, rows = index[order], rows[order]
    segment = jnp.cumsum(jnp.concatenate([jnp.zeros(1, bool), index[1:] != index[:-1]]))
    summed = jax.ops.segment_sum(rows, segment, num_segments=number, indices_are_sorted=True)
    return beyond.at[segment].set(index), summed
