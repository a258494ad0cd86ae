"""Computes the regions of a program block by block, forward and backward, so that their big values never exist in full.

`regions.py` finds the regions. `BlockedProgram` runs a program with them. A region is a loop over blocks of
rows. If the cotangents of its results are known before it runs, the gradient is taken in the same loop, and nothing is
computed twice: this holds for the losses of a language model, whose cotangents are weights of tokens. Otherwise the
backward pass is a second loop, which computes each block again.

The cotangents are passed to the program as further arguments. A region passes them to a `custom_vjp`, whose forward
rule computes the gradient and whose backward rule returns it. So the gradient is exact only if the program is then
differentiated with just these cotangents, as `gradients/accumulate.py` does.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.call.checks import warn
from anybatch.call.loss import TracedLoss
from anybatch.call.memory import readable
from anybatch.errors import AnybatchError, RuleFailedWarning
from anybatch.jaxprs import avals, interpreter, source, tracing
from anybatch.jaxprs.graph import Node, Value, num_bytes, sources
from anybatch.jaxprs.primitives import FUSED, REMAT
from anybatch.reading.block_loop import BlockLoop, OverRows, here, summed_in
from anybatch.reading.evaluation import Examples
from anybatch.reading.regions import Region, Regions, weight
from anybatch.reading.split import HEAVY, PrefixInputs, Split
from anybatch.reading.states import Batched, take_rows

# How many times more bytes the big values of a region must have than what it reads and writes by rows, unless the user
# asks for blocks.
LEAST_GAIN = 4
SHARE = 8  # a value is big if it has more than this share of the bytes of the largest


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which inputs of a program depend on the examples, and which it is differentiated with respect to."""

    of_data: tuple[bool, ...]
    moves: tuple[bool, ...]

    @classmethod
    def of_loss(cls, loss: TracedLoss) -> Self:
        """The roles of the arguments of a loss."""
        roles = [role for role, types in zip(loss.types._fields, loss.types, strict=True) for _ in types]
        return cls(tuple(role == "batch" for role in roles), tuple(role == "wrt" for role in roles))

    def after(self, consts: Sequence[Any]) -> Self:
        """The roles of a program that takes arrays that it closes over as its first inputs."""
        first = (False,) * len(consts)
        return type(self)((*first, *self.of_data), (*first, *self.moves))


def in_blocks(
    traced: tracing.Traced,
    const_types: Sequence[Any],
    roles: Roles,
    block_size: int,
    differentiated: Sequence[int] | None,
    copies: Mapping[int, int] | None = None,
) -> tuple[tracing.Traced, list[int]]:
    """The same program, with its big values computed in blocks; and the arguments that it accumulates gradients of.

    An argument that a region reads in full may have a second copy among the arguments. Then the region reads that copy,
    and adds the gradient to an accumulator, a further argument that is returned as a further output. The first copy
    gets the other part of the gradient from JAX. So there is no second buffer for the gradient of an embedding.

    Args:
      traced: the program.
      const_types: the types of the arrays that it closes over.
      roles: the roles of its arguments.
      block_size: the number of rows of a block.
      differentiated: the positions of the outputs that are differentiated. The result takes their cotangents as further
        arguments, and must be differentiated with just these. None for a program that is not differentiated.
      copies: for the arguments that have a second copy, the position of the copy.
    """
    types = [avals.abstract(variable.aval) for variable in traced.arguments]
    number = len(const_types) + len(types)
    program = program_in_blocks(traced, roles.after(const_types), block_size, differentiated or ())
    more = [avals.abstract(traced.out_avals[position]) for position in differentiated or ()]
    first = len(const_types)
    accumulated = [] if program is None else [each for each in program.accumulated(first) if each in (copies or {})]
    more += [types[each].update(dtype=summed_in(types[each].dtype)) for each in accumulated]

    def of_arrays(*flat: Any) -> list[Any]:
        if program is None:
            return traced(flat[:first], *flat[first:number])
        if differentiated is None:
            return program(flat)
        cotangents, totals = flat[number : number + len(differentiated)], flat[number + len(differentiated) :]
        inputs = [(first + each, flat[first + copies[each]]) for each in accumulated] if copies else []
        run = program.start(
            flat[:number],
            cotangents,
            {position: (copy, total) for (position, copy), total in zip(inputs, totals, strict=True)},
        )
        return [*run.outputs(), *run.totals.values()]

    retraced = tracing.retrace(of_arrays, const_types, [*types, *more])
    return dataclasses.replace(retraced, bound=traced.bound), accumulated


