"""Evaluates jaxprs with NumPy, one equation at a time, so that nothing is compiled.

Compiling a random program takes XLA ten times as long as tracing it takes JAX, and the errors that the fuzzers look
for are in what is traced. Every floating-point number is a float64 here, whatever the program says: casts to
bfloat16 and back are there in the program, but nothing is rounded, and gradients agree to the last digits.

References (`jax.new_ref`) are arrays that are written in place. To give one to a nested function twice is an error
here: JAX 0.10 and 0.11 turn the two into separate values when they lower it, and lose what is written to one of them.
What is not covered: XLA, and the rest of lowering. Primitives without a rule are computed by JAX.
"""

import itertools
import math
import warnings

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax

from anybatch.jaxprs import interpreter

RULES = {}


def rule(names):
    def add(function):
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return add


class AliasedReferenceError(Exception):
    """One reference reaches a nested function twice."""


class Ref:
    """What a reference refers to."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, row):
        return Ref(self.array[row : row + 1].reshape(self.array.shape[1:]))  # still the same memory


def evaluate(closed, *arguments):
    """The outputs of a jaxpr that is closed, at flat arguments."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _evaluate(closed, [_widened(argument) for argument in arguments])


def results_of(fun, *arguments):
    """Traces `fun`, as under `jit`, and evaluates it."""
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*arguments)
    return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(closed, *jax.tree.leaves(arguments)))


def _evaluate(jaxpr, arguments):
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    consts = [_widened(const) for const in getattr(jaxpr, "consts", ()) or ()]
    return _run(opened, [*consts, *arguments])


def _run(opened, arguments):
    variables = [*opened.constvars, *opened.invars]
    assert len(variables) == len(arguments)
    known = dict(zip(variables, arguments, strict=True))
    for equation in opened.eqns:
        operands = [_widened(v.val) if isinstance(v, jex_core.Literal) else known[v] for v in equation.invars]
        refs = [operand.array for operand in operands if isinstance(operand, Ref)]
        if any(np.may_share_memory(a, b) for a, b in itertools.combinations(refs, 2)):
            raise AliasedReferenceError(f"{equation.primitive} is given one reference twice")
        one = RULES.get(equation.primitive.name)
        results = _by_jax(equation, operands) if one is None else one(equation.params, *operands)
        results = results if equation.primitive.multiple_results else [results]
        for output, result in zip(equation.outvars, results, strict=True):
            known[output] = result
    return [_widened(v.val) if isinstance(v, jex_core.Literal) else known[v] for v in opened.outvars]


def _is_key(dtype):
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def _packed(words):
    """Keys are numbers of 64 bits here, so that they can be indexed as all arrays are."""
    return (words[..., 0].astype(np.uint64) << np.uint64(32)) | words[..., 1]


def _words(keys):
    return (keys >> np.uint64(32)).astype(np.uint32), keys.astype(np.uint32)


def _wide(dtype):
    if jax.dtypes.issubdtype(dtype, jnp.complexfloating):
        return np.dtype(np.complex128)
    return np.dtype(np.float64) if jax.dtypes.issubdtype(dtype, jnp.floating) else np.dtype(dtype)


def _widened(value):
    if isinstance(value, Ref):
        return value
    if _is_key(getattr(value, "dtype", np.int32)):
        return _packed(np.asarray(jax.random.key_data(value)))
    array = np.asarray(value)
    return array.astype(_wide(array.dtype), copy=False)


def _by_jax(equation, operands):
    narrow = []
    for operand, variable in zip(operands, equation.invars, strict=True):
        assert not isinstance(operand, Ref), equation.primitive
        if _is_key(variable.aval.dtype):
            narrow.append(jax.random.wrap_key_data(np.stack(_words(operand), -1)))
        else:
            narrow.append(jnp.asarray(np.asarray(operand, variable.aval.dtype)))
    if interpreter.jaxprs_in(equation):
        results = interpreter.evaluate(equation, narrow)
    else:
        results = equation.primitive.bind(*narrow, **equation.params)
        results = results if equation.primitive.multiple_results else [results]
    results = [_widened(result) for result in results]
    return results if equation.primitive.multiple_results else results[0]


# Element by element.

