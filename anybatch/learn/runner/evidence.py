"""Finds out what a learner's function does, in the process that runs it, and reports it as plain data.

Nothing is judged here: only the grader knows the right answers. A function is traced once for each combination of
shapes and dtypes; its value, program, memory, collectives and work all come from that one trace.
"""

import builtins
import functools
import importlib.abc
import inspect
import linecache
import math
import re
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anybatch.collectives import collectives_of
from anybatch.jaxprs import interpreter, tracing, versions
from anybatch.jaxprs.hlo import Instruction, Program
from anybatch.learn.runner import influence
from anybatch.learn.values import Answer

_DIMENSIONS = re.compile(r"\[([^\]]*)\]")
_OPERANDS = re.compile(r"%?([\w.\-]+)(?:,|\)|$)")
_RUNS = {
    **dict.fromkeys(("call", "async-start", "custom-call"), ("to_apply", "calls")),
    "fusion": ("calls",),
    "conditional": ("true_computation", "false_computation", "branch_computations"),
    "while": ("body",),
}


def multiplications_of(compiled: Any) -> int:
    """The number of multiplications of one run on one device; -1 if it has a loop of unknown length.

    Those in a loop count once for each iteration. All branches of a condition are counted.
    """
    program = Program(compiled.as_text())
    return _total(program, program.entry)


def _total(program: Program, name: str) -> int:
    shapes = {_name(each): each.shape for each in program[name]}
    total = 0
    for each in program[name]:
        inner = sum(_total(program, one) for key in _RUNS.get(each.op, ()) for one in each.names(key))
        if each.op == "while" and inner:
            inner = -1 if each.trip_count is None or inner < 0 else each.trip_count * inner
        if inner < 0:
            return -1
        total += inner + _multiplications(each, shapes)
    return total


def _multiplications(each: Instruction, shapes: Mapping[str, str]) -> int:
    if each.op == "multiply":
        return _size(each.shape)
    if each.op != "dot":
        return 0
    match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", each.attributes)
    # HLO text has operands with their types, or without.
    first = each.attributes if _DIMENSIONS.match(each.attributes.lstrip("abcdefghijklmnopqrstuvwxyz0123456789")) else ""
    shape = first or shapes.get(_OPERANDS.findall(each.attributes)[0], "")
    sizes = _sizes(shape)
    contracted = [int(place) for place in match[1].split(",") if place] if match else []
    return _size(each.shape) * math.prod(sizes[place] for place in contracted if place < len(sizes))


def _name(each: Instruction) -> str:
    return each.line.strip().removeprefix("ROOT ").split(" ", 1)[0].lstrip("%")


def _sizes(shape: str) -> list[int]:
    match = _DIMENSIONS.search(shape)
    return [int(size.lstrip("<=")) for size in match[1].split(",") if size] if match else []


def _size(shape: str) -> int:
    return math.prod(_sizes(shape))


# A file must not replace functions of these modules: the code that reports on it uses them, too.
_GUARDED = (builtins, np, np.linalg, jax, jnp, jax.lax, jax.tree, jax.tree_util, jax.random)
_NOT_BY_HAND = (
    "In this exercise you write it by hand, so anybatch cannot be imported. "
    "The line that does the same with anybatch is shown once you have solved the exercise."
)
_LEAKED = (
    "the function uses a value that was traced in another function.\n"
    "Another call, or the body of a loop, stored it in a list, a dict or a global variable. Outside of that function "
    "it has no meaning. Pass values as arguments, results, or the carry of a loop."
)


