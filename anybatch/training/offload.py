"""The optimizer's state in the host's memory, streamed through the update on the device.

`updated` is the update of a step whose optimizer state is there: it copies one array of it after another to the device
and back. `init_on_host` makes such a state without having it on the device first.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from anybatch.call.placement import HOST, local_bytes
from anybatch.errors import InputError
from anybatch.jaxprs import avals, interpreter, primitives, tracing
from anybatch.training.arrays import is_large, is_on_host, merge_arrays, place, split_arrays
from anybatch.training.state import NewGradient, StateAdapter

# How many arrays are on their way at once: while the two moments of a parameter are stored, the next two are loaded.
WINDOW = 4


def check_devices(arrays: Sequence[Any]) -> None:
    """Raises an InputError if a device of some arrays cannot reach pinned memory of the host."""
    devices: set[Any] = set()
    for array in arrays:
        devices |= array.sharding.addressable_devices if isinstance(array, jax.Array) else set()
    for device in devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if HOST not in kinds:
            raise InputError(
                f'offload="optimizer" needs devices that have memory of the kind {HOST}',
                given=f"{device.device_kind}, which has {', '.join(kinds)}",
                remedy="Leave offload out, or shard the state over several devices: ab.train_step(..., mesh=mesh).",
            )


def host_bytes(arrays: Sequence[Any]) -> int:
    """The bytes of those arrays that are in the host's memory, for one device."""
    return sum(local_bytes(array) for array in arrays if is_on_host(array))


def saved_bytes(arrays: Sequence[Any], on_host: Sequence[bool]) -> tuple[int, int]:
    """About how many bytes of each device it saves to have these arrays on the host: during the update, and before.

    During the update, a window of them is on the device.
    """
    pairs = zip(arrays, on_host, strict=True)
    sizes = sorted(local_bytes(array) for array, hosted in pairs if hosted and is_large(array))
    # Beside the window, two new arrays are on the device until they are stored.
    return sum(sizes[: -(WINDOW + 2)]), sum(sizes)


def init_on_host(init: Callable[[Any], Any], params: Any) -> Any:
    """`init(params)`, equation by equation, with each large array moved to the host before the next is made.

    How a state is sharded over several devices is known only from the arrays that `init` makes of sharded parameters.
    There it is made on the devices first. So it is if `init` looks at values of the parameters. Under `jit`, the state
    stays on the devices; the first step moves it.
    """
    arrays, constants = split_arrays(params)
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return init(params)
    check_devices([*arrays, jnp.zeros(())])
    if any(isinstance(array, jax.Array) and len(array.sharding.device_set) > 1 for array in arrays):
        return _all_on_host(init(params))
    of_state: list[Any] = []

    def flat_init(*flat: Any) -> list[Any]:
        made, made_constants = split_arrays(init(merge_arrays(flat, constants)))
        of_state.append(made_constants)
        return made

    try:
        traced, consts = tracing.trace(flat_init, *arrays)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, AttributeError):
        return _all_on_host(init(params))
    variables, _, equations = interpreter.open_jaxpr(traced.jaxpr)
    outputs = interpreter.outputs_of(traced.jaxpr)
    environment = interpreter.Environment(variables, [*consts, *arrays])
    touched = [(equation, {*equation.outvars, *_variables(equation.invars)}) for equation in equations]
    last = {variable: equation for equation, those in touched for variable in those}
    wanted = set(_variables(outputs))
    devices = [each for array in arrays if isinstance(array, jax.Array) and array.committed for each in array.devices()]
    for equation, those in touched:
        with jax.default_device(devices[0]) if devices else contextlib.nullcontext():
            environment.write(equation.outvars, interpreter.evaluate(equation, environment.read(equation.invars)))
        for variable in those - set(variables):
            if last[variable] is equation:  # no later equation reads it
                value = _on_host(environment.read([variable])[0]) if variable in wanted else None
                environment.write([variable], [jax.block_until_ready(value)])
    return merge_arrays([_on_host(array) for array in environment.read(outputs)], of_state[0])


def _all_on_host(state: Any) -> Any:
    arrays, constants = split_arrays(state)
    return merge_arrays([_on_host(array) for array in arrays], constants)


def _on_host(array: Any) -> jax.Array:
    return place(jnp.asarray(array), on_host=True)


def updated(adapter: StateAdapter, state: Any, arrays: list[Any], new: NewGradient, norm: Any) -> tuple[list[Any], Any]:
    """`adapter.updated(state, arrays, new)`, with arrays that are on the host streamed, and `norm` as it is.

    The new arrays are where the old ones are. Streaming begins after `norm`, the norm of the gradient, is computed.
    """
    positions = [position for position, array in enumerate(arrays) if is_on_host(array)]
    if not positions:
        return adapter.updated(state, arrays, new), norm
    current, constants = adapter.split(state)  # the loss may have changed an NNX model
    if len(current) != len(arrays):
        # The loss has added or removed variables of a model: `adapter.updated` says so.
        there = [jax.device_put(array, jax.memory.Space.Device) if is_on_host(array) else array for array in current]
        return adapter.updated(adapter.merge(there, constants), arrays, new), norm

    def update(*loaded: Any) -> list[Any]:
        there = dict(zip(positions, loaded, strict=True))
        now, before = ([there.get(index, array) for index, array in enumerate(each)] for each in (current, arrays))
        return adapter.updated(adapter.merge(now, constants), before, new)

    return _streamed(update, [arrays[position] for position in positions], set(positions), norm)


