"""Which gradients the backward pass may add to their accumulators in place, and a check that it does so correctly.

`vjp.with_refs` gives an accumulator to the equations that use a parameter, and they add to it in place. For layers in a
`lax.scan`, that takes one buffer instead of two. But JAX has bugs there:

- 0.10 and 0.11 silently lose a gradient if one accumulator reaches a nested function twice (tied weights in a jitted
  loss);
- 0.10 silently swaps gradients in a scan over several arrays if some are accumulated in place and some are not;
- some equations fail with an accumulator (a slice in 0.10, an optimization barrier in 0.11 and 0.12).

So `written_in_place` allows it only for gradients whose equations are all known to be right in this version of JAX. All
other gradients are added up as values, and then written once.

`with_same_terms` is a second check, which relies on no such knowledge. It compares two programs: one that accumulates
in references, and one that returns values. Each is evaluated with a fingerprint in place of every array. The
fingerprint of a sum is the sum of fingerprints modulo a prime, whatever the order. That of any other operation is a
hash of its name, its parameters and the fingerprints of its operands. A scan is evaluated once, with a symbol for its
carry: what it adds to slices of a reference is what it would otherwise return stacked.

Programs with the same fingerprints add up the same terms, unless hashes collide, or the programs differ only in large
constants or in the indices of a lookup, which are not compared. Programs with different fingerprints may still compute
the same numbers. Then gradients are not written in place.
"""

import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from anybatch.call.checks import warn
from anybatch.jaxprs import avals, interpreter, tracing, versions
from anybatch.jaxprs.primitives import CALLS, CUSTOM_JVP, CUSTOM_VJP, REMAT, SCATTER_ADD, called_jaxpr

# Tested one by one, in every supported version of JAX (tests/gradients/test_references.py).
PLAIN = frozenset("conv_general_dilated div dot_general exp gather log mul neg reduce_sum tanh transpose".split())

# Tested too. But their derivative can be the identity, so that the accumulator of `w` is also that of `w + 1`.
IDENTICAL = frozenset("add add_any broadcast_in_dim convert_element_type integer_pow reshape squeeze sub".split())


def written_in_place(traced: tracing.Traced, is_direct: Sequence[bool]) -> list[bool]:
    """For each of the first inputs of a program, whether the backward pass may write to its accumulator.

    An input that is cast or gathered before it reaches the program is not `is_direct`.
    """
    variables = traced.arguments[: len(is_direct)]
    moving = set(variables)
    chosen = {
        variable
        for variable, direct in zip(variables, is_direct, strict=True)
        if direct and _is_safe(traced.jaxpr, variable)
    }
    if not versions.TRANSPOSES_MIXED_SCANS:
        while mixed := _in_mixed_scans(traced.jaxpr, {variable: {variable} for variable in chosen}, chosen, moving):
            chosen -= mixed
    return [variable in chosen for variable in variables]


def reach_nested_functions(traced: tracing.Traced, written_in_place: list[bool]) -> bool:
    """True if a nested function gets an accumulator. That is where JAX has had bugs, and could have them again."""
    reached = {variable for variable, direct in zip(traced.arguments, written_in_place, strict=False) if direct}
    for equation in traced.jaxpr.eqns:
        if not any(_is_in(reached, operand) for operand in equation.invars):
            continue
        if interpreter.jaxprs_in(equation):
            return True
        if equation.primitive.name in IDENTICAL:
            reached.update(equation.outvars)
    return False


def with_same_terms(add: Callable[..., list[Any]], totals: Sequence[Any], written_in_place: list[bool]) -> list[bool]:
    """Checks that JAX adds the same terms in references as by value, and returns which gradients pass.

    It takes as long as tracing both programs, so it is used only if a nested function gets an accumulator.
    `add(totals, written_in_place, mutate=...)` returns the totals with the gradient of one microbatch added, in
    references or by value. `written_in_place` are the gradients that are known to be safe.
    """
    names = range(len(totals))

    def terms_of(written_in_place: list[bool], mutate: bool) -> list[int] | None:
        traced = jax.make_jaxpr(lambda *flat: add(flat, written_in_place, mutate=mutate))(*totals)
        return fingerprints(traced, names)

    chosen, expected = list(written_in_place), None
    while any(chosen):
        expected = expected or terms_of(chosen, mutate=False)
        try:
            found = terms_of(chosen, mutate=True)
        except Exception:  # an equation that JAX cannot transpose into a reference
            found = None
        same = [False] * len(chosen) if expected is None or found is None else list(map(operator.eq, expected, found))
        if all(same):
            break
        # Add by value the gradients that differ. If only gradients that already are by value differ, add all by value.
        left = [each and is_same for each, is_same in zip(chosen, same, strict=True)]
        chosen = left if left != chosen else [False] * len(chosen)
    if chosen != list(written_in_place):
        warn(
            f"JAX {versions.versions()[0]} does not add up the gradients of this loss in place as it does by value. "
            f"{sum(written_in_place) - sum(chosen)} of {len(chosen)} are added up by value, which is right and takes "
            "one more buffer for each of them. Please report this loss to anybatch.",
            RuntimeWarning,
        )
    return chosen


