"""Which gradients the backward pass may write straight into their accumulators.

`vjp.with_refs` hands an accumulator to the equations that use a parameter, and these add to it in place: for
layers in a `lax.scan`, one buffer instead of two. But JAX does not get this right everywhere:

- 0.10 and 0.11 silently lose a gradient where one accumulator reaches a nested function twice (tied weights in a
  jitted loss);
- 0.10 silently swaps gradients in a scan over several arrays if some are accumulated in place and some are not;
- some equations fail on an accumulator (a slice in 0.10, an optimization barrier in 0.11 and 0.12).

So a gradient is written in place only if every equation on its way is known to do it right in this version. The other
gradients are added up as values, and then written once.
"""

import operator
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from anybatch import compat
from anybatch.errors import user_stacklevel
from anybatch.routes import terms

# Tested one by one, in every supported version of JAX (tests/test_references.py).
PLAIN = frozenset("conv_general_dilated div dot_general exp gather log mul neg reduce_sum tanh transpose".split())

# Of these too; but their derivative can be the identity, so that an accumulator of `w` is also one of `w + 1`.
IDENTICAL = frozenset("add add_any broadcast_in_dim convert_element_type integer_pow reshape squeeze sub".split())


def written_in_place(traced: compat.Traced, is_direct: Sequence[bool]) -> list[bool]:
    """For each of the first inputs, whether its accumulator may be given to the backward pass.

    Args:
      traced: the program to be differentiated.
      is_direct: for each of these inputs, whether its accumulator would reach the program as it is. That of a parameter
        that is cast or gathered on the way does not.
    """
    variables = traced.arguments[: len(is_direct)]
    moving = set(variables)
    chosen = {
        variable
        for variable, direct in zip(variables, is_direct, strict=True)
        if direct and _is_safe(traced.jaxpr, variable)
    }
    if not compat.TRANSPOSES_MIXED_SCANS:
        while mixed := _in_mixed_scans(traced.jaxpr, {variable: {variable} for variable in chosen}, chosen, moving):
            chosen -= mixed
    return [variable in chosen for variable in variables]


def reach_nested_functions(traced: compat.Traced, written_in_place: list[bool]) -> bool:
    """Whether an accumulator is given to a nested function: where JAX has been wrong, and could be again."""
    reached = {variable for variable, direct in zip(traced.arguments, written_in_place, strict=False) if direct}
    for equation in traced.jaxpr.eqns:
        if not any(_is_in(reached, operand) for operand in equation.invars):
            continue
        if compat.jaxprs_in(equation):
            return True
        if equation.primitive.name in IDENTICAL:
            reached.update(equation.outvars)
    return False


def with_same_terms(add: Callable[..., list[Any]], totals: Sequence[Any], written_in_place: list[bool]) -> list[bool]:
    """Checks that JAX adds the same terms to accumulators as to values, and writes in place only what passes.

    A second line of defence, which does not rest on what is known of JAX: the terms of both programs are compared. It
    takes as long as tracing both, so that it is for programs that give accumulators to nested functions.

    Args:
      add: `add(totals, written_in_place, mutate=...)` returns the totals with the gradient of one microbatch added: in
        references, or as values.
      totals: arrays or types of the accumulators.
      written_in_place: what is thought to be safe.
    """
    names = range(len(totals))

    def terms_of(written_in_place: list[bool], mutate: bool) -> list[int] | None:
        traced = jax.make_jaxpr(lambda *flat: add(flat, written_in_place, mutate=mutate))(*totals)
        return terms.fingerprints(traced, names)

    chosen, expected = list(written_in_place), None
    while any(chosen):
        expected = expected or terms_of(chosen, mutate=False)
        try:
            found = terms_of(chosen, mutate=True)
        except Exception:  # JAX may also fail on what it does not do right
            found = None
        same = [False] * len(chosen) if expected is None or found is None else list(map(operator.eq, expected, found))
        if all(same):
            break
        # Stop writing in place what differs. If only gradients that are added by value differ, write none in place.
        left = [each and is_same for each, is_same in zip(chosen, same, strict=True)]
        chosen = left if left != chosen else [False] * len(chosen)
    if chosen != list(written_in_place):
        warnings.warn(
            f"JAX {compat.versions()[0]} does not add up the gradients of this loss in place as it does by value. "
            f"{sum(written_in_place) - sum(chosen)} of {len(chosen)} are added up by value, which is right and takes "
            "one more buffer for each of them. Please report this loss to anybatch.",
            RuntimeWarning,
            stacklevel=user_stacklevel(),
        )
    return chosen


def add(pullback: Any, cotangents: Any, totals: Sequence[Any], *, mutate: bool) -> list[Any]:
    """The totals, with the gradient added that a pullback gives: in references, or as values."""
    if not mutate:
        return [total + grad for total, grad in zip(totals, pullback(cotangents)[0], strict=True)]
    accumulators = [jax.new_ref(total) for total in totals]
    pullback.with_refs(accumulators)(cotangents)
    return [jax.freeze(accumulator) for accumulator in accumulators]


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


def _in_mixed_scans(jaxpr: Any, reached_by: Mapping[Any, set[Any]], direct: set[Any], moving: set[Any]) -> set[Any]:
    """Accumulators that must not be given to a scan, since it also returns gradients of other inputs as values.

    Args:
      jaxpr: a program, or a function nested in it.
      reached_by: the accumulators that may reach each variable.
      direct: the variables that certainly stand for one accumulator each.
      moving: the variables that depend on what is differentiated.
    """
    reached_by, moving, found = dict(reached_by), set(moving), set()
    for equation in jaxpr.eqns:
        operands = [None if compat.is_literal(operand) else operand for operand in equation.invars]
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
                for operand in equation.invars[sum(compat.scan_counts(equation.params)) :]
                if _is_in(moving, operand)
            ]
            if any(compat.is_inexact(operand.aval) and operand not in direct for operand in scanned):
                found |= _union(reached_by, scanned)
        inner = compat.function_of(equation)
        if inner is None:
            continue
        pairs = list(zip(operands, inner.invars, strict=True))
        found |= _in_mixed_scans(
            inner,
            {variable: reached_by[operand] for operand, variable in pairs if operand in reached_by},
            {variable for operand, variable in pairs if operand in direct},
            # The carry of a loop may come to depend on what its other inputs depend on.
            {variable for operand, variable in pairs if operand in moving or equation.primitive.name == "scan"},
        )
    return found


def _union(reached_by: Mapping[Any, set[Any]], variables: Iterable[Any]) -> set[Any]:
    return {accumulator for variable in variables for accumulator in reached_by.get(variable, ())}


def _is_in(variables: set[Any], operand: Any) -> bool:
    return not compat.is_literal(operand) and operand in variables
