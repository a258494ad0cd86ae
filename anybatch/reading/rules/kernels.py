"""Rules of kernels for accelerators: cuDNN's attention, and Pallas."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from anybatch.jaxprs import interpreter
from anybatch.jaxprs.graph import Node
from anybatch.reading.reader import Reader, RuleResult, rule
from anybatch.reading.states import SUMMED, Batched, NotRowwise, State, common_rows, replaced

_NUM_FORWARD_OPERANDS = 10  # query, key, value, bias, lengths, offsets and page tables


@rule("dot_product_attention_fwd_wrapper", linear=False)
def _cudnn_forward(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows, takes = _cudnn_operands(reader, node, states)
    return RuleResult([rows] * len(node.outputs), takes)


@rule("dot_product_attention_bwd_wrapper", linear=False)
def _cudnn_backward(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    rows, takes = _cudnn_operands(reader, node, states)
    found: list[State] = [rows] * len(node.outputs)
    if len(found) > 3:  # the gradient of a bias: batched if each example has a bias, summed if they share one
        found[3] = rows if takes[3] is not None else SUMMED
    return RuleResult(found, takes)


def _cudnn_operands(reader: Reader, node: Node, states: Sequence[State]) -> tuple[Batched, list[Batched | None]]:
    """The state of the operands, with the examples along axis 0, and what a microbatch takes of invariant ones."""
    rows = common_rows(states)
    if rows.axis != 0:
        raise NotRowwise("it attends from one example to another")
    if node.params["dropout_rate"]:
        raise NotRowwise("cuDNN draws its dropout by the position in the batch: apply dropout outside the kernel")
    if node.params.get("score_mod") is not None:
        raise NotRowwise("it changes the scores by a user's function")
    page_tables = node.inputs[8:_NUM_FORWARD_OPERANDS]
    if any(value.ndim > 1 for value in page_tables):
        raise NotRowwise("its keys and values are in pages that examples share")
    length = rows.length(reader.num_examples)
    return rows, [rows if value.ndim and value.shape[0] == length else None for value in node.inputs]


@rule("pallas_call", linear=False)
def _pallas(reader: Reader, node: Node, states: Sequence[State]) -> RuleResult:
    """A kernel over a grid with an axis for the examples, where each example has its own block."""
    params, mapping = node.params, node.params["grid_mapping"]
    simple = (
        not mapping.num_index_operands
        and not mapping.scratch_avals  # the next step may read what one step writes there
        and not params.get("input_output_aliases")
        and all(isinstance(size, int) for size in mapping.grid)
        and len(mapping.block_mappings) == len(node.inputs) + len(node.outputs)
    )
    if not simple:
        raise NotRowwise("it is a kernel whose steps may depend on one another")
    blocks = [*mapping.block_mappings]
    rows = common_rows([state.at(0) if isinstance(state, Batched) else state for state in states])
    grid_axis = next(
        _grid_axis(block, operand.axis)
        for block, operand in zip(blocks, states, strict=False)
        if isinstance(operand, Batched)
    )
    axes: list[int | None] = []
    num_inputs = len(node.inputs)
    for position, block in enumerate(blocks):
        axis = _axis_along_grid(block, grid_axis)
        state = states[position] if position < num_inputs else None
        if isinstance(state, Batched) and axis != state.axis:
            raise NotRowwise("it is a kernel that reads other examples")
        if state is None and axis is None:
            raise NotRowwise("it is a kernel that combines examples")
        axes.append(axis)
    length = rows.length(reader.num_examples)
    if mapping.grid[grid_axis] != length or _asks_for_position(params["jaxpr"], mapping, grid_axis):
        raise NotRowwise("it is a kernel that asks for the position of an example")
    takes = [None if axis is None else rows.at(axis) for axis in axes[:num_inputs]]

    def smaller(size: int) -> dict[str, Any]:
        local = rows.length(size)

        def shrunk(aval: Any, axis: int | None) -> Any:
            return aval if axis is None else aval.update(shape=replaced(aval.shape, axis, local))

        shrunk_blocks = tuple(
            block.replace(array_aval=shrunk(block.array_aval, axis)) for block, axis in zip(blocks, axes, strict=True)
        )
        grid = replaced(mapping.grid, grid_axis, local)
        results = tuple(shrunk(aval, axis) for aval, axis in zip(params["out_avals"], axes[num_inputs:], strict=True))
        smaller_mapping = dataclasses.replace(mapping, grid=grid, block_mappings=shrunk_blocks)
        return {**params, "grid_mapping": smaller_mapping, "out_avals": results}

    return RuleResult([rows.at(axis) for axis in axes[num_inputs:] if axis is not None], takes, params=smaller)


def _block_size(block: Any, axis: int) -> int:
    size = block.block_shape[axis]
    return getattr(size, "block_size", 1 if size is None or type(size).__name__ == "Squeezed" else size)


def _grid_axis(block: Any, axis: int) -> int:
    """The axis of the grid that counts the blocks along `axis`."""
    jaxpr = interpreter.opened(block.index_map_jaxpr)
    index = jaxpr.outvars[axis]
    if interpreter.is_literal(index) or index not in jaxpr.invars:
        raise NotRowwise("it is a kernel whose blocks hold several examples")
    return jaxpr.invars.index(index)


def _axis_along_grid(block: Any, grid_axis: int) -> int | None:
    """The axis of an array along which an axis of the grid counts rows; None if blocks do not depend on it."""
    jaxpr = interpreter.opened(block.index_map_jaxpr)
    counter = jaxpr.invars[grid_axis]
    if any(operand is counter for equation in jaxpr.eqns for operand in equation.invars):
        raise NotRowwise("it is a kernel that computes which examples to read")
    axes = [axis for axis, index in enumerate(jaxpr.outvars) if index is counter]
    if not axes:
        return None
    if len(axes) > 1 or _block_size(block, axes[0]) != 1:
        raise NotRowwise("it is a kernel whose blocks hold several examples")
    return axes[0]


def _asks_for_position(kernel: Any, mapping: Any, grid_axis: int) -> bool:
    """Whether the kernel reads the index of its example, or the number of examples."""
    if grid_axis in mapping.vmapped_dims:
        return False  # vmap added the axis: the kernel was written for one example
    axis = grid_axis - sum(hidden < grid_axis for hidden in mapping.vmapped_dims)
    return any(
        equation.primitive.name in ("program_id", "num_programs") and equation.params["axis"] == axis
        for equation in interpreter.walk(kernel)
    )