ELEMENTWISE = {
    **{"neg": np.negative, "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "exp": np.exp, "log": np.log},
    **{"log1p": np.log1p, "expm1": np.expm1, "sqrt": np.sqrt, "cbrt": np.cbrt, "abs": np.abs, "sign": np.sign},
    **{"exp2": np.exp2, "sinh": np.sinh, "cosh": np.cosh, "atan": np.arctan, "asinh": np.arcsinh},
    **{"floor": np.floor, "ceil": np.ceil, "is_finite": np.isfinite, "square": np.square, "real": np.real},
    **{"imag": np.imag, "conj": np.conj, "erf": scipy.special.erf, "erfc": scipy.special.erfc},
    **{"logistic": lambda x: 1 / (1 + np.exp(-x)), "rsqrt": lambda x: 1 / np.sqrt(x), "not": np.invert},
    **{"one_minus_square": lambda x: 1 - x * x},
    **{
        "stop_gradient": lambda x: x,
        "copy": lambda x: x,
        "copy_p": lambda x: x,
        "name": lambda x: x,
        "reduce_precision": lambda x: x,
    },
    **{"add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "eq": np.equal, "ne": np.not_equal},
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "atan2": np.arctan2},
    **{"rem": np.fmod, "pow": np.power, "complex": lambda a, b: a + 1j * b, "erf_inv": scipy.special.erfinv},
}
for _name, _function in ELEMENTWISE.items():
    RULES[_name] = lambda params, *values, function=_function: function(*values)


@rule("div")
def _(params, a, b):
    if a.dtype.kind in "iu":
        return np.where(b == 0, -1, np.trunc(a / np.where(b == 0, 1, b))).astype(a.dtype)
    return np.divide(a, b)


@rule("integer_pow")
def _(params, x):
    return 1 / x ** -params["y"] if params["y"] < 0 else x ** params["y"]


@rule("round")
def _(params, x):
    return np.round(x) if int(params["rounding_method"]) == 1 else np.trunc(x + np.copysign(0.5, x))


@rule("shift_left")
def _(params, x, by):
    bits = x.dtype.itemsize * 8
    return np.where(by < bits, np.left_shift(x, np.minimum(by, bits - 1)), 0).astype(x.dtype)


@rule("shift_right_logical")
def _(params, x, by):
    bits, unsigned = x.dtype.itemsize * 8, np.dtype(f"u{x.dtype.itemsize}")
    shifted = np.right_shift(x.view(unsigned), np.minimum(by, bits - 1).astype(unsigned))
    return np.where(by < bits, shifted, 0).astype(unsigned).view(x.dtype)


@rule("shift_right_arithmetic")
def _(params, x, by):
    return np.right_shift(x, np.minimum(by, x.dtype.itemsize * 8 - 1))


@rule("select_n")
def _(params, which, *cases):
    if which.dtype == bool:
        return np.where(which, cases[1], cases[0])
    return np.choose(np.clip(which, 0, len(cases) - 1), cases)


@rule("clamp")
def _(params, low, x, high):
    return np.minimum(np.maximum(x, low), high)


@rule("convert_element_type")
def _(params, x):
    dtype = params["new_dtype"]
    if x.dtype.kind == "f" and jax.dtypes.issubdtype(dtype, jnp.integer):
        x = np.trunc(np.nan_to_num(x))
    if x.dtype.kind == "c" and not jax.dtypes.issubdtype(dtype, jnp.complexfloating):
        x = x.real
    return x.astype(_wide(dtype))


@rule("bitcast_convert_type")
def _(params, x):
    assert x.dtype.kind in "iu"  # A float would have to be as narrow as the program has it.
    return _widened(np.ascontiguousarray(x).view(params["new_dtype"]).reshape(x.shape))


@rule("optimization_barrier")
def _(params, *values):
    return list(values)


# Shapes.


@rule("broadcast_in_dim")
def _(params, x, *_):
    shape, axes = tuple(params["shape"]), tuple(params["broadcast_dimensions"])
    sizes = [1] * len(shape)
    for axis, size in zip(axes, x.shape, strict=True):
        sizes[axis] = size
    return np.broadcast_to(x.reshape(sizes), shape)


@rule("reshape")
def _(params, x, *_):
    x = x if params.get("dimensions") is None else np.transpose(x, params["dimensions"])
    return x.reshape(params["new_sizes"])


@rule("squeeze")
def _(params, x):
    return np.squeeze(x, tuple(params["dimensions"]))


@rule("expand_dims")
def _(params, x):
    return np.expand_dims(x, tuple(params["dimensions"]))


@rule("transpose")
def _(params, x):
    return np.transpose(x, params["permutation"])


@rule("rev")
def _(params, x):
    return np.flip(x, tuple(params["dimensions"]))


@rule("tile")
def _(params, x):
    return np.tile(x, params["reps"])


@rule("concatenate")
def _(params, *arrays):
    return np.concatenate(arrays, params["dimension"])


@rule("stack")
def _(params, *arrays):
    return np.stack(arrays, params.get("axis", params.get("dimension", 0)))


@rule("unstack")
def _(params, x):
    return list(np.moveaxis(x, params.get("axis", params.get("dimension", 0)), 0))


@rule("split")
def _(params, x):
    return np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"])


@rule("pad")
def _(params, x, value):
    config = params["padding_config"]
    between = [size + max(0, size - 1) * c[2] for c, size in zip(config, x.shape, strict=True)]
    shape = [c[0] + c[1] + size for c, size in zip(config, between, strict=True)]
    spread = np.full(between, value, x.dtype)
    spread[tuple(slice(None, None, c[2] + 1) for c in config)] = x
    spread = spread[tuple(slice(max(0, -c[0]), n - max(0, -c[1])) for c, n in zip(config, spread.shape, strict=True))]
    result = np.full(shape, value, x.dtype)
    starts = [max(0, c[0]) for c in config]
    result[tuple(slice(start, start + n) for start, n in zip(starts, spread.shape, strict=True))] = spread
    return result


@rule("slice")
def _(params, x):
    strides = params["strides"] or [1] * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _clamped(starts, sizes, shape):
    return [min(max(int(start), 0), whole - size) for start, size, whole in zip(starts, sizes, shape, strict=True)]


@rule("dynamic_slice")
def _(params, x, *starts):
    sizes = params["slice_sizes"]
    return x[
        tuple(slice(start, start + size) for start, size in zip(_clamped(starts, sizes, x.shape), sizes, strict=True))
    ]


@rule("dynamic_update_slice")
def _(params, x, update, *starts):
    result = np.array(x)
    first = _clamped(starts, update.shape, x.shape)
    result[tuple(slice(start, start + size) for start, size in zip(first, update.shape, strict=True))] = update
    return result


@rule("iota")
def _(params, *_):
    shape, axis = params["shape"], params["dimension"]
    sizes = [-1 if i == axis else 1 for i in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(sizes), shape).astype(_wide(params["dtype"]))


# Reductions, orders and products.


def _reduction(function):
    return lambda params, x, *_: np.asarray(function(x, axis=tuple(params["axes"])), x.dtype)


for _name, _function in {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}.items():
    RULES[f"reduce_{_name}"] = _reduction(_function)
for _name, _function in {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}.items():
    RULES[f"reduce_{_name}"] = _reduction(_function.reduce)
for _name, _function in {"argmax": np.argmax, "argmin": np.argmin}.items():
    RULES[_name] = lambda params, x, f=_function: np.asarray(f(x, axis=params["axes"][0]), params["index_dtype"])

ACCUMULATIONS = {"cumsum": np.add, "cumprod": np.multiply, "cummax": np.maximum, "cummin": np.minimum}
for _name, _function in {**ACCUMULATIONS, "cumlogsumexp": np.logaddexp}.items():

    def _accumulated(params, x, function=_function):
        axis = params["axis"]
        if params["reverse"]:
            return np.flip(function.accumulate(np.flip(x, axis), axis=axis), axis)
        return function.accumulate(x, axis=axis).astype(x.dtype)

    RULES[_name] = _accumulated


@rule("dot_general")
def _(params, a, b, *_):
    (contract_a, contract_b), (batch_a, batch_b) = (tuple(map(tuple, pair)) for pair in params["dimension_numbers"])
    if not batch_a:
        return np.tensordot(a, b, (contract_a, contract_b))

    def sorted_axes(x, first, contracted, contracted_last):
        free = [axis for axis in range(x.ndim) if axis not in first and axis not in contracted]
        order = [*first, *free, *contracted] if contracted_last else [*first, *contracted, *free]
        sizes = [math.prod(x.shape[axis] for axis in axes) for axes in (free, contracted)]
        lead = [x.shape[axis] for axis in first]
        flat = np.transpose(x, order).reshape([*lead, *(sizes if contracted_last else sizes[::-1])])
        return flat, [x.shape[axis] for axis in free], lead

    a, free_a, lead = sorted_axes(a, batch_a, contract_a, True)
    b, free_b, _ = sorted_axes(b, batch_b, contract_b, False)
    return np.matmul(a, b).reshape([*lead, *free_a, *free_b])


@rule("sort")
def _(params, *operands):
    axis = params["dimension"]
    order = np.lexsort([operands[i] for i in range(params["num_keys"])][::-1], axis=axis)
    return [np.take_along_axis(operand, order, axis) for operand in operands]


# Random numbers: JAX's default generator.


@rule("threefry2x32")
def _threefry(params, key, other_key, a, b):
    keys = [key, other_key, key ^ other_key ^ np.uint32(0x1BD11BDA)]
    state = [a + key, b + other_key]
    for turn in range(5):
        for shift in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            shift = np.uint32(shift)
            state[0] = state[0] + state[1]
            state[1] = state[0] ^ ((state[1] << shift) | (state[1] >> (np.uint32(32) - shift)))
        state[0] = state[0] + keys[(turn + 1) % 3]
        state[1] = state[1] + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return state


def _drawn(keys, shape):
    """Two words for every position, of every key."""
    keys = np.asarray(keys)
    counts = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    expanded = [np.reshape(word, (*keys.shape, *[1] * len(shape))) for word in _words(keys)]
    return _threefry({}, *expanded, np.zeros_like(counts), counts)


@rule("random_bits")
def _(params, keys):
    high, low = _drawn(keys, params["shape"])
    if params["bit_width"] == 64:
        return (high.astype(np.uint64) << np.uint64(32)) | low
    return (high ^ low).astype(f"u{params['bit_width'] // 8}")


@rule("random_split")
def _(params, keys):
    return _packed(np.stack(_drawn(keys, params["shape"]), -1))


@rule("random_fold_in")
def _(params, keys, number):
    number = np.asarray(number).astype(np.uint32)
    return _packed(np.stack(np.broadcast_arrays(*_threefry({}, *_words(keys), np.zeros_like(number), number)), -1))


@rule("random_unwrap")
def _(params, keys):
    return np.stack(_words(keys), -1)


@rule("random_wrap")
def _(params, words):
    return _packed(words)


# Looking up and writing: every window of the smaller array has its place in the larger one.


def _windows(shape, indices, window, collapsed, batching, index_batching, start_map, output_shape, offsets, mode):
    """For each position of `output_shape`, the position in an array of `shape`, and whether it is inside."""
    grids = np.indices(output_shape)
    batch = [grids[axis] for axis in range(len(output_shape)) if axis not in offsets]
    vectors = indices[tuple(batch)] if batch else np.broadcast_to(indices, (*output_shape, indices.shape[-1]))
    position = [np.zeros(output_shape, np.int64) for _ in shape]
    inside = np.ones(output_shape, bool)
    for column, axis in enumerate(start_map):
        start = vectors[..., column].astype(np.int64)
        last = shape[axis] - window[axis]
        inside &= (start >= 0) & (start <= last)
        position[axis] = position[axis] + (np.clip(start, 0, last) if mode == "clip" else start)
    for axis, index_axis in zip(batching, index_batching, strict=True):
        position[axis] = position[axis] + batch[index_axis]
    free = [axis for axis in range(len(shape)) if axis not in collapsed and axis not in batching]
    for axis, offset in zip(free, offsets, strict=True):
        position[axis] = position[axis] + grids[offset]
    return position, np.ones(output_shape, bool) if mode == "clip" else inside


MODES = {lax.GatherScatterMode.CLIP: "clip", lax.GatherScatterMode.FILL_OR_DROP: "fill"}


def _mode(params):
    return MODES.get(lax.GatherScatterMode.from_any(params["mode"]), "inside")


@rule("gather")
def _(params, x, indices):
    numbers, sizes, mode = params["dimension_numbers"], params["slice_sizes"], _mode(params)
    offsets = numbers.offset_dims
    window = [
        n for axis, n in enumerate(sizes) if axis not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    ]
    lead, window = iter(indices.shape[:-1]), iter(window)
    shape = [next(window) if a in offsets else next(lead) for a in range(indices.ndim - 1 + len(offsets))]
    position, inside = _windows(
        *(x.shape, indices, sizes, numbers.collapsed_slice_dims, numbers.operand_batching_dims),
        *(numbers.start_indices_batching_dims, numbers.start_index_map, shape, offsets, mode),
    )
    found = x[tuple(np.clip(p, 0, n - 1) for p, n in zip(position, x.shape, strict=True))]
    fill = params["fill_value"]
    if fill is None:
        fill = np.nan if x.dtype.kind in "fc" else np.iinfo(x.dtype).min if x.dtype.kind == "i" else 1
    return np.where(inside, found, np.asarray(fill, x.dtype)) if mode == "fill" else found


SCATTERS = {"scatter": None, "scatter-add": np.add, "scatter_add": np.add, "scatter-mul": np.multiply}
SCATTERS |= {"scatter-max": np.maximum, "scatter-min": np.minimum, "scatter_mul": np.multiply}
SCATTERS |= {"scatter_max": np.maximum, "scatter_min": np.minimum, "scatter-sub": np.subtract}
for _name, _function in SCATTERS.items():

    def _scattered(params, x, indices, updates, function=_function):
        numbers, mode = params["dimension_numbers"], _mode(params)
        offsets = numbers.update_window_dims
        dropped = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        sizes = iter(updates.shape[axis] for axis in offsets)
        window = [1 if axis in dropped else next(sizes) for axis in range(x.ndim)]
        position, inside = _windows(
            *(x.shape, indices, window, numbers.inserted_window_dims, numbers.operand_batching_dims),
            *(numbers.scatter_indices_batching_dims, numbers.scatter_dims_to_operand_dims, updates.shape),
            *(offsets, mode),
        )
        result = np.array(x)
        where = tuple(p[inside] for p in position)
        if function is None:
            result[where] = updates[inside]
        elif x.ndim == 0:
            for update in updates[inside]:
                result = np.asarray(function(result, update))
        else:
            function.at(result, where, updates[inside])
        return result

    RULES[_name] = _scattered


# Functions inside functions.


@rule("jit pjit closed_call core_call eval_jaxpr remat2 checkpoint")
def _(params, *values):
    return _evaluate(params.get("jaxpr", params.get("call_jaxpr")), values)


@rule("custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr")
def _(params, *values):
    return _evaluate(params.get("call_jaxpr", params.get("fun_jaxpr", params.get("jaxpr"))), values)


@rule("accumulate_in_place")
def _(params, *values):
    return _evaluate(params["jaxpr"], values)


@rule("cond")
def _(params, index, *values):
    branches = params["branches"]
    return _evaluate(branches[min(max(int(index), 0), len(branches) - 1)], values)


@rule("while")
def _(params, *values):
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    state = list(values[second:])
    while True:
        goes_on = np.asarray(_evaluate(params["cond_jaxpr"], [*values[:first], *state])[0])
        if not goes_on.any():
            return state
        new = _evaluate(params["body_jaxpr"], [*values[first:second], *state])
        if goes_on.ndim:  # Under `vmap`, the loops that have ended keep their state.
            new = [
                np.where(goes_on.reshape(goes_on.shape + (1,) * (np.ndim(one) - goes_on.ndim)), one, old)
                for one, old in zip(new, state, strict=True)
            ]
        state = new


@rule("scan")
def _(params, *values):
    num_consts, num_carry = interpreter.scan_counts(params)
    consts, carry = values[:num_consts], list(values[num_consts : num_consts + num_carry])
    xs, steps = values[num_consts + num_carry :], range(params["length"])
    jaxpr, made = params["jaxpr"], []
    for step in reversed(steps) if params["reverse"] else steps:
        results = _evaluate(jaxpr, [*consts, *carry, *(x[step] for x in xs)])
        carry = results[:num_carry]
        made.append(results[num_carry:])
    if not made:
        avals = interpreter.opened(jaxpr).outvars[num_carry:]
        return [*carry, *(np.zeros((0, *v.aval.shape), _wide(v.aval.dtype)) for v in avals)]
    made = made[::-1] if params["reverse"] else made
    return [*carry, *(np.stack(each) for each in zip(*made, strict=True))]


# References.


def _place(params, flat):
    """The part of an array that an equation reads or writes, as NumPy indexes it."""
    transforms = jax.tree.unflatten(params["tree"], flat)
    if not transforms:
        return ()
    (indexer,) = transforms
    return tuple(
        slice(int(index.start), int(index.start) + index.size * index.stride, index.stride)
        if hasattr(index, "stride")
        else np.asarray(index)
        for index in indexer.indices
    )


@rule("new_ref ref mutable_array")
def _(params, value):
    return Ref(np.array(value))


@rule("freeze")
def _(params, ref):
    return np.array(ref.array)


@rule("get")
def _(params, ref, *index):
    return np.array(ref.array[_place(params, index)])


@rule("swap")
def _(params, ref, value, *index):
    place = _place(params, index)
    old = np.array(ref.array[place])
    ref.array[place] = value
    return old


@rule("addupdate")
def _(params, ref, value, *index):
    np.add.at(ref.array, _place(params, index), value)  # An index may be there twice, as in an embedding.
    return []
