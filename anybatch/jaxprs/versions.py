"""The only code that knows JAX versions: 0.10 to 0.12."""

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.backend
import jax.extend.core as jex_core
import jax.numpy as jnp
import jaxlib
from jax.extend import source_info_util
from jax.interpreters import partial_eval

_CONFIG: Any = jax.config  # unannotated, some of it


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function of flat arguments as JAX traced it, with the arrays it closed over made arguments."""

    jaxpr: Any  # without those arrays: a program that keeps it keeps no array alive
    num_arguments: int
    out_avals: list[Any]
    bound: tuple[Any, ...] = ()  # arrays that it closes over, where these are constants for good
    inner: tuple[Any, ...] = ()  # those that its nested functions closed over, from before they were opened

    def __call__(self, consts: Sequence[Any], *arguments: Any) -> list[Any]:
        # Version 0.11 merged ClosedJaxpr into Jaxpr; pairing equations and constants is spelled the same.
        closed: Any = jex_core.ClosedJaxpr(self.jaxpr, (*self.inner, *consts))
        if jax.sharding.get_abstract_mesh().manual_axes:
            outputs = interpret(closed, arguments, evaluate)
        else:
            outputs = jex_core.jaxpr_as_fun(closed)(*arguments)
        return [jnp.asarray(output) for output in outputs]  # those that were constants come as Python numbers

    @property
    def arguments(self) -> list[Any]:
        """The variables of the arguments. From 0.11 on, what was closed over may stand before them."""
        return self.jaxpr.invars[len(self.jaxpr.invars) - self.num_arguments :]

    @property
    def has_effects(self) -> bool:
        """Whether running it does anything beyond its results: prints, calls back, mutates."""
        return bool(self.jaxpr.effects)

    def inputs_used_by(self, output: int) -> list[bool]:
        """Which arguments the given output is computed from, at any depth of nested functions."""
        wanted = [position == output for position in range(len(self.jaxpr.outvars))]
        used = partial_eval.dce_jaxpr(self.jaxpr, wanted, instantiate=False)[1]
        return used[len(used) - self.num_arguments :]

    def text_of(self, output: int) -> str:
        """The program of one output alone."""
        wanted = [position == output for position in range(len(self.jaxpr.outvars))]
        return str(partial_eval.dce_jaxpr(self.jaxpr, wanted, instantiate=False)[0])

    def uses_dtype(self, dtype: Any) -> bool:
        """Whether any value in it has that dtype, at any depth of nested functions."""
        return _uses_dtype(self.jaxpr, dtype)


def trace(fun: Callable[..., Sequence[Any]], *arguments: Any) -> tuple[Traced, tuple[Any, ...]]:
    """Traces `fun` at flat arguments: arrays, tracers or abstract values. Also returns what it closes over.

    The trace is never taken from JAX's caches, which go by the identity of a function: one that reads a
    global sees today's value of it.
    """
    closed = jax.make_jaxpr(lambda *flat: fun(*flat))(*arguments)
    consts = tuple(closed.consts)
    opened = getattr(closed, "jaxpr", closed)
    if getattr(opened, "consts", ()):  # from 0.11 on
        opened = jex_core.Jaxpr(
            opened.constvars, opened.invars, opened.outvars, opened.eqns, opened.effects, opened.debug_info
        )
    return Traced(opened, len(arguments), list(closed.out_avals)), consts


def retrace(fun: Callable[..., Sequence[Any]], const_types: Sequence[Any], types: Sequence[Any]) -> Traced:
    """Traces a function of flat arrays whose first ones are to be what it closes over.

    Args:
      fun: the function. Arrays that it closes over itself stay with what is returned.
      const_types: the types of the first arrays.
      types: the types of the others.
    """
    number = len(const_types)
    closed = jax.make_jaxpr(lambda *flat: fun(*flat))(*const_types, *types)
    opened = getattr(closed, "jaxpr", closed)
    info = opened.debug_info._replace(arg_names=None, result_paths=None)
    jaxpr = jex_core.Jaxpr(
        [*opened.constvars, *opened.invars[:number]],
        opened.invars[number:],
        opened.outvars,
        opened.eqns,
        opened.effects,
        info,
    )
    return Traced(jaxpr, len(types), list(closed.out_avals), inner=tuple(closed.consts))


def close(fun: Callable[..., Sequence[Any]], types: Sequence[Any]) -> Any:
    """A function that closes over no arrays as the body of a loop has it, a jaxpr that is closed."""
    return jax.make_jaxpr(lambda *flat: fun(*flat))(*types)


def opened(closed: Any) -> Any:
    """The jaxpr in one that is closed over no arrays."""
    return getattr(closed, "jaxpr", closed)


def call(jaxpr: Any, *arguments: Any) -> list[Any]:
    """Calls a jaxpr that is closed."""
    return list(jex_core.jaxpr_as_fun(jaxpr)(*arguments))


def traced_on_mesh(equation: Any) -> bool:
    """Whether an equation was traced with a mesh around it, which it would bring back wherever it is computed."""
    return not equation.ctx.cur_abstract_mesh.empty


def open_jaxpr(jaxpr: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """The variables that a jaxpr starts from, the arrays for the first of them, and its equations.

    A jaxpr and one closed over its constants are the same to it; they are the same class from 0.11 on.
    """
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    consts = list(getattr(jaxpr, "consts", ()) or ())
    return [*opened.constvars, *opened.invars], consts, list(opened.eqns)


def jaxprs_in(equation: Any) -> list[Any]:
    """The functions inside an equation, such as the body of a scan."""
    return [getattr(inner, "jaxpr", inner) for inner in jex_core.jaxprs_in_params(equation.params)]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # from 0.11 on
    return len(consts), len(carry)


def evaluate(equation: Any, operands: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Computes one equation, with other operands and perhaps other parameters, as if on its own line of the source."""
    if params is None and jaxprs_in(equation):
        return _evaluate_nested(equation, operands)
    info = equation.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    # The mesh around it is that of the place where it is computed, not that of the place where it was traced.
    here = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
    with source_info_util.user_context(info.traceback, name_stack=names), equation.ctx.manager, here:
        results = equation.primitive.bind(*operands, **(equation.params if params is None else params))
    return list(results) if equation.primitive.multiple_results else [results]


