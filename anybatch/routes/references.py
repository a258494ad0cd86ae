"""Which gradients the backward pass may write straight into their accumulators.

`vjp.with_refs` hands an accumulator to the equations that use a parameter, and these add to it in place: for
layers in a `lax.scan`, one buffer instead of two. But JAX 0.10 and 0.11 silently lose a gradient where one
accumulator reaches a nested function twice (tied weights in a jitted loss), and some equations fail on one (a
slice in 0.10, an optimization barrier in 0.11). So a parameter goes this way only if every equation that uses
it is known to do it right; the gradients of the others are added up as values, and then written once.
"""

from collections.abc import Callable
from typing import Any

import jax

from anybatch import compat

# Tested one by one, in every supported version of JAX (tests/test_references.py).
PLAIN = frozenset("conv_general_dilated div dot_general exp gather log mul neg reduce_sum tanh transpose".split())

# Of these too; but their derivative can be the identity, so that an accumulator of `w` is also one of `w + 1`.
IDENTICAL = frozenset("add add_any broadcast_in_dim convert_element_type integer_pow reshape squeeze sub".split())


def written_in_place(traced: compat.Traced, num_wrt: int) -> list[bool]:
    """For each of the first `num_wrt` inputs, whether its accumulator may be given to the backward pass."""
    return [_is_safe(traced.jaxpr, variable) for variable in traced.arguments[:num_wrt]]


def shielded(fun: Callable[[list[Any]], Any], written_in_place: list[bool]) -> Callable[[list[Any]], Any]:
    """`fun`, to be differentiated into references: those of the inputs that are not in place stay outside it."""

    def shielded_fun(wrt: list[Any]) -> Any:
        return fun([leaf if direct else _shield(leaf) for leaf, direct in zip(wrt, written_in_place, strict=True)])

    return shielded_fun


@jax.custom_vjp
def _shield(leaf: jax.Array) -> jax.Array:
    """The identity. Its backward pass is a function of values, so that no reference can pass."""
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
        inner = compat.nested_input(equation, positions[0])
        if nested_uses > 1 or inner is None or not _is_safe(*inner):
            return False
    return not any(_is_in(aliases, output) for output in jaxpr.outvars)


def _is_in(variables: set[Any], operand: Any) -> bool:
    return not compat.is_literal(operand) and operand in variables
