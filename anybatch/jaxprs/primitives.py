"""The families of JAX's primitives that more than one module treats alike, by their names.

Several names stand for one thing where JAX has renamed it, or may rename it back: `pjit` is `jit`, and `remat2` is what
`jax.checkpoint` makes. Where a module needs fewer or more names than a family has, it says so beside the use.
"""

from typing import Any

# Calls of a function, without any meaning of their own: the equations inside can be written in their place.
CALLS = frozenset(("jit", "pjit", "closed_call", "core_call"))

# Functions whose equations are computed again in the backward pass: `jax.checkpoint`.
REMAT = frozenset(("remat2", "remat", "checkpoint"))

# Functions with a derivative that somebody wrote: `jax.custom_jvp` and `jax.custom_vjp`.
CUSTOM_JVP = frozenset(("custom_jvp_call",))
CUSTOM_VJP = frozenset(("custom_vjp_call", "custom_vjp_call_jaxpr"))

# They add updates to an array, by index.
SCATTER_ADD = frozenset(("scatter-add", "scatter_add"))

# They draw random numbers from a key.
RANDOM_DRAWS = frozenset(("random_bits", "random_gamma"))

# Each element of the result is computed from the same element of every operand.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi
    name ne neg nextafter not one_minus_square or pcast polygamma population_count pow pvary random_clone random_fold_in
    real reduce_precision regularized_incomplete_beta rem round rsqrt select_n sharding_constraint sharding_hint
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor
    zeta""".split()
)

# Their derivative is zero everywhere, and JAX does not differentiate what follows from them alone.
WITHOUT_GRADIENT = frozenset("stop_gradient ceil floor round sign".split())

# Their results are floating-point numbers that jump where an operand changes by a rounding error.
STEPS = frozenset("ceil floor round sign rem sort top_k".split())

# Each element of the result is an element of an operand, or a constant.
MOVES = frozenset("broadcast_in_dim reshape transpose squeeze concatenate slice rev pad iota".split())

# XLA pads their operands where they are divided among devices.
PADDED = frozenset(
    """conv_general_dilated cumlogsumexp cummax cummin cumprod cumsum pad reduce_window reduce_window_max
    reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter select_and_scatter_add""".split()
)

# XLA computes these together with the equation that uses them, so that their results take no memory.
FUSED = ELEMENTWISE | (MOVES - {"rev"})


def called_jaxpr(equation: Any) -> Any:
    """The jaxpr that an equation of `CALLS`, `REMAT` or a custom derivative calls, with its constants if it has any."""
    return next(equation.params[key] for key in _PARAMETERS if key in equation.params)


_PARAMETERS = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")  # that hold the function, by primitive and version of JAX
