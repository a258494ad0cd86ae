"""Whether two programs add up the same terms: a check of gradients that are written in place, without arithmetic.

JAX transposes a program in one way if its gradients are accumulated in references, and in another if they are returned
as values. Both must add up the same terms, for the same parameters. Here each program is evaluated with a fingerprint
in the place of every array. Sums are sums of fingerprints modulo a prime, in any order. Every other operation is a hash
of its name, its parameters and the fingerprints of its operands. A scan is evaluated once, with a symbol for its carry:
what it adds to slices of a reference is what it would otherwise return stacked.

Programs with the same fingerprints add up the same terms, unless hashes collide, or the programs differ only in large
constants or in the indices of a lookup, which are not compared. Programs with other fingerprints may still compute the
same: then gradients are not written in place.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from anybatch import compat

_PRIME = 2**61 - 1
_SMALL = 1024  # elements of a constant that are looked at
_CALLS = frozenset(
    """jit pjit closed_call core_call remat2 remat checkpoint custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr""".split()
)
_OF_ZERO = frozenset("broadcast_in_dim reshape convert_element_type transpose squeeze neg copy reduce_sum mul".split())
_ADDRESS = re.compile(r"0x[0-9a-f]+")


class _NotComparable(Exception):
    """Raised for a program that uses references in other ways than to add to them."""


class _Accumulator:
    """What a reference refers to: the sum of the fingerprints that were added to it."""

    def __init__(self, total: int) -> None:
        self.total = total


def fingerprints(jaxpr: Any, names: Sequence[Any]) -> list[int] | None:
    """The fingerprints of the outputs of a jaxpr, or None for a program that cannot be compared.

    Args:
      jaxpr: as `jax.make_jaxpr` returns it.
      names: what the inputs are called, the same in all programs that are compared.
    """
    try:
        return _run(jaxpr, [_hash("input", name) for name in names])
    except _NotComparable:
        return None


def _hash(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") % _PRIME


def _run(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    variables, consts, equations = compat.open_jaxpr(jaxpr)
    known = dict(zip(variables, [*(_constant(const) for const in consts), *arguments], strict=True))

    def read(operand: Any) -> Any:
        return _constant(operand.val) if compat.is_literal(operand) else known[operand]

    for equation in equations:
        operands = [read(operand) for operand in equation.invars]
        known.update(zip(equation.outvars, _compute(equation, operands), strict=True))
    return [read(output) for output in compat.opened(jaxpr).outvars]


def _constant(value: Any) -> int:
    if isinstance(value, (bool, int, float, complex, np.generic)) or (
        isinstance(value, np.ndarray) and value.ndim == 0
    ):
        return 0 if value == 0 else _hash("constant", complex(value))
    if isinstance(value, jax.core.Tracer):
        return _hash("constant", id(value))  # of the trace around us: the same object in all programs
    is_small = isinstance(value, (np.ndarray, jax.Array)) and value.size <= _SMALL and not compat.has_keys(value)
    return _hash("constant", str(jax.typeof(value)), np.asarray(value).tobytes() if is_small else "")


def _compute(equation: Any, operands: list[Any]) -> list[Any]:
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
    if name in ("scatter-add", "scatter_add"):
        return [(operands[0] + _by_index(operands[2])) % _PRIME]
    if name in _CALLS:
        return _run(next(params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), operands)
    if name == "scan":
        return _scan(params, operands)
    if any(isinstance(operand, _Accumulator) for operand in operands):
        return _accumulate(equation, operands)
    if name in ("new_ref", "ref", "mutable_array"):
        return [_Accumulator(operands[0])]
    made = (name, _parameters(params), operands)
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
    """What is added to elements that are looked up. By which indices is not compared: JAX writes them in two ways."""
    return _hash("added by index", value)


def _scan(params: dict[str, Any], operands: list[Any]) -> list[Any]:
    num_consts, num_carry = compat.scan_counts(params)
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


def _parameters(params: dict[str, Any]) -> list[Any]:
    return [(name, _parameter(params[name])) for name in sorted(params)]


def _parameter(value: Any) -> Any:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        variables, consts, _ = compat.open_jaxpr(value)
        return _run(value, [_hash("variable", number) for number in range(len(variables) - len(consts))])
    if isinstance(value, (tuple, list)):
        return [_parameter(each) for each in value]
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _ADDRESS.sub("", repr(value))