def add(pullback: Any, cotangents: Any, totals: Sequence[Any], *, mutate: bool) -> list[Any]:
    """The totals plus the gradient of a pullback, added in references or by value."""
    if not mutate:
        return [total + grad for total, grad in zip(totals, pullback(cotangents)[0], strict=True)]
    accumulators = [jax.new_ref(total) for total in totals]
    pullback.with_refs(accumulators)(cotangents)
    return [jax.freeze(accumulator) for accumulator in accumulators]


def shielded(fun: Callable[[list[Any]], Any], written_in_place: list[bool]) -> Callable[[list[Any]], Any]:
    """`fun`, to be differentiated with references. References of inputs that are not in place cannot enter it."""

    def shielded_fun(wrt: list[Any]) -> Any:
        return fun([leaf if direct else _shield(leaf) for leaf, direct in zip(wrt, written_in_place, strict=True)])

    return shielded_fun


@jax.custom_vjp
def _shield(leaf: jax.Array) -> jax.Array:
    """The identity. Its backward pass is a function of values, which stops references."""
    return leaf


_shield.defvjp(lambda leaf: (leaf, None), lambda _, cotangent: (cotangent,))


def _is_safe(jaxpr: Any, variable: Any) -> bool:
    aliases = {variable}
    nested_uses = 0
    for equation in jaxpr.eqns:
        positions = [position for position, operand in enumerate(equation.invars) if _is_in(aliases, operand)]
        if not positions or equation.primitive.name in PLAIN:
            continue
        if equation.primitive.name in IDENTICAL:
            aliases.update(equation.outvars)
            continue
        nested_uses += len(positions)
        inner = interpreter.nested_input(equation, positions[0])
        if nested_uses > 1 or inner is None or not _is_safe(*inner):
            return False
    return not any(_is_in(aliases, output) for output in jaxpr.outvars)


def _in_mixed_scans(jaxpr: Any, reached_by: Mapping[Any, set[Any]], direct: set[Any], moving: set[Any]) -> set[Any]:
    """The accumulators that must not enter a scan, because it also returns gradients of other inputs by value.

    `reached_by` has the accumulators that may reach each variable, `direct` the variables that certainly stand for one
    accumulator each, and `moving` those that depend on a differentiated input.
    """
    reached_by, moving, found = dict(reached_by), set(moving), set()
    for equation in jaxpr.eqns:
        operands = [None if interpreter.is_literal(operand) else operand for operand in equation.invars]
        if not any(operand in moving for operand in operands):
            continue
        moving.update(equation.outvars)
        accumulators = _union(reached_by, operands)
        if equation.primitive.name in IDENTICAL:
            reached_by.update((output, accumulators) for output in equation.outvars)
        if not accumulators or equation.primitive.name in PLAIN | IDENTICAL:
            continue
        if equation.primitive.name == "scan":
            scanned = [
                operand
                for operand in equation.invars[sum(interpreter.scan_counts(equation.params)) :]
                if _is_in(moving, operand)
            ]
            if any(avals.is_inexact(operand.aval) and operand not in direct for operand in scanned):
                found |= _union(reached_by, scanned)
        inner = interpreter.function_of(equation)
        if inner is None:
            continue
        pairs = list(zip(operands, inner.invars, strict=True))
        found |= _in_mixed_scans(
            inner,
            {variable: reached_by[operand] for operand, variable in pairs if operand in reached_by},
            {variable for operand, variable in pairs if operand in direct},
            # The carry of a loop may depend on all of its inputs after some iterations.
            {variable for operand, variable in pairs if operand in moving or equation.primitive.name == "scan"},
        )
    return found


def _union(reached_by: Mapping[Any, set[Any]], variables: Iterable[Any]) -> set[Any]:
    return {accumulator for variable in variables for accumulator in reached_by.get(variable, ())}


def _is_in(variables: set[Any], operand: Any) -> bool:
    return not interpreter.is_literal(operand) and operand in variables


# Fingerprints of programs.

_PRIME = 2**61 - 1
_SMALL = 1024  # constants of at most this many elements are compared
# Custom derivatives too: nothing is differentiated here.
_INLINED = CALLS | REMAT | CUSTOM_JVP | CUSTOM_VJP
_OF_ZERO = frozenset("broadcast_in_dim reshape convert_element_type transpose squeeze neg copy reduce_sum mul".split())
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class _NotComparable(Exception):
    """Raised for a program that does anything with references but add to them."""


class _Accumulator:
    """Stands for a reference: the sum of the fingerprints that were added to it."""

    def __init__(self, total: int) -> None:
        self.total = total


