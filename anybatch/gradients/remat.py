"""Rematerialisation: divides a program into blocks and applies `jax.checkpoint` to each of them.

One `jax.checkpoint` around the loss saves no memory: the backward pass would compute all of it again and keep all
activations at once. It saves memory around blocks, one after the other. So the program is divided where few bytes are
passed on, as between the layers of a network. The body of a `lax.scan` over layers is already such a block.

Inside the blocks, a policy says which values are kept for the backward pass: one of JAX's by its name, or a share of
the bytes that are not kept. By a share, those values are computed again that take the least time for each byte.

With the policy "offload", as much is computed again as by a share of 1, and what one iteration of a loop over layers
passes to the next is kept in the host's memory.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from anybatch.call import placement
from anybatch.call.options import OFFLOAD
from anybatch.jaxprs import avals, interpreter, tracing
from anybatch.jaxprs.graph import num_bytes
from anybatch.jaxprs.primitives import CALLS, CUSTOM_JVP, ELEMENTWISE, FUSED, MOVES, called_jaxpr
from anybatch.planning.prediction import seconds_alone
from anybatch.reading.block_loop import is_region

MOST_BLOCKS = 64

KEPT = "anybatch.kept"  # the name of values that are kept
ON_HOST = "anybatch.on_host"  # the name of values that are kept in the host's memory

# Of the values that XLA computes inside the kernels that read them, about this share is in memory for the backward pass
# if nothing is computed again. To compute them again takes about as long as to write and read them.
FUSED_SHARE = 0.25

# What takes the most time for each byte, such as the sums of a normalisation, is kept: less than 1% of the bytes.
ALL = 0.99

_FUSED = ELEMENTWISE | MOVES | {"split"}

# Derivatives of these do not need the operands. Derivatives of others in `ELEMENTWISE` do.
_NEEDS_NO_OPERAND = MOVES | frozenset(
    """add add_any and ceil convert_element_type copy copy_p dynamic_slice eq exp floor ge gt imag is_finite le logistic
    lt name ne neg not or pcast pvary real reduce_sum round rsqrt select_n sharding_constraint sign sqrt stop_gradient
    sub tanh""".split()
)
_NEEDS_RESULT = frozenset("cbrt exp logistic reduce_max reduce_min rsqrt sqrt tan tanh".split())


@dataclasses.dataclass(frozen=True)
class _Policy:
    """Which values are kept for the backward pass.

    JAX's policy says so inside the blocks; it allows the results of the `kept` equations, but not variables that a
    print or a callback was `told`, since JAX cannot keep these. Blocks that are left `as_is` have no `jax.checkpoint`.
    `kept` and `as_is` are identities of equations, of a block that of its first one. If it `offloads`, what a loop over
    layers carries is kept in the host's memory.
    """

    saveable: Callable[..., Any]
    kept: frozenset[int] = frozenset()
    as_is: frozenset[int] = frozenset()
    offloads: bool = False
    told: frozenset[Any] = frozenset()

    def evaluate(self, equation: Any, operands: Sequence[Any]) -> list[Any]:
        results = interpreter.evaluate(equation, operands)
        if id(equation) not in self.kept:
            return results
        pairs = zip(equation.outvars, results, strict=True)
        skipped = [variable in self.told or _is_complex(jax.typeof(result)) for variable, result in pairs]
        return [
            each if is_skipped else checkpoint_name(each, KEPT)
            for each, is_skipped in zip(results, skipped, strict=True)
        ]

    def body(self, jaxpr: Any, consts: int, carry: int) -> Callable[..., list[Any]]:
        """The body of a loop over layers, which has so many constants and carried values, as a function."""

        def compute(*operands: Any) -> list[Any]:
            if self.offloads:
                operands = tuple(
                    checkpoint_name(each, ON_HOST) if consts <= index < consts + carry and _is_large(each) else each
                    for index, each in enumerate(operands)
                )
            if self.kept:
                return interpreter.interpret(jaxpr, operands, self.evaluate)
            return interpreter.call(jaxpr, *operands)

        return compute

    def checkpoint(self, block: Callable[..., Any], first: Any, **options: Any) -> Callable[..., Any]:
        """The block that begins with an equation, with `jax.checkpoint` unless it is left as it is."""
        return block if id(first) in self.as_is else jax.checkpoint(block, policy=self.saveable, **options)


def rematerialised(traced: tracing.Traced, const_types: Sequence[Any], policy: str | float) -> tracing.Traced:
    """The same program, divided into blocks with `jax.checkpoint`.

    `const_types` are the types of the arrays that it closes over. The policy is the name of one of
    `jax.checkpoint_policies`, "offload", or the share of the activations' bytes that are computed again.
    """
    types = [avals.abstract(variable.aval) for variable in traced.arguments]
    jaxpr = traced.jaxpr
    if isinstance(policy, str) and policy != OFFLOAD:
        of_jax = getattr(jax.checkpoint_policies, policy)
        chosen = _Policy(lambda *types, **params: not any(map(_is_complex, types[1:])) and of_jax(*types, **params))
    else:
        inner = [avals.abstract(jax.typeof(array)) for array in traced.inner]
        jaxpr = _inlined(jaxpr, [*inner, *const_types, *types])
        kept, as_is = _kept(_steps(jaxpr, _written(jaxpr)), 1.0 if isinstance(policy, str) else policy)
        with_effects = [equation for equation in interpreter.walk(jaxpr) if equation.effects]
        told = frozenset(operand for equation in with_effects for operand in _variables(equation.invars))
        chosen = _Policy(_saved_by_name(policy == OFFLOAD), kept, as_is, policy == OFFLOAD, told)

    def in_blocks(*flat: Any) -> list[Any]:
        return _run(jaxpr, (*traced.inner, *flat), chosen, _written(jaxpr))

    return dataclasses.replace(tracing.retrace(in_blocks, const_types, types), bound=traced.bound)


# Which values are kept, if the policy is a share.


def _saved_by_name(offloads: bool) -> Callable[..., Any]:
    if not offloads:
        return jax.checkpoint_policies.save_only_these_names(KEPT)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[KEPT],
        names_which_can_be_offloaded=[ON_HOST],
        offload_src=placement.DEVICE,
        offload_dst=placement.HOST,
    )


def _inlined(jaxpr: Any, types: Sequence[Any]) -> Any:
    """The same program with calls of functions inlined, so that no two equations are one object."""
    return tracing.close(lambda *flat: interpreter.interpret(jaxpr, flat, _evaluate_inlined), types)


def _evaluate_inlined(equation: Any, operands: Sequence[Any]) -> list[Any]:
    name = equation.primitive.name
    if name in CALLS and not is_region(equation):
        return interpreter.interpret(called_jaxpr(equation), operands, _evaluate_inlined)
    if name == "scan" and not _has_refs(equation):
        body = equation.params["jaxpr"]
        types = [avals.abstract(variable.aval) for variable in interpreter.unbound_inputs_of(body)]
        return interpreter.evaluate(equation, operands, equation.params | {"jaxpr": _inlined(body, types)})
    return interpreter.evaluate(equation, operands)


@dataclasses.dataclass(frozen=True)
class _Step:
    """Values of one block that are computed again together.

    The first step of a block gives it a `jax.checkpoint`: all values that XLA fuses are computed again then, and those
    that this needs are kept, even if they were not. Later steps keep fewer of them.
    """

    first: Any  # the first equation of the block
    equations: tuple[Any, ...]  # their results are no longer kept
    is_first: bool
    num_bytes: float  # what is no longer kept
    seconds: float  # to compute it again

    @property
    def seconds_per_byte(self) -> float:
        if self.num_bytes > 0:
            return self.seconds / self.num_bytes
        return math.inf if self.seconds or self.num_bytes else 0.0

    @property
    def order(self) -> tuple[float, bool, float]:
        """Cheap ones come first; of those about as cheap, small ones, so that there are more sizes to choose from."""
        ratio = self.seconds_per_byte
        about = round(4 * math.log2(ratio)) if 0 < ratio < math.inf else ratio or -math.inf
        return about, not self.is_first, self.num_bytes

    def joined(self, later: "_Step") -> "_Step":
        return dataclasses.replace(
            self,
            equations=(*self.equations, *later.equations),
            num_bytes=self.num_bytes + later.num_bytes,
            seconds=self.seconds + later.seconds,
        )

    def times(self, number: int) -> "_Step":
        return dataclasses.replace(self, num_bytes=number * self.num_bytes, seconds=number * self.seconds)


def _steps(jaxpr: Any, all_written: int) -> list[_Step]:
    """The steps of all blocks of a program, for each block those first that take the least time for each byte."""
    equations, found = interpreter.equations_of(jaxpr), []
    segments = _segments(equations, interpreter.outputs_of(jaxpr), all_written)
    for segment in segments:
        first = segment.equations[0]
        if not segment.has_blocks_inside:
            steps = _steps_of_block(first, segment.equations)
            if segment is segments[-1]:
                # The backward pass begins with it, while all other blocks are still kept: to compute more of it again
                # than what XLA fuses would save nothing.
                steps[1:] = [dataclasses.replace(each, num_bytes=0.0, seconds=math.inf) for each in steps[1:]]
            found += steps
        elif first.primitive.name == "scan" and not is_region(first):
            inside = _steps_of_block(first, interpreter.equations_of(first.params["jaxpr"]))
            found += [each.times(first.params["length"]) for each in inside]
    return found


def _steps_of_block(first: Any, equations: Sequence[Any]) -> list[_Step]:
    needed = {
        operand
        for equation in equations
        if equation.primitive.name not in _NEEDS_NO_OPERAND
        for operand in _variables(equation.invars)
    }
    # JAX cannot keep what only a print or a callback reads.
    told = {operand for equation in equations if equation.effects for operand in _variables(equation.invars)}
    again = _again_with_fused(equations, needed)
    num_bytes_fused = seconds_inside = 0.0
    later = []
    for equation in equations:
        name = equation.primitive.name
        can_be_kept = [each for each in equation.outvars if each not in told and not _is_complex(each.aval)]
        results = [each for each in can_be_kept if each in needed or name in _NEEDS_RESULT]
        size = sum(num_bytes(each.aval) for each in results)
        if is_region(equation) or _has_refs(equation):
            continue
        if name in _FUSED:
            num_bytes_fused += FUSED_SHARE * size
        elif _keeps_more_than_results(equation):
            num_bytes_fused += size
            seconds_inside += seconds_alone(equation)
        else:
            read_again = [each for each in can_be_kept if each in results or each in again]
            kept = sum(num_bytes(each.aval) for each in read_again)
            if kept:
                num_bytes_fused -= kept - size
                later.append(_Step(first, (equation,), False, kept, seconds_alone(equation)))
    steps = [_Step(first, (), True, num_bytes_fused, seconds_inside)]
    for step in sorted(later, key=lambda each: each.order):
        if len(steps) == 1 and step.order < steps[0].order:
            steps[0] = steps[0].joined(step)
        else:
            steps.append(step)
    return steps


def _again_with_fused(equations: Sequence[Any], needed: set[Any]) -> set[Any]:
    """The operands of what is computed again in a block if all results that XLA does not fuse are kept."""
    again: set[Any] = set()
    for equation in reversed(equations):
        name = equation.primitive.name
        is_read = any(each in needed or each in again for each in equation.outvars) or name in _NEEDS_RESULT
        if (name in _FUSED and is_read) or _keeps_more_than_results(equation):
            again.update(_variables(equation.invars))
    return again


def _keeps_more_than_results(equation: Any) -> bool:
    """True if the backward pass needs values from inside an equation, so that it must be computed again in any case."""
    name = equation.primitive.name
    if name in CUSTOM_JVP or name.startswith(("scatter", "reduce", "select_and_")):  # functions of numbers
        return False
    return bool(interpreter.jaxprs_in(equation))


def _kept(steps: Sequence[_Step], share: float) -> tuple[frozenset[int], frozenset[int]]:
    """`_Policy.kept` and `_Policy.as_is` if this share of all bytes is computed again.

    Steps that take forever are never taken.
    """
    left = min(share, ALL) * sum(each.num_bytes for each in steps)
    kept: set[int] = set()
    as_is: set[int] = set()
    for step in sorted(steps, key=lambda each: each.order):
        if step.seconds == math.inf or (left <= 0 and step.num_bytes):
            if step.is_first:
                as_is.add(id(step.first))
            kept.update(map(id, step.equations))
        left -= step.num_bytes
    return frozenset(kept), frozenset(as_is)


# The program in blocks.


def _run(jaxpr: Any, values: Sequence[Any], policy: _Policy, all_written: int) -> list[Any]:
    variables, consts, equations = interpreter.open_jaxpr(jaxpr)
    outputs = interpreter.outputs_of(jaxpr)
    environment = interpreter.Environment(variables, [*consts, *values])
    for segment in _segments(equations, outputs, all_written):
        if segment.has_blocks_inside:
            (equation,) = segment.equations
            results = _run_inside(equation, environment.read(equation.invars), policy, all_written)
            environment.write(equation.outvars, results)
        else:
            block = _block(segment, policy)
            if not any(map(_runs_once, segment.equations)):
                block = policy.checkpoint(block, segment.equations[0])
            environment.write(segment.writes, block(*environment.read(segment.reads)))
    return environment.read(outputs)


def _run_inside(equation: Any, operands: Sequence[Any], policy: _Policy, all_written: int) -> list[Any]:
    """Evaluates an equation that contains most of the program, with blocks inside it; or one that needs none."""
    if equation.primitive.name in CALLS and not is_region(equation):
        return _run(called_jaxpr(equation), operands, policy, all_written)
    if is_region(equation) or _runs_once(equation):
        return interpreter.evaluate(equation, operands)
    body = equation.params["jaxpr"]
    types = [avals.abstract(variable.aval) for variable in interpreter.unbound_inputs_of(body)]
    turn = policy.body(body, *interpreter.scan_counts(equation.params))
    # In a loop, XLA cannot merge the second computation with the first, so prevent_cse is not needed.
    blocked = tracing.close(policy.checkpoint(turn, equation, prevent_cse=False), types)
    return interpreter.evaluate(equation, operands, equation.params | {"jaxpr": blocked})


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Consecutive equations, the variables that they read, and those that later equations read."""

    equations: list[Any]
    reads: list[Any]
    writes: list[Any]
    has_blocks_inside: bool  # True for a single equation that is divided inside instead