def blocked(
    fun: Callable[..., list[Any]],
    arrays: Sequence[list[Any]],
    roles: Roles,
    block_size: int,
    over_rows: OverRows | None = None,
) -> Callable[..., list[Any]]:
    """A function of lists of arrays whose first output is a loss, with its big values computed in blocks.

    The result must be differentiated with a cotangent of 1 for the loss. `over_rows` divides the rows of a region among
    devices, which each run a loop over the blocks of their rows; None for a single loop over all rows.
    """
    leaves, tree = jax.tree.flatten(tuple(arrays))
    traced, consts = tracing.trace(lambda *flat: fun(*jax.tree.unflatten(tree, flat)), *leaves)
    program = program_in_blocks(traced, roles.after(consts), block_size, [0], over_rows)
    if program is None:
        return fun

    def in_blocks(*arrays: Any) -> list[Any]:
        one = jnp.ones(traced.out_avals[0].shape, traced.out_avals[0].dtype)
        return program([*consts, *jax.tree.leaves(arrays)], differentiable=True, cotangents=[one])

    return in_blocks


def program_in_blocks(
    traced: tracing.Traced, roles: Roles, block_size: int, losses: Sequence[int], over_rows: OverRows | None = None
) -> "BlockedProgram | None":
    """The program with its big values in blocks; None if it has none, or prints, or if looking for them failed."""
    if traced.has_effects:
        return None
    try:
        program = BlockedProgram(traced.jaxpr, roles, block_size, losses, least_gain=1, over_rows=over_rows)
        return program if program.has_blocks and program.cotangent_programs is not None else None
    except AnybatchError:
        raise
    except Exception as error:  # an error in anybatch must not lead to an error for the user
        warn(
            f"anybatch failed to divide a loss into blocks ({type(error).__name__}: {error}).\nThe gradient is exact "
            "all the same. Big values are computed in full, which takes more memory. Please report it with the loss.",
            RuleFailedWarning,
        )
        return None


