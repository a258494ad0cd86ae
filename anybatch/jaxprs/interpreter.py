"""Opens jaxprs, looks into their equations, and evaluates them one equation at a time.

JAX 0.10 has two classes, `Jaxpr` and `ClosedJaxpr` (a jaxpr with its constants); from 0.11 on they are one. Every
function here takes either.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from anybatch.jaxprs.primitives import REMAT


@functools.cache
def jax_core() -> Any:
    """`jax.extend.core`, imported when it is first used: importing `jax.extend` loads Pallas, which takes time."""
    from jax.extend import core

    return core


# The parts of a jaxpr.


def opened(jaxpr: Any) -> Any:
    """The jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_jaxpr(value: Any) -> bool:
    """Whether a value, such as a parameter of an equation, is a jaxpr."""
    return hasattr(value, "eqns")


def open_jaxpr(jaxpr: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The input variables of a jaxpr, its constants, and its equations. The first variables stand for the constants."""
    inner = opened(jaxpr)
    consts = list(getattr(jaxpr, "consts", ()) or ())
    return [*inner.constvars, *inner.invars], consts, list(inner.eqns)


def unbound_inputs_of(jaxpr: Any) -> list[Any]:
    """The variables that a call must give values to: of constants that the jaxpr does not hold, and of arguments."""
    variables, consts, _ = open_jaxpr(jaxpr)
    return variables[len(consts) :]


def outputs_of(jaxpr: Any) -> list[Any]:
    """The outputs of a jaxpr: variables, or literals."""
    return list(opened(jaxpr).outvars)


def equations_of(jaxpr: Any) -> list[Any]:
    """The equations of a jaxpr, without those of the functions inside them."""
    return list(opened(jaxpr).eqns)


def is_literal(operand: Any) -> bool:
    """Whether an operand of an equation is a number written into it, not a variable."""
    return isinstance(operand, jax_core().Literal)


# The functions inside an equation.


def walk(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, at any depth of nested functions."""
    for equation in equations_of(jaxpr):
        yield equation
        for inner in jaxprs_in(equation):
            yield from walk(inner)


def jaxprs_in(equation: Any) -> list[Any]:
    """The functions inside an equation, such as the body of a scan, without their constants."""
    return [opened(inner) for inner in jax_core().jaxprs_in_params(equation.params)]


def function_of(equation: Any) -> Any:
    """The jaxpr that a jit, a checkpoint or a scan calls, with a variable for each operand; None for other equations.

    Other calls are left out: it is not tested that JAX hands an accumulator through them correctly.
    """
    if equation.primitive.name not in {"jit", "pjit", "scan", *REMAT}:
        return None
    inner = opened(equation.params["jaxpr"])
    return inner if len(inner.invars) == len(equation.invars) else None


def nested_input(equation: Any, position: int) -> tuple[Any, Any] | None:
    """The jaxpr inside an equation, and its variable for the operand at `position`.

    None unless that variable stands for the operand and nothing else: a nested function's, or for a scan the
    slices of an array that it scans over.
    """
    inner = function_of(equation)
    if inner is None or (equation.primitive.name == "scan" and position < sum(scan_counts(equation.params))):
        return None
    return inner, inner.invars[position]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from 0.11 on
    return len(consts), len(carry)


# Where an equation comes from.


def name_stack(equation: Any) -> str:
    """The transformations that made an equation, the outermost first: "vmap(transpose(jvp()))"."""
    return str(equation.source_info.name_stack)


# Evaluation.


def call(jaxpr: Any, *arguments: Any) -> list[Any]:
    """Calls a closed jaxpr."""
    return list(as_function(jaxpr)(*arguments))


def as_function(jaxpr: Any) -> Callable[..., Any]:
    """A closed jaxpr as a function of its flat arguments."""
    return jax_core().jaxpr_as_fun(jaxpr)


class Environment:
    """The values of variables, while equations are evaluated one by one. `constant(value, aval)` is that of a literal.

    The values need not be arrays: a graph has its nodes there, and a comparison of programs their fingerprints.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        values: Sequence[Any],
        constant: Callable[[Any, Any], Any] = lambda value, aval: value,
    ) -> None:
        self._constant, self._values = constant, dict(zip(variables, values, strict=True))

    def read(self, operands: Sequence[Any]) -> list[Any]:
        """The values of operands: variables or literals. None for variables that were not computed."""
        return [
            self._constant(operand.val, operand.aval) if is_literal(operand) else self._values.get(operand)
            for operand in operands
        ]

    def write(self, variables: Sequence[Any], values: Sequence[Any]) -> None:
        """Gives variables their values."""
        self._values.update(zip(variables, values, strict=True))


def interpret(
    jaxpr: Any,
    arguments: Sequence[Any],
    compute: Callable[[Any, list[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any] = lambda value, aval: value,
) -> list[Any]:
    """Calls a jaxpr, open or closed. `compute(equation, operands)` returns the results of an equation.

    `constant(value, aval)` returns the value that stands for a constant or a literal.
    """
    variables, consts, equations = open_jaxpr(jaxpr)
    own = [constant(const, variable.aval) for const, variable in zip(consts, variables, strict=False)]
    environment = Environment(variables, [*own, *arguments], constant)
    for equation in equations:
        environment.write(equation.outvars, compute(equation, environment.read(equation.invars)))
    return environment.read(outputs_of(jaxpr))


def evaluate(equation: Any, operands: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Computes one equation at other operands, and perhaps with other parameters. It keeps its source line and name."""
    if params is None and jaxprs_in(equation):
        return _evaluate_nested(equation, operands)
    # The mesh is that of the place where it is computed, not that of the place where it was traced.
    here = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
    with _source_of(equation), equation.ctx.manager, here:
        results = equation.primitive.bind(*operands, **(equation.params if params is None else params))
    return list(results) if equation.primitive.multiple_results else [results]


def _source_of(equation: Any) -> contextlib.AbstractContextManager[Any]:
    """Gives the equations that are traced inside the source line and the name stack of this one."""
    from jax.extend import source_info_util

    info = equation.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=names)


def _evaluate_nested(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Computes an equation with functions inside, as a jaxpr of this equation alone."""
    core = jax_core()
    # Fresh variables: an operand may stand there twice, or be a literal.
    variables = [core.Var(operand.aval) for operand in equation.invars]
    outputs = [core.Var(output.aval) for output in equation.outvars]
    single = equation.replace(invars=variables, outvars=outputs)
    info = jaxprs_in(equation)[0].debug_info._replace(arg_names=None, result_paths=None)
    jaxpr = core.Jaxpr([], variables, outputs, [single], equation.effects, info)
    return call(core.ClosedJaxpr(jaxpr, []), *operands)


def shard_mapped(equation: Any, fun: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`fun` under a shard_map like the one of an equation: the same mesh and axes, other specs."""
    params = equation.params
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=params["check_vma"],
        axis_names=set(params.get("newly_manual_axes") or params["manual_axes"]),
    )