def _streamed(
    fun: Callable[..., list[Any]], arrays: Sequence[Any], to_host: set[int], start: Any
) -> tuple[list[Any], Any]:
    """`fun(*arrays)` for arrays on the host, with some of its results put there. Also returns `start` as it is.

    The arrays are copied to the device in an order, and what depends on the first ones is computed before the next
    ones are there: stage 1 is what can be computed with the first one alone, and so on. An array is copied only after
    the results of the stage `WINDOW` before its own are stored, so XLA cannot copy all of them at once.
    """
    types = [avals.abstract(jax.typeof(array)) for array in arrays]
    nested, closed_over = tracing.trace(fun, *types)
    traced, consts = tracing.trace(lambda *flat: _opened(nested.jaxpr, [*closed_over, *flat]), *types)
    variables, _, equations = interpreter.open_jaxpr(traced.jaxpr)
    inputs, outputs = traced.arguments, interpreter.outputs_of(traced.jaxpr)
    order = _order(inputs, equations)
    stages = {inputs[number]: stage for stage, number in enumerate(order, 1)}

    def stage_of(operands: Sequence[Any]) -> int:
        return max((stages.get(variable, 0) for variable in _variables(operands)), default=0)

    of_stage: list[list[Any]] = [[] for _ in range(len(arrays) + 1)]
    with_effects = 0  # equations that change a reference or call back stay in their order
    for equation in equations:
        stage = stage_of(equation.invars)
        if equation.effects:
            stage = with_effects = max(stage, with_effects)
        stages |= dict.fromkeys(equation.outvars, stage)
        of_stage[stage].append(equation)
    finished: list[list[int]] = [[] for _ in of_stage]
    for index, output in enumerate(outputs):
        finished[stage_of([output])].append(index)
    environment = interpreter.Environment(variables[: len(consts)], consts)
    results: dict[int, Any] = {}
    for stage, of_this in enumerate(of_stage):
        if stage:
            number = order[stage - 1]
            done = finished[stage - WINDOW] if stage > WINDOW else []
            # All results of the barrier are used, so that XLA drops none of them.
            array, start, *after = lax.optimization_barrier((arrays[number], start, *map(results.get, done)))
            results |= dict(zip(done, after, strict=True))
            environment.write([inputs[number]], [jax.device_put(array, jax.memory.Space.Device)])
        for equation in of_this:
            environment.write(equation.outvars, interpreter.evaluate(equation, environment.read(equation.invars)))
        for index in finished[stage]:
            result = jnp.asarray(environment.read([outputs[index]])[0])
            results[index] = jax.device_put(result, jax.memory.Space.Host) if index in to_host else result
    return [results[index] for index in range(len(outputs))], start


def _order(inputs: Sequence[Any], equations: Sequence[Any]) -> list[int]:
    """The order in which to load inputs: those that are used together, such as the moments of a parameter, together."""
    used = {variable: 1 << number for number, variable in enumerate(inputs)}  # sets of inputs, as bits
    together = set()
    for equation in equations:
        union = functools.reduce(operator.or_, (used.get(variable, 0) for variable in _variables(equation.invars)), 0)
        used |= dict.fromkeys(equation.outvars, union)
        together.add(union)
    # The smallest sets are joined first: the two moments of a parameter, then its master, then all parameters.
    groups = {number: [number] for number in range(len(inputs))}
    for union in sorted(together, key=lambda union: (union.bit_count(), union)):
        distinct = {id(groups[number]): groups[number] for number in groups if union >> number & 1}
        joined = [number for group in distinct.values() for number in group]
        groups |= {number: joined for number in joined}
    distinct = {id(group): group for group in groups.values()}
    return [number for group in distinct.values() for number in group]


def _opened(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Calls a jaxpr with its calls inlined, and each cheap `cond` as a selection, so that every array is by itself."""

    def compute(equation: Any, operands: list[Any]) -> Sequence[Any]:
        if equation.primitive.name in primitives.CALLS:
            return _opened(primitives.called_jaxpr(equation), operands)
        if equation.primitive.name != "cond" or not all(map(_is_cheap, equation.params["branches"])):
            return interpreter.evaluate(equation, operands)
        branches = [_opened(branch, operands[1:]) for branch in equation.params["branches"]]
        index = jnp.clip(operands[0], 0, len(branches) - 1)
        return [
            lax.select_n(index, *(jnp.asarray(case, output.aval.dtype) for case in cases))
            for output, *cases in zip(equation.outvars, *branches, strict=True)
        ]

    return interpreter.interpret(jaxpr, arguments, compute)


def _is_cheap(branch: Any) -> bool:
    """Whether a branch of a `cond` takes little more time than reading its operands does."""
    return {equation.primitive.name for equation in interpreter.walk(branch)} <= _CHEAP and not branch.effects


_REDUCTIONS = frozenset("reduce_and reduce_max reduce_min reduce_or reduce_sum".split())
_CHEAP = primitives.FUSED | primitives.CALLS | _REDUCTIONS | {"cond"}


def _variables(operands: Sequence[Any]) -> list[Any]:
    return [operand for operand in operands if not interpreter.is_literal(operand)]