def _block(segment: _Segment, policy: _Policy) -> Callable[..., list[Any]]:
    def block(*values: Any) -> list[Any]:
        environment = interpreter.Environment(segment.reads, values)
        for equation in segment.equations:
            environment.write(equation.outvars, policy.evaluate(equation, environment.read(equation.invars)))
        return environment.read(segment.writes)

    return block


def _segments(equations: Sequence[Any], outputs: Sequence[Any], all_written: int) -> list[_Segment]:
    last_use = {operand: position for position, each in enumerate(equations) for operand in _variables(each.invars)}
    last_use |= dict.fromkeys(_variables(outputs), len(equations))
    opened = [_has_blocks_inside(equation, all_written) for equation in equations]
    borders = {0, len(equations)}
    for position, is_opened in enumerate(opened):
        if is_opened:
            borders |= {position, position + 1}
    plain = sum(_weight(equation) for equation, is_opened in zip(equations, opened, strict=True) if not is_opened)
    if plain > 0.5 * all_written:
        borders |= set(_cuts(equations, last_use))
    for position, equation in enumerate(equations):  # a reference does not leave its block
        until = max((last_use.get(output, -1) for output in equation.outvars if _is_ref(output)), default=-1)
        borders -= set(range(position + 1, until + 1))
    borders |= {0, len(equations)}
    segments = []
    for start, end in itertools.pairwise(sorted(borders)):
        inside = list(equations[start:end])
        made = {output for equation in inside for output in equation.outvars}
        read = dict.fromkeys(each for equation in inside for each in _variables(equation.invars) if each not in made)
        writes = [output for equation in inside for output in equation.outvars if last_use.get(output, -1) >= end]
        segments.append(_Segment(inside, list(read), writes, len(inside) == 1 and opened[start]))
    return segments