@dataclasses.dataclass(frozen=True)
class WideValue:
    """A value that is much larger than what it is computed from, and whether blocks can compute it.

    Args:
      shape: its shape; that of one example, if it is computed per microbatch.
      dtype: its dtype.
      bytes: its bytes.
      axis: the axis of its rows, which are computed in blocks; None if it has to be computed in full.
      per_example: whether every example has such a value. Otherwise it is one of the full batch.
      file: the source file of the user that computes it.
      line: the line in that file.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    axis: int | None
    per_example: bool
    file: str = ""
    line: int = 0

    @property
    def num_rows(self) -> int:
        """The number of rows that blocks divide; 1 if it is computed in full."""
        return 1 if self.axis is None else self.shape[self.axis]

    def __str__(self) -> str:
        place = f" ({self.file}:{self.line})" if self.file else ""
        size = f"{readable(self.bytes)} as {self.dtype}[{','.join(map(str, self.shape))}]{place}"
        each = " for each example" if self.per_example else ""
        if self.axis is None:
            return f"{size}{each}, which has to be computed in full"
        rows = max(1, 1 << ((self.num_rows // 8).bit_length() - 1)) if self.num_rows >= 8 else 1
        return f"{size}{each}, in blocks of rows along axis {self.axis}, e.g. with block_size={rows}"


class BlockedProgram:
    """Runs a program with its big values, such as logits, computed in blocks of rows.

    Args:
      jaxpr: the program.
      roles: the roles of its inputs.
      block_size: the number of rows of a block.
      losses: the positions of the outputs that are differentiated.
      least_gain: how many times more bytes the big values of a region must have than what it reads and writes by rows.
      threshold: a value with more bytes than this is big; None to derive it from the largest value.
      is_survey: whether one of several big values of the same line and shape is enough, as for a report.
      over_rows: what divides the rows of a region among devices; None for a single loop over all rows. With it, big
        values inside loops are computed in full, and so are those inside checkpoints unless their results are small.
    """

    threshold: int
    regions: Regions
    nested: dict[Node, "BlockedProgram"]
    _is_sliced: bool

    def __init__(
        self,
        jaxpr: Any,
        roles: Roles,
        block_size: int,
        losses: Sequence[int],
        *,
        least_gain: float = LEAST_GAIN,
        threshold: int | None = None,
        is_survey: bool = False,
        over_rows: OverRows | None = None,
    ) -> None:
        self.block_size, self.losses, self.over_rows = block_size, list(losses), over_rows or here
        self._least_gain, self._is_survey = least_gain, is_survey
        largest = largest_value(jaxpr, roles.of_data)
        self._find(jaxpr, roles, largest // SHARE if threshold is None else threshold)
        in_full = self._largest_in_full()
        if in_full > largest // 2 > self.threshold:
            # Hidden states may be nearly as large as logits. With a higher threshold, they are not big themselves.
            found = self.threshold, self.regions, self._is_sliced
            self._find(jaxpr, roles, largest // 2)
            if self._largest_in_full() >= in_full:
                self.threshold, self.regions, self._is_sliced = found
        self.nested = self._blocked_inside() if over_rows is None else {}

    def _find(self, jaxpr: Any, roles: Roles, threshold: int) -> None:
        """Finds the regions of a program, in which values with more bytes than the threshold are big."""
        self.threshold, self._is_sliced = max(1, threshold), False
        opened = _checkpoints_to_open(jaxpr, self.threshold)
        options = {"is_survey": self._is_survey, "divides_rows": self.over_rows is not here}
        regions = Regions(jaxpr, roles.of_data, roles.moves, self.threshold, self.losses, opened, **options)
        while regions.slices:  # the program in which slices are taken first
            self.regions, self.nested, self._is_sliced = regions, {}, True
            types = [value.type for value in regions.graph.inputs]
            jaxpr = tracing.close(lambda *flat: self(flat), types)
            regions = Regions(jaxpr, roles.of_data, roles.moves, self.threshold, self.losses, None, **options)
        self.regions = regions
        regions.keep(self._gains)

    def _largest_in_full(self) -> int:
        """The bytes of the largest value that is computed in full, or in a single block."""
        found = [value for value in self.regions.computed() if value in self.regions.big]
        single = [region.needs for region in self.regions.regions if region.length <= self.block_size]
        found += [output for needs in single for node in needs.nodes for output in node.outputs]
        return max(map(weight, found), default=0)

    def _gains(self, region: Region) -> bool:
        """Whether a region saves memory: its big values are much larger than what it reads and writes by rows."""
        needs = region.needs
        by_rows = sum(
            value.num_bytes for value, _ in needs.cuts if not (self._is_shared(value) or self._is_given(value))
        )
        by_rows += sum(value.num_bytes for value in region.exits if isinstance(region.state(value), Batched))
        inside = max(output.num_bytes for node in needs.nodes for output in node.outputs)
        return inside >= self._least_gain * by_rows

    def _is_shared(self, value: Value) -> bool:
        """Whether a large value is computed from parameters alone, such as relative biases: it is there anyway."""
        regions = self.regions
        return regions.is_large(value) and value not in regions.of_data and regions.variable_of(value) is None

    def _is_given(self, value: Value) -> bool:
        """Whether a value is there in any case, so that it costs nothing that devices take its rows."""
        return self.regions.divides_rows and value.node is None and not self.regions.facts[value].has_gradient

    @property
    def has_blocks(self) -> bool:
        """True if anything is computed in blocks, or from slices of what it is computed from."""
        return bool(self.regions.regions or self.nested or self._is_sliced)

    def wide_values(self, *, per_example: bool) -> list[WideValue]:
        """The largest value of each region, also inside loops, then the values that are computed in full."""
        found = [_wide_value(region.root, region.axis, per_example) for region in self.regions.regions]
        for inner in self.nested.values():
            found += inner.wide_values(per_example=per_example)
        roots = [value for value in self.regions.in_full if value.node is not None and value.node.name in HEAVY]
        in_full = [_wide_value(value, None, per_example) for value in roots]
        # A survey looks at one of several values of the same line and shape.
        known = {dataclasses.replace(value, axis=None) for value in found}
        return found + [value for value in in_full if value not in known]

    # Functions inside equations.

    def _blocked_inside(self) -> dict[Node, "BlockedProgram"]:
        """The nodes with big values inside the function that they call, and these functions in blocks."""
        found: dict[Node, BlockedProgram] = {}
        in_regions = {value.node for region in self.regions.regions for value in region.exits}
        for node in self.regions.graph.nodes:
            if node in in_regions or node.name not in {"scan", *REMAT}:
                continue
            body = node.params["jaxpr"]
            if largest_value(body) <= self.threshold:
                continue
            of_data, moves = self._roles_inside(node)
            positions = range(len(interpreter.outputs_of(body)))
            inner = BlockedProgram(
                body,
                Roles(of_data, moves),
                self.block_size,
                positions,
                least_gain=self._least_gain,
                threshold=self.threshold,
                is_survey=self._is_survey,
            )
            if inner.has_blocks:
                found[node] = inner
        return found

    def _roles_inside(self, node: Node) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        regions = self.regions
        of_data = [value in regions.of_data for value in node.inputs]
        moves = [not value.is_constant and regions.facts[value].has_gradient for value in node.inputs]
        if node.name == "scan":
            num_consts, num_carry = interpreter.scan_counts(node.params)
            carry = slice(num_consts, num_consts + num_carry)
            of_data[carry] = [True] * num_carry
            moves[carry] = [any(moves) and value.is_inexact for value in node.inputs[carry]]
        return tuple(of_data), tuple(moves)

    # Running it.

    def __call__(
        self, inputs: Sequence[Any], *, differentiable: bool = False, cotangents: Sequence[Any] | None = None
    ) -> list[Any]:
        """The outputs of the program.

        Args:
          inputs: its inputs.
          differentiable: whether the program is differentiated in reverse mode.
          cotangents: the cotangents of the differentiated outputs, if they are known. The program must then be
            differentiated with these and no others.
        """
        return _Run(self, inputs, differentiable, cotangents).outputs()

    def start(
        self, inputs: Sequence[Any], cotangents: Sequence[Any], accumulators: Mapping[int, tuple[Any, Any]]
    ) -> "_Run":
        """A run that is differentiated with these cotangents.

        For some inputs there are accumulators, each with a copy of the input. Regions read the copy, and add the
        gradient to the accumulator, which is then in `totals`.
        """
        run = _Run(self, inputs, True, cotangents)
        for position, (copy, total) in accumulators.items():
            value = self.regions.graph.inputs[position]
            run.copies[value], run.totals[value] = copy, total
        return run

    def accumulated(self, first: int) -> list[int]:
        """The inputs from `first` on that regions with known cotangents read in full, counted from there."""
        entries = {value for region in self.cotangent_programs for value in region.needs.entries}
        inputs = self.regions.graph.inputs[first:]
        return [position for position, value in enumerate(inputs) if value in entries]

    @functools.cached_property
    def cotangent_programs(self) -> dict[Region, "CotangentProgram"]:
        """For each region whose cotangents do not depend on its results, the program that computes them."""
        found: dict[Region, CotangentProgram] = {}
        for region in self.regions.regions:
            program = CotangentProgram.of(self, region)
            if program is not None and not self._needs(program.outside, region, found):
                found[region] = program
        return found

    def _needs(self, values: Sequence[Value], wanted: Region, known: Mapping[Region, "CotangentProgram"]) -> bool:
        """Whether values are computed from results of a region. Cotangents of two regions may need each other."""

        def operands(value: Value) -> list[Value]:
            region = self.regions.region_of.get(value)
            outside = known[region].outside if region is not None and region in known else []
            return [*self.regions.operands_of(value), *outside]

        return any(self.regions.region_of.get(value) is wanted for value in sources(values, operands=operands))


class _Run:
    """The values of one run of a program, each computed when it is first asked for."""

    def __init__(
        self,
        program: BlockedProgram,
        inputs: Sequence[Any],
        differentiable: bool = False,
        cotangents: Sequence[Any] | None = None,
        known: Mapping[Value, Any] | None = None,
    ) -> None:
        self.program, self.differentiable, self.cotangents = program, differentiable, cotangents
        self.known: dict[Value, Any] = dict(zip(program.regions.graph.inputs, inputs, strict=True))
        self.known.update(known or {})
        self.copies: dict[Value, Any] = {}
        self.totals: dict[Value, Any] = {}

    def outputs(self) -> list[Any]:
        """The outputs of the program."""
        return [jnp.asarray(self[value]) for value in self.program.regions.graph.outputs]

    def __getitem__(self, value: Value) -> Any:
        if value.is_constant:
            return value.known
        if value not in self.known:
            for each in self.order([value]):
                self._compute(each)
        return self.known[value]

    def order(self, wanted: Sequence[Value]) -> list[Value]:
        """The values to compute for the wanted ones, each after those that it needs."""
        order: list[Value] = []
        entered: set[Value] = set()
        stack = [(value, False) for value in wanted]
        while stack:
            value, is_ready = stack.pop()
            if is_ready:
                order.append(value)
            elif not value.is_constant and value not in self.known and value not in entered:
                entered.add(value)
                stack.append((value, True))
                stack.extend((operand, False) for operand in self.program.regions.operands_of(value))
        return order

    def _compute(self, value: Value) -> None:
        regions = self.program.regions
        if value in self.known:
            return
        if value in regions.slices:
            self.known[value] = self._slice(value)
        elif value in regions.region_of:
            region = regions.region_of[value]
            for each, result in zip(region.exits, self._region(region), strict=True):
                # What has no gradient now may have one under an outer `grad` with respect to the batch.
                fixed = each not in regions.with_derivative and not each.is_key
                self.known.setdefault(each, _without_derivative(result) if fixed else result)
        else:
            node = value.node
            assert node is not None
            operands = [self[operand] for operand in node.inputs]
            nested = self.program.nested.get(node)
            results = node(operands) if nested is None else _run_nested(node, nested, operands, self.differentiable)
            for output, result in zip(node.outputs, results, strict=True):
                self.known.setdefault(output, result)

    def _region(self, region: Region) -> list[Any]:
        loop = BlockLoop(region, self.program.block_size, self.program.over_rows)
        cuts = [jnp.asarray(self[value]) for value, _ in loop.cuts]
        if not self.differentiable:
            return loop.forward(cuts, [jnp.asarray(self[value]) for value in loop.entries])
        if self.cotangents is None or region not in self.program.cotangent_programs:
            return loop.differentiable(cuts, [jnp.asarray(self[value]) for value in loop.entries])
        known = self.program.cotangent_programs[region](self, self.cotangents)
        entries = [self.copies[value] if value in self.copies else jnp.asarray(self[value]) for value in loop.entries]
        totals = [self.totals.get(value) for value in loop.entries]
        exits, totals = loop.with_known_cotangents(cuts, entries, known, totals)
        self.totals.update(
            {value: total for value, total in zip(loop.entries, totals, strict=True) if total is not None}
        )
        return exits

    def _slice(self, value: Value) -> Any:
        """A slice of a big value, computed from slices of what the big value is computed from."""
        region, start, size = self.program.regions.slices[value]
        needs = region.needs
        cuts = [take_rows(jnp.asarray(self[each]), rows, region.length, start, size) for each, rows in needs.cuts]
        return BlockLoop(region, size).of_block(cuts, [self[each] for each in needs.entries], start, size)[0]


class CotangentProgram:
    """Computes the cotangents of the results of a region before the region runs."""

    def __init__(self, traced: tracing.Traced, num_exits: int, outside: list[Value]) -> None:
        self._traced, self._num_exits, self.outside = traced, num_exits, outside

    @staticmethod
    def of(program: BlockedProgram, region: Region) -> "CotangentProgram | None":
        """The program; None if the cotangents depend on the results of the region."""
        regions = program.regions
        moving = [region.exits[position] for position in region.differentiated]
        if not moving:
            return None
        dependent = set(region.exits)
        outside: dict[Value, None] = {}
        losses = [regions.graph.outputs[position] for position in program.losses]
        for value in _Run(program, [None] * len(regions.graph.inputs)).order(losses):
            operands = regions.operands_of(value)
            if value in dependent or not any(operand in dependent for operand in operands):
                continue
            if value in regions.region_of:
                return None  # another region follows, whose backward pass comes first
            dependent.add(value)
            outside.update(dict.fromkeys(operand for operand in operands if not operand.is_constant))
        others = [value for value in outside if value not in dependent]
        exits = [*moving, *(value for value in region.exits if value not in moving)]
        inputs = regions.graph.inputs

        def cotangents(*flat: Any) -> list[Any]:
            moved, rest = flat[: len(moving)], flat[len(moving) :]
            still = [*exits[len(moving) :], *others]
            known, seeds = dict(zip(still, rest, strict=False)), rest[len(still) :]

            def after(moved: Sequence[Any]) -> list[Any]:
                given = {**known, **dict(zip(moving, moved, strict=True))}
                run = _Run(program, [given.get(value) for value in inputs], known=given)
                return [run[value] if value in dependent else jnp.zeros(value.shape, value.dtype) for value in losses]

            return jax.vjp(after, list(moved))[1](list(seeds))[0]

        types = [value.type for value in (*exits, *others, *losses)]
        traced, consts = tracing.trace(cotangents, *types)
        if consts or any(any(traced.inputs_used_by(position)[: len(exits)]) for position in range(len(moving))):
            return None
        return CotangentProgram(traced, len(exits), others)

    def __call__(self, run: _Run, seeds: Sequence[Any]) -> list[Any]:
        """The cotangents of the differentiated results."""
        placeholders = [
            avals.zeros_of(each.aval, each.aval.dtype) for each in self._traced.arguments[: self._num_exits]
        ]
        return self._traced((), *placeholders, *(jnp.asarray(run[value]) for value in self.outside), *seeds)


def _without_derivative(array: Any) -> Any:
    """The same array. JAX takes all results of a custom_vjp to have a derivative, which some primitives do not have."""
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return lax.stop_gradient(array)
    return lax.bitwise_and(array, array)  # lax.stop_gradient does nothing to integers


def _wide_value(value: Value, axis: int | None, per_example: bool) -> WideValue:
    place = source.SourceLine() if value.node is None else source.locate(value.node)
    return WideValue(value.shape, str(value.dtype), value.num_bytes, axis, per_example, place.file, place.line)


def _run_nested(node: Node, inner: BlockedProgram, operands: Sequence[Any], differentiable: bool) -> list[Any]:
    """Computes a scan or a checkpoint with blocks inside."""

    def body(*flat: Any) -> list[Any]:
        return inner(flat, differentiable=differentiable)

    if node.name == "scan":
        types = [value.type for value in inner.regions.graph.inputs]
        return interpreter.evaluate(node.equation, operands, node.params | {"jaxpr": tracing.close(body, types)})
    options = {name: node.params[name] for name in ("prevent_cse", "policy") if name in node.params}
    return list(jax.checkpoint(body, **options)(*operands))


def largest_value(jaxpr: Any, of_data: Sequence[bool] | None = None) -> int:
    """The bytes of the largest value that a program computes from data, at any depth of nested functions."""
    variables, consts, equations = interpreter.open_jaxpr(jaxpr)
    inputs = variables[len(consts) :]
    reached = set(inputs if of_data is None else [each for each, data in zip(inputs, of_data, strict=True) if data])
    largest = 0
    for equation in equations:
        if any(not interpreter.is_literal(operand) and operand in reached for operand in equation.invars):
            reached.update(equation.outvars)
            sizes = [max(num_bytes(out.aval), 4 * getattr(out.aval, "size", 0)) for out in equation.outvars]
            if not equation.primitive.name.startswith(("scatter", "reduce")):
                sizes += [largest_value(inner) for inner in interpreter.jaxprs_in(equation)]
            largest = max(largest, *sizes, 0)
    return largest


def _checkpoints_to_open(jaxpr: Any, threshold: int) -> dict[int, tuple[Any, Any]]:
    """Checkpoints around big values whose results are small, such as a head. Blocks save what they would save."""
    found: dict[int, tuple[Any, Any]] = {}
    for equation in interpreter.equations_of(jaxpr):
        if equation.primitive.name in REMAT:
            inner = equation.params["jaxpr"]
            written = sum(num_bytes(output.aval) for output in equation.outvars)
            if largest_value(inner) > threshold and written * 64 < threshold:
                found[id(equation)] = equation, inner
    return found


# The parts of a loss.


def prefix_of_one(split: Split, selection: int | None, wanted: Sequence[Value], inputs: list[Any]) -> list[Any]:
    """Values of the prefix of a loss for its first example."""
    given = PrefixInputs(variables=[], inputs=inputs, known=None, selected=[], place=[])
    return split.prefix(given, Examples(0, 1, selection=selection), wanted)


def head_roles(split: Split, num_known: int, num_variables: int) -> Roles:
    """The roles of the arguments of a head: all inputs, the values known first, variables, and the frontier."""
    inputs, frontier = len(split.graph.inputs), len(split.frontier)
    batch = [position in split.batch_positions for position in range(inputs)]
    of_data = [*batch, *[True] * num_known, *[False] * num_variables, *[True] * frontier]
    moving = [position in split.differentiated for position in range(frontier)]
    return Roles(tuple(of_data), (*[False] * (inputs + num_known), *[True] * num_variables, *moving))


def wide_values(split: Split, least: int) -> list[WideValue]:
    """The values of a loss that have at least so many bytes, for one example or in the head, and dwarf all others."""
    types = [value.type for value in split.graph.inputs]
    first, num_wrt = split.num_consts, len(split.loss.types.wrt)
    moves = tuple(first <= position < first + num_wrt for position in range(len(types)))
    of_data = tuple(position in split.batch_positions for position in range(len(types)))
    found: list[WideValue] = []
    for selection, positions in split.selections.items():
        wanted = [split.frontier[position] for position in positions]
        prefix = functools.partial(prefix_of_one, split, selection, wanted)
        jaxpr = tracing.close(lambda *flat, prefix=prefix: prefix(list(flat)), types)
        losses = [index for index, position in enumerate(positions) if position in split.differentiated]
        program = BlockedProgram(jaxpr, Roles(of_data, moves), 1, losses, is_survey=True)
        found += program.wide_values(per_example=True)
    frontier = [value.type for value in split.frontier]
    head = tracing.close(
        lambda *flat: split.head(flat[: len(types)], None, [], flat[len(types) :]), [*types, *frontier]
    )
    roles = head_roles(split, 0, 0)
    moves = (*moves, *roles.moves[len(types) :])
    program = BlockedProgram(head, Roles(roles.of_data, moves), 1, [0], is_survey=True)
    found += program.wide_values(per_example=False)
    return [value for value in dict.fromkeys(found) if value.bytes >= least]


def bytes_in_full(split: Split) -> int:
    """About how many bytes the head of a loss computes in full, if it is computed in blocks."""
    types = [value.type for value in (*split.graph.inputs, *split.frontier)]
    number = len(split.graph.inputs)
    head = tracing.close(lambda *flat: split.head(flat[:number], None, [], flat[number:]), types)
    program = BlockedProgram(head, head_roles(split, 0, 0), 1, [0], least_gain=1)
    in_full = [value for value in program.regions.in_full if value.node is not None and value.node.name not in FUSED]
    return sum(value.num_bytes for value in in_full)
