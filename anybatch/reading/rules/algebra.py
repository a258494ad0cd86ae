"""Linear algebra and transforms: matrices on the last two axes, a matrix for each example."""

from collections.abc import Sequence
from typing import Any

from jax import lax

from anybatch.reading.graph import Node
from anybatch.reading.reader import Fact, Outcome, Reader
from anybatch.reading.rules.shapes import takes_of
from anybatch.reading.rules.table import rule
from anybatch.reading.states import SUM, WHOLE, NotRowwise, Rows, State, only_rows, refuse_sums

# How many of its last axes an operation works along; two unless named here.
_CORE_AXES = {"lu_pivots_to_permutation": (1,), "tridiagonal_solve": (1, 1, 1, 2), "householder_product": (2, 1)}


@rule("cholesky", "lu", "qr", "geqrf", "geqp3", "eigh", "svd", "eig", "householder_product")
@rule("tridiagonal_solve", "lu_pivots_to_permutation", "schur", "hessenberg", "tridiagonal", "ormqr", "eigvalsh")
@rule("cholesky_update", "symmetric_product")
def _matrices(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    refuse_sums(states)
    rows = only_rows(states)
    core = _CORE_AXES.get(node.name, (2,) * len(node.inputs))
    for value, axes in zip(node.inputs, core, strict=False):
        if rows.axis >= value.ndim - axes:
            raise NotRowwise("its matrices are made of several examples")
    if any(rows.axis >= output.ndim for output in node.outputs):
        raise NotRowwise("its matrices are made of several examples")
    return Outcome([rows] * len(node.outputs), takes_of(rows, states))


@rule("triangular_solve")
def _triangular_solve(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    """One matrix for all examples, which are the columns of the right-hand side; or a matrix for each."""
    matrix, side = states
    free = node.inputs[1].ndim - (1 if node.params["left_side"] else 2)
    if matrix == WHOLE and isinstance(side, Rows) and side.axis == free:
        return Outcome([side])
    if matrix == WHOLE and side == SUM:
        return Outcome([SUM])
    return _matrices(reader, node, states)


@rule("fft")
def _fft(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    if states[0] == SUM:
        return Outcome([SUM])
    rows = only_rows(states)
    if rows.axis >= node.inputs[0].ndim - len(node.params["fft_lengths"]):
        raise NotRowwise("it transforms along the batch")
    return Outcome([rows])


@rule("custom_linear_solve")
def _linear_solve(reader: Reader, node: Node, states: Sequence[State]) -> Outcome:
    """A solver that is given as functions: each of them must keep the examples apart."""
    refuse_sums(states)
    lengths, jaxprs = node.params["const_lengths"], node.params["jaxprs"]
    num_consts = sum(lengths)
    sides, rows = node.inputs[num_consts:], only_rows(states)
    found = list(states[num_consts:])
    for position, (value, state) in enumerate(zip(sides, found, strict=True)):
        if state == WHOLE and value.ndim > rows.axis and value.shape[rows.axis] == rows.length(reader.num_examples):
            found[position] = rows
        elif state not in (WHOLE, rows):
            raise NotRowwise("it solves for several examples at once")
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
                raise NotRowwise("it solves with results beside the solution")
            for got, goal in zip(inner.output_states(), found, strict=True):
                if got != goal and not (got == WHOLE and isinstance(goal, Rows)):
                    raise NotRowwise("it solves for several examples at once")
            parts[name] = (inner, first, length)
        first += length

    def run(microbatch: Any) -> list[Any]:
        consts = [microbatch.value(value) for value in node.inputs[:num_consts]]
        right = [
            microbatch.value(value, state if isinstance(state, Rows) else None)
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

    return Outcome(found, run=run)