class SubmittedFile:
    """One loaded file, and what its functions do.

    Args:
      source: the text of the file.
      path: its name in messages; nothing is read from there.
      anybatch: whether the file may import anybatch.

    Attributes:
      loaded: the functions of the file and their numbers of arguments, or the error.
    """

    def __init__(self, source: str, path: str, *, anybatch: bool = False) -> None:
        self.path = path
        self.module = types.ModuleType("exercise")
        self.module.__file__ = path
        self._programs: dict[Any, _Compiled] = {}
        self._before = [(module, dict(vars(module))) for module in _GUARDED]
        self.loaded = self._load(source, anybatch)

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Calls a function, as `anybatch.learn.grading.call` requests it. An exception is described in `error`."""
        try:
            reply = self._call(request)
        except BaseException as error:
            reply = {"error": describe(error, self.path)}
        return reply | {"replaced": self._replaced()}

    def _load(self, source: str, anybatch: bool) -> dict[str, Any]:
        linecache.cache[self.path] = (len(source), None, source.splitlines(keepends=True), self.path)
        sys.modules["exercise"] = self.module
        if not anybatch:
            for name in [name for name in sys.modules if name.partition(".")[0] == "anybatch"]:
                del sys.modules[name]
            sys.meta_path.insert(0, _NotByHand())
        try:
            exec(compile(source, self.path, "exec", dont_inherit=True), self.module.__dict__)
        except BaseException as error:
            return {"error": describe(error, self.path)}
        functions = {name: each for name, each in vars(self.module).items() if callable(each)}
        return {"functions": {name: _arity(each) for name, each in functions.items()}, "replaced": self._replaced()}

    def _replaced(self) -> list[str]:
        """The names of library functions that the file has replaced."""
        return [
            f"{module.__name__}.{name}"
            for module, before in self._before
            for name, value in before.items()
            if callable(value) and vars(module).get(name, value) is not value
        ]

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name, args = request["function"], request["args"]
        function = getattr(self.module, name)
        if not request["compiled"]:
            given = jax.tree.map(lambda leaf: jnp.asarray(leaf) if _is_array(leaf) else leaf, args)
            return {"value": vars(Answer.of(function(*given)))}
        leaves, structure = jax.tree.flatten(args)
        key = (name, kind_of(args))
        if key not in self._programs:
            self._programs[key] = _Compiled(function, leaves, structure)
        program = self._programs[key]
        makers = {
            "value": lambda: program.value(leaves),
            "program": lambda: operations(program.traced.jaxpr),
            "temporaries": lambda: versions.temporaries(program.compiled),
            "collectives": lambda: [
                (each.kind, -1 if each.times is None else each.times, each.bytes)
                for each in collectives_of(program.compiled)
            ],
            "work": lambda: multiplications_of(program.compiled),
            "response": lambda: program.response(leaves, request),
        }
        return {what: makers[what]() for what in request["want"]}


def kind_of(args: Any) -> Any:
    """A key that is equal for arguments that share one compiled program."""
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((x.shape, x.dtype.name) if _is_array(x) else (type(x), repr(x)) for x in leaves)


class _Compiled:
    """A function compiled for given shapes and dtypes. Arrays are traced; other arguments are constants."""

    def __init__(self, function: Callable, leaves: Sequence[Any], structure: Any) -> None:
        self.structure = structure

        # JAX's errors then name the learner's function, its line and its arguments, not this wrapper.
        @functools.wraps(function)
        def traced(*args: Any) -> Any:
            arrays = iter(jax.tree.leaves(args))
            given = [next(arrays) if _is_array(leaf) else leaf for leaf in leaves]
            answer = function(*jax.tree.unflatten(structure, given))
            _refuse_what_is_no_array(answer)
            return answer

        self.traced = jax.jit(traced).trace(*self._arrays(leaves))
        self._compiled: Any = None

    def _arrays(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The arguments, with None in place of those that are not traced."""
        return jax.tree.unflatten(self.structure, [leaf if _is_array(leaf) else None for leaf in leaves])

    @property
    def compiled(self) -> Any:
        if self._compiled is None:
            self._compiled = self.traced.lower().compile()
        return self._compiled

    def value(self, leaves: Sequence[Any]) -> dict[str, Any]:
        try:
            return vars(Answer.of(self.compiled(*self._arrays(leaves))))
        except TypeError as error:
            # A leaked tracer is an additional input of the program, and the call does not provide it.
            if str(error).startswith("Computation compiled for"):
                raise jax.errors.UnexpectedTracerError(_LEAKED) from None
            raise

    def response(self, leaves: Sequence[Any], request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The answer for changed arguments while operations keep their results; None if they cannot affect it."""
        others = jax.tree.leaves(request["others"])
        ones, twos = ([np.asarray(leaf) for leaf in each if _is_array(leaf)] for each in (leaves, others))
        try:
            found = influence.responses(self.traced.jaxpr, request["selects"], ones, twos, distorts=request["distorts"])
        except Exception as error:  # an operation that `influence` does not know, which is not the learner's mistake
            return {"unknown": f"{type(error).__name__}: {error}"[:1000]}
        if found is None:
            return None
        return {"before": found[0], "held": found[1], "after": self.value(others)["leaves"]}


class _NotByHand(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "anybatch":
            raise ImportError(_NOT_BY_HAND, name=name)


def _refuse_what_is_no_array(answer: Any) -> None:
    if inspect.isgenerator(answer):  # JAX would only warn
        raise TypeError("the function is a generator, because it uses `yield`. Use `return`.")
    for leaf in jax.tree.leaves(answer):
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, bool, int, float, complex)):
            hint = " Call it, and return its result." if inspect.isfunction(leaf) else ""
            raise TypeError(f"the answer has a {type(leaf).__name__} where an array should be.{hint}")


def operations(jaxpr: Any) -> list[Any]:
    """The traced program as plain data, which `anybatch.learn.check.Program` reads.

    Operations that do not affect the result are left out: unused ones, and those whose result is multiplied by 0.
    """
    return _operations(tracing.used_part(_without_products_with_zero(interpreter.opened(jaxpr))))


def _without_products_with_zero(jaxpr: Any) -> Any:
    """The jaxpr with 0 * x replaced by 0 * 0, also in nested jaxprs. It is only inspected, never run."""
    zeros: set[int] = set()
    equations = []
    for equation in jaxpr.eqns:
        name, operands = equation.primitive.name, equation.invars
        is_zero = [_is_literal_zero(each) or id(each) in zeros for each in operands]
        if name in ("broadcast_in_dim", "convert_element_type", "mul") and any(is_zero):
            zeros.update(id(each) for each in equation.outvars)
            equation = equation.replace(invars=[operands[is_zero.index(True)]] * len(operands))
        params = {key: _inside(value) for key, value in equation.params.items()}
        equations.append(equation.replace(params=params))
    return jaxpr.replace(eqns=equations)


def _inside(value: Any) -> Any:
    if isinstance(value, (tuple, list)) and any(interpreter.is_jaxpr(interpreter.opened(each)) for each in value):
        return type(value)(_inside(each) for each in value)
    if not interpreter.is_jaxpr(interpreter.opened(value)):
        return value
    inner = _without_products_with_zero(interpreter.opened(value))
    return inner if interpreter.opened(value) is value else value.replace(jaxpr=inner)


def _is_literal_zero(operand: Any) -> bool:
    return bool(np.all(np.asarray(operand.val) == 0)) if hasattr(operand, "val") else False


def _operations(jaxpr: Any) -> list[Any]:
    _, _, equations = interpreter.open_jaxpr(jaxpr)
    return [
        {
            "name": equation.primitive.name,
            "inputs": [_type(each.aval) for each in equation.invars],
            "outputs": [_type(each.aval) for each in equation.outvars],
            "params": _params(equation),
            "bodies": [_operations(inner) for inner in interpreter.jaxprs_in(equation)],
        }
        for equation in equations
    ]


def _type(aval: Any) -> tuple[list[int], str]:
    return [int(size) for size in getattr(aval, "shape", ())], str(getattr(aval, "dtype", type(aval).__name__))


def _params(equation: Any) -> dict[str, Any]:
    params = {name: value for name, value in equation.params.items() if _is_plain(value)}
    if equation.primitive.name == "scan":
        params["num_consts"], params["num_carry"] = interpreter.scan_counts(equation.params)
    if equation.primitive.name == "shard_map":
        mesh = equation.params["mesh"]
        params |= {"devices": int(mesh.size), "axes": [str(name) for name in mesh.axis_names]}
    return params


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return value is None or type(value) in (bool, int, float, str)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, np.generic))


def _arity(function: Callable) -> list[int] | None:
    """The smallest and largest number of positional arguments of a function; None if they are not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return None
    by_position = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = [each for each in by_position if each.default is each.empty]
    return [len(needed), 1000 if any(each.kind == each.VAR_POSITIONAL for each in parameters) else len(by_position)]


def describe(error: BaseException, path: str) -> dict[str, Any]:
    """An exception as plain data, with the line of the learner's file that raised it."""
    line = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename == path:
            line = number
    if isinstance(error, SyntaxError) and error.filename == path:
        line = error.lineno
    try:
        message = str(error.msg if isinstance(error, SyntaxError) else error)
    except BaseException:  # the learner's own exception class may have a bug
        message = "(its message cannot be read)"
    return {
        "type": type(error).__name__,
        "bases": [base.__name__ for base in type(error).__mro__],
        "message": message[:4000],
        "line": line,
        "source_line": linecache.getline(path, line).rstrip() if line else None,
        "column": error.offset if isinstance(error, SyntaxError) else None,
    }