def _cuts(equations: Sequence[Any], last_use: dict[Any, int]) -> list[int]:
    """Where to divide: into blocks that write about the same number of bytes, and pass few bytes to the next.

    With K blocks, memory holds K borders and the inside of one block. That is smallest at K = sqrt(inside / border).
    """
    reached = list(itertools.accumulate(map(_weight, equations)))
    passed_on = _passed_on(equations, last_use)
    borders = [each for each in passed_on[len(equations) // 8 : -len(equations) // 8] if each > 0]
    if not borders or not reached[-1]:
        return []
    number = min(MOST_BLOCKS, max(2, round(math.sqrt(reached[-1] / min(borders)))))
    each_block = reached[-1] / number
    cuts, begin = [], 0
    for wanted in range(1, number):
        window = [i for i in range(begin, len(equations)) if abs(reached[i] / each_block - wanted) <= 0.4]
        if window:
            best = min(window, key=lambda i: (passed_on[i], abs(reached[i] / each_block - wanted)))
            begin = best + 1
            cuts.append(begin)
    return cuts


def _passed_on(equations: Sequence[Any], last_use: dict[Any, int]) -> list[int]:
    """For each equation, the bytes that it or an earlier equation writes and a later one reads."""
    live, results = 0, []
    ending: dict[int, int] = {}
    for position, equation in enumerate(equations):
        for output in equation.outvars:
            until = last_use.get(output, -1)
            if until > position:
                live += num_bytes(output.aval)
                ending[until] = ending.get(until, 0) + num_bytes(output.aval)
        live -= ending.pop(position, 0)
        results.append(live)
    return results


def _has_blocks_inside(equation: Any, all_written: int) -> bool:
    """True for a loop over much of the program, a call of a function with most of it inside, or a region."""
    if is_region(equation):
        return True
    name = equation.primitive.name
    if name == "scan":
        return equation.params["length"] > 1 and _weight(equation) > 0.1 * all_written
    return name in CALLS and _weight(equation) > 0.5 * all_written


def _written(jaxpr: Any) -> int:
    """An estimate of the bytes that a program writes, except in regions, which keep nothing for the backward pass."""
    return sum(map(_weight, interpreter.equations_of(jaxpr)))


def _weight(equation: Any) -> int:
    """An estimate of the bytes that an equation writes."""
    name = equation.primitive.name
    if is_region(equation):
        return 0
    has_functions_of_numbers = name.startswith(("scatter", "reduce"))
    inner = 0 if has_functions_of_numbers else sum(map(_written, interpreter.jaxprs_in(equation)))
    if inner:
        return inner * (equation.params["length"] if name == "scan" else 1)
    return 0 if name in FUSED else sum(num_bytes(output.aval) for output in equation.outvars)


def _is_ref(variable: Any) -> bool:
    return "Ref" in type(variable.aval).__name__


def _runs_once(equation: Any) -> bool:
    """True if JAX cannot compute an equation again: it uses references, or calls back to read or write something."""
    return _has_refs(equation) or any("IO" in type(effect).__name__ for effect in equation.effects)


def _has_refs(equation: Any) -> bool:
    """True if an equation reads, makes or writes references, or a function inside it does."""
    inside = (each for jaxpr in interpreter.jaxprs_in(equation) for each in interpreter.equations_of(jaxpr))
    return any(map(_is_ref, (*_variables(equation.invars), *equation.outvars))) or any(map(_has_refs, inside))


def _is_complex(aval: Any) -> bool:
    """True for complex numbers. JAX rounds what `jax.checkpoint` keeps, and has no rounding for these."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.complexfloating))


def _is_large(array: Any) -> bool:
    aval = jax.typeof(array)
    return bool(jnp.issubdtype(aval.dtype, jnp.floating)) and num_bytes(aval) >= placement.SMALL


def _variables(operands: Sequence[Any]) -> list[Any]:
    return [operand for operand in operands if not interpreter.is_literal(operand)]