def fingerprints(jaxpr: Any, names: Sequence[Any]) -> list[int] | None:
    """The fingerprints of the outputs of a jaxpr, or None for a program that cannot be compared.

    There is a name for each input, the same in all programs that are compared.
    """
    try:
        return _run(jaxpr, [_hash("input", name) for name in names])
    except _NotComparable:
        return None


def _hash(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") % _PRIME


def _run(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    return interpreter.interpret(jaxpr, arguments, _compute, _constant)


def _constant(value: Any, aval: Any = None) -> int:
    if getattr(value, "dtype", None) == jax.dtypes.float0:
        return 0  # the gradient of an integer
    if isinstance(value, (bool, int, float, complex, np.generic)) or (
        isinstance(value, np.ndarray) and value.ndim == 0
    ):
        return 0 if value == 0 else _hash("constant", complex(value))
    if isinstance(value, jax.core.Tracer):
        return _hash("constant", id(value))  # of an outer trace: the same object in all programs
    is_small = isinstance(value, (np.ndarray, jax.Array)) and value.size <= _SMALL and not avals.has_keys(value)
    return _hash("constant", str(jax.typeof(value)), np.asarray(value).tobytes() if is_small else "")


def _compute(equation: Any, operands: list[Any]) -> list[Any]:  # noqa: C901 - one case for each kind of equation
    name, params = equation.primitive.name, equation.params
    accumulators = [id(operand) for operand in operands if isinstance(operand, _Accumulator)]
    if len(set(accumulators)) < len(accumulators):
        raise _NotComparable  # one reference twice: JAX 0.10 and 0.11 lose one of its gradients when they lower it
    if name in ("add", "add_any"):
        return [(operands[0] + operands[1]) % _PRIME]
    if name == "sub":
        return [(operands[0] - operands[1]) % _PRIME]
    if name == "neg":
        return [-operands[0] % _PRIME]
    if name == "optimization_barrier":
        return operands
    if name == "convert_element_type" and equation.invars[0].aval.dtype == params["new_dtype"]:
        return operands
    if name in _OF_ZERO and 0 in operands:
        return [0]
    if name in SCATTER_ADD:
        return [(operands[0] + _by_index(operands[2])) % _PRIME]
    if name in _INLINED:
        return _run(called_jaxpr(equation), operands)
    if name == "scan":
        return _scan(params, operands)
    if any(isinstance(operand, _Accumulator) for operand in operands):
        return _accumulate(equation, operands)
    if name in ("new_ref", "ref", "mutable_array"):
        return [_Accumulator(operands[0])]
    made = (name, [(key, _parameter(params[key])) for key in sorted(params)], operands)
    return [_hash(number, made) for number in range(len(equation.outvars))]


def _accumulate(equation: Any, operands: list[Any]) -> list[Any]:
    accumulator, *others = operands
    if not isinstance(accumulator, _Accumulator):
        raise _NotComparable
    name, before = equation.primitive.name, accumulator.total
    if name == "freeze" or (name == "get" and not others):
        return [before]
    if name == "swap" and len(others) == 1:
        accumulator.total = others[0]
        return [before]
    if name != "addupdate":
        raise _NotComparable
    value, *indices = others
    accumulator.total = (before + (_by_index(value) if indices else value)) % _PRIME
    return []


def _by_index(value: int) -> int:
    """The fingerprint of an addition at indices. The indices are not compared: JAX writes them in two ways."""
    return _hash("added by index", value)


def _scan(params: dict[str, Any], operands: list[Any]) -> list[Any]:
    num_consts, num_carry = interpreter.scan_counts(params)
    consts, carry = operands[:num_consts], operands[num_consts : num_consts + num_carry]
    if any(isinstance(operand, _Accumulator) for operand in (*consts, *carry)):
        raise _NotComparable
    how = (params["length"], params["reverse"])
    symbols = [_hash("carry", how, number, start) for number, start in enumerate(carry)]
    scanned = operands[num_consts + num_carry :]
    slices = [_Accumulator(0) if isinstance(operand, _Accumulator) else operand for operand in scanned]
    results = _run(params["jaxpr"], [*consts, *symbols, *slices])
    for operand, made in zip(scanned, slices, strict=True):
        if isinstance(operand, _Accumulator):
            operand.total = (operand.total + made.total) % _PRIME
    return [*(_hash("carried", how, symbols[k], results[k]) for k in range(num_carry)), *results[num_carry:]]


def _parameter(value: Any) -> Any:
    if interpreter.is_jaxpr(value):
        variables, consts, _ = interpreter.open_jaxpr(value)
        return _run(value, [_hash("variable", number) for number in range(len(variables) - len(consts))])
    if isinstance(value, (tuple, list)):
        return [_parameter(each) for each in value]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _ADDRESS.sub("", repr(value))
