"""Rules of operations along axes: reductions, sorting, products of matrices, convolutions, windows, linear algebra."""

from collections.abc import Sequence
from typing import Any

from jax import lax

from anybatch.jaxprs.graph import Node
from anybatch.reading.reader import Fact, Reader, RuleResult, rule
from anybatch.reading.rules import indexing
from anybatch.reading.rules.elementwise import all_sums, without
from anybatch.reading.states import INVARIANT, SUMMED, Batched, NotRowwise, State, common_rows, refuse_sums


def _reduced_axes(node: Node) -> list[int]:
    axes = node.params["axes"] if "axes" in node.params else node.params["dimensions"]
    return [axis % node.inputs[0].ndim for axis in axes]


@rule("reduce_sum", linear=True)
def _sum(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows, axes = common_rows(states), _reduced_axes(node)
    return RuleResult([SUMMED if rows.axis in axes else rows.at(without(axes, rows.axis))])


@rule("psum")
def _psum(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """`vmap` with an axis name turns a psum into one over positions. One over mesh axes belongs to the head."""
    axes = node.params["axes"]
    if any(not isinstance(axis, int) for axis in axes) or node.params.get("axis_index_groups") is not None:
        raise NotRowwise("it adds up over the devices of a mesh")
    if SUMMED in states:
        if all_sums(reader, node.inputs, states):
            return RuleResult([SUMMED] * len(node.outputs))
        refuse_sums(states)
    rows = common_rows(states)
    state = SUMMED if rows.axis in axes else rows.at(without(axes, rows.axis))
    return RuleResult([state] * len(node.outputs), [rows] * len(states))


@rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", linear=False)
@rule("argmax", "argmin", "reduce", linear=False)
def _reduction(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows, axes = common_rows(states), _reduced_axes(node)
    num_operands = len(node.inputs) // 2 if node.name == "reduce" else len(node.inputs)
    if any(state != INVARIANT for state in states[num_operands:]):
        raise NotRowwise("it starts a reduction from a value of the batch")
    if rows.axis in axes:
        name = node.name.removeprefix("reduce_")
        words = {"and": "asks something of all examples", "or": "asks something of all examples"}
        raise NotRowwise(f"it {words.get(name, f'takes the {name} over the examples')}")
    takes = [*[rows] * num_operands, *[None] * (len(states) - num_operands)]
    return RuleResult([rows.at(without(axes, rows.axis))] * len(node.outputs), takes)


def _axes_along(node: Node) -> Sequence[int]:
    """The axes that an operation with one operand works along, if its results have the axes of the operand."""
    ndim, params = node.inputs[0].ndim, node.params
    if node.name == "fft":
        return range(ndim - len(params["fft_lengths"]), ndim)
    if node.name == "rev":
        return params["dimensions"]
    return [params.get("axis", params.get("reduction_dimension", -1)) % ndim]


_ALONG_THE_BATCH = {
    "rev": "it reverses the order of the examples",
    "fft": "it transforms along the batch",
    "top_k": "it picks the largest of the examples",
    "approx_top_k": "it picks the largest of the examples",
}


@rule("rev", "cumsum", "fft", linear=True)
@rule("cumprod", "cummax", "cummin", "cumlogsumexp", "top_k", "approx_top_k", linear=False)
def _along_other_axes(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows = common_rows(states)
    if rows.axis in _axes_along(node):
        raise NotRowwise(_ALONG_THE_BATCH.get(node.name, "it runs from one example to the next"))
    return RuleResult([rows] * len(node.outputs))


@rule("sort", linear=False)
def _sort(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows = common_rows(states)
    if node.params["dimension"] == rows.axis:
        return indexing.sort_rows(reader, node, states)
    return RuleResult([rows] * len(node.outputs), [rows] * len(states))


@rule("dot_general")
def _dot(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    if SUMMED in states:
        if INVARIANT in states:
            return RuleResult([SUMMED])
        refuse_sums(states)
    (contracted, batched) = node.params["dimension_numbers"]
    free = [
        [axis for axis in range(value.ndim) if axis not in contracted[side] and axis not in batched[side]]
        for side, value in enumerate(node.inputs)
    ]

    def role(side: int, axis: int) -> tuple[str, int]:
        """The role of an axis in the product, and its position in the result or among the axes of that role."""
        if axis in contracted[side]:
            return "contracted", list(contracted[side]).index(axis)
        if axis in batched[side]:
            return "batched", list(batched[side]).index(axis)
        return "free", len(batched[0]) + (len(free[0]) if side else 0) + free[side].index(axis)

    sides = [(side, state) for side, state in enumerate(states) if isinstance(state, Batched)]
    roles = [role(side, state.axis) for side, state in sides]
    (kind, position), rows = roles[0], sides[0][1]
    if len(sides) == 2:
        if "free" in (roles[0][0], roles[1][0]):
            raise NotRowwise("it multiplies every example with every other")
        if roles[0] != roles[1] or rows.at(0) != sides[1][1].at(0):
            raise NotRowwise("it brings different examples together")
        return RuleResult([SUMMED if kind == "contracted" else rows.at(position)])
    if kind == "free":
        return RuleResult([rows.at(position)])
    other = 1 - sides[0][0]
    takes: list[Batched | None] = [None, None]
    takes[other] = rows.at((contracted if kind == "contracted" else batched)[other][position])
    return RuleResult([SUMMED if kind == "contracted" else rows.at(position)], takes)


@rule("ragged_dot_general")
def _ragged_dot(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """A product of rows in groups, with a matrix for each group."""
    numbers = node.params["ragged_dot_dimension_numbers"]
    if states[2] == SUMMED:
        return indexing.multiply_groups(reader, node, states)
    (_, (batched_lhs, batched_rhs)) = numbers.dot_dimension_numbers
    refuse_sums(states)
    rows = common_rows([state.at(0) if isinstance(state, Batched) else state for state in states])
    group_sizes = node.inputs[2]
    for position, (lhs_axis, rhs_axis) in enumerate(zip(batched_lhs, batched_rhs, strict=True)):
        axes = (lhs_axis, rhs_axis, position if group_sizes.ndim > 1 else None)
        fits = [
            state == INVARIANT or (isinstance(state, Batched) and state.axis == axis)
            for state, axis in zip(states, axes, strict=True)
        ]
        if all(fits):
            takes = [None if axis is None else rows.at(axis) for axis in axes]
            return RuleResult([rows.at(position)], takes)
    raise NotRowwise("it multiplies examples in groups that are formed across the batch")


@rule("conv_general_dilated", linear=True)
def _convolution(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    numbers, params = node.params["dimension_numbers"], node.params
    image, kernel = states
    is_ungrouped = kernel == INVARIANT and params["batch_group_count"] == 1
    if is_ungrouped and isinstance(image, Batched) and image.axis == numbers.lhs_spec[0]:
        return RuleResult([image.at(numbers.out_spec[0])])
    # A kernel for each example: `vmap` makes the examples groups of channels, the example first.
    channels, groups = (numbers.lhs_spec[1], numbers.rhs_spec[0]), params["feature_group_count"]
    fits = [
        state == INVARIANT or (isinstance(state, Batched) and state.axis == axis and state.outer == 1)
        for state, axis in zip(states, channels, strict=True)
    ]
    if not all(fits) or groups % reader.num_examples or params["batch_group_count"] != 1:
        raise NotRowwise("it convolves across the examples, or with kernels that depend on them")
    per_example = groups // reader.num_examples
    takes = [
        Batched(axis, 1, value.shape[axis] // reader.num_examples)
        for axis, value in zip(channels, node.inputs, strict=True)
    ]
    axis = numbers.out_spec[1]
    rows = Batched(axis, 1, node.outputs[0].shape[axis] // reader.num_examples)
    return RuleResult([rows], takes, params=lambda size: {**params, "feature_group_count": per_example * size})


@rule("reduce_window_sum", linear=True)
@rule("reduce_window", "reduce_window_max", "reduce_window_min", linear=False)
@rule("select_and_gather_add", "select_and_scatter_add", linear=False)  # the derivatives of pooling
def _window(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows, params = common_rows(states), node.params
    num_operands = len(node.outputs) if node.name == "reduce_window" else len(node.inputs)
    if any(state != INVARIANT for state in states[num_operands:]):
        raise NotRowwise("it starts a reduction from a value of the batch")
    sizes = [params[name] for name in ("window_dimensions", "window_strides", "base_dilation") if name in params]
    if any(size[rows.axis] != 1 for size in sizes) or tuple(params["padding"][rows.axis]) != (0, 0):
        raise NotRowwise("its window covers several examples")
    takes = [*[rows] * num_operands, *[None] * (len(states) - num_operands)]
    return RuleResult([rows] * len(node.outputs), takes)


# The number of last axes of each operand that an operation works along; two unless it is named here.
_CORE_AXES = {"lu_pivots_to_permutation": (1,), "tridiagonal_solve": (1, 1, 1, 2), "householder_product": (2, 1)}


@rule("cholesky", "lu", "qr", "geqrf", "geqp3", "eigh", "svd", "eig", "householder_product", linear=False)
@rule("tridiagonal_solve", "lu_pivots_to_permutation", "schur", "hessenberg", "tridiagonal", "ormqr", linear=False)
@rule("eigvalsh", "cholesky_update", "symmetric_product", linear=False)
def _matrices(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows = common_rows(states)
    core = _CORE_AXES.get(node.name, (2,) * len(node.inputs))
    inside = [rows.axis >= value.ndim - axes for value, axes in zip(node.inputs, core, strict=False)]
    if any(inside) or any(rows.axis >= output.ndim for output in node.outputs):
        raise NotRowwise("its matrices are made of several examples")
    return RuleResult([rows] * len(node.outputs), [rows] * len(states))


@rule("triangular_solve")
def _triangular_solve(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """One matrix for all examples, which are columns of the right-hand side; or a matrix for each example."""
    matrix, side = states
    free = node.inputs[1].ndim - (1 if node.params["left_side"] else 2)
    if matrix == INVARIANT and isinstance(side, Batched) and side.axis == free:
        return RuleResult([side])
    if matrix == INVARIANT and side == SUMMED:
        return RuleResult([SUMMED])
    refuse_sums(states)
    return _matrices(reader, node, states)


@rule("custom_linear_solve", linear=False)
def _linear_solve(  # noqa: C901 - the four functions of a solver, one after the other
    reader: Reader, node: Node, states: Sequence[State]
) -> RuleResult:
    """A solver that is given as functions. Each of them must run per microbatch."""
    lengths, jaxprs = node.params["const_lengths"], node.params["jaxprs"]
    num_consts = sum(lengths)
    sides, rows = node.inputs[num_consts:], common_rows(states)
    found = list(states[num_consts:])
    for position, (value, state) in enumerate(zip(sides, found, strict=True)):
        if state == INVARIANT and value.ndim > rows.axis and value.shape[rows.axis] == rows.length(reader.num_examples):
            found[position] = rows
        elif state not in (INVARIANT, rows):
            raise NotRowwise("it solves for several examples together")
    parts: dict[str, tuple[Reader, int, int]] = {}
    first = 0
    for name in ("matvec", "vecmat", "solve", "transpose_solve"):
        length, jaxpr = getattr(lengths, name), getattr(jaxprs, name)
        if jaxpr is not None:
            consts = [
                Fact(state, True, value.is_inexact)
                for value, state in zip(node.inputs[first : first + length], states[first:], strict=False)
            ]
            inner = reader.nested(node, jaxpr, [*consts, *(Fact(state, True, True) for state in found)])
            if len(inner.graph.outputs) != len(sides):
                raise NotRowwise("its solver returns more than the solution")
            for got, goal in zip(inner.output_states(), found, strict=True):
                if got != goal and not (got == INVARIANT and isinstance(goal, Batched)):
                    raise NotRowwise("it solves for several examples together")
            parts[name] = (inner, first, length)
        first += length

    def run(microbatch: Any) -> list[Any]:
        consts = [microbatch.value(value) for value in node.inputs[:num_consts]]
        right = [
            microbatch.value(value, state if isinstance(state, Batched) else None)
            for value, state in zip(sides, found, strict=True)
        ]

        def function(name: str) -> Any:
            if name not in parts:
                return None
            inner, first, length = parts[name]
            return lambda x: microbatch.nested(inner, [*consts[first : first + length], *x], found)

        solve, transpose = function("solve"), function("transpose_solve")
        return lax.custom_linear_solve(
            function("matvec"),
            right,
            lambda _, x: solve(x),
            (lambda _, x: transpose(x)) if transpose else None,
        )

    return RuleResult(found, run=run, scales=all(inner.scales for inner, _, _ in parts.values()))