def interpret(jaxpr: Any, arguments: Sequence[Any], compute: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
    """Calls a jaxpr, open or closed, equation by equation."""
    variables, consts, equations = open_jaxpr(jaxpr)
    known = dict(zip(variables, [*consts, *arguments], strict=True))

    def read(operand: Any) -> Any:
        return operand.val if is_literal(operand) else known[operand]

    for equation in equations:
        results = compute(equation, [read(operand) for operand in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(output) for output in getattr(jaxpr, "jaxpr", jaxpr).outvars]


def _evaluate_nested(equation: Any, operands: Sequence[Any]) -> list[Any]:
    # Fresh variables: an operand may stand there twice, or be a literal.
    variables = [jex_core.Var(operand.aval) for operand in equation.invars]
    outputs = [jex_core.Var(output.aval) for output in equation.outvars]
    single = equation.replace(invars=variables, outvars=outputs)
    info = jaxprs_in(equation)[0].debug_info._replace(arg_names=None, result_paths=None)
    jaxpr = jex_core.Jaxpr([], variables, outputs, [single], equation.effects, info)
    closed: Any = jex_core.ClosedJaxpr(jaxpr, [])
    return list(jex_core.jaxpr_as_fun(closed)(*operands))


def is_ref(value: Any) -> bool:
    """Whether a value is a reference to an array that can be written to, such as `jax.new_ref` returns."""
    return "Ref" in type(jax.typeof(value)).__name__


def name_stack(equation: Any) -> str:
    """The transformations that made an equation, the outermost first: "vmap(transpose(jvp()))"."""
    return str(equation.source_info.name_stack)


def shard_mapped(equation: Any, fun: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Another function in the place of the one that a shard_map calls, on the same mesh."""
    params = equation.params
    return jax.shard_map(
        fun,
        mesh=params["mesh"],
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=params["check_vma"],
        axis_names=set(params.get("newly_manual_axes") or params["manual_axes"]),
    )


def source_frames(equation: Any) -> list[tuple[str, int, str]]:
    """The file, line and function of every call that led to an equation, the innermost first."""
    traceback = equation.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    return [(frame.file_name, frame.line_num, frame.function_name) for frame in frames]


def platforms() -> set[str]:
    """The platforms that this process has devices of, as `lax.platform_dependent` names them: "cpu", "cuda", ..."""
    return set(jax.extend.backend.backends())


def is_threefry(key_dtype: Any) -> bool:
    """Whether keys are of JAX's default generator, which draws for each of several keys by itself."""
    return str(key_dtype) == "key<fry>"


def draws_by_counter(key_dtype: Any) -> bool:
    """Whether a key's random bits depend, each of them, on the key and on its own position alone."""
    return is_threefry(key_dtype) and bool(_CONFIG.jax_threefry_partitionable)


def has_keys(array: Any) -> bool:
    """Whether an array, or one of that type, is made of PRNG keys."""
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def key_impl(key_dtype: Any) -> str:
    """The name of the generator of keys of that dtype, as `jax.random.key(seed, impl=...)` takes it."""
    return key_dtype._impl.name


# Whether the transpose of a scan keeps its inputs apart if only some of their gradients are written in place.
TRANSPOSES_MIXED_SCANS = jax.__version_info__ >= (0, 11)


def nested_input(equation: Any, position: int) -> tuple[Any, Any] | None:
    """The jaxpr inside an equation, and its variable for the operand at `position`.

    None unless that variable stands for the operand and nothing else: a nested function's, or for a scan the
    slices of an array that it scans over.
    """
    inner = function_of(equation)
    if inner is None or (equation.primitive.name == "scan" and position < sum(scan_counts(equation.params))):
        return None
    return inner, inner.invars[position]


def function_of(equation: Any) -> Any:
    """The one jaxpr that a jit, a checkpoint or a scan calls, with a variable for each operand; None for others."""
    if equation.primitive.name not in ("jit", "pjit", "remat2", "checkpoint", "scan"):
        return None
    inner = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
    return inner if len(inner.invars) == len(equation.invars) else None


def is_inexact(aval: Any) -> bool:
    """Whether values of a type are floating-point or complex numbers."""
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jnp.inexact)


def is_literal(operand: Any) -> bool:
    """Whether an operand of an equation is a number written into it, not a variable."""
    return isinstance(operand, jex_core.Literal)


def is_high(jaxpr: Any) -> bool:
    """Whether a jaxpr has equations that JAX rewrites before lowering (from 0.11 on, those of `custom_root`)."""
    return getattr(getattr(jaxpr, "jaxpr", jaxpr), "is_high", False)


def _uses_dtype(jaxpr: Any, dtype: Any) -> bool:
    variables = [*jaxpr.invars, *(output for equation in jaxpr.eqns for output in equation.outvars)]
    if any(getattr(variable.aval, "dtype", None) == dtype for variable in variables):
        return True
    nested = (inner for equation in jaxpr.eqns for inner in jex_core.jaxprs_in_params(equation.params))
    return any(_uses_dtype(getattr(inner, "jaxpr", inner), dtype) for inner in nested)


def abstract(aval: Any, num_rows: int | None = None) -> jax.ShapeDtypeStruct:
    """The type `aval`, as `jax.typeof` gives it, in the form that traces take; or that of `num_rows` rows of it."""
    shape = aval.shape if num_rows is None else (num_rows, *aval.shape[1:])
    placement = {}
    if not aval.sharding.mesh.empty:  # inside shard_map, or on a mesh with explicit axes
        placement = {"sharding": aval.sharding, "manual_axis_type": aval.manual_axis_type}
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type, **placement)


def one_of(aval: Any) -> jax.ShapeDtypeStruct:
    """The type of one row of arrays of a type, as `abstract` gives it."""
    placement = {}
    if not aval.sharding.mesh.empty:
        sharding = jax.sharding.NamedSharding(aval.sharding.mesh, jax.sharding.PartitionSpec(*aval.sharding.spec[1:]))
        placement = {"sharding": sharding, "manual_axis_type": aval.manual_axis_type}
    return jax.ShapeDtypeStruct(aval.shape[1:], aval.dtype, weak_type=aval.weak_type, **placement)


def bare(array: Any) -> Any:
    """The type of an array, without where it lies or varies."""
    return bare_type(jax.typeof(array))


def bare_type(aval: Any) -> Any:
    """A type, without where such arrays lie or vary."""
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def as_weak(array: jax.Array, like: Any) -> jax.Array:
    """`array`, of a weak type if `like` is of one, as the gradient with respect to a Python number is."""
    if not getattr(like, "weak_type", False) or array.weak_type:
        return array
    primitive: Any = jax.lax.convert_element_type_p
    return primitive.bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def varying_axes(aval: Any) -> frozenset[str]:
    """The mesh axes of the `shard_map` around us over which a value differs from device to device."""
    return aval.manual_axis_type.varying


def zeros_of(aval: Any, dtype: Any) -> jax.Array:
    """Zeros of the shape of `aval` that vary over the same mesh axes, as the carry of a scan must."""
    zeros = jnp.zeros(aval.shape, dtype)
    varying = varying_axes(aval)
    return jax.lax.pcast(zeros, tuple(varying), to="varying") if varying else zeros


def temporaries(compiled: Any) -> int:
    """The bytes that a compiled program needs beside its arguments and results, as XLA reports them.

    Its `peak_memory_in_bytes` is of no use on the CPU, where it is the same for every program.
    """
    return compiled.memory_analysis().temp_size_in_bytes


def vmap_levels(array: Any) -> dict[int, int]:
    """The `vmap`s around us that map a value, the innermost first: which, and how many copies each makes."""
    levels: dict[int, int] = {}
    while isinstance(array, jax.core.Tracer):
        if isinstance(getattr(array, "batch_dim", None), int):
            levels[id(getattr(array._trace, "tag", array._trace))] = array.val.shape[array.batch_dim]
            array = array.val
        else:  # a tracer of derivatives has a primal value, which may be traced by a vmap around
            array = getattr(array, "primal", getattr(array, "val", None))
    return levels


def vmapped_copies(*arrays: Any) -> int:
    """How many times values are there together, which inside one `vmap` or several look like one each."""
    together: dict[int, int] = {}
    for array in arrays:
        together |= vmap_levels(array)
    return math.prod(together.values())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of JAX's runtime says that memory ran out."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


def elsewhere(fun: Callable[[], Any]) -> Any:
    """Calls a function outside of the trace around us and its mesh: a new thread is inside nothing."""
    double, device = _CONFIG.jax_enable_x64, _CONFIG.jax_default_device
    results: list[Any] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            with jax.enable_x64(double), jax.default_device(device):
                results.append(fun())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _trace_state() -> Any:
    return jex_core.get_opaque_trace_state(convention="anybatch")


# This module may well be imported inside somebody's jit.
_CLEAN = elsewhere(_trace_state)


def is_eager() -> bool:
    """Whether we are outside every `jit`, `grad` and `vmap`, so that a call computes its result."""
    return not _CONFIG.jax_disable_jit and _trace_state() == _CLEAN


def is_jit_disabled() -> bool:
    """Whether we are under `jax.disable_jit()`, where nothing is compiled."""
    return bool(_CONFIG.jax_disable_jit)


def versions() -> list[str]:
    """The versions of JAX, and of the compiler and runtime underneath it."""
    return [str(jax.__version__), str(jaxlib.__version__)]


def is_supported() -> bool:
    """Whether this version of JAX is one that the tests run on."""
    return (0, 10) <= jax.__version_info__[:2] < (0, 13)


def quick_compilation_flags() -> str:
    """XLA's flags for small programs on the CPU that run only a few times; they change no buffer that it plans."""
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    return flags + (" --xla_cpu_use_fusion_emitters=false" if jax.__version_info__[:2] < (0, 11) else "")


def used_part(closed: Any) -> Any:
    """A jaxpr without the equations whose results nobody uses."""
    return partial_eval.dce_jaxpr(opened(closed), [True] * len(opened(closed).outvars))[0]


def default_device() -> Any:
    """Where arrays go that say nothing themselves: that of `jax.default_device(...)`, or None."""
    return _CONFIG.jax_default_device


def program_key(lowered: Any) -> str | None:
    """A text that spells out all that a lowered program computes, or None where something is hidden from it."""
    text = lowered.as_text()
    # A callback is a number in the text, and with this flag the arrays that a nested jit closes over are absent.
    hidden = "callback" in text or getattr(_CONFIG, "jax_use_simplified_jaxpr_constants", False)
    return None if hidden else text


def clear_with_jax(cache: Any) -> None:
    """Lets `jax.clear_caches()` call `cache.cache_clear()`, where JAX offers it. It holds the cache weakly."""
    try:
        from jax._src.util import register_cache
    except ImportError:
        return
    register_cache(cache, "anybatch")
